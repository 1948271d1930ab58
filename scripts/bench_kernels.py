"""Numerics and speed of the attention kernels on this machine's device, as JSON; can be stopped and started again.

Each case runs several implementations: this package's kernel for the device, its XLA path, and, where they run, JAX's own paged attention
and cuDNN's. A result is the time of one layer: a program walks through the pools of as many layers as exceed the device's caches, so
that no pool is still in a cache when its turn comes. Decode says what share of the memory's rate it reaches, prefill what share of the
matrix rate. Cases that the file already has, of the same device and commit, are not run again; after --minutes no new one is started.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxserve.provenance import commit, device, versions
from pallas_kernels import choose_backend, default_page_size, paged_attention
from pallas_kernels.pool import from_token_major
from scripts.bench_peers import PEERS

# Part of the device kind -> (bytes/s of the memory, dense bfloat16 FLOP/s), from the makers' data sheets.
PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.04e12, 312e12),
    "TPU v4": (1.23e12, 275e12),
    "TPU v5 lite": (0.82e12, 197e12),
    "TPU v5p": (2.77e12, 459e12),
    "TPU v6 lite": (1.64e12, 918e12),
    "TPU7x": (3.69e12, 1153e12),
}
ROTATE_BYTES = 256 << 20  # of pools in one program; the largest cache of these devices is 128 MiB
CHECK_TOKENS = 1 << 14  # most tokens of context for which the reference is run


@dataclass(frozen=True)
class Case:
    """`batch` rows of `context` tokens, each with one query (decode) or `queries` (prefill)."""

    batch: int
    context: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    page_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        kind = "decode" if self.queries == 1 else f"prefill{self.queries}"
        return f"{kind}-b{self.batch}-c{self.context}-h{self.heads}x{self.kv_heads}x{self.head_dim}-{self.page_dtype}"

    @property
    def layer_bytes(self) -> int:
        """What one layer must read and write at least: each key and value once, queries and outputs."""
        kv = 2 * self.batch * self.context * self.kv_heads * self.head_dim * jnp.dtype(self.page_dtype).itemsize
        return kv + 2 * self.batch * self.queries * self.heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def layer_flops(self) -> int:
        """Multiplications and additions of both products over the pairs that causality leaves."""
        pairs = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * pairs


@dataclass
class Result:
    """One implementation in one case; times are of one layer."""

    case: str
    implementation: str
    error: str = ""
    microseconds: float | None = None
    spread: float | None = None  # (slowest - fastest) / median of the repetitions
    gigabytes_per_second: float | None = None
    bandwidth_share: float | None = None
    teraflops: float | None = None
    flops_share: float | None = None
    max_error: float | None = None  # against the float32 reference; None where that would take too long


def cases(small: bool) -> Iterator[Case]:
    """The shapes to run: on an accelerator those of 8B and 70B models and small heads, on a CPU tiny ones."""
    if small:
        for heads, kv_heads, head_dim in ((9, 3, 64), (8, 2, 128)):
            yield from (Case(b, c, 1, heads, kv_heads, head_dim, "float32", "float32") for b, c in ((1, 256), (8, 512)))
            yield Case(2, 256, 128, heads, kv_heads, head_dim, "float32", "float32")
        return
    for batch, context in itertools.product((1, 8, 64, 256), (512, 4096, 32768)):
        if batch * context <= 1 << 20:
            yield Case(batch, context)
    yield from (Case(1, n, n) for n in (1024, 8192))
    yield Case(8, 4096, 512)
    for heads, kv_heads, head_dim in ((64, 8, 128), (8, 1, 128), (14, 2, 64), (32, 8, 80), (32, 8, 96), (8, 4, 256)):
        yield Case(64, 4096, 1, heads, kv_heads, head_dim)
        yield Case(1, 4096, 4096, heads, kv_heads, head_dim)
    yield from (Case(64, 4096, page_dtype=dtype) for dtype in ("float8_e4m3fn", "int8"))


def make_arrays(case: Case, page_size: int, num_layers: int) -> tuple[jax.Array, list[tuple], list[jax.Array]]:
    """(q, token-major pools of each layer, metadata), with shuffled tables."""
    pages_per_row = -(-case.context // page_size)
    tables = np.random.default_rng(0).permutation(case.batch * pages_per_row).reshape(case.batch, -1).astype(np.int32)
    shape = (tables.size, page_size, case.kv_heads, case.head_dim)
    scale = 100 if case.page_dtype == "int8" else 1

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return scale * jax.random.normal(key, shape, jnp.bfloat16)

    keys = iter(jax.random.split(jax.random.key(0), 2 * num_layers + 1))
    q = normal(next(keys), (case.batch * case.queries, case.heads, case.head_dim)).astype(case.dtype) / scale
    pools = [tuple(normal(next(keys), shape).astype(case.page_dtype) for _ in range(2)) for _ in range(num_layers)]
    starts = np.arange(case.batch + 1, dtype=np.int32) * case.queries
    decode_rows = case.batch if case.queries == 1 else 0
    metadata = (tables, np.full(case.batch, case.context, np.int32), starts, np.array([decode_rows, case.batch], np.int32))
    return q, pools, [jnp.asarray(x) for x in metadata]


def ours(backend: str) -> tuple[Callable, Callable]:
    """This package's attention with the signature of the peers in bench_peers."""

    def prepare(case: Case, pools: list[tuple]) -> list[tuple]:
        return [tuple(from_token_major(pages, backend) for pages in pair) for pair in pools]

    def attend(case: Case, q, k_pages, v_pages, *metadata):
        scale = {"k_scale": 0.01, "v_scale": 0.01} if case.page_dtype == "int8" else {}
        return paged_attention(
            q, k_pages, v_pages, *metadata, sm_scale=case.head_dim**-0.5, decode_only=case.queries == 1, backend=backend, **scale
        )

    return prepare, attend


