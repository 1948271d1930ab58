"""The server as a process: start, failures of the start, signals."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from live_server import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Process:
    """A server over the fake engine in a process of its own."""

    def __init__(self, model: str, *flags: str, port: int | None = None):
        self.port = port or free_port()
        command = [sys.executable, str(HERE / "fake_engine.py"), model, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)

    def health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0

    def ready(self) -> "Process":
        assert wait_until(lambda: self.health() == 200, 20)
        return self

    def end(self, limit_s: float) -> tuple[int, str]:
        """(exit code, stderr)"""
        _, stderr = self.process.communicate(timeout=limit_s)
        return self.process.returncode, stderr

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def start():
    running: list[Process] = []

    def launch(*args: str, **kw: int) -> Process:
        running.append(Process(*args, **kw))
        return running[-1]

    yield launch
    for process in running:
        process.close()


def test_a_missing_model_is_one_line(start) -> None:
    code, stderr = start("missing").end(20)
    assert code == 1
    assert stderr.splitlines()[-1] == "jaxserve: error: there is no model at 'missing'"
    assert "Traceback" not in stderr


def test_the_log_of_a_start_is_ours_alone(start) -> None:
    process = start("fake").ready()
    process.process.terminate()
    lines = process.end(5)[1].splitlines()
    assert all(" INFO jaxserve: " in line for line in lines)
    words = ("listening on http://127.0.0.1:", "weights 1 GiB", "ready after ", "shutting down: 0 request(s)")
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * len(words)


def test_a_fault_of_the_program_shows_where(start) -> None:
    code, stderr = start("broken").end(20)
    assert code == 1
    assert "Traceback" in stderr


def test_a_port_in_use_is_known_before_loading(start) -> None:
    first = start("fake").ready()
    began = time.monotonic()
    code, stderr = start("slow-30", port=first.port).end(20)
    assert time.monotonic() - began < 15
    assert code == 1
    (line,) = stderr.splitlines()
    assert line.startswith(f"jaxserve: error: cannot listen on 127.0.0.1 port {first.port}: ")


def test_a_wrong_chat_template_file(start) -> None:
    code, stderr = start("fake", "--chat-template", "/does/not/exist.jinja").end(20)
    assert code == 1
    assert "chat_template" in stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_at_once(start, number: signal.Signals) -> None:
    process = start("slow-60")
    assert wait_until(lambda: process.health() == 503, 20)
    process.process.send_signal(number)
    assert process.end(5)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_idle(start, number: signal.Signals) -> None:
    process = start("fake").ready()
    process.process.send_signal(number)
    assert process.end(5)[0] == 0
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", process.port))


def stream(process: Process, tokens: int):
    return process.http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": tokens, "stream": True})


def test_running_streams_end_normally(start) -> None:
    process = start("fake").ready()
    with stream(process, 60) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=process.http.base_url, trust_env=False) as other:
            assert wait_until(lambda: other.get("/health").status_code == 503, 2)
            assert other.post("/v1/completions", json={"prompt": "x"}).json()["error"]["code"] == "shutting_down"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.end(3)[0] == 0


def test_half_sent_bodies_do_not_hold_up_the_end(start) -> None:
    process = start("fake").ready()
    connections = [socket.create_connection(("127.0.0.1", process.port), timeout=10) for _ in range(5)]
    for connection in connections:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": ')
    assert process.health() == 200
    process.process.terminate()
    for connection in connections:
        with connection:
            assert b'"code":"shutting_down"' in b"".join(iter(lambda c=connection: c.recv(65536), b""))
    code, stderr = process.end(2)
    assert code == 0
    assert "Traceback" not in stderr


def test_the_drain_has_a_limit(start) -> None:
    process = start("fake", "--shutdown-timeout", "0.5").ready()
    with stream(process, 5000) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        assert '"code":"shutting_down"' in [line for line in lines if line][-1]
    assert process.end(5)[0] == 0


def test_a_second_signal_ends_at_once(start) -> None:
    process = start("fake").ready()
    with stream(process, 5000) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: process.health() == 503, 2)
        process.process.send_signal(signal.SIGTERM)
        assert process.end(2)[0] == 128 + signal.SIGTERM
