"""What was captured behind the documents -> capability: passes or fails; and calibration: measured.

``captures.jsonl`` has one line of canonical JSON an arm and document, in the order in which they ran:

    arm, document     which; documents count from 0
    prompt_tokens     tokens of the document, BOS included
    vocabulary        how many logits a step has
    ids               the id that was chosen at each step, greedily from the processed scores
    nan, infinite     how many raw logits of each step are NaN, or infinite
    broken            how many processed scores of each step are NaN or +inf
    masked            how many processed scores of each step are -inf
    masked_ids        ``[{"from": step, "count": n, "ids": […]}, …]``: which ids those are, ascending, from that step on; the first
                      :data:`LISTED` where there are more

No infinity is recorded. The bars are the archive's: no raw logit may be NaN or infinite, no score NaN or +inf, and the ids of
-inf are exactly those that the frozen spec names (:class:`ledger.records.Capture`), at every step. A line has as many steps as were
taken; an arm that was stopped has what it took until then. A step of which something is wrong fails its arm, and says so whatever else
is missing, unless the run or the arm itself came to no end. What is missing makes an arm invalid.

``calibration.safetensors`` holds the sizes of the states that reached the cache, float32 ``[kv_heads]``, for both sides of each
attending layer:

    keys.amax/<layer>     largest absolute value; likewise values.amax/<layer>
    keys.p999/<layer>     the smallest that at least 99.9 % of all absolute values lie at or below (numpy's "higher")
    keys.p9999/<layer>    the same of 99.99 %

Of these follow, all measured:

    captures, steps                                 documents that were continued to their end; steps in all
    cache_bytes                                     bytes of the measured allocations after the last document
    keys_amax, values_amax                          largest absolute value over layers and heads
    keys_saturating_heads, values_saturating_heads  heads whose largest exceeds 448, so that a scale of 1 clips it
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ledger import measures, validity
from ledger.errors import InputError
from ledger.records import Contrast, Decision, GateOutcome, Harness, Measurement, Result, Retract, Run, Spec, Status, Supersede

FILE = "captures.jsonl"
CALIBRATION = "calibration.safetensors"
LARGEST = 448.0
"""Largest finite number of fp8_e4m3."""
LISTED = 1000
"""Most masked ids that a line lists."""
SIDES = ("keys", "values")
SIZES = ("amax", "p999", "p9999")

CHECKS = {
    "finite_logits": "every raw logit of every step is a finite number",
    "suppressed_exactly": "the scores of -inf are those of the declared suppressed ids, at every step",
    "finite_scores": "every other processed score is a finite number",
    "suppressed_never_chosen": "no document is continued by a suppressed id",
    "cache_budget": "the cache's allocations stay within its budget",
}
"""Every check of a capability and what it says."""

_COUNTS = ("nan", "infinite", "broken", "masked")
_KEYS = {"arm", "document", "prompt_tokens", "vocabulary", "ids", "masked_ids", *_COUNTS}
_AS_LEFT = "record the folder as the runner left it."


@dataclass(frozen=True)
class Capture:
    """One line of ``captures.jsonl``. ``masked_ids`` maps the first step of a set to its size and the ids listed."""

    prompt_tokens: int
    vocabulary: int
    ids: tuple[int, ...]
    nan: tuple[int, ...]
    infinite: tuple[int, ...]
    broken: tuple[int, ...]
    masked: tuple[int, ...]
    masked_ids: dict[int, tuple[int, tuple[int, ...]]]

    def masks(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """For each step: how many scores are -inf by its set, and which ids are listed."""
        count, ids = 0, tuple[int, ...]()
        for step in range(len(self.ids)):
            count, ids = self.masked_ids.get(step, (count, ids))
            yield step, count, ids


@dataclass(frozen=True)
class Captures:
    """Lines by arm and document, and the sizes of states by tensor name, float64 ``[kv_heads]``."""

    lines: dict[tuple[str, int], Capture] = field(default_factory=dict)
    sizes: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def of(self, arm: str) -> dict[int, Capture]:
        """An arm's lines by document."""
        return {document: line for (name, document), line in self.lines.items() if name == arm}


