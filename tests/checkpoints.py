"""Tiny checkpoints with random values, in the Hugging Face layout and as GGUF, made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}


def tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a Llama model under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, ffn, heads, kv = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    dim = config.get("head_dim") or hidden // heads
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv * dim, hidden),
            "self_attn.v_proj": (kv * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.normal(0, 0.2, shape).astype(dtype) for name, shape in shapes.items()}


def write_hf(directory: Path, config: dict[str, Any], stored: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A model directory; with several shards, one file each and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        name, names = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors", sorted(stored)[shard::shards]
        save_file({n: stored[n] for n in names}, directory / name)
        weight_map |= dict.fromkeys(names, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def metadata(config: dict[str, Any], architecture: str = "llama") -> dict[str, Any]:
    """The GGUF metadata that llama.cpp's converter writes for such a model."""
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def write_gguf(path: Path, keys: dict[str, Any], stored: dict[str, np.ndarray], kind: str = "F32", architecture: str = "llama") -> Path:
    """A .gguf file; matrices are stored as `kind`, vectors as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in stored.items():
        wanted = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(value, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(config: dict[str, Any], stored: dict[str, np.ndarray], permute: bool) -> dict[str, np.ndarray]:
    """Hugging Face tensors under GGUF names, q and k rows interleaved as llama.cpp's converter does for the llama architecture."""
    parts = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    renamed = {}
    for name, value in stored.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if permute and heads:
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        for old, new in parts.items():
            name = name.replace(old + ".", new + ".")
        renamed[name] = value
    return renamed
