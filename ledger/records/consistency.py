"""What a spec must say to agree with itself. Checked before a study is frozen, run or appended; pure.

A spec that is refused here would run for minutes and then decide nothing, or say less than it seems to: a repeat that
repeats nothing new, a bound that no number of resamples can establish, a tolerance for a figure that does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from ledger.errors import InputError
from ledger.records import (
    ANSWER_FIGURES,
    ANSWERS,
    EACH_ARM,
    EXACT_UNITS,
    FIGURES,
    FUSED_BACKEND,
    MEASUREMENTS,
    PARTS,
    Arm,
    Case,
    Contrast,
    Family,
    Spec,
    Task,
    gsm8k,
)

MAX_BLOCK = 1024
"""Most tokens of a block in which arms of different chunks meet: each reference's logits are kept, a float32 a token and word."""
RESAMPLES = (99, 100_000)
"""Fewest and most resamples of a family: fewer cannot show 1 %, more take minutes a gate."""

FEWEST_REPEATS = 5
"""Fewest samples of a timing: fewer have no quartiles worth the name."""
LEAST_ROTATION = 64 << 20
"""Fewest bytes that the buffers of a timing on a GPU turn over. The second-level cache of an H100 or H200 holds 50 MiB."""

_REPEATED = ("implementation", "compute", "keys", "values", "scales", "granularity", "scale_source", "backend")
"""What a repeat shares with the arm that it repeats."""


def check(spec: Spec) -> None:
    """Refuse a spec that contradicts itself. Raises InputError."""
    try:
        _check_scope(spec)
        _check_documents(spec)
        _check_names(spec)
        for arm in spec.arms:
            _check_role(spec, arm)
            _check_policy(spec, arm)
        _check_chunks(spec)
        _check_contrasts(spec)
        for family in spec.families:
            _check_family(spec, family)
        _check_tolerances(spec)
    except _Contradiction as error:
        raise InputError(
            f"The spec of study {spec.study!r} contradicts itself: {error.what}",
            expected=error.expected,
            found=error.found,
            next="correct the study.",
        ) from None


class _Contradiction(InputError):
    """One contradiction, before it is said of which study."""


def _refuse(what: str, *, expected: str = "", found: str = "") -> NoReturn:
    raise _Contradiction(what, expected=expected, found=found)


def _twice(names: Sequence[str]) -> str:
    """Those that stand more than once, or an empty string."""
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


# ---------------------------------------------------------------- scopes without a dataset


def _check_scope(spec: Spec) -> None:
    own = PARTS.get(spec.scope)
    if own is None:
        _refuse(f"nothing is frozen for scope {spec.scope!r}.", expected=", ".join(PARTS))
    for name in sorted({part for parts in PARTS.values() for part in parts}):
        if (getattr(spec, name) is not None) != (name in own):
            what = f"lacks its {name}" if name in own else f"has a {name}, which is of another scope"
            _refuse(f"a study of scope {spec.scope!r} {what}.", expected=" and ".join(f"[{part}]" for part in own))
    if spec.task is not None:
        _check_task(spec, spec.task)
    if spec.scope not in ("performance", "production", *EACH_ARM):
        return
    for name in ("contrasts", "families"):
        if getattr(spec, name):
            _refuse(f"scope {spec.scope!r} has {name}; its arms are judged without any.", found=f"{len(getattr(spec, name))}")
    if spec.scope in EACH_ARM:
        _check_each_arm(spec)
        return
    if any(arm.role == "repeat" or arm.chunk is not None for arm in spec.arms):
        _refuse(f"scope {spec.scope!r} has an arm that repeats another, or a chunk of its own.")
    if any(arm.role == "control" for arm in spec.arms) and not spec.questions():
        _refuse(f"scope {spec.scope!r} has no fused arm beside its control.", expected='an arm with implementation = "fused"')
    if spec.performance is not None:
        _check_cases(spec.performance.cases)
        if spec.performance.repeats < FEWEST_REPEATS:
            _refuse("there are too few samples for a spread.", expected=f"repeats >= {FEWEST_REPEATS}", found=str(spec.performance.repeats))
        if spec.device == "cuda" and spec.performance.rotate_bytes < LEAST_ROTATION:
            _refuse(
                "its buffers may stay in the cache of the device, so that no memory would be timed.",
                expected=f"rotate_bytes >= {LEAST_ROTATION}",
                found=str(spec.performance.rotate_bytes),
            )
        if (spec.performance.budget_bytes is not None) != any(case.kind == "capacity" for case in spec.performance.cases):
            _refuse("a budget is what capacity is measured under.", expected="budget_bytes where a case is of capacity, and only there")


