"""Decode and prefill rows of one call put together, for either page layout."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_decode import decode_rows
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.tpu_prefill import prefill_rows
from pallas_kernels.paged_attention.tpu_tiles import Tiles, decode_tiles, prefill_tiles, vmem_bytes

MAX_TABLE_ENTRIES = 128 << 10  # of one kernel call: half of the 1 MiB of scalar memory


def attend_pages(
    make_layout: Callable[[Tiles], Layout],
    page_size: int,
    columns_per_token: int,
    q: Array,
    pools: tuple[Array, ...],
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    decode_only: bool,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Array, Array]:
    """Return (o [T, H, D], lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`.

    ``pools`` are K, V and, with scales for each slot, theirs; ``columns_per_token`` is the width of a token in decode's score matrix.
    A block table too large for scalar memory is taken some rows at a time.

    Raises ValueError where one row of the block table is too large.
    """
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    num_rows, table_width = block_tables.shape
    if table_width > MAX_TABLE_ENTRIES:
        raise ValueError(
            f"block_tables.shape={block_tables.shape}: expected at most {MAX_TABLE_ENTRIES} pages a row, which scalar memory holds; "
            "use larger pages"
        )
    vmem = vmem_bytes(interpret)
    page_bytes = sum(math.prod(pool.shape[1:]) * pool.dtype.itemsize for pool in pools)
    decoded_bytes = sum(math.prod(pool.shape[1:]) * q.dtype.itemsize for pool in pools[:2])
    score_bytes = 4 * q.shape[1] * columns_per_token
    decode_layout = make_layout(decode_tiles(page_bytes, decoded_bytes, page_size, table_width, score_bytes, vmem))
    prefill_layout = make_layout(prefill_tiles(page_bytes, decoded_bytes, page_size, table_width, q, decode_layout.num_kv_heads, vmem))
    rows_per_call = MAX_TABLE_ENTRIES // table_width

    def some_rows(first: int) -> tuple[Array, Array]:
        end = min(first + rows_per_call, num_rows)
        tables, lens = block_tables[first:end], seq_lens[first:end]
        if decode_only:
            return decode_rows(decode_layout, q[first:end], pools, tables, lens, options, interpret)
        counts = jnp.clip(distribution - first, 0, end - first)
        o, lse = prefill_rows(prefill_layout, q, pools, tables, lens, query_start_loc[first : end + 1], counts, options, interpret)
        # Token t of a decode row is row t. A step may have fewer tokens than rows.
        tokens = slice(first, max(first, min(end, q.shape[0])))
        is_decode = jnp.arange(end - first, dtype=jnp.int32) < counts[0]
        row_q = jnp.pad(q[tokens], ((0, end - first - q[tokens].shape[0]), (0, 0), (0, 0)))
        new = decode_rows(decode_layout, row_q, pools, tables, jnp.where(is_decode, lens, 0), options, interpret)
        return _put(o, new[0], is_decode, tokens), _put(lse, new[1], is_decode, tokens)

    parts = [some_rows(first) for first in range(0, num_rows, rows_per_call)]
    if decode_only:
        return jnp.concatenate([o for o, _ in parts]), jnp.concatenate([lse for _, lse in parts])
    # Each part is 0 or -inf at the tokens of the others.
    o, lse = parts[0]
    for part_o, part_lse in parts[1:]:
        o, lse = o + part_o, jnp.maximum(lse, part_lse)
    return o, lse


def _put(old: Array, new: Array, where: Array, tokens: slice) -> Array:
    """``old`` with the rows of ``new`` at ``tokens``, where ``where``."""
    size = tokens.stop - tokens.start
    where = where[:size].reshape(-1, *[1] * (old.ndim - 1))
    return old.at[tokens].set(jnp.where(where, new[:size], old[tokens]))
