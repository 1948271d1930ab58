"""Hopper decode kernel: partial attention of rows with one query, the work split evenly over a fixed number of thread blocks.

A thread block has one warpgroup that fetches pages and one or two that compute. The batch's work is a line of KV blocks, row by row and
within a row head by head; each thread block takes an equal piece of that line and walks it segment by segment, a segment being what lies of
one (row, head) in its piece. Blocks go to the compute warpgroups in turn, each through a ring of its own, so that the stream of fetches
never stops at a segment's end. Each compute warpgroup writes its normalised output and log-sum-exp of the segment; `gpu.combine` merges
them.

Sources: FlashDecoding (Dao et al., 2023); stream-K, arXiv:2301.03598; warp specialisation as in FlashAttention-3, arXiv:2407.08608.
"""

import dataclasses
import math
import types
from collections.abc import Container
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_tiles as tiles
from pallas_kernels.paged_attention.gpu_tiles import LOG2E, MASKED, ROWS
from pallas_kernels.paged_attention.options import Options

BARRIER_BYTES = 1024  # all barriers, rounded up as Mosaic GPU does


class Plan(NamedTuple):
    """Who computes what; see `gpu.plan_decode`."""

    row_blocks: Array  # int32 [R + 1] KV blocks of the rows before, for one head
    pieces: Array  # int32 [C, 3] of each thread block: first and last (exclusive) position on the line, row of the first


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one decode call."""

    group: int  # query heads to a KV head
    num_kv_heads: int
    head_dim: int
    page_size: int
    block: int  # tokens of a KV block
    warpgroups: int  # that compute; the one after them fetches
    stages: int  # ring slots of a compute warpgroup
    columns: int  # of the output that are staged at a time
    fixed_span: int | None  # blocks of a segment, cut by the row's own length; None cuts where a thread block's piece ends
    sliding_window: int | None
    soft_cap: float | None

    @property
    def padded_group(self) -> int:
        """Rows of a query tile that are fetched: whole tiles of eight."""
        return -(-self.group // 8) * 8


def partial_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    plan: Plan,
    scale: Array,
    optional: dict[str, Array],
    shape: Shape,
    num_slots: int,
    interpret,
) -> tuple[Array, Array]:
    """Attention of each segment of the plan.

    Args:
        q: [R, KVH, padded group, D]; rows of the padding may hold anything.
        k_pages, v_pages: [P, page_size, KVH, D].
        block_tables, seq_lens: int32 [R, MP], [R].
        scale: float32 [1], factor on q . k.
        optional: any of slopes, float32 [KVH, 64], and k_scale and v_scale, float32 [P, page_size, KVH], factors on what is stored.
        num_slots: slots of the result.
        interpret: None, or the interpreter's parameters.

    Returns (o float32 [num_slots, W, group, D], lse float32 [num_slots, W, 64] in base 2), one entry for each of the W compute
    warpgroups; lse is MASKED, and
    o anything, where the warpgroup had no block. Slots that no segment has are not written.
    """
    operands = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_tables": block_tables, "seq_lens": seq_lens}
    operands |= {"row_blocks": plan.row_blocks, "pieces": plan.pieces, "scale": scale, **optional}

    def body(*arrays, **scratch):
        refs = types.SimpleNamespace(slopes=None, k_scale=None, v_scale=None, **scratch)
        vars(refs).update(zip((*operands, "o", "lse"), arrays, strict=True))
        role = lax.axis_index("warpgroup")
        pl.when(role < shape.warpgroups)(lambda: _compute(refs, shape, role, interpret is not None))
        pl.when(role == shape.warpgroups)(lambda: _fetch(refs, shape))

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_slots, shape.warpgroups, shape.group, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_slots, shape.warpgroups, ROWS), jnp.float32),
        ],
        scratch_types=_scratch(shape, q.dtype, k_pages, optional),
        grid=(plan.pieces.shape[0],),
        grid_names=("piece",),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands.values())


def _scratch(shape: Shape, dtype, pages, optional: Container[str]) -> dict:
    """Shared memory and barriers; ring slots of compute warpgroup w are w * stages onward."""
    swizzle = tiles.swizzle_bytes((shape.head_dim, dtype), (shape.block, dtype))
    slots = shape.warpgroups * shape.stages
    scratch = tiles.ring(slots, 1, shape.block, shape.page_size, pages.shape, pages.dtype, dtype, swizzle, optional)
    if pages.dtype != dtype or "k_scale" in optional or "v_scale" in optional:
        scratch["cast"] = tiles.shared((shape.warpgroups, shape.block, shape.head_dim), dtype, swizzle)
    return scratch | {
        "q_tile": tiles.shared((2, ROWS, shape.head_dim), dtype, swizzle),
        "weights": tiles.shared((shape.warpgroups, ROWS, shape.block), dtype, swizzle),
        "o_tile": plgpu.SMEM((shape.warpgroups, ROWS, shape.columns), jnp.float32),
        "q_loaded": plgpu.Barrier(num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=2),
    }


def shared_memory_bytes(shape: Shape, dtype, page_dtype, options: Options) -> int:
    """Bytes that a thread block of this kernel takes, more than one of the prefill kernel does."""
    pages = jax.ShapeDtypeStruct((1, shape.page_size, shape.num_kv_heads, shape.head_dim), page_dtype)
    optional = ("k_scale", "v_scale") if options.slot_scales else ()
    scratch = _scratch(shape, jnp.dtype(dtype), pages, optional).values()
    buffers = [part for part in scratch if not isinstance(part, plgpu.Barrier)]
    return sum(math.prod(part.shape) * jnp.dtype(part.dtype).itemsize for part in buffers) + BARRIER_BYTES


class Segment(NamedTuple):
    """What lies of one (row, KV head) in a thread block's piece; int32 scalars."""

    row: Array
    head: Array
    length: Array  # tokens of the row
    first: Array  # token where the first block of this segment begins
    blocks: Array  # how many KV blocks; 0 for a row with nothing to do
    slot: Array  # of the result


