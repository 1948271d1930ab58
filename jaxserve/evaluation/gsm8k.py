"""GSM8K: grade-school arithmetic, answered by generation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from jaxserve.evaluation.data import find_file, read_rows
from jaxserve.evaluation.task import Item, Result, Score, check_room, mean_score
from jaxserve.sampling_params import SamplingParams

COLUMNS = ("question", "answer")
NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
STOP = ("Question:",)


class Gsm8k:
    """Exact match on the final number (Cobbe et al., arXiv:2110.14168), greedy.

    The prompt is `num_shots` examples from the training file, "Question: ...\\nAnswer: ...", then the question, separated by empty
    lines. exact_match_strict reads the number after the first "####", exact_match_flexible the last number of the text; numbers
    are equal by value, without dollar signs and thousands separators.
    """

    name = "gsm8k"
    batch_size = 64

    def __init__(self, location: Path, num_shots: int = 5, max_tokens: int = 256):
        if num_shots < 0 or max_tokens < 1:
            raise ValueError(f"--num-shots is {num_shots} and --max-tokens {max_tokens}; give at least 0 shots and 1 token")
        test = find_file(location, ("gsm8k*test*.jsonl", "test.jsonl"), "gsm8k")
        self.num_shots, self.max_tokens = num_shots, max_tokens
        self.rows = read_rows(test, COLUMNS)
        self.golds = [_gold(row["answer"], f"{test} item {i + 1}") for i, row in enumerate(self.rows)]
        self.files = (test,)
        self.examples: list[dict[str, str]] = []
        if num_shots:
            train = find_file(test.parent, ("gsm8k*train*.jsonl", "train.jsonl"), f"gsm8k's {num_shots} examples (--num-shots)")
            self.examples = read_rows(train, COLUMNS)[:num_shots]
            if len(self.examples) < num_shots:
                raise ValueError(f"{train} has {len(self.examples)} rows, fewer than --num-shots {num_shots}; lower --num-shots")
            self.files = (test, train)

    def settings(self) -> dict[str, Any]:
        return {"num_shots": self.num_shots, "max_tokens": self.max_tokens, "stop": list(STOP), "temperature": 0.0}

    def items(self, llm: Any) -> list[Item]:
        shots = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in self.examples)
        prompts = [f"{shots}Question: {row['question']}\nAnswer:" for row in self.rows]
        return [Item(f"gsm8k-{i:05d}", pair) for i, pair in enumerate(zip(prompts, self.golds, strict=True))]

    def run(self, llm: Any, items: Sequence[Item]) -> list[Result]:
        prompts = [llm.tokenizer.encode(item.content[0], add_special_tokens=True) for item in items]
        for item, prompt in zip(items, prompts, strict=True):
            check_room(llm, item, len(prompt) + self.max_tokens, "lower --num-shots or --max-tokens")
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, stop=STOP)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results = []
        for item, prompt, output in zip(items, prompts, outputs, strict=True):
            completion = output.outputs[0]
            results.append(
                {
                    "output": list(completion.token_ids),
                    "text": completion.text,
                    "gold": str(item.content[1]),
                    "strict": _text(strict_answer(completion.text)),
                    "flexible": _text(flexible_answer(completion.text)),
                    "num_prompt_tokens": len(prompt),
                    "num_output_tokens": len(completion.token_ids),
                }
            )
        return results

    def scores(self, results: Sequence[Result]) -> dict[str, Score]:
        return {f"exact_match_{kind}": mean_score([float(r[kind] == r["gold"]) for r in results]) for kind in ("strict", "flexible")}


def strict_answer(text: str) -> Decimal | None:
    """The number that follows the first "####"; None when there is none."""
    match = re.search(rf"####\s*({NUMBER})", text)
    return _number(match.group(1)) if match else None


def flexible_answer(text: str) -> Decimal | None:
    """The last number in the text; None when there is none."""
    found = re.findall(NUMBER, text)
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace("$", "").replace(",", "")).normalize()
    except InvalidOperation:
        return None


def _text(number: Decimal | None) -> str | None:
    return None if number is None else str(number)


def _gold(answer: str, where: str) -> Decimal:
    number = strict_answer(answer)
    if number is None:
        raise ValueError(f"{where}: answer has no '#### NUMBER' at its end; got {answer[-60:]!r}")
    return number
