"""What the Hopper kernels share: shared-memory layouts, the matrix product, scores and the online softmax of one tile.

Mosaic GPU's interpreter does not look for races in what wgmma reads and has no accumulator with a start value; `matmul` is the one place
where an interpreted kernel differs from a compiled one.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # rows of a tile: one warpgroup's wgmma
LOG2E = math.log2(math.e)
# Finite, so that a row with nothing to attend to yet stays free of inf - inf.
MASKED = -1e30


def swizzle_bytes(*columns_and_dtypes: tuple[int, jnp.dtype]) -> int:
    """The widest swizzle that suits arrays of these row lengths; wgmma wants one swizzle for both operands."""
    return min(plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8) for columns, dtype in columns_and_dtypes)


def shared(shape: tuple[int, ...], dtype, swizzle: int):
    """A shared-memory buffer in the tiled, swizzled layout that TMA writes and wgmma reads."""
    tile = 8, swizzle // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def matmul(start: Array | None, a, b, *, transpose_b: bool, interpret: bool) -> Any:
    """start + a @ b (b transposed if asked) in float32; a [64, K] and b are references to shared memory."""
    if interpret:
        dimensions = (((1,), (1 if transpose_b else 0,)), ((), ()))
        product = lax.dot_general(a[...], b[...], dimensions, preferred_element_type=jnp.float32)
        # These were ordinary reads; wgmma's own need no fence before the next TMA write into the same place.
        plgpu.commit_smem()
        return product if start is None else start + product
    b = b.transpose((1, 0)) if transpose_b else b
    if start is not None:
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.WGMMAAccumulatorRef.init(start))

    def from_zero(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(from_zero, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def rows_of(column: Array, shape: tuple[int, ...]) -> Array:
    """Repeat [M] along the columns of ``shape`` [M, N]."""
    return lax.broadcast_in_dim(column, shape, [0])


def part_width(columns: int) -> int:
    """Columns that pass through the registers at a time when a block is copied within shared memory."""
    return 64 if columns % 64 == 0 else columns


def column(table, index: Array) -> Array:
    """Column ``index`` of a float32 table [64, N] in shared memory, N = 1 or a multiple of 8: Mosaic GPU has no strided load."""
    value = plgpu.load(table, layout=plgpu.Layout.WGMMA)
    chosen = lax.broadcasted_iota(jnp.int32, value.shape, 1) == index
    return jnp.where(chosen, value, 0.0).sum(axis=1)


def cast(source, factor: Array | None, target) -> None:
    """Write the block ``source`` [64, D] of stored numbers, times ``factor`` [64] if given, into ``target``; both in shared memory."""
    width = part_width(source.shape[1])
    for column in range(0, source.shape[1], width):
        part = pl.ds(column, width)
        value = source[:, part]
        if factor is not None or jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(jnp.float32)  # no direct conversion from float8 to bfloat16
        if factor is not None:
            value *= rows_of(factor, value.shape)
        target[:, part] = value.astype(target.dtype)
    plgpu.commit_smem()


def modify_scores(products: Array, scale: Array, soft_cap: float | None, slopes: Array | None, distance: Array) -> Array:
    """q . k [M, N] -> scores in base 2; ``slopes`` [M] times ``distance`` [M, N] (key minus query position) is added."""
    scores = products * (scale * LOG2E)
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)); the hardware's own tanh is off by 5e-4, too much once the cap multiplies it.
        scores = soft_cap * LOG2E - (2 * soft_cap * LOG2E) / (1 + jnp.exp2(scores * (2 / soft_cap)))
    if slopes is not None:
        scores += rows_of(slopes * LOG2E, scores.shape) * distance.astype(jnp.float32)
    return scores


def softmax_step(m: Array, l: Array, scores: Array) -> tuple[Array, Array, Array, Array]:  # noqa: E741
    """Largest score [M], sum [M] and base-2 scores [M, N] of a new block -> (m, l, weights [M, N], rescaling of the past [M])."""
    new_m = jnp.maximum(m, scores.max(axis=1))
    weights = jnp.exp2(scores - rows_of(new_m, scores.shape))
    keep = jnp.exp2(m - new_m)
    return new_m, l * keep + weights.sum(axis=1), weights, keep


def zero_rows_outside(block, first: Array, end: Array) -> None:
    """Write 0 over the rows of ``block`` [N, D] before ``first`` and from ``end`` on: they may hold NaN, and 0 * NaN is NaN."""
    if jnp.issubdtype(block.dtype, jnp.integer):
        return
    width = part_width(block.shape[1])
    for column in range(0, block.shape[1], width):
        part = block.at[:, pl.ds(column, width)]
        value = part[...]
        row = lax.broadcasted_iota(jnp.int32, value.shape, 0)
        value = value.astype(jnp.float32)  # 8-bit numbers cannot be selected
        part[...] = jnp.where((row >= first) & (row < end), value, 0.0).astype(block.dtype)


def page_ids(table, row, token, block: int, page_size: int) -> list[Array]:
    """Pages that hold positions ``token`` .. token + block - 1 of a row; past the table's end, its last entry."""
    last = table.shape[1] - 1
    starts = range(0, block, min(page_size, block))
    return [table[row, jnp.minimum(lax.div(token + start, jnp.int32(page_size)), last)] for start in starts]


