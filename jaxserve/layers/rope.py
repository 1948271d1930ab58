"""Rotary position embedding (arXiv:2104.09864) with the context-extension scalings of Hugging Face's `rope_parameters`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_angles(
    config: RopeConfig, head_dim: int, max_positions: int, positions: jax.Array, rope_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Float32 cos and sin [T, head_dim / 2] at positions i32[T].

    rope_lens i32[T] is the sequence length that the length-dependent kinds (dynamic, longrope) scale for: the prompt's length, or
    position + 1 once that is larger. It depends on the request alone, so chunks and batches do not change the angles.
    """
    frequencies = _frequencies(config, head_dim, max_positions, rope_lens)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    scale = attention_scale(config, max_positions)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x[T, ..., head_dim], whose last dimension's halves hold the pairs' two components, in float32."""
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (a.reshape(a.shape[0], *(1,) * (x.ndim - 2), a.shape[1]) for a in (cos, sin))
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def attention_scale(config: RopeConfig, max_positions: int) -> float:
    """The factor on cos and sin: 1 but for yarn (arXiv:2309.00071) and longrope (arXiv:2402.13753)."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    original = config.original_max_position_embeddings or max_positions
    factor = config.factor if config.factor is not None else max_positions / original
    if config.kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(factor, config.mscale) / _yarn_scale(factor, config.mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _need(config: RopeConfig, name: str) -> float:
    """A field that the kind cannot do without; ValueError when it is None."""
    value = getattr(config, name)
    if value is None:
        raise ValueError(f"{name} is None; rope of kind {config.kind!r} needs a number")
    return value


def _frequencies(config: RopeConfig, head_dim: int, max_positions: int, rope_lens: jax.Array) -> np.ndarray | jax.Array:
    """Radians a position: [head_dim / 2], or [T, head_dim / 2] where they depend on the length."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / config.theta**exponents).astype(np.float32)
    if config.kind == "default":
        return base
    if config.kind == "linear":
        return base / np.float32(_need(config, "factor"))
    if config.kind == "llama3":
        return _llama3(config, base)
    if config.kind == "yarn":
        return _yarn(config, base, head_dim, max_positions)
    if config.kind == "dynamic":
        length = jnp.maximum(rope_lens, max_positions).astype(jnp.float32)[:, None]
        factor = _need(config, "factor")
        stretch = factor * length / max_positions - (factor - 1)
        return 1.0 / (config.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
    original = config.original_max_position_embeddings or max_positions
    short, long = (base / np.asarray(f, np.float32) for f in (config.short_factor, config.long_factor))
    return jnp.where((rope_lens > original)[:, None], long, short)


def _llama3(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1 model card)."""
    wavelengths = 2 * math.pi / base
    names = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor")
    original, low, high, factor = (_need(config, name) for name in names)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * base / factor + smooth * base).astype(np.float32)


def _yarn(config: RopeConfig, base: np.ndarray, head_dim: int, max_positions: int) -> np.ndarray:
    """NTK-by-parts: dimensions that turn often keep their frequency, slow ones are interpolated (arXiv:2309.00071 section 3.2)."""
    original = config.original_max_position_embeddings or max_positions
    factor = config.factor if config.factor is not None else max_positions / original

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast or 32), dimension(config.beta_slow or 1)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (base / factor * ramp + base * (1 - ramp)).astype(np.float32)
