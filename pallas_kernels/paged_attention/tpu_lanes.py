"""paged_attention on TPUs over lane-major pages, [num_pages, num_kv_heads, head_dim, page_size], for any head dim.

A page's tokens fill the lanes, so no head dim is padded in memory. The same pages suit a single key head, whose tokens would fill one
row of a tile each in the token-major layout.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_softmax as softmax
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_rows import attend_pages
from pallas_kernels.paged_attention.tpu_tiles import Tiles, unsupported_dtypes, unsupported_page


@dataclasses.dataclass(frozen=True)
class LaneMajor:
    """Decode sees a page as [KVH * D, page_size] and queries widened to KVH * D, zero outside their own key head."""

    page_size: int
    num_kv_heads: int
    head_dim: int
    tiles: Tiles
    name = "mosaic_tpu_lanes"

    def slot_positions(self, num_heads):
        return np.arange(self.tiles.pages_per_block * self.page_size, dtype=np.int32)[None]

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
        return self._sum_pages(lambda j: softmax.matmul(self._columns(p, j), self._page(v, j, p.dtype), (1, 1)))

    def _page(self, block, j, dtype):
        return block[j].astype(dtype).reshape(-1, self.page_size)

    def _over_pages(self, scores_of):
        return jnp.concatenate([scores_of(j) for j in range(self.tiles.pages_per_block)], axis=1)

    def _sum_pages(self, values_of):
        return functools.reduce(jnp.add, [values_of(j) for j in range(self.tiles.pages_per_block)])

    def _columns(self, p, j):
        return p[:, j * self.page_size : (j + 1) * self.page_size]

    def slot_scales(self, scales, num_heads):
        """A block of scales [pages_per_block, KVH, page_size] -> float32 [H, N], one for each score of decode."""
        heads = jnp.concatenate([scales[j] for j in range(self.tiles.pages_per_block)], axis=1)
        return jnp.repeat(heads, num_heads // self.num_kv_heads, axis=0)

    def head_slot_scales(self, scales, head):
        """The same block -> the scales of one head, float32 [1, N], for prefill."""
        return jnp.concatenate([scales[j, pl.ds(head, 1)] for j in range(self.tiles.pages_per_block)], axis=1)

    def zero_outside(self, v, first, end):
        @pl.when((first > 0) | (end < self.tiles.pages_per_block * self.page_size))
        def _():
            page, slot = (lax.broadcasted_iota(jnp.int32, v.shape, i) for i in (0, 3))
            position = page * self.page_size + slot
            v[...] = jnp.where((position >= first) & (position < end), v[...], jnp.zeros((), v.dtype))

    def head_scratch(self, dtype):
        return ()

    def by_head(self, k, v, scratch):
        return k, v

    def head_scores(self, q, k, head):
        return self._over_pages(lambda j: softmax.matmul(q, k[j, head].astype(q.dtype), (1, 0)))

    def head_values(self, p, v, head):
        return self._sum_pages(lambda j: softmax.matmul(self._columns(p, j), v[j, head].astype(p.dtype), (1, 1)))


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
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array]:
    """Return (o [T, H, D] in q's dtype, lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`.

    A result does not depend on the other rows of the batch. ``interpret`` may also be the interpreter's parameters.
    """
    _, num_kv_heads, head_dim, page_size = k_pages.shape
    pools = (k_pages, v_pages)
    if options.slot_scales:
        # XLA keeps an array of so few heads with its slots along the lanes, so that this moves nothing.
        pools += tuple(jnp.asarray(x, jnp.float32).transpose(0, 2, 1) for x in (options.k_scale, options.v_scale))
    make_layout = functools.partial(LaneMajor, page_size, num_kv_heads, head_dim)
    rows = block_tables, seq_lens, query_start_loc, distribution
    return attend_pages(make_layout, page_size, 1, q, pools, *rows, options, decode_only, interpret)


def unsupported(
    q_shape: tuple[int, ...], q_dtype: jnp.dtype, pages_shape: tuple[int, ...], pages_dtype: jnp.dtype, options: Options
) -> str | None:
    """Why the kernels cannot do a call, in one sentence with the values; None if they can."""
    _, _, head_dim, page_size = pages_shape
    if page_size % 128:
        return f"page_size is {page_size}, and lane-major pages need a multiple of the 128 lanes"
    if head_dim % 8:
        return f"head_dim is {head_dim}, and lane-major pages need a multiple of the 8 rows of a tile"
    return unsupported_dtypes(q_dtype, pages_dtype) or unsupported_page(pages_shape, pages_dtype)
