"""JAX's own paged attention and cuDNN's, called as scripts/bench_kernels calls ours: decode only, one program over several pools.

Each entry is (prepare, attend): prepare(case, token-major pools) gives the pools in the peer's layout, outside of what is timed, and
attend(case, q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution) one layer's output. What a peer refuses it raises.
"""

from __future__ import annotations

import warnings

import jax.numpy as jnp


def _heads_first(case, pools):
    return [tuple(pages.transpose(2, 0, 1, 3) for pages in pair) for pair in pools]


def _as_they_are(case, pools):
    return pools


def _decode_only(case):
    if case.queries != 1:
        raise ValueError("this implementation is for one query a row")
    if case.page_dtype == "int8":
        raise ValueError("int8 pages are left out here: this implementation quantises in another way")


def _jax_gpu(case, q, k_pages, v_pages, tables, lens, *_):
    _decode_only(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    return paged_attention(q * case.head_dim**-0.5, k_pages, v_pages, tables, lens)


def _jax_tpu(case, q, k_pages, v_pages, tables, lens, *_):
    _decode_only(case)
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    pages_per_block = next(n for n in (8, 4, 2, 1) if tables.shape[1] % n == 0)
    return paged_attention(q * case.head_dim**-0.5, k_pages, v_pages, lens, tables, pages_per_compute_block=pages_per_block)


def _cudnn(case, q, k_pages, v_pages, tables, lens, *_):
    _decode_only(case)
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    table = tables[:, None, :, None]
    out = paged_attention(
        q[:, None], k_pages, v_pages, jnp.ones_like(lens), lens, table, table, scale=case.head_dim**-0.5, mask_type=MaskType.PADDING
    )
    return out[:, 0]


_GPU = {"jax_triton": (_heads_first, _jax_gpu), "cudnn": (_as_they_are, _cudnn)}
PEERS = {"gpu": _GPU, "cuda": _GPU, "tpu": {"jax_tpu": (_heads_first, _jax_tpu)}}
