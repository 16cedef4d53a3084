"""The JSON documents that the command line and the web view show.

    status   {"rows": [{key, model, checkpoint, source, revision, arm, baseline, scope, study, workload,
              hardware, claim, status, synthetic, reason, runs}],
              "reported": what documents outside say, as ``reported``; never among the rows
              [{key, report, position, model, policy, scope, status, outcome, says, reason, document: {title, place, sha256, size, …}}],
              "recipes": as ``recipes``}
    recipes  [{recipe, name, title, checkpoint, model, policy, steps, requirements, lock, word, scopes, reason, claims: [a row each],
              beside: claims on the same checkpoint and policy that it does not cite}]
    runs     [{id, sequence, recorded_at, study, title, model, scope, outcome, reason, hardware, harness,
              warnings, superseded_by, retracted}]
    run      one run in full: spec, arms, groups, decisions, evidence, harness, checkpoint, host, relations, claims …
             ``groups`` of performance: {"decode/k16v8/b32/c8192/d128": {arm, case, kernel, refused, median_us, …}}
    compare  two runs side by side: {"a", "b", "same_spec", "facts", "measurements", "decisions"}
    precision  a checkpoint's stored policies in one table, of its runs of loss and of a task: see :mod:`ledger.precision`
    log      {"head": {size, root, text}, "entries": [{sequence, kind, record, recorded_at, leaf, run, says}]}

All of it is answered from the database, each document from one state of it, and every number passes through
:func:`ledger.digest.jsonable`: a document is strict JSON whatever a run measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from ledger import admission, digest, performance, precision, recipes, records, reports, validity
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.sidebyside import side_by_side
from ledger.tables import (
    ArmRow,
    AttachmentRow,
    BackingRow,
    ClaimRow,
    ClaimRunRow,
    DecisionRow,
    EntryRow,
    EvidenceRow,
    FactRow,
    GateRow,
    KernelRow,
    KeyChangeRow,
    LayerRow,
    MeasurementRow,
    RecipeClaimRow,
    RecipeRow,
    RedactionRow,
    RelationRow,
    ReportRow,
    ReproductionRow,
    RetractionRow,
    RunRow,
    SpecArmRow,
    SpecExtraRow,
    SpecPartRow,
    SpecRow,
)

POLICY = ("implementation", "compute", "keys", "values", "scales", "granularity")
"""The fields of an arm's policy that are requested, said to be effective, and measured."""

Row = dict[str, Any]


def _all(connection: Connection, query: sa.Executable) -> list[Row]:
    """All rows of a query as dicts; each column that ends in ``_json`` becomes its value, under the name without the ending."""
    return [
        {
            (name.removesuffix("_json")): (digest.parse(value.encode()) if name.endswith("_json") and value is not None else value)
            for name, value in row.items()
        }
        for row in connection.execute(query).mappings()
    ]


def _of(table: type[Any], *where: sa.ColumnElement[bool], order: Sequence[Any] = ()) -> sa.Select[Any]:
    return sa.select(*table.__table__.c).where(*where).order_by(*order)


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _jsonable(value: Any) -> Any:
    return digest.jsonable(value)


# ---------------------------------------------------------------- status


def _claims(connection: Connection, *where: sa.ColumnElement[bool]) -> list[Row]:
    order = [ClaimRow.synthetic, ClaimRow.model, ClaimRow.checkpoint, ClaimRow.position, ClaimRow.key]
    found = [_without(row, "position") for row in _all(connection, _of(ClaimRow, *where, order=order))]
    runs: dict[str, list[str]] = {}
    for key, run in connection.execute(sa.select(ClaimRunRow.key, ClaimRunRow.run).order_by(ClaimRunRow.key, ClaimRunRow.position)):
        runs.setdefault(key, []).append(run)
    sources = {
        row["checkpoint"]: row
        for row in _all(
            connection, sa.select(SpecRow.checkpoint, SpecRow.checkpoint_source, SpecRow.checkpoint_revision).order_by(SpecRow.spec)
        )
    }
    return [
        {
            **row,
            "claim": f"synthetic {row['status']}" if row["synthetic"] else row["status"],
            "source": sources.get(row["checkpoint"], {}).get("checkpoint_source"),
            "revision": sources.get(row["checkpoint"], {}).get("checkpoint_revision"),
            "runs": runs.get(row["key"], []),
        }
        for row in found
    ]


