"""Each task's numbers against a plain computation, and its complaints about bad data."""

import argparse
import json
import math
from decimal import Decimal

import pytest
from fake_llm import FakeLLM, rows

from jaxserve.evaluation.cli import TASKS, build_task
from jaxserve.evaluation.gsm8k import Gsm8k, flexible_answer, strict_answer
from jaxserve.evaluation.multiple_choice import MultipleChoice, parse_options, split_tokens
from jaxserve.evaluation.perplexity import Perplexity
from jaxserve.evaluation.task import mean_score


def scores(task, llm):
    return task.scores(task.run(llm, task.items(llm)))


@pytest.mark.parametrize("bos", [None, 2])
@pytest.mark.parametrize("window", [2, 7, 64, 5000])
def test_perplexity_scores_all_but_the_first_token_of_each_window(data, window, bos):
    llm = FakeLLM(bos=bos, max_model_len=10_000)
    text = (data / "wikitext2_test.txt").read_text()
    ids, room = [ord(c) for c in text], window - (bos is not None)
    windows = [([bos] if bos else []) + ids[i : i + room] for i in range(0, len(ids), room)]
    losses = [[-llm.logprob(w[:k], w[k]) for k in range(1, len(w))] for w in windows if len(w) > 1]
    mean = sum(map(sum, losses)) / sum(map(len, losses))
    got = scores(Perplexity(data, window), llm)
    assert got["token_perplexity"].value == pytest.approx(math.exp(mean))
    assert got["word_perplexity"].value == pytest.approx(math.exp(mean * len(ids) / len(text.split())))
    assert got["bits_per_byte"].value == pytest.approx(mean / math.log(2))  # one token a byte here
    if window == 5000:
        assert got["token_perplexity"].stderr is None
    else:
        n, total = len(losses), sum(map(len, losses))
        variance = sum((sum(w) - mean * len(w)) ** 2 for w in losses) / (n - 1)
        assert got["token_perplexity"].stderr == pytest.approx(math.exp(mean) * math.sqrt(n * variance) / total)


def test_a_last_window_of_one_token_is_left_out(data):
    (data / "wikitext2_test.txt").write_text("abcdefg")
    assert [len(item.content) for item in Perplexity(data, 3).items(FakeLLM())] == [3, 3]
    assert [len(item.content) for item in Perplexity(data, 3).items(FakeLLM(bos=1))] == [3, 3, 3, 2]


def test_multiple_choice_picks_by_sum_and_by_sum_per_byte(tmp_path):
    rows(tmp_path / "piqa.jsonl", [{"question": " é? ", "options": "A. ä\nB. lo ng\n er", "answer": "B. lo ng\n er"}])
    task, llm = MultipleChoice("piqa", tmp_path), FakeLLM()
    values = {" ä": [-3.0, -1.0], " lo ng\n er": [-1.5] * 9 + [-0.5]}
    llm.logprob = lambda context, token: values[seen[0]][len(context) - len("Question: é?\nAnswer:")]
    calls = llm.score

    def score(prompts, targets=None, use_tqdm=True):
        assert targets is not None
        out = []
        for prompt, target in zip(prompts, targets, strict=True):
            assert "".join(map(chr, prompt)) == "Question: é?\nAnswer:"
            seen[0] = "".join(map(chr, target))
            out += calls([prompt], [target])
        return out

    seen, llm.score = [""], score
    (result,) = task.run(llm, task.items(llm))
    assert result["logprobs"] == [-4.0, -14.0] and result["gold"] == 1
    assert result["output"] == [0, 1]  # -4 > -14, but -4 / 2 bytes < -14 / 9 bytes
    found = task.scores([result])
    assert (found["acc"].value, found["acc_norm"].value) == (0.0, 1.0)


def test_mmlu_prompt_lists_the_options_and_scores_letters(data):
    task = MultipleChoice("mmlu", data)
    first = task.questions[0]
    assert first.prompt == "The following are multiple choice questions (with answers).\n\nQ0?\nA. x\nB. yy\nC. z\nD. é é\nAnswer:"
    assert first.continuations == (" A", " B", " C", " D") and first.num_bytes == (1, 1, 1, 1) and first.gold == 3


def test_equal_options_take_the_first(data):
    task, llm = MultipleChoice("openbookqa", data), FakeLLM()
    llm.logprob = lambda context, token: -1.0
    assert {r["output"][0] for r in task.run(llm, task.items(llm))} == {0}  # "x" and "z" are equal


def test_split_tokens_scores_at_least_one_token():
    class Merging:
        def encode(self, text, add_special_tokens=True):
            return [len(word) for word in text.split()]

    assert split_tokens(Merging(), "a b", "c d") == ([1, 2], [1])
    assert split_tokens(Merging(), "a b", "c") == ([1], [2])  # the tokens of "b" and "c" merge


@pytest.mark.parametrize("task", ["wikitext2", "piqa"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_model_that_gives_no_numbers_is_told(data, task, value):
    built, llm = build_task(task, arguments(data)), FakeLLM()
    llm.logprob = lambda context, token: value
    with pytest.raises(ValueError, match=r"item \w+-00000: the log-probability is (nan|-inf)"):
        built.run(llm, built.items(llm))


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so #### 18", 18, 18),
        ("so ####18. Then 5", 18, 5),
        ("#### $1,234.50\n\nmore #### 7", "1234.5", 7),
        ("It is -3", None, -3),
        ("18.00 eggs", None, 18),
        ("#### about 5", None, 5),
        ("none", None, None),
        ("", None, None),
        ("a total of $70,000.", None, 70000),
    ],
)
def test_number_extraction(text, strict, flexible):
    for found, wanted in ((strict_answer(text), strict), (flexible_answer(text), flexible)):
        assert found == (None if wanted is None else Decimal(wanted))


