"""The contract of kv_write, its argument checks and the way to the backend."""

import importlib
from typing import cast

import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_write.quantize import is_quantized, quantize
from pallas_kernels.kv_write.xla import kv_write_xla, scatter
from pallas_kernels.pool import check_backend, page_size_multiple, page_sizes, pool_axes, scale_shape

_KERNELS = {"mosaic_tpu": "tpu", "mosaic_tpu_lanes": "tpu"}  # a scatter is slow on a TPU; the others use XLA's


def kv_write(
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    slot_mapping: Array,
    *,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    backend: str = "xla",
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Write the keys and values of T tokens into one layer's pools and return the new pools.

    In place when the caller's jit donates the pools. Without scales, values are cast to the pool's dtype; with them, each token and head
    is quantised to the pool's 8 bits and its scale (stored * scale = value) is written beside.

    Args:
        k_pages, v_pages: one layer's pool, shape from :func:`pallas_kernels.pool_shape`; int8 or float8_e4m3fn when scales are given.
        k, v: [T, num_kv_heads, head_dim].
        slot_mapping: int32 [T], page * page_size + offset. A negative slot skips its token. Non-negative slots must be distinct.
        k_scales, v_scales: None, or float32 [num_pages, page_size, num_kv_heads], from :func:`pallas_kernels.scale_shape`.
        backend: static; whose layout the pools have.
        interpret: static; run a Pallas backend's kernel in its interpreter, on a CPU.

    Returns (k_pages, v_pages), or (k_pages, v_pages, k_scales, v_scales) when scales were given.

    Raises ValueError naming the argument, its value and what was expected.
    """
    check_backend(backend)
    _check_arrays(k_pages, v_pages, k, v, slot_mapping, backend)
    if k_scales is None and v_scales is None:
        return _write(k_pages, v_pages, k, v, slot_mapping, backend, interpret)
    _check_scales(k_pages, k_scales, v_scales, backend)
    (k, new_k_scales), (v, new_v_scales) = quantize(k, k_pages.dtype), quantize(v, v_pages.dtype)
    pools = cast(tuple[Array, Array], (k_scales, v_scales))  # checked above
    scales = (scatter(pool, new, slot_mapping) for pool, new in zip(pools, (new_k_scales, new_v_scales), strict=True))
    return (*_write(k_pages, v_pages, k, v, slot_mapping, backend, interpret), *scales)


def _write(k_pages, v_pages, k, v, slot_mapping, backend, interpret):
    if backend not in _KERNELS:
        return kv_write_xla(k_pages, v_pages, k, v, slot_mapping)
    kernel = importlib.import_module(f"pallas_kernels.kv_write.{_KERNELS[backend]}")
    return kernel.write(k_pages, v_pages, k, v, slot_mapping, backend=backend, interpret=interpret)


def _check_arrays(k_pages, v_pages, k, v, slot_mapping, backend):
    axes = list(pool_axes(backend))
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages.shape={v_pages.shape}, k_pages.shape={k_pages.shape}: expected both {axes} for backend {backend!r}")
    sizes = page_sizes(k_pages.shape, backend)
    multiple = page_size_multiple(backend)
    if sizes["page_size"] % multiple:
        raise ValueError(f"k_pages.shape={k_pages.shape}: expected a multiple of {multiple} as page_size for backend {backend!r}")
    expected = (slot_mapping.shape[0] if slot_mapping.ndim == 1 else "T", sizes["kv_heads"], sizes["head_dim"])
    for name, value in (("k", k), ("v", v)):
        if value.shape != expected:
            raise ValueError(f"{name}.shape={value.shape}: expected {expected} (tokens, num_kv_heads, head_dim)")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping.dtype={slot_mapping.dtype}: expected int32")


def _check_scales(k_pages, k_scales, v_scales, backend):
    sizes = page_sizes(k_pages.shape, backend)
    shape = scale_shape(sizes["pages"], sizes["page_size"], sizes["kv_heads"])
    for name, value in (("k_scales", k_scales), ("v_scales", v_scales)):
        if value is None or value.shape != shape or value.dtype != jnp.float32:
            got = "None" if value is None else f"{value.dtype}{list(value.shape)}"
            raise ValueError(f"{name}: {got}: expected float32{list(shape)}, for both keys and values or for neither")
    if not is_quantized(k_pages.dtype):
        raise ValueError(f"k_pages.dtype={k_pages.dtype}: expected int8 or float8_e4m3fn, because k_scales and v_scales are given")
