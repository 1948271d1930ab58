"""Soak a server: thousands of mixed requests over HTTP, then proof that nothing leaked. Prints a JSON summary; exit code 1 on any fault.

Starts `jaxserve serve MODEL` with limits so small that requests wait and are preempted, and sends it completions and chats of every
kind from several clients at once: streams and whole answers, greedy and random, with logprobs, echo, several choices and prompts,
requests that must be refused, and clients that leave before the first byte or in the middle of a stream. Afterwards every answer
must have been as expected, nothing may run or wait, all pages must be free, nothing may have compiled, some prompts must give the same
text as before, and SIGTERM must end the server with exit code 0. Needs httpx (the extra `test`).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from soak_requests import (
    CONTROLS,
    MAX_MODEL_LEN,
    REFUSED,
    TEXT,
    Body,
    Fault,
    check_answer,
    expect,
    random_body,
    whole_from_json,
    whole_from_stream,
)

# Too few pages for 32 requests: those of full length take 16 each.
LIMITS = {
    "max-model-len": MAX_MODEL_LEN,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 64,
    "num-pages": 40,
    "page-size": 16,
    "decode-buckets": "8 32",
    "token-buckets": 64,
    "dtype": "float32",
    "shutdown-timeout": 20,
}


class Soak:
    """Sends the requests to the server at `base` and counts what came of them."""

    def __init__(self, base: str, args: argparse.Namespace) -> None:
        self.base, self.args, self.rng = base, args, random.Random(args.seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.latencies_s: list[float] = []
        self.controls: list[list[str]] = []
        self.last: dict[str, float] = {}

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self.args.concurrency * 2)
        async with httpx.AsyncClient(base_url=self.base, timeout=self.args.request_timeout, limits=limits, trust_env=False) as self.http:
            self.controls = [await self.control(body) for body in CONTROLS]
            numbers = iter(range(self.args.requests))
            async with asyncio.timeout(self.args.time_limit), asyncio.TaskGroup() as group:
                for _ in range(self.args.concurrency):
                    group.create_task(self.client(numbers))
            await self.settle()

    async def client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            kind = self.rng.choices(("served", "refused", "control", "left"), (55, 12, 8, 25))[0]
            began = time.monotonic()
            try:
                await getattr(self, kind)()
                self.counts[kind] += 1
            except (Fault, httpx.HTTPError, ValueError, KeyError) as e:
                self.faults.append(f"request {number} ({kind}): {type(e).__name__}: {e}")
            if kind in ("served", "control"):
                self.latencies_s.append(time.monotonic() - began)

    async def served(self) -> None:
        path, body = random_body(self.rng)
        reply = await self.http.post(path, json=body)
        expect(reply.status_code == 200, f"{reply.status_code} {reply.text[:300]} for {json.dumps(body)[:300]}")
        if body["stream"]:
            whole = whole_from_stream([line for line in reply.text.split("\n") if line], path)
        else:
            whole = whole_from_json(reply.json(), path)
        try:
            check_answer(path, body, whole)
        except Fault as e:
            raise Fault(f"{e} for {json.dumps(body)[:400]}") from None
        self.counts["stream" if body["stream"] else "whole"] += 1

    async def refused(self) -> None:
        path, body, status, named = self.rng.choice(REFUSED)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self.http.post(path, content=data, headers={"Content-Type": "application/json"})
        expect(reply.status_code == status, f"{reply.status_code} instead of {status} for {data[:100]}: {reply.text[:300]}")
        error = reply.json()["error"]
        expect(named in (error["param"], error["code"]), f"the error for {data[:100]} does not name {named}: {error}")

    async def control(self, body: Body | None = None) -> list[str]:
        i = self.rng.randrange(len(CONTROLS))
        reply = await self.http.post(TEXT, json=body or CONTROLS[i])
        expect(reply.status_code == 200, f"{reply.status_code} {reply.text[:300]}")
        texts = [c["text"] for c in reply.json()["choices"]]
        if body is None:
            expect(texts == self.controls[i], f"control {i} gave {texts} instead of {self.controls[i]}")
        return texts

    async def left(self) -> None:
        """A client that goes away: at once, after a while, or after some events."""
        path, body = random_body(self.rng)
        body["ignore_eos"] = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.choice((0.002, 0.02, 0.2, 2.0))):
                async with self.http.stream("POST", path, json=body) as reply:
                    expect(reply.status_code == 200, f"{reply.status_code} for {json.dumps(body)[:300]}")
                    most = self.rng.randint(0, 6)
                    async for line in reply.aiter_lines():
                        most -= line.startswith("data: ")
                        if most < 0:
                            break

    async def settle(self) -> None:
        """Wait until the server is idle, then compare the controls once more."""
        end = time.monotonic() + 10
        while not idle(await self.metrics()):
            expect(time.monotonic() < end, f"the server is not idle after 10 s: {self.last}")
            await asyncio.sleep(0.1)
        again = [await self.control(body) for body in CONTROLS]
        expect(again == self.controls, f"the controls gave {again} at the end, {self.controls} at the start")
        await self.metrics()

    async def metrics(self) -> dict[str, float]:
        self.last = parse_metrics((await self.http.get("/metrics")).text)
        return self.last


def parse_metrics(text: str) -> dict[str, float]:
    """Values by name, with the labels but for model_name."""
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
            values[name.removeprefix("jaxserve:")] = float(value)
    return values


def idle(values: dict[str, float]) -> bool:
    return not (values["num_requests_running"] or values["num_requests_waiting"] or values['pages{state="used"}'])


class Server:
    """A `jaxserve serve` process; its log goes to a file, and is shown when it does not do as it should."""

    def __init__(self, model: str, flags: list[str], log: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.base, self.log = f"http://127.0.0.1:{port}", log
        limits = [word for name, value in LIMITS.items() for word in (f"--{name}", *str(value).split())]
        command = [sys.executable, "-m", "jaxserve", "serve", model, "--port", str(port), *limits, *flags]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)

    def wait_ready(self, limit_s: float) -> float:
        """Seconds until /health says 200; Fault with the log's end if it does not."""
        began = time.monotonic()
        while time.monotonic() < began + limit_s and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.base + "/health", trust_env=False).status_code == 200:
                    return time.monotonic() - began
            time.sleep(0.2)
        raise Fault(f"the server is not ready after {limit_s:g} s, its log ends in: {self.log.read_text()[-2000:]}")

    def memory_mb(self, name: str) -> float | None:
        """VmRSS (now) or VmHWM (peak) in MB; None where there is no /proc."""
        with contextlib.suppress(OSError):
            found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
            return int(found[1]) / 1024 if found else None

    def end(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMITS["shutdown-timeout"] + 15)


