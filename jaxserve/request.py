"""A request on its way through the engine, and what comes back from it."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field

from jaxserve.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why generation ended, in OpenAI's words; ABORT: the caller gave up."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def no_pages() -> array[int]:
    """An empty block table. An array of C ints is copied into the step's input at once; a list costs as much a page as a row."""
    return array("i")


@dataclass(eq=False, slots=True)
class Request:
    """One sequence: a prompt, its sampling settings and its progress. A request with n > 1 becomes n of these.

    `num_computed_tokens` counts the tokens whose keys and values are in the pool or will be when the dispatched steps have run.
    `num_pending_tokens` counts tokens that dispatched steps sample and that are not in `output_token_ids` yet.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # resolved: sampling_params.max_tokens or what max_model_len leaves
    stop_token_ids: frozenset[int] = frozenset()  # resolved: end-of-sequence ids (unless ignored) and the request's own
    seed: int = 0  # resolved
    index: int = 0  # which of the request's n sequences
    arrival_time_s: float = field(default_factory=time.monotonic)
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_table: array[int] = field(default_factory=no_pages)  # logical page -> page id
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    scheduled_time_s: float | None = None  # first time in a step
    first_token_time_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop-1 of prompt and output together."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - n) : stop - n]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: the token's own, its rank (1 is best) and the best (id, logprob) pairs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenOutput:
    """What one step made for one sequence; token_id is None when it only ended or only brings prompt logprobs."""

    request_id: str
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, when the prompt is done; its first entry is None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence's text and tokens: all of it from LLM.generate, the new part in a stream."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it


@dataclass(slots=True)
class RequestOutput:
    """A request's result, or in a stream the part of it that is new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False


class QueueFull(Exception):
    """Too many requests wait, the message names max_num_queued_requests; the same request may be sent again later."""


class EngineStopped(Exception):
    """The engine is shutting down, or its thread died; the message says which."""
