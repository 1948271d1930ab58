"""A live server over the fake engine, and what the tests ask of it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import uvicorn
from fake_engine import Compiles, FakeEngine

from jaxserve.api.app import create_app
from jaxserve.api.serve import bind
from jaxserve.api.state import ServerState
from jaxserve.config import ServerConfig


class Live:
    """A server in a thread: `engine` is its FakeEngine, `http` an httpx client."""

    def __init__(self, engine: FakeEngine | None = None, ready: bool = True, **options):
        self.engine = engine or FakeEngine()
        self.state = ServerState(ServerConfig(**options), "fake-model")
        if ready:
            self.state.ready(self.engine, self.engine.llm, Compiles())
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(create_app(self.state), lifespan="off", log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        self.http = httpx.Client(base_url=self.base, timeout=30, trust_env=False)

    def post(self, path: str, **body):
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "Hi", **body):
        return self.post("/v1/completions", prompt=prompt, **body)

    def chat(self, content: Any = "Hi", **body):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", messages=messages, **body)

    def events(self, path: str, **body) -> list[dict]:
        """The parsed events of a stream, after a check of the framing."""
        reply = self.http.post(path, json={**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        blocks = reply.content.split(b"\n\n")
        assert blocks.pop() == b""
        assert all(b.startswith(b"data: ") and b"\n" not in b for b in blocks)
        assert blocks.pop() == b"data: [DONE]"
        return [strict(b[6:]) for b in blocks]

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def close(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join(10)


def strict(data: bytes | str):
    """JSON without NaN and Infinity."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(data, parse_constant=refuse)


def error(reply: httpx.Response, status: int = 400) -> dict:
    """The error object of a refusal, after a check of its form."""
    assert reply.status_code == status, reply.text
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return body


def wait_until(check, limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
