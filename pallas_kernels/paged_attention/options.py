"""What modifies the score of a query and a key, bundled so that every backend takes the same thing."""

import dataclasses

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options of one paged_attention call; fields are as in :func:`pallas_kernels.paged_attention`."""

    sm_scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Array | None = None  # f32 [H]
    sinks: Array | None = None  # f32 [H]
    k_scale: Array | float | None = None  # f32 [], or f32 [num_pages, page_size, num_kv_heads]
    v_scale: Array | float | None = None  # f32 [], or f32 [num_pages, page_size, num_kv_heads]

    @property
    def slot_scales(self) -> bool:
        """Whether each slot and head has scales of its own (then both keys and values have)."""
        return self.k_scale is not None and jnp.ndim(self.k_scale) == 3
