"""Which backend serves a device and a model best, and why."""

import re

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.api import kernel_module
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.pool import default_page_size, page_size_multiple, pool_shape

_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
_OTHER_GPUS = {
    "Blackwell": re.compile(r"\b(B100|B200|B300|GB200|GB300|GB10|RTX (PRO )?50\d\d|RTX PRO \d000 Blackwell)\b"),
    "Ada": re.compile(r"\b(L4|L40S?|RTX 40\d\d|RTX \d000 Ada)\b"),
    "Ampere": re.compile(r"\b(A100|A800|A10G?|A16|A30|A40|RTX 30\d\d|RTX A\d000)\b"),
}
_MOSAIC_GPU_SINCE = (0, 11)


def choose_backend(
    platform: str,
    device_kind: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    page_dtype: DTypeLike,
    page_size: int | None = None,
    jax_version: str = jax.__version__,
) -> tuple[str, str]:
    """(backend, reason): the fastest backend that can serve a model on a device, and the reason in one line.

    Args:
        platform, device_kind: as a ``jax.Device`` has them, e.g. "cuda" or "gpu" and "NVIDIA H200", "tpu" and "TPU v5 lite".
        num_heads, num_kv_heads, head_dim: of one device; under tensor parallelism its share of the heads.
        dtype, page_dtype: of the queries and of the pool.
        page_size: tokens a page, or None for the backend's own default.
        jax_version: the version to decide for.
    """
    heads = (num_heads, num_kv_heads, head_dim)
    if platform == "tpu":
        return _checked(_tpu_backend(num_kv_heads, head_dim, page_dtype), device_kind, heads, dtype, page_dtype, page_size)
    if platform == "cpu":
        return _checked("numba", device_kind, heads, dtype, page_dtype, page_size)
    if platform not in ("gpu", "cuda", "rocm"):
        return "xla", f"{device_kind or platform} runs attention as XLA operations; there is no kernel for it"
    if not _HOPPER.search(device_kind):
        family = next((name for name, kinds in _OTHER_GPUS.items() if kinds.search(device_kind)), None)
        what = f"{device_kind} is {family}" if family else f"{device_kind} is no GPU that a kernel is known for"
        return "xla", f"{what}; the GPU kernels use Hopper's matrix and copy units (H100, H200)"
    if _numbers(jax_version) < _MOSAIC_GPU_SINCE:
        return "xla", f"JAX {jax_version} is too old for the Hopper kernels; install 0.11 or newer (Python 3.12 or newer)"
    return _checked("mosaic_gpu", device_kind, heads, dtype, page_dtype, page_size)


def _tpu_backend(num_kv_heads: int, head_dim: int, page_dtype: DTypeLike) -> str:
    """Token-major where a token's heads fill a tile of memory; not for 8 bits, whose scales for each slot lie along the lanes.

    Where they do not fill it, XLA stores the pool in an order of its own, and every call of a kernel would copy it.
    """
    itemsize = jnp.dtype(page_dtype).itemsize
    fill = (num_kv_heads % 8 == 0 or num_kv_heads in (1, 2, 4)) and num_kv_heads * itemsize % 4 == 0
    return "mosaic_tpu" if head_dim % 128 == 0 and fill and itemsize > 1 else "mosaic_tpu_lanes"


def _checked(
    backend: str, device_kind: str, heads: tuple[int, int, int], dtype: DTypeLike, page_dtype: DTypeLike, page_size: int | None
) -> tuple[str, str]:
    """``backend``, or "xla" with the constraint that the shape breaks."""
    num_heads, num_kv_heads, head_dim = heads
    page_size = page_size or default_page_size(backend)
    if page_size % page_size_multiple(backend):
        return "xla", f"page_size {page_size} is no multiple of {page_size_multiple(backend)}, which {backend} needs"
    pages = pool_shape(1, page_size, num_kv_heads, head_dim, backend)
    reason = kernel_module(backend).unsupported((1, num_heads, head_dim), jnp.dtype(dtype), pages, jnp.dtype(page_dtype), Options(1.0))
    return ("xla", f"{backend} cannot: {reason}") if reason else (backend, f"{device_kind} has a kernel for this shape")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
