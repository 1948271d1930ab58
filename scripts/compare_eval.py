#!/usr/bin/env python3
"""Compare evaluation results with transformers on the same items: perplexity by window, multiple choice pick by pick.

Needs torch (the parity extra). `--reference` is a Hugging Face directory of the same weights; transformers runs it in float32 with
its own tokenizer, one text at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxserve import provenance
from jaxserve.config import EngineConfig
from jaxserve.evaluation.multiple_choice import FORMATS, MultipleChoice, split_tokens
from jaxserve.evaluation.perplexity import Perplexity
from jaxserve.evaluation.task import Item
from jaxserve.flags import add_flags, given_options


class Reference:
    """transformers' log-probabilities of given tokens."""

    def __init__(self, path: str):
        import torch  # pyright: ignore[reportMissingImports]  # only the parity extra brings it
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def logprobs(self, ids: Sequence[int], first: int) -> list[float]:
        """Log-probabilities of ids[first:], each after all tokens before it; first is at least 1."""
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([list(ids)])).logits[0, first - 1 : -1].double()
        targets = self.torch.tensor(list(ids[first:]))
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """`count` of the items, evenly over all of them."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def compare_perplexity(llm: Any, reference: Reference, task: Perplexity, count: int) -> dict[str, Any]:
    """Both perplexities over the same windows, and whether both tokenizers cut the text into the same ones."""
    items = task.items(llm)
    theirs_ids = reference.tokenizer.encode(task.text, add_special_tokens=False)
    ours_ids = llm.tokenizer.encode(task.text, add_special_tokens=False)
    chosen = spread(items, count)
    results = task.run(llm, chosen)
    sums = [math.fsum(reference.logprobs(item.content, 1)) for item in chosen]
    scored = sum(r["num_scored"] for r in results)
    ours, theirs = (math.exp(-math.fsum(values) / scored) for values in ([r["logprob"] for r in results], sums))
    worst = max(abs(r["logprob"] - value) / r["num_scored"] for r, value in zip(results, sums, strict=True))
    return {
        "windows": len(chosen),
        "window_tokens": task.window,
        "same_tokens": list(ours_ids) == list(theirs_ids),
        "ours": ours,
        "transformers": theirs,
        "relative_difference": abs(ours / theirs - 1),
        "worst_window_logprob_per_token": worst,
    }


def compare_choices(llm: Any, reference: Reference, task: MultipleChoice, count: int) -> dict[str, Any]:
    """How many picks agree, by sum and by sum per byte, and the greatest difference of an option's log-probability."""
    chosen = spread(task.items(llm), count)
    results = task.run(llm, chosen)
    worst, differing, tokenised_alike, right = 0.0, [], 0, {"ours": 0, "transformers": 0}
    for item, result in zip(chosen, results, strict=True):
        question = item.content
        pairs = [split_tokens(reference.tokenizer, question.prompt, c) for c in question.continuations]
        tokenised_alike += pairs == [split_tokens(llm.tokenizer, question.prompt, c) for c in question.continuations]
        theirs = [math.fsum(reference.logprobs(context + target, len(context))) for context, target in pairs]
        per_byte = [value / size for value, size in zip(theirs, question.num_bytes, strict=True)]
        picks = [values.index(max(values)) for values in (theirs, per_byte)]
        worst = max(worst, *(abs(a - b) for a, b in zip(result["logprobs"], theirs, strict=True)))
        right["ours"] += result["output"][0] == question.gold
        right["transformers"] += picks[0] == question.gold
        if picks != result["output"]:
            differing.append({"id": item.id, "ours": result["output"], "transformers": picks, "logprobs": [result["logprobs"], theirs]})
    return {
        "items": len(chosen),
        "same_tokens": tokenised_alike,
        "same_picks": len(chosen) - len(differing),
        "acc_ours": right["ours"] / len(chosen),
        "acc_transformers": right["transformers"] / len(chosen),
        "worst_logprob_difference": worst,
        "differing": differing,
    }


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The results as a table."""
    lines = ["| task | items | jaxserve | transformers | agreement |", "|---|---|---|---|---|"]
    for name, r in results.items():
        if "windows" in r:
            agreement = f"relative difference {r['relative_difference']:.1e}"
            lines.append(f"| {name}, token perplexity | {r['windows']} windows | {r['ours']:.5f} | {r['transformers']:.5f} | {agreement} |")
        else:
            agreement = f"{r['same_picks']} of {r['items']} picks; logprobs within {r['worst_logprob_difference']:.1e}"
            lines.append(f"| {name}, acc | {r['items']} | {r['acc_ours']:.4f} | {r['acc_transformers']:.4f} | {agreement} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--reference", required=True, help="Hugging Face directory of the same weights")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--tasks", default=f"wikitext2,{','.join(FORMATS)}")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8, help="windows of wikitext2 (default: 8)")
    parser.add_argument("--items", type=int, default=100, help="items of each other task (default: 100)")
    parser.add_argument("--json", type=Path)
    add_flags(parser.add_argument_group("engine"), EngineConfig, leave_out=["model"])
    args = parser.parse_args(argv)
    tasks = {n: Perplexity(args.data, args.window) if n == "wikitext2" else MultipleChoice(n, args.data) for n in args.tasks.split(",")}
    from jaxserve.llm import LLM

    llm, reference, results = LLM(**given_options(args, EngineConfig)), Reference(args.reference), {}
    for name, task in tasks.items():
        if isinstance(task, Perplexity):
            results[name] = compare_perplexity(llm, reference, task, args.windows)
        else:
            results[name] = compare_choices(llm, reference, task, args.items)
        print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
    if args.json:
        found = {"results": results, "versions": provenance.versions(), "device": provenance.device(), "commit": provenance.commit()}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    print(markdown(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
