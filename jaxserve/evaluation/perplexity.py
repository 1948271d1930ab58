"""Perplexity of a text in windows of fixed length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.evaluation.data import find_file, read_text
from jaxserve.evaluation.task import Item, Result, Score, check_room, total_logprob

PATTERNS = ("wikitext2*test*.txt", "wikitext-2*test*.txt", "wiki.test.*")


class Perplexity:
    """WikiText-2 perplexity (Merity et al., arXiv:1609.07843).

    The file is encoded as one text and cut into windows of `window` tokens that do not overlap (stride = window); the last one
    may be shorter and counts when it has two tokens or more. In each window every token but the first is scored, given the
    window's tokens before it. Where the tokenizer puts a token before every text (BOS), each window begins with it instead.
    """

    name = "wikitext2"
    batch_size = 16

    def __init__(self, location: Path, window: int = 1024):
        if window < 2:
            raise ValueError(f"--window is {window}; give at least 2 tokens, as the first one of a window is not scored")
        self.files = (find_file(location, PATTERNS, "wikitext2"),)
        self.window = window
        self.text = read_text(self.files[0])
        self._num_tokens = 0

    def settings(self) -> dict[str, Any]:
        return {"window": self.window, "stride": "window", "scored": "all tokens but the first of each window"}

    def items(self, llm: Any) -> list[Item]:
        prefix = list(llm.tokenizer.encode("", add_special_tokens=True))
        ids = llm.tokenizer.encode(self.text, add_special_tokens=False)
        self._num_tokens = len(ids)
        room = self.window - len(prefix)
        if room < 1:
            raise ValueError(f"--window is {self.window}, too short for the {len(prefix)} tokens that begin every text; give a larger one")
        windows = [prefix + ids[i : i + room] for i in range(0, len(ids), room)]
        return [Item(f"window-{i:05d}", window) for i, window in enumerate(windows) if len(window) >= 2]

    def run(self, llm: Any, items: Sequence[Item]) -> list[Result]:
        for item in items:
            check_room(llm, item, len(item.content), "lower --window")
        outputs = llm.score([item.content for item in items], use_tqdm=False)
        return [
            {
                "output": f"{int(''.join('1' if best else '0' for best in o.is_greedy), 2):x}",  # which tokens the model would have chosen
                "logprob": total_logprob(item, o.logprobs),
                "num_scored": len(o.logprobs),
                "num_prompt_tokens": len(item.content),
                "num_output_tokens": 0,
            }
            for item, o in zip(items, outputs, strict=True)
        ]

    def scores(self, results: Sequence[Result]) -> dict[str, Score]:
        """token_perplexity = exp(mean negative logprob); words are separated by whitespace, bytes are UTF-8, both over the whole text."""
        scored = sum(r["num_scored"] for r in results)
        loss = -math.fsum(r["logprob"] for r in results) / scored
        error = self._loss_error(results, loss, scored)
        per_word = self._num_tokens / len(self.text.split())
        per_byte = self._num_tokens / len(self.text.encode()) / math.log(2)

        def score(value: float, slope: float) -> Score:  # delta method: the error of f(loss) is |f'(loss)| times the loss's
            return Score(value, None if error is None else slope * error, higher_is_better=False)

        token, word = math.exp(loss), math.exp(loss * per_word)
        return {
            "token_perplexity": score(token, token),
            "word_perplexity": score(word, word * per_word),
            "bits_per_byte": score(loss * per_byte, per_byte),
        }

    @staticmethod
    def _loss_error(results: Sequence[Result], loss: float, scored: int) -> float | None:
        """Standard error of the mean loss per token, taking the windows (not their tokens) as independent."""
        n = len(results)
        if n < 2:
            return None
        squares = math.fsum((-r["logprob"] - loss * r["num_scored"]) ** 2 for r in results)
        return math.sqrt(squares * n / (n - 1)) / scored
