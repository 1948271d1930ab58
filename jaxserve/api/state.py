"""What the routes share: where the server stands, its engine, its names, and how a prompt becomes tokens."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxserve.api.errors import ApiError, bad_request, from_value_error, unavailable
from jaxserve.api.metrics import Metrics
from jaxserve.config import ServerConfig
from jaxserve.request import EngineStopped, QueueFull
from jaxserve.tokenizer import read_chat_template

T = TypeVar("T")
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")  # what a model's generation_config.json may set
_ENGINE_FAILED = "the engine has failed; the server must be restarted, its log has the cause"
_INLINE_CHARS = 4096  # longer texts are tokenised in a thread, so that streams go on meanwhile


class Status(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Prompt:
    """A prompt as the engine takes it; `text` is None when the client sent token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass
class ServerState:
    """One server. `engine` (AsyncEngine) and `llm` (the LLMEngine in it) are set by ready()."""

    config: ServerConfig
    model: str  # as given on the command line
    status: Status = Status.LOADING
    engine: Any = None
    llm: Any = None
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)
    _body_limits: set[asyncio.Timeout] = field(default_factory=set)
    chat_template: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.config.metrics_prefix, self.names[0])
        self.chat_template = read_chat_template(self.config.chat_template)

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.model,)

    def ready(self, engine: Any, llm: Any, compiles: Any) -> None:
        """From now on requests are served; `compiles` is the process's CompileCounter."""
        self.engine, self.llm = engine, llm
        self.generation_defaults = {k: v for k, v in llm.generation_defaults.items() if k in _DEFAULTS and v is not None}
        engine.on_finish = self.metrics.on_finish
        self.metrics.watch(llm, compiles)
        self.status = Status.READY

    def drain(self) -> None:
        """From now on new requests get 503, also those whose bodies are still on their way."""
        self.status = Status.DRAINING
        for limit in self._body_limits:
            limit.reschedule(0)

    @contextlib.asynccontextmanager
    async def reading_body(self) -> AsyncIterator[None]:
        """Around the reading of a request's body: 408 when it takes longer than request_body_timeout, 503 when the server shuts down."""
        timeout_s = self.config.request_body_timeout
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._body_limits.add(limit)
                try:
                    yield
                finally:
                    self._body_limits.discard(limit)
        except TimeoutError:
            self.require_ready()
            message = f"the body did not come within {timeout_s:g} s; send it faster or raise --request-body-timeout"
            raise ApiError(408, message, code="request_timeout") from None

    def health(self) -> tuple[int, str]:
        """HTTP status and a word for it."""
        if self.status is Status.READY and not self.engine.is_healthy:
            return 503, "failed"
        return (200 if self.status is Status.READY else 503), self.status.value

    def require_ready(self) -> None:
        if self.status is Status.LOADING:
            raise unavailable("the model is still loading", "model_loading")
        if self.status is Status.DRAINING:
            raise unavailable("the server is shutting down", "shutting_down")
        if not self.engine.is_healthy:
            raise ApiError(500, _ENGINE_FAILED, code="engine_failed")

    def check_model(self, name: str | None) -> str:
        """The name to answer with; 404 for a model that is not served. No name means the served one."""
        if name is not None and name not in self.names:
            message = f"the model {name!r} is not served here; use one of: {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    def check_capacity(self, num_sequences: int, field: str = "n") -> None:
        """503 if so many new sequences would overfill the queue now, 400 if always; asked before any tokenising."""
        try:
            self.engine.check_capacity(num_sequences)
        except ValueError as e:
            raise bad_request(str(e), field, "invalid_value") from None
        except QueueFull as e:
            raise self.queue_full(e) from None
        except EngineStopped as e:
            raise self.engine_stopped(e) from None

    def engine_stopped(self, error: EngineStopped) -> ApiError:
        """503 while shutting down; 500 if the engine's thread died."""
        if self.status is Status.DRAINING:
            return unavailable(str(error), "shutting_down")
        return ApiError(500, _ENGINE_FAILED, code="engine_failed")

    def queue_full(self, error: QueueFull) -> ApiError:
        self.metrics.rejections.inc()
        return unavailable(str(error) or "the queue is full; send the request again later", "queue_full")

    @property
    def tokenizer(self) -> Any:
        if self.llm.tokenizer is None:
            raise bad_request(
                "this model has no tokenizer; send prompts as token ids and give --tokenizer to serve text", code="no_tokenizer"
            )
        return self.llm.tokenizer

    async def encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        """A completion prompt's tokens; ids are taken as they are."""
        if isinstance(prompt, list):
            return Prompt(prompt)
        tokenizer = self.tokenizer
        ids = await _offload(len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        if not ids:
            raise bad_request("prompt is empty: the text encodes to no token, and the model has no BOS token", "prompt", "empty_prompt")
        return Prompt(ids, prompt)

    async def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, options: dict[str, Any]) -> Prompt:
        """A chat's tokens by the chat template; 400 if there is none or it refuses."""
        tokenizer = self.tokenizer
        reserved = sorted(set(options) & {"messages", "add_generation_prompt", "tools", "chat_template", "tokenize"})
        if reserved:
            raise bad_request(f"chat_template_kwargs must not set {reserved[0]}", "chat_template_kwargs", "invalid_value")
        size = sum(len(m["content"]) for m in messages)
        keywords = {"add_generation_prompt": add_generation_prompt, "chat_template": self.chat_template, **options}
        try:
            ids = await _offload(size, lambda: tokenizer.apply_chat_template(messages, **keywords))
        except ValueError as e:
            raise from_value_error(e, {"chat_template_kwargs"}, "messages") from None
        if not ids:
            raise bad_request("the chat template made an empty prompt", "messages", "empty_prompt")
        return Prompt(ids)


async def _offload(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _INLINE_CHARS else await asyncio.to_thread(work)
