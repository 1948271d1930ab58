"""`jaxserve convert SRC DST`: any model that load_model takes, rewritten as an Orbax checkpoint that restores without conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import DTYPES
from jaxserve.loader.gguf_file import write_metadata
from jaxserve.loader.hf_config import to_hf_config
from jaxserve.loader.hub import resolve
from jaxserve.loader.load import open_checkpoint
from jaxserve.loader.orbax_checkpoint import TOKENIZER_GGUF, is_orbax, save_module
from jaxserve.loader.weights import fill_module
from jaxserve.models.registry import model_class

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def convert(source: str, destination: str | Path, dtype: str = "auto", progress: bool = False) -> Path:
    """Write `source` to the directory `destination` as weights of `dtype` ("auto": as stored), configuration and tokenizer files.

    Loading the directory gives the same tokens as loading the source. ValueError when the destination is not empty.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    path, target = resolve(source), Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"destination {target} exists and is not an empty directory; give a new one")
    if is_orbax(path):
        raise ValueError(f"source {path} is an Orbax checkpoint already; give a Hugging Face directory, a .gguf file or a hub id")
    checkpoint = open_checkpoint(path)
    stored = checkpoint.tensors["model.embed_tokens.weight"].dtype
    module = model_class(checkpoint.config.architecture)(checkpoint.config, stored if dtype == "auto" else jnp.dtype(dtype))
    host = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "tensor"))
    fill_module(module, checkpoint, host, progress)
    target.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(path, target)
    if checkpoint.generation_config:
        _write_json(target / "generation_config.json", checkpoint.generation_config)
    save_module(module, target)
    _write_json(target / "config.json", to_hf_config(checkpoint.config))  # last: without it the directory does not load
    return target


def _copy_tokenizer(path: Path, target: Path) -> None:
    if path.is_file():
        write_metadata(path, target / TOKENIZER_GGUF)
        return
    for pattern in TOKENIZER_FILES:
        for file in path.glob(pattern):
            if file.is_file():
                shutil.copy(file, target / file.name)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
