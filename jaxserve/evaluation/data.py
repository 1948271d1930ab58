"""Finding and reading the data files of the tasks; every complaint names the file, the line and what was expected."""

from __future__ import annotations

import json
from pathlib import Path


def find_file(location: Path, patterns: tuple[str, ...], what: str) -> Path:
    """The one file for `what`: `location` itself when it is a file, else the only match of the first pattern that matches in it."""
    if location.is_file():
        return location
    if not location.exists():
        raise ValueError(f"--data {location} does not exist; give a directory or a file that holds {what}")
    for pattern in patterns:
        found = sorted(p for p in location.glob(pattern) if p.is_file())
        if len(found) > 1:
            names = ", ".join(p.name for p in found)
            raise ValueError(f"--data {location} holds several files for {what} ({names}); name one of them with --data FILE")
        if found:
            return found[0]
    raise ValueError(f"--data {location} holds no file for {what}; expected one named {' or '.join(patterns)}")


def read_text(path: Path) -> str:
    """A UTF-8 text file that is not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
    if not text.strip():
        raise ValueError(f"{path} is empty; it must hold text")
    return text


def read_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The objects of a JSON-lines file, each with the given text columns; others are ignored."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}); expected one object a line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number} is a {type(row).__name__}; expected an object with {', '.join(columns)}")
        for column in columns:
            if not isinstance(row.get(column), str) or not row[column].strip():
                got = f"is {row[column]!r}" if column in row else f"is missing (columns: {', '.join(row) or 'none'})"
                raise ValueError(f"{path} line {number}: column {column!r} {got}; expected text, in each of {', '.join(columns)}")
        rows.append(row)
    return rows
