"""ModelRunner: sizes the pool, compiles one program per bucket, dispatches steps and collects their results. The only jit site."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import programs
from jaxserve.engine.input_batch import Bucket, InputLayout, SamplingLayout, sampling_variant, successors
from jaxserve.engine.scheduler import SchedulerOutput
from jaxserve.kv_cache import KVCache, abstract_kv_cache
from jaxserve.layers.attention import AttentionPath
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.sampler import VARIANTS
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.sharding import param_sharding


@dataclass
class CompileStats:
    """What compilation cost, for the ledger and /metrics."""

    num_programs: int = 0
    seconds: float = 0.0  # wall time of the whole start-up compilation
    program_seconds: dict[str, float] = field(default_factory=dict)
    temp_bytes: int = 0  # the largest program's temporaries


@dataclass(frozen=True)
class StepResult:
    """A step's results on the host: ids i32[rows], and where asked for (logprob, rank, top ids, top logprobs) by row or token."""

    ids: np.ndarray
    logprobs: tuple[np.ndarray, ...] | None
    prompt_logprobs: tuple[np.ndarray, ...] | None


@dataclass(frozen=True)
class InFlightStep:
    """A dispatched step; `collect` waits for it."""

    scheduled: SchedulerOutput
    ids: jax.Array
    logprobs: tuple[jax.Array, ...] | None
    prompt_logprobs: tuple[jax.Array, ...] | None

    def collect(self) -> StepResult:
        """Wait for the device and copy the results; called once, a step after the dispatch."""
        read = lambda arrays: None if arrays is None else tuple(np.asarray(a) for a in arrays)  # noqa: E731
        return StepResult(np.asarray(self.ids), read(self.logprobs), read(self.prompt_logprobs))


