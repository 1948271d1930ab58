"""Out of pages, and aborted: what the scheduler does with requests that have to make room or leave."""

from __future__ import annotations

import pytest
from simulation import Simulation, expected_end, make_request, prompt, rows

from jaxserve.engine.scheduler import SchedulerOutput
from jaxserve.request import FinishReason, Request, RequestStatus


def step_until_preempted(s: Simulation, request: Request) -> tuple[SchedulerOutput, list[int]]:
    """Stop between `schedule` and `update`: the step before, which sampled a token for the request, is still in flight.

    Returns the step just launched, which becomes the one in flight after the update.
    """
    while True:
        output = s.dispatch()
        assert output
        launched = output, s.device.run(output)
        if request.num_preemptions:
            return launched
        s.collect()
        s.in_flight = launched


def test_request_may_fill_the_whole_pool():
    for length, max_tokens in ((1, 15), (15, 1), (16, 0), (8, 8)):
        s = Simulation(usable_pages=4, page_size=4)
        s.add(prompt(length), max_tokens)
        s.finish()
        assert s.scheduler.num_preemptions == 0


def test_smallest_pool_serves_one_request_after_the_other():
    s = Simulation(usable_pages=1, page_size=2)
    for _ in range(3):
        s.add([1], 1)
    s.add([1, 2], 0)
    s.step()
    assert (s.scheduler.num_running, s.scheduler.num_waiting) == (1, 3)
    s.finish()


def test_newest_is_preempted_and_goes_to_the_front_of_the_queue():
    s = Simulation(usable_pages=5, page_size=4, max_num_seqs=2)
    old, new = s.add(prompt(4), 12), s.add(prompt(4), 12)
    last = s.add(prompt(1), 1)
    output = s.step()
    while not new.num_preemptions:
        output = s.step()
    assert output and output.preempted == [new]
    assert s.scheduler.running == [old]
    assert list(s.scheduler.waiting) == [new, last]
    assert not new.block_table and new.num_computed_tokens == 0
    s.finish()
    assert old.num_preemptions == 0


def test_preempted_request_with_a_pending_token_waits_for_it():
    s = Simulation(usable_pages=4, page_size=4, max_num_seqs=2)
    old, new = s.add(prompt(4), 8), s.add(prompt(4), 8)
    launched = step_until_preempted(s, new)
    known = len(new.output_token_ids)
    assert new.num_pending_tokens == 1
    s.scheduler.abort(old.request_id)  # room enough now
    assert s.scheduler.schedule() is None
    s.collect()
    s.in_flight = launched
    assert len(new.output_token_ids) == known + 1
    assert rows(s.step()) == [("1", 0, 4 + known + 1, True)]
    s.finish()


def test_request_can_be_preempted_again_and_again():
    s = Simulation(usable_pages=8, page_size=1, max_num_seqs=3)
    requests = [s.add([1], 7) for _ in range(6)]
    s.finish()
    assert max(r.num_preemptions for r in requests) >= 2
    assert requests[0].num_preemptions == 0


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_preempted_request_may_end_with_its_pending_token(ending):
    ids = [2] * 4
    tokens = expected_end(make_request("", ids, 5))[0]
    assert tokens[4] not in tokens[:4]
    s = Simulation(usable_pages=4, page_size=4, max_num_seqs=2)
    s.add(prompt(4), 8)
    new = s.add(ids, 5) if ending == "length" else s.add(ids, 8, end_ids=tokens[4:])
    launched = step_until_preempted(s, new)
    s.collect()
    assert (new.finish_reason, new.output_token_ids) == (ending, tokens)
    assert not s.scheduler.waiting
    s.in_flight = launched
    s.finish()


def test_new_request_leaves_a_page_to_each_running_one():
    s = Simulation(usable_pages=4, page_size=4)
    s.add(prompt(4), 8)
    s.step()
    second = s.add(prompt(12), 1)
    s.step()
    assert second.status is RequestStatus.WAITING  # 2 pages are taken; 2 are free, 3 needed
    s.finish()
    assert s.scheduler.num_preemptions == 0


