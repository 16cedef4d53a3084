"""Write, append, decode and prefill once each, for a tool that watches every access: no test, and nothing for a host without a GPU.

    compute-sanitizer --tool memcheck python -m tests.sanitize 128 K16/V8
    compute-sanitizer --tool racecheck python -m tests.sanitize 128 K16/V8

Head dimensions 64, 128, 256 and 512, formats 16/16, K16/V8 and 8/8. Run it once without the tool first: kernels compile slowly under
it. Every output is held against the float32 oracle too, and the last line counts those beyond the bound.
"""

from __future__ import annotations

import sys

import torch

from runners import fused, oracle, slots, tuning
from runners.pages import Pages

BOUND = 3e-3
"""Largest relative error to the oracle on the same stored bytes."""
CASES = (((700, 77, 333), 2), ((160,) * 40, 8))
"""Lengths of a batch, and KV heads: ragged with few heads, and more programs than run at a time."""


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def main(dim: int, format: str, device: str = "cuda", cases: tuple[tuple[tuple[int, ...], int], ...] = CASES) -> int:
    """How many outputs are beyond the bound; each is printed."""
    torch.manual_seed(1)
    beyond = 0
    with torch.inference_mode():
        for lengths, heads in cases:
            shape = (1, len(lengths), max(lengths), heads, dim)
            keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
            held = slots.store(tuning.FORMATS[format], keys, values, lengths, page=64, seed=3, room=64)
            stored = torch.tensor(lengths, dtype=torch.int32, device=device)  # the room behind them is reserved, not written
            pages, scale = held.pages[0], dim**-0.5
            sides = (pages.keys, pages.values, pages.key_scales, pages.value_scales)
            beside = Pages(*(None if side is None else side.cpu() for side in sides))  # the oracle's own kernels are not to be watched
            token = torch.randn(len(lengths), 4 * heads, dim, device=device, dtype=torch.bfloat16)
            chunk = torch.randn(len(lengths), min(70, *lengths), 4 * heads, dim, device=device, dtype=torch.bfloat16)
            for window in (0, 100):
                for cap in (0.0, 30.0):
                    for query, ours, truth in ((token, fused.decode, oracle.decode), (chunk, fused.prefill, oracle.prefill)):
                        found = ours(query, pages, held.table, stored, scale=scale, window=window, soft_cap=cap)
                        expected = truth(query.cpu(), beside, held.table.cpu(), stored.cpu(), scale=scale, window=window, soft_cap=cap)
                        off = error(found.cpu(), expected)
                        beyond += not off < BOUND
                        print(f"{ours.__name__} {format} d{dim} window {window} cap {cap:g} batch {len(lengths)}: {off:.2e}", flush=True)
            fused.write(pages, keys[0, :, :1], values[0, :, :1], held.table, stored)
    print(f"{beyond} beyond {BOUND:g}")
    return beyond


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]), sys.argv[2]) else 0)