def _check_task(spec: Spec, task: Task) -> None:
    known = ("gsm8k", gsm8k.VERSION, gsm8k.DEFINITION_SHA256)
    given = (task.definition, task.version, task.definition_sha256)
    if given != known:
        _refuse("this version knows no such definition of its task.", expected=", ".join(known), found=", ".join(given))
    if not task.items:
        _refuse("there is no item to ask.")
    if len(set(task.items)) != len(task.items):
        _refuse("an item is asked twice.")
    if max(task.items) >= task.test_items:
        _refuse(
            "an item is asked that the file of questions does not hold.", expected=f"below {task.test_items}", found=str(max(task.items))
        )
    if task.shots > task.train_items:
        _refuse("there are fewer worked examples than shots.", expected=f"at most {task.train_items}", found=str(task.shots))
    if task.test.file == task.train.file:
        _refuse("questions and worked examples come from files of one name.", found=task.test.file)
    if task.chat_template and task.bos:
        _refuse("a chat template brings its own BOS.", expected="bos = false beside chat_template = true")
    if not 0 < task.margin < 1 / 5:
        _refuse(
            "the margin cannot be shown: accuracy must be sure of five of them.", expected="above 0, below 0.2", found=repr(task.margin)
        )
    if not 0.5 < task.confidence < 1:
        _refuse("the confidence is impossible.", expected="above 0.5, below 1", found=repr(task.confidence))
    if spec.families:
        _refuse("a task has families; its contrasts are judged by its margin.", expected=f"family = {' or '.join(ANSWERS)}")


def _check_each_arm(spec: Spec) -> None:
    if any(arm.role == "repeat" or arm.chunk is not None for arm in spec.arms):
        _refuse(f"scope {spec.scope!r} has an arm that repeats another, or a chunk of its own.")
    if spec.capture is not None:
        if spec.text.greedy is not None:
            _refuse("a capture continues every document by itself.", expected="no [workload.greedy]")
        if not spec.capture.language_only:
            _refuse("a capture loads language alone in this version.", expected="language_only = true")
        if list(spec.capture.suppressed) != sorted(set(spec.capture.suppressed)):
            _refuse("suppressed ids stand twice or out of order.", found=str(list(spec.capture.suppressed))[:200])
    if spec.scope == "calibration":
        # one set of scales comes of it: that of the states before anything is quantised
        eight = any("fp8_e4m3" in (arm.keys, arm.values) for arm in spec.arms)
        if len(spec.arms) != 1 or eight or spec.arms[0].implementation == "fused":
            _refuse(
                "a calibration is of the states of one arm, as its own layers compute them.",
                expected="one arm, native or reference, that stores no fp8_e4m3",
                found=", ".join(f"{arm.name}: {arm.implementation}, {arm.keys}/{arm.values}" for arm in spec.arms)[:400],
            )
    if spec.memory is not None:
        if not spec.memory.contexts:
            _refuse("there is no context to measure at.")
        if list(spec.memory.contexts) != sorted(set(spec.memory.contexts)):
            _refuse("contexts stand twice or out of order.", found=str(list(spec.memory.contexts))[:200])


