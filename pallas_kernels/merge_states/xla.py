"""merge_states as XLA operations: it reads each state once and fuses into one pass, so no platform needs a kernel of its own."""

import jax.numpy as jnp
from jax import Array


def merge_states_xla(o: Array, lse: Array) -> tuple[Array, Array]:
    """Weigh each state by its share of the denominator; see :func:`pallas_kernels.merge_states`."""
    top = lse.max(axis=0)
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # all empty: -inf - -inf would be NaN
    weights = jnp.exp(lse - top)
    total = weights.sum(axis=0)
    share = weights / jnp.where(total > 0, total, 1.0)
    # An empty state may hold NaN, and 0 * NaN is NaN.
    return jnp.where(weights[..., None] > 0, o * share[..., None], 0.0).sum(axis=0), jnp.log(total) + top
