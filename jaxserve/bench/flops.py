"""Floating-point operations that a workload needs, counted from the model's shapes."""

from __future__ import annotations

from jaxserve.config import ModelConfig


def request_flops(config: ModelConfig, num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Operations to compute one request once, a multiply-add as two: matrix products, attention scores and the head.

    The last output token is not fed back, and the head runs once for each output token. Padding and recomputation are not needed
    work and do not count.
    """
    tokens = num_prompt_tokens + num_output_tokens - 1
    attention_width = config.num_heads * config.head_dim
    qkv = config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = qkv + attention_width * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    contexts = tokens * (tokens + 1) // 2  # each token attends to itself and all before it
    scores = 2 * attention_width * contexts  # queries times keys, and weights times values
    head = config.hidden_size * config.vocab_size * num_output_tokens
    return 2 * (config.num_layers * (layer * tokens + scores) + head)
