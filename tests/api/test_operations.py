"""Disconnects, a full queue, failures of the engine, readiness, the key, CORS, metrics."""

import http.client
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import Live, error, wait_until

LONG = {"prompt": "Hi", "max_tokens": 1500}
KEY, ORIGIN = "sk-test-1", "http://app.example"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def slow(launch) -> Live:
    return launch(engine=FakeEngine(step_s=0.02))


class OpenStream:
    """A streamed request whose first event has come."""

    def __init__(self, live: Live, **body) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
        self._connection.request("POST", "/v1/completions", json.dumps({**LONG, **body, "stream": True}))
        self.response = self._connection.getresponse()
        assert self.response.read1(6) == b"data: "

    def close(self) -> None:
        self._connection.close()
        self.response.close()


@pytest.mark.parametrize("body", [{}, {"n": 4}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "n": 2}], ids=str)
def test_a_closed_stream_is_ended(slow: Live, body: dict) -> None:
    connection = OpenStream(slow, **body)
    assert slow.engine.num_unfinished == body.get("n", 1) * (len(body["prompt"]) if "prompt" in body else 1)
    connection.close()
    assert wait_until(lambda: slow.engine.num_unfinished == 0, 2)


@pytest.mark.parametrize("body", [{}, {"prompt": ["a", "b"], "n": 2}], ids=str)
def test_a_whole_answer_is_ended_when_its_client_leaves(slow: Live, body: dict) -> None:
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post("/v1/completions", json={**LONG, **body}, timeout=0.3)
    assert wait_until(lambda: slow.engine.num_unfinished == 0, 2)


def test_a_stream_closed_before_its_first_token_is_ended(launch) -> None:
    late = launch(engine=FakeEngine(step_s=5))
    with socket.create_connection(("127.0.0.1", late.port)) as raw:
        body = json.dumps({**LONG, "stream": True}).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert wait_until(lambda: late.engine.num_unfinished == 1)
    assert wait_until(lambda: late.engine.num_unfinished == 0, 2)


