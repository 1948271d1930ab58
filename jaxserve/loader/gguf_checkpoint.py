"""GGUF metadata and tensor names -> ModelConfig and Hugging Face names (as llama.cpp's convert_hf_to_gguf.py made them)."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.loader.checkpoint import Checkpoint, SourceTensor
from jaxserve.loader.gguf_file import GGUFFile, GGUFTensor, open_gguf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = ("llama",)  # architectures whose q and k rows are stored with the two components of each rotary pair side by side
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # part of the configuration here


def open_gguf_checkpoint(path: Path) -> Checkpoint:
    """The configuration and tensors of a .gguf file; ValueError names what it has that is not supported."""
    file = open_gguf(path)
    config = gguf_model_config(file)
    tensors = {}
    for name, tensor in file.tensors.items():
        if name not in _ROPE_TENSORS:
            read = functools.partial(tensor.read, _row_order(file, config, tensor))
            tensors[_hugging_face_name(name)] = SourceTensor(tensor.shape, tensor.dtype, read)
    return Checkpoint(path, config, tensors, str(path))


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """ModelConfig from the metadata; what GGUF does not say (tied head, biases, q and k norms) follows from which tensors exist."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"{file.path}: general.architecture is {name!r}, which is not supported; supported: {', '.join(ARCHITECTURES)}")
    get = functools.partial(_get, file, name)
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    for key, supported in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim), ("expert_count", 0)):
        if get(key, supported) != supported:
            raise ValueError(f"{file.path}: {name}.{key} is {get(key)}, but only {supported} is supported for this model")
    context = get("context_length")
    if 0 < get("attention.sliding_window", 0) < context:
        raise ValueError(
            f"{file.path}: {name}.attention.sliding_window is {get('attention.sliding_window')}; only full attention is supported"
        )
    vocab_size = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else get("vocab_size")
    eos = [file.metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    return ModelConfig(
        architecture=ARCHITECTURES[name],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, get, head_dim, context),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None and i < vocab_size)),
    )


def _get(file: GGUFFile, architecture: str, key: str, default: Any = None) -> Any:
    value = file.metadata.get(f"{architecture}.{key}", default)
    if value is None:
        raise ValueError(f"{file.path} lacks the metadata key {architecture}.{key}; convert the model again with a current llama.cpp")
    if isinstance(value, list):
        raise ValueError(f"{file.path}: {architecture}.{key} has a value for each layer, which is not supported")
    return value


def _rope(file: GGUFFile, get: Any, head_dim: int, context: int) -> RopeConfig:
    theta, kind = get("rope.freq_base", 10000.0), get("rope.scaling.type", "none")
    original = get("rope.scaling.original_context_length", context)
    if "rope_freqs.weight" in file.tensors:  # llama3: a fixed divisor of each frequency, which longrope with one set of factors is
        factors = _factors(file, "rope_freqs.weight", head_dim)
        return RopeConfig(theta, "longrope", 1.0, original, attention_factor=1.0, short_factor=factors, long_factor=factors)
    if "rope_factors_long.weight" in file.tensors:
        long, short = (_factors(file, f"rope_factors_{x}.weight", head_dim) for x in ("long", "short"))
        return RopeConfig(
            theta, "longrope", None, original, attention_factor=get("rope.scaling.attn_factor", 1.0), short_factor=short, long_factor=long
        )
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", get("rope.scaling.factor"))
    if kind == "yarn":
        factor = get("rope.scaling.factor")
        attention = get("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
        return RopeConfig(theta, "yarn", factor, original, attention_factor=attention)
    raise ValueError(f"{file.path}: rope.scaling.type is {kind!r}, which is not supported; supported: none, linear, yarn")


def _factors(file: GGUFFile, name: str, head_dim: int) -> tuple[float, ...]:
    if name not in file.tensors or file.tensors[name].shape != (head_dim // 2,):
        raise ValueError(f"{file.path}: tensor {name} must have {head_dim // 2} values, one for each rotary pair")
    return tuple(float(x) for x in file.tensors[name].read())


def _hugging_face_name(name: str) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _BLOCK:
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _row_order(file: GGUFFile, config: ModelConfig, tensor: GGUFTensor) -> np.ndarray | None:
    """Where each row of the half-split rotary layout is stored, for q and k of the permuted architectures."""
    if file.metadata["general.architecture"] not in PERMUTED or not re.search(r"\.attn_[qk]\.(weight|bias)$", tensor.name):
        return None
    rows = np.arange(tensor.shape[0])
    if len(rows) % config.head_dim:
        return None  # misshapen: reported with the others when the parameters are planned
    return rows.reshape(-1, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
