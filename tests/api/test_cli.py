"""The command line: flags made from the config classes."""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import add_serve_flags, main, read_serve_flags
from jaxserve.config import EngineConfig, ServerConfig, layers
from jaxserve.flags import add_flags, given_options
from jaxserve.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


def parse(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    return read_serve_flags(parser.parse_args(argv))


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
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len is 0; give an integer of at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; give an integer of at least 1"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1; give an integer of at least 1"),
        ({"max_num_queued_requests": -1}, "max_num_queued_requests is -1; give an integer of at least 0"),
        ({"token_buckets": (0, 512)}, r"token_buckets is \(0, 512\); give an integer of at least 1"),
        ({"decode_buckets": ("8",)}, r"decode_buckets is \('8',\); give an integer"),
        ({"num_pages": 0}, "num_pages is 0; give an integer of at least 1"),
        ({"num_pages": True}, "num_pages is True; give an integer"),
        ({"kv_cache_memory": -5}, "kv_cache_memory is -5"),
        ({"page_size": 12}, "page_size is 12; give a multiple of 8"),
        ({"page_size": 0}, "page_size is 0; give an integer of at least 8"),
        ({"memory_fraction": 7.0}, "memory_fraction is 7.0; give a number above 0 and at most 1"),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"generation_config": "foo"}, "generation_config is 'foo'; give one of: auto, none"),
        ({"dtype": "int3"}, "dtype is 'int3'; give one of: auto, float32, bfloat16, float16"),
        ({"layer_loop": "square"}, "layer_loop is 'square'; give one of"),
    ],
    ids=str,
)
def test_impossible_values_are_refused_before_anything_is_loaded(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options(**options)


@pytest.mark.parametrize(
    "argv", [["DIR", "--page-size", "x"], ["DIR", "--dtype", "int3"], ["DIR", "--unknown", "1"], ["DIR", "--max-model", "5"], []], ids=str
)
def test_wrong_flags_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *argv])
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("port", "70000"), ("port", "-1"), ("api-key", ""), ("api-key", " k"), ("shutdown-timeout", "-1"), ("shutdown-timeout", "nan"),
     ("max-request-bytes", "0"), ("metrics-prefix", "9x"), ("served-model-name", ""), ("host", "no such host")],
)  # fmt: skip
def test_impossible_server_options_are_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "DIR", f"--{flag}={value}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxserve: error: {flag.replace('-', '_')} is ")


def test_booleans_have_two_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, SamplingParams)
    args = parser.parse_args(["--ignore-eos", "--no-skip-special-tokens", "--stop", "a", "b", "--seed", "3"])
    assert given_options(args, SamplingParams) == {"ignore_eos": True, "skip_special_tokens": False, "stop": ("a", "b"), "seed": 3}


def test_a_wrong_sampling_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "DIR", "--prompt", "x", "--top-p", "7"]) == 1
    assert capsys.readouterr().err == "jaxserve: error: top_p is 7.0; give a number > 0 and <= 1; 1 keeps every token\n"


@pytest.mark.parametrize("command", [["-m", "jaxserve", "--help"], ["server.py", "--help"], ["-m", "jaxserve", "serve", "--help"]], ids=str)
def test_help_is_quick_and_loads_no_model_code(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"jax", "transformers", "flax", "uvicorn"}
