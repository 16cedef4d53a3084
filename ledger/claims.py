"""Runs -> claims: the status vocabulary, and the versioned rule that derives a claim from all runs of its key.

A claim's key is the checkpoint, the policies of candidate and baseline, the scope, the workload, the bounds and the hardware class; and the
token ids, where a spec pins them or a run was fed others than the first run of its key. Names of studies, arms and families, seeds
and resamples are no part of it: to choose another seed is to try again, and counts in the same row. Rule 1, for the runs of
one key, in the order of the log:

- A retracted run does not count, nor does one that was superseded; both stay listed, after those that count.
- A decision that stands on a valid run counts before one that does not. Among those the most adverse decides:
  fails, degraded, not established, then passes and established; then unsupported, then invalid.
  Among equals the latest decides.
- A key whose runs are all withdrawn is ``retracted``. A spec that was frozen and has no run is ``not measured``.
- Performance is ``measured`` where quality is established beside it, else ``measured, not qualified``. Beside it means: on the
  same checkpoint and hardware class, for the same policy and the same implementation (formats, scales, compute dtype), a claim
  of quality.loss against a control of 16 bit or more is ``established`` by a family that bounds the mean loss, and no such
  claim is ``degraded`` or ``not established``. What was timed is not all that was judged: a study of loss feeds its documents
  through the prefill kernel, in chunks, while a timed step decodes, in a streamlined model. They share formats, pages and
  the write kernel; the reason of the claim says through what quality was established.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from ledger import digest, performance
from ledger.records import (
    Arm,
    Body,
    Case,
    Checkpoint,
    Claim,
    Contrast,
    Result,
    Retract,
    Run,
    Spec,
    Status,
    Supersede,
    Task,
    Workload,
    ids_digest,
    plain,
)

RULES = "1"
"""Version of the rule; a run names the one under which it was recorded."""

_ADVERSE: tuple[Status, ...] = (
    "fails",
    "degraded",
    "not established",
    "measured, not qualified",
    "measured",
    "passes",
    "established",
    "unsupported",
    "invalid",
)
_NOT_RUN = "not run"
_GRAINS = {"tensor": "per tensor", "head": "per head", "page_head": "per page and head", "token_head": "per token and head"}


# ---------------------------------------------------------------- the key


def checkpoint_id(checkpoint: Checkpoint) -> str:
    """Digest of what makes a checkpoint itself: its files' digests, or its config and seed, and its alteration."""
    return checkpoint.identity


def _policy(arm: Arm, workload: Workload | None) -> dict[str, Any]:
    value = plain(arm)
    for name in ("name", "role", "repeats"):
        del value[name]
    return {**value, "chunk": arm.chunk or (workload.chunk if workload else None)}


def _key(spec: Spec, contrast: Contrast, hardware: str | None) -> str:
    workload = spec.workload
    if spec.task is not None:
        return _key_of_task(spec, spec.task, contrast, hardware)
    if workload is None or spec.capture is not None:
        return _key_without_gates(spec, contrast, hardware)
    family = spec.family(contrast.family)
    device = {} if spec.device == "cpu" else {"device": spec.device}  # absent, so that keys of format 1 stay as they were
    return digest.digest_of(
        {
            **device,
            "checkpoint": checkpoint_id(spec.checkpoint),
            "candidate": _policy(spec.arm(contrast.candidate), workload),
            "baseline": _policy(spec.arm(contrast.baseline), workload),
            "scope": spec.scope,
            "workload": _fed_text(spec, workload),
            "gates": sorted([gate.statistic, float(gate.bound), float(gate.harm)] for gate in family.gates),
            "confidence": float(family.confidence),
            "hardware": hardware,
        }
    )


def _fed_text(spec: Spec, workload: Workload) -> dict[str, Any]:
    pinned = {} if spec.ids is None else {"ids": spec.ids}
    return {
        **pinned,
        "dataset": workload.dataset.sha256,
        "spans": [plain(span) for span in workload.spans],
        "bos": workload.bos,
        "split_special_tokens": workload.split_special_tokens,
        "batch": workload.batch,
    }


