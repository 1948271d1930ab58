"""Servers for the tests of the API."""

import contextlib

import pytest
from live_server import Live


@pytest.fixture(scope="session")
def live():
    with contextlib.closing(Live()) as server:
        yield server


@pytest.fixture
def launch():
    """Start servers with their own options; they end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Live(**options)))