def _walk(refs, shape: Shape, visit, carry):
    """Call ``visit(segment, carry) -> carry`` for each segment of this thread block's piece, in order."""
    piece = lax.axis_index("piece")
    end = refs.pieces[piece, 1]

    def step(state):
        position, row, carry = state
        before, after = refs.row_blocks[row], refs.row_blocks[row + 1]
        blocks = jnp.maximum(after - before, 1)  # of this row for one head; the 1 keeps the division legal
        into_row = position - before * shape.num_kv_heads
        head = lax.div(into_row, blocks)
        block = into_row - head * blocks
        length = refs.seq_lens[row]
        last = jnp.minimum(position + blocks - block, end)
        if shape.fixed_span is not None:
            last = jnp.minimum(last, position + shape.fixed_span - lax.rem(block, jnp.int32(shape.fixed_span)))
        last = jnp.where(after > before, last, position)
        first = first_token(length, shape) + block * shape.block
        count = jnp.minimum(last - position, pl.cdiv(length - first, jnp.int32(shape.block)))
        slot = row * shape.num_kv_heads + head + piece
        if shape.fixed_span is not None:
            slot = lax.div(position, jnp.int32(shape.fixed_span))
        carry = visit(Segment(row, head, length, first, jnp.where(after > before, count, 0), slot), carry)
        return last, jnp.where(last >= after * shape.num_kv_heads, row + 1, row), carry

    start = refs.pieces[piece, 0], refs.pieces[piece, 2], carry
    return lax.while_loop(lambda state: state[0] < end, step, start)[2]


def window_start(length: Array, shape: Shape) -> Array:
    """First position that a row's query sees."""
    if shape.sliding_window is None:
        return length - length  # not zeros_like: where the arguments are sharded over a mesh, Mosaic cannot lower that constant
    return jnp.maximum(length - shape.sliding_window, 0)


def first_token(length: Array, shape: Shape) -> Array:
    """Where the first block of a row begins: pages that the sliding window has left behind are not fetched."""
    unit = min(shape.page_size, shape.block)
    return lax.div(window_start(length, shape), jnp.int32(unit)) * unit


