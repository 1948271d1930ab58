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
    k_scale: Array | float | None = None  # f32 []
    v_scale: Array | float | None = None  # f32 []

    def scales(self) -> Array:
        """float32 [2]: the factor on q . k, that on the weighted values."""
        k_scale, v_scale = (1.0 if x is None else x for x in (self.k_scale, self.v_scale))
        return jnp.stack([jnp.asarray(self.sm_scale * k_scale, jnp.float32), jnp.asarray(v_scale, jnp.float32)])
