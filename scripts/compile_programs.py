"""What scripts/compile_for compiles: every kernel over its shapes, and whole steps of the engine at real models' shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig, ModelConfig, RopeConfig
from jaxserve.engine.model_runner import ModelRunner
from jaxserve.layers.attention import attention_path
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.sharding import with_kv_heads_for
from pallas_kernels import choose_backend, default_page_size, kv_write, paged_attention, pool_shape, scale_shape
from pallas_kernels.paged_attention.api import kernel_module
from pallas_kernels.paged_attention.options import Options

_ROPE = RopeConfig(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
# Name -> (model, chips). The shapes of Llama 3.1.
MODELS = {
    "8B": (ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, _ROPE), 1),
    "70B": (ModelConfig("LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8, 128, 131072, 1e-5, _ROPE), 16),
}
GIB = 1 << 30
RESERVED = 1.5 * GIB  # of a chip's memory, for a step's temporaries and the runtime


@dataclass(frozen=True)
class Program:
    """One thing to compile: jit(function, donated)(*arguments)."""

    name: str
    function: Callable
    arguments: tuple
    donated: tuple[int, ...] = ()
    out_shardings: Any = None
    pool_dims: tuple[int, ...] = ()  # numbers that only the shapes of a pool contain
    pool_bytes: int = 0  # of one chip; to be found donated
    limit: str = ""  # what is known to be copied nevertheless, and why; other copies still count as failures
    limit_dtype: str = ""  # HLO's name of the dtype of those copies


# head_dim, dtype of the pages, (KV heads, query heads for each)
SHAPES = tuple(itertools.product((64, 80, 96, 128, 256), ("bfloat16", "float8_e4m3fn", "int8"), ((8, 4), (1, 8))))
# Small models' heads with 8 bits, common heads, and what one of eight chips has of them.
QUICK_SHAPES = ((64, "int8", (8, 4)), (128, "bfloat16", (8, 4)), (128, "bfloat16", (1, 8)))


def kernel_programs(device: Any, quick: bool = False) -> Iterator[tuple[str, Program | str]]:
    """(name, program, or why the backend refuses the shape) of the kernels that the device's platform has, over all or a few shapes."""
    mesh = Mesh(np.array([device]), ("x",))
    for backend in _backends(device):
        for (head_dim, page_dtype, (kv_heads, group)), kind in itertools.product(QUICK_SHAPES if quick else SHAPES, ("decode", "mixed")):
            for options in ("plain", "all options", *(("slot scales",) if page_dtype != "bfloat16" else ())):
                name = f"{backend} {kind} d{head_dim} {kv_heads}x{group} {page_dtype} {options}"
                yield name, _attention(backend, head_dim, page_dtype, kv_heads, group, kind, options, name, mesh)
            if kind == "decode" and page_dtype != "float8_e4m3fn":
                name = f"kv_write {backend} d{head_dim} {kv_heads} heads {page_dtype}"
                yield name, _write(backend, head_dim, page_dtype, kv_heads, name, mesh, device.platform == "tpu")


def _backends(device: Any) -> tuple[str, ...]:
    if device.platform == "tpu":
        return "mosaic_tpu", "mosaic_tpu_lanes"
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_dtype": "bfloat16"}
    return (choose_backend(device.platform, device.device_kind, **heads)[0],)


def _attention(backend, head_dim, page_dtype, kv_heads, group, kind, options, name, mesh) -> Program | str:
    rows, tokens, page_size = 32, 32 if kind == "decode" else 512, default_page_size(backend)
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    heads, pages = kv_heads * group, 1024
    q, pool = array((tokens, heads, head_dim), jnp.bfloat16), array(pool_shape(pages, page_size, kv_heads, head_dim, backend), page_dtype)
    width = 4096 // page_size
    metadata = [array(shape, jnp.int32) for shape in ((rows, width), (rows,), (rows + 1,), (2,))]
    given: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    if options != "plain":
        given, fixed = {key: array((heads,), jnp.float32) for key in ("alibi_slopes", "sinks")}, {"sliding_window": 1000, "soft_cap": 30.0}
    if page_dtype != "bfloat16":
        scale = array(scale_shape(pages, page_size, kv_heads) if options == "slot scales" else (), jnp.float32)
        given |= {"k_scale": scale, "v_scale": scale}
    if backend != "xla":
        refusal = kernel_module(backend).unsupported(q.shape, q.dtype, pool.shape, pool.dtype, Options(0.1, **fixed, **given))
        if refusal:
            return refusal

    def call(arguments, given):
        return paged_attention(*arguments, sm_scale=0.1, decode_only=kind == "decode", backend=backend, return_lse=True, **fixed, **given)

    return Program(name, call, ((q, pool, pool, *metadata), given))


