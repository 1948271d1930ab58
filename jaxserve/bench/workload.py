"""What a benchmark runs: prompts as token ids with fixed output lengths, from a file or at random."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One request of a workload."""

    id: str
    token_ids: list[int]
    max_tokens: int


def read_workload(path: Path, tokenizer: Any, limit: int | None = None) -> list[Prompt]:
    """Rows {"prompt": text, "max_tokens": n} of a JSON-lines file, "id" optional; the first `limit` rows, None: all."""
    if not path.is_file():
        raise ValueError(f"--workload {path} is not a file; give JSON lines with prompt and max_tokens")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(_prompt(line, f"{path} line {number}", len(prompts), tokenizer))
    if not prompts:
        raise ValueError(f"--workload {path} is empty; give JSON lines with prompt and max_tokens")
    return prompts


def _prompt(line: str, where: str, index: int, tokenizer: Any) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    text, count = (row.get("prompt"), row.get("max_tokens")) if isinstance(row, dict) else (None, None)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: prompt is {text!r}; give a text that is not empty")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{where}: max_tokens is {count!r}; give an integer of at least 1")
    return Prompt(str(row.get("id", index)), list(tokenizer.encode(text, add_special_tokens=True)), count)


def random_workload(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[Prompt]:
    """`count` prompts of `input_len` random tokens; the same for the same seed."""
    for flag, value in (("--num-prompts", count), ("--random-input-len", input_len), ("--random-output-len", output_len)):
        if value < 1:
            raise ValueError(f"{flag} is {value}; give an integer of at least 1")
    draw = random.Random(seed)
    return [Prompt(str(i), [draw.randrange(vocab_size) for _ in range(input_len)], output_len) for i in range(count)]
