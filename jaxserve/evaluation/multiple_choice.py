"""Multiple choice by log-likelihood: the model picks the option that it finds most probable after the question."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.evaluation.data import find_file, read_rows
from jaxserve.evaluation.task import Item, Result, Score, check_room, mean_score, total_logprob

COLUMNS = ("question", "options", "answer")


@dataclass(frozen=True)
class Question:
    """A prompt, what may follow it, and which of these is right."""

    prompt: str
    continuations: tuple[str, ...]
    num_bytes: tuple[int, ...]  # UTF-8 length of each continuation without its leading space
    gold: int


@dataclass(frozen=True)
class Format:
    """How a row becomes a prompt: `template` gets question and options; `letters`: the continuations are the options' letters."""

    patterns: tuple[str, ...]
    template: str
    letters: bool = False


FORMATS = {
    "mmlu": Format(
        ("mmlu*test*.jsonl", "mmlu*.jsonl"),
        "The following are multiple choice questions (with answers).\n\n{question}\n{options}\nAnswer:",
        letters=True,
    ),
    "piqa": Format(("piqa*validation*.jsonl", "piqa*.jsonl"), "Question: {question}\nAnswer:"),
    "openbookqa": Format(("openbookqa*test*.jsonl", "openbookqa*.jsonl"), "{question}"),
}


class MultipleChoice:
    """MMLU (arXiv:2009.03300), PIQA (arXiv:1911.11641) or OpenBookQA (arXiv:1809.02789), without examples in the prompt.

    Each continuation is a space and the option's text (MMLU: its letter). acc takes the greatest sum of token logprobs,
    acc_norm the greatest sum per UTF-8 byte of the text; of equal ones the first.
    """

    batch_size = 64

    def __init__(self, name: str, location: Path):
        self.name, self.format = name, FORMATS[name]
        self.files = (find_file(location, self.format.patterns, name),)
        rows = read_rows(self.files[0], COLUMNS)
        self.questions = [self._question(row, f"{self.files[0]} item {i + 1}") for i, row in enumerate(rows)]

    def settings(self) -> dict[str, Any]:
        return {"template": self.format.template, "continuations": "letters" if self.format.letters else "texts", "num_shots": 0}

    def items(self, llm: Any) -> list[Item]:
        return [Item(f"{self.name}-{i:05d}", question) for i, question in enumerate(self.questions)]

    def run(self, llm: Any, items: Sequence[Item]) -> list[Result]:
        pairs = [split_tokens(llm.tokenizer, item.content.prompt, c) for item in items for c in item.content.continuations]
        owners = [item for item in items for _ in item.content.continuations]
        for item, (context, target) in zip(owners, pairs, strict=True):
            check_room(llm, item, len(context) + len(target), "raise --max-model-len")
        scored = iter(llm.score([context for context, _ in pairs], [target for _, target in pairs], use_tqdm=False))
        lengths = iter([len(context) + len(target) for context, target in pairs])
        results = []
        for item in items:
            count = len(item.content.continuations)
            logprobs = [total_logprob(item, next(scored).logprobs) for _ in range(count)]
            results.append(_result(item.content, logprobs, sum(next(lengths) for _ in range(count))))
        return results

    def scores(self, results: Sequence[Result]) -> dict[str, Score]:
        return {
            "acc": mean_score([float(r["output"][0] == r["gold"]) for r in results]),
            "acc_norm": mean_score([float(r["output"][1] == r["gold"]) for r in results]),
        }

    def _question(self, row: dict[str, str], where: str) -> Question:
        options = parse_options(row["options"], where)
        gold = _gold(options, row["answer"], where)
        letters = [chr(ord("A") + i) for i in range(len(options))]
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True))
        texts = letters if self.format.letters else options
        prompt = self.format.template.format(question=row["question"].strip(), options=listed)
        return Question(prompt, tuple(" " + t for t in texts), tuple(len(t.encode()) for t in texts), gold)


def split_tokens(tokenizer: Any, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of prompt and continuation: both encoded as one text, then cut at the number of tokens that the prompt alone has."""
    whole = tokenizer.encode(prompt + continuation, add_special_tokens=True)
    cut = min(len(tokenizer.encode(prompt, add_special_tokens=True)), len(whole) - 1)  # at least one token is scored
    return list(whole[:cut]), list(whole[cut:])


def parse_options(text: str, where: str) -> list[str]:
    """The options of "A. one\\nB. two"; an option may hold line breaks."""
    parts = re.split(r"(?:^|\n)([A-Z])\.(?=\s)", text.strip("\n"))
    letters, options = parts[1::2], [part.strip() for part in parts[2::2]]
    wanted = [chr(ord("A") + i) for i in range(len(letters))]
    if parts[0].strip() or len(letters) < 2 or letters != wanted or not all(options):
        raise ValueError(f"{where}: options is {text!r}; expected two or more lines 'A. text', 'B. text', ... in order, none empty")
    return options


def _gold(options: list[str], answer: str, where: str) -> int:
    lines = [f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(options)]
    normal = re.sub(r"\s+", " ", answer).strip()
    matches = [i for i, line in enumerate(lines) if re.sub(r"\s+", " ", line) == normal]
    if len(matches) != 1:
        raise ValueError(f"{where}: answer is {answer!r}; expected one of {lines}")
    return matches[0]


def _result(question: Question, logprobs: list[float], num_tokens: int) -> Result:
    per_byte = [logprob / size for logprob, size in zip(logprobs, question.num_bytes, strict=True)]
    choice, choice_norm = (values.index(max(values)) for values in (logprobs, per_byte))
    return {
        "output": [choice, choice_norm],
        "gold": question.gold,
        "logprobs": logprobs,
        "num_prompt_tokens": num_tokens,
        "num_output_tokens": 0,
    }