def _check_cases(cases: Sequence[Case]) -> None:
    if not cases:
        _refuse("there is no case to measure.")
    again = _twice([case.name for case in cases])
    if again:
        _refuse("a case stands twice.", found=again)
    for case in cases:
        whole = case.kind in ("step", "capacity")
        if whole == (case.head_dim is not None):
            _refuse(f"case {case.name!r}: all kinds but step and capacity are of layers of one head dimension.", found=str(case.head_dim))
        for name, kinds in (("shortest", ("decode",)), ("window", ("decode", "prefill")), ("soft_cap", ("decode", "prefill"))):
            if getattr(case, name) is not None and case.kind not in kinds:
                _refuse(f"case {case.name!r} has a {name}.", expected=f"one for {' and '.join(kinds)} only")
        if (case.chunk is not None) != (case.kind == "prefill"):
            _refuse(f"case {case.name!r}: prefill runs in chunks, and nothing else does.", found=f"chunk {case.chunk}")
        if case.shortest is not None and case.shortest >= case.context:
            _refuse(f"case {case.name!r} has no lengths to draw from.", expected="shortest < context")
        if case.chunk is not None and case.context % case.chunk:
            _refuse(f"case {case.name!r} is no whole number of chunks.", found=f"{case.context} tokens in chunks of {case.chunk}")
        if case.soft_cap is not None and not (math.isfinite(case.soft_cap) and case.soft_cap > 0):
            _refuse(f"case {case.name!r} has an impossible soft cap.", expected="a finite number above 0", found=repr(case.soft_cap))


# ---------------------------------------------------------------- documents and arms


def _check_documents(spec: Spec) -> None:
    if spec.workload is None:
        return
    if not spec.workload.spans:
        _refuse("there is no document.")
    end = 0
    for span in spec.workload.spans:
        if span.start < end:
            _refuse("documents overlap or are out of order.", found=f"a span starts at {span.start}, before {end}")
        if span.tokens + int(spec.workload.bos) < 2:
            _refuse("a document has no token to predict.", expected="2 tokens or more", found=f"{span.tokens} from token {span.start}")
        end = span.start + span.tokens


def _check_names(spec: Spec) -> None:
    arms, families = [arm.name for arm in spec.arms], [family.name for family in spec.families]
    if _twice(arms):
        _refuse("two arms have one name.", found=_twice(arms))
    if _twice(families):
        _refuse("two gate families have one name.", found=_twice(families))
    if not any(arm.role == "control" for arm in spec.arms):
        _refuse("no arm is a control.", expected='at least one arm with role = "control"')


def _check_role(spec: Spec, arm: Arm) -> None:
    if arm.role != "repeat":
        if arm.repeats is not None:
            _refuse(f"arm {arm.name!r} names an arm to repeat but is a {arm.role}.")
        return
    other = next((other for other in spec.arms if other.name == arm.repeats and other.role != "repeat"), None)
    if other is None:
        _refuse(f"arm {arm.name!r} repeats no arm of this spec.", found=repr(arm.repeats))
    for field in _REPEATED:
        own, theirs = getattr(arm, field), getattr(other, field)
        if own != theirs:
            _refuse(f"arm {arm.name!r} repeats {other.name!r} with another {field}.", expected=repr(theirs), found=repr(own))
    if spec.task is not None:
        chunk, theirs = (each.chunk or spec.task.chunk for each in (arm, other))
    else:
        longest = max((span.tokens for span in spec.documents), default=0) + int(spec.text.bos)
        chunk, theirs = (min(each.chunk or spec.text.chunk, longest) for each in (arm, other))
    if chunk == theirs:
        # The same sums in the same order: bit-identical on a CPU, so that the floor would be zero whatever the noise.
        _refuse(f"arm {arm.name!r} repeats {other.name!r} under the same chunk, which proves nothing.", found=f"chunks of {chunk} tokens")


