"""A stand-in for the engine with bytes as tokens and known answers, so that the API is tested without a model.

Run as a script it is a server, python fake_engine.py MODEL [flags], which the tests of start and shutdown run as a process.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from types import SimpleNamespace

from jaxserve.request import CompletionOutput, EngineStopped, FinishReason, QueueFull, RequestOutput, TokenLogprobs

BOS, EOS, VOCAB = 256, 257, 258
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class FakeTokenizer:
    """Token ids are UTF-8 bytes; BOS comes first."""

    all_special_ids = frozenset({BOS, EOS})
    strips_first_space, decode_window = False, None

    def __init__(self, bos: bool = True):
        self.bos = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self.bos and add_special_tokens) + list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id) or bytes([token_id])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i < BOS or not skip_special_tokens).decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: list[dict], add_generation_prompt: bool = True, chat_template: str | None = None, **kw
    ) -> list[int]:
        if any(m["content"] == "refuse" for m in messages):
            raise ValueError("the chat template refused the messages: NOSYS")
        text = "".join(f"[{m['role']}]{m['content']}" + "".join(map(_call, m.get("tool_calls", []))) for m in messages)
        return [BOS, *(text + "[assistant]" * add_generation_prompt).encode()]


def _call(call: dict) -> str:
    return f"!{call['function']['name']}({sorted(call['function']['arguments'].items())})"


class FakeEngine:
    """AsyncEngine's interface. A prompt's answer is the alphabet from letter `index` on, one letter a step of `step_s` seconds."""

    def __init__(self, step_s: float = 0.001, max_model_len: int = 2048, max_queued: int | None = None, bos: bool = True):
        limits = SimpleNamespace(max_model_len=max_model_len)
        stats = dict.fromkeys(("num_steps", "scheduled_tokens", "padded_tokens", "host_seconds", "wait_seconds"), 0)
        self.llm = SimpleNamespace(
            tokenizer=FakeTokenizer(bos),
            config=SimpleNamespace(scheduler=limits),
            model_config=SimpleNamespace(vocab_size=VOCAB),
            generation_defaults={},
            stats=SimpleNamespace(**stats),
            scheduler=SimpleNamespace(num_running=0, num_waiting=0, num_preemptions=0),
            page_manager=SimpleNamespace(num_usable_pages=10, num_free_pages=10),
            ledger=SimpleNamespace(weights_bytes=1, pool_bytes=2, lines=lambda: ["weights 1 GiB"]),
            runner=SimpleNamespace(stats=SimpleNamespace(temp_bytes=3)),
        )
        self.step_s, self.max_queued = step_s, max_queued
        self.is_healthy, self.failure = True, None
        self.seen: list = []  # (prompt ids, params) of every prompt
        self._ending = False

    def start(self) -> None:
        pass

    @property
    def num_unfinished(self) -> int:
        return self.llm.scheduler.num_running

    def check_capacity(self, n: int) -> None:
        if self.max_queued is not None and self.num_unfinished + n > self.max_queued:
            raise QueueFull(f"{self.num_unfinished} requests are waiting, the limit is {self.max_queued}")

    async def shutdown(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.num_unfinished and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._ending = True
        await asyncio.sleep(0.05)

    async def generate(self, prompt_token_ids, params, request_id, prompt=None):
        self.check_capacity(params.n)
        limit = self.llm.config.scheduler.max_model_len
        max_tokens = limit - len(prompt_token_ids) if params.max_tokens is None else params.max_tokens
        if len(prompt_token_ids) + max_tokens > limit:
            raise ValueError(f"the prompt has {len(prompt_token_ids)} tokens, with max_tokens more than max_model_len ({limit})")
        if any(not 0 <= t < VOCAB for t in prompt_token_ids):
            raise ValueError(f"the prompt holds an id outside 0 to {VOCAB - 1}")
        self.seen.append((prompt_token_ids, params))
        self.llm.scheduler.num_running += params.n
        try:
            for step in range(max(1, max_tokens)):
                await asyncio.sleep(self.step_s)
                if self.failure:
                    raise self.failure
                yield self._step(step, max_tokens, prompt_token_ids, params, request_id)
                if self._ending:
                    raise EngineStopped("the server shut down after waiting")
        finally:
            self.llm.scheduler.num_running -= params.n

    def _step(self, step, max_tokens, prompt_token_ids, params, request_id):
        out = RequestOutput(request_id, None, prompt_token_ids, [])
        if step == 0 and params.prompt_logprobs is not None:
            out.prompt_logprobs = [None, *(logprobs(t) for t in prompt_token_ids[1:])]
        reason = FinishReason.LENGTH if step >= max_tokens - 1 else None
        for index in range(params.n):
            letter = ALPHABET[(step + index) % 26]
            ids = [ord(letter)] if max_tokens else []
            choice = CompletionOutput(index, letter if ids else "", ids, None, reason)
            if params.logprobs is not None:
                choice.logprobs = [logprobs(t) for t in ids]
            out.outputs.append(choice)
        return out


def logprobs(token_id: int) -> TokenLogprobs:
    """Own logprob -0.5, then 'A' -1 and an impossible 'B'."""
    return TokenLogprobs(token_id, -0.5, 1, ((token_id, -0.5), (65, -1.0), (66, -math.inf)))


class Compiles:
    count, seconds, count_after_ready = 4, 1.5, 0


def load(config):
    """For jaxserve.api.serve.serve(load=...); a model named slow-N takes N seconds, one named missing fails."""
    if config.load.model == "missing":
        raise FileNotFoundError("there is no model at 'missing'")
    if config.load.model == "broken":
        raise KeyError("a fault")
    if config.load.model.startswith("slow-"):
        time.sleep(float(config.load.model.removeprefix("slow-")))
    engine = FakeEngine(step_s=0.02, max_model_len=100_000)
    return engine, engine.llm, Compiles()


if __name__ == "__main__":
    import argparse

    from jaxserve.api.serve import serve
    from jaxserve.cli import add_serve_flags, read_serve_flags

    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    sys.exit(serve(*read_serve_flags(parser.parse_args()), load))
