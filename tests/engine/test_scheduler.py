"""Order, token budget, overlap and ends of requests, one by one; test_scheduler_properties.py has all promises at once, at random."""

from __future__ import annotations

import pytest
from simulation import Simulation, expected_end, make_request, prompt, rows

from jaxserve.config import SchedulerConfig
from jaxserve.engine.page_manager import PageManager
from jaxserve.engine.scheduler import Scheduler
from jaxserve.request import FinishReason

# -- prompts and the token budget


def test_prompt_is_cut_into_chunks_of_the_budget():
    s = Simulation(usable_pages=20, max_num_batched_tokens=16)
    s.add(prompt(37), 2)
    assert rows(s.step()) == [("0", 0, 16, False)]
    assert rows(s.step()) == [("0", 16, 16, False)]
    output = s.step()
    assert rows(output) == [("0", 32, 5, True)]
    assert output and not output.is_decode
    output = s.step()
    assert rows(output) == [("0", 37, 1, True)]
    assert output and output.is_decode
    assert s.step() is None
    s.finish()


def test_one_token_prompt_is_a_decode_row():
    s = Simulation(usable_pages=20)
    s.add(prompt(5), 3)
    s.add([1], 3)
    output = s.step()
    assert rows(output) == [("1", 0, 1, True), ("0", 0, 5, True)]
    assert output and output.num_decode_rows == 1 and not output.is_decode
    s.finish()


def test_decodes_come_first_and_prompts_get_the_rest():
    s = Simulation(usable_pages=20, max_num_batched_tokens=8)
    s.add(prompt(3), 9)
    s.step()
    s.add(prompt(30), 1)
    for start in (0, 7, 14):
        assert rows(s.step()) == [("0", 3 + start // 7, 1, True), ("1", start, 7, False)]
    s.finish()


def test_long_prompt_leaves_a_quarter_to_those_behind_it():
    s = Simulation(usable_pages=40, max_num_batched_tokens=16)
    s.add(prompt(100), 1)
    s.add(prompt(4), 1)
    assert rows(s.step()) == [("0", 0, 12, False), ("1", 0, 4, True)]
    assert rows(s.step()) == [("0", 12, 16, False)]  # nobody waits: all of it
    s.finish()


def test_long_prompt_gets_back_what_those_behind_it_do_not_use():
    s = Simulation(usable_pages=40, max_num_batched_tokens=16)
    s.add(prompt(100), 1)
    s.add(prompt(2), 1)
    assert rows(s.step()) == [("0", 0, 14, False), ("1", 0, 2, True)]
    s.finish()


def test_short_prompts_do_not_wait_for_a_long_one():
    s = Simulation(usable_pages=200, max_num_seqs=16, max_num_batched_tokens=32)
    long = s.add(prompt(640), 1)
    short = [s.add(prompt(8), 1) for _ in range(8)]
    steps = 0
    while not all(r.output_token_ids for r in short):
        s.step()
        steps += 1
    assert steps <= 9  # one short prompt a step, and the last update
    assert long.num_computed_tokens >= 8 * 24  # and the long one got the rest
    s.finish()


def test_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    s = Simulation(usable_pages=200, max_num_seqs=16, max_num_batched_tokens=16)
    long = s.add(prompt(120), 1)
    for _ in range(11):
        for _ in range(4):
            s.add(prompt(8), 1)
        s.step()
    assert long.finish_reason is FinishReason.LENGTH  # 120 tokens at 12 a step
    s.finish()


def test_even_one_token_of_budget_moves_a_prompt_on():
    s = Simulation(usable_pages=20, max_num_seqs=2, max_num_batched_tokens=2)
    s.add(prompt(1), 20)
    s.step()
    s.add(prompt(3), 1)
    assert rows(s.step()) == [("0", 1, 1, True), ("1", 0, 1, False)]
    s.finish()


def test_no_more_requests_run_than_allowed():
    s = Simulation(usable_pages=50, max_num_seqs=3)
    for _ in range(5):
        s.add([1, 2], 4)
    s.step()
    assert (s.scheduler.num_running, s.scheduler.num_waiting) == (3, 2)
    s.finish()


# -- overlap


def test_pending_token_is_the_next_input_before_it_is_known():
    s = Simulation(usable_pages=20)
    request = s.add(prompt(4), 5)
    first, second = s.step(), s.step()
    assert first and not first.rows[0].pending_input
    assert second and second.rows[0].pending_input and second.rows[0].start == 4
    assert len(request.block_table) == 2  # its page is reserved before the dispatch
    s.collect()
    third = s.dispatch()
    assert third and not third.rows[0].pending_input  # updated before it is scheduled: the token is known


def test_known_last_token_is_not_computed():
    s = Simulation(usable_pages=20)
    request = s.add(prompt(4), 1)
    assert rows(s.step()) == [("0", 0, 4, True)]
    assert s.step() is None
    assert request.finish_reason is FinishReason.LENGTH
    s.finish()


def test_end_of_sequence_wastes_one_row_and_drops_its_token():
    s = Simulation(usable_pages=20)
    tokens = expected_end(make_request("", prompt(4), 3))[0]
    request = s.add(prompt(4), 9, end_ids=tokens[:1])
    s.step()
    assert len(rows(s.step())) == 1
    assert s.pages.num_free_pages == s.pages.num_usable_pages  # freed though a step is in flight
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.STOP, tokens[:1])
    s.finish()
    assert request.output_token_ids == tokens[:1]


def test_update_needs_one_id_a_row():
    s = Simulation(usable_pages=20)
    s.add(prompt(4), 2)
    output = s.dispatch()
    assert output
    with pytest.raises(ValueError, match="longer"):
        s.scheduler.update(output, [1, 2])


# -- how requests end


def test_stop_reason_names_only_the_request_s_own_stop_token():
    token = expected_end(make_request("", prompt(4), 1))[0][0]
    for arguments, stop_reason in (({"end_ids": [token]}, None), ({"stop_token_ids": [token]}, token)):
        s = Simulation(usable_pages=20)
        request = s.add(prompt(4), 5, **arguments)
        s.finish()
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop_reason)


