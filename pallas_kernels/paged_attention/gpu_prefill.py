"""Hopper prefill kernel: causal attention of rows with many queries, a thread block for each tile of queries and KV head.

A thread block has one warpgroup that fetches pages and one or two that compute. A compute warpgroup owns 64 rows, each one query of one
head of the KV head's group, so that all heads of a group share what is fetched. Blocks end at the tile's last position and begin where its
first query's window does. The mask is computed only where a block is not seen whole.

Sources: FlashAttention-3, arXiv:2407.08608 (warp specialisation); packing of query heads and ragged tiles as in arXiv:2511.11581.
"""

import dataclasses
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_tiles as tiles
from pallas_kernels.paged_attention.gpu_tiles import LOG2E, MASKED, ROWS


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one prefill call."""

    group: int  # query heads to a KV head
    num_kv_heads: int
    head_dim: int
    page_size: int
    block: int  # tokens of a KV block
    warpgroups: int  # that compute; the one after them fetches
    stages: int  # ring slots
    sliding_window: int | None
    soft_cap: float | None

    @property
    def queries(self) -> int:
        """Queries of a compute warpgroup."""
        return ROWS // self.group

    @property
    def tile_queries(self) -> int:
        """Queries of a thread block."""
        return self.queries * self.warpgroups


class Work(NamedTuple):
    """What a thread block does; int32 scalars, the first three being a row of `attend_tiles`'s argument ``work``."""

    row: Array
    position: Array  # of the tile's first query
    queries: Array  # valid ones; 0 for a tile that is not used
    first: Array  # token where the first block begins
    end: Array  # token after the last that any query sees
    blocks: Array


def attend_tiles(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    work: Array,
    scales: Array,
    query_of_row: Array,
    optional: dict[str, Array],
    shape: Shape,
    interpret,
) -> tuple[Array, Array]:
    """Attention of tiles of queries.

    Args:
        q: [N, W, KVH, 64, D], the tiles' rows by compute warpgroup: query i, head g of the group is row i * group + g.
        k_pages, v_pages: [P, page_size, KVH, D].
        block_tables: int32 [R, MP].
        work: int32 [N, 3] of each tile: row of the block table, position of the first query, number of queries.
        scales: float32 [2], factors on q . k and on the result.
        query_of_row: int32 [64], row // group.
        optional: any of slopes and sinks, float32 [KVH, 64] by row, and k_scale and v_scale, float32 [P, page_size, KVH].
        interpret: None, or the interpreter's parameters.

    Returns (o as q, lse float32 [N, W, KVH, 64], natural log). Tiles with no queries are not written; rows with no query hold anything.
    """
    operands = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_tables": block_tables, "work": work, "scales": scales}
    operands |= {"query_of_row": query_of_row, **optional}

    def body(*arrays, **scratch):
        refs = types.SimpleNamespace(slopes=None, sinks=None, k_scale=None, v_scale=None, **scratch)
        vars(refs).update(zip((*operands, "o", "lse"), arrays, strict=True))
        role, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
        todo = _work(refs, shape, tile)
        pl.when((todo.queries > 0) & (role < shape.warpgroups))(lambda: _compute(refs, shape, todo, tile, role, interpret is not None))
        pl.when((todo.queries > 0) & (role == shape.warpgroups))(lambda: _fetch(refs, shape, todo))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)],
        scratch_types=_scratch(shape, q.dtype, k_pages, optional),
        grid=(shape.num_kv_heads, q.shape[0]),
        grid_names=("kv_head", "tile"),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands.values())


def _scratch(shape: Shape, dtype, pages, optional) -> dict:
    swizzle = tiles.swizzle_bytes((shape.head_dim, dtype), (shape.block, dtype))
    ring = tiles.ring(shape.stages, shape.warpgroups, shape.block, shape.page_size, pages.shape, pages.dtype, dtype, swizzle, optional)
    if pages.dtype != dtype or "k_scale" in optional or "v_scale" in optional:
        ring["cast"] = tiles.shared((shape.warpgroups, shape.block, shape.head_dim), dtype, swizzle)
    return ring | {
        "q_tile": tiles.shared((shape.warpgroups, ROWS, shape.head_dim), dtype, swizzle),
        "weights": tiles.shared((shape.warpgroups, ROWS, shape.block), dtype, swizzle),
        "q_loaded": plgpu.Barrier(num_barriers=shape.warpgroups),
    }


def _work(refs, shape: Shape, tile) -> Work:
    row, position, queries = (refs.work[tile, i] for i in range(3))
    unit = jnp.int32(min(shape.page_size, shape.block))
    seen = jnp.int32(0) if shape.sliding_window is None else jnp.maximum(position - (shape.sliding_window - 1), 0)
    first, end = lax.div(seen, unit) * unit, position + queries
    return Work(row, position, queries, first, end, pl.cdiv(end - first, jnp.int32(shape.block)))


