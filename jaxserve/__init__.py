"""jaxserve: large language models served with JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.llm import LLM

__all__ = ["LLM", "AsyncEngine", "EngineConfig", "ModelConfig", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"

# What imports JAX is imported when it is first used, so that the command line and the server's port are there at once.
_LAZY = {"LLM": "jaxserve.llm", "AsyncEngine": "jaxserve.engine.async_engine"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