def status(archive: Archive) -> dict[str, Any]:
    """The status table: one row a claim, the deciding run of each first; apart from them what was reported, and the recipes."""
    with archive.reading() as connection:
        rows = _claims(connection)
        document = {"rows": rows, "reported": _reported(connection), "recipes": _recipes(connection, rows)}
    return {name: _jsonable(found) for name, found in document.items()}


# ---------------------------------------------------------------- reports and recipes


def _withdrawn(connection: Connection) -> dict[str, str]:
    """Why each report or recipe that was retracted was, by its digest; the last retraction counts."""
    query = (
        sa.select(RetractionRow.subject, RetractionRow.author, RetractionRow.reason)
        .join(EntryRow, EntryRow.record == RetractionRow.record)
        .order_by(EntryRow.sequence)
    )
    return {subject: f"retracted by {author}: {reason}" for subject, author, reason in connection.execute(query)}


def _reported(connection: Connection) -> list[Row]:
    """What documents outside say, in the order of the log and of each report."""
    withdrawn = _withdrawn(connection)
    query = (
        sa.select(*ReportRow.__table__.c, *(column for column in FactRow.__table__.c if column.name != "report"))
        .join(FactRow, FactRow.report == ReportRow.report)
        .join(EntryRow, EntryRow.record == ReportRow.report)
        .order_by(EntryRow.sequence, FactRow.position)
    )
    return [
        {
            "key": reports.key(row["sha256"], row),
            **{name: row[name] for name in ("report", "position", "model", "policy", "scope", "outcome", "says")},
            "status": "retracted" if row["report"] in withdrawn else "reported",
            "reason": withdrawn.get(row["report"], ""),
            "document": {name: row[name] for name in ("title", "place", "sha256", "size", "license", "kept")},
        }
        for row in _all(connection, query)
    ]


def recipes_of(archive: Archive) -> list[dict[str, Any]]:
    """All recipes in the order of the log, each as far as its claims reach now."""
    with archive.reading() as connection:
        documents: list[dict[str, Any]] = _jsonable(_recipes(connection, _claims(connection)))
    return documents


def _recipes(connection: Connection, rows: Sequence[Row]) -> list[Row]:
    query = sa.select(*RecipeRow.__table__.c).join(EntryRow, EntryRow.record == RecipeRow.recipe).order_by(EntryRow.sequence)
    found = _all(connection, query)
    if not found:
        return []
    withdrawn, claims = _withdrawn(connection), {row["key"]: row for row in rows}
    cites: dict[str, list[str]] = {}
    for row in _all(connection, _of(RecipeClaimRow, order=[RecipeClaimRow.recipe, RecipeClaimRow.position])):
        cites.setdefault(row["recipe"], []).append(row["key"])
    locks = {row["record"]: {name: row[name] for name in ("name", "sha256", "size")} for row in _all(connection, _of(AttachmentRow))}
    of_policy = admission.cited(connection, ClaimRow.checkpoint.in_({row["checkpoint"] for row in found}))
    documents = []
    for row in found:
        # a claim that is not there lends no support; verification names it
        keys = cites.get(row["recipe"], [])
        cited = [claims[key] for key in keys if key in claims]
        verdict = recipes.judge(cited, withdrawn.get(row["recipe"], ""))
        policy = records.convert(records.Policy, row["policy"], "A row of the database")
        same = [other.claim.key for other in of_policy if (other.claim.checkpoint, other.policy) == (row["checkpoint"], policy)]
        documents.append(
            {
                **row,
                "model": cited[0]["model"] if cited else "",
                "lock": locks.get(row["recipe"]),
                "word": verdict.word,
                "scopes": list(verdict.scopes),
                "reason": verdict.reason,
                "claims": cited,
                "beside": [claims[key] for key in same if key not in keys],
            }
        )
    return documents


