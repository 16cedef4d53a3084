"""The Triton kernels behind :mod:`runners.fused`, which checks what they are given and launches them.

Arithmetic. Scores are products in the keys' dtype, summed in float32; where the keys are e4m3, in fp16, with each query row
scaled by a power of two into its range. e4m3 becomes fp16 exactly, so values that are e4m3 meet fp16 probabilities; fp16
probabilities are biased by 2**14, which cancels, so that what is small stays a normal number. A value's scale goes
to the probabilities (per token) or to the end (per head). Softmax is online, in base 2.

A sequence of length zero has the result zero. What is not finite: a NaN among keys, values or the query makes NaN of every result that
attends to it, and in a chunk it may do so of rows that lie in the same tile; so does an infinity, but for two: in e4m3 under a scale
that is not dynamic it is stored as ±448 times the scale, and a 16-bit key whose score comes out as -infinity is not attended to as long as
another score in its tile, or in one before it, does not. Where all the scores of a first tile do, that of what is attended to or, in
decode, of a segment, the result may be NaN.

Under Triton's interpreter (``TRITON_INTERPRET=1``, set before triton is imported) everything runs on a CPU. Its faults
are met where INTERPRET stands: ``tl.dot`` multiplies the raw bits of bf16, conversion to bf16 cuts off instead of rounding, that to
e4m3 is wrong inside its range, and that from e4m3 turns the NaN codes into numbers.
"""

from __future__ import annotations

from typing import Any

from ledger.errors import RefusedError

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401 - for fused, after this refusal
except ImportError as missing:
    raise RefusedError(
        "backend",
        "The fused kernels need Triton, which is not installed.",
        found=str(missing),
        next="install triton (it comes with torch for CUDA).",
    ) from missing

BIAS = tl.constexpr(14.0)
"""Binary logarithm of the largest fp16 probability."""
FIELDS = tl.constexpr(8)
"""int32 fields of a work item: sequence, first token, end, lowest attended position; segment, segments of the sequence, segments of
a run, tokens of a segment."""
UNEVEN = tl.constexpr(4)
"""How much shorter a share is where lengths differ."""


# ---------------------------------------------------------------- e4m3


@triton.jit
def _to_e4m3(x, INTERPRET: tl.constexpr):
    """float32 -> e4m3 codes as uint8: clamp to ±448, round to nearest even. NaN stays NaN."""
    clamped = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
    if INTERPRET:
        bits = clamped.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        # Normal, from 2**-6 on: round the mantissa to three bits, then move the exponent's bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below, in units of 2**-9: the sum with 2**14 has just this unit in its last place, so adding rounds.
        small = (tl.abs(clamped) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, normal)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code) | sign
        return code.to(tl.uint8)
    else:
        return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _from_e4m3(codes, INTERPRET: tl.constexpr):
    """e4m3 codes (uint8) -> fp16, exactly."""
    numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if INTERPRET:
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers).to(tl.float16)
    return numbers


