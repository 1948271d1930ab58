"""The loops of the numba backend: flash attention over pages, compiled once for every shape.

Arrays are float32 and C-contiguous, with the shapes of :func:`pallas_kernels.paged_attention`. Slots past a row's length are never read.
"""

# numba fills in the first parameter of an intrinsic, and names its exports at run time.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math

import numpy as np
from numba import carray, cfunc, njit, types

from pallas_kernels import native, native_calls
from pallas_kernels.native_tile import ROWS, WIDTH, multiply_tile

TILE_QUERIES = 32  # query tokens of one row that share a chunk of keys
CHUNK = 64  # keys in a chunk
STAGE = 16  # tokens copied at a time from a page
MASKED = np.float32(-1e30)
LOG2E = np.float32(1.4426950408889634)
SMALLEST = np.float32(-126)  # exponent of the smallest normal number
ZERO, HALF = np.float32(0), np.float32(0.5)
# 2**x on [-0.5, 0.5], least squares of the relative error, which stays below 1e-7.
C0, C1, C2 = np.float32(1.000000071e00), np.float32(6.931469492e-01), np.float32(2.402212175e-01)
C3, C4, C5 = np.float32(5.550742616e-02), np.float32(9.675459746e-03), np.float32(1.326697039e-03)

# Sums may be reordered: a dot product can't be vectorised otherwise. Not all of fastmath, which would lose NaN and infinity.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
compiled = njit(fastmath=FASTMATH, error_model="numpy")
# The largest of many can't be vectorised unless NaN is ruled out; a NaN score still reaches the result, through its own exponential.
compiled_without_nan = njit(fastmath=True, error_model="numpy")


@compiled_without_nan
def largest(x, count):
    """The largest of x[:count] and MASKED."""
    a = b = c = d = MASKED  # four chains of comparisons, as one waits for its own last result
    for i in range(0, count - 3, 4):
        a, b, c, d = max(a, x[i]), max(b, x[i + 1]), max(c, x[i + 2]), max(d, x[i + 3])
    for i in range(count - count % 4, count):
        a = max(a, x[i])
    return max(max(a, b), max(c, d))


@compiled
def exponentiate(x):
    """x = exp(x) in place, 0 where that is below 1e-38; x is 1-D and at most 0."""
    bits = x.view(np.int32)
    for i in range(x.size):
        power = x[i] * LOG2E
        clipped = max(power, SMALLEST)
        whole = np.floor(clipped + HALF)
        part = clipped - whole
        x[i] = C0 + part * (C1 + part * (C2 + part * (C3 + part * (C4 + part * C5))))
        bits[i] += np.int32(whole) << np.int32(23)
        if power < SMALLEST:
            x[i] = ZERO


@compiled
def exponentials(x, top):
    """x = exp(x - top) in place; returns the sum."""
    for i in range(x.size):
        x[i] -= top
    exponentiate(x)
    total = ZERO
    for i in range(x.size):
        total += x[i]
    return total


@compiled
def modify(scores, distance, slope, soft_cap):
    """Soft cap and ALiBi of one query's scores in place; ``distance`` is the first key's position minus the query's."""
    if soft_cap > ZERO:
        for j in range(scores.size):
            scores[j] = soft_cap * np.float32(math.tanh(scores[j] / soft_cap))
    if slope != ZERO:
        for j in range(scores.size):
            scores[j] += slope * np.float32(distance + j)


@compiled
def finish(o, acc, top, total, sink, v_scale):
    """o = acc / total, with the sink's weight in the total; returns the log of that total."""
    new_top = max(top, sink)
    keep = np.float32(math.exp(top - new_top))
    total = total * keep + np.float32(math.exp(sink - new_top))
    factor = keep * v_scale / total
    for d in range(o.shape[0]):
        o[d] = acc[d] * factor
    return new_top + np.float32(math.log(total))


