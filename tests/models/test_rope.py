"""Rope configs that a caller makes, which no loader has checked."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import RopeConfig
from jaxserve.layers.rope import rope_angles

COMPLETE = {
    "linear": RopeConfig(kind="linear", factor=2.0),
    "dynamic": RopeConfig(kind="dynamic", factor=2.0),
    "llama3": RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, f.name) for kind, c in COMPLETE.items() for f in dataclasses.fields(c) if getattr(c, f.name) != f.default and f.name != "kind"],
)
def test_a_missing_number_is_named(kind, name):
    one = jnp.ones(1, jnp.int32)
    rope_angles(COMPLETE[kind], 8, 64, one, one)
    with pytest.raises(ValueError, match=f"{name} is None; rope of kind '{kind}' needs a number"):
        rope_angles(dataclasses.replace(COMPLETE[kind], **{name: None}), 8, 64, one, one)


def test_linear_divides_positions():
    positions = jnp.array([6], jnp.int32)
    stretched = rope_angles(COMPLETE["linear"], 8, 64, positions, positions)
    plain = rope_angles(RopeConfig(), 8, 64, positions // 2, positions)
    np.testing.assert_allclose(stretched[0], plain[0], rtol=1e-6)
