"""Which stored tensors make up each parameter, one table per model family: the place to look up where a weight goes.

Stored matrices are [out, in] (torch); parameters are [in, *out]. Shapes below: H query heads in KVH groups of G, head dimension D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How stored tensors become one parameter."""

    source_shapes: Callable[[Shape], tuple[Shape, ...]]  # parameter shape -> shapes of the stored tensors
    write: Callable[..., None]  # (parameter array to fill, *stored arrays)


def _write_same(out: np.ndarray, x: np.ndarray) -> None:
    out[...] = x


def _write_transposed(out: np.ndarray, x: np.ndarray) -> None:
    out[...] = x.T


def _qkv_shapes(shape: Shape) -> tuple[Shape, ...]:
    hidden, kv_heads, group_and_kv, dim = shape
    kv = (kv_heads * dim, hidden)
    return (kv_heads * (group_and_kv - 2) * dim, hidden), kv, kv


def _write_qkv(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """out[hidden, KVH, G + 2, D]: of each KV head its G query heads, then its key, then its value."""
    hidden, kv_heads, group_and_kv, dim = out.shape
    group = group_and_kv - 2
    out[:, :, :group] = q.reshape(kv_heads, group, dim, hidden).transpose(3, 0, 1, 2)
    out[:, :, group] = k.reshape(kv_heads, dim, hidden).transpose(2, 0, 1)
    out[:, :, group + 1] = v.reshape(kv_heads, dim, hidden).transpose(2, 0, 1)


def _qkv_bias_shapes(shape: Shape) -> tuple[Shape, ...]:
    return tuple(s[:1] for s in _qkv_shapes((1, *shape)))


def _write_qkv_bias(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    _write_qkv(out[None], q[:, None], k[:, None], v[:, None])


def _write_gate_up(out: np.ndarray, gate: np.ndarray, up: np.ndarray) -> None:
    out[:, 0], out[:, 1] = gate.T, up.T


def _write_gate_up_bias(out: np.ndarray, gate: np.ndarray, up: np.ndarray) -> None:
    out[0], out[1] = gate, up


SAME = Layout(lambda shape: (shape,), _write_same)
TRANSPOSED = Layout(lambda shape: (shape[::-1],), _write_transposed)
QKV = Layout(_qkv_shapes, _write_qkv)  # [hidden, KVH, G + 2, D] <- q [H * D, hidden], k and v [KVH * D, hidden]
QKV_BIAS = Layout(_qkv_bias_shapes, _write_qkv_bias)
GATE_UP = Layout(lambda shape: ((shape[2], shape[0]),) * 2, _write_gate_up)  # [hidden, 2, ffn] <- gate and up [ffn, hidden]
GATE_UP_BIAS = Layout(lambda shape: (shape[1:],) * 2, _write_gate_up_bias)

# Parameter path ("N": block number) -> stored names and their layout. A model has the biases and norms that its configuration declares.
_BLOCK, _STORED = "blocks.N.", "model.layers.N."
LLAMA: dict[str, tuple[tuple[str, ...], Layout]] = {
    "embedding.table": (("model.embed_tokens.weight",), SAME),
    _BLOCK + "attention_norm.scale": ((_STORED + "input_layernorm.weight",), SAME),
    _BLOCK + "attention.qkv.kernel": (tuple(_STORED + f"self_attn.{x}_proj.weight" for x in "qkv"), QKV),
    _BLOCK + "attention.qkv.bias": (tuple(_STORED + f"self_attn.{x}_proj.bias" for x in "qkv"), QKV_BIAS),
    _BLOCK + "attention.q_norm.scale": ((_STORED + "self_attn.q_norm.weight",), SAME),
    _BLOCK + "attention.k_norm.scale": ((_STORED + "self_attn.k_norm.weight",), SAME),
    _BLOCK + "attention.o.kernel": ((_STORED + "self_attn.o_proj.weight",), TRANSPOSED),
    _BLOCK + "attention.o.bias": ((_STORED + "self_attn.o_proj.bias",), SAME),
    _BLOCK + "mlp_norm.scale": ((_STORED + "post_attention_layernorm.weight",), SAME),
    _BLOCK + "mlp.gate_up.kernel": ((_STORED + "mlp.gate_proj.weight", _STORED + "mlp.up_proj.weight"), GATE_UP),
    _BLOCK + "mlp.gate_up.bias": ((_STORED + "mlp.gate_proj.bias", _STORED + "mlp.up_proj.bias"), GATE_UP_BIAS),
    _BLOCK + "mlp.down.kernel": ((_STORED + "mlp.down_proj.weight",), TRANSPOSED),
    _BLOCK + "mlp.down.bias": ((_STORED + "mlp.down_proj.bias",), SAME),
    "norm.scale": (("model.norm.weight",), SAME),
    "head.kernel": (("lm_head.weight",), TRANSPOSED),
    "head.bias": (("lm_head.bias",), SAME),
}

TABLES = {name: LLAMA for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")}


def sources(architecture: str, path: tuple[str | int, ...]) -> tuple[tuple[str, ...], Layout]:
    """The stored names and the layout of the parameter at a path such as ("blocks", 3, "attention", "qkv", "kernel")."""
    block = next((part for part in path if isinstance(part, int)), 0)
    pattern = ".".join("N" if isinstance(part, int) else part for part in path)
    names, layout = TABLES[architecture][pattern]
    return tuple(name.replace(".N.", f".{block}.") for name in names), layout
