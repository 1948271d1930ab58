"""What every kind of checkpoint gives to the loader: a configuration, named tensors, sampling defaults and a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxserve.config import ModelConfig

_KEY_OR_VALUE = re.compile(r"self_attn\.[kv]_proj\.(weight|bias)$")


@dataclass(frozen=True)
class SourceTensor:
    """A stored tensor under its Hugging Face name: the shape is known at once, the values are read when asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of what read() gives
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; no weight has been read yet."""

    path: Path
    config: ModelConfig
    tensors: dict[str, SourceTensor]
    tokenizer_source: str  # what Tokenizer loads from: a directory or a .gguf file
    generation_config: dict[str, Any] = field(default_factory=dict)

    def with_kv_heads(self, count: int) -> Checkpoint:
        """The same model with each KV head repeated, until there are `count`; see jaxserve.sharding.with_kv_heads_for."""
        heads, times = self.config.num_kv_heads, count // self.config.num_kv_heads
        if times == 1:
            return self
        tensors = {name: _repeated(t, heads, times) if _KEY_OR_VALUE.search(name) else t for name, t in self.tensors.items()}
        return replace(self, config=replace(self.config, num_kv_heads=count), tensors=tensors)


def _repeated(tensor: SourceTensor, heads: int, times: int) -> SourceTensor:
    """A key's or value's projection, or its bias, with the rows of each head `times` times."""
    rows, *rest = tensor.shape

    def read() -> np.ndarray:
        return np.repeat(tensor.read().reshape(heads, rows // heads, *rest), times, axis=0).reshape(rows * times, *rest)

    return SourceTensor((rows * times, *rest), tensor.dtype, read)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array whose memory the CPU backend takes over as it is: it copies what is not aligned to 64 bytes."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
