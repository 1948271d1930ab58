"""The import rules of docs/architecture.md, checked over the source; every rule is also shown to catch a bad example."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Sources = dict[str, str]  # path relative to the repository -> source text

# Lowest first. A module imports its own level and those below; the longest matching prefix decides.
LEVELS = (
    ("jaxserve.config", "jaxserve.request", "jaxserve.sampling_params"),
    (
        "jaxserve.detokenizer",
        "jaxserve.engine.page_manager",
        "jaxserve.kv_cache",
        "jaxserve.layers",
        "jaxserve.loader",
        "jaxserve.models",
        "jaxserve.sampler",
        "jaxserve.sharding",
        "jaxserve.tokenizer",
        "jaxserve.gguf_tokenizer",
    ),
    ("jaxserve.engine", "jaxserve.engine.model_runner", "jaxserve.engine.scheduler"),
    ("jaxserve.engine.llm_engine", "jaxserve.engine.output_processor"),
    ("jaxserve.engine.async_engine", "jaxserve.llm"),
    ("jaxserve", "jaxserve.api", "jaxserve.evaluation"),
    ("jaxserve.__main__", "jaxserve.cli", "server"),
)
HOST_TYPES = LEVELS[0]
HOST_LOGIC = ("jaxserve.engine.page_manager", "jaxserve.engine.scheduler")
NATIVE_LOOPS = {  # imported on CPUs alone
    "pallas_kernels/native.py",
    "pallas_kernels/native_tile.py",
    "pallas_kernels/matmul/cpu_loops.py",
    "pallas_kernels/paged_attention/cpu_loops.py",
}
DEVICE_PACKAGES = {"jax", "jaxlib", "flax", "orbax", "pallas_kernels"}
DEVICE_CALLS = {"jit", "pjit", "pmap", "device_put", "device_get"}
KERNEL_USERS = {"jaxserve/layers/attention.py", "jaxserve/layers/linear.py", "jaxserve/kv_cache.py"}
BANNED_FOLDERS = {"utils", "util", "common", "helpers", "managers", "v2"}


def sources() -> Sources:
    files = [ROOT / "server.py", *(ROOT / "jaxserve").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files if path.exists()}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, relative ones resolved; `from a import b` gives a.b, which may be a module or a name in a."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.removesuffix(".py").split("/")
            base = [*package[: len(package) - node.level], *filter(None, [node.module])] if node.level else [node.module or ""]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def resolve(name: str, modules: set[str]) -> str:
    """The module of ours that `name` means: jaxserve.request.Request -> jaxserve.request; other names stay as they are."""
    parent = name.rpartition(".")[0]
    return parent if name not in modules and parent in modules else name


def in_package(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def host_types_stay_plain(files: Sources) -> Iterator[str]:
    allowed = {*sys.stdlib_module_names, "numpy"}
    for path, source in files.items():
        if module_name(path) in HOST_TYPES:
            for line, name in imports(path, source):
                if name.split(".")[0] not in allowed and not any(in_package(name, own) for own in HOST_TYPES):
                    yield f"{path}:{line} imports {name}; it may import the standard library, numpy and {', '.join(HOST_TYPES)}"


def host_logic_never_reaches_jax(files: Sources) -> Iterator[str]:
    """Follows imports through jaxserve's modules. Packages' __init__ are left out: that of jaxserve is public names only."""
    by_module = {module_name(path): (path, source) for path, source in files.items()}
    for start in HOST_LOGIC:
        todo, seen = [start], {start}
        while todo:
            path, source = by_module.get(todo.pop(), ("", ""))
            for line, name in imports(path, source):
                if name.split(".")[0] in DEVICE_PACKAGES:
                    yield f"{path}:{line} imports {name}, so {start} depends on the device; keep it pure host code"
                target = resolve(name, set(by_module))
                if target in by_module and target not in seen:
                    seen.add(target)
                    todo.append(target)


def kernels_stand_alone(files: Sources) -> Iterator[str]:
    allowed = {*sys.stdlib_module_names, "jax", "numpy", "pallas_kernels"}
    for path, source in files.items():
        if path.startswith("pallas_kernels/"):
            compiler = {"numba", "llvmlite"} if path in NATIVE_LOOPS else set()
            for line, name in imports(path, source):
                if name.split(".")[0] not in allowed | compiler:
                    yield f"{path}:{line} imports {name}; pallas_kernels imports jax, numpy and the standard library"


def kernels_have_one_door(files: Sources) -> Iterator[str]:
    for path, source in files.items():
        if path.startswith("jaxserve/") and path not in KERNEL_USERS:
            for line, name in imports(path, source):
                if in_package(name, "pallas_kernels"):
                    yield f"{path}:{line} imports {name}; go through jaxserve.layers.attention"


def device_calls_have_one_site(files: Sources) -> Iterator[str]:
    for path, source in files.items():
        if not path.startswith("jaxserve/engine/") or path == "jaxserve/engine/model_runner.py":
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr in DEVICE_CALLS:
                yield f"{path}:{node.lineno} uses {ast.unparse(node)}; in the engine this belongs to model_runner.py"
        for line, name in imports(path, source):
            if name.split(".")[0] in {"jax", "flax"} and name.split(".")[-1] in DEVICE_CALLS:
                yield f"{path}:{line} imports {name}; in the engine this belongs to model_runner.py"


def level(name: str) -> int:
    """Number of the module's level; -1 for what is not ours, pallas_kernels included."""
    found = [(len(prefix), number) for number, prefixes in enumerate(LEVELS) for prefix in prefixes if in_package(name, prefix)]
    return max(found, default=(0, -1))[1]