def _key_without_gates(spec: Spec, contrast: Contrast, hardware: str | None) -> str:
    """The key of a scope without gates of its own: what is timed or fed, and for performance how, beside which contenders."""
    found: dict[str, Any] = {
        "checkpoint": checkpoint_id(spec.checkpoint),
        "candidate": _policy(spec.arm(contrast.candidate), spec.workload),
        "scope": spec.scope,
        "device": spec.device,
        "hardware": hardware,
    }
    if spec.performance is not None:
        found["cases"] = sorted(case.name for case in spec.performance.cases)
        for name in ("repeats", "launches", "rotate_bytes", "budget_bytes", "page"):
            found[name] = getattr(spec.performance, name)
        found["contenders"] = sorted(digest.digest_of(_policy(arm, None)) for arm in _contenders(spec))
    elif spec.production is not None:
        found["fed"] = {name: value for name, value in plain(spec.production).items() if name != "seed"}
        found["baseline"] = _policy(spec.arm(contrast.baseline), None)
    elif spec.capture is not None:
        found |= {"workload": _fed_text(spec, spec.text), "capture": plain(spec.capture)}
    elif spec.memory is not None:
        found["memory"] = {name: value for name, value in plain(spec.memory).items() if name != "seed"}
        found["baseline"] = _policy(spec.arm(contrast.baseline), None)
    return digest.digest_of(found)


def _key_of_task(spec: Spec, task: Task, contrast: Contrast, hardware: str | None) -> str:
    """The key of an answer to a task: what is asked, and how it is read and judged."""
    sides = {side: _policy(spec.arm(name), None) for side, name in (("candidate", contrast.candidate), ("baseline", contrast.baseline))}
    for side, name in (("candidate", contrast.candidate), ("baseline", contrast.baseline)):
        sides[side]["chunk"] = spec.arm(name).chunk or task.chunk
    asked = {name: value for name, value in plain(task).items() if name not in ("test", "train", "chunk")}
    return digest.digest_of(
        {
            **sides,
            "checkpoint": checkpoint_id(spec.checkpoint),
            "scope": spec.scope,
            "task": asked | {side: file.sha256 for side, file in task.files.items()},
            "reading": contrast.family,
            "device": spec.device,
            "hardware": hardware,
        }
    )


def _contenders(spec: Spec) -> tuple[Arm, ...]:
    return tuple(arm for arm in spec.arms if arm.implementation == "native" and performance.is_contender(arm))


# ---------------------------------------------------------------- labels


def arm_label(arm: Arm) -> str:
    """A policy in a few words: ``K bf16 / V fp8_e4m3, unit scales, reference, fp32 compute``."""
    parts = [f"K {arm.keys} / V {arm.values}"]
    if arm.scales != "none":
        source = f" ({arm.scale_source[:8]})" if arm.scale_source else ""
        parts.append(f"{arm.scales} scales{source} {_GRAINS.get(arm.granularity, '')}".rstrip())
    parts += [arm.implementation, f"{arm.compute} compute"]
    if arm.backend != "sdpa" and arm.implementation != "fused":
        parts.append(arm.backend)
    if arm.chunk is not None:
        parts.append(f"chunk {arm.chunk}")
    return ", ".join(parts)


def _named(arm: Arm) -> str:
    """The label with the arm's name before it. A key's row shows the name that the deciding run used."""
    return f"{arm.name}: {arm_label(arm)}"


def workload_label(workload: Workload) -> str:
    """What is fed, in a few words: ``16 x 1,024 tokens of WikiText-2 test, chunk 64, BOS``. A BOS counts as a token."""
    spans = workload.spans
    sizes = [span.tokens + int(workload.bos) for span in spans]
    alike = len(set(sizes)) == 1
    tokens = f"{len(spans)} × {sizes[0]:,} tokens" if alike else f"{len(spans)} documents, {sum(sizes):,} tokens"
    where = f"{tokens} of {workload.dataset.name}"
    if any(left.start + left.tokens != right.start for left, right in pairwise(spans)):
        where += f" (spans {digest.digest_of([plain(span) for span in spans])[:8]})"
    elif spans[0].start:
        where += f" from token {spans[0].start:,}"
    parts = [where, f"chunk {workload.chunk}", "BOS" if workload.bos else "no BOS"]
    if not workload.split_special_tokens:
        parts.append("special tokens parsed")
    if workload.batch != 1:
        parts.append(f"batch {workload.batch}")
    return ", ".join(parts)


