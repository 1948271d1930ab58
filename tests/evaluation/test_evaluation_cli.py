"""The whole command on a fake model: results, resuming after a kill, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_llm import FakeLLM

from jaxserve.evaluation import main

ALL = "wikitext2,mmlu,piqa,openbookqa,gsm8k"


def command(data, output, *more, tasks=ALL):
    return ["--model", "fake", "--data", str(data), "--tasks", tasks, "--output", str(output), "--window", "64", "--no-progress", *more]


def run(argv, **fake):
    made = []

    def make(model, **options):
        made.append(FakeLLM(model=model, **options, **fake))
        return made[-1]

    return main(argv, make_llm=make), made


def without_timing(result):
    noise = {"seconds", "items_per_s", "tokens_per_s", "output_tokens_per_s", "num_items_resumed", "started", "wall_seconds"}
    if isinstance(result, dict):
        return {k: without_timing(v) for k, v in result.items() if k not in noise}
    return result


def test_all_tasks_give_scores_errors_counts_config_and_hashes(data, tmp_path, capsys):
    code, _ = run(command(data, tmp_path / "r.json", "--max-num-seqs", "7"))
    assert code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["tasks"]) == ALL.split(",")
    assert result["engine_config"]["scheduler"]["max_num_seqs"] == 7
    assert result["versions"]["jax"] and result["device"]["platform"] and len(result["outputs_sha256"]) == 64
    assert result["tasks"]["gsm8k"]["scores"]["exact_match_strict"]["value"] == pytest.approx(1 / 6)
    assert result["tasks"]["gsm8k"]["num_output_tokens"] == 6 * len("the answer is #### 18")
    for task in result["tasks"].values():
        assert task["num_items"] > 5 and task["tokens_per_s"] > 0 and task["items_per_s"] > 0 and len(task["outputs_sha256"]) == 64
        assert all(score["stderr"] >= 0 for score in task["scores"].values())
        assert all(len(digest) == 64 for digest in task["config"]["data"].values())
    screen = capsys.readouterr().out
    assert all(word in screen for word in ("token_perplexity", "acc_norm", "exact_match_flexible", "gsm8k"))


@pytest.mark.parametrize("budget", range(1, 12))
def test_a_killed_run_resumes_to_the_same_result(data, tmp_path, budget):
    run(command(data, tmp_path / "whole.json", "--save-every", "3"))
    argv = command(data, tmp_path / "killed.json", "--save-every", "3")
    code, first = run(argv, budget=budget)
    assert code == 130 and not (tmp_path / "killed.json").exists()
    code, second = run(argv)
    assert code == 0
    whole, killed = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "killed.json"))
    assert without_timing(killed) == without_timing(whole)
    assert sum(task["num_items_resumed"] for task in killed["tasks"].values()) > 0
    _, reference = run(command(data, tmp_path / "third.json", "--save-every", "3"))
    assert len(first[0].calls) + len(second[0].calls) == len(reference[0].calls)  # nothing ran twice


def test_every_cut_of_the_items_file_resumes_to_the_same_items(data, tmp_path):
    argv = command(data, tmp_path / "r.json", tasks="piqa")
    run(argv)
    items, result = tmp_path / "r.json.items.jsonl", json.loads((tmp_path / "r.json").read_text())
    content = items.read_bytes()
    for cut in range(0, len(content), 97):
        items.write_bytes(content[:cut])
        code, _ = run(argv)
        assert code == 0
        assert without_timing(json.loads((tmp_path / "r.json").read_text())) == without_timing(result), cut
        assert [json.loads(line).get("id") for line in items.read_text().splitlines()].count("piqa-00003") == 1


def test_a_larger_limit_goes_on_from_a_smaller_one(data, tmp_path):
    run(command(data, tmp_path / "r.json", "--limit", "2", tasks="piqa"))
    _, made = run(command(data, tmp_path / "r.json", "--limit", "5", tasks="piqa"))
    assert made[0].calls == [3 * 2]
    task = json.loads((tmp_path / "r.json").read_text())["tasks"]["piqa"]
    assert task["num_items"] == 5 and task["num_items_resumed"] == 2


@pytest.mark.parametrize(
    ("more", "named"), [(("--window", "32"), "settings.window was 64 and is 32"), (("--dtype", "bfloat16"), "engine.load.dtype was 'auto'")]
)
def test_results_of_another_config_are_refused(data, tmp_path, capsys, more, named):
    run(command(data, tmp_path / "r.json", tasks="wikitext2"))
    code, made = run(command(data, tmp_path / "r.json", *more, tasks="wikitext2"))
    error = capsys.readouterr().err
    assert code == 1 and not made  # told before the model is loaded
    assert named in error and "--restart" in error
    assert run(command(data, tmp_path / "r.json", *more, "--restart", tasks="wikitext2"))[0] == 0


def test_changed_data_is_refused(data, tmp_path, capsys):
    run(command(data, tmp_path / "r.json", tasks="piqa"))
    with (data / "piqa_validation.jsonl").open("a") as stream:
        stream.write('{"question": "new", "options": "A. a\\nB. b", "answer": "A. a"}\n')
    assert run(command(data, tmp_path / "r.json", tasks="piqa"))[0] == 1
    assert "data.piqa_validation.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["hello\nworld\n", '{"kind": "item"}\n{"kind": "item"}\n', "[]\n3\n"])
def test_a_file_that_is_not_ours_is_left_alone(data, tmp_path, capsys, content):
    items = tmp_path / "r.json.items.jsonl"
    items.write_text(content)
    assert run(command(data, tmp_path / "r.json", tasks="piqa"))[0] == 1
    assert "line 1 is not a line of evaluation results" in capsys.readouterr().err
    assert items.read_text() == content


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--limit", "0"), "'0' is not an integer of at least 1"),
        (("--limit", "-3"), "'-3' is not an integer of at least 1"),
        (("--tasks", "piqa,nope"), "'piqa,nope' does not name tasks"),
        (("--tasks", "piqa,piqa"), "each once"),
        (("--tasks", ","), "does not name tasks"),
        (("--dtype", "int7"), "invalid choice: 'int7'"),
        (("--page-size", "many"), "invalid int value: 'many'"),
    ],
)
def test_bad_flags(data, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as stop:
        run(command(data, tmp_path / "r.json", *more))
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--window", "1"), "--window is 1"),
        (("--num-shots", "-1"), "--num-shots is -1"),
        (("--num-shots", "6"), "has 5 rows, fewer than --num-shots 6"),
        (("--max-tokens", "0"), "--max-tokens 0"),
        (("--window", "64", "--max-model-len", "50"), "item window-00000 needs 64 tokens, more than max_model_len (50); lower --window"),
        (("--tasks", "piqa", "--max-model-len", "20"), "item piqa-00000 needs"),
        (("--tasks", "gsm8k", "--max-model-len", "300"), "lower --num-shots or --max-tokens"),
    ],
)
def test_settings_that_cannot_work(data, tmp_path, capsys, more, message):
    assert run(command(data, tmp_path / "r.json", *more))[0] == 1
    assert message in capsys.readouterr().err


KILLED = """
import sys, time
sys.path[:0] = {path!r}
from fake_llm import FakeLLM
from jaxserve.evaluation import main
class Slow(FakeLLM):
    def score(self, *args, **kw):
        time.sleep(0.05)
        return super().score(*args, **kw)
