"""The contract of matmul and its argument checks."""

import jax
from jax import Array

from pallas_kernels.matmul import cpu


def matmul(x: Array, kernel: Array, *, backend: str = "xla") -> Array:
    """Activations times weights.

    Args:
        x: [T, K].
        kernel: [K, ...], of x's dtype.
        backend: static; "xla", or "numba" for native loops on the CPU in float32, which differ from "xla" by rounding only: up to a sixth
            faster from 16 rows up, and a row's result does not depend, to the bit, on the rows beside it.

    Returns [T, ...] in x's dtype. Shapes that the native loops do not take (less than one vector of columns) run
    as "xla". Raises ValueError naming the argument, its value and what was expected.
    """
    if backend not in ("xla", "numba"):
        raise ValueError(f"backend={backend!r}: expected one of ('xla', 'numba')")
    if x.ndim != 2 or kernel.ndim < 2 or kernel.shape[0] != x.shape[1]:
        raise ValueError(f"kernel: {list(kernel.shape)}: expected [K, ...] with the K of x, which is {list(x.shape)}")
    if kernel.dtype != x.dtype:
        raise ValueError(f"kernel: {kernel.dtype}: expected {x.dtype}, as x")
    if backend == "numba" and cpu.takes(x, kernel):
        return cpu.matmul(x, kernel)
    return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), preferred_element_type=x.dtype)
