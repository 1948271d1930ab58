"""Online softmax (Milakov & Gimelshein, arXiv:1805.02867) over chunks of keys, shared by the XLA decode and prefill loops."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.options import Options

# Finite, so that a row with nothing to attend to in a chunk stays free of inf - inf. What such a row sums up at this maximum is
# wiped out by the first real score, whose rescaling factor exp(MASKED - m) is 0, or by `finish`.
MASKED = -1e30


class Running(NamedTuple):
    """Softmax state of some queries: B independent problems of M queries each."""

    m: Array  # f32 [B, M] largest score so far
    l: Array  # f32 [B, M] sum of exp(score - m)  # noqa: E741
    o: Array  # f32 [B, M, D] sum of exp(score - m) * value


def start(batch: int, num_queries: int, width: int) -> Running:
    """The state before any key is seen."""
    shape = (batch, num_queries)
    return Running(jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, width), jnp.float32))


def modify_scores(scores: Array, distance: Array, slopes: Array | None, options: Options) -> Array:
    """q . k -> scores, float32; ``distance`` (key minus query position) and ``slopes`` broadcast against them."""
    scores = scores * (options.sm_scale if options.k_scale is None or options.slot_scales else options.sm_scale * options.k_scale)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    if slopes is not None:
        scores += slopes * distance.astype(jnp.float32)
    return scores


def update(state: Running, scores: Array, mask: Array, v: Array) -> Running:
    """Add a chunk: scores f32 [B, M, C], mask (broadcast against scores), v [B, C, W] with finite values everywhere."""
    scores = jnp.where(mask, scores, MASKED)
    m = jnp.maximum(state.m, scores.max(-1))
    p = jnp.exp(scores - m[..., None])
    keep = jnp.exp(state.m - m)
    pv = jnp.einsum("bmc,bcw->bmw", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Running(m, state.l * keep + p.sum(-1), state.o * keep[..., None] + pv)


def finish(m: Array, l: Array, o: Array, sinks: Array | None, v_scale) -> tuple[Array, Array]:  # noqa: E741
    """Normalise: m, l [..., H], o [..., H, D] -> (o, lse [..., H]); 0 and -inf where nothing was attended to."""
    empty = m <= MASKED
    if sinks is not None:
        new_m = jnp.maximum(m, sinks)
        keep = jnp.exp(m - new_m)
        m, l, o = new_m, l * keep + jnp.exp(sinks - new_m), o * keep[..., None]  # noqa: E741
    l = jnp.where(empty, 1.0, l)  # noqa: E741
    factor = jnp.where(empty, 0.0, (1.0 if v_scale is None else v_scale) / l)
    return o * factor[..., None], jnp.where(empty, -jnp.inf, m + jnp.log(l))