def _fetch(refs, shape: Shape) -> None:
    """The memory warpgroup: queries into their two buffers, blocks into the rings of the compute warpgroups in turn."""

    def pages_of(segment, block):
        return tiles.page_ids(refs.block_tables, segment.row, segment.first + block * shape.block, shape.block, shape.page_size)

    def visit(segment, carry):
        segments, done = carry

        @pl.when(segment.blocks > 0)
        def _():
            buffer = lax.rem(segments, jnp.int32(2))
            pl.when(segments >= 2)(lambda: plgpu.barrier_wait(refs.q_free.at[buffer]))
            queries = refs.q_tile.at[buffer, pl.ds(0, shape.padded_group)]
            plgpu.copy_gmem_to_smem(refs.q.at[segment.row, segment.head], queries, refs.q_loaded.at[buffer])

            def step(block, pages):
                # The next block's page numbers are on their way while this block's copies wait for room.
                following = pages_of(segment, block + 1)
                owner = lax.rem(block, jnp.int32(shape.warpgroups))
                before = sum(jnp.where(owner == w, done[w], 0) for w in range(shape.warpgroups))
                count = before + lax.div(block, jnp.int32(shape.warpgroups))
                slot = owner * shape.stages + lax.rem(count, jnp.int32(shape.stages))

                pl.when(count >= shape.stages)(lambda: tiles.wait_for_room(refs, slot))

                valid = window_start(segment.length, shape), segment.length
                tiles.fetch_block(refs, pages, segment.head, segment.first + block * shape.block, slot, valid)
                return following

            lax.fori_loop(0, segment.blocks, step, pages_of(segment, jnp.int32(0)))

        own = [done[w] + _share(segment.blocks, w, shape) for w in range(shape.warpgroups)]
        return segments + jnp.where(segment.blocks > 0, 1, 0), own

    segments, done = _walk(refs, shape, visit, (jnp.int32(0), [jnp.int32(0)] * shape.warpgroups))

    # Every completion of a barrier must be seen by who waits on it, the last ones too.
    for warpgroup in range(shape.warpgroups):
        for back in range(shape.stages):

            @pl.when(done[warpgroup] > back)
            def _(warpgroup=warpgroup, back=back):
                slot = warpgroup * shape.stages + lax.rem(done[warpgroup] - 1 - back, jnp.int32(shape.stages))
                tiles.wait_for_room(refs, slot)

    for back in range(2):
        pl.when(segments > back)(lambda back=back: plgpu.barrier_wait(refs.q_free.at[lax.rem(segments - 1 - back, jnp.int32(2))]))


def _share(blocks: Array, warpgroup, shape: Shape) -> Array:
    """How many of a segment's blocks go to a compute warpgroup."""
    return lax.div(blocks + (shape.warpgroups - 1 - warpgroup), jnp.int32(shape.warpgroups))


def _compute(refs, shape: Shape, warpgroup, interpret: bool) -> None:
    """A compute warpgroup: its blocks of each segment, then the segment's output and log-sum-exp."""
    scale = refs.scale[0]

    def visit(segment, carry):
        segments, done = carry
        own = _share(segment.blocks, warpgroup, shape)

        @pl.when(segment.blocks > 0)
        def _():
            buffer = lax.rem(segments, jnp.int32(2))
            plgpu.barrier_wait(refs.q_loaded.at[buffer])
            slopes = None if refs.slopes is None else refs.slopes[segment.head]
            m, l, o = jnp.full((ROWS,), MASKED), jnp.zeros((ROWS,)), jnp.zeros((ROWS, shape.head_dim))  # noqa: E741

            def step(i, state):
                slot = warpgroup * shape.stages + lax.rem(done + i, jnp.int32(shape.stages))
                token = segment.first + (i * shape.warpgroups + warpgroup) * shape.block

                def score(products):
                    position = token + lax.broadcasted_iota(jnp.int32, products.shape, 1)
                    scores = tiles.modify_scores(products, scale, shape.soft_cap, slopes, position - (segment.length - 1))
                    mask = position < segment.length
                    if shape.sliding_window is not None:
                        mask &= position >= window_start(segment.length, shape)
                    return jnp.where(mask, scores, MASKED)

                return tiles.attend_block(refs, refs.q_tile.at[buffer], segment.head, warpgroup, slot, score, state, interpret)

            m, l, o = lax.fori_loop(0, own, step, (m, l, o))  # noqa: E741
            plgpu.barrier_arrive(refs.q_free.at[buffer])
            _store(refs, shape, segment.slot, warpgroup, m, l, o)

        return segments + jnp.where(segment.blocks > 0, 1, 0), done + own

    _walk(refs, shape, visit, (jnp.int32(0), jnp.int32(0)))


def _store(refs, shape: Shape, slot, warpgroup, m, l, o) -> None:  # noqa: E741
    """Write a segment's output, normalised, and its log-sum-exp."""
    found = l > 0
    l = jnp.where(found, l, 1.0)  # noqa: E741
    refs.lse[slot, warpgroup] = jnp.where(found, m + jnp.log(l) * LOG2E, MASKED)
    o = o / tiles.rows_of(l, o.shape)
    staged = refs.o_tile.at[warpgroup]
    for column in range(0, shape.head_dim, shape.columns):
        staged[...] = o[:, column : column + shape.columns]
        plgpu.commit_smem()
        target = refs.o.at[slot, warpgroup, :, pl.ds(column, shape.columns)]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, shape.group)], target)
        plgpu.wait_smem_to_gmem(0)
