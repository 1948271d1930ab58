"""config.json -> ModelConfig: families, defaults, spellings, and refusals that name the key."""

import json
import logging
from pathlib import Path

import pytest
from checkpoints import CONFIG

from jaxserve.config import RopeConfig
from jaxserve.loader import load_model_config
from jaxserve.loader.hf_config import hf_model_config, to_hf_config

FACTORS = [1.0, 1.5, 2.0, 2.5]
SUPPORTED = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def parse(**changes):
    return hf_model_config({k: v for k, v in (CONFIG | changes).items() if v != "absent"}, "config.json")


def family(name, **changes):
    return parse(architectures=[f"{name}ForCausalLM"], **changes)


def test_plain_llama():
    config = parse()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert config.rope == RopeConfig(theta=10000.0)
    assert not (config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_explicit_head_dim_need_not_be_hidden_over_heads():
    assert parse(head_dim=16).head_dim == 16
    assert parse(head_dim=None).head_dim == 8


def test_absent_keys_take_the_architecture_s_defaults():
    absent = {k: "absent" for k in ("tie_word_embeddings", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")}
    llama = parse(**absent)
    assert (llama.num_kv_heads, llama.max_position_embeddings, llama.rms_norm_eps, llama.tie_word_embeddings) == (4, 2048, 1e-6, False)
    mistral = family("Mistral", num_attention_heads=16, sliding_window=None, **absent)
    assert (mistral.num_kv_heads, mistral.max_position_embeddings) == (8, 131072)
    qwen3 = family("Qwen3", num_attention_heads=32, hidden_size=64, **absent)
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.max_position_embeddings, qwen3.bos_token_id) == (32, 128, 32768, None)


@pytest.mark.parametrize(
    ("name", "attention_bias", "expected"),  # (qkv_bias, o_bias, qk_norm)
    [
        ("Llama", False, (False, False, False)),
        ("Llama", True, (True, True, False)),
        ("Mistral", False, (False, False, False)),
        ("Qwen2", False, (True, False, False)),
        ("Qwen3", False, (False, False, True)),
        ("Qwen3", True, (True, True, True)),
    ],
)
def test_biases_and_norms(name, attention_bias, expected):
    config = family(name, attention_bias=attention_bias, sliding_window=None)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == expected


def test_mlp_bias_is_llama_s_alone():
    assert parse(mlp_bias=True).mlp_bias
    assert not family("Qwen2", mlp_bias=True).mlp_bias


ROPE = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "longrope": {"short_factor": FACTORS, "long_factor": FACTORS, "original_max_position_embeddings": 32, "factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_spellings_mean_the_same(kind):
    old, older = ({"rope_theta": 5e5, "rope_scaling": {key: kind, **ROPE[kind]}} for key in ("rope_type", "type"))
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **ROPE[kind]}}
    nested = {"rope_parameters": {"full_attention": new["rope_parameters"]}}
    parsed = [parse(**spelling).rope for spelling in (old, older, new, nested)]
    assert parsed == [parsed[0]] * 4
    assert (parsed[0].kind, parsed[0].theta, parsed[0].factor) == (kind, 5e5, ROPE[kind]["factor"])


def test_rope_default_in_every_spelling():
    for entry in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}):
        assert parse(**entry).rope == RopeConfig()


def test_original_length_is_the_outer_one_then_the_entry_s_then_the_longest():
    entry = {"rope_type": "yarn", "factor": 2.0}
    assert parse(rope_scaling=entry).rope.original_max_position_embeddings == 64
    entry["original_max_position_embeddings"] = 32
    assert parse(rope_scaling=entry).rope.original_max_position_embeddings == 32
    assert parse(rope_scaling=entry, original_max_position_embeddings=16).rope.original_max_position_embeddings == 16


