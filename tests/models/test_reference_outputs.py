"""Tiny checkpoints with outputs that Transformers gave: every RoPE scaling and its spellings, biases, norms, head sizes, tied heads."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from forward import greedy, load, log_softmax

KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
ROPE = ["rope-default", "rope-null", *(f"rope-{kind}-{spelling}" for kind in KINDS for spelling in ("type", "rope_type", "parameters"))]
SHAPES = [f"bias-{name}" for name in ("qwen2", "llama", "qwen3", "headdim", "gqa82", "gqa81", "stray")]
HEADS = ["head-tied", "head-tied-extra", "head-untied", "tiny"]


@pytest.fixture
def checkpoint(shared_dir, tmp_path):
    """A function from a checkpoint's name to a directory with it; links that were stored as text files are followed."""

    def copy(name: str) -> Path:
        source = shared_dir / "conformance" / "checkpoints" / name
        directory = Path(shutil.copytree(source, tmp_path / name))
        weights = directory / "model.safetensors"
        if weights.stat().st_size < 200:
            shutil.copy(source / weights.read_text().strip(), weights)
        return directory

    return copy


@pytest.mark.parametrize("name", ROPE + SHAPES + HEADS)
def test_equals_reference(name, checkpoint, shared_dir):
    """Log-probabilities of prompt and output and the greedy ids, prefilled at once and in chunks of 24."""
    runs = json.loads((shared_dir / "conformance" / "checkpoints" / "reference" / f"{name}.json").read_text())
    loaded = load(checkpoint(name))
    for run in runs:
        prompt, expected = run["prompt"], run["prompt_logprobs"] + run["logprobs"]
        for chunk in (128, 24):
            ids, logits = greedy(loaded.module, loaded.model_config, prompt, len(run["ids"]), chunk)
            assert ids == run["ids"], f"prompt of {len(prompt)} ids in chunks of {chunk}"
            logprobs = log_softmax(logits)[np.arange(len(expected)), (prompt + ids)[1:]]
            np.testing.assert_allclose(logprobs, expected, atol=1e-4, err_msg=f"prompt of {len(prompt)} ids in chunks of {chunk}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rope-mystery", ("rope_scaling", "mystery", "config.json")),
        ("rope-nofactor", ("rope_scaling", "yarn", "factor")),
        ("head-missing", ("missing: lm_head.weight", "tie_word_embeddings")),
        ("head-tied-bias", ("surplus: lm_head.bias",)),
        ("bias-lacking", ("missing: model.layers.1.mlp.up_proj.weight",)),
    ],
)
def test_refused_with_its_name(name, words, checkpoint):
    with pytest.raises(ValueError) as error:
        load(checkpoint(name))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("name", "tensor"), [("bias-stray", "q_proj.bias"), ("head-tied-extra", "lm_head.weight")])
def test_ignored_tensor_is_named(name, tensor, checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        load(checkpoint(name))
    assert tensor in caplog.text


@pytest.mark.parametrize(("name", "eos"), [("zero", (1, 2)), ("zero-inteos", (1, 2)), ("zero-tokeos", (1, 2)), ("zero-nogen", (1,))])
def test_end_of_sequence_ids_are_the_union(name, eos, checkpoint):
    assert load(checkpoint(name)).model_config.eos_token_ids == eos


@pytest.mark.parametrize("name", ["tiny", "zero"])
def test_gguf_equals_safetensors(name, checkpoint, shared_dir):
    """The GGUF file of a checkpoint gives the same parameters, q and k rows put back in order."""
    from jaxserve.models.parameters import parameters

    one = load(checkpoint(name)).module
    other = load(shared_dir / "conformance" / "checkpoints" / "gguf" / f"{name}.gguf").module
    pairs = dict(parameters(one)), dict(parameters(other))
    assert pairs[0].keys() == pairs[1].keys()
    for path, variable in pairs[0].items():
        np.testing.assert_array_equal(variable.get_value(), pairs[1][path].get_value(), err_msg=str(path))
