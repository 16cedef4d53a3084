"""What a production check found: the comparisons it made, counted, and the line of evidence that says so.

A line of ``checks.jsonl`` has ``compared`` values, of which ``differing`` differ (or stand in a comparison beyond its
tolerance), the ``largest`` difference or relative error, its ``tolerance`` (null: bit for bit), and a ``detail`` in words. Where
comparisons have different tolerances, the line has the one that comes nearest to its own, or lies furthest beyond. With a
tolerance or without one, a check passes only where nothing differs. One that could not be made compared nothing and says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ledger import digest
from runners.words import said

TOLERANCES = {
    "bf16": {"oracle": 3e-3, "chunks": 4e-3, "logits": 1e-1},
    "fp16": {"oracle": 3e-3, "chunks": 1e-3, "logits": 2e-2},
    "fp8_e4m3": {"values": 3e-2, "keys": 6e-2, "logits": 2e-1},
}
"""Relative errors that are allowed, by dtype.

    oracle          attention to the float32 oracle on the same stored bytes, by the dtype that is computed in
    chunks          attention in chunks to attention in one shot
    keys, values    attention to that of unquantised states, by the more delicate side that is quantised
    logits          a model's logits in chunks to those in one shot, by the coarsest dtype of an arm. All sums of the model change with
                    the shape. Rounding noise at the output of every attention (one s.d. of half a unit in the last place, SmolLM2 and
                    Gemma 3 270M) moved logits by 0.03 in bf16 and 0.002 in fp16; where fp8 is stored a changed code
                    weighs more: 0.07. Chunks that do not see the ones before them moved them by 0.4 and 0.6.
"""
LONGEST_DETAIL = 2000


@dataclass
class Finding:
    """What one check found for one arm: a line of ``checks.jsonl``."""

    check: str
    arm: str
    compared: int = 0
    differing: int = 0
    largest: float = 0.0
    tolerance: float | None = None
    broken: bool = False
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def same(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Compare two tensors bit for bit."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.fact(False, f"{what}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}")
            return
        unlike = bits(found) != bits(expected)
        self.compared += found.numel()
        if not unlike.any():
            return
        self.differing += int(unlike.sum())
        gap = (found.float() - expected.float()).abs().max().item()
        self.largest = max(self.largest, gap if math.isfinite(gap) else math.inf)
        self.wrong.append(f"{what}: {int(unlike.sum())} of {found.numel()} differ")

    def near(self, found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
        """Compare two tensors of one shape by their relative error."""
        error = relative(found, expected)
        self.compared += found.numel()
        if self.tolerance is None or error / tolerance > self.largest / self.tolerance:
            self.largest, self.tolerance = error, tolerance
        if not error <= tolerance:
            self.differing += found.numel()
            self.wrong.append(f"{what}: relative error {error:.3g} > {tolerance:g}")

    def fact(self, holds: bool, what: str) -> None:
        """Something that holds or does not."""
        self.compared += 1
        if not holds:
            self.differing += 1
            self.wrong.append(what)

    def attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do ``work``; where it cannot be done, the check did not compare all that it has to, and counts as not made."""
        try:
            work(*arguments)
        except Exception as error:
            self.broken = True
            self.wrong.append(f"could not be made: {said(error)[:400]}")

    @property
    def passes(self) -> bool:
        """Whether something was compared, nothing differs, and the largest is within the tolerance where there is one."""
        within = self.tolerance is None or self.largest <= self.tolerance
        return self.compared > 0 and not self.differing and within and not self.broken

    def words(self) -> str:
        """One line for who waits."""
        return f"{self.check} " + ("passes" if self.passes else "does not pass: " + "; ".join([*self.wrong, *self.notes])[:300])

    def line(self) -> bytes:
        """The canonical line."""
        more = [f"and {len(self.wrong) - 4} more"] if len(self.wrong) > 4 else []
        detail = "; ".join([*self.wrong[:4], *more, *dict.fromkeys(self.notes)])
        value = {
            "check": self.check,
            "arm": self.arm,
            "compared": 0 if self.broken else self.compared,
            "differing": self.differing,
            "largest": self.largest,
            "tolerance": self.tolerance,
            "detail": detail[:LONGEST_DETAIL],
        }
        return digest.canonical(value) + b"\n"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous()
    return whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of ``expected``; infinite where it is no number."""
    error = ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()
    return error if math.isfinite(error) else math.inf
