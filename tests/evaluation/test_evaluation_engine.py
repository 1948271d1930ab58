"""The command on a real small engine: results do not depend on how items are batched, paged and cut into steps."""

import json

import pytest
from fake_llm import CharTokenizer
from tiny_engine import CONFIG, LIMITS, tiny_model

from jaxserve.evaluation import main
from jaxserve.llm import LLM

SETTINGS = [
    ([], {}),
    (["--save-every", "1"], {"page_size": 8, "num_pages": 65}),
    (["--save-every", "5"], {"max_num_batched_tokens": 8, "token_buckets": (8,), "num_pages": 7}),
]


def evaluate(data, output, flags, options):
    def make(model):
        return LLM(model=tiny_model(), config=CONFIG, tokenizer=CharTokenizer(), progress=False, **(LIMITS | options))

    argv = ["--model", "tiny", "--data", str(data), "--tasks", "wikitext2,piqa", "--output", str(output), "--window", "48", "--no-progress"]
    assert main([*argv, *flags], make_llm=make) == 0
    return json.loads(output.read_text())


def test_outputs_do_not_depend_on_the_batch(data, tmp_path):
    text = (data / "wikitext2_test.txt").read_text()
    (data / "wikitext2_test.txt").write_text(text[:300])
    results = [evaluate(data, tmp_path / f"{i}.json", flags, options) for i, (flags, options) in enumerate(SETTINGS)]
    assert len({r["outputs_sha256"] for r in results}) == 1
    for task, score in (("wikitext2", "token_perplexity"), ("piqa", "acc")):
        values = [r["tasks"][task]["scores"][score]["value"] for r in results]
        assert values == pytest.approx([values[0]] * 3, rel=1e-5)
