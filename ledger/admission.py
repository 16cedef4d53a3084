"""What may be appended: checks on a record and its evidence that need the archive around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ledger import digest, recipes, records
from ledger.database import nul
from ledger.errors import InputError
from ledger.records import Body
from ledger.store import FolderStore
from ledger.tables import (
    AttachmentRow,
    ClaimRow,
    ClaimRunRow,
    EntryRow,
    EvidenceRow,
    RecipeRow,
    RedactionRow,
    RelationRow,
    ReportRow,
    RetractionRow,
    RunRow,
    SpecArmRow,
    SpecRow,
)

KIND: dict[type[records.Record], str] = {kind: name for name, kind in records.KINDS.items()}
"""The word for each kind of record."""


def check_references(connection: Connection, record: Body) -> None:
    """Refuse a record that names what is not recorded here. Raises InputError."""
    if isinstance(record, records.Run):
        if connection.scalar(sa.select(SpecRow.spec).where(SpecRow.spec == record.spec)) is None:
            raise InputError(
                "The run names a spec that is not recorded here.", found=record.spec, next="freeze the study into this archive first."
            )
    elif isinstance(record, (records.Report, records.Recipe)):
        _check_outside(connection, record)
    elif isinstance(record, records.Retract) and record.record is not None:
        kind = connection.scalar(sa.select(EntryRow.kind).where(EntryRow.record == record.record))
        if kind not in ("report", "recipe"):
            raise InputError(
                "The retraction names no report and no recipe of this archive.",
                found=record.record,
                next="see `ledger status` for those that are.",
            )
    elif isinstance(record, records.Redaction):
        _check_redaction(connection, record)
    elif not isinstance(record, (records.Spec, records.KeyChange)):
        others = {"run": subject(record), "other run": getattr(record, "by", None) or getattr(record, "reproduced", None)}
        for side, run in others.items():
            if run is not None and connection.scalar(sa.select(RunRow.run).where(RunRow.run == run)) is None:
                raise InputError(
                    f"The {KIND[type(record)]} names a {side} that is not recorded here.",
                    found=run,
                    next="see `ledger runs` for those that are.",
                )
        if others["run"] == others["other run"]:
            raise InputError(f"The {KIND[type(record)]} names one run twice.", found=str(others["run"]), next="name two runs.")
        if isinstance(record, records.Supersede):
            _refuse_withdrawn(connection, record.by)


def _check_redaction(connection: Connection, record: records.Redaction) -> None:
    """Only evidence can be taken out: of a record or a run's result, all that the archive says of it would be lost."""
    columns = (EvidenceRow.sha256, AttachmentRow.sha256, SpecArmRow.scale_source)
    named = any(connection.scalar(sa.select(column).where(column == record.object).limit(1)) is not None for column in columns)
    kept = any(
        connection.scalar(sa.select(column).where(column == record.object).limit(1)) is not None
        for column in (EntryRow.record, RunRow.result)
    )
    if kept or not named:
        raise InputError(
            "That object cannot be redacted.",
            expected="an evidence file that a run, a report or a recipe names, other than result.json",
            found=f"{record.object}, " + ("a record or a result" if kept else "which nothing here names"),
            next="see `ledger show RUN --json` for evidence and its digests.",
        )
    earlier = connection.scalar(sa.select(RedactionRow.record).where(RedactionRow.object == record.object))
    if earlier is not None:
        raise InputError(
            "That object was redacted before.", found=f"by {earlier}", next="`ledger redact` without another reason finishes it."
        )


def redacted(connection: Connection, digests: Iterable[str]) -> str | None:
    """One of ``digests`` whose bytes were taken out of the archive, or None."""
    found: str | None = connection.scalar(sa.select(RedactionRow.object).where(RedactionRow.object.in_(list(digests))).limit(1))
    return found


def _check_outside(connection: Connection, record: records.Report | records.Recipe) -> None:
    """Refuse a second report on a document, a second recipe of a name, and a recipe that cites what it may not."""
    gone = sa.select(RetractionRow.subject)
    if isinstance(record, records.Report):
        query = sa.select(ReportRow.report).where(ReportRow.sha256 == record.sha256, ReportRow.report.not_in(gone))
        what = "A report on that document is recorded already, and says something else."
    else:
        query = sa.select(RecipeRow.recipe).where(RecipeRow.name == record.name, RecipeRow.recipe.not_in(gone))
        what = "A recipe of that name is recorded already, and says something else."
    standing = connection.scalar(query)
    if standing is not None:
        raise InputError(what, found=standing, next=f"if it is wrong, retract it first: ledger retract {standing[:12]} …")
    if isinstance(record, records.Recipe):
        known = {found.claim.key: found for found in cited(connection, ClaimRow.key.in_(record.claims))}
        wrong = list(recipes.faults(record, known))
        if wrong:
            raise InputError(
                "The recipe cites what cannot validate it.",
                expected="claims of runs on its own checkpoint and of its own policy, by their full keys",
                found="; ".join(wrong)[:2000],
                next="see `ledger status --json` for keys and checkpoints.",
            )


