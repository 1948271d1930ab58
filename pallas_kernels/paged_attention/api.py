"""The contract of paged_attention, its argument checks and the way to the backend."""

import importlib
from types import ModuleType

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.pool import check_backend, page_size_multiple, page_sizes, pool_axes, scale_shape

_PLAIN = {"xla": paged_attention_xla, "reference": paged_attention_reference}
# Imported when first asked for: Pallas takes a second to import, and a platform's kernels may need a newer JAX than the rest does.
_KERNELS = {"numba": "cpu", "mosaic_gpu": "gpu", "mosaic_tpu": "tpu", "mosaic_tpu_lanes": "tpu_lanes"}


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
    interpret: bool = False,
    deterministic: bool = False,
) -> Array | tuple[Array, Array]:
    """Causal attention of T query tokens, packed by row, over keys and values that lie in pages.

    Row r is one sequence. Its queries are tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` of ``q`` and are the last
    positions of that sequence, whose keys and values (those of this call's tokens too) are already in the pool.

    Args:
        q: [T, H, D], float; H is a multiple of num_kv_heads (grouped-query attention).
        k_pages, v_pages: one layer's pool, float, int8 or float8_e4m3fn, shape from :func:`pallas_kernels.pool_shape`. Unused slots may
            hold anything, NaN included.
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
        k_scale, v_scale: what multiplies the stored keys and values: scalars, or float32 [num_pages, page_size, num_kv_heads], one for
            each slot and head, as :func:`pallas_kernels.kv_write` makes them; then both are given.
        return_lse: also return the natural log of the softmax denominator (sinks included), -inf where nothing is attended to.
        backend: static; one of :data:`pallas_kernels.BACKENDS`; :func:`pallas_kernels.choose_backend` knows the best for a device.
        interpret: static; run a Pallas backend's kernel in its interpreter, on a CPU. Changes nothing for "xla", "numba" and "reference".
        deterministic: static; among calls of the same shapes a row's result does not depend, to the bit, on the other rows. Costs
            "mosaic_gpu" speed where few rows are long, as it cuts each row by its own length and not the batch into equal shares; changes
            nothing for the others, which are so anyway.

    Returns o [T, H, D] in q's dtype, and with return_lse (o, lse float32 [T, H]). Softmax is in float32.

    Raises ValueError naming the argument, its value and what was expected.

    Sources: PagedAttention, arXiv:2309.06180; online softmax, arXiv:1805.02867; sinks, arXiv:2309.17453; ALiBi, arXiv:2108.12409.
    """
    check_backend(backend)
    _check_arrays(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution, decode_only, backend)
    options = Options(sm_scale, sliding_window, soft_cap, alibi_slopes, sinks, k_scale, v_scale)
    _check_options(options, q.shape[1], page_sizes(k_pages.shape, backend))
    arrays = (q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution)
    if backend in _PLAIN:
        o, lse = _PLAIN[backend](*arrays, options, decode_only=decode_only)
    else:
        kernel = kernel_module(backend)
        reason = kernel.unsupported(q.shape, q.dtype, k_pages.shape, k_pages.dtype, options)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot do this call: {reason}; backend 'xla' can")
        how: dict[str, bool] = {"fixed_splits": deterministic} if backend == "mosaic_gpu" else {}
        o, lse = kernel.attend(*arrays, options, decode_only=decode_only, interpret=interpret, **how)
    return (o, lse) if return_lse else o


def kernel_module(backend: str) -> ModuleType:
    """The module that has ``attend`` and ``unsupported`` of a backend that can't take every call."""
    return importlib.import_module(f"pallas_kernels.paged_attention.{_KERNELS[backend]}")


def _check_arrays(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, distribution, decode_only, backend):
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: {q.dtype}{list(q.shape)}: expected floating [tokens, heads, head_dim]")
    num_tokens, num_heads, head_dim = q.shape
    sizes = page_sizes(k_pages.shape, backend) if k_pages.ndim == 4 else {}
    if sizes.get("head_dim") != head_dim:
        raise ValueError(
            f"k_pages.shape={k_pages.shape}: expected {list(pool_axes(backend))} with head_dim {head_dim} for backend {backend!r}"
        )
    multiple = page_size_multiple(backend)
    if sizes["page_size"] % multiple:
        raise ValueError(f"k_pages.shape={k_pages.shape}: expected a multiple of {multiple} as page_size for backend {backend!r}")
    if (v_pages.shape, v_pages.dtype) != (k_pages.shape, k_pages.dtype):
        raise ValueError(f"v_pages: {v_pages.dtype}{list(v_pages.shape)}: expected {k_pages.dtype}{list(k_pages.shape)}, as k_pages")
    if not jnp.issubdtype(k_pages.dtype, jnp.floating) and k_pages.dtype != jnp.int8:
        raise ValueError(f"k_pages.dtype={k_pages.dtype}: expected a floating dtype or int8")
    if num_heads % sizes["kv_heads"]:
        raise ValueError(f"q.shape={q.shape}: expected heads to be a multiple of num_kv_heads={sizes['kv_heads']}")
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


def _check_options(options, num_heads, sizes):
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window={options.sliding_window}: expected None or at least 1")
    if options.soft_cap is not None and options.soft_cap <= 0:
        raise ValueError(f"soft_cap={options.soft_cap}: expected None or above 0")
    for name in ("alibi_slopes", "sinks"):
        value = getattr(options, name)
        if value is not None and value.shape != (num_heads,):
            raise ValueError(f"{name}.shape={value.shape}: expected ({num_heads},), one for each head")
    for_slots = scale_shape(sizes["pages"], sizes["page_size"], sizes["kv_heads"])
    scales = {name: getattr(options, name) for name in ("k_scale", "v_scale")}
    for name, value in scales.items():
        if value is not None and jnp.shape(value) not in ((), for_slots):
            raise ValueError(f"{name}.shape={jnp.shape(value)}: expected a scalar or {for_slots}, one for each slot and head")
    shapes = {jnp.shape(value) for value in scales.values() if value is not None}
    if for_slots in shapes and (len(shapes) > 1 or None in (options.k_scale, options.v_scale)):
        raise ValueError(f"k_scale and v_scale: one has {for_slots}; expected the other to have it too")
