"""llama2.c's model.bin (github.com/karpathy/llama2.c) -> a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def convert(source: Path, directory: Path) -> Path:
    """Write config.json and model.safetensors; q and k rows go from interleaved rotary pairs to halves."""
    dim, ffn, layers, heads, kv_heads, vocab, context = np.fromfile(source, np.int32, 7).tolist()
    data, position = np.fromfile(source, np.float32, offset=28), 0

    def take(*shape: int) -> np.ndarray:
        nonlocal position
        start, position = position, position + int(np.prod(shape))
        return data[start:position].reshape(shape)

    def halves(x: np.ndarray) -> np.ndarray:
        return x.reshape(layers, -1, dim // heads // 2, 2, dim).swapaxes(2, 3).reshape(x.shape)

    kv = dim * kv_heads // heads
    tensors = {"model.embed_tokens.weight": take(vocab, dim)}
    stacked = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": halves(take(layers, dim, dim)),
        "self_attn.k_proj": halves(take(layers, kv, dim)),
        "self_attn.v_proj": take(layers, kv, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, ffn, dim),
        "mlp.down_proj": take(layers, dim, ffn),
        "mlp.up_proj": take(layers, ffn, dim),
    }
    tensors |= {f"model.layers.{i}.{name}.weight": np.ascontiguousarray(x[i]) for name, x in stacked.items() for i in range(layers)}
    tensors["model.norm.weight"] = take(dim)
    sizes = dict(zip(SIZES, (dim, ffn, layers, heads, kv_heads, vocab, context), strict=True))
    config = {"architectures": ["LlamaForCausalLM"], **sizes, "rms_norm_eps": 1e-05, "tie_word_embeddings": True}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
