"""Fused kernels over a paged cache: write, decode attention, prefill attention. Triton; :mod:`runners.oracle` is the reference.

    write     quantise, lay out and append: 16-bit keys as they are, e4m3 values transposed to [dim][token], with their scales
    decode    one query token a sequence. A sequence is cut into segments, each with a result of its own, folded in
              their order; where several programs share a sequence, the last one to finish folds
    prefill   a chunk of query tokens that is stored already: its pages are read back into a workspace of 16 bit, then
              attended to causally

All of 16/16, K16/V8, 8/16 and 8/8 run through the same kernels.

A sequence's result depends on that sequence alone, bit for bit: how it is cut follows from its length and the window, tile
shapes from the geometry and the formats; the batch decides only which program does which piece, and when.

Arithmetic. Scores are products in the keys' dtype, summed in float32; where the keys are e4m3, in fp16, with each query row
scaled by a power of two into its range. e4m3 becomes fp16 exactly, so values that are e4m3 meet fp16 probabilities; all
probabilities are biased by 2**14, which cancels, so that what is small stays a normal number of fp16. A value's scale goes
to the probabilities (per token) or to the end (per head). Softmax is online, in base 2.
A sequence of length zero has the result zero; a key, value or
query that is not finite makes NaN of the results that attend to it.

Under Triton's interpreter (``TRITON_INTERPRET=1``, set before triton is imported) everything runs on a CPU. Its faults
are met where INTERPRET stands: ``tl.dot`` multiplies the raw bits of bf16, conversion to bf16 cuts off instead of rounding, that to
e4m3 is wrong inside its range, and that from e4m3 turns the NaN codes into numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ledger.errors import InputError, RefusedError
from runners import fp8
from runners.paged import Pages

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as missing:
    raise RefusedError(
        "backend",
        "The fused kernels need Triton, which is not installed.",
        found=str(missing),
        next="install triton (it comes with torch for CUDA).",
    ) from missing

HEAD_DIMS = (64, 128, 256, 512)
BIAS = tl.constexpr(14.0)
"""Binary logarithm of the largest fp16 probability."""
LOG2E = 1.4426950408889634
SEGMENTS = 16
"""Most segments of a sequence."""
UNEVEN = tl.constexpr(4)
"""How much shorter a share is where lengths differ."""
SHORTEST = 256
"""Tokens of the shortest segment, a power of two and more than a tile; other segments are a power of two times as long."""
FIELDS = tl.constexpr(8)
"""int32 fields of a work item: sequence, first token, end, lowest attended position; segment, segments of the sequence, segments of
a run, tokens of a segment."""


@dataclass(frozen=True)
class Shape:
    """How a kernel is compiled: tokens a tile, warps, pipeline stages."""

    tile: int
    warps: int
    stages: int


# Chosen by measurement on an H200 (docs/kernel-log.md), for a head dimension and formats: never for a batch, since the sums of a
# sequence must not depend on its companions.
DECODE: dict[tuple[int, int, int], Shape] = {
    (64, 1, 1): Shape(64, 1, 4),
    (128, 1, 1): Shape(64, 1, 4),
    (512, 2, 2): Shape(32, 4, 3),
    (512, 2, 1): Shape(32, 4, 3),
    (256, 2, 2): Shape(64, 4, 3),
}
"""Head dimension, bytes of a key and of a value -> shape of the decode kernel. Else 64 tokens, 4 warps, 4 stages."""
PREFILL: dict[int, tuple[int, int, int, int]] = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2), 512: (64, 32, 8, 1)}
"""Head dimension -> query rows, tokens a tile, warps, stages of the prefill kernel."""
WRITE = (32, 4)
"""Tokens a program and warps of the write kernel, for more than one token."""


def shape(dim: int, key_bytes: int, value_bytes: int) -> Shape:
    """The decode kernel's shape."""
    return DECODE.get((dim, key_bytes, value_bytes), Shape(64, 4, 4))


def programs(dim: int) -> int:
    """Programs a multiprocessor among which the decode kernel's work is shared out: as many as fit beside each other."""
    return 2 if dim <= 128 else 1


def interpreting() -> bool:
    """Whether the kernels run under Triton's interpreter, on the CPU."""
    return not isinstance(_decode_kernel, triton.runtime.JITFunction)


