"""safetensors directories: one file or several, every number format, and damage that is named."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CONFIG, tensors, write_hf

from jaxserve.config import EngineConfig, ParallelConfig
from jaxserve.loader import load_model
from jaxserve.loader.safetensors_file import open_safetensors
from jaxserve.models.parameters import parameters
from jaxserve.sharding import make_mesh


def load(path, dtype="float32", size=1):
    return load_model(EngineConfig.from_options(model=str(path)), make_mesh(ParallelConfig(size)), jnp.dtype(dtype))


def values(loaded):
    return {path: np.asarray(variable.get_value()) for path, variable in parameters(loaded.module)}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_reads_every_tensor(tmp_path, shards, dtype):
    stored = tensors(CONFIG, dtype)
    opened = open_safetensors(write_hf(tmp_path, CONFIG, stored, shards))
    assert opened.keys() == stored.keys()
    for name, value in stored.items():
        assert (opened[name].shape, opened[name].dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(opened[name].read(), value)


def test_parameters_hold_what_the_names_say(tmp_path):
    """q heads of each KV head, then its key, then its value; gate and up side by side; matrices transposed."""
    stored = tensors(CONFIG)
    parameter = values(load(write_hf(tmp_path, CONFIG, stored)))
    block = "model.layers.1."
    q, k, v = (stored[f"{block}self_attn.{x}_proj.weight"] for x in "qkv")
    qkv = parameter["blocks", 1, "attention", "qkv", "kernel"]
    assert qkv.shape == (32, 2, 4, 8)  # hidden, KV heads, 2 query heads + key + value, head_dim
    for head in range(4):
        np.testing.assert_array_equal(qkv[:, head // 2, head % 2], q[head * 8 : head * 8 + 8].T)
    for head in range(2):
        np.testing.assert_array_equal(qkv[:, head, 2], k[head * 8 : head * 8 + 8].T)
        np.testing.assert_array_equal(qkv[:, head, 3], v[head * 8 : head * 8 + 8].T)
    gate_up = parameter["blocks", 1, "mlp", "gate_up", "kernel"]
    np.testing.assert_array_equal(gate_up[:, 0], stored[block + "mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(gate_up[:, 1], stored[block + "mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(parameter["blocks", 1, "mlp", "down", "kernel"], stored[block + "mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(parameter["blocks", 1, "attention", "o", "kernel"], stored[block + "self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(parameter["embedding", "table"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(parameter["head", "kernel"], stored["lm_head.weight"].T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 2])
def test_dtype_and_sharding_are_the_asked_ones(tmp_path, dtype, size):
    write_hf(tmp_path, CONFIG, tensors(CONFIG, jnp.bfloat16))
    sharded, plain = load(tmp_path, dtype, size), load(tmp_path, "float32")
    for path, variable in parameters(sharded.module):
        array = variable.get_value()
        assert array.dtype == jnp.dtype(dtype)
        assert len(array.sharding.device_set) == size
        np.testing.assert_array_equal(np.asarray(array, np.float32), values(plain)[path])
    kernel = dict(parameters(sharded.module))["blocks", 0, "attention", "qkv", "kernel"].get_value()
    assert kernel.addressable_shards[0].data.shape == (32, 2 // size, 4, 8)


def test_one_error_lists_all_that_does_not_fit(tmp_path):
    stored = tensors(CONFIG)
    del stored["model.norm.weight"], stored["model.layers.0.mlp.up_proj.weight"]
    stored["model.layers.1.self_attn.k_proj.weight"] = np.zeros((32, 32), np.float32)
    stored["model.layers.2.input_layernorm.weight"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError) as error:
        load(write_hf(tmp_path, CONFIG, stored))
    for line in (
        "missing: model.norm.weight",
        "missing: model.layers.0.mlp.up_proj.weight",
        "misshapen: model.layers.1.self_attn.k_proj.weight has shape [32, 32], but the configuration asks for [16, 32]",
        "surplus: model.layers.2.input_layernorm.weight",
    ):
        assert line in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_stored_frequencies_are_of_no_interest(tmp_path, caplog):
    stored = tensors(CONFIG) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    load(write_hf(tmp_path, CONFIG, stored))
    assert caplog.text == ""


@pytest.mark.parametrize(("same", "tied"), [(True, True), (False, False)])
def test_tied_model_with_a_stored_head(tmp_path, same, tied):
    """Equal to the embedding it is left out; with other values it is used, as in Transformers."""
    config = CONFIG | {"tie_word_embeddings": True}
    stored = tensors(config)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] * (1 if same else 2)
    loaded = load(write_hf(tmp_path, config, stored))
    assert loaded.model_config.tie_word_embeddings is tied
    if not tied:
        np.testing.assert_array_equal(values(loaded)["head", "kernel"], stored["lm_head.weight"].T)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(("keep", "word"), [(0, "truncated"), (5, "truncated"), (300, "truncated"), (-1, "truncated")])
def test_truncated_file_is_named(tmp_path, keep, word):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    cut(tmp_path / "model.safetensors", keep)
    with pytest.raises(ValueError, match=f"model.safetensors is {word}"):
        load(tmp_path)


def header(path, content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + bytes(64))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"not json", "corrupt"),
        ([1], "corrupt"),
        ({"a": {"dtype": "F32"}}, "corrupt"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "corrupt"),
        ({"a": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}, "truncated"),
        ({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, "F8_E4M3"),
    ],
)
def test_damaged_header_is_named(tmp_path, content, word):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    header(tmp_path / "model.safetensors", content)
    with pytest.raises(ValueError, match=rf"model.safetensors.*{word}"):
        load(tmp_path)


def test_git_lfs_pointer_is_recognised(tmp_path):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        load(tmp_path)


def test_missing_shard_and_lost_tensor_are_named(tmp_path):
    write_hf(tmp_path, CONFIG, tensors(CONFIG), shards=3)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"model.ghost": weight_map["model.norm.weight"]}}))
    with pytest.raises(ValueError, match=r"model\.ghost"):
        load(tmp_path)
    index.write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match="weight_map"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00003\.safetensors"):
        load(tmp_path)


def test_directory_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        load(tmp_path)
