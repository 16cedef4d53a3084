"""What the production checks found -> decisions: passes or fails, with one outcome a check.

``checks.jsonl`` has one line of canonical JSON a check and arm:

    check       its name, one of :data:`CHECKS`
    arm         the fused arm that it is of; an empty string where it holds for all of them
    compared    how many numbers, or cases, were compared
    differing   how many of them differed
    largest     the largest difference, relative where the check says so
    tolerance   what ``largest`` may be; null where nothing may differ
    detail      what was done, in words

A check passes where something was compared and, with a tolerance, ``largest`` is at most that; without one, nothing
differed. An arm passes where all its checks do. One that lacks a check is invalid: what was not tried is not passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ledger import measures, validity
from ledger.errors import InputError
from ledger.records import Arm, Contrast, Decision, GateOutcome, Harness, Result, Spec

FILE = "checks.jsonl"
CHECKS = {
    "graph_replay_equals_eager": "a replayed graph gives the bits of the eager step",
    "batch_independence": "a sequence gives the same bits alone and among others",
    "page_independence": "a sequence gives the same bits whichever pages it holds",
    "chunked_equals_one_shot": "prefill in chunks gives what one shot gives, within the dtype's tolerance",
    "page_border_appends": "tokens appended across page borders are read as the oracle reads them",
    "border_lengths": "lengths 1, page - 1, page and page + 1 are read as the oracle reads them",
    "poisoned_pages": "unused bytes of pages hold NaN, and no result does",
    "returned_pages": "pages that were given back and taken again carry nothing over",
    "kernel_recorded": "the kernel that ran is known by name",
    "unsupported_refused": "what is not supported is refused, not replaced",
    "oracle_error": "attention is that of the float32 oracle on the same stored bytes, within tolerance",
    "quantise_all_inputs": "every 16-bit input is quantised as torch does after clamping",
}
"""Every check and what it says."""

_KEYS = {"check", "arm", "compared", "differing", "largest", "tolerance", "detail"}
_AS_LEFT = "record the folder as the runner left it."


@dataclass(frozen=True)
class Check:
    """One line of ``checks.jsonl``."""

    compared: int
    differing: int
    largest: float
    tolerance: float | None
    detail: str

    @property
    def passes(self) -> bool:
        """Whether something was compared, and nothing differed by more than it may."""
        return self.compared > 0 and (self.differing == 0 if self.tolerance is None else self.largest <= self.tolerance)


@dataclass(frozen=True)
class Checks:
    """Lines by check and arm; the arm is empty where a line is of every fused arm."""

    lines: dict[tuple[str, str], Check] = field(default_factory=dict)

    def of(self, check: str, arm: str) -> Check | None:
        """What was found for an arm: its own line before that of all."""
        return self.lines.get((check, arm)) or self.lines.get((check, ""))


def read(spec: Spec, evidence: Mapping[str, bytes]) -> Checks:
    """Parse ``checks.jsonl`` strictly; it may be missing. Raises InputError naming the line."""
    found = Checks()
    if FILE in evidence:
        names = {"", *(question.candidate for question in spec.questions())}
        for number, value in measures.json_lines(FILE, evidence[FILE]):
            _read_line(names, f"Line {number} of {FILE}", value, found)
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_line(names: set[str], where: str, value: Any, into: Checks) -> None:
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_KEYS)), found=repr(value)[:200], next=_AS_LEFT)
    check, arm, tolerance = value["check"], value["arm"], value["tolerance"]
    if not isinstance(check, str) or check not in CHECKS or not isinstance(arm, str) or arm not in names:
        raise InputError(
            f"{where} names no check, or no fused arm of the spec.", found=f"check {check!r}, arm {arm!r}"[:300], next=_AS_LEFT
        )
    if (check, arm) in into.lines:
        raise InputError(f"{where} repeats check {check!r}, arm {arm!r}.", next=_AS_LEFT)
    counts = (value["compared"], value["differing"])
    if (
        any(type(count) is not int or count < 0 for count in counts)
        or not _number(value["largest"])
        or not (tolerance is None or (_number(tolerance) and math.isfinite(tolerance) and tolerance >= 0))
        or not isinstance(value["detail"], str)
    ):
        raise InputError(
            f"{where} holds a value that cannot be.",
            expected="compared and differing whole numbers, largest a number, tolerance one from 0 or null",
            found=repr(value)[:200],
            next=_AS_LEFT,
        )
    into.lines[check, arm] = Check(
        compared=counts[0],
        differing=counts[1],
        largest=float(value["largest"]),
        tolerance=None if tolerance is None else float(tolerance),
        detail=value["detail"],
    )


# ---------------------------------------------------------------- decisions


def required(arm: Arm) -> tuple[str, ...]:
    """The checks that an arm must have: quantisation only where it stores 8 bit."""
    eight = "fp8_e4m3" in (arm.keys, arm.values)
    return tuple(name for name in CHECKS if eight or name != "quantise_all_inputs")


def _outcome(name: str, check: Check) -> GateOutcome:
    exact = check.tolerance is None
    estimate = float(check.differing) if exact else check.largest
    bound = 0.0 if check.tolerance is None else check.tolerance
    words = f"{check.compared:,} compared, {check.differing:,} differ"
    if check.tolerance is not None:
        words += f", by {check.largest:.3g} at most of {check.tolerance:g} allowed"
    elif check.differing:
        words += f", by {check.largest:.3g} at most"
    return GateOutcome(
        statistic=name,
        estimate=estimate,
        lower=estimate,
        upper=estimate,
        bound=bound,
        harm=bound,
        met=check.passes,
        harmed=not check.passes,
        method=f"{words if check.compared else 'nothing was compared'}; {check.detail}"[:8000].removesuffix("; "),
    )


def decide(spec: Spec, result: Result, found: Checks, harness: Harness) -> tuple[Decision, ...]:
    """``passes``, ``fails``, ``unsupported`` or ``invalid`` for each fused arm, with one outcome a check."""
    return tuple(_decision(spec, result, found, harness, question) for question in spec.questions())


def _decision(spec: Spec, result: Result, found: Checks, harness: Harness, question: Contrast) -> Decision:
    arm = question.candidate
    checks = {name: check for name in CHECKS if (check := found.of(name, arm)) is not None}
    outcomes = tuple(_outcome(name, check) for name, check in checks.items())
    refused = validity.refusal(spec, result, harness, [arm])
    missing = [name for name in required(spec.arm(arm)) if name not in checks]
    failed = [f"{outcome.statistic}: {outcome.method}" for outcome in outcomes if not outcome.met]
    if refused is not None:
        status, reason = refused
    elif failed:  # a check that failed says so whatever else is missing
        status, reason = "fails", "; ".join(failed)
    elif missing:
        status, reason = "invalid", f"missing evidence: no check {', '.join(missing)}"
    else:
        status, reason = "passes", f"{len(outcomes)} checks, every one passed"
    return Decision(candidate=arm, baseline=question.baseline, family=question.family, status=status, reason=reason[:8000], gates=outcomes)
