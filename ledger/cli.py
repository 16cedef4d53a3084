"""``ledger …`` and ``reproduce-run``: the command line over the archive.

Exit status, decided here alone:

    0    done
    1    verify has findings; with --check, a run or one of its decisions failed
    2    it could not be done: the message on standard error says why and what to do
    3    reproduced, outside tolerance
    4    not comparable
    130  interrupted; what a run had measured by then is recorded

Standard output carries the answer, as text or, with --json, as one strict JSON document; all else goes to standard
error. Everything beyond the parser is imported by the command that needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ledger import __version__, terminal
from ledger.errors import InputError, LedgerError

if TYPE_CHECKING:
    from ledger import records
    from ledger.archive import Archive
    from ledger.policies import Policy

OK, FINDINGS, IMPOSSIBLE, OUTSIDE, INCOMPARABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
_VERDICTS = {"outside": OUTSIDE, "not comparable": INCOMPARABLE}
GOOD = ("established", "passes", "measured")
"""Decisions that --check lets pass."""

app = typer.Typer(
    name="ledger",
    help="Record tests of KV-cache quantisation, verify them, and show what each model has been shown to do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ArchiveOption = Annotated[
    Path | None, typer.Option("--archive", metavar="DIR", help="The archive's folder. Else LEDGER_ARCHIVE, else ./evidence.")
]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="The index's database. Else LEDGER_DATABASE, else ledger.db in the archive."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document instead of text.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 where the run or one of its decisions failed.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run, by its digest or a unique beginning of it.")]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration", metavar="RUN", help="Fixed scales come from this run; with none, cells of a grid that need them are left out."
    ),
]
Author = Annotated[str, typer.Option("--author", help="Who says so.")]
Reason = Annotated[str, typer.Option("--reason", help="Why.")]

_given: dict[str, Any] = {}
"""Options that stood before the command."""


# ---------------------------------------------------------------- errors, once


def _guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn what a command returns or raises into the exit status."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            status = command(*arguments, **options) or OK
            sys.stdout.flush()
        except LedgerError as error:
            terminal.note(f"error: {error.message()}")
            status = IMPOSSIBLE
        except KeyboardInterrupt as stop:
            terminal.note(f"interrupted{f': {stop}' if str(stop) else ''}")
            status = INTERRUPTED
        except BrokenPipeError:
            # The reader has gone; nothing more can be said to it, at interpreter exit neither.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = IMPOSSIBLE
        except OSError as error:
            named = f": {error.filename}" if error.filename else ""
            terminal.note(f"error: the operating system refuses: {error.strerror or error}{named}")
            terminal.note("next: see to the disk, the permissions or the path, and try again; what was recorded before stands.")
            status = IMPOSSIBLE
        except typer.Exit:
            raise
        except Exception:  # a fault of this program: its place is worth having, and 1 would read as findings
            import traceback

            traceback.print_exc()
            terminal.note("error: this is a fault of the ledger itself; what was recorded before stands.")
            status = IMPOSSIBLE
        raise typer.Exit(status)

    return run


def command(name: str) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a command of ``ledger``. It returns its exit status; None is 0."""

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        app.command(name)(_guarded(function))
        return function

    return register


# ---------------------------------------------------------------- the archive that is meant


def _version(asked: bool) -> None:
    if asked:
        terminal.say(f"kv-evidence-ledger {__version__}")
        raise typer.Exit(OK)


