"""The TPU kernels compiled for real chips, none of which need be there: vector and scalar memory suffice, and no pool is copied."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from pallas_kernels import kv_write, paged_attention, pool_shape

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
NUM_PAGES = 997  # appears in no other shape, so that a copy of a pool is found in the compiled text
ALL_OPTIONS = {"sliding_window": 1000, "soft_cap": 3.0}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu"),
    pytest.mark.filterwarnings("ignore:The transpose of jax.Array is deprecated"),
]


@functools.cache
def device(chip):
    return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]


@pytest.fixture(autouse=True)
def compiler_alone(monkeypatch):
    """No question to a cloud's metadata server, and no lock against other processes: nothing here touches a chip."""
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        monkeypatch.setenv(name, value)


def compile_for(chip, function, *shapes, donate=()):
    place = SingleDeviceSharding(device(chip))
    arguments = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), x) for x in shapes]
    with jax.set_mesh(Mesh(np.array([device(chip)]), ("x",))):
        return jax.jit(function, donate_argnums=donate).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def layers_step(pools, q, k, v, slots, tables, lens, starts, distribution, slopes, *, backend, decode_only, options):
    """Write and attend in each of several layers, the output of one feeding the next."""
    new_pools = []
    for k_pages, v_pages in pools:
        num_kv_heads = k.shape[1]
        k_pages, v_pages = kv_write(k_pages, v_pages, k + q[:, :num_kv_heads], v + q[:, :num_kv_heads], slots, backend=backend)
        attend = functools.partial(paged_attention, sm_scale=0.1, decode_only=decode_only, backend=backend, **options)
        q = q + attend(q, k_pages, v_pages, tables, lens, starts, distribution, alibi_slopes=slopes, sinks=slopes)
        new_pools.append((k_pages, v_pages))
    return q, new_pools


def check_step(chip, backend, heads, dtype, page_dtype, page_size, *, decode_only, num_rows=64, pages_per_row=64, options=ALL_OPTIONS):
    """Compile a step of two layers; every pool is updated where it is."""
    num_heads, num_kv_heads, head_dim = heads
    array = jax.ShapeDtypeStruct
    pool = array(pool_shape(NUM_PAGES, page_size, num_kv_heads, head_dim, backend), page_dtype)
    num_tokens = num_rows if decode_only else 1024
    q, k = array((num_tokens, num_heads, head_dim), dtype), array((num_tokens, num_kv_heads, head_dim), dtype)
    ints = [array(s, jnp.int32) for s in ((num_tokens,), (num_rows, pages_per_row), (num_rows,), (num_rows + 1,), (2,))]
    step = functools.partial(layers_step, backend=backend, decode_only=decode_only, options=options)
    compiled = compile_for(chip, step, [(pool, pool)] * 2, q, k, k, *ints, array((num_heads,), jnp.float32), donate=0)
    pool_bytes = pool.size * pool.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * pool_bytes
    lines = compiled.as_text().splitlines()
    copies = [
        line for line in lines if f"[{NUM_PAGES}," in line.split(" = ")[-1].split("(")[0] and (" copy(" in line or " fusion(" in line)
    ]
    assert not copies
    assert sum("custom-call" in line and "tpu_custom_call" in line for line in lines) >= 4


TOKEN_MAJOR = [((32, 8, 128), 128), ((64, 8, 128), 16), ((8, 4, 256), 32), ((32, 32, 128), 64)]
LANE_MAJOR = [((32, 8, 64), 128), ((32, 32, 80), 128), ((9, 3, 96), 256), ((14, 2, 64), 128), ((8, 1, 128), 128), ((16, 8, 256), 128)]
DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn")]


def matrix(shapes):
    """(chip, shape, dtypes, decode_only), every seventh point, so that all pairs of values meet in some chip."""
    return list(itertools.product(CHIPS, shapes, DTYPES, (True, False)))[::7]


@pytest.mark.parametrize(("chip", "shape", "dtypes", "decode_only"), matrix(TOKEN_MAJOR))
def test_token_major_step(chip, shape, dtypes, decode_only):
    check_step(chip, "mosaic_tpu", shape[0], *dtypes, shape[1], decode_only=decode_only)


@pytest.mark.parametrize(("chip", "shape", "dtypes", "decode_only"), matrix(LANE_MAJOR))
def test_lane_major_step(chip, shape, dtypes, decode_only):
    check_step(chip, "mosaic_tpu_lanes", shape[0], *dtypes, shape[1], decode_only=decode_only)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("decode_only", [True, False])
def test_block_table_of_many_rows(chip, decode_only):
    """256 rows of 1,024 pages are four times what scalar memory is given."""
    check_step(
        chip, "mosaic_tpu", (32, 8, 128), "bfloat16", "bfloat16", 16, decode_only=decode_only, num_rows=256, pages_per_row=1024, options={}
    )


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("decode_only", [True, False])
def test_scales_for_each_slot(chip, decode_only):
    """Scales beside lane-major pages are read as they lie."""
    array = jax.ShapeDtypeStruct
    pool, scales = array(pool_shape(NUM_PAGES, 128, 8, 64, "mosaic_tpu_lanes"), jnp.int8), array((NUM_PAGES, 128, 8), jnp.float32)
    ints = [array(s, jnp.int32) for s in ((64, 64), (64,), (65,), (2,))]

    def attend(q, k_pages, v_pages, k_scale, v_scale, *metadata):
        options = {"sm_scale": 0.1, "decode_only": decode_only, "backend": "mosaic_tpu_lanes"}
        return paged_attention(q, k_pages, v_pages, *metadata, k_scale=k_scale, v_scale=v_scale, **options)

    compiled = compile_for(chip, attend, array((64, 32, 64), jnp.bfloat16), pool, pool, scales, scales, *ints)
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and f"[{NUM_PAGES}," in line]
