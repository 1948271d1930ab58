"""The one product that the native loops of the CPU are built from: eight rows by one strip of columns, held in registers.

It is emitted as LLVM vector code, since a compiler that is given plain loops keeps the sums in memory and reaches a third of the rate.
"""

# numba fills in the first parameter of an intrinsic, and names its exports at run time.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

ROWS = 8
# Columns of a strip: 16 vector registers of sums with AVX-512, which has 32 registers; 8 registers elsewhere.
WIDTH = 32 if binding.get_host_cpu_features().get("avx512f") else 8

_FLOAT, _WORD, _INDEX, _BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_FMA = f"llvm.fma.v{WIDTH}f32"


@intrinsic
def multiply_tile(typing_context, c, c_stride, a, a_stride, a_step, b, b_stride, depth, accumulate):
    """c [ROWS, WIDTH] = a [ROWS, depth] . b [depth, WIDTH], plus c itself where ``accumulate`` is not 0.

    All arguments are int64: addresses of float32, strides of the first axis in bytes, and ``a_step``, the stride of a's second axis; the
    others' is contiguous. Each sum runs over ``depth`` in order, so a row's result does not depend on the other rows.
    """
    return types.void(*[types.int64] * 9), _emit


def _emit(context, builder, signature, arguments):
    c, c_stride, a, a_stride, a_step, b, b_stride, depth, accumulate = arguments
    fma = builder.module.globals.get(_FMA) or ir.Function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), _FMA)
    c_rows = [builder.inttoptr(address, _VECTOR.as_pointer()) for address in _rows(builder, c, c_stride)]
    a_rows = [builder.inttoptr(address, _BYTE.as_pointer()) for address in _rows(builder, a, a_stride)]
    before = builder.block
    load, enter, loop, leave = (builder.append_basic_block(name) for name in ("load", "enter", "loop", "leave"))
    builder.cbranch(builder.icmp_signed("!=", accumulate, _WORD(0)), load, enter)

    builder.position_at_end(load)
    held = [builder.load(row, align=4) for row in c_rows]
    builder.branch(enter)

    builder.position_at_end(enter)
    starts = [_phi(builder, _VECTOR, (_VECTOR(None), before), (value, load)) for value in held]
    builder.branch(loop)

    builder.position_at_end(loop)
    k = _phi(builder, _WORD, (_WORD(0), enter))
    a_offset = _phi(builder, _WORD, (_WORD(0), enter))
    b_row = _phi(builder, _WORD, (b, enter))
    sums = [_phi(builder, _VECTOR, (start, enter)) for start in starts]
    values = builder.load(builder.inttoptr(b_row, _VECTOR.as_pointer()), align=4)
    updated = [
        builder.call(fma, [_broadcast(builder, builder.gep(row, [a_offset])), values, total])
        for row, total in zip(a_rows, sums, strict=True)
    ]
    next_k = builder.add(k, _WORD(1))
    advanced = next_k, builder.add(a_offset, a_step), builder.add(b_row, b_stride), *updated
    for phi, value in zip((k, a_offset, b_row, *sums), advanced, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, leave)

    builder.position_at_end(leave)
    for row, value in zip(c_rows, updated, strict=True):
        builder.store(value, row, align=4)
    return context.get_dummy_value()


def _rows(builder, address, stride):
    return [builder.add(address, builder.mul(stride, _WORD(i))) for i in range(ROWS)]


def _phi(builder, kind, *incoming):
    phi = builder.phi(kind)
    for value, block in incoming:
        phi.add_incoming(value, block)
    return phi


def _broadcast(builder, address):
    value = builder.load(builder.bitcast(address, _FLOAT.as_pointer()), align=4)
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, _INDEX(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INDEX, WIDTH), None))
