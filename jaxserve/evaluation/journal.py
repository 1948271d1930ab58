"""Results on disk while a run goes on: append-only JSON lines, so that a killed run loses one batch at most."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.evaluation.task import Result


class Journal:
    """The file of one run: per task a line with its config, then a line an item, keyed by item id and the config's hash.

    Opening keeps what is whole: a torn last line is cut off and its item runs again. One process at a time; ValueError when the
    file is in use, damaged elsewhere, or not ours.
    """

    def __init__(self, path: Path):
        self.path = path
        self._hashes: dict[str, str] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self._results: dict[str, dict[str, Result]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"{path} is being written by another run; wait for it or give another --output") from error
        try:
            self._read()
        except ValueError:
            self._file.close()
            raise

    def begin(self, task: str, config: dict[str, Any]) -> dict[str, Result]:
        """Results already there for `task` by item id; ValueError when they were made with another config."""
        new = json.loads(json.dumps(config))
        if task in self._configs and self._configs[task] != new:
            changes = "; ".join(_differences(self._configs[task], new))
            raise ValueError(
                f"{self.path} holds {len(self._results[task])} results of {task} made with another configuration ({changes}); "
                "give another --output, or --restart to discard them"
            )
        self._hashes[task] = config_hash(new)
        if task not in self._configs:
            self._configs[task], self._results[task] = new, {}
            self._write([{"kind": "config", "task": task, "config_hash": self._hashes[task], "config": new}])
        return dict(self._results[task])

    def append(self, task: str, results: dict[str, Result]) -> None:
        """Save the results of one batch; they are on disk when this returns."""
        head = {"kind": "item", "task": task, "config_hash": self._hashes[task]}
        self._write([{**head, "id": item, **result} for item, result in results.items()])

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        end = 0
        for number, (raw, is_last) in enumerate(_lines(content), 1):
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            if line is None and is_last:
                break
            self._take(line, number)
            end += len(raw)
        self._file.truncate(end)

    def _take(self, line: Any, number: int) -> None:
        line = line if isinstance(line, dict) else {}
        kind, task, key = line.get("kind"), line.get("task"), line.get("config_hash")
        if kind == "config" and "config" in line and config_hash(line["config"]) == key:
            self._configs[task], self._hashes[task], self._results[task] = line["config"], key, {}
        elif kind == "item" and "id" in line and task in self._hashes and self._hashes[task] == key:
            self._results[task][line["id"]] = {k: v for k, v in line.items() if k not in ("kind", "task", "config_hash", "id")}
        else:
            raise ValueError(
                f"{self.path} line {number} is not a line of evaluation results; the file is damaged or another program's: "
                "give another --output, or --restart to discard it"
            )


def config_hash(config: dict[str, Any]) -> str:
    """Short hash of a JSON-able config, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def _lines(content: bytes) -> Iterator[tuple[bytes, bool]]:
    lines = content.splitlines(keepends=True)
    return ((line, i == len(lines) - 1) for i, line in enumerate(lines))


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)]
    return [] if old == new else [f"{name} was {old!r} and is {new!r}"]
