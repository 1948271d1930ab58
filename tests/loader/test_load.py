"""load_model on the real model and on names that lead nowhere: memory, defaults, the hub, conversion to Orbax."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CONFIG, gguf_tensors, metadata, tensors, write_gguf, write_hf

from jaxserve import LLM
from jaxserve.config import EngineConfig, ModelConfig, ParallelConfig, RopeConfig
from jaxserve.loader import convert, load_model, load_model_config
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.parameters import init_params, parameters
from jaxserve.sharding import make_mesh


def load(path, dtype="float32", size=1, **options):
    return load_model(EngineConfig.from_options(model=str(path), **options), make_mesh(ParallelConfig(size)), jnp.dtype(dtype))


def values(loaded):
    return {path: np.asarray(variable.get_value()) for path, variable in parameters(loaded.module)}


MEASURE = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from jaxserve.config import EngineConfig
from jaxserve.loader import load_model
from jaxserve.sharding import make_mesh

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

config = EngineConfig.from_options(model=sys.argv[1])
mesh = make_mesh(config.parallel)
before = peak()
loaded = load_model(config, mesh, jnp.dtype("float32"))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_no_second_copy_of_the_weights(smollm2_gguf):
    """538 MB of float32 weights: the peak stays within them and the largest tensor in work (113 MB)."""
    run = subprocess.run([sys.executable, "-c", MEASURE, str(smollm2_gguf)], capture_output=True, text=True, check=True)
    weights = 134_515_008 * 4
    assert weights * 0.9 < int(run.stdout) < weights + 1.5 * 49152 * 576 * 4


def test_smollm2_is_read_as_published(smollm2_gguf):
    assert load_model_config(str(smollm2_gguf)) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-05,
        rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("", ValueError, ("model is empty",)),
        ("/no/such/dir/at/all", FileNotFoundError, ("/no/such/dir/at/all", "does not exist")),
        ("nothing.gguf", FileNotFoundError, ("nothing.gguf", "does not exist")),
        ("nobody/no-such-model", FileNotFoundError, ("nobody/no-such-model", "offline", "path")),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(model, error, words):
    for function in (load, load_model_config):
        with pytest.raises(error) as caught:
            function(model)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_a_path_may_be(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"does not end in \.gguf"):
        load(tmp_path / "weights.bin")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load(tmp_path)
    stored = gguf_tensors(CONFIG, tensors(CONFIG), True)
    write_gguf(tmp_path / "one.gguf", metadata(CONFIG), stored)
    assert load(tmp_path).tokenizer_source == str(tmp_path / "one.gguf")
    write_gguf(tmp_path / "two.gguf", metadata(CONFIG), stored)
    with pytest.raises(ValueError, match=r"one\.gguf, two\.gguf"):
        load(tmp_path)


def test_damaged_json_is_named(tmp_path):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        load(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config\.json holds a JSON list"):
        load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("temperature", "hot"), ("temperature", -1), ("top_p", 7), ("max_new_tokens", -5)])
def test_generation_defaults_that_no_request_could_have(tmp_path, key, value):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=r"generation_config\.json: \w+ is .* correct it, or start with generation_config 'none'"):
        load(tmp_path)
    assert load(tmp_path, generation_config="none").generation_defaults == {}


def test_generation_defaults(tmp_path, caplog):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    assert load(tmp_path).generation_defaults == {}
    generation = {
        "eos_token_id": [2, 7],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "max_new_tokens": 64,
        "do_sample": True,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = load(tmp_path)
    assert loaded.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 64}
    assert loaded.model_config.eos_token_ids == (2, 7)
    assert load(tmp_path, generation_config="none").generation_defaults == {}
    assert caplog.text == ""


def test_tokenizer_source_is_the_model_s_own_or_the_given_one(tmp_path):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    assert load(tmp_path).tokenizer_source == str(tmp_path)
    assert load(tmp_path, tokenizer="other/tokenizer").tokenizer_source == "other/tokenizer"


def test_progress_bar(tmp_path, capsys):
    write_hf(tmp_path, CONFIG, tensors(CONFIG))
    config = EngineConfig.from_options(model=str(tmp_path))
    load_model(config, make_mesh(config.parallel), jnp.dtype("float32"))
    assert capsys.readouterr().err == ""
    load_model(config, make_mesh(config.parallel), jnp.dtype("float32"), progress=True)
    assert "15/15" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_converted_checkpoint_is_the_same_model(tmp_path, source):
    """Weights, configuration and tokenizer files; restored onto one device, onto two, and in another dtype."""
    path = write_hf(tmp_path / "hf", CONFIG | {"eos_token_id": [2, 9]}, tensors(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    if source == "gguf":
        path = write_gguf(tmp_path / "m.gguf", metadata(CONFIG), gguf_tensors(CONFIG, tensors(CONFIG), True))
    target, original = convert(str(path), tmp_path / "orbax"), load(path)
    one, two, half = load(target), load(target, size=2), load(target, "bfloat16")
    assert one.model_config == original.model_config == load_model_config(str(target))
    assert one.generation_defaults == original.generation_defaults
    assert one.tokenizer_source == (str(target) if source == "hf" else str(target / "tokenizer.gguf"))
    assert (target / "tokenizer.json").exists() == (source == "hf")
    expected = values(original)
    for key, variable in parameters(two.module):
        np.testing.assert_array_equal(values(one)[key], expected[key])
        np.testing.assert_array_equal(variable.get_value(), expected[key])
        assert len(variable.get_value().sharding.device_set) == 2
        np.testing.assert_array_equal(values(half)[key], expected[key].astype(jnp.bfloat16))


@pytest.mark.parametrize(("dtype", "expected"), [("auto", jnp.bfloat16), ("float32", jnp.float32)])
def test_conversion_keeps_the_stored_dtype_unless_told(tmp_path, dtype, expected):
    from jaxserve.loader.orbax_checkpoint import stored_parameters

    write_hf(tmp_path / "hf", CONFIG, tensors(CONFIG, jnp.bfloat16))
    target = convert(str(tmp_path / "hf"), tmp_path / "orbax", dtype)
    assert {entry.dtype for entry in stored_parameters(target).values()} == {jnp.dtype(expected)}


def test_conversion_refuses_what_would_lose_something(tmp_path):
    write_hf(tmp_path / "hf", CONFIG, tensors(CONFIG))
    target = convert(str(tmp_path / "hf"), tmp_path / "orbax")
    with pytest.raises(ValueError, match="not an empty directory"):
        convert(str(tmp_path / "hf"), target)
    with pytest.raises(ValueError, match="Orbax checkpoint already"):
        convert(str(target), tmp_path / "again")
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        convert(str(tmp_path / "hf"), tmp_path / "third", "int8")


def test_orbax_checkpoint_of_another_model_is_refused(tmp_path):
    write_hf(tmp_path / "hf", CONFIG, tensors(CONFIG))
    target = convert(str(tmp_path / "hf"), tmp_path / "orbax")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "intermediate_size": 32}))
    with pytest.raises(ValueError) as error:
        load(target)
    for line in (
        "missing: blocks.2.attention.qkv.kernel",
        "misshapen: blocks.0.mlp.down.kernel has shape [64, 32], not [32, 32]",
        str(target),
    ):
        assert line in str(error.value)


def test_random_initialisation(tmp_path):
    config = load_model_config(str(write_hf(tmp_path, CONFIG, tensors(CONFIG))))
    modules = [LlamaForCausalLM(config, jnp.bfloat16) for _ in range(3)]
    for module, seed in zip(modules, (0, 0, 1), strict=True):
        init_params(module, seed, make_mesh(ParallelConfig(2)))
    first, same, other = ({path: v.get_value() for path, v in parameters(module)} for module in modules)
    for path, value in first.items():
        assert value.dtype == jnp.bfloat16 and len(value.sharding.device_set) == 2
        assert jnp.array_equal(value, same[path])
        if path[-1] == "scale":
            assert jnp.all(value == 1)
        else:
            assert not jnp.array_equal(value, other[path])
            assert 0.015 < float(jnp.std(value.astype(jnp.float32))) < 0.025


@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_more_devices_than_kv_heads_keep_each_head_several_times(tmp_path, source):
    path = write_hf(tmp_path / "hf", CONFIG, tensors(CONFIG))
    if source == "gguf":
        path = write_gguf(tmp_path / "m.gguf", metadata(CONFIG), gguf_tensors(CONFIG, tensors(CONFIG), True))
    scores = []
    for size in (1, 4):
        loaded = load(path, size=size)
        assert loaded.model_config.num_kv_heads == {1: 2, 4: 4}[size]
        options = {"tensor_parallel_size": size, "max_num_seqs": 4, "compilation_cache_dir": "none"}
        llm = LLM(loaded.module, config=loaded.model_config, progress=False, **options)
        (score,) = llm.score([[5, 80, 3, 41, 17, 2, 66, 9, 30]], use_tqdm=False)
        scores.append(score.logprobs)
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)
