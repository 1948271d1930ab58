"""paged_attention on the CPU as native loops: cost follows each row's own length, on all cores.

Pallas has no CPU lowering, and XLA's gathers and small products leave most of the memory's bandwidth idle (docs/decisions). Needs numba.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import native_calls
from pallas_kernels.paged_attention.options import Options

_NO_WINDOW = 1 << 30


def unsupported(q_shape, q_dtype, pages_shape, pages_dtype, options: Options) -> str | None:
    """None, or in one sentence why :func:`attend` can't take this call."""
    if not native_calls.INSTALLED:
        return "the numba backend needs numba, which is not installed; pip install numba"
    if (jnp.dtype(q_dtype), jnp.dtype(pages_dtype)) != (jnp.float32, jnp.float32):
        return f"the numba backend takes float32 queries and pages, not {q_dtype} and {pages_dtype}"
    if q_shape[2] % 4:
        return f"the numba backend takes a head_dim that is a multiple of 4, not {q_shape[2]}"
    if any(jnp.ndim(scale) for scale in (options.k_scale, options.v_scale) if scale is not None):
        return "the numba backend takes scalar k_scale and v_scale, not one for each slot"
    return None


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
    """Return (o [T, H, D], lse float32 [T, H]); see :func:`pallas_kernels.paged_attention`."""
    native_calls.register(native_calls.PAGED_ATTENTION)
    num_rows, num_heads = block_tables.shape[0], q.shape[1]
    if decode_only:
        distribution = jnp.full(2, num_rows, jnp.int32)
        query_start_loc = jnp.full(num_rows + 1, num_rows, jnp.int32)
    counts = jnp.append(distribution, jnp.int32(options.sliding_window or _NO_WINDOW))
    k_scale, v_scale = (1.0 if scale is None else scale for scale in (options.k_scale, options.v_scale))
    scales = jnp.stack([jnp.asarray(x, jnp.float32) for x in (options.sm_scale * k_scale, options.soft_cap or 0.0, v_scale)])
    slopes = np.zeros(num_heads, np.float32) if options.alibi_slopes is None else options.alibi_slopes
    sinks = np.full(num_heads, -np.inf, np.float32) if options.sinks is None else options.sinks
    call = jax.ffi.ffi_call(
        native_calls.PAGED_ATTENTION, (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    )
    o, lse = call(q, k_pages, v_pages, block_tables, seq_lens, query_start_loc, counts, scales, slopes, sinks)
    return o, lse
