"""Records into rows: the one translation, used where entries are appended, rebuilt and verified.

A row is a dict with the columns of a table in :mod:`ledger.tables`. Columns ending in ``_json`` hold
canonical JSON. Pure: the same record gives the same rows, whatever the database holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ledger import digest, log, records
from ledger.claims import checkpoint_id

Row = dict[str, Any]
Rows = dict[str, list[Row]]
"""Rows by table name."""


def _json(value: Any) -> str:
    return digest.canonical(value).decode()


def _plain(items: Iterable[records.Record]) -> str:
    return _json([records.plain(item) for item in items])


def rows_of(entry: records.Entry, record: records.Body, result: records.Result | None = None, spec: records.Spec | None = None) -> Rows:
    """The rows of one entry and its record; of a run, with its ``result`` and the ``spec`` that it ran.

    Tables come in an order in which they can be inserted. Claims are not among them: they are drawn from
    many records, see :func:`claim_rows`.
    """
    leaf = log.leaf_hash(records.encode(entry)).hex()
    rows: Rows = {
        "entries": [
            {
                "sequence": entry.sequence,
                "kind": entry.kind,
                "record": entry.record,
                "recorded_at": entry.recorded_at,
                "leaf_hash": leaf,
            }
        ]
    }
    if isinstance(record, records.Spec):
        rows |= _spec(entry.record, record)
    elif isinstance(record, records.Run):
        if result is None or spec is None:
            raise TypeError("a run's rows need its result and its spec")
        rows |= _run(entry.record, record, result)
        rows |= _arms(entry.record, result, spec)
        rows |= _derived(entry.record, record)
    elif isinstance(record, records.Reproduction):
        rows["reproductions"] = [
            {
                "record": entry.record,
                "original": record.original,
                "reproduced": record.reproduced,
                "verdict": record.verdict,
                "reason": record.reason,
                "same_hardware": record.same_hardware,
                "harness": record.harness,
                "differences_json": _plain(record.differences),
                "environment_json": _plain(record.environment),
                "divergence_json": None if record.divergence is None else _json(records.plain(record.divergence)),
            }
        ]
    elif isinstance(record, records.Report):
        rows |= _report(entry.record, record)
    elif isinstance(record, records.Recipe):
        rows |= _recipe(entry.record, record)
    elif isinstance(record, records.KeyChange):
        said = {field: getattr(record, field) for field in ("action", "key", "author", "reason")}
        rows["key_changes"] = [{"record": entry.record, **said}]
    elif isinstance(record, records.Redaction):
        said = {field: getattr(record, field) for field in ("object", "author", "reason")}
        rows["redactions"] = [{"record": entry.record, **said}]
    elif record.run is None:
        rows["retractions"] = [{"record": entry.record, "subject": record.subject, "author": record.author, "reason": record.reason}]
    else:
        rows["relations"] = [
            {
                "record": entry.record,
                "kind": entry.kind,
                "run": record.run,
                "by": record.by if isinstance(record, records.Supersede) else None,
                "author": record.author,
                "reason": record.reason,
            }
        ]
    return rows


def _report(name: str, report: records.Report) -> Rows:
    return {
        "reports": [
            {
                "report": name,
                **{field: getattr(report, field) for field in ("title", "place", "sha256", "size", "license")},
                "kept": report.bytes == "kept",
            }
        ],
        "facts": [{"report": name, "position": position, **records.plain(fact)} for position, fact in enumerate(report.facts)],
        "attachments": _attachments(name, report.evidence),
    }


def _recipe(name: str, recipe: records.Recipe) -> Rows:
    return {
        "recipes": [
            {
                "recipe": name,
                **{field: getattr(recipe, field) for field in ("name", "title", "checkpoint")},
                "policy_json": _json(records.plain(recipe.policy)),
                "steps_json": _json(recipe.steps),
                "requirements_json": _plain(recipe.requirements),
            }
        ],
        "recipe_claims": [{"recipe": name, "position": position, "key": key} for position, key in enumerate(recipe.claims)],
        "attachments": _attachments(name, recipe.evidence),
    }


def _attachments(name: str, evidence: Iterable[records.Evidence]) -> list[Row]:
    return [{"record": name, "position": position, **records.plain(item)} for position, item in enumerate(evidence)]


_PARTS = ("performance", "production")
_LATER = ("capture", "memory", "task")
"""Parts that specs of format 3 may have; each that one has is a row."""


def _spec(name: str, spec: records.Spec) -> Rows:
    checkpoint = records.plain(spec.checkpoint)
    work = spec.workload or spec.performance or spec.production or spec.memory or spec.task
    workload = None if spec.workload is None else records.plain(spec.workload)
    dataset = None if spec.workload is None else spec.workload.dataset
    rows: Rows = {
        "specs": [
            {
                "spec": name,
                "study": spec.study,
                "title": spec.title,
                "scope": spec.scope,
                "checkpoint": checkpoint_id(spec.checkpoint),
                "checkpoint_name": spec.checkpoint.name,
                "checkpoint_source": spec.checkpoint.source,
                "checkpoint_revision": spec.checkpoint.revision,
                "checkpoint_license": spec.checkpoint.license,
                "checkpoint_json": _json(checkpoint),
                "synthetic": spec.checkpoint.synthetic,
                "workload": digest.digest_of(None if work is None else records.plain(work)),
                "dataset_name": dataset.name if dataset else "",
                "dataset_sha256": dataset.sha256 if dataset else "",
                "documents": len(spec.documents),
                "inputs": spec.workload.inputs if spec.workload else "",
                "workload_json": _json(workload),
                "contrasts_json": _plain(spec.contrasts),
                "families_json": _plain(spec.families),
                "tolerances_json": _json(spec.tolerances),
            }
        ],
        "spec_arms": [{"spec": name, "position": position, **records.plain(arm)} for position, arm in enumerate(spec.arms)],
    }
    if spec.format != "kv-ledger/spec/1":
        rows["spec_extras"] = [
            {
                "spec": name,
                "format": spec.format,
                "device": spec.device,
                **{f"{part}_json": _json(None if (value := getattr(spec, part)) is None else records.plain(value)) for part in _PARTS},
            }
        ]
    rows["spec_parts"] = [
        {"spec": name, "name": part, "part_json": _json(records.plain(value))}
        for part in _LATER
        if (value := getattr(spec, part)) is not None
    ]
    return rows


def _run(name: str, run: records.Run, result: records.Result) -> Rows:
    return {
        "runs": [
            {
                "run": name,
                "spec": run.spec,
                "result": run.result,
                "rules": run.rules,
                "outcome": run.outcome,
                "reason": run.reason,
                "result_outcome": result.outcome,
                "result_reason": result.reason,
                "started": result.started,
                "stopped": result.stopped,
                "hardware_class": result.host.hardware_class,
                "accelerator": result.host.accelerator,
                "host_json": _json(records.plain(result.host)),
                "harness_matched": run.harness.matched,
                "harness_revision": run.harness.revision,
                "harness_state": run.harness.state,
                "harness_json": _json(records.plain(run.harness)),
                "tokenizer_json": _json(result.tokenizer),
                "documents_json": _plain(result.documents),
                "segments_json": _plain(result.segments),
                "sources_json": _json(result.sources),
                "warnings_json": _json(run.warnings),
                "result_warnings_json": _json(result.warnings),
                "peak_memory_bytes": result.peak_memory_bytes,
            }
        ],
        "evidence": [{"run": name, "position": at, **records.plain(item)} for at, item in enumerate(run.evidence)],
    }


def requested(arm: records.Arm) -> dict[str, str]:
    """What a spec asks of an arm, under the keys that ``effective`` and ``measured`` use."""
    return {
        "implementation": arm.implementation,
        "compute": arm.compute,
        "keys": arm.keys,
        "values": arm.values,
        "scales": arm.scales,
        "granularity": arm.granularity,
    }


def _arms(name: str, result: records.Result, spec: records.Spec) -> Rows:
    rows: Rows = {"arms": [], "layers": [], "backings": []}
    asked = {arm.name: arm for arm in spec.arms}
    for position, arm in enumerate(result.arms):
        ask = asked.get(arm.name)
        rows["arms"].append(
            {
                "run": name,
                "position": position,
                "name": arm.name,
                "role": ask.role if ask else None,
                "outcome": arm.outcome,
                "reason": arm.reason,
                "requested_json": _json(requested(ask)) if ask else None,
                "effective_json": _json(arm.effective),
                "measured_json": _json(arm.measured),
                "backends_json": _plain(arm.backends),
                "census_json": _json(arm.census),
                "has_geometry": arm.geometry is not None,
                "seconds": arm.seconds,
            }
        )
        sides = {"declared": arm.geometry.declared, "measured": arm.geometry.measured} if arm.geometry else {}
        rows["layers"] += [
            {"run": name, "arm": position, "side": side, "position": at, **records.plain(layer)}
            for side, layers in sides.items()
            for at, layer in enumerate(layers)
        ]
        for at, backing in enumerate(arm.backings):
            plain = records.plain(backing)
            layers_json = _json(plain.pop("layers"))
            rows["backings"].append({"run": name, "arm": position, "position": at, "layers_json": layers_json, **plain})
    return rows


def _derived(name: str, run: records.Run) -> Rows:
    rows: Rows = {"measurements": [], "decisions": [], "gates": []}
    rows["kernels"] = [{"run": name, "position": position, **records.plain(kernel)} for position, kernel in enumerate(run.kernels)]
    for position, measurement in enumerate(run.measurements):
        rows["measurements"].append({"run": name, "position": position, **records.plain(measurement)})
    for position, decision in enumerate(run.decisions):
        plain = records.plain(decision)
        gates = plain.pop("gates")
        rows["decisions"].append({"run": name, "position": position, **plain})
        rows["gates"] += [{"run": name, "decision": position, "position": at, **gate} for at, gate in enumerate(gates)]
    return rows


def claim_rows(claims: Iterable[records.Claim]) -> Rows:
    """The rows of derived claims. ``position`` counts the claims on one checkpoint, in the order in which they were derived."""
    rows: Rows = {"claims": [], "claim_runs": []}
    counts: Counter[str] = Counter()
    for claim in claims:
        plain = records.plain(claim)
        runs = plain.pop("runs")
        rows["claims"].append({**plain, "position": counts[claim.checkpoint]})
        counts[claim.checkpoint] += 1
        rows["claim_runs"] += [{"key": claim.key, "position": position, "run": run} for position, run in enumerate(runs)]
    return rows