def measure(case: Case, implementation: str, prepare: Callable, attend: Callable, page_size: int, seconds: float) -> Result:
    """Run one implementation; whatever it raises is its result."""
    result = Result(case.name, implementation)
    try:
        layers = max(1, min(64, -(-ROTATE_BYTES // case.layer_bytes)))
        q, token_major, metadata = make_arrays(case, page_size, layers)
        pools = prepare(case, token_major)

        @jax.jit
        def program(q, pools, metadata):
            for k_pages, v_pages in pools:  # each layer's queries need the one before, so that none can be left out or moved
                q = q + attend(case, q, k_pages, v_pages, *metadata) * jnp.asarray(1e-3, q.dtype)
            return q

        jax.block_until_ready(program(q, pools, metadata))
        times, began = [], time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < 200):
            start = time.perf_counter()
            jax.block_until_ready(program(q, pools, metadata))
            times.append(1e6 * (time.perf_counter() - start) / layers)
        fill_in(result, case, times)
        if case.batch * case.context <= CHECK_TOKENS:
            result.max_error = error_of(case, attend, q, pools[0], token_major[0], metadata)
    except Exception as error:  # a peer may refuse a shape or be absent: that is its result
        result.error = f"{type(error).__name__}: {str(error).strip()[:300]}"
    return result


def fill_in(result: Result, case: Case, times: list[float]) -> None:
    """Times in microseconds of a layer -> the rates, and their shares of the device's peaks where those are known."""
    median = statistics.median(times)
    result.microseconds, result.spread = round(median, 2), round((max(times) - min(times)) / median, 3)
    result.gigabytes_per_second = round(case.layer_bytes / median / 1e3, 2)
    result.teraflops = round(case.layer_flops / median / 1e6, 3)
    peaks = next((value for kind, value in PEAKS.items() if kind in jax.devices()[0].device_kind), None)
    if peaks is not None:
        result.bandwidth_share = round(1e9 * result.gigabytes_per_second / peaks[0], 3)
        result.flops_share = round(1e12 * result.teraflops / peaks[1], 3)


def error_of(case: Case, attend: Callable, q, pools: tuple, token_major: tuple, metadata: list) -> float:
    got = jax.jit(functools.partial(attend, case))(q, *pools, *metadata)
    want = jax.jit(functools.partial(ours("reference")[1], case))(q.astype(jnp.float32), *token_major, *metadata)
    return float(jnp.max(jnp.abs(got.astype(jnp.float32) - want)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench_kernels.json"), help="file of the results, read first and added to")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no case after this time")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.3, help="time to measure each implementation for")
    args = parser.parse_args()
    where = {"device": device(), "commit": commit(), "versions": versions()}
    chip = jax.devices()[0]
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    if any(stored.get(key) != where[key] for key in ("device", "commit")):
        stored = {**where, "results": []}
    done = {(x["case"], x["implementation"]) for x in stored["results"]}
    began = time.monotonic()
    for case in tqdm([case for case in cases(chip.platform == "cpu") if args.match in case.name], unit="case"):
        heads: dict[str, Any] = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
        best, _ = choose_backend(chip.platform, chip.device_kind, **heads, dtype=case.dtype, page_dtype=case.page_dtype)
        implementations = {name: ours(name) for name in dict.fromkeys((best, "xla"))} | PEERS.get(chip.platform, {})
        for name, (prepare, attend) in implementations.items():
            if (case.name, name) in done or time.monotonic() - began > 60 * args.minutes:
                continue
            result = measure(case, name, prepare, attend, default_page_size(best), args.seconds)
            stored["results"].append(asdict(result))
            args.out.write_text(json.dumps(stored, indent=1))
    print(json.dumps(stored, indent=1))


if __name__ == "__main__":
    main()
