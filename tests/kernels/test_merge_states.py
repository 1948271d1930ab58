"""merge_states against float64, its algebra, and against attention over a split sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import merge_states

BACKENDS = ("xla", "reference")
MERGE = jax.jit(merge_states, static_argnames="backend")


@st.composite
def states(draw):
    """o, lse of 1 to 5 states; lse over a wide range or -inf, and o NaN there."""
    shape = (draw(st.integers(1, 5)), 3, 2)
    lse = draw(
        st.lists(st.one_of(st.just(-np.inf), st.floats(-80, 80, width=32)), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    )
    lse = np.array(lse, np.float32).reshape(shape)
    o = np.random.default_rng(draw(st.integers(0, 99))).standard_normal((*shape, 4)).astype(np.float32)
    o[np.isneginf(lse)] = np.nan
    return jnp.asarray(o), jnp.asarray(lse)


def merge_float64(o, lse):
    o, lse = np.nan_to_num(np.asarray(o, np.float64)), np.asarray(lse, np.float64)
    with np.errstate(divide="ignore"):
        total = np.logaddexp.reduce(lse, axis=0)
    share = np.exp(lse - np.where(np.isneginf(total), 0, total))
    return (o * share[..., None]).sum(0), total


def close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@given(states())
@settings(max_examples=60, deadline=None)
def test_equals_float64(backend, case):
    close(MERGE(*case, backend=backend), merge_float64(*case))


@given(states(), st.data())
@settings(max_examples=60, deadline=None)
def test_order_and_grouping_do_not_matter(case, data):
    o, lse = case
    order = np.array(data.draw(st.permutations(range(len(o)))))
    cut = data.draw(st.integers(1, len(o)))
    first, rest = order[:cut], order[cut:]
    merged_o, merged_lse = merge_states(o[first], lse[first])
    grouped = jnp.concatenate([o[rest], merged_o[None]]), jnp.concatenate([lse[rest], merged_lse[None]])
    close(merge_states(*grouped), MERGE(o, lse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_states_are_neutral_and_all_empty_gives_zero(backend):
    o, lse = jnp.full((2, 1, 1, 4), jnp.nan), jnp.full((2, 1, 1), -jnp.inf)
    merged = MERGE(o, lse, backend=backend)
    np.testing.assert_array_equal(merged[0], 0)
    assert np.isneginf(merged[1])
    merged = MERGE(o.at[1].set(3.0), lse.at[1].set(-200.0), backend=backend)
    np.testing.assert_array_equal(merged[0], 3.0)
    np.testing.assert_array_equal(merged[1], -200.0)


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_attention_over_parts_is_attention_over_the_whole(cut):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((n, 2, 8)), jnp.float32) for n in (3, 31, 31))

    def attend(k, v):
        scores = jnp.einsum("thd,shd->ths", q, k, precision="highest")
        return jnp.einsum("ths,shd->thd", jax.nn.softmax(scores), v, precision="highest"), jax.nn.logsumexp(scores, axis=-1)

    parts = attend(k[:cut], v[:cut]), attend(k[cut:], v[cut:])
    close(merge_states(*(jnp.stack(x) for x in zip(*parts, strict=True))), attend(k, v))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"o": np.zeros((3, 2, 4), np.float32)}, r"o: float32\[3, 2, 4\]"),
        ({"o": np.zeros((2, 3, 2, 4), np.float16)}, "o: float16"),
        ({"lse": np.zeros((2, 3), np.float32)}, "lse: float32"),
        ({"backend": "mosaic_gpu"}, "backend='mosaic_gpu'"),
    ],
)
def test_refuses_wrong_arguments(arguments, message):
    good = {"o": np.zeros((2, 3, 2, 4), np.float32), "lse": np.zeros((2, 3, 2), np.float32)}
    with pytest.raises(ValueError, match=message):
        merge_states(**(good | arguments))
