"""What a cache takes at each context -> state memory, measured.

``memory.jsonl`` has one line of canonical JSON an arm and context, in the order in which they were filled:

    arm, context  which; the context is tokens of one sequence
    refused       why the context does not fit (its code and words), or an empty string; then nothing below was measured
    backings      every allocation: ``kind``, ``holds``, ``dtype``, ``bytes``, ``layers``
    counted       bytes by a second way, beside the backings
    method        what that way is: ``allocator`` (what the device's allocator was asked for since before) or ``storages`` (every distinct
                  storage that is reachable from the cache; on a CPU, where torch's allocator counts nothing)

A context that does not fit into the budget or the model's positions is said not to: that is no failure. All others are measured:

    state_bytes/<kind>/c<context>   bytes of the backings of a kind: attention, sliding, recurrent, convolution, scales
    state_bytes/total/c<context>    bytes of all of them
    allocator_bytes/c<context>      what the second way counted
    ratio/c<context>                total over that of the control at the same context

Nothing follows from a formula, and nothing from one context for another. The two ways must agree, or the arm is invalid. Neither may
count less than the backings. Storages may have :data:`COUNTERS` more an allocation: stock sliding layers keep a length beside
their keys and values, which no backing shows. An allocator may have, of stock and reference caches, its rounding more
(:data:`ROUNDING` an allocation and :data:`SLACK` besides). A fused cache also has tables and scratch memory, which are counted and
no backing shows: of it, only too little is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ledger import measures, validity
from ledger.errors import InputError
from ledger.records import Contrast, Decision, Harness, Measurement, Result, Spec, Status

FILE = "memory.jsonl"
KINDS = ("attention", "sliding", "recurrent", "convolution", "scales")
METHODS = ("allocator", "storages")
ROUNDING = 512
"""Bytes that CUDA's caching allocator rounds an allocation up to."""
COUNTERS = 16
"""Bytes of lengths that a cache may keep beside an allocation."""
SLACK = 2 << 20
"""Bytes beyond that, of counters and lengths that a cache keeps and no backing shows."""

_KEYS = {"arm", "context", "refused", "backings", "counted", "method"}
_BACKING = {"kind", "holds", "dtype", "bytes", "layers"}
_AS_LEFT = "record the folder as the runner left it."


@dataclass(frozen=True)
class Held:
    """One line: bytes by kind, how many allocations, and what the second way counted."""

    refused: str
    kinds: dict[str, int] = field(default_factory=dict)
    allocations: int = 0
    counted: int = 0
    method: str = ""

    @property
    def total(self) -> int:
        """Bytes of all backings."""
        return sum(self.kinds.values())


Memories = dict[tuple[str, int], Held]
"""Lines by arm and context."""


def read(spec: Spec, evidence: Mapping[str, bytes]) -> Memories:
    """Parse ``memory.jsonl`` strictly; it may be missing. Raises InputError naming the line."""
    found: Memories = {}
    if FILE in evidence:
        for number, value in measures.json_lines(FILE, evidence[FILE]):
            _read_line(spec, f"Line {number} of {FILE}", value, found)
    return found


def _read_line(spec: Spec, where: str, value: Any, into: Memories) -> None:
    assert spec.memory is not None
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_KEYS)), found=repr(value)[:200], next=_AS_LEFT)
    arm, context, refused, backings = (value[name] for name in ("arm", "context", "refused", "backings"))
    known = isinstance(arm, str) and any(arm == each.name for each in spec.arms)
    if not known or type(context) is not int or context not in spec.memory.contexts or (arm, context) in into:
        raise InputError(
            f"{where} names no arm or no context of the spec, or stands twice.",
            found=f"arm {arm!r}, context {context!r}"[:300],
            next=_AS_LEFT,
        )
    good = isinstance(refused, str) and isinstance(backings, list) and measures.is_count(value["counted"]) and value["method"] in METHODS
    for each in backings if good else ():
        good = good and isinstance(each, dict) and set(each) == _BACKING and each["kind"] in KINDS and measures.is_count(each["bytes"])
        good = good and isinstance(each["layers"], list) and all(map(measures.is_count, each["layers"]))
        good = good and isinstance(each["dtype"], str) and isinstance(each["holds"], str)
    if not good or (refused and (backings or value["counted"])):
        raise InputError(
            f"{where} holds a value that cannot be.",
            expected="backings with kind, holds, dtype, bytes and layers, and what was counted; neither where it was refused",
            found=repr(value)[:200],
            next=_AS_LEFT,
        )
    kinds = {kind: sum(each["bytes"] for each in backings if each["kind"] == kind) for kind in KINDS}
    into[arm, context] = Held(
        refused=refused,
        kinds={kind: bytes for kind, bytes in kinds.items() if bytes},
        allocations=len(backings),
        counted=value["counted"],
        method=value["method"],
    )