@app.callback()
def options(
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options for every command; each command takes them too."""
    _given.update(archive=archive, database=database)


def _place(archive: Path | None, database: str | None) -> tuple[Path, str | None]:
    folder = archive or _given.get("archive") or Path(os.environ.get("LEDGER_ARCHIVE") or "evidence")
    return folder, database or _given.get("database") or os.environ.get("LEDGER_DATABASE") or None


@contextlib.contextmanager
def _opened(archive: Path | None, database: str | None, *, write: bool = False) -> Iterator[Archive]:
    from ledger.archive import Archive

    folder, url = _place(archive, database)
    with Archive.open(folder, url, write=write) as opened, _heard(opened):
        yield opened


@contextlib.contextmanager
def _unopened(archive: Path | None, database: str | None) -> Iterator[Archive]:
    """The archive where its database may be missing, damaged or of another schema."""
    from ledger.archive import Archive

    with Archive.at(*_place(archive, database)) as found, _heard(found):
        yield found


@contextlib.contextmanager
def _heard(archive: Archive) -> Iterator[None]:
    """Pass the archive's notices on, whatever happens."""
    try:
        yield
    finally:
        for text in archive.notices:
            terminal.note(f"note: {text}")


def _judged(document: Mapping[str, Any]) -> int:
    """Exit status of --check for the document of a run."""
    failed = [item["candidate"] for item in document["decisions"] if item["status"] not in GOOD]
    return FINDINGS if failed or document["outcome"] != "completed" else OK


# ---------------------------------------------------------------- make and keep


@command("init")
def init(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Where; else as --archive says.")] = None,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Make an empty archive."""
    from ledger.archive import Archive

    place, url = _place(folder or archive, database)
    with Archive.create(place, url) as made, _heard(made):
        pass
    terminal.say(f"An empty archive is in {place}.")


@command("migrate")
def migrate(archive: ArchiveOption = None, database: DatabaseOption = None) -> None:
    """Bring the database to this version's schema. Nothing migrates by itself."""
    with _unopened(archive, database) as found:
        found.migrate()
    terminal.say("The database has this version's schema.")


@command("rebuild")
def rebuild(archive: ArchiveOption = None, database: DatabaseOption = None) -> None:
    """Make the database anew from the objects and the log alone."""
    with _unopened(archive, database) as found:
        found.rebuild()
    terminal.say("The database has been made anew from the objects.")


@command("freeze")
def freeze(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study that ships, by name, or a TOML file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The frozen folder to make.")],
    calibration: CalibrationOption = None,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Freeze a study: resolve every name to a digest and log the spec, before anything runs."""
    from ledger import freezing, records

    with _opened(archive, database, write=True) as opened:
        spec = freezing.freeze(study, opened, out, _calibration(calibration))
    terminal.say(f"Study {spec.study} is frozen as spec {records.identify(spec)} in {out}.")
    if spec.task is not None:
        terminal.note(spec.task.power)
    terminal.note(f"next: python -m runners {out} OUT, here or elsewhere, then {_recording(opened.folder, 'OUT')}")


@command("run")
def run(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study or a suite that ships, by name, or a TOML file.")],
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the frozen and the result folder here.")] = None,
    check: CheckOption = False,
    calibration: CalibrationOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it asks for and whether this host can do it. Offline.")] = False,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> int:
    """Freeze a study, run it here, and record whatever comes of it; of a suite, one study after the other."""
    from ledger import dryrun, launching

    suite = dryrun.suite_of(study)
    members = (study,) if suite is None else suite.studies
    source = _calibration(calibration)
    if suite is not None and source is not None:
        raise InputError("The studies of a suite name their calibrations.", found="--calibration", next="run one study.")
    if dry_run:
        found = [dryrun.look(name, source) for name in members]
        document = found[0] if suite is None else {"suite": suite.suite, "title": suite.title, "studies": found}
        terminal.emit(document) if as_json else terminal.dry_run(found, None if suite is None else suite.title)
        return FINDINGS if check and not all(one["can_run"] for one in found) else OK
    launching.check_installed()
    if suite is not None and keep is not None:
        keep = _workplace(keep)
    statuses, documents = [], []
    with _opened(archive, database, write=True) as opened:
        for name in members:
            document, rows = _run(name, opened, keep if suite is None or keep is None else keep / Path(name).stem, source)
            documents.append(document)
            if not as_json:
                _report(document, rows, opened.folder, as_json)
            if document["outcome"] == "interrupted":
                break
            failed = document["outcome"] == "failed"
            statuses.append((FINDINGS if check else IMPOSSIBLE) if failed else _judged(document) if check else OK)
    if as_json:
        terminal.emit(documents[0] if suite is None else {"suite": suite.suite, "runs": documents})
    if documents[-1]["outcome"] == "interrupted":
        raise KeyboardInterrupt(f"recorded as run {documents[-1]['id']}")
    return max(statuses)


def _calibration(given: str | None) -> str | None:
    """The calibration of the command line as a study names it."""
    return given if given is None or given == "none" or ":" in given else f"run:{given}"


def _run(study: str, archive: Archive, keep: Path | None, calibration: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Freeze, run and record one study: the document of its run, and its rows of the status table."""
    from ledger import freezing, launching, queries, recording

    place = _workplace(keep)
    frozen, out = place / "frozen", place / "result"
    try:
        spec = freezing.freeze(study, archive, frozen, calibration)
    except BaseException:
        if keep is None:
            _remove(place)
        raise
    terminal.note(f"running study {spec.study}: {_size(spec)}, {len(spec.arms)} arms; result in {out}")
    ended = launching.launch(frozen, out)
    if not (out / recording.RESULT).is_file():
        if ended.interrupted:
            raise KeyboardInterrupt("before anything was measured")
        raise InputError(
            "The runner ended before it wrote a result.",
            found=ended.words or f"status {ended.status}; its message is above",
            next=f"correct what it names, then: python -m runners {frozen} NEW_DIR && {_recording(archive.folder, 'NEW_DIR')}",
        )
    try:
        entry = recording.record(archive, out)
    except BaseException:
        terminal.note(f"The result is kept in {out}: record it with `{_recording(archive.folder, out)}`.")
        raise
    document = queries.run(archive, entry.record)
    rows = [row for row in queries.status(archive)["rows"] if entry.record in row["runs"]]
    if keep is None:
        _remove(place)
    return document, rows


def _size(spec: records.Spec) -> str:
    """How much a spec asks for, in its own unit."""
    if spec.performance is not None:
        return f"{len(spec.performance.cases)} cases"
    if spec.task is not None:
        return f"{len(spec.task.items)} items"
    if spec.memory is not None:
        return f"{len(spec.memory.contexts)} contexts"
    return "production checks" if spec.production is not None else f"{len(spec.documents)} documents"


def _recording(archive: Path, result: Path | str) -> str:
    """The command that records a result into this archive."""
    return shlex.join(["ledger", "--archive", str(archive), "record", str(result)])


def _workplace(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="ledger-run-"))
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise InputError("The folder to keep the run in is not empty.", found=str(keep), next="choose a new folder.")
    return keep


def _remove(place: Path) -> None:
    import shutil

    shutil.rmtree(place, ignore_errors=True)


def _report(document: Mapping[str, Any], rows: list[dict[str, Any]], folder: Path, as_json: bool) -> None:
    if as_json:
        terminal.emit(document)
        return
    name = document["id"][: terminal.SHORT]
    said = f": {document['reason']}" if document["reason"] else ""
    terminal.say(f"Recorded as run {document['id']}, {document['outcome']}{said}")
    if rows:
        terminal.say()
        terminal.status({"rows": rows})
    terminal.say()
    terminal.say(f"ledger --archive {folder} show {name}   every figure and where it comes from")
    terminal.say(f"ledger --archive {folder} serve   the same in a browser")


@command("record")
def record(
    result: Annotated[Path, typer.Argument(metavar="RESULT_DIR", help="A result folder, written by a runner.")],
    reproduces: Annotated[str | None, typer.Option("--reproduces", metavar="RUN", help="The recorded run that it repeats.")] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> int:
    """Check a result folder and record it as a run. Twice is once; the folder is not changed."""
    from ledger import queries, recording

    with _opened(archive, database, write=True) as opened:
        original = opened.resolve(reproduces) if reproduces is not None else None
        before = opened.head.size
        entry = recording.record(opened, result, reproduces=original)
        document = queries.run(opened, entry.record)
    verdicts = [item["verdict"] for item in document["relations"] if item["kind"] == "reproduces" and item["run"] == original]
    if as_json:
        terminal.emit(document)
    else:
        said = f": {document['reason']}" if document["reason"] else ""
        once = "Recorded" if entry.sequence >= before else f"Recorded already, as entry {entry.sequence},"
        terminal.say(f"{once} as run {document['id']}, {document['outcome']}{said}")
        for verdict in verdicts[-1:]:
            terminal.say(f"As a reproduction of {original}: {verdict}")
    return _VERDICTS.get(verdicts[-1], OK) if verdicts else OK


@command("supersede")
def supersede(
    run: RunArgument,
    by: Annotated[str, typer.Option("--by", metavar="RUN", help="The run that replaces it.")],
    author: Author,
    reason: Reason,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Say that a run is replaced by another. Both stay readable."""
    from ledger import records

    with _opened(archive, database, write=True) as opened:
        old, new = opened.resolve(run), opened.resolve(by)
        if old == new:
            raise InputError("A run cannot supersede itself.", found=old, next="name the run that replaces it with --by.")
        fields = {"run": old, "by": new, **_signed(author, reason)}
        entry = opened.append(records.convert(records.Supersede, {"format": "kv-ledger/supersede/1", **fields}, "the correction"))
    terminal.say(f"Run {old} is superseded by {new}: entry {entry.sequence}.")


@command("retract")
def retract(
    record: Annotated[str, typer.Argument(metavar="RECORD", help="A run, a report or a recipe, by a unique beginning of its digest.")],
    author: Author,
    reason: Reason,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Say that a run, a report or a recipe no longer counts. It stays readable."""
    from ledger import records

    with _opened(archive, database, write=True) as opened:
        old = opened.resolve(record, ("run", "report", "recipe"))
        run = isinstance(opened.record(old), records.Run)
        fields = {"format": f"kv-ledger/retract/{1 if run else 2}", "run" if run else "record": old, **_signed(author, reason)}
        entry = opened.append(records.convert(records.Retract, fields, "the correction"))
    terminal.say(f"{'Run' if run else 'Record'} {old} is retracted: entry {entry.sequence}.")


def _signed(author: str, reason: str) -> dict[str, str]:
    for name, text in (("author", author), ("reason", reason)):
        if not text.strip():
            raise InputError(f"A correction needs its {name}.", found="an empty text", next=f"give it with --{name}.")
    return {"author": author, "reason": reason}


# ---------------------------------------------------------------- keys, signed heads and proofs

key_app = typer.Typer(no_args_is_help=True, help="Keys that sign the log's heads.")
app.add_typer(key_app, name="key")
KeyOption = Annotated[Path, typer.Option("--key", metavar="FILE", help="The file of the signing key.")]


def _key_new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the log, such as example.org/kv-ledger: its heads will bear it.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the signing key goes; readable by you alone.")],
    witness: Annotated[bool, typer.Option("--witness", help="A key for cosignatures of a witness.")] = False,
) -> None:
    """Make a signing key. Its verifier key is printed; the file must stay secret."""
    from ledger import notes

    signer = notes.Signer.new(name, notes.WITNESS if witness else notes.LOG)
    try:
        handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InputError(f"There is a file already: {out}", next="choose another name: a key is never overwritten.") from None
    with os.fdopen(handle, "w") as stream:
        stream.write(signer.encode() + "\n")
    terminal.say(str(signer.key))
    terminal.note(f"next: ledger key add '{signer.key}' --author NAME --reason TEXT, then ledger sign --key {out}")


def _key_change(action: str, key: str, author: str, reason: str, archive: Path | None, database: str | None) -> None:
    from ledger import records

    fields = {"format": "kv-ledger/key/1", "action": action, "key": key, **_signed(author, reason)}
    with _opened(archive, database, write=True) as opened:
        _appended(opened, records.convert(records.KeyChange, fields, "the change of keys"), {})


def _key_add(
    key: Annotated[str, typer.Argument(metavar="VKEY", help="The verifier key, as `ledger key new` printed it.")],
    author: Author,
    reason: Reason,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Let a key sign heads from now on: an entry of the log."""
    _key_change("add", key, author, reason, archive, database)


def _key_revoke(
    key: Annotated[str, typer.Argument(metavar="VKEY", help="The verifier key, as `ledger keys` shows it.")],
    author: Author,
    reason: Reason,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """End a key's right to sign heads: an entry of the log. Heads that it signed before stay signed."""
    _key_change("revoke", key, author, reason, archive, database)


key_app.command("new")(_guarded(_key_new))
key_app.command("add")(_guarded(_key_add))
key_app.command("revoke")(_guarded(_key_revoke))


@command("keys")
def keys(as_json: JsonOption = False, archive: ArchiveOption = None, database: DatabaseOption = None) -> None:
    """The keys that this archive's own entries name, and from which entry on each one counts, or no longer does."""
    with _opened(archive, database) as opened, opened.reading() as connection:
        found = [
            {"entry": sequence, "action": change.action, "key": change.key, "author": change.author, "reason": change.reason}
            for sequence, change in opened.key_changes(connection)
        ]
    if as_json:
        terminal.emit(found)
    elif not found:
        terminal.say("No key signs this archive's heads. Make one: `ledger key new NAME -o FILE`.")
    for item in [] if as_json else found:
        terminal.pairs([(f"{item['action']} {item['entry']}", str(item["key"])), ("", f"{item['author']}: {item['reason']}")])


@command("sign")
def sign(
    key: KeyOption,
    cosignatures: Annotated[
        list[Path] | None,
        typer.Option("--cosignature", metavar="FILE", help="Signature lines of witnesses for this head, to put below it."),
    ] = None,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Sign the log's head, and lay the log as static tiles beside the objects, for any web server to serve."""
    from ledger.notes import Signature, Signer

    signer = Signer.parse(_text(key, "signing key").strip())
    below = [Signature.parse(line) for path in cosignatures or () for line in _text(path, "cosignature").splitlines() if line]
    with _opened(archive, database, write=True) as opened:
        note = opened.sign(signer, below)
    terminal.say(note.encode().decode().rstrip("\n"))


def _text(path: Path, what: str) -> str:
    try:
        return _read(path, what).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"The {what} is no text: {path}", found=f"byte {error.start}") from error


@command("prove")
def prove(
    record: Annotated[
        str | None, typer.Argument(metavar="[RECORD]", help="A run or another record, by a unique beginning of its digest.")
    ] = None,
    since: Annotated[
        Path | None, typer.Option("--since", metavar="HEAD", help="Prove that the log begins with the head in this file, signed or not.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the proof here, not to standard output.")] = None,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Prove that a record stands under the signed head, or that the log only grew since an older head."""
    from ledger import records, signing
    from ledger.notes import Checkpoint

    if (record is None) == (since is None):
        raise InputError("Name one thing to prove.", expected="a RECORD, or --since HEAD")
    with _opened(archive, database) as opened:
        if since is not None:
            # the text above the signatures, if there are any: who keeps a head has checked it when it was kept
            proof = signing.prove_since(opened.store, Checkpoint.parse(_text(since, "head").partition("\n\n")[0].rstrip("\n") + "\n").head)
        else:
            name = opened.resolve(str(record), tuple(records.KINDS))
            proof = signing.prove(opened.store, opened.sequence_of(name)).encode()
    if out is None:
        terminal.say(proof.decode().rstrip("\n"))
    else:
        out.write_bytes(proof)
        terminal.say(
            f"The proof is in {out}. Check it anywhere: ledger verify --proof {out} --policy FILE"
            if since is None
            else f"The proof is in {out}."
        )


@command("redact")
def redact(
    object: Annotated[str, typer.Argument(metavar="SHA256", help="The evidence object, by its whole digest.")],
    author: Author,
    reason: Reason,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Take the bytes of one evidence object out, by an entry that says why. Its digest, and what was derived from it, stand."""
    from ledger import records

    fields = {"format": "kv-ledger/redaction/1", "object": object, **_signed(author, reason)}
    with _opened(archive, database, write=True) as opened:
        entry = opened.redact(records.convert(records.Redaction, fields, "the redaction"))
    terminal.say(f"The bytes of {object} are gone: entry {entry.sequence}. Copies and clones of the archive still hold them.")


@command("gc")
def gc(
    remove: Annotated[bool, typer.Option("--remove", help="Remove them; else they are only listed.")] = False,
    grace: Annotated[
        float, typer.Option("--grace", min=0, metavar="DAYS", help="Leave what was written later than so many days ago.")
    ] = 14,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """List the objects that no entry names, which stopped work may leave; with --remove, remove them."""
    with _opened(archive, database, write=True) as opened:
        found = (opened.collect if remove else opened.unnamed)(grace * 86_400)
    for name, size in found:
        terminal.say(f"{name}  {size:,} bytes")
    verb = "removed" if remove else "would be removed by `ledger gc --remove`"
    terminal.say(f"{len(found)} object{'' if len(found) == 1 else 's'} of {sum(size for _, size in found):,} bytes {verb}.")


# ---------------------------------------------------------------- what others say, and what to install


@command("report")
def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML or JSON file: the document, and what it says, in your own words.")],
    document: Annotated[
        Path | None,
        typer.Option("--document", metavar="PATH", help="The document itself: its digest is checked; kept only if FILE says so."),
    ] = None,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Record what a document outside says, as reported: there is no evidence for it here. Twice is once."""
    from ledger import reports

    found, evidence = reports.read(file, document)
    with _opened(archive, database, write=True) as opened:
        _appended(opened, found, evidence)
    terminal.say(f"It says {len(found.facts)} things. They are shown as reported: there is no evidence for them here.")


def _appended(archive: Archive, record: records.Body, evidence: Mapping[str, Path | bytes]) -> str:
    """Append a record, and say whether it was there already; its digest."""
    before = archive.head.size
    entry = archive.append(record, evidence)
    once = "Recorded" if entry.sequence >= before else "Recorded already,"
    terminal.say(f"{once} as entry {entry.sequence}: {entry.kind} {entry.record}")
    return entry.record


recipe_app = typer.Typer(
    no_args_is_help=True, help="Recipes: what to install for a policy on a checkpoint, and the claims that validate it."
)
app.add_typer(recipe_app, name="recipe")


def _recipe_add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML or JSON file.")],
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Record a recipe. It may cite only claims of this archive, on its own checkpoint and policy. Twice is once."""
    from ledger import queries, recipes

    found, evidence = recipes.read(file)
    with _opened(archive, database, write=True) as opened:
        name = _appended(opened, found, evidence)
        (shown,) = [item for item in queries.recipes_of(opened) if item["recipe"] == name]
    terminal.say(f"It is {shown['word']}: {shown['reason']}")


recipe_app.command("add")(_guarded(_recipe_add))


@command("recipes")
def recipes(as_json: JsonOption = False, archive: ArchiveOption = None, database: DatabaseOption = None) -> None:
    """All recipes, each supported exactly as far as its claims reach now."""
    from ledger import queries

    with _opened(archive, database) as opened:
        document = queries.recipes_of(opened)
    if as_json:
        terminal.emit(document)
    else:
        terminal.recipes(document)


# ---------------------------------------------------------------- read


@command("status")
def status(as_json: JsonOption = False, archive: ArchiveOption = None, database: DatabaseOption = None) -> None:
    """The status table: what each model has been shown to do."""
    from ledger import queries

    with _opened(archive, database) as opened:
        document = queries.status(opened)
    if as_json:
        terminal.emit(document)
    else:
        terminal.status(document)


@command("table")
def table(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A model by name, or a checkpoint by its digest; else every one.")] = "",
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Formats and scale policies of a checkpoint in one table: losses, KL, top-1, answers, accuracy, measured bytes, gates."""
    from ledger import queries

    with _opened(archive, database) as opened:
        document = queries.precision_tables(opened, model)
    if as_json:
        terminal.emit(document)
    else:
        terminal.precision(document)


@command("runs")
def runs(as_json: JsonOption = False, archive: ArchiveOption = None, database: DatabaseOption = None) -> None:
    """All recorded runs."""
    from ledger import queries

    with _opened(archive, database) as opened:
        document = queries.runs(opened)
    if as_json:
        terminal.emit(document)
    else:
        terminal.runs(document)


@command("show")
def show(
    run: RunArgument,
    check: CheckOption = False,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> int:
    """One run: arms, measurements with their intervals, decisions, evidence."""
    from ledger import queries

    with _opened(archive, database) as opened:
        document = queries.run(opened, opened.resolve(run))
    if as_json:
        terminal.emit(document)
    else:
        terminal.run(document)
    return _judged(document) if check else OK


@command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="RUN", help="A run, by its digest or a unique beginning of it.")],
    b: Annotated[str, typer.Argument(metavar="RUN", help="Another.")],
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Two runs side by side."""
    from ledger import queries

    with _opened(archive, database) as opened:
        document = queries.compare(opened, opened.resolve(a), opened.resolve(b))
    if as_json:
        terminal.emit(document)
    else:
        terminal.compare(document)


@command("verify")
def verify(
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Whose signatures on the head you trust, and how many witnesses you ask for."),
    ] = None,
    proof: Annotated[
        Path | None, typer.Option("--proof", metavar="FILE", help="Check this proof under the policy instead, without any archive.")
    ] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> int:
    """Hash, derive and compare everything again. Exit 0 clean, 1 findings, 2 could not check."""
    from ledger import verify as checking
    from ledger.policies import Policy

    trusted = None if policy is None else Policy.parse(_read(policy, "policy"))
    if proof is not None:
        return _check_proof(_read(proof, "proof"), trusted)
    place, url = _place(archive, database)
    document = checking.verify(place, url, trusted).document()
    if as_json:
        terminal.emit(document)
    else:
        terminal.findings(document)
    return OK if document["ok"] else FINDINGS


def _read(path: Path, what: str) -> bytes:
    """A small file that a command names. Raises InputError."""
    try:
        with path.open("rb") as stream:
            return stream.read((1 << 20) + 1)
    except OSError as error:
        raise InputError(f"The {what} cannot be read: {path}", found=str(error.strerror), next="name a file that can.") from error


def _check_proof(data: bytes, policy: Policy | None) -> int:
    from ledger import records
    from ledger.notes import Proof, encode64

    if policy is None:
        raise InputError(
            "A proof shows nothing under keys that nobody trusts.",
            expected="--policy FILE",
            next="write whose heads you trust: a line `log <vkey>` and a line `quorum none`.",
        )
    found = Proof.parse(data)
    checkpoint = found.check()
    faults = policy.faults(found.note)
    entry = records.decode(records.Entry, found.entry, "The entry of the proof")
    terminal.say(f"entry {entry.sequence}: {entry.kind} {entry.record}, recorded {entry.recorded_at}")
    terminal.say(f"head: {checkpoint.origin}, {checkpoint.head.size} entries, root {encode64(checkpoint.head.root)}")
    if found.index != entry.sequence:
        faults.append(f"the entry says that it is number {entry.sequence}, and stands at {found.index}")
    for words in faults:
        terminal.say(f"finding: {words}")
    if not faults:
        terminal.say("ok: the entry stands under a head that the policy trusts.")
    return FINDINGS if faults else OK


@command("serve")
def serve(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 lets the system choose.")] = 8000,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> None:
    """Show the archive in a browser, on 127.0.0.1 only. Nothing can be changed there."""
    from ledger import web

    place, url = _place(archive, database)
    web.serve(place, url, port=port)


# ---------------------------------------------------------------- reproduce


def _reproduce_run(
    run: RunArgument,
    current_harness: Annotated[
        bool, typer.Option("--current-harness", help="Use the code that is here, not the recorded commit; the record says so.")
    ] = False,
    inputs: Annotated[
        list[Path] | None, typer.Option("--inputs", metavar="DIR", help="A folder to look for the dataset and the weights in, by digest.")
    ] = None,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the frozen and the result folder here.")] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    database: DatabaseOption = None,
) -> int:
    """Run a recorded run again from its pinned parts, and record how the two compare. Exit 3 outside, 4 not comparable."""
    from ledger import digest, records, reproduce

    with _opened(archive, database, write=True) as opened:
        outcome: records.Reproduction = reproduce.reproduce(
            opened, opened.resolve(run), current_harness=current_harness, keep=keep, search=inputs or ()
        )
    document = digest.jsonable(records.plain(outcome))
    if as_json:
        terminal.emit(document)
    else:
        terminal.reproduction(document)
    return _VERDICTS.get(outcome.verdict, OK)


command("reproduce-run")(_reproduce_run)


# ---------------------------------------------------------------- entry points


def _tolerant_output() -> None:
    """Let a terminal of a small character set show escapes instead of failing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: there is nobody to tell
            setattr(sys, name, io.StringIO())
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def main() -> None:
    """The console script ``ledger``."""
    _tolerant_output()
    app()


def reproduce_run_main() -> None:
    """The console script ``reproduce-run``, the same as ``ledger reproduce-run``."""
    _tolerant_output()
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    single.command("reproduce-run")(_guarded(_reproduce_run))
    single()


if __name__ == "__main__":
    main()
