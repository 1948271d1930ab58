"""jaxserve: large language models served with JAX."""

from jaxserve.config import EngineConfig
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = ["EngineConfig", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"
