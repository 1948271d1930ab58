"""Running alike blocks one after the other: unrolled, or rolled into a loop whose body is compiled once for all layers.

Unrolled is what accelerators want: one flat program. Rolled compiles four times faster, which decides how long a CPU server takes to
start. Its weights are not stacked, as slicing a stack would copy every layer's weights in every step; instead each matmul of the body
is a switch over the layers' own kernels, and the pool is one array that the loop carries, with the layers' pages one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.kv_cache import KVCache

SMALL = 1 << 16  # elements of a parameter that a rolled loop may copy in every step


class LayerSlice:
    """The parameter of layer `index` (traced) among the alike parameters of all layers; stands in an nnx.Param for an array."""

    def __init__(self, arrays: Sequence[jax.Array], index: jax.Array):
        self.arrays, self.index = tuple(arrays), index

    def __getitem__(self, key: object) -> LayerSlice:
        return self

    def apply(self, function: Callable, *operands: jax.Array) -> jax.Array:
        """function(*operands, parameter), with no copy of the parameter."""
        count = len(operands)
        branches = [lambda *args, i=i: function(*args[:count], args[count + i]) for i in range(len(self.arrays))]
        return jax.lax.switch(self.index, branches, *operands, *self.arrays)


def apply(function: Callable, x: jax.Array, param: nnx.Param) -> jax.Array:
    """function(x, param's array)."""
    value = param[...]
    return value.apply(function, x) if isinstance(value, LayerSlice) else function(x, value)


# Blocks are alike, so jit traces the first and reuses the result; without it tracing 30 layers takes most of a warm start.
_run_block = jax.jit(lambda block, *inputs: block(*inputs))


def run_blocks(blocks: Sequence[nnx.Module], x: jax.Array, cos, sin, pool: KVCache, metadata) -> tuple[jax.Array, KVCache]:
    """x through all blocks, each with its own layer of the pool; rolled where the pool is one array for all layers."""
    if pool.stacked and len(blocks) > 1:
        return _rolled(blocks, x, cos, sin, pool, metadata)
    k_pool, v_pool = [], []
    for block, k_pages, v_pages in zip(blocks, pool.k_pages, pool.v_pages, strict=True):
        x, k_pages, v_pages = _run_block(block, x, cos, sin, k_pages, v_pages, metadata)
        k_pool.append(k_pages)
        v_pool.append(v_pages)
    return x, replace(pool, k_pages=tuple(k_pool), v_pages=tuple(v_pool))


def _rolled(blocks: Sequence[nnx.Module], x: jax.Array, cos, sin, pool: KVCache, metadata) -> tuple[jax.Array, KVCache]:
    graphdefs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    treedef = jax.tree.structure(states[0])
    layers = [_stack_if_small(arrays) for arrays in zip(*(jax.tree.leaves(state) for state in states), strict=True)]
    pages, slots = pool.num_pages // len(blocks), pool.num_slots // len(blocks)

    def body(i: jax.Array, carry: tuple) -> tuple:
        block = nnx.merge(graphdefs[0], jax.tree.unflatten(treedef, [_layer(parameter, i) for parameter in layers]))
        slot_mapping = jnp.where(metadata.slot_mapping < 0, metadata.slot_mapping, metadata.slot_mapping + i * slots)
        own = replace(metadata, block_tables=metadata.block_tables + i * pages, slot_mapping=slot_mapping)
        return block(carry[0], cos, sin, *carry[1:], own)

    x, k_pages, v_pages = jax.lax.fori_loop(0, len(blocks), body, (x, pool.k_pages[0], pool.v_pages[0]))
    return x, replace(pool, k_pages=(k_pages,), v_pages=(v_pages,))


def _stack_if_small(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...] | jax.Array:
    """One parameter of all layers: scales and biases as one array, kernels apart."""
    return jnp.stack(arrays) if arrays[0].size <= SMALL else arrays


def _layer(parameter: tuple[jax.Array, ...] | jax.Array, index: jax.Array) -> LayerSlice | jax.Array:
    return LayerSlice(parameter, index) if isinstance(parameter, tuple) else parameter[index]