def _check_policy(spec: Spec, arm: Arm) -> None:
    stores_fp8 = "fp8_e4m3" in (arm.keys, arm.values)
    if arm.compute == "fp8_e4m3":
        _refuse(f"arm {arm.name!r} computes in fp8_e4m3.", expected="fp32, bf16 or fp16")
    if stores_fp8 and arm.scales == "none":
        _refuse(
            f"arm {arm.name!r} stores fp8_e4m3 without a scale policy; a silent scale of 1.0 is refused.",
            expected='scales = "unit", "fixed" or "dynamic"',
        )
    if not stores_fp8 and arm.scales != "none":
        _refuse(f"arm {arm.name!r} has a scale policy but stores no fp8_e4m3.", found=f'scales = "{arm.scales}"')
    if (arm.scales in ("fixed", "dynamic")) != (arm.granularity != "none"):
        _refuse(
            f"arm {arm.name!r}: fixed and dynamic scales need a granularity, and only they.",
            found=f'granularity = "{arm.granularity}"',
        )
    if (arm.scales == "fixed") != (arm.scale_source is not None):
        _refuse(f"arm {arm.name!r}: fixed scales need the digest of their calibration, and only they.")
    if arm.scales == "fixed" and arm.granularity not in ("tensor", "head"):
        _refuse(f"arm {arm.name!r}: fixed scales are of a layer or a head.", expected='"tensor" or "head"', found=arm.granularity)
    # Beside what is timed, a native kernel that reads an 8-bit cache is a peer worth seeing; it is no denominator.
    stored = {arm.compute, "fp8_e4m3"} if spec.scope == "performance" else {arm.compute}
    if arm.implementation == "native" and not {arm.keys, arm.values} <= stored:
        _refuse(f"arm {arm.name!r} is native, so its cache holds the compute dtype.", found=f"keys {arm.keys}, values {arm.values}")
    if (arm.implementation == "fused") != (arm.backend == FUSED_BACKEND):
        _refuse(
            f"arm {arm.name!r}: every fused arm, and no other, has the backend {FUSED_BACKEND!r}.",
            found=f"{arm.implementation}, backend {arm.backend!r}",
        )
    if arm.implementation == "fused":
        _check_fused(arm)


def _check_fused(arm: Arm) -> None:
    if arm.compute == "fp32" or not {arm.keys, arm.values} <= {arm.compute, "fp8_e4m3"}:
        _refuse(
            f"arm {arm.name!r} is fused: it computes in 16 bits, and stores what it computes or fp8_e4m3.",
            expected='compute = "bf16" or "fp16", keys and values the same or "fp8_e4m3"',
            found=f"compute {arm.compute}, keys {arm.keys}, values {arm.values}",
        )
    if arm.scales == "dynamic" and arm.granularity != "token_head":
        _refuse(f"arm {arm.name!r} is fused: its dynamic scales are of a token and head.", expected='"token_head"', found=arm.granularity)


def _check_chunks(spec: Spec) -> None:
    if spec.workload is None:
        return
    chunks = sorted({arm.chunk or spec.workload.chunk for arm in spec.arms})
    block = math.lcm(*chunks)
    if len(chunks) > 1 and block > MAX_BLOCK:
        _refuse(
            "the chunks of its arms meet too rarely: logits are kept from one common boundary to the next.",
            expected=f"chunks whose least common multiple is at most {MAX_BLOCK} tokens, such as powers of two; or one chunk for all arms",
            found=f"{block} tokens, of the chunks {', '.join(str(chunk) for chunk in chunks)}"[:400],
        )


# ---------------------------------------------------------------- contrasts and gates


def _check_contrasts(spec: Spec) -> None:
    arms = {arm.name for arm in spec.arms}
    families = set(ANSWERS) if spec.task is not None else {family.name for family in spec.families}
    for contrast in spec.contrasts:
        for side in (contrast.candidate, contrast.baseline):
            if side not in arms:
                _refuse("a contrast names no arm of this spec.", found=side)
        if contrast.candidate == contrast.baseline:
            _refuse("a contrast compares an arm with itself.", found=contrast.candidate)
        if contrast.family not in families:
            _refuse("a contrast names no gate family of this spec.", found=contrast.family)
    again = _twice([_words(contrast) for contrast in spec.contrasts])
    if again:
        _refuse("a contrast stands twice.", found=again)
    for contrast in spec.contrasts:
        if "kl_difference_mean" in spec.statistics(contrast) and spec.common_control(contrast) is None:
            _refuse("a kl_difference_mean has no control to which both sides are compared.", found=_words(contrast))


