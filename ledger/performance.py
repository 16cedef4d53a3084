"""Raw timings -> figures and decisions of scope performance.

``cases.jsonl`` has one line of canonical JSON for each case and arm that takes part in it, and one for the copy. In ``decode``
and ``prefill`` every arm takes part but ``transformers``; in ``step`` that and the fused arms; in all else the fused arms
(:func:`ledger.records.takes_part`).

    case, arm                    names; of the copy ``copy`` and an empty arm
    kernel                       what ran, in its own words
    bytes                        that one launch must move; of capacity, those that its tokens take
    launches                     that one sample took: at least one a buffer, unless that would take too long
    refused                      why nothing ran, or an empty string
    relative_error               of the output, in the norm, to the float32 oracle on the same stored bytes; or null
    relative_error_unquantised   the same to the oracle on what was there before it was stored; or null
    tokens                       of capacity alone: how many fit into the budget

``timings/NNNN.safetensors`` holds the samples: F64 ``[repeats]``, microseconds a launch, under ``<case>|<arm>``, each once
in a run; ``copy|`` may stand in every file, since the copy is timed between cases.

Figures of ``<kind>/<arm>/<rest of the case's name>``, and of ``step/<model>/<arm>/<rest>``:

    median_us, spread_us    median and interquartile range of the samples
    share_of_copy           bytes over median, as a share of the copy bandwidth: the copy's bytes over the median of all its samples
    ratio_to_best_native    median over the least median of the case among arms that store 16 bit twice, native and fused; absent
                            where no native one was timed in that case
    tokens, bytes, ratio    of capacity; the ratio is that of tokens to the fused 16-bit arm's

A run is void, and all its decisions invalid, where no native contender was timed in the decode of 32 sequences of 8,192
tokens without window and cap, or the best stays under 95 % of the copy bandwidth there: then the contenders were not at their
best, and a ratio to them says nothing. An arm whose error to the oracle is above 1 % computes something else, and one that was
not compared may: it is no contender, and is not judged. Steps have no oracle; their runner checks that what comes out is finite.
A contender that failed, or did not do what was asked, makes the decisions invalid; one that was refused is named in the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ledger import measures, validity
from ledger.errors import InputError
from ledger.measures import Floats, Unit
from ledger.records import FIGURES, Arm, Case, Contrast, Decision, Harness, Kernel, Measurement, Result, Spec, Status, takes_part

CASES = "cases.jsonl"
COPY = "copy"
LEAST_SHARE = 0.95
"""Of the copy bandwidth, that the best native decode at 32 × 8,192 must reach."""
MAX_ERROR = 0.01
"""Largest relative error to the oracle on the same stored bytes of what still computes the same."""

_FILE = re.compile(r"timings/(\d{4})\.safetensors\Z")
_WIDE = ("bf16", "fp16")
_UNCOMPARED = ("step", "capacity")
"""Kinds of cases whose results have no oracle."""
_CLOCK_US = (1e-6, 1e12)
"""Microseconds that a clock can give."""
_KEYS = {"case", "arm", "kernel", "bytes", "launches", "refused", "relative_error", "relative_error_unquantised"}
_AS_LEFT = "record the folder as the runner left it."


@dataclass(frozen=True)
class Line:
    """What ``cases.jsonl`` says of one case and arm."""

    kernel: str
    bytes: int
    refused: str
    relative_error: float | None
    relative_error_unquantised: float | None
    tokens: int | None


@dataclass(frozen=True)
class Timings:
    """Lines and samples by case and arm. Samples ``float64 [repeats]``, microseconds a launch; of the copy, all of the run."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    samples: dict[tuple[str, str], Floats] = field(default_factory=dict)


# ---------------------------------------------------------------- names