def spec_label(spec: Spec) -> str:
    """What a spec feeds or times, in a few words."""
    if spec.workload is not None:
        where = "" if spec.device == "cpu" else f", on {spec.device}"
        if spec.capture is not None:
            where = f", {spec.capture.new_tokens:,} forced tokens each, cache budget {_binary(spec.capture.budget_bytes)}{where}"
        return workload_label(spec.workload) + where
    if spec.performance is not None:
        timed, cases = spec.performance, spec.performance.cases
        kinds = ", ".join(dict.fromkeys(case.kind for case in cases))
        names = digest.digest_of(sorted(case.name for case in cases))[:8]
        return (
            f"{kinds}; batch {_extent([case.batch for case in cases])}, context {_extent([case.context for case in cases])}"
            f"{_dims(cases)}; {len(cases)} cases ({names}), page {timed.page}, "
            f"{timed.repeats} × {timed.launches} launches over {timed.rotate_bytes / (1 << 20):,.4g} MiB"
        )
    if spec.production is not None:
        fed = spec.production
        return f"{fed.batch} seeded prompts of up to {fed.prompt_tokens:,} tokens, {fed.new_tokens:,} new"
    if spec.memory is not None:
        asked = spec.memory
        contexts = ", ".join(f"{context:,}" for context in asked.contexts)
        where = "" if spec.device == "cpu" else f", on {spec.device}"
        return f"one sequence of {contexts} seeded tokens, chunk {asked.chunk}, cache budget {_binary(asked.budget_bytes)}{where}"
    if spec.task is not None:
        return _task_label(spec.task) + ("" if spec.device == "cpu" else f", on {spec.device}")
    return "nothing"


def _task_label(task: Task) -> str:
    """What is asked, in a few words: ``200 of 1,319 items of GSM8K test (0a1b2c3d), 5 shots, batch 4, chunk 64, BOS, margin 0.02``."""
    asked = f"{len(task.items):,} of {task.test_items:,} items of {task.test.name}"
    if task.items != tuple(range(task.test_items)):
        asked += f" ({digest.digest_of(list(task.items))[:8]})"
    marks = "chat template" if task.chat_template else "BOS" if task.bos else "no BOS"
    marks += " in turns" if task.chat_template == "multiturn" else ""
    return (
        f"{asked}, {task.definition} of lm-eval {task.version}, {task.shots} shots, {task.new_tokens} new tokens, "
        f"batch {task.batch}, chunk {task.chunk}, {marks}, margin {task.margin:g}"
    )


def _workload_of(spec: Spec, contrast: Contrast) -> str:
    """The workload's label; of a task, with the reading that is judged."""
    return spec_label(spec) + (f", {contrast.family} reading" if spec.task is not None else "")


def _binary(bytes: int) -> str:
    """A number of bytes in GiB or MiB, as far as it is one of them."""
    return f"{bytes / (1 << 30):,.4g} GiB" if bytes >= 1 << 30 else f"{bytes / (1 << 20):,.4g} MiB"


