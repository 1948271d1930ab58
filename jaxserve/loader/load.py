"""load_model: from a directory, a .gguf file, an Orbax checkpoint or a hub id to a module whose parameters are on the devices."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.loader.checkpoint import Checkpoint, SourceTensor
from jaxserve.loader.gguf_checkpoint import gguf_model_config, open_gguf_checkpoint
from jaxserve.loader.gguf_file import open_gguf
from jaxserve.loader.hf_config import read_generation_config, read_hf_config
from jaxserve.loader.hub import resolve
from jaxserve.loader.orbax_checkpoint import TOKENIZER_GGUF, is_orbax, restore_module
from jaxserve.loader.safetensors_file import open_safetensors
from jaxserve.loader.weights import fill_module
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.registry import model_class
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding import with_kv_heads_for

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# generation_config.json's name -> SamplingParams' name, and the value that changes nothing.
_GENERATION_FIELDS = {
    "temperature": ("temperature", 1.0),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "max_new_tokens": ("max_tokens", None),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    module: LlamaForCausalLM  # every parameter is a jax.Array in its sharding
    model_config: ModelConfig
    generation_defaults: dict[str, Any]  # SamplingParams fields that the model's generation_config.json sets
    tokenizer_source: str  # what Tokenizer loads from: a directory, a .gguf file or a hub id


def load_model(config: EngineConfig, mesh: Mesh, dtype: jax.typing.DTypeLike, progress: bool = False) -> LoadedModel:
    """Load config.load.model with weights of `dtype` sharded over the mesh.

    ValueError or FileNotFoundError names the file and what is wrong with it; `progress` shows a bar.
    """
    path = resolve(config.load.model)
    if is_orbax(path):
        model_config = read_hf_config(path)
        module = model_class(model_config.architecture)(model_config, dtype)
        restore_module(module, path, mesh)
        own = path / TOKENIZER_GGUF
        generation, tokenizer = read_generation_config(path), str(own if own.exists() else path)
    else:
        checkpoint = open_checkpoint(path)
        checkpoint = checkpoint.with_kv_heads(with_kv_heads_for(checkpoint.config, mesh.shape["tensor"]).num_kv_heads)
        model_config, generation, tokenizer = checkpoint.config, checkpoint.generation_config, checkpoint.tokenizer_source
        module = model_class(model_config.architecture)(model_config, dtype)
        fill_module(module, checkpoint, mesh, progress)
    defaults = generation_defaults(generation) if config.load.generation_config == "auto" else {}
    return LoadedModel(module, model_config, defaults, config.load.tokenizer or tokenizer)


def load_model_config(model: str) -> ModelConfig:
    """The ModelConfig of what load_model would load; reads no weights."""
    path = resolve(model, weights=False)
    return gguf_model_config(open_gguf(path)) if path.is_file() else read_hf_config(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face directory.

    A tied model whose files hold an output head of other values uses that one, as in Transformers.
    """
    if path.is_file():
        return open_gguf_checkpoint(path)
    config = read_hf_config(path)
    tensors = open_safetensors(path)
    if config.tie_word_embeddings and {_EMBEDDING, _HEAD} <= set(tensors) and not _equal(tensors[_EMBEDDING], tensors[_HEAD]):
        logger.warning("%s: tie_word_embeddings is true, but %s holds other values than %s and is used", path, _HEAD, _EMBEDDING)
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return Checkpoint(path, config, tensors, str(path), read_generation_config(path))


def _equal(one: SourceTensor, other: SourceTensor) -> bool:
    """Whether two stored matrices hold the same values; compared in pieces, so that memory stays small."""
    a, b = one.read(), other.read()
    return a.shape == b.shape and all(np.array_equal(a[i : i + 4096], b[i : i + 4096]) for i in range(0, len(a), 4096))


def generation_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The SamplingParams fields that a generation_config.json sets; what this version cannot honour is named in a warning.

    ValueError for a value that no request could have.
    """
    known = {f.name for f in dataclasses.fields(SamplingParams)}
    defaults = {}
    for key, (name, neutral) in _GENERATION_FIELDS.items():
        value = generation_config.get(key)
        if value is None or value == neutral:
            continue
        if name in known:
            defaults[name] = value
        else:
            logger.warning("generation_config.json sets %s to %s, which is not supported and has no effect", key, value)
    try:
        SamplingParams(**defaults)
    except ValueError as error:  # else every request would be refused for a value that it did not give
        raise ValueError(f"generation_config.json: {error}; correct it, or start with generation_config 'none'") from None
    return defaults