def test_gsm8k_prompt_and_zero_shots(data):
    items = Gsm8k(data, num_shots=2).items(FakeLLM())
    assert items[1].content[0] == (
        "Question: 0 pears?\nAnswer: well\n#### 0,000\n\nQuestion: 1 pears?\nAnswer: well\n#### 1,000\n\nQuestion: 1 apples?\nAnswer:"
    )
    (data / "gsm8k_train.jsonl").unlink()
    assert Gsm8k(data, num_shots=0).items(FakeLLM())[0].content[0] == "Question: 0 apples?\nAnswer:"
    with pytest.raises(ValueError, match=r"holds no file for gsm8k's 5 examples"):
        Gsm8k(data)


@pytest.mark.parametrize(("values", "mean", "stderr"), [([1.0, 0.0, 1.0, 1.0], 0.75, 0.25), ([1.0], 1.0, None)])
def test_mean_score(values, mean, stderr):
    assert (mean_score(values).value, mean_score(values).stderr) == (mean, stderr)


def test_options_may_hold_dots_and_line_breaks():
    assert parse_options("\nA. e.g. B.C. one\ntwo\nB. $0", "here") == ["e.g. B.C. one\ntwo", "$0"]


UNREADABLE = ["A. one", "one\ntwo", "A. one\nC. two", "B. one\nA. two", "A. one\nB. ", "x\nA. one\nB. two", "A.one\nB.two"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_options_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="here: options is"):
        parse_options(text, "here")


def arguments(data, **more):
    return argparse.Namespace(**{"data": data, "window": 64, "num_shots": 5, "max_tokens": 8, "save_every": None, **more})


BAD_ROWS = {
    "": "is empty",
    " \n\n": "is empty",
    "not json\n": "line 1 is not JSON",
    '{"question": "q"': "line 1 is not JSON",
    "[1, 2]\n": "line 1 is a list; expected an object",
    '{"question": "q"}\n': r"line 1: column '\w+' is missing \(columns: question\)",
    '{"question": 3, "options": "A. a\\nB. b", "answer": "A. a"}\n': "line 1: column 'question' is 3",
    '{"question": "", "options": "A. a\\nB. b", "answer": "A. a"}\n': "line 1: column 'question' is ''",
}


@pytest.mark.parametrize("task", [name for name in TASKS if name != "wikitext2"])
@pytest.mark.parametrize("content", BAD_ROWS)
def test_bad_rows_are_named(tmp_path, task, content):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"bad\.jsonl {BAD_ROWS[content]}"):
        build_task(task, arguments(path))


@pytest.mark.parametrize("task", TASKS)
def test_missing_places_and_encodings_are_named(tmp_path, task):
    with pytest.raises(ValueError, match=r"--data .*nowhere does not exist"):
        build_task(task, arguments(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=rf"holds no file for {task}; expected one named"):
        build_task(task, arguments(tmp_path))
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"latin is not UTF-8 text \(byte 3\)"):
        build_task(task, arguments(path))


def test_two_files_for_a_task_are_ambiguous(data):
    (data / "mmlu_test_2.jsonl").write_text((data / "mmlu_test.jsonl").read_text())
    with pytest.raises(ValueError, match=r"several files for mmlu \(mmlu_test\.jsonl, mmlu_test_2\.jsonl\)"):
        build_task("mmlu", arguments(data))
    assert build_task("mmlu", arguments(data / "mmlu_test.jsonl")).files[0].name == "mmlu_test.jsonl"


def test_an_empty_text_is_refused(data):
    (data / "wikitext2_test.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"wikitext2_test\.txt is empty"):
        build_task("wikitext2", arguments(data))


@pytest.mark.parametrize("answer", ["C. c", "a", "A", "A. b"])
def test_an_answer_that_is_no_option_is_refused(tmp_path, answer):
    rows(tmp_path / "piqa.jsonl", [{"question": "q", "options": "A. a\nB. b", "answer": answer}])
    with pytest.raises(ValueError, match=r"piqa\.jsonl item 1: answer is .*; expected one of \['A\. a', 'B\. b'\]"):
        build_task("piqa", arguments(tmp_path))


def test_an_answer_without_its_number_is_refused(data):
    rows(data / "gsm8k_test.jsonl", [{"question": "q", "answer": "it is 5"}])
    with pytest.raises(ValueError, match=r"item 1: answer has no '#### NUMBER'"):
        build_task("gsm8k", arguments(data))


def test_the_real_files_are_read(shared_dir):
    counts = {"mmlu": 2850, "piqa": 1500, "openbookqa": 500, "gsm8k": 1319}
    for name, count in counts.items():
        items = build_task(name, arguments(shared_dir / "data" / "eval")).items(FakeLLM())
        assert len(items) == count and len({item.id for item in items}) == count
    assert json.dumps(build_task("wikitext2", arguments(shared_dir / "data" / "eval")).settings())
