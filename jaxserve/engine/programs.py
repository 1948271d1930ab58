"""The functions that ModelRunner compiles: pure, over flat tuples of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve import sampler
from jaxserve.engine.input_batch import InputLayout
from jaxserve.kv_cache import KVCache
from jaxserve.layers.attention import AttentionMetadata

SCORE_ROWS = 32  # tokens whose logits a score program holds at once


def unpack(layout: InputLayout, buffer: jax.Array) -> dict[str, jax.Array]:
    """The fields of a packed buffer, on device."""
    fields = {}
    for name, (offset, shape) in layout.fields.items():
        fields[name] = jax.lax.slice(buffer, (offset,), (offset + _size(shape),)).reshape(shape)
    for name in ("temperature", "top_p", "min_p"):
        fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
    fields["seed"] = jax.lax.bitcast_convert_type(fields["seed"], jnp.uint32)
    return fields


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def forward_program(graphdef: Any, treedef: Any, layout: InputLayout, backend: str) -> Callable:
    """(weights, pool, prev_ids i32[max_num_seqs], buffer) -> (logits f32[R, vocab], hidden [T, hidden], pool)."""
    decode_only = layout.bucket.decode_only

    def forward(weights: tuple, pool: KVCache, prev_ids: jax.Array, buffer: jax.Array):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        fields = unpack(layout, buffer)
        prev_rows = fields["prev_rows"]
        token_ids = jnp.where(prev_rows >= 0, prev_ids[jnp.maximum(prev_rows, 0)], fields["token_ids"])
        names = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "distribution")
        metadata = AttentionMetadata(**{name: fields[name] for name in names}, decode_only=decode_only, backend=backend)
        hidden, pool = model(token_ids, fields["positions"], fields["rope_lens"], pool, metadata)
        last = hidden if decode_only else hidden[fields["logits_indices"]]
        return model.logits(last), hidden, pool

    return forward


def sample_program(variant: str, layout: InputLayout, num_ids: int) -> Callable:
    """(logits, buffer) -> ids i32[num_ids], of which the first R are the rows' samples."""

    def sample(logits: jax.Array, buffer: jax.Array) -> jax.Array:
        fields = unpack(layout, buffer)
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "index", "position", "suppressed")
        ids = sampler.VARIANTS[variant](logits, sampler.SamplingMetadata(**{name: fields[name] for name in names}))
        return jnp.zeros(num_ids, jnp.int32).at[: ids.shape[0]].set(ids)

    return sample


def logprobs_program(num_top: int) -> Callable:
    """(logits, ids) -> sampler.logprobs of the sampled tokens."""

    def logprobs(logits: jax.Array, ids: jax.Array):
        return sampler.logprobs(logits, ids[: logits.shape[0]], num_top)

    return logprobs


def score_program(graphdef: Any, treedef: Any, layout: InputLayout, num_top: int) -> Callable:
    """(weights, hidden, buffer) -> sampler.logprobs of each token's successor in its prompt, SCORE_ROWS tokens at a time."""

    def score(weights: tuple, hidden: jax.Array, buffer: jax.Array):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        targets = unpack(layout, buffer)["target_ids"]
        rows = min(SCORE_ROWS, targets.shape[0])
        chunks = hidden.reshape(-1, rows, hidden.shape[-1]), targets.reshape(-1, rows)
        scores = jax.lax.map(lambda chunk: sampler.logprobs(model.logits(chunk[0]), chunk[1], num_top), chunks)
        return tuple(x.reshape(-1, *x.shape[2:]) for x in scores)

    return score
