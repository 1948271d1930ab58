"""Command-line flags made from the fields of config classes, so that every option exists once."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any

from jaxserve.config import layers


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add a flag for each field of a (composed) config class; fields marked positional are left to the caller.

    A flag that is not given leaves no attribute, so that the config's own default stands.
    """
    for kind in [*layers(cls).values(), cls]:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if "help" in field.metadata and not field.metadata.get("positional"):
                _add_flag(parser, field, hints[field.name])


def given_options(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of `cls` that were given on the command line, by flat field name."""
    kinds = [*layers(cls).values(), cls]
    names = {f.name for kind in kinds for f in dataclasses.fields(kind) if "help" in f.metadata and not f.metadata.get("positional")}
    return {name: value for name, value in vars(args).items() if name in names}


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: Any) -> None:
    flag, metadata = "--" + field.name.replace("_", "-"), field.metadata
    element, repeated = _element(hint)
    text = metadata["help"].replace("%", "%%")
    if "default:" not in text and field.default is not None:
        text += f" (default: {field.default})".replace("%", "%%")
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if element is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    if metadata.get("choices"):
        common["choices"] = metadata["choices"]
    parser.add_argument(flag, type=_Tuple(element) if repeated else element, metavar=None if metadata.get("choices") else "VALUE", **common)


def _element(hint: Any) -> tuple[Any, bool]:
    """The type that one word of the flag is read as, and whether the flag takes several, separated by commas."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


class _Tuple:
    """Reads "1,2,3" as (1, 2, 3)."""

    def __init__(self, element: Any):
        self.element = element
        self.__name__ = f"comma-separated {element.__name__}"  # argparse names the type in its messages by this

    def __call__(self, text: str) -> tuple[Any, ...]:
        return tuple(self.element(part) for part in text.split(",") if part)
