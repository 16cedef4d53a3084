"""What was recorded against what follows: a result against its spec, figures against those derived again.

Numbers that pass through libm may differ between machines in their last bits: figures agree within 1e-9 relative
(1e-12 absolute), counts and verdicts exactly, texts but for the last digit of the numbers in them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ledger import captures, memory, performance, production, records, tasks
from ledger.records import Decision, Kernel, Measurement, Result, Run, Spec

_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def short(value: Any) -> str:
    """``repr`` of a value, cut after 160 characters."""
    text = repr(value)
    return text if len(text) <= 160 else text[:160] + "…"


def is_sample(name: str) -> bool:
    """Whether figures follow from the evidence file ``name``, or its token ids are checked; no other file need be read for them."""
    names = {"greedy.jsonl", "inputs.safetensors", performance.CASES, production.FILE}
    names |= {captures.FILE, captures.CALIBRATION, memory.FILE, tasks.FILE, tasks.TEST, tasks.SHOTS}
    return name.startswith(("samples/", "timings/")) or name in names


def run_faults(run: Run, result: Result) -> Iterator[str]:
    """Where a run says of its result what the result does not: one clause each."""
    if result.spec != run.spec:
        yield f"the result is of spec {result.spec}, the run of {run.spec}"
    outcome = "failed" if result.outcome == "running" else result.outcome
    if run.outcome != outcome:
        yield f"the result's outcome is {result.outcome}, the run says {run.outcome}"


def result_faults(spec: Spec, result: Result) -> Iterator[str]:
    """Where a result is not of ``spec``: documents, arms, and the files that a completed one must list; one clause each.

    The recorder refuses a result with a fault, and the verification reports it: one set of rules for both.
    """
    spans = spec.documents
    complete = result.outcome == "completed"
    if spec.task is not None:
        if len(result.documents) not in (0, len(spec.task.items)):
            yield f"{len(result.documents)} documents, the spec has {len(spec.task.items)} items; a task lists one an item, or none"
    elif len(result.documents) > len(spans) or (complete and len(result.documents) != len(spans)):
        yield f"{len(result.documents)} documents, the spec has {len(spans)}"
    for at, (document, span) in enumerate(zip(result.documents, spans, strict=False)):
        tokens = span.tokens + int(spec.text.bos)
        if document.tokens != tokens:
            yield f"document {at} has {document.tokens} tokens, the spec asks {tokens}"
    asked = [arm.name for arm in spec.arms]
    arms = Counter(arm.name for arm in result.arms)
    yield from (f"arm {name} stands twice" for name, count in sorted(arms.items()) if count > 1)
    yield from (f"arm {name} is not in the spec" for name in arms if name not in asked)
    if complete:
        yield from (f"arm {name} is missing" for name in asked if name not in arms)
        yield from (f"evidence {name} is missing" for name in sorted(_required(spec) - {item.name for item in result.evidence}))


def _required(spec: Spec) -> set[str]:
    """Names of the files that a completed run of ``spec`` must list."""
    if spec.performance is not None:
        return {performance.CASES}
    if spec.production is not None:
        return {production.FILE}
    if spec.task is not None:
        return {tasks.FILE, tasks.TEST, *([tasks.SHOTS] if spec.task.shots and spec.task.train else [])}
    if spec.memory is not None:
        return {memory.FILE}
    if spec.capture is not None:
        stored = {"inputs.safetensors"} if spec.text.inputs == "store" else set()
        return {captures.FILE} | stored
    names = {f"samples/{index:04}.safetensors" for index in range(len(spec.documents))}
    if spec.text.greedy is not None:
        names.add("greedy.jsonl")
    if spec.text.inputs == "store":
        names.add("inputs.safetensors")
    return names


def close(recorded: Any, derived: Any) -> bool:
    """Equal: floats within tolerance, NaN with NaN, texts but for the last digits of the numbers in them, all else exactly."""
    if isinstance(derived, float) and isinstance(recorded, (int, float)) and not isinstance(recorded, bool):
        if math.isnan(derived) or math.isnan(recorded):
            return math.isnan(derived) and math.isnan(recorded)
        return math.isclose(recorded, derived, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    if isinstance(derived, str) and isinstance(recorded, str):
        if derived == recorded:
            return True
        left, right = _NUMBER.findall(recorded), _NUMBER.findall(derived)
        return _NUMBER.sub("#", recorded) == _NUMBER.sub("#", derived) and all(map(_same_digits, left, right))
    if isinstance(derived, (tuple, list)) and isinstance(recorded, (tuple, list)):
        return len(derived) == len(recorded) and all(map(close, recorded, derived))
    if isinstance(derived, dict) and isinstance(recorded, dict):
        return derived.keys() == recorded.keys() and all(close(recorded[key], derived[key]) for key in derived)
    return type(derived) is type(recorded) and bool(derived == recorded)


def _same_digits(left: str, right: str) -> bool:
    """Whether two printed numbers differ by at most one in their last digit. Counts must be equal."""
    if left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return left == right
    digits = min(len(re.sub(r"e.*|[-.]", "", text).lstrip("0")) or 1 for text in (left, right))
    return math.isclose(float(left), float(right), rel_tol=1.01 * 10.0 ** (1 - digits), abs_tol=_ABSOLUTE)


def measurement_faults(recorded: Sequence[Measurement], derived: Sequence[Measurement]) -> Iterator[str]:
    """Where recorded measurements are not those derived from the samples, in any order: one clause each, naming arm and figure."""

    def keyed(items: Sequence[Measurement]) -> dict[tuple[str, str, str | None], Measurement]:
        return {(m.arm, m.name, m.against): m for m in items}

    def words(key: tuple[str, str, str | None]) -> str:
        return f"{key[1]} of {key[0]}" + (f" against {key[2]}" if key[2] else "")

    left, right = keyed(recorded), keyed(derived)
    if len(left) != len(recorded):
        yield "a measurement is recorded twice"
    yield from (f"{words(key)} is recorded, but does not follow from the samples" for key in left if key not in right)
    yield from (f"{words(key)} follows from the samples, but is not recorded" for key in right if key not in left)
    for key in right:
        if key in left:
            for part in ("value", "unit", "lower", "upper"):
                old, new = getattr(left[key], part), getattr(right[key], part)
                if not close(old, new):
                    yield f"{words(key)}: {part} is recorded as {old!r}, the samples give {new!r}"


def decision_faults(recorded: Sequence[Decision], derived: Sequence[Decision]) -> Iterator[str]:
    """Where recorded decisions are not those derived from the samples, in any order: one clause each, naming contrast and part."""

    def keyed(items: Sequence[Decision]) -> dict[tuple[str, str, str], Decision]:
        return {(d.candidate, d.baseline, d.family): d for d in items}

    left, right = keyed(recorded), keyed(derived)
    if len(left) != len(recorded):
        yield "a decision is recorded twice"
    for key in dict.fromkeys((*left, *right)):
        words = f"{key[0]} against {key[1]} ({key[2]})"
        if key not in left or key not in right:
            yield f"{words} is {'not recorded' if key in right else 'recorded, but no contrast of the spec'}"
            continue
        old, new = records.plain(left[key]), records.plain(right[key])
        for part, value in new.items():
            if not close(old[part], value):
                yield f"{words}: {part} is recorded as {short(old[part])}, the samples give {short(value)}"


def kernel_faults(recorded: Sequence[Kernel], derived: Sequence[Kernel]) -> Iterator[str]:
    """Where the kernels that a run names are not those that its evidence names: one clause each, naming case and arm."""
    left, right = ({(kernel.case, kernel.arm): kernel for kernel in side} for side in (recorded, derived))
    if len(left) != len(recorded):
        yield "a kernel is recorded twice"
    for key in dict.fromkeys((*left, *right)):
        if left.get(key) != right.get(key):
            old, new = (side[key].kernel or side[key].refused if key in side else "nothing" for side in (left, right))
            yield f"the kernel of {key[1] or 'the run'} in {key[0]} is recorded as {short(old)}, the evidence says {short(new)}"
