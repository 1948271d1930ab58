"""The sampler against plain numpy: thresholds by sorting, frequencies by counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sampler

VOCAB = 64
RANDOM, FILTERED, GREEDY = (jax.jit(f) for f in (sampler.random, sampler.filtered, sampler.greedy))


def metadata(rows, **fields):
    defaults = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "index": 0, "position": np.arange(rows),
    }  # fmt: skip
    values = {**defaults, **fields}
    floats = ("temperature", "top_p", "min_p")
    arrays = {k: jnp.broadcast_to(jnp.asarray(v, jnp.float32 if k in floats else jnp.int32), rows) for k, v in values.items()}
    seed = jnp.broadcast_to(jnp.asarray([3, 0], jnp.uint32), (rows, 2))
    return sampler.SamplingMetadata(**arrays, seed=seed, suppressed=jnp.full((rows, sampler.MAX_SUPPRESSED), VOCAB))


def kept(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The ids that may be drawn, by sorting."""
    scaled = logits.astype(np.float64) / temperature
    keep = scaled >= scaled.max() + (np.log(min_p) if min_p else -np.inf)
    if top_k:
        keep &= scaled >= np.sort(scaled)[-min(top_k, len(scaled))]
    p = np.where(keep, np.exp(scaled - scaled.max()), 0)
    order = np.argsort(-p)
    count = np.searchsorted(np.cumsum(p[order] / p.sum()), top_p) + 1
    return set(order[:count].tolist()) & set(np.flatnonzero(keep).tolist())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 3.0, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"top_k": 1000, "top_p": 0.999999},
    ],
    ids=str,
)
def test_draws_come_from_the_kept_tokens_in_proportion(settings):
    logits = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
    rows = 4000
    ids = np.asarray(FILTERED(jnp.broadcast_to(logits, (rows, VOCAB)), metadata(rows, **settings)))
    allowed = kept(logits, **settings)
    assert set(ids.tolist()) <= allowed
    scaled = np.where([i in allowed for i in range(VOCAB)], logits / settings.get("temperature", 1.0), -np.inf)
    expected = np.exp(scaled - scaled.max())
    expected /= expected.sum()
    counts = np.bincount(ids, minlength=VOCAB) / rows
    assert np.abs(counts - expected).max() < 4 * np.sqrt(0.25 / rows)


def test_filtered_without_filters_is_random_and_temperature_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 2, (50, VOCAB)), jnp.float32)
    plain = metadata(50, temperature=np.where(np.arange(50) % 2, 0.0, 1.0))
    drawn = RANDOM(logits, plain)
    assert np.array_equal(drawn, FILTERED(logits, plain))
    assert np.array_equal(drawn[1::2], GREEDY(logits)[1::2])
    assert not np.array_equal(drawn[::2], GREEDY(logits)[::2])


def test_a_draw_depends_on_seed_index_and_position_only():
    logits = jnp.broadcast_to(jnp.zeros(VOCAB), (8, VOCAB))
    same = RANDOM(logits, metadata(8, position=5, index=2))
    assert len(set(np.asarray(same).tolist())) == 1
    assert RANDOM(logits[:1], metadata(1, position=5, index=2))[0] == same[0]
    assert len(set(np.asarray(RANDOM(logits, metadata(8, position=5, index=np.arange(8)))).tolist())) > 4
    assert len(set(np.asarray(RANDOM(logits, metadata(8))).tolist())) > 4


def test_suppressed_ids_are_never_drawn():
    logits = jnp.zeros((100, VOCAB)).at[:, 3].set(50.0)
    blocked = metadata(100, temperature=np.where(np.arange(100) % 2, 0.0, 1.0))
    blocked = sampler.SamplingMetadata(**{**blocked.__dict__, "suppressed": blocked.suppressed.at[:, 0].set(3)})
    assert 3 not in np.asarray(FILTERED(logits, blocked)).tolist()
    assert set(np.asarray(RANDOM(logits, blocked)).tolist()) == {3}


def test_thresholds_are_exact_for_zeros_and_tiny_numbers():
    values = np.array([[-0.0, 0.0, 1e-37, -1e-37, -5.0, 3.0, 2.5, -np.inf]], np.float32)
    for k in range(1, 8):
        found = sampler._top_k_threshold(jnp.asarray(values), jnp.array([k]))
        # compared by XLA, as the sampler does: it takes denormal numbers for 0
        assert np.array_equal(jnp.asarray(values) >= found, values >= np.sort(values[0])[-k])


def test_logprobs_of_a_row():
    logits = np.random.default_rng(2).normal(0, 2, (3, VOCAB)).astype(np.float32)
    chosen, rank, top_ids, top = sampler.logprobs(jnp.asarray(logits), jnp.array([1, 2, 3]), 5)
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.allclose(chosen, reference[np.arange(3), [1, 2, 3]], atol=1e-5)
    assert rank.tolist() == [int((r > r[i]).sum()) + 1 for r, i in zip(reference, (1, 2, 3), strict=True)]
    assert np.array_equal(top_ids, np.argsort(-logits, axis=-1)[:, :5])
    assert np.allclose(top, np.sort(reference)[:, ::-1][:, :5], atol=1e-5)
