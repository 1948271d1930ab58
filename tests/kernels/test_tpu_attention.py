"""The TPU attention kernels in Pallas' TPU interpreter, with its race detector, against the reference."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_suite import AttentionSuite, dense_float64
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from matrix import FEATURES, Case, matrix

from pallas_kernels.paged_attention import tpu, tpu_lanes, tpu_pages, tpu_rows
from pallas_kernels.paged_attention.options import Options
from pallas_kernels.paged_attention.tpu_prefill import make_segments

# Copies that run when they are waited for show a missing wait as NaN, those that run at once show a buffer filled too early.
MODES = {
    mode: pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan") for mode in ("on_wait", "eager")
}
BOTH_MODES = pytest.mark.parametrize("mode", MODES)
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("bfloat16", "int8"), ("float32", "int8")]
NO_SLOT_SCALES = [name for name, options in FEATURES.items() if options.get("scales") != "slots"]
DECODE = Case((1,) * 7, (0, 126, 127, 128, 299, 5, 0), 8, 2, 128, 128, padding_rows=2, decode_only=True)
MIXED = Case((1, 1, 5, 200, 64, 65, 1, 130), (0, 150, 0, 0, 64, 63, 40, 127), 8, 2, 128, 128, padding_rows=3)
FEW_TOKENS = Case((1, 1, 3), (7, 70, 33), 8, 2, 128, 128, padding_rows=40)
WINDOWS = {
    "short": {"sliding_window": 20},
    "page": {"sliding_window": 128},
    "with everything": {
        "sliding_window": 150,
        "soft_cap": 1.5,
        "alibi_slopes": np.linspace(0.02, 0.5, 8, dtype=np.float32),
        "sinks": np.linspace(-2, 4, 8, dtype=np.float32),
        "k_scale": np.float32(0.5),
        "v_scale": np.float32(3.0),
    },
}


def races_found():
    """Whether the interpreter's last kernel had a race."""
    return interpreter.races is not None and interpreter.races.races_found


@pytest.fixture(autouse=True)
def no_race():
    yield
    assert not races_found()


def alternate(cases):
    """(case, mode) with either mode for every other case; all but each fifth marked exhaustive: the interpreter takes seconds a case."""
    modes = list(MODES) * len(cases)
    marks = [() if i % 5 == 0 else pytest.mark.exhaustive for i in range(len(cases))]
    return pytest.mark.parametrize(
        ("case", "mode"),
        [
            pytest.param(case, mode, id=f"{case.plain_name}-{mode}", marks=mark)
            for case, mode, mark in zip(cases, modes, marks, strict=False)
        ],
    )


