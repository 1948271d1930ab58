#!/usr/bin/env python3
"""Compare two throughput benchmarks in one session: runs A B A B ... and reports the ratio and its spread.

Each side is a command, quoted as one argument, that prints a line of JSON with its tokens per second: `runs_output_throughput` or
`runs_tok_s` (a list, one entry a run) or `output_throughput` or `out_tok_s` (one number). Example:

  scripts/compare_peers.py --a "jaxserve bench throughput --model M --workload W" --b "python peer.py --model M --workload W" \\
      --rounds 3 --json ratio.json --markdown ratio.md --tokens-a a.jsonl --tokens-b b.jsonl
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEVERAL, ONE = ("runs_output_throughput", "runs_tok_s"), ("output_throughput", "out_tok_s")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, help="command of side A")
    parser.add_argument("--b", required=True, help="command of side B")
    parser.add_argument("--name-a", default="jaxserve")
    parser.add_argument("--name-b", default="peer")
    parser.add_argument("--cwd-a", type=Path, help="directory that A runs in")
    parser.add_argument("--cwd-b", type=Path, help="directory that B runs in")
    parser.add_argument("--rounds", type=int, default=2, help="times that A and B run, in turn (default: 2)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one command may take (default: 1800)")
    parser.add_argument("--tokens-a", type=Path, help="token ids that A saves, to be compared with B's")
    parser.add_argument("--tokens-b", type=Path, help="token ids that B saves")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.rounds < 1:
        print(f"error: --rounds is {args.rounds}; give at least 1", file=sys.stderr)
        return 2
    results: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    try:
        for number in range(args.rounds):
            for side, command, folder in (("a", args.a, args.cwd_a), ("b", args.b, args.cwd_b)):
                results[side].append(run(command, folder, args.timeout))
                print(f"round {number + 1} {side}: {throughputs(results[side][-1])} tokens/s", file=sys.stderr, flush=True)
        summary = compare(results["a"], results["b"])
        if args.tokens_a and args.tokens_b:
            summary["tokens"] = compare_tokens(args.tokens_a, args.tokens_b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = markdown(summary, args.name_a, args.name_b)
    if args.json:
        args.json.write_text(json.dumps({"summary": summary, "command_a": args.a, "command_b": args.b, **results}, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(text)
    print(text, end="")
    return 0


def run(command: str, folder: Path | None, timeout_s: float) -> dict[str, Any]:
    """Run a command and read the JSON object in the last line of its output that holds one; adds `wall_s`."""
    began = time.monotonic()
    try:
        done = subprocess.run(shlex.split(command), cwd=folder, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{error}; its messages are above") from error
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            result = json.loads(line)
            throughputs(result)
            return result | {"wall_s": time.monotonic() - began}
    raise ValueError(f"{command!r} printed no line of JSON; its output ends with {done.stdout[-200:]!r}")


def throughputs(result: dict[str, Any]) -> list[float]:
    """Tokens per second of each run that a result tells of."""
    for name in SEVERAL:
        if result.get(name):
            return [round(float(value), 2) for value in result[name]]
    for name in ONE:
        if result.get(name):
            return [round(float(result[name]), 2)]
    raise ValueError(f"the result has none of {', '.join(SEVERAL + ONE)}; it has {', '.join(result)}")


def compare(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each side's runs and the ratio A / B: of the medians over all runs, and per round (neighbours in time) its least and greatest."""
    sides = {}
    for name, results in (("a", a), ("b", b)):
        runs = [value for result in results for value in throughputs(result)]
        sides[name] = {"runs": runs, "median": statistics.median(runs), "min": min(runs), "max": max(runs)}
    pairs = zip(a, b, strict=True)
    ratios = [statistics.median(throughputs(x)) / statistics.median(throughputs(y)) for x, y in pairs]
    return {
        **sides,
        "ratio": sides["a"]["median"] / sides["b"]["median"],
        "ratio_by_round": ratios,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def compare_tokens(a: Path, b: Path) -> dict[str, Any]:
    """How many requests have the same output ids in two files of {"id", "output_token_ids"} rows; only ids in both count."""
    ours, theirs = ({row["id"]: row["output_token_ids"] for row in map(json.loads, path.read_text().splitlines())} for path in (a, b))
    both = [key for key in ours if key in theirs]
    different = [key for key in both if ours[key] != theirs[key]]
    firsts = {key: next((i for i, (x, y) in enumerate(zip(ours[key], theirs[key], strict=False)) if x != y), None) for key in different}
    return {"compared": len(both), "same": len(both) - len(different), "first_difference": firsts}


def markdown(summary: dict[str, Any], name_a: str, name_b: str) -> str:
    """The comparison as a table."""
    lines = ["| side | median tok/s | min - max | runs |", "|---|---|---|---|"]
    for name, side in ((name_a, summary["a"]), (name_b, summary["b"])):
        lines.append(f"| {name} | {side['median']:.1f} | {side['min']:.1f} - {side['max']:.1f} | {len(side['runs'])} |")
    spread = f"{summary['ratio_min']:.2f} - {summary['ratio_max']:.2f} over {len(summary['ratio_by_round'])} rounds"
    lines += ["", f"{name_a} / {name_b}: **{summary['ratio']:.2f}x** ({spread})"]
    if "tokens" in summary:
        lines.append(f"Same output tokens: {summary['tokens']['same']} of {summary['tokens']['compared']} requests")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
