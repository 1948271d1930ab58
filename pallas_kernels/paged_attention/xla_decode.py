"""Decode part of the XLA backend: one query a row, rows in blocks of like length."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention import online
from pallas_kernels.paged_attention.options import Options

ROWS_PER_BLOCK = 16
CHUNK_TOKENS = 128
FEW_ROWS = 32  # up to here a block's rows differ much in length, and half a chunk wastes less on the short ones


def decode_rows(q: Array, pages: tuple[Array, Array], block_tables: Array, seq_lens: Array, options: Options) -> tuple[Array, Array]:
    """Attention of one query a row: q [R, H, D], seq_lens [R] (0: no query) -> (o float32 [R, H, D], lse float32 [R, H]).

    Rows are sorted by length and taken in blocks, each with its own number of chunks, so short rows do not pay for long ones and
    rows of length 0 cost nothing. The order depends on the metadata alone, so XLA computes it once for all layers.
    """
    num_rows = q.shape[0]
    block_rows = min(ROWS_PER_BLOCK, num_rows)
    order = jnp.argsort(-seq_lens)
    pad = -num_rows % block_rows
    num_pages = chunk_pages(pages[0], CHUNK_TOKENS if num_rows > FEW_ROWS else CHUNK_TOKENS // 2)
    tables = pad_tables(block_tables, num_pages)[order]
    lens = jnp.pad(seq_lens[order], (0, pad))
    tables, q_sorted = (jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)) for x in (tables, q[order]))

    def block(i, results):
        first = i * block_rows
        q_block, tables_block, lens_block = (lax.dynamic_slice_in_dim(x, first, block_rows) for x in (q_sorted, tables, lens))
        new = _attend_block(q_block, tables_block, lens_block, pages, num_pages, options)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, first, 0) for x, y in zip(results, new, strict=True))

    # Rows of length 0 lie behind the last block.
    empty = jnp.zeros(q_sorted.shape, jnp.float32), jnp.full(q_sorted.shape[:2], -jnp.inf, jnp.float32)
    num_blocks = (jnp.sum(seq_lens > 0) + block_rows - 1) // block_rows
    o, lse = lax.fori_loop(0, num_blocks, block, empty)
    back = jnp.argsort(order)
    return o[back], lse[back]


def _attend_block(
    q: Array, tables: Array, lens: Array, pages: tuple[Array, Array], num_pages: int, options: Options
) -> tuple[Array, Array]:
    """Rows of one block, longest first, ``num_pages`` at a time.

    q [B, H, D], tables [B, MP] with MP a multiple of num_pages, lens [B] -> (o float32 [B, H, D], lse [B, H]).
    """
    pools = with_scales(pages, options)
    q = widen_queries(q, pages[0])
    num_rows, num_heads, width = q.shape
    chunk = num_pages * pages[0].shape[1]
    position = lens[:, None] - 1
    first_seen = jnp.zeros_like(position) if options.sliding_window is None else jnp.maximum(position - options.sliding_window + 1, 0)
    slopes = None if options.alibi_slopes is None else options.alibi_slopes[None, :, None]

    def body(i, state):
        page_ids = lax.dynamic_slice(tables, (0, i * num_pages), (num_rows, num_pages))
        key_position = i * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]
        mask = (key_position <= position) & (key_position >= first_seen)
        k, v = (gather_pages(x, page_ids, q.dtype).reshape(num_rows, chunk, width) for x in pools)
        # Slots outside the mask may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(mask[:, :, None], v, 0)
        scores = jnp.einsum("bhw,bcw->bhc", q, k, preferred_element_type=jnp.float32)
        scores = online.modify_scores(scores, (key_position - position)[:, None, :], slopes, options)
        return online.update(state, scores, mask[:, None, :], v)

    first_chunk = jnp.min(jnp.where(lens[:, None] > 0, first_seen, lens[0])) // chunk
    empty = online.start(num_rows, num_heads, width)
    m, l, o = lax.fori_loop(first_chunk, (lens[0] + chunk - 1) // chunk, body, empty)  # noqa: E741
    return online.finish(m, l, narrow_outputs(o, pages[0]), options.sinks, None if options.slot_scales else options.v_scale)


def widen_queries(q: Array, k_pages: Array) -> Array:
    """q [R, H, D] -> [R, H, KVH * D] with zeros outside each head's own key head.

    One matrix product a row over whole tokens then serves every head: the pool is read in its own layout, with no transposition, for
    KVH times the arithmetic, which is cheaper while KVH is small.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    q = q.reshape(num_rows, num_kv_heads, -1, 1, head_dim)
    own = jnp.eye(num_kv_heads, dtype=bool)[None, :, None, :, None]
    return jnp.where(own, q, 0).reshape(num_rows, num_heads, num_kv_heads * head_dim)


def narrow_outputs(o: Array, k_pages: Array) -> Array:
    """[R, H, KVH * D] -> [R, H, D]: keep each head's own value head."""
    num_rows, num_heads, _ = o.shape
    num_kv_heads, head_dim = k_pages.shape[2:]
    o = o.reshape(num_rows, num_kv_heads, -1, num_kv_heads, head_dim)
    own = jnp.eye(num_kv_heads, dtype=bool)[None, :, None, :, None]
    return jnp.where(own, o, 0).sum(3).reshape(num_rows, num_heads, head_dim)


def chunk_pages(k_pages: Array, chunk_tokens: int) -> int:
    """Pages in one chunk of keys."""
    return max(1, chunk_tokens // k_pages.shape[1])


def pad_tables(block_tables: Array, multiple: int) -> Array:
    """Widen the tables so that a chunk never reaches past them (a dynamic slice would shift back, not stop)."""
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % multiple)))


def with_scales(pages: tuple[Array, Array], options: Options) -> list[tuple[Array, ...]]:
    """(k_pages,) and (v_pages,), each with its scales [P, page_size, KVH] where each slot and head has one."""
    return [(x, scale) if options.slot_scales else (x,) for x, scale in zip(pages, (options.k_scale, options.v_scale), strict=True)]


def gather_pages(pool: tuple[Array, ...], page_ids: Array, dtype) -> Array:
    """pages[page_ids], times their slots' scales, as whole contiguous pages, flat: [*page_ids.shape, page_size * KVH * D]."""
    pages, *scales = (x.reshape(x.shape[0], -1).at[page_ids].get(mode="promise_in_bounds") for x in pool)
    for scale in scales:
        scaled = pages.astype(jnp.float32).reshape(*scale.shape, -1) * scale[..., None]
        pages = scaled.reshape(*page_ids.shape, -1)
    return pages.astype(dtype)
