"""Attention over a paged key/value pool, for decode steps and for mixed prefill and decode steps."""

from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
