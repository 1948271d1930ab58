"""IncrementalDetokenizer: a sequence's tokens to text as they come, with stop strings and split characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_CONTEXT = 8  # prompt tokens that are enough to finish a character which the prompt began
_MAX_SPLIT = 8  # tokens a decoder may need for one character; after these an invalid one is given out as U+FFFD


class TokenText(Protocol):
    """What is needed of a tokenizer."""

    @property
    def strips_first_space(self) -> bool: ...
    @property
    def decode_window(self) -> Callable[[Sequence[int]], str] | None: ...
    @property
    def all_special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...


class ByteStream:
    """Text of tokens that stand for bytes, decoded as UTF-8: an unfinished character waits, an invalid one becomes U+FFFD."""

    def __init__(self, tokenizer: TokenText, prompt: Sequence[int] = ()):
        self._bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = tokenizer.strips_first_space and not prompt
        self._decode(b"".join(map(self._bytes, prompt[-_CONTEXT:])))

    def push(self, token_id: int) -> str:
        return self._out(self._decode(self._bytes(token_id)))

    def flush(self) -> str:
        return self._out(self._decode(b"", True))

    def _out(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowStream:
    """Text of tokens whose decoder is a black box: what a window of tokens reads more than its beginning, which is known already."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._known, self._new = list(prompt[-_CONTEXT:]), []
        self._known_text = decode(self._known)

    def push(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._decode(self._known + self._new)
        if text.endswith("\ufffd") and len(self._new) < _MAX_SPLIT:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._known + self._new)) if self._new else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._known_text) :]
        if new:
            self._known, self._new = self._new, []
            self._known_text = self._decode(self._known)
        return new


def text_stream(tokenizer: TokenText, prompt: Sequence[int] = ()) -> ByteStream | WindowStream:
    """A stream of a tokenizer's text that goes on from the visible tokens of `prompt`."""
    if tokenizer.decode_window is None:
        return ByteStream(tokenizer, prompt)
    return WindowStream(tokenizer.decode_window, prompt)


class StopMatcher:
    """Finds the first occurrence of one stop string in text that comes in pieces (Knuth-Morris-Pratt, so long stop strings cost nothing).

    `matched` is the length of the longest end of the text so far that is a beginning of the stop string.
    """

    def __init__(self, stop: str):
        self.stop, self.matched = stop, 0
        self._borders = [0] * len(stop)
        k = 0
        for i in range(1, len(stop)):
            while k and stop[i] != stop[k]:
                k = self._borders[k - 1]
            k += stop[i] == stop[k]
            self._borders[i] = k

    def feed(self, piece: str) -> int | None:
        """Take the next piece; the position in it just behind the stop string, when it is complete."""
        stop, borders, k = self.stop, self._borders, self.matched
        if not k and stop[0] not in piece:
            return None
        for i, char in enumerate(piece):
            while k and stop[k] != char:
                k = borders[k - 1]
            k += stop[k] == char
            if k == len(stop):
                return i + 1
        self.matched = k
        return None


class IncrementalDetokenizer:
    """Text of one sequence, token by token; what add() and finish() return, joined, is the whole text.

    A stop string ends the text where it begins (behind it with `include_stop`). Of several, the one that begins first in the text counts,
    and the shorter of two that begin together; while one that would begin earlier may yet come true, more tokens are awaited.
    A special token that is not shown (`skip_special_tokens`) ends the text too if a stop string is its exact text.
    The text goes on from `prompt_token_ids`: a tokenizer that drops the first space of a text keeps the output's if the prompt shows any.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        stop: Iterable[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ):
        self.stop_reason: str | None = None
        self._tokenizer, self._include_stop = tokenizer, include_stop
        self._hidden = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._stream = text_stream(tokenizer, visible_tail(prompt_token_ids, self._hidden))
        self._matchers = {s: StopMatcher(s) for s in stop}
        self._stops = frozenset(self._matchers)
        self._parts: list[str] = []  # given out
        self._held, self._held_at = "", 0  # not given out yet, and its position in the text
        self._found: tuple[int, str] | None = None  # the best stop so far: (position, string)

    @property
    def text(self) -> str:
        """What was given out so far."""
        return "".join(self._parts)

    def add(self, token_id: int) -> str:
        """Take a token; the text that it makes certain. Nothing once stop_reason is set."""
        if self.stop_reason is not None:
            return ""
        if token_id not in self._hidden:
            return self._take(self._stream.push(token_id))
        if self._stops and (special := self._tokenizer.token_text(token_id)) in self._stops:
            return self._end(*(self._found or (self._held_at + len(self._held), special)))
        return ""

    def finish(self) -> str:
        """The text held back until now; stop_reason may be set by it."""
        if self.stop_reason is not None:
            return ""
        text = self._take(self._stream.flush())
        if self.stop_reason is not None:
            return text
        return text + (self._end(*self._found) if self._found else self._give(len(self._held)))

    def _take(self, piece: str) -> str:
        if not self._stops:
            self._held = piece
            return self._give(len(piece))
        if not piece:
            return ""
        start = self._held_at + len(self._held)
        self._held += piece
        end = start + len(piece)
        for stop, matcher in list(self._matchers.items()):
            behind = matcher.feed(piece)
            if behind is not None:
                match = (start + behind - len(stop), stop)
                self._found = min(self._found or match, match, key=lambda m: (m[0], len(m[1])))
                del self._matchers[stop]
        begun = min((end - m.matched for m in self._matchers.values()), default=end)
        if self._found is None:
            return self._give(begun - self._held_at)
        if begun < self._found[0]:
            return self._give(begun - self._held_at)
        return self._end(*self._found)

    def _give(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._held_at += length
        if text:
            self._parts.append(text)
        return text

    def _end(self, position: int, stop: str) -> str:
        self.stop_reason = stop
        self._held = self._held[: position - self._held_at] + (stop if self._include_stop else "")
        return self._give(len(self._held))


def visible_tail(token_ids: Sequence[int], hidden: frozenset[int]) -> list[int]:
    """The last few tokens that are not hidden, of the last few dozen if there are any there, else of all."""
    near = [t for t in token_ids[-8 * _CONTEXT :] if t not in hidden]
    return (near or [t for t in token_ids if t not in hidden])[-_CONTEXT:]