def cited(connection: Connection, *where: sa.ColumnElement[bool]) -> list[recipes.Cited]:
    """Claims that come of a run, each with its deciding run and the policy of its candidate."""
    query = (
        sa.select(ClaimRow.__table__, RunRow.run, RunRow.spec)
        .join(ClaimRunRow, sa.and_(ClaimRunRow.key == ClaimRow.key, ClaimRunRow.position == 0))
        .join(RunRow, RunRow.run == ClaimRunRow.run)
        .where(*where)
        .order_by(ClaimRow.checkpoint, ClaimRow.position, ClaimRow.key)
    )
    rows = [dict(row) for row in connection.execute(query).mappings()]
    arms = {
        (row["spec"], row["name"]): dict(row)
        for row in connection.execute(sa.select(SpecArmRow.__table__).where(SpecArmRow.spec.in_({row["spec"] for row in rows}))).mappings()
    }
    found = []
    for row in rows:
        fields = {name: value for name, value in row.items() if name not in ("position", "run", "spec")}
        claim = records.convert(records.Claim, {**fields, "runs": (row["run"],)}, "A row of the database")
        arm = arms[row["spec"], recipes.candidate(claim)]
        policy = {name: arm[name] for name in records.Policy.__struct_fields__}
        found.append(recipes.Cited(claim, records.convert(records.Policy, policy, "A row of the database")))
    return found


def _refuse_withdrawn(connection: Connection, run: str) -> None:
    """A successor must count itself: else two runs could replace each other, and both would vanish."""
    row = connection.execute(sa.select(RelationRow.kind, RelationRow.author).where(RelationRow.run == run)).first()
    if row is not None:
        raise InputError(
            "That run cannot replace another: it was withdrawn itself.",
            expected="a run that still counts",
            found=f"run {run}, {'retracted' if row.kind == 'retract' else 'superseded'} by {row.author}",
            next="name a run that still counts, or retract the run with its reason.",
        )


def store_evidence(store: FolderStore, record: Body, evidence: Mapping[str, Path | bytes]) -> None:
    """Store what the record names, checking bytes against digests and sizes. Raises InputError, ArchiveError."""
    wanted: list[tuple[str, int | None]] = []
    if isinstance(record, records.Run):
        wanted = [(item.sha256, item.size) for item in record.evidence]
        names = [item.name for item in record.evidence]
        if len(set(names)) != len(names):
            raise InputError("The run lists two evidence files of one name.", found=next(name for name in names if names.count(name) > 1))
        if ("result.json", record.result) not in [(item.name, item.sha256) for item in record.evidence]:
            raise InputError("The run does not list its result.json as evidence.", expected=record.result)
    elif isinstance(record, (records.Report, records.Recipe)):
        wanted = [(item.sha256, item.size) for item in record.evidence]
    elif isinstance(record, records.Spec):
        wanted = [(arm.scale_source, None) for arm in record.arms if arm.scale_source]
    extra = sorted(set(evidence) - {name for name, _ in wanted})
    if extra:
        raise InputError(
            "Evidence was given that the record does not name.", found=extra[0], next="name it in the record, or leave it out."
        )
    for name, size in wanted:
        given = evidence.get(name)
        if given is None and not store.has(name):
            raise InputError("Evidence that the record names is missing.", expected=name, next="give that file with the record.")
        if isinstance(given, Path):
            _, found = store.put_file(given, expected=name)
        elif given is not None:
            if digest.sha256(given) != name:
                raise InputError("Evidence is not what the record says.", expected=name, found=digest.sha256(given))
            store.put(given)
            found = len(given)
        else:
            _, found = store.hash(name)
        if size is not None and size != found:
            raise InputError(f"The record gives a wrong size for evidence {name}.", expected=f"{found} bytes", found=f"{size} bytes")


def subject(record: Body) -> str:
    """The run that a correction or a reproduction is about."""
    return record.original if isinstance(record, records.Reproduction) else str(getattr(record, "run", ""))


def check_result(run: records.Run, result: records.Result) -> None:
    """Refuse a run whose result is another's. Raises InputError."""
    if result.spec != run.spec:
        raise InputError("The run's result is of another spec.", expected=run.spec, found=result.spec)
    refuse_nul(records.plain(result), "result.json")


def refuse_nul(value: Any, what: str, where: str = "") -> None:
    """Refuse NUL in any string, key or value. PostgreSQL cannot hold it, and both databases must behave alike."""
    if isinstance(value, str):
        if "\0" in value:
            raise nul(what, where or "a text")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_nul(key, what, f"a key of {where or 'it'}")
            refuse_nul(item, what, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            refuse_nul(item, what, f"{where}[{index}]")
