"""Combine attention over parts of a sequence into attention over all of it."""

from pallas_kernels.merge_states.api import merge_states

__all__ = ["merge_states"]
