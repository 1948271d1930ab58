"""Chips that programs can be compiled for on a machine that has none of them.

A GPU target needs the ``jax[cuda13]`` plugin, a TPU target ``libtpu``; neither needs a driver or a device. What compiles fits the chip's
registers and on-chip memory; nothing is executed. Set ``JAX_PLATFORMS=cpu`` and, for GPUs, ``JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`` (the
plugin's version check asks for a driver) before jax is imported, and REPORT_VARIABLES to 1 to learn what Mosaic GPU kernels use.
"""

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

# Names that libtpu understands, of the smallest slice that exists.
TPU_TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# Make Mosaic GPU print what a kernel uses, and ptxas its registers and spills.
REPORT_VARIABLES = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
# Most shared memory that one block of threads of a Hopper GPU may use.
HOPPER_SHARED_MEMORY_BYTES = 232_448


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """An NVIDIA GPU, as far as XLA's compiler needs to know it."""

    name: str
    num_sms: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    l2_bytes: int
    bytes_per_second: int
    memory_bytes: int
    compute_capability: tuple[int, int]
    clock_ghz: float

    @property
    def config(self) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        major, minor = self.compute_capability
        # Hopper's own instructions (wgmma, TMA) exist in the architecture-specific target only, sm_90a.
        features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_sm_bytes}
  shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
  threads_per_core_limit: 2048
  core_count: {self.num_sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {self.bytes_per_second}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  name: "{self.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


GPU_TARGETS = {
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", 108, 167_936, 166_912, 41_943_040, 2_039_040_000_000, 85_100_068_864, (8, 0), 1.41),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", 132, 233_472, HOPPER_SHARED_MEMORY_BYTES, 52_428_800, 3_352_320_000_000, 84_942_979_072, (9, 0), 1.98
    ),
    "h200": GpuTarget(
        "NVIDIA H200", 132, 233_472, HOPPER_SHARED_MEMORY_BYTES, 52_428_800, 4_800_000_000_000, 151_397_597_184, (9, 0), 1.98
    ),
}


@dataclasses.dataclass(frozen=True)
class GpuResources:
    """What the compiler says of a program's Mosaic GPU kernels."""

    registers: dict[str, int]  # of a thread, by the kernel's name
    spill_bytes: int  # stores and loads, all kernels together
    shared_memory_bytes: int  # of a block of threads, the largest kernel


def topology(target: str) -> topologies.TopologyDescription:
    """Return the devices of ``target``, a key of GPU_TARGETS or TPU_TOPOLOGIES.

    Raises ValueError for an unknown name and RuntimeError where the compiler of that platform is not installed.
    """
    if target in TPU_TOPOLOGIES:
        return topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[target])
    if target not in GPU_TARGETS:
        raise ValueError(f"target={target!r}: expected one of {(*GPU_TARGETS, *TPU_TOPOLOGIES)}")
    return topologies.get_topology_desc(topology_name="", platform="cuda", topology="1x1x1", target_config=GPU_TARGETS[target].config)


def hopper_mesh(target: str = "h100") -> AbstractMesh:
    """An abstract mesh of one Hopper GPU: tracing or interpreting a kernel inside ``jax.sharding.use_abstract_mesh`` sees that chip."""
    device = AbstractDevice(device_kind=GPU_TARGETS[target].name, platform="gpu", num_cores=GPU_TARGETS[target].num_sms)
    return AbstractMesh((), (), abstract_device=device)


def compile_for_gpu(function: Callable, arguments: tuple, target: str) -> tuple[jax.stages.Compiled, GpuResources | None]:
    """Compile ``function(*arguments)`` for one GPU; arguments is a pytree of arrays or ShapeDtypeStructs, whose shardings do not count.

    Otherwise as :func:`compile_with_report`.
    """
    sharding = SingleDeviceSharding(topology(target).devices[0])
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return compile_with_report(jax.jit(function), arguments, target)


def compile_with_report(function: Any, arguments: tuple, target: str) -> tuple[jax.stages.Compiled, GpuResources | None]:
    """Compile the jitted ``function(*arguments)``, arguments being sharded over devices of ``topology(target)``, a GPU.

    Returns the compiled program and what its Mosaic GPU kernels use, None if it has none. Raises what the compiler raises: a kernel that
    wants more shared memory than there is does not compile.
    """
    if target not in GPU_TARGETS:
        raise ValueError(f"target={target!r}: expected one of {(*GPU_TARGETS,)}")
    with _captured_output() as output:
        compiled = function.trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    output.seek(0)
    text = output.read()
    return compiled, parse_resources(text) if "mosaic_gpu" in (compiled.as_text() or "") else None


def parse_resources(text: str) -> GpuResources:
    """Read the reports of ptxas and of Mosaic, as printed under REPORT_VARIABLES."""
    kernels = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", text, re.DOTALL)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    shared = re.findall(r"smem_scratch_bytes=(\d+)", text)
    if not kernels or not spills or not shared:
        raise RuntimeError(f"no report of a Mosaic GPU kernel in {text[:500]!r}; set {' and '.join(REPORT_VARIABLES)} to 1 before")
    registers: dict[str, int] = {}
    for name, count in kernels:
        registers[name] = max(int(count), registers.get(name, 0))
    return GpuResources(registers, sum(map(int, spills)), max(map(int, shared)))


@contextmanager
def _captured_output() -> Iterator[IO[str]]:
    """Collect what the process prints; the compiler prints from C++, so file descriptors are redirected, not sys.stdout."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read by the caller after the redirection has ended
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        yield output
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