@triton.jit
def round_to(x, to: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 -> a 16-bit format, to nearest even."""
    if INTERPRET and to == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(to)
    else:
        return x.to(to)


@triton.jit
def _in_fp16(q, AXIS: tl.constexpr):
    """Queries in fp16, each over a power of two that brings it below 2**8 along AXIS; and those powers."""
    wide = q.to(tl.float32)
    power = ((tl.max(tl.abs(wide), axis=AXIS).to(tl.int32, bitcast=True) & 0x7F800000) - (7 << 23)).to(tl.float32, bitcast=True)
    power = tl.where(power > 1e-30, power, 1.0)
    return (wide / tl.expand_dims(power, AXIS)).to(tl.float16), power


@triton.jit
def _capped(scores, cap):
    """``cap`` · tanh(scores / cap)."""
    part = scores / cap
    # tanh(x) = 1 - 2 / (1 + exp(2x)), in base 2; near zero, where that cancels, the beginning of its series.
    near = scores * (1.0 - part * part * (1.0 / 3.0 - part * part * (2.0 / 15.0)))
    far = cap * (1.0 - 2.0 / (1.0 + tl.exp2(part * 2.8853900817779268)))
    return tl.where(tl.abs(part) < 0.05, near, far)


@triton.jit
def _parted(factor):
    """Scales of a tile's values, over the largest of them, so that their product with a probability stays in fp16's range; and that one."""
    largest = tl.max(factor, axis=0)
    largest = tl.where(largest == 0.0, 1.0, largest)
    return factor / largest, largest


@triton.jit
def _dot(a, b, INTERPRET: tl.constexpr):
    """Matrix product, summed in float32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    """What every kernel does before its first load: wait for the launch before it, whose end it overlaps, and let the next one start.

    A kernel that has waited knows that all launches before its predecessor have ended too, since that one waited as well.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# ---------------------------------------------------------------- write


@triton.jit
def _scaled(x, scales, head, SCALES: tl.constexpr):
    """Rows ``x`` [T, D], float32, over their scale; and that scale [T] where it is dynamic (else anything)."""
    factor = tl.zeros([x.shape[0]], tl.float32)
    if SCALES == 1:
        x = tl.div_rn(x, tl.load(scales + head) + tl.zeros_like(x))
    if SCALES == 2:
        broken = tl.max((x != x).to(tl.int32), axis=1)
        largest = tl.max(tl.abs(tl.where(x == x, x, 0.0)), axis=1)
        factor = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
        factor = tl.where(factor == 0.0, 1.0, factor)
        factor = tl.where(broken > 0, float("nan"), factor)
        x = tl.div_rn(x, factor[:, None] + tl.zeros_like(x))
    return x, factor


@triton.jit
def _write_side(
    x, stored, scales, page, slot, valid, full, head, page_stride, head_stride,
    D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr, SCALES: tl.constexpr, TRANSPOSED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Rows ``x`` [T, D] to slots ``slot`` [T] of one page and head."""
    dims = tl.arange(0, D)
    base = stored + page * page_stride + head * head_stride
    if E4M3:
        x, factor = _scaled(x.to(tl.float32), scales, head, SCALES)
        if SCALES == 2:
            tl.store(scales + (page * HEADS + head) * PAGE + slot, factor, mask=valid)
        x = _to_e4m3(x, INTERPRET)
    if TRANSPOSED:
        where = base + dims[:, None] * PAGE + slot[None, :]
        if full:  # without a mask, since a mask over bytes would store byte by byte
            tl.store(where, tl.trans(x))
        else:
            tl.store(where, tl.trans(x), mask=valid[None, :])
    else:
        tl.store(base + slot[:, None] * D + dims[None, :], x, mask=valid[:, None])


@triton.jit
def write_kernel(
    keys, values, key_pages, value_pages, key_scales, value_scales, table, lengths, counts, tokens,
    k_batch, k_token, k_head, v_batch, v_token, v_head, kp_page, kp_head, vp_page, vp_head, table_row,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, INTERPRET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK positions of one sequence and head. Grid: (heads, blocks, batch)."""
    _begin(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    count = tokens
    if COUNTS:
        count = tl.minimum(tl.maximum(tl.load(counts + row), 0), tokens)
    first = (length // BLOCK + tl.program_id(1)) * BLOCK
    if first < length + count:
        position = first + tl.arange(0, BLOCK)
        token = position - length
        valid = (token >= 0) & (token < count)
        full = (first >= length) & (first + BLOCK <= length + count)
        source = (tokens - count + token).to(tl.int64)
        page = tl.load(table + row * table_row + first // PAGE).to(tl.int64)
        slot = tl.multiple_of(first % PAGE, BLOCK) + tl.arange(0, BLOCK)
        there = valid[:, None]
        keys += row * k_batch + head * k_head
        values += row * v_batch + head * v_head
        k = tl.load(keys + source[:, None] * k_token + tl.arange(0, DK)[None, :], mask=there, other=0.0)
        v = tl.load(values + source[:, None] * v_token + tl.arange(0, DV)[None, :], mask=there, other=0.0)
        _write_side(
            k, key_pages, key_scales, page, slot, valid, full, head, kp_page, kp_head, DK, PAGE, HEADS, K8, KS, False, INTERPRET,
        )  # fmt: skip
        _write_side(
            v, value_pages, value_scales, page, slot, valid, full, head, vp_page, vp_head, DV, PAGE, HEADS, V8, VS, V8, INTERPRET,
        )  # fmt: skip


# ---------------------------------------------------------------- decode


@triton.jit
def plan_kernel(
    lengths, items, total, batch, window, heads, slots, max_tokens,
    BATCH: tl.constexpr, SEGMENTS: tl.constexpr, SHORTEST: tl.constexpr, ALIGN: tl.constexpr, FIELDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The work list: one item a run of segments, in the order of the sequences. One program."""
    _begin(OVERLAP)
    row = tl.arange(0, BATCH)
    there = row < batch
    length = tl.minimum(tl.maximum(tl.load(lengths + row, mask=there, other=0), 0), max_tokens)  # the list holds no more
    low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    base = low // ALIGN * ALIGN
    # How a sequence is cut follows from its own length,
    size = tl.full([BATCH], SHORTEST, tl.int32)
    for _ in range(24):
        size = tl.where(length - base > size * SEGMENTS, size * 2, size)
    pieces = tl.where(there, tl.maximum((length - base + size - 1) // size, 1), 0)
    # and how many of its pieces one program does from all lengths, so that each has about the same to do.
    work = tl.sum((length - base).to(tl.int64), axis=0) * heads
    share = (work + slots - 1) // slots
    # Sequences of unlike lengths make uneven runs: shorter ones level out, as programs that end early make room for others.
    uneven = tl.max(length - base, axis=0).to(tl.int64) * batch * heads > work + work // 8
    share = tl.where(uneven, (share + UNEVEN - 1) // UNEVEN, share)
    run = tl.full([BATCH], 1, tl.int32)  # a power of two, so that it begins and ends with a set of segments or lies in one
    for _ in range(8):
        run = tl.where((run < SEGMENTS) & (run.to(tl.int64) * size < share), run * 2, run)
    runs = (pieces + run - 1) // run
    last = tl.cumsum(runs, axis=0)
    tl.store(total, tl.sum(runs, axis=0))
    for number in range(SEGMENTS):
        item = items + (last - runs + number) * FIELDS
        mine = number < runs
        tl.store(item, row, mask=mine)
        tl.store(item + 1, base + number * run * size, mask=mine)
        tl.store(item + 2, tl.minimum(base + (number + 1) * run * size, length), mask=mine)
        tl.store(item + 3, low, mask=mine)
        tl.store(item + 4, number * run, mask=mine)
        tl.store(item + 5, pieces, mask=mine)
        tl.store(item + 6, run, mask=mine)
        tl.store(item + 7, size, mask=mine)


@triton.jit
def _fold(acc, top, norm, more, more_top, more_norm, AXIS: tl.constexpr):
    """Two partial results, the earlier one first; ``AXIS`` of ``acc`` is that of the dimensions. The same bits wherever it is done."""
    higher = tl.maximum(top, more_top)
    known = tl.where(higher == float("-inf"), 0.0, higher)  # two results of no token
    one, other = tl.exp2(top - known), tl.exp2(more_top - known)
    acc = tl.fma(more, tl.broadcast_to(tl.expand_dims(other, AXIS), more.shape), acc * tl.expand_dims(one, AXIS))
    return acc, higher, tl.fma(more_norm, other, norm * one)


@triton.jit
def _attend(
    acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, page, head, at, low, end, scale, cap,
    kp_page, vp_page,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, CAP: tl.constexpr, FP16: tl.constexpr, MASKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of TILE tokens from position ``at`` on, which lies in one page, into the running softmax of ``q`` [DK, R].

    Everything is transposed, tokens and dimensions before query heads: the matrix unit's tiles have 16 rows and 8 columns, and a KV
    head has few query heads; and e4m3 values are stored as its first operand is read.
    """
    tokens = tl.arange(0, TILE)
    slot = tl.multiple_of(at % PAGE, TILE) + tokens
    seen = (at + tokens >= low) & (at + tokens < end)
    k = tl.load(k_base + page * kp_page + slot[:, None] * DK + tl.arange(0, DK)[None, :])
    if K8:
        k = _from_e4m3(k, INTERPRET)
    scores = _dot(k, q, INTERPRET) * scale
    if K8:
        scores = scores * q_scale[None, :]
    if KS == 2:
        scores = scores * tl.load(key_scales + (page * HEADS + head) * PAGE + slot)[:, None]
    if CAP:
        scores = _capped(scores, cap)
    if MASKED:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - (higher - BIAS * FP16)[None, :])
    norm = norm * shrink + tl.sum(weights, axis=0)
    acc = acc * shrink[None, :]
    dims = tl.arange(0, DV)[:, None]
    if V8:
        v = _from_e4m3(tl.load(v_base + page * vp_page + dims * PAGE + slot[None, :]), INTERPRET)
    else:
        v = tl.load(v_base + page * vp_page + slot[None, :] * DV + dims)
    if MASKED:  # a slot that holds nothing may hold NaN
        v = tl.where(seen[None, :], v, 0.0).to(v.dtype)
    if VS == 2:
        factor = tl.load(value_scales + (page * HEADS + head) * PAGE + slot)
        if MASKED:
            factor = tl.where(seen, factor, 0.0)
        factor, largest = _parted(factor)
        acc += _dot(v, round_to(weights * factor[:, None], v.dtype, INTERPRET), INTERPRET) * largest
    else:
        acc += _dot(v, round_to(weights, v.dtype, INTERPRET), INTERPRET)
    return acc, higher, norm


@triton.jit
def _store_partial(
    partial, stats, place, acc, top, norm, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """A partial result to its place: [GROUP, DV], and the maxima and norms [2, GROUP]."""
    rows = tl.arange(0, ROWS)
    mine = rows < GROUP
    tl.store(partial + (place * GROUP + rows[None, :]) * DV + tl.arange(0, DV)[:, None], acc, mask=mine[None, :])
    tl.store(stats + place * 2 * GROUP + rows, top, mask=mine)
    tl.store(stats + (place * 2 + 1) * GROUP + rows, norm, mask=mine)


@triton.jit
def _load_partial(partial, stats, place, there, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr):
    """A partial result [ROWS, DV] and the maxima and norms [ROWS]; of none where it is not ``there``."""
    rows = tl.arange(0, ROWS)
    there = there & (rows < GROUP)
    where = partial + (place * GROUP + rows[:, None]) * DV + tl.arange(0, DV)[None, :]
    acc = tl.load(where, mask=there[:, None], other=0.0, cache_modifier=".cg")
    top = tl.load(stats + place * 2 * GROUP + rows, mask=there, other=float("-inf"), cache_modifier=".cg")
    norm = tl.load(stats + (place * 2 + 1) * GROUP + rows, mask=there, other=0.0, cache_modifier=".cg")
    return acc, top, norm


@triton.jit
def _end_segment(
    acc, top, norm, part, part_top, part_norm, whole, whole_top, whole_norm, folds, leading, segment, partial, stats, place,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr, SET: tl.constexpr,
):  # fmt: skip
    """A segment's result goes into its set's, and a whole set's into the sequence's, or to their places where another program folds.

    Sums are taken in this order always: the segments of a set, then the sets. ``folds``: the run began with this set, or before it.
    """
    if folds:
        part, part_top, part_norm = _fold(part, part_top, part_norm, acc, top, norm, 0)
    else:
        _store_partial(partial, stats, place + segment, acc, top, norm, GROUP, ROWS, DV)
    segment += 1
    if segment % SET == 0:
        if folds:
            if leading:
                whole, whole_top, whole_norm = _fold(whole, whole_top, whole_norm, part, part_top, part_norm, 0)
            else:
                _store_partial(partial, stats, place + segment - SET, part, part_top, part_norm, GROUP, ROWS, DV)
        folds = True
        part, part_top, part_norm = _none_yet(ROWS, DV)
    return part, part_top, part_norm, whole, whole_top, whole_norm, folds, segment


@triton.jit
def _none_yet(ROWS: tl.constexpr, DV: tl.constexpr):
    """The result of no token."""
    return tl.zeros([DV, ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def decode_kernel(
    query, key_pages, value_pages, key_scales, value_scales, table, items, total, partial, stats, arrived, out,
    q_batch, q_head, kp_page, kp_head, vp_page, vp_head, table_row, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SEGMENTS: tl.constexpr, SET: tl.constexpr, FIELDS: tl.constexpr, K8: tl.constexpr, V8: tl.constexpr,
    KS: tl.constexpr, VS: tl.constexpr, CAP: tl.constexpr, FP16: tl.constexpr, WINDOW: tl.constexpr, MERGED: tl.constexpr,
    INTERPRET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One work item, a run of segments of a sequence, of one KV head. Grid: (the plan's capacity of items times heads,)."""
    _begin(OVERLAP)
    rows = tl.arange(0, ROWS)
    mine = rows < GROUP
    dims = tl.arange(0, DV)
    head = tl.program_id(0) % HEADS
    number = tl.program_id(0) // HEADS
    item = items + number * FIELDS  # read before it is known to be one: the loads need not wait for each other
    row = tl.load(item).to(tl.int64)
    first = tl.load(item + 1)
    end = tl.load(item + 2)
    low = tl.load(item + 3)
    segment = tl.load(item + 4)
    pieces = tl.load(item + 5)
    run = tl.load(item + 6)
    size = tl.load(item + 7)
    if number < tl.load(total):
        places = table + row * table_row
        k_base = key_pages + head * kp_head
        v_base = value_pages + head * vp_head
        # Whole tiles in the loop; those that a border cuts, the first one of a window and the last one of the sequence, by themselves.
        start = tl.maximum(first, low)
        before = (start + TILE - 1) // TILE
        after = end // TILE
        page = tl.load(places + tl.minimum(before * TILE, tl.maximum(end - 1, 0)) // PAGE).to(tl.int64)
        query += row * q_batch + head * GROUP * q_head
        q = tl.load(query + rows[None, :] * q_head + tl.arange(0, DK)[:, None], mask=mine[None, :], other=0.0)
        q_scale = tl.full([ROWS], 1.0, tl.float32)
        if K8:
            q, q_scale = _in_fp16(q, 0)
        if KS == 1:
            q_scale = q_scale * tl.load(key_scales + head)
        acc, top, norm = _none_yet(ROWS, DV)  # of a segment,
        part, part_top, part_norm = _none_yet(ROWS, DV)  # of a set of segments,
        whole, whole_top, whole_norm = _none_yet(ROWS, DV)  # and of a sequence's first sets
        place = (row * HEADS + head) * SEGMENTS
        leading = segment == 0
        folds = segment % SET == 0
        if WINDOW:  # noqa: SIM102 - a constexpr decides what is compiled
            if (before * TILE > start) & ((before <= after) | (end % TILE == 0)):
                at = start // TILE * TILE
                acc, top, norm = _attend(
                    acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, tl.load(places + at // PAGE).to(tl.int64),
                    head, at, low, end, scale, cap,
                    kp_page, vp_page, HEADS, DK, DV, PAGE, TILE, K8, V8, KS, VS, CAP, FP16, True, INTERPRET,
                )  # fmt: skip
        for tile in range(before, after):
            following = tl.load(places + tl.minimum((tile + 1) * TILE, end - 1) // PAGE).to(tl.int64)
            acc, top, norm = _attend(
                acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, page, head, tile * TILE, low, end, scale, cap,
                kp_page, vp_page, HEADS, DK, DV, PAGE, TILE, K8, V8, KS, VS, CAP, FP16, False, INTERPRET,
            )  # fmt: skip
            page = following
            if (((tile + 1) * TILE - first) & (size - 1)) == 0:
                part, part_top, part_norm, whole, whole_top, whole_norm, folds, segment = _end_segment(
                    acc, top, norm, part, part_top, part_norm, whole, whole_top, whole_norm, folds, leading, segment, partial, stats, place,
                    GROUP, ROWS, DV, SET,
                )  # fmt: skip
                acc, top, norm = _none_yet(ROWS, DV)
        if (end % TILE != 0) & (end > first):
            at = end // TILE * TILE
            acc, top, norm = _attend(
                acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, tl.load(places + at // PAGE).to(tl.int64),
                head, at, low, end, scale, cap,
                kp_page, vp_page, HEADS, DK, DV, PAGE, TILE, K8, V8, KS, VS, CAP, FP16, True, INTERPRET,
            )  # fmt: skip
        if ((end - first) & (size - 1)) != 0:
            part, part_top, part_norm, whole, whole_top, whole_norm, folds, segment = _end_segment(
                acc, top, norm, part, part_top, part_norm, whole, whole_top, whole_norm, folds, leading, segment, partial, stats, place,
                GROUP, ROWS, DV, SET,
            )  # fmt: skip
        v_scale = 1.0
        if VS == 1:
            v_scale = tl.load(value_scales + head)
        done = out + (row * HEADS + head) * GROUP * DV
        alone = run >= pieces
        if segment % SET != 0:  # a set that this run or the sequence cuts short
            if alone:
                whole, whole_top, whole_norm = _fold(whole, whole_top, whole_norm, part, part_top, part_norm, 0)
            elif folds:
                _store_partial(partial, stats, place + segment // SET * SET, part, part_top, part_norm, GROUP, ROWS, DV)
        if alone:
            result = whole / tl.where(whole_norm == 0.0, 1.0, whole_norm)[None, :] * v_scale + 0.0  # no zero is negative
            tl.store(done + rows[None, :] * DV + dims[:, None], round_to(result, out.dtype.element_ty, INTERPRET), mask=mine[None, :])
        else:
            if leading & (run >= SET):
                _store_partial(partial, stats, place, whole, whole_top, whole_norm, GROUP, ROWS, DV)
            tl.debug_barrier()  # every thread's stores before the one that announces them
            earlier = tl.atomic_add(arrived + row * HEADS + head, 1, sem="acq_rel")
            if earlier == (pieces + run - 1) // run - 1:
                tl.store(arrived + row * HEADS + head, 0)
                merged, tops, norms = _load_partial(partial, stats, place, True, GROUP, MERGED, DV)
                if run >= SET:  # all loads in flight at once, here and there
                    for at in tl.static_range(SET, SEGMENTS, SET):
                        more, more_tops, more_norms = _load_partial(
                            partial, stats, place + at, (at >= run) & (at < pieces), GROUP, MERGED, DV
                        )
                        merged, tops, norms = _fold(merged, tops, norms, more, more_tops, more_norms, 1)
                else:
                    for at in tl.static_range(0, SEGMENTS, SET):
                        set, set_tops, set_norms = _load_partial(partial, stats, place + at, at < pieces, GROUP, MERGED, DV)
                        for ahead in tl.static_range(1, SET):
                            more, more_tops, more_norms = _load_partial(
                                partial, stats, place + at + ahead, (ahead >= run) & (at + ahead < pieces), GROUP, MERGED, DV
                            )
                            set, set_tops, set_norms = _fold(set, set_tops, set_norms, more, more_tops, more_norms, 1)
                        if at == 0:
                            merged, tops, norms = set, set_tops, set_norms
                        else:
                            merged, tops, norms = _fold(merged, tops, norms, set, set_tops, set_norms, 1)
                result = merged / tl.where(norms == 0.0, 1.0, norms)[:, None] * v_scale + 0.0
                heads = tl.arange(0, MERGED)
                where = done + heads[:, None] * DV + tl.arange(0, DV)[None, :]
                tl.store(where, round_to(result, out.dtype.element_ty, INTERPRET), mask=(heads < GROUP)[:, None])


# ---------------------------------------------------------------- prefill


@triton.jit
def _gather_side(
    stored, scales, target, target_scales, page, head, there, page_stride, head_stride, places,
    D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr, SCALES: tl.constexpr, TRANSPOSED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One page and head to ``target`` [PAGE, D], or [D, PAGE] in rows of ``places``, and its scales to ``target_scales`` [PAGE].

    Slots that are not ``there`` become zero.
    """
    slot, dims = tl.arange(0, PAGE), tl.arange(0, D)
    base = stored + page * page_stride + head * head_stride
    if TRANSPOSED:
        x = tl.load(base + dims[:, None] * PAGE + slot[None, :])
        held = there[None, :]
        where = dims[:, None] * places + slot[None, :]
    else:
        x = tl.load(base + slot[:, None] * D + dims[None, :])
        held = there[:, None]
        where = slot[:, None] * D + dims[None, :]
    if E4M3:
        x = _from_e4m3(x, INTERPRET)
    if SCALES == 2:
        factor = tl.load(scales + (page * HEADS + head) * PAGE + slot)
        tl.store(target_scales + slot, tl.where(there, factor, 0.0))
    tl.store(target + where, tl.where(held, x, 0.0).to(target.dtype.element_ty))


@triton.jit
def gather_kernel(
    key_pages, value_pages, key_scales, value_scales, table, lengths, counts, tokens, window,
    key_space, value_space, key_factors, value_factors, kp_page, kp_head, vp_page, vp_head, table_row, places,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, COUNTS: tl.constexpr,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, INTERPRET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Stored pages, read back into a workspace [B, HEADS, places, D], whole tiles of it, or as they are stored where
    that is transposed, [B, HEADS, D, places]. Grid: (heads, pages, batch)."""
    _begin(OVERLAP)
    head, at, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    count = tokens
    if COUNTS:
        count = tl.minimum(tl.maximum(tl.load(counts + row), 0), tokens)
    low = tl.where(window > 0, tl.maximum(length - count - window + 1, 0), 0)
    slots = at * PAGE + tl.arange(0, PAGE)
    there = (slots >= low // PAGE * PAGE) & (slots < length)
    if (at * PAGE < (length + TILE - 1) // TILE * TILE) & ((at + 1) * PAGE > low // TILE * TILE):
        held = (at * PAGE < length) & ((at + 1) * PAGE > low)
        page = tl.load(table + row * table_row + at, mask=held, other=0).to(tl.int64)  # page 0 is read for nothing where none is held
        base = (row * HEADS + head) * places + at * PAGE
        key_space += base * DK
        if V8:
            value_space += (row * HEADS + head) * places * DV + at * PAGE
        else:
            value_space += base * DV
        _gather_side(
            key_pages, key_scales, key_space, key_factors + base, page, head, there, kp_page, kp_head, places, DK, PAGE, HEADS, K8, KS,
            False, INTERPRET,
        )  # fmt: skip
        _gather_side(
            value_pages, value_scales, value_space, value_factors + base, page, head, there, vp_page, vp_head, places, DV, PAGE, HEADS, V8,
            VS, V8, INTERPRET,
        )  # fmt: skip


@triton.jit
def _prefill_tile(
    acc, top, norm, q, q_scale, keys, values, key_factors, value_factors, k_row, v_row, at, positions, window, scale, cap,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, CAP: tl.constexpr, FP16: tl.constexpr, MASKED: tl.constexpr,
    INTERPRET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the workspace from position ``at`` on, into the running softmax of ``q`` [R, DK] at ``positions`` [R]."""
    tokens = at + tl.arange(0, TILE)
    k = keys.load([k_row + at, 0])
    scores = _dot(q, tl.trans(k), INTERPRET)
    if K8:
        scores = scores * q_scale[:, None]
    if KS == 2:
        scores = scores * tl.load(key_factors + k_row.to(tl.int64) + tokens)[None, :]
    if CAP:
        scores = _capped(scores * scale, cap)
        scale = 1.0
    if MASKED:
        seen = (tokens[None, :] <= positions[:, None]) & ((window == 0) | (tokens[None, :] > positions[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
    # The scale is positive: it may come after the maximum, and within the exponential costs nothing.
    higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
    known = higher
    if MASKED:
        known = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    shrink = tl.exp2(top - known)
    weights = tl.exp2(scores * scale - (known - BIAS * FP16)[:, None])
    norm = norm * shrink + tl.sum(weights, axis=1)
    if V8:  # noqa: SIM108 - a constexpr decides which is compiled
        v = tl.trans(values.load([v_row, at]))
    else:
        v = values.load([k_row + at, 0])
    acc = acc * shrink[:, None]
    if VS == 2:
        factor, largest = _parted(tl.load(value_factors + k_row.to(tl.int64) + tokens))
        acc += _dot(round_to(weights * factor[None, :], v.dtype, INTERPRET), v, INTERPRET) * largest
    else:
        acc += _dot(round_to(weights, v.dtype, INTERPRET), v, INTERPRET)
    return acc, higher, norm


@triton.jit
def prefill_kernel(
    query, keys, values, key_factors, value_factors, key_scales, value_scales, lengths, counts, out, tokens, places, window,
    q_batch, q_token, q_head, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    COUNTS: tl.constexpr, K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, CAP: tl.constexpr, FP16: tl.constexpr,
    INTERPRET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS query tokens of one head; ``keys`` and ``values`` are descriptors. Grid: (query heads, blocks, batch), long rows first."""
    _begin(OVERLAP)
    head, block, row = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    count = tokens
    if COUNTS:
        count = tl.minimum(tl.maximum(tl.load(counts + row), 0), tokens)
    rows = block * ROWS + tl.arange(0, ROWS)
    positions = length - tokens + rows
    there = (rows < tokens) & (rows >= tokens - count)
    query += row.to(tl.int64) * q_batch + head * q_head
    q = tl.load(query + rows.to(tl.int64)[:, None] * q_token + tl.arange(0, DK)[None, :], mask=there[:, None], other=0.0)
    q_scale = tl.full([ROWS], 1.0, tl.float32)
    if K8:
        q, q_scale = _in_fp16(q, 1)
    if KS == 1:
        q_scale = q_scale * tl.load(key_scales + head // GROUP)
    k_row = (row * HEADS + head // GROUP) * places
    v_row = (row * HEADS + head // GROUP) * DV
    acc = tl.zeros([ROWS, DV], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    start = length - tokens + tl.maximum(block * ROWS, tokens - count)  # position of the first row that counts
    end = tl.minimum(length - tokens + (block + 1) * ROWS, length)
    low = tl.where(window > 0, tl.maximum(start - window + 1, 0), 0) // TILE
    inside = tl.where(window > 0, tl.maximum(end - window, 0) + TILE - 1, 0) // TILE  # from here on every row's window is open
    diagonal = tl.maximum((start + 1) // TILE, low)
    inside = tl.minimum(tl.maximum(inside, low), diagonal)
    # In the order of the positions, so that a row's bits do not depend on the block of rows that it falls into.
    for tile in range(low, inside):
        acc, top, norm = _prefill_tile(
            acc, top, norm, q, q_scale, keys, values, key_factors, value_factors, k_row, v_row, tile * TILE, positions, window, scale, cap,
            K8, V8, KS, VS, CAP, FP16, True, INTERPRET, TILE,
        )  # fmt: skip
    for tile in range(inside, diagonal):
        acc, top, norm = _prefill_tile(
            acc, top, norm, q, q_scale, keys, values, key_factors, value_factors, k_row, v_row, tile * TILE, positions, window, scale, cap,
            K8, V8, KS, VS, CAP, FP16, False, INTERPRET, TILE,
        )  # fmt: skip
    for tile in range(diagonal, (end + TILE - 1) // TILE):
        acc, top, norm = _prefill_tile(
            acc, top, norm, q, q_scale, keys, values, key_factors, value_factors, k_row, v_row, tile * TILE, positions, window, scale, cap,
            K8, V8, KS, VS, CAP, FP16, True, INTERPRET, TILE,
        )  # fmt: skip
    if VS == 1:
        acc = acc * tl.load(value_scales + head // GROUP)
    result = tl.where(there[:, None], acc / tl.where(norm == 0.0, 1.0, norm)[:, None], 0.0)
    where = out + ((row.to(tl.int64) * tokens + rows[:, None]) * HEADS * GROUP + head) * DV + tl.arange(0, DV)[None, :]
    tl.store(where, round_to(result, out.dtype.element_ty, INTERPRET), mask=(rows < tokens)[:, None])


def interpreting() -> bool:
    """Whether the kernels run under Triton's interpreter, on the CPU."""
    return not isinstance(decode_kernel, triton.runtime.JITFunction)


if interpreting():
    # INTERPRET: a scalar is an array of one element there, which numpy from 2.4 on no longer takes for a loop's bound.
    from triton.runtime import interpreter

    _patched = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        _patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