class TpuSuite:
    """What both layouts must do; not collected itself."""

    backend = ""
    same: ClassVar = {}

    def suite(self, mode):
        suite = AttentionSuite()
        suite.backend, suite.interpret = self.backend, MODES[mode]
        return suite

    @BOTH_MODES
    @pytest.mark.parametrize("case", [DECODE, MIXED, FEW_TOKENS], ids=["decode", "mixed", "few tokens"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_shapes_and_lengths(self, case, dtype, mode):
        self.suite(mode).check(dataclasses.replace(case, dtype=dtype, **self.same))

    @BOTH_MODES
    @pytest.mark.parametrize("options", WINDOWS.values(), ids=list(WINDOWS))
    @pytest.mark.parametrize("case", [DECODE, MIXED], ids=["decode", "mixed"])
    def test_windows(self, case, options, mode):
        self.suite(mode).check(dataclasses.replace(case, **self.same), **options)

    @BOTH_MODES
    def test_what_the_window_has_passed_may_be_nan(self, mode):
        case = dataclasses.replace(DECODE, **self.same)
        arrays = case.build()
        want, _ = dense_float64(arrays, 0.125, sliding_window=20)
        for row, length in enumerate(np.asarray(arrays[4])):
            for position in range(max(0, length - 20)):
                place = arrays[3][row, position // case.page_size], position % case.page_size
                arrays[1], arrays[2] = (x.at[place].set(jnp.nan) for x in arrays[1:3])
        o, _ = self.suite(mode).attend(arrays, decode_only=True, sliding_window=20)
        np.testing.assert_allclose(o, want, atol=2e-5, rtol=0)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        """Bit for bit: a row alone in its batch, at another place of another tile, gives what it gives among others."""
        case = dataclasses.replace(MIXED, **self.same)
        arrays = case.build()
        together, _ = self.suite("eager").attend(arrays)
        tables, lens, starts = (np.asarray(x) for x in arrays[3:6])
        for row in (1, 3, 5, 7):
            first, last = starts[row], starts[row + 1]
            q = np.full(arrays[0].shape, np.nan, np.float32)
            q[: last - first] = arrays[0][first:last]
            alone_lens = np.zeros_like(lens)
            alone_lens[0] = lens[row]
            alone_starts = np.concatenate([[0], np.full(len(lens), last - first)]).astype(np.int32)
            distribution = np.array([last - first == 1, 1], np.int32)
            metadata = (jnp.asarray(x) for x in (np.roll(tables, -row, axis=0), alone_lens, alone_starts, distribution))
            alone, _ = self.suite("eager").attend([jnp.asarray(q), *arrays[1:3], *metadata])
            np.testing.assert_array_equal(alone[: last - first], together[first:last])
            assert not np.asarray(alone[last - first :]).any()

    def test_a_large_table_is_taken_in_parts(self, monkeypatch):
        monkeypatch.setattr(tpu_rows, "MAX_TABLE_ENTRIES", 5 * 2)  # five rows at a time
        num_queries, prefixes = (1, 1, 1, 9, 1, 30, 2, 1), (0, 150, 7, 0, 64, 63, 40, 127)
        for padding_rows, decode_only in ((0, True), (3, False), (9, False)):
            case = Case(num_queries, prefixes, 8, 2, 128, 128, padding_rows, spare_pages=0, decode_only=False)
            if decode_only:
                case = dataclasses.replace(case, num_queries=(1,) * 8, decode_only=True)
            self.suite("eager").check(dataclasses.replace(case, **self.same))

    def test_a_removed_wait_is_caught(self, monkeypatch):
        def take(stream, item, block):
            stream._fetch()
            slot = jax.lax.rem(stream.state[tpu_pages.TAKEN], stream.num_buffers)
            stream.state[tpu_pages.TAKEN] += 1
            return slot, stream.items.first_page[item] + block * stream.pages_per_block

        monkeypatch.setattr(tpu_pages.PageStream, "take", take)
        arrays = dataclasses.replace(DECODE, padding_rows=1, **self.same).build()
        message = ""
        try:
            jax.block_until_ready(self.suite("eager").attend(arrays, decode_only=True))
        except jax.errors.JaxRuntimeError as error:  # JAX 0.10 only takes note of a race
            message = str(error)
        found = races_found()
        pltpu.reset_tpu_interpret_mode_state()
        assert found or "race" in message.lower()


class TestTokenMajor(TpuSuite):
    backend = "mosaic_tpu"

    @alternate(matrix(dtypes=DTYPES, feature=NO_SLOT_SCALES, head_dim=(128, 256), kv_heads=(4, 8)))
    def test_matrix(self, case, mode):
        self.suite(mode).check(case)


class TestLaneMajor(TpuSuite):
    backend = "mosaic_tpu_lanes"
    same: ClassVar = {"head_dim": 80}

    @alternate(matrix(dtypes=DTYPES, page_size=(128, 256)))
    def test_matrix(self, case, mode):
        self.suite(mode).check(case)


@pytest.mark.parametrize("seed", range(20))
def test_segments_cover_each_query_once(seed):
    rng = np.random.default_rng(seed)
    tile, num_tiles, page = int(rng.choice([16, 32])), int(rng.integers(1, 6)), 8
    queries = np.sort(rng.integers(1, 40, rng.integers(0, 6)))
    queries = queries[np.cumsum(queries) <= tile * num_tiles]
    lens = np.concatenate([queries + rng.integers(0, 50, len(queries)), np.zeros(2)]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(queries), np.full(2, queries.sum())]).astype(np.int32)
    num_decode = int(np.sum(queries == 1))
    window = [None, 5, 30][seed % 3]
    segments, items, count = make_segments(
        tile, num_tiles, jnp.asarray(lens), jnp.asarray(starts), jnp.asarray([num_decode, len(queries)]), Options(1.0, window), page
    )
    seen = np.zeros(tile * num_tiles, int)
    for i in range(int(count)):
        first, end = int(segments.first_token[i]), int(segments.end_token[i])
        assert first == end or first // tile == (end - 1) // tile == segments.tile[i]
        if items.end_page[i] > items.first_page[i]:
            row = int(items.row[i])
            assert starts[row] <= first < end <= starts[row + 1]
            seen[first:end] += 1
            last = lens[row] - starts[row + 1] + end
            oldest = 0 if window is None else max(0, last - (end - first) - window + 1)
            assert (items.first_page[i], items.end_page[i]) == (oldest // page, -(-last // page))
    np.testing.assert_array_equal(seen, (np.arange(len(seen)) >= num_decode) & (np.arange(len(seen)) < queries.sum()))
    assert segments.tile[int(count)] == num_tiles and set(range(num_tiles)) <= set(np.asarray(segments.tile).tolist())


F32, BF16, F16, INT8 = (jnp.dtype(x) for x in ("float32", "bfloat16", "float16", "int8"))


@pytest.mark.parametrize(
    ("module", "q", "pages", "options", "reason"),
    [
        (tpu, ((4, 8, 128), BF16), ((9, 16, 8, 128), BF16), Options(1.0), None),
        (tpu, ((4, 8, 64), BF16), ((9, 16, 8, 64), BF16), Options(1.0), "head_dim is 64"),
        (tpu, ((4, 9, 128), BF16), ((9, 16, 3, 128), BF16), Options(1.0), "num_kv_heads is 3"),
        (tpu, ((4, 8, 128), BF16), ((9, 16, 1, 128), BF16), Options(1.0), "num_kv_heads is 1"),
        (tpu, ((4, 8, 128), F32), ((9, 16, 1, 128), F32), Options(1.0), None),
        (tpu, ((4, 8, 128), BF16), ((9, 16, 2, 128), INT8), Options(1.0), "num_kv_heads is 2 with int8"),
        (tpu, ((4, 8, 128), F16), ((9, 16, 8, 128), F16), Options(1.0), "q is float16"),
        (tpu, ((4, 8, 128), BF16), ((9, 16, 8, 128), F16), Options(1.0), "the pages are float16"),
        (tpu, ((4, 32, 128), BF16), ((9, 512, 32, 128), BF16), Options(1.0), "4194304 bytes"),
        (tpu, ((4, 8, 128), BF16), ((9, 16, 8, 128), INT8), Options(1.0, k_scale=np.ones((9, 16, 8))), "for each slot"),
        (tpu_lanes, ((4, 9, 80), BF16), ((9, 3, 80, 128), BF16), Options(1.0), None),
        (tpu_lanes, ((4, 9, 80), BF16), ((9, 3, 80, 64), BF16), Options(1.0), "page_size is 64"),
        (tpu_lanes, ((4, 9, 81), BF16), ((9, 3, 81, 128), BF16), Options(1.0), "head_dim is 81"),
        (tpu_lanes, ((4, 9, 80), F16), ((9, 3, 80, 128), BF16), Options(1.0), "q is float16"),
        (tpu_lanes, ((4, 9, 80), BF16), ((9, 3, 80, 8192), BF16), Options(1.0), "3932160 bytes"),
    ],
)
def test_unsupported(module, q, pages, options, reason):
    got = module.unsupported(*q, *pages, options)
    assert got is None if reason is None else reason in got


def test_a_row_of_too_many_pages_is_refused():
    q, pages, table = (jax.ShapeDtypeStruct(*x) for x in (((1, 8, 128), BF16), ((9, 16, 8, 128), BF16), ((1, 1 << 18), jnp.int32)))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (2,), (2,))]
    with pytest.raises(ValueError, match="use larger pages"):
        jax.eval_shape(lambda *a: tpu.attend(*a, Options(1.0), decode_only=True, interpret=True), q, pages, pages, table, *ints)