class ModelRunner:
    """Owns the weights, the pool and the programs of one model on one mesh."""

    def __init__(
        self,
        config: EngineConfig,
        model: LlamaForCausalLM,
        model_config: ModelConfig,
        mesh: Mesh,
        dtype: Any,
        kv_dtype: Any,
        path: AttentionPath,
    ):
        """A `model` without values (abstract parameters) gives `forward_jobs` to compile, even for a mesh that does not exist."""
        self.config, self.model_config, self.mesh, self.path = config, model_config, mesh, path
        platform = mesh.devices.flat[0].platform
        self.rolled = platform == "cpu" if config.layer_loop == "auto" else config.layer_loop == "rolled"
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.graphdef, state = nnx.split(model)
        placed = [_place(value.get_value(), param_sharding(mesh, value)) for _, value in nnx.to_flat_state(state)]
        self.treedef = jax.tree.structure(state)
        self.weights: tuple[jax.Array, ...] = tuple(placed)
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.buckets = make_buckets(config)
        self.max_num_seqs = max(bucket.num_rows for bucket in self.buckets)
        page_size, vocab_size = cast(int, config.cache.page_size), model_config.vocab_size  # resolve() has replaced None
        width = -(-cast(int, config.scheduler.max_model_len) // page_size)
        self.layouts = {bucket: InputLayout(bucket, width, page_size) for bucket in self.buckets}
        self.sampling_layouts = {
            variant: [SamplingLayout(rows, vocab_size) for rows in sampling_rows(self.max_num_seqs, 2 if variant == "greedy" else 4)]
            for variant in ("greedy", *VARIANTS)
        }
        self.programs: dict[tuple, Callable] = {}
        self.stats = CompileStats()
        self.pool: KVCache | None = None
        self.prev_ids: jax.Array | None = None
        self.prev_rows: dict[str, int] = {}

    def compile(self, num_pages: int, progress: bool = False) -> CompileStats:
        """Allocate a pool of num_pages and build every program; afterwards nothing compiles any more. Returns what it cost."""
        start = time.perf_counter()
        pool = self.abstract_pool(num_pages)
        jobs = [*self._other_jobs(), *self.forward_jobs(pool)]  # those with attention last: its native loops may still compile
        bar = tqdm(total=len(jobs), desc="compiling", unit="program", disable=not progress)
        with ThreadPoolExecutor(max_workers=2) as threads:
            for key, program, seconds in threads.map(_compile, jobs):
                self.programs[key] = program
                self.stats.program_seconds["/".join(map(str, key))] = seconds
                memory = program.memory_analysis()
                self.stats.temp_bytes = max(self.stats.temp_bytes, memory.temp_size_in_bytes if memory else 0)
                bar.update()
        bar.close()
        zeros = jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), pool), out_shardings=jax.tree.map(lambda a: a.sharding, pool)
        )
        self.pool = zeros()
        self.prev_ids = jax.device_put(np.zeros(self.max_num_seqs, np.int32), self.replicated)
        self.stats.num_programs = len(self.programs)
        self.stats.seconds = time.perf_counter() - start
        return self.stats

    def abstract_pool(self, num_pages: int) -> KVCache:
        """Shapes and shardings of a pool of num_pages a layer, in the attention backend's layout."""
        size = cast(int, self.config.cache.page_size)
        return abstract_kv_cache(self.model_config, num_pages, size, self.kv_dtype, self.mesh, self.path.backend, self.rolled)

    def forward_jobs(self, pool: KVCache) -> list[tuple]:
        """(key, function, donated arguments, abstract arguments, output shardings) of every forward program."""
        weights, max_tokens = self._abstract_weights(), self.buckets[-1].num_tokens
        prev_ids = self._abstract((self.max_num_seqs,), jnp.int32)
        jobs = []
        for bucket, layout in self.layouts.items():
            forward = programs.forward_program(self.graphdef, self.treedef, layout, self.path, self.max_num_seqs, max_tokens)
            outputs = (self.replicated, None if bucket.decode_only else self.replicated, jax.tree.map(lambda a: a.sharding, pool))
            buffer = self._abstract((layout.size,), jnp.int32)
            jobs.append((("forward", bucket), forward, (1,), (weights, pool, prev_ids, buffer), outputs))
        return jobs

    def _other_jobs(self) -> list[tuple]:
        """As forward_jobs, of the sampling and scoring programs, which compile faster."""
        weights, last = self._abstract_weights(), self._hidden(self.max_num_seqs)
        prev_ids, count = self._abstract((self.max_num_seqs,), jnp.int32), self._abstract((1,), jnp.int32)
        model, max_tokens = (self.graphdef, self.treedef), self.buckets[-1].num_tokens
        jobs = []
        for variant, layouts in self.sampling_layouts.items():
            for layout in layouts:
                sample = programs.sample_program(*model, variant, layout)
                settings = () if variant == "greedy" else (self._abstract((layout.size,), jnp.int32),)
                jobs.append((("sample", variant, layout.num_rows), sample, (), (weights, last, *settings), self.replicated))
        score = programs.score_program(*model, MAX_LOGPROBS)
        jobs.append((("score", "sampled"), score, (), (weights, last, prev_ids, count), self.replicated))
        targets = self._abstract((max_tokens,), jnp.int32)
        jobs.append((("score", "prompt"), score, (), (weights, self._hidden(max_tokens), targets, count), self.replicated))
        return jobs

    def _abstract_weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for w in self.weights)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def _hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return self._abstract((rows, self.model_config.hidden_size), self.dtype)

    def bucket_for(self, scheduled: SchedulerOutput) -> Bucket:
        """The smallest bucket that holds the step."""
        rows, tokens = len(scheduled.rows), scheduled.num_tokens
        decode_only = scheduled.num_decode_rows == rows
        for bucket in self.buckets:
            if bucket.decode_only == decode_only and bucket.num_rows >= rows and bucket.num_tokens >= tokens:
                return bucket
        raise RuntimeError(f"no program for {tokens} tokens of {rows} rows; the scheduler went over its limits: a bug")

    def dispatch(self, scheduled: SchedulerOutput) -> InFlightStep:
        """Start a step on the device and return at once; its sampled ids stay there as the next step's input."""
        bucket, run = self.bucket_for(scheduled), self.programs
        params = [row.request.sampling_params for row in scheduled.rows]
        buffer = self._put(self.layouts[bucket].pack(scheduled, self.prev_rows))
        last, hidden, self.pool = run["forward", bucket](self.weights, self.pool, self.prev_ids, buffer)
        variant = sampling_variant(scheduled)
        layout = next(layout for layout in self.sampling_layouts[variant] if layout.num_rows >= len(params))
        settings = () if variant == "greedy" else (self._put(layout.pack(scheduled)),)
        ids = run["sample", variant, layout.num_rows](self.weights, last, *settings)
        logprobs = prompt_logprobs = None
        if any(p.logprobs is not None for p in params):
            logprobs = run["score", "sampled"](self.weights, last, ids, self._put(np.array([len(params)], np.int32)))
        if hidden is not None and any(p.prompt_logprobs is not None for p in params):
            targets = self._put(successors(scheduled, hidden.shape[0]))
            prompt_logprobs = run["score", "prompt"](self.weights, hidden, targets, self._put(np.array([scheduled.num_tokens], np.int32)))
        for array in (ids, *(logprobs or ()), *(prompt_logprobs or ())):
            array.copy_to_host_async()
        self.prev_ids = ids
        self.prev_rows = {row.request.request_id: i for i, row in enumerate(scheduled.rows)}
        return InFlightStep(scheduled, ids, logprobs, prompt_logprobs)

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self.replicated)