def nothing_imports_upward(files: Sources) -> Iterator[str]:
    modules = {module_name(path) for path in files}
    for path, source in files.items():
        own = module_name(path)
        for line, name in imports(path, source):
            target = resolve(name, modules)
            if level(target) > level(own):
                yield f"{path}:{line} imports {target}, which is above it (api -> async_engine -> llm_engine -> scheduler, model_runner)"


def imports_have_no_cycle(files: Sources) -> Iterator[str]:
    modules = {module_name(path): path for path in files}
    graph = {own: {resolve(n, set(modules)) for _, n in imports(path, files[path])} & set(modules) - {own} for own, path in modules.items()}
    while ends := [name for name, targets in graph.items() if not targets & set(graph)]:
        for name in ends:
            del graph[name]
    if graph:
        yield f"modules that import each other in a circle, or that import such modules: {', '.join(sorted(graph))}"


def folders_are_named_for_what_they_hold(files: Sources) -> Iterator[str]:
    for path in files:
        for part in path.removesuffix(".py").split("/"):
            if part in BANNED_FOLDERS:
                yield f"{path}: {part!r} says nothing about what is inside; name it for its content"


def no_environment_options(files: Sources) -> Iterator[str]:
    for path, source in files.items():
        names = ((node.lineno, ast.unparse(node)) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
        for line, name in [*names, *imports(path, source)]:
            if name.startswith("os.") and name.split(".")[1] in {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}:
                yield f"{path}:{line} uses {name}; options are fields of a config"


Rule = Callable[[Sources], Iterator[str]]
BAD: list[tuple[Rule, str, str]] = [  # (rule, path, source that breaks it)
    (host_types_stay_plain, "jaxserve/config.py", "import jax"),
    (host_types_stay_plain, "jaxserve/request.py", "def f():\n    from transformers import AutoTokenizer"),
    (host_types_stay_plain, "jaxserve/sampling_params.py", "from . import tokenizer"),
    (host_logic_never_reaches_jax, "jaxserve/engine/scheduler.py", "import jax.numpy as jnp"),
    (host_logic_never_reaches_jax, "jaxserve/engine/page_manager.py", "from jaxserve.layers.attention import Attention"),
    (kernels_stand_alone, "pallas_kernels/paged_attention/api.py", "from jaxserve.config import EngineConfig"),
    (kernels_stand_alone, "pallas_kernels/__init__.py", "import flax"),
    (kernels_have_one_door, "jaxserve/models/llama.py", "from pallas_kernels import paged_attention"),
    (kernels_have_one_door, "jaxserve/engine/model_runner.py", "import pallas_kernels.paged_attention.api as api"),
    (device_calls_have_one_site, "jaxserve/engine/llm_engine.py", "import jax\njax.device_get(1)"),
    (device_calls_have_one_site, "jaxserve/engine/input_batch.py", "from jax import jit as compile"),
    (device_calls_have_one_site, "jaxserve/engine/programs.py", "@nnx.jit\ndef f(): ..."),
    (nothing_imports_upward, "jaxserve/engine/scheduler.py", "from jaxserve.engine.llm_engine import LLMEngine"),
    (nothing_imports_upward, "jaxserve/engine/llm_engine.py", "from . import async_engine"),
    (nothing_imports_upward, "jaxserve/engine/async_engine.py", "from jaxserve.api.errors import APIError"),
    (nothing_imports_upward, "jaxserve/layers/attention.py", "from jaxserve.engine import model_runner"),
    (nothing_imports_upward, "jaxserve/api/routes.py", "import server"),
    (imports_have_no_cycle, "jaxserve/request.py", "from jaxserve.engine.scheduler import Scheduler"),
    (folders_are_named_for_what_they_hold, "jaxserve/engine/utils.py", ""),
    (folders_are_named_for_what_they_hold, "pallas_kernels/common/api.py", ""),
    (no_environment_options, "jaxserve/cli.py", "import os\nos.environ['X'] = '1'"),
    (no_environment_options, "pallas_kernels/tuning.py", "from os import getenv"),
]
GOOD: Sources = {
    "jaxserve/request.py": "import time\nimport numpy as np\nfrom jaxserve.sampling_params import SamplingParams",
    "jaxserve/sampling_params.py": "import math",
    "jaxserve/layers/attention.py": "import jax\nimport pallas_kernels",
    "jaxserve/engine/scheduler.py": "from jaxserve.engine.page_manager import PageManager\nfrom ..request import Request",
    "jaxserve/engine/page_manager.py": "import collections",
    "jaxserve/engine/model_runner.py": "import jax\nfrom .scheduler import SchedulerOutput\njax.jit(print)",
    "jaxserve/engine/llm_engine.py": "import os.path\nfrom jaxserve.engine import model_runner, scheduler",
    "jaxserve/engine/async_engine.py": "from jaxserve.engine.llm_engine import LLMEngine",
    "jaxserve/api/routes.py": "import fastapi\nfrom jaxserve.engine.async_engine import AsyncEngine",
    "pallas_kernels/paged_attention/api.py": "import jax\nfrom . import reference",
    "pallas_kernels/paged_attention/reference.py": "import numpy",
}
RULES = list(dict.fromkeys(rule for rule, _, _ in BAD))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    files = sources()
    assert len(files) > 10, f"sources are not where this test looks for them: {ROOT}"
    assert not (broken := list(rule(files))), "\n".join(broken)


@pytest.mark.parametrize(("rule", "path", "source"), BAD, ids=[f"{rule.__name__}-{path}" for rule, path, _ in BAD])
def test_the_rule_catches_a_bad_example(rule: Rule, path: str, source: str) -> None:
    assert list(rule({**GOOD, path: source}))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_allows_a_good_example(rule: Rule) -> None:
    assert list(rule(GOOD)) == []


def test_every_module_of_the_levels_exists() -> None:
    """A renamed module must not leave its rule behind."""
    modules = {module_name(path) for path in sources()}
    assert [name for names in LEVELS for name in names if name not in modules] == []
