"""paged_attention on TPUs over lane-major pages, [num_pages, num_kv_heads, head_dim, page_size], for any head dim.

A page's tokens fill the lanes, so no head dim is padded in memory. The same pages suit a single key head, whose tokens would fill one
row of a tile each in the token-major layout.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_softmax as softmax
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_rows import attend_pages


@dataclasses.dataclass(frozen=True)
class LaneMajor:
    """Decode sees a page as [KVH * D, page_size] and queries widened to KVH * D, zero outside their own key head."""

    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    pages_per_block: int
    num_buffers: int
    vmem_limit_bytes: int = 64 << 20
    name = "mosaic_tpu_lanes"

    def scratch(self):
        buffer = pltpu.VMEM((self.num_buffers, self.pages_per_block, self.num_kv_heads, self.head_dim, self.page_size), self.dtype)
        return (buffer, buffer), pltpu.SemaphoreType.DMA((2, self.num_buffers)), pltpu.SMEM((4,), jnp.int32)

    def slot_positions(self, num_heads):
        return np.arange(self.pages_per_block * self.page_size, dtype=np.int32)[None]

    def widen(self, q):
        num_rows, num_heads, _ = q.shape
        q = q.reshape(num_rows, self.num_kv_heads, -1, 1, self.head_dim)
        return jnp.where(self._own_head(), q, 0).reshape(num_rows, num_heads, -1)

    def narrow(self, o):
        num_rows, num_heads, _ = o.shape
        o = o.reshape(num_rows, self.num_kv_heads, -1, self.num_kv_heads, self.head_dim)
        return jnp.where(self._own_head(), o, 0).sum(3).reshape(num_rows, num_heads, self.head_dim)

    def _own_head(self):
        return np.eye(self.num_kv_heads, dtype=bool)[None, :, None, :, None]

    def scores(self, q, k):
        return self._over_pages(lambda j: softmax.matmul(q, self._page(k, j, q.dtype), (1, 0)))

    def values(self, p, v):
        return sum(softmax.matmul(self._columns(p, j), self._page(v, j, p.dtype), (1, 1)) for j in range(self.pages_per_block))

    def _page(self, block, j, dtype):
        return block[j].astype(dtype).reshape(-1, self.page_size)

    def _over_pages(self, scores_of):
        return jnp.concatenate([scores_of(j) for j in range(self.pages_per_block)], axis=1)

    def _columns(self, p, j):
        return p[:, j * self.page_size : (j + 1) * self.page_size]

    def zero_outside(self, v, first, end):
        @pl.when((first > 0) | (end < self.pages_per_block * self.page_size))
        def _():
            page, slot = (lax.broadcasted_iota(jnp.int32, v.shape, i) for i in (0, 3))
            position = page * self.page_size + slot
            v[...] = jnp.where((position >= first) & (position < end), v[...], jnp.zeros((), v.dtype))

    def tile_tokens(self, num_heads):
        return 128

    def head_scratch(self, dtype):
        return ()

    def by_head(self, k, v, scratch):
        return k, v

    def head_scores(self, q, k, head):
        return self._over_pages(lambda j: softmax.matmul(q, k[j, head].astype(q.dtype), (1, 0)))

    def head_values(self, p, v, head):
        return sum(softmax.matmul(self._columns(p, j), v[j, head].astype(p.dtype), (1, 1)) for j in range(self.pages_per_block))


def attend(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    options: Options,
    *,
    decode_only: bool,
    interpret: bool = False,
) -> tuple[Array, Array]:
    _, num_kv_heads, head_dim, page_size = k_pages.shape
    layout = LaneMajor(page_size, num_kv_heads, head_dim, k_pages.dtype, max(1, 256 // page_size), 3)
    return attend_pages(layout, q, (k_pages, v_pages), block_tables, seq_lens, query_start_loc, distribution, options, decode_only, interpret)