def _words(contrast: Contrast) -> str:
    return f"{contrast.candidate} against {contrast.baseline} under {contrast.family}"


def _check_family(spec: Spec, family: Family) -> None:
    if not 0.5 < family.confidence < 1:
        _refuse(f"family {family.name!r} has an impossible confidence.", expected="above 0.5, below 1", found=repr(family.confidence))
    if not family.gates:
        _refuse(f"family {family.name!r} has no gate.")
    again = _twice([gate.statistic for gate in family.gates])
    if again:
        _refuse(f"family {family.name!r} has two gates of one statistic.", found=again)
    for gate in family.gates:
        for side, value in (("bound", gate.bound), ("harm", gate.harm)):
            if not math.isfinite(value):
                _refuse(f"gate {gate.statistic!r} has a {side} that is no finite number.", found=repr(value))
            if gate.statistic == "bit_equal" and value != 0:
                _refuse(f"gate 'bit_equal' allows a difference: its {side} is not zero.", expected="0.0", found=repr(value))
        if gate.harm < gate.bound:
            _refuse(
                f"gate {gate.statistic!r} calls harm what its bound allows.",
                expected="harm >= bound",
                found=f"harm {gate.harm}, bound {gate.bound}",
            )
    _check_resamples(spec, family)


def _check_resamples(spec: Spec, family: Family) -> None:
    fewest, most = RESAMPLES
    if not fewest <= family.resamples <= most:
        _refuse(f"family {family.name!r} has an unusable number of resamples.", expected=f"{fewest} to {most}", found=str(family.resamples))
    # The p-value of kl_p999 comes from resamples alone and is never below 1/(resamples + 1); those of means can be
    # as small as any. Holm multiplies the least p by all hypotheses that are not smaller: at best, where every mean comes
    # first, by the contrasts that have a kl_p999. That holds for bounds, one hypothesis a contrast, and for
    # harms, one a gate, since a family has one kl_p999 at most.
    tails = sum("kl_p999" in spec.statistics(contrast) for contrast in spec.contrasts)
    used = any(contrast.family == family.name for contrast in spec.contrasts)
    if used and any(gate.statistic == "kl_p999" for gate in family.gates) and tails / (family.resamples + 1) > 1 - family.confidence:
        _refuse(
            f"family {family.name!r} has too few resamples for its kl_p999 ever to be decided: after Holm's correction over "
            f"{tails} contrasts its least p-value is {tails / (family.resamples + 1):.3g}.",
            expected=f"at most {1 - family.confidence:.3g}; so at least {math.ceil(tails / (1 - family.confidence))} resamples",
            found=f"{family.resamples} resamples",
        )


# ---------------------------------------------------------------- tolerances


def _check_tolerances(spec: Spec) -> None:
    for name, tolerance in spec.tolerances.items():
        if not (math.isfinite(tolerance) and tolerance >= 0):
            _refuse(f"the tolerance of {name!r} is no finite number from 0 up.", found=repr(tolerance))
        figures = FIGURES if spec.scope == "performance" else MEASUREMENTS
        if spec.task is not None:
            figures = ANSWER_FIGURES | {f"{reading}/{figure}": unit for reading in ANSWERS for figure, unit in ANSWER_FIGURES.items()}
        known = next((known for known in figures if name == known or (known.endswith("/") and name.startswith(known))), None)
        if known is None:
            _refuse(f"there is no measurement {name!r} to be tolerant about.", expected=", ".join(figures))
        if figures[known] in EXACT_UNITS:
            _refuse(f"{name!r} is counted in {figures[known]}, and a count is equal or not.", expected="no tolerance of it")
