"""The command line: flags made from the config classes."""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import add_serve_flags, main
from jaxserve.config import EngineConfig, ServerConfig, layers
from jaxserve.flags import add_flags, given_options, read_flags
from jaxserve.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


def parse(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    args = parser.parse_args(argv)
    return read_flags(EngineConfig, args), read_flags(ServerConfig, args)


def test_no_flags_are_the_defaults() -> None:
    assert parse("DIR") == (EngineConfig.from_options(model="DIR"), ServerConfig())


def test_every_field_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    fields = [f for cls in (EngineConfig, *layers(EngineConfig).values(), ServerConfig) for f in dataclasses.fields(cls)]
    wanted = {f.name for f in fields} - set(layers(EngineConfig)) - {"model"}
    assert {f"--{name.replace('_', '-')}" for name in wanted} <= flags
    assert all(action.help for action in parser._actions)


def test_values_reach_their_configs() -> None:
    engine, server = parse(
        "DIR", "--dtype", "float32", "--page-size", "32", "--num-pages", "7", "--max-model-len", "64", "--decode-buckets", "1", "8",
        "--memory-fraction", "0.5", "--attention-backend", "xla", "--port", "9", "--served-model-name", "a", "b", "--api-key", "k",
        "--allowed-origins", "http://x", "--shutdown-timeout", "2",
    )  # fmt: skip
    assert engine == EngineConfig.from_options(
        model="DIR",
        dtype="float32",
        page_size=32,
        num_pages=7,
        max_model_len=64,
        decode_buckets=(1, 8),
        memory_fraction=0.5,
        attention_backend="xla",
    )
    assert server == ServerConfig(port=9, served_model_name=("a", "b"), api_key="k", allowed_origins=("http://x",), shutdown_timeout=2.0)


@pytest.mark.parametrize(
    "argv", [["DIR", "--page-size", "x"], ["DIR", "--dtype", "int3"], ["DIR", "--unknown", "1"], ["DIR", "--max-model", "5"], []], ids=str
)
def test_wrong_flags_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *argv])
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_booleans_have_two_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, SamplingParams)
    args = parser.parse_args(["--ignore-eos", "--no-skip-special-tokens", "--stop", "a", "b", "--seed", "3"])
    assert given_options(SamplingParams, args) == {"ignore_eos": True, "skip_special_tokens": False, "stop": ("a", "b"), "seed": 3}


def test_a_wrong_sampling_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "DIR", "--prompt", "x", "--top-p", "7"]) == 1
    assert capsys.readouterr().err == "jaxserve: error: top_p is 7.0; give a number > 0 and <= 1; 1 keeps every token\n"


@pytest.mark.parametrize("command", [["-m", "jaxserve", "--help"], ["server.py", "--help"], ["-m", "jaxserve", "serve", "--help"]], ids=str)
def test_help_is_quick_and_loads_no_model_code(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"jax", "transformers", "flax", "uvicorn"}
