"""The contract of paged_attention, its argument checks and the choice of backend."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.pool import check_backend

_BACKENDS = {"xla": paged_attention_xla, "reference": paged_attention_reference}


def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    distribution: Array,
    *,
    sm_scale: float,
    decode_only: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    return_lse: bool = False,
    backend: str = "xla",
) -> Array | tuple[Array, Array]:
    """Causal attention of T query tokens, packed by row, over keys and values that lie in pages.

    Row r is one sequence. Its queries are tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` of ``q`` and are the last
    positions of that sequence, whose keys and values (those of this call's tokens too) are already in the pool.

    Args:
        q: [T, H, D], float; H is a multiple of num_kv_heads (grouped-query attention).
        k_pages, v_pages: one layer's pool, shape from :func:`pallas_kernels.pool_shape`. Unused slots may hold anything, NaN included.
        block_tables: int32 [R, MP]; entry j of row r is the page of its tokens j * page_size onward. Entries past the length are
            ignored but must be valid page ids.
        seq_lens: int32 [R], all tokens of the row, in [0, MP * page_size]. A row of length 0 gives 0.
        query_start_loc: int32 [R + 1], non-decreasing. Unused when decode_only.
        distribution: int32 [2], (num_decode_rows, num_rows). Rows below num_decode_rows have one query each, token t of row t; rows up to
            num_rows have one or more; the rest is padding. Tokens from query_start_loc[num_rows] on are padding and give 0. Unused
            when decode_only.
        sm_scale: factor on q . k.
        decode_only: static; T == R and token t is the one query of row t.
        sliding_window: static; a query sees the last ``sliding_window`` positions, its own included.
        soft_cap: static; scores become soft_cap * tanh(score / soft_cap), after sm_scale.
        alibi_slopes: float32 [H]; adds slope * (key position - query position).
        sinks: float32 [H]; a score per head that takes weight and has no value.
        k_scale, v_scale: scalars that multiply the stored keys and values.
        return_lse: also return the natural log of the softmax denominator (sinks included), -inf where nothing is attended to.
        backend: "xla" or "reference".

    Returns o [T, H, D] in q's dtype, and with return_lse (o, lse float32 [T, H]). Softmax is in float32.

    Raises ValueError naming the argument, its value and what was expected.

    Sources: PagedAttention, arXiv:2309.06180; online softmax, arXiv:1805.02867; sinks, arXiv:2309.17453; ALiBi, arXiv:2108.12409.
    """
    check_backend(backend)
    _check_arrays(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution, decode_only)
    options = Options(sm_scale, sliding_window, soft_cap, alibi_slopes, sinks, k_scale, v_scale)
    _check_options(options, num_heads=q.shape[1])
    o, lse = _BACKENDS[backend](
        q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution, options, decode_only=decode_only
    )
    return (o, lse) if return_lse else o


def _check_arrays(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution, decode_only):
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: {q.dtype}{list(q.shape)}: expected floating [tokens, heads, head_dim]")
    num_tokens, num_heads, head_dim = q.shape
    if k_pages.ndim != 4 or k_pages.shape[3] != head_dim:
        raise ValueError(f"k_pages.shape={k_pages.shape}: expected [num_pages, page_size, num_kv_heads, {head_dim}]")
    if (v_pages.shape, v_pages.dtype) != (k_pages.shape, k_pages.dtype):
        raise ValueError(f"v_pages: {v_pages.dtype}{list(v_pages.shape)}: expected {k_pages.dtype}{list(k_pages.shape)}, as k_pages")
    if not jnp.issubdtype(k_pages.dtype, jnp.floating):
        raise ValueError(f"k_pages.dtype={k_pages.dtype}: expected a floating dtype")
    if num_heads % k_pages.shape[2]:
        raise ValueError(f"q.shape={q.shape}: expected heads to be a multiple of num_kv_heads={k_pages.shape[2]}")
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables.shape={block_tables.shape}: expected [rows, pages per row]")
    num_rows = block_tables.shape[0]
    metadata = {
        "block_tables": (block_tables, block_tables.shape),
        "seq_lens": (seq_lens, (num_rows,)),
        "query_start_loc": (query_start_loc, (num_rows + 1,)),
        "distribution": (distribution, (2,)),
    }
    for name, (value, shape) in metadata.items():
        if value.shape != shape or value.dtype != jnp.int32:
            raise ValueError(f"{name}: {value.dtype}{list(value.shape)}: expected int32{list(shape)}")
    if decode_only and num_tokens != num_rows:
        raise ValueError(f"q.shape={q.shape}: expected {num_rows} tokens, one for each row, because decode_only=True")


def _check_options(options, num_heads):
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window={options.sliding_window}: expected None or at least 1")
    if options.soft_cap is not None and options.soft_cap <= 0:
        raise ValueError(f"soft_cap={options.soft_cap}: expected None or above 0")
    for name in ("alibi_slopes", "sinks"):
        value = getattr(options, name)
        if value is not None and value.shape != (num_heads,):
            raise ValueError(f"{name}.shape={value.shape}: expected ({num_heads},), one for each head")
    for name in ("k_scale", "v_scale"):
        value = getattr(options, name)
        if value is not None and jnp.ndim(value) != 0:
            raise ValueError(f"{name}.shape={value.shape}: expected a scalar; a scale for each slot is not supported yet")