def slug(model: str) -> str:
    """A model's name as part of a measurement's: letters, digits, dots, hyphens and underscores, 40 at most."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", model)[:40].strip("-") or "model"


def group(model: str, case: str, arm: str) -> str:
    """What the figures of a case and arm are called, before the figure: ``decode/k16v8/b32/c8192/d128``."""
    kind, _, rest = case.partition("/")
    if kind == COPY:
        return COPY
    return f"step/{slug(model)}/{arm}/{rest}" if kind == "step" else f"{kind}/{arm}/{rest}"


def is_yardstick(case: Case) -> bool:
    """Whether the case is one by which a run is known to be valid."""
    plain = case.shortest is None and case.window is None and case.soft_cap is None
    return case.kind == "decode" and case.batch == 32 and case.context == 8192 and plain


# ---------------------------------------------------------------- reading


def read(spec: Spec, evidence: Mapping[str, bytes]) -> Timings:
    """Parse cases and timings among ``evidence`` (name to bytes) strictly. Raises InputError naming file and line or tensor.

    Either may be missing: a run that was cut short.
    """
    found = Timings()
    if CASES in evidence:
        for number, value in measures.json_lines(CASES, evidence[CASES]):
            _read_line(spec, f"Line {number} of {CASES}", value, found)
    copies: list[Floats] = []
    for name in sorted(name for name in evidence if name.startswith("timings/")):
        if _FILE.match(name) is None:
            raise InputError(f"{name} is no file of timings.", expected="timings/NNNN.safetensors", next=_AS_LEFT)
        for tensor, content in measures.tensors(name, evidence[name]).items():
            case, bar, arm = tensor.partition("|")
            key = (case, arm)
            if not bar or not _known(spec, case, arm):
                raise InputError(f"{name} holds a tensor that the spec does not ask for.", found=repr(tensor[:200]), next=_AS_LEFT)
            shape = list(content["shape"])
            if content["dtype"] != "F64" or len(shape) != 1 or (case != COPY and shape != [_repeats(spec)]):
                raise InputError(
                    f"{name}: the tensor {tensor!r} has another type or shape.",
                    expected=f"F64 [{_repeats(spec)}]",
                    found=f"{content['dtype']} {shape}",
                    next=_AS_LEFT,
                )
            values = np.frombuffer(bytes(content["data"]), np.dtype("<f8")).astype(np.float64)
            if case == COPY:
                copies.append(values)
            elif key in found.samples:
                raise InputError(f"{name} times {tensor!r} again.", next=_AS_LEFT)
            else:
                found.samples[key] = values
    if copies:
        found.samples[COPY, ""] = np.concatenate(copies)
    return found


def _repeats(spec: Spec) -> int:
    return spec.performance.repeats if spec.performance else 0


def _cases(spec: Spec) -> tuple[Case, ...]:
    return spec.performance.cases if spec.performance else ()


def _known(spec: Spec, case: str, arm: str) -> bool:
    if case == COPY:
        return arm == ""
    return any(each.name == case and other.name == arm and takes_part(other, each) for each in _cases(spec) for other in spec.arms)


def _read_line(spec: Spec, where: str, value: Any, into: Timings) -> None:
    if not isinstance(value, dict) or not _KEYS <= set(value) <= _KEYS | {"tokens"}:
        raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_KEYS)), found=repr(value)[:200], next=_AS_LEFT)
    case, arm = value["case"], value["arm"]
    if not isinstance(case, str) or not isinstance(arm, str) or not _known(spec, case, arm):
        raise InputError(
            f"{where} names no case of the spec, or no arm that takes part in it.", found=f"case {case!r}, arm {arm!r}"[:300], next=_AS_LEFT
        )
    if (case, arm) in into.lines:
        raise InputError(f"{where} repeats case {case!r}, arm {arm!r}.", next=_AS_LEFT)
    counts = [value["bytes"], value["launches"], value.get("tokens", 0)]
    errors = [value["relative_error"], value["relative_error_unquantised"]]
    if (
        not all(map(measures.is_count, counts))
        or any(not isinstance(text, str) for text in (value["kernel"], value["refused"]))
        or any(error is not None and (not measures.is_number(error) or error < 0) for error in errors)
    ):
        raise InputError(
            f"{where} holds a value that cannot be.",
            expected="bytes, launches and tokens whole numbers from 0, errors numbers from 0 or null, kernel and refused texts",
            found=repr(value)[:200],
            next=_AS_LEFT,
        )
    into.lines[case, arm] = Line(
        kernel=value["kernel"],
        bytes=value["bytes"],
        refused=value["refused"],
        relative_error=None if errors[0] is None else float(errors[0]),
        relative_error_unquantised=None if errors[1] is None else float(errors[1]),
        tokens=value.get("tokens"),
    )


# ---------------------------------------------------------------- figures


def median(values: Floats) -> float:
    """The middle sample, or the mean of the middle two."""
    return float(np.median(values))


def spread(values: Floats) -> float:
    """The interquartile range, quartiles by numpy's linear method."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)