sys.exit(main({argv!r}, make_llm=lambda model, **o: Slow(model=model, **o)))
"""


def test_sigkill_of_the_process_loses_one_batch_at_most(data, tmp_path):
    argv = command(data, tmp_path / "k.json", "--save-every", "1", tasks="mmlu,piqa")
    root = Path(__file__).parents[2]
    script = KILLED.format(path=[str(root), str(Path(__file__).parent)], argv=argv)
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    items, deadline = tmp_path / "k.json.items.jsonl", time.monotonic() + 60
    while not (items.exists() and items.read_bytes().count(b'"kind": "item"') >= 4):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = items.read_bytes().count(b'"kind": "item"')
    code, made = run(argv)
    assert code == 0 and sum(made[0].calls) <= (9 * 4 + 7 * 2) - 2 * (saved - 1)
    run(command(data, tmp_path / "w.json", "--save-every", "1", tasks="mmlu,piqa"))
    killed, whole = (json.loads((tmp_path / name).read_text()) for name in ("k.json", "w.json"))
    assert killed["outputs_sha256"] == whole["outputs_sha256"] and without_timing(killed) == without_timing(whole)


def test_two_runs_cannot_write_one_file(data, tmp_path, capsys):
    from jaxserve.evaluation.journal import Journal

    journal = Journal(tmp_path / "r.json.items.jsonl")
    assert run(command(data, tmp_path / "r.json", tasks="piqa"))[0] == 1
    assert "is being written by another run" in capsys.readouterr().err
    journal.close()
    assert run(command(data, tmp_path / "r.json", tasks="piqa"))[0] == 0
