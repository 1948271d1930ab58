"""Walking over a module's parameters, and giving a fresh module random values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxserve.sharding import param_sharding

STDDEV = 0.02


def parameters(module: nnx.Module) -> Iterator[tuple[tuple[str | int, ...], nnx.Param]]:
    """Path, such as ("blocks", 3, "attention", "qkv", "kernel"), and variable of each parameter, abstract or filled."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            yield cast("tuple[str | int, ...]", path), node


def init_params(module: nnx.Module, seed: int, mesh: Mesh) -> None:
    """Fill a module with normal(0, 0.02) values, norm scales with ones, each parameter in its own dtype and sharding."""
    key = jax.random.key(seed)
    for index, (path, variable) in enumerate(parameters(module)):
        if path[-1] == "scale":
            value = jnp.ones(variable.shape, variable.dtype)
        else:
            value = (STDDEV * jax.random.normal(jax.random.fold_in(key, index), variable.shape)).astype(variable.dtype)
        variable.set_value(jax.device_put(value, param_sharding(mesh, variable)))
