"""Random tiny checkpoints written by Transformers: logits of prefill and decode, and greedy ids, equal Transformers' in float32."""

import importlib

import numpy as np
import pytest
from forward import greedy, load

pytestmark = pytest.mark.parity

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
FACTORS = np.linspace(1.0, 3.0, 8).tolist()  # one for each rotary pair of a 16-dimensional head
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    "longrope": {"short_factor": FACTORS, "long_factor": FACTORS[::-1], "original_max_position_embeddings": 32, "factor": 4.0},
    "longrope-ratio": {"short_factor": FACTORS, "long_factor": FACTORS[::-1], "original_max_position_embeddings": 32},
}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama-gqa-8-1": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    **{
        f"rope-{name}": (
            "Llama",
            {
                "max_position_embeddings": 32 if name == "dynamic" else 128,
                "rope_parameters": {"rope_type": name.split("-")[0], "rope_theta": 10000.0, **entry},
            },
        )
        for name, entry in SCALINGS.items()
    },
}


@pytest.fixture(params=CASES)
def reference(request, tmp_path):
    """(Transformers' model in float32, the directory that it was saved to)."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))

    family, changes = CASES[request.param]
    config = getattr(transformers, f"{family}Config")(**SIZES | {"max_position_embeddings": 128, "initializer_range": 0.2} | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases start as zeros and norms as ones: give them values that show
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_equals_transformers(reference):
    """Prompts below, at and above the original length of 32, prefilled in chunks; decode past it."""
    torch = importlib.import_module("torch")

    model, directory = reference
    loaded = load(directory)
    for length in (5, 32, 33, 90):
        model = type(model).from_pretrained(directory)  # afresh: dynamic scaling leaves traces of earlier, longer prompts in it
        prompt = np.random.default_rng(length).integers(3, 128, length).tolist()
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].numpy()
            output = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=32,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                eos_token_id=None,
            )
        decoded = np.concatenate([step.numpy() for step in output.logits])
        ids, logits = greedy(loaded.module, loaded.model_config, prompt, 32, chunk=24)
        np.testing.assert_allclose(logits[:length], expected, atol=1e-4, rtol=1e-4, err_msg=f"prompt of {length} ids")
        assert ids == output.sequences[0, length:].tolist(), f"prompt of {length} ids"
        np.testing.assert_allclose(logits[length - 1 :], decoded, atol=1e-4, rtol=1e-4, err_msg=f"output after {length} ids")
