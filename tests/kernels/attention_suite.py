"""The suite that every backend of paged_attention inherits: cases, the expected results, the checks."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import Case

from pallas_kernels import paged_attention
from pallas_kernels.pool import from_token_major

ATTEND = jax.jit(
    paged_attention,
    static_argnames=("sm_scale", "decode_only", "sliding_window", "soft_cap", "return_lse", "backend", "interpret", "deterministic"),
    compiler_options={"xla_backend_optimization_level": 0},
)


def dense_float64(arrays, sm_scale, sliding_window=None, soft_cap=None, alibi_slopes=None, sinks=None, k_scale=1.0, v_scale=1.0):
    """Dense attention, one query and head at a time, in numpy float64 -> (o, lse)."""
    q, k_pages, v_pages = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays[:3])
    k_scale, v_scale = (np.asarray(x, np.float64)[..., None] for x in (k_scale, v_scale))
    tables, lens, starts, (_, num_rows) = (np.asarray(x) for x in arrays[3:])
    o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row in range(num_rows):
        k, v = (x[tables[row]].reshape(-1, *x.shape[2:]) for x in (k_pages * k_scale, v_pages * v_scale))
        for token in range(starts[row], starts[row + 1]):
            position = lens[row] - (starts[row + 1] - token)
            if position < 0:
                continue
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                scores = k[first : position + 1, kv_head] @ q[token, head] * sm_scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores = scores + float(alibi_slopes[head]) * (np.arange(first, position + 1) - position)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sink - top)
                o[token, head] = weights @ v[first : position + 1, kv_head] / total
                lse[token, head] = top + np.log(total)
    return o, lse


def around(page_size, longest):
    """Lengths where paging goes wrong."""
    return (1, page_size - 1, page_size, page_size + 1, longest)


DECODE = [
    Case((1,) * 5, tuple(n - 1 for n in around(s, longest)), h, kvh, d, s, decode_only=True)
    for s, longest, h, kvh, d in [
        (8, 300, 3, 3, 64),
        (16, 300, 9, 3, 64),
        (16, 257, 4, 1, 80),
        (32, 300, 14, 2, 64),
        (128, 300, 8, 1, 128),
        (16, 130, 16, 8, 64),
    ]
] + [
    Case((1,) * 20, tuple((37 * i) % 290 for i in range(20)), decode_only=True, padding_rows=4),
    Case((1,), (140,), decode_only=True, padding_rows=1),
]
MIXED = [
    Case((1, 1, 1, 5, 200, 64, 65, 1), (0, 16, 150, 0, 0, 64, 63, 40)),
    Case((3, 15, 16, 17, 130), (0, 1, 16, 128, 200), 4, 1, 80, 16),
    Case((1, 1, 70), (31, 32, 90), 14, 2, 64, 32, padding_rows=0),
    Case((1, 2, 140), (5, 0, 140), 8, 1, 128, 128, padding_tokens=0),
    Case((1, 1, 40, 9), (7, 8, 0, 7), 3, 3, 64, 8, padding_rows=9),
    Case((1, 1, 1), (7, 70, 33), padding_rows=40),
    Case((1, 66, 2), (7, 70, 33), 16, 8, 64),
]
CASES = DECODE + MIXED
OPTIONS = {
    "window": {"sliding_window": 20},
    "long window": {"sliding_window": 140},
    "soft cap": {"soft_cap": 1.5},
    "alibi": {"alibi_slopes": np.linspace(0.02, 0.5, 9, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-2, 4, 9, dtype=np.float32)},
    "scales": {"k_scale": np.float32(0.5), "v_scale": np.float32(3.0)},
}
OPTIONS["all"] = functools.reduce(lambda a, b: b | a, OPTIONS.values())


class AttentionSuite:
    """What every backend must do. A subclass sets ``backend`` and, where it must, the others, and adds ``test_matrix``:

        @pytest.mark.parametrize("case", matrix(...), ids=lambda case: case.plain_name)
        def test_matrix(self, case):
            self.check(case)

    Cases are token-major; ``attend`` gives the pools the backend's layout. Expected is what the reference gives.
    """

    backend = "reference"
    interpret = False
    atol: ClassVar = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
    rtol: ClassVar = {"float32": 0, "bfloat16": 2**-7, "float16": 2**-10}  # the result's own rounding

    def attend(self, arrays, **options):
        q, k_pages, v_pages, *metadata = arrays
        k_pages, v_pages = (from_token_major(pages, self.backend) for pages in (k_pages, v_pages))
        same = {"sm_scale": 0.125, "return_lse": True, "backend": self.backend, "interpret": self.interpret}
        return ATTEND(q, k_pages, v_pages, *metadata, **same, **options)

    def expected(self, arrays, decode_only, **options):
        o, lse = ATTEND(*arrays, sm_scale=0.125, return_lse=True, backend="reference", decode_only=decode_only, **options)
        return np.asarray(o.astype(jnp.float32)), np.asarray(lse)

    def check(self, case, **options):
        arrays, options = case.build(), case.options() | options
        o, lse = self.attend(arrays, decode_only=case.decode_only, **options)
        want_o, want_lse = self.expected(arrays, case.decode_only, **options)
        assert o.dtype == case.dtype and o.shape == arrays[0].shape and lse.dtype == np.float32
        np.testing.assert_allclose(np.asarray(o.astype(jnp.float32)), want_o, atol=self.atol[case.dtype], rtol=self.rtol[case.dtype])
        np.testing.assert_allclose(np.asarray(lse), want_lse, atol=self.atol[case.dtype], rtol=1e-5)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_shapes_and_lengths(self, case):
        self.check(case)

    @pytest.mark.parametrize("case", [DECODE[1], DECODE[3], MIXED[0], MIXED[1]], ids=str)
    def test_bfloat16(self, case):
        self.check(dataclasses.replace(case, dtype="bfloat16"))

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
    @pytest.mark.parametrize("case", [DECODE[6], MIXED[0]], ids=["decode", "mixed"])
    def test_options(self, case, options):
        self.check(case, **options)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        arrays = MIXED[0].build()
        together, _ = self.attend(arrays)
        q, k_pages, v_pages, tables, lens, starts, _ = (np.asarray(x) for x in arrays)
        for row in range(len(MIXED[0].num_queries)):
            first, last = starts[row], starts[row + 1]
            alone_q = np.full_like(q, np.nan)
            alone_q[: last - first] = q[first:last]
            alone_tables, alone_lens = np.roll(tables, -row, axis=0), np.zeros_like(lens)
            alone_lens[0] = lens[row]
            alone_starts = np.concatenate([[0], np.full(len(lens), last - first)]).astype(np.int32)
            distribution = np.array([last - first == 1, 1], np.int32)
            arguments = alone_q, k_pages, v_pages, alone_tables, alone_lens, alone_starts, distribution
            alone, _ = self.attend([jnp.asarray(x) for x in arguments])
            np.testing.assert_allclose(alone[: last - first], together[first:last], atol=1e-6, rtol=0)
            assert not np.asarray(alone[last - first :]).any()

    def test_rows_may_share_pages(self):
        arrays = DECODE[6].build()
        tables = arrays[3].at[1].set(arrays[3][7])
        arrays = [arrays[0].at[1].set(arrays[0][7]), *arrays[1:3], tables, arrays[4].at[1].set(arrays[4][7]), *arrays[5:]]
        o, _ = self.attend(arrays, decode_only=True)
        np.testing.assert_allclose(o[1], o[7], atol=1e-6, rtol=0)
