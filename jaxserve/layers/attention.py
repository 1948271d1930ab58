"""Self-attention over the page pool; the one place that calls pallas_kernels."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import pallas_kernels
from jaxserve.config import ModelConfig
from jaxserve.kv_cache import pool_spec
from jaxserve.layers.linear import Linear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import apply_rope

KERNEL_PLATFORMS = {"numba": ("cpu",), "mosaic_gpu": ("gpu", "cuda"), "mosaic_tpu": ("tpu",), "mosaic_tpu_lanes": ("tpu",)}


@dataclass(frozen=True)
class AttentionPath:
    """How attention runs: a backend of pallas_kernels, how it is called, and the mesh whose shards each run it."""

    backend: str = "xla"
    interpret: bool = False  # on a CPU
    mesh: Mesh | None = None  # None: one device
    deterministic: bool = False  # no row depends on the others, to the bit

    @property
    def page_size(self) -> int:
        """Tokens a page that suit the backend."""
        return pallas_kernels.default_page_size(self.backend)


def attention_path(wanted: str, model: ModelConfig, mesh: Mesh, dtype, kv_dtype, page_size: int | None) -> tuple[AttentionPath, str]:
    """The path for a wanted backend, or for the device's best ("auto"), and why in one line.

    A kernel for another platform runs in its interpreter on a CPU, to be tested there; on other devices it raises ValueError.
    """
    device, shards = mesh.devices.flat[0], mesh.shape["tensor"]
    reason = "as configured"
    if wanted == "auto":
        heads = {"num_heads": model.num_heads // shards, "num_kv_heads": model.num_kv_heads // shards, "head_dim": model.head_dim}
        wanted, reason = pallas_kernels.choose_backend(
            device.platform, device.device_kind, **heads, dtype=dtype, page_dtype=kv_dtype, page_size=page_size
        )
    platforms = KERNEL_PLATFORMS.get(wanted, (device.platform,))
    interpret = device.platform == "cpu" and device.platform not in platforms
    if not interpret and device.platform not in platforms:
        raise ValueError(f"attention_backend is {wanted!r}, but the device is {device.device_kind} ({device.platform}); give 'auto'")
    if interpret:
        reason = f"{reason}; interpreted on the CPU, which is slow and only good for tests"
    return AttentionPath(wanted, interpret, mesh if shards > 1 else None), reason


def prepare_in_background(path: AttentionPath) -> None:
    """Start what the backend's first call would wait for, native loops to be compiled on a CPU, while other programs compile."""
    threading.Thread(target=pallas_kernels.prepare, args=(path.backend,)).start()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens belong to which row, and where their keys and values are. T tokens, R rows, P table width."""

    block_tables: jax.Array  # i32[R, P] logical page -> page
    seq_lens: jax.Array  # i32[R] tokens of the row, those of this step included; 0: padding
    query_start_loc: jax.Array  # i32[R + 1] first token of each row
    slot_mapping: jax.Array  # i32[T] page * page_size + offset of each token; -1: padding
    distribution: jax.Array  # i32[2] (decode rows, rows): decode rows come first and have one token each
    decode_only: bool = field(default=False, metadata={"static": True})
    path: AttentionPath = field(default=AttentionPath(), metadata={"static": True})


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245): q, k and v in one matmul whose output is grouped by KV head."""

    def __init__(self, config: ModelConfig, dtype):
        hidden, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.group = heads // kv_heads
        self.head_dim = head_dim
        self.qkv = Linear(hidden, (kv_heads, self.group + 2, head_dim), dtype, ("embed", "kv_heads", None, None), bias=config.qkv_bias)
        self.o = Linear(heads * head_dim, (hidden,), dtype, ("heads", "embed"), bias=config.o_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def __call__(self, x, cos, sin, k_pages, v_pages, metadata: AttentionMetadata):
        """x[T, hidden] -> (y[T, hidden], k_pages, v_pages), the new keys and values written into their slots."""
        qkv = self.qkv(x)
        tokens = x.shape[0]
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            qk = jnp.concatenate([self.q_norm(qk[:, :, :-1]), self.k_norm(qk[:, :, -1:])], axis=2)
        qk = apply_rope(qk, cos, sin)
        q, k = qk[:, :, :-1].reshape(tokens, -1, self.head_dim), qk[:, :, -1]
        out, k_pages, v_pages = write_and_attend(q, k, v, k_pages, v_pages, metadata)
        return self.o(out.reshape(tokens, -1).astype(x.dtype)), k_pages, v_pages


def write_and_attend(q, k, v, k_pages, v_pages, metadata: AttentionMetadata) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D], k and v [T, KVH, D] -> (out [T, H, D], k_pages, v_pages with the new keys and values in their slots)."""
    mesh = metadata.path.mesh
    if mesh is None:
        return _write_and_attend(q, k, v, k_pages, v_pages, metadata)
    # Heads are independent, so each device runs its own. XLA cannot partition a kernel, and left alone with its own operations it
    # copies the pools.
    heads = PartitionSpec(None, "tensor", None)
    pages = pool_spec(metadata.path.backend)
    specs = (heads, heads, heads, pages, pages, PartitionSpec())
    return jax.shard_map(_write_and_attend, mesh=mesh, in_specs=specs, out_specs=(heads, pages, pages), check_vma=False)(
        q, k, v, k_pages, v_pages, metadata
    )


def _write_and_attend(q, k, v, k_pages, v_pages, metadata: AttentionMetadata) -> tuple[jax.Array, jax.Array, jax.Array]:
    path = metadata.path
    how = {"backend": path.backend, "interpret": path.interpret}
    k_pages, v_pages = pallas_kernels.kv_write(
        k_pages, v_pages, k.astype(k_pages.dtype), v.astype(v_pages.dtype), metadata.slot_mapping, **how
    )
    out = pallas_kernels.paged_attention(
        q,
        k_pages,
        v_pages,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.distribution,
        sm_scale=q.shape[-1] ** -0.5,
        decode_only=metadata.decode_only,
        deterministic=path.deterministic,
        **how,
    )
    return cast(jax.Array, out), k_pages, v_pages  # a pair only with return_lse
