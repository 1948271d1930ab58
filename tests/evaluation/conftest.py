import pytest
from fake_llm import write_data


@pytest.fixture
def data(tmp_path):
    """A directory with a small file for each task."""
    return write_data(tmp_path / "data")
