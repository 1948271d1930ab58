"""Command-line flags made from the fields of config classes, so that every option exists once."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from jaxserve.config import layers


def add_flags(parser: Any, cls: type, leave_out: Sequence[str] = ()) -> None:
    """Add a flag for each field of a (composed) config class to a parser or group; fields marked positional are left to the caller.

    A flag that is not given leaves no attribute, so that the config's own default stands. A tuple takes several values: --x 1 2 3.
    """
    for kind in [*layers(cls).values(), cls]:
        hints = typing.get_type_hints(kind)
        for field in _fields(kind):
            if field.name not in leave_out:
                _add_flag(parser, field, hints[field.name])


def given_options(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of `cls` that were given on the command line, by flat field name."""
    names = {field.name for kind in [*layers(cls).values(), cls] for field in dataclasses.fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items() if name in names}


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """The fields that are flags: not the nested configs, and not what is positional."""
    return [f for f in dataclasses.fields(kind) if f.name not in layers(kind) and not f.metadata.get("positional")]


def _add_flag(parser: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    element, several = _element(hint)
    text = field.metadata.get("help", "as in jaxserve.SamplingParams")
    if "default:" not in text and field.default not in (None, ()):
        text += f" (default: {field.default})"
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if element is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": element, "nargs": "+" if several else None}
        options |= {"choices": field.metadata["choices"]} if "choices" in field.metadata else {"metavar": element.__name__.upper()}
    parser.add_argument("--" + field.name.replace("_", "-"), **options)


def _element(hint: Any) -> tuple[Any, bool]:
    """(type of one value, whether there are several) of T, T | None, tuple[T, ...] and tuple[T, ...] | None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False
