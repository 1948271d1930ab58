"""The throughput benchmark: its figures, its files, what it refuses, and a run on a real small engine."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
from tiny_engine import CONFIG, tiny_engine

from jaxserve import bench
from jaxserve.bench import throughput
from jaxserve.bench.flops import request_flops
from jaxserve.bench.measure import Run, Timeline, measure
from jaxserve.bench.workload import Prompt, random_workload, read_workload

COUNTS = (
    "date backend model_id tokenizer_id num_prompts request_rate max_concurrency duration completed failed total_input_tokens "
    "total_output_tokens request_throughput request_goodput output_throughput total_token_throughput elapsed_time num_requests "
    "total_num_tokens requests_per_second tokens_per_second"
)
LATENCIES = [f"{figure}_{name}_ms" for figure in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")]
VLLM_FIELDS = {*COUNTS.split(" "), *LATENCIES}


@pytest.fixture(scope="module")
def llm():
    return SimpleNamespace(engine=tiny_engine())


class Words:
    def encode(self, text, add_special_tokens=True):
        return [len(word) for word in text.split()]


def test_a_real_run_gives_all_fields_and_the_engines_tokens(llm, tmp_path, capsys):
    made = {}

    def make(**options):
        made.update(options)
        return llm

    sizes = ["--num-prompts", "6", "--random-input-len", "11", "--random-output-len", "9", "--runs", "2", "--page-size", "8"]
    files = ["--output-json", str(tmp_path / "o" / "r.json"), "--save-tokens", str(tmp_path / "t.jsonl")]
    code = throughput.main(["--model", "tiny", *sizes, *files], make_llm=make)
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and made == {"model": "tiny", "page_size": 8}
    assert json.loads((tmp_path / "o" / "r.json").read_text()) == result
    assert set(result) >= VLLM_FIELDS
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (6, 66, 54)
    assert result["output_throughput"] == pytest.approx(54 / result["duration"])
    assert result["duration"] == min(result["runs_s"]) and len(result["runs_output_throughput"]) == 2
    assert result["same_tokens_in_all_runs"] and result["counters"]["generation_tokens"] == 54
    assert 0 <= result["padding_waste"] < 1 and result["compile_s"] > 0 and result["gflops_per_s"] > 0
    assert result["peak_rss_mb"] > 10 and result["versions"]["jax"] and result["device"]["kind"]
    saved = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    prompts = random_workload(6, 11, 9, CONFIG.vocab_size, 0)
    assert [row["id"] for row in saved] == [p.id for p in prompts]
    for row, prompt in zip(saved, prompts, strict=True):
        alone = measure(llm.engine, [prompt]).timelines[0].token_ids
        assert row["output_token_ids"] == alone and len(alone) == 9


def test_flops_are_those_of_the_matrix_products():
    config = dataclasses.replace(CONFIG, num_layers=1)
    hidden, heads, kv, width, ffn, vocab = 32, 4, 2, 8, 64, 128
    projections = hidden * (heads + 2 * kv) * width + heads * width * hidden + 3 * hidden * ffn
    assert request_flops(config, 1, 1) == 2 * (projections + 2 * heads * width + hidden * vocab)
    assert request_flops(config, 2, 2) == 2 * (3 * projections + 2 * heads * width * (1 + 2 + 3) + 2 * hidden * vocab)
    layer = request_flops(config, 5, 4) - 2 * hidden * vocab * 4
    assert request_flops(dataclasses.replace(config, num_layers=3), 5, 4) == 3 * layer + 2 * hidden * vocab * 4


def test_latencies():
    run = Run(2.0, [Timeline([1, 2, 3], [0.1, 0.2, 0.5]), Timeline([1], [0.3])], {})
    found = throughput.latencies(run)
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_tpot_ms"] == pytest.approx(200)
    assert found["mean_itl_ms"] == pytest.approx(200) and found["std_itl_ms"] == pytest.approx(100)
    assert found["p99_e2el_ms"] == pytest.approx(300 + 0.99 * 200)
    assert throughput.percentile([1.0, 2.0, 3.0], 0.5) == 2 and throughput.percentile([4.0], 0.99) == 4


def test_workload_file(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a bb", "max_tokens": 3, "id": "x"}\n\n{"prompt": "ccc", "max_tokens": 1}\n')
    assert read_workload(path, Words()) == [Prompt("x", [1, 2], 3), Prompt("1", [3], 1)]
    assert len(read_workload(path, Words(), 1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[]", "prompt is None"),
        ('{"prompt": "", "max_tokens": 1}', "prompt is ''"),
        ('{"prompt": [1], "max_tokens": 1}', r"prompt is \[1\]"),
        ('{"prompt": "a"}', "max_tokens is None"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens is True"),
    ],
)
def test_bad_workload_files(tmp_path, content, message):
    (tmp_path / "w.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_workload(tmp_path / "w.jsonl", Words())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workload", "nowhere.jsonl"], "--workload nowhere.jsonl is not a file"),
        (["--workload", __file__], "has no tokenizer"),
        (["--runs", "0"], "--runs is 0"),
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--random-input-len", "0"], "--random-input-len is 0"),
        (["--random-output-len", "0"], "--random-output-len is 0"),
        (["--random-input-len", "60", "--random-output-len", "30"], "prompt 0: the prompt has 60 tokens"),
    ],
)
def test_bad_settings(llm, capsys, more, message):
    code = throughput.main(["--model", "tiny", *more], make_llm=lambda model, **options: llm)
    assert code == 1 and message in capsys.readouterr().err


def test_an_engine_that_loses_tokens_is_caught(llm, monkeypatch):
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: step()[1:])
    with pytest.raises(RuntimeError, match="the engine lost some"):
        measure(llm.engine, random_workload(2, 5, 4, CONFIG.vocab_size, 0))


def test_random_workload_depends_on_the_seed_only():
    assert random_workload(3, 5, 2, 50, 1) == random_workload(3, 5, 2, 50, 1) != random_workload(3, 5, 2, 50, 2)
    assert all(0 <= token < 50 for prompt in random_workload(20, 20, 1, 50, 3) for token in prompt.token_ids)


@pytest.mark.parametrize("argv", [["throughput", "--help"], ["--help"]])
def test_help(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    assert stop.value.code == 0
    assert ("--random-input-len" if argv[0] == "throughput" else "throughput") in capsys.readouterr().out


def test_the_command_passes_its_flags_on(monkeypatch):
    seen = []
    monkeypatch.setitem(bench.BENCHMARKS, "throughput", lambda argv: seen.append(list(argv)) or 0)
    assert bench.main(["throughput", "--model", "m", "--runs", "2"]) == 0
    assert seen == [["--model", "m", "--runs", "2"]]


def test_figures_are_of_the_median_run(llm):
    prompts = [Prompt("0", [1, 2], 2)]
    runs = [Run(d, [Timeline([7, 8], [d / 2, d])], {"scheduled_tokens": 3, "padded_tokens": 1}) for d in (3.0, 1.0, 2.0)]
    result = throughput.result_of(llm.engine, prompts, runs)
    assert result["duration"] == 2.0 and result["padding_waste"] == 0.25 and result["median_e2el_ms"] == 2000
    assert math.isclose(result["gflops_per_s"], request_flops(CONFIG, 2, 2) / 2e9)
    runs[0].timelines[0].token_ids[0] = 9
    assert not throughput.result_of(llm.engine, prompts, runs)["same_tokens_in_all_runs"]
