"""FP8 e4m3 (``float8_e4m3fn``): quantise, dequantise, and the scale policies.

    write   v8 = rne(clamp(v / s, ±448))      clamp first: a bare cast above the range gives NaN
    read    v  = v8 · s

Policies:

    unit       s = 1 everywhere; nothing is divided, multiplied or stored
    fixed      s = amax / 448 of a calibration: one a layer (``tensor``), or one a KV head (``head``)
    dynamic    s = amax / 448 of the states as they are written

When ``dynamic`` scales are decided, and what larger values do that come later. Every sequence has scales of its own:

    tensor, head   by the first chunk that is written to the layer and is not all zeros. Later values are clamped to ±448·s.
    page_head      by all tokens of a page of 64, counted from the sequence's beginning. A page that fills chunk by chunk, or
                   token by token, takes a larger scale when a larger value comes: what it holds is then read back and rounded
                   a second time, under the new scale. A scale never shrinks, whatever is cropped or slides out of a window,
                   until its page is empty.
    token_head     by the token itself, so that chunks do not matter.

A scale of 0 says that nothing but zeros was written: it is still to be decided, and reads back as zeros. Only rows of
``token_head`` are decided at once; an all-zero one has scale 1.

Shapes, by which each kind of stored scale is known, all fp32, with B batch, H KV heads, T tokens held, P pages touched by them:

    fixed, tensor         []
    fixed, head           [H]
    dynamic, tensor       [B, 1]
    dynamic, head         [B, H, 1]
    dynamic, page_head    [B, H, P, 1, 1]
    dynamic, token_head   [B, H, T, 1]

Anything else is refused with the code ``scale_policy``; a silent scale of 1.0 is not a policy.

What is not finite: ±infinity is clamped to ±448·s under ``unit`` and ``fixed``, and NaN stays NaN everywhere.
Under ``dynamic`` what decides a scale and holds an infinity or a NaN makes one that is not finite, and all that it
scales reads back as NaN as a whole: the fault stays visible in every loss that attends to it.
"""

from __future__ import annotations

from functools import cache

import torch

from ledger.errors import RefusedError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite e4m3 value."""
PAGE = 64
"""Tokens of a page, for scales of granularity ``page_head``."""
POLICIES = frozenset(
    {("unit", "none"), ("fixed", "tensor"), ("fixed", "head")}
    | {("dynamic", granularity) for granularity in ("tensor", "head", "page_head", "token_head")}
)
"""Scales and granularity, as pairs of words of ``records.Arm``."""


def check(scales: str, granularity: str) -> None:
    """Refuse a scale policy that ``quantise`` does not do. Raises RefusedError (``scale_policy``)."""
    if (scales, granularity) not in {("unit", "none"), ("dynamic", "token_head")}:
        raise RefusedError(
            "scale_policy",
            "These scales depend on more than the states that are written.",
            expected='scales "unit" without granularity, or "dynamic" with granularity "token_head"',
            found=f'scales "{scales}", granularity "{granularity}"',
            next="choose one of these in the study.",
        )


def token_head_scales(states: torch.Tensor) -> torch.Tensor:
    """Scales of ``states`` [B, H, T, D]: amax / 448 over D, fp32 [B, H, T, 1].

    1.0 where that is zero: an all-zero row, or one so small that its scale has no fp32 form and
    whose values are stored as zeros.
    """
    largest = states.abs().amax(dim=-1, keepdim=True).float()
    scales = largest / torch.full_like(largest, LARGEST)  # by a number, CUDA would multiply with its rounded inverse
    return torch.where(scales == 0, 1.0, scales)


def quantise(states: torch.Tensor, scales: str, granularity: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``states`` [B, H, T, D] as e4m3 of that shape, and their scales: fp32 [B, H, T, 1], or None under ``unit``.

    For policies that need nothing but the states; :func:`append` is for all others. Raises RefusedError (``scale_policy``).
    """
    check(scales, granularity)
    if scales == "unit":
        return states.clamp(-LARGEST, LARGEST).to(E4M3), None
    factors = token_head_scales(states)
    return encode(states, factors), factors