def test_a_body_cut_short_does_no_harm(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert live.complete(max_tokens=1).status_code == 200


def half_body(port: int, headers: bytes = b"") -> socket.socket:
    """A connection that has sent the beginning of a body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b'Content-Length: 500\r\n\r\n{"prompt": ')
    return connection


def test_a_body_that_does_not_come_ends_in_a_408(launch) -> None:
    live = launch(request_body_timeout=0.3)
    with half_body(live.port) as connection:
        assert live.complete(max_tokens=1).status_code == 200
        reply = b"".join(iter(lambda: connection.recv(65536), b""))  # the server closes
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b'"the body did not come within 0.3 s; send it faster or raise --request-body-timeout"' in reply
    assert b"request_timeout" in reply


def test_a_compressed_body_is_refused(live: Live) -> None:
    reply = live.http.post("/v1/completions", content=b"\x1f\x8b\x08", headers={"Content-Encoding": "gzip"})
    assert error(reply, 415)["message"] == "Content-Encoding is 'gzip'; send the body uncompressed"


def test_a_number_of_many_digits(live: Live) -> None:
    reply = live.http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}")
    assert error(reply)["message"] == "the body is not valid JSON: a number has too many digits"


def test_a_full_queue_is_refused_fast(launch) -> None:
    full = launch(engine=FakeEngine(step_s=0.02, max_queued=2))
    held = [OpenStream(full) for _ in range(2)]
    before = full.metrics()['jaxserve:admission_rejections_total{model_name="fake-model"}']
    began = time.monotonic()
    for stream in (False, True):
        reply = full.complete("x" * 1_000_000, stream=stream)
        assert error(reply, 503)["code"] == "queue_full"
        assert reply.headers["retry-after"] == "1"
    assert time.monotonic() - began < 0.5
    assert full.metrics()['jaxserve:admission_rejections_total{model_name="fake-model"}'] == before + 2
    held.pop().close()
    assert wait_until(lambda: full.engine.num_unfinished == 1)
    assert error(full.complete(n=2, max_tokens=1), 503)["code"] == "queue_full"
    assert error(full.complete(["a", "b"], max_tokens=1), 503)["code"] == "queue_full"
    assert full.complete(max_tokens=1).status_code == 200
    held.pop().close()


def test_a_failing_engine_is_a_500_and_an_error_event(launch, caplog) -> None:
    broken = launch(engine=FakeEngine(step_s=0.05))
    connection = OpenStream(broken)
    broken.engine.failure = RuntimeError("secret detail")
    rest = connection.response.read()
    connection.close()
    assert b"[DONE]" not in rest
    last = json.loads(rest.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last["error"]["code"] == "internal_error"
    for stream in (False, True):
        found = error(broken.complete(max_tokens=1, stream=stream), 500)
        assert found["type"] == "server_error"
        assert "secret" not in found["message"]
    broken.engine.is_healthy = False
    assert broken.http.get("/health").status_code == 503
    assert error(broken.complete(), 500)["code"] == "engine_failed"


def test_loading_is_503_on_everything(launch) -> None:
    loading = launch(ready=False)
    assert loading.http.get("/health").status_code == 503
    for reply in (loading.complete(), loading.chat(), loading.http.get("/v1/models"), loading.post("/tokenize", prompt="x")):
        assert error(reply, 503)["code"] == "model_loading"
        assert "retry-after" in reply.headers
    assert loading.http.get("/metrics").status_code == 200


ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing"),
    ("POST", "/health/"),
]  # fmt: skip
SPELLINGS = [
    "/v1/models/",
    "//v1/models",
    "/V1/models",
    "/v1//models",
    "/v1/../v1/models",
    "/%76%31/models",
    "/health/../v1/models",
    "/health%2f",
]
WRONG = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {KEY}x"},
         {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer \u00e9"}]  # fmt: skip


@pytest.fixture(scope="module")
def guarded():
    server = Live(api_key=KEY, allowed_origins=(ORIGIN,))
    yield server
    server.close()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_key(guarded: Live, method: str, path: str) -> None:
    for headers in WRONG:
        encoded = {k: v.encode() for k, v in headers.items()}
        reply = guarded.http.request(method, path, json={} if method == "POST" else None, headers=encoded)
        assert error(reply, 401)["code"] == "invalid_api_key"
        assert "fake-model" not in reply.text
    assert guarded.http.request(method, path, json={} if method == "POST" else None, headers=AUTH).status_code != 401


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_gets_round_the_key(guarded: Live, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port)  # sends the path as it is
    connection.request("GET", path)
    assert connection.getresponse().status == 401
    connection.close()


def test_health_needs_no_key(guarded: Live) -> None:
    assert guarded.http.get("/health").status_code == 200
    assert guarded.http.get("/v1/models", headers={"Authorization": f"bearer {KEY}"}).status_code == 200


def references(node: object) -> Iterator[str]:
    """Every "$ref" in a JSON document."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from references(child)


def test_the_described_api_is_the_served_one(live: Live) -> None:
    page = live.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text
    described = live.http.get("/openapi.json").json()
    served = {(method, path) for method, path in ROUTES if path.startswith("/v1/c") or path in ("/tokenize", "/v1/models", "/metrics")}
    assert served <= {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"]
    for reference in references(described):
        found = described
        for part in reference.removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/")]
        assert found


def test_preflight(guarded: Live) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    good = guarded.http.options("/v1/chat/completions", headers={"Origin": ORIGIN, **ask})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in good.headers["access-control-allow-methods"]
    assert "authorization" in good.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in guarded.http.options("/v1/models", headers={"Origin": "http://evil.example", **ask}).headers
    refused = guarded.http.post("/v1/completions", json={}, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_the_key_is_in_no_message(guarded: Live, caplog) -> None:
    caplog.set_level("DEBUG")
    guarded.http.get("/v1/models", headers=AUTH)
    guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}x"})
    assert KEY not in caplog.text
    assert KEY not in repr(guarded.state.config)


def label(name: str, **labels: str) -> str:
    pairs = ",".join(f'{k}="{v}"' for k, v in sorted({"model_name": "fake-model", **labels}.items()))
    return f"jaxserve:{name}{{{pairs}}}"


def test_sums_match_usage(live: Live) -> None:
    before = live.metrics()
    first = live.complete("The quick", max_tokens=7).json()["usage"]
    second = live.complete(["a", "b"], n=2, max_tokens=5).json()["usage"]
    third = live.events("/v1/completions", prompt="A", max_tokens=4, stream_options={"include_usage": True})[-1]["usage"]
    error(live.complete(temperature=-1))
    error(live.complete("x" * 3000))
    after = live.metrics()

    def grown(name: str, **labels: str) -> float:
        return after[label(name, **labels)] - before[label(name, **labels)]

    usages = (first, second, third)
    assert grown("generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
    assert grown("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert grown("request_success_total", finished_reason="length") == 6
    assert grown("request_success_total", finished_reason="abort") == 0
    assert grown("e2e_request_latency_seconds_count") == 6
    assert grown("time_to_first_token_seconds_count") == 4
    assert grown("inter_token_latency_seconds_count") == 6 + 4 * 4 + 3
    assert set(after) == set(before)


def test_aborts_are_counted(slow: Live) -> None:
    held = [OpenStream(slow, n=n) for n in (1, 2)]
    for connection in held:
        connection.close()
    assert wait_until(lambda: slow.metrics()[label("request_success_total", finished_reason="abort")] == 3, 2)
    assert slow.metrics()[label("e2e_request_latency_seconds_count")] == 0


def test_metric_names_and_labels(launch) -> None:
    """Dashboards hold on to these."""
    reply = launch().http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    kinds = dict(line.split()[2:4] for line in reply.text.splitlines() if line.startswith("# TYPE"))
    assert {name.removeprefix("jaxserve:"): kind for name, kind in kinds.items() if not name.endswith("_created")} == {
        "admission_rejections_total": "counter", "compile_seconds_total": "counter", "compiles_after_ready_total": "counter",
        "compiles_total": "counter", "device_wait_seconds_total": "counter", "e2e_request_latency_seconds": "histogram",
        "engine_steps_total": "counter", "generation_tokens_total": "counter", "host_seconds_total": "counter",
        "inter_token_latency_seconds": "histogram", "kv_cache_usage_perc": "gauge", "memory_bytes": "gauge",
        "num_preemptions_total": "counter", "num_requests_running": "gauge", "num_requests_waiting": "gauge",
        "padded_tokens_total": "counter", "pages": "gauge", "prompt_tokens_total": "counter", "request_queue_time_seconds": "histogram",
        "request_success_total": "counter", "scheduled_tokens_total": "counter", "time_to_first_token_seconds": "histogram",
    }  # fmt: skip


def test_the_prefix_of_metrics(launch) -> None:
    text = launch(metrics_prefix="mine_").http.get("/metrics").text
    assert "mine_compiles_total" in text
    assert "jaxserve:" not in text
