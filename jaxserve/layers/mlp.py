"""The gated feed-forward block SwiGLU (arXiv:2002.05202)."""

from __future__ import annotations

import jax
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.layers.linear import Linear


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matmul."""

    def __init__(self, config: ModelConfig, dtype):
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(hidden, (2, ffn), dtype, ("embed", None, "ffn"), bias=config.mlp_bias)
        self.down = Linear(ffn, (hidden,), dtype, ("ffn", "embed"), bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])