# ---------------------------------------------------------------- reading


def read(spec: Spec, evidence: Mapping[str, bytes]) -> Captures:
    """Parse the evidence strictly; files may be missing. Raises InputError naming file and line."""
    found = Captures()
    if FILE in evidence:
        for number, value in measures.json_lines(FILE, evidence[FILE]):
            _read_line(spec, f"Line {number} of {FILE}", value, found)
    if spec.scope == "calibration" and CALIBRATION in evidence:
        found.sizes.update(read_sizes(CALIBRATION, evidence[CALIBRATION]))
    return found


def _read_line(spec: Spec, where: str, value: Any, into: Captures) -> None:
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_KEYS)), found=repr(value)[:200], next=_AS_LEFT)
    arm, document = value["arm"], value["document"]
    known = isinstance(arm, str) and any(arm == each.name for each in spec.arms)
    if not known or not measures.is_count(document) or document >= len(spec.documents):
        raise InputError(
            f"{where} names no arm or no document of the spec.", found=f"arm {arm!r}, document {document!r}"[:300], next=_AS_LEFT
        )
    if (arm, document) in into.lines:
        raise InputError(f"{where} repeats arm {arm}, document {document}.", next=_AS_LEFT)
    series = {name: value[name] for name in ("ids", *_COUNTS)}
    steps = len(value["ids"]) if isinstance(value["ids"], list) else -1
    if not all(isinstance(each, list) and len(each) == steps and all(map(measures.is_count, each)) for each in series.values()):
        raise InputError(
            f"{where} has series that are not of its steps.", expected=f"{steps} counts each", found=repr(series)[:200], next=_AS_LEFT
        )
    vocabulary = value["vocabulary"]
    if not measures.is_count(value["prompt_tokens"]) or not measures.is_count(vocabulary) or any(not i < vocabulary for i in value["ids"]):
        raise InputError(
            f"{where} holds a value that cannot be.", expected="ids below the vocabulary", found=str(vocabulary)[:100], next=_AS_LEFT
        )
    into.lines[arm, document] = Capture(
        prompt_tokens=value["prompt_tokens"],
        vocabulary=vocabulary,
        masked_ids=_masks(where, value["masked_ids"], steps, vocabulary),
        **{name: tuple(each) for name, each in series.items()},
    )


def _masks(where: str, value: Any, steps: int, vocabulary: int) -> dict[int, tuple[int, tuple[int, ...]]]:
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    sets: list[Any] = value if isinstance(value, list) else [None]
    for each in sets:
        if not _is_mask(each, steps, vocabulary) or each["from"] <= max(found, default=-1):
            raise InputError(
                f"{where} has masked ids that cannot be.",
                expected="for each set its first step, its size and its ids, ascending",
                found=repr(each)[:200],
                next=_AS_LEFT,
            )
        found[each["from"]] = (each["count"], tuple(each["ids"]))
    if steps > 0 and 0 not in found:
        raise InputError(f"{where} does not say which ids are masked at its first step.", next=_AS_LEFT)
    return found


def _is_mask(each: Any, steps: int, vocabulary: int) -> bool:
    if not isinstance(each, dict) or set(each) != {"from", "count", "ids"} or not isinstance(each["ids"], list):
        return False
    ids = each["ids"]
    if not all(map(measures.is_count, (each["from"], each["count"], *ids))) or each["from"] >= steps or each["count"] > vocabulary:
        return False
    return ids == sorted(set(ids)) and len(ids) == min(each["count"], LISTED) and all(name < vocabulary for name in ids)


