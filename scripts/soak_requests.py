"""The requests of scripts/soak.py: random ones that must be served, fixed ones that must be refused, and what their answers must be."""

from __future__ import annotations

import collections
import json
import random
from typing import Any

Body = dict[str, Any]
MAX_MODEL_LEN = 256
WORDS = ["the", "sea", "a", "small", "boat", "went", "to", "find", "12", "café", "doors", "漢字", "city", "😀", "Ωmega", "rain"]
CONTROLS: list[Body] = [
    {"prompt": "The sea is", "temperature": 0, "max_tokens": 40, "ignore_eos": True},
    {"prompt": "One two three", "temperature": 0.9, "seed": 11, "top_p": 0.9, "max_tokens": 40, "ignore_eos": True},
    {"prompt": [5, 6, 7, 8] * 10, "temperature": 1, "seed": 12, "top_k": 40, "n": 2, "max_tokens": 30, "ignore_eos": True},
]
# Bodies that must be refused: path, body or raw bytes, status, what the error names (its param, else its code).
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REFUSED: list[tuple[str, Body | bytes, int, str]] = [
    (TEXT, b"{", 400, "invalid_json"),
    (TEXT, b'{"prompt": "\xff"}', 400, "invalid_json"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json"),
    (TEXT, b"[]", 400, "invalid_json"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [10**9]}, 400, "prompt"),
    (TEXT, {"prompt": [1] * (MAX_MODEL_LEN + 1)}, 400, "prompt"),
    (TEXT, {"prompt": ["a", [1] * (MAX_MODEL_LEN + 1)]}, 400, "prompt"),
    (TEXT, {"prompt": "a", "max_tokens": MAX_MODEL_LEN * 2}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "n"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "top_k": -2}, 400, "top_k"),
    (TEXT, {"prompt": "a", "min_p": 1.5}, 400, "min_p"),
    (TEXT, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "logprobs": 1000}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "stop": ""}, 400, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [10**9]}, 400, "stop_token_ids"),
    (TEXT, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    (TEXT, {"prompt": "a", "unheard_of": 1}, 400, "unheard_of"),
    (TEXT, {"prompt": "a", "model": "another"}, 404, "model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/unheard_of", {}, 404, "not_found"),
]


class Fault(Exception):
    """Something that must not happen; the message says what."""


def expect(good: bool, message: str) -> None:
    if not good:
        raise Fault(message)


def random_body(rng: random.Random) -> tuple[str, Body]:
    """A request that must be served, and its path."""
    longest = rng.choice((20, 60, MAX_MODEL_LEN))
    max_tokens = rng.randint(1, longest // 2)
    body: Body = {"max_tokens": max_tokens, "n": rng.choice((1, 1, 1, 2, 3)), "stream": rng.random() < 0.5}
    body["ignore_eos"] = rng.random() < 0.3
    if rng.random() < 0.4:
        body["temperature"] = 0
    else:
        body |= {"temperature": rng.uniform(0.2, 1.5)}
        for name, value in (("seed", rng.randrange(2**32)), ("top_k", rng.randint(1, 50)), ("top_p", rng.uniform(0.1, 1)), ("min_p", 0.05)):
            if rng.random() < 0.4:
                body[name] = value
    if rng.random() < 0.2:
        body["min_tokens"] = rng.randint(1, max_tokens)
    if rng.random() < 0.2:
        body["stop"] = [rng.choice(WORDS), "\n"]
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.3:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))
        if rng.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": rng.choice((0, 5))}
        body["max_tokens"] = min(max_tokens, 64)  # the template's own tokens need room
        if "min_tokens" in body:
            body["min_tokens"] = min(body["min_tokens"], 64)
        return CHAT, {**body, "messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.4:
        body["logprobs"] = rng.choice((0, 5))
    body["echo"] = rng.random() < 0.2
    lengths = [rng.randint(1, MAX_MODEL_LEN - max_tokens) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]
    return TEXT, {**body, "prompt": prompts if len(prompts) > 1 else prompts[0]}


def num_choices(path: str, body: Body) -> int:
    prompt = body.get("prompt")
    several = path == TEXT and isinstance(prompt, list) and isinstance(prompt[0], list)
    return body.get("n", 1) * (len(body["prompt"]) if several else 1)


def whole_from_stream(lines: list[str], path: str) -> Body:
    """The choices that a stream's events add up to."""
    expect(lines[-1:] == ["data: [DONE]"], f"a stream ended with {lines[-1:]}")
    choices: dict[int, Body] = collections.defaultdict(lambda: {"text": "", "logprobs": [], "finish_reason": None})
    usage = None
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        expect("error" not in event, f"a stream failed: {event}")
        usage = event.get("usage") or usage
        for new in event["choices"]:
            choice = choices[new["index"]]
            expect(choice["finish_reason"] is None, "a choice went on after its end")
            choice["text"] += new["text"] if path == TEXT else new["delta"].get("content") or ""
            choice["logprobs"] += tokens_of(new["logprobs"], path)
            choice["finish_reason"] = new["finish_reason"]
    return {"choices": [{"index": i, **choices[i]} for i in sorted(choices)], "usage": usage}


def tokens_of(logprobs: Body | None, path: str) -> list[Any]:
    return [] if not logprobs else logprobs["tokens"] if path == TEXT else logprobs["content"]


def whole_from_json(reply: Body, path: str) -> Body:
    choices = [
        {
            "index": c["index"],
            "text": c["text"] if path == TEXT else c["message"]["content"],
            "logprobs": tokens_of(c["logprobs"], path),
            "finish_reason": c["finish_reason"],
        }
        for c in reply["choices"]
    ]
    return {"choices": choices, "usage": reply["usage"]}


def check_answer(path: str, body: Body, whole: Body) -> None:
    """Fault unless the answer has the choices, ends and lengths that the request asked for."""
    choices, usage = whole["choices"], whole["usage"]
    expect([c["index"] for c in choices] == list(range(num_choices(path, body))), f"choices are {[c['index'] for c in choices]}")
    expect(all(c["finish_reason"] in ("stop", "length") for c in choices), f"ends are {[c['finish_reason'] for c in choices]}")
    if usage is not None:
        most, made = body["max_tokens"] * len(choices), usage["completion_tokens"]
        expect(usage["total_tokens"] == usage["prompt_tokens"] + made, f"usage is {usage}")
        full = body.get("ignore_eos") and "stop" not in body
        least = most if full else body.get("min_tokens", 1) * len(choices) if "stop" not in body else 1
        expect(least <= made <= most, f"{made} tokens were made, {least} to {most} expected")
        if body.get("logprobs") not in (None, False) and not body.get("stop"):
            echoed = usage["prompt_tokens"] * body["n"] if body.get("echo") else 0
            count = sum(len(c["logprobs"]) for c in choices)
            expect(count == made + echoed, f"logprobs of {count} tokens, {made} made and {echoed} echoed")
