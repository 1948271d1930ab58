"""kv_write on a TPU as DMA in place, for both page layouts (an XLA scatter on a TPU takes its indices one by one)."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write.tpu_lanes import write_lanes

RUN_TOKENS = 16  # tokens of one copy where slots follow each other, as in a prefill


def write(
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    slot_mapping: Array,
    *,
    backend: str,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, ...]:
    """Return the pools with every token of non-negative slot written; see :func:`pallas_kernels.kv_write` for the contract."""
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    pools, new = (k_pages, v_pages), (k.astype(k_pages.dtype), v.astype(v_pages.dtype))
    if backend == "mosaic_tpu_lanes":
        return write_lanes(pools, new, slot_mapping, interpret)
    page_size = k_pages.shape[1]
    run_tokens = min(RUN_TOKENS, page_size, slot_mapping.shape[0])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return tuple(
        pl.pallas_call(
            functools.partial(_kernel, run_tokens),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(1,),
                in_specs=[(anywhere, anywhere), (anywhere, anywhere)],
                out_specs=[anywhere, anywhere],
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
            input_output_aliases={4: 0, 5: 1},
            interpret=interpret,
            name="mosaic_tpu_kv_write",
        )(slot_mapping, _starts_run(slot_mapping, run_tokens, page_size), new, pools)
    )


def _starts_run(slots: Array, run_tokens: int, page_size: int) -> Array:
    """int32 [T]: 1 where this token and the run_tokens - 1 after it have consecutive slots of one page."""
    num_tokens = slots.shape[0]
    follows = jnp.pad((slots[1:] == slots[:-1] + 1).astype(jnp.int32), (1, 0))
    count = jnp.cumsum(follows)
    last = jnp.arange(num_tokens, dtype=jnp.int32) + run_tokens - 1
    inside = (last < num_tokens) & (slots >= 0) & (slots % page_size + run_tokens <= page_size)
    return (inside & (count[jnp.minimum(last, num_tokens - 1)] - count == run_tokens - 1)).astype(jnp.int32)


def _kernel(run_tokens, slots, starts_run, new, pools, *outputs_and_semaphore):
    """Start all copies, then wait for all: slots are distinct, so that their order does not matter."""
    *outputs, semaphore = outputs_and_semaphore
    del pools  # the same memory as the outputs
    num_tokens = slots.shape[0]
    page_size = outputs[0].shape[1]

    def each_copy(act):
        def one(token):
            slot = slots[token]
            run = starts_run[token] == 1

            def copies(size):
                for source, pool in zip(new, outputs, strict=True):
                    place = pool.at[slot // page_size, pl.ds(lax.rem(slot, page_size), size)]
                    act(pltpu.make_async_copy(source.at[pl.ds(token, size)], place, semaphore))

            pl.when(run)(lambda: copies(run_tokens))
            pl.when(jnp.logical_not(run) & (slot >= 0))(lambda: copies(1))
            return token + jnp.where(run, run_tokens, 1)

        lax.while_loop(lambda token: token < num_tokens, one, jnp.int32(0))

    each_copy(lambda copy: copy.start())
    each_copy(lambda copy: copy.wait())