def read_sizes(name: str, data: bytes) -> dict[str, npt.NDArray[np.float64]]:
    """The tensors of a calibration. Raises InputError where one is not float32 ``[kv_heads]`` under a known name, or a layer lacks some."""
    found: dict[str, npt.NDArray[np.float64]] = {}
    kinds = [f"{side}.{size}" for side in SIDES for size in SIZES]
    for title, tensor in measures.tensors(name, data).items():
        kind, _, layer = title.partition("/")
        known = kind in kinds and layer.isdecimal() and str(int(layer)) == layer
        if not known or tensor["dtype"] != "F32" or len(tensor["shape"]) != 1 or not tensor["shape"][0]:
            raise InputError(
                f"{name} holds a tensor that is no size of states.",
                expected="keys.amax/<layer> and the like, F32 [kv_heads]",
                found=f"{title}: {tensor['dtype']} {tensor['shape']}"[:300],
                next=_AS_LEFT,
            )
        found[title] = np.frombuffer(tensor["data"], np.dtype("<f4")).astype(np.float64)
    layers = {title.partition("/")[2] for title in found}
    missing = [f"{kind}/{layer}" for layer in layers for kind in kinds if f"{kind}/{layer}" not in found]
    if missing or any(len({found[f"{kind}/{layer}"].size for kind in kinds}) > 1 for layer in layers):
        raise InputError(f"{name} is not whole.", found=", ".join(sorted(missing))[:300] or "sides of unequal heads", next=_AS_LEFT)
    return dict(sorted(found.items(), key=lambda item: (item[0].partition("/")[0], int(item[0].partition("/")[2]))))


def unusable(spec: Spec, run: Run, withdrawn: Sequence[Retract | Supersede]) -> tuple[str, str]:
    """Why no scales may come of a recorded run, what else it is and what says so; two empty strings where they may.

    ``withdrawn`` are the corrections of the run so far. What its file says, :func:`size_flaw` looks at.
    """
    decisions = [decision for decision in run.decisions if decision.family == "calibration"]
    if spec.scope != "calibration" or not decisions:
        return "a run that is no calibration", f"of scope {spec.scope}"
    for record in withdrawn:
        words = "retracted" if isinstance(record, Retract) else f"superseded by {record.by[:12]}"
        return f"a run that is {words}", record.reason
    bad = next((decision for decision in decisions if decision.status != "measured"), None)
    if run.outcome != "completed" or bad is not None or sizes_of(run) is None:
        return "a calibration that measured nothing usable", f"{bad.status}: {bad.reason}" if bad else f"the run {run.outcome}"
    return "", ""


def sizes_of(run: Run) -> str | None:
    """The digest of a run's :data:`CALIBRATION`; None where it has none."""
    return next((item.sha256 for item in run.evidence if item.name == CALIBRATION), None)


def size_flaw(sizes: Mapping[str, npt.NDArray[np.float64]], *, zero: bool = True) -> str:
    """The first size that cannot be, in words, or an empty string. ``zero``: whether a largest value of zero may stand."""
    for title, values in sizes.items():
        for head, value in enumerate(values.tolist()):
            wrong = not math.isfinite(value) or value < 0 or (value == 0 and not zero and ".amax/" in title)
            if wrong:
                return f"{title} of head {head} is {value:g}"
    for title in sizes:
        side, _, rest = title.partition(".")
        if rest.startswith("amax/"):
            layer = rest.partition("/")[2]
            amax, p9999, p999 = (sizes[f"{side}.{size}/{layer}"] for size in ("amax", "p9999", "p999"))
            if (p9999 > amax).any() or (p999 > p9999).any():
                return f"{title} is below a quantile of the same values"
    return ""


# ---------------------------------------------------------------- what is wrong, step by step


def _first(found: Mapping[int, Capture], wrong: str, words: str) -> tuple[int, str]:
    """How many steps have a count of ``wrong`` other than zero, and the first of them in words."""
    steps = [(document, step, count) for document, line in found.items() for step, count in enumerate(getattr(line, wrong)) if count]
    return len(steps), f"document {steps[0][0]}, step {steps[0][1]}: {steps[0][2]} {words}" if steps else ""


def _unlike(found: Mapping[int, Capture], suppressed: tuple[int, ...]) -> tuple[int, str]:
    """How many steps mask other ids than ``suppressed``, and the first of them in words."""
    total, said = 0, ""
    for document, line in found.items():
        for step, count, ids in line.masks():
            if (count, ids) == (len(suppressed), suppressed[:LISTED]) and line.masked[step] == count:
                continue
            total += 1
            if not said:
                extra, missing = sorted(set(ids) - set(suppressed)), sorted(set(suppressed) - set(ids)) if count <= LISTED else []
                said = f"document {document}, step {step}: {line.masked[step]} of -inf, {len(suppressed)} declared"
                said += f"; not declared {extra[:5]}" if extra else ""
                said += f"; not masked {missing[:5]}" if missing else ""
    return total, said


