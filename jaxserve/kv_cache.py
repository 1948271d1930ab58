"""KVCache: the preallocated page pool, one pair of arrays a layer (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from jaxserve.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The pool: a page id names the same page in every layer. Page 0 is the dummy page, which no request owns.

    One pair of arrays a layer, or, stacked, one pair for all layers, in which the pages of layer i start at i * (pages a layer).
    """

    k_pages: tuple[jax.Array, ...]  # in the attention backend's layout
    v_pages: tuple[jax.Array, ...]
    backend: str = field(default="xla", metadata={"static": True})

    @property
    def stacked(self) -> bool:
        return len(self.k_pages) == 1

    @property
    def num_pages(self) -> int:
        """Pages in one array."""
        return self.k_pages[0].shape[0]

    @property
    def num_slots(self) -> int:
        """Tokens that the pages of one array hold."""
        return self.num_pages * pallas_kernels.page_sizes(self.k_pages[0].shape, self.backend)["page_size"]


def page_bytes(config: ModelConfig, page_size: int, dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim * np.dtype(jnp.dtype(dtype)).itemsize


def pool_spec(backend: str) -> PartitionSpec:
    """How a layer's pool lies on the mesh: KV heads are split over the tensor axis."""
    return PartitionSpec(*("tensor" if axis == "kv_heads" else None for axis in pallas_kernels.pool_axes(backend)))


def abstract_kv_cache(config: ModelConfig, num_pages: int, page_size: int, dtype, mesh: Mesh, backend: str, stacked: bool) -> KVCache:
    """The pool's shapes and shardings, num_pages a layer."""
    num_arrays, layers_each = (1, config.num_layers) if stacked else (config.num_layers, 1)
    shape = pallas_kernels.pool_shape(num_pages * layers_each, page_size, config.num_kv_heads, config.head_dim, backend)
    pages: tuple[Any, ...] = (jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pool_spec(backend))),) * num_arrays
    return KVCache(pages, pages, backend)
