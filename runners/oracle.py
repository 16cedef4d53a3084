"""The reference of the fused kernels: the same signatures in plain torch, float32, one sequence at a time.

``write`` quantises as :mod:`runners.fp8` does; ``decode`` and ``prefill`` read the stored bytes, scale them, and attend in
float32. Nothing is fast here. Shapes are those of :mod:`runners.fused`.
"""

from __future__ import annotations

import torch

from runners import fp8
from runners.pages import Pages


def write(
    pages: Pages, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor | None = None
) -> None:
    """Store ``keys`` [B, T, H, D_k] and ``values`` [B, T, H, D_v] behind the ``lengths`` [B] tokens that are held.

    The last ``counts[b]`` of the T tokens are stored (all T without ``counts``), at the places that ``table`` [B, width] names.
    """
    tokens = keys.shape[1]
    for row in range(keys.shape[0]):
        count = tokens if counts is None else int(counts[row])
        positions = int(lengths[row]) + torch.arange(count, device=keys.device)
        places, slots = table[row].long()[positions // pages.page], positions % pages.page
        _store(pages.keys, pages.key_scales, places, slots, keys[row, tokens - count :], transposed=False)
        _store(pages.values, pages.value_scales, places, slots, values[row, tokens - count :], transposed=pages.values.dtype == fp8.E4M3)


def _store(
    stored: torch.Tensor, scales: torch.Tensor | None, places: torch.Tensor, slots: torch.Tensor, states: torch.Tensor, *, transposed: bool
) -> None:
    """``states`` [n, H, D] to ``slots`` [n] of the pages ``places`` [n]: [H, page, D], or [H, D, page] where ``transposed``."""
    if stored.dtype == fp8.E4M3:
        factors: torch.Tensor | float = 1.0
        if scales is not None and scales.dim() == 3:
            factors = fp8.token_head_scales(states)
            scales[places, :, slots] = factors[..., 0]
        elif scales is not None:
            factors = scales[:, None]
        states = (states.float() / factors).clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.E4M3)
    raw = torch.uint8 if stored.dtype == fp8.E4M3 else stored.dtype
    where = (places, slice(None), slice(None), slots) if transposed else (places, slice(None), slots)
    stored.view(raw)[where] = states.view(raw)


def read(pages: Pages, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence, float32 ``[length, H, D]``, as its pages (``table`` [width]) hold them."""
    places = table[: -(-length // pages.page)].long()
    found = []
    for stored, scales, transposed in (
        (pages.keys, pages.key_scales, False),
        (pages.values, pages.value_scales, pages.values.dtype == fp8.E4M3),
    ):
        states = stored.view(torch.uint8)[places].view(fp8.E4M3).float() if stored.dtype == fp8.E4M3 else stored[places].float()
        if transposed:
            states = states.transpose(2, 3)
        if scales is not None:
            states = states * (scales[:, None, None] if scales.dim() == 1 else scales[places][..., None])
        found.append(states.transpose(1, 2).flatten(0, 1)[:length])
    return found[0], found[1]


def decode(
    query: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    plan: object = None,
) -> torch.Tensor:
    """Attention of one query token a sequence: ``query`` [B, H_q, D_k] -> [B, H_q, D_v], float32.

    ``lengths`` [B] count the current token, which is stored already. ``window`` 0 attends to everything.
    """
    return prefill(query[:, None], pages, table, lengths, scale=scale, window=window, soft_cap=soft_cap)[:, 0]


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
    """Causal attention of a stored chunk: ``query`` [B, T, H_q, D_k] -> [B, T, H_q, D_v], float32.

    Row t of sequence b is at position ``lengths[b] - T + t``; rows before the last ``counts[b]`` are padding and come out zero.
    """
    batch, tokens, heads, _ = query.shape
    out = torch.zeros(batch, tokens, heads, _value_dim(pages), device=query.device)
    for row in range(batch):
        length, count = int(lengths[row]), tokens if counts is None else int(counts[row])
        if not count:
            continue
        keys, values = (side.repeat_interleave(heads // pages.heads, dim=1).transpose(0, 1) for side in read(pages, table[row], length))
        scores = query[row, tokens - count :].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length - count, length, device=query.device)[:, None]
        places = torch.arange(length, device=query.device)[None]
        seen = places <= positions
        if window:
            seen &= places > positions - window
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        # A place that is not seen has weight zero, but zero times NaN is NaN.
        outside = ~seen.any(dim=0)
        out[row, tokens - count :] = (weights @ values.masked_fill(outside[None, :, None], 0.0)).transpose(0, 1)
    return out


def _value_dim(pages: Pages) -> int:
    return int(pages.values.shape[2 if pages.values.dtype == fp8.E4M3 else 3])
