"""Decode and prefill rows of one call put together, for either page layout."""

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_decode import decode_rows
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.tpu_prefill import prefill_rows


def attend_pages(
    layout: Layout,
    q: Array,
    pools: tuple[Array, Array],
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    decode_only: bool,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Array, Array]:
    """Return (o [T, H, D], lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`."""
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    if decode_only:
        return decode_rows(layout, q, pools, block_tables, seq_lens, options, interpret)
    num_tokens, num_rows = q.shape[0], block_tables.shape[0]
    o, lse = prefill_rows(layout, q, pools, block_tables, seq_lens, query_start_loc, distribution, options, interpret)
    # Token t of a decode row is row t, so only the first tokens can be theirs. A step may have fewer tokens than rows.
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < distribution[0]
    first = jnp.pad(q[:num_rows], ((0, max(0, num_rows - num_tokens)), (0, 0), (0, 0)))
    new = decode_rows(layout, first, pools, block_tables, jnp.where(is_decode, seq_lens, 0), options, interpret)
    size = min(num_rows, num_tokens)

    def merge(old: Array, new: Array) -> Array:
        mine = is_decode[:size].reshape(-1, *[1] * (old.ndim - 1))
        return old.at[:size].set(jnp.where(mine, new[:size], old[:size]))

    return merge(o, new[0]), merge(lse, new[1])
