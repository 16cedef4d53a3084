"""The archive: the only place where records, objects, log and rows meet.

The truth is the objects and the log; the database is an index over them, made anew at any time.

Order of writing, each step durable before the next:

    1  evidence objects                killed here: objects that nothing names; harmless
    2  the record's object             the same
    3  rows, in an open transaction    killed here: the database rolls back
    4  log/<n>.json                    killed here: an entry beyond the head, whose objects are all there
    5  the transaction commits         killed here: the same, with its rows
    6  log/head                        done

After 4 or 5 the next writer adopts the entry: it inserts the rows where they are missing, replaces
the head and says so in ``notices``. Readers go by the head and, in the database, at most one entry beyond it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ledger import admission, claims, digest, records, signing
from ledger.database import Database, check_rows, stored_form
from ledger.errors import ArchiveError, InputError, RedactedError
from ledger.log import Head, leaf_hash
from ledger.notes import Note, Signature, Signer
from ledger.records import Body, Entry, consistency
from ledger.rows import Rows, claim_rows, rows_of
from ledger.store import FolderStore
from ledger.tables import (
    AttachmentRow,
    ClaimRow,
    ClaimRunRow,
    EntryRow,
    EvidenceRow,
    RedactionRow,
    RelationRow,
    ReproductionRow,
    RunRow,
    SpecArmRow,
    SpecRow,
)

__all__ = ["Archive", "claim_rows", "rows_of", "stored_form"]

R = TypeVar("R", bound=records.Record)


class Archive:
    """An archive that is open. Use :meth:`create` or :meth:`open`; each is a context manager.

    :meth:`at` gives one whose database was not looked at: for :meth:`migrate`, :meth:`rebuild` and a
    verification, which must work where :meth:`open` refuses.
    """

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = Path(folder)
        self.store = FolderStore(self.folder)
        self.database = Database.file(self.folder / "ledger.db")
        if url:
            named = Database(url)
            place = Path(str(named.url.database))
            if not named.sqlite or place.parent.resolve() / place.name != self.folder.resolve() / "ledger.db":
                self.database = named
        self.notices: list[str] = []
        self._write = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    # ------------------------------------------------------------ opening

    @classmethod
    def create(cls, folder: Path, url: str | None = None) -> Archive:
        """Make an empty archive in ``folder``, which must be missing or empty. Raises ArchiveError."""
        archive = cls(folder, url)
        try:
            archive._refuse_another()  # before the lock, which would leave its file in a folder that is another's
            with archive.store.lock():
                archive._refuse_another()  # another process may have been quicker
                try:
                    archive.store.write_head(Head.over(()))
                    archive._prepare(write=True)
                except BaseException:
                    archive._unmake()
                    raise
        except BaseException:
            archive.close()
            raise
        return archive

    def _unmake(self) -> None:
        """Take back an archive that could not be made, so that the command can be repeated. Called under the lock that made it."""
        self.database.close()
        with suppress(OSError, ArchiveError):
            if self.store.sequences():
                return
            if self.database.own:  # first: without its head, the folder would not be empty
                self.database.remove_file()
            self.store.remove_head()

    def _refuse_another(self) -> None:
        """Refuse to make an archive where there is something already: in its folder, or in its database."""
        if self.store.has_head():
            raise ArchiveError(f"There is an archive already: {self.folder}", next="use it, or choose another folder.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # what a killed `create` leaves behind is taken up again
            others = sorted(item.name for item in self.folder.iterdir() if item.name not in ("tmp", "log", "objects"))
        except OSError as error:
            raise ArchiveError(
                f"The folder cannot be made: {self.folder}", found=str(error.strerror), next="choose another folder."
            ) from error
        if others or self.store.sequences() or next(self.store.digests(), None):
            raise ArchiveError(f"The folder is not empty: {self.folder}", found=", ".join(others[:5]), next="choose an empty folder.")
        if self.database.revision() is not None:
            with self.database.reading() as connection:
                if connection.scalar(sa.select(sa.func.count()).select_from(EntryRow)):
                    raise ArchiveError(
                        f"The database {self.database} belongs to another archive.", next="choose another database, or empty its schema."
                    )

    @classmethod
    def open(cls, folder: Path, url: str | None = None, write: bool = False) -> Archive:
        """Open the archive in ``folder``. Raises ArchiveError, SchemaError.

        A database that is missing is built, and one that is behind the log is brought up to it; ``notices`` says so.
        """
        return cls.at(folder, url)._open(write)

    @classmethod
    def at(cls, folder: Path, url: str | None = None) -> Archive:
        """The archive in ``folder``, its database not looked at. Raises ArchiveError where there is no archive."""
        archive = cls(folder, url)
        if not archive.store.has_head():
            raise ArchiveError(
                f"This folder is no archive: {folder}",
                expected="a folder with log/head",
                found="no such folder" if not archive.folder.is_dir() else "no log/head",
                next="name the archive's folder with --archive or LEDGER_ARCHIVE, or make one with `ledger init`.",
            )
        return archive

    def _open(self, write: bool) -> Archive:
        try:
            self._prepare(write)
        except BaseException:
            self.close()
            raise
        return self

    def _prepare(self, write: bool) -> None:
        self._write = write
        writable = self.store.writable()
        if write and not writable:
            raise ArchiveError(
                f"The archive's folder is read-only: {self.folder}", next="give this user the right to write there, or work on a copy."
            )
        if not writable and self.database.own:
            self._scratch = tempfile.TemporaryDirectory(prefix="kv-ledger-")
            self.database = Database.file(Path(self._scratch.name) / "ledger.db")
            self._settle(adopt=False)
            self.notices.insert(0, "The archive's folder is read-only: its database was built in a temporary folder.")
        elif write or not self._settled():
            with self.store.lock() if writable else nullcontext():
                self._settle(adopt=write)

    def close(self) -> None:
        """Close the database; remove a temporary one."""
        self.database.close()
        if self._scratch:
            self._scratch.cleanup()
            self._scratch = None

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ the database against the log

    def _leaves(self, connection: Connection) -> list[bytes]:
        """Leaf hashes that the database holds, in order."""
        found = connection.execute(sa.select(EntryRow.sequence, EntryRow.leaf_hash).order_by(EntryRow.sequence)).all()
        try:
            leaves = [bytes.fromhex(leaf) for _, leaf in found]
        except (ValueError, TypeError):
            leaves = []
        if [sequence for sequence, _ in found] != list(range(len(leaves))) or len(leaves) != len(found):
            raise self._contradiction("its entries are not numbered 0, 1, 2 … or have no hash")
        return leaves

    def _contradiction(self, found: str) -> ArchiveError:
        return ArchiveError(
            f"The database {self.database} contradicts the log.",
            found=found,
            next="run `ledger verify` to see what differs; if the log is right, `ledger rebuild` makes the database anew.",
        )

    def _settled(self) -> bool:
        """Whether the database can be read as it is. Takes no lock: a False may only mean that a writer is at work."""
        found = self.database.revision()
        if found is None:
            return False
        self.database.check_revision(found)
        with self.database.reading() as connection:  # database first: the head that is read later cannot be older
            leaves = self._leaves(connection)
        head = self.store.read_head()
        if len(leaves) == head.size + 1 and self.store.has_entry(head.size):
            ahead = leaves.pop()
            if leaf_hash(self.store.read_entry(head.size)) != ahead:
                return False
        return Head.over(leaves) == head

    def _settle(self, adopt: bool) -> None:
        """Build the database, or bring it up to the log. Called under the lock."""
        found = self.database.revision()
        if found is not None:
            self.database.check_revision(found)
        with self.database.writing() as connection:
            if found is None:
                self.database.upgrade(connection)
            head, notices = self._catch_up(connection, adopt, built=found is None)
            named = self._named(connection, self.store.pending()) if adopt else set()
            connection.commit()
        if head != self.store.read_head():
            self.store.write_head(head)
        self.notices += notices  # now that it is so
        if named:
            self.store.arrived(named)

    def _named(self, connection: Connection, digests: set[str]) -> set[str]:
        """Those of ``digests`` that a record names, or is."""
        columns = (EntryRow.record, EvidenceRow.sha256, AttachmentRow.sha256, SpecArmRow.scale_source)
        return {str(name) for column in columns if digests for name in connection.scalars(sa.select(column).where(column.in_(digests)))}

    def _catch_up(self, connection: Connection, adopt: bool, built: bool) -> tuple[Head, list[str]]:
        """Insert the rows of entries that the database lacks; the head that is then right, and what is to be said once it stands."""
        notices: list[str] = []
        head, leaves = self.store.read_head(), self._leaves(connection)
        have, size = len(leaves), head.size
        if have > size + 1 or (have == size + 1 and not self.store.has_entry(size)):
            raise self._contradiction(f"{have} entries where the log's head has {size}")
        if adopt and self.store.has_entry(size):
            if self.store.has_entry(size + 1):
                raise ArchiveError(
                    "The log holds several entries beyond its head.", next="restore log/head from a copy, or run `ledger verify`."
                )
            left = records.decode(Entry, self.store.read_entry(size), f"entry {size} of the log")
            if left.record not in self.store.pending():  # every append announces its record first
                raise ArchiveError(
                    f"Entry {size} stands beyond the log's head, and no append announced its record.",
                    next=f"remove log/{size:09}.json, or restore log/head from another copy of the archive.",
                )
            size += 1
            notices.append(f"Entry {head.size} was left unfinished by an earlier writer; it has been completed.")
        if have == head.size + 1 and leaf_hash(self.store.read_entry(head.size)) != leaves[-1]:
            raise self._contradiction(f"entry {head.size} differs")
        missing = [self.store.read_entry(sequence) for sequence in range(have, size)]
        leaves += [leaf_hash(data) for data in missing]
        if Head.over(leaves[: head.size]) != head:
            in_log = Head.over([leaf_hash(data) for data in self.store.entries(head.size)])
            if in_log != head:
                raise ArchiveError("The log's entries do not agree with its head.", next="run `ledger verify`, which names the entry.")
            raise self._contradiction("its entries are not those of the log")
        if missing:
            for sequence, data in enumerate(missing, start=have):
                self._insert_entry(connection, sequence, data)
            self._refresh_claims(connection)
            if built:
                notices.append(f"The database was built from the log: {len(leaves)} entries.")
            elif have < head.size:
                notices.append(f"The database was behind the log: {head.size - have} entries were added to it.")
        return Head.over(leaves) if size > head.size else head, notices

    def _insert_entry(self, connection: Connection, sequence: int, data: bytes) -> None:
        entry = records.decode(Entry, data, f"entry {sequence} of the log")
        if entry.sequence != sequence:
            raise ArchiveError(f"Entry {sequence} of the log says that it is number {entry.sequence}.", next="run `ledger verify`.")
        self.database.insert(connection, self._rows(entry, self._load(records.KINDS[entry.kind], entry.record)))

    def _rows(self, entry: Entry, record: Any) -> Rows:
        if isinstance(record, records.Run):
            rows = rows_of(entry, record, self.result(record), self._load(records.Spec, record.spec))
        else:
            rows = rows_of(entry, record)
        check_rows(rows, f"The {entry.kind} {entry.record[:12]}")
        return rows

    def _refresh_claims(self, connection: Connection, checkpoint: str | None = None) -> None:
        """Derive the claims again: all, or those on one checkpoint, which depend on no others."""
        derived = claims.derive(*self._family(connection, checkpoint))
        old = sa.select(ClaimRow.key)
        if checkpoint is not None:
            old = old.where(ClaimRow.checkpoint == checkpoint)
            derived = tuple(claim for claim in derived if claim.checkpoint == checkpoint)
        connection.execute(sa.delete(ClaimRunRow).where(ClaimRunRow.key.in_(old)))
        connection.execute(sa.delete(ClaimRow).where(ClaimRow.key.in_(old)))
        rows = claim_rows(derived)
        check_rows(rows, "A claim")
        self.database.insert(connection, rows)

    def _family(self, connection: Connection, checkpoint: str | None) -> tuple[list[tuple[str, Body]], dict[str, records.Result]]:
        """Records, in the order of the log, that claims on one checkpoint (or on all) are drawn from, and the runs' results."""
        chosen = sa.select(EntryRow.kind, EntryRow.record).order_by(EntryRow.sequence)
        if checkpoint is not None:
            specs = sa.select(SpecRow.spec).where(SpecRow.checkpoint == checkpoint)
            runs = sa.select(RunRow.run).where(RunRow.spec.in_(specs))
            relations = sa.select(RelationRow.record).where(RelationRow.run.in_(runs))
            reproductions = sa.select(ReproductionRow.record).where(ReproductionRow.original.in_(runs))
            chosen = chosen.where(sa.or_(*(EntryRow.record.in_(part) for part in (specs, runs, relations, reproductions))))
        bodies: list[tuple[str, Body]] = []
        results: dict[str, records.Result] = {}
        for kind, name in connection.execute(chosen):
            body: Any = self._load(records.KINDS[kind], name)
            bodies.append((name, body))
            if isinstance(body, records.Run):
                results[name] = self.result(body)
        return bodies, results

    def migrate(self) -> None:
        """Bring the database's schema to this version's, keeping its rows. Holds the lock: two at once are one after the other."""
        with self.store.lock():
            found = self.database.revision()
            if found is None:
                self._settle(adopt=True)
                return
            self.database.check_revision(found, older=True)
            with self.database.writing() as connection:
                self.database.upgrade(connection)
            self._settle(adopt=True)

    def rebuild(self) -> None:
        """Make the database anew from objects and log, in one transaction: killed at any moment, the old one stands.

        Raises ArchiveError where the database holds tables that are not this archive's; they are left as they are.
        """
        with self.store.lock():
            try:
                self._rebuild()
            except ArchiveError as error:
                if not self.database.unusable(error):
                    raise
                self.database.remove_file()  # there is nothing to keep
                self._rebuild()

    def _rebuild(self) -> None:
        self.database.exists()  # refuses what is no file, which SQLite would wait for or call something else
        with self.database.writing() as connection:
            self.database.refuse_others(connection, self._hashes())
            self.database.drop(connection)
            self.database.upgrade(connection)
            head, notices = self._catch_up(connection, adopt=True, built=True)
            connection.commit()
        if head != self.store.read_head():
            self.store.write_head(head)
        self.notices += notices

    def _hashes(self) -> set[str]:
        """Leaf hashes (hex) of the log's entries, the one beyond the head included."""
        return {leaf_hash(self.store.read_entry(sequence)).hex() for sequence in self.store.sequences()}

    # ------------------------------------------------------------ appending

    def append(self, record: Body, evidence: Mapping[str, Path | bytes] | None = None) -> Entry:
        """Append one record; ``evidence`` holds bytes or files by their SHA-256. Twice is once.

        Raises InputError where the record or its evidence is unusable, ArchiveError where it cannot be written.
        """
        self._refuse_reading()
        evidence = evidence or {}
        data = records.encode(record)
        name = digest.sha256(data)
        kind = admission.KIND[type(record)]
        records.decode(type(record), data, f"The {kind}")
        if isinstance(record, records.Spec):
            consistency.check(record)
        admission.refuse_nul(records.plain(record), f"The {kind}")
        with self.store.lock():
            self._settle(adopt=True)
            with self.database.reading() as connection:
                known = self._recorded(connection, record, name)
                if known is not None:
                    return known
                admission.check_references(connection, record)
                if isinstance(record, records.KeyChange) and (fault := signing.change_fault(self.key_changes(connection), record)):
                    raise InputError(f"That change of keys cannot be made: {fault}.", next="see `ledger keys`.")
                taken_out = admission.redacted(connection, evidence)
            if taken_out is not None:
                raise InputError(
                    "Evidence that was redacted is not taken in again.",
                    found=taken_out,
                    next="leave that file out, or record it in another archive.",
                )
            objects = {name, *evidence}
            self.store.announce(objects)
            admission.store_evidence(self.store, record, evidence)
            if isinstance(record, records.Run):
                admission.check_result(record, self.result(record))
            self.store.put(data)
            entry = self._append(kind, name, record)
            self.store.arrived(objects)
            return entry

    def _append(self, kind: Any, name: str, record: Body) -> Entry:
        with self.database.writing() as connection:
            leaves = self._leaves(connection)
            now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            entry = Entry(format="kv-ledger/entry/1", sequence=len(leaves), kind=kind, record=name, recorded_at=now)
            rows = self._rows(entry, record)
            self.database.insert(connection, rows)
            checkpoint = self._checkpoint(connection, record)
            if checkpoint is not None:
                self._refresh_claims(connection, checkpoint)
            data = records.encode(entry)
            # after the rows, so that a database that refuses them leaves no entry; before the commit, so that
            # the database is never ahead of the log
            self.store.write_entry(entry.sequence, data)
            connection.commit()
        self.store.write_head(Head.over([*leaves, leaf_hash(data)]))
        return entry

    def _checkpoint(self, connection: Connection, record: Body) -> str | None:
        """The checkpoint whose claims a record may change; None where it changes none."""
        if isinstance(record, records.Spec):
            return claims.checkpoint_id(record.checkpoint)
        if isinstance(record, (records.Report, records.Recipe, records.KeyChange, records.Redaction)):
            return None
        if isinstance(record, records.Retract) and record.run is None:
            return None
        where = SpecRow.spec == record.spec if isinstance(record, records.Run) else RunRow.run == admission.subject(record)
        query = sa.select(SpecRow.checkpoint).outerjoin(RunRow, RunRow.spec == SpecRow.spec).where(where)
        return str(connection.execute(query).scalars().first())

    def _recorded(self, connection: Connection, record: Body, name: str) -> Entry | None:
        """The entry that has recorded this already; of a run, the one that has recorded its result."""
        if isinstance(record, records.Run):
            name = connection.scalar(sa.select(RunRow.run).where(RunRow.result == record.result)) or name
        row = connection.execute(sa.select(EntryRow.__table__).where(EntryRow.record == name)).mappings().first()
        return None if row is None else _entry(dict(row))

    def sign(self, signer: Signer, cosignatures: Sequence[Signature] = ()) -> Note:
        """Sign the head and lay the log's tiles beside the objects; the signed head. Raises InputError, ArchiveError."""
        self._refuse_reading()
        with self.store.lock():
            self._settle(adopt=True)
            with self.database.reading() as connection:
                return signing.sign(self.store, self._leaves(connection), self.key_changes(connection), signer, cosignatures)

    def redact(self, record: records.Redaction) -> Entry:
        """Append a redaction, then remove the bytes; killed between, the same call finishes it. Raises InputError, ArchiveError."""
        with self.store.lock():
            entry = self.append(record)
            self.store.remove(record.object)
        return entry

    def unnamed(self, older_than: float) -> list[tuple[str, int]]:
        """Objects that no entry names and no append has announced, last written more than ``older_than`` seconds ago; digest and bytes."""
        with self.store.lock(), self.database.reading() as connection:
            there = set(self.store.digests()) - self.store.pending()
            columns = (EntryRow.record, EvidenceRow.sha256, AttachmentRow.sha256, SpecArmRow.scale_source)
            for column in columns:
                there -= {str(name) for name in connection.scalars(sa.select(column).where(column.is_not(None)))}
            ages = {name: self.store.age(name) for name in there}
            return sorted((name, self.store.size(name)) for name in there if ages[name] > older_than)

    def collect(self, older_than: float) -> list[tuple[str, int]]:
        """Remove what :meth:`unnamed` lists; what was removed. The database is brought up to the log first."""
        self._refuse_reading()
        with self.store.lock():
            self._settle(adopt=True)
            found = self.unnamed(older_than)
            for name, _ in found:
                self.store.remove(name)
        return found

    def _refuse_reading(self) -> None:
        if not self._write:
            raise ArchiveError("The archive was opened for reading only.", next="open it for writing.")

    # ------------------------------------------------------------ reading

    def key_changes(self, connection: Connection) -> list[tuple[int, records.KeyChange]]:
        """The entries that add and revoke signing keys, each with its number, in the order of the log."""
        query = sa.select(EntryRow.sequence, EntryRow.record).where(EntryRow.kind == "key").order_by(EntryRow.sequence)
        return [(sequence, self._load(records.KeyChange, name)) for sequence, name in connection.execute(query)]

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A database connection whose queries all see one state; for :mod:`ledger.queries`."""
        with self.database.reading() as connection:
            yield connection

    def sequence_of(self, name: str) -> int:
        """Number of the entry that names the record of that digest. Raises InputError."""
        with self.reading() as connection:
            found = connection.scalar(sa.select(EntryRow.sequence).where(EntryRow.record == name))
        if found is None:
            raise InputError("No entry of this archive names that record.", found=name[:80], next="see `ledger runs`.")
        return int(found)

    @property
    def head(self) -> Head:
        """The head of the log as it is now."""
        return self.store.read_head()

    def entries(self) -> list[Entry]:
        """All entries, in the order of the log."""
        with self.reading() as connection:
            return [_entry(dict(row)) for row in connection.execute(sa.select(EntryRow.__table__).order_by(EntryRow.sequence)).mappings()]

    def _load(self, kind: type[R], name: str) -> R:
        return records.decode(kind, self.store.read(name, digest.MAX_JSON_BYTES), f"The {admission.KIND[kind]} {name}")

    def record(self, name: str) -> Body:
        """The record of that digest, whatever its kind. Raises InputError where no entry names it."""
        with self.reading() as connection:
            kind = connection.scalar(sa.select(EntryRow.kind).where(EntryRow.record == name))
        if kind is None:
            raise InputError("No entry of this archive names that record.", found=name[:80], next="see `ledger runs`.")
        body: Any = self._load(records.KINDS[kind], name)
        return body  # type: ignore[no-any-return]

    def get(self, kind: type[R], name: str) -> R:
        """The record of that digest and kind. Raises InputError."""
        body = self.record(name)
        if not isinstance(body, kind):
            raise InputError(f"That record is no {admission.KIND[kind]}.", found=f"a {admission.KIND[type(body)]}: {name}")
        return body

    def spec(self, name: str) -> records.Spec:
        """The spec of that digest. Raises InputError."""
        return self.get(records.Spec, name)

    def run(self, name: str) -> records.Run:
        """The run of that digest. Raises InputError."""
        return self.get(records.Run, name)

    def corrections(self, run: str) -> list[records.Retract | records.Supersede]:
        """What retracts or supersedes a run, in the order of the log."""
        query = sa.select(RelationRow.record).join(EntryRow, EntryRow.record == RelationRow.record).where(RelationRow.run == run)
        with self.reading() as connection:
            names = [str(name) for name in connection.scalars(query.order_by(EntryRow.sequence))]
        return [body for name in names if isinstance(body := self.record(name), (records.Retract, records.Supersede))]

    def result(self, run: records.Run | str) -> records.Result:
        """The ``result.json`` of a run, given as a record or by digest. Raises InputError, ArchiveError."""
        run = self.run(run) if isinstance(run, str) else run
        return records.decode(records.Result, self.store.read(run.result, digest.MAX_JSON_BYTES), "result.json")

    def evidence(self, name: str) -> bytes:
        """The bytes of an evidence object, checked against its digest. Raises RedactedError, ArchiveError."""
        self.refuse_redacted(name)
        return self.store.read(name)

    def refuse_redacted(self, name: str) -> None:
        """Raise RedactedError where an entry took the bytes of that object out."""
        query = (
            sa.select(EntryRow.sequence, RedactionRow.author, RedactionRow.reason)
            .join(EntryRow, EntryRow.record == RedactionRow.record)
            .where(RedactionRow.object == name)
        )
        with self.reading() as connection:
            row = connection.execute(query).first()
        if row is not None:
            raise RedactedError(
                f"The bytes of {name} were redacted.",
                found=f"entry {row.sequence}, {row.author}: {row.reason}",
                next="what was derived from them stands; ask the archive's owner for a copy, if there is a right to one.",
            )

    def samples(self, run: records.Run | str) -> dict[str, bytes]:
        """Evidence under ``samples/`` by name, each checked against its digest."""
        run = self.run(run) if isinstance(run, str) else run
        return {item.name: self.evidence(item.sha256) for item in run.evidence if item.name.startswith("samples/")}

    def resolve(self, prefix: str, kinds: tuple[str, ...] = ("run",)) -> str:
        """Digest of the one run that begins with ``prefix``, of 4 hex digits or more, or of a record of ``kinds``. Raises InputError."""
        what = " or ".join(kinds)
        if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
            raise InputError(
                f"This names no {what}.",
                expected="4 to 64 lower-case hex digits of its digest",
                found=repr(prefix[:80]),
                next="see `ledger runs`.",
            )
        with self.reading() as connection:
            query = sa.select(EntryRow.record).where(EntryRow.kind.in_(kinds), EntryRow.record.startswith(prefix))
            found = list(connection.execute(query.order_by(EntryRow.record).limit(6)).scalars())
        if not found:
            raise InputError(f"No {what} of this archive begins so.", found=prefix, next="see `ledger runs`.")
        if len(found) > 1:
            raise InputError(
                "Several runs begin so." if kinds == ("run",) else "Several records begin so.",
                found=", ".join(name[: len(prefix) + 8] for name in found),
                next="give more digits of the one you mean.",
            )
        return found[0]

    def find_result(self, result: str) -> str | None:
        """Digest of the run that recorded the result of that SHA-256, or None."""
        with self.reading() as connection:
            return connection.scalar(sa.select(RunRow.run).where(RunRow.result == result))

    # ------------------------------------------------------------ rows, for verification

    def stored_rows(self) -> Rows:
        """Every row as the database stores it, unread. Raises ArchiveError."""
        return self.database.stored_rows()

    def expected_rows(self) -> Rows:
        """Every row that the objects and the log call for, in stored form. Raises LedgerError at the first unreadable object."""
        rows: Rows = {}
        bodies: list[tuple[str, Body]] = []
        results: dict[str, records.Result] = {}
        for data in self.store.entries(self.head.size):
            entry = records.decode(Entry, data, "an entry of the log")
            body: Any = self._load(records.KINDS[entry.kind], entry.record)
            bodies.append((entry.record, body))
            if isinstance(body, records.Run):
                results[entry.record] = self.result(body)
            for table, found in self._rows(entry, body).items():
                rows.setdefault(table, []).extend(found)
        return stored_form(rows | claim_rows(claims.derive(bodies, results)))


def _entry(row: Mapping[str, Any]) -> Entry:
    fields = {key: row[key] for key in ("sequence", "kind", "record", "recorded_at")}
    return records.convert(Entry, {"format": "kv-ledger/entry/1", **fields}, "A row of the database")
