"""Running a model without the engine: one sequence, pages in shuffled order, prefill in chunks and decode in one padded program."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import EngineConfig, ModelConfig, ParallelConfig
from jaxserve.kv_cache import abstract_kv_cache
from jaxserve.layers.attention import AttentionMetadata, AttentionPath
from jaxserve.loader import LoadedModel, load_model
from jaxserve.sharding import make_mesh

PAGE_SIZE = 16
MAX_LEN = 256
CHUNK = 128  # tokens of the program; shorter steps are padded into the dummy page


def load(path: Path | str, dtype: str = "float32", tensor_parallel_size: int = 1) -> LoadedModel:
    config = EngineConfig.from_options(model=str(path), tensor_parallel_size=tensor_parallel_size)
    return load_model(config, make_mesh(ParallelConfig(tensor_parallel_size)), jnp.dtype(dtype))


class Sequence:
    """One request over its own pool: feed() gives the logits after each new token."""

    def __init__(self, module: Any, config: ModelConfig, num_prompt_tokens: int, backend: str = "xla", stacked: bool = False):
        self.state = nnx.split(module)
        self.num_prompt_tokens, self.length, self.backend = num_prompt_tokens, 0, backend
        num_pages = MAX_LEN // PAGE_SIZE + 1
        mesh = module.embedding.table.get_value().sharding.mesh
        abstract = abstract_kv_cache(config, num_pages, PAGE_SIZE, jnp.float32, mesh, backend, stacked)
        self.cache = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), abstract)
        self.pages = np.random.default_rng(0).permutation(np.arange(1, num_pages)).astype(np.int32)

    def feed(self, token_ids: list[int]) -> np.ndarray:
        """Logits float32 [len(token_ids), vocab]."""
        count, pad = len(token_ids), CHUNK - len(token_ids)
        positions = np.arange(self.length, self.length + count)
        self.length += count
        slots = self.pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        lens = np.maximum(positions + 1, self.num_prompt_tokens)
        tokens, positions, lens, slots = (np.pad(x, (0, pad)).astype(np.int32) for x in (token_ids, positions, lens, slots))
        slots[count:] = np.arange(pad) % PAGE_SIZE
        metadata = AttentionMetadata(
            block_tables=jnp.asarray(self.pages[None]),
            seq_lens=jnp.array([self.length], jnp.int32),
            query_start_loc=jnp.array([0, count], jnp.int32),
            slot_mapping=jnp.asarray(slots),
            distribution=jnp.array([0, 1], jnp.int32),
            path=AttentionPath(self.backend),
        )
        graph, state = self.state
        logits, self.cache = _forward(graph, state, tokens, positions, lens, self.cache, metadata)
        return np.asarray(logits[:count])


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, state, tokens, positions, rope_lens, cache, metadata):
    module = nnx.merge(graph, state)
    hidden, cache = module(tokens, positions, rope_lens, cache, metadata)
    return module.logits(hidden), cache


def greedy(module: Any, config: ModelConfig, prompt: list[int], count: int, chunk: int = CHUNK) -> tuple[list[int], np.ndarray]:
    """`count` greedy ids after a prompt that is prefilled `chunk` tokens at a time, and the logits of every position."""
    sequence = Sequence(module, config, len(prompt))
    logits = [sequence.feed(prompt[i : i + chunk]) for i in range(0, len(prompt), chunk)]
    ids = [int(logits[-1][-1].argmax())]
    while len(ids) < count:
        logits.append(sequence.feed(ids[-1:]))
        ids.append(int(logits[-1][-1].argmax()))
    return ids, np.concatenate(logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