def _place(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    return jax.device_put(value, sharding)


def _compile(job: tuple) -> tuple[tuple, jax.stages.Compiled, float]:
    key, function, donated, arguments, out_shardings = job
    start = time.perf_counter()
    program = jax.jit(function, donate_argnums=donated, out_shardings=out_shardings).lower(*arguments).compile()
    return key, program, time.perf_counter() - start


def make_buckets(config: EngineConfig) -> list[Bucket]:
    """The forward programs' shapes, smallest first; ValueError when those given do not reach the scheduler's limits.

    Decode rows: powers of two from 8 up, and from 32 also those times 1.5; fewer than 8 rows would take as long, as reading the weights
    bounds them. Mixed tokens: max_num_batched_tokens and its quarters down to 32.
    """
    limits = config.scheduler
    most_rows, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    decode = limits.decode_buckets or _decode_rows(most_rows)
    tokens = limits.token_buckets or _powers(min(32, most_tokens), most_tokens, 4)
    for name, sizes, limit_name, limit in (
        ("decode_buckets", decode, "max_num_seqs", limits.max_num_seqs),
        ("token_buckets", tokens, "max_num_batched_tokens", most_tokens),
    ):
        if min(sizes) < 1 or max(sizes) < limit or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"{name} is {tuple(sizes)}; give ascending sizes of which the last is at least {limit_name} ({limit})")
    return [Bucket(rows, rows, True) for rows in decode] + [Bucket(count, min(most_rows, count), False) for count in tokens]


def sampling_rows(most: int, factor: int) -> list[int]:
    """Row counts of a sampling variant's programs: the most, and its fractions down to 8."""
    return _powers(min(8, most), most, factor)


def _decode_rows(most: int) -> list[int]:
    rows = {most, *(2**i for i in range(3, 12)), *(3 * 2**i for i in range(4, 11))}
    return sorted(n for n in rows if n <= most)


def _powers(low: int, high: int, factor: int) -> list[int]:
    """high, high / factor, ... down to low, in ascending order."""
    sizes = [high]
    while sizes[-1] // factor >= low:
        sizes.append(sizes[-1] // factor)
    return sizes[::-1]