# ---------------------------------------------------------------- runs and log


def runs(archive: Archive) -> list[dict[str, Any]]:
    """All runs in the order of the log."""
    query = (
        sa.select(
            RunRow.run.label("id"),
            EntryRow.sequence,
            EntryRow.recorded_at,
            SpecRow.study,
            SpecRow.title,
            SpecRow.checkpoint_name.label("model"),
            SpecRow.scope,
            RunRow.outcome,
            RunRow.reason,
            RunRow.hardware_class.label("hardware"),
            RunRow.harness_revision.label("harness"),
            RunRow.warnings_json,
            RunRow.result_warnings_json,
        )
        .join(EntryRow, EntryRow.record == RunRow.run)
        .join(SpecRow, SpecRow.spec == RunRow.spec)
        .order_by(EntryRow.sequence)
    )
    with archive.reading() as connection:
        found = _all(connection, query)
        corrections = list(connection.execute(sa.select(RelationRow.kind, RelationRow.run, RelationRow.by)))
    replaced = {run: by for kind, run, by in corrections if kind == "supersede"}
    withdrawn = {run for kind, run, _ in corrections if kind == "retract"}
    documents: list[dict[str, Any]] = _jsonable(
        [
            {
                **_without(row, "warnings", "result_warnings"),
                "warnings": len(_warnings(row)),
                "superseded_by": replaced.get(row["id"]),
                "retracted": row["id"] in withdrawn,
            }
            for row in found
        ]
    )
    return documents


def _warnings(row: Row) -> list[str]:
    return [*row["warnings"], *(text for text in row["result_warnings"] if text not in row["warnings"])]


def log(archive: Archive) -> dict[str, Any]:
    """The log's head and its entries in order, each with the run that it is about and what it says."""
    head = archive.head
    specs, owners = aliased(SpecRow), aliased(SpecRow)
    query = (
        sa.select(
            EntryRow.sequence,
            EntryRow.kind,
            EntryRow.record,
            EntryRow.recorded_at,
            EntryRow.leaf_hash.label("leaf"),
            specs.study.label("spec_study"),
            specs.title.label("spec_title"),
            owners.study.label("run_study"),
            RunRow.run.label("own_run"),
            RunRow.outcome,
            RelationRow.run.label("corrected"),
            RelationRow.by,
            RelationRow.author,
            RelationRow.reason.label("correction"),
            ReproductionRow.original,
            ReproductionRow.verdict,
            ReproductionRow.reason.label("comparison"),
            ReportRow.title.label("report_title"),
            RecipeRow.name.label("recipe_name"),
            RecipeRow.title.label("recipe_title"),
            RetractionRow.subject,
            RetractionRow.author.label("retracted_by"),
            RetractionRow.reason.label("retraction"),
            KeyChangeRow.action.label("key_action"),
            KeyChangeRow.key.label("key_text"),
            RedactionRow.object.label("redacted"),
            sa.func.coalesce(KeyChangeRow.author, RedactionRow.author).label("kept_by"),
            sa.func.coalesce(KeyChangeRow.reason, RedactionRow.reason).label("kept_why"),
        )
        .outerjoin(specs, specs.spec == EntryRow.record)
        .outerjoin(RunRow, RunRow.run == EntryRow.record)
        .outerjoin(owners, owners.spec == RunRow.spec)
        .outerjoin(RelationRow, RelationRow.record == EntryRow.record)
        .outerjoin(ReproductionRow, ReproductionRow.record == EntryRow.record)
        .outerjoin(ReportRow, ReportRow.report == EntryRow.record)
        .outerjoin(RecipeRow, RecipeRow.recipe == EntryRow.record)
        .outerjoin(RetractionRow, RetractionRow.record == EntryRow.record)
        .outerjoin(KeyChangeRow, KeyChangeRow.record == EntryRow.record)
        .outerjoin(RedactionRow, RedactionRow.record == EntryRow.record)
        .order_by(EntryRow.sequence)
    )
    with archive.reading() as connection:
        found = _all(connection, query)
    return {
        "head": {"size": head.size, "root": head.root.hex(), "text": head.encode().decode()},
        "entries": _jsonable(
            [
                {
                    **{name: row[name] for name in ("sequence", "kind", "record", "recorded_at", "leaf")},
                    "run": row["own_run"] or row["corrected"] or row["original"],
                    "says": _says(row),
                }
                for row in found
            ]
        ),
    }


