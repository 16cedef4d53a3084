"""The JSON documents that the command line and the web view show.

    status   {"rows": [{key, model, checkpoint, source, revision, arm, baseline, scope, study, workload,
              hardware, claim, status, synthetic, reason, runs}]}
    runs     [{id, sequence, recorded_at, study, title, model, scope, outcome, reason, hardware, harness,
              arms, warnings, superseded_by, retracted}]
    run      one run in full: spec, arms, decisions, evidence, harness, checkpoint, host, relations, claims
    compare  two runs side by side: {"a", "b", "same_spec", "facts", "measurements", "decisions"}
    log      {"head": {size, root}, "entries": [{sequence, kind, record, recorded_at, run, study, says}]}

What many rows answer is asked of the database; the facts of one run are read from its own objects, whose
digests are checked on the way. Every number passes through :func:`ledger.digest.jsonable`, so each document is
strict JSON whatever a run measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ledger import digest, records

POLICY = ("implementation", "compute", "keys", "values", "scales", "granularity")
"""The fields of an arm's policy that are requested, said to be effective, and measured."""


def _policy(arm: records.Arm) -> dict[str, str]:
    return {field: str(getattr(arm, field)) for field in POLICY}


def _measurement(found: records.Measurement) -> dict[str, Any]:
    return {name: value for name, value in records.plain(found).items() if name != "arm"}


def _arm(
    arm: records.Arm, result: records.ArmResult | None, measured: Iterable[records.Measurement], contradictions: Sequence[str]
) -> dict[str, Any]:
    facts: dict[str, Any] = (
        records.plain(result)
        if result is not None
        else {"outcome": "not run", "reason": "", "effective": {}, "measured": {}, "geometry": None, "backings": []}
    )
    return {
        **facts,
        "name": arm.name,
        "role": arm.role,
        "repeats": arm.repeats,
        "backend": arm.backend,
        "chunk": arm.chunk,
        "requested": _policy(arm),
        "contradictions": list(contradictions),
        "measurements": [_measurement(found) for found in measured if found.arm == arm.name],
    }


def describe(
    *,
    spec: records.Spec,
    result: records.Result,
    run: records.Run,
    entry: records.Entry,
    contradictions: Mapping[str, Sequence[str]],
    relations: Sequence[Mapping[str, Any]] = (),
    claims: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The document of one run. ``contradictions`` is by arm; ``relations`` and ``claims`` are as in :func:`run`."""
    held = {arm.name: arm for arm in result.arms}
    plain = records.plain(result)
    document: dict[str, Any] = {
        "id": records.identify(run),
        "sequence": entry.sequence,
        "entry": records.identify(entry),
        "recorded_at": entry.recorded_at,
        "study": spec.study,
        "title": spec.title,
        "model": spec.checkpoint.name,
        "scope": spec.scope,
        "outcome": run.outcome,
        "reason": run.reason,
        "rules": run.rules,
        "spec_digest": run.spec,
        "result_digest": run.result,
        "warnings": [*run.warnings, *(text for text in result.warnings if text not in run.warnings)],
        "spec": records.plain(spec),
        "checkpoint": {
            **records.plain(spec.checkpoint),
            "digest": records.identify(spec.checkpoint),
            "synthetic": spec.checkpoint.synthetic,
        },
        "tokenizer": result.tokenizer,
        "documents": plain["documents"],
        "started": result.started,
        "stopped": result.stopped,
        "segments": plain["segments"],
        "peak_memory_bytes": result.peak_memory_bytes,
        "host": {**records.plain(result.host), "hardware_class": result.host.hardware_class},
        "harness": {**records.plain(run.harness), "revision": run.harness.revision},
        "sources": result.sources,
        "arms": [
            _arm(arm, held.get(arm.name), run.measurements, contradictions.get(arm.name, ())) for arm in spec.arms
        ],
        "decisions": [records.plain(decision) for decision in run.decisions],
        "evidence": [records.plain(file) for file in run.evidence],
        "relations": list(relations),
        "claims": list(claims),
    }
    found: dict[str, Any] = digest.jsonable(document)
    return found


# ---------------------------------------------------------------- two runs side by side

_ARM_FACTS = ("outcome", "reason", "effective", "measured", "backends", "census", "geometry", "contradictions")


def _leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Dotted name and value of every leaf. Lists are one leaf, tagged numbers too."""
    if isinstance(value, dict) and value and set(value) != {"number"}:
        for key, item in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value


def _facts(document: Mapping[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in document["spec"].items() if key not in ("arms", "checkpoint", "format")}
    arms = {arm["name"]: {"requested": arm["requested"], **{key: arm.get(key) for key in _ARM_FACTS}} for arm in document["arms"]}
    bytes_held = {
        arm["name"]: {"backings": len(arm["backings"]), "backing_bytes": sum(found["bytes"] for found in arm["backings"])}
        for arm in document["arms"]
    }
    chosen = {
        "outcome": document["outcome"],
        "reason": document["reason"],
        "spec": spec,
        "checkpoint": document["checkpoint"],
        "tokenizer": document["tokenizer"],
        "documents": [found["sha256"] for found in document["documents"]],
        "harness": document["harness"],
        "host": document["host"],
        "peak_memory_bytes": document["peak_memory_bytes"],
        "arms": {name: {**facts, **bytes_held[name]} for name, facts in arms.items()},
    }
    return dict(_leaves("", chosen))


def _figures(document: Mapping[str, Any]) -> dict[tuple[str, str, str | None], Mapping[str, Any]]:
    return {
        (arm["name"], found["name"], found["against"]): found for arm in document["arms"] for found in arm["measurements"]
    }


def _both(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> list[Any]:
    return [*left, *(key for key in right if key not in left)]


_HEAD = ("id", "sequence", "recorded_at", "study", "title", "model", "scope", "outcome")


def side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two documents of :func:`run`. Each fact and figure says whether the two ``differ``; absent is None."""
    left, right = _facts(a), _facts(b)
    facts = [
        {"name": name, "a": left.get(name), "b": right.get(name), "differ": left.get(name) != right.get(name)}
        for name in _both(left, right)
    ]
    ours, theirs = _figures(a), _figures(b)
    measurements = []
    for key in _both(ours, theirs):
        one, two = ours.get(key), theirs.get(key)
        arm, name, against = key
        values = one and one["value"], two and two["value"]
        known: Mapping[str, Any] = one or two or {}
        measurements.append(
            {
                "arm": arm,
                "name": name,
                "against": against,
                "unit": known["unit"],
                "a": values[0],
                "b": values[1],
                "differ": values[0] != values[1],
            }
        )
    verdicts = [
        {(found["candidate"], found["baseline"], found["family"]): found["status"] for found in document["decisions"]}
        for document in (a, b)
    ]
    decisions = [
        {
            "candidate": key[0],
            "baseline": key[1],
            "family": key[2],
            "a": verdicts[0].get(key),
            "b": verdicts[1].get(key),
            "differ": verdicts[0].get(key) != verdicts[1].get(key),
        }
        for key in _both(verdicts[0], verdicts[1])
    ]
    return {
        "a": {name: a[name] for name in _HEAD},
        "b": {name: b[name] for name in _HEAD},
        "same_spec": a["spec_digest"] == b["spec_digest"],
        "facts": facts,
        "measurements": measurements,
        "decisions": decisions,
    }
