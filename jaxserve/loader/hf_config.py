"""Hugging Face config.json -> ModelConfig, with Transformers' defaults for absent keys, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.loader.rope_config import parse_rope
from jaxserve.loader.safetensors_file import read_json
from jaxserve.models.registry import model_class

# What Transformers' configuration classes say when config.json leaves a key out.
_COMMON = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _COMMON | {"max_position_embeddings": 2048, "num_key_value_heads": None, "bos_token_id": 1, "eos_token_id": 2},
    "MistralForCausalLM": _COMMON
    | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4096},
    "Qwen2ForCausalLM": _COMMON | {"sliding_window": 4096},
    "Qwen3ForCausalLM": _COMMON | {"sliding_window": 4096, "head_dim": 128},
}


def read_hf_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a model directory; ValueError names the file, the key and the value that is not supported."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json; give a model directory in the Hugging Face layout, a .gguf file or a hub id"
        )
    generation, tokenizer_eos = read_generation_config(directory), _tokenizer_eos(directory)
    return hf_model_config(read_json(path), str(path), (generation.get("eos_token_id"), tokenizer_eos))


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json as it is; empty when the model has none."""
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def hf_model_config(config: dict[str, Any], where: str, more_eos: tuple[Any, ...] = ()) -> ModelConfig:
    """ModelConfig of a config.json's content; `more_eos` are end-of-sequence ids that other files declare."""
    architecture = str((config.get("architectures") or [None])[0])
    try:
        model_class(architecture)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    get = _Reader(DEFAULTS[architecture] | config, where)
    hidden, heads = get.size("hidden_size"), get.size("num_attention_heads")
    kv_heads = get.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads is {heads}, which num_key_value_heads ({kv_heads}) does not divide")
    head_dim = get.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim is {head_dim}; rotary embedding needs an even one")
    context = get.size("max_position_embeddings")
    _check_supported(architecture, get.values, where, context)
    attention_bias = get.boolean("attention_bias")
    family = architecture.removesuffix("ForCausalLM")
    return ModelConfig(
        architecture=architecture,
        vocab_size=get.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.size("intermediate_size"),
        num_layers=get.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=get.positive("rms_norm_eps"),
        rope=parse_rope(config, where, head_dim, context),
        tie_word_embeddings=get.boolean("tie_word_embeddings"),
        qkv_bias=family == "Qwen2" or (family in ("Llama", "Qwen3") and attention_bias),
        o_bias=family in ("Llama", "Qwen3") and attention_bias,
        mlp_bias=family == "Llama" and get.boolean("mlp_bias"),
        qk_norm=family == "Qwen3",
        bos_token_id=next(iter(_ids(get.values["bos_token_id"], "bos_token_id", where)), None),
        eos_token_ids=_eos_ids((get.values["eos_token_id"], *more_eos), get.size("vocab_size"), where),
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json that hf_model_config reads back to the same ModelConfig, and that Transformers reads too."""
    rope = {k: v for k, v in dataclasses.asdict(config.rope).items() if v is not None and k not in ("theta", "kind", "truncate")}
    if not config.rope.truncate:
        rope["truncate"] = False
    return {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": config.rope.kind, "rope_theta": config.rope.theta, **rope},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


class _Reader:
    """Checked access to config.json's values; errors name the file, the key and the value."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where = values, where

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.where} lacks {key}; add it")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be an integer of at least 1")
        return value

    def positive(self, key: str) -> float:
        value = self.values[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be a number above 0")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.values[key]
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be true or false")
        return value


def _check_supported(architecture: str, values: dict[str, Any], where: str, context: int) -> None:
    if values["hidden_act"] != "silu":
        raise ValueError(f"{where}: hidden_act is {values['hidden_act']!r}; only 'silu' is supported")
    for key in ("quantization_config", "compression_config"):
        if values.get(key):
            method = values[key].get("quant_method") if isinstance(values[key], dict) else values[key]
            raise ValueError(
                f"{where}: {key} asks for quantised weights ({method}), which are not supported; use an unquantised checkpoint or GGUF"
            )
    window = values["sliding_window"]
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        if not values["use_sliding_window"] or values["max_window_layers"] >= values["num_hidden_layers"]:
            window = None
    elif architecture == "LlamaForCausalLM":
        window = None  # Llama has no such key
    if window is not None and window < context:
        raise ValueError(f"{where}: sliding_window is {window}; only full attention is supported (sliding_window null)")
    other = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ValueError(f"{where}: layer_types has {', '.join(map(repr, other))}; only 'full_attention' is supported")


def _ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    """The token ids of null, one integer or a list of them."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise ValueError(f"{where}: {key} is {value!r}; it must be a token id or a list of token ids")
    return ids


def _eos_ids(declared: tuple[Any, ...], vocab_size: int, where: str) -> tuple[int, ...]:
    """Every declared id once, in order, without those that the model cannot produce."""
    ids = [i for value in declared for i in _ids(value, "eos_token_id", where)]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _tokenizer_eos(directory: Path) -> int | None:
    """The id of tokenizer_config.json's eos_token; None when the directory does not tell."""
    path = directory / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    for number, entry in read_json(path).get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return int(number)
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    content = read_json(tokenizer)
    for entry in content.get("added_tokens", ()):
        if entry.get("content") == token:
            return entry["id"]
    vocab = content.get("model", {}).get("vocab", {})
    return vocab.get(token) if isinstance(vocab, dict) else next((i for i, (text, _) in enumerate(vocab) if text == token), None)
