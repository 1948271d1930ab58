"""Whole answers and streams: shapes, indices, usage, echo, log-probabilities."""

import openai
import pytest
from live_server import Live, error, strict

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES = pytest.mark.parametrize(
    ("path", "ask"), [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})], ids=["completions", "chat"]
)


def choices(events: list[dict], index: int = 0) -> list[dict]:
    return [c for e in events for c in e["choices"] if c["index"] == index]


def text(events: list[dict], index: int = 0) -> str:
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices(events, index))


def test_completion(live: Live) -> None:
    body = live.complete(max_tokens=3).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "fake-model",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    }


def test_chat(live: Live) -> None:
    body = live.chat(max_completion_tokens=3).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"


def test_default_lengths(live: Live) -> None:
    assert live.complete().json()["usage"]["completion_tokens"] == 16
    assert live.complete(max_tokens=None).json()["usage"]["completion_tokens"] == 16
    live.chat(max_tokens=1)
    assert live.engine.seen[-1][1].max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("Hi", [[256, 72, 105]]), (["H", "i"], [[256, 72], [256, 105]]), ([72, 105], [[72, 105]]), ([[72], [105]], [[72], [105]])],
    ids=str,
)
def test_prompt_forms(live: Live, prompt: object, ids: list) -> None:
    live.engine.seen.clear()
    body = live.complete(prompt, max_tokens=1).json()
    assert [seen for seen, _ in live.engine.seen] == ids
    assert [c["index"] for c in body["choices"]] == list(range(len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_no_special_tokens(live: Live) -> None:
    live.complete("Hi", max_tokens=1, add_special_tokens=False)
    assert live.engine.seen[-1][0] == [72, 105]


def test_several_prompts_and_sequences(live: Live) -> None:
    body = live.complete(["x", "y"], n=2, max_tokens=2, echo=True).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "xab"), (1, "xbc"), (2, "yab"), (3, "ybc")]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
    events = live.events(COMPLETIONS, prompt=["x", "y"], n=2, max_tokens=2, echo=True)
    assert [text(events, i) for i in range(4)] == ["xab", "xbc", "yab", "ybc"]


@ROUTES
def test_stream_equals_whole(live: Live, path: str, ask: dict) -> None:
    body = {**ask, "n": 2, "max_tokens": 6}
    whole, events = live.post(path, **body).json(), live.events(path, **body)
    for key in ("id", "created", "model", "object"):
        assert len({e[key] for e in events}) == 1
    for index, choice in enumerate(whole["choices"]):
        assert text(events, index) == (choice["text"] if "text" in choice else choice["message"]["content"])
        reasons = [c["finish_reason"] for c in choices(events, index)]
        assert [r for r in reasons if r is not None] == [choice["finish_reason"]]
        assert reasons[-1] == choice["finish_reason"]
    assert not any("usage" in e for e in events)


def test_chat_stream_is_framed_as_openai_does(live: Live) -> None:
    events = live.events(CHAT, messages=MESSAGES, max_tokens=2)
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert [c["delta"] for c in choices(events)] == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]


def test_role_comes_first_for_each_index(live: Live) -> None:
    events = live.events(CHAT, messages=MESSAGES, max_tokens=2, n=3)
    assert [choices(events, i)[0]["delta"]["role"] for i in range(3)] == ["assistant"] * 3


@ROUTES
def test_usage_only_when_asked(live: Live, path: str, ask: dict) -> None:
    whole = live.post(path, **ask, max_tokens=3).json()["usage"]
    *rest, last = live.events(path, **ask, max_tokens=3, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], whole)
    assert all(e["usage"] is None and e["choices"] for e in rest)
    for options in ({}, {"include_usage": False}, None):
        assert not any(e.get("usage") or not e["choices"] for e in live.events(path, **ask, max_tokens=3, stream_options=options))


