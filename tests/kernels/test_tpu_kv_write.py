"""The TPU kernels of kv_write in Pallas' TPU interpreter, with its race detector, against a numpy loop."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_kv_write import TestKvWrite as KvWriteSuite

from pallas_kernels.kv_write import tpu_lanes
from pallas_kernels.kv_write.reference import kv_write_reference

RUNS = {"one run": [(5, 90)], "short runs": [(70, 3), (1, 17), (130, 40), (300, 128)], "backwards": [(600, 60), (400, 60), (100, 60)]}


class TestTokenMajor(KvWriteSuite):
    backend = "mosaic_tpu"
    interpret = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)

    @pytest.mark.parametrize("mode", ["on_wait", "eager"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("runs", RUNS.values(), ids=list(RUNS))
    def test_runs_of_slots(self, runs, dtype, mode):
        """Tokens that follow each other in a page, over pages' bounds, and among other runs of the same page."""
        self.interpret = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
        slots = np.concatenate([np.arange(first, first + size) for first, size in runs]).astype(np.int32)
        slots[7] = -1
        case = self.make_case(np.float32, num_tokens=len(slots), num_pages=-(-768 // self.page_size))
        k_pages, v_pages, k, v = (jnp.round(8 * x).astype(dtype) for x in case[:4])
        expected = kv_write_reference(k_pages, v_pages, k, v, slots)
        for got, want in zip(self.write(k_pages, v_pages, k, v, jnp.asarray(slots)), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), want.astype(np.float32))


class TestLaneMajor(TestTokenMajor):
    backend = "mosaic_tpu_lanes"
    page_size = 256  # two tiles of lanes

    def test_several_steps_of_the_grid(self):
        """More tokens than one step takes, so that tiles are read again after they were written."""
        k_pages, v_pages, k, v, slots = self.make_case(num_tokens=tpu_lanes.STEP_TOKENS + 300)
        expected = kv_write_reference(k_pages, v_pages, k, v, slots)
        for got, want in zip(self.write(k_pages, v_pages, k, v, jnp.asarray(slots)), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
