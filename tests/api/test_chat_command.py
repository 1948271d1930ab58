"""`jaxserve chat`: a conversation in the terminal."""

import pytest
from fake_engine import EOS, FakeTokenizer

import jaxserve.chat
from jaxserve.config import EngineConfig
from jaxserve.request import FinishReason, Request, TokenOutput
from jaxserve.sampling_params import SamplingParams


class FakeLLMEngine:
    """Answers every prompt with the letters abc."""

    generation_defaults: dict = {}  # noqa: RUF012

    def __init__(self, config: EngineConfig, progress: bool) -> None:
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.prompts: list[str] = []
        self.aborted: list[str] = []
        made.append(self)

    def make_requests(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str) -> list[Request]:
        if len(prompt_token_ids) > 100:
            raise ValueError("the prompt is too long")
        self.prompts.append(bytes(prompt_token_ids[1:]).decode())
        return [Request(request_id, prompt_token_ids, params, 3)]

    def add_request(self, request: Request) -> None:
        self.todo = [TokenOutput(request.request_id, ord(c)) for c in "abc"]
        self.todo.append(TokenOutput(request.request_id, EOS, finish_reason=FinishReason.STOP))

    def step(self) -> list[TokenOutput]:
        return [self.todo.pop(0)]

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self.aborted.append(request_id)


made: list[FakeLLMEngine] = []


def run(monkeypatch: pytest.MonkeyPatch, lines: list[str], system: str | None = None) -> FakeLLMEngine:
    monkeypatch.setattr(jaxserve.chat, "LLMEngine", FakeLLMEngine)
    waiting = iter(lines)

    def read(prompt: str) -> str:
        for line in waiting:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    assert jaxserve.chat.chat(EngineConfig(), lambda defaults: SamplingParams(), system) == 0
    return made[-1]


def test_the_conversation_is_remembered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = run(monkeypatch, ["Hi", "", "More"], system="Be kind")
    assert engine.prompts == [
        "[system]Be kind[user]Hi[assistant]",
        "[system]Be kind[user]Hi[assistant]abc[user]More[assistant]",
    ]
    assert capsys.readouterr().out.count("abc\n") == 2


def test_new_forgets_and_quit_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = run(monkeypatch, ["Hi", "/new", "Yo", "/quit", "never"])
    assert engine.prompts == ["[user]Hi[assistant]", "[user]Yo[assistant]"]


def test_a_refusal_is_shown_and_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = run(monkeypatch, ["x" * 200, "Yo"])
    assert "error: the prompt is too long" in capsys.readouterr().out
    assert engine.prompts == ["[user]Yo[assistant]"]


def test_ctrl_c_stops_an_answer_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    normal, calls = FakeLLMEngine.step, []

    def step(self: FakeLLMEngine) -> list[TokenOutput]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return normal(self)

    monkeypatch.setattr(FakeLLMEngine, "step", step)
    engine = run(monkeypatch, ["Hi", "Yo"])
    assert "a [stopped]" in capsys.readouterr().out
    assert engine.aborted[0] == "chat-0"
    assert engine.prompts[1] == "[user]Hi[assistant]a[user]Yo[assistant]"