def _says(row: Row) -> str:
    if row["kind"] == "spec":
        return f"study {row['spec_study']} frozen: {row['spec_title']}"
    if row["kind"] == "run":
        return f"study {row['run_study']} {row['outcome']}"
    if row["kind"] == "reproduction":
        return f"{row['verdict']}: {row['comparison']}" if row["comparison"] else str(row["verdict"])
    if row["kind"] == "report":
        return f"a document outside is reported on: {row['report_title']}"
    if row["kind"] == "recipe":
        return f"recipe {row['recipe_name']}: {row['recipe_title']}"
    if row["kind"] == "key":
        verb = "begins" if row["key_action"] == "add" else "ends"
        return f"key {row['key_text']} {verb} to sign, {row['kept_by']}: {row['kept_why']}"
    if row["kind"] == "redaction":
        return f"the bytes of {row['redacted'][:10]} were removed, {row['kept_by']}: {row['kept_why']}"
    if row["subject"]:
        return f"{row['subject'][:10]} retracted, {row['retracted_by']}: {row['retraction']}"
    to = f" by {row['by'][:10]}" if row["by"] else ""
    verb = "superseded" if row["kind"] == "supersede" else "retracted"
    return f"{verb}{to}, {row['author']}: {row['correction']}"


# ---------------------------------------------------------------- one run


def run(archive: Archive, name: str) -> dict[str, Any]:
    """One run in full; ``name`` is its digest or a unique prefix. Raises InputError where there is none."""
    found = archive.resolve(name)
    with archive.reading() as connection:
        document: dict[str, Any] = _jsonable(_run(connection, found))
    return document


def _one(connection: Connection, query: sa.Executable, what: str) -> Row:
    rows = _all(connection, query)
    if not rows:
        raise InputError(f"The database holds no {what}.", next="run `ledger verify`; `ledger rebuild` makes the database anew.")
    return rows[0]


def _run(connection: Connection, name: str) -> Row:
    row = _one(connection, _of(RunRow, RunRow.run == name), f"run {name}")
    entry = _one(connection, _of(EntryRow, EntryRow.record == name), f"entry of run {name}")
    spec = _spec_row(connection, row["spec"])
    asked = [
        _without(arm, "spec", "position")
        for arm in _all(connection, _of(SpecArmRow, SpecArmRow.spec == row["spec"], order=[SpecArmRow.position]))
    ]
    entry_record = {"format": "kv-ledger/entry/1", **{key: entry[key] for key in ("sequence", "kind", "record", "recorded_at")}}
    return {
        "id": name,
        "sequence": entry["sequence"],
        "entry": digest.digest_of(entry_record),
        "recorded_at": entry["recorded_at"],
        "study": spec["study"],
        "title": spec["title"],
        "model": spec["checkpoint_name"],
        "scope": spec["scope"],
        "outcome": row["outcome"],
        "reason": row["reason"],
        "rules": row["rules"],
        "spec_digest": row["spec"],
        "result_digest": row["result"],
        "warnings": _warnings(row),
        "spec": _spec(connection, spec, asked),
        "checkpoint": {**spec["checkpoint"], "digest": spec["checkpoint_digest"], "synthetic": spec["synthetic"]},
        "tokenizer": row["tokenizer"],
        "documents": row["documents"],
        "started": row["started"],
        "stopped": row["stopped"],
        "segments": row["segments"],
        "peak_memory_bytes": row["peak_memory_bytes"],
        "host": {**row["host"], "hardware_class": row["hardware_class"]},
        "harness": {**row["harness"], "revision": row["harness_revision"]},
        "sources": row["sources"],
        "arms": _arms(connection, name, asked, whole=spec["workload"] is not None or spec["scope"] == "quality.task"),
        "groups": _groups(connection, name, spec["checkpoint_name"]),
        "decisions": _decisions(connection, name),
        "evidence": [
            _without(file, "run", "position")
            for file in _all(connection, _of(EvidenceRow, EvidenceRow.run == name, order=[EvidenceRow.position]))
        ],
        "relations": _relations(connection, name),
        "claims": _claims(connection, ClaimRow.key.in_(sa.select(ClaimRunRow.key).where(ClaimRunRow.run == name))),
    }