def _sound(values: Floats) -> bool:
    least, most = _CLOCK_US
    return bool(values.size and np.isfinite(values).all() and values.min() >= least and values.max() <= most)


def _timed(found: Timings, case: str, arm: str) -> Floats | None:
    """The samples of a case and arm, where they are of something that ran and that a clock can have measured."""
    line, values = found.lines.get((case, arm)), found.samples.get((case, arm))
    return values if line is not None and not line.refused and values is not None and _sound(values) else None


def _right(case: Case, line: Line) -> bool:
    """Whether what was timed is known to compute what it should; where there is no oracle, nothing says that it does not."""
    return case.kind in _UNCOMPARED if line.relative_error is None else line.relative_error <= MAX_ERROR


def copy_bandwidth(found: Timings) -> float | None:
    """Bytes a microsecond of the copy, or None where it was not timed, or moved nothing."""
    values = _timed(found, COPY, "")
    return found.lines[COPY, ""].bytes / median(values) or None if values is not None else None


def is_contender(arm: Arm) -> bool:
    """Whether an arm may be the best native: it stores 16 bit on both sides, in a kernel of others or in ours."""
    return arm.implementation in ("native", "fused") and arm.keys in _WIDE and arm.values in _WIDE


def best_native(spec: Spec, found: Timings, case: Case) -> tuple[str, float] | None:
    """The contender of least median in a case, and that median in microseconds; None where no native one was timed."""
    times = {
        arm.name: median(values)
        for arm in spec.arms
        if is_contender(arm)
        and (values := _timed(found, case.name, arm.name)) is not None
        and _right(case, found.lines[case.name, arm.name])
    }
    if not any(spec.arm(name).implementation == "native" for name in times):
        return None
    return min(times.items(), key=lambda item: (item[1], item[0]))


def measure(spec: Spec, found: Timings) -> tuple[Measurement, ...]:
    """Every figure, case by case and arm by arm in the order of the spec; the copy's first, under the first control."""
    bandwidth = copy_bandwidth(found)
    figures: list[Measurement] = []

    def add(arm: str, case: str, name: str, value: float | int | None) -> None:
        if value is not None:
            unit: Unit = FIGURES[name]  # type: ignore[assignment]
            label = f"{group(spec.checkpoint.name, case, arm)}/{name}"
            figures.append(Measurement(arm=arm, name=label, value=value, unit=unit))

    control = next(arm.name for arm in spec.arms if arm.role == "control")
    copied = _timed(found, COPY, "")
    if copied is not None:
        add(control, COPY, "median_us", median(copied))
        add(control, COPY, "spread_us", spread(copied))
        add(control, COPY, "bytes", found.lines[COPY, ""].bytes)
    for case in _cases(spec):
        best = best_native(spec, found, case)
        for arm in spec.arms:
            line = found.lines.get((case.name, arm.name))
            if line is None or line.refused:
                continue
            if case.kind == "capacity":
                add(arm.name, case.name, "tokens", line.tokens)
                add(arm.name, case.name, "bytes", line.bytes)
                base = _capacity_base(spec, found, case.name)
                add(arm.name, case.name, "ratio", line.tokens / base if line.tokens is not None and base else None)
                continue
            values = _timed(found, case.name, arm.name)
            if values is None:
                continue
            middle = median(values)
            add(arm.name, case.name, "median_us", middle)
            add(arm.name, case.name, "spread_us", spread(values))
            add(arm.name, case.name, "share_of_copy", line.bytes / middle / bandwidth if bandwidth else None)
            add(arm.name, case.name, "ratio_to_best_native", middle / best[1] if best else None)
            add(arm.name, case.name, "bytes", line.bytes)
            add(arm.name, case.name, "relative_error", line.relative_error)
            add(arm.name, case.name, "relative_error_unquantised", line.relative_error_unquantised)
    return tuple(figures)


