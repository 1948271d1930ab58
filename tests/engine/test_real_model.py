"""SmolLM2-135M-Instruct through the whole engine: transformers' greedy tokens, and what its tokenizer says."""

import json

import pytest

from jaxserve import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    return LLM(str(smollm2_gguf), progress=False, max_model_len=1024, max_num_seqs=16, decode_buckets=(16,), token_buckets=(128, 512))


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(llm, shared_dir):
    """16 real prompts of mixed lengths, all at once; the reference is transformers in float32 on the dequantised weights.

    The short outputs are also compared by logprob, which costs as much a step as the model.
    """
    golden = [json.loads(line) for line in (shared_dir / "peers" / "golden_greedy.jsonl").read_text().splitlines()]
    assert len(golden) == 16
    lengths = [len(g["output_token_ids"]) for g in golden]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0 if n <= 60 else None) for n in lengths]
    assert sum(p.logprobs is not None for p in params) == 7
    outputs = llm.generate([g["prompt_token_ids"] for g in golden], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [g["output_token_ids"] for g in golden]
    for output, g, p in zip(outputs, golden, params, strict=True):
        if p.logprobs is not None:
            assert [e.logprob for e in output.outputs[0].logprobs] == pytest.approx(g["logprobs"], abs=1e-3)


@pytest.mark.slow
def test_text_chat_and_score(llm):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    first = llm.generate("The capital of France is", greedy, use_tqdm=False)[0].outputs[0]
    assert first.text.startswith(" Paris")
    answer = llm.chat([{"role": "user", "content": "What is 2+2?"}], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    assert "4" in answer.outputs[0].text
    assert "<|im_end|>" not in answer.outputs[0].text
    paris, rome = llm.score(["The capital of France is"] * 2, [" Paris", " Rome"], use_tqdm=False)
    assert paris.total > rome.total
    assert paris.is_greedy[0]
    until_ris = SamplingParams(temperature=0, max_tokens=8, stop="ris")
    stopped = llm.generate("The capital of France is", until_ris, use_tqdm=False)[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == (" Pa", "ris")
