"""Tile sizes of the TPU kernels from the shapes and the chip's vector memory."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

MAX_PAGE_BYTES = 2 << 20  # of K or of V; two of each must be in VMEM, and leave room
_INTERPRETED_VMEM_BYTES = 64 << 20  # as TPU v5p and 7x have


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How much of what one step of a kernel handles."""

    pages_per_block: int
    num_buffers: int  # blocks of K and of V in VMEM, all but one of them on their way
    queries: int  # tokens in a tile of the prefill kernel
    vmem_limit_bytes: int


def vmem_bytes(interpret) -> int:
    """Vector memory of one core of the chip that is compiled for. Raises ValueError where JAX targets no TPU."""
    return _INTERPRETED_VMEM_BYTES if interpret else pltpu.get_tpu_info().vmem_capacity_bytes


def decode_tiles(
    page_bytes: int, decoded_page_bytes: int, page_size: int, table_width: int, score_bytes_per_token: int, vmem: int
) -> Tiles:
    """Blocks of about 1 MB, K and V together, and four of them, so that DMA always has some 3 MB to fetch.

    A chip's bandwidth times its latency is 1 to 3 MB; a block shorter than that is over before its own overhead is. ``page_bytes`` is
    that of a page in all pools, ``decoded_page_bytes`` in the queries' dtype, as a block lies in VMEM a second time.
    """
    ring = min(4 << 20, vmem // 8)
    tokens = min(ring // 4 * page_size // max(page_bytes, decoded_page_bytes), vmem // 64 // score_bytes_per_token)
    pages = max(1, min(tokens // page_size, table_width))
    return Tiles(pages, max(2, min(8, ring // (pages * page_bytes))), 0, _limit(vmem))


def prefill_tiles(
    page_bytes: int, decoded_page_bytes: int, page_size: int, table_width: int, q: Array, num_kv_heads: int, vmem: int
) -> Tiles:
    """Up to 128 queries, which make arithmetic outweigh the fetching of keys, against blocks of up to 512 keys."""
    _, num_heads, head_dim = q.shape
    lanes = -(-head_dim // 128) * 128
    # Maximum and sum take a whole row of lanes each; queries and outputs are double buffered.
    query_bytes = num_heads * (2 * 512 + 4 * lanes + 4 * q.dtype.itemsize * lanes)
    queries = next((n for n in (128, 64, 32) if n * query_bytes <= vmem * 3 // 8), 16)
    # About four float32 arrays of scores are alive at once.
    tokens = min(
        512,
        vmem // 8 // (16 * queries * (num_heads // num_kv_heads)),
        min(2 << 20, vmem // 32) * page_size // max(page_bytes, decoded_page_bytes),
    )
    return Tiles(max(1, min(tokens // page_size, table_width)), 2, queries, _limit(vmem))


def _limit(vmem: int) -> int:
    """What a kernel may take: XLA wants some for itself."""
    return vmem - vmem // 8


def unsupported_dtypes(q_dtype: jnp.dtype, pages_dtype: jnp.dtype) -> str | None:
    """Why the kernels cannot take a pair of dtypes, or None."""
    if q_dtype not in (jnp.float32, jnp.bfloat16):
        return f"q is {q_dtype}, and a TPU computes in float32 or bfloat16"
    if pages_dtype not in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        return f"the pages are {pages_dtype}, and the kernels read float32, bfloat16, int8 or float8_e4m3fn"
    return None


def unsupported_page(pages_shape: tuple[int, ...], pages_dtype: jnp.dtype) -> str | None:
    """Why the kernels cannot take pages of a size, or None."""
    page_bytes = math.prod(pages_shape[1:]) * pages_dtype.itemsize
    if page_bytes > MAX_PAGE_BYTES:
        return f"a page of keys takes {page_bytes} bytes, and vector memory has room for {MAX_PAGE_BYTES}; use smaller pages"
    return None
