"""What modifies the score of a query and a key, bundled so that every backend takes the same thing."""

import dataclasses

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
