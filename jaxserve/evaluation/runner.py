"""Runs tasks item by item, saves each batch, and sums up."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from jaxserve.evaluation.journal import Journal, config_hash
from jaxserve.evaluation.task import Item, Result, Task


def run_task(task: Task, llm: Any, journal: Journal, config: dict[str, Any], limit: int | None, progress: bool = True) -> dict[str, Any]:
    """Run what is not yet in the journal of the first `limit` items (None: all); returns the task's summary."""
    done = journal.begin(task.name, config)
    items = task.items(llm)
    if limit is not None:
        items = items[:limit]
    if not items:
        raise ValueError(f"{task.name}: {task.files[0]} gives no items")
    missing = [item for item in items if item.id not in done]
    with tqdm(total=len(items), initial=len(items) - len(missing), desc=task.name, unit="item", disable=not progress) as bar:
        for start in range(0, len(missing), task.batch_size):
            batch = missing[start : start + task.batch_size]
            results = _run_batch(task, llm, batch)
            journal.append(task.name, results)
            done.update(results)
            bar.update(len(batch))
    return _summary(task, items, [done[item.id] for item in items], config, len(items) - len(missing))


def _run_batch(task: Task, llm: Any, batch: Sequence[Item]) -> dict[str, Result]:
    began = time.perf_counter()
    results = task.run(llm, batch)
    seconds = (time.perf_counter() - began) / len(batch)
    return {item.id: {**result, "seconds": seconds} for item, result in zip(batch, results, strict=True)}


def _summary(task: Task, items: Sequence[Item], results: Sequence[Result], config: dict[str, Any], resumed: int) -> dict[str, Any]:
    prompt, output = (sum(r[name] for r in results) for name in ("num_prompt_tokens", "num_output_tokens"))
    seconds = sum(r["seconds"] for r in results)
    return {
        "scores": {
            name: {"value": s.value, "stderr": s.stderr, "higher_is_better": s.higher_is_better} for name, s in task.scores(results).items()
        },
        "num_items": len(items),
        "num_items_resumed": resumed,
        "num_prompt_tokens": prompt,
        "num_output_tokens": output,
        "seconds": seconds,
        "items_per_s": len(items) / seconds,
        "tokens_per_s": (prompt + output) / seconds,
        "output_tokens_per_s": output / seconds,
        "outputs_sha256": outputs_hash([(item.id, result["output"]) for item, result in zip(items, results, strict=True)]),
        "config": config,
        "config_hash": config_hash(config),
    }


def outputs_hash(outputs: Sequence[tuple[str, Any]]) -> str:
    """SHA-256 over each item's id and output, in the items' order."""
    digest = hashlib.sha256()
    for item, output in outputs:
        digest.update(json.dumps([item, output]).encode() + b"\n")
    return digest.hexdigest()