def _spec_row(connection: Connection, name: str) -> Row:
    """A spec's row. Its digests of the checkpoint and the workload make way for the parts themselves."""
    digests = {"checkpoint", "workload"}
    columns = [column.label(f"{column.name}_digest") if column.name in digests else column for column in SpecRow.__table__.c]
    return _one(connection, sa.select(*columns).where(SpecRow.spec == name), f"spec {name}")


def _spec(connection: Connection, row: Row, asked: Sequence[Row]) -> Row:
    """The spec as its record has it."""
    parts = ("study", "title", "scope", "checkpoint", "workload", "contrasts", "families", "tolerances")
    extra = _all(connection, _of(SpecExtraRow, SpecExtraRow.spec == row["spec"]))
    more = _without(extra[0], "spec") if extra else {"format": "kv-ledger/spec/1"}
    for later in _all(connection, _of(SpecPartRow, SpecPartRow.spec == row["spec"], order=[SpecPartRow.name])):
        more[later["name"]] = later["part"]
    return {**more, **{part: row[part] for part in parts}, "arms": list(asked)}


def _groups(connection: Connection, name: str, model: str) -> Row:
    """The figures of performance by what they are of, each with the kernel that ran, in the order of the cases."""
    found: Row = {}
    for row in _all(connection, _of(KernelRow, KernelRow.run == name, order=[KernelRow.position])):
        found[performance.group(model, row["case"], row["arm"])] = _without(row, "run", "position")
    if found:
        for row in _all(connection, _of(MeasurementRow, MeasurementRow.run == name, order=[MeasurementRow.position])):
            of, _, figure = row["name"].rpartition("/")
            if of in found:
                found[of][figure] = row["value"]
    return found


def _arms(connection: Connection, name: str, asked: Sequence[Row], *, whole: bool) -> list[Row]:
    """Every arm of the spec, in its order, with what the result says about it."""
    held = {row["name"]: row for row in _all(connection, _of(ArmRow, ArmRow.run == name, order=[ArmRow.position]))}
    layers: dict[tuple[int, str], list[Row]] = {}
    for row in _all(connection, _of(LayerRow, LayerRow.run == name, order=[LayerRow.arm, LayerRow.side, LayerRow.position])):
        layers.setdefault((row["arm"], row["side"]), []).append(_without(row, "run", "arm", "side", "position"))
    backings: dict[int, list[Row]] = {}
    for row in _all(connection, _of(BackingRow, BackingRow.run == name, order=[BackingRow.arm, BackingRow.position])):
        backings.setdefault(row["arm"], []).append(_without(row, "run", "arm", "position"))
    measured: dict[str, list[Row]] = {}
    for row in _all(connection, _of(MeasurementRow, MeasurementRow.run == name, order=[MeasurementRow.position])):
        measured.setdefault(row["arm"], []).append(_without(row, "run", "arm", "position"))
    documents = []
    for ask in asked:
        row = held.get(ask["name"], {})
        at = row.get("position", -1)
        geometry = {side: layers.get((at, side), []) for side in ("declared", "measured")} if row.get("has_geometry") else None
        document = {
            "name": ask["name"],
            "role": ask["role"],
            "repeats": ask["repeats"],
            "backend": ask["backend"],
            "chunk": ask["chunk"],
            "outcome": row.get("outcome", "not run"),
            "reason": row.get("reason", ""),
            "requested": {field: ask[field] for field in POLICY},
            "effective": row.get("effective", {}),
            "measured": row.get("measured", {}),
            "backends": row.get("backends", []),
            "census": row.get("census", {}),
            "seconds": row.get("seconds"),
            "geometry": geometry,
            "backings": backings.get(at, []),
            "measurements": measured.get(ask["name"], []),
        }
        documents.append({**document, "contradictions": _contradictions(ask, document, whole)})
    return documents


