"""paged_attention on TPUs over token-major pages, [num_pages, page_size, num_kv_heads, head_dim], for head dims that fill the lanes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_softmax as softmax
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_rows import attend_pages
from pallas_kernels.paged_attention.tpu_layout import ELSEWHERE


@dataclasses.dataclass(frozen=True)
class TokenMajor:
    """Decode sees a block as [tokens * KVH, D]: all heads' queries against all rows, scores of other key heads masked."""

    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    pages_per_block: int
    num_buffers: int
    vmem_limit_bytes: int = 64 << 20
    name = "mosaic_tpu"

    def scratch(self):
        buffer = pltpu.VMEM((self.num_buffers, self.pages_per_block, self.page_size, self.num_kv_heads, self.head_dim), self.dtype)
        return (buffer, buffer), pltpu.SemaphoreType.DMA((2, self.num_buffers)), pltpu.SMEM((4,), jnp.int32)

    def slot_positions(self, num_heads):
        column = np.arange(self.pages_per_block * self.page_size * self.num_kv_heads, dtype=np.int32)
        own = column % self.num_kv_heads == np.arange(num_heads)[:, None] // (num_heads // self.num_kv_heads)
        return np.where(own, column // self.num_kv_heads, np.int32(ELSEWHERE))

    def widen(self, q):
        return q

    def narrow(self, o):
        return o

    def scores(self, q, k):
        return softmax.matmul(q, self._rows(k, q.dtype), (1, 1))

    def values(self, p, v):
        return softmax.matmul(p, self._rows(v, p.dtype), (1, 0))

    def _rows(self, block, dtype):
        return block[...].astype(dtype).reshape(-1, self.head_dim)

    def zero_outside(self, v, first, end):
        @pl.when((first > 0) | (end < self.pages_per_block * self.page_size))
        def _():
            page, slot = (lax.broadcasted_iota(jnp.int32, v.shape, i) for i in (0, 1))
            position = page * self.page_size + slot
            v[...] = jnp.where((position >= first) & (position < end), v[...], jnp.zeros((), v.dtype))

    def tile_tokens(self, num_heads):
        return 128

    def head_scratch(self, dtype):
        heads = pltpu.VMEM((self.num_kv_heads, self.pages_per_block * self.page_size, self.head_dim), dtype)
        return heads, heads

    def by_head(self, k, v, scratch):
        for block, heads in zip((k, v), scratch, strict=True):
            tokens = block[...].astype(heads.dtype).reshape(-1, self.num_kv_heads, self.head_dim)
            heads[...] = jnp.swapaxes(tokens, 0, 1)
        return scratch

    def head_scores(self, q, k, head):
        return softmax.matmul(q, k[head], (1, 1))

    def head_values(self, p, v, head):
        return softmax.matmul(p, v[head], (1, 0))


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
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    layout = TokenMajor(page_size, num_kv_heads, head_dim, k_pages.dtype, max(1, 256 // page_size), 3)
    return attend_pages(layout, q, (k_pages, v_pages), block_tables, seq_lens, query_start_loc, distribution, options, decode_only, interpret)
