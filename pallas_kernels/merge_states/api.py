"""The contract of merge_states and its argument checks."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.merge_states.reference import merge_states_reference
from pallas_kernels.merge_states.xla import merge_states_xla

_BACKENDS = {"xla": merge_states_xla, "reference": merge_states_reference}


def merge_states(o: Array, lse: Array, *, backend: str = "xla") -> tuple[Array, Array]:
    """Attention of T tokens over the union of N disjoint sets of keys, from their attention over each set.

    Args:
        o: float32 [N, T, H, D], normalised; anything, NaN included, where lse is -inf.
        lse: float32 [N, T, H], natural log of each softmax denominator; -inf where a set was empty, which then changes nothing.
        backend: static; "xla" (one fusion on every platform) or "reference".

    Returns (o [T, H, D], lse [T, H]), both float32; 0 and -inf where all sets were empty. The order of the sets and how they are grouped
    into several calls change rounding only. An attention sink must be part of one set alone.

    Raises ValueError naming the argument, its value and what was expected. Source: FlashInfer's attention states, arXiv:2501.01005.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {tuple(_BACKENDS)}")
    if o.ndim != 4 or o.shape[0] < 1 or o.dtype != jnp.float32:
        raise ValueError(f"o: {o.dtype}{list(o.shape)}: expected float32 [states, tokens, heads, head_dim] with at least one state")
    if lse.shape != o.shape[:3] or lse.dtype != jnp.float32:
        raise ValueError(f"lse: {lse.dtype}{list(lse.shape)}: expected float32{list(o.shape[:3])}, as o without head_dim")
    return _BACKENDS[backend](o, lse)
