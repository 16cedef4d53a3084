"""What the production checks found -> decisions: passes or fails, with one outcome a check.

``checks.jsonl`` has one line of canonical JSON a check and arm:

    check       its name, one of :data:`CHECKS`
    arm         the fused arm that it is of; an empty string where it holds for all of them
    compared    how many numbers, or cases, were compared
    differing   how many of them differed, or stand in a comparison beyond its tolerance
    largest     the largest difference, relative where there is a tolerance
    tolerance   what ``largest`` may be; null where nothing may differ
    detail      what was done, in words

Which checks have a tolerance, and how large it may be, is said here (:func:`bar`) and not by the evidence: all others are
exact. A check passes where something was compared, nothing differs, and ``largest`` is at most the tolerance. An arm passes
where all its checks do, and fails where one compared something and found it to differ. Else it is invalid: where a check is
missing or compared nothing, since what was not tried is not passed; and where a line was held to another bar than this one.
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
    "page_border_appends": "tokens appended across page borders are stored as one write of all stores them",
    "border_lengths": "lengths 1, page - 1, page and page + 1 are read as the oracle reads them",
    "poisoned_pages": "unused bytes of pages hold NaN, and no result does",
    "returned_pages": "pages that were given back and taken again carry nothing over",
    "kernel_recorded": "the kernel that ran is known by name",
    "unsupported_refused": "what is not supported is refused, not replaced",
    "oracle_error": "attention is that of the float32 oracle on the same stored bytes, within tolerance",
    "quantise_all_inputs": "every 16-bit input is quantised as torch does after clamping",
}
"""Every check and what it says."""

ORACLE = 3e-3
"""Largest relative error of 16-bit attention to the float32 oracle on the same stored bytes."""
UNQUANTISED = {"values": 3e-2, "keys": 6e-2}
"""The same to the oracle on states that were never quantised, by the more delicate side that stores fp8_e4m3."""
LOGITS = {"bf16": 1e-1, "fp16": 2e-2, "fp8_e4m3": 2e-1}
"""Largest relative difference of a model's logits after prefill in chunks, by the coarsest format of an arm: all its sums change."""

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
    def differs(self) -> bool:
        """Whether something that was compared differs by more than it may."""
        within = self.largest == 0 if self.tolerance is None else self.largest <= self.tolerance
        return self.compared > 0 and (self.differing > 0 or not within)


@dataclass(frozen=True)
class Checks:
    """Lines by check and arm; the arm is empty where a line is of every fused arm."""

    lines: dict[tuple[str, str], Check] = field(default_factory=dict)

    def of(self, check: str, arm: str) -> Check | None:
        """What was found for an arm, in its own line or in that of all arms."""
        return self.lines.get((check, arm)) or self.lines.get((check, ""))


def bar(check: str, arm: Arm) -> float | None:
    """The largest tolerance that a check of an arm may have; None where it is exact, so that nothing may differ."""
    if check == "border_lengths":
        return ORACLE
    if check == "oracle_error":
        return max([ORACLE, *(UNQUANTISED[side] for side in UNQUANTISED if getattr(arm, side) == "fp8_e4m3")])
    if check == "chunked_equals_one_shot":
        return max(LOGITS[form] for form in (arm.compute, arm.keys, arm.values) if form in LOGITS)
    return None


def read(spec: Spec, evidence: Mapping[str, bytes]) -> Checks:
    """Parse ``checks.jsonl`` strictly; it may be missing. Raises InputError naming the line."""
    found = Checks()
    if FILE in evidence:
        names = {"", *(question.candidate for question in spec.questions())}
        for number, value in measures.json_lines(FILE, evidence[FILE]):
            _read_line(names, f"Line {number} of {FILE}", value, found)
    return found


