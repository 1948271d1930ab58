"""Filling an abstract module from a checkpoint: one parameter at a time is read, converted and put where it lives on the mesh."""

from __future__ import annotations

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxserve.loader.checkpoint import Checkpoint, SourceTensor, aligned_empty
from jaxserve.loader.tables import SAME, Layout, sources
from jaxserve.models.parameters import parameters
from jaxserve.sharding import param_sharding

logger = logging.getLogger(__name__)

MAX_WORKERS = 4  # parameters in work at once; each costs its own size in host memory
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # buffers that old checkpoints store and every program computes itself
_IGNORED = re.compile(r"(self_attn|mlp)\.\w+_proj\.bias$|^lm_head\.weight$")  # what Transformers leaves unused too


def fill_module(module: nnx.Module, checkpoint: Checkpoint, mesh: Mesh, progress: bool = False) -> None:
    """Give every parameter its value, in its own dtype and sharding.

    ValueError lists all missing, misshapen and surplus tensors by name; biases that the configuration declares absent are left out
    with a warning, as in Transformers. No second copy of the weights exists at any time.
    """
    plan = sorted(_plan(module, checkpoint), key=lambda item: -np.prod(item[0].shape))  # largest first, lest one worker ends alone with it
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(plan), desc="Loading weights", unit="tensor", disable=not progress) as bar:
        for _ in pool.map(lambda item: _fill(item, mesh), plan):
            bar.update()


def _plan(module: nnx.Module, checkpoint: Checkpoint) -> list[tuple[nnx.Param, list[SourceTensor], Layout]]:
    plan, problems, used = [], [], set()
    for path, variable in parameters(module):
        names, layout = sources(checkpoint.config.architecture, path)
        used.update(names)
        for name, shape in zip(names, layout.source_shapes(variable.shape), strict=True):
            if name not in checkpoint.tensors:
                problems.append(_missing(name))
            elif (stored := checkpoint.tensors[name].shape) != shape:
                problems.append(f"misshapen: {name} has shape {list(stored)}, but the configuration asks for {list(shape)}")
        plan.append((variable, [checkpoint.tensors[n] for n in names if n in checkpoint.tensors], layout))
    surplus = sorted(name for name in checkpoint.tensors if name not in used and not _COMPUTED.search(name))
    ignored = [name for name in surplus if _IGNORED.search(name)]
    problems += [f"surplus: {name}" for name in surplus if name not in ignored]
    if problems:
        raise ValueError(f"{checkpoint.path}: the tensors do not fit the model's configuration:\n  " + "\n  ".join(problems))
    if ignored:
        logger.warning("%s: ignored tensors that the configuration declares absent: %s", checkpoint.path, ", ".join(ignored))
    return plan


def _missing(name: str) -> str:
    if name == "lm_head.weight":
        return "missing: lm_head.weight; set tie_word_embeddings to true in config.json if the model shares its embedding with the head"
    return f"missing: {name}"


def _fill(item: tuple[nnx.Param, list[SourceTensor], Layout], mesh: Mesh) -> None:
    variable, tensors, layout = item
    arrays, dtype = [tensor.read() for tensor in tensors], np.dtype(variable.dtype)
    out = arrays[0]
    if layout is not SAME or out.dtype != dtype or not out.flags.writeable:  # else it is a fresh array already as it should be
        out = aligned_empty(variable.shape, dtype)
        layout.write(out, *arrays)
    variable.set_value(jax.block_until_ready(jax.device_put(out, param_sharding(mesh, variable))))
