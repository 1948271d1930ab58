"""Reference for merge_states: the states one after the other, two at a time."""

import functools

import jax.numpy as jnp
from jax import Array


def merge_states_reference(o: Array, lse: Array) -> tuple[Array, Array]:
    """See :func:`pallas_kernels.merge_states`."""
    empty = jnp.zeros(o.shape[1:], o.dtype), jnp.full(lse.shape[1:], -jnp.inf, lse.dtype)
    return functools.reduce(_merge_two, zip(o, lse, strict=True), empty)


def _merge_two(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    lse = jnp.logaddexp(a[1], b[1])
    parts = [jnp.where(jnp.isneginf(part)[..., None], 0.0, o * jnp.exp(part - lse)[..., None]) for o, part in (a, b)]
    return parts[0] + parts[1], lse
