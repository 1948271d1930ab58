"""Load a model, print one answer with its speed, then serve it. scripts/demo prepares all that this needs and calls it."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.api.serve import serve
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.compile_counter import CompileCounter

QUESTION = "What is 2+2?"

SNIPPETS = """
Serving on http://{host}:{port} - Ctrl-C stops it. In another terminal:

curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{name}",
  "messages": [{{"role": "user", "content": "{question}"}}],
  "temperature": 0
}}'

or, with {python}:

from openai import OpenAI
client = OpenAI(base_url="http://{host}:{port}/v1", api_key="none")
stream = client.chat.completions.create(
    model="{name}",
    messages=[{{"role": "user", "content": "{question}"}}],
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""


def load(model: str) -> tuple[LLM, CompileCounter]:
    """The model, compiled and tried on one question."""
    counter = CompileCounter()
    llm = LLM(model)
    counter.mark_ready()
    began = time.perf_counter()
    [answer] = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=64, temperature=0), use_tqdm=False)
    seconds, [completion] = time.perf_counter() - began, answer.outputs
    count = len(completion.token_ids)
    print(f"\n> {QUESTION}\n{completion.text.strip()}\n")
    print(f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s, one request alone", flush=True)
    return llm, counter


def main() -> int:
    parser = argparse.ArgumentParser("scripts/demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path, help="GGUF file or directory")
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    parser.add_argument("--port", type=int, default=8000, help="port to serve on (default: 8000)")
    args = parser.parse_args()
    name = args.model.name.split(".")[0]
    if args.once:
        load(str(args.model))
        return 0
    server = ServerConfig(port=args.port, served_model_name=(name,))

    def load_and_tell(config: EngineConfig) -> tuple[Any, Any, Any]:
        llm, counter = load(config.load.model)
        print(SNIPPETS.format(host=server.host, port=server.port, name=name, question=QUESTION, python=sys.executable), flush=True)
        return AsyncEngine(llm.engine), llm.engine, counter

    return serve(EngineConfig.from_options(model=str(args.model)), server, load_and_tell)


if __name__ == "__main__":
    sys.exit(main())
