"""Perplexity and picks against transformers on a small random model with a tokenizer of its own."""

import importlib.util
import random
from pathlib import Path

import pytest
from fake_llm import rows

from jaxserve.evaluation.multiple_choice import MultipleChoice
from jaxserve.evaluation.perplexity import Perplexity

pytestmark = pytest.mark.parity

SMALL = {"max_num_seqs": 8, "decode_buckets": (8,), "max_num_batched_tokens": 64, "token_buckets": (64,), "num_pages": 257}
SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_eval.py"
TEXT = "the cat sat on a mat while seven dogs ran over green hills and rivers were cold blue deep"
WORDS = TEXT.split()


def sentence(draw, length):
    return " ".join(draw.choice(WORDS) for _ in range(length))


def write_model(folder, text):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=256, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    from jaxserve.llm import LLM

    spec = importlib.util.spec_from_file_location("compare_eval", SCRIPT)
    assert spec and spec.loader
    compare_eval = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare_eval)
    folder, draw = tmp_path_factory.mktemp("model"), random.Random(0)
    text = "\n".join(sentence(draw, 12) for _ in range(40))
    write_model(folder, text)
    (folder / "wikitext2_test.txt").write_text(text)
    options = [[sentence(draw, draw.randint(1, 4)) for _ in range(4)] for _ in range(60)]
    listed = ["\n".join(f"{'ABCD'[i]}. {option}" for i, option in enumerate(four)) for four in options]
    questions = [{"question": sentence(draw, 8), "options": lines, "answer": lines.split("\n")[1]} for lines in listed]
    for name in ("mmlu", "piqa", "openbookqa"):
        rows(folder / f"{name}.jsonl", questions)
    llm = LLM(str(folder), max_model_len=256, **SMALL, progress=False)
    return compare_eval, llm, compare_eval.Reference(str(folder)), folder


@pytest.mark.parametrize("window", [16, 100])
def test_perplexity_equals_transformers(both, window):
    compare_eval, llm, reference, folder = both
    found = compare_eval.compare_perplexity(llm, reference, Perplexity(folder, window), count=8)
    assert found["same_tokens"] and found["windows"] == 8
    assert found["relative_difference"] < 1e-5 and found["worst_window_logprob_per_token"] < 1e-5
    assert 10 < found["ours"] < 1e6


@pytest.mark.parametrize("task", ["mmlu", "piqa", "openbookqa"])
def test_picks_equal_transformers(both, task):
    compare_eval, llm, reference, folder = both
    found = compare_eval.compare_choices(llm, reference, MultipleChoice(task, folder), count=60)
    assert found["items"] == found["same_tokens"] == found["same_picks"] == 60 and not found["differing"]
    assert found["worst_logprob_difference"] < 1e-3
