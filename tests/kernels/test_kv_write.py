"""kv_write against a numpy loop, its in-place promise, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write, paged_attention, pool_shape
from pallas_kernels.kv_write.reference import kv_write_reference


def make_case(dtype=np.float32, num_pages=6, page_size=8, num_kv_heads=3, head_dim=16, num_tokens=7, seed=0):
    rng = np.random.default_rng(seed)
    shape = pool_shape(num_pages, page_size, num_kv_heads, head_dim, "xla")
    k_pages, v_pages = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, num_kv_heads, head_dim)), dtype) for _ in range(2))
    slots = rng.permutation(num_pages * page_size)[:num_tokens].astype(np.int32)
    return k_pages, v_pages, k, v, slots


class TestKvWrite:
    """A later backend inherits this class and replaces ``write``."""

    write = staticmethod(jax.jit(kv_write))

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
    @pytest.mark.parametrize("skipped", ["none", "some", "all"])
    def test_equals_reference(self, dtype, num_tokens, skipped):
        k_pages, v_pages, k, v, slots = make_case(dtype, num_tokens=num_tokens)
        if skipped != "none":
            # Any negative slot is a skip, not an index from the end.
            slots[:: 2 if skipped == "some" else 1] = np.resize([-1, -2, -(2**31)], len(slots[:: 2 if skipped == "some" else 1]))
        expected = kv_write_reference(k_pages, v_pages, k, v, slots)
        for got, want in zip(self.write(k_pages, v_pages, k, v, jnp.asarray(slots)), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)

    def test_casts_to_the_pools_dtype(self):
        k_pages, v_pages, k, v, slots = make_case()
        got, _ = self.write(k_pages.astype(jnp.bfloat16), v_pages.astype(jnp.bfloat16), k, v, jnp.asarray(slots))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got[slots[0] // 8, slots[0] % 8]), np.asarray(k[0].astype(jnp.bfloat16)))


def layers_step(pools, q, k, v, slots, tables, lens, starts, distribution, *, decode_only):
    """Write and attend in each of several layers, the output of one feeding the next."""
    new_pools = []
    for k_pages, v_pages in pools:
        k_pages, v_pages = kv_write(k_pages, v_pages, k + q[:, :3], v + q[:, :3], slots)
        q = q + paged_attention(q, k_pages, v_pages, tables, lens, starts, distribution, sm_scale=0.25, decode_only=decode_only)
        new_pools.append((k_pages, v_pages))
    return q, new_pools


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_no_copy_of_a_donated_pool(decode_only, num_rows):
    shape = pool_shape(997, 16, 3, 16, "xla")
    pool_bytes = 4 * int(np.prod(shape))
    array = jax.ShapeDtypeStruct
    num_tokens = num_rows if decode_only else 64
    q, k = array((num_tokens, 9, 16), jnp.float32), array((num_tokens, 3, 16), jnp.float32)
    ints = [array(s, jnp.int32) for s in ((num_tokens,), (num_rows, 32), (num_rows,), (num_rows + 1,), (2,))]
    pools = [(array(shape, jnp.float32),) * 2 for _ in range(2)]
    step = jax.jit(functools.partial(layers_step, decode_only=decode_only), donate_argnums=0)
    compiled = step.lower(pools, q, k, k, *ints).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and "997" in line.split(" copy(")[0]]
    assert not copies


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"v_pages": a["v_pages"][:1]}, "v_pages.shape"),
        (lambda a: a | {"k": a["k"][:1]}, "k.shape"),
        (lambda a: a | {"v": a["v"][:, :1]}, "v.shape"),
        (lambda a: a | {"slot_mapping": a["slot_mapping"].astype(np.int16)}, "slot_mapping.dtype=int16"),
    ],
)
def test_refuses_wrong_arguments(change, message):
    arguments = dict(zip(("k_pages", "v_pages", "k", "v", "slot_mapping"), make_case(), strict=True))
    with pytest.raises(ValueError, match=message):
        kv_write(**change(arguments))


def test_pool_shape_refuses():
    with pytest.raises(ValueError, match="backend='cuda'"):
        pool_shape(1, 1, 1, 1, "cuda")
    with pytest.raises(ValueError, match="page_size=0"):
        pool_shape(1, 0, 1, 1)
