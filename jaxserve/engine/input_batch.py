"""SchedulerOutput to the padded arrays of one program, packed into one int32 buffer: one host-to-device copy a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxserve.engine.scheduler import ScheduledRow, SchedulerOutput
from jaxserve.request import Request
from jaxserve.sampler import MAX_SUPPRESSED


@dataclass(frozen=True)
class Bucket:
    """The shape of one program: num_tokens tokens of num_rows rows; decode programs have one token a row."""

    num_tokens: int
    num_rows: int
    decode_only: bool


@dataclass(frozen=True)
class InputLayout:
    """Where each field stands in the packed buffer of a bucket. Float fields travel as their bits."""

    bucket: Bucket
    table_width: int  # pages a row's block table can hold
    page_size: int
    vocab_size: int

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Field -> (offset in int32 words, shape)."""
        tokens, rows = (self.bucket.num_tokens,), (self.bucket.num_rows,)
        shapes = {name: tokens for name in ("token_ids", "prev_rows", "positions", "rope_lens", "slot_mapping", "target_ids")}
        shapes |= {name: rows for name in ("seq_lens", "logits_indices", "temperature", "top_k", "top_p", "min_p", "index", "position")}
        shapes |= {"query_start_loc": (rows[0] + 1,), "distribution": (2,), "seed": (*rows, 2), "suppressed": (*rows, MAX_SUPPRESSED)}
        shapes["block_tables"] = (*rows, self.table_width)
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += int(np.prod(shape))
        return fields

    @cached_property
    def size(self) -> int:
        """Words in the buffer."""
        offset, shape = self.fields["block_tables"]
        return offset + int(np.prod(shape))

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of a buffer's fields; the float fields as float32."""
        views = {name: buffer[offset : offset + int(np.prod(shape))].reshape(shape) for name, (offset, shape) in self.fields.items()}
        for name in ("temperature", "top_p", "min_p"):
            views[name] = views[name].view(np.float32)
        views["seed"] = views["seed"].view(np.uint32)
        return views

    def pack(self, scheduled: SchedulerOutput, prev_rows: dict[str, int]) -> np.ndarray:
        """The buffer i32[size] for a step. prev_rows: request id -> its row in the previous step's sampled ids.

        Padding tokens write to distinct slots of the dummy page as far as it has them, and read nothing.
        """
        buffer = np.zeros(self.size, np.int32)
        views = self.views(buffer)
        views["prev_rows"][:] = -1
        views["suppressed"][:] = self.vocab_size
        views["top_p"][:] = 1.0
        views["slot_mapping"][:] = np.arange(self.bucket.num_tokens, dtype=np.int32) % self.page_size
        self._fill_tokens(views, scheduled.rows, prev_rows)
        for i, row in enumerate(scheduled.rows):
            if row.samples:
                self._fill_sampling(views, i, row.request)
        views["distribution"][:] = scheduled.num_decode_rows, len(scheduled.rows)
        return buffer

    def _fill_tokens(self, views: dict[str, np.ndarray], rows: list[ScheduledRow], prev_rows: dict[str, int]) -> None:
        ids, positions, rope_lens, targets = [], [], [], []
        starts, tables = [0], views["block_tables"]
        for i, row in enumerate(rows):
            request, start, stop = row.request, row.start, row.start + row.num_tokens
            known = stop - 1 if row.pending_input else stop
            tokens = request.token_ids(start, min(known + 1, request.num_tokens))
            ids += tokens[: known - start]
            targets += tokens[1:]
            if row.pending_input:
                views["prev_rows"][len(ids)] = prev_rows[request.request_id]
                ids.append(0)
            targets += [0] * (len(ids) - len(targets))
            positions += range(start, stop)
            rope_lens += [max(request.num_prompt_tokens, p + 1) for p in range(start, stop)]
            tables[i, : len(request.block_table)] = request.block_table
            starts.append(starts[-1] + row.num_tokens)
        total = len(ids)
        for name, values in (("token_ids", ids), ("positions", positions), ("rope_lens", rope_lens), ("target_ids", targets)):
            views[name][:total] = values
        self._fill_slots(views, np.asarray(starts, np.int32), [row.start + row.num_tokens for row in rows])

    def _fill_slots(self, views: dict[str, np.ndarray], starts: np.ndarray, seq_lens: list[int]) -> None:
        num_rows, total = len(seq_lens), int(starts[-1])
        positions = views["positions"][:total]
        row_of_token = np.repeat(np.arange(num_rows), np.diff(starts))
        pages = views["block_tables"][row_of_token, positions // self.page_size]
        views["slot_mapping"][:total] = pages * self.page_size + positions % self.page_size
        views["seq_lens"][:num_rows] = seq_lens
        views["query_start_loc"][: num_rows + 1] = starts
        views["query_start_loc"][num_rows + 1 :] = total
        views["logits_indices"][:num_rows] = starts[1:] - 1

    def _fill_sampling(self, views: dict[str, np.ndarray], i: int, request: Request) -> None:
        params = request.sampling_params
        position = request.num_computed_tokens
        if not params.greedy:
            views["temperature"][i] = params.temperature
            views["top_k"][i] = max(params.top_k, 0)
            views["top_p"][i] = params.top_p
            views["min_p"][i] = params.min_p
            views["seed"][i] = request.seed & 0xFFFFFFFF, (request.seed >> 32) & 0xFFFFFFFF
            views["index"][i] = request.index
            views["position"][i] = position
        if position - request.num_prompt_tokens < params.min_tokens:
            stops = sorted(request.stop_token_ids)
            views["suppressed"][i, : len(stops)] = stops


def sampling_variant(scheduled: SchedulerOutput) -> str:
    """The cheapest of the sampler's variants that serves every row of the step."""
    variant = "greedy"
    for row in scheduled.rows:
        if not row.samples:
            continue
        params = row.request.sampling_params
        if params.min_tokens > row.request.num_computed_tokens - row.request.num_prompt_tokens:
            return "filtered"
        if not params.greedy:
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                return "filtered"
            variant = "random"
    return variant
