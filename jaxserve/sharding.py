"""The device mesh ("data", "tensor") and the table from logical axes to its axes."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig, ParallelConfig

# Logical axis -> mesh axis. Megatron's split (arXiv:1909.08053): columns of the first matmul of a pair, rows of the second.
LOGICAL_AXES = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "embed": None, "pages": None}


def make_mesh(config: ParallelConfig) -> Mesh:
    """A mesh over the first `tensor_parallel_size` devices; ValueError when there are fewer."""
    size, devices = config.tensor_parallel_size, jax.devices()
    if not 1 <= size <= len(devices):
        found = f"{len(devices)} {devices[0].platform} device(s)"
        raise ValueError(f"tensor_parallel_size is {size}, but this process sees {found}; give 1 to {len(devices)}")
    return Mesh(np.array(devices[:size]).reshape(1, size), ("data", "tensor"))


def with_kv_heads_for(model: ModelConfig, size: int) -> ModelConfig:
    """The model as `size` devices that share each layer hold it: where they are more than its KV heads, several keep the same one.

    Llama 3.1 70B (8 KV heads of 8 query heads each) on 16 devices becomes a model of 16 KV heads of 4, equal two by two: a device then
    still holds one KV head, and the attention of no query head needs another device. Other models come back as they are.
    """
    if size <= model.num_kv_heads or size % model.num_kv_heads or model.num_heads % size:
        return model
    return replace(model, num_kv_heads=size)


def check_divisible(model: ModelConfig, parallel: ParallelConfig) -> None:
    """ValueError when a sharded dimension of the model does not divide by the tensor-parallel size."""
    size = parallel.tensor_parallel_size
    for name in ("num_kv_heads", "intermediate_size", "vocab_size"):
        value = getattr(model, name)
        if value % size:
            raise ValueError(f"tensor_parallel_size is {size}, which does not divide the model's {name} ({value}); choose a divisor of it")


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry these logical axes."""
    return PartitionSpec(*(LOGICAL_AXES[a] if a else None for a in axes))


def param(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter that has a shape, a dtype and logical axes, but no value yet: models are built abstract, a loader fills them."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


def param_sharding(mesh: Mesh, variable: nnx.Variable) -> NamedSharding:
    """Where a parameter lives on the mesh."""
    return NamedSharding(mesh, partition_spec(variable.get_metadata().get("axes", ())))
