"""Hopper kernels of paged_attention under Mosaic GPU's interpreter, which raises for a data race, and compiled for real chips."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import DECODE, MIXED, OPTIONS, AttentionSuite
from matrix import AXES, matrix

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas has no Mosaic GPU here")
if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip(f"JAX {jax.__version__} has no public Mosaic GPU interpreter; 0.12 has", allow_module_level=True)

from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.options import Options

SIXTEEN_BIT = [dtypes for dtypes in AXES["dtypes"] if dtypes[0] != "float32" and dtypes[1] in ("bfloat16", "float16")]
EIGHT_BIT = [dtypes for dtypes in AXES["dtypes"] if dtypes[0] != "float32" and dtypes[1] not in ("bfloat16", "float16")]
NO_SLOTS = [feature for feature in AXES["feature"] if feature not in ("slots", "all")]
GROUPS_OF_TESTS = (
    matrix(dtypes=SIXTEEN_BIT, feature=NO_SLOTS)
    + matrix(dtypes=EIGHT_BIT, feature=NO_SLOTS, head_dim=(64, 96, 128))
    + matrix(dtypes=EIGHT_BIT, feature=("slots", "all"), head_dim=(64, 96, 128), kv_heads=(8,))
)
# The interpreter takes seconds a case, so every third is enough here; the rest are marked slow.
CASES = [pytest.param(case, id=case.plain_name, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, case in enumerate(GROUPS_OF_TESTS)]


def in_16_bits(cases):
    """The shared cases in bfloat16; the kernels take no float32."""
    return [dataclasses.replace(case, dtype="bfloat16") for case in cases]


class TestMosaicGpu(AttentionSuite):
    """The Hopper kernels against the reference."""

    backend = "mosaic_gpu"
    interpret = True
    atol: ClassVar = {"bfloat16": 2e-2, "float16": 4e-3}

    @pytest.mark.parametrize("case", CASES)
    def test_matrix(self, case):
        self.check(case)

    @pytest.mark.parametrize("case", in_16_bits([*DECODE, *MIXED]), ids=str)
    def test_shapes_and_lengths(self, case):
        self.check(case)

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
    @pytest.mark.parametrize("case", in_16_bits([DECODE[4], MIXED[5]]), ids=["decode", "mixed"])
    def test_options(self, case, options):
        head = {name: value[: case.heads] if np.ndim(value) else value for name, value in options.items()}
        self.check(case, **head)

    @pytest.mark.parametrize("case", in_16_bits([DECODE[3]]), ids=str)
    def test_bfloat16(self, case):
        self.check(case)

    def test_rows_may_share_pages(self):
        arrays = dataclasses.replace(DECODE[3], dtype="bfloat16").build()
        tables = arrays[3].at[1].set(arrays[3][4])
        arrays = [arrays[0].at[1].set(arrays[0][4]), *arrays[1:3], tables, arrays[4].at[1].set(arrays[4][4]), *arrays[5:]]
        o, _ = self.attend(arrays, decode_only=True)
        np.testing.assert_allclose(o[1].astype(jnp.float32), o[4].astype(jnp.float32), atol=2e-2, rtol=0)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        """With fixed splits, exactly; the second row is cut in two spans."""
        case = dataclasses.replace(DECODE[3], num_queries=(1, 1, 1), prefixes=(70, 1100, 3), dtype="bfloat16")
        arrays = case.build()
        attend = functools.partial(gpu.attend, options=Options(0.125), decode_only=True, interpret=True, fixed_splits=True)
        together, _ = attend(*arrays)
        for row in range(3):
            lens = jnp.where(jnp.arange(len(arrays[4])) == row, arrays[4], 0)
            alone, _ = attend(*arrays[:4], lens, *arrays[5:])
            np.testing.assert_array_equal(np.asarray(alone[row], np.float32), np.asarray(together[row], np.float32))
            assert not np.asarray(jnp.delete(alone, row, axis=0), np.float32).any()
