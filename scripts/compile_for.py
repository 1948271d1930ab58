"""Compile every kernel, and whole steps of the engine, for chips that this machine does not have; prints a table.

Nothing is executed: a line says that the program compiles for the chip, what it needs of registers or VMEM and of memory, and whether it
updates the page pools in place. The status is 1 when a program does not compile, spills registers, copies a pool or leaves it undonated.
A model that is too large for the chip and a copy that is a known limit are reported, and are no failures.
Needs the compilers: `jaxserve[tpu]`, `jaxserve[cuda13]`.
"""

from __future__ import annotations

import os

# Read when jax is imported: compile on the CPU, and do not ask for a driver, an accelerator or a metadata server.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Make the GPU kernels' compiler say what it used.
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"

import argparse
import contextlib
import importlib.metadata
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels import compile_targets
from scripts.compile_programs import GIB, MODELS, Program, collectives, kernel_programs, pool_copies, step_programs, vmem_bytes

# Memory of a device (a TPU7x chip is two) and the smallest slice of 16 of them.
TPUS = {
    "v4": (32 * GIB, "v4:2x2x4"),
    "v5e": (16 * GIB, "v5e:4x4"),
    "v5p": (95 * GIB, "v5p:2x2x4"),
    "v6e": (32 * GIB, "v6e:4x4"),
    "tpu7x": (96 * GIB, "tpu7x:2x2x2"),
}


@dataclass
class Line:
    """What is known of one program on one target; bytes are a device's."""

    target: str
    program: str
    status: str = "ok"  # "ok", "refused", "known limit", "too large", "left out", or what failed
    reason: str = ""
    seconds: float = 0.0
    registers: int | None = None
    spill_bytes: int | None = None
    shared_memory_bytes: int | None = None
    vmem_bytes: int | None = None
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    collectives: str = ""


def compile_program(target: str, program: Program, mesh: Mesh) -> Line:
    """Compile and look at the result; what goes wrong becomes the line's status."""
    line, start = Line(target, program.name), time.perf_counter()
    function = jax.jit(program.function, donate_argnums=program.donated, out_shardings=program.out_shardings)
    try:
        if target in TPUS:
            with jax.set_mesh(mesh):
                compiled = function.trace(*program.arguments).lower(lowering_platforms=("tpu",)).compile()
        else:
            compiled, used = compile_targets.compile_with_report(function, program.arguments, target)
            if used is not None:
                line.registers, line.spill_bytes = max(used.registers.values()), used.spill_bytes
                line.shared_memory_bytes = used.shared_memory_bytes
    except Exception as error:  # any compiler's refusal is a result here
        line.status, line.reason = "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300]
        return line
    finally:
        line.seconds = round(time.perf_counter() - start, 2)
    hlo, memory = compiled.as_text() or "", cast(Any, compiled.memory_analysis())
    line.vmem_bytes, line.argument_bytes, line.temp_bytes = vmem_bytes(hlo), memory.argument_size_in_bytes, memory.temp_size_in_bytes
    line.collectives = ", ".join(f"{count} {kind}" for kind, count in collectives(hlo).items())
    copies = pool_copies(hlo, program.pool_dims)
    if copies and program.limit and all(re.search(rf" = \(?{program.limit_dtype}\[", copy) for copy in copies):
        line.status, line.reason = "known limit", f"{program.limit}, {len(copies)} times"
    elif copies:
        line.status, line.reason = "copies a pool", f"{len(copies)} times, first: {copies[0][:200]}"
    elif memory.alias_size_in_bytes < program.pool_bytes:
        line.status, line.reason = "not donated", f"{memory.alias_size_in_bytes} of {program.pool_bytes} bytes of the pools are aliased"
    elif line.spill_bytes:
        line.status, line.reason = "spills", f"{line.spill_bytes} bytes"
    return line


def memory_bytes(target: str) -> int:
    return TPUS[target][0] if target in TPUS else compile_targets.GPU_TARGETS[target].memory_bytes


