"""What the kernel tests share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Hundreds of programs in one process use up the memory maps that the system allows, and XLA crashes."""
    yield
    jax.clear_caches()
