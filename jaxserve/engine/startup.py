"""What happens before the first step: resolve the config, load the model, size the pool, keep the ledger."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.kv_cache import page_bytes
from jaxserve.layers.attention import AttentionPath, attention_path, prepare_in_background
from jaxserve.layers.linear import Linear
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.sharding import check_divisible, make_mesh

CPU_POOL_BYTES = 1 << 30


@dataclass(frozen=True)
class Loaded:
    """A model ready to be compiled."""

    module: LlamaForCausalLM
    model_config: ModelConfig
    tokenizer: Future[Any]  # importing transformers takes a second, which compiling hides
    generation_defaults: dict[str, Any]
    mesh: Mesh
    dtype: Any
    kv_dtype: Any
    path: AttentionPath
    path_reason: str


@dataclass(frozen=True)
class Ledger:
    """Where memory and start-up time went: bytes and seconds."""

    weights_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int
    device_bytes: int | None = None
    attention: str = ""  # the backend and why
    scratch_bytes: int = 0  # the largest program's temporaries
    compile_seconds: float = 0.0
    num_programs: int = 0
    startup_seconds: float = 0.0

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    def lines(self) -> list[str]:
        """The ledger as text, a line an entry."""
        gib = 1 << 30
        tokens = (self.num_pages - 1) * self.page_size
        return [
            f"weights   {self.weights_bytes / gib:8.3f} GiB",
            f"KV pool   {self.pool_bytes / gib:8.3f} GiB  {self.num_pages} pages of {self.page_size} tokens, {tokens} tokens",
            f"scratch   {self.scratch_bytes / gib:8.3f} GiB",
            f"attention {self.attention}",
            f"programs  {self.num_programs:8d}      compiled in {self.compile_seconds:.1f} s",
            f"ready in  {self.startup_seconds:8.1f} s",
        ]


def load(config: EngineConfig, model: LlamaForCausalLM | None, model_config: ModelConfig | None, tokenizer: Any, progress: bool) -> Loaded:
    """Load weights and tokenizer, or take the caller's."""
    keep_compiled_programs(config)
    mesh = make_mesh(config.parallel)
    platform = mesh.devices.flat[0].platform
    dtype = jnp.dtype(config.load.dtype if config.load.dtype != "auto" else default_dtype(platform))
    defaults: dict[str, Any] = {}
    source = config.load.tokenizer
    if model is None:
        from jaxserve.loader import load_model

        loaded = load_model(config, mesh, dtype, progress=progress)
        model, model_config, defaults = loaded.module, loaded.model_config, loaded.generation_defaults
        source = config.load.tokenizer or loaded.tokenizer_source
    elif model_config is None:
        raise ValueError("model_config is None; a module of the caller's own needs its ModelConfig (config=...)")
    check_divisible(model_config, config.parallel)
    dtype = model.embedding.table[...].dtype  # a caller's own module has its own
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else jnp.dtype(config.cache.kv_cache_dtype)
    path, reason = attention_path(config.attention_backend, model_config, mesh, dtype, kv_dtype, config.cache.page_size)
    path = replace(path, deterministic=config.deterministic)
    prepare_in_background(path)
    if platform == "cpu":
        model = suited_to_cpu(model, path)
    if config.load.generation_config == "none":
        defaults = {}
    return Loaded(model, model_config, _in_background(tokenizer, source), defaults, mesh, dtype, kv_dtype, path, reason)


def _in_background(tokenizer: Any, source: str | None) -> Future[Any]:
    """The caller's tokenizer, or the one that loads from `source` in a thread; None where there is neither."""
    if tokenizer is not None or source is None:
        done: Future[Any] = Future()
        done.set_result(tokenizer)
        return done
    from jaxserve.tokenizer import load_tokenizer

    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(load_tokenizer, source)
    finally:
        thread.shutdown(wait=False)


def default_dtype(platform: str) -> str:
    """float32 where it is the safe choice (CPU), bfloat16 on accelerators."""
    return "float32" if platform == "cpu" else "bfloat16"


def keep_compiled_programs(config: EngineConfig) -> None:
    """Point JAX's persistent compilation cache at the configured directory."""
    directory = config.compilation_cache_dir
    if directory == "none":
        return
    jax.config.update("jax_compilation_cache_dir", directory or os.path.expanduser("~/.cache/jaxserve/xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def suited_to_cpu(module: LlamaForCausalLM, path: AttentionPath) -> LlamaForCausalLM:
    """The module, sharing its arrays, with native matmuls where attention is native, and with a head of its own, transposed, if it is tied.

    x @ table.T runs at a third of the rate of x @ head.
    """
    module = nnx.merge(*nnx.split(module))  # the caller's module stays as it is
    if module.head is None:
        table = module.embedding.table[...]
        module.head = nnx.data(Linear(table.shape[1], (table.shape[0],), table.dtype, ("embed", "vocab")))
        module.head.kernel.set_value(jnp.array(table.T))
    if path.backend == "numba" and path.mesh is None:
        for _, layer in nnx.iter_modules(module):
            if isinstance(layer, Linear):
                layer.backend = "numba"
    return module


def resolve(config: EngineConfig, model: ModelConfig, path: AttentionPath) -> EngineConfig:
    """Every None and "auto" replaced by its number; ValueError where limits contradict each other."""
    limits = config.scheduler
    longest = limits.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ValueError(f"max_model_len is {longest}, but the model's positions end at {model.max_position_embeddings}; give at most that")
    batched = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    limits = replace(limits, max_model_len=longest, max_num_batched_tokens=batched)
    cache = replace(config.cache, page_size=config.cache.page_size or path.page_size)
    return replace(config, scheduler=limits, cache=cache)


def plan_pool(config: EngineConfig, model: ModelConfig, runner: Any) -> Ledger:
    """How many pages fit: as told, or what the device's memory leaves; ValueError when not even one request's page does."""
    cache, page_size = config.cache, cast(int, config.cache.page_size)  # resolve() has replaced None
    size = page_bytes(model, page_size, runner.kv_dtype)
    weights = sum(w.nbytes for w in runner.weights)
    device = runner.mesh.devices.flat[0]
    device_bytes = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if cache.num_pages is not None:
        num_pages = cache.num_pages + 1  # the dummy page comes on top, so that num_pages is what requests can use
    elif cache.kv_cache_memory is not None:
        num_pages = cache.kv_cache_memory // size
    elif device_bytes is None:
        num_pages = CPU_POOL_BYTES // size
    else:
        shards = config.parallel.tensor_parallel_size
        num_pages = int((device_bytes * cache.memory_fraction - weights / shards) * shards // size)
    if num_pages < 2:
        raise ValueError(f"the KV pool would hold {num_pages} page(s) of {size} bytes; raise num_pages, kv_cache_memory or memory_fraction")
    return Ledger(weights, size, int(num_pages), page_size, device_bytes)
