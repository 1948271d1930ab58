"""Where a result comes from: versions, commit, device, and hashes of the files it was made with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("jaxserve", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")


def versions() -> dict[str, str | None]:
    """Installed versions by package, and Python's; None for a package that runs from its sources, not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The git commit of the running sources, with "-dirty" when tracked files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        return _git(root, "rev-parse", "HEAD") + ("-dirty" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True).stdout.strip()


def device() -> dict[str, Any]:
    """Platform, kind and number of the devices, and the host's processor."""
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices), "host": _processor()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.machine()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def model_fingerprint(model: str) -> str | None:
    """Short hash over names and sizes of a local model's files, which tells models at one path apart; None for a hub id.

    Contents are not read: weights may be hundreds of gigabytes.
    """
    path = Path(model)
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    text = "\n".join(f"{p.name if p == path else p.relative_to(path)} {p.stat().st_size}" for p in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
