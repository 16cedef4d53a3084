"""FP8 e4m3 (``float8_e4m3fn``): quantise, dequantise, and the scale policies.

    write   v8 = rne(clamp(v / s, ±448))      clamp first: a bare cast above the range gives NaN
    read    v  = v8 · s

Policies of this version:

    unit                   s = 1 everywhere; nothing is divided, multiplied or stored
    dynamic, token_head    s = amax / 448 over the head dimension, for each token and KV head, fp32

Anything else is refused with the code ``scale_policy``; a silent scale of 1.0 is not a policy.

What is not finite: ±infinity is clamped to ±448·s under ``unit``, and NaN stays NaN under both.
Under ``dynamic`` a row that holds an infinity or a NaN has a scale that is not finite, and reads
back as NaN as a whole: the fault stays visible in every loss that attends to it.
"""

from __future__ import annotations

from functools import cache

import torch

from ledger.errors import RefusedError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite e4m3 value."""


def check(scales: str, granularity: str) -> None:
    """Refuse a scale policy that this module does not do. Raises RefusedError (``scale_policy``)."""
    if (scales, granularity) not in {("unit", "none"), ("dynamic", "token_head")}:
        raise RefusedError(
            "scale_policy",
            "This scale policy for fp8_e4m3 is not supported.",
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

    Raises RefusedError (``scale_policy``).
    """
    check(scales, granularity)
    if scales == "unit":
        return states.clamp(-LARGEST, LARGEST).to(E4M3), None
    factors = token_head_scales(states)
    return (states.float() / factors).clamp(-LARGEST, LARGEST).to(E4M3), factors


def dequantise(codes: torch.Tensor, factors: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 ``codes`` [B, H, T, D] in ``dtype``, times ``factors`` [B, H, T, 1] where there are any.

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
