"""kv_write against a numpy loop, its in-place promise, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write, paged_attention, pool_shape, scale_shape
from pallas_kernels.kv_write.reference import kv_write_reference
from pallas_kernels.pool import from_token_major, to_token_major

WRITE = jax.jit(kv_write, static_argnames=("backend", "interpret"))


def make_case(dtype=np.float32, num_pages=6, page_size=8, num_kv_heads=3, head_dim=16, num_tokens=7, seed=0):
    rng = np.random.default_rng(seed)
    shape = pool_shape(num_pages, page_size, num_kv_heads, head_dim, "xla")
    k_pages, v_pages = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, num_kv_heads, head_dim)), dtype) for _ in range(2))
    slots = rng.permutation(num_pages * page_size)[:num_tokens].astype(np.int32)
    return k_pages, v_pages, k, v, slots


class TestKvWrite:
    """The inherited suite: a backend sets ``backend``, and ``page_size`` where it must. Pools are token-major outside of ``write``."""

    backend = "xla"
    interpret = False
    page_size = 8

    def make_case(self, *args, **sizes):
        return make_case(*args, page_size=self.page_size, **sizes)

    def write(self, k_pages, v_pages, k, v, slots, **scales):
        pools = (from_token_major(pages, self.backend) for pages in (k_pages, v_pages))
        k_pages, v_pages, *scales = WRITE(*pools, k, v, slots, **scales, backend=self.backend, interpret=self.interpret)
        return *(to_token_major(pages, self.backend) for pages in (k_pages, v_pages)), *scales

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
    @pytest.mark.parametrize("skipped", ["none", "some", "all"])
    def test_equals_reference(self, dtype, num_tokens, skipped):
        k_pages, v_pages, k, v, slots = self.make_case(dtype, num_tokens=num_tokens)
        if skipped != "none":
            # Any negative slot is a skip, not an index from the end.
            slots[:: 2 if skipped == "some" else 1] = np.resize([-1, -2, -(2**31)], len(slots[:: 2 if skipped == "some" else 1]))
        expected = kv_write_reference(k_pages, v_pages, k, v, slots)
        for got, want in zip(self.write(k_pages, v_pages, k, v, jnp.asarray(slots)), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)

    def test_casts_to_the_pools_dtype(self):
        k_pages, v_pages, k, v, slots = self.make_case()
        got, _ = self.write(k_pages.astype(jnp.bfloat16), v_pages.astype(jnp.bfloat16), k, v, jnp.asarray(slots))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.asarray(got[slots[0] // self.page_size, slots[0] % self.page_size]), np.asarray(k[0].astype(jnp.bfloat16))
        )

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("num_tokens", [1, 7, 40])
    def test_quantises_each_token_and_head(self, dtype, num_tokens):
        k_pages, v_pages, k, v, slots = self.make_case(num_tokens=num_tokens)
        k_pages, v_pages = k_pages.astype(dtype), v_pages.astype(dtype)
        k = k * jnp.logspace(-6, 6, k.shape[1])[:, None]
        k, slots = k.at[0, 0].set(0), np.where(np.arange(num_tokens) % 3 == 2, -1, slots).astype(np.int32)
        scales = [jnp.full(k_pages.shape[:3], x, jnp.float32) for x in (0.25, 0.5)]
        got = self.write(k_pages, v_pages, k, v, jnp.asarray(slots), k_scales=scales[0], v_scales=scales[1])
        want = kv_write_reference(k_pages, v_pages, k, v, slots, *scales)
        for x, y in zip(got[2:], want[2:], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
        for x, y, scale in zip(got[:2], want[:2], got[2:], strict=True):
            assert x.dtype == dtype
            # The compiled division may round to the neighbour of what numpy's gives.
            step = 1 if dtype == jnp.int8 else 2.0**-3
            np.testing.assert_allclose(np.asarray(x.astype(jnp.float32)), y.astype(np.float32), rtol=step if step < 1 else 0, atol=step)
            self.check_round_trip(x, scale, k if scale is got[2] else v, slots)

    def check_round_trip(self, pages, scales, new, slots):
        """Stored * scale is as close to what was written as the format allows."""
        written = slots >= 0
        place = slots[written] // self.page_size, slots[written] % self.page_size
        scale = np.asarray(scales)[place][..., None]
        value = np.asarray(new)[written]
        error = np.abs(np.asarray(pages.astype(jnp.float32))[place] * scale - value)
        bound = scale * 0.5001 if pages.dtype == jnp.int8 else np.maximum(np.abs(value) / 16, scale * 2**-10) * 1.001
        assert (error <= bound).all()

    def test_skipped_slots_of_quantised_pools_stay(self):
        k_pages, v_pages, k, v, slots = self.make_case(jnp.int8)
        scales = [jnp.full(k_pages.shape[:3], x, jnp.float32) for x in (0.25, 0.5)]
        got = self.write(k_pages, v_pages, k.astype(jnp.float32), v, jnp.full_like(slots, -1), k_scales=scales[0], v_scales=scales[1])
        for x, y in zip(got, (k_pages, v_pages, *scales), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


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


def test_no_copy_of_a_donated_quantised_pool():
    array = jax.ShapeDtypeStruct
    pages = array(pool_shape(997, 16, 3, 16, "xla"), jnp.int8)
    scales, new = array(scale_shape(997, 16, 3), jnp.float32), array((8, 3, 16), jnp.float32)

    def step(pools, k, v, slots):
        return kv_write(*pools[:2], k, v, slots, k_scales=pools[2], v_scales=pools[3])

    compiled = jax.jit(step, donate_argnums=0).lower((pages, pages, scales, scales), new, new, array((8,), jnp.int32)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 997 * 16 * 3 * (16 + 4)
    assert memory.temp_size_in_bytes < 997 * 16 * 3
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and "997" in line.split(" copy(")[0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"v_pages": a["v_pages"][:1]}, "v_pages.shape"),
        (lambda a: a | {"k": a["k"][:1]}, "k.shape"),
        (lambda a: a | {"v": a["v"][:, :1]}, "v.shape"),
        (lambda a: a | {"slot_mapping": a["slot_mapping"].astype(np.int16)}, "slot_mapping.dtype=int16"),
        (lambda a: a | {"k_scales": jnp.ones((6, 8, 3))}, "v_scales: None"),
        (lambda a: a | {"k_scales": jnp.ones((6, 8, 2)), "v_scales": jnp.ones((6, 8, 3))}, r"k_scales: float32\[6, 8, 2\]"),
        (lambda a: a | {"k_scales": jnp.ones((6, 8, 3)), "v_scales": jnp.ones((6, 8, 3))}, "k_pages.dtype=float32: expected int8"),
        (lambda a: a | {"backend": "mosaic_tpu_lanes"}, "expected a multiple of 128"),
        (lambda a: a | {"backend": "cuda"}, "backend='cuda'"),
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