def _chosen(found: Mapping[int, Capture], suppressed: tuple[int, ...]) -> tuple[int, str]:
    """How many documents hold a suppressed token, and the first of them in words."""
    wrong = [(document, sorted(set(line.ids) & set(suppressed))) for document, line in found.items() if set(line.ids) & set(suppressed)]
    return len(wrong), f"document {wrong[0][0]} holds the suppressed id {wrong[0][1][0]}" if wrong else ""


def _lacking(spec: Spec, found: Mapping[int, Capture]) -> list[str]:
    """What is not there of an arm's captures, document by document."""
    assert spec.capture is not None
    lacking = []
    for document, span in enumerate(spec.documents):
        line, prompt = found.get(document), span.tokens + int(spec.text.bos)
        if line is None:
            lacking.append(f"no capture of document {document}")
        elif len(line.ids) != spec.capture.new_tokens or line.prompt_tokens != prompt:
            asked = f"{spec.capture.new_tokens} behind {prompt}"
            lacking.append(f"document {document} has {len(line.ids)} tokens behind {line.prompt_tokens}, the spec asks {asked}")
    return lacking


def _held(result: Result, arm: str) -> int:
    """Bytes of an arm's measured allocations, each address once."""
    found = next((each for each in result.arms if each.name == arm), None)
    return sum({backing.address: backing.bytes for backing in found.backings}.values()) if found else 0


def outcomes(spec: Spec, result: Result, found: Captures, arm: str) -> tuple[GateOutcome, ...]:
    """One outcome a check of an arm that has a line."""
    assert spec.capture is not None
    lines, suppressed = found.of(arm), spec.capture.suppressed
    if not lines:
        return ()
    steps = sum(len(line.ids) for line in lines.values())
    logits = sum(len(line.ids) * line.vocabulary for line in lines.values())
    nans, infinities = _first(lines, "nan", "logits are NaN"), _first(lines, "infinite", "logits are infinite")
    said = "; ".join(words for words in (nans[1], infinities[1]) if words)
    held, budget = _held(result, arm), spec.capture.budget_bytes
    over = f"{held:,} of {budget:,} bytes"
    wrong = {
        "finite_logits": (nans[0] + infinities[0], said, f"{logits:,} logits of {steps:,} steps"),
        "suppressed_exactly": (*_unlike(lines, suppressed), f"{len(suppressed)} ids at each of {steps:,} steps"),
        "finite_scores": (*_first(lines, "broken", "scores are NaN or +inf"), f"{steps:,} steps"),
        "suppressed_never_chosen": (*_chosen(lines, suppressed), f"{len(lines)} documents of {spec.capture.new_tokens} new tokens"),
        "cache_budget": (int(held > budget), over if held > budget else "", over),
    }
    return tuple(
        GateOutcome(
            statistic=name,
            estimate=float(count),
            lower=float(count),
            upper=float(count),
            bound=0.0,
            harm=0.0,
            met=not count,
            harmed=bool(count),
            method=words if count else checked,
        )
        for name, (count, words, checked) in wrong.items()
    )


# ---------------------------------------------------------------- measurements


def measure(spec: Spec, result: Result, found: Captures) -> tuple[Measurement, ...]:
    """Figures of every arm that has a line, in the order of the spec."""
    assert spec.capture is not None
    figures = []
    for arm in spec.arms:
        lines = found.of(arm.name)
        if not lines:
            continue
        whole = sum(len(line.ids) == spec.capture.new_tokens for line in lines.values())
        figures += [
            Measurement(arm=arm.name, name="captures", value=whole, unit="count"),
            Measurement(arm=arm.name, name="steps", value=sum(len(line.ids) for line in lines.values()), unit="count"),
        ]
        if _held(result, arm.name):
            figures.append(Measurement(arm=arm.name, name="cache_bytes", value=_held(result, arm.name), unit="bytes"))
        if spec.scope == "calibration":
            figures += _sizes(arm.name, found)
    return tuple(figures)


