"""The `jaxserve` command. Each subcommand imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jaxserve
from jaxserve.config import EngineConfig, LoadConfig, ServerConfig
from jaxserve.flags import add_flags, given_options
from jaxserve.sampling_params import SamplingParams

_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")  # what a model's generation_config.json may set


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error in the input is one line on stderr and code 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in _FORWARDED:
            return _FORWARDED[arguments[0]](arguments[1:])
        args = _parser().parse_args(arguments)
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
    add_serve_flags(_command(commands, "serve", "serve a model over HTTP with OpenAI's API", run_server))
    generate = _command(commands, "generate", "complete prompts and print the texts", _generate)
    generate.add_argument("--prompt", action="append", required=True, help="a prompt; may be given several times")
    chat = _command(commands, "chat", "talk with a model in the terminal", _chat)
    chat.add_argument("--system", help="system message")
    for command in (generate, chat):
        _add_model(command)
        add_flags(command, EngineConfig, leave_out=["seed"])
        add_flags(command, SamplingParams, leave_out=["logprobs", "prompt_logprobs", *(["n"] if command is chat else [])])
    convert = _command(commands, "convert", "write a checkpoint in jaxserve's own form, which loads faster", _convert)
    convert.add_argument("source", metavar="SRC", help="directory, .gguf file or hub id")
    convert.add_argument("target", metavar="DST", help="directory to write")
    add_flags(convert, LoadConfig, leave_out=["tokenizer", "generation_config"])
    for name, help in (("bench", "measure speed"), ("eval", "evaluate a model")):
        commands.add_parser(name, help=help, add_help=False)
    return parser


def _command(commands: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    made.set_defaults(run=run)
    return made


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a server: those of the engine and of HTTP."""
    _add_model(parser)
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)


def read_serve_flags(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """What the flags of add_serve_flags mean."""
    engine = EngineConfig.from_options(**given_options(args, EngineConfig))
    return engine, ServerConfig(**given_options(args, ServerConfig))


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory, .gguf file, Orbax checkpoint or hub id of the model")


def run_server(args: argparse.Namespace) -> int:
    """Serve as the flags of add_serve_flags say."""
    from jaxserve.api.serve import serve

    return serve(*read_serve_flags(args))


def _sampling_params(args: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    known = {k: v for k, v in defaults.items() if k in _MODEL_DEFAULTS and v is not None}
    return SamplingParams(**{"max_tokens": 256, **known, **given_options(args, SamplingParams)})


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    given = given_options(args, EngineConfig)
    given.pop("seed", None)  # --seed is the sampling seed here
    return given


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

    print(convert(args.source, args.target, dtype=getattr(args, "dtype", "auto"), progress=True))
    return 0


def _bench(arguments: list[str]) -> int:
    from jaxserve.bench import main as bench

    return bench(arguments)


def _eval(arguments: list[str]) -> int:
    from jaxserve.evaluation import main as evaluate

    return evaluate(arguments)


_FORWARDED = {"bench": _bench, "eval": _eval}  # these have parsers of their own
