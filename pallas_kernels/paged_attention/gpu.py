"""paged_attention on Hopper GPUs: the plan of the decode work, the two kernels and the merge of partial results."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_decode, online
from pallas_kernels.paged_attention.gpu_tiles import LOG2E, MASKED, ROWS
from pallas_kernels.paged_attention.options import Options

NUM_SMS = 132
PIECES = 5


def decode_shape(q_shape, q_dtype, pages_shape, pages_dtype, options: Options, fixed: bool) -> gpu_decode.Shape:
    head_dim = q_shape[2]
    page_size, num_kv_heads = pages_shape[1:3]
    target = 64
    block = target if page_size >= target else page_size * max(1, target // page_size)
    warpgroups, stages = (2, 2) if head_dim <= 128 else (1, 2)
    columns = 64 if head_dim % 64 == 0 else head_dim
    if head_dim > 128:
        columns = 64
    return gpu_decode.Shape(
        q_shape[1] // num_kv_heads, num_kv_heads, head_dim, page_size, block, warpgroups, stages, columns, 16 if fixed else None,
        options.sliding_window, options.soft_cap,
    )


def plan_decode(seq_lens: Array, shape: gpu_decode.Shape, num_pieces: int) -> tuple[gpu_decode.Plan, Array, Array]:
    """Cut the work of the rows into equal pieces -> (plan, first slot [U], number of slots [U]) for U = R * KVH units (row, head)."""
    heads = shape.num_kv_heads
    blocks = -(-(seq_lens - gpu_decode.first_token(seq_lens, shape)) // shape.block)
    unit = 1 if shape.fixed_span is None else shape.fixed_span
    blocks = -(-blocks // unit) * unit
    row_blocks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(blocks, dtype=jnp.int32)])
    total = row_blocks[-1] * heads
    size = jnp.maximum(-(-total // (num_pieces * unit)) * unit, unit)
    begin = jnp.minimum(jnp.arange(num_pieces, dtype=jnp.int32) * size, total)
    first_row = jnp.sum(row_blocks[1:, None] * heads <= begin, axis=0, dtype=jnp.int32)
    pieces = jnp.stack([begin, jnp.minimum(begin + size, total), first_row], axis=1)
    head = jnp.arange(heads, dtype=jnp.int32)
    first = row_blocks[:-1, None] * heads + head * blocks[:, None]
    if shape.fixed_span is not None:
        first_slot = first // unit
        num = jnp.broadcast_to(blocks[:, None] // unit, first.shape)
    else:
        first_piece = first // size
        num = jnp.where(blocks[:, None] > 0, (first + blocks[:, None] - 1) // size - first_piece + 1, 0)
        first_slot = jnp.arange(first.size, dtype=jnp.int32).reshape(first.shape) + first_piece
    return gpu_decode.Plan(row_blocks, pieces), first_slot.reshape(-1), num.reshape(-1)


def combine(o, lse, first_slot, num_slots, most, options, num_rows, shape):
    """Merge segments -> (o [R, H, D] float32, lse [R, H])."""
    slot = first_slot[:, None] + jnp.arange(most, dtype=jnp.int32)
    live = jnp.arange(most, dtype=jnp.int32) < num_slots[:, None]
    slot = jnp.where(live, slot, 0)
    lse = jnp.where(live[:, :, None, None], lse[slot][..., : shape.group], MASKED)  # [U, most, 2, G]
    m = lse.max((1, 2))
    weight = jnp.where(lse > MASKED, jnp.exp2(lse - m[:, None, None]), 0)
    l = weight.sum((1, 2))  # noqa: E741
    o = jnp.where(weight[..., None] > 0, o[slot] * weight[..., None], 0).sum((1, 2))
    heads = num_rows, shape.num_kv_heads * shape.group
    m = jnp.where(m > MASKED, m / LOG2E, MASKED)
    return online.finish(m.reshape(heads), l.reshape(heads), o.reshape(*heads, -1), options.sinks, options.v_scale)


def attend(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution, options, *, decode_only, interpret, fixed=False, params=None):
    num_rows, width = block_tables.shape
    shape = decode_shape(q.shape, q.dtype, k_pages.shape, k_pages.dtype, options, fixed)
    pieces = NUM_SMS if not interpret else PIECES
    plan, first, num = plan_decode(seq_lens, shape, pieces)
    units = num_rows * shape.num_kv_heads
    longest = -(-width * shape.page_size // shape.block)
    most = -(-longest // shape.fixed_span) if fixed else min(pieces, longest)
    slots = units * most if fixed else units + pieces
    grouped = q.reshape(num_rows, shape.num_kv_heads, shape.group, shape.head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, shape.padded_group - shape.group), (0, 0)))
    factor, optional = options.sm_scale, {}
    if options.k_scale is not None:
        if jnp.ndim(options.k_scale) == 0:
            factor = factor * options.k_scale
        else:
            optional["k_scale"] = options.k_scale
    if jnp.ndim(options.v_scale) == 3:
        optional["v_scale"] = options.v_scale
        options = dataclasses.replace(options, v_scale=None)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.reshape(shape.num_kv_heads, shape.group)
        optional["slopes"] = jnp.pad(slopes, ((0, 0), (0, ROWS - shape.group)))
    o, lse = gpu_decode.partial_attention(
        grouped, k_pages, v_pages, block_tables, seq_lens, plan, jnp.asarray(factor, jnp.float32).reshape(1), optional, shape, slots,
        params if interpret else None,
    )
    o, lse = combine(o, lse, first, num, most, options, num_rows, shape)
    return o.astype(q.dtype), lse
