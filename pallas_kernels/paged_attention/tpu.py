"""paged_attention on TPUs over token-major pages, [num_pages, page_size, num_kv_heads, head_dim], for head dims that fill the lanes."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_softmax as softmax
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_layout import ELSEWHERE
from pallas_kernels.paged_attention.tpu_rows import attend_pages
from pallas_kernels.paged_attention.tpu_tiles import Tiles, unsupported_dtypes, unsupported_page


@dataclasses.dataclass(frozen=True)
class TokenMajor:
    """Decode sees a block as [tokens * KVH, D]: all heads' queries against all rows, scores of other key heads masked."""

    page_size: int
    num_kv_heads: int
    head_dim: int
    tiles: Tiles
    name = "mosaic_tpu"

    def slot_positions(self, num_heads):
        column = np.arange(self.tiles.pages_per_block * self.page_size * self.num_kv_heads, dtype=np.int32)
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
        @pl.when((first > 0) | (end < self.tiles.pages_per_block * self.page_size))
        def _():
            page, slot = (lax.broadcasted_iota(jnp.int32, v.shape, i) for i in (0, 1))
            position = page * self.page_size + slot
            v[...] = jnp.where((position >= first) & (position < end), v[...], jnp.zeros((), v.dtype))

    def head_scratch(self, dtype):
        heads = pltpu.VMEM((self.num_kv_heads, self.tiles.pages_per_block * self.page_size, self.head_dim), dtype)
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
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array]:
    """Return (o [T, H, D] in q's dtype, lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`.

    A result does not depend on the other rows of the batch. ``interpret`` may also be the interpreter's parameters.
    """
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    make_layout = functools.partial(TokenMajor, page_size, num_kv_heads, head_dim)
    rows = block_tables, seq_lens, query_start_loc, distribution
    return attend_pages(make_layout, page_size, num_kv_heads, q, (k_pages, v_pages), *rows, options, decode_only, interpret)


def unsupported(
    q_shape: tuple[int, ...], q_dtype: jnp.dtype, pages_shape: tuple[int, ...], pages_dtype: jnp.dtype, options: Options
) -> str | None:
    """Why the kernels cannot do a call, in one sentence with the values; None if they can."""
    _, _, num_kv_heads, head_dim = pages_shape
    if head_dim % 128:
        return f"head_dim is {head_dim}, and token-major pages need a multiple of the 128 lanes"
    if num_kv_heads * pages_dtype.itemsize % 4 or (num_kv_heads % 8 and num_kv_heads not in (1, 2, 4)):
        return (
            f"num_kv_heads is {num_kv_heads} with {pages_dtype} pages, and a token's heads must fill a tile of memory: "
            "1, 2, 4 or a multiple of 8, of 4 bytes or more together"
        )
    if options.slot_scales:
        return "k_scale and v_scale are given for each slot, and token-major pages take scalars"
    return unsupported_dtypes(q_dtype, pages_dtype) or unsupported_page(pages_shape, pages_dtype)
