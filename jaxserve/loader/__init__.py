"""Checkpoints -> modules on the devices: Hugging Face safetensors, GGUF and Orbax."""

from jaxserve.loader.convert import convert
from jaxserve.loader.load import LoadedModel, load_model, load_model_config

__all__ = ["LoadedModel", "convert", "load_model", "load_model_config"]
