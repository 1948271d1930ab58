"""Native loops as XLA operations: makes them known to XLA, once a process. Imports numba only when it does."""

import importlib
import importlib.util
import threading

import jax

INSTALLED = importlib.util.find_spec("numba") is not None
MATMUL, PAGED_ATTENTION = "pallas_kernels_matmul", "pallas_kernels_paged_attention"  # names of XLA's targets
_LOOPS = {MATMUL: "pallas_kernels.matmul.cpu_loops", PAGED_ATTENTION: "pallas_kernels.paged_attention.cpu_loops"}
_lock = threading.Lock()
_registered = {}


def register(target: str) -> None:
    """Compile the target's loops, or load them from numba's cache beside the source, and give their ``handler`` to XLA."""
    with _lock:  # programs are traced in several threads
        if target not in _registered:
            loops = importlib.import_module(_LOOPS[target])
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(loops.handler.ctypes), platform="cpu")
            _registered[target] = loops


def prepare(backend: str) -> None:
    """Do now what the first call of ``backend`` would do once a process: numba compiles its loops, for some seconds without its cache."""
    if backend == "numba":
        for target in _LOOPS:
            register(target)