def wait_for_room(refs, slot) -> None:
    """Wait until the ring slot's keys and values have been read by all that need them."""
    plgpu.barrier_wait(refs.k_free.at[slot])
    plgpu.barrier_wait(refs.v_free.at[slot])


def fetch_block(refs, pages: list[Array], head, token, slot, valid: tuple[Array, Array]) -> None:
    """Start the copies of one block of keys and values, positions ``token`` on, into ring slot ``slot``.

    Positions outside ``valid`` (first, end) may hold NaN: a block that has such positions is waited for, and their values are zeroed before
    the slot is reported as loaded.
    """
    page_size, block = refs.k_pages.shape[1], refs.k_ring.shape[1]
    rows = min(page_size, block)
    offset = lax.rem(token, jnp.int32(page_size)) if rows < page_size else 0

    def start(name, barrier):
        pool, ring, scale = (getattr(refs, name + part) for part in ("_pages", "_ring", "_scale"))
        for i, page in enumerate(pages):
            place = slot, pl.ds(i * rows, rows)
            plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(offset, rows), head], ring.at[place], barrier)
            if scale is not None:
                # All heads' scales: one head's are too far apart for a TMA copy.
                plgpu.copy_gmem_to_smem(scale.at[page, pl.ds(offset, rows)], getattr(refs, f"{name}_scale_ring").at[place], barrier)

    start("k", refs.k_loaded.at[slot])
    loaded = refs.v_loaded.at[slot]
    partial = (token < valid[0]) | (token + block > valid[1])
    pl.when(~partial)(lambda: start("v", loaded))

    @pl.when(partial)
    def _():
        start("v", refs.v_partial)
        plgpu.barrier_wait(refs.v_partial)
        zero_rows_outside(refs.v_ring.at[slot], valid[0] - token, valid[1] - token)
        if refs.v_scale is not None:
            zero_rows_outside(refs.v_scale_ring.at[slot], valid[0] - token, valid[1] - token)
        plgpu.commit_smem()
        for _ in range(len(pages) * (1 if refs.v_scale is None else 2)):
            plgpu.barrier_arrive(loaded)


def ring(slots: int, free_arrivals: int, block: int, page_size: int, pages_shape, page_dtype, dtype, swizzle: int, optional) -> dict:
    """Shared memory and barriers of a ring of KV blocks."""
    num_kv_heads, head_dim = pages_shape[2:]
    if page_dtype != dtype:
        swizzle = swizzle_bytes((part_width(head_dim), page_dtype))
    scratch = {}
    for name in ("k", "v"):
        arrivals = max(block // page_size, 1)
        if f"{name}_scale" in optional:
            arrivals *= 2
            scratch[f"{name}_scale_ring"] = plgpu.SMEM((slots, block, num_kv_heads), jnp.float32)
        scratch[f"{name}_ring"] = shared((slots, block, head_dim), page_dtype, swizzle)
        scratch[f"{name}_loaded"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
        scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=free_arrivals, num_barriers=slots)
    return scratch | {"v_partial": plgpu.Barrier(num_arrivals=arrivals)}


def operand(refs, name: str, head, warpgroup, slot):
    """A loaded block as wgmma can take it: itself, or its 16-bit copy, multiplied by the slots' scales."""
    block = getattr(refs, f"{name}_ring").at[slot]
    if not hasattr(refs, "cast"):
        return block
    scale = None if getattr(refs, f"{name}_scale") is None else column(getattr(refs, f"{name}_scale_ring").at[slot], head)
    cast(block, scale, refs.cast.at[warpgroup])
    return refs.cast.at[warpgroup]


def attend_block(refs, q, head, warpgroup, slot, score, state, interpret: bool):
    """One loaded KV block into the softmax state (m [64], l [64], o [64, D]); ``score`` maps q . k [64, N] to base-2 scores."""
    m, l, o = state  # noqa: E741
    plgpu.barrier_wait(refs.k_loaded.at[slot])
    products = matmul(None, q, operand(refs, "k", head, warpgroup, slot), transpose_b=True, interpret=interpret)
    plgpu.barrier_arrive(refs.k_free.at[slot])
    m, l, weights, keep = softmax_step(m, l, score(products))  # noqa: E741
    mine = refs.weights.at[warpgroup]
    mine[...] = weights.astype(mine.dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(refs.v_loaded.at[slot])
    v = operand(refs, "v", head, warpgroup, slot)
    o = matmul(o * rows_of(keep, o.shape), mine, v, transpose_b=False, interpret=interpret)
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return m, l, o