def _contradictions(ask: Row, arm: Row, whole: bool) -> list[str]:
    """What the gates call a contradiction; only an arm that ran to its end can contradict what was asked."""
    if arm["outcome"] != "completed":
        return []
    facts = {key: arm[key] for key in ("name", "outcome", "effective", "measured", "backends", "geometry", "backings")}
    asked, found = records.convert(records.Arm, ask, "an arm"), records.convert(records.ArmResult, facts, "an arm's result")
    return validity.contradictions(asked, found, whole=whole)


def _decisions(connection: Connection, name: str) -> list[Row]:
    judged: dict[int, list[Row]] = {}
    for row in _all(connection, _of(GateRow, GateRow.run == name, order=[GateRow.decision, GateRow.position])):
        judged.setdefault(row["decision"], []).append(_without(row, "run", "decision", "position"))
    found = _all(connection, _of(DecisionRow, DecisionRow.run == name, order=[DecisionRow.position]))
    return [{**_without(row, "run", "position"), "gates": judged.get(row["position"], [])} for row in found]


def _relations(connection: Connection, name: str) -> list[Row]:
    """Corrections and reproductions that name this run, in the order of the log; ``run`` is the other run, if any."""
    when = (EntryRow.sequence, EntryRow.recorded_at)
    corrections = _all(
        connection,
        sa.select(*RelationRow.__table__.c, *when)
        .join(EntryRow, EntryRow.record == RelationRow.record)
        .where(sa.or_(RelationRow.run == name, RelationRow.by == name)),
    )
    repeats = _all(
        connection,
        sa.select(*ReproductionRow.__table__.c, *when)
        .join(EntryRow, EntryRow.record == ReproductionRow.record)
        .where(sa.or_(ReproductionRow.original == name, ReproductionRow.reproduced == name)),
    )
    found: list[Row] = []
    for row in corrections:
        if row["kind"] == "retract":
            kind, other = "retracted", None
        else:
            kind, other = ("superseded by", row["by"]) if row["run"] == name else ("supersedes", row["run"])
        found.append({**_without(row, "by"), "kind": kind, "run": other})
    for row in repeats:
        kind, other = ("reproduced by", row["reproduced"]) if row["original"] == name else ("reproduces", row["original"])
        found.append({**_without(row, "original", "reproduced"), "kind": kind, "run": other})
    return sorted(found, key=lambda row: int(row["sequence"]))


def evidence(archive: Archive, sha256: str) -> dict[str, Any] | None:
    """Name and media type of an object that the archive refers to, evidence or record; None for any other."""
    with archive.reading() as connection:
        files = _all(connection, _of(EvidenceRow, EvidenceRow.sha256 == sha256, order=[EvidenceRow.run, EvidenceRow.position]).limit(1))
        if files:
            return {name: files[0][name] for name in ("name", "sha256", "size", "media_type")}
        kept = _all(connection, _of(AttachmentRow, AttachmentRow.sha256 == sha256, order=[AttachmentRow.record]).limit(1))
        if kept:
            return {name: kept[0][name] for name in ("name", "sha256", "size", "media_type")}
        entries = _all(connection, _of(EntryRow, EntryRow.record == sha256))
    return {"name": f"{entries[0]['kind']}.json", "sha256": sha256, "size": None, "media_type": "application/json"} if entries else None


# ---------------------------------------------------------------- two runs side by side


def compare(archive: Archive, a: str, b: str) -> dict[str, Any]:
    """Two runs side by side; each is named by its digest or a unique prefix. Raises InputError."""
    return side_by_side(run(archive, a), run(archive, b))


# ---------------------------------------------------------------- precision and scaling


