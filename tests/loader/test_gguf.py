"""GGUF files: number formats, the llama architecture's q and k row order, metadata, and damage that is named."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CONFIG, gguf_tensors, metadata, tensors, write_gguf, write_hf

from jaxserve.config import EngineConfig, ParallelConfig, RopeConfig
from jaxserve.loader import load_model, load_model_config
from jaxserve.loader.gguf_file import open_gguf, write_metadata
from jaxserve.models.parameters import parameters
from jaxserve.sharding import make_mesh

QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # byte offsets of the block's float16 scales


def load(path, dtype="float32"):
    return load_model(EngineConfig.from_options(model=str(path)), make_mesh(ParallelConfig()), jnp.dtype(dtype))


def write(path, keys=None, stored=None, kind="F32", architecture="llama"):
    stored = gguf_tensors(CONFIG, tensors(CONFIG), permute=architecture == "llama") if stored is None else stored
    return write_gguf(path, metadata(CONFIG, architecture) | (keys or {}), stored, kind, architecture)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
def test_values_equal_the_dequantised_ones(tmp_path, kind):
    """3,000 rows: several chunks of blocks and a rest."""
    value = np.random.default_rng(0).normal(0, 1, (3000, 64)).astype(np.float32)
    file = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"x": value}, kind))
    wanted = gguf.GGMLQuantizationType[kind]
    np.testing.assert_array_equal(file.tensors["x"].read(), gguf.dequantize(gguf.quantize(value, wanted), wanted))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_equal_the_dequantised_ones(tmp_path, kind):
    wanted = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[wanted]
    blocks = np.random.default_rng(0).integers(0, 256, (2500, size), np.uint8)
    for offset in K_QUANTS[kind]:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", blocks, raw_shape=blocks.shape, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "m.gguf").tensors["x"]
    assert tensor.shape == (2500, values)
    np.testing.assert_array_equal(tensor.read(), gguf.dequantize(blocks, wanted))


@pytest.mark.parametrize(("architecture", "family"), [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")])
def test_equals_the_hugging_face_checkpoint(tmp_path, architecture, family):
    """The same model in both formats: qwen2's biases, qwen3's norms, and q and k rows that only llama files interleave."""
    config = CONFIG | {"architectures": [f"{family}ForCausalLM"], "head_dim": 8, "bos_token_id": None, "eos_token_id": None}
    stored, rng = tensors(config), np.random.default_rng(1)
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn."
        if family == "Qwen2":
            stored |= {f"{attention}{x}_proj.bias": rng.normal(size=32 if x == "q" else 16).astype(np.float32) for x in "qkv"}
        if family == "Qwen3":
            stored |= {f"{attention}{x}_norm.weight": rng.normal(size=8).astype(np.float32) for x in "qk"}
    one = load(write_hf(tmp_path / "hf", config, stored))
    other = load(write(tmp_path / "m.gguf", stored=gguf_tensors(config, stored, architecture == "llama"), architecture=architecture))
    assert one.model_config == other.model_config
    pairs = dict(parameters(one.module)), dict(parameters(other.module))
    assert pairs[0].keys() == pairs[1].keys()
    for path, variable in pairs[0].items():
        np.testing.assert_array_equal(variable.get_value(), pairs[1][path].get_value(), err_msg=str(path))


def test_biases_of_llama_files_are_reordered_too(tmp_path):
    config = CONFIG | {"attention_bias": True, "bos_token_id": None, "eos_token_id": None}
    stored, rng = tensors(config), np.random.default_rng(1)
    for layer in range(2):
        shapes = {"q": 32, "k": 16, "v": 16, "o": 32}
        stored |= {f"model.layers.{layer}.self_attn.{x}_proj.bias": rng.normal(size=n).astype(np.float32) for x, n in shapes.items()}
    one = load(write_hf(tmp_path / "hf", config, stored))
    other = load(write(tmp_path / "m.gguf", stored=gguf_tensors(config, stored, True)))
    bias = ("blocks", 1, "attention", "qkv", "bias")
    np.testing.assert_array_equal(dict(parameters(one.module))[bias].get_value(), dict(parameters(other.module))[bias].get_value())


def test_float32_metadata_is_the_decimal_that_was_meant(tmp_path):
    config = load_model_config(str(write(tmp_path / "m.gguf", {"llama.rope.freq_base": 500000.0})))
    assert (config.rms_norm_eps, config.rope.theta) == (1e-05, 500000.0)


def test_end_of_sequence_ids_and_tied_head(tmp_path):
    stored = gguf_tensors(CONFIG, tensors(CONFIG | {"tie_word_embeddings": True}), True)
    keys = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", 1), ("eos", 2), ("eot", 5), ("eom", 2))}
    config = load_model_config(str(write(tmp_path / "m.gguf", keys, stored)))
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2, 5), True)


FACTORS = np.array([1.0, 1.5, 4.0, 8.0], np.float32)


@pytest.mark.parametrize(
    ("keys", "extra", "expected"),
    [
        ({}, {}, RopeConfig()),
        ({"type": "none"}, {}, RopeConfig()),
        ({"type": "linear", "factor": 4.0}, {}, RopeConfig(kind="linear", factor=4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            {},
            RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.1 * np.log(4.0) + 1),
        ),
        (
            {},
            {"rope_freqs.weight": FACTORS},
            RopeConfig(10000.0, "longrope", 1.0, 64, attention_factor=1.0, short_factor=tuple(FACTORS), long_factor=tuple(FACTORS)),
        ),
        (
            {"original_context_length": 16, "attn_factor": 1.25},
            {"rope_factors_short.weight": FACTORS / 2, "rope_factors_long.weight": FACTORS},
            RopeConfig(10000.0, "longrope", None, 16, attention_factor=1.25, short_factor=tuple(FACTORS / 2), long_factor=tuple(FACTORS)),
        ),
    ],
)
def test_rope_scaling(tmp_path, keys, extra, expected):
    stored = gguf_tensors(CONFIG, tensors(CONFIG), True) | extra
    path = write(tmp_path / "m.gguf", {f"llama.rope.scaling.{k}": v for k, v in keys.items()}, stored)
    assert load_model_config(str(path)).rope == expected
    load(path)  # the factor tensors are part of the configuration, not surplus


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.rope.scaling.type": "mystery"}, ("rope.scaling.type", "mystery", "yarn")),
        ({"llama.rope.scaling.type": "yarn"}, ("rope.scaling.factor",)),
        ({"llama.rope.dimension_count": 4}, ("rope.dimension_count", "4", "8")),
        ({"llama.expert_count": 8}, ("expert_count", "8")),
        ({"llama.attention.sliding_window": 16}, ("sliding_window", "16")),
        ({"llama.attention.head_count_kv": [2, 1]}, ("head_count_kv", "each layer")),
        ({"split.count": 3}, ("split.count", "3", "merge")),
    ],
)
def test_unsupported_metadata_is_named(tmp_path, keys, words):
    with pytest.raises(ValueError) as error:
        load(write(tmp_path / "m.gguf", keys))
    assert all(word in str(error.value) for word in ("m.gguf", *words)), str(error.value)


def test_unknown_architecture_and_missing_key_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"general\.architecture is 'gpt2'.*llama, qwen2, qwen3"):
        load(write(tmp_path / "a.gguf", architecture="gpt2"))
    with pytest.raises(ValueError, match=r"lacks the metadata key llama\.embedding_length"):
        load(write_gguf(tmp_path / "b.gguf", {"llama.attention.head_count": 4}, {"token_embd.weight": np.zeros((4, 4), np.float32)}))


def test_unsupported_number_format_is_named(tmp_path):
    stored = gguf_tensors(CONFIG, tensors(CONFIG | {"hidden_size": 256, "num_attention_heads": 32}), True)
    with pytest.raises(ValueError, match=r"tensor .* has type TQ1_0, which is not supported; supported: F32, F16, BF16"):
        open_gguf(write(tmp_path / "m.gguf", stored={k: v for k, v in stored.items() if v.shape[-1] % 256 == 0}, kind="TQ1_0"))


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 500, -1000])
def test_truncated_file_is_named(tmp_path, keep):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf is (truncated|not a GGUF file)"):
        load(path)


def test_other_file_is_no_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ValueError, match="not a GGUF file"):
        load(path)


def test_missing_tensor_is_named_by_its_hugging_face_name(tmp_path):
    stored = gguf_tensors(CONFIG, tensors(CONFIG), True)
    del stored["blk.1.ffn_up.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(write(tmp_path / "m.gguf", stored=stored))


def test_metadata_is_copied_without_tensors(tmp_path):
    path = write(tmp_path / "m.gguf", {"tokenizer.ggml.tokens": ["a", "é", ""], "tokenizer.ggml.bos_token_id": 1})
    write_metadata(path, tmp_path / "copy.gguf")
    copy = open_gguf(tmp_path / "copy.gguf")
    assert (copy.metadata, copy.tensors) == (open_gguf(path).metadata, {})
    assert copy.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