def _read_line(names: set[str], where: str, value: Any, into: Checks) -> None:
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_KEYS)), found=repr(value)[:200], next=_AS_LEFT)
    check, arm, tolerance = value["check"], value["arm"], value["tolerance"]
    if not isinstance(check, str) or check not in CHECKS or not isinstance(arm, str) or arm not in names:
        raise InputError(
            f"{where} names no check, or no fused arm of the spec.", found=f"check {check!r}, arm {arm!r}"[:300], next=_AS_LEFT
        )
    if any(name == check and (arm == other or "" in (arm, other)) for name, other in into.lines):
        raise InputError(f"{where} repeats check {check!r}, arm {arm!r}.", next=_AS_LEFT)
    counts = (value["compared"], value["differing"])
    if (
        not all(map(measures.is_count, counts))
        or not measures.is_number(value["largest"])
        or value["largest"] < 0
        or not (tolerance is None or (measures.is_number(tolerance) and math.isfinite(tolerance) and tolerance >= 0))
        or not isinstance(value["detail"], str)
    ):
        raise InputError(
            f"{where} holds a value that cannot be.",
            expected="compared and differing whole numbers, largest a number from 0, tolerance one from 0 or null",
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


def _flaw(name: str, check: Check, arm: Arm) -> str:
    """Why a check says nothing of an arm, or an empty string."""
    allowed = bar(name, arm)
    if check.compared == 0:
        return "nothing was compared"
    if allowed is None:
        return "" if check.tolerance is None else f"it is exact, and was held to a tolerance of {check.tolerance:g}"
    if check.tolerance is None:
        return f"it was held to no tolerance, and has one of at most {allowed:g}"
    return f"it was held to a tolerance of {check.tolerance:g}, above {allowed:g}" if check.tolerance > allowed else ""


def _outcome(name: str, check: Check, flaw: str) -> GateOutcome:
    estimate = float(check.differing) if check.tolerance is None else check.largest
    bound = 0.0 if check.tolerance is None else check.tolerance
    words = f"{check.compared:,} compared, {check.differing:,} differ"
    if check.tolerance is not None:
        words += f", by {check.largest:.3g} at most of {check.tolerance:g} allowed"
    elif check.differs:
        words += f", by {check.largest:.3g} at most"
    parts = [words] if check.compared else []
    return GateOutcome(
        statistic=name,
        estimate=estimate,
        lower=estimate,
        upper=estimate,
        bound=bound,
        harm=bound,
        met=not flaw and not check.differs,
        harmed=check.differs,
        method="; ".join(part for part in (*parts, flaw, check.detail) if part)[:8000],
    )


def decide(spec: Spec, result: Result, found: Checks, harness: Harness) -> tuple[Decision, ...]:
    """``passes``, ``fails``, ``unsupported`` or ``invalid`` for each fused arm, with one outcome a check."""
    return tuple(_decision(spec, result, found, harness, question) for question in spec.questions())


def _decision(spec: Spec, result: Result, found: Checks, harness: Harness, question: Contrast) -> Decision:
    arm = spec.arm(question.candidate)
    checks = {name: check for name in CHECKS if (check := found.of(name, arm.name)) is not None}
    outcomes = tuple(_outcome(name, check, _flaw(name, check, arm)) for name, check in checks.items())
    refused = validity.refusal(spec, result, harness, [arm.name])
    missing = [name for name in required(arm) if name not in checks]
    failed = [f"{outcome.statistic}: {outcome.method}" for outcome in outcomes if outcome.harmed]
    flawed = [f"{outcome.statistic}: {outcome.method}" for outcome in outcomes if not outcome.met]
    if refused is not None:
        status, reason = refused
    elif failed:  # a check that failed says so whatever else is missing
        status, reason = "fails", "; ".join(failed)
    elif flawed or missing:
        lacking = [f"missing evidence: no check {', '.join(missing)}"] if missing else []
        status, reason = "invalid", "; ".join([*flawed, *lacking])
    else:
        status, reason = "passes", f"{len(outcomes)} checks, every one passed"
    return Decision(
        candidate=arm.name, baseline=question.baseline, family=question.family, status=status, reason=reason[:8000], gates=outcomes
    )
