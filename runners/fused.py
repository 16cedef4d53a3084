"""Fused kernels over a paged cache: write, decode attention, prefill attention. Triton; :mod:`runners.oracle` is the reference.

    write     quantise, lay out and append: 16-bit keys as they are, e4m3 values transposed to [dim][token], with their scales
    decode    one query token a sequence. A sequence is cut into segments, each with a result of its own, folded in
              sets and these in their order; where several programs share a sequence, the last one to finish folds
    prefill   a chunk of query tokens that is stored already: its pages are read back into a workspace of 16 bit, then
              attended to causally

From Hopper on every launch begins while the one before it ends (programmatic dependent launch), and waits for it before it reads.

All of 16/16, K16/V8, 8/16 and 8/8 run through the same kernels.

A sequence's result depends on that sequence alone, bit for bit: how it is cut follows from its length and the window, tile
shapes from the geometry and the formats; the batch decides only which program does which piece, and when.

Every call is checked by shapes, strides, dtypes and devices, which reads no data. What tables, lengths and counts say is not checked on
a GPU, as that would wait for it: those of a :class:`runners.paged.Pool` are right by construction, those made by hand are
:func:`runners.pages.check_table`'s to check, and wrong ones are read and written outside of the pages. There is no backward pass: one
through a result raises RefusedError, and one to what was written does not reach it.

Under Triton's interpreter (``TRITON_INTERPRET=1``, set before triton is imported) everything runs on a CPU, and every call
looks at the data too: no position lies beyond its table, and no entry that is used is anything but a page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from ledger.errors import InputError, RefusedError
from runners import fp8
from runners.geometry import HEAD_DIMS
from runners.kernels import (
    FIELDS,
    UNEVEN,
    TensorDescriptor,
    decode_kernel,
    gather_kernel,
    interpreting,
    plan_kernel,
    prefill_kernel,
    triton,
    write_kernel,
)
from runners.pages import Pages, check_page, check_reach, check_window, few, without_gradient

LOG2E = 1.4426950408889634
SEGMENTS = 16
"""Most segments of a sequence."""
SET = 4
"""Segments that are summed first, a power of two; then the sums are."""
SHORTEST = 128
"""Tokens of the shortest segment, a power of two and more than a tile; other segments are a power of two times as long."""


@dataclass(frozen=True)
class Shape:
    """How a kernel is compiled: tokens a tile, warps, pipeline stages; and stages where many more programs wait than fit.

    Stages decide how far loads run ahead and change no sum, so that they may follow from the batch. With fewer of them more programs fit
    beside each other, which pays where ``rounds`` of them or more would follow one another: a last round is seldom full.
    """

    tile: int
    warps: int
    stages: int
    crowded: int = 0
    rounds: float = 3


# Chosen by measurement on an H200 (docs/kernel-log.md), for a head dimension and formats: never for a batch, since the sums of a
# sequence must not depend on its companions.
DECODE: dict[tuple[int, int, int], Shape] = {
    (64, 1, 1): Shape(64, 1, 4),
    (128, 1, 1): Shape(64, 2, 6, crowded=4, rounds=1.5),
    (128, 2, 1): Shape(64, 4, 4, crowded=3),
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


def programs(dim: int, device: torch.device | str) -> int:
    """Programs among which the decode kernel's work is shared out: as many as run beside each other."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if torch.device(device).type == "cuda" else 4
    return processors * (2 if dim <= 128 else 1)


def available(device: torch.device | str) -> str:
    """An empty string, or why the kernels cannot run on ``device``."""
    if interpreting():
        return "" if torch.device(device).type == "cpu" else "Triton's interpreter runs on the CPU alone"
    if torch.device(device).type != "cuda":
        return f"Triton needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if reason := _elsewhere(torch.device(device)):
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"the device has compute capability {major}.{minor}, and e4m3 needs 8.9"
    return ""


