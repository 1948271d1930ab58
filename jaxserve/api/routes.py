"""The routes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import jaxserve
from jaxserve.api.body import read_json
from jaxserve.api.errors import ApiError, bad_request, guarded, internal_error
from jaxserve.api.generation import generate, until_disconnect
from jaxserve.api.messages import normalise
from jaxserve.api.pieces import ChatPieces, CompletionPieces, Piece, join
from jaxserve.api.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody, parse
from jaxserve.api.state import Prompt, ServerState
from jaxserve.api.streaming import DONE, ChunkWriter, EventStream, error_event
from jaxserve.sampling_params import SamplingParams

log = logging.getLogger(__name__)


def _state(request: Request) -> ServerState:
    return request.app.state.server


async def _body(request: Request, kind: type[Any]) -> Any:
    state = _state(request)
    state.require_ready()
    async with state.reading_body():
        found = await read_json(request, state.config.max_request_bytes)
    body = parse(kind, found)
    state.require_ready()  # it may have begun to shut down while the body came
    return body


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    state, arrival_s = _state(request), time.monotonic()
    body: CompletionBody = await _body(request, CompletionBody)
    model = state.check_model(body.model)
    params, raw = body.sampling_params(state.generation_defaults), body.prompts()
    state.check_capacity(len(raw) * params.n, "n" if params.n > 1 else "prompt")
    prompts = [await state.encode(p, body.add_special_tokens is not False) for p in raw]
    pieces = CompletionPieces(state.llm.tokenizer, params, prompts, bool(body.echo))
    return await _answer(request, body, model, prompts, params, pieces, arrival_s)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    state, arrival_s = _state(request), time.monotonic()
    body: ChatBody = await _body(request, ChatBody)
    model = state.check_model(body.model)
    params, messages = body.sampling_params(state.generation_defaults), normalise(body.messages)
    state.check_capacity(params.n)
    prompt = await state.render(messages, body.add_generation_prompt is not False, body.chat_template_kwargs or {})
    return await _answer(request, body, model, [prompt], params, ChatPieces(state.tokenizer, params), arrival_s)


async def _answer(
    request: Request,
    body: GenerationBody,
    model: str,
    prompts: list[Prompt],
    params: SamplingParams,
    pieces: ChatPieces | CompletionPieces,
    arrival_s: float,
) -> Response:
    chat = isinstance(pieces, ChatPieces)
    request_id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
    name = ("chat.completion.chunk" if body.stream else "chat.completion") if chat else "text_completion"
    head = {"id": request_id, "object": name, "created": int(time.time()), "model": model}
    outputs = generate(_state(request), prompts, params, request_id, arrival_s, "messages" if chat else "prompt")
    source = _pieces(outputs, pieces)
    if not body.stream:
        return JSONResponse(await until_disconnect(request, _collect(source, head, prompts, chat)))
    first = await until_disconnect(request, anext(source))
    writer = ChunkWriter(head, chat, body.include_usage)
    return EventStream(_events(writer, first, source, prompts, params.n if chat else 0, body.include_usage))


async def _pieces(outputs: Any, pieces: ChatPieces | CompletionPieces) -> AsyncGenerator[list[Piece], None]:
    async with aclosing(outputs):
        async for prompt_index, output in outputs:
            yield list(pieces.make(prompt_index, output))


async def _collect(source: Any, head: dict[str, Any], prompts: list[Prompt], chat: bool) -> dict[str, Any]:
    found: dict[int, list[Piece]] = {}
    async with aclosing(source):
        async for new in source:
            for piece in new:
                found.setdefault(piece.index, []).append(piece)
    whole = [join(found[i]) for i in sorted(found)]
    return {**head, "choices": [_choice(p, chat) for p in whole], "usage": _usage(prompts, sum(p.num_tokens for p in whole))}


def _choice(piece: Piece, chat: bool) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": piece.text, "refusal": None}} if chat else {"text": piece.text}
    end = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
    return {"index": piece.index, **text, "logprobs": piece.logprobs, **end}


def _usage(prompts: list[Prompt], num_output: int) -> dict[str, int]:
    num_prompt = sum(len(p.token_ids) for p in prompts)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


async def _events(
    writer: ChunkWriter, first: list[Piece], source: Any, prompts: list[Prompt], num_roles: int, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    num_output, new = 0, first
    async with aclosing(source):
        yield b"".join(writer.role(i) for i in range(num_roles))
        try:
            while True:
                num_output += sum(p.num_tokens for p in new)
                if data := b"".join([writer.piece(p) for p in new]):
                    yield data
                new = await anext(source)
        except StopAsyncIteration:
            end = writer.usage(_usage(prompts, num_output)) if include_usage else b""
            yield end + DONE
        except ApiError as e:
            yield error_event(e)
        except Exception:
            log.exception("a stream failed")
            yield error_event(internal_error())


async def models(request: Request) -> Response:
    """GET /v1/models."""
    state = _state(request)
    state.require_ready()
    return JSONResponse({"object": "list", "data": [_model(state, name) for name in state.names]})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME; a name may hold slashes."""
    state = _state(request)
    state.require_ready()
    return JSONResponse(_model(state, state.check_model(request.path_params["name"])))


