"""`jaxserve bench throughput`: tokens per second with all requests there from the start."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve import provenance
from jaxserve.bench.flops import request_flops
from jaxserve.bench.measure import Run, measure
from jaxserve.bench.workload import Prompt, random_workload, read_workload
from jaxserve.config import EngineConfig
from jaxserve.flags import add_flags, given_options

WARMUP_TOKENS = 8
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags: the benchmark's own, then the engine's."""
    description = "Offline throughput, greedy, fixed output lengths."
    parser = argparse.ArgumentParser(prog="jaxserve bench throughput", description=description, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="directory, .gguf file, Orbax checkpoint or hub id of the model")
    parser.add_argument("--workload", type=Path, help="JSON lines with prompt and max_tokens; without it prompts are random tokens")
    parser.add_argument("--num-prompts", type=int, help="the workload's first ones (default: all), or random ones (100)")
    parser.add_argument("--random-input-len", type=int, default=128, help="tokens of a random prompt (default: 128)")
    parser.add_argument("--random-output-len", type=int, default=64, help="tokens of output of a random prompt (default: 64)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs; the reported one is the median (default: 3)")
    parser.add_argument("--output-json", type=Path, help="write the result to this file too")
    parser.add_argument("--save-tokens", type=Path, help="write each request's output token ids to this JSON-lines file")
    add_flags(parser.add_argument_group("engine"), EngineConfig, leave_out=["model"])
    return parser


def main(argv: Sequence[str] | None = None, make_llm: Callable[..., Any] | None = None) -> int:
    """Run the benchmark and print its result as one line of JSON; returns the exit code. `make_llm` replaces the class LLM."""
    args = build_parser().parse_args(argv)
    try:
        _run(args, make_llm or _load)
    except (ValueError, OSError) as error:
        print(f"jaxserve bench throughput: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> None:
    if args.runs < 1 or (args.num_prompts is not None and args.num_prompts < 1):
        raise ValueError(f"--runs is {args.runs} and --num-prompts {args.num_prompts}; give integers of at least 1")
    if args.workload and not args.workload.is_file():
        raise ValueError(f"--workload {args.workload} is not a file; give JSON lines with prompt and max_tokens")
    began = time.perf_counter()
    engine = make_llm(**given_options(args, EngineConfig)).engine
    load_s = time.perf_counter() - began
    if args.workload:
        if engine.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer, which a workload of texts needs; give one with --tokenizer")
        prompts = read_workload(args.workload, engine.tokenizer, args.num_prompts)
    else:
        vocab, count = engine.model_config.vocab_size, args.num_prompts or 100
        prompts = random_workload(count, args.random_input_len, args.random_output_len, vocab, engine.config.seed)
    began = time.perf_counter()
    measure(engine, prompts, max_tokens=WARMUP_TOKENS)
    warmup_s = time.perf_counter() - began
    runs = [measure(engine, prompts) for _ in range(args.runs)]
    result = result_of(engine, prompts, runs) | {
        "model_id": args.model,
        "tokenizer_id": engine.config.load.tokenizer or args.model,
        "workload": str(args.workload) if args.workload else "random",
        "load_s": load_s,
        "warmup_s": warmup_s,
    }
    _write(args, result, prompts, runs)


def _load(model: str, **options: Any) -> Any:
    from jaxserve.llm import LLM  # here, so that --help needs no model code

    return LLM(model, **options)


def result_of(engine: Any, prompts: Sequence[Prompt], runs: Sequence[Run]) -> dict[str, Any]:
    """All figures of the median run, and of all runs where that is said."""
    run = sorted(runs, key=lambda r: r.duration_s)[(len(runs) - 1) // 2]
    outputs = sum(p.max_tokens for p in prompts)
    flops = sum(request_flops(engine.model_config, len(p.token_ids), p.max_tokens) for p in prompts)
    scheduled, padded = run.counters["scheduled_tokens"], run.counters["padded_tokens"]
    ids = [timeline.token_ids for timeline in run.timelines]
    return {
        **common_fields(prompts, run.duration_s),
        **latencies(run),
        "runs_s": [r.duration_s for r in runs],
        "runs_output_throughput": [outputs / r.duration_s for r in runs],
        "same_tokens_in_all_runs": all([t.token_ids for t in r.timelines] == ids for r in runs),
        "outputs_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "gflops_needed": flops / 1e9,
        "gflops_per_s": flops / 1e9 / run.duration_s,
        "padding_waste": padded / (scheduled + padded),
        "counters": run.counters,
        "startup": dataclasses.asdict(engine.ledger),
        "compile_s": engine.ledger.compile_seconds,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "engine_config": dataclasses.asdict(engine.config),
        "commit": provenance.commit(),
        "device": provenance.device(),
        "versions": provenance.versions(),
    }


def common_fields(prompts: Sequence[Prompt], seconds: float) -> dict[str, Any]:
    """Figures under the names of vLLM's `bench serve` and `bench throughput` results."""
    inputs, outputs = sum(len(p.token_ids) for p in prompts), sum(p.max_tokens for p in prompts)
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "jaxserve",
        "num_prompts": len(prompts),
        "request_rate": "inf",
        "max_concurrency": None,
        "duration": seconds,
        "completed": len(prompts),
        "failed": 0,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(prompts) / seconds,
        "request_goodput": None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "elapsed_time": seconds,
        "num_requests": len(prompts),
        "total_num_tokens": inputs + outputs,
        "requests_per_second": len(prompts) / seconds,
        "tokens_per_second": (inputs + outputs) / seconds,
    }


def latencies(run: Run) -> dict[str, float]:
    """Mean, median, standard deviation and 99th percentile, in ms: first token, per output token, between tokens, whole request."""
    times = [timeline.times_s for timeline in run.timelines]
    samples = {
        "ttft": [t[0] for t in times],
        "tpot": [(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1],
        "itl": [gap for timeline in run.timelines for gap in timeline.gaps_s],
        "e2el": [t[-1] for t in times],
    }
    found = {}
    for name, values in samples.items():
        ordered = sorted(1e3 * v for v in values) or [0.0]
        found[f"mean_{name}_ms"] = statistics.fmean(ordered)
        found[f"median_{name}_ms"] = statistics.median(ordered)
        found[f"std_{name}_ms"] = statistics.pstdev(ordered)
        found[f"p99_{name}_ms"] = percentile(ordered, 0.99)
    return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ascending values lie, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _write(args: argparse.Namespace, result: dict[str, Any], prompts: Sequence[Prompt], runs: Sequence[Run]) -> None:
    line = json.dumps(result)
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(line + "\n", encoding="utf-8")
    if args.save_tokens:
        args.save_tokens.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"id": p.id, "output_token_ids": t.token_ids} for p, t in zip(prompts, runs[-1].timelines, strict=True)]
        args.save_tokens.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(line)
