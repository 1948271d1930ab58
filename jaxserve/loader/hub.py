"""From the model's name to a path: an existing directory or .gguf file, or a snapshot of a hub repository."""

from __future__ import annotations

import re
from pathlib import Path

CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve(model: str, weights: bool = True) -> Path:
    """The local directory or .gguf file of a model.

    A name that is no existing path and looks like "owner/name" is fetched from the hub (its weights too, if `weights`).
    FileNotFoundError or ValueError says what was tried.
    """
    if not model:
        raise ValueError("model is empty; give a directory, a .gguf file, an Orbax checkpoint or a hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        return _only_gguf(path) or path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"model {model!r} is a file that does not end in .gguf; give the directory that holds config.json, or a .gguf file"
            )
        return path
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise FileNotFoundError(f"model {model!r} does not exist; give a directory, a .gguf file or a hub id such as 'owner/name'")
    return _download(model, weights)


def _only_gguf(directory: Path) -> Path | None:
    """The .gguf file of a directory that holds no Hugging Face model."""
    files = sorted(directory.glob("*.gguf"))
    if (directory / "config.json").exists() or not files:
        return None
    if len(files) > 1:
        raise ValueError(f"{directory} has several .gguf files ({', '.join(f.name for f in files)}); give the path of one")
    return files[0]


def _download(model: str, weights: bool) -> Path:
    # Imported here: it costs a quarter of a second, which local models need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=[*CONFIG_FILES, *(WEIGHT_FILES if weights else ())]))
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(f"model {model!r} is no local path, and the hub refuses it: {error}") from error
    except OSError as error:
        raise FileNotFoundError(
            f"model {model!r} is no local path, and it cannot be fetched from the hub (offline, and not in the local cache); "
            "give the path of a directory or .gguf file, or connect to the hub"
        ) from error
