"""A pairwise sample of the test matrix of paged attention: every two values of two axes meet in some case, in about 60 cases."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels import pool_shape
from pallas_kernels.kv_write.quantize import is_quantized, quantize

LENGTHS = {  # tokens of each row of a case, given the page size
    "edges": lambda page: (0, 1, page - 1, page, page + 1),
    "block": lambda page: (63, 64, 65, 129),
    "long": lambda page: (290, 7),
    "ragged": lambda page: (1, 150, 3, 33, 80),
    "short": lambda page: (1, 2, 3, 1, 5),
    "full": lambda page: (2 * page, page, 2 * page),  # the whole table
}
FEATURES = {
    "none": {},
    "window": {"sliding_window": 20},
    "cap": {"soft_cap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "scales": {"scales": "scalar"},
    "slots": {"scales": "slots"},
    "window+cap": {"sliding_window": 70, "soft_cap": 2.0},
    "sinks+window": {"sliding_window": 33, "sinks": True},
    "all": {"sliding_window": 90, "soft_cap": 2.5, "alibi": True, "sinks": True, "scales": "slots"},
}
AXES = {
    "dtypes": (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float8_e4m3fn"),
        ("bfloat16", "int8"),
        ("float32", "int8"),
    ),
    "feature": tuple(FEATURES),
    "lengths": tuple(LENGTHS),
    "group": (1, 4, 5, 7, 8, 16),
    "head_dim": (64, 80, 96, 128, 256),
    "page_size": (8, 16, 32, 64, 128),
    "kv_heads": (1, 2, 3, 8),
    "step": ("decode", "mixed", "prefill"),
    "tables": ("identity", "shuffled", "shared"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: ``prefixes[r]`` cached tokens and ``num_queries[r]`` queries a row; rows of one query first."""

    num_queries: tuple[int, ...]
    prefixes: tuple[int, ...]
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    padding_rows: int = 1
    padding_tokens: int = 3
    dtype: str = "float32"
    decode_only: bool = False
    page_dtype: str = ""  # "": as dtype
    tables: str = "shuffled"
    spare_pages: int = 1  # width of the tables beyond the longest row
    feature: str = "none"

    def build(self, seed=0):
        """The call's arrays, pools token-major; every slot and token that is not in use holds NaN, or the largest int8."""
        rng = np.random.default_rng(seed)
        lens = np.array([*(n + p for n, p in zip(self.num_queries, self.prefixes, strict=True)), *[0] * self.padding_rows], np.int32)
        rows, pages_per_row = len(lens), max(-(-max(lens) // self.page_size) + self.spare_pages, 1)
        num_pages = rows * pages_per_row + 2
        tables = self._tables(rng, num_pages, rows, pages_per_row)
        used = np.zeros((num_pages, self.page_size), bool)
        for row, length in enumerate(lens):
            positions = np.arange(length)
            used[tables[row, positions // self.page_size], positions % self.page_size] = True
        shape = pool_shape(num_pages, self.page_size, self.kv_heads, self.head_dim, "xla")
        pools = (np.where(used[:, :, None, None], rng.standard_normal(shape), np.nan).astype(np.float32) for _ in range(2))
        num_queries = np.array([*self.num_queries, *[0] * self.padding_rows])
        starts = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
        num_tokens = rows if self.decode_only else starts[-1] + self.padding_tokens
        q = np.full((num_tokens, self.heads, self.head_dim), np.nan, np.float32)
        q[: starts[-1]] = rng.standard_normal((starts[-1], self.heads, self.head_dim))
        num_decode = next((r for r, n in enumerate(self.num_queries) if n != 1), len(self.num_queries))
        distribution = np.array([num_decode, len(self.num_queries)], np.int32)
        return [
            jnp.asarray(q, self.dtype),
            *(self._store(pages) for pages in pools),
            *(jnp.asarray(x) for x in (tables, lens, starts, distribution)),
        ]

    def _tables(self, rng, num_pages, rows, pages_per_row):
        pages = np.arange(num_pages) if self.tables == "identity" else rng.permutation(num_pages)
        tables = pages[: rows * pages_per_row].reshape(rows, pages_per_row).astype(np.int32)
        if self.tables == "shared":
            tables[-1 - self.padding_rows, 0] = tables[0, 0]  # a prefix of one page in two rows
        return tables

    def _store(self, pages):
        dtype = jnp.dtype(self.page_dtype or self.dtype)
        if not is_quantized(dtype):
            return jnp.asarray(pages, dtype)
        stored, _ = quantize(jnp.asarray(pages), dtype)
        return jnp.where(jnp.isnan(pages), jnp.asarray(127 if dtype == jnp.int8 else jnp.nan, dtype), stored)

    def options(self, seed=1):
        """Keyword arguments of the call for this case's feature; scales of unused slots are NaN where the page's floats are."""
        rng = np.random.default_rng(seed)
        options = dict(FEATURES[self.feature])
        if options.pop("alibi", False):
            options["alibi_slopes"] = jnp.linspace(0.02, 0.5, self.heads, dtype=jnp.float32)
        if options.pop("sinks", False):
            options["sinks"] = jnp.linspace(-2, 4, self.heads, dtype=jnp.float32)
        quantized = {"int8": 3 / 127, "float8_e4m3fn": 3 / 448}.get(self.page_dtype, 1.0)
        scales = options.pop("scales", "scalar" if quantized != 1 else "none")
        if scales == "scalar":
            options |= {"k_scale": jnp.float32(0.5 * quantized), "v_scale": jnp.float32(1.5 * quantized)}
        elif scales == "slots":
            arrays = self.build()
            used = np.zeros(arrays[1].shape[:2], bool)
            for table, length in zip(np.asarray(arrays[3]), np.asarray(arrays[4]), strict=True):
                used[table[np.arange(length) // self.page_size], np.arange(length) % self.page_size] = True
            values = quantized * rng.uniform(0.3, 1.2, (2, *arrays[1].shape[:3]))
            options["k_scale"], options["v_scale"] = jnp.asarray(np.where(used[:, :, None], values, np.nan), jnp.float32)
        return options

    @property
    def plain_name(self) -> str:
        """A short name for a test's id."""
        kind = "decode" if self.decode_only else "mixed"
        shape = f"{self.kv_heads}x{self.heads // self.kv_heads}x{self.head_dim}-page{self.page_size}"
        return f"{kind}-{self.dtype}-{self.page_dtype or self.dtype}-{shape}-{self.feature}-{self.tables}-rows{len(self.num_queries)}"


def matrix(**axes: Sequence) -> list[Case]:
    """The sampled cases; an axis given replaces that of AXES, so that a backend leaves out what it refuses. The same each time."""
    unknown = set(axes) - set(AXES)
    if unknown:
        raise ValueError(f"axes {sorted(unknown)}: expected some of {sorted(AXES)}")
    return [_case(**point) for point in pairwise({**AXES, **{name: tuple(values) for name, values in axes.items()}})]


def pairwise(axes: dict[str, tuple], candidates: int = 12) -> list[dict]:
    """Points that together hold every pair of values of two different axes: greedy, each the best of some random completions."""
    names, rng = list(axes), random.Random(0)
    left = set()
    for a, b in itertools.combinations(names, 2):
        left |= {frozenset(((a, x), (b, y))) for x, y in itertools.product(range(len(axes[a])), range(len(axes[b])))}
    points = []
    while left:
        start = min(left, key=lambda pair: sorted(pair))
        best, covered = None, set()
        for _ in range(candidates):
            point = _complete(dict(start), axes, left, rng)
            pairs = {frozenset(pair) for pair in itertools.combinations(point.items(), 2)} & left
            if len(pairs) > len(covered):
                best, covered = point, pairs
        left -= covered
        points.append({name: axes[name][best[name]] for name in names})
    return points


def _complete(point: dict[str, int], axes: dict[str, tuple], left: set, rng: random.Random) -> dict[str, int]:
    """Fill the other axes in random order, each with the value that meets most pairs that are left."""
    others = [name for name in axes if name not in point]
    rng.shuffle(others)
    for name in others:
        gain = [sum(frozenset(((name, i), pair)) in left for pair in point.items()) for i in range(len(axes[name]))]
        point[name] = rng.choice([i for i, count in enumerate(gain) if count == max(gain)])
    return point


def _case(dtypes, feature, lengths, group, head_dim, page_size, kv_heads, step, tables) -> Case:
    lens = LENGTHS[lengths](page_size)
    if step == "decode":
        num_queries = [1] * len(lens)
    else:
        lens = [n for n in lens if n > 0]  # only decode steps have rows of length 0
        decode = len(lens) // 2 if step == "mixed" else 0
        # Whole prompts and last chunks of one, in turn.
        num_queries = [1 if row < decode else min(n, 70) if row % 2 else -(-min(n, 40) // 2) for row, n in enumerate(lens)]
        order = sorted(range(len(lens)), key=lambda row: num_queries[row] != 1)
        lens, num_queries = [lens[row] for row in order], [num_queries[row] for row in order]
    return Case(
        tuple(num_queries),
        tuple(n - count for n, count in zip(lens, num_queries, strict=True)),
        kv_heads * group,
        kv_heads,
        head_dim,
        page_size,
        dtype=dtypes[0],
        page_dtype=dtypes[1],
        decode_only=step == "decode",
        tables=tables,
        spare_pages=0 if lengths == "full" else 1,
        feature=feature,
    )
