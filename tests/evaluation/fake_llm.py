"""A small fake of the class LLM, deterministic and without a device: one token a character."""

import json
import zlib
from types import SimpleNamespace

from jaxserve.config import EngineConfig
from jaxserve.request import CompletionOutput, RequestOutput


class CharTokenizer:
    """Token ids are code points; `bos` is put before every text when set."""

    all_special_ids = frozenset()
    strips_first_space = False
    decode_window = None  # the text is the tokens' bytes, joined

    def __init__(self, bos: int | None = None):
        self.bos = bos

    def encode(self, text, add_special_tokens=True):
        return ([self.bos] if add_special_tokens and self.bos is not None else []) + [ord(c) for c in text]

    def token_bytes(self, token_id):
        return self.token_text(token_id).encode()

    def token_text(self, token_id):
        return chr(token_id)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


class FakeLLM:
    """Logprobs are a hash of the tokens; generation copies `answer`; after `budget` calls it dies with KeyboardInterrupt."""

    def __init__(self, answer="the answer is #### 18", budget=None, bos=None, max_model_len=4096, model="fake", **options):
        self.tokenizer, self.answer, self.budget, self.calls = CharTokenizer(bos), answer, budget, []
        config = EngineConfig.from_options(model=model, max_model_len=max_model_len, **options)
        self.engine = SimpleNamespace(config=config)

    def logprob(self, context, token):
        return -(zlib.crc32(json.dumps([list(context), token]).encode()) % 1000 + 1) / 250

    def score(self, prompts, targets=None, use_tqdm=True):
        self._spend(len(prompts))
        outputs = []
        for i, prompt in enumerate(prompts):
            ids, first = (list(prompt), 1) if targets is None else (list(prompt) + list(targets[i]), len(prompt))
            values = [self.logprob(ids[:k], ids[k]) for k in range(first, len(ids))]
            outputs.append(SimpleNamespace(token_ids=ids, num_context_tokens=first, logprobs=values, is_greedy=[v > -2 for v in values]))
        return outputs

    def generate(self, prompts, params=None, use_tqdm=True):
        self._spend(len(prompts))
        ids = [ord(c) for c in self.answer][: params.max_tokens]
        return [RequestOutput("x", None, list(p), [CompletionOutput(0, self.tokenizer.decode(ids), ids)], finished=True) for p in prompts]

    def _spend(self, count):
        if self.budget is not None and len(self.calls) >= self.budget:
            raise KeyboardInterrupt
        self.calls.append(count)


def rows(path, entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8")


def write_data(folder):
    """Fill a directory with a small file for each task."""
    folder.mkdir()
    (folder / "wikitext2_test.txt").write_text("one two three four\n" * 40, encoding="utf-8")
    letters = [{"question": f"Q{i}?", "options": "A. x\nB. yy\nC. z\nD. é é", "answer": "B. yy" if i % 2 else "D. é é"} for i in range(9)]
    rows(folder / "mmlu_test.jsonl", letters)
    goals = [{"question": f"goal {i}", "options": "A. do \nB. do not ", "answer": "A. do "} for i in range(7)]
    rows(folder / "piqa_validation.jsonl", goals)
    rows(folder / "openbookqa_test.jsonl", letters)
    rows(folder / "gsm8k_test.jsonl", [{"question": f"{i} apples?", "answer": f"so\n#### {17 + i}"} for i in range(6)])
    rows(folder / "gsm8k_train.jsonl", [{"question": f"{i} pears?", "answer": f"well\n#### {i},000"} for i in range(5)])
    return folder
