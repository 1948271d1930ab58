"""paged_attention on Hopper GPUs: what it takes, the plan of the work, the two kernels and the merge of partial results.

Rows with one query go to the split decode kernel, the others to the tiled prefill kernel; under one static shape each costs what its rows
need. How a decode row is split follows the whole batch, so that every multiprocessor gets the same share, and rounding follows the split;
``fixed_splits`` cuts each row by its own length instead, and then a row's result does not depend on its neighbours. Prefill tiles never do.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import use_abstract_mesh

from pallas_kernels.compile_targets import HOPPER_SHARED_MEMORY_BYTES, hopper_mesh
from pallas_kernels.paged_attention import gpu_decode, gpu_prefill, online
from pallas_kernels.paged_attention.gpu_tiles import LOG2E, MASKED, ROWS
from pallas_kernels.paged_attention.options import Options

BLOCK = 64  # tokens of a KV block
FIXED_SPAN = 16  # blocks of a segment with fixed_splits
NUM_SMS = 132  # of an H100 SXM or H200


def unsupported(q_shape, q_dtype, pages_shape, pages_dtype, options: Options) -> str | None:
    """Return None, or in one sentence why these kernels cannot run a call."""
    (_, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q_shape, pages_shape
    q_dtype, pages_dtype = jnp.dtype(q_dtype), jnp.dtype(pages_dtype)
    eight_bit = pages_dtype in (jnp.int8, jnp.float8_e4m3fn)
    checks = [
        (q_dtype in (jnp.bfloat16, jnp.float16), f"q.dtype={q_dtype}: expected bfloat16 or float16"),
        (pages_dtype == q_dtype or eight_bit, f"pages.dtype={pages_dtype}: expected {q_dtype}, as q, int8 or float8_e4m3fn"),
        (head_dim in (64, 80, 96, 128, 256), f"head_dim={head_dim}: expected 64, 80, 96, 128 or 256"),
        (page_size in (8, 16, 32) or page_size % BLOCK == 0, f"page_size={page_size}: expected 8, 16, 32 or a multiple of {BLOCK}"),
        (num_heads <= ROWS * num_kv_heads, f"{num_heads} heads over {num_kv_heads} KV heads: expected at most {ROWS} to one"),
        (not (eight_bit or options.slot_scales) or head_dim in (64, 96, 128), f"head_dim={head_dim}: expected 64, 96 or 128 in 8 bits"),
        (not options.slot_scales or num_kv_heads % 8 == 0, f"num_kv_heads={num_kv_heads}: expected a multiple of 8 with slots' scales"),
    ]
    refused = next((message for passes, message in checks if not passes), None)
    if refused is not None:
        return refused
    needed = gpu_decode.shared_memory_bytes(
        _decode_shape(q_shape, q_dtype, pages_shape, pages_dtype, options), q_dtype, pages_dtype, options
    )
    if needed > HOPPER_SHARED_MEMORY_BYTES:
        sizes = f"num_kv_heads={num_kv_heads}, head_dim={head_dim}"
        return f"{sizes}: {needed} bytes of shared memory, expected at most {HOPPER_SHARED_MEMORY_BYTES}"
    return None


def attend(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    *,
    decode_only: bool,
    interpret: bool = False,
    fixed_splits: bool = False,
) -> tuple[Array, Array]:
    """Return (o [T, H, D], lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`.

    With ``interpret`` the kernels run on a CPU under Mosaic GPU's interpreter, which raises RuntimeError for a data race.
    """
    arguments = q, (k_pages, v_pages), block_tables, seq_lens, query_start_loc, distribution, options, decode_only, fixed_splits
    if not interpret:
        return _attend(*arguments, None)
    with use_abstract_mesh(hopper_mesh()):
        return _attend(*arguments, plgpu.InterpretGPUParams(detect_races=True))


def _attend(q, pages, block_tables, seq_lens, query_start_loc, distribution, options, decode_only, fixed_splits, params):
    if decode_only:
        return _decode(q, pages, block_tables, seq_lens, options, fixed_splits, params)
    num_tokens, num_rows = q.shape[0], block_tables.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    # A step may have fewer tokens than rows; token t of row t still is what the decode part reads.
    q_rows = jnp.pad(q, ((0, max(0, num_rows - num_tokens)), (0, 0), (0, 0)))[:num_rows]
    decode = _decode(q_rows, pages, block_tables, jnp.where(rows < distribution[0], seq_lens, 0), options, fixed_splits, params)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(query_start_loc[1:] <= token[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    prefill = _prefill(q, pages, block_tables, seq_lens, query_start_loc, distribution, row, options, params)
    is_decode, live = token < distribution[0], (token < query_start_loc[distribution[1]]) & (seq_lens[row] > 0)
    o, lse = (
        jnp.where(is_decode.reshape(-1, *[1] * (y.ndim - 1)), x[jnp.minimum(token, num_rows - 1)], y)
        for x, y in zip(decode, prefill, strict=True)
    )
    return jnp.where(live[:, None, None], o, 0), jnp.where(live[:, None], lse, -jnp.inf)


def _split_options(options: Options, num_kv_heads: int, group: int, repeats: int) -> tuple[Any, dict[str, Array]]:
    """Return (the factor on q . k, what the kernels take as optional arrays), a KV head's slopes and sinks ``repeats`` times over."""
    factor: Any = options.sm_scale
    optional: dict[str, Any] = {}
    if options.slot_scales:
        optional = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    elif options.k_scale is not None:
        factor = factor * options.k_scale
    for name, value in (("slopes", options.alibi_slopes), ("sinks", options.sinks)):
        if value is not None:
            rows = jnp.tile(value.astype(jnp.float32).reshape(num_kv_heads, group), (1, repeats))
            optional[name] = jnp.pad(rows, ((0, 0), (0, ROWS - rows.shape[1])))
    return factor, optional


def _v_factor(options: Options):
    return 1.0 if options.v_scale is None or options.slot_scales else options.v_scale


def _warpgroups(head_dim: int, q_dtype, pages_dtype, options: Options) -> int:
    """Compute warpgroups: two leave a thread 168 registers, one leaves it 255, and a spill would cost more than the second one gains."""
    casts = pages_dtype != q_dtype or options.slot_scales
    return 1 if head_dim > (96 if casts else 128) else 2


def _decode_shape(q_shape, q_dtype, pages_shape, pages_dtype, options: Options, fixed_splits: bool = False) -> gpu_decode.Shape:
    (_, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q_shape, pages_shape
    warpgroups = _warpgroups(head_dim, q_dtype, pages_dtype, options)
    return gpu_decode.Shape(
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block=BLOCK,
        warpgroups=warpgroups,
        stages=4 if warpgroups == 1 and head_dim <= 128 else 2,
        columns=64 if head_dim % 64 == 0 else head_dim,
        fixed_span=FIXED_SPAN if fixed_splits else None,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
    )


def _decode(
    q: Array, pages: tuple[Array, Array], block_tables: Array, seq_lens: Array, options: Options, fixed_splits: bool, params
) -> tuple[Array, Array]:
    """Rows of one query: q [R, H, D] -> (o [R, H, D], lse [R, H])."""
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = pages[0].shape[1:3]
    group = num_heads // num_kv_heads
    factor, optional = _split_options(options, num_kv_heads, group, 1)
    optional.pop("sinks", None)  # applied once, where the splits are merged
    shape = _decode_shape(q.shape, q.dtype, pages[0].shape, pages[0].dtype, options, fixed_splits)
    pieces = NUM_SMS if params is None else 3  # the interpreter pays for each thread block
    longest, units = -(-block_tables.shape[1] * page_size // BLOCK), num_rows * num_kv_heads
    # The merge reads this many slots of each pair (row, head), used or not, so it is kept in proportion to what a full batch uses.
    most = -(-longest // FIXED_SPAN) if fixed_splits else min(pieces, longest, max(8, 4 * pieces // units))
    plan, first_slot, num_slots = plan_decode(seq_lens, shape, pieces, most)
    q = jnp.pad(q.reshape(num_rows, num_kv_heads, group, head_dim), ((0, 0), (0, 0), (0, shape.padded_group - group), (0, 0)))
    total = units * most if fixed_splits else units + pieces
    scale = jnp.asarray(factor, jnp.float32).reshape(1)
    o, lse = gpu_decode.partial_attention(q, *pages, block_tables, seq_lens, plan, scale, optional, shape, total, params)
    m, l, o = combine(o, lse[..., :group], first_slot, num_slots, most)  # noqa: E741
    m, l, o = (x.reshape(num_rows, num_heads, *x.shape[2:]) for x in (m, l, o))  # noqa: E741
    o, lse = online.finish(m, l, o, options.sinks, _v_factor(options))
    return o.astype(q.dtype), lse


def plan_decode(seq_lens: Array, shape: gpu_decode.Shape, num_pieces: int, most: int) -> tuple[gpu_decode.Plan, Array, Array]:
    """Cut the rows' work into equal pieces -> (plan, first slot [U], number of slots [U]) for the U = R * KVH pairs (row, head).

    A pair gets at most ``most`` slots (with fixed_span, one for each span): where one row is much longer than the rest, pieces are larger.
    """
    heads = shape.num_kv_heads
    unit = 1 if shape.fixed_span is None else shape.fixed_span
    blocks = -(-(seq_lens - gpu_decode.first_token(seq_lens, shape)) // (shape.block * unit)) * unit
    row_blocks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(blocks, dtype=jnp.int32)])
    total = row_blocks[-1] * heads
    size = jnp.maximum(-(-total // (num_pieces * unit)), 1) * unit
    if shape.fixed_span is None:
        size = jnp.maximum(size, -(-blocks.max() // max(most - 1, 1)))  # a pair that spans k pieces may touch k + 1
    begin = jnp.minimum(jnp.arange(num_pieces, dtype=jnp.int32) * size, total)
    first_row = jnp.sum(row_blocks[1:, None] * heads <= begin, axis=0, dtype=jnp.int32)
    pieces = jnp.stack([begin, jnp.minimum(begin + size, total), first_row], axis=1)
    blocks = blocks[:, None]
    first = row_blocks[:-1, None] * heads + jnp.arange(heads, dtype=jnp.int32) * blocks
    if shape.fixed_span is not None:
        first_slot, num_slots = first // unit, jnp.broadcast_to(blocks // unit, first.shape)
    else:
        first_piece = first // size
        first_slot = jnp.arange(first.size, dtype=jnp.int32).reshape(first.shape) + first_piece
        num_slots = jnp.where(blocks > 0, (first + blocks - 1) // size - first_piece + 1, 0)
    return gpu_decode.Plan(row_blocks, pieces), first_slot.reshape(-1), num_slots.reshape(-1)


def combine(o: Array, lse: Array, first_slot: Array, num_slots: Array, most: int) -> tuple[Array, Array, Array]:
    """Merge the slots first_slot .. first_slot + num_slots - 1 (at most ``most``) of each of U pairs (row, head).

    o [S, W, G, D], lse [S, W, G] in base 2, anything in slots that no pair has -> (m [U, G], l [U, G], o [U, G, D]): softmax state as in
    :class:`online.Running`.
    """
    index = jnp.arange(most, dtype=jnp.int32)
    live = index < num_slots[:, None]
    slot = jnp.where(live, first_slot[:, None] + index, 0)
    lse = jnp.where(live[:, :, None, None], lse[slot], MASKED)
    m = lse.max((1, 2))
    weight = jnp.where(lse > MASKED, jnp.exp2(lse - m[:, None, None]), 0)
    o = jnp.where(weight[..., None] > 0, o[slot] * weight[..., None], 0).sum((1, 2))
    return jnp.where(m > MASKED, m / LOG2E, MASKED), weight.sum((1, 2)), o


def _prefill(
    q, pages: tuple[Array, Array], block_tables, seq_lens, query_start_loc, distribution, row, options: Options, params
) -> tuple[Array, Array]:
    """Rows distribution[0] .. distribution[1] - 1; ``row`` int32 [T] of each token -> (o [T, H, D], lse [T, H]), junk for other tokens."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows = block_tables.shape[0]
    page_size, num_kv_heads = pages[0].shape[1:3]
    group = num_heads // num_kv_heads
    factor, optional = _split_options(options, num_kv_heads, group, ROWS // group)
    warpgroups = _warpgroups(head_dim, q.dtype, pages[0].dtype, options)
    shape = gpu_prefill.Shape(
        group=group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block=BLOCK,
        warpgroups=warpgroups,
        stages=2 if head_dim > 128 else 3,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
    )
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    starts, counts = query_start_loc[:-1], query_start_loc[1:] - query_start_loc[:-1]
    counts = jnp.where((rows >= distribution[0]) & (rows < distribution[1]) & (seq_lens > 0), counts, 0)
    num_tiles = -(-counts // shape.tile_queries)
    last_tile = jnp.cumsum(num_tiles, dtype=jnp.int32)
    tile = jnp.arange(min(-(-num_tokens // shape.tile_queries) + num_rows, num_tokens), dtype=jnp.int32)
    tile_row = jnp.minimum(jnp.sum(last_tile <= tile[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    begin = (tile - (last_tile - num_tiles)[tile_row]) * shape.tile_queries
    queries = jnp.where(tile < last_tile[-1], jnp.minimum(counts[tile_row] - begin, shape.tile_queries), 0)
    work = jnp.stack([tile_row, seq_lens[tile_row] - counts[tile_row] + begin, queries], axis=1)

    each = jnp.arange(shape.tile_queries, dtype=jnp.int32)
    token = jnp.clip((starts[tile_row] + begin)[:, None] + each, 0, num_tokens - 1)
    packed = q[token].reshape(-1, warpgroups, shape.queries, num_kv_heads, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
    used = shape.queries * group
    packed = packed.reshape(*packed.shape[:3], used, head_dim)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, ROWS - used), (0, 0)))
    scales = jnp.stack([jnp.asarray(x, jnp.float32) for x in (factor, _v_factor(options))])
    query_of_row = jnp.arange(ROWS, dtype=jnp.int32) // group
    o, lse = gpu_prefill.attend_tiles(packed, *pages, block_tables, work, scales, query_of_row, optional, shape, params)

    index = jnp.arange(num_tokens, dtype=jnp.int32) - starts[row]
    tile = jnp.clip((last_tile - num_tiles)[row] + index // shape.tile_queries, 0, o.shape[0] - 1)
    place = tile, index // shape.queries % warpgroups, index % shape.queries
    o, lse = (
        x[..., :used, *[slice(None)] * (x.ndim - 4)]
        .reshape(*x.shape[:3], shape.queries, group, *x.shape[4:])
        .swapaxes(2, 3)[place]
        .reshape(num_tokens, num_heads, *x.shape[4:])
        for x in (o, lse)
    )
    return o, lse
