"""paged_attention in plain XLA operations, shaped for the CPU: cost follows the batch's real lengths under one static shape."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.xla_decode import decode_rows
from pallas_kernels.paged_attention.xla_prefill import prefill_rows


def paged_attention_xla(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    *,
    decode_only: bool,
) -> tuple[Array, Array]:
    """Return (o [T, H, D], lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`.

    Rows with one query go through :func:`decode_rows`, the others through :func:`prefill_rows`, whose loops have dynamic trip counts, so a
    step without the one kind pays nothing for it.
    """
    pages = (k_pages, v_pages)
    if decode_only:
        o, lse = decode_rows(q, pages, block_tables, seq_lens, options)
        return o.astype(q.dtype), lse
    num_tokens, num_rows = q.shape[0], block_tables.shape[0]
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < distribution[0]
    # A step may have fewer tokens than rows; token t of row t still is what the decode part reads.
    q_rows = jnp.pad(q, ((0, max(0, num_rows - num_tokens)), (0, 0), (0, 0)))
    o, lse = decode_rows(q_rows[:num_rows], pages, block_tables, jnp.where(is_decode, seq_lens, 0), options)
    o, lse = prefill_rows(q, pages, block_tables, seq_lens, query_start_loc, distribution, options, o.astype(q.dtype), lse)
    return o[:num_tokens], lse[:num_tokens]
