"""The functions that ModelRunner compiles: pure, over flat tuples of arrays.

A step is one forward program, which ends in the hidden states of the rows' last tokens, and one sampling program, which starts from
them. Kept apart, buckets and sampling variants add up instead of multiplying (docs/decisions).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve import sampler
from jaxserve.engine.input_batch import Fields, InputLayout, SamplingLayout
from jaxserve.kv_cache import KVCache
from jaxserve.layers.attention import AttentionMetadata, AttentionPath

SCORE_ROWS = 32  # tokens whose logits the score program holds at once


def _unpack(fields: Fields, buffer: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.lax.slice(buffer, (at,), (at + prod(shape),)).reshape(shape) for name, (at, shape) in fields.items()}


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def forward_program(graphdef: Any, treedef: Any, layout: InputLayout, path: AttentionPath, num_rows: int, num_tokens: int) -> Callable:
    """(weights, pool, prev_ids i32[max_num_seqs], buffer) -> (last hidden [num_rows, hidden], hidden [num_tokens, hidden], pool).

    A decode program's tokens are its rows, so it gives no second array.
    """
    decode_only = layout.bucket.decode_only

    def forward(weights: tuple, pool: KVCache, prev_ids: jax.Array, buffer: jax.Array):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        fields = _unpack(layout.fields, buffer)
        prev_rows = fields["prev_rows"]
        token_ids = jnp.where(prev_rows >= 0, prev_ids[jnp.maximum(prev_rows, 0)], fields["token_ids"])
        names = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "distribution")
        metadata = AttentionMetadata(**{name: fields[name] for name in names}, decode_only=decode_only, path=path)
        hidden, pool = model(token_ids, fields["positions"], fields["rope_lens"], pool, metadata)
        if decode_only:
            return _pad_rows(hidden, num_rows), None, pool
        return _pad_rows(hidden[fields["logits_indices"]], num_rows), _pad_rows(hidden, num_tokens), pool

    return forward


def sample_program(graphdef: Any, treedef: Any, variant: str, layout: SamplingLayout) -> Callable:
    """(weights, last hidden [N, hidden], buffer) -> ids i32[N], of which the first layout.num_rows are sampled; greedy takes no buffer."""

    def sample(weights: tuple, hidden: jax.Array, buffer: jax.Array | None = None) -> jax.Array:
        logits = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights)).logits(hidden[: layout.num_rows])
        if buffer is None:
            ids = sampler.greedy(logits)
        else:
            fields = _unpack(layout.fields, buffer)
            for name in ("temperature", "top_p", "min_p"):
                fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
            fields["seed"] = jax.lax.bitcast_convert_type(fields["seed"], jnp.uint32)
            ids = sampler.VARIANTS[variant](logits, sampler.SamplingMetadata(**fields))
        return jnp.pad(ids, (0, hidden.shape[0] - layout.num_rows))

    return sample


def score_program(graphdef: Any, treedef: Any, num_top: int) -> Callable:
    """(weights, hidden [N, hidden], ids i32[N'], count) -> sampler.logprobs of the ids that follow the first `count` tokens.

    SCORE_ROWS tokens at a time, so that the logits of a long prompt never exist at once, and only as many as `count` needs.
    """

    def score(weights: tuple, hidden: jax.Array, ids: jax.Array, count: jax.Array):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        total = hidden.shape[0]
        rows = min(SCORE_ROWS, total)
        padded = -(-total // rows) * rows
        hidden = _pad_rows(hidden, padded)
        ids = jnp.pad(ids[:total], (0, padded - min(total, ids.shape[0])))

        def chunk(i: jax.Array, found: tuple) -> tuple:
            start = i * rows
            logits = model.logits(jax.lax.dynamic_slice_in_dim(hidden, start, rows))
            new = sampler.logprobs(logits, jax.lax.dynamic_slice_in_dim(ids, start, rows), num_top)
            return tuple(jax.lax.dynamic_update_slice_in_dim(a, b, start, 0) for a, b in zip(found, new, strict=True))

        shapes = jax.eval_shape(lambda: sampler.logprobs(model.logits(hidden[:rows]), ids[:rows], num_top))
        zeros = tuple(jnp.zeros((padded, *s.shape[1:]), s.dtype) for s in shapes)
        return jax.lax.fori_loop(0, (count[0] + rows - 1) // rows, chunk, zeros)

    return score
