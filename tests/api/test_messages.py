"""Chat messages on their way to the template."""

import pytest
from live_server import Live, error

from jaxserve.api.errors import ApiError
from jaxserve.api.messages import normalise


def one(**message) -> dict:
    return normalise([message])[0]


def history(arguments: object) -> list[dict]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "B"},
    ]


def test_text_parts_are_joined_by_newlines() -> None:
    part = {"type": "text", "text": "Hi"}
    assert one(role="user", content=[part]) == one(role="user", content="Hi")
    assert one(role="user", content=[part, {"type": "text", "text": "there"}])["content"] == "Hi\nthere"


def test_developer_is_system() -> None:
    assert one(role="developer", content="x") == {"role": "system", "content": "x"}


def test_null_content_of_the_assistant_is_empty() -> None:
    assert normalise(history("{}"))[1]["content"] == ""
    assert one(role="assistant", content=None)["content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"city":"Oslo"}', {"city": "Oslo"}), ("", {}), ("null", {}), ("{}", {}), (None, {}), ({"a": 1}, {"a": 1})],
)
def test_arguments_become_a_mapping(arguments: object, expected: dict) -> None:
    assert normalise(history(arguments))[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": expected}


@pytest.mark.parametrize("arguments", ["[1]", '"x"', "{bad", "1", 5, "[" * 100_000], ids=lambda a: str(a)[:8])
def test_other_arguments_are_refused(arguments: object) -> None:
    with pytest.raises(ApiError) as caught:
        normalise(history(arguments))
    assert "messages[1].tool_calls[0]" in caught.value.message
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


BAD = [
    ("text", "messages[0]"),
    ({}, "messages[0].role"),
    ({"role": "robot", "content": "x"}, "messages[0].role"),
    ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "extra": 1}]}, "messages[0].content[0].extra"),
    ({"role": "user", "content": "x", "extra": 1}, "messages[0].extra"),
    ({"role": "user", "content": "x", "tool_calls": []}, "messages[0].tool_calls"),
    ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ({"role": "assistant", "content": "", "tool_calls": "x"}, "messages[0].tool_calls"),
    ({"role": "assistant", "content": "", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0]"),
    ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}, "messages[0].tool_calls[0].function.name"),
]


@pytest.mark.parametrize(("message", "param"), BAD, ids=str)
def test_wrong_messages_are_refused_by_place(message: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        normalise([message])
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.removesuffix(".type") in caught.value.message


def test_the_part_type_is_named(live: Live) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert "image_url" in error(live.chat([{"role": "user", "content": [image]}]))["message"]


def test_an_answer_may_be_sent_back_as_it_came(live: Live) -> None:
    answer = live.chat(max_tokens=3).json()["choices"][0]["message"]
    nulls = {"audio": None, "function_call": None, "tool_calls": None, "annotations": None}
    assert live.chat([{"role": "user", "content": "Hi"}, {**answer, **nulls}, {"role": "user", "content": "More"}], max_tokens=1).is_success


def test_the_templates_refusal_is_a_400(live: Live) -> None:
    for stream in (False, True):
        found = error(live.chat("refuse", stream=stream))
        assert "NOSYS" in found["message"]
        assert found["param"] == "messages"


def test_the_prompt_is_the_rendered_template(live: Live) -> None:
    live.chat(history('{"city":"Oslo"}'), max_tokens=1)
    assert bytes(live.engine.seen[-1][0][1:]).decode() == "[user]A[assistant]!look([('city', 'Oslo')])[tool]B[assistant]"
    live.chat("Hi", max_tokens=1, add_generation_prompt=False)
    assert bytes(live.engine.seen[-1][0][1:]).decode() == "[user]Hi"
