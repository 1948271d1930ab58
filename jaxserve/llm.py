"""LLM: generate, chat and score in the caller's process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tqdm import tqdm

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.llm_engine import LLMEngine
from jaxserve.engine.output_processor import SequenceProcessor
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.request import CompletionOutput, FinishReason, Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class ScoreOutput:
    """Log-probabilities of given tokens. logprobs[i] and is_greedy[i] belong to token_ids[num_context_tokens + i]."""

    token_ids: list[int]
    num_context_tokens: int  # tokens before the scored ones; at least 1, as the first token has no prediction
    logprobs: list[float]
    is_greedy: list[bool]  # whether the token was the best one

    @property
    def total(self) -> float:
        """Log-probability of all scored tokens together."""
        return sum(self.logprobs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, or several, as a list."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


class LLM:
    """A model in this process. Options are EngineConfig's fields, e.g. LLM("DIR", max_model_len=4096, page_size=32).

    LLM(model=nnx_module, config=ModelConfig(...), tokenizer=...) serves a module that the caller already holds in memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LlamaForCausalLM,
        *,
        config: ModelConfig | None = None,
        tokenizer: Any = None,
        progress: bool = True,
        **options: Any,
    ):
        if not isinstance(model, (str, os.PathLike)):
            engine_config = EngineConfig.from_options(**options)
            self.engine = LLMEngine(engine_config, model=model, model_config=config or model.config, tokenizer=tokenizer, progress=progress)
        else:
            if isinstance(tokenizer, str):
                options["tokenizer"], tokenizer = tokenizer, None
            engine_config = EngineConfig.from_options(model=str(model), **options)
            self.engine = LLMEngine(engine_config, tokenizer=tokenizer, progress=progress)
        self.tokenizer = self.engine.tokenizer
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts (strings or token ids), results in input order; one SamplingParams for all, or one a prompt."""
        many = _as_list(prompts)
        settings = self._settings(params, len(many))
        texts = [p if isinstance(p, str) else None for p in many]
        encoded = [self._encode(p) for p in many]
        requests = [self.engine.make_requests(ids, s, f"generate-{next(self._ids)}") for ids, s in zip(encoded, settings, strict=True)]
        return self._run(texts, requests, use_tqdm)

    def chat(self, messages: Sequence, params: SamplingParams | None = None, use_tqdm: bool = True, **template: Any) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several; `template` goes to the chat template."""
        tokenizer = self._need_tokenizer("chat")
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate([tokenizer.apply_chat_template(c, **template) for c in conversations], params, use_tqdm)

    def score(self, prompts: Sequence[Prompt], targets: Sequence[Prompt] | None = None, use_tqdm: bool = True) -> list[ScoreOutput]:
        """Log-probabilities of the prompts' own tokens, or of `targets` after their prompts."""
        encoded, contexts = [], []
        for i, prompt in enumerate(prompts):
            ids = self._encode(prompt)
            if targets is not None and not ids:
                raise ValueError(f"prompts[{i}] has no tokens, so its target's first token has no prediction; give at least one token")
            contexts.append(len(ids) if targets is not None else 1)
            encoded.append(ids + (self._encode(targets[i], special=False) if targets is not None else []))
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0)
        outputs = self.generate(encoded, params, use_tqdm)
        return [self._score(output, context) for output, context in zip(outputs, contexts, strict=True)]

    @staticmethod
    def _score(output: RequestOutput, context: int) -> ScoreOutput:
        scored = [t for t in (output.prompt_logprobs or [])[context:] if t is not None]  # None: the first token, never scored
        return ScoreOutput(output.prompt_token_ids, context, [t.logprob for t in scored], [t.rank == 1 for t in scored])

    def _run(self, texts: list[str | None], requests: list[list[Request]], use_tqdm: bool) -> list[RequestOutput]:
        outputs = [RequestOutput("", text, group[0].prompt_token_ids, []) for text, group in zip(texts, requests, strict=True)]
        processors: dict[str, tuple[SequenceProcessor, CompletionOutput, RequestOutput]] = {}
        added: list[Request] = []
        try:
            for group, result in zip(requests, outputs, strict=True):
                result.request_id = group[0].request_id.rsplit("-", 1)[0]
                for request in group:
                    completion = CompletionOutput(request.index, "", [], [] if request.sampling_params.logprobs is not None else None)
                    result.outputs.append(completion)
                    processors[request.request_id] = SequenceProcessor(request, self.tokenizer), completion, result
                    self.engine.add_request(request)
                    added.append(request)
            with tqdm(total=len(added), desc="requests", disable=not use_tqdm) as bar:
                while processors:
                    self._take(self.engine.step(), processors, bar)
        except BaseException:
            for request in added:
                self.engine.abort(request.request_id)
            raise
        return outputs

    def _take(self, step: list, processors: dict, bar: tqdm) -> None:
        for output in step:
            if output.request_id not in processors:
                continue
            processor, completion, result = processors[output.request_id]
            delta = processor.process(output)
            completion.text += delta.text
            completion.token_ids += delta.token_ids
            if completion.logprobs is not None:
                completion.logprobs += delta.logprobs or []
            if output.prompt_logprobs is not None:
                result.prompt_logprobs = list(output.prompt_logprobs)
            if processor.finished:
                completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
                if processor.stopped_here:
                    self.engine.abort(output.request_id, FinishReason.STOP, delta.stop_reason)
                del processors[output.request_id]
                result.finished = all(c.finish_reason is not None for c in result.outputs)
                bar.update()

    def _settings(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params()] * count
        if len(params) != count:
            raise ValueError(f"params has {len(params)} entries for {count} prompts; give one for all or one a prompt")
        return list(params)

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json) over SamplingParams'."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return replace(SamplingParams(), **{k: v for k, v in self.engine.generation_defaults.items() if k in names})

    def _encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return self._need_tokenizer("a text prompt").encode(prompt, add_special_tokens=special)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none; give LLM(..., tokenizer=...) or pass token ids")
        return self.tokenizer