@compiled
def score_keys(scores, q, keys, count, at):
    """scores[h, at + i] = q[h] . keys[i, its key head] for i < count, four keys at a time; q [H, D], keys [S, KVH, D]."""
    group = q.shape[0] // keys.shape[1]
    for i in range(0, count - 3, 4):
        for h in range(q.shape[0]):
            a = b = c = e = ZERO
            for d in range(q.shape[1]):
                x = q[h, d]
                a += x * keys[i, h // group, d]
                b += x * keys[i + 1, h // group, d]
                c += x * keys[i + 2, h // group, d]
                e += x * keys[i + 3, h // group, d]
            scores[h, at + i], scores[h, at + i + 1], scores[h, at + i + 2], scores[h, at + i + 3] = a, b, c, e
    for i in range(count - count % 4, count):
        for h in range(q.shape[0]):
            a = ZERO
            for d in range(q.shape[1]):
                a += q[h, d] * keys[i, h // group, d]
            scores[h, at + i] = a


@compiled
def add_values(acc, weights, values, count, at):
    """acc[h] += weights[h, at + i] * values[i, its value head] for i < count, four values at a time."""
    group = acc.shape[0] // values.shape[1]
    for i in range(0, count - 3, 4):
        for h in range(acc.shape[0]):
            k = h // group
            a, b, c, e = weights[h, at + i], weights[h, at + i + 1], weights[h, at + i + 2], weights[h, at + i + 3]
            for d in range(acc.shape[1]):
                acc[h, d] += a * values[i, k, d] + b * values[i + 1, k, d] + c * values[i + 2, k, d] + e * values[i + 3, k, d]
    for i in range(count - count % 4, count):
        for h in range(acc.shape[0]):
            for d in range(acc.shape[1]):
                acc[h, d] += weights[h, at + i] * values[i, h // group, d]


@compiled
def stage(buffer, page, first, count):
    """Copy tokens of a page: memory answers a plain copy about twice as fast as loads between arithmetic."""
    width = page.shape[1] * page.shape[2]
    source, target = page.reshape(-1)[first * width : (first + count) * width], buffer.reshape(-1)
    for i in range(source.size):
        target[i] = source[i]


@compiled
def decode_row(o, lse, q, k_pages, v_pages, table, length, options, scratch):
    """One query [H, D] over a row's keys: the pages are streamed from memory, K first, then V."""
    window, sm_scale, soft_cap, v_scale, slopes, sinks = options
    scaled, acc, scores, buffer = scratch
    page_size = k_pages.shape[1]
    first = max(0, length - window)
    count = length - first
    for h in range(q.shape[0]):
        for d in range(q.shape[1]):
            scaled[h, d] = q[h, d] * sm_scale
            acc[h, d] = ZERO
    position = first
    while position < length:
        step = min(STAGE, page_size - position % page_size, length - position)
        stage(buffer, k_pages[table[position // page_size]], position % page_size, step)
        score_keys(scores, scaled, buffer, step, position - first)
        position += step
    for h in range(q.shape[0]):
        modify(scores[h, :count], 1 - count, slopes[h], soft_cap)
        scaled[h, 0] = largest(scores[h], count)
        scaled[h, 1] = exponentials(scores[h, :count], scaled[h, 0])
    position = first
    while position < length:
        step = min(STAGE, page_size - position % page_size, length - position)
        stage(buffer, v_pages[table[position // page_size]], position % page_size, step)
        add_values(acc, scores, buffer, step, position - first)
        position += step
    for h in range(q.shape[0]):
        lse[h] = finish(o[h], acc[h], scaled[h, 0], scaled[h, 1], sinks[h], v_scale)


@compiled
def multiply(c, a, a_stride, a_step, depth, b, accumulate):
    """c [M, N] = a . b [depth, N], plus c where told; M in steps of ROWS, N of WIDTH; a is an address with its two strides in bytes."""
    for n in range(0, c.shape[1], WIDTH):
        for m in range(0, c.shape[0], ROWS):
            target = c.ctypes.data + m * c.strides[0] + n * 4
            multiply_tile(target, c.strides[0], a + m * a_stride, a_stride, a_step, b.ctypes.data + n * 4, b.strides[0], depth, accumulate)


@compiled
def score_chunk(scores, queries, k_pages, table, head, first, count):
    """scores [CHUNK, M] = keys . queries [D, M] for count keys of one head from position ``first``; keys are read where they are."""
    page_size, stride = k_pages.shape[1], k_pages.strides[1]
    for j in range(0, count, ROWS):  # pages hold multiples of ROWS tokens, and chunks start at one
        slot = (first + j) % page_size
        keys = k_pages.ctypes.data + table[(first + j) // page_size] * k_pages.strides[0] + slot * stride + head * k_pages.strides[2]
        multiply(scores[j : j + ROWS], keys, stride, 4, queries.shape[0], queries, 0)


@compiled
def copy_values(values, v_pages, table, head, first, count):
    """values [CHUNK, D] = count values of one head from position ``first``, zeros behind them."""
    page_size = v_pages.shape[1]
    for j in range(CHUNK):
        page, slot = table[min(first + j, first + count - 1) // page_size], (first + j) % page_size
        for d in range(v_pages.shape[3]):
            values[j, d] = v_pages[page, slot, head, d] if j < count else ZERO


@compiled
def weigh(scores, count, total, top, new_top, acc):
    """Scores [count, M] -> weights; each query's running maximum, sum and output are rescaled (arXiv:1805.02867)."""
    for m in range(top.size):
        new_top[m] = top[m]
    for j in range(count):
        for m in range(top.size):
            new_top[m] = max(new_top[m], scores[j, m])
    for m in range(top.size):
        top[m] = top[m] - new_top[m]
    exponentiate(top)
    for m in range(top.size):
        total[m] *= top[m]
    for d in range(acc.shape[0]):
        for m in range(top.size):
            acc[d, m] *= top[m]
    for j in range(count):
        for m in range(top.size):
            scores[j, m] -= new_top[m]
        exponentiate(scores[j])
        for m in range(top.size):
            total[m] += scores[j, m]
    for m in range(top.size):
        top[m] = new_top[m]


@compiled
def mask(scores, count, first, position, group, window):
    """Scores of keys that a query may not see, those after it and those before its window, become MASKED."""
    for j in range(count):
        before = min(max(first + j - position, 0) * group, scores.shape[1])  # columns of queries before the key
        scores[j, :before] = MASKED
        scores[j, max(first + j + window - position, 0) * group :] = MASKED


@compiled
def prefill_tile(o, lse, q, k_pages, v_pages, table, position, options, scratch):
    """Queries [N, H, D] of one row, at ``position`` onward, N <= TILE_QUERIES: each chunk of keys is read once for all of them.

    Everything is transposed, [keys or D, queries], so that keys and values are used as the pages have them. A column is a query
    and one of the heads that share a key head.
    """
    window, sm_scale, soft_cap, v_scale, slopes, sinks = options
    queries, acc, scores, top, new_top, total, values = scratch
    num_kv_heads, head_dim = k_pages.shape[2], k_pages.shape[3]
    group = q.shape[1] // num_kv_heads
    columns = q.shape[0] * group
    end = position + q.shape[0]
    for head in range(num_kv_heads):
        queries[:], acc[:], top[:], total[:] = ZERO, ZERO, MASKED, ZERO
        for m in range(columns):
            for d in range(head_dim):
                queries[d, m] = q[m // group, head * group + m % group, d] * sm_scale
        for first in range(max(0, position - window + 1) // CHUNK * CHUNK, end, CHUNK):
            count = min(CHUNK, end - first)
            score_chunk(scores, queries, k_pages, table, head, first, count)
            for m in range(columns):
                h, distance = head * group + m % group, first - position - m // group
                modify(scores[:count, m], distance, slopes[h], soft_cap)
            mask(scores, count, first, position, group, window)
            copy_values(values, v_pages, table, head, first, count)
            weigh(scores, count, total, top, new_top, acc)
            multiply(acc, values.ctypes.data, 4, values.strides[0], count, scores, 1)
        for m in range(columns):
            h = head * group + m % group
            lse[m // group, h] = finish(o[m // group, h], acc[:head_dim, m], top[m], total[m], sinks[h], v_scale)


@compiled
def round_up(n, multiple):
    """n, or the next multiple after it."""
    return n + -n % multiple


@compiled
def num_tiles(r, starts):
    """Tiles of row r."""
    return (starts[r + 1] - starts[r] + TILE_QUERIES - 1) // TILE_QUERIES


@compiled
def arrays(frame):
    """Results and operands of a call, in the order in which cpu.attend passes them."""
    b = native.buffers(frame, 2, 10)
    tokens, pool, heads = (b[2, 2], b[2, 3], b[2, 4]), (b[3, 2], b[3, 3], b[3, 4], b[3, 5]), b[2, 3]
    return (
        carray(native.pointer(b[0, 0]), tokens, np.float32),
        carray(native.pointer(b[1, 0]), (tokens[0], heads), np.float32),
        carray(native.pointer(b[2, 0]), tokens, np.float32),
        carray(native.pointer(b[3, 0]), pool, np.float32),
        carray(native.pointer(b[4, 0]), pool, np.float32),
        carray(native.pointer(b[5, 0]), (b[5, 2], b[5, 3]), np.int32),
        carray(native.pointer(b[6, 0]), b[6, 2], np.int32),
        carray(native.pointer(b[7, 0]), b[7, 2], np.int32),
        carray(native.pointer(b[8, 0]), b[8, 2], np.int32),
        carray(native.pointer(b[9, 0]), b[9, 2], np.float32),
        carray(native.pointer(b[10, 0]), heads, np.float32),
        carray(native.pointer(b[11, 0]), heads, np.float32),
    )


@compiled
def count_units(o, lse, seq_lens, starts, counts):
    """Tiles and decode rows of the step; tokens that are in neither get 0 and -inf."""
    units = counts[0]
    for r in range(counts[0], counts[1]):
        units += num_tiles(r, starts)
    for t in range(o.shape[0]):
        if (t >= counts[0] or seq_lens[t] == 0) and not starts[counts[0]] <= t < starts[counts[1]]:
            o[t] = ZERO
            lse[t] = -np.inf
    return units


@cfunc(types.int64(types.int64), fastmath=FASTMATH, error_model="numpy", cache=True)
def work(state):
    """Units 0 onward are the tiles of prefill rows, which take longest; the decode rows follow."""
    counting = native.counting(state)
    unit = 0 if counting else native.take(state)
    if unit < 0:
        native.let_go(state)
        return 0
    o, lse, q, k_pages, v_pages, tables, seq_lens, starts, counts, scales, slopes, sinks = arrays(native.frame_of(state))
    if counting:
        return count_units(o, lse, seq_lens, starts, counts)
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], k_pages.shape[2]
    num_decode, num_rows = counts[0], counts[1]
    options = counts[2], scales[0], scales[1], scales[2], slopes, sinks
    tile_columns = round_up(TILE_QUERIES * (num_heads // num_kv_heads), WIDTH)
    longest = 1
    for r in range(num_decode):
        longest = max(longest, seq_lens[r])
    for_tile = (
        np.empty((head_dim, tile_columns), np.float32),
        np.empty((round_up(head_dim, ROWS), tile_columns), np.float32),
        np.empty((CHUNK, tile_columns), np.float32),
        np.empty(tile_columns, np.float32),
        np.empty(tile_columns, np.float32),
        np.empty(tile_columns, np.float32),
        np.zeros((CHUNK, round_up(head_dim, ROWS)), np.float32),
    )
    for_row = (
        np.empty((num_heads, head_dim), np.float32),
        np.empty((num_heads, head_dim), np.float32),
        np.empty((num_heads, longest), np.float32),
        np.empty((STAGE, num_kv_heads, head_dim), np.float32),
    )
    while unit >= 0:
        r, tile = num_decode, unit
        while r < num_rows and tile >= num_tiles(r, starts):
            tile -= num_tiles(r, starts)
            r += 1
        if r < num_rows:
            first = starts[r] + tile * TILE_QUERIES
            stop = min(first + TILE_QUERIES, starts[r + 1])
            position = seq_lens[r] - starts[r + 1] + first
            prefill_tile(o[first:stop], lse[first:stop], q[first:stop], k_pages, v_pages, tables[r], position, options, for_tile)
        elif seq_lens[tile] > 0:
            decode_row(o[tile], lse[tile], q[tile], k_pages, v_pages, tables[tile], seq_lens[tile], options, for_row)
        native.finish_unit(state)
        unit = native.take(state)
    native.let_go(state)
    return 0


address_of_work = native.publish(native_calls.PAGED_ATTENTION, work)


@cfunc(types.int64(types.int64), error_model="numpy", cache=True)
def handler(frame):
    """What XLA calls."""
    return native.run(frame, address_of_work())