def _capacity_base(spec: Spec, found: Timings, case: str) -> int | None:
    """Tokens of the fused 16-bit arm in a capacity case."""
    lines = [found.lines.get((case, arm.name)) for arm in spec.arms if is_contender(arm)]
    return next((line.tokens for line in lines if line is not None and not line.refused and line.tokens), None)


def kernels(spec: Spec, found: Timings) -> tuple[Kernel, ...]:
    """What ran or was refused, the copy first, then case by case in the order of the spec."""
    pairs = [(COPY, ""), *((case.name, arm.name) for case in _cases(spec) for arm in spec.arms)]
    return tuple(
        Kernel(case=case, arm=arm, kernel=line.kernel[:8000], refused=line.refused[:8000])
        for case, arm in pairs
        if (line := found.lines.get((case, arm))) is not None
    )


# ---------------------------------------------------------------- decisions


def void(spec: Spec, found: Timings) -> str:
    """Why the figures of a run say nothing, or an empty string."""
    bandwidth = copy_bandwidth(found)
    if bandwidth is None:
        return "missing evidence: the copy was not timed"
    yardsticks = [case for case in _cases(spec) if is_yardstick(case)]
    if not yardsticks:
        return "void: no case tells whether the native contenders were at their best"
    for case in yardsticks:
        best = best_native(spec, found, case)
        if best is None:
            return f"void: no native contender was timed in {case.name}"
        arm, middle = best
        share = found.lines[case.name, arm].bytes / middle / bandwidth
        if not share >= LEAST_SHARE:
            reached = f"{100 * share:.1f} % of the copy bandwidth, under {100 * LEAST_SHARE:g} %"
            return f"void: the best native {case.name} ({arm}) reaches {reached}"
    return ""


def _flaws(spec: Spec, result: Result, found: Timings, candidate: str) -> Iterator[str]:
    """What is missing or cannot be, of the candidate and of the contenders that it is compared with."""
    for arm in spec.arms:
        if arm.name == candidate or is_contender(arm):
            yield from _flaws_of(spec, result, found, arm)
    for case in _cases(spec):
        line = found.lines.get((case.name, candidate))
        if line is None or line.refused:
            continue
        if line.relative_error is None and case.kind not in _UNCOMPARED:
            yield f"missing evidence: {case.name} of {candidate} was not compared with the oracle"
        elif not _right(case, line):
            yield f"{case.name} of {candidate} is another result: {line.relative_error:.2g} from the oracle, above {MAX_ERROR:g}"


def _flaws_of(spec: Spec, result: Result, found: Timings, arm: Arm) -> Iterator[str]:
    """The same of one arm: whether it did what was asked, and a line and samples for each of its cases. Of one refused whole, neither."""
    said = next((each for each in result.arms if each.name == arm.name), None)
    if said is None:
        yield f"missing evidence: the result says nothing of arm {arm.name}"
    elif said.outcome == "failed":
        yield f"arm {arm.name} failed: {said.reason}"
    elif said.outcome == "completed" and (wrong := validity.contradictions(arm, said, whole=False)):
        yield f"arm {arm.name} did not do what was asked: " + "; ".join(wrong)
    whole = said is not None and said.outcome == "refused"
    for case in (case for case in _cases(spec) if takes_part(arm, case)):
        line, values = found.lines.get((case.name, arm.name)), found.samples.get((case.name, arm.name))
        if (whole or (line is not None and line.refused)) and values is not None:
            yield f"{case.name} of {arm.name} is said to be refused, and was timed"
        elif whole or (line is not None and line.refused):
            continue
        elif line is None:
            yield f"missing evidence: {CASES} says nothing of {case.name} for {arm.name}"
        elif case.kind == "capacity":
            if line.tokens is None:
                yield f"missing evidence: {CASES} does not say how many tokens fit for {arm.name}"
        elif values is None:
            yield f"missing evidence: {case.name} was not timed for {arm.name}"
        elif not _sound(values):
            yield f"{case.name} of {arm.name} holds a time that no clock gives"


