"""What may be appended: checks on a record and its evidence that need the archive around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ledger import digest, records
from ledger.database import nul
from ledger.errors import InputError
from ledger.records import Body
from ledger.store import FolderStore
from ledger.tables import RelationRow, RunRow, SpecRow

KIND: dict[type[records.Record], str] = {kind: name for name, kind in records.KINDS.items()}
"""The word for each kind of record."""


def check_references(connection: Connection, record: Body) -> None:
    """Refuse a record that names what is not recorded here. Raises InputError."""
    if isinstance(record, records.Run):
        if connection.scalar(sa.select(SpecRow.spec).where(SpecRow.spec == record.spec)) is None:
            raise InputError(
                "The run names a spec that is not recorded here.", found=record.spec, next="freeze the study into this archive first."
            )
    elif not isinstance(record, records.Spec):
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
