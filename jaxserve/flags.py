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
    """A flag for each field of a config class and of the configs nested in it; `parser` may be a group of one.

    A flag that is not given leaves no attribute, so that the class's own default stands.
    """
    nested, hints = layers(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in nested:
            add_flags(parser, nested[field.name], leave_out)
        elif field.name not in leave_out:
            _add_flag(parser, field, hints[field.name], f"see {cls.__module__}.{cls.__name__}")


def given_options(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """The flags of `cls` that were given, by field name."""
    names = {f.name for kind in (cls, *layers(cls).values()) for f in dataclasses.fields(kind)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(args).items() if k in names}


def read_flags(cls: Any, args: argparse.Namespace) -> Any:
    """The `cls` that the given flags mean; ValueError from the class itself when a value is impossible."""
    options = given_options(cls, args)
    return cls.from_options(**options) if layers(cls) else cls(**options)


def _add_flag(parser: Any, field: dataclasses.Field[Any], hint: Any, default_help: str) -> None:
    kind, several = _value_type(hint)
    text = field.metadata.get("help", default_help)
    if field.metadata.get("positional"):
        parser.add_argument(field.name, metavar=field.name.upper(), help=text)
        return
    if field.default not in (None, (), "") and "default:" not in text:
        text += f" (default: {field.default})"
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"], options["metavar"] = kind, kind.__name__.upper()
        if several:
            options["nargs"] = "+"
        if "choices" in field.metadata:
            options["choices"], options["metavar"] = field.metadata["choices"], None
    parser.add_argument("--" + field.name.replace("_", "-"), **options)


def _value_type(hint: Any) -> tuple[type, bool]:
    """(type of one value, whether there are several) of `T`, `T | None`, `tuple[T, ...]` and `tuple[T, ...] | None`."""
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False
