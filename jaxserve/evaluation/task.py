"""What every task is to the runner: items to run, a result for each, and scores over all results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Result = dict[str, Any]  # JSON-able; always has "output" (what the outputs' hash covers), "num_prompt_tokens" and "num_output_tokens"


@dataclass(frozen=True)
class Item:
    """One unit of work, saved once it is done."""

    id: str  # unique in its task, and the same in every run over the same data
    content: Any


@dataclass(frozen=True)
class Score:
    """A value with its standard error (None where one item is too few to tell) and whether more of it is better."""

    value: float
    stderr: float | None
    higher_is_better: bool = True


class Task(Protocol):
    """Built from its data files, which are checked then, before any model is loaded."""

    name: str
    files: tuple[Path, ...]
    batch_size: int  # items run at once, and lost at most when the process dies

    def settings(self) -> dict[str, Any]:
        """All that changes results, for the config hash."""
        ...

    def items(self, llm: Any) -> list[Item]: ...

    def run(self, llm: Any, items: Sequence[Item]) -> list[Result]: ...

    def scores(self, results: Sequence[Result]) -> dict[str, Score]: ...


def mean_score(values: Sequence[float]) -> Score:
    """Mean of the values and its standard error (sample standard deviation over the square root of their number)."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Score(mean, None)
    return Score(mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n))


def total_logprob(item: Item, logprobs: Sequence[float]) -> float:
    """Sum of an item's log-probabilities; ValueError when it is no finite number, as a broken model gives."""
    total = math.fsum(logprobs)
    if not math.isfinite(total):
        raise ValueError(f"item {item.id}: the log-probability is {total}; the model's weights or dtype are broken, try --dtype float32")
    return total


def check_room(llm: Any, item: Item, num_tokens: int, remedy: str) -> None:
    """ValueError when an item needs more tokens than a request may have."""
    limit = llm.engine.config.scheduler.max_model_len
    if limit is not None and num_tokens > limit:
        raise ValueError(f"item {item.id} needs {num_tokens} tokens, more than max_model_len ({limit}); {remedy}")