def _elsewhere(device: torch.device) -> str:
    """An empty string, or that Triton would launch on another device than ``device``."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return ""
    return f"Triton launches on the current device, cuda:{torch.cuda.current_device()}, not on {device}"


def _compiled(pages: Pages, batch: int, slots: int) -> dict[str, int]:
    """How the decode kernel is compiled for these pages, of a ``batch`` that ``slots`` programs at a time work on."""
    chosen = shape(pages.keys.shape[-1], pages.keys.element_size(), pages.values.element_size())
    crowded = chosen.crowded and batch * pages.heads >= chosen.rounds * slots
    return {"TILE": min(chosen.tile, pages.page), "num_warps": chosen.warps, "num_stages": chosen.crowded if crowded else chosen.stages}


def crowd(pages: Pages) -> int:
    """The smallest batch for which the decode kernel is compiled with other stages than for one sequence; 0 where none is."""
    dim = pages.keys.shape[-1]
    chosen = shape(dim, pages.keys.element_size(), pages.values.element_size())
    return math.ceil(chosen.rounds * programs(dim, pages.keys.device) / pages.heads) if chosen.crowded else 0


def describe(pages: Pages, batch: int = 1) -> str:
    """The decode kernel that runs on these pages, in words: ``fused decode bf16/e4m3 d128 page64 tile64 warps4 stages3``."""
    dim = pages.keys.shape[-1]
    how = _compiled(pages, batch, programs(dim, pages.keys.device))
    names = "/".join(_WORDS[side.dtype] for side in (pages.keys, pages.values))
    return f"fused decode {names} d{dim} page{pages.page} tile{how['TILE']} warps{how['num_warps']} stages{how['num_stages']}"


_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", fp8.E4M3: "e4m3"}


# ---------------------------------------------------------------- what is checked before a launch


def _refuse(code: str, what: str, expected: str, found: str) -> None:
    raise RefusedError(code, what, expected=expected, found=found, next="choose what the fused kernels do.")


def _check_scores(scale: float, window: int, soft_cap: float) -> None:
    if not _usable(scale):
        raise InputError("The scale of the scores is wrong.", expected=_NUMBER, found=repr(scale)[:100], next=_AGAIN)
    check_window(window)
    if not (_usable(soft_cap) or (_is_number(soft_cap) and soft_cap == 0)):
        raise InputError("The soft cap is wrong.", expected=f"{_NUMBER}, or 0 for none", found=repr(soft_cap)[:100], next=_AGAIN)


def _usable(number: object) -> bool:
    """Whether it is positive, and a normal number of float32 in base 2 as in base e."""
    return _is_number(number) and 2.0**-126 <= number < 2.0**127  # type: ignore[operator]


def _is_number(number: object) -> bool:
    return isinstance(number, float) or type(number) is int


_NUMBER = "a positive number in the range of float32"
_INT32 = 1 << 31
_LAUNCH = (1 << 16) - 1
_AGAIN = "correct it, and call again."


def _check(
    pages: Pages, table: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor | None = None, *, dims: int = 4, **states: torch.Tensor
) -> None:
    """Refuse what a kernel would read wrongly. Looks at shapes, dtypes, strides and devices; reads no data.

    ``states`` have ``dims`` dimensions. What the table and the lengths say is the pool's to check, or :func:`runners.pages.check_table`'s;
    and :func:`_check_data`'s under the interpreter.
    """
    device = pages.keys.device
    reason = available(device)
    if reason:
        _refuse("device", "The fused kernels cannot run here.", "a CUDA device with e4m3 (8.9 or newer)", reason)
    if pages.keys.dim() != 4 or 0 in pages.keys.shape:
        found = str(tuple(pages.keys.shape))
        raise InputError("There are no pages.", expected="keys [pages, heads, page, dimension]", found=found, next=_AGAIN)
    page, heads, dim = pages.page, pages.heads, pages.keys.shape[-1]
    transposed = pages.values.dtype == fp8.E4M3
    if dim not in HEAD_DIMS:
        _refuse("head_dim", "The fused kernels do not do this head dimension.", ", ".join(map(str, HEAD_DIMS)), str(dim))
    check_page(page, dim)
    expected = (pages.keys.shape[0], heads, dim, page) if transposed else (pages.keys.shape[0], heads, page, dim)
    if tuple(pages.values.shape) != expected:
        raise InputError(
            "The values' pages do not fit the keys'.", expected=str(expected), found=str(tuple(pages.values.shape)), next=_AGAIN
        )
    for name, stored, scales in (("keys", pages.keys, pages.key_scales), ("values", pages.values, pages.value_scales)):
        if stored.dtype not in _WORDS:
            _refuse("dtype", f"The {name} are stored in a format that the fused kernels do not do.", "bf16, fp16, e4m3", str(stored.dtype))
        if not stored[0, 0].is_contiguous():
            raise InputError(
                f"The stored {name} of a page and head are not contiguous.",
                expected="no gaps",
                found=f"strides {stored.stride()}",
                next=_AGAIN,
            )
        if any(stored.shape[at] > 1 and stored.stride(at) < page * dim for at in (0, 1)):
            raise InputError(
                f"Pages of the stored {name} overlap.",
                expected=f"{page * dim} numbers or more from one to the next",
                found=f"strides {stored.stride()}",
                next=_AGAIN,
            )
        if (heads - 1) * stored.stride(1) >= _INT32:
            _far(f"stored {name}", heads, stored.stride(1))
        if scales is None:
            continue
        known = ((heads,), (pages.keys.shape[0], heads, page))
        if stored.dtype != fp8.E4M3 or scales.dtype != torch.float32 or tuple(scales.shape) not in known or not scales.is_contiguous():
            raise InputError(
                f"The scales of the {name} do not fit.",
                expected=f"float32 {known[0]} or {known[1]}, beside e4m3",
                found=f"{scales.dtype} {tuple(scales.shape)}, beside {stored.dtype}",
                next=_AGAIN,
            )
    batch = lengths.shape[0] if lengths.dim() == 1 else -1
    if batch < 1:
        raise InputError("There is no sequence.", expected="a batch of 1 or more", found=f"lengths {tuple(lengths.shape)}", next=_AGAIN)
    if table.dim() != 2 or table.shape[0] != batch or not table.shape[1] or table.dtype != torch.int32 or table.stride(1) != 1:
        found = f"{table.dtype} {tuple(table.shape)}, strides {table.stride()}"
        expected = f"int32 [{batch}, width], width at least 1, contiguous rows"
        raise InputError("The block table does not fit.", expected=expected, found=found, next=_AGAIN)
    for name, numbers in (("lengths", lengths), ("counts", counts)):
        if numbers is not None and (numbers.dtype != torch.int32 or numbers.shape != (batch,) or not numbers.is_contiguous()):
            found = f"{numbers.dtype} {tuple(numbers.shape)}, strides {numbers.stride()}"
            raise InputError(f"The {name} do not fit.", expected=f"int32 [{batch}], contiguous", found=found, next=_AGAIN)
    for name, tensor in states.items():
        if tensor.dim() != dims:
            found = str(tuple(tensor.shape))
            raise InputError(f"The {name} do not fit.", expected=f"{dims} dimensions", found=found, next=_AGAIN)
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            _refuse("dtype", f"The {name} have a dtype that the fused kernels do not do.", "bf16 or fp16", str(tensor.dtype))
        if tensor.shape[0] != batch or tensor.shape[-1] != dim or tensor.shape[-2] % heads or 0 in tensor.shape:
            expected = f"batch {batch}, head dimension {dim}, heads a multiple of {heads}"
            raise InputError(f"The {name} do not fit the pages.", expected=expected, found=str(tuple(tensor.shape)), next=_AGAIN)
        if tensor.stride(-1) != 1:
            found = f"strides {tensor.stride()}"
            raise InputError(f"The last dimension of the {name} is not contiguous.", expected="stride 1", found=found, next=_AGAIN)
        if (tensor.shape[-2] - 1) * tensor.stride(-2) >= _INT32:
            _far(name, tensor.shape[-2], tensor.stride(-2))
    # Scores are products in the keys' dtype; 16-bit states are stored as they are.
    for name, stored in (("query", pages.keys), ("keys", pages.keys), ("values", pages.values)):
        if name in states and stored.dtype != fp8.E4M3 and states[name].dtype != stored.dtype:
            _refuse("dtype", f"The {name} and what is stored differ in dtype.", str(stored.dtype), str(states[name].dtype))
    for tensor in (pages.values, pages.key_scales, pages.value_scales, table, lengths, counts, *states.values()):
        if tensor is not None and tensor.device != device:
            raise InputError("Not everything is on one device.", expected=str(device), found=str(tensor.device), next=_AGAIN)


def _far(name: str, heads: int, stride: int) -> NoReturn:
    """Of heads whose offset a kernel's int32 does not hold; those of pages, sequences and tokens are int64."""
    found = f"{heads} heads with a stride of {stride}"
    raise InputError(f"The heads of the {name} lie too far apart.", expected="offsets below 2**31", found=found, next=_AGAIN)


