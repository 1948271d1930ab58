"""Server-sent events as OpenAI frames them: 'data: JSON', a blank line, and '[DONE]' at the end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from jaxserve.api.errors import ApiError
from jaxserve.api.pieces import Piece

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Writes the events of one stream; the parts that do not change are made once, as a server sends thousands a second."""

    def __init__(self, head: dict[str, Any], chat: bool, include_usage: bool) -> None:
        self._head = "data: " + _dumps(head)[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._chat = chat

    def role(self, index: int) -> bytes:
        """The first event of a chat choice."""
        return self._event(index, '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')

    def piece(self, piece: Piece) -> bytes:
        """The events of one piece: none if it brings nothing; a chat's end is an event of its own."""
        if piece.empty:
            return b""
        logprobs = "null" if piece.logprobs is None else _dumps(piece.logprobs)
        end = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
        if piece.finish_reason is not None:
            end += f',"stop_reason":{_dumps(piece.stop_reason)}'
        if not self._chat:
            return self._event(piece.index, f'"text":{quote(piece.text)},"logprobs":{logprobs},"finish_reason":{end}')
        out = b""
        if piece.text or piece.logprobs is not None:
            out = self._event(piece.index, f'"delta":{{"content":{quote(piece.text)}}},"logprobs":{logprobs},"finish_reason":null')
        if piece.finish_reason is not None:
            out += self._event(piece.index, f'"delta":{{}},"logprobs":null,"finish_reason":{end}')
        return out

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event before the last when usage was asked for."""
        return f'{self._head}],"usage":{_dumps(usage)}}}\n\n'.encode()

    def _event(self, index: int, choice: str) -> bytes:
        return f'{self._head}{{"index":{index},{choice}}}{self._tail}'.encode()


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed; no [DONE] follows it."""
    return f"data: {_dumps(error.body())}\n\n".encode()


class EventStream(StreamingResponse):
    """Sends events and closes their source at the end, whatever the end is: complete, failed, or the client gone."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
