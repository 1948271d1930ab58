"""kv_write as one XLA scatter per pool, in place when the pool is donated.

But for float8 pools on a CPU: it has no such numbers, and XLA converts the whole pool to float16 and back. Use int8 there.
"""

import jax.numpy as jnp
from jax import Array


def kv_write_xla(k_pages: Array, v_pages: Array, k: Array, v: Array, slot_mapping: Array) -> tuple[Array, Array]:
    """Scatter each token's keys and values to its slot; see :func:`pallas_kernels.kv_write` for the contract."""
    return scatter(k_pages, k, slot_mapping), scatter(v_pages, v, slot_mapping)


def scatter(pages: Array, new: Array, slot_mapping: Array) -> Array:
    """pages [num_pages, page_size, ...] with new [T, ...], cast, in slots slot_mapping [T]; negative slots are skipped."""
    if slot_mapping.shape[0] == 1:
        # XLA turns a scatter of one index into a select over the whole pool (on the CPU 200 ms a layer, not 0.02): add a skipped token.
        new = jnp.pad(new, ((0, 1),) + ((0, 0),) * (new.ndim - 1))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=-1)
    num_slots = pages.shape[0] * pages.shape[1]
    # A negative index counts from the end even under mode="drop", so a skipped token must go past the end instead; each to its own
    # place, because unique_indices promises that no two are equal.
    past_end = num_slots + jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    slots = jnp.where(slot_mapping < 0, past_end, slot_mapping)
    rows = pages.reshape(num_slots, *pages.shape[2:])
    return rows.at[slots].set(new.astype(pages.dtype), mode="drop", unique_indices=True).reshape(pages.shape)
