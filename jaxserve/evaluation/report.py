"""The result of a run: one JSON file and a table."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from jaxserve import provenance
from jaxserve.evaluation.runner import outputs_hash


def report(model: str, engine: Any, tasks: dict[str, dict[str, Any]], started: str, seconds: float, limit: int | None) -> dict[str, Any]:
    """Everything about a run as JSON-able data; `engine` is the LLM's, with its config resolved."""
    return {
        "model": model,
        "tasks": tasks,
        "outputs_sha256": outputs_hash([(name, task["outputs_sha256"]) for name, task in sorted(tasks.items())]),
        "limit": limit,
        "engine_config": dataclasses.asdict(engine.config),
        "started": started,
        "wall_seconds": seconds,
        "commit": provenance.commit(),
        "device": provenance.device(),
        "versions": provenance.versions(),
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data` so that `path` holds all of it or what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(data, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def table(tasks: dict[str, dict[str, Any]]) -> str:
    """Scores as aligned text, a line a score."""
    rows: list[tuple[str, ...]] = [("task", "score", "value", "± stderr", "items", "items/s", "tokens/s")]
    for name, task in tasks.items():
        for i, (score, entry) in enumerate(task["scores"].items()):
            error = "n/a" if entry["stderr"] is None else f"{entry['stderr']:.4f}"
            speed = (str(task["num_items"]), f"{task['items_per_s']:.2f}", f"{task['tokens_per_s']:.0f}") if i == 0 else ("", "", "")
            arrow = "" if entry["higher_is_better"] else " (lower is better)"
            rows.append((name if i == 0 else "", score + arrow, f"{entry['value']:.4f}", error, *speed))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in rows]
    return "\n".join([lines[0].rstrip(), "  ".join("-" * w for w in widths), *(line.rstrip() for line in lines[1:])])
