"""Small trained models: what they write is known."""

import json

import llama2c
import numpy as np
import pytest
from forward import Sequence, greedy, load, log_softmax

STORY = [403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396]


@pytest.mark.parametrize(
    ("devices", "backend", "stacked"), [(1, "xla", False), (1, "xla", True), (2, "xla", False), (1, "reference", False)]
)
def test_stories260k(shared_dir, tmp_path, devices, backend, stacked):
    """ "Once upon a time, there was a little girl named Lily." with an interleaved rotary layout in the source."""
    source = shared_dir / "data" / "models" / "stories260K" / "stories260K.bin"
    loaded = load(llama2c.convert(source, tmp_path), tensor_parallel_size=devices)
    logits = Sequence(loaded.module, loaded.model_config, 1, backend, stacked).feed([1, *STORY[:-1]])
    assert logits.argmax(-1).tolist() == STORY


def test_stories260k_token_by_token(shared_dir, tmp_path):
    source = shared_dir / "data" / "models" / "stories260K" / "stories260K.bin"
    loaded = load(llama2c.convert(source, tmp_path))
    assert greedy(loaded.module, loaded.model_config, [1], len(STORY))[0] == STORY


def test_smollm2_agrees_with_llama_cpp(smollm2_gguf, shared_dir):
    """Log-probabilities of llama.cpp's text, within what its 8-bit activations allow; the sure tokens are the greedy ones."""
    runs = json.loads((shared_dir / "data" / "models" / "goldens_llamacpp_greedy.json").read_text())["runs"]["smollm2"]
    run = next(r for r in runs if r["request"].get("prompt") == "The capital of France is")
    tokens = run["response"]["choices"][0]["logprobs"]["content"]
    prompt, ids = [504, 3575, 282, 4649, 314], [token["id"] for token in tokens]
    loaded = load(smollm2_gguf)
    logits = Sequence(loaded.module, loaded.model_config, len(prompt)).feed(prompt + ids)[len(prompt) - 1 : -1]
    expected = np.array([token["logprob"] for token in tokens])
    np.testing.assert_allclose(log_softmax(logits)[np.arange(len(ids)), ids], expected, atol=0.35)
    sure = expected > -0.5
    assert sure.sum() > 10
    np.testing.assert_array_equal(logits.argmax(-1)[sure], np.array(ids)[sure])
