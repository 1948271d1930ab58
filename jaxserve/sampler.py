"""From logits to token ids: temperature, top_k, top_p, min_p and counter-based randomness, without sorting the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

NEG_INF = float("-inf")
MAX_SUPPRESSED = 16  # ids a row can suppress until min_tokens is reached


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingMetadata:
    """How each of R rows is sampled; every field is an array, so one program serves any mix of requests."""

    temperature: jax.Array  # f32[R]; 0: greedy
    top_k: jax.Array  # i32[R]; 0: all
    top_p: jax.Array  # f32[R]
    min_p: jax.Array  # f32[R]
    seed: jax.Array  # u32[R, 2] low and high half
    index: jax.Array  # i32[R] which of a request's n sequences
    position: jax.Array  # i32[R] position of the token to sample
    suppressed: jax.Array  # i32[R, MAX_SUPPRESSED] ids that must not be sampled; the vocabulary size: none


def greedy(logits: jax.Array) -> jax.Array:
    """The best id of each row, i32[R]; the lowest id among equals.

    In two levels where the vocabulary divides: XLA on CPU takes maxima with vector instructions, but an argmax one number at a time.
    """
    rows, vocab = logits.shape
    width = math.gcd(vocab, 64)
    if width == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    groups = logits.reshape(rows, -1, width)
    best = jnp.argmax(groups.max(-1), axis=-1)
    within = jnp.take_along_axis(groups, best[:, None, None], axis=1)[:, 0]
    return (best * width + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def random(logits: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    """Ids i32[R] drawn from softmax(logits / temperature); rows of temperature 0 are greedy."""
    return _draw(logits, _scaled(logits, metadata), metadata)


def filtered(logits: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    """Like `random`, after suppressed ids, min_p, top_k and top_p took tokens away, in vLLM's order: temperature first."""
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, metadata.suppressed].set(NEG_INF, mode="drop")
    scaled = _scaled(logits, metadata)
    best = jnp.max(scaled, axis=-1, keepdims=True)
    keep = scaled >= best + jnp.log(metadata.min_p)[:, None]
    keep &= scaled >= _top_k_threshold(scaled, metadata.top_k)[:, None]
    kept = jnp.where(keep, scaled, NEG_INF)
    kept = jnp.where(kept >= _top_p_threshold(kept, metadata.top_p)[:, None], kept, NEG_INF)
    return _draw(logits, kept, metadata)


VARIANTS = {"random": random, "filtered": filtered}  # beside greedy, which needs no metadata


def logprobs(logits: jax.Array, ids: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of each row's token: its log-probability f32[R] and rank i32[R] (1 is best), and the num_top best ids and logprobs [R, num_top].

    They are the model's own: temperature and the filters do not change them.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)
    rank = jnp.sum(logits > chosen, axis=-1).astype(jnp.int32) + 1
    top_logits, top_ids = jax.lax.top_k(logits, num_top)
    return (chosen - normaliser)[:, 0], rank, top_ids.astype(jnp.int32), top_logits - normaliser


def _scaled(logits: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    temperature = metadata.temperature[:, None]
    return logits / jnp.where(temperature > 0, temperature, 1.0)


def _draw(logits: jax.Array, scaled: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    """Gumbel-max draw. The key depends on seed, sequence index and position alone, never on the batch."""

    def row_key(seed: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, index), position)

    keys = jax.vmap(row_key)(metadata.seed, metadata.index, metadata.position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], jnp.float32))(keys)
    return jnp.where(metadata.temperature > 0, greedy(scaled + noise), greedy(logits))


def _ordered(x: jax.Array) -> jax.Array:
    """Float32 to u32 such that the order of the numbers is kept."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _unordered(u: jax.Array) -> jax.Array:
    bits = jnp.where(u >> 31 == 1, u & jnp.uint32(0x7FFFFFFF), ~u)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(rows: int, satisfied) -> jax.Array:
    """The largest float32 t of each row for which satisfied(t) holds; it must hold for all smaller ones too.

    Bisects over the bits of the float, so the answer is exact after 32 passes, where a sort of the vocabulary would take far longer.
    """

    def narrow(bit: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (jnp.uint32(1) << (jnp.uint32(31) - bit.astype(jnp.uint32)))
        return jnp.where(satisfied(_unordered(trial)), trial, found)

    return _unordered(jax.lax.fori_loop(0, 32, narrow, jnp.zeros(rows, jnp.uint32)))


def _top_k_threshold(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    """The k-th largest value of each row; -inf where top_k is 0."""
    k = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1])
    threshold = _largest_threshold(scaled.shape[0], lambda t: jnp.sum(scaled >= t[:, None], axis=-1) >= k)
    return jnp.where(top_k > 0, threshold, NEG_INF)


def _top_p_threshold(scaled: jax.Array, top_p: jax.Array) -> jax.Array:
    """The largest value such that the tokens from it upwards have probability top_p or more; -inf where top_p is 1."""
    probabilities = jax.nn.softmax(scaled, axis=-1)

    def enough(t: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(scaled >= t[:, None], probabilities, 0.0), axis=-1) >= top_p

    return jnp.where(top_p < 1, _largest_threshold(scaled.shape[0], enough), NEG_INF)
