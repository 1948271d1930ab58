"""The safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes (github.com/huggingface/safetensors)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.loader.checkpoint import SourceTensor

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
INDEX = "model.safetensors.index.json"


class UnsupportedType(ValueError):
    """A tensor of a type that is not read, such as 8-bit floats."""


def open_safetensors(directory: Path) -> dict[str, SourceTensor]:
    """The tensors of a model directory with one model.safetensors or with an index over several files."""
    index = directory / INDEX
    if index.is_file():
        return _open_sharded(directory, read_json(index).get("weight_map"))
    file = directory / "model.safetensors"
    if file.is_file():
        return open_file(file)
    found = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
    raise FileNotFoundError(
        f"{directory} has no model.safetensors, no {INDEX} and no Orbax checkpoint (weight files there: {', '.join(found) or 'none'}); "
        "save the model with save_pretrained(..., safe_serialization=True)"
    )


def open_file(path: Path) -> dict[str, SourceTensor]:
    """The tensors of one file; ValueError names the file when it is truncated or not in this format."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is only a Git LFS pointer; run 'git lfs pull' in {path.parent}")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path} is truncated or not a safetensors file: its header needs {length} bytes, the file has {size}; fetch it again"
            )
        header = file.read(length)
    start = 8 + length
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(path, start, **entry) for name, entry in entries.items()}
        end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except UnsupportedType:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is corrupt: its safetensors header cannot be read ({error}); fetch it again") from error
    if end > size:
        raise ValueError(f"{path} is truncated: its header describes {end} bytes, the file has {size}; fetch it again")
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; ValueError names the file when it holds no such thing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, but an object is needed")
    return value


def _open_sharded(directory: Path, weight_map: Any) -> dict[str, SourceTensor]:
    if not isinstance(weight_map, dict):
        raise ValueError(f"{directory / INDEX} has no object weight_map; fetch it again")
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (directory / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{directory} lacks {', '.join(absent)}, which {INDEX} names; fetch the missing files")
    tensors: dict[str, SourceTensor] = {}
    for name in files:
        tensors |= open_file(directory / name)
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise ValueError(f"{directory}: {INDEX} names tensors that no file holds: {', '.join(lost)}; fetch the checkpoint again")
    return tensors


def _tensor(path: Path, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> SourceTensor:
    begin, end = data_offsets
    if dtype not in DTYPES:
        raise UnsupportedType(f"{path} stores weights as {dtype}, which is not supported; supported: {', '.join(DTYPES)}")
    if end - begin != int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize:
        raise ValueError(f"a tensor of shape {shape} and type {dtype} has {end - begin} bytes")
    read = functools.partial(_read, path, start + begin, end - begin, np.dtype(DTYPES[dtype]), tuple(shape))
    return SourceTensor(tuple(shape), np.dtype(DTYPES[dtype]), read)


def _read(path: Path, offset: int, num_bytes: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A view of the file's bytes, mapped for as long as the array lives: memory never holds more than the tensors in work."""
    return np.memmap(path, np.uint8, "r", offset, (num_bytes,)).view(np.ndarray).view(dtype).reshape(shape)
