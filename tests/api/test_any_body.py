"""Whatever JSON comes, the answer is a result or a refusal in the envelope, never a fault of the server."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import Live, error, strict

from jaxserve.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

NUMBERS = st.integers(-3, 6) | st.sampled_from([2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e-320, 1e308])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | st.sampled_from(["user", "text", "system", "fake-model", "role", "{}"])
KEYS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "arguments", "name", "include_usage", "a"])
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=4), max_leaves=8)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]) | VALUES, "content": VALUES}), max_size=3)


def bodies(kind: type, **likely: st.SearchStrategy) -> st.SearchStrategy[dict]:
    """Bodies with a few of the fields of `kind`, of any value, and the likely ones."""
    names = st.sampled_from([*kind.model_fields, *kind.UNSUPPORTED, "other"])
    some = st.dictionaries(names, VALUES, max_size=2)
    return st.builds(lambda extra, base: {"max_tokens": 2, **base, **extra}, some, st.fixed_dictionaries(likely))


CASES = st.one_of(
    st.tuples(st.just("/v1/completions"), bodies(CompletionBody, prompt=st.just("Hi") | VALUES)),
    st.tuples(st.just("/v1/chat/completions"), bodies(ChatBody, messages=MESSAGES)),
    st.tuples(st.just("/tokenize"), bodies(TokenizeBody, prompt=VALUES).map(lambda b: {k: v for k, v in b.items() if k != "max_tokens"})),
    st.tuples(
        st.just("/detokenize"), bodies(DetokenizeBody, tokens=VALUES).map(lambda b: {k: v for k, v in b.items() if k != "max_tokens"})
    ),
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES)
def test_no_body_is_a_fault(live: Live, case: tuple[str, dict]) -> None:
    path, body = case
    reply = live.http.post(path, json=body)
    if reply.status_code == 200 and not body.get("stream"):
        assert strict(reply.content)
    elif reply.status_code != 200:
        assert error(reply, 404 if reply.status_code == 404 else 400)["param"] is None or reply.json()["error"]["param"]
