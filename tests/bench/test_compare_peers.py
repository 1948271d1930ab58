"""The comparison of two benchmark commands, with commands that print fixed results."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_peers.py"
spec = importlib.util.spec_from_file_location("compare_peers", SCRIPT)
assert spec and spec.loader
compare_peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_peers)


def printing(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_sides_alternate_and_the_ratio_has_its_spread(tmp_path, capsys):
    log = tmp_path / "log"
    code = (
        "import json,pathlib; p=pathlib.Path({log!r}); t=p.read_text() if p.exists() else ''; p.write_text(t+{side!r}); "
        "print('noise'); n=t.count({side!r}); print(json.dumps({result})); print('done')"
    )
    a = printing(code.format(log=str(log), side="A", result="{'runs_output_throughput': [[10, 20, 30], [40, 60, 50]][n]}"))
    b = printing(code.format(log=str(log), side="B", result="{'out_tok_s': [10, 20][n]}"))
    out, table = tmp_path / "r.json", tmp_path / "r.md"
    argv = ["--a", a, "--b", b, "--rounds", "2", "--json", str(out), "--markdown", str(table), "--name-b", "other"]
    assert compare_peers.main(argv) == 0
    assert log.read_text() == "ABAB"
    summary = json.loads(out.read_text())["summary"]
    assert summary["a"] == {"runs": [10, 20, 30, 40, 60, 50], "median": 35, "min": 10, "max": 60}
    assert summary["ratio_by_round"] == [2.0, 2.5] and summary["ratio"] == pytest.approx(35 / 15)
    assert table.read_text() == capsys.readouterr().out
    assert "jaxserve / other: **2.33x** (2.00 - 2.50 over 2 rounds)" in table.read_text()


def test_tokens_are_compared_by_id(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("".join(json.dumps({"id": i, "output_token_ids": [1, 2, i]}) + "\n" for i in range(4)))
    b.write_text("".join(json.dumps({"id": i, "output_token_ids": [1, 2, 2]}) + "\n" for i in range(1, 4)))
    assert compare_peers.compare_tokens(a, b) == {"compared": 3, "same": 1, "first_difference": {1: 2, 3: 2}}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('nothing')", "printed no line of JSON"),
        ("print('{\"speed\": 3}')", "the result has none of runs_output_throughput"),
        ("raise SystemExit(3)", "returned non-zero exit status 3"),
        ("import time; time.sleep(60)", "timed out after"),
    ],
)
def test_commands_that_fail_are_named(capsys, code, message):
    good, timeout = printing("print('{\"out_tok_s\": 1}')"), "2" if "sleep" in code else "60"
    assert compare_peers.main(["--a", good, "--b", printing(code), "--timeout", timeout]) == 2
    assert message in capsys.readouterr().err


def test_no_rounds(capsys):
    assert compare_peers.main(["--a", "x", "--b", "y", "--rounds", "0"]) == 2
    assert "--rounds is 0" in capsys.readouterr().err
