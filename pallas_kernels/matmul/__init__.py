"""Activations times weights."""

from pallas_kernels.matmul.api import matmul

__all__ = ["matmul"]
