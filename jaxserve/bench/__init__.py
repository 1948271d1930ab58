"""Benchmarks of the engine: `jaxserve bench NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxserve.bench import throughput

BENCHMARKS = {"throughput": throughput.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the first argument names on the other arguments; returns its exit code."""
    parser = argparse.ArgumentParser(prog="jaxserve bench", description="Measure the engine.")
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own flags; --help after its name lists them")
    args = parser.parse_args(argv)
    return BENCHMARKS[args.benchmark](args.arguments)
