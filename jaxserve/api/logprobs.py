"""Log-probability objects of OpenAI's two APIs, finite numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxserve.detokenizer import TokenText, text_stream, visible_tail
from jaxserve.request import TokenLogprobs

LOWEST = -9999.0  # what OpenAI reports for a token that is all but impossible


class CompletionLogprobs:
    """Makes the logprobs objects of one choice of /v1/completions, piece by piece; text offsets go on from piece to piece.

    `before` are the tokens in front of the choice's text: its prompt, unless that is echoed.

    A token that is part of a character is written as bytes:\\xNN..., so that the keys of top_logprobs stay distinct.
    """

    def __init__(self, tokenizer: TokenText, num_top: int, skip_special_tokens: bool, before: Sequence[int]) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._hidden = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._stream = text_stream(tokenizer, visible_tail(before, self._hidden))
        self._offset = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """{tokens, token_logprobs, top_logprobs, text_offset} of the next tokens; None entries become nulls."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, shown = token_text(self._tokenizer, token_id), "" if token_id in self._hidden else self._stream.push(token_id)
            if text == f" {shown}":
                text = shown  # the first token of a text, whose space the tokenizer drops
            out["tokens"].append(text)
            out["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            out["top_logprobs"].append(None if entry is None else self._top(text, entry))
            out["text_offset"].append(self._offset)
            self._offset += len(shown)
        return out

    def _top(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        top = {token_text(self._tokenizer, t): p for t, p in entry.top[: self._num_top] if math.isfinite(p)}
        return {**top, text: _finite(entry.logprob)}


def chat_logprobs(tokenizer: TokenText, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """{content: [{token, logprob, bytes, top_logprobs}], refusal: null} of /v1/chat/completions."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_chat_entry(tokenizer, t, p) for t, p in entry.top[:num_top] if math.isfinite(p)]
        content.append({**_chat_entry(tokenizer, token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def token_text(tokenizer: TokenText, token_id: int) -> str:
    """A token's own text, special tokens included."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _chat_entry(tokenizer: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
