"""The command line of `jaxserve eval`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve import provenance
from jaxserve.config import EngineConfig
from jaxserve.evaluation.gsm8k import Gsm8k
from jaxserve.evaluation.journal import Journal
from jaxserve.evaluation.multiple_choice import FORMATS, MultipleChoice
from jaxserve.evaluation.perplexity import Perplexity
from jaxserve.evaluation.report import report, table, write_json
from jaxserve.evaluation.runner import run_task
from jaxserve.evaluation.task import Task
from jaxserve.flags import add_flags, given_options

TASKS = ("wikitext2", *FORMATS, "gsm8k")
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags: the evaluation's own, then the engine's."""
    parser = argparse.ArgumentParser(
        prog="jaxserve eval",
        allow_abbrev=False,
        description="Evaluate a model. A run that was killed goes on where it stopped when the same command is given again.",
    )
    parser.add_argument("--model", required=True, help="directory, .gguf file, Orbax checkpoint or hub id of the model")
    parser.add_argument("--data", required=True, type=Path, help="directory with the tasks' data files, or the file of the only task")
    parser.add_argument("--tasks", required=True, type=task_names, metavar="A,B", help=f"which tasks to run: {', '.join(TASKS)}")
    parser.add_argument("--limit", type=positive, help="run only the first LIMIT items of each task (default: all)")
    parser.add_argument("--output", type=Path, default=Path("eval.json"), help="result; items go to OUTPUT.items.jsonl (eval.json)")
    parser.add_argument("--restart", action="store_true", help="discard the items that an earlier run left at OUTPUT")
    parser.add_argument("--save-every", type=positive, help="items run at once, then saved (default: 16 windows, 64 of others)")
    parser.add_argument("--window", type=int, default=1024, help="wikitext2: tokens a window (default: 1024)")
    parser.add_argument("--num-shots", type=int, default=5, help="gsm8k: examples in the prompt (default: 5)")
    parser.add_argument("--max-tokens", type=int, default=256, help="gsm8k: most tokens of an answer (default: 256)")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bars")
    add_flags(parser.add_argument_group("engine"), EngineConfig, leave_out=["model"])
    return parser


def main(argv: Sequence[str] | None = None, make_llm: Callable[..., Any] | None = None) -> int:
    """Run `jaxserve eval`; returns the exit code: 0, 1 for bad input, 130 when interrupted. `make_llm` replaces the class LLM."""
    args = build_parser().parse_args(argv)
    items_path = args.output.with_name(args.output.name + ".items.jsonl")
    try:
        return _run(args, items_path, make_llm or _load)
    except KeyboardInterrupt:
        print(f"interrupted; finished items are in {items_path}, the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"jaxserve eval: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _run(args: argparse.Namespace, items_path: Path, make_llm: Callable[..., Any]) -> int:
    began, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    tasks = [build_task(name, args) for name in args.tasks]  # before the model, so that bad data is told at once
    options = given_options(args, EngineConfig)
    configs = {task.name: task_config(task, options) for task in tasks}
    if args.restart:
        items_path.unlink(missing_ok=True)
    journal = Journal(items_path)
    try:
        for task in tasks:
            journal.begin(task.name, configs[task.name])
        llm = make_llm(**options)
        summaries = {t.name: run_task(t, llm, journal, configs[t.name], args.limit, progress=not args.no_progress) for t in tasks}
    finally:
        journal.close()
    write_json(args.output, report(args.model, llm.engine, summaries, started, time.monotonic() - began, args.limit))
    print(f"\n{table(summaries)}\n\nresult: {args.output}   items: {items_path}")
    return 0


def _load(model: str, **options: Any) -> Any:
    from jaxserve.llm import LLM  # here, so that --help and bad data need no model code

    llm = LLM(model, **options)
    if llm.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer; give one with --tokenizer")
    return llm


def build_task(name: str, args: argparse.Namespace) -> Task:
    """The task with its settings from the command line and its data read."""
    task: Any
    if name == "wikitext2":
        task = Perplexity(args.data, args.window)
    elif name == "gsm8k":
        task = Gsm8k(args.data, args.num_shots, args.max_tokens)
    else:
        task = MultipleChoice(name, args.data)
    if args.save_every:
        task.batch_size = args.save_every
    return task


def task_config(task: Task, options: dict[str, Any]) -> dict[str, Any]:
    """All that a task's results depend on. --limit is not part of it: a run over more items goes on from one over fewer."""
    engine = dataclasses.asdict(EngineConfig.from_options(**options))
    engine.pop("compilation_cache_dir")
    return {
        "task": task.name,
        "settings": task.settings(),
        "data": {path.name: provenance.file_sha256(path) for path in task.files},
        "model_files": provenance.model_fingerprint(options["model"]),
        "engine": engine,
        "device": provenance.device()["kind"],
        "versions": {name: v for name, v in provenance.versions().items() if name in ("jaxserve", "jax", "transformers")},
    }


def task_names(text: str) -> list[str]:
    """Task names from "a,b", each known and given once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} does not name tasks, each once, out of {', '.join(TASKS)}")
    return names


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)
