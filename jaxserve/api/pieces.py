"""The new part of each choice, in the same form for streams and for whole answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxserve.api.logprobs import CompletionLogprobs, chat_logprobs
from jaxserve.api.state import Prompt
from jaxserve.request import CompletionOutput, RequestOutput, TokenLogprobs
from jaxserve.sampling_params import SamplingParams


@dataclass(slots=True)
class Piece:
    """What one step added to the choice `index`."""

    index: int
    text: str
    num_tokens: int = 0
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def empty(self) -> bool:
        return not self.text and self.logprobs is None and self.finish_reason is None


class ChatPieces:
    """Pieces of a chat: choices are the n sequences of the one prompt."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._num_top = tokenizer, params.logprobs

    def make(self, prompt_index: int, output: RequestOutput) -> Iterator[Piece]:
        for choice in output.outputs:
            piece = _piece(choice.index, choice)
            if self._num_top is not None and choice.token_ids:
                piece.logprobs = chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs or [], self._num_top)
            yield piece


class CompletionPieces:
    """Pieces of a completion: choice = prompt index * n + sequence index; with echo each choice begins with its prompt."""

    def __init__(self, tokenizer: Any, params: SamplingParams, prompts: list[Prompt], echo: bool) -> None:
        self._tokenizer, self._params, self._prompts, self._echo = tokenizer, params, prompts, echo
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._started: set[int] = set()

    def make(self, prompt_index: int, output: RequestOutput) -> Iterator[Piece]:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        for choice in output.outputs:
            piece = _piece(prompt_index * self._params.n + choice.index, choice)
            token_ids, entries = list(choice.token_ids), list(choice.logprobs or [])
            if self._echo and piece.index not in self._started:
                piece.text = self._prompt_text(prompt_index) + piece.text
                token_ids = self._prompts[prompt_index].token_ids + token_ids
                entries = self._prompt_logprobs.get(prompt_index, []) + entries
            self._started.add(piece.index)
            if self._params.logprobs is not None and token_ids:
                piece.logprobs = self._of(piece.index, prompt_index, self._params.logprobs).add(token_ids, entries)
            yield piece

    def _of(self, index: int, prompt_index: int, num_top: int) -> CompletionLogprobs:
        if index not in self._logprobs:
            before = [] if self._echo else self._prompts[prompt_index].token_ids
            self._logprobs[index] = CompletionLogprobs(self._tokenizer, num_top, self._params.skip_special_tokens, before)
        return self._logprobs[index]

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self._prompts[prompt_index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._params.skip_special_tokens)


def _piece(index: int, choice: CompletionOutput) -> Piece:
    reason = None if choice.finish_reason is None else choice.finish_reason.value
    return Piece(index, choice.text, len(choice.token_ids), None, reason, choice.stop_reason)


def join(pieces: list[Piece]) -> Piece:
    """The whole choice from all its pieces."""
    whole = Piece(pieces[0].index, "".join(p.text for p in pieces), sum(p.num_tokens for p in pieces))
    whole.finish_reason, whole.stop_reason = pieces[-1].finish_reason, pieces[-1].stop_reason
    for piece in pieces:
        if piece.logprobs is not None and whole.logprobs is None:
            whole.logprobs = piece.logprobs
        elif piece.logprobs is not None and whole.logprobs is not None:
            for key, values in piece.logprobs.items():
                if isinstance(values, list):
                    whole.logprobs[key] += values
    return whole