def _sizes(arm: str, found: Captures) -> list[Measurement]:
    figures = []
    for side in SIDES:
        maxima = [values for title, values in found.sizes.items() if title.startswith(f"{side}.amax/")]
        if maxima:
            every = np.concatenate(maxima)
            over = int((every > LARGEST).sum())
            figures += [
                Measurement(arm=arm, name=f"{side}_amax", value=float(every.max()), unit="states"),
                Measurement(arm=arm, name=f"{side}_saturating_heads", value=over, unit="count"),
            ]
    return figures


# ---------------------------------------------------------------- decisions


def decide(spec: Spec, result: Result, found: Captures, harness: Harness) -> tuple[Decision, ...]:
    """``passes``, ``fails``, ``unsupported`` or ``invalid`` for each arm; of a calibration ``measured`` in place of the first two."""
    return tuple(_decision(spec, result, found, harness, question) for question in spec.questions())


def _decision(spec: Spec, result: Result, found: Captures, harness: Harness, question: Contrast) -> Decision:
    arm = question.candidate
    checks = outcomes(spec, result, found, arm)
    refused = validity.refusal(spec, result, harness, [arm])
    missing = _lacking(spec, found.of(arm))
    failed = [f"{outcome.statistic}: {outcome.method}" for outcome in checks if outcome.harmed]
    impossible = _impossible(found.of(arm), spec)
    status: Status
    if refused is not None:
        status, reason = refused
    elif impossible:
        status, reason = "invalid", impossible
    elif failed:  # a step that failed says so whatever else is missing
        status, reason = "fails", "; ".join(failed)
        if spec.scope == "calibration":
            status, reason = "invalid", f"the captures fail: {reason}"
    elif missing:
        status, reason = "invalid", f"missing evidence: {'; '.join(missing[:5])}"
    elif spec.scope == "calibration":
        status, reason = _calibrated(result, found, arm)
    else:
        status, reason = (
            "passes",
            f"{len(spec.documents)} captures: loading, execution and capture work under these settings, and nothing more is said",
        )
    return Decision(candidate=arm, baseline=question.baseline, family=question.family, status=status, reason=reason[:8000], gates=checks)


def _impossible(lines: Mapping[int, Capture], spec: Spec) -> str:
    """Why the spec's suppressed ids cannot be judged, or an empty string."""
    assert spec.capture is not None
    vocabulary = min((line.vocabulary for line in lines.values()), default=None)
    beyond = [name for name in spec.capture.suppressed if vocabulary is not None and name >= vocabulary]
    return f"the suppressed id {beyond[0]} lies outside the vocabulary of {vocabulary}" if beyond else ""


def _calibrated(result: Result, found: Captures, arm: str) -> tuple[Status, str]:
    geometry = next((each.geometry for each in result.arms if each.name == arm), None)
    wanted = (
        {layer.layer: layer.kv_heads for layer in geometry.measured if layer.kind != "recurrent" and layer.kv_heads} if geometry else {}
    )
    held = {int(title.partition("/")[2]): values.size for title, values in found.sizes.items()}
    if held != wanted or not held:
        return "invalid", f"missing evidence: {CALIBRATION} has layers and heads {_brief(held)}, the cache {_brief(wanted)}"
    flaw = size_flaw(found.sizes)
    if flaw:
        return "invalid", f"{CALIBRATION}: {flaw}"
    return "measured", f"{len(held)} layer{'s' if len(held) > 1 else ''}, keys and values of every head"


def _brief(heads: Mapping[int, int]) -> str:
    return f"{len(heads)} × {sorted(set(heads.values()))}" if heads else "none"


def suspicions(spec: Spec, found: Captures) -> Sequence[str]:
    """What a reader should know beside a decision that stands: sizes of zero, which no scale can be made of."""
    zero = size_flaw(found.sizes, zero=False) if spec.scope == "calibration" and not size_flaw(found.sizes) else ""
    return (f"{zero}: no scale can be made of it.",) if zero else ()