def _model(state: ServerState, name: str) -> dict[str, Any]:
    limit = state.llm.config.scheduler.max_model_len
    return {"id": name, "object": "model", "created": state.created, "owned_by": "jaxserve", "max_model_len": limit}


async def tokenize(request: Request) -> Response:
    """POST /tokenize: the ids that a completion prompt or a chat becomes."""
    state = _state(request)
    body: TokenizeBody = await _body(request, TokenizeBody)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt", "invalid_value")
    if body.messages is not None:
        if body.add_special_tokens:
            raise bad_request("add_special_tokens goes with prompt; a chat template writes its own", "add_special_tokens", "invalid_value")
        messages = normalise(body.messages)
        ids = (await state.render(messages, body.add_generation_prompt is not False, body.chat_template_kwargs or {})).token_ids
    else:
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise bad_request(f"{name} goes with messages", name, "invalid_value")
        tokenizer, text, special = state.tokenizer, body.prompt, body.add_special_tokens is not False
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": state.llm.config.scheduler.max_model_len})


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    state = _state(request)
    body: DetokenizeBody = await _body(request, DetokenizeBody)
    state.check_model(body.model)
    tokenizer, size = state.tokenizer, state.llm.model_config.vocab_size
    bad = next((t for t in body.tokens if not 0 <= t < size), None)
    if bad is not None:
        raise bad_request(f"tokens holds {bad}; give ids from 0 to {size - 1}", "tokens", "invalid_value")
    return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)})


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are served, else 503; needs no key."""
    code, word = _state(request).health()
    return JSONResponse({"status": word}, code)


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(_state(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def version(request: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": jaxserve.__version__})


# Handlers read and check bodies themselves, for OpenAI's error envelope; the models are here for /docs.
_ENDPOINTS: dict[str, tuple[Callable[[Request], Awaitable[Response]], type[BaseModel] | None]] = {
    "/v1/completions": (completions, CompletionBody),
    "/v1/chat/completions": (chat_completions, ChatBody),
    "/v1/models": (models, None),
    "/v1/models/{name:path}": (model, None),
    "/tokenize": (tokenize, TokenizeBody),
    "/detokenize": (detokenize, DetokenizeBody),
    "/health": (health, None),
    "/metrics": (metrics, None),
    "/version": (version, None),
}


def add_routes(app: FastAPI) -> None:
    """All routes of the API; those with a body are POST, the others GET."""
    for path, (endpoint, body) in _ENDPOINTS.items():
        described = None
        if body is not None:
            schema = body.model_json_schema(
                ref_template=f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
            )
            described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        methods = ["GET"] if body is None else ["POST"]
        app.add_api_route(path, guarded(endpoint), methods=methods, response_model=None, openapi_extra=described)
