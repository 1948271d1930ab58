"""The `jaxserve` command; each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jaxserve
from jaxserve.config import EngineConfig, LoadConfig, ServerConfig
from jaxserve.flags import add_flags, given_options, read_flags
from jaxserve.sampling_params import SamplingParams

_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")  # what a model's generation_config.json may set


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error in the input is one line on stderr and code 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _FORWARDED:
        return _FORWARDED[arguments[0]](arguments[1:])
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except (ValueError, OSError) as e:
        print("jaxserve: error: " + " ".join(str(e).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxserve", description=jaxserve.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=jaxserve.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_serve_flags(_command(commands, "serve", "serve a model over HTTP with OpenAI's API", _serve))
    generate = _command(commands, "generate", "complete prompts and print the texts", _generate)
    generate.add_argument("--prompt", action="append", required=True, help="a prompt; may be given several times")
    chat = _command(commands, "chat", "talk with a model in the terminal", _chat)
    chat.add_argument("--system", help="system message")
    for command in (generate, chat):
        add_flags(command, EngineConfig, leave_out=["seed"])
        add_flags(command, SamplingParams, leave_out=["logprobs", "prompt_logprobs", *(["n"] if command is chat else [])])
    convert = _command(commands, "convert", "write a checkpoint in jaxserve's own form, which loads faster", _convert)
    convert.add_argument("source", metavar="SRC", help="directory, .gguf file or hub id")
    convert.add_argument("target", metavar="DST", help="directory to write")
    add_flags(convert, LoadConfig, leave_out=["model", "tokenizer", "generation_config"])
    for name, help in (("bench", "measure speed; bench --help lists the kinds"), ("eval", "evaluate a model; eval --help lists the tasks")):
        commands.add_parser(name, help=help, add_help=False)
    return parser


def _command(commands: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    made.set_defaults(run=run)
    return made


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a server: those of the engine and of HTTP."""
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)


def run_server(args: argparse.Namespace) -> int:
    """Serve as the flags of add_serve_flags say."""
    from jaxserve.api.serve import serve

    return serve(read_flags(EngineConfig, args), read_flags(ServerConfig, args))


def _serve(args: argparse.Namespace) -> int:
    return run_server(args)


def _sampling_params(args: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    known = {k: v for k, v in defaults.items() if k in _MODEL_DEFAULTS and v is not None}
    return SamplingParams(**{"max_tokens": 256, **known, **given_options(SamplingParams, args)})


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in given_options(EngineConfig, args).items() if k != "seed"}  # --seed is the sampling seed here


def _generate(args: argparse.Namespace) -> int:
    _sampling_params(args, {})  # a wrong flag is an error before the model loads
    from jaxserve.llm import LLM

    llm = LLM(**_engine_options(args))
    for output in llm.generate(args.prompt, _sampling_params(args, llm.engine.generation_defaults), use_tqdm=False):
        for completion in output.outputs:
            print(f"{output.prompt}{completion.text}")
    return 0


def _chat(args: argparse.Namespace) -> int:
    _sampling_params(args, {})
    from jaxserve.chat import chat

    return chat(EngineConfig.from_options(**_engine_options(args)), lambda defaults: _sampling_params(args, defaults), args.system)


def _convert(args: argparse.Namespace) -> int:
    from jaxserve.loader.convert import convert

    convert(args.source, args.target, dtype=getattr(args, "dtype", "auto"))
    return 0


def _bench(arguments: list[str]) -> int:
    from jaxserve.bench import main as bench

    return bench(arguments)


def _eval(arguments: list[str]) -> int:
    from jaxserve.evaluation import main as evaluate

    return evaluate(arguments)


_FORWARDED = {"bench": _bench, "eval": _eval}  # these read their own arguments
