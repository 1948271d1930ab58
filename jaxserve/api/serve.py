"""Runs a server process: port first, then the model in a thread while /health says 503, then requests until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from jaxserve.api.app import create_app
from jaxserve.api.state import ServerState, Status
from jaxserve.config import EngineConfig, ServerConfig

log = logging.getLogger("jaxserve")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FLUSH_S = 3  # what answers get to leave the socket after the engine has stopped
Load = Callable[[EngineConfig], tuple[Any, Any, Any]]


def serve(engine_config: EngineConfig, config: ServerConfig, load: Load | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code. 1, with one line on stderr, when the start fails."""
    _start_log()
    try:
        listener = bind(config.host, config.port)
        state = ServerState(config, engine_config.load.model)
    except (ValueError, OSError) as e:
        return _failed(e)
    uvicorn_config = uvicorn.Config(
        create_app(state), lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_FLUSH_S
    )
    process = _Process(state, engine_config, _Server(uvicorn_config), load or load_engine)
    with asyncio.Runner(loop_factory=uvicorn_config.get_loop_factory()) as runner:
        return runner.run(process.run(listener))


def _start_log() -> None:
    """Our own log from INFO on, others' from WARNING on, to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, so that a port in use is known before the model is loaded; OSError says so in words."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as e:
        raise OSError(f"host is {host!r}: {e.strerror}; give an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as e:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {e.strerror}; choose another --port or --host") from None
    return listener


def load_engine(config: EngineConfig) -> tuple[Any, Any, Any]:
    """(AsyncEngine, LLMEngine, CompileCounter), loaded and compiled. The imports are here, as the port answers before JAX is there."""
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.engine.compile_counter import CompileCounter
    from jaxserve.engine.llm_engine import LLMEngine

    counter = CompileCounter()
    llm = LLMEngine(config, progress=True)
    counter.mark_ready()
    return AsyncEngine(llm), llm, counter


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours let requests end first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """One server's life: load, ready, drain, exit."""

    def __init__(self, state: ServerState, engine_config: EngineConfig, server: uvicorn.Server, load: Load) -> None:
        self._state, self._engine_config, self._server, self._load = state, engine_config, server, load
        self._stop = asyncio.Event()
        self._code = 0

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        began = time.monotonic()
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        log.info("listening on http://%s:%d, loading %s", *listener.getsockname()[:2], self._engine_config.load.model)
        try:
            engine, llm, counter = await self._loaded()
        except Exception as e:
            self._code = _failed(e)
            await self._end(serving)
            return self._code
        engine.start()
        self._state.ready(engine, llm, counter)
        for line in llm.ledger.lines():
            log.info(line)
        log.info("ready after %.1f s, serving %s", time.monotonic() - began, ", ".join(self._state.names))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain(engine)
        await self._end(serving)
        return self._code

    async def _loaded(self) -> tuple[Any, Any, Any]:
        """Load in a daemon thread, which a signal may leave behind."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, Any, Any]] = loop.create_future()

        def work() -> None:
            try:
                result, failure = self._load(self._engine_config), None
            except BaseException as e:
                result, failure = None, e
            with contextlib.suppress(RuntimeError):  # the loop is closed when nobody waits any more
                loop.call_soon_threadsafe(_settle, done, result, failure)

        threading.Thread(target=work, name="load", daemon=True).start()
        return await done

    async def _drain(self, engine: Any) -> None:
        """Let running requests end, up to the limit; new ones get 503 meanwhile."""
        self._state.drain()
        timeout_s = self._state.config.shutdown_timeout
        log.info("shutting down: %d request(s) have %g s to finish", engine.num_unfinished, timeout_s)
        await engine.shutdown(timeout_s)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        await serving

    def _on_signal(self, number: int) -> None:
        if self._state.status is Status.READY and not self._stop.is_set():
            self._stop.set()
            return
        if self._state.status is Status.LOADING:
            log.info("stopped while loading")
            _exit(0)  # XLA may be compiling in other threads, which cannot be interrupted
        log.info("stopped by a second signal")
        _exit(128 + number)


def _settle(done: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)


def _failed(error: Exception) -> int:
    """Say in one line why the server does not start; a fault that is not about its input shows where it is."""
    if not isinstance(error, ValueError | OSError | ImportError | MemoryError):
        log.error("the start failed by a fault of the program", exc_info=error)
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"jaxserve: error: {text}", file=sys.stderr, flush=True)
    return 1


def _exit(code: int) -> None:
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