def precision_table(archive: Archive, checkpoint: str) -> dict[str, Any]:
    """The table of one checkpoint, by its digest. Raises InputError where no spec is of it."""
    with archive.reading() as connection:
        specs = _all(connection, _of(SpecRow, SpecRow.checkpoint == checkpoint, order=[SpecRow.spec]).limit(1))
        if not specs:
            raise InputError("No spec of this archive is of that checkpoint.", found=checkpoint[:80], next="see `ledger table`.")
        whole: dict[str, Row | None] = {}
        said: dict[str, Row | None] = {}
        for name in precision.SCOPES:
            best, others = precision.chosen(_standing(connection, checkpoint, name))
            whole[name] = None if best is None else _jsonable(_run(connection, best["run"]))
            said[name] = None
            if best is not None:
                more = {"items": best["items"]} if name == "task" else {"documents": best["documents"]}
                said[name] = {
                    **{key: best[key] for key in ("run", "study", "hardware")},
                    **more,
                    "others": [each["run"] for each in others],
                }
        document = {
            "model": next((found["model"] for found in whole.values() if found is not None), specs[0]["checkpoint_name"]),
            "checkpoint": checkpoint,
            "source": specs[0]["checkpoint_source"],
            "synthetic": specs[0]["synthetic"],
            "runs": said,
            "rows": precision.joined(whole["loss"], whole["task"]),
        }
    found: dict[str, Any] = _jsonable(document)
    return found


def _standing(connection: Connection, checkpoint: str, name: str) -> list[Row]:
    """Completed runs of a scope on a checkpoint whose sources are known and that are neither retracted nor superseded.

    Each with how many of its 8-bit arms ran to their end.
    """
    covered = (
        sa.select(sa.func.count())
        .where(ArmRow.run == RunRow.run, ArmRow.outcome == "completed", SpecArmRow.name == ArmRow.name)
        .where(SpecArmRow.spec == SpecRow.spec, SpecArmRow.role != "repeat")
        .where(sa.or_(SpecArmRow.keys == "fp8_e4m3", SpecArmRow.values == "fp8_e4m3"))
        .scalar_subquery()
    )
    query = (
        sa.select(
            RunRow.run,
            SpecRow.study,
            SpecRow.documents,
            RunRow.hardware_class.label("hardware"),
            covered.label("covered"),
            SpecPartRow.part_json,
        )
        .join(EntryRow, EntryRow.record == RunRow.run)
        .join(SpecRow, SpecRow.spec == RunRow.spec)
        .outerjoin(SpecPartRow, sa.and_(SpecPartRow.spec == SpecRow.spec, SpecPartRow.name == "task"))
        .where(SpecRow.checkpoint == checkpoint, SpecRow.scope == precision.SCOPES[name], RunRow.outcome == "completed")
        .where(RunRow.harness_matched != "none", RunRow.run.not_in(sa.select(RelationRow.run)))
        .order_by(EntryRow.sequence)
    )
    return [{**row, "items": len((row["part"] or {}).get("items", ()))} for row in _all(connection, query)]


def precision_tables(archive: Archive, wanted: str = "") -> list[dict[str, Any]]:
    """The tables of all checkpoints that have rows, the published ones first; or of those whose model, or digest from its first digits on,
    is ``wanted``. Raises InputError where there is none of these.
    """
    query = (
        sa.select(SpecRow.checkpoint, SpecRow.checkpoint_name)
        .where(SpecRow.scope.in_(precision.SCOPES.values()))
        .distinct()
        .order_by(SpecRow.checkpoint_name, SpecRow.checkpoint)
    )
    with archive.reading() as connection:
        known = [(str(checkpoint), str(name)) for checkpoint, name in connection.execute(query)]
    named = dict.fromkeys(
        checkpoint for checkpoint, name in known if not wanted or name == wanted or (len(wanted) >= 4 and checkpoint.startswith(wanted))
    )
    found = [table for table in (precision_table(archive, checkpoint) for checkpoint in named) if table["rows"]]
    if wanted and not found:
        raise InputError(
            "No run of losses or of a task stands for that model.",
            expected="; ".join(dict.fromkeys(name for _, name in known)) or "a model of this archive",
            found=wanted[:200],
            next="choose one of them, or the digest of its checkpoint.",
        )
    return sorted(found, key=lambda table: bool(table["synthetic"]))