def _extent(values: Sequence[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _dims(cases: Sequence[Case]) -> str:
    dims = sorted({case.head_dim for case in cases if case.head_dim is not None})
    return f", head dim {', '.join(map(str, dims))}" if dims else ""


def _baseline_label(spec: Spec, contrast: Contrast, timed: Set[str] | None) -> str:
    """The baseline's label; of performance, the contenders ``timed``, the best of which is the denominator case by case.

    ``timed`` is None where nothing was run yet: then the contenders are those that were asked for.
    """
    if contrast.candidate == contrast.baseline or spec.capture is not None:
        return ""  # judged by itself
    if spec.performance is None:
        return _named(spec.arm(contrast.baseline))
    ran = [arm for arm in spec.arms if performance.is_contender(arm) and (timed is None or arm.name in timed)]
    backends = list(dict.fromkeys(arm.backend for arm in ran if arm.implementation == "native"))
    if not backends:
        return "best native: no native contender was timed"
    formats = ", ".join(dict.fromkeys(f"K {arm.keys} / V {arm.values}" for arm in ran))
    fused = " and fused 16 bit" if any(arm.implementation == "fused" for arm in ran) else ""
    return f"best native: {formats}, the fastest of {', '.join(backends)}{fused}"


def _timed(run: Run) -> frozenset[str]:
    """Arms of which a run holds a time, the copy's apart."""
    copy = f"{performance.COPY}/"
    return frozenset(found.arm for found in run.measurements if found.name.endswith("/median_us") and not found.name.startswith(copy))


# ---------------------------------------------------------------- the rule


@dataclass(frozen=True)
class _Finding:
    """What one run says of one contrast. ``withdrawn`` says why it does not count, or is empty."""

    sequence: int
    run: str
    spec: Spec
    contrast: Contrast
    status: Status
    reason: str
    withdrawn: str
    timed: frozenset[str]


@dataclass
class _Row:
    hardware: str
    findings: list[_Finding] = field(default_factory=list)


def _withdrawals(records: Sequence[tuple[str, Body]]) -> dict[str, str]:
    """Run to why it does not count. A retraction weighs more than a replacement."""
    found: dict[str, str] = {}
    for _, body in records:
        if isinstance(body, Supersede):
            found.setdefault(body.run, f"superseded by {body.by[:12]} ({body.author}: {body.reason})")
    for _, body in records:
        if isinstance(body, Retract) and body.run is not None:
            found[body.run] = f"retracted by {body.author}: {body.reason}"
    return found


def _finding(sequence: int, run_id: str, run: Run, spec: Spec, contrast: Contrast, withdrawn: str) -> _Finding:
    wanted = (contrast.candidate, contrast.baseline, contrast.family)
    decision = next((d for d in run.decisions if (d.candidate, d.baseline, d.family) == wanted), None)
    status: Status = "invalid"
    if run.outcome != "completed":
        reason = f"the run {'was interrupted' if run.outcome == 'interrupted' else 'failed'}" + (f": {run.reason}" if run.reason else "")
    elif decision is None:
        reason = "the run holds no decision on this contrast"
    else:
        status, reason = decision.status, decision.reason
    reason = "; ".join(line.strip() for line in reason.splitlines() if line.strip())  # a table's cell is one line
    return _Finding(sequence, run_id, spec, contrast, status, reason, withdrawn, _timed(run))


def _rank(status: Status) -> int:
    return _ADVERSE.index(status) if status in _ADVERSE else len(_ADVERSE)


def _unique(runs: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(runs))


def _judge(findings: Sequence[_Finding]) -> tuple[_Finding, Status, str, tuple[str, ...]]:
    """The deciding finding, the status, the reason, and the runs, deciding first."""
    counted = [finding for finding in findings if not finding.withdrawn]
    withdrawn = [finding for finding in findings if finding.withdrawn]
    listed = [finding.run for finding in (*counted, *withdrawn)]
    if not counted:
        last = withdrawn[-1]
        return last, "retracted", last.withdrawn, _unique([last.run, *listed])
    deciding = min(counted, key=lambda finding: (_rank(finding.status), -finding.sequence))
    reason = deciding.reason
    total = len(_unique([finding.run for finding in counted]))
    if total > 1:
        alike = len(_unique([finding.run for finding in counted if finding.status == deciding.status]))
        reason = f"{deciding.status} in {alike} of {total} runs: {reason}"
    if withdrawn:
        count = len(_unique([finding.run for finding in withdrawn]))
        reason += f" ({count} {'run' if count == 1 else 'runs'} withdrawn: {withdrawn[-1].withdrawn})"
    return deciding, deciding.status, reason[:8192], _unique([deciding.run, *listed])


def _claim(
    key: str,
    hardware: str,
    spec: Spec,
    contrast: Contrast,
    status: Status,
    reason: str,
    runs: tuple[str, ...] = (),
    timed: Set[str] | None = None,
) -> Claim:
    return Claim(
        key=key,
        model=spec.checkpoint.name,
        checkpoint=checkpoint_id(spec.checkpoint),
        arm=_named(spec.arm(contrast.candidate)),
        baseline=_baseline_label(spec, contrast, timed),
        scope=spec.scope,
        workload=_workload_of(spec, contrast),
        hardware=hardware,
        status=status,
        synthetic=spec.checkpoint.synthetic,
        reason=reason,
        study=spec.study,
        runs=runs,
    )


def _fed_ids(spec: Spec, result: Result | None) -> str:
    """Digest of the token ids that a whole run was fed; empty where it was fed no text, not all of it, or does not say."""
    asked = len(spec.documents) if spec.task is None else len(spec.task.items)
    if result is None or not asked or len(result.documents) != asked:
        return ""
    return ids_digest([document.sha256 for document in result.documents])


def derive(records: Sequence[tuple[str, Body]], results: Mapping[str, Result]) -> tuple[Claim, ...]:
    """Every claim of the archive.

    ``records`` are all records with their digests, in the order of the log; ``results`` maps a run's digest to its result,
    which says on what hardware it ran, and what it was fed: runs of one spec whose tokenizers read the text otherwise do not add up.
    Claims stand in the order in which their keys were first frozen, then by hardware.
    """
    specs = {name: body for name, body in records if isinstance(body, Spec)}
    withdrawn = _withdrawals(records)
    # by key without hardware: the first contrast that asked for it, and the rows of each hardware class
    asked: dict[str, tuple[Spec, Contrast]] = {}
    rows: dict[str, dict[tuple[str, str], _Row]] = {}
    first: dict[str, str] = {}  # what the first whole run of a key was fed, withdrawn or not: no later entry changes a key
    keys: dict[str, list[tuple[str, Contrast]]] = {}
    for name, spec in specs.items():
        keys[name] = [(_key(spec, contrast, None), contrast) for contrast in spec.questions()]
        for base, contrast in keys[name]:
            asked.setdefault(base, (spec, contrast))
    for sequence, (name, body) in enumerate(records):
        if isinstance(body, Run) and body.spec in specs:
            result = results.get(name)
            hardware = result.host.hardware_class if result else "unknown"
            fed = _fed_ids(specs[body.spec], result)
            for base, contrast in keys[body.spec]:
                other = fed if fed and fed != first.setdefault(base, fed) else ""
                row = rows.setdefault(base, {}).setdefault((hardware, other), _Row(hardware))
                row.findings.append(_finding(sequence, name, body, specs[body.spec], contrast, withdrawn.get(name, "")))
    claims = []
    said: list[tuple[Spec, Contrast, Claim]] = []
    for base, (spec, contrast) in asked.items():
        for (hardware, other), row in sorted(rows.get(base, {}).items()):
            deciding, status, reason, runs = _judge(row.findings)
            key = _key(deciding.spec, deciding.contrast, hardware)
            if other:
                key = digest.digest_of({"claim": key, "ids": other})
                reason = f"of other token ids than the first run that asked this; {reason}"[:8192]
            claim = _claim(key, hardware, deciding.spec, deciding.contrast, status, reason, runs, deciding.timed)
            said.append((deciding.spec, deciding.contrast, claim))
        if base not in rows:
            said.append((spec, contrast, _claim(base, _NOT_RUN, spec, contrast, "not measured", "frozen, but no run was recorded")))
    for spec, contrast, claim in said:
        claims.append(_qualified(spec, contrast, claim, said) if claim.status == "measured" else claim)
    return tuple(claims)


# ---------------------------------------------------------------- performance beside quality


def _stored(arm: Arm) -> tuple[Any, ...]:
    """What makes two arms one policy run by one implementation, wherever else they differ."""
    return arm.implementation, arm.compute, arm.keys, arm.values, arm.scales, arm.granularity, arm.scale_source


def _judges_quality(spec: Spec, contrast: Contrast) -> bool:
    """Whether a contrast says of its candidate that it loses little to a cache of 16 bit or more."""
    baseline = spec.arm(contrast.baseline)
    whole = "fp8_e4m3" not in (baseline.keys, baseline.values)
    return spec.scope == "quality.loss" and whole and "loss_difference_mean" in spec.statistics(contrast)


def _fed(spec: Spec, contrast: Contrast) -> str:
    """Through what a study of loss fed its candidate."""
    chunk = spec.arm(contrast.candidate).chunk or spec.text.chunk
    return "token by token" if chunk == 1 else f"through prefill in chunks of {chunk}"


def _qualified(spec: Spec, contrast: Contrast, claim: Claim, said: Sequence[tuple[Spec, Contrast, Claim]]) -> Claim:
    """A measured claim as it stands where quality is established beside it, else as not qualified, with the reason."""
    if spec.scope != "performance":
        return claim
    policy = _stored(spec.arm(contrast.candidate))
    beside = [
        (other, _fed(their_spec, their_contrast))
        for their_spec, their_contrast, other in said
        if (other.checkpoint, other.hardware, their_spec.device) == (claim.checkpoint, claim.hardware, spec.device)
        and _judges_quality(their_spec, their_contrast)
        and _stored(their_spec.arm(their_contrast.candidate)) == policy
    ]
    harmed = [other for other, _ in beside if other.status in ("degraded", "not established")]
    good = [f"quality.loss established by study {other.study}, {fed}" for other, fed in beside if other.status == "established"]
    if good and not harmed:
        return msgspec.structs.replace(claim, reason=f"{claim.reason}; {good[0]}"[:8192])
    why = "quality.loss is not established for this policy here"
    if harmed:
        why = f"quality.loss is {harmed[0].status} by study {harmed[0].study}"
    return msgspec.structs.replace(claim, status="measured, not qualified", reason=f"{claim.reason}; {why}"[:8192])
