"""Prefill on a TPU: tiles of queries that lie on a fixed grid of tokens; the grid steps over (tile, row) pairs.

Where several rows meet in one tile, each takes its turn on the tile's softmax state with the queries of the others masked. The tiles'
bounds then do not depend on the rows, so Pallas moves queries and outputs by itself, padding included.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_softmax as softmax
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.tpu_pages import Items, PageStream, make_items, stream_scratch

ROWS_AT_ONCE = 256  # by the compiler's schedules for v6e: fewer push the keys into the matrix unit more often, more spill registers


class Segments(NamedTuple):
    """Runs of tokens of one row in one tile, in order; as scalars in SMEM. Some are empty, and some tokens belong to no row."""

    tile: Array  # i32 [N + 1], num_tiles for the segments not to visit
    first_token: Array  # i32 [N]
    end_token: Array  # i32 [N]
    offset: Array  # i32 [N] position of a token in its sequence, less its index


def make_segments(
    tile_tokens: int, num_tiles: int, seq_lens: Array, query_start_loc: Array, distribution: Array, options: Options, page_size: int
) -> tuple[Segments, Items, Array]:
    """Cut the tokens at the tiles' and the rows' bounds -> (segments, the pages that each reads, the number of those to visit)."""
    num_tokens = tile_tokens * num_tiles
    num_rows = seq_lens.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    is_prefill = (rows >= distribution[0]) & (rows < distribution[1])
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    end = query_start_loc[distribution[1]]
    tiles = jnp.arange(num_tiles, dtype=jnp.int32) * tile_tokens
    first = jnp.sort(jnp.concatenate([tiles, jnp.where(is_prefill, starts, num_tokens), end[None]]))
    last = jnp.append(first[1:], num_tokens)
    row = jnp.maximum(jnp.sum(starts <= first[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    live = is_prefill[row] & (first >= starts[row]) & (first < end) & (first < last)
    offset = seq_lens[row] - ends[row]
    first_position = jnp.zeros_like(offset)
    if options.sliding_window is not None:
        first_position = jnp.maximum(offset + first - options.sliding_window + 1, 0)
    items = make_items(row, first_position, jnp.where(live, offset + last, 0), page_size)
    segments = Segments(jnp.append(first, num_tokens) // tile_tokens, first, last, offset)
    return segments, items, jnp.sum(first < num_tokens, dtype=jnp.int32)


def prefill_rows(
    layout: Layout,
    q: Array,
    pools: tuple[Array, ...],
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    interpret,
) -> tuple[Array, Array]:
    """Attention of rows distribution[0] .. distribution[1] - 1 -> (o [T, H, D] in q's dtype, lse float32 [T, H]); other tokens give 0."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = layout.num_kv_heads
    group = num_heads // num_kv_heads
    tile_tokens = min(layout.tiles.queries, -(-num_tokens // 16) * 16)
    num_tiles = -(-num_tokens // tile_tokens)
    tile_rows = tile_tokens * group
    segments, items, num_segments = make_segments(
        tile_tokens, num_tiles, seq_lens, query_start_loc, distribution, options, layout.page_size
    )
    q = jnp.pad(q, ((0, num_tiles * tile_tokens - num_tokens), (0, 0), (0, 0))).reshape(-1, num_kv_heads, group, head_dim)
    q = q.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    row_token = np.repeat(np.arange(tile_tokens, dtype=np.int32), group)[:, None]
    per_row = [None if x is None else _per_row(x, num_kv_heads, tile_tokens) for x in softmax.per_head(options)]
    tile = pl.BlockSpec((num_kv_heads, tile_rows, head_dim), lambda i, segments, *_: (0, segments.tile[i], 0))
    lse_tile = pl.BlockSpec((1, num_kv_heads, 1, tile_rows), lambda i, segments, *_: (segments.tile[i], 0, 0, 0))
    whole, anywhere = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    column = pltpu.VMEM((num_kv_heads, tile_rows, 1), jnp.float32)
    o, lse = pl.pallas_call(
        functools.partial(_kernel, layout, options, tile_tokens, block_tables.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_segments,),
            in_specs=[tile, whole, [None if x is None else whole for x in per_row], (anywhere,) * len(pools)],
            out_specs=[tile, lse_tile],
            scratch_shapes=[
                (column, column, pltpu.VMEM((num_kv_heads, tile_rows, head_dim), jnp.float32)),
                layout.head_scratch(q.dtype),
                *stream_scratch(pools, layout.tiles),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((num_tiles, num_kv_heads, 1, tile_rows), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=layout.tiles.vmem_limit_bytes),
        interpret=interpret,
        name=f"{layout.name}_prefill",
    )(segments, items, block_tables.reshape(-1), softmax.scales(options), q, jnp.asarray(row_token), per_row, pools)
    o = o.reshape(num_kv_heads, -1, group, head_dim).transpose(1, 0, 2, 3).reshape(-1, num_heads, head_dim)
    lse = lse.reshape(num_tiles, num_kv_heads, tile_tokens, group).transpose(0, 2, 1, 3).reshape(-1, num_heads)
    return o[:num_tokens], lse[:num_tokens]


def _per_row(x: Array, num_kv_heads: int, tile_tokens: int) -> Array:
    """A value a head [H] -> one a row of the tile, [KVH, tile_tokens * G, 1]."""
    x = x.reshape(num_kv_heads, 1, -1)
    return jnp.broadcast_to(x, (num_kv_heads, tile_tokens, x.shape[2])).reshape(num_kv_heads, -1, 1)


def _kernel(
    layout, options, tile_tokens, table_width,
    segments, items, block_tables, scales, q_ref, row_token, per_row, pools, o_ref, lse_ref, state, head_scratch, *stream_scratch,
):  # fmt: skip
    stream = PageStream(items, block_tables, table_width, pools, *stream_scratch)
    i = pl.program_id(0)
    tile, first_token, end_token, offset = segments.tile[i], segments.first_token[i], segments.end_token[i], segments.offset[i]
    first_seen = 0
    if options.sliding_window is not None:
        first_seen = jnp.maximum(first_token + offset - options.sliding_window + 1, 0)
    m_ref, l_ref, o_sum_ref = state
    num_kv_heads = q_ref.shape[0]
    pl.when(i == 0)(stream.open)

    @pl.when((i == 0) | (segments.tile[jnp.maximum(i - 1, 0)] != tile))
    def _():
        m_ref[...] = jnp.full_like(m_ref, softmax.MASKED)
        l_ref[...] = jnp.zeros_like(l_ref)
        o_sum_ref[...] = jnp.zeros_like(o_sum_ref)

    def one_block(block, _):
        slot, first_page = stream.take(i, block)
        k, v, *slot_scales = (buffer.at[slot] for buffer in stream.buffers)
        base = first_page * layout.page_size
        layout.zero_outside(v, first_seen - base, end_token + offset - base)
        k, v = layout.by_head(k, v, head_scratch)
        token = row_token[...] + tile * tile_tokens
        # As seen from the block's first slot; queries that are not this segment's see nothing.
        query = jnp.where((token >= first_token) & (token < end_token), token + offset - base, -1)
        all_seen = base + layout.page_size * layout.tiles.pages_per_block <= first_token + offset + 1
        all_seen &= end_token - first_token == tile_tokens
        if options.sliding_window is not None:
            all_seen &= base > end_token - 1 + offset - options.sliding_window

        def all_heads(masked):
            def one_head(head, _):
                slopes = None if per_row[0] is None else per_row[0][head]
                _attend(layout, options, masked, head, query, scales[0], q_ref, k, v, slot_scales, slopes, state)

            lax.fori_loop(0, num_kv_heads, one_head, None)

        # Most blocks of a long prompt lie before all of the tile's queries.
        pl.when(all_seen)(lambda: all_heads(False))
        pl.when(jnp.logical_not(all_seen))(lambda: all_heads(True))

    lax.fori_loop(0, stream.num_blocks(i), one_block, None)

    @pl.when(segments.tile[i + 1] != tile)
    def _():
        def one_head(head, _):
            sinks = None if per_row[1] is None else per_row[1][head]
            o, lse = softmax.finish(m_ref[head], l_ref[head], o_sum_ref[head], sinks, scales[1])
            o_ref[head] = o.astype(o_ref.dtype)
            lse_ref[0, head] = softmax.column_to_row(lse)

        lax.fori_loop(0, num_kv_heads, one_head, None)


def _attend(layout, options, masked, head, query, scale, q_ref, k, v, slot_scales, slopes, state):
    """One key head's queries [M, D] against one block, into the softmax state; query [M, 1] counts from the block's first slot."""
    m_ref, l_ref, o_sum_ref = state
    num_rows = q_ref.shape[1]
    # In parts, because the scores of all would not stay in registers; unrolled, so that one part's products overlap another's softmax.
    for first in range(0, num_rows, ROWS_AT_ONCE):
        rows = pl.ds(first, min(ROWS_AT_ONCE, num_rows - first))
        part = slice(first, first + ROWS_AT_ONCE)
        q = q_ref[head, rows]
        scores = layout.head_scores(q, k, head)
        if slot_scales:
            scores *= layout.head_slot_scales(slot_scales[0], head)
        key = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = softmax.modify_scores(scores, scale, key - query[part], None if slopes is None else slopes[part], options)
        mask = key <= query[part]
        if options.sliding_window is not None:
            mask &= key > query[part] - options.sliding_window
        if masked:
            scores = jnp.where(mask, scores, softmax.MASKED)
        m, l, p, keep = softmax.rescale(m_ref[head, rows], l_ref[head, rows], scores)  # noqa: E741
        m_ref[head, rows] = m
        l_ref[head, rows] = l
        if slot_scales:
            p = jnp.where(mask, p * layout.head_slot_scales(slot_scales[1], head), 0.0)  # a scale that is not in use may be NaN
        o_sum_ref[head, rows] = o_sum_ref[head, rows] * keep + layout.head_values(p.astype(q.dtype), v, head)
