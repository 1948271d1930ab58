"""KVCache: the preallocated page pool, one pair of arrays a layer (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from jaxserve.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The pool: a page id names the same page in every layer. Page 0 is the dummy page, where padding writes."""

    k_pages: tuple[jax.Array, ...]  # one array a layer, in the attention backend's layout
    v_pages: tuple[jax.Array, ...]


def page_bytes(config: ModelConfig, page_size: int, dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim * np.dtype(jnp.dtype(dtype)).itemsize


def abstract_kv_cache(config: ModelConfig, num_pages: int, page_size: int, dtype, mesh: Mesh, backend: str) -> KVCache:
    """The pool's shapes and shardings: KV heads are split over the tensor axis."""
    shape = pallas_kernels.pool_shape(num_pages, page_size, config.num_kv_heads, config.head_dim, backend)
    axes = pallas_kernels.pool_axes(backend)
    spec = PartitionSpec(*("tensor" if axis == "kv_heads" else None for axis in axes))
    layer = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return KVCache((layer,) * config.num_layers, (layer,) * config.num_layers)