def versions() -> dict[str, str]:
    """Of JAX and of the compilers that are installed."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def kernel_lines(target: str, match: str, quick: bool):
    device = compile_targets.topology(target).devices[0]
    mesh = Mesh(np.array([device]), ("x",))
    for name, program in kernel_programs(device, quick):
        if match in name:
            yield Line(target, name, "refused", program) if isinstance(program, str) else compile_program(target, program, mesh)


def step_lines(target: str, models: list[str], layers: int | None, layer_loop: str, match: str):
    for model in models:
        chips = MODELS[model][1]
        if chips == 1:
            devices = list(compile_targets.topology(target).devices)
        elif target in TPUS:
            devices = list(topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target][1]).devices)
        else:
            yield Line(target, f"{model} on {chips}", "left out", "the GPU compiler is given one device")
            continue
        mesh = Mesh(np.array(devices[:chips]).reshape(1, chips), ("data", "tensor"))
        for program in step_programs(model, devices, memory_bytes(target), layers, layer_loop):
            if match not in program.name:
                continue
            line = compile_program(target, program, mesh)
            needed = (line.argument_bytes or 0) + (line.temp_bytes or 0)
            full = "RESOURCE_EXHAUSTED" in line.reason
            if (line.status == "ok" and needed > memory_bytes(target)) or full:
                line.status = "too large"
                line.reason = line.reason or f"{needed / GIB:.1f} of {memory_bytes(target) / GIB:.1f} GiB"
            yield line


def table(lines: list[Line]) -> str:
    """The lines as Markdown."""
    head = (
        "target",
        "program",
        "s",
        "registers",
        "spills B",
        "SMEM / VMEM KiB",
        "arguments GiB",
        "temporaries GiB",
        "collectives",
        "result",
    )
    rows = [head, ("---",) * len(head)]
    for x in lines:
        number = lambda value, unit, digits: "" if value is None else f"{value / unit:.{digits}f}"  # noqa: E731
        on_chip = number(x.shared_memory_bytes or x.vmem_bytes, 1024, 0)
        memory = number(x.argument_bytes, GIB, 3), number(x.temp_bytes, GIB, 3)
        result = f"{x.status}: {x.reason}" if x.reason else x.status
        used = number(x.registers, 1, 0), number(x.spill_bytes, 1, 0)
        rows.append((x.target, x.program, f"{x.seconds:.1f}", *used, on_chip, *memory, x.collectives, result.replace("|", "/")))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", nargs="+", choices=(*TPUS, *compile_targets.GPU_TARGETS), metavar="TARGET", help="v4 v5e v5p v6e tpu7x a100 h100 h200"
    )
    parser.add_argument("--only", choices=("kernels", "steps"), help="leave the other out")
    parser.add_argument("--match", default="", help="only programs whose name contains this")
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS), help="models of the steps")
    parser.add_argument("--layers", type=int, help="layers of the models; default: all, which takes minutes")
    parser.add_argument(
        "--layer-loop", choices=("auto", "rolled", "unrolled"), default="auto", help="as the engine's option; rolled compiles faster"
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes of the kernels, and one layer of the models")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    layers = 1 if args.quick and args.layers is None else args.layers
    lines: list[Line] = []
    with tqdm(unit="program", file=sys.stderr) as bar:
        for target in args.targets:
            bar.set_description(target)
            kernels = () if args.only == "steps" else kernel_lines(target, args.match, args.quick)
            steps = () if args.only == "kernels" else step_lines(target, args.models, layers, args.layer_loop, args.match)
            for source in (kernels, steps):
                for line in source:
                    lines.append(line)
                    bar.update()
                    if args.json:
                        record = {"versions": versions(), "command": sys.argv[1:], "lines": [asdict(x) for x in lines]}
                        args.json.write_text(json.dumps(record, indent=1))
    print(table(lines))
    good = {"ok", "refused", "known limit", "too large", "left out"}
    failed = [x for x in lines if x.status not in good]
    print(f"\n{len(lines)} programs, {len(failed)} failed; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
