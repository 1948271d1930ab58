"""Flags made from config classes."""

import argparse
import dataclasses
import typing

import pytest

from jaxserve.config import EngineConfig, ServerConfig, layers
from jaxserve.flags import add_flags, given_options


def parse(cls, argv, **more):
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, **more)
    return given_options(cls, parser.parse_args(argv))


def every_field(cls):
    for kind in (cls, *layers(cls).values()):
        hints = typing.get_type_hints(kind)
        yield from ((f, hints[f.name]) for f in dataclasses.fields(kind) if f.name not in layers(kind))


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_every_field_is_a_flag_that_reaches_the_config(cls):
    argv, wanted = [], {}
    for field, hint in every_field(cls):
        if field.metadata.get("positional"):
            continue
        if "choices" in field.metadata:
            word, value = field.metadata["choices"][-1], field.metadata["choices"][-1]
        elif "tuple[int" in str(hint):
            word, value = ["3", "5"], (3, 5)
        elif "tuple[str" in str(hint):
            word, value = ["a", "b"], ("a", "b")
        elif "float" in str(hint):
            word, value = "0.5", 0.5
        elif "int" in str(hint):
            word, value = "7", 7
        else:
            word, value = "text", "text"
        argv += ["--" + field.name.replace("_", "-"), *(word if isinstance(word, list) else [word])]
        wanted[field.name] = value
    assert parse(cls, argv, leave_out=["model"]) == wanted and len(wanted) > 5


def test_what_is_not_given_is_left_to_the_defaults():
    options = parse(EngineConfig, ["MODEL"])
    assert options == {"model": "MODEL"}
    assert EngineConfig.from_options(**options) == EngineConfig.from_options(model="MODEL")


@pytest.mark.parametrize("argv", [["M", "--page-size", "x"], ["M", "--dtype", "int3"], ["M", "--no-such-flag", "1"], []])
def test_bad_flags_are_refused(argv):
    with pytest.raises(SystemExit):
        parse(EngineConfig, argv)