def test_stop_token_in_the_last_allowed_place_is_a_stop():
    token = expected_end(make_request("", prompt(4), 1))[0][0]
    s = Simulation(usable_pages=20)
    request = s.add(prompt(4), 1, end_ids=[token])
    s.finish()
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33])
def test_no_token_is_sampled_for_max_tokens_0(length):
    s = Simulation(usable_pages=20, max_num_batched_tokens=16)
    s.add(prompt(length), 0)
    samples, outputs = [], []
    while s.scheduler.has_unfinished:
        output = s.dispatch()
        assert output
        samples += [row.samples for row in output.rows]
        outputs += s.scheduler.update(output, s.device.run(output))
    assert samples == [False] * -(-length // 16)
    assert [(o.token_id, o.finish_reason) for o in outputs] == [(None, FinishReason.LENGTH)]
    s.finish()


def test_times_are_set_once():
    s = Simulation(usable_pages=3, page_size=4)
    first = s.add(prompt(4), 8)
    assert first.scheduled_time_s is None
    s.step()
    assert first.scheduled_time_s is not None and first.scheduled_time_s >= first.arrival_time_s and first.first_token_time_s is None
    s.step()
    times = first.scheduled_time_s, first.first_token_time_s
    assert times[1] is not None and times[1] >= times[0]
    s.finish()
    assert (first.scheduled_time_s, first.first_token_time_s) == times


# -- requests that cannot be


@pytest.fixture
def small() -> Simulation:
    return Simulation(usable_pages=4, page_size=4, max_model_len=12)


def refuse(simulation: Simulation, length: int, max_tokens: int) -> str:
    with pytest.raises(ValueError) as error:
        simulation.add(prompt(length), max_tokens)
    assert not simulation.scheduler.has_unfinished
    return str(error.value)


def test_refuses_what_exceeds_the_model_s_length(small):
    assert refuse(small, 10, 3) == (
        "the prompt has 10 tokens and max_tokens is 3, together 13, more than max_model_len (12); shorten the prompt or lower max_tokens"
    )
    small.add(prompt(10), 2)
    small.finish()


def test_refuses_what_exceeds_the_pool():
    s = Simulation(usable_pages=4, page_size=4)
    assert refuse(s, 10, 7) == (
        "the prompt has 10 tokens and max_tokens is 7, together 17, more than the page pool holds (4 pages of 4 tokens); "
        "shorten the prompt, lower max_tokens, or start with a larger num_pages or kv_cache_memory"
    )
    assert "together 17" in refuse(s, 17, 0)
    s.add(prompt(10), 6)
    s.add(prompt(16), 0)
    s.finish()


def test_refuses_an_empty_prompt(small):
    assert refuse(small, 0, 3) == "the prompt has 0 tokens; give at least 1"


def test_refuses_an_id_in_use_until_it_has_ended(small):
    small.add([1], 2)
    with pytest.raises(ValueError, match="'request-0' is in use"):
        small.scheduler.add(make_request("request-0", [2], 2))
    small.step()
    with pytest.raises(ValueError, match="'request-0' is in use"):
        small.scheduler.add(make_request("request-0", [2], 2))
    small.finish()
    small.scheduler.add(make_request("request-0", [2], 2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SchedulerConfig(max_model_len=None), "max_model_len is None"),
        (SchedulerConfig(max_model_len=8, max_num_seqs=9, max_num_batched_tokens=8), "max_num_seqs is 9 and max_num_batched_tokens is 8"),
    ],
)
def test_refuses_limits_that_cannot_work(config, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(config, PageManager(4, 4))
