"""The whole archive -> a list of findings. Nothing is trusted, nothing is changed, nothing stops at the first fault.

    log        every entry parsed, numbered and hashed; the root over them against the head
    signatures the signed head and every tile against the log, its keys and, where one is given, a policy
    objects    every file hashed, whatever its size and time say; what is named must exist, what exists must be named
    records    parsed strictly; what they name must be recorded, specs before their runs, calibrations before the specs that use them
    results    against their spec; evidence by name, size and digest
    figures    measurements, decisions and warnings derived again from the raw samples
    database   every column of every row against what records, log and claims (derived again) call for

Kinds of findings:

    head, root, entry, entry_missing, entry_extra, unfinished_append    the log
    checkpoint, rollback, split_view, tile_missing, tile_changed, policy           its signed head and its tiles
    object_changed, object_missing, object_unreadable, redacted_present, stray_object, stray_file    the folder
    record, reference, result, evidence    what records say
    samples, measurement, decision, kernel, warning    what follows from the samples
    database, schema, table_extra, column_extra, row_missing, row_extra, row_changed    the index

A database that could not be looked at (no right to it, a full disk, no server) is no finding: nothing was found out, so
the verification itself fails. Objects that no record names are findings only where the whole log could be read.

An append that was stopped, at whatever moment, is no fault: the objects that it announced and, where it came so far, the one
entry beyond the head are noted, and the next writer completes them. An entry beyond the head that no append announced is
``unfinished_append``.

How nearly figures must agree stands in :mod:`ledger.agreement`. Samples are read one run at a time; all else is streamed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ledger import captures, claims, deriving, digest, recipes, records, signing, tiles
from ledger.agreement import decision_faults, is_sample, kernel_faults, measurement_faults, result_faults, run_faults, short
from ledger.archive import Archive, claim_rows, rows_of, stored_form
from ledger.database import Database, UnreachableError
from ledger.errors import ArchiveError, InputError, LedgerError, SchemaError
from ledger.log import Head, leaf_hash
from ledger.notes import Checkpoint, Note
from ledger.policies import Policy
from ledger.records import Body, Entry, Result, Run, Spec, consistency
from ledger.store import FolderStore
from ledger.tables import TABLES, VERSION_TABLE

_RESTORE = "restore it from another copy of the archive, then run `ledger verify` again."
_REBUILD = "if objects and log are without findings, `ledger rebuild` makes the database anew."
_LOG_KINDS = {"head", "root", "entry", "entry_missing", "entry_extra", "unfinished_append"}
_SIGN = "`ledger sign` lays the tiles and signs the head anew."
_TWO_HISTORIES = "keep both, and compare with a head that you or others kept: entries were removed or changed after it was signed."
_ASK = "the record was altered or made by another version: ask whoever recorded it, or retract the run."

Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Finding:
    """One fault: its kind, the object it is found in, what is wrong in words, and what to do."""

    kind: str
    object: str
    detail: str
    next: str


@dataclass
class Report:
    """Everything that was found. ``notes`` are no faults: what was not there to be checked, and what a stopped append left."""

    entries: int = 0
    objects: int = 0
    bytes: int = 0
    measurements: int = 0
    head: Head | None = None
    signed: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    @property
    def checked(self) -> dict[str, int]:
        """How much was looked at: entries, objects, their bytes, and measurements that were derived again."""
        return {"entries": self.entries, "objects": self.objects, "bytes": self.bytes, "measurements": self.measurements}

    def add(self, kind: str, object: str, detail: str, next: str) -> None:
        """Note a fault."""
        self.findings.append(Finding(kind, object, detail, next))

    def document(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "ok": self.ok,
            "checked": self.checked,
            "head": {"size": self.head.size, "root": self.head.encode().decode().splitlines()[2]} if self.head else None,
            "signed": self.signed,
            "findings": [{"kind": f.kind, "object": f.object, "detail": f.detail, "next": f.next} for f in self.findings],
            "notes": list(self.notes),
        }


def verify(folder: Path, url: str | None = None, policy: Policy | None = None) -> Report:
    """Check the archive in ``folder`` against itself, against its database and, where one is given, against a ``policy``.

    Clean after a writer was killed at any moment: what it left is a note. Raises ArchiveError where there is nothing that
    could be checked, or where the database could not be looked at. Never builds, repairs or migrates the database.
    """
    folder = Path(folder)
    if not (folder / "log").is_dir() and not (folder / "objects").is_dir():
        raise ArchiveError(f"This folder is no archive: {folder}", expected="a folder with log/head", next="name it with --archive.")
    return _Check(folder, url, policy).run()


# ---------------------------------------------------------------- a quiet moment


@contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Wait until no writer is at work, and hold the next one back. Creates nothing: no lock file, no writer so far."""
    try:
        # non-blocking: a named pipe would otherwise hold the reader for ever
        handle = os.open(folder / "tmp" / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextmanager
def _readable(database: Database, folder: Path) -> Iterator[Database]:
    """``database``, or a copy where SQLite could not work: it needs to write beside its file even to read it."""
    own = database.own
    if own is None or os.access(folder, os.W_OK):
        yield database
        return
    with tempfile.TemporaryDirectory(prefix="kv-ledger-") as scratch:
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(own.with_name(own.name + suffix), Path(scratch) / (own.name + suffix))
        copy = Database.file(Path(scratch) / own.name)
        try:
            yield copy
        finally:
            copy.close()


# ---------------------------------------------------------------- the check


class _Check:
    """One verification. Each step adds to the report and keeps what the later ones need."""

    def __init__(self, folder: Path, url: str | None, policy: Policy | None) -> None:
        self.folder = folder
        self.policy = policy
        self.store = FolderStore(folder)
        self.database = Archive(folder, url).database
        self.report = Report()
        self.head: Head | None = None
        self.entries: list[Entry] = []
        self.sequences: list[int] = []
        self.objects: list[str] = []
        self.strays: list[str] = []
        self.pending: set[str] = set()
        self.stored: Rows | None = None
        self.sizes: dict[str, int | None] = {}  # of what exists: bytes, or None where its bytes are not those of its name
        self.owners: dict[str, list[str]] = {}
        self.bodies: list[tuple[str, Body]] = []
        self.results: dict[str, Result] = {}
        self.unknown: set[str] = set()  # digests of records that could not be read, or not in full
        self.unread: set[int] = set()  # entries that could not be read
        self.redacted: dict[str, int] = {}  # objects whose bytes were taken out, and by which entry
        self.leaves: list[bytes] | None = None  # leaf hashes that the head counts, where all could be read

    def run(self) -> Report:
        with _quiet(self.folder):
            self._snapshot()
        self._log()
        self._hash_objects()
        self._records()
        self._signatures()
        self._recipes()
        self._account()
        for name, body in self.bodies:
            if isinstance(body, Run) and name in self.results:
                self._derive(name, body, self.results[name])
        if self.stored is not None:
            self._compare_rows(self.stored)
        return self.report

    # ------------------------------------------------------------ what is there

    def _snapshot(self) -> None:
        """Head, log, object names and rows at one moment without a writer. What is added later does not count."""
        add = self.report.add
        try:
            self.head = self.report.head = self.store.read_head()
        except LedgerError as error:
            add("head", "log/head", error.message().replace("\n", "; "), _RESTORE)
        self.sequences = self.store.sequences()
        self.objects = list(self.store.digests())
        self.strays = self.store.strays()
        self.pending = self.store.pending()
        with ExitStack() as stack:
            try:
                database = stack.enter_context(_readable(self.database, self.folder))
                self.stored = self._stored(database)
            except SchemaError as error:
                add("schema", str(self.database), error.message().replace("\n", "; "), error.next)
            except UnreachableError:
                raise
            except OSError as error:
                raise UnreachableError(
                    f"The database {self.database} cannot be read.", found=str(error.strerror), next="give this user the right to read it."
                ) from error
            except ArchiveError as error:
                add("database", str(self.database), str(error).replace("\n", "; "), _REBUILD)
            finally:
                self.database.close()

    def _stored(self, database: Database) -> Rows | None:
        if not self.database.exists():  # of a copy, only the original's place says what is wrong
            self.report.notes.append("There is no database: it is built at first use.")
            return None
        with database.reading() as connection:
            names = database.names(connection)
        if self.database.own or not self.database.sqlite:  # a file or a schema of our own
            indexes = {str(index.name) for table in TABLES.values() for index in table.indexes}
            for name in sorted(names - {*TABLES, VERSION_TABLE, *indexes}):
                self.report.add("table_extra", name, "the database holds a table, view, index or trigger that is none of its own", _REBUILD)
        if not names & {*TABLES, VERSION_TABLE}:
            self.report.notes.append("The database holds nothing of this archive: it is built at first use.")
            return None
        revision = database.revision()
        if revision is None:
            raise SchemaError("The database does not say which schema it has.", next="run `ledger rebuild`.")
        database.check_revision(revision)
        with database.reading() as connection:
            for name in database.extra_columns(connection, names):
                self.report.add("column_extra", name, "the database holds a column that is none of its own", _REBUILD)
        return database.stored_rows()

    # ------------------------------------------------------------ the log

    def _log(self) -> None:
        add = self.report.add
        found = set(self.sequences)
        size = self.head.size if self.head else next(n for n in range(len(found) + 1) if n not in found)
        for sequence in sorted(set(range(size)) - found) if size <= len(found) + 1000 else [min(set(range(len(found) + 1)) - found)]:
            add("entry_missing", f"log/{sequence:09}.json", f"the head counts {size} entries, and this one is not there", _RESTORE)
            self.unread.add(sequence)
        leaves: dict[int, bytes] = {}
        named: set[str] = set()  # records that an entry names so far
        for sequence in self.sequences:
            name = f"log/{sequence:09}.json"
            if sequence > size or (sequence == size and self.head is None):
                add(
                    "entry_extra",
                    name,
                    f"the head counts {size} entries",
                    "remove it, or restore log/head from another copy of the archive.",
                )
                continue
            try:
                data = self.store.read_entry(sequence)
                leaves[sequence] = leaf_hash(data)
                entry = records.decode(Entry, data, name)
            except LedgerError as error:
                add("entry", name, error.message().replace("\n", "; "), _RESTORE)
                self.unread.add(sequence)
                if sequence == size:
                    self._beyond(name, None)
                continue
            if sequence == size:
                self._beyond(name, entry if entry.sequence == sequence else None)
            if entry.sequence != sequence:
                add("entry", name, f"it says that it is entry {entry.sequence}", _RESTORE)
            if entry.record in named:
                add("entry", name, f"it names record {entry.record}, which an earlier entry names already", _RESTORE)
                continue
            named.add(entry.record)
            self.report.entries += 1
            self.entries.append(entry)
        if self.head is not None and all(n in leaves for n in range(size)):
            self.leaves = [leaves[n] for n in range(size)]
            self._root(self.head, self.leaves)

    def _beyond(self, name: str, entry: Entry | None) -> None:
        """The one entry beyond the head: a note where an append announced its record, as every append does first; else a finding."""
        if entry is not None and entry.record in self.pending and self.store.has(entry.record):
            self.report.notes.append(f"An append was cut off before it could replace the head ({name}); the next writer completes it.")
            return
        self.report.add(
            "unfinished_append",
            name,
            "an entry stands beyond the head, and no append announced its record",
            "remove the file, or restore log/head from another copy of the archive.",
        )

    def _root(self, head: Head, leaves: Sequence[bytes]) -> None:
        if Head.over(leaves) == head:
            return
        self.report.add(
            "root", "log/head", f"the root over the entries is {Head.over(leaves).root.hex()}, the head says {head.root.hex()}", _RESTORE
        )
        rows = {row["sequence"]: row["leaf_hash"] for row in (self.stored or {}).get("entries", ())}
        with suppress(ValueError, TypeError):  # the database may know which entry is meant
            known = [bytes.fromhex(rows[n]) if n in rows else b"" for n in range(len(leaves))]
            if Head.over(known) == head:
                for sequence, (leaf, other) in enumerate(zip(leaves, known, strict=True)):
                    if leaf != other:
                        self.report.add("entry", f"log/{sequence:09}.json", "its bytes are not those that the head covers", _RESTORE)

    def _signatures(self) -> None:
        """The signed head against keys, log and policy; the tiles against the log."""
        add, known, signed = self.report.add, dict(self.bodies), self.store.has_published(tiles.CHECKPOINT)
        changes: list[tuple[int, records.KeyChange]] = []
        for entry in self.entries:
            change = known.get(entry.record)
            if not isinstance(change, records.KeyChange):
                continue
            try:
                fault = signing.change_fault(changes, change)
            except InputError as error:
                fault = error.message().replace("\n", "; ")
            if fault:
                add("record", entry.record, fault, _ASK)
            else:
                changes.append((entry.sequence, change))
        if not signed and self.policy is not None:
            add("policy", tiles.CHECKPOINT, "the policy asks for a signed head, and there is none", _SIGN)
        if self.leaves is None:
            if signed:
                self.report.notes.append("The signed head and the tiles were not checked, since not every entry could be read.")
            return
        size = 0
        if signed:
            try:
                note = Note.parse(self.store.read_published(tiles.CHECKPOINT))
                size = self._signed_head(note, changes, self.leaves)
            except LedgerError as error:
                add("checkpoint", tiles.CHECKPOINT, error.message().replace("\n", "; "), _RESTORE)
        for kind, name, words in signing.tile_faults(self.store, self.leaves, min(size, len(self.leaves))):
            add(kind, name, words, _SIGN)

    def _signed_head(self, note: Note, changes: signing.Changes, leaves: Sequence[bytes]) -> int:
        """Check the signed head; how many entries it counts. Raises InputError."""
        found = Checkpoint.parse(note.text)
        for kind, words in signing.head_faults(note, changes, leaves):
            self.report.add(kind, tiles.CHECKPOINT, words, _TWO_HISTORIES if kind != "checkpoint" else _RESTORE)
        if self.policy is not None:
            for words in self.policy.faults(note):
                self.report.add("policy", tiles.CHECKPOINT, words, "ask the archive's owner, or trust it by a policy of your own.")
        if found.head.size < len(leaves):
            count = len(leaves) - found.head.size
            last = "The last entry is" if count == 1 else f"The last {count} entries are"
            self.report.notes.append(f"{last} unsigned: the signed head counts {found.head.size}.")
        keys: list[str] = []
        with suppress(InputError):  # a forged signature was said above
            keys = [f"{key.name} ({key.id.hex()})" for key in note.signed(signing.standing(changes, found.head.size))]
        self.report.signed = {"origin": found.origin, "size": found.head.size, "keys": keys, "policy": self.policy is not None}
        return found.head.size

    # ------------------------------------------------------------ objects

    def _hash_objects(self) -> None:
        for name in self.objects:
            try:
                found, size = self.store.hash(name)
            except ArchiveError as error:
                self.report.add("object_unreadable", name, error.message().replace("\n", "; "), _RESTORE)
                self.sizes[name] = None
                continue
            self.report.objects += 1
            self.report.bytes += size
            self.sizes[name] = size if found == name else None
            if found != name:
                self.owners.setdefault(name, [])
                self.report.add("object_changed", name, f"its {size} bytes have the digest {found}", _RESTORE)

    def _account(self) -> None:
        """What is named must exist; what exists must be named. Names the owners of what is damaged."""
        for name, owners in self.owners.items():
            by = self.redacted.get(name)
            if name not in self.sizes and by is not None:
                self.report.notes.append(f"Object {name} is redacted by entry {by}; it was {'; '.join(owners)}.")
            elif name not in self.sizes:
                self.report.add("object_missing", name, f"it is {'; '.join(owners)}", _RESTORE)
            elif by is not None:
                self.report.add(
                    "redacted_present", name, f"entry {by} redacts it, and its bytes are still there", "repeat the `ledger redact`."
                )
        self.report.findings = [
            replace(finding, detail=f"{finding.detail}; it is {'; '.join(self.owners[finding.object])}")
            if finding.kind in ("object_changed", "object_unreadable") and self.owners.get(finding.object)
            else finding
            for finding in self.report.findings
        ]
        strangers = [name for name in self.objects if not self.owners.get(name) and self.sizes[name] is not None]
        announced = [name for name in strangers if name in self.pending]
        if announced:
            self.report.notes.append(
                f"An append that was stopped left objects that no record names: {len(announced)}. Recording the result again uses them."
            )
        strangers = [name for name in strangers if name not in self.pending]
        # what the log names is known only where all of it could be read; moved out, an object that it names would be lost
        doubtful = self.unknown or self.unread or any(finding.kind in _LOG_KINDS for finding in self.report.findings)
        if strangers and doubtful:
            self.report.notes.append(f"No record that could be read names {len(strangers)} of the objects.")
        else:
            for name in strangers:
                self.report.add(
                    "stray_object", name, "no record names it, and no append announced it", "move it out of the archive's folder."
                )
        for name in self.strays:
            self.report.add("stray_file", name, "the archive has no such file", "move it out of the archive's folder.")

    def _own(self, name: str, words: str) -> None:
        self.owners.setdefault(name, []).append(words)

    # ------------------------------------------------------------ records

    def _records(self) -> None:
        seen: dict[str, Body] = {}
        for entry in self.entries:
            self._own(entry.record, f"the {entry.kind} of log/{entry.sequence:09}.json")
            if self.sizes.get(entry.record) is None:  # missing or damaged: said elsewhere
                self.unknown.add(entry.record)
                continue
            try:
                body: Any = records.decode(
                    records.KINDS[entry.kind], self.store.read(entry.record, digest.MAX_JSON_BYTES), f"the {entry.kind}"
                )
                if isinstance(body, Spec):
                    consistency.check(body)
            except LedgerError as error:
                self.report.add("record", entry.record, error.message().replace("\n", "; "), _ASK)
                self.unknown.add(entry.record)
                continue
            self._references(entry, body, seen)
            seen[entry.record] = body
            self.bodies.append((entry.record, body))
            if isinstance(body, Spec):
                for arm in body.arms:
                    if arm.scale_source:
                        self._own(arm.scale_source, f"the scales of arm {arm.name} of spec {entry.record}")
                self._scales(entry.record, body, seen)
            elif isinstance(body, Run):
                self._run(entry.record, body, seen.get(body.spec))
            elif isinstance(body, (records.Report, records.Recipe)):
                self._attachments(entry, body)
            elif isinstance(body, records.Redaction):
                self.redacted.setdefault(body.object, entry.sequence)

    def _scales(self, name: str, spec: Spec, seen: dict[str, Body]) -> None:
        """Fixed scales are those of a calibration of the same weights that an earlier entry records, and that freezing would take now."""
        fixed = [arm for arm in spec.arms if arm.scale_source]
        if not fixed or self.unknown or self.unread:  # what could not be read may be the calibration
            return
        withdrawn: dict[str, list[records.Retract | records.Supersede]] = {}
        for body in seen.values():
            if isinstance(body, (records.Retract, records.Supersede)) and body.run is not None:
                withdrawn.setdefault(body.run, []).append(body)
        measured: dict[str, dict[str, str]] = {}  # by the digest of their sizes: weights, and why none may come of them
        for run_id, run in seen.items():
            of = seen.get(run.spec) if isinstance(run, Run) else None
            if isinstance(run, Run) and isinstance(of, Spec) and of.scope == "calibration" and (file := captures.sizes_of(run)):
                said = measured.setdefault(file, {})
                if said.get(of.weights) != "":  # of two runs of the same sizes, one that may be used is enough
                    said[of.weights] = self._unusable(of, run, file, withdrawn.get(run_id, []))
        for arm in fixed:
            known = measured.get(str(arm.scale_source))
            if known is None:
                why = "no calibration that an earlier run recorded"
            elif spec.weights not in known:
                why = "the calibration of another checkpoint"
            else:
                why = known[spec.weights]
            if why:
                self.report.add("reference", name, f"arm {arm.name} takes its scales from {arm.scale_source}, which is {why}", _ASK)

    def _unusable(self, spec: Spec, run: Run, file: str, withdrawn: Sequence[records.Retract | records.Supersede]) -> str:
        """Why freezing would not take scales from a calibration, or an empty string; ``file`` is the digest of its sizes."""
        what, said = captures.unusable(spec, run, withdrawn)
        if what or self.sizes.get(file) is None:  # a file that is missing or damaged is said elsewhere
            return what and f"of {what}: {said}"
        try:
            flaw = captures.size_flaw(captures.read_sizes(captures.CALIBRATION, self.store.read(file)), zero=False)
        except LedgerError as error:
            flaw = str(error)
        return flaw and f"of a calibration that no scale can be made of: {flaw}"

    def _attachments(self, entry: Entry, body: records.Report | records.Recipe) -> None:
        """The document of a report, where it is kept; the lock file of a recipe."""
        for item in body.evidence:
            self._own(item.sha256, f"{item.name} of {entry.kind} {entry.record}")
        for detail in self._size_faults(body.evidence):
            self.report.add("evidence", entry.record, detail, _ASK)

    def _recipes(self) -> None:
        """A recipe may cite what an earlier run gave, on its own checkpoint and of its own policy."""
        if not any(isinstance(body, records.Recipe) for _, body in self.bodies):
            return
        if self.unknown or self.unread:
            self.report.notes.append("What recipes cite was not checked, since not every record could be read.")
            return
        known = dict(self.bodies)
        places = {name: at for at, (name, _) in enumerate(self.bodies)}
        derived = [(claim, known[claim.runs[0]]) for claim in claims.derive(self.bodies, self.results) if claim.runs]
        for at, (name, body) in enumerate(self.bodies):
            if not isinstance(body, records.Recipe):
                continue
            cited = {}
            for claim, run in derived:
                spec = known[run.spec] if isinstance(run, Run) else None
                if claim.key in body.claims and isinstance(spec, Spec) and any(places[other] < at for other in claim.runs):
                    cited[claim.key] = recipes.Cited(claim, recipes.policy_of(spec.arm(recipes.candidate(claim))))
            for detail in recipes.faults(body, cited):
                self.report.add("reference", name, f"the recipe may not cite this: {detail}", _ASK)

    def _references(self, entry: Entry, body: Body, seen: dict[str, Body]) -> None:
        wanted: list[tuple[str | None, type[Any] | tuple[type[Any], ...], str]]
        if isinstance(body, Run):
            wanted = [(body.spec, Spec, "spec")]
        elif isinstance(body, records.Reproduction):
            wanted = [(body.original, Run, "run"), (body.reproduced, Run, "run")]
        elif isinstance(body, records.Supersede):
            wanted = [(body.run, Run, "run"), (body.by, Run, "run")]
        elif isinstance(body, records.Retract):
            wanted = [(body.run, Run, "run"), (body.record, (records.Report, records.Recipe), "report or recipe")]
        else:
            wanted = []
        for name, kind, words in wanted:
            if name is not None and name not in self.unknown and not isinstance(seen.get(name), kind) and not self.unread:
                self.report.add("reference", entry.record, f"the {entry.kind} names {words} {name}, which no earlier entry records", _ASK)

    def _run(self, name: str, run: Run, spec: Body | None) -> None:
        for item in run.evidence:
            self._own(item.sha256, f"{item.name} of run {name}")
        if run.result not in self.owners:
            self._own(run.result, f"result.json of run {name}")
        if not isinstance(spec, Spec) or self.sizes.get(run.result) is None:
            self.unknown.add(name)
            return
        try:
            result = records.decode(Result, self.store.read(run.result, digest.MAX_JSON_BYTES), "result.json")
        except LedgerError as error:
            self.report.add("result", run.result, f"run {name}: " + error.message().replace("\n", "; "), _ASK)
            self.unknown.add(name)
            return
        self.results[name] = result
        for detail in (*run_faults(run, result), *result_faults(spec, result)):
            self.report.add("result", name, detail, _ASK)
        for detail in self._evidence_faults(run, result):
            self.report.add("evidence", name, detail, _ASK)

    def _evidence_faults(self, run: Run, result: Result) -> Iterator[str]:
        twice = [name for name, count in Counter(item.name for item in run.evidence).items() if count > 1]
        yield from (f"{name} is listed twice" for name in twice)
        listed = {item.name: item for item in run.evidence}
        if "result.json" not in listed or listed["result.json"].sha256 != run.result:
            yield f"result.json is not the result {run.result}"
        for item in result.evidence:
            if listed.get(item.name) != item:
                yield f"{item.name} is not listed as the result lists it"
        extra = sorted(set(listed) - {item.name for item in result.evidence} - {"result.json"})
        yield from (f"{name} is no file of the result" for name in extra if not name.startswith("harness/"))
        if run.harness.diff is not None and run.harness.diff not in listed:
            yield f"{run.harness.diff}, the harness's diff, is not listed"
        yield from self._size_faults(run.evidence)

    def _size_faults(self, evidence: Sequence[records.Evidence]) -> Iterator[str]:
        for item in evidence:
            size = self.sizes.get(item.sha256)
            if size is not None and size != item.size:
                yield f"{item.name} has {size} bytes, the record says {item.size}"

    # ------------------------------------------------------------ figures

    def _derive(self, name: str, run: Run, result: Result) -> None:
        spec = next(body for other, body in self.bodies if other == run.spec and isinstance(body, Spec))
        needed = [item for item in run.evidence if is_sample(item.name)]
        if any(self.sizes.get(item.sha256) is None for item in needed):
            gone = [self.redacted[item.sha256] for item in needed if item.sha256 in self.redacted]
            why = f"entry {gone[0]} redacts some of its evidence" if gone else "its evidence is damaged"
            self.report.notes.append(f"The figures of run {name} were not derived again, since {why}.")
            return
        try:
            evidence = {item.name: self.store.read(item.sha256) for item in needed}
            derived = deriving.derive(spec, result, evidence, run.harness)
        except LedgerError as error:
            self.report.add("samples", name, error.message().replace("\n", "; "), _ASK)
            return
        for detail in derived.wrong_inputs:
            self.report.add("samples", name, detail, _ASK)
        self.report.measurements += len(derived.measurements)
        for detail in measurement_faults(run.measurements, derived.measurements):
            self.report.add("measurement", name, detail, _ASK)
        for detail in decision_faults(run.decisions, derived.decisions):
            self.report.add("decision", name, detail, _ASK)
        for detail in kernel_faults(run.kernels, derived.kernels):
            self.report.add("kernel", name, detail, _ASK)
        for words in (*result.warnings, *derived.warnings):
            if words not in run.warnings:
                self.report.add("warning", name, f"the run does not keep this warning: {words}", _ASK)

    # ------------------------------------------------------------ database

    def _compare_rows(self, stored: Rows) -> None:
        recorded = {row["record"] for row in stored["entries"]}
        size = self.head.size if self.head else len(self.entries)
        unknown = self.unknown | {row["record"] for row in stored["entries"] if row["sequence"] in self.unread}
        known = dict(self.bodies)
        rows: Rows = {}
        included: list[tuple[str, Body]] = []
        for entry in self.entries:
            if entry.record in unknown or (entry.sequence >= size and entry.record not in recorded):
                continue
            body = known[entry.record]
            included.append((entry.record, body))
            spec = known.get(body.spec) if isinstance(body, Run) else None
            for table, found in rows_of(entry, body, self.results.get(entry.record), spec if isinstance(spec, Spec) else None).items():
                rows.setdefault(table, []).extend(found)
        skipped: tuple[str, ...] = ()
        if unknown or self.unread:
            skipped = ("claims", "claim_runs")
            self.report.notes.append("Claims were not compared with the database, since not every record could be read.")
        else:
            rows |= claim_rows(claims.derive(included, self.results))
        for table, expected in stored_form(rows).items():
            if table not in skipped:
                self._compare_table(table, expected, stored[table], unknown)

    def _compare_table(self, table: str, expected: list[dict[str, Any]], stored: list[dict[str, Any]], unknown: set[str]) -> None:
        columns = [column.name for column in TABLES[table].primary_key.columns]

        def keyed(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
            return {tuple(row[column] for column in columns): row for row in rows}

        def words(key: tuple[Any, ...]) -> str:
            return f"{table} [{', '.join(f'{column}={value}' for column, value in zip(columns, key, strict=True))}]"

        wanted, found = keyed(expected), keyed(stored)
        for key in sorted(wanted.keys() - found.keys(), key=repr):
            self.report.add("row_missing", words(key), "records and log call for this row, and the database lacks it", _REBUILD)
        for key in sorted(found.keys() - wanted.keys(), key=repr):
            if not unknown.intersection(value for value in found[key].values() if isinstance(value, str)):
                self.report.add("row_extra", words(key), "no record calls for this row", _REBUILD)
        for key, row in wanted.items():
            for column, value in row.items():
                other = found.get(key, row)[column]
                if other != value or isinstance(other, (str, bytes)) != isinstance(value, (str, bytes)):
                    self.report.add("row_changed", words(key), f"column {column}: expected {short(value)}, found {short(other)}", _REBUILD)
