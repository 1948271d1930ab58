"""The Hopper kernels compile for real chips without spills and within shared memory; nothing is executed.

Compiling runs in a process of its own, because the CUDA plugin looks for a driver when JAX starts, unless told not to.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.compile_targets import HOPPER_SHARED_MEMORY_BYTES, REPORT_VARIABLES, parse_resources

ROOT = Path(__file__).parents[2]
PLAIN = [("bfloat16", "bfloat16", d, False) for d in (64, 80, 96, 128, 256)]
FULL = [("float16", "float16", d, True) for d in (64, 80, 96, 128, 256)]
EIGHT_BIT = [("bfloat16", page, d, options) for page in ("int8", "float8_e4m3fn") for d in (64, 96, 128) for options in (False, True)]
FEW = [PLAIN[3], FULL[3], EIGHT_BIT[5]]
OLD_JAX = jax.__version_info__ < (0, 11)
NO_PLUGIN = importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None


def compile_case(target, dtype, page_dtype, head_dim, all_options):
    """Compile one mixed step, which has both kernels, and return what they use."""
    import jax.numpy as jnp

    from pallas_kernels import paged_attention
    from pallas_kernels.compile_targets import compile_for_gpu

    rows, tokens, heads, kv_heads, pages, page_size, width = 32, 512, 32, 8, 512, 16, 64
    array = jax.ShapeDtypeStruct
    pool = array((pages, page_size, kv_heads, head_dim), page_dtype)
    metadata = [array(shape, jnp.int32) for shape in ((rows, width), (rows,), (rows + 1,), (2,))]
    given, fixed = {}, {}
    if all_options:
        fixed = {"sliding_window": 1000, "soft_cap": 30.0}
        given = {name: array((heads,), jnp.float32) for name in ("alibi_slopes", "sinks")}
    if page_dtype != dtype:
        shape = pool.shape[:3] if all_options else ()
        given |= {name: array(shape, jnp.float32) for name in ("k_scale", "v_scale")}

    def step(arrays, given):
        return paged_attention(*arrays, sm_scale=0.1, backend="mosaic_gpu", return_lse=True, **fixed, **given)

    _, used = compile_for_gpu(step, ([array((tokens, heads, head_dim), dtype), pool, pool, *metadata], given), target)
    return {"registers": used.registers, "spill_bytes": used.spill_bytes, "shared_memory_bytes": used.shared_memory_bytes}


def compile_in_a_process(target, cases):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": str(ROOT)}
    environment |= dict.fromkeys(REPORT_VARIABLES, "1")
    command = [sys.executable, __file__, target, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(NO_PLUGIN, reason="jax[cuda13] is not installed, whose compiler this needs")
@pytest.mark.skipif(OLD_JAX, reason=f"JAX {jax.__version__} is too old for the Hopper kernels, which need 0.11")
@pytest.mark.parametrize(
    ("target", "cases"),
    [
        pytest.param("h100", FEW, id="h100"),
        pytest.param("h200", FEW, id="h200"),
    ]
    + [
        pytest.param(target, cases, id=f"{target}-{name}", marks=pytest.mark.exhaustive)
        for target in ("h100", "h200")
        for name, cases in (("plain", PLAIN), ("all-options", FULL), ("int8", EIGHT_BIT[:6]), ("float8", EIGHT_BIT[6:]))
    ],
)
def test_kernels_compile(target, cases):
    for case, used in zip(cases, compile_in_a_process(target, cases), strict=True):
        assert len(used["registers"]) == 2, f"{case}: expected the decode and the prefill kernel, got {used}"
        assert used["spill_bytes"] == 0, f"{case}: {used}"
        assert used["shared_memory_bytes"] <= HOPPER_SHARED_MEMORY_BYTES, f"{case}: {used}"


def test_report_of_spills_is_read():
    text = """Resources(smem_scratch_bytes=1000, x=0)
ptxas info    : Compiling entry function 'a_kernel' for 'sm_90a'
ptxas         .     576 bytes stack frame, 612 bytes spill stores, 616 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 17 bytes smem
"""
    used = parse_resources(text)
    assert (used.registers, used.spill_bytes, used.shared_memory_bytes) == ({"a_kernel": 168}, 1228, 1000)
    with pytest.raises(RuntimeError, match="no report of a Mosaic GPU kernel"):
        parse_resources("nothing")


if __name__ == "__main__":
    print(json.dumps([compile_case(sys.argv[1], *case) for case in json.loads(sys.argv[2])]))
