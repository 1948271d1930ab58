"""Orbax checkpoints of jaxserve's own parameters: restored straight into their dtype and sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxserve.models.parameters import parameters
from jaxserve.sharding import param_sharding

DIRECTORY = "orbax"  # beside config.json and the tokenizer's files
TOKENIZER_GGUF = "tokenizer.gguf"  # the tokenizer of a model that came from GGUF


def is_orbax(path: Path) -> bool:
    """Whether a model directory holds weights that save_module wrote."""
    return (path / DIRECTORY).is_dir()


def save_module(module: nnx.Module, path: Path) -> None:
    """Write a module's parameters under path/orbax."""
    import orbax.checkpoint as ocp  # slow to import, and most runs need none of it

    values = {_key(parameter_path): variable.get_value() for parameter_path, variable in parameters(module)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((path / DIRECTORY).absolute(), values)


def restore_module(module: nnx.Module, path: Path, mesh: Mesh) -> None:
    """Fill an abstract module from path/orbax, each parameter read into its own dtype and sharding.

    ValueError names the checkpoint when it lacks parameters, holds others, or cannot be read.
    """
    import orbax.checkpoint as ocp

    variables = {_key(parameter_path): variable for parameter_path, variable in parameters(module)}
    target = {key: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=param_sharding(mesh, v)) for key, v in variables.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = {key: tuple(entry.shape) for key, entry in stored_parameters(path).items()}
            problems = _differences({key: value.shape for key, value in target.items()}, stored)
            if problems:
                raise ValueError("the parameters do not fit config.json:\n  " + "\n  ".join(problems))
            values = checkpointer.restore((path / DIRECTORY).absolute(), target)
        except (ValueError, OSError, KeyError) as error:
            raise ValueError(f"{path / DIRECTORY} cannot be restored: {error}; convert the model again") from error
    for key, variable in variables.items():
        variable.set_value(values[key])


def stored_parameters(path: Path) -> dict[str, Any]:
    """Shape and dtype of each parameter under path/orbax, as Orbax describes them; reads no values."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return dict(checkpointer.metadata((path / DIRECTORY).absolute()).item_metadata)


def _differences(expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> list[str]:
    missing = [f"missing: {key}" for key in sorted(set(expected) - set(stored))]
    surplus = [f"surplus: {key}" for key in sorted(set(stored) - set(expected))]
    differing = [key for key in sorted(set(expected) & set(stored)) if expected[key] != stored[key]]
    return missing + surplus + [f"misshapen: {key} has shape {list(stored[key])}, not {list(expected[key])}" for key in differing]


def _key(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))
