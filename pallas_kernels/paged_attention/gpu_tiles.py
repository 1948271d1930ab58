"""What the Hopper kernels share: shared-memory layouts, the matrix product, scores and the online softmax of one tile.

Mosaic GPU's interpreter does not look for races in what wgmma reads and has no accumulator with a start value; `matmul` is the one place
where an interpreted kernel differs from a compiled one.
"""

import math

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
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)))


def matmul(start: Array | None, a, b, *, transpose_b: bool, interpret: bool) -> Array:
    """start + a @ b (b transposed if asked) in float32; a [64, K] and b are references to shared memory."""
    if interpret:
        dimensions = (((1,), (1 if transpose_b else 0,)), ((), ()))
        product = lax.dot_general(a[...], b[...], dimensions, preferred_element_type=jnp.float32)
        # These were ordinary reads; wgmma's own need no fence before the next TMA write into the same place.
        plgpu.commit_smem()
        return product if start is None else start + product
    b = b.transpose((1, 0)) if transpose_b else b
    if start is not None:
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(start))

    def from_zero(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(from_zero, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def rows_of(column: Array, shape: tuple[int, int]) -> Array:
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


def zero_rows_outside(v, first: Array, end: Array) -> None:
    """Write 0 over rows of the block v [N, D] before ``first`` and from ``end`` on: they may hold NaN, and 0 * NaN is NaN."""
    width = part_width(v.shape[1])
    for column in range(0, v.shape[1], width):
        part = v.at[:, pl.ds(column, width)]
        value = part[...]
        row = lax.broadcasted_iota(jnp.int32, value.shape, 0)
        part[...] = jnp.where((row >= first) & (row < end), value, jnp.zeros_like(value))
    plgpu.commit_smem()
