"""Pieces of online softmax (Milakov & Gimelshein, arXiv:1805.02867) for the TPU kernels; one row of an array is one query of one head."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.options import Options

# Finite, so that a query with nothing to attend to in a block stays free of inf - inf. What it sums up at this maximum is wiped out
# by its first real score, whose rescaling factor exp(MASKED - m) is 0, or by `finish`.
MASKED = -1e30


def scales(options: Options) -> Array:
    """float32 [2]: the factor on q . k and the one on the weighted values; 1 stands in for scales that differ by slot."""
    k_scale, v_scale = (1.0 if x is None or options.slot_scales else x for x in (options.k_scale, options.v_scale))
    return jnp.stack([jnp.asarray(options.sm_scale * k_scale, jnp.float32), jnp.asarray(v_scale, jnp.float32)])


def matmul(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    """x . y over the given dimensions, in float32; float32 operands keep their precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def start(num_queries: int, width: int) -> tuple[Array, Array, Array]:
    """(m [M, 1], l [M, 1], o [M, width]) before any key is seen."""
    column = (num_queries, 1)
    return jnp.full(column, MASKED, jnp.float32), jnp.zeros(column, jnp.float32), jnp.zeros((num_queries, width), jnp.float32)


def modify_scores(scores: Array, scale: Array, distance: Array | None, slopes: Array | None, options: Options) -> Array:
    """q . k [M, N] -> scores; ``distance`` int32 [M, N], key minus query position, and ``slopes`` [M, 1] with ALiBi only."""
    scores = scores * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores * (1.0 / options.soft_cap))
    if slopes is not None and distance is not None:
        scores += slopes * distance.astype(jnp.float32)
    return scores


def rescale(m: Array, l: Array, scores: Array) -> tuple[Array, Array, Array, Array]:  # noqa: E741
    """Masked scores [M, N] -> (new m, new l, weights p [M, N], the factor [M, 1] for what was summed before)."""
    new_m = jnp.maximum(m, scores.max(axis=1, keepdims=True))
    p = jnp.exp(scores - new_m)
    keep = jnp.exp(m - new_m)
    return new_m, l * keep + p.sum(axis=1, keepdims=True), p, keep


def finish(m: Array, l: Array, o: Array, sinks: Array | None, v_scale: Array) -> tuple[Array, Array]:  # noqa: E741
    """m, l, sinks [M, 1], o [M, D] -> (o, lse [M, 1]); 0 and -inf where nothing was attended to."""
    empty = m <= MASKED
    if sinks is not None:
        new_m = jnp.maximum(m, sinks)
        keep = jnp.exp(m - new_m)
        m, l, o = new_m, l * keep + jnp.exp(sinks - new_m), o * keep  # noqa: E741
    l = jnp.where(empty, 1.0, l)  # noqa: E741
    return o * jnp.where(empty, 0.0, v_scale / l), jnp.where(empty, -jnp.inf, m + jnp.log(l))


def column_to_row(x: Array) -> Array:
    """[M, 1] -> [1, M]: the diagonal of x spread over M columns, since a transposition wants whole tiles."""
    size = x.shape[0]
    diagonal = lax.broadcasted_iota(jnp.int32, (size, size), 0) == lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.sum(jnp.where(diagonal, x, 0.0), axis=0, keepdims=True)
