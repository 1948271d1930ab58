"""CompileCounter: how many programs XLA has compiled in this process, so that a compilation while serving is seen."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # once a program, whether compiled or read from the persistent cache


class CompileCounter:
    """Counts from its construction on; `mark_ready()` splits the count. Seconds are summed over threads."""

    def __init__(self) -> None:
        self.count, self.seconds, self._at_ready = 0, 0.0, 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs

    def mark_ready(self) -> None:
        self._at_ready = self.count

    @property
    def count_after_ready(self) -> int:
        return self.count - self._at_ready