def _write(backend, head_dim, page_dtype, kv_heads, name, mesh, on_tpu) -> Program | str:
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    page_size = default_page_size(backend)
    # Larger than a TPU's VMEM, where the compiler would else keep the pool for the length of the program.
    pages = _prime((512 << 20) // (page_size * kv_heads * head_dim))
    pool = array(pool_shape(pages, page_size, kv_heads, head_dim, backend), page_dtype)
    pools, limit, scale = [pool, pool], "", None
    if page_dtype == "int8":
        scale = array(scale_shape(pages, page_size, kv_heads), jnp.float32)
        pools += [scale, scale]
        limit = "XLA's scatter of the scales copies the pool of scales" if on_tpu else ""
    if backend != "xla":
        options = Options(0.1, k_scale=cast(Any, scale), v_scale=cast(Any, scale))
        refusal = kernel_module(backend).unsupported((1, kv_heads, head_dim), jnp.dtype("bfloat16"), pool.shape, pool.dtype, options)
        if refusal:
            return refusal  # no kernel reads such a pool, so none need write it
    new, slots = array((512, kv_heads, head_dim), jnp.bfloat16), array((512,), jnp.int32)

    def call(pools, k, v, slots):
        scales = dict(zip(("k_scales", "v_scales"), pools[2:], strict=False))
        return kv_write(pools[0], pools[1], k, v, slots, backend=backend, **scales)

    size = 2 * int(np.prod(pool.shape)) * pool.dtype.itemsize
    return Program(name, call, (tuple(pools), new, new, slots), (0,), None, (pages, pages * page_size), size, limit, "f32" if limit else "")


def step_programs(model_name: str, devices: list, memory_bytes: int, layers: int | None, layer_loop: str = "auto") -> Iterator[Program]:
    """The decode and the mixed forward program of a model, as the engine builds them, with weights that have shapes only."""
    model, chips = MODELS[model_name]
    if layers is not None:
        model = dataclasses.replace(model, num_layers=layers)
    mesh = Mesh(np.array(devices[:chips]).reshape(1, chips), ("data", "tensor"))
    config = EngineConfig.from_options(
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        decode_buckets=(64,),
        token_buckets=(2048,),
        tensor_parallel_size=chips,
        layer_loop=layer_loop,
    )
    model = with_kv_heads_for(model, chips)
    path, _ = attention_path("auto", model, mesh, "bfloat16", "bfloat16", None)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, page_size=path.page_size))
    runner = ModelRunner(config, LlamaForCausalLM(model, "bfloat16"), model, mesh, "bfloat16", "bfloat16", path)
    weights = sum(int(np.prod(w.sharding.shard_shape(w.shape))) * w.dtype.itemsize for w in runner.weights)
    page = 2 * model.num_layers * path.page_size * (model.num_kv_heads // chips) * model.head_dim * 2
    pages = _prime(max((0.9 * memory_bytes - weights - RESERVED) // page, 64 * 1024 // path.page_size))
    pool = runner.abstract_pool(pages)
    for (_, bucket), function, donated, arguments, outputs in runner.forward_jobs(pool):
        name = f"{model_name} on {chips}, {path.backend}, {bucket}"
        yield Program(name, function, arguments, donated, outputs, (pages, pages * path.page_size), pages * page)


def _prime(at_least: float) -> int:
    """The first prime from at_least on: no other array of a program has this number among its dimensions."""
    number = int(at_least)
    while any(number % i == 0 for i in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def pool_copies(hlo: str, pool_dims: tuple[int, ...]) -> list[str]:
    """The operations of a compiled program that copy a pool: their results have one of pool_dims as a dimension."""
    found = []
    for line in hlo.splitlines():
        match = re.search(r" = (.*?) (copy|copy-start|transpose|convert)\(", line)
        if match and {int(n) for dims in re.findall(r"\[([\d,]+)\]", match[1]) for n in dims.split(",")} & set(pool_dims):
            found.append(line.strip())
    return found


def collectives(hlo: str) -> dict[str, int]:
    """How often each kind of collective stands in a compiled program."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
    return {kind: count for kind in kinds if (count := len(re.findall(rf" {kind}(?:-start)?\(", hlo)))}


def vmem_bytes(hlo: str) -> int | None:
    """Most VMEM that a custom call of a TPU program uses, as the compiler notes it; None where it notes nothing."""
    calls = "\n".join(line for line in hlo.splitlines() if "tpu_custom_call" in line)
    sizes = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', calls)
    return max(map(int, sizes), default=None)
