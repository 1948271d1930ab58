"""Decode on a TPU: one query a row; the grid steps over rows, the page stream runs ahead of it."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_softmax as softmax
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.tpu_pages import PageStream, make_items, stream_scratch


def decode_rows(
    layout: Layout, q: Array, pools: tuple[Array, ...], block_tables: Array, seq_lens: Array, options: Options, interpret
) -> tuple[Array, Array]:
    """Attention of one query a row: q [R, H, D], seq_lens [R] (0: no query) -> (o [R, H, D] in q's dtype, lse float32 [R, H])."""
    num_rows = q.shape[0]
    first_seen = jnp.zeros_like(seq_lens)
    if options.sliding_window is not None:
        first_seen = jnp.maximum(seq_lens - options.sliding_window, 0)
    items = make_items(jnp.arange(num_rows, dtype=jnp.int32), first_seen, seq_lens, layout.page_size)
    wide = layout.widen(q)
    _, num_heads, width = wide.shape
    slot_positions = layout.slot_positions(num_heads)
    one_row = pl.BlockSpec((1, num_heads, width), lambda i, *_: (i, 0, 0))
    whole, anywhere = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    per_head = [None if x is None else x[:, None] for x in softmax.per_head(options)]
    o, lse = pl.pallas_call(
        functools.partial(_kernel, layout, options, block_tables.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_rows,),
            in_specs=[one_row, whole, [None if x is None else whole for x in per_head], (anywhere,) * len(pools)],
            out_specs=[one_row, pl.BlockSpec((1, 1, num_heads), lambda i, *_: (i, 0, 0))],
            scratch_shapes=stream_scratch(pools, layout.tiles),
        ),
        out_shape=[jax.ShapeDtypeStruct(wide.shape, q.dtype), jax.ShapeDtypeStruct((num_rows, 1, num_heads), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=layout.tiles.vmem_limit_bytes),
        interpret=interpret,
        name=f"{layout.name}_decode",
    )(items, seq_lens, block_tables.reshape(-1), softmax.scales(options), wide, jnp.asarray(slot_positions), per_head, pools)
    return layout.narrow(o), lse[:, 0]


def _kernel(
    layout, options, table_width,
    items, seq_lens, block_tables, scales, q_ref, slot_positions, per_head, pools, o_ref, lse_ref, *scratch,
):  # fmt: skip
    stream = PageStream(items, block_tables, table_width, pools, *scratch)
    row = pl.program_id(0)
    pl.when(row == 0)(stream.open)
    end = seq_lens[row]
    first_seen = 0 if options.sliding_window is None else jnp.maximum(end - options.sliding_window, 0)
    slopes, sinks = (None if ref is None else ref[...] for ref in per_head)
    q = q_ref[0]

    def body(block, state):
        m, l, o = state  # noqa: E741
        slot, first_page = stream.take(row, block)
        k, v, *slot_scales = (buffer.at[slot] for buffer in stream.buffers)
        base = first_page * layout.page_size
        layout.zero_outside(v, first_seen - base, end - base)
        position = slot_positions[...]
        scores = layout.scores(q, k)
        if slot_scales:
            scores *= layout.slot_scales(slot_scales[0], q.shape[0])
        scores = softmax.modify_scores(scores, scales[0], position - (end - 1 - base), slopes, options)
        mask = position < end - base
        if options.sliding_window is not None:
            mask &= position >= first_seen - base
        m, l, p, keep = softmax.rescale(m, l, jnp.where(mask, scores, softmax.MASKED))  # noqa: E741
        if slot_scales:
            p = jnp.where(mask, p * layout.slot_scales(slot_scales[1], q.shape[0]), 0.0)  # a scale that is not in use may be NaN
        return m, l, o * keep + layout.values(p.astype(q.dtype), v)

    m, l, o = lax.fori_loop(0, stream.num_blocks(row), body, softmax.start(*q.shape))  # noqa: E741
    o, lse = softmax.finish(m, l, o, sinks, scales[1])
    o_ref[0] = o.astype(o_ref.dtype)
    lse_ref[0] = softmax.column_to_row(lse)
