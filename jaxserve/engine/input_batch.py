"""SchedulerOutput to padded arrays: the model's input packed into one int32 buffer, the sampler's into another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from jaxserve.engine.scheduler import SchedulerOutput
from jaxserve.sampler import MAX_SUPPRESSED

FLOAT32_MAX = float(np.finfo(np.float32).max)
Fields = dict[str, tuple[int, tuple[int, ...]]]  # name -> (offset in int32 words, shape)


@dataclass(frozen=True)
class Bucket:
    """The shape of one forward program: num_tokens tokens of num_rows rows; decode programs have one token a row."""

    num_tokens: int
    num_rows: int
    decode_only: bool

    def __str__(self) -> str:
        return f"decode {self.num_rows}" if self.decode_only else f"mixed {self.num_tokens}"


def _place(shapes: dict[str, tuple[int, ...]]) -> Fields:
    offset, fields = 0, {}
    for name, shape in shapes.items():
        fields[name] = (offset, shape)
        offset += prod(shape)
    return fields


def _size(fields: Fields) -> int:
    offset, shape = list(fields.values())[-1]
    return offset + prod(shape)


def _views(fields: Fields, buffer: np.ndarray) -> dict[str, np.ndarray]:
    return {name: buffer[offset : offset + prod(shape)].reshape(shape) for name, (offset, shape) in fields.items()}


@dataclass(frozen=True)
class InputLayout:
    """Where each field of the model's input stands in the packed buffer of a bucket."""

    bucket: Bucket
    table_width: int  # pages a row's block table can hold
    page_size: int

    @cached_property
    def fields(self) -> Fields:
        tokens, rows = (self.bucket.num_tokens,), (self.bucket.num_rows,)
        shapes = {name: tokens for name in ("token_ids", "prev_rows", "positions", "rope_lens", "slot_mapping")}
        shapes |= {"seq_lens": rows, "logits_indices": rows, "query_start_loc": (rows[0] + 1,), "distribution": (2,)}
        return _place(shapes | {"block_tables": (*rows, self.table_width)})

    @cached_property
    def size(self) -> int:
        """Words in the buffer."""
        return _size(self.fields)

    def pack(self, scheduled: SchedulerOutput, prev_rows: dict[str, int]) -> np.ndarray:
        """The buffer i32[size] of a step. prev_rows: request id -> its row in the previous step's sampled ids.

        Padding tokens have slot -1: their keys and values are not written.
        """
        buffer = np.zeros(self.size, np.int32)
        views = _views(self.fields, buffer)
        views["prev_rows"][:] = -1
        views["slot_mapping"][:] = -1
        views["distribution"][:] = scheduled.num_decode_rows, len(scheduled.rows)
        ids, pending, num_prompt_tokens, starts, counts = [], [], [], [], []
        tables = views["block_tables"]
        for i, row in enumerate(scheduled.rows):
            request = row.request
            if row.pending_input:  # the id is still on the device
                pending.append((len(ids), prev_rows[request.request_id]))
                ids.append(0)
            else:
                ids += request.token_ids(row.start, row.start + row.num_tokens)
            starts.append(row.start)
            counts.append(row.num_tokens)
            num_prompt_tokens.append(len(request.prompt_token_ids))
            table = request.block_table
            tables[i, : len(table)] = table
        views["token_ids"][: len(ids)] = ids
        if pending:
            tokens, rows = zip(*pending, strict=True)
            views["prev_rows"][list(tokens)] = rows
        self._fill_positions(views, np.array(starts, np.int32), np.array(counts, np.int32), np.array(num_prompt_tokens, np.int32))
        return buffer

    def _fill_positions(self, views: dict[str, np.ndarray], starts: np.ndarray, counts: np.ndarray, num_prompt_tokens: np.ndarray) -> None:
        num_rows, ends = len(starts), np.cumsum(counts)
        total = int(ends[-1])
        row_of_token = np.repeat(np.arange(num_rows), counts)
        positions = np.arange(total) - (ends - counts - starts)[row_of_token]
        views["positions"][:total] = positions
        views["rope_lens"][:total] = np.maximum(num_prompt_tokens[row_of_token], positions + 1)
        pages = views["block_tables"][row_of_token, positions // self.page_size]
        views["slot_mapping"][:total] = pages * self.page_size + positions % self.page_size
        views["seq_lens"][:num_rows] = starts + counts
        views["query_start_loc"][1 : num_rows + 1] = ends
        views["query_start_loc"][num_rows + 1 :] = total
        views["logits_indices"][:num_rows] = ends - 1


@dataclass(frozen=True)
class SamplingLayout:
    """Where each field of the sampler's input stands in the packed buffer of num_rows rows. Floats travel as their bits."""

    num_rows: int
    vocab_size: int

    @cached_property
    def fields(self) -> Fields:
        rows = (self.num_rows,)
        shapes = {name: rows for name in ("temperature", "top_k", "top_p", "min_p", "index", "position")}
        return _place(shapes | {"seed": (*rows, 2), "suppressed": (*rows, MAX_SUPPRESSED)})

    @cached_property
    def size(self) -> int:
        """Words in the buffer."""
        return _size(self.fields)

    def pack(self, scheduled: SchedulerOutput) -> np.ndarray:
        """The buffer i32[size] of a step; rows that do not sample are greedy and ignored."""
        buffer = np.zeros(self.size, np.int32)
        views = _views(self.fields, buffer)
        views["suppressed"][:] = self.vocab_size
        floats = {name: views[name].view(np.float32) for name in ("temperature", "top_p", "min_p")}
        floats["top_p"][:] = 1.0
        for i, row in enumerate(scheduled.rows):
            request, params = row.request, row.request.sampling_params
            if not row.samples:
                continue
            position = request.num_computed_tokens
            if position - request.num_prompt_tokens < params.min_tokens:
                stops = sorted(request.stop_token_ids)
                views["suppressed"][i, : len(stops)] = stops
            if not params.greedy:
                floats["temperature"][i] = min(params.temperature, FLOAT32_MAX)
                floats["top_p"][i], floats["min_p"][i] = params.top_p, params.min_p
                views["top_k"][i] = min(max(params.top_k, 0), self.vocab_size)
                views["seed"].view(np.uint32)[i] = request.seed & 0xFFFFFFFF, (request.seed >> 32) & 0xFFFFFFFF
                views["index"][i], views["position"][i] = request.index, position
        return buffer


def sampling_variant(scheduled: SchedulerOutput) -> str:
    """The cheapest of the sampler's variants that serves every row of the step."""
    variant = "greedy"
    for row in scheduled.rows:
        params = row.request.sampling_params
        if row.samples and params.min_tokens > row.request.num_computed_tokens - row.request.num_prompt_tokens:
            return "filtered"
        if row.samples and not params.greedy:
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                return "filtered"
            variant = "random"
    return variant


def successors(scheduled: SchedulerOutput, num_tokens: int) -> np.ndarray:
    """i32[num_tokens]: for each token of the step the prompt token after it, whose log-probability its hidden state gives; 0 for none."""
    targets, first = np.zeros(num_tokens, np.int32), 0
    for row in scheduled.rows:
        following = row.request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
        targets[first : first + len(following)] = following
        first += row.num_tokens
    return targets
