"""The GGUF format (github.com/ggml-org/ggml, docs/gguf.md): metadata, then quantised tensors that are dequantised to float32 when read.

The gguf package's own reader takes seconds on a vocabulary of 50,000 tokens, so the header is parsed here; its dequantisers are used.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from jaxserve.loader.checkpoint import aligned_empty

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_UNQUANTISED = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
_QUANTISED = {t: getattr(quants, t) for t in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
_CHUNK = 2048  # blocks dequantised at a time: the intermediate arrays stay in the cache


@dataclass(frozen=True)
class GGUFTensor:
    """A stored tensor: rows of whole quantisation blocks."""

    path: Path
    name: str
    shape: tuple[int, ...]  # [out, in], slowest first as in numpy
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(_UNQUANTISED.get(self.kind, np.float32))

    @property
    def num_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * size

    def read(self, row_order: np.ndarray | None = None) -> np.ndarray:
        """The values, float32 (or float16 as stored), with the rows reordered first."""
        rows = np.memmap(self.path, np.uint8, "r", self.offset, (self.num_bytes,)).view(np.ndarray).reshape(self.shape[0], -1)
        if row_order is not None:
            rows = rows[row_order]
        if self.kind in _UNQUANTISED:
            return rows.reshape(-1).view(self.dtype).reshape(self.shape)
        quantised = _QUANTISED[self.kind.name]
        blocks = rows.reshape(-1, quantised.type_size)
        out = aligned_empty((len(blocks), quantised.block_size), np.float32)
        for start in range(0, len(blocks), _CHUNK):
            out[start : start + _CHUNK] = quantised.dequantize_blocks(blocks[start : start + _CHUNK])
        return out.reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """The header of one file; a float32 number is given as its shortest decimal, so that 1e-05 is not 9.999999747378752e-06."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Read a file's header; ValueError names the file when it is truncated, not GGUF, or holds a type without a dequantiser."""
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path} is not a GGUF file: it has only {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it begins with {data[:4]!r}")
        try:
            metadata, infos, end = _read_header(_Cursor(data, 4))
        except (struct.error, KeyError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ValueError(f"{path} is truncated or corrupt: its GGUF header cannot be read ({error}); fetch it again") from error
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts (split.count); join them with llama-gguf-split --merge")
    alignment = metadata.get("general.alignment", 32)
    start = -(-end // alignment) * alignment
    tensors = {name: GGUFTensor(path, name, shape, _kind(path, name, kind), start + offset) for name, shape, kind, offset in infos}
    _check(path, tensors, size)
    return GGUFFile(path, metadata, tensors)


def write_metadata(source: Path, target: Path) -> None:
    """Copy a GGUF file without its tensors: its tokenizer and chat template in a file of their own."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, 4)
        _read_header(cursor, tensors=False)
        target.write_bytes(data[:8] + bytes(8) + data[16 : cursor.position])  # bytes 8 to 16: the number of tensors


def _kind(path: Path, name: str, number: int) -> GGMLQuantizationType:
    kinds = {kind.value: kind for kind in GGMLQuantizationType}
    kind = kinds.get(number)
    if kind is None or (kind not in _UNQUANTISED and kind.name not in _QUANTISED):
        supported = ", ".join(["F32", "F16", *_QUANTISED])
        raise ValueError(f"{path}: tensor {name} has type {kind.name if kind else number}, which is not supported; supported: {supported}")
    return kind


def _check(path: Path, tensors: dict[str, GGUFTensor], size: int) -> None:
    for tensor in tensors.values():
        block = GGML_QUANT_SIZES[tensor.kind][0]
        if tensor.shape[-1] % block:
            raise ValueError(f"{path} is corrupt: rows of {tensor.name} have {tensor.shape[-1]} values, not a multiple of {block}")
        if tensor.offset + tensor.num_bytes > size:
            end = tensor.offset + tensor.num_bytes
            raise ValueError(f"{path} is truncated: tensor {tensor.name} ends at byte {end}, the file has {size}; fetch it again")


def _read_header(cursor: _Cursor, tensors: bool = True) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    version = cursor.number("I")
    if version not in (2, 3):
        raise struct.error(f"version {version}, but versions 2 and 3 are supported")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = []
    for _ in range(num_tensors if tensors else 0):
        name = cursor.string()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        infos.append((name, shape or (1,), cursor.number("I"), cursor.number("Q")))
    return metadata, infos, cursor.position


class _Cursor:
    """A position in the file's bytes; struct.error past their end."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data, self.position = data, position

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.number("Q")
        end = self.position + length
        if end > len(self.data):
            raise struct.error(f"a string of {length} bytes at byte {self.position} goes past the end")
        value = self.data[self.position : end].decode("utf-8", "surrogateescape")
        self.position = end
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        value = self.number(_SCALARS[kind])
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def array(self, kind: int, count: int) -> list[Any]:
        """Items of one kind; strings, of which a vocabulary has many, without a call for each."""
        if count > len(self.data):
            raise struct.error(f"an array of {count} items at byte {self.position} goes past the end")
        if kind != _STRING:
            return [self.value(kind) for _ in range(count)] if kind == _ARRAY else list(self._numbers(_SCALARS[kind], count))
        items, data, position, unpack = [], self.data, self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            items.append(data[start:position].decode("utf-8", "surrogateescape"))
        if position > len(data):
            raise struct.error(f"an array of strings at byte {self.position} goes past the end")
        self.position = position
        return items

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{count}{code}")
        return values