def _check_room(pages: Pages, table: torch.Tensor, tokens: int, counts: torch.Tensor | None) -> None:
    """Refuse a chunk that is longer than any sequence of the table may be."""
    room = table.shape[1] * pages.page
    if counts is None and tokens > room:
        raise InputError("The chunk is longer than the block table.", expected=f"at most {room} tokens", found=str(tokens), next=_AGAIN)


def _check_launch(batch: int, blocks: int) -> None:
    """Refuse what one launch of a kernel whose grid is (heads, blocks, batch) does not hold."""
    if max(batch, blocks) > _LAUNCH:
        found, again = f"{batch} sequences, {blocks} blocks of tokens each", "make several calls of fewer sequences or tokens."
        raise InputError("The call is larger than one launch.", expected=f"at most {_LAUNCH} of either", found=found, next=again)


def _check_data(
    pages: Pages, table: torch.Tensor, lengths: torch.Tensor, tokens: int, counts: torch.Tensor | None, *, held: bool, window: int = 0
) -> None:
    """Under the interpreter: refuse lengths, counts, fixed scales and entries of the table that a kernel would go wrong by. Reads the data.

    The last ``counts`` of ``tokens`` are ``held`` already, and count in ``lengths``, or are to be written behind them. With no ``tokens``
    each sequence asks for its last one, if it has any.
    """
    if not interpreting():
        return
    for name, scales in (("keys", pages.key_scales), ("values", pages.value_scales)):
        if scales is not None and scales.dim() == 1 and not bool((scales.isfinite() & (scales > 0)).all()):
            raise InputError(
                f"The scales of the {name} hold a number that is no scale.",
                expected="positive finite numbers",
                found=str(scales.tolist())[:200],
                next=_AGAIN,
            )
    have = lengths.numpy().astype(np.int64)
    more = np.full_like(have, tokens) if tokens else np.minimum(have, 1)
    if counts is not None:
        more = counts.numpy().astype(np.int64)
    if have.min() < 0 or more.min() < 0 or more.max() > max(tokens, 1) or (held and bool((more > have).any())):
        raise InputError(
            "Lengths and counts do not fit the chunk.",
            expected=f"lengths of 0 or more, counts from 0 to {max(tokens, 1)}" + (", and no more than are held" if held else ""),
            found=f"lengths {have.tolist()}, counts {more.tolist()}"[:200],
            next=_AGAIN,
        )
    if held:
        check_reach(pages, table, np.maximum(have - more - window + 1, 0) if window else np.zeros_like(have), have)
    else:
        used = check_reach(pages, table, have, have + more)
        written = np.concatenate([entries for entries, count in zip(used, more, strict=True) if count] or [have[:0]])
        if len(np.unique(written)) != len(written):
            raise InputError(
                "Two places of the table would write to one page.",
                expected="each page that is written to once in the table",
                found=f"pages {few(sorted(written.tolist()))}",
                next="give each sequence pages of its own.",
            )


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
        **_overlap(pages.keys.device),
    }


