"""SequenceProcessor: one sequence's tokens to text, with stop strings. Shared by LLM.generate and the streams of AsyncEngine."""

from __future__ import annotations

from jaxserve.request import CompletionOutput, FinishReason, Request, TokenOutput
from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer


class SequenceProcessor:
    """Turns TokenOutputs into CompletionOutput deltas.

    `finished` with `stopped_here`: a stop string ended it, and the engine must be told.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        params = request.sampling_params
        self.request, self.params = request, params
        self.finished = False
        self.stopped_here = False
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens, request.prompt_token_ids
            )
        elif params.stop:
            raise ValueError(f"stop is {params.stop!r}, but the engine has no tokenizer; give one or use stop_token_ids")

    def process(self, output: TokenOutput) -> CompletionOutput:
        """The new text, ids and logprobs that a step's output brings; text that may yet become a stop string is held back."""
        reason, stop_reason, text = output.finish_reason, output.stop_reason, ""
        ids = [] if output.token_id is None else [output.token_id]
        if self._detokenizer is not None:
            # the token that ended the request shows only where the caller wants to see what stopped it
            hidden = reason is FinishReason.STOP and not self.params.include_stop_str_in_output
            if ids and not hidden:
                text = self._detokenizer.add(ids[0])
            if self._detokenizer.stop_reason is not None:
                self.stopped_here = reason is None
                reason, stop_reason = FinishReason.STOP, self._detokenizer.stop_reason
            elif reason is not None:
                text += self._detokenizer.finish()
                if self._detokenizer.stop_reason is not None:
                    reason, stop_reason = FinishReason.STOP, self._detokenizer.stop_reason
        self.finished = reason is not None
        logprobs = None if self.params.logprobs is None else ([output.logprobs] if output.logprobs else [])
        return CompletionOutput(self.request.index, text, ids, logprobs, reason, stop_reason)