def _why_not(found: Timings, case: Case, arm: str) -> str:
    """Why a case has no time of an arm that counts, in two words at most; or an empty string."""
    line = found.lines.get((case.name, arm))
    if line is not None and line.refused:
        return "refused"
    if line is None or _timed(found, case.name, arm) is None:
        return "not timed"
    return "" if _right(case, line) else "another result"


def _left_out(spec: Spec, found: Timings, candidate: str) -> str:
    """The contenders other than the candidate that did not count, and why in how many of their cases; or an empty string."""
    parts = []
    for arm in spec.arms:
        cases = [case for case in _cases(spec) if takes_part(arm, case) and case.kind != "capacity"]
        if arm.name == candidate or not is_contender(arm) or not cases:
            continue
        why = [_why_not(found, case, arm.name) for case in cases]
        counts = [f"{words} in {why.count(words)} of {len(cases)}" for words in dict.fromkeys(why) if words]
        if counts:
            parts.append(f"{arm.name} ({', '.join(counts)} cases)")
    return f"contenders left out: {', '.join(parts)}" if parts else ""


def decide(spec: Spec, result: Result, found: Timings, harness: Harness) -> tuple[Decision, ...]:
    """``measured``, ``unsupported`` or ``invalid`` for each fused arm, with what the yardstick shows."""
    return tuple(_decision(spec, result, found, harness, question) for question in spec.questions())


def _decision(spec: Spec, result: Result, found: Timings, harness: Harness, question: Contrast) -> Decision:
    status: Status
    refused = validity.refusal(spec, result, harness, [question.candidate])
    if refused is None:
        flaws = list(_flaws(spec, result, found, question.candidate))
        reason = void(spec, found)
        if reason:
            reason = "; ".join(part for part in (reason, _left_out(spec, found, question.candidate)) if part)
        else:
            reason = "; ".join([*flaws[:5], *([f"and {len(flaws) - 5} more"] if len(flaws) > 5 else [])])
        status, reason = ("invalid", reason) if reason else _said(spec, found, question.candidate)
    else:
        status, reason = refused
    return Decision(candidate=question.candidate, baseline=question.baseline, family=question.family, status=status, reason=reason[:8000])


def _said(spec: Spec, found: Timings, candidate: str) -> tuple[Status, str]:
    ran = [case for case in _cases(spec) if not found.lines[case.name, candidate].refused]
    if not ran:
        return "unsupported", f"every case was refused: {found.lines[_cases(spec)[0].name, candidate].refused}"
    parts = []
    bandwidth = copy_bandwidth(found)
    for case in ran:
        values, best = _timed(found, case.name, candidate), best_native(spec, found, case)
        if is_yardstick(case) and values is not None and best is not None and bandwidth:
            middle, line = median(values), found.lines[case.name, candidate]
            parts.append(
                f"{case.name}: {middle:.4g} µs, {middle / best[1]:.3f} of the best native ({best[0]}), "
                f"{100 * line.bytes / middle / bandwidth:.1f} % of the copy bandwidth"
            )
    left = len(_cases(spec)) - len(ran)
    parts.append(f"{len(ran)} cases" + (f", {left} refused" if left else ""))
    return "measured", "; ".join(part for part in (*parts, _left_out(spec, found, candidate)) if part)