def _overlap(device: torch.device) -> dict[str, bool]:
    """Whether a launch may begin before the one before it has ended (programmatic dependent launch, from Hopper on)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


# ---------------------------------------------------------------- the three operations


def write(
    pages: Pages, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor | None = None
) -> None:
    """Store ``keys`` [B, T, H, D] and ``values`` [B, T, H, D] behind the ``lengths`` [B] tokens that are held.

    bf16 or fp16, the last dimension contiguous, other strides free. Without ``counts`` [B] all T tokens are stored, with
    them the last ``counts[b]``. ``table`` [B, width] names the page of every ``page`` positions. All int32 on the device, where their
    contents are taken as they are: a pool's are right, and :func:`runners.pages.check_table` says it of others.
    Raises InputError and RefusedError.
    """
    _check(pages, table, lengths, counts, keys=keys, values=values)
    batch, tokens, heads, dim = keys.shape
    if keys.shape != values.shape or heads != pages.heads:
        raise InputError(
            "Keys and values differ in shape, or from the pages.",
            expected=f"{pages.heads} heads",
            found=f"{tuple(keys.shape)}, {tuple(values.shape)}",
            next=_AGAIN,
        )
    _check_room(pages, table, tokens, counts)
    block, warps = (1, 1) if tokens == 1 else (min(WRITE[0], pages.page), WRITE[1])
    blocks = 1 if tokens == 1 else -(-tokens // block) + 1
    _check_launch(batch, blocks)
    _check_data(pages, table, lengths, tokens, counts, held=False)
    write_kernel[(heads, blocks, batch)](
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
    captured. Not for two streams at a time. Raises InputError for sizes below 1, a batch beyond one launch and a window that is none.
    """

    def __init__(self, batch: int, kv_heads: int, max_tokens: int, window: int = 0, *, dim: int = 128, device: torch.device | str) -> None:
        if not 1 <= batch <= _LAUNCH or kv_heads < 1 or max_tokens < 1:
            raise InputError(
                "A plan needs sequences that one launch holds, heads and tokens.",
                expected=f"a batch of 1 to {_LAUNCH}, and 1 or more of the others",
                found=f"batch {batch}, {kv_heads} KV heads, {max_tokens} tokens",
                next=_AGAIN,
            )
        check_window(window)
        self.batch, self.kv_heads, self.max_tokens, self.window = batch, kv_heads, max_tokens, window
        span = min(max_tokens, window + ALIGN) if window else max_tokens
        self.slots = programs(dim, device)
        # A run is no shorter than its share, so that beside one a sequence there are no more than there are shares.
        self.capacity = min(batch * min(SEGMENTS, -(-span // SHORTEST)), batch + -(-self.slots * UNEVEN.value // kv_heads))
        self.items = torch.zeros(self.capacity, FIELDS.value, dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
        self.lengths: torch.Tensor | None = None
        self._space: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, lengths: torch.Tensor) -> None:
        """Make the list for ``lengths`` [B], the current token included. :meth:`check` takes no other lengths from then on.

        It knows them by their address alone, as it may not wait for the device: where the same tensor's numbers are changed in place, call
        this again before the next step, or that one attends to the tokens of the old ones. On a GPU lengths
        count as 0 where they are below, and as ``max_tokens`` where they are above. Raises InputError and RefusedError.
        """
        if reason := _elsewhere(lengths.device):
            _refuse("device", "The plan cannot be made here.", "the current device", reason)
        if lengths.shape != (self.batch,) or lengths.dtype != torch.int32 or not lengths.is_contiguous():
            found, expected = f"{lengths.dtype} {tuple(lengths.shape)}, strides {lengths.stride()}", f"int32 ({self.batch},), contiguous"
            raise InputError("The lengths do not fit the plan.", expected=expected, found=found, next="make another plan.")
        if interpreting() and not bool(((lengths >= 0) & (lengths <= self.max_tokens)).all()):
            raise InputError(
                "The plan is for other lengths.",
                expected=f"0 to {self.max_tokens} tokens",
                found=str(lengths.tolist())[:200],
                next="make the plan for the longest sequence.",
            )
        self.lengths = lengths
        plan_kernel[(1,)](
            lengths, self.items, self.total, self.batch, self.window, self.kv_heads, self.slots, min(self.max_tokens, _INT32 - 1),
            BATCH=triton.next_power_of_2(self.batch), SEGMENTS=SEGMENTS, SHORTEST=SHORTEST, ALIGN=ALIGN, FIELDS=FIELDS,
            **_overlap(lengths.device),
        )  # fmt: skip

    def check(self, pages: Pages, table: torch.Tensor, lengths: torch.Tensor, window: int) -> None:
        """Refuse a step that the list is not for. Raises InputError."""
        mine, asked = (self.batch, self.kv_heads, self.window), (lengths.shape[0], pages.heads, window)
        if mine != asked:
            raise InputError(
                "The plan is for another step.",
                expected="batch {}, {} KV heads, window {}".format(*asked),
                found="batch {}, {} KV heads, window {}".format(*mine),
                next="make another plan.",
            )
        if table.shape[1] * pages.page > -(-self.max_tokens // pages.page) * pages.page:
            raise InputError(
                "The plan is for shorter sequences than the block table holds.",
                expected=f"at least {table.shape[1] * pages.page} tokens",
                found=f"{self.max_tokens}",
                next="make the plan for the longest sequence.",
            )
        if self.lengths is None or self.lengths.data_ptr() != lengths.data_ptr():
            raise InputError(
                "The plan was made for other lengths.",
                expected="the tensor that update() was given",
                found="another one" if self.lengths is not None else "update() was never called",
                next="call plan.update(lengths) before the step.",
            )

    def space(self, group: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch for the partial results of ``group`` query heads a KV head: float32 results, and maxima and norms."""
        if (group, dim) not in self._space:
            size, device = self.batch * self.kv_heads * SEGMENTS * group, self.items.device
            self._space[group, dim] = torch.empty(size * dim, device=device), torch.empty(size * 2, device=device)
        return self._space[group, dim]


ALIGN = 64
"""Segments begin at multiples of this; no tile is larger."""


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
    h // (H_q / H). Without a ``plan`` one is made. Table and lengths are taken as they are, as by :func:`write`; so is a ``plan``, whose
    lengths must not have changed since :meth:`Plan.update`. Raises InputError and RefusedError.
    """
    _check(pages, table, lengths, dims=3, query=query)
    _check_scores(scale, window, soft_cap)
    _check_data(pages, table, lengths, 0, None, held=True, window=window)
    batch, heads, dim = query.shape
    group = heads // pages.heads
    if plan is None:
        plan = Plan(batch, pages.heads, table.shape[1] * pages.page, window, dim=dim, device=query.device)
        plan.update(lengths)
    plan.check(pages, table, lengths, window)
    partial, stats = plan.space(group, dim)
    out = torch.empty(batch, heads, dim, dtype=query.dtype, device=query.device)
    decode_kernel[(plan.capacity * pages.heads,)](
        query, _raw(pages.keys), _raw(pages.values), _none(pages.key_scales, partial), _none(pages.value_scales, partial),
        table, plan.items, plan.total, partial, stats, plan.arrived, out,
        query.stride(0), query.stride(1), pages.keys.stride(0), pages.keys.stride(1), pages.values.stride(0), pages.values.stride(1),
        table.stride(0), scale * LOG2E, soft_cap * LOG2E,
        HEADS=pages.heads, GROUP=group, ROWS=max(8, triton.next_power_of_2(group)), DK=dim, DV=dim, PAGE=pages.page,
        SEGMENTS=SEGMENTS, SET=SET, FIELDS=FIELDS, CAP=soft_cap > 0, WINDOW=window > 0,
        FP16=pages.values.dtype != torch.bfloat16,
        MERGED=triton.next_power_of_2(group), **_formats(pages),
        **_compiled(pages, batch, plan.slots),
    )  # fmt: skip
    return without_gradient(out, query)


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
    zero. The rest as for :func:`decode`. What is stored is first read back into a workspace of 16 bit, as
    wide as the table. Raises InputError and RefusedError.
    """
    _check(pages, table, lengths, counts, query=query)
    _check_scores(scale, window, soft_cap)
    batch, tokens, heads, dim = query.shape
    _check_room(pages, table, tokens, counts)
    _check_data(pages, table, lengths, tokens, counts, held=True, window=window)
    rows, tile, warps, stages = PREFILL[dim]
    if interpreting():
        rows = 16  # INTERPRET: rows that are padding cost as much as others
    places = -(-table.shape[1] * pages.page // tile) * tile
    _check_launch(batch, max(-(-places // pages.page), -(-tokens // rows)))
    if max(batch * pages.heads, dim) * places >= _INT32:
        found = f"{batch} x {pages.heads} heads, {places} tokens each, {dim} dimensions"
        raise InputError(
            "The workspace is too large.", expected="offsets below 2**31", found=found, next="prefill fewer sequences at a time."
        )
    formats = _formats(pages)
    space = (batch * pages.heads * places, dim)  # e4m3 is exact in fp16; its scales stand beside it
    key_space = torch.empty(space, dtype=torch.float16 if formats["K8"] else pages.keys.dtype, device=query.device)
    value_space = torch.empty(space, dtype=torch.float16 if formats["V8"] else pages.values.dtype, device=query.device)
    value_tile = [tile, dim]
    if formats["V8"]:  # as they are stored: transposed
        value_space, value_tile = value_space.view(-1, places), [dim, tile]
    factors = [torch.empty(space[0] if formats[side] == 2 else 1, device=query.device) for side in ("KS", "VS")]
    gather_kernel[(pages.heads, -(-places // pages.page), batch)](
        _raw(pages.keys), _raw(pages.values), _none(pages.key_scales, query), _none(pages.value_scales, query), table, lengths,
        _none(counts, lengths), tokens, window, key_space, value_space, *factors,
        pages.keys.stride(0), pages.keys.stride(1), pages.values.stride(0), pages.values.stride(1), table.stride(0), places,
        HEADS=pages.heads, DK=dim, DV=dim, PAGE=pages.page, TILE=tile, COUNTS=counts is not None, **formats, num_warps=4,
    )  # fmt: skip
    out = torch.empty(batch, tokens, heads, dim, dtype=query.dtype, device=query.device)
    prefill_kernel[(heads, -(-tokens // rows), batch)](
        query, TensorDescriptor.from_tensor(key_space, [tile, dim]), TensorDescriptor.from_tensor(value_space, value_tile), *factors,
        _none(pages.key_scales, query), _none(pages.value_scales, query), lengths, _none(counts, lengths), out, tokens, places, window,
        query.stride(0), query.stride(1), query.stride(2), scale * LOG2E, soft_cap * LOG2E,
        HEADS=pages.heads, GROUP=heads // pages.heads, DK=dim, DV=dim, ROWS=rows, TILE=tile,
        COUNTS=counts is not None, CAP=soft_cap > 0, FP16=value_space.dtype == torch.float16, **formats, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return without_gradient(out, query)
