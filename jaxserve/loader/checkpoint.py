"""What every kind of checkpoint gives to the loader: a configuration, named tensors, sampling defaults and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxserve.config import ModelConfig


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


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array whose memory the CPU backend takes over as it is: it copies what is not aligned to 64 bytes."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
