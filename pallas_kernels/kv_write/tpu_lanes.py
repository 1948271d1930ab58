"""kv_write into lane-major pages: tokens lie along the lanes, so a tile of 128 slots is read, changed and written back.

Tokens are sorted by slot; those of one tile are neighbours then and change it together, in VMEM. Tiles are distinct within a step of the
grid, so that several can be on their way at once; between steps everything is written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
STEP_TOKENS = 512  # of one step of the grid, at most
BUFFER_BYTES = 4 << 20  # for tiles, and as much for new tokens


class Plan(NamedTuple):
    """Which tiles to change, in which order; as scalars in SMEM. Tokens are in order of slot, skipped ones left out."""

    slot: Array  # i32 [T]
    run: Array  # i32 [T] tokens from here on with consecutive slots of one tile, inside one 128-token block
    first_token: Array  # i32 [T + 1] of each tile visit
    first_visit: Array  # i32 [steps + 1] of each step of the grid


def make_plan(slots: Array, step_tokens: int) -> tuple[Array, Plan]:
    """slots int32 [T], T a multiple of 128 -> (the order of the tokens, the plan)."""
    num_tokens = slots.shape[0]
    slots = jnp.where(slots < 0, jnp.iinfo(jnp.int32).max, slots)
    order = jnp.argsort(slots)
    slots = slots[order]
    count = jnp.sum(slots < jnp.iinfo(jnp.int32).max, dtype=jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    before = jnp.concatenate([slots[:1] - 2, slots[:-1]])
    new_tile = slots // LANES != before // LANES
    breaks = (slots != before + 1) | new_tile | (token % LANES == 0)
    lane = jnp.arange(LANES, dtype=jnp.int32)
    later_break = breaks.reshape(-1, 1, LANES) & (lane > lane[:, None])
    run = jnp.min(jnp.where(later_break, lane, LANES), axis=2) - lane
    visits = (new_tile | (token % step_tokens == 0)) & (token < count)
    first_token = jnp.sort(jnp.where(visits, token, count))
    steps = jnp.arange(num_tokens // step_tokens + 1, dtype=jnp.int32) * step_tokens
    first_visit = jnp.sum(visits & (token < steps[:, None]), axis=1, dtype=jnp.int32)
    run = jnp.minimum(run.reshape(-1), jnp.maximum(count - token, 0))
    return order, Plan(slots, run, jnp.append(first_token, count), first_visit)


def write_lanes(pools: tuple[Array, ...], new: tuple[Array, ...], slots: Array, interpret) -> tuple[Array, ...]:
    """pools [P, KVH, D, page_size], new [T, KVH, D] of the pools' dtype -> the pools, in place."""
    _, num_kv_heads, head_dim, _ = pools[0].shape
    num_tokens = slots.shape[0]
    tile_bytes = num_kv_heads * head_dim * LANES * pools[0].dtype.itemsize
    blocks = max(1, min(STEP_TOKENS // LANES, -(-num_tokens // LANES), BUFFER_BYTES // (4 * tile_bytes)))
    step_tokens = blocks * LANES
    pad = -num_tokens % step_tokens
    order, plan = make_plan(jnp.pad(slots, (0, pad), constant_values=-1), step_tokens)
    order = jnp.minimum(order, num_tokens - 1)
    new = tuple(x[order].transpose(1, 2, 0) for x in new)
    num_buffers = max(2, min(8, BUFFER_BYTES // (2 * tile_bytes)))
    block = pl.BlockSpec((num_kv_heads, head_dim, step_tokens), lambda i, *_: (0, 0, i))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return tuple(
        pl.pallas_call(
            _kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(slots.shape[0] // step_tokens + (pad > 0),),
                in_specs=[(block, block), (anywhere, anywhere)],
                out_specs=[anywhere, anywhere],
                scratch_shapes=[
                    pltpu.VMEM((2, num_buffers, num_kv_heads, head_dim, LANES), pools[0].dtype),
                    pltpu.SemaphoreType.DMA((2, num_buffers)),
                    pltpu.SemaphoreType.DMA((2, num_buffers)),
                ],
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
            input_output_aliases={6: 0, 7: 1},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=interpret,
            name="mosaic_tpu_lanes_kv_write",
        )(plan, new, pools)
    )


def _kernel(plan, new, pools, k_out, v_out, buffers, read_semaphores, write_semaphores):
    del pools  # the same memory as the outputs
    step = pl.program_id(0)
    num_buffers = buffers.shape[1]
    ahead = num_buffers // 2
    first, end = plan.first_visit[step], plan.first_visit[step + 1]

    def reads(visit):
        return [_copy(plan, visit, first, i, out, buffers, read_semaphores, False) for i, out in enumerate((k_out, v_out))]

    def writes(visit):
        return [_copy(plan, visit, first, i, out, buffers, write_semaphores, True) for i, out in enumerate((k_out, v_out))]

    def drain(visit, _):
        for copy in writes(visit):
            copy.wait()

    def start_read(visit):
        @pl.when(visit < end)
        def _():
            # The buffer is free once the tile that it held before is written.
            pl.when(visit - num_buffers >= first)(lambda: drain(visit - num_buffers, None))
            for copy in reads(visit):
                copy.start()

    for i in range(ahead):
        start_read(first + i)

    def one_visit(visit, _):
        start_read(visit + ahead)
        for copy in reads(visit):
            copy.wait()
        _change(plan, visit, step, new, [buffers.at[i, lax.rem(visit - first, num_buffers)] for i in range(2)])
        for copy in writes(visit):
            copy.start()

    lax.fori_loop(first, end, one_visit, None)

    lax.fori_loop(jnp.maximum(first, end - num_buffers), end, drain, None)


def _copy(plan, visit, first_visit, pool_index, pool, buffers, semaphores, out: bool):
    """The copy of a visit's tile between the pool and its buffer."""
    slot = plan.slot[plan.first_token[visit]]
    page_size = pool.shape[3]
    lane = pl.multiple_of(lax.rem(slot, page_size) // LANES * LANES, LANES)
    place = lax.rem(visit - first_visit, buffers.shape[1])
    tile, buffer = pool.at[slot // page_size, :, :, pl.ds(lane, LANES)], buffers.at[pool_index, place]
    return pltpu.make_async_copy(*((buffer, tile) if out else (tile, buffer)), semaphores.at[pool_index, place])


def _change(plan, visit, step, new, tiles):
    """Put the visit's tokens, run by run, into the tiles [KVH, D, 128] of K and of V."""
    step_tokens = new[0].shape[2]

    def one_run(token):
        local = token - step * step_tokens
        lane = lax.rem(plan.slot[token], LANES)
        size = plan.run[token]
        shift = lax.rem(lane - local + step_tokens, LANES)
        source = pl.multiple_of(local // LANES * LANES, LANES)
        for x, tile in zip(new, tiles, strict=True):
            moved = pltpu.roll(x[:, :, pl.ds(source, LANES)], shift, 2)
            position = lax.broadcasted_iota(jnp.int32, moved.shape, 2)
            tile[...] = jnp.where((position >= lane) & (position < lane + size), moved, tile[...])
        return token + size

    lax.while_loop(lambda token: token < plan.first_token[visit + 1], one_run, plan.first_token[visit])