@pytest.mark.parametrize("kind", ROPE)
def test_each_missing_rope_field_is_named(kind):
    for field in set(ROPE[kind]) & {"factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"} - (
        {"factor"} if kind == "longrope" else set()
    ):
        entry = {"rope_type": kind, **{k: v for k, v in ROPE[kind].items() if k != field}}
        with pytest.raises(ValueError, match=f"rope_scaling has rope_type '{kind}' but lacks {field}"):
            parse(rope_scaling=entry)


def test_unknown_rope_field_is_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        parse(rope_scaling={"type": "linear", "factor": 2.0, "surprise": 1})
    assert "surprise" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "LlamaForCausalLM")),
        ({"architectures": "absent"}, ("architecture", "None")),
        ({"hidden_size": "absent"}, ("lacks hidden_size",)),
        ({"hidden_size": "32"}, ("hidden_size", "'32'")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"vocab_size": True}, ("vocab_size", "True")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({"head_dim": 7}, ("head_dim", "7")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps", "0")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "yes")),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config", "awq")),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, ("sliding_window", "32")),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, ("sliding_window", "4096")),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            ("sliding_window",),
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            ("layer_types", "sliding_attention"),
        ),
        ({"rope_scaling": {"rope_type": "mystery"}}, ("rope_scaling", "mystery", "yarn")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "linear")),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, ("rope_scaling.factor", "'4'")),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ("rope_scaling.factor", "-1")),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": FACTORS}}, ("short_factor", "4")),
        ({"rope_scaling": {**ROPE["llama3"], "type": "llama3", "high_freq_factor": 1.0}}, ("high_freq_factor",)),
        ({"rope_theta": 0}, ("rope_theta", "0")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"eos_token_id": "</s>"}, ("eos_token_id", "</s>")),
    ],
)
def test_refused_with_the_key(changes, words):
    with pytest.raises(ValueError) as error:
        parse(**changes)
    assert all(word in str(error.value) for word in ("config.json", *words)), str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64},  # as long as the context: the same as full attention
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 8},
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2},
    ],
)
def test_windows_that_never_apply_are_fine(changes):
    assert parse(**changes).num_layers == 2


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("kind", [None, *ROPE])
def test_written_config_reads_back(name, kind):
    config = family(
        name, head_dim=8, sliding_window=None, eos_token_id=[5, 7], **({"rope_scaling": {"type": kind, **ROPE[kind]}} if kind else {})
    )
    assert hf_model_config(json.loads(json.dumps(to_hf_config(config))), "config.json") == config


@pytest.mark.parametrize(
    ("token", "added", "vocab", "expected"),
    [
        ("<end>", {"added_tokens": [{"id": 9, "content": "<end>"}]}, None, 9),
        ({"content": "<end>"}, {"model": {"vocab": {"<end>": 8}}}, None, 8),
        ("<end>", {"model": {"vocab": [["a", 0.0], ["<end>", 0.0]]}}, None, 1),
        ("<end>", None, {"11": {"content": "<end>"}}, 11),
        ("<end>", None, None, None),
    ],
)
def test_tokenizer_s_end_token_counts(tmp_path, token, added, vocab, expected):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 3}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, "added_tokens_decoder": vocab or {}}))
    if added:
        (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    assert load_model_config(str(tmp_path)).eos_token_ids == ((3,) if expected is None else (3, expected))


def test_every_published_config_loads_or_is_refused_clearly(shared_dir: Path):
    """Configurations of well-known models: the supported families parse, the others are refused by architecture or feature."""
    files = sorted((shared_dir / "data" / "configs").glob("*_config.json"))
    assert len(files) > 50
    parsed = 0
    for file in files:
        if file.name.endswith("hf_quant_config.json"):
            continue
        content = json.loads(file.read_text())
        try:
            config = hf_model_config(content, file.name)
        except ValueError as error:
            plain = set(content.get("architectures") or ()) <= SUPPORTED and not content.get("quantization_config")
            assert not plain, str(error)
            assert file.name in str(error)
        else:
            parsed += 1
            assert config.num_layers == content["num_hidden_layers"]
    assert parsed >= 6