def _fetch(refs, shape: Shape, work: Work) -> None:
    """The memory warpgroup: the tile's blocks, one after the other, into the ring."""
    head = lax.axis_index("kv_head")
    seen = jnp.int32(0) if shape.sliding_window is None else jnp.maximum(work.position - (shape.sliding_window - 1), 0)

    def pages_of(block):
        return tiles.page_ids(refs.block_tables, work.row, work.first + block * shape.block, shape.block, shape.page_size)

    def step(block, pages):
        following = pages_of(block + 1)
        slot = lax.rem(block, jnp.int32(shape.stages))

        pl.when(block >= shape.stages)(lambda: tiles.wait_for_room(refs, slot))

        tiles.fetch_block(refs, pages, head, work.first + block * shape.block, slot, (seen, work.end))
        return following

    lax.fori_loop(0, work.blocks, step, pages_of(jnp.int32(0)))

    # Every completion of a barrier must be seen by who waits on it, the last ones too.
    for back in range(shape.stages):

        @pl.when(work.blocks > back)
        def _(back=back):
            slot = lax.rem(work.blocks - 1 - back, jnp.int32(shape.stages))
            tiles.wait_for_room(refs, slot)


def _compute(refs, shape: Shape, work: Work, tile, warpgroup, interpret: bool) -> None:
    """A compute warpgroup: its 64 rows over all blocks that they see, then their output and log-sum-exp."""
    head = lax.axis_index("kv_head")
    q = refs.q_tile.at[warpgroup]
    plgpu.copy_gmem_to_smem(refs.q.at[tile, warpgroup, head], q, refs.q_loaded.at[warpgroup])
    plgpu.barrier_wait(refs.q_loaded.at[warpgroup])
    scale = refs.scales[0]
    slopes = None if refs.slopes is None else refs.slopes[head]
    begin = work.position + warpgroup * shape.queries  # position of this warpgroup's first query
    row_position = begin + refs.query_of_row[...]
    last = jnp.minimum(begin + shape.queries, work.end)
    block = jnp.int32(shape.block)
    seen = jnp.where(begin < work.end, pl.cdiv(last - work.first, block), 0)
    whole = jnp.int32(0) if shape.sliding_window is not None else jnp.minimum(lax.div(begin + 1, block), seen)

    def step(i, state, masked):
        token = work.first + i * shape.block

        def score(products):
            key = token + lax.broadcasted_iota(jnp.int32, products.shape, 1)
            distance = key - tiles.rows_of(row_position, products.shape)
            scores = tiles.modify_scores(products, scale, shape.soft_cap, slopes, distance)
            if not masked:
                return scores
            mask = (distance <= 0) & (key < work.end)
            if shape.sliding_window is not None:
                mask &= distance > -shape.sliding_window
            return jnp.where(mask, scores, MASKED)

        slot = lax.rem(i, jnp.int32(shape.stages))
        return tiles.attend_block(refs, q, head, warpgroup, slot, score, state, interpret)

    state = jnp.full((ROWS,), MASKED), jnp.zeros((ROWS,)), jnp.zeros((ROWS, shape.head_dim))
    if shape.sliding_window is None:
        state = lax.fori_loop(0, whole, lambda i, state: step(i, state, masked=False), state)
    state = lax.fori_loop(whole, seen, lambda i, state: step(i, state, masked=True), state)
    lax.fori_loop(seen, work.blocks, lambda i, _: _pass_over(refs, shape, i), None)
    _store(refs, tile, head, warpgroup, *state)


def _pass_over(refs, shape: Shape, i) -> None:
    """Give back a block that only the other warpgroup needs."""
    slot = lax.rem(i, jnp.int32(shape.stages))
    for name in ("k", "v"):
        plgpu.barrier_wait(getattr(refs, f"{name}_loaded").at[slot])
        plgpu.barrier_arrive(getattr(refs, f"{name}_free").at[slot])


def _store(refs, tile, head, warpgroup, m, l, o) -> None:  # noqa: E741
    """Write the rows' output and log-sum-exp."""
    factor = jnp.full((ROWS,), refs.scales[1])
    if refs.sinks is not None:
        sinks = refs.sinks[head] * LOG2E
        top = jnp.maximum(m, sinks)
        keep = jnp.exp2(m - top)
        m, l, factor = top, l * keep + jnp.exp2(sinks - top), factor * keep  # noqa: E741
    l = jnp.where(l > 0, l, 1.0)  # noqa: E741 - rows with no query
    refs.lse[tile, warpgroup, head] = m / LOG2E + jnp.log(l)
    rows = refs.q_tile.at[warpgroup]
    rows[...] = (o * tiles.rows_of(factor / l, o.shape)).astype(rows.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows, refs.o.at[tile, warpgroup, head])
    plgpu.wait_smem_to_gmem(0)