def soak(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Run it all; the summary, with the list of faults."""
    ready_s, rss = server.wait_ready(args.start_limit), server.memory_mb("VmRSS")
    run, began = Soak(server.base, args), time.monotonic()
    faults = run.faults
    try:
        asyncio.run(run.run())
    except* (Fault, TimeoutError, httpx.HTTPError) as group:
        faults += [f"{type(e).__name__}: {e}" for e in group.exceptions]
    duration_s, values, peak = time.monotonic() - began, run.last, server.memory_mb("VmHWM")
    if values.get("compiles_after_ready_total") != 0:
        faults.append(f"{values.get('compiles_after_ready_total')} programs compiled while serving")
    if (code := server.end()) != 0:
        faults.append(f"the server ended with exit code {code}, its log ends in: {server.log.read_text()[-2000:]}")
    if re.search("Traceback| ERROR ", log := server.log.read_text()):
        faults.append(f"the server's log shows an error: {log[-2000:]}")
    latencies = sorted(run.latencies_s) or [0.0]
    return {
        "model": args.model,
        "requests": args.requests,
        "counts": dict(sorted(run.counts.items())),
        "sequences_aborted": values.get('request_success_total{finished_reason="abort"}'),
        "preemptions": values.get("num_preemptions_total"),
        "steps": values.get("engine_steps_total"),
        "prompt_tokens": values.get("prompt_tokens_total"),
        "generation_tokens": values.get("generation_tokens_total"),
        "compiles_after_ready": values.get("compiles_after_ready_total"),
        "ready_s": round(ready_s, 1),
        "duration_s": round(duration_s, 1),
        "latency_median_s": round(statistics.median(latencies), 3),
        "latency_max_s": round(latencies[-1], 3),
        "rss_ready_mb": rss and round(rss),
        "rss_peak_growth_mb": rss and peak and round(peak - rss),
        "num_faults": len(faults),
        "faults": faults[:20],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory, .gguf file or hub id of a model with a chat template")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24, help="clients at once")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of requests")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds until the server must be ready")
    parser.add_argument("--time-limit", type=float, default=1800, help="seconds for all requests")
    parser.add_argument("--request-timeout", type=float, default=120, help="seconds for one request")
    args, flags = parser.parse_known_args(arguments)  # the rest goes to the server
    with tempfile.TemporaryDirectory() as directory:
        server = Server(args.model, flags, Path(directory) / "server.log")
        try:
            summary = soak(args, server)
        except Fault as e:
            summary = {"model": args.model, "num_faults": 1, "faults": [str(e)]}
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
    print(json.dumps(summary, indent=1))
    return 1 if summary["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
