"""paged_attention: the reference against float64 dense attention, the XLA path against the reference; refusals."""

import concurrent.futures
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import DECODE, MIXED, AttentionSuite, dense_float64
from matrix import AXES, FEATURES, matrix, pairwise

from pallas_kernels import BACKENDS, paged_attention, pool_shape
from pallas_kernels.pool import from_token_major, to_token_major

SCALAR_FEATURES = [name for name, options in FEATURES.items() if options.get("scales") != "slots"]


class TestReference(AttentionSuite):
    """The reference against float64."""

    backend = "reference"

    def expected(self, arrays, decode_only, **options):
        return dense_float64(arrays, 0.125, **options)

    @pytest.mark.parametrize("case", matrix(), ids=lambda case: case.plain_name)
    def test_matrix(self, case):
        self.check(case)


class TestXla(AttentionSuite):
    """The XLA path against the reference."""

    backend = "xla"

    @pytest.mark.parametrize("case", matrix(), ids=lambda case: case.plain_name)
    def test_matrix(self, case):
        self.check(case)

    def test_decode_only_equals_mixed(self):
        arrays = DECODE[6].build()
        for got, want in zip(self.attend(arrays, decode_only=True), self.attend(arrays), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=0)


class TestNumba(AttentionSuite):
    """The native loops against the reference: float32 alone."""

    backend = "numba"

    @pytest.mark.parametrize("case", matrix(dtypes=[("float32", "float32")], feature=SCALAR_FEATURES), ids=lambda case: case.plain_name)
    def test_matrix(self, case):
        self.check(case)

    def test_bfloat16(self):
        with pytest.raises(ValueError, match=r"float32 queries and pages, not bfloat16.*backend 'xla' can"):
            self.check(dataclasses.replace(DECODE[1], dtype="bfloat16"))

    def test_calls_side_by_side(self):
        calls = [case.build(seed) for seed, case in enumerate([DECODE[6], MIXED[0]] * 4)]
        alone = [self.attend(arrays)[0] for arrays in calls]
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            for _ in range(20):
                for got, want in zip(threads.map(lambda arrays: self.attend(arrays)[0], calls), alone, strict=True):
                    np.testing.assert_array_equal(got, want)


def test_the_matrix_is_pairwise_and_the_same_each_time():
    points = pairwise(AXES)
    for a, b in itertools.combinations(AXES, 2):
        assert {(point[a], point[b]) for point in points} == set(itertools.product(AXES[a], AXES[b]))
    assert points == pairwise(AXES) and len(points) < 80


def test_layouts_hold_the_same_tokens():
    pages = jnp.arange(2 * 128 * 3 * 4).reshape(2, 128, 3, 4)
    for backend in BACKENDS:
        own = from_token_major(pages, backend)
        assert own.shape == pool_shape(2, 128, 3, 4, backend)
        np.testing.assert_array_equal(to_token_major(own, backend), pages)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", np.zeros((4, 5, 64), np.float32), "q.shape"),
        ("q", np.zeros((4, 9, 64), np.int32), "q: int32"),
        ("k_pages", np.zeros((4, 16, 3, 32), np.float32), "k_pages.shape"),
        ("v_pages", np.zeros((4, 16, 3, 64), np.float16), "v_pages: float16"),
        ("block_tables", np.zeros((4, 2), np.int16), "block_tables: int16"),
        ("seq_lens", np.zeros((3,), np.int32), "seq_lens"),
        ("query_start_loc", np.zeros((4,), np.int32), "query_start_loc"),
        ("distribution", np.zeros((3,), np.int32), "distribution"),
        ("sliding_window", 0, "sliding_window=0"),
        ("soft_cap", -1.0, "soft_cap=-1.0"),
        ("sinks", np.zeros((3,), np.float32), "sinks.shape"),
        ("k_scale", np.ones((4, 16, 2), np.float32), "k_scale.shape"),
        ("v_scale", np.ones((4, 16, 3), np.float32), "k_scale and v_scale"),
        ("backend", "cuda", "backend='cuda'"),
    ],
)
def test_refuses_wrong_arguments(name, value, message):
    arguments = {
        "q": np.zeros((4, 9, 64), np.float32),
        "k_pages": np.zeros((4, 16, 3, 64), np.float32),
        "v_pages": np.zeros((4, 16, 3, 64), np.float32),
        "block_tables": np.zeros((4, 2), np.int32),
        "seq_lens": np.zeros(4, np.int32),
        "query_start_loc": np.zeros(5, np.int32),
        "distribution": np.zeros(2, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | {name: value}), sm_scale=1.0)


def test_decode_only_wants_a_token_for_each_row():
    arrays = MIXED[0].build()
    with pytest.raises(ValueError, match="decode_only=True"):
        paged_attention(*arrays, sm_scale=1.0, decode_only=True)
