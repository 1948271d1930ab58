"""A conversation with a model in the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.llm_engine import LLMEngine
from jaxserve.engine.output_processor import SequenceProcessor
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams

HELP = "Write a message and press Enter; Ctrl-C stops an answer, /new starts over, /quit or Ctrl-D ends."


def chat(config: EngineConfig, make_params: Callable[[dict[str, Any]], SamplingParams], system: str | None) -> int:
    """Read messages from the terminal and print the answers as they are made, until the end of input."""
    engine = LLMEngine(config, progress=True)
    params = make_params(engine.generation_defaults)
    if engine.tokenizer is None:
        raise ValueError("chat needs a tokenizer, and this model has none; give --tokenizer")
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    print(HELP)
    for number in itertools.count():
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text == "/quit":
            return 0
        if text == "/new":
            messages = list(opening)
        elif text:
            answer = _answer(engine, [*messages, {"role": "user", "content": text}], params, f"chat-{number}")
            if answer is not None:
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return 0


def _answer(engine: LLMEngine, messages: list[dict[str, str]], params: SamplingParams, request_id: str) -> str | None:
    """Print the model's answer piece by piece and return it; None, with the reason printed, when the engine refuses."""
    try:
        (request,) = engine.make_requests(engine.tokenizer.apply_chat_template(messages), params, request_id)
        engine.add_request(request)
    except ValueError as e:
        print(f"error: {e}")
        return None
    processor, answer = SequenceProcessor(request, engine.tokenizer), ""
    try:
        while not processor.finished:
            for output in engine.step():
                if output.request_id == request.request_id and not processor.finished:
                    piece = processor.process(output).text
                    answer += piece
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    engine.abort(request.request_id, FinishReason.STOP)
    print()
    return answer