def measure(spec: Spec, found: Memories) -> tuple[Measurement, ...]:
    """Figures of every arm and context that was measured, in the order of the spec."""
    assert spec.memory is not None
    figures = []
    control = next(arm.name for arm in spec.arms if arm.role == "control")
    for arm in spec.arms:
        for context in spec.memory.contexts:
            held = found.get((arm.name, context))
            if held is None or held.refused:
                continue
            named = {**{f"state_bytes/{kind}": bytes for kind, bytes in held.kinds.items()}, "state_bytes/total": held.total}
            named["allocator_bytes"] = held.counted
            figures += [Measurement(arm=arm.name, name=f"{name}/c{context}", value=bytes, unit="bytes") for name, bytes in named.items()]
            beside = found.get((control, context))
            if arm.name != control and beside is not None and beside.total:
                ratio = held.total / beside.total
                figures.append(Measurement(arm=arm.name, name=f"ratio/c{context}", value=ratio, unit="ratio", against=control))
    return tuple(figures)


def decide(spec: Spec, result: Result, found: Memories, harness: Harness) -> tuple[Decision, ...]:
    """``measured``, ``unsupported`` or ``invalid`` for each arm."""
    return tuple(_decision(spec, result, found, harness, question) for question in spec.questions())


def _decision(spec: Spec, result: Result, found: Memories, harness: Harness, question: Contrast) -> Decision:
    assert spec.memory is not None
    arm = question.candidate
    refused = validity.refusal(spec, result, harness, [arm])
    lines = {context: found[arm, context] for context in spec.memory.contexts if (arm, context) in found}
    missing = [str(context) for context in spec.memory.contexts if context not in lines]
    beyond = [f"{context} tokens do not fit ({held.refused})" for context, held in lines.items() if held.refused]
    wrong = [f"at {context} tokens {words}" for context, held in lines.items() if (words := _flaw(spec, arm, held))]
    status: Status
    if refused is not None:
        status, reason = refused
    elif missing:
        status, reason = "invalid", f"missing evidence: no line of context {', '.join(missing)}"
    elif wrong:
        status, reason = "invalid", "; ".join(wrong)
    elif len(beyond) == len(lines):
        status, reason = "unsupported", "; ".join(beyond)
    else:
        fits = [f"{context:,}" for context, held in lines.items() if not held.refused]
        status, reason = "measured", "; ".join([f"at {', '.join(fits)} tokens", *beyond])
    return Decision(candidate=arm, baseline=question.baseline, family=question.family, status=status, reason=reason[:8000])


def _flaw(spec: Spec, arm: str, held: Held) -> str:
    """Where the two ways of counting disagree, in words, or an empty string."""
    if held.refused:
        return ""
    if not held.total:
        return "no backing was measured"
    most = held.total
    if spec.arm(arm).implementation == "fused":
        most = max(held.counted, held.total)
    elif held.method == "allocator":
        most += ROUNDING * held.allocations + SLACK
    else:
        most += COUNTERS * held.allocations
    if held.total <= held.counted <= most:
        return ""
    return f"the backings have {held.total:,} bytes and the {held.method} {held.counted:,}"
