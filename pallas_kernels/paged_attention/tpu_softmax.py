"""Pieces of online softmax (Milakov & Gimelshein, arXiv:1805.02867) for the TPU kernels; one row of an array is one query of one head."""

import math

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.options import Options

# Finite, so that a query with nothing to attend to in a block stays free of inf - inf. What it sums up at this maximum is wiped out
# by its first real score, whose rescaling factor exp2(MASKED - m) is 0, or by `finish`.
MASKED = -1e30
# Scores are in base 2 here, as the hardware's exponential is: the factor goes into the scale that they are multiplied with anyway.
LOG2_E = math.log2(math.e)


def scales(options: Options) -> Array:
    """float32 [2]: what `modify_scores` takes and the factor on the weighted values; scales that differ by slot are not in it."""
    k_scale, v_scale = (1.0 if x is None or options.slot_scales else x for x in (options.k_scale, options.v_scale))
    unit = LOG2_E if options.soft_cap is None else 1.0 / options.soft_cap
    return jnp.stack([jnp.asarray(options.sm_scale * k_scale, jnp.float32) * unit, jnp.asarray(v_scale, jnp.float32)])


def per_head(options: Options) -> list[Array | None]:
    """ALiBi slopes and sinks, float32 [H] or None, in base 2."""
    return [None if x is None else x.astype(jnp.float32) * LOG2_E for x in (options.alibi_slopes, options.sinks)]


def matmul(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    """x . y over the given dimensions, in float32; float32 operands keep their precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def start(num_queries: int, width: int) -> tuple[Array, Array, Array]:
    """(m [M, 1], l [M, 1], o [M, width]) before any key is seen."""
    column = (num_queries, 1)
    return jnp.full(column, MASKED, jnp.float32), jnp.zeros(column, jnp.float32), jnp.zeros((num_queries, width), jnp.float32)


def modify_scores(scores: Array, scale: Array, distance: Array, slopes: Array | None, options: Options) -> Array:
    """q . k [M, N] -> scores in base 2; ``distance`` int32 [M, N] is key minus query position, ``slopes`` [M, 1]."""
    scores = scores * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * LOG2_E * jnp.tanh(scores)
    if slopes is not None:
        scores += slopes * distance.astype(jnp.float32)
    return scores


def rescale(m: Array, l: Array, scores: Array) -> tuple[Array, Array, Array, Array]:  # noqa: E741
    """Masked scores [M, N] -> (new m, new l, weights p [M, N], the factor [M, 1] for what was summed before)."""
    new_m = jnp.maximum(m, scores.max(axis=1, keepdims=True))
    p = jnp.exp2(scores - new_m)
    keep = jnp.exp2(m - new_m)
    return new_m, l * keep + p.sum(axis=1, keepdims=True), p, keep


def finish(m: Array, l: Array, o: Array, sinks: Array | None, v_scale: Array) -> tuple[Array, Array]:  # noqa: E741
    """m, l, sinks [M, 1], o [M, D] -> (o, natural lse [M, 1]); 0 and -inf where nothing was attended to."""
    empty = m <= MASKED
    if sinks is not None:
        new_m = jnp.maximum(m, sinks)
        keep = jnp.exp2(m - new_m)
        m, l, o = new_m, l * keep + jnp.exp2(sinks - new_m), o * keep  # noqa: E741
    l = jnp.where(empty, 1.0, l)  # noqa: E741
    return o * jnp.where(empty, 0.0, v_scale / l), jnp.where(empty, -jnp.inf, m * (1 / LOG2_E) + jnp.log(l))


def column_to_row(x: Array) -> Array:
    """[M, 1] -> [1, M]: the diagonal of x spread over M columns, since a transposition wants whole tiles."""
    size = x.shape[0]
    diagonal = lax.broadcasted_iota(jnp.int32, (size, size), 0) == lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.sum(jnp.where(diagonal, x, 0.0), axis=0, keepdims=True)