def test_the_openai_client(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.base}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "fake-model"
    done = client.completions.create(model="fake-model", prompt="Hi", max_tokens=3, logprobs=1, echo=True)
    assert done.choices[0].text == "Hiabc"
    chunks = list(
        client.chat.completions.create(
            model="fake-model", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logprobs=True, stream=True
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "abcd"
    assert [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []] == list("abcd")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake-model", prompt="Hi", n=0)
    assert (caught.value.param, caught.value.status_code) == ("n", 400)
    client.close()


def test_completion_logprobs_are_off_by_default(live: Live) -> None:
    for fields in ({}, {"logprobs": None}):
        assert live.complete(max_tokens=2, **fields).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("count", "top"), [(0, {"a": -0.5}), (2, {"a": -0.5, "A": -1.0}), (5, {"a": -0.5, "A": -1.0})])
def test_completion_logprobs(live: Live, count: int, top: dict) -> None:
    found = strict(live.complete(max_tokens=2, logprobs=count).content)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"]
    assert found["token_logprobs"] == [-0.5, -0.5]
    assert found["top_logprobs"][0] == top  # the impossible 'B' is left out
    assert found["text_offset"] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(live: Live, stream: bool) -> None:
    body = {"prompt": "h\u00e9", "max_tokens": 2, "echo": True, "logprobs": 1}
    if stream:
        found = [c["logprobs"] for c in choices(live.events(COMPLETIONS, **body))]
        merged = {k: [x for part in found for x in part[k]] for k in found[0]}
    else:
        choice = live.complete(**body).json()["choices"][0]
        assert choice["text"] == "h\u00e9ab"
        merged = choice["logprobs"]
    assert merged["tokens"] == ["<bos>", "h", "bytes:\\xc3", "bytes:\\xa9", "a", "b"]
    assert merged["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert merged["token_logprobs"] == [None] + [-0.5] * 5
    assert merged["top_logprobs"][0] is None
    assert merged["top_logprobs"][2] == {"bytes:\\xc3": -0.5}


def test_scoring_a_prompt(live: Live) -> None:
    body = live.complete([72, 105], max_tokens=0, echo=True, logprobs=1).json()
    assert body["choices"][0]["text"] == "Hi"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "count"), [({}, 0), ({"top_logprobs": None}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)], ids=str
)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(live: Live, fields: dict, count: int, stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, **fields}
    if stream:
        content = [e for c in choices(live.events(CHAT, **body)) for e in (c["logprobs"] or {}).get("content", [])]
    else:
        content = strict(live.post(CHAT, **body).content)["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert [len(e["top_logprobs"]) for e in content] == [count, count]


def test_models(live: Live, launch) -> None:
    named = launch(served_model_name=("org/one", "two"))
    assert [m["id"] for m in named.http.get("/v1/models").json()["data"]] == ["org/one", "two"]
    assert named.http.get("/v1/models/org/one").json()["max_model_len"] == 2048
    assert error(named.http.get("/v1/models/three"), 404)["code"] == "model_not_found"
    assert named.complete(model="two", max_tokens=1).json()["model"] == "two"
    assert named.complete(max_tokens=1).json()["model"] == "org/one"


def test_tokenize_and_back(live: Live) -> None:
    assert live.post("/tokenize", prompt="Hi").json() == {"tokens": [256, 72, 105], "count": 3, "max_model_len": 2048}
    assert live.post("/tokenize", prompt="Hi", add_special_tokens=False).json()["tokens"] == [72, 105]
    assert live.post("/tokenize", messages=MESSAGES).json()["count"] == len("[user]Hi[assistant]") + 1
    assert live.post("/detokenize", tokens=[256, 72, 105]).json() == {"prompt": "<bos>Hi"}
    assert error(live.post("/detokenize", tokens=[258]))["param"] == "tokens"
    assert error(live.post("/tokenize"))["param"] == "prompt"
    assert error(live.post("/tokenize", prompt="Hi", messages=MESSAGES))["param"] == "prompt"
    assert error(live.post("/tokenize", prompt="Hi", add_generation_prompt=True))["param"] == "add_generation_prompt"
    assert error(live.post("/tokenize", prompt="Hi", other=1))["param"] == "other"


def test_version(live: Live) -> None:
    assert live.http.get("/version").json()["version"]
