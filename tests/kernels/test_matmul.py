"""matmul: native loops against float64, independence of a row from its neighbours, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("rows", [1, 7, 8, 13, 16, 64])
@pytest.mark.parametrize(("depth", "columns"), [(1, (32,)), (5, (33,)), (96, (3, 5, 16)), (576, (95,)), (64, (2, 344)), (16, (7,))])
def test_against_float64(rows, depth, columns):
    x, kernel = draw(rows, depth), draw(depth, *columns, seed=1)
    want = np.tensordot(np.float64(x), np.float64(kernel), axes=1)
    for backend in ("numba", "xla"):
        got = jax.jit(lambda x, kernel, backend=backend: matmul(x, kernel, backend=backend))(x, kernel)
        assert got.shape == (rows, *columns) and got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * depth)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, kernel = draw(77, 200), draw(200, 160, seed=1)
    whole = matmul(x, kernel, backend="numba")
    for first, count in [(0, 1), (3, 8), (40, 37), (76, 1)]:
        np.testing.assert_array_equal(matmul(x[first : first + count], kernel, backend="numba"), whole[first : first + count])


def test_nan_and_infinity_stay_in_their_row():
    x = draw(16, 40).at[3, 5].set(jnp.nan).at[9, 0].set(jnp.inf)
    got = matmul(x, draw(40, 64, seed=1), backend="numba")
    assert np.isnan(got[3]).all() and np.isinf(got[9]).all() and np.isfinite(np.delete(got, [3, 9], axis=0)).all()


def test_no_rows():
    assert matmul(draw(0, 8), draw(8, 32), backend="numba").shape == (0, 32)


def test_other_dtypes_run_as_xla():
    x, kernel = draw(8, 64).astype(jnp.bfloat16), draw(64, 64).astype(jnp.bfloat16)
    np.testing.assert_array_equal(*(np.float32(matmul(x, kernel, backend=backend)) for backend in ("numba", "xla")))


@pytest.mark.parametrize(
    ("x", "kernel", "backend", "message"),
    [
        (draw(2, 4), draw(5, 8), "xla", r"kernel: \[5, 8\]: expected \[K, \.\.\.\] with the K of x, which is \[2, 4\]"),
        (draw(4), draw(4, 8), "xla", r"kernel: \[4, 8\]: expected"),
        (draw(2, 4), draw(4), "xla", r"kernel: \[4\]: expected"),
        (draw(2, 4), draw(4, 8).astype(jnp.bfloat16), "xla", "kernel: bfloat16: expected float32, as x"),
        (draw(2, 4), draw(4, 8), "cublas", r"backend='cublas': expected one of \('xla', 'numba'\)"),
    ],
)
def test_refusals(x, kernel, backend, message):
    with pytest.raises(ValueError, match=message):
        matmul(x, kernel, backend=backend)