def test_request_that_does_not_fit_is_not_overtaken():
    s = Simulation(usable_pages=4, page_size=4)
    s.add(prompt(4), 8)
    s.step()
    big, small = s.add(prompt(12), 1), s.add([1], 1)
    s.step()
    assert list(s.scheduler.waiting) == [big, small]
    s.finish()


# -- abort


def abort(s: Simulation, request: Request) -> None:
    assert s.scheduler.abort(request.request_id) is request
    assert (request.status, request.finish_reason, len(request.block_table)) == (RequestStatus.FINISHED, FinishReason.ABORT, 0)
    s.scheduler.check_integrity()
    assert s.scheduler.abort(request.request_id) is None


def test_abort_of_a_waiting_request():
    s = Simulation(usable_pages=20, max_num_seqs=1)
    requests = [s.add([1, 2], 3) for _ in range(3)]
    s.step()
    abort(s, requests[1])
    s.finish()
    assert requests[1].output_token_ids == []


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_abort_in_flight_frees_pages_and_drops_the_token(num_steps):
    s = Simulation(usable_pages=20)
    request = s.add(prompt(20), 8)
    other = s.add(prompt(4), 8)
    for _ in range(num_steps):
        s.step()
    known = list(request.output_token_ids)
    abort(s, request)
    s.finish()
    assert request.output_token_ids == known
    assert other.finish_reason is FinishReason.LENGTH


def test_abort_of_a_preempted_request_with_a_pending_token():
    s = Simulation(usable_pages=4, page_size=4, max_num_seqs=2)
    s.add(prompt(4), 8)
    new = s.add(prompt(4), 8)
    launched = step_until_preempted(s, new)
    known = list(new.output_token_ids)
    assert new.num_pending_tokens == 1
    abort(s, new)
    s.collect()
    s.in_flight = launched
    s.finish()
    assert new.output_token_ids == known


def test_abort_of_an_unknown_request_is_nothing():
    assert Simulation(usable_pages=4).scheduler.abort("nobody") is None


def test_abort_may_carry_a_stop_string():
    s = Simulation(usable_pages=4)
    request = s.add([1], 4)
    s.step()
    s.scheduler.abort(request.request_id, FinishReason.STOP, "\n\n")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\n\n")


def test_id_can_be_used_again_while_the_aborted_one_is_in_flight():
    s = Simulation(usable_pages=20)
    first = s.add(prompt(4), 4)
    s.step()
    abort(s, first)
    again = make_request(first.request_id, prompt(6), 4)
    s.scheduler.add(again)
    s.requests[0], s.received = again, {again: []}
    s.finish()
    assert first.output_token_ids == []


# -- the integrity check itself


def damage_order(s: Simulation) -> None:
    s.scheduler.running.reverse()


def damage_num_seqs(s: Simulation) -> None:
    s.scheduler.max_num_seqs = 1


def damage_computed(s: Simulation) -> None:
    s.scheduler.running[0].num_computed_tokens += 5


def damage_pages(s: Simulation) -> None:
    s.pages.release([s.scheduler.running[0].block_table.pop()])


def damage_waiting(s: Simulation) -> None:
    s.scheduler.waiting[0].num_computed_tokens = 1


def damage_leak(s: Simulation) -> None:
    s.pages.allocate(1)


DAMAGES = [
    (damage_order, "not the order of arrival"),
    (damage_num_seqs, "2 requests run, more than max_num_seqs"),
    (damage_computed, "more tokens than it has"),
    (damage_pages, "computed tokens are in 1 pages"),
    (damage_waiting, "a waiting request holds"),
    (damage_leak, "1 references but is in 0 block tables"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_integrity_check_sees_each_kind_of_damage(damage, message):
    s = Simulation(usable_pages=20, max_num_seqs=2)
    for _ in range(3):
        s.add(prompt(5), 5)
    s.step()
    s.scheduler.check_integrity()
    damage(s)
    with pytest.raises(AssertionError, match=message):
        s.scheduler.check_integrity()
