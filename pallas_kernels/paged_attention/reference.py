"""Reference for paged_attention: one token at a time over its row's whole table, in float32."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.options import Options


def paged_attention_reference(
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
) -> tuple[Array, Array]:
    """Return (o [T, H, D], lse float32 [T, H]) over token-major pages; see :func:`pallas_kernels.paged_attention`.

    Cost follows the table's width. Pages of another layout go through :func:`pallas_kernels.pool.to_token_major` first.
    """
    num_tokens, num_rows = q.shape[0], block_tables.shape[0]
    if decode_only:
        query_start_loc = jnp.arange(num_rows + 1, dtype=jnp.int32)
        distribution = jnp.full((2,), num_rows, jnp.int32)

    def one_token(token):
        row = jnp.clip(jnp.searchsorted(query_start_loc, token, side="right") - 1, 0, num_rows - 1)
        position = seq_lens[row] - (query_start_loc[row + 1] - token)
        live = (token < query_start_loc[distribution[1]]) & (position >= 0)
        k, v = (pages[block_tables[row]].astype(jnp.float32) for pages in (k_pages, v_pages))
        k_scale, v_scale = (_of_pages(scale, block_tables[row]) for scale in (options.k_scale, options.v_scale))
        o, lse = _attend(q[token], k * k_scale, v * v_scale, position, options)
        return jnp.where(live, o, 0).astype(q.dtype), jnp.where(live, lse, -jnp.inf)

    return jax.lax.map(one_token, jnp.arange(num_tokens, dtype=jnp.int32))


def _of_pages(scale, page_ids):
    """A scale to multiply pages [MP, page_size, KVH, D] with: a scalar, or for each slot and head."""
    if scale is None:
        return 1.0
    return scale[page_ids][..., None] if jnp.ndim(scale) == 3 else scale


def _attend(q, k, v, position, options):
    """One query [H, D] at ``position`` over pages k, v float32 [MP, page_size, KVH, D] -> (o float32 [H, D], lse [H])."""
    num_kv_heads, head_dim = k.shape[2:]
    key_position = jnp.arange(k.shape[0] * k.shape[1], dtype=jnp.int32)
    mask = key_position <= position
    if options.sliding_window is not None:
        mask &= key_position > position - options.sliding_window
    # Unused slots may hold NaN, and 0 * NaN is NaN: they are replaced, not only given weight 0.
    k, v = (jnp.where(mask[:, None, None], x.reshape(-1, num_kv_heads, head_dim), 0) for x in (k, v))
    q = q.reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)
    scores = jnp.einsum("kgd,skd->kgs", q, k, precision="highest").reshape(-1, k.shape[0]) * options.sm_scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    if options.alibi_slopes is not None:
        scores += options.alibi_slopes[:, None] * (key_position - position)
    scores = jnp.where(mask, scores, -jnp.inf)
    if options.sinks is not None:
        scores = jnp.concatenate([scores, options.sinks[:, None]], axis=1)
        v = jnp.concatenate([v, jnp.zeros_like(v[:1])])
    lse = jax.nn.logsumexp(scores, axis=1)
    weights = jnp.exp(scores - lse[:, None]).reshape(num_kv_heads, -1, v.shape[0])
    return jnp.einsum("kgs,skd->kgd", weights, v, precision="highest").reshape(-1, head_dim), lse