def available(device: torch.device | str) -> str:
    """An empty string, or why the kernels cannot run on ``device``."""
    if interpreting():
        return "" if torch.device(device).type == "cpu" else "Triton's interpreter runs on the CPU alone"
    if torch.device(device).type != "cuda":
        return f"Triton needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"the device has compute capability {major}.{minor}, and e4m3 needs 8.9"
    return ""


def describe(pages: Pages) -> str:
    """The decode kernel that runs on these pages, in words: ``fused decode bf16/e4m3 d128 page64 tile64 warps4 stages3``."""
    dim = pages.keys.shape[-1]
    chosen = shape(dim, pages.keys.element_size(), pages.values.element_size())
    names = "/".join(_WORDS[side.dtype] for side in (pages.keys, pages.values))
    return f"fused decode {names} d{dim} page{pages.page} tile{_tile_of(chosen, pages)} warps{chosen.warps} stages{chosen.stages}"


_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", fp8.E4M3: "e4m3"}


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
def _round(x, to: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 -> a 16-bit format, to nearest even."""
    if INTERPRET and to == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(to)
    else:
        return x.to(to)


@triton.jit
def _dot(a, b, INTERPRET: tl.constexpr):
    """Matrix product, summed in float32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


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
def _write_kernel(
    keys, values, key_pages, value_pages, key_scales, value_scales, table, lengths, counts, tokens,
    k_batch, k_token, k_head, v_batch, v_token, v_head, kp_page, kp_head, vp_page, vp_head, table_row,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK positions of one sequence and head. Grid: (heads, blocks, batch)."""
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    count = tokens
    if COUNTS:
        count = tl.load(counts + row)
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
def _plan_kernel(
    lengths, items, total, batch, window, heads, slots,
    BATCH: tl.constexpr, SEGMENTS: tl.constexpr, SHORTEST: tl.constexpr, ALIGN: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The work list: one item a run of segments, in the order of the sequences. One program."""
    row = tl.arange(0, BATCH)
    there = row < batch
    length = tl.load(lengths + row, mask=there, other=0)
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
    run = tl.minimum(tl.maximum((share + size - 1) // size, 1), SEGMENTS).to(tl.int32)
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
def _fold(acc, top, norm, more, more_top, more_norm):
    """Two partial results, the earlier one first; the last axis of ``acc`` is that of the others. The same bits wherever it is done."""
    higher = tl.maximum(top, more_top)
    one, other = tl.exp2(top - higher), tl.exp2(more_top - higher)
    if len(acc.shape) == 2:
        acc = tl.fma(more, tl.broadcast_to(other[None, :], more.shape), acc * one[None, :])
    else:
        acc = tl.fma(more, other, acc * one)
    return acc, higher, tl.fma(more_norm, other, norm * one)


@triton.jit
def _attend(
    acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, page, head, at, low, end, scale, cap,
    kp_page, vp_page,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
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
        # tanh(x) = 1 - 2 / (1 + exp(2x)), in base 2; scale and cap carry log2(e)
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.8853900817779268 / cap))))
    if MASKED:
        scores = tl.where(seen[:, None], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - (higher - BIAS)[None, :])
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
        largest = tl.max(factor, axis=0)  # taken out, so that the product stays in fp16's range
        largest = tl.where(largest == 0.0, 1.0, largest)
        weights = weights * (factor / largest)[:, None]
        acc += _dot(v, _round(weights, v.dtype, INTERPRET), INTERPRET) * largest
    else:
        acc += _dot(v, _round(weights, v.dtype, INTERPRET), INTERPRET)
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
def _load_partial(partial, stats, place, element, there, GROUP: tl.constexpr, DV: tl.constexpr):
    """A partial result, flat: its elements [GROUP · DV], and of each the maximum and norm."""
    parts = tl.load(partial + place * GROUP * DV + element, mask=there, other=0.0, cache_modifier=".cg")
    tops = tl.load(stats + place * 2 * GROUP + element // DV, mask=there, other=0.0, cache_modifier=".cg")
    norms = tl.load(stats + (place * 2 + 1) * GROUP + element // DV, mask=there, other=1.0, cache_modifier=".cg")
    return parts, tops, norms


@triton.jit
def _decode_kernel(
    query, key_pages, value_pages, key_scales, value_scales, table, items, total, partial, stats, arrived, out,
    q_batch, q_head, kp_page, kp_head, vp_page, vp_head, table_row, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SEGMENTS: tl.constexpr, FIELDS: tl.constexpr, K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr,
    VS: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, FLAT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One work item, a run of segments of a sequence, of one KV head. Grid: (the plan's capacity of items times heads,)."""
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
        whole = (start + TILE - 1) // TILE
        after = end // TILE
        page = tl.load(places + tl.minimum(whole * TILE, tl.maximum(end - 1, 0)) // PAGE).to(tl.int64)
        query += row * q_batch + head * GROUP * q_head
        q = tl.load(query + rows[None, :] * q_head + tl.arange(0, DK)[:, None], mask=mine[None, :], other=0.0)
        q_scale = tl.full([ROWS], 1.0, tl.float32)
        if K8:
            # A power of two a row brings it below 2**8; the exponent's bits alone are kept.
            q32 = q.to(tl.float32)
            q_scale = tl.max(tl.abs(q32), axis=0)
            q_scale = ((q_scale.to(tl.int32, bitcast=True) & 0x7F800000) - (7 << 23)).to(tl.float32, bitcast=True)
            q_scale = tl.where(q_scale > 1e-30, q_scale, 1.0)
            q = (q32 / q_scale[None, :]).to(tl.float16)
        if KS == 1:
            q_scale = q_scale * tl.load(key_scales + head)
        acc = tl.zeros([DV, ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        all_acc, all_top, all_norm = acc, top, norm  # of a sequence's first segments, in their order
        place = (row * HEADS + head) * SEGMENTS
        leading = segment == 0
        if WINDOW:  # noqa: SIM102 - a constexpr decides what is compiled
            if (whole * TILE > start) & ((whole <= after) | (end % TILE == 0)):
                at = start // TILE * TILE
                acc, top, norm = _attend(
                    acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, tl.load(places + at // PAGE).to(tl.int64),
                    head, at, low, end, scale, cap,
                    kp_page, vp_page, HEADS, DK, DV, PAGE, TILE, K8, V8, KS, VS, CAP, True, INTERPRET,
                )  # fmt: skip
        for tile in range(whole, after):
            following = tl.load(places + tl.minimum((tile + 1) * TILE, end - 1) // PAGE).to(tl.int64)
            acc, top, norm = _attend(
                acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, page, head, tile * TILE, low, end, scale, cap,
                kp_page, vp_page, HEADS, DK, DV, PAGE, TILE, K8, V8, KS, VS, CAP, False, INTERPRET,
            )  # fmt: skip
            page = following
            if (((tile + 1) * TILE - first) & (size - 1)) == 0:
                if leading:
                    all_acc, all_top, all_norm = _fold(all_acc, all_top, all_norm, acc, top, norm)
                else:
                    _store_partial(partial, stats, place + segment, acc, top, norm, GROUP, ROWS, DV)
                segment += 1
                acc = tl.zeros([DV, ROWS], tl.float32)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                norm = tl.zeros([ROWS], tl.float32)
        if (end % TILE != 0) & (end > first):
            at = end // TILE * TILE
            acc, top, norm = _attend(
                acc, top, norm, q, q_scale, k_base, v_base, key_scales, value_scales, tl.load(places + at // PAGE).to(tl.int64),
                head, at, low, end, scale, cap,
                kp_page, vp_page, HEADS, DK, DV, PAGE, TILE, K8, V8, KS, VS, CAP, True, INTERPRET,
            )  # fmt: skip
        if ((end - first) & (size - 1)) != 0:
            if leading:
                all_acc, all_top, all_norm = _fold(all_acc, all_top, all_norm, acc, top, norm)
            else:
                _store_partial(partial, stats, place + segment, acc, top, norm, GROUP, ROWS, DV)
        v_scale = 1.0
        if VS == 1:
            v_scale = tl.load(value_scales + head)
        done = out + (row * HEADS + head) * GROUP * DV
        if run >= pieces:
            result = all_acc / tl.where(all_norm == 0.0, 1.0, all_norm)[None, :] * v_scale
            tl.store(done + rows[None, :] * DV + dims[:, None], _round(result, out.dtype.element_ty, INTERPRET), mask=mine[None, :])
        else:
            if leading:
                _store_partial(partial, stats, place, all_acc, all_top, all_norm, GROUP, ROWS, DV)
            tl.debug_barrier()  # every thread's stores before the one that announces them
            before = tl.atomic_add(arrived + row * HEADS + head, 1, sem="acq_rel")
            if before == (pieces + run - 1) // run - 1:
                tl.store(arrived + row * HEADS + head, 0)
                element = tl.arange(0, FLAT)
                inside = element < GROUP * DV
                flat, tops, norms = _load_partial(partial, stats, place, element, inside, GROUP, DV)
                for at in range(run, pieces, SEGMENTS):
                    for ahead in tl.static_range(SEGMENTS):  # all loads in flight at once
                        more, more_tops, more_norms = _load_partial(
                            partial, stats, place + at + ahead, element, inside & (at + ahead < pieces), GROUP, DV
                        )
                        more_tops = tl.where(at + ahead < pieces, more_tops, float("-inf"))
                        more_norms = tl.where(at + ahead < pieces, more_norms, 0.0)
                        flat, tops, norms = _fold(flat, tops, norms, more, more_tops, more_norms)
                result = flat / norms * v_scale
                tl.store(done + element, _round(result, out.dtype.element_ty, INTERPRET), mask=inside)


# ---------------------------------------------------------------- prefill


@triton.jit
def _gather_side(
    stored, scales, target, page, head, there, page_stride, head_stride,
    D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr, SCALES: tl.constexpr, TRANSPOSED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One page and head, times its scales (but values' scale of a head, which comes at the end), to ``target`` [PAGE, D].

    Slots that are not ``there`` [PAGE] become zero.
    """
    slot, dims = tl.arange(0, PAGE), tl.arange(0, D)
    base = stored + page * page_stride + head * head_stride
    if TRANSPOSED:  # noqa: SIM108 - a constexpr decides which is compiled
        x = tl.trans(tl.load(base + dims[:, None] * PAGE + slot[None, :]))
    else:
        x = tl.load(base + slot[:, None] * D + dims[None, :])
    if E4M3:
        x = _from_e4m3(x, INTERPRET).to(tl.float32)
        if SCALES == 1 and not TRANSPOSED:
            x = x * tl.load(scales + head)
        if SCALES == 2:
            x = x * tl.load(scales + (page * HEADS + head) * PAGE + slot)[:, None]
        x = _round(x, target.dtype.element_ty, INTERPRET)
    x = tl.where(there[:, None], x, 0.0).to(target.dtype.element_ty)
    tl.store(target + slot[:, None] * D + dims[None, :], x)


@triton.jit
def _gather_kernel(
    key_pages, value_pages, key_scales, value_scales, table, lengths, tokens, window, key_space, value_space,
    kp_page, kp_head, vp_page, vp_head, table_row, places,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    K8: tl.constexpr, V8: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Stored pages, read back into a workspace [B, HEADS, places, D], whole tiles of it. Grid: (heads, pages, batch)."""
    head, at, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    low = tl.where(window > 0, tl.maximum(length - tokens - window + 1, 0), 0)
    slots = at * PAGE + tl.arange(0, PAGE)
    there = (slots >= low // PAGE * PAGE) & (slots < length)
    if (at * PAGE < (length + TILE - 1) // TILE * TILE) & ((at + 1) * PAGE > low // TILE * TILE):
        held = (at * PAGE < length) & ((at + 1) * PAGE > low)
        page = tl.load(table + row * table_row + at, mask=held, other=0).to(tl.int64)  # page 0 is read for nothing where none is held
        base = (row * HEADS + head) * places + at * PAGE
        key_space += base * DK
        value_space += base * DV
        _gather_side(key_pages, key_scales, key_space, page, head, there, kp_page, kp_head, DK, PAGE, HEADS, K8, KS, False, INTERPRET)
        _gather_side(value_pages, value_scales, value_space, page, head, there, vp_page, vp_head, DV, PAGE, HEADS, V8, VS, V8, INTERPRET)


@triton.jit
def _prefill_tile(
    acc, top, norm, q, keys, values, space, at, positions, window, scale, cap,
    CAP: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the workspace from position ``at`` on, into the running softmax of ``q`` [R, DK] at ``positions`` [R]."""
    k = keys.load([space + at, 0])
    scores = _dot(q, tl.trans(k), INTERPRET)
    if CAP:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * 2.8853900817779268 / cap))))
        scale = 1.0
    if MASKED:
        tokens = at + tl.arange(0, TILE)
        seen = (tokens[None, :] <= positions[:, None]) & ((window == 0) | (tokens[None, :] > positions[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
    # The scale is positive: it may come after the maximum, and within the exponential costs nothing.
    higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
    known = higher
    if MASKED:
        known = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    shrink = tl.exp2(top - known)
    weights = tl.exp2(scores * scale - (known - BIAS)[:, None])
    norm = norm * shrink + tl.sum(weights, axis=1)
    v = values.load([space + at, 0])
    acc = acc * shrink[:, None]
    acc += _dot(_round(weights, v.dtype, INTERPRET), v, INTERPRET)
    return acc, higher, norm


@triton.jit
def _prefill_kernel(
    query, keys, values, value_scales, lengths, counts, out, tokens, places, window,
    q_batch, q_token, q_head, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    COUNTS: tl.constexpr, VS: tl.constexpr, CAP: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """ROWS query tokens of one head; ``keys`` and ``values`` are descriptors. Grid: (query heads, blocks, batch), long rows first."""
    head, block, row = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    count = tokens
    if COUNTS:
        count = tl.load(counts + row)
    rows = block * ROWS + tl.arange(0, ROWS)
    positions = length - tokens + rows
    there = (rows < tokens) & (rows >= tokens - count)
    query += row.to(tl.int64) * q_batch + head * q_head
    q = tl.load(query + rows.to(tl.int64)[:, None] * q_token + tl.arange(0, DK)[None, :], mask=there[:, None], other=0.0)
    space = (row * HEADS + head // GROUP) * places
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
            acc, top, norm, q, keys, values, space, tile * TILE, positions, window, scale, cap, CAP, True, INTERPRET, TILE
        )
    for tile in range(inside, diagonal):
        acc, top, norm = _prefill_tile(
            acc, top, norm, q, keys, values, space, tile * TILE, positions, window, scale, cap, CAP, False, INTERPRET, TILE
        )
    for tile in range(diagonal, (end + TILE - 1) // TILE):
        acc, top, norm = _prefill_tile(
            acc, top, norm, q, keys, values, space, tile * TILE, positions, window, scale, cap, CAP, True, INTERPRET, TILE
        )
    if VS == 1:
        acc = acc * tl.load(value_scales + head // GROUP)
    result = tl.where(there[:, None], acc / tl.where(norm == 0.0, 1.0, norm)[:, None], 0.0)
    where = out + ((row.to(tl.int64) * tokens + rows[:, None]) * HEADS * GROUP + head) * DV + tl.arange(0, DV)[None, :]
    tl.store(where, _round(result, out.dtype.element_ty, INTERPRET), mask=(rows < tokens)[:, None])


if interpreting():
    # INTERPRET: a scalar is an array of one element there, which numpy from 2.4 on no longer takes for a loop's bound.
    from triton.runtime import interpreter

    _patched = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        _patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor


# ---------------------------------------------------------------- what is checked before a launch


def _refuse(code: str, what: str, expected: str, found: str) -> None:
    raise RefusedError(code, what, expected=expected, found=found, next="choose what the fused kernels do.")


def _check(pages: Pages, table: torch.Tensor, lengths: torch.Tensor, scale: float = 1.0, **states: torch.Tensor) -> None:
    """Refuse what a kernel would read wrongly. Looks at shapes, dtypes, strides and devices; reads no data."""
    if not 0 < scale < float("inf"):
        raise InputError("The scale of the scores is not a positive finite number.", found=str(scale))
    device = pages.keys.device
    reason = available(device)
    if reason:
        _refuse("device", "The fused kernels cannot run here.", "a CUDA device with e4m3 (8.9 or newer)", reason)
    page, heads, dim = pages.page, pages.heads, pages.keys.shape[-1]
    transposed = pages.values.dtype == fp8.E4M3
    if dim not in HEAD_DIMS:
        _refuse("head_dim", "The fused kernels do not do this head dimension.", ", ".join(map(str, HEAD_DIMS)), str(dim))
    if page < 16 or page & (page - 1):
        raise InputError("A page has a wrong number of tokens.", expected="a power of two, 16 or more", found=str(page))
    expected = (pages.keys.shape[0], heads, dim, page) if transposed else (pages.keys.shape[0], heads, page, dim)
    if tuple(pages.values.shape) != expected:
        raise InputError("The values' pages do not fit the keys'.", expected=str(expected), found=str(tuple(pages.values.shape)))
    for name, stored, scales in (("keys", pages.keys, pages.key_scales), ("values", pages.values, pages.value_scales)):
        if stored.dtype not in _WORDS:
            _refuse("dtype", f"The {name} are stored in a format that the fused kernels do not do.", "bf16, fp16, e4m3", str(stored.dtype))
        if not stored[0, 0].is_contiguous():
            raise InputError(f"The stored {name} of a page and head are not contiguous.", found=f"strides {stored.stride()}")
        if scales is None:
            continue
        known = ((heads,), (pages.keys.shape[0], heads, page))
        if stored.dtype != fp8.E4M3 or scales.dtype != torch.float32 or tuple(scales.shape) not in known or not scales.is_contiguous():
            raise InputError(
                f"The scales of the {name} do not fit.",
                expected=f"float32 {known[0]} or {known[1]}, beside e4m3",
                found=f"{scales.dtype} {tuple(scales.shape)}, beside {stored.dtype}",
            )
    batch = lengths.shape[0] if lengths.dim() == 1 else -1
    if batch < 1:
        raise InputError("There is no sequence.", expected="a batch of 1 or more", found=f"lengths {tuple(lengths.shape)}")
    if table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32 or lengths.dtype != torch.int32 or table.stride(1) != 1:
        raise InputError(
            "The block table and the lengths do not fit.",
            expected=f"int32 [{batch}, width] with contiguous rows, and int32 [{batch}]",
            found=f"{table.dtype} {tuple(table.shape)}, and {lengths.dtype} {tuple(lengths.shape)}",
        )
    for name, tensor in states.items():
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            _refuse("dtype", f"The {name} have a dtype that the fused kernels do not do.", "bf16 or fp16", str(tensor.dtype))
        if tensor.shape[0] != batch or tensor.shape[-1] != dim or tensor.shape[-2] % heads or 0 in tensor.shape:
            expected = f"batch {batch}, head dimension {dim}, heads a multiple of {heads}"
            raise InputError(f"The {name} do not fit the pages.", expected=expected, found=str(tuple(tensor.shape)))
        if tensor.stride(-1) != 1:
            found = f"strides {tensor.stride()}"
            raise InputError(f"The last dimension of the {name} is not contiguous.", expected="stride 1", found=found)
    # Scores are products in the keys' dtype; 16-bit states are stored as they are.
    for name, stored in (("query", pages.keys), ("keys", pages.keys), ("values", pages.values)):
        if name in states and stored.dtype != fp8.E4M3 and states[name].dtype != stored.dtype:
            _refuse("dtype", f"The {name} and what is stored differ in dtype.", str(stored.dtype), str(states[name].dtype))
    for tensor in (pages.values, pages.key_scales, pages.value_scales, table, lengths, *states.values()):
        if tensor is not None and tensor.device != device:
            raise InputError("Not everything is on one device.", expected=str(device), found=str(tensor.device))


def check_places(pages: Pages, table: torch.Tensor, lengths: torch.Tensor) -> None:
    """Read table and lengths, and refuse places that do not exist or stand twice. Waits for the device: not for use in a step.

    A pool has made sure of all this on the host. Raises InputError.
    """
    places, sizes = table.cpu(), lengths.cpu()
    held = []
    for row, length in enumerate(sizes.tolist()):
        if not 0 <= length <= table.shape[1] * pages.page:
            raise InputError(
                f"The length of sequence {row} is beyond its block table.",
                expected=f"0 to {table.shape[1] * pages.page}",
                found=str(length),
            )
        held += places[row, : -(-length // pages.page)].tolist()
    outside = [place for place in held if not 0 <= place < pages.keys.shape[0]]
    if outside:
        raise InputError(
            "The block table names a page that does not exist.", expected=f"0 to {pages.keys.shape[0] - 1}", found=str(outside[0])
        )
    for scales in (pages.key_scales, pages.value_scales):
        if scales is not None and scales.dim() == 1 and not bool((scales > 0).all() & scales.isfinite().all()):
            raise InputError("A scale is not a positive finite number.", found=str(scales.tolist())[:200])


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == fp8.E4M3 else tensor


def _none(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Something to point at where there is nothing; the kernel does not read it."""
    return other if tensor is None else tensor


def _policy(scales: torch.Tensor | None) -> int:
    """0 none, 1 per head, 2 per token and head."""
    return 0 if scales is None else 1 if scales.dim() == 1 else 2


def _formats(pages: Pages) -> dict[str, Any]:
    return {
        "K8": pages.keys.dtype == fp8.E4M3,
        "V8": pages.values.dtype == fp8.E4M3,
        "KS": _policy(pages.key_scales),
        "VS": _policy(pages.value_scales),
        "INTERPRET": interpreting(),
    }


# ---------------------------------------------------------------- the three operations


def write(
    pages: Pages, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor | None = None
) -> None:
    """Store ``keys`` [B, T, H, D] and ``values`` [B, T, H, D] behind the ``lengths`` [B] tokens that are held.

    bf16 or fp16, the last dimension contiguous, other strides free. Without ``counts`` [B] all T tokens are stored, with
    them the last ``counts[b]``. ``table`` [B, width] names the page of every ``page`` positions. All int32 on the device.
    Raises InputError and RefusedError.
    """
    _check(pages, table, lengths, keys=keys, values=values)
    batch, tokens, heads, dim = keys.shape
    if keys.shape != values.shape or heads != pages.heads:
        raise InputError(
            "Keys and values differ in shape, or from the pages.", expected=f"{pages.heads} heads", found=f"{keys.shape}, {values.shape}"
        )
    block, warps = (1, 1) if tokens == 1 else (min(WRITE[0], pages.page), WRITE[1])
    blocks = 1 if tokens == 1 else -(-tokens // block) + 1
    _write_kernel[(heads, blocks, batch)](
        keys, values, _raw(pages.keys), _raw(pages.values),
        _none(pages.key_scales, keys), _none(pages.value_scales, keys), table, lengths, _none(counts, lengths), tokens,
        *(keys.stride(at) for at in (0, 1, 2)), *(values.stride(at) for at in (0, 1, 2)),
        pages.keys.stride(0), pages.keys.stride(1), pages.values.stride(0), pages.values.stride(1), table.stride(0),
        HEADS=heads, DK=dim, DV=dim, PAGE=pages.page, BLOCK=block, COUNTS=counts is not None, **_formats(pages),
        num_warps=warps,
    )  # fmt: skip


class Plan:
    """The work list of a decode step, shared by all layers of a group, and the scratch memory of the merge.

    For ``batch`` sequences of at most ``max_tokens`` tokens and heads of ``dim``. :meth:`update` works on the device alone and can be
    captured. Not for two streams at a time.
    """

    def __init__(self, batch: int, kv_heads: int, max_tokens: int, window: int = 0, *, dim: int = 128, device: torch.device | str) -> None:
        if batch < 1 or max_tokens < 1:
            raise InputError("A plan needs a sequence.", expected="a batch of 1 or more", found=f"batch {batch}, {max_tokens} tokens")
        self.batch, self.kv_heads, self.window = batch, kv_heads, window
        span = min(max_tokens, window + ALIGN) if window else max_tokens
        processors = torch.cuda.get_device_properties(device).multi_processor_count if torch.device(device).type == "cuda" else 4
        self.slots = processors * programs(dim)
        # A run is no shorter than its share, so that beside one a sequence there are no more than there are shares.
        self.capacity = min(batch * min(SEGMENTS, -(-span // SHORTEST)), batch + -(-self.slots * UNEVEN.value // kv_heads))
        self.items = torch.zeros(self.capacity, FIELDS.value, dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
        self.scratch: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, lengths: torch.Tensor) -> None:
        """Make the list for ``lengths`` [B], the current token included."""
        if lengths.shape != (self.batch,):
            raise InputError("The plan is for another batch.", expected=f"[{self.batch}]", found=str(tuple(lengths.shape)))
        _plan_kernel[(1,)](
            lengths, self.items, self.total, self.batch, self.window, self.kv_heads, self.slots,
            BATCH=triton.next_power_of_2(self.batch), SEGMENTS=SEGMENTS, SHORTEST=SHORTEST, ALIGN=ALIGN, FIELDS=FIELDS,
        )  # fmt: skip

    def space(self, group: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch for the partial results of ``group`` query heads a KV head: float32 results, and maxima and norms."""
        size = self.batch * self.kv_heads * SEGMENTS * group
        if size * dim not in self.scratch:
            device = self.items.device
            self.scratch[size * dim] = torch.empty(size * dim, device=device), torch.empty(size * 2, device=device)
        return self.scratch[size * dim]


ALIGN = 64
"""Segments begin at multiples of this; no tile is larger."""


def _tile_of(chosen: Shape, pages: Pages) -> int:
    return min(chosen.tile, pages.page)


def decode(
    query: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Attention of one query token a sequence: ``query`` [B, H_q, D] -> [B, H_q, D] in its dtype.

    ``lengths`` [B] count the current token, which is stored already. ``window`` w attends to the last w positions, 0 to
    all. ``scale`` multiplies the scores, ``soft_cap`` c then makes them c·tanh(scores / c). Query head h reads KV head
    h // (H_q / H). Without a ``plan`` one is made. Raises InputError and RefusedError.
    """
    _check(pages, table, lengths, scale, query=query)
    batch, heads, dim = query.shape
    group = heads // pages.heads
    if plan is None:
        plan = Plan(batch, pages.heads, table.shape[1] * pages.page, window, dim=dim, device=query.device)
        plan.update(lengths)
    elif (plan.batch, plan.kv_heads, plan.window) != (batch, pages.heads, window):
        raise InputError(
            "The plan is for another step.",
            expected=f"batch {batch}, {pages.heads} KV heads, window {window}",
            found=f"batch {plan.batch}, {plan.kv_heads} KV heads, window {plan.window}",
        )
    partial, stats = plan.space(group, dim)
    out = torch.empty(batch, heads, dim, dtype=query.dtype, device=query.device)
    chosen = shape(dim, pages.keys.element_size(), pages.values.element_size())
    _decode_kernel[(plan.capacity * pages.heads,)](
        query, _raw(pages.keys), _raw(pages.values), _none(pages.key_scales, partial), _none(pages.value_scales, partial),
        table, plan.items, plan.total, partial, stats, plan.arrived, out,
        query.stride(0), query.stride(1), pages.keys.stride(0), pages.keys.stride(1), pages.values.stride(0), pages.values.stride(1),
        table.stride(0), scale * LOG2E, soft_cap * LOG2E,
        HEADS=pages.heads, GROUP=group, ROWS=max(8, triton.next_power_of_2(group)), DK=dim, DV=dim, PAGE=pages.page,
        TILE=_tile_of(chosen, pages), SEGMENTS=SEGMENTS, FIELDS=FIELDS, CAP=soft_cap > 0, WINDOW=window > 0,
        FLAT=triton.next_power_of_2(group * dim), **_formats(pages),
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return out


def prefill(
    query: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of a stored chunk: ``query`` [B, T, H_q, D] -> [B, T, H_q, D] in its dtype.

    Row t of sequence b is at position ``lengths[b] - T + t``; rows before the last ``counts[b]`` are padding and come out
    zero. The rest as for :func:`decode`; ``scale`` is positive. What is stored is first read back into a workspace of 16 bit, as
    wide as the table. Raises InputError and RefusedError.
    """
    _check(pages, table, lengths, scale, query=query)
    batch, tokens, heads, dim = query.shape
    rows, tile, warps, stages = PREFILL[dim]
    if interpreting():
        rows, tile = 16, pages.page
    places = -(-table.shape[1] * pages.page // tile) * tile
    formats = _formats(pages)
    # fp16 holds e4m3 exactly, but not every number that a scale makes of it.
    value_dtype = torch.float16 if formats["V8"] and formats["VS"] != 2 else query.dtype
    key_space = torch.empty(batch * pages.heads * places, dim, dtype=query.dtype, device=query.device)
    value_space = torch.empty_like(key_space, dtype=value_dtype)
    _gather_kernel[(pages.heads, -(-places // pages.page), batch)](
        _raw(pages.keys), _raw(pages.values), _none(pages.key_scales, query), _none(pages.value_scales, query), table, lengths,
        tokens, window, key_space, value_space,
        pages.keys.stride(0), pages.keys.stride(1), pages.values.stride(0), pages.values.stride(1), table.stride(0), places,
        HEADS=pages.heads, DK=dim, DV=dim, PAGE=pages.page, TILE=tile, **formats, num_warps=4,
    )  # fmt: skip
    out = torch.empty(batch, tokens, heads, dim, dtype=query.dtype, device=query.device)
    _prefill_kernel[(heads, -(-tokens // rows), batch)](
        query, TensorDescriptor.from_tensor(key_space, [tile, dim]), TensorDescriptor.from_tensor(value_space, [tile, dim]),
        _none(pages.value_scales, query), lengths, _none(counts, lengths), out, tokens, places, window,
        query.stride(0), query.stride(1), query.stride(2), scale * LOG2E, soft_cap * LOG2E,
        HEADS=pages.heads, GROUP=heads // pages.heads, DK=dim, DV=dim, ROWS=rows, TILE=tile,
        COUNTS=counts is not None, VS=formats["VS"], CAP=soft_cap > 0, INTERPRET=interpreting(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
