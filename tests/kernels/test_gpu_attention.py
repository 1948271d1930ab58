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

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

from pallas_kernels.paged_attention import gpu, gpu_tiles
from pallas_kernels.paged_attention.options import Options

SIXTEEN_BIT = [dtypes for dtypes in AXES["dtypes"] if dtypes[0] != "float32" and dtypes[1] in ("bfloat16", "float16")]
EIGHT_BIT = [dtypes for dtypes in AXES["dtypes"] if dtypes[0] != "float32" and dtypes[1] not in ("bfloat16", "float16")]
NO_SLOTS = [feature for feature in AXES["feature"] if feature not in ("slots", "all")]
SAMPLE = (
    matrix(dtypes=SIXTEEN_BIT, feature=NO_SLOTS)
    + matrix(dtypes=EIGHT_BIT, feature=NO_SLOTS, head_dim=(64, 96, 128))
    + matrix(dtypes=EIGHT_BIT, feature=("slots", "all"), head_dim=(64, 96, 128), kv_heads=(8,))
)


def some(cases, every):
    """All cases, those that are not the first of ``every`` marked exhaustive: the interpreter takes seconds for each."""
    return [pytest.param(case, id=case.plain_name, marks=[] if i % every == 0 else pytest.mark.exhaustive) for i, case in enumerate(cases)]


SLOT_SCALES = Options(1.0, k_scale=np.ones((9, 16, 2)), v_scale=np.ones((9, 16, 2)))
MANY_HEADS = Options(1.0, k_scale=np.ones((9, 16, 64)), v_scale=np.ones((9, 16, 64)))


def in_16_bits(cases):
    """The shared cases in bfloat16; the kernels take no float32."""
    return [dataclasses.replace(case, dtype="bfloat16") for case in cases]


class TestMosaicGpu(AttentionSuite):
    """The Hopper kernels against the reference."""

    backend = "mosaic_gpu"
    interpret = True
    atol: ClassVar = {"bfloat16": 2e-2, "float16": 4e-3}

    @pytest.mark.parametrize("case", some(SAMPLE, 8))
    def test_matrix(self, case):
        self.check(case)

    @pytest.mark.parametrize("case", some(in_16_bits([*DECODE, *MIXED]), 3))
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
        """With deterministic=True, exactly; the second row is cut in two spans."""
        case = dataclasses.replace(DECODE[3], num_queries=(1, 1, 1), prefixes=(70, 1100, 3), dtype="bfloat16")
        arrays = case.build()
        attend = functools.partial(self.attend, decode_only=True, deterministic=True)
        together, _ = attend(arrays)
        for row in range(3):
            lens = jnp.where(jnp.arange(len(arrays[4])) == row, arrays[4], 0)
            alone, _ = attend([*arrays[:4], lens, *arrays[5:]])
            np.testing.assert_array_equal(np.asarray(alone[row], np.float32), np.asarray(together[row], np.float32))
            assert not np.asarray(jnp.delete(alone, row, axis=0), np.float32).any()


def test_a_removed_wait_is_a_race(monkeypatch):
    """Without the wait for room, the memory warpgroup overwrites a block that is still being read."""
    case = dataclasses.replace(DECODE[3], num_queries=(1,), prefixes=(1400,), heads=2, kv_heads=1, dtype="bfloat16")
    arrays = case.build()
    attend = functools.partial(gpu.attend, *arrays, Options(0.125), decode_only=True, interpret=True)
    attend()
    monkeypatch.setattr(gpu_tiles, "wait_for_room", lambda refs, slot: None)
    try:
        # What the interpreter sees first depends on its threads: the race itself, or a completion of the barrier that nobody waited for.
        with pytest.raises(Exception, match=r"RACE DETECTED|observ"):
            attend()
    finally:
        reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("q", "pages", "options", "message"),
    [
        (((4, 8, 64), "float32"), ((9, 16, 2, 64), "float32"), Options(1.0), "q.dtype=float32"),
        (((4, 8, 64), "bfloat16"), ((9, 16, 2, 64), "float16"), Options(1.0), "pages.dtype=float16"),
        (((4, 8, 72), "bfloat16"), ((9, 16, 2, 72), "bfloat16"), Options(1.0), "head_dim=72"),
        (((4, 8, 64), "bfloat16"), ((9, 24, 2, 64), "bfloat16"), Options(1.0), "page_size=24"),
        (((4, 71, 64), "bfloat16"), ((9, 16, 1, 64), "bfloat16"), Options(1.0), "71 heads over 1"),
        (((4, 8, 256), "bfloat16"), ((9, 16, 2, 256), "int8"), Options(1.0), "head_dim=256"),
        (((4, 8, 64), "bfloat16"), ((9, 16, 2, 64), "int8"), SLOT_SCALES, "num_kv_heads=2"),
        (((4, 64, 128), "bfloat16"), ((9, 16, 64, 128), "int8"), MANY_HEADS, "277504 bytes of shared memory"),
    ],
)
def test_refuses_and_says_why(q, pages, options, message):
    assert message in gpu.unsupported(*q, *pages, options)
    assert gpu.unsupported((4, 8, 64), "bfloat16", (9, 16, 2, 64), "bfloat16", Options(1.0)) is None
