"""ModelRunner: sizes the pool, compiles one program per bucket, dispatches steps and collects their results. The only jit site."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import programs
from jaxserve.engine.input_batch import Bucket, InputLayout, sampling_variant
from jaxserve.engine.scheduler import SchedulerOutput
from jaxserve.kv_cache import KVCache, abstract_kv_cache
from jaxserve.sampler import VARIANTS
from jaxserve.sampling_params import MAX_LOGPROBS


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

    def __init__(self, config: EngineConfig, model: nnx.Module, model_config: ModelConfig, mesh: Mesh, kv_dtype: Any, backend: str):
        self.config, self.model_config, self.mesh, self.backend = config, model_config, mesh, backend
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.graphdef, state = nnx.split(model)
        weights, self.treedef = jax.tree.flatten(state)
        self.weights: tuple[jax.Array, ...] = tuple(weights)
        self.kv_dtype = kv_dtype
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.buckets = make_buckets(config)
        self.layouts = {bucket: self._layout(bucket) for bucket in self.buckets}
        self.programs: dict[tuple, Callable] = {}
        self.stats = CompileStats()
        self.pool: KVCache | None = None
        self.prev_ids: jax.Array | None = None
        self.prev_rows: dict[str, int] = {}

    def _layout(self, bucket: Bucket) -> InputLayout:
        page_size = self.config.cache.page_size
        width = -(-self.config.scheduler.max_model_len // page_size)
        return InputLayout(bucket, width, page_size, self.model_config.vocab_size)

    def compile(self, num_pages: int, progress: bool = False) -> None:
        """Allocate a pool of num_pages and build every program; afterwards nothing compiles any more."""
        start = time.perf_counter()
        pool = abstract_kv_cache(self.model_config, num_pages, self.config.cache.page_size, self.kv_dtype, self.mesh, self.backend)
        jobs = self._jobs(pool)
        bar = tqdm(total=len(jobs), desc="compiling", unit="program", disable=not progress)
        with ThreadPoolExecutor(max_workers=2) as threads:
            for key, program, seconds in threads.map(_compile, jobs):
                self.programs[key] = program
                self.stats.program_seconds["/".join(map(str, key))] = seconds
                bar.update()
        bar.close()
        zeros = jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), pool), out_shardings=jax.tree.map(lambda a: a.sharding, pool))
        self.pool = zeros()
        self.prev_ids = jax.device_put(np.zeros(self.max_num_seqs, np.int32), self.replicated)
        self.stats.num_programs = len(self.programs)
        self.stats.seconds = time.perf_counter() - start

    def _jobs(self, pool: KVCache) -> list[tuple]:
        """(key, function, donated arguments, abstract arguments) of every program, the slowest to compile first."""
        config, abstract = self.model_config, lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)  # noqa: E731
        weights = tuple(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for w in self.weights)
        prev_ids = abstract((self.max_num_seqs,), jnp.int32)
        hidden_dtype = jnp.dtype(self.config.load.dtype)
        jobs = []
        for bucket, layout in self.layouts.items():
            buffer = abstract((layout.size,), jnp.int32)
            logits = abstract((bucket.num_rows, config.vocab_size), jnp.float32)
            hidden = abstract((bucket.num_tokens, config.hidden_size), hidden_dtype)
            forward = programs.forward_program(self.graphdef, self.treedef, layout, self.backend)
            outputs = (self.replicated, self.replicated, jax.tree.map(lambda a: a.sharding, pool))
            jobs.append((("forward", bucket), forward, (1,), (weights, pool, prev_ids, buffer), outputs))
            for variant in VARIANTS:
                sample = programs.sample_program(variant, layout, self.max_num_seqs)
                jobs.append((("sample", variant, bucket), sample, (), (logits, buffer), self.replicated))
            jobs.append((("logprobs", bucket), programs.logprobs_program(MAX_LOGPROBS), (), (logits, prev_ids), self.replicated))
            if not bucket.decode_only:
                score = programs.score_program(self.graphdef, self.treedef, layout, MAX_LOGPROBS)
                jobs.append((("score", bucket), score, (), (weights, hidden, buffer), self.replicated))
        return sorted(jobs, key=lambda job: job[0][0] != "forward")

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
        bucket = self.bucket_for(scheduled)
        packed = self.layouts[bucket].pack(scheduled, self.prev_rows)
        buffer = jax.device_put(packed, self.replicated)
        run = self.programs
        logits, hidden, self.pool = run["forward", bucket](self.weights, self.pool, self.prev_ids, buffer)
        ids = run["sample", sampling_variant(scheduled), bucket](logits, buffer)
        logprobs = prompt_logprobs = None
        if any(row.samples and row.request.sampling_params.logprobs is not None for row in scheduled.rows):
            logprobs = run["logprobs", bucket](logits, ids)
        if not bucket.decode_only and any(row.request.sampling_params.prompt_logprobs is not None for row in scheduled.rows):
            prompt_logprobs = run["score", bucket](self.weights, hidden, buffer)
        for array in (ids, *(logprobs or ()), *(prompt_logprobs or ())):
            array.copy_to_host_async()
        self.prev_ids = ids
        self.prev_rows = {row.request.request_id: i for i, row in enumerate(scheduled.rows)}
        return InFlightStep(scheduled, ids, logprobs, prompt_logprobs)


def _compile(job: tuple) -> tuple[tuple, Callable, float]:
    key, function, donated, arguments, out_shardings = job
    start = time.perf_counter()
    program = jax.jit(function, donate_argnums=donated, out_shardings=out_shardings).lower(*arguments).compile()
    return key, program, time.perf_counter() - start


def make_buckets(config: EngineConfig) -> list[Bucket]:
    """The programs' shapes, smallest first: decode rows in powers of two from 2 up, mixed tokens in powers of four down from the most.

    One row is avoided: XLA on CPU turns a scatter of one index into a select over the whole pool, 30 times slower than two.
    """
    limits = config.scheduler
    decode = limits.decode_buckets or _powers(2, max(2, limits.max_num_seqs), 2)
    tokens = limits.token_buckets or _powers(min(32, limits.max_num_batched_tokens), limits.max_num_batched_tokens, 4)
    buckets = [Bucket(rows, rows, True) for rows in decode]
    return buckets + [Bucket(count, min(limits.max_num_seqs, count), False) for count in tokens]


def _powers(low: int, high: int, factor: int) -> Sequence[int]:
    """high, high / factor, ... down to low, in ascending order."""
    sizes = [high]
    while sizes[-1] // factor >= low:
        sizes.append(sizes[-1] // factor)
    return sizes[::-1]
