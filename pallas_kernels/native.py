"""Loops compiled by numba as XLA operations on the CPU, where Pallas has no lowering: call frame, threads, atomics.

XLA calls a handler with a pointer to a struct that names operands and results (the C interface of ``xla/ffi/api/c_api.h``; what is read
here is there since its version 0.1). It is read as an array of 8-byte words. Work is spread over XLA's own thread pool; the caller works
too and never waits for a thread that is busy elsewhere, so calls that run side by side can't block each other.
"""

# numba fills in the first parameter of an intrinsic, and names its exports at run time.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.extending import intrinsic

_VERSION = 1 << 32  # major 0, minor 1: two 32-bit halves of a word
# Words of XLA_FFI_CallFrame, XLA_FFI_Metadata_Extension, XLA_FFI_Metadata, XLA_FFI_Buffer and XLA_FFI_Api.
_EXTENSION, _API, _CONTEXT, _OPERANDS, _RESULTS = 1, 2, 3, 9, 14
_METADATA, _HANDLER_VERSION, _TRAITS = 3, 3, 4
_DATA, _RANK, _DIMENSIONS = 3, 4, 5
_SCHEDULE, _NUM_THREADS = 17, 18
# Words of the state that the threads of one call share; it lives until the last of them has let go of it.
_NEXT, _UNITS, _DONE, _HOLDERS, _FRAME, _STATE_WORDS = 0, 1, 2, 3, 4, 5

_WORD = ir.IntType(64)
compiled = njit(error_model="numpy")


@intrinsic
def pointer(typing_context, address):
    """The address as a pointer, for ``numba.carray``."""
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(args[0], ir.IntType(8).as_pointer())


@intrinsic
def _call(typing_context, function, argument):
    def emit(context, builder, signature, args):
        return builder.call(builder.inttoptr(args[0], ir.FunctionType(_WORD, [_WORD]).as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _atomic_add(typing_context, address, value):
    def emit(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


def _external(builder, name):
    """A C function of one word, found by name when the code is loaded: one of libc, or one that :func:`publish` made known."""
    return builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(_WORD, [_WORD]), name)


@intrinsic
def _malloc(typing_context, num_bytes):
    return types.int64(types.int64), lambda context, builder, signature, args: builder.call(_external(builder, "malloc"), [args[0]])


@intrinsic
def _free(typing_context, address):
    return types.int64(types.int64), lambda context, builder, signature, args: builder.call(_external(builder, "free"), [args[0]])


@compiled
def words(address, count):
    """The memory at ``address`` as int64 [count]."""
    return carray(pointer(address), count, np.int64)


@compiled
def buffers(frame, num_results, num_operands):
    """int64 [results, then operands; 6]: the address of each one's data, its rank and up to 4 dimensions.

    One array for all: numba compiles a function anew for each constant it is given, so an accessor of a buffer would be slow to compile.
    """
    table = np.zeros((num_results + num_operands, 6), np.int64)
    call_frame = words(frame, 15)
    for i in range(table.shape[0]):
        is_result = i < num_results
        first = call_frame[_RESULTS] if is_result else call_frame[_OPERANDS]
        index = i if is_result else i - num_results
        buffer = words(words(first, index + 1)[index], 6)
        table[i, 0], table[i, 1] = buffer[_DATA], buffer[_RANK]
        dimensions = words(buffer[_DIMENSIONS], buffer[_RANK])
        for axis in range(min(buffer[_RANK], 4)):
            table[i, 2 + axis] = dimensions[axis]
    return table


@compiled
def _answer_metadata(frame):
    """Whether XLA only asks what the handler is, once, at registration; then the answer is written."""
    extension = words(frame, 2)[_EXTENSION]
    if extension == 0:
        return False
    metadata = words(words(extension, 4)[_METADATA], 5)
    metadata[_HANDLER_VERSION], metadata[_TRAITS] = _VERSION, 0
    return True


def publish(name, work):
    """Make the cfunc ``work`` known in this process by a name; returns the function that gives its address to compiled code.

    Code that calls by name does not compile ``work`` once more, and can be cached on disk, as a number could not.
    """
    binding.add_symbol(name, work.address)

    @intrinsic
    def address(typing_context):
        return types.int64(), lambda context, builder, signature, args: builder.ptrtoint(_external(builder, name), _WORD)

    return address


@compiled
def run(frame, work):
    """The body of an XLA handler: run ``work(state)``, an address, on as many threads as are free; returns 0, no error.

    First ``work`` is asked for the number of units: it must return it where :func:`counting` says so, and may write what belongs to no
    unit. After that it draws units with :func:`take` until there are none, reports each with :func:`finish_unit` and leaves with
    :func:`let_go`. It must draw one before it touches the frame: a thread that comes late finds none, and the frame may be gone.
    """
    if _answer_metadata(frame):
        return 0
    state = _malloc(8 * _STATE_WORDS)
    shared = words(state, _STATE_WORDS)
    api, context = words(frame, 4)[_API], words(frame, 4)[_CONTEXT]
    shared[_NEXT], shared[_UNITS], shared[_DONE], shared[_HOLDERS], shared[_FRAME] = 0, -1, 0, 1, frame
    num_units = _call(work, state)
    num_threads = max(min(_pool_threads(api, context), num_units), 1)
    shared[_UNITS], shared[_HOLDERS] = num_units, num_threads + 1
    for _ in range(num_threads - 1):
        if _schedule(api, context, work, state) != 0:
            let_go(state)
    _call(work, state)
    while _atomic_add(state + 8 * _DONE, 0) < num_units:
        pass
    let_go(state)
    return 0


@compiled
def counting(state):
    """Whether the number of units is asked for."""
    return words(state, _STATE_WORDS)[_UNITS] < 0


@compiled
def frame_of(state):
    """The call frame, for :func:`buffers`."""
    return words(state, _STATE_WORDS)[_FRAME]


@compiled
def take(state):
    """The next unit's number, or -1 when there is none left."""
    unit = _atomic_add(state + 8 * _NEXT, 1)
    return unit if unit < words(state, _STATE_WORDS)[_UNITS] else -1


@compiled
def finish_unit(state):
    """Report the unit that :func:`take` gave as done; all must be, before the call returns."""
    _atomic_add(state + 8 * _DONE, 1)


@compiled
def let_go(state):
    """Leave the state; the last one frees it."""
    if _atomic_add(state + 8 * _HOLDERS, -1) == 1:
        _free(state)


@compiled
def _pool_threads(api, context):
    count = np.zeros(1, np.int64)
    arguments = np.zeros(4, np.int64)
    arguments[0], arguments[2], arguments[3] = 32, context, count.ctypes.data
    error = _call(words(api, 19)[_NUM_THREADS], arguments.ctypes.data)
    return count[0] if error == 0 else 1


@compiled
def _schedule(api, context, function, argument):
    arguments = np.zeros(5, np.int64)
    arguments[0], arguments[2], arguments[3], arguments[4] = 40, context, function, argument
    return _call(words(api, 19)[_SCHEDULE], arguments.ctypes.data)
