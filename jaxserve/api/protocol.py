"""The request bodies of the API: which fields there are, their types, and the SamplingParams they mean."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from jaxserve.api.errors import ApiError, bad_request, from_value_error
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams

# Fields that OpenAI (or vLLM) documents and this version does not implement, with the values that mean the same as leaving them out.
_SHARED_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
}
_COMPLETION_UNSUPPORTED = {**_SHARED_UNSUPPORTED, "suffix": ("",), "best_of": (1,)}
_CHAT_UNSUPPORTED = {
    **_SHARED_UNSUPPORTED,
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("give a string or a list of strings")
    return value


Strings = Annotated[list[str], BeforeValidator(_as_list)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None


class Body(BaseModel):
    """A request body: types are strict, unknown fields are refused, and null means the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True)
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    model: str | None = None


class GenerationBody(Body):
    """What completions and chat share. `user` and `safety_identifier` only label a request and change nothing."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Strings | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # beyond OpenAI, with vLLM's names and meanings
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_fields(self) -> dict[str, Any]:
        """The given fields that SamplingParams has under the same name."""
        return {k: v for k in _SAMPLING_FIELDS if (v := getattr(self, k, None)) is not None}


_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"logprobs", "prompt_logprobs"}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar = _COMPLETION_UNSUPPORTED
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None  # False: the prompt text already holds its BOS

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of token ids."""
        p = self.prompt
        if isinstance(p, str):
            return [p]
        if isinstance(p, list) and p:
            if all(isinstance(x, str) for x in p):
                return p
            if _ids(p):
                return [p]
            if all(isinstance(x, list) and x and _ids(x) for x in p):
                return p
        message = (
            f"prompt is {_short(p)}; give a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
        )
        raise bad_request(message, "prompt", "invalid_value")

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """SamplingParams with `defaults` (the model's own) for what the request leaves open."""
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens is 0; give at least 1, or echo true to score the prompt", "max_tokens", "invalid_value")
        fields = {"max_tokens": 16, **defaults, **self.sampling_fields(), "logprobs": self.logprobs}
        if self.echo:
            fields["prompt_logprobs"] = self.logprobs
        return _sampling_params(fields)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar = _CHAT_UNSUPPORTED
    messages: list[Any]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """SamplingParams with `defaults` (the model's own) for what the request leaves open; by default output fills the context."""
        fields = {"max_tokens": None, **defaults, **self.sampling_fields()}
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self._max_completion_tokens()
        if fields["max_tokens"] == 0:
            raise bad_request("max_tokens is 0; give at least 1", "max_tokens", "invalid_value")
        if self.top_logprobs is not None:
            self._check_top_logprobs()
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return _sampling_params(fields)

    def _max_completion_tokens(self) -> int | None:
        value = self.max_completion_tokens
        if value is not None and value < 1:
            raise bad_request(f"max_completion_tokens is {value}; give at least 1", "max_completion_tokens", "invalid_value")
        if self.max_tokens is not None and self.max_tokens != value:
            message = f"max_completion_tokens is {value} and max_tokens is {self.max_tokens}; give one of them"
            raise bad_request(message, "max_completion_tokens", "invalid_value")
        return value

    def _check_top_logprobs(self) -> None:
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            message = f"top_logprobs is {self.top_logprobs}; give an integer from 0 to {MAX_LOGPROBS}"
            raise bad_request(message, "top_logprobs", "invalid_value")
        if not self.logprobs:
            raise bad_request("top_logprobs needs logprobs true", "top_logprobs", "invalid_value")


class TokenizeBody(Body):
    """POST /tokenize: a text or a chat."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


def parse(cls: type[Any], body: dict[str, Any]) -> Any:
    """A `cls` from a JSON object; 400 names the first field that is unknown, not implemented or of the wrong type."""
    for name in [n for n in body if n in cls.UNSUPPORTED]:
        value, neutral = body[name], cls.UNSUPPORTED[name]
        if value is not None and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            message = f"{name} is not supported by this server; leave it out" + (f" or give {json.dumps(neutral[0])}" if neutral else "")
            raise bad_request(message, name, "unsupported_parameter")
    try:
        made = cls.model_validate({k: v for k, v in body.items() if k not in cls.UNSUPPORTED})
    except ValidationError as e:
        raise _from_validation(e) from None
    if getattr(made, "stream_options", None) is not None and not made.stream:
        raise bad_request("stream_options needs stream true", "stream_options", "invalid_value")
    return made


def _from_validation(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return bad_request(f"unknown field {param}; leave it out", param, "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"{param} is missing", param, "missing_required_parameter")
    return bad_request(f"{param} is {_short(first['input'])}; {_lower(first['msg'].removeprefix('Value error, '))}", param, "invalid_type")


def _sampling_params(fields: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except ValueError as e:
        raise from_value_error(e, set(SamplingParams.__dataclass_fields__)) from None


def _ids(values: list[Any]) -> bool:
    return all(type(x) is int for x in values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
