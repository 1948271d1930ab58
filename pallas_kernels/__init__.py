"""Paged-attention operations for JAX; needs jax and numpy, and numba for the fast path on CPUs.

Each operation is a folder with the same shape: ``api.py`` (the contract and the argument checks), ``reference.py`` (slow and
plain) and one file per backend.
"""

from pallas_kernels.dispatch import choose_backend
from pallas_kernels.kv_write import kv_write
from pallas_kernels.matmul import matmul
from pallas_kernels.merge_states import merge_states
from pallas_kernels.native_calls import prepare
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pool import BACKENDS, default_page_size, page_sizes, pool_axes, pool_shape, scale_shape

__all__ = [
    "BACKENDS",
    "choose_backend",
    "default_page_size",
    "kv_write",
    "matmul",
    "merge_states",
    "page_sizes",
    "paged_attention",
    "pool_axes",
    "pool_shape",
    "prepare",
    "scale_shape",
]
