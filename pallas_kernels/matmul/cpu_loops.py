"""The loops of matmul on the CPU: strips of columns, drawn by the threads one after the other.

Nothing is packed or blocked: a strip of the weights, at most some hundred KB, is read from memory with the first eight rows of
activations and from the second-level cache with the others.
"""

# numba fills in the first parameter of an intrinsic, and names its exports at run time.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import numpy as np
from numba import carray, cfunc, types

from pallas_kernels import native, native_calls
from pallas_kernels.native_tile import ROWS, WIDTH, multiply_tile


@native.compiled
def multiply_strip(y, x, kernel, first):
    """y[:, first : first + WIDTH] = x . kernel[:, first : first + WIDTH]; at least ROWS rows, of which the last may be computed twice."""
    strip = kernel.ctypes.data + first * 4
    for step in range(0, x.shape[0], ROWS):
        row = min(step, x.shape[0] - ROWS)
        target, source = y.ctypes.data + row * y.strides[0] + first * 4, x.ctypes.data + row * x.strides[0]
        multiply_tile(target, y.strides[0], source, x.strides[0], 4, strip, kernel.strides[0], x.shape[1], 0)


@cfunc(types.int64(types.int64), error_model="numpy", cache=True)
def work(state):
    """A unit is a strip of columns; the last also takes the columns behind it, which are no whole strip."""
    counting = native.counting(state)
    unit = 0 if counting else native.take(state)
    if unit < 0:
        native.let_go(state)
        return 0
    b = native.buffers(native.frame_of(state), 1, 2)
    rows, depth, columns = b[1, 2], b[1, 3], b[2, 3]
    num_units = columns // WIDTH
    if counting:
        return num_units
    y = carray(native.pointer(b[0, 0]), (rows, columns), np.float32)
    x = carray(native.pointer(b[1, 0]), (rows, depth), np.float32)
    kernel = carray(native.pointer(b[2, 0]), (depth, columns), np.float32)
    while unit >= 0:
        multiply_strip(y, x, kernel, unit * WIDTH)
        if unit == num_units - 1 and columns % WIDTH:
            multiply_strip(y, x, kernel, columns - WIDTH)
        native.finish_unit(state)
        unit = native.take(state)
    native.let_go(state)
    return 0


address_of_work = native.publish(native_calls.MATMUL, work)


@cfunc(types.int64(types.int64), error_model="numpy", cache=True)
def handler(frame):
    """What XLA calls."""
    return native.run(frame, address_of_work())
