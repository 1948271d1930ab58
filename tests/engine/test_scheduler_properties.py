"""The scheduler under random requests, aborts and overlap: every request gets exactly its tokens, whatever happens around it."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation import VOCAB_SIZE, Simulation

TOKENS = st.integers(0, VOCAB_SIZE - 1)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        usable_pages=st.integers(1, 12),
        page_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 12),
        max_model_len=st.integers(8, 40),
    )
    def start(self, usable_pages: int, page_size: int, max_num_seqs: int, spare_tokens: int, max_model_len: int) -> None:
        self.simulation = Simulation(usable_pages, page_size, max_num_seqs, max_num_seqs + spare_tokens, max_model_len)

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=16), max_tokens=st.integers(0, 16), end_ids=st.sets(TOKENS, max_size=2))
    def add(self, prompt: list[int], max_tokens: int, end_ids: set[int]) -> None:
        pages, scheduler = self.simulation.pages, self.simulation.scheduler
        total = len(prompt) + max_tokens
        if total <= scheduler.max_model_len and total <= pages.num_usable_pages * pages.page_size:
            self.simulation.add(prompt, max_tokens, end_ids)
        else:
            with pytest.raises(ValueError, match=rf"the prompt has {len(prompt)} tokens"):
                self.simulation.add(prompt, max_tokens, end_ids)

    @rule(choice=st.integers(0, 30))
    def abort(self, choice: int) -> None:
        if choice < len(self.simulation.requests):
            request = self.simulation.requests[-1 - choice]
            unfinished = request.finish_reason is None
            assert self.simulation.scheduler.abort(request.request_id) is (request if unfinished else None)
            assert request.finish_reason is not None and not request.block_table

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @rule()
    def collect(self) -> None:
        """Without overlap the step is updated before the next one is scheduled."""
        self.simulation.collect()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_sequence_of_events = SchedulerMachine.TestCase


def random_simulation(rng: random.Random) -> Simulation:
    max_num_seqs = rng.randint(1, 8)
    return Simulation(rng.randint(8, 40), rng.choice([1, 2, 4, 8]), max_num_seqs, max_num_seqs + rng.randint(0, 40))


@pytest.mark.parametrize("seed", range(100))
def test_long_random_load(seed: int) -> None:
    """Queues much longer than the machine above builds, mostly short of pages, with and without overlap."""
    rng = random.Random(seed)
    simulation = random_simulation(rng)
    capacity = simulation.pages.num_usable_pages * simulation.pages.page_size
    for _ in range(40):
        total = rng.randint(2, min(capacity, 60))
        num_prompt_tokens = rng.randint(1, total)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)]
        end_ids = rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1]))
        simulation.add(prompt, total - num_prompt_tokens, end_ids)
        for _ in range(rng.randint(0, 4)):
            simulation.step()
            if rng.random() < 0.3:
                simulation.collect()
        if rng.random() < 0.1:
            simulation.scheduler.abort(rng.choice(simulation.requests).request_id)
    simulation.finish()
    assert simulation.num_schedules >= 40


def test_random_loads_do_preempt() -> None:
    """The tests above would prove little if pages never ran out."""
    simulations = []
    for seed in range(10):
        rng = random.Random(seed)
        simulation = Simulation(12, 2, 6, 20)
        for _ in range(12):
            simulation.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))], rng.randint(8, 16))
        simulation.finish()
        simulations.append(simulation)
    assert sum(s.scheduler.num_preemptions for s in simulations) > 50
    assert max(r.num_preemptions for s in simulations for r in s.requests) >= 2
