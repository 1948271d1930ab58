"""What is refused, with which words; nothing is ignored in silence."""

import json

import pytest
from live_server import Live, error

from jaxserve.api.protocol import ChatBody, CompletionBody

BAD_SHARED = [  # (fields, the field that the error names)
    ({"unknown_field": 1}, "unknown_field"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 5_000_000}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": "x"}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"user": 5}, "user"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"logit_bias": "text"}, "logit_bias"),
]
BAD_CHAT = [
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"echo": True}, "echo"),
]
BAD_COMPLETION = [
    ({"logprobs": 1_000_000_000}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"messages": []}, "messages"),
    ({"tools": []}, "tools"),
]
NEUTRAL_SHARED = [
    {"presence_penalty": 0},
    {"frequency_penalty": 0.0},
    {"logit_bias": {}},
    {"logit_bias": None},
    {"temperature": None, "top_p": None, "stop": None, "n": None, "seed": None, "stream": None, "stream_options": None},
    {"user": "someone"},
    {"top_k": -1},
    {"top_k": 0, "min_p": 0, "top_p": 1},
    {"stop": "zz"},
    {"stop": ["zz", "yy"]},
    {"stop": []},
]
NEUTRAL_CHAT = [
    {"tools": None},
    {"tools": [], "tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"logprobs": False, "top_logprobs": None},
    {"parallel_tool_calls": True, "store": False, "service_tier": "auto", "modalities": ["text"], "metadata": None},
    {"max_completion_tokens": 3, "max_tokens": 3},
]


@pytest.mark.parametrize(("fields", "param"), BAD_SHARED, ids=str)
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_wrong_values_are_refused_by_name(live: Live, route: str, fields: dict, param: str) -> None:
    found = error(getattr(live, route)(**{"max_tokens": 3, **fields}))
    assert found["param"] == param
    assert param in found["message"]
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=str)
def test_wrong_chat_values(live: Live, fields: dict, param: str) -> None:
    found = error(live.chat(**fields))
    assert found["param"] == param
    assert param in found["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=str)
def test_wrong_completion_values(live: Live, fields: dict, param: str) -> None:
    found = error(live.complete(**fields))
    assert found["param"] == param
    assert param in found["message"]


@pytest.mark.parametrize("fields", NEUTRAL_SHARED, ids=str)
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_neutral_values_are_accepted(live: Live, route: str, fields: dict) -> None:
    assert getattr(live, route)(**{"max_tokens": 3, **fields}).status_code == 200


@pytest.mark.parametrize("fields", NEUTRAL_CHAT, ids=str)
def test_neutral_chat_values_are_accepted(live: Live, fields: dict) -> None:
    assert live.chat(**{"max_tokens": 3, **fields}).status_code == 200


def test_all_settings_reach_the_engine(live: Live) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "n": 2, "max_tokens": 4, "min_tokens": 2,
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    for route, logprobs in ((live.complete, {"logprobs": 3}), (live.chat, {"logprobs": True, "top_logprobs": 3})):
        assert route(**given, stop=["x"], stop_token_ids=[9], **logprobs).status_code == 200
        params = live.engine.seen[-1][1]
        assert {k: getattr(params, k) for k in given} == given
        assert (params.stop, params.stop_token_ids, params.logprobs) == (("x",), (9,), 3)


def test_the_range_is_in_the_message(live: Live) -> None:
    assert "from 1 to 128" in error(live.complete(n=0))["message"]
    assert "0 to 20" in error(live.chat(logprobs=True, top_logprobs=99))["message"]


PROMPTS = [None, [], [[]], [[1], []], ["a", 1], [1, "a"], [1.5], [True], {}, 5, [[1, "a"]], ["a", [1]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_wrong_prompts(live: Live, prompt: object) -> None:
    assert error(live.complete(prompt))["param"] == "prompt"


def test_missing_prompt_and_messages(live: Live) -> None:
    assert error(live.post("/v1/completions"))["param"] == "prompt"
    assert error(live.post("/v1/chat/completions"))["param"] == "messages"
    assert error(live.chat([]))["param"] == "messages"


@pytest.mark.parametrize("prompt", [[258], [-1], [[1], [258]]], ids=str)
def test_ids_outside_the_vocabulary(live: Live, prompt: list) -> None:
    found = error(live.complete(prompt))
    assert found["param"] == "prompt"
    assert "0 to 257" in found["message"]


def test_empty_text_needs_a_bos(live: Live, launch) -> None:
    from fake_engine import FakeEngine

    assert live.complete("").json()["usage"]["prompt_tokens"] == 1
    bare = launch(engine=FakeEngine(bos=False))
    assert "empty" in error(bare.complete(""))["message"]
    assert error(bare.complete(["ok", ""]))["param"] == "prompt"
    assert not bare.engine.seen


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_for_the_model(live: Live, route: str, stream: bool) -> None:
    found = error(getattr(live, route)("x" * 3000, max_tokens=10, stream=stream))
    assert found["code"] == "context_length_exceeded"
    assert "2048" in found["message"]


def test_unknown_model_route_and_method(live: Live) -> None:
    assert error(live.complete(model="other"), 404)["code"] == "model_not_found"
    assert live.complete(model="fake-model", max_tokens=1).status_code == 200
    assert error(live.post("/v1/nope"), 404)["code"] == "not_found"
    found = live.http.get("/v1/completions")
    assert error(found, 405)["code"] == "method_not_allowed"
    assert found.headers["allow"] == "POST"


BODIES = [
    b"", b"{", b"[]", b'"text"', b"null", b'{"prompt": "a",}', b'\xff\xfe{"prompt": "a"}', b'{"prompt": "\xff"}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "\\uDC00x"}', b'{"a":' * 100_000, b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:40]))
def test_bodies_that_are_not_json_objects(live: Live, body: bytes) -> None:
    assert error(live.http.post("/v1/completions", content=body))["code"] == "invalid_json"
    assert live.http.get("/health").status_code == 200


def test_infinity_by_a_huge_number(live: Live) -> None:
    reply = live.http.post("/v1/completions", content=b'{"prompt": "a", "temperature": 1e999}')
    assert error(reply)["param"] == "temperature"


def test_whole_surrogate_pairs_are_fine(live: Live) -> None:
    reply = live.http.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1, "echo": true}')
    assert reply.json()["choices"][0]["text"] == "\U0001f600a"


