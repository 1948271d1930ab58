"""Prefill part of the XLA backend: tiles of queries of one row, each over its own causal range of keys."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention import online
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.xla_decode import chunk_pages, gather_pages, pad_tables, with_scales

TILE_QUERIES = 64
CHUNK_TOKENS = 64


def prefill_rows(
    q: Array,
    pages: tuple[Array, Array],
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    decode_o: Array,
    decode_lse: Array,
) -> tuple[Array, Array]:
    """Attention of rows distribution[0] .. distribution[1] - 1, written over the decode part's results.

    decode_o [R, H, D] and decode_lse [R, H] hold the first R tokens; returns (o [max(R, T), H, D], lse).
    """
    num_tokens = q.shape[0]
    num_rows = block_tables.shape[0]
    tile = min(TILE_QUERIES, num_tokens)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    is_prefill = (rows >= distribution[0]) & (rows < distribution[1])
    num_queries = jnp.where(is_prefill, query_start_loc[1:] - query_start_loc[:-1], 0)
    last_tile = jnp.cumsum((num_queries + tile - 1) // tile)
    tables = pad_tables(block_tables, chunk_pages(pages[0], CHUNK_TOKENS))
    o = jnp.pad(decode_o, ((0, max(num_tokens - num_rows, 0)), (0, 0), (0, 0)))
    lse = jnp.pad(decode_lse, ((0, max(num_tokens - num_rows, 0)), (0, 0)), constant_values=-jnp.inf)

    def one_tile(i, results):
        row = jnp.sum(last_tile <= i)
        first_token = query_start_loc[row] + (i - (last_tile[row] - (num_queries[row] + tile - 1) // tile)) * tile
        # The last tile is shifted back to end with the tokens; only queries of this tile see anything, and only they are written.
        start = jnp.minimum(first_token, num_tokens - tile)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        own = (token >= first_token) & (token < query_start_loc[row + 1])
        position = jnp.where(own, seq_lens[row] - query_start_loc[row + 1] + token, -1)
        new = _attend_tile(lax.dynamic_slice_in_dim(q, start, tile), tables[row], position, pages, options)
        return tuple(_write(x, y, own, start) for x, y in zip(results, new, strict=True))

    return lax.fori_loop(0, last_tile[-1], one_tile, (o, lse))


def _write(results: Array, new: Array, own: Array, start: Array) -> Array:
    """results with new [Q, H, ...] at ``start``, where ``own`` [Q]."""
    old = lax.dynamic_slice_in_dim(results, start, new.shape[0])
    new = jnp.where(own.reshape(-1, *[1] * (new.ndim - 1)), new.astype(results.dtype), old)
    return lax.dynamic_update_slice_in_dim(results, new, start, 0)


def _attend_tile(q: Array, table: Array, position: Array, pages: tuple[Array, Array], options: Options) -> tuple[Array, Array]:
    """Queries [Q, H, D] of one row at ``position`` [Q] (-1: none) -> (o float32 [Q, H, D], lse [Q, H])."""
    tile, num_heads, head_dim = q.shape
    page_size, num_kv_heads = pages[0].shape[1:3]
    pools = with_scales(pages, options)
    group = num_heads // num_kv_heads
    num_pages = chunk_pages(pages[0], CHUNK_TOKENS)
    chunk = num_pages * page_size
    q = q.reshape(tile, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3).reshape(num_kv_heads, tile * group, head_dim)
    query_position = jnp.repeat(position, group)[:, None]
    end = jnp.max(position) + 1
    first_seen = jnp.zeros_like(end)
    if options.sliding_window is not None:
        first_seen = jnp.maximum(jnp.min(jnp.where(position >= 0, position, end)) - options.sliding_window + 1, 0)
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = jnp.broadcast_to(slopes.reshape(num_kv_heads, 1, group), (num_kv_heads, tile, group)).reshape(num_kv_heads, -1, 1)

    def body(i, state):
        page_ids = lax.dynamic_slice(table, (i * num_pages,), (num_pages,))
        key_position = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        k, v = (gather_pages(x, page_ids, q.dtype).reshape(chunk, num_kv_heads, head_dim).transpose(1, 0, 2) for x in pools)
        # Slots outside the tile's range may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(((key_position < end) & (key_position >= first_seen))[None, :, None], v, 0)
        distance = key_position[None, :] - query_position
        mask = distance <= 0
        if options.sliding_window is not None:
            mask &= distance > -options.sliding_window
        scores = jnp.einsum("kmd,kcd->kmc", q, k, preferred_element_type=jnp.float32)
        scores = online.modify_scores(scores, distance, slopes, options)
        return online.update(state, scores, mask, v)

    empty = online.start(num_kv_heads, tile * group, head_dim)
    m, l, o = lax.fori_loop(first_seen // chunk, (end + chunk - 1) // chunk, body, empty)  # noqa: E741
    m, l, o = (x.reshape(num_kv_heads, tile, group, *x.shape[2:]).swapaxes(0, 1) for x in (m, l, o))  # noqa: E741
    m, l, o = m.reshape(tile, -1), l.reshape(tile, -1), o.reshape(tile, num_heads, head_dim)  # noqa: E741
    return online.finish(m, l, o, options.sinks, None if options.slot_scales else options.v_scale)
