"""What every kind of checkpoint gives to the loader: a configuration, named tensors, sampling defaults and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig


@dataclass(frozen=True)
class SourceTensor:
    """A stored tensor under its Hugging Face name: the shape is known at once, the values are read when asked for."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; no weight has been read yet."""

    path: Path
    config: ModelConfig
    tensors: dict[str, SourceTensor]
    tokenizer_source: str  # what Tokenizer loads from: a directory or a .gguf file
    generation_config: dict[str, Any] = field(default_factory=dict)