def encode(states: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``states`` [B, H, T, D] as e4m3 of that shape, under ``factors`` that broadcast to it. Zeros count as ones."""
    return (states.float() / torch.where(factors == 0, 1.0, factors)).clamp(-LARGEST, LARGEST).to(E4M3)


def dequantise(codes: torch.Tensor, factors: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 ``codes`` [B, H, T, D] in ``dtype``, times ``factors`` that broadcast to it, where there are any.

    Every e4m3 value is exact in fp32, bf16 and fp16; the product is made in fp32 and rounded once.
    """
    if factors is None:
        return _decode(codes, dtype)
    return _decode(codes, torch.float32).mul_(factors).to(dtype)


def _decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # Torch converts e4m3 on a CPU one value at a time, with branches: looking the byte up gives the
    # same values at about seven times the speed, and 32-bit indices at twice that of 64-bit ones.
    indices = codes.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return _table(dtype).index_select(0, indices).view(codes.shape)


@cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """All 256 e4m3 values by code, as torch itself converts them."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)


# ---------------------------------------------------------------- scales that are stored beside the codes


def undecided(batch: int, heads: int, granularity: str, device: torch.device) -> torch.Tensor:
    """The ``dynamic`` scales of a layer that holds nothing yet, in the shape of their granularity."""
    shapes = {"tensor": (batch, 1), "head": (batch, heads, 1), "page_head": (batch, heads, 0, 1, 1), "token_head": (batch, heads, 0, 1)}
    return torch.zeros(shapes[granularity], dtype=torch.float32, device=device)


def append(codes: torch.Tensor, scales: torch.Tensor, states: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``codes`` [B, H, N, D] and what ``states`` [B, H, T, D] become behind them, and the scales of both.

    ``scales`` are those of ``codes``, in one of the shapes above; ``first`` is the position of the first token held.
    """
    tokens = states.shape[2]
    if not tokens:
        return codes, scales
    if scales.dim() == 4:
        factors = token_head_scales(states)
        return join(codes, encode(states, factors)), torch.cat([scales, factors], dim=2)
    if scales.dim() == 5:
        codes, scales = _grow(codes, scales, states, first)
    elif scales.dim() in (2, 3):
        over = (1, 2, 3) if scales.dim() == 2 else (2, 3)
        scales = torch.where(scales == 0, _ratio(states.abs().amax(dim=over)[..., None]), scales)
    at = first + codes.shape[2]
    return join(codes, encode(states, spread(within(scales, first, at - first, at - first + tokens), at, tokens))), scales


def spread(scales: torch.Tensor, first: int, tokens: int) -> torch.Tensor:
    """Factors that broadcast to [B, H, tokens, D], for ``tokens`` positions from ``first`` on; ``scales`` are theirs alone."""
    if scales.dim() == 1:
        return scales[None, :, None, None]
    if scales.dim() in (2, 3):
        return scales[:, :, None, None] if scales.dim() == 2 else scales[..., None]
    if scales.dim() == 5:
        skipped = first % PAGE
        return scales[..., 0].repeat_interleave(PAGE, dim=2)[:, :, skipped : skipped + tokens]
    return scales


def within(scales: torch.Tensor, first: int, start: int, stop: int) -> torch.Tensor:
    """The scales of the tokens from ``start`` up to ``stop`` of those held, where the first held one has position ``first``.

    Scales of a whole layer are undecided again where no token is left.
    """
    if scales.dim() == 4:
        return scales[:, :, start:stop]
    if scales.dim() == 5:
        before = first // PAGE
        pages = slice((first + start) // PAGE - before, (first + stop - 1) // PAGE - before + 1) if stop > start else slice(0)
        return scales[:, :, pages]
    return torch.zeros_like(scales) if scales.dim() in (2, 3) and stop <= start else scales


def join(codes: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Tensors of one dtype, one behind the other along the tokens. Torch has no concatenation of e4m3 on every device."""
    if codes.dtype != E4M3:
        return torch.cat([codes, more], dim=2)
    return torch.cat([codes.view(torch.uint8), more.view(torch.uint8)], dim=2).view(E4M3)


def _ratio(largest: torch.Tensor) -> torch.Tensor:
    largest = largest.float()
    return largest / torch.full_like(largest, LARGEST)  # as in token_head_scales


def _grow(codes: torch.Tensor, scales: torch.Tensor, states: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for ``states`` in the scales of pages, and the codes of the page that they begin in under its grown scale."""
    held, tokens = codes.shape[2], states.shape[2]
    into = (first + held) % PAGE
    largest = torch.nn.functional.pad(states.abs().amax(dim=-1).float(), (into, -(into + tokens) % PAGE))
    fresh = _ratio(largest.unflatten(-1, (-1, PAGE)).amax(dim=-1))[..., None, None]
    if not into or not scales.shape[2]:
        return codes, torch.cat([scales, fresh], dim=2)
    old = scales[:, :, -1:]
    grown = torch.maximum(old, fresh[:, :, :1])
    changed = (grown != old)[..., 0]
    kept = held - min(into, held)
    if kept < held and bool(changed.any()):
        page = codes[:, :, kept:]
        again = encode(dequantise(page, old[..., 0], torch.float32), grown[..., 0])
        codes = join(codes[:, :, :kept], torch.where(changed, again.view(torch.uint8), page.view(torch.uint8)).view(E4M3))
    return codes, torch.cat([scales[:, :, :-1], grown, fresh[:, :, 1:]], dim=2)