def test_long_bodies(launch) -> None:
    small = launch(max_request_bytes=1000)
    assert small.complete("x" * 900, max_tokens=1).status_code == 200
    found = error(small.complete("x" * 1000, max_tokens=1), 413)
    assert "1000 bytes" in found["message"]
    reply = small.http.post("/v1/completions", content=iter([b'{"prompt": "'] + [b"x" * 100] * 20))
    assert error(reply, 413)["code"] == "request_too_large"


def test_the_body_is_read_without_a_content_type(live: Live) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    assert live.http.post("/v1/completions", content=body, headers={"Content-Type": "text/plain"}).status_code == 200


TABLES = [("complete", CompletionBody.UNSUPPORTED), ("chat", ChatBody.UNSUPPORTED)]


@pytest.mark.parametrize(("route", "field", "neutral"), [(r, f, n) for r, table in TABLES for f, n in table.items()], ids=str)
def test_fields_without_effect_here(live: Live, route: str, field: str, neutral: tuple) -> None:
    """A field that is not implemented is accepted with a value that changes nothing, and else refused by name."""
    for value in (None, *neutral):
        assert getattr(live, route)(max_tokens=1, **{field: value}).status_code == 200
    for value in ({"x": 1}, ["x"], "x", 0.25, 7):
        found = error(getattr(live, route)(max_tokens=1, **{field: value}))
        assert found["param"] == field
        assert found["code"] == "unsupported_parameter"
