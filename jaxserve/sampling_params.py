"""SamplingParams: how the tokens of one request are chosen, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOGPROBS = 20
MAX_N = 128
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and meanings.

    ValueError names the field, the value and the allowed range.
    """

    n: int = 1  # completions of the prompt, each with its own random stream
    max_tokens: int | None = 16  # most tokens to generate; None: as many as max_model_len leaves; 0: none (with prompt_logprobs)
    min_tokens: int = 0  # end-of-sequence and stop tokens are not sampled before this many
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k best tokens; 0 or -1: all
    top_p: float = 1.0  # keep the smallest set of best tokens whose probability reaches top_p
    min_p: float = 0.0  # drop tokens less probable than min_p times the best
    seed: int | None = None  # None: a seed of the engine's own
    stop: tuple[str, ...] = ()  # strings that end the text; cut off unless include_stop_str_in_output
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's and the k best ones' (0: only the sampled token's)
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        _number("temperature", self.temperature, 0.0, math.inf, "a finite number >= 0")
        _integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, math.ulp(0.0), 1.0, "a number > 0 and <= 1; 1 keeps every token")
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}); lower min_tokens")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; give a non-empty string or a list of them")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken; a temperature below 1e-5 counts as 0, as it would overflow float32 logits."""
        return self.temperature < 1e-5


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r}; give an integer {limit}")


def _number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; give {allowed}")
