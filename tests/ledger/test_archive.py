"""The archive: append, read, rebuild, and what happens when it is killed, damaged or shared."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ledger import database as databases
from ledger import digest, records
from ledger.archive import Archive, rows_of
from ledger.database import Database
from ledger.errors import ArchiveError, InputError, LedgerError
from ledger.log import Head, leaf_hash
from ledger.store import FolderStore
from ledger.verify import verify
from tests import factories
from tests.conftest import append_derived_run, append_outside, append_performance, append_run

ROOT = Path(__file__).parent.parent.parent
Make = Callable[..., Archive]


def _comparable(rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[bytes]]:
    """Rows in an order and a form that two databases share; SQLite gives 1 for True."""
    return {
        name: sorted(digest.canonical({key: int(v) if isinstance(v, bool) else v for key, v in row.items()}) for row in found)
        for name, found in rows.items()
    }


def assert_whole(archive: Archive) -> None:
    """Head, log and database agree, row by row."""
    data = list(archive.store.entries(archive.head.size))
    assert archive.head == Head.over([leaf_hash(item) for item in data])
    assert [records.encode(entry) for entry in archive.entries()] == data
    assert archive.store.sequences() == list(range(archive.head.size))
    assert _comparable(archive.stored_rows()) == _comparable(archive.expected_rows())
    assert archive.store.strays() == []


def _retract(run: str, reason: str = "a wrong scale") -> records.Retract:
    return records.Retract(format="kv-ledger/retract/1", run=run, author="the maintainers", reason=reason)


def _supersede(run: str, by: str) -> records.Supersede:
    return records.Supersede(format="kv-ledger/supersede/1", run=run, by=by, author="the maintainers", reason="more documents")


def _reproduction(original: str, reproduced: str | None) -> records.Reproduction:
    return records.Reproduction(
        format="kv-ledger/reproduction/1",
        original=original,
        reproduced=reproduced,
        verdict="within",
        reason="",
        same_hardware=True,
        harness="recorded",
        differences=(records.Difference(name="loss", original=2.5, reproduced=float("nan"), tolerance=0.1),),
        divergence=records.Divergence(evidence="samples/0000.safetensors", series="native.loss", position=3, original=1.0, reproduced=-0.0),
    )


def fill(archive: Archive) -> tuple[str, str]:
    """One record of every kind; the digests of two runs."""
    gate = records.GateOutcome(
        statistic="loss_difference_mean",
        estimate=0.5,
        lower=-0.0,
        upper=float("inf"),
        bound=0.02,
        harm=0.02,
        met=False,
        harmed=True,
        method="t",
    )
    decision = records.Decision(
        candidate="k8v8", baseline="k16v16", family="loss", status="degraded", reason="harm", p_bound=1.0, p_harm=1e-9, gates=(gate, gate)
    )
    figure = records.Measurement(arm="k8v8", name="loss", value=2.5, unit="nats", lower=float("nan"), upper=float("inf"))
    first = append_run(archive, 0, measurements=(figure,), decisions=(decision,), warnings=("a warning",)).record
    second = append_run(archive, 1).record
    other = factories.spec(study="other", checkpoint=factories.checkpoint(config={"layers": 2}, seed=7, files=()))
    third = append_run(archive, 2, other, outcome="failed", reason="killed").record
    archive.append(_reproduction(first, second))
    archive.append(_supersede(first, second))
    archive.append(_retract(third))
    return first, second


# ---------------------------------------------------------------- append and read


def test_what_is_appended_is_read_back(archive: Archive) -> None:
    spec = factories.spec()
    files = factories.samples(spec)
    found = factories.result(spec, files)
    run = factories.run(spec, found)
    frozen = archive.append(spec)
    entry = archive.append(run, {item.sha256: files.get(item.name) or records.encode(found) for item in run.evidence})
    assert (frozen.sequence, frozen.kind, frozen.record) == (0, "spec", records.identify(spec))
    assert (entry.sequence, entry.kind, entry.record) == (1, "run", records.identify(run))
    assert archive.entries() == [frozen, entry]
    assert archive.record(frozen.record) == archive.spec(frozen.record) == spec
    assert archive.record(entry.record) == archive.run(entry.record) == archive.get(records.Run, entry.record) == run
    assert archive.result(entry.record) == archive.result(run) == found
    assert archive.samples(entry.record) == files
    assert archive.find_result(run.result) == entry.record
    assert archive.find_result("0" * 64) is None
    assert archive.notices == []
    assert_whole(archive)


def test_every_kind_of_record_has_its_rows(archive: Archive) -> None:
    fill(archive)
    append_performance(archive)
    archive.append(factories.memory_spec())
    append_outside(archive)
    assert_whole(archive)
    assert [name for name, rows in archive.stored_rows().items() if not rows] == []


def test_appending_twice_is_appending_once(archive: Archive) -> None:
    spec = factories.spec()
    entry = archive.append(spec)
    assert archive.append(spec) == entry
    run = append_run(archive)
    assert append_run(archive) == run
    assert append_run(archive, warnings=("the same result, recorded again",)) == run
    assert archive.append(_retract(run.record)) == archive.append(_retract(run.record))
    assert archive.head.size == 3


def test_evidence_is_taken_from_files(make_archive: Make, tmp_path: Path) -> None:
    archive, spec = make_archive(), factories.spec()
    files = factories.samples(spec)
    found = factories.result(spec, files)
    folder = factories.write_result_folder(tmp_path / "out", found, files)
    run = factories.run(spec, found)
    archive.append(spec)
    entry = archive.append(run, {item.sha256: folder / item.name for item in run.evidence})
    assert archive.samples(entry.record) == files
    assert archive.store.pending() == set()


def _run(archive: Archive, **changes: Any) -> tuple[records.Run, dict[str, bytes]]:
    spec = factories.spec()
    archive.append(spec)
    files = factories.samples(spec)
    found = factories.result(spec, files)
    run = factories.run(spec, found, **changes)
    return run, {item.sha256: files.get(item.name) or records.encode(found) for item in factories.run(spec, found).evidence}


def test_a_run_of_an_unknown_spec_is_refused(archive: Archive) -> None:
    run, evidence = _run(archive)
    other = records.convert(records.Run, {**records.plain(run), "spec": "0" * 64}, "a run")
    with pytest.raises(InputError, match="names a spec that is not recorded"):
        archive.append(other, evidence)
    assert archive.head.size == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda run, other: _retract(other),
        lambda run, other: _supersede(other, run),
        lambda run, other: _supersede(run, other),
        lambda run, other: _supersede(run, run),
        lambda run, other: _reproduction(other, run),
        lambda run, other: _reproduction(run, other),
        lambda run, other: _reproduction(run, run),
        lambda run, other: _retract(records.identify(factories.spec())),
    ],
)
def test_a_correction_of_what_is_no_run_here_is_refused(archive: Archive, make: Callable[[str, str], records.Body]) -> None:
    run = append_run(archive).record
    with pytest.raises(InputError, match=r"not recorded here|one run twice"):
        archive.append(make(run, "0" * 64))
    assert archive.head.size == 2


def test_evidence_that_is_missing_wrong_or_too_much_is_refused(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    run, evidence = _run(archive)
    one = next(item.sha256 for item in run.evidence if item.name.startswith("samples/"))
    (tmp_path / "wrong").write_bytes(b"wrong")
    cases: list[tuple[str, records.Run, dict[str, Any]]] = [
        ("is missing", run, {key: value for key, value in evidence.items() if key != one}),
        ("not what the record says", run, {**evidence, one: b"wrong"}),
        ("not what the record says", run, {**evidence, one: tmp_path / "wrong"}),
        ("cannot be read", run, {**evidence, one: tmp_path / "absent"}),
        ("does not name", run, {**evidence, digest.sha256(b"more"): b"more"}),
    ]
    plain = records.plain(run)
    for what, changed in (
        ("wrong size", [{**item, "size": item["size"] + 1} for item in plain["evidence"]]),
        ("two evidence files of one name", [plain["evidence"][0], *plain["evidence"]]),
        ("does not list its result.json", [item for item in plain["evidence"] if item["name"] != "result.json"]),
    ):
        cases.append((what, records.convert(records.Run, {**plain, "evidence": changed}, "a run"), evidence))
    for what, body, given in cases:
        with pytest.raises(LedgerError, match=what):
            archive.append(body, given)
    assert archive.head.size == 1
    assert_whole(archive)
    archive.append(run, evidence)
    assert_whole(archive)


@pytest.mark.parametrize("data", [b"", b"{}", b"{", b"\xff", b'{"a":NaN}', b" {}", b"\0"])
def test_a_run_whose_result_cannot_be_read_is_refused(make_archive: Make, data: bytes) -> None:
    archive = make_archive()
    run, evidence = _run(archive)
    plain = records.plain(run)
    own = {"name": "result.json", "sha256": digest.sha256(data), "size": len(data), "media_type": "application/json"}
    plain["evidence"] = [own, *(item for item in plain["evidence"] if item["name"] != "result.json")]
    plain["result"] = own["sha256"]
    del evidence[run.result]
    with pytest.raises(InputError, match=r"(?s)JSON|Result|canonical|UTF-8"):
        archive.append(records.convert(records.Run, plain, "a run"), {**evidence, own["sha256"]: data})
    assert archive.head.size == 1


def test_a_nul_character_is_refused_alike_on_both_databases(archive: Archive) -> None:
    with pytest.raises(InputError, match=r"(?s)NUL.*arms\[0\]\.backend"):
        archive.append(factories.spec(arms=(records.Arm(**{**_fields(factories.ARMS[0]), "backend": "a\0b"}), *factories.ARMS[1:])))
    run, evidence = _run(archive)
    with pytest.raises(InputError, match="NUL"):
        archive.append(records.convert(records.Run, {**records.plain(run), "reason": "\0"}, "a run"), evidence)
    assert archive.head.size == 1
    assert_whole(archive)


def _fields(record: records.Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@pytest.mark.parametrize(
    "text", ["<script>", "=1+1", "'; DROP TABLE runs; --", "\u202e", "🜚", "é", "\x01\x7f", "%s %(a)s :a", "\\", "x" * 8192]
)
def test_any_other_text_survives(archive: Archive, text: str) -> None:
    entry = append_run(archive, reason=text)
    assert archive.run(entry.record).reason == text
    assert_whole(archive)


def test_a_spec_that_contradicts_itself_is_refused(make_archive: Make) -> None:
    with pytest.raises(InputError, match="contradicts itself"):
        make_archive().append(factories.spec(arms=factories.ARMS[1:]))


def test_an_archive_opened_for_reading_does_not_append(make_archive: Make) -> None:
    with Archive.open(make_archive().folder) as archive, pytest.raises(ArchiveError, match="reading only"):
        archive.append(factories.spec())


def test_a_run_is_named_by_a_unique_prefix(archive: Archive) -> None:
    first, second = fill(archive)
    assert archive.resolve(first) == first
    assert archive.resolve(second[:12]) == second
    for prefix in ("", "abc", "ABCD", "zzzz", "%%%%", "____", first + "0", "../..", "ab\0cd"):
        with pytest.raises(InputError, match=r"names no run|begins so"):
            archive.resolve(prefix)
    with pytest.raises(InputError, match="No run"):
        archive.resolve("0" * 64)
    with pytest.raises(InputError, match="No entry"):
        archive.run("0" * 64)
    with pytest.raises(InputError, match="no spec"):
        archive.spec(first)


def test_a_prefix_of_several_runs_is_ambiguous(make_archive: Make) -> None:
    archive = make_archive()
    first, second = fill(archive)
    twin = first[:8] + second[8:]
    with archive.database.writing() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        connection.exec_driver_sql("UPDATE runs SET run = ? WHERE run = ?", (twin, second))
        with archive.database.reading():
            pass
        for table in ("arms", "layers", "backings", "measurements", "decisions", "gates", "evidence", "claim_runs"):
            connection.exec_driver_sql(f"UPDATE {table} SET run = ? WHERE run = ?", (twin, second))
        connection.exec_driver_sql("UPDATE relations SET by = ? WHERE by = ?", (twin, second))
        connection.exec_driver_sql("UPDATE reproductions SET reproduced = ? WHERE reproduced = ?", (twin, second))
        connection.exec_driver_sql("UPDATE entries SET record = ? WHERE record = ?", (twin, second))
    with pytest.raises(InputError, match="Several runs") as caught:
        archive.resolve(first[:4])
    assert first[:12] in caught.value.found
    assert twin[:12] in caught.value.found


# ---------------------------------------------------------------- opening, rebuilding


def test_a_folder_that_is_no_archive_names_the_command(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArchiveError, match="ledger init"):
            Archive.open(folder)


def test_an_archive_is_made_in_an_empty_folder_alone(tmp_path: Path, make_archive: Make) -> None:
    made = make_archive("made")
    with pytest.raises(ArchiveError, match="an archive already"):
        Archive.create(made.folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(ArchiveError, match="not empty"):
        Archive.create(tmp_path / "full")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArchiveError, match="cannot be made"):
        Archive.create(tmp_path / "file")


def test_rebuilding_gives_equal_rows(archive: Archive) -> None:
    fill(archive)
    before = _comparable(archive.stored_rows())
    for _ in range(2):
        archive.rebuild()
        assert _comparable(archive.stored_rows()) == before
    assert_whole(archive)


def test_two_databases_of_one_archive_hold_equal_rows(make_archive: Make, postgresql_url: str) -> None:
    archive = make_archive()
    fill(archive)
    with Archive.open(archive.folder, postgresql_url) as other:
        assert "built from the log: 8 entries" in other.notices[0]
        assert _comparable(other.stored_rows()) == _comparable(archive.stored_rows())


def test_a_missing_database_is_built_at_first_use(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    before = _comparable(archive.stored_rows())
    for path in archive.folder.glob("ledger.db*"):
        path.unlink()
    with Archive.open(archive.folder) as again:
        assert _comparable(again.stored_rows()) == before
        assert "built from the log" in again.notices[0]
    with Archive.open(archive.folder) as again:
        assert again.notices == []


def test_entries_that_a_pull_brought_are_added_at_the_next_opening(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    append_run(archive)
    clone = tmp_path / "clone"
    shutil.copytree(archive.folder, clone)
    first, _ = fill(archive)
    shutil.copytree(archive.folder / "objects", clone / "objects", dirs_exist_ok=True)
    shutil.copytree(archive.folder / "log", clone / "log", dirs_exist_ok=True)
    with Archive.open(clone) as pulled:
        assert "behind the log: " in pulled.notices[0]
        assert pulled.resolve(first) == first
        assert_whole(pulled)


@contextmanager
def _sqlite(archive: Archive) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(archive.folder / "ledger.db")
    try:
        with connection:
            yield connection
    finally:
        connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET leaf_hash = 'ab' || substr(leaf_hash, 3) WHERE sequence = 1",
        "UPDATE entries SET leaf_hash = 'no hash' WHERE sequence = 1",
        "UPDATE entries SET leaf_hash = x'00' WHERE sequence = 1",
        "UPDATE entries SET sequence = 90 WHERE sequence = 1",
        "INSERT INTO entries VALUES (8, 'run', 'x', 'now', '00')",
        "INSERT INTO entries VALUES (8, 'run', 'x', 'now', '00'), (9, 'run', 'y', 'now', '00')",
    ],
)
def test_a_database_that_contradicts_the_log_is_refused_until_it_is_rebuilt(make_archive: Make, statement: str) -> None:
    archive = make_archive()
    fill(archive)
    with _sqlite(archive) as connection:
        connection.execute(statement)
    for write in (False, True):
        with pytest.raises(ArchiveError, match=r"(?s)contradicts the log.*ledger verify.*ledger rebuild"):
            Archive.open(archive.folder, write=write)
    with Archive.at(archive.folder) as damaged:
        damaged.rebuild()
    with Archive.open(archive.folder) as again:
        assert_whole(again)


def test_a_log_that_contradicts_its_head_is_refused(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    path = archive.folder / "log" / "000000001.json"
    path.write_bytes(path.read_bytes().replace(b'"recorded_at":"2', b'"recorded_at":"3'))
    for file in archive.folder.glob("ledger.db*"):
        file.unlink()
    with pytest.raises(ArchiveError, match=r"(?s)do not agree.*ledger verify"):
        Archive.open(archive.folder)
    with pytest.raises(ArchiveError, match="do not agree"), Archive.at(archive.folder) as damaged:
        damaged.rebuild()


@pytest.mark.parametrize("data", [b"not a database" * 100, os.urandom(8192), b"SQLite format 3\0" + b"\xff" * 4080])
def test_a_file_that_is_no_database_is_a_clear_error_and_rebuilt(make_archive: Make, data: bytes) -> None:
    archive = make_archive()
    fill(archive)
    archive.close()
    (archive.folder / "ledger.db").write_bytes(data)
    with pytest.raises(ArchiveError, match="ledger rebuild"):
        Archive.open(archive.folder)
    with Archive.at(archive.folder) as damaged:
        damaged.rebuild()
    with Archive.open(archive.folder) as again:
        assert_whole(again)


def test_a_database_whose_tables_were_changed_is_rebuilt(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    with _sqlite(archive) as connection:
        connection.executescript(
            "ALTER TABLE runs DROP COLUMN reason; CREATE TABLE notes (a); CREATE VIEW v AS SELECT * FROM notes;"
            "CREATE TRIGGER t AFTER INSERT ON specs BEGIN DELETE FROM claims; END;"
        )
    with Archive.at(archive.folder) as damaged:
        damaged.rebuild()
    with Archive.open(archive.folder) as again:
        assert_whole(again)
    with _sqlite(archive) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert not names & {"notes", "v", "t"}


def test_a_database_of_another_archive_is_refused(make_archive: Make, tmp_path: Path, postgresql_url: str) -> None:
    append_run(make_archive("first", postgresql_url))
    with pytest.raises(ArchiveError, match="another archive"):
        make_archive("second", postgresql_url)
    third = make_archive("third")
    with pytest.raises(ArchiveError, match="contradicts the log"):
        Archive.open(third.folder, postgresql_url)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("nonsense", "no database URL"),
        ("mysql://root:secret@localhost/x", "not supported"),
        ("sqlite://", "in memory"),
        ("sqlite:////nonexistent/folder/ledger.db", "folder does not exist"),
        ("postgresql://user:secret@127.0.0.1:1/none", "cannot be used"),
        ("postgresql://user:secret@127.0.0.1:abc/x", "no database URL"),
        ("postgresql://user:sec/secret@127.0.0.1:abc/x", "no database URL"),
        ("user:secret@127.0.0.1", "no database URL"),
        ("postgresql://127.0.0.1:99999/x?password=secret", "cannot be used"),
        ("postgresql://user:secret@127.0.0.1/x?nonsense=1", "cannot be used"),
        ("postgresql://user:secret@127.0.0.1:1/x?connect_timeout=abc", "cannot be used"),
        ("sqlite+aiosqlite:///x.db", "driver of SQLite is not supported"),
        ("sqlite://user:secret@host/x.db", "no URL of an SQLite file"),
        ("sqlite://x.db", "no URL of an SQLite file"),
        ("sqlite:///x.db?timeout=abc", "no URL of an SQLite file"),
        ("sqlite:///x\0.db", "no database URL"),
        ("sqlite:////" + "x" * 300, "cannot be used"),
        ("", "no database URL"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_clear_error_without_its_password(make_archive: Make, url: str, what: str) -> None:
    folder = make_archive().folder
    with pytest.raises(ArchiveError, match=what) as caught:
        Database(url) if not url else Archive.open(folder, url)
    assert "secret" not in str(caught.value)
    assert caught.value.next


@pytest.mark.parametrize("name", ["runs", "Runs", "ix_claims_checkpoint"])
def test_the_tables_of_another_tool_are_refused_and_left_as_they_are(make_archive: Make, tmp_path: Path, name: str) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        table = name if name.lower() == "runs" else "theirs"
        connection.executescript(f"CREATE TABLE alembic_version (version_num); CREATE TABLE {table} (id, mine)")
        connection.execute(f"INSERT INTO {table} VALUES (1, 2)")
        if table == "theirs":
            connection.execute(f"CREATE INDEX {name} ON theirs (id)")
    before, url = path.read_bytes(), f"sqlite:///{path}"
    archive = make_archive()
    append_run(archive)
    attempts: list[Callable[[], object]] = [
        lambda: Archive.create(tmp_path / "new", url),
        lambda: Archive.open(archive.folder, url),
        lambda: Archive.open(archive.folder, url, write=True),
        lambda: Archive.at(archive.folder, url).migrate(),
        lambda: Archive.at(archive.folder, url).rebuild(),
    ]
    for attempt in attempts:
        with pytest.raises(ArchiveError, match=r"(?s)holds tables that are not this archive's.*choose another database"):
            attempt()
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.glob("other.db*")) == ["other.db"]


def test_other_tables_beside_ours_are_left_alone(make_archive: Make, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript("CREATE TABLE alembic_version (version_num); INSERT INTO alembic_version VALUES ('mine')")
    archive = make_archive(url=f"sqlite:///{path}")
    fill(archive)
    archive.rebuild()
    assert_whole(archive)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM alembic_version").fetchall() == [("mine",)]


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_rebuilding_over_the_index_of_another_archive_is_refused(
    make_archive: Make, tmp_path: Path, request: pytest.FixtureRequest, backend: str
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}" if backend == "sqlite" else str(request.getfixturevalue("postgresql_url"))
    first, second = make_archive("first", url), make_archive("second")
    append_run(first)
    append_run(second)
    with (
        pytest.raises(ArchiveError, match=r"(?s)not this archive's.*index of another archive"),
        Archive.at(second.folder, url) as other,
    ):
        other.rebuild()
    assert_whole(first)
    first.rebuild()
    assert_whole(first)


def test_the_archives_own_file_may_be_named_by_url_and_is_made_anew_whatever_it_holds(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    append_run(archive)
    archive.close()
    (archive.folder / "ledger.db").unlink()
    with closing(sqlite3.connect(archive.folder / "ledger.db")) as connection, connection:
        connection.execute("CREATE TABLE runs (id)")
    with pytest.raises(ArchiveError, match=r"(?s)does not say which schema.*ledger rebuild"):
        Archive.open(archive.folder)
    with Archive.at(archive.folder, f"sqlite:///{archive.folder / 'ledger.db'}") as own:
        own.rebuild()
        assert_whole(own)


# ---------------------------------------------------------------- a full disk

_LIMITED = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try: Archive.create(Path(sys.argv[1]), sys.argv[2] or None)
except Exception as error: print(type(error).__name__, error)
"""


@pytest.mark.parametrize("limit", [4096, 40_000, 70_000])
@pytest.mark.parametrize("own", [True, False])
def test_making_an_archive_on_a_full_disk_can_be_repeated(tmp_path: Path, own: bool, limit: int) -> None:
    """A real limit: the kernel refuses to let any file grow further."""
    url = "" if own else f"sqlite:///{tmp_path / 'other.db'}"
    done = _child(_LIMITED, str(tmp_path / "archive"), url, str(limit))
    assert done.returncode == 0, done.stderr
    assert "the disk may be full: free space" in done.stdout
    assert "rebuild" not in done.stdout
    assert not (tmp_path / "archive" / "log" / "head").exists()
    with Archive.create(tmp_path / "archive", url or None) as archive:
        append_run(archive)
        assert_whole(archive)


def _limit_pages(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    real = databases._sqlite_connected

    def connected(connection: Any, record: Any) -> None:
        real(connection, record)
        connection.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(databases, "_sqlite_connected", connected)


def test_nothing_is_said_to_be_done_that_failed(make_archive: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_archive()
    fill(archive)
    with _sqlite(archive) as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    archive.database.remove_file()
    data = list(archive.store.entries(archive.head.size))
    archive.store.announce([records.decode(records.Entry, data[-1], "the entry").record])
    archive.store.write_head(Head.over([leaf_hash(item) for item in data[:-1]]))
    for action in ("migrate", "rebuild"):
        with monkeypatch.context() as patch, Archive.at(archive.folder) as full:
            _limit_pages(patch, pages - 1)
            with pytest.raises(ArchiveError, match=r"(?s)full.*the disk may be full: free space.*nothing recorded is lost"):
                getattr(full, action)()
            assert full.notices == []
    with Archive.at(archive.folder) as again:
        again.migrate()
        assert [("left unfinished" in text, "built from the log" in text) for text in again.notices] == [(True, False), (False, True)]
        assert_whole(again)


def test_an_archive_that_comes_into_being_meanwhile_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FolderStore.lock

    @contextmanager
    def late(store: FolderStore) -> Iterator[None]:
        (tmp_path / "archive" / "thesis.tex").write_text("mine")
        with real(store):
            yield

    monkeypatch.setattr(FolderStore, "lock", late)
    with pytest.raises(ArchiveError, match="not empty"):
        Archive.create(tmp_path / "archive")
    assert not (tmp_path / "archive" / "log").exists()


@pytest.mark.parametrize("fault", ["tmp is a file", "lock is a folder"])
def test_what_stands_in_the_place_of_the_lock_is_said(make_archive: Make, fault: str) -> None:
    archive = make_archive()
    archive.close()
    shutil.rmtree(archive.folder / "tmp")
    if fault == "tmp is a file":
        (archive.folder / "tmp").write_text("mine")
    else:
        (archive.folder / "tmp" / "lock").mkdir(parents=True)
    for write in (False, True):
        with pytest.raises(ArchiveError, match=r"(?s)stands where the archive has.*found: a .*move it away") as caught:
            Archive.open(archive.folder, write=write)
        assert "read-only" not in str(caught.value)


def test_the_schema_of_other_tools_in_one_database_is_left_alone(make_archive: Make, postgresql_url: str) -> None:
    import psycopg

    with psycopg.connect(postgresql_url) as connection:
        connection.execute("CREATE TABLE runs (a int); CREATE TABLE alembic_version (version_num text); INSERT INTO runs VALUES (1)")
    archive = make_archive(url=postgresql_url)
    fill(archive)
    archive.rebuild()
    assert_whole(archive)
    with psycopg.connect(postgresql_url) as connection:
        assert connection.execute("SELECT a FROM public.runs").fetchall() == [(1,)]


# ---------------------------------------------------------------- processes

_OPENING = "import os, signal, sys; from pathlib import Path; from ledger.archive import Archive; from tests import factories\n"


def _child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", _OPENING + script, *arguments], capture_output=True, text=True, check=False, env=environment
    )


_KILLED = """
import ledger.archive, ledger.store, ledger.database
from ledger.store import FolderStore
from ledger.database import Database
from sqlalchemy.engine import Connection
where = sys.argv[3]
def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def before(owner, name):
    setattr(owner, name, kill)
def after(owner, name):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        real(*args, **kwargs)
        kill()
    setattr(owner, name, call)
def nth(owner, name, n):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        nonlocal n
        n -= 1
        if n == 0: kill()
        return real(*args, **kwargs)
    setattr(owner, name, call)
archive = Archive.open(Path(sys.argv[1]), sys.argv[2] or None, write=True)
from ledger import records
from tests.conftest import derived
spec = factories.spec(); files = factories.samples(spec, 5); found = factories.result(spec, files)
run = factories.run(spec, found, **derived(spec, found, files))
evidence = {item.sha256: files.get(item.name) or records.encode(found) for item in run.evidence}
{"announced": lambda: after(FolderStore, "announce"),
 "first object staged": lambda: nth(Path, "replace", 2),
 "third object staged": lambda: nth(Path, "replace", 4),
 "evidence stored": lambda: after(ledger.archive.admission, "store_evidence"),
 "record stored": lambda: before(Archive, "_append"),
 "rows inserted": lambda: after(Database, "insert"),
 "before the entry": lambda: before(FolderStore, "write_entry"),
 "entry staged": lambda: nth(Path, "replace", 8),
 "entry written": lambda: after(FolderStore, "write_entry"),
 "before the commit": lambda: nth(Connection, "commit", 2),  # the first is that of the look before
 "committed": lambda: before(FolderStore, "write_head"),
 "head written": lambda: after(FolderStore, "write_head"),
 "before striking out": lambda: before(FolderStore, "arrived"),
}[where]()
archive.append(run, evidence)
"""

_ABSENT = [
    "announced",
    "first object staged",
    "third object staged",
    "evidence stored",
    "record stored",
    "rows inserted",
    "before the entry",
]
_ADOPTED = ["entry written", "before the commit", "committed"]
_WHOLE = ["head written", "before striking out"]


@pytest.mark.parametrize(
    ("backend", "where"),
    [
        *(("sqlite", where) for where in (*_ABSENT, "entry staged", *_ADOPTED, *_WHOLE)),
        *(("postgresql", where) for where in (*_ABSENT, "entry staged", *_ADOPTED, *_WHOLE)),
    ],
)
def test_killed_at_any_step_of_an_append_the_archive_stays_whole(
    make_archive: Make, request: pytest.FixtureRequest, backend: str, where: str
) -> None:
    database_url = request.getfixturevalue("postgresql_url") if backend == "postgresql" else None
    archive = make_archive(url=database_url)
    before = [append_derived_run(archive, 0), append_derived_run(archive, 1)]
    kept = archive.entries()
    done = _child(_KILLED, str(archive.folder), database_url or "", where)
    assert done.returncode == -9, done.stderr

    report = verify(archive.folder, database_url)
    assert report.ok, report.findings
    assert any("cut off" in note for note in report.notes) is (where in _ADOPTED)
    with Archive.open(archive.folder, database_url) as reader:  # reading needs no repair
        assert reader.entries()[: len(kept)] == kept
        assert {reader.resolve(entry.record) for entry in before} == {entry.record for entry in before}
        assert reader.head.size == len(kept) + (where in _WHOLE)
    with Archive.open(archive.folder, database_url, write=True) as writer:
        assert writer.entries()[: len(kept)] == kept
        assert writer.head.size == len(kept) + (where in _ADOPTED + _WHOLE)
        assert [notice for notice in writer.notices if "left unfinished" in notice] == writer.notices
        assert bool(writer.notices) is (where in _ADOPTED)
        named = {item.sha256 for entry in writer.entries() if entry.kind == "run" for item in writer.run(entry.record).evidence}
        named |= {entry.record for entry in writer.entries()}
        assert set(writer.store.digests()) - named <= writer.store.pending()
        assert_whole(writer)
        append_derived_run(writer, 5)  # the same command again
        assert writer.head.size == len(kept) + 1
        assert_whole(writer)
        assert writer.store.pending() == set()
        assert not list(writer.folder.glob("tmp/stage-*"))
    assert verify(archive.folder, database_url).ok


_TWENTY = """
archive = Archive.open(Path(sys.argv[1]), sys.argv[2] or None, write=True)
for index in range(20):
    archive.append(factories.spec(study=f"study-{sys.argv[3]}-{index}"))
"""


def test_two_processes_append_at_once_without_a_gap(make_archive: Make, database_url: str | None) -> None:
    archive = make_archive(url=database_url)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _OPENING + _TWENTY, str(archive.folder), database_url or ""]
    both = [subprocess.Popen([*command, side], env=environment, stderr=subprocess.PIPE, text=True) for side in "ab"]
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert [entry.sequence for entry in archive.entries()] == list(range(40))
    studies = {archive.spec(entry.record).study for entry in archive.entries()}
    assert studies == {f"study-{side}-{index}" for side in "ab" for index in range(20)}
    assert_whole(archive)


def test_two_processes_build_one_missing_database(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    archive.close()
    for path in archive.folder.glob("ledger.db*"):
        path.unlink()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = _OPENING + "Archive.open(Path(sys.argv[1])).close()"
    both = [
        subprocess.Popen([sys.executable, "-c", script, str(archive.folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in "ab"
    ]
    for process in both:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    with Archive.open(archive.folder) as again:
        assert_whole(again)


_REBUILD_KILLED = """
from ledger.database import Database
def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
setattr(Archive if sys.argv[3].startswith("_") else Database, sys.argv[3], kill)
Archive.at(Path(sys.argv[1]), sys.argv[2] or None).rebuild()
"""


@pytest.mark.parametrize("where", ["upgrade", "_catch_up", "_insert_entry", "_refresh_claims"])
def test_a_rebuild_that_is_killed_leaves_the_old_database(archive: Archive, database_url: str | None, where: str) -> None:
    fill(archive)
    assert _child(_REBUILD_KILLED, str(archive.folder), database_url or "", where).returncode == -9
    assert_whole(archive)
    archive.append(factories.spec(study="after"))
    assert_whole(archive)


@pytest.fixture
def read_only(make_archive: Make) -> Iterator[Path]:
    """A filled archive without the right to write."""
    archive = make_archive()
    fill(archive)
    archive.close()
    paths = [archive.folder, *archive.folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield archive.folder
    for path in paths:
        path.chmod(0o755)


_ORDINARY = """
def become_ordinary():  # root may write anywhere: give up the capabilities by which it does
    import ctypes
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # linux/capability.h: version 3, this process
    sets = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, sets) == 0
if os.geteuid() == 0:
    become_ordinary()
"""

_READER = """
with Archive.open(Path(sys.argv[1])) as archive:
    print(len(archive.entries()), *archive.notices)
try:
    Archive.open(Path(sys.argv[1]), write=True)
except Exception as error:
    print(type(error).__name__, error)
for action in ("rebuild", "migrate"):
    try:
        getattr(Archive.at(Path(sys.argv[1])), action)()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_read_only_archive_is_read_and_not_written(read_only: Path) -> None:
    before = sorted(str(path) for path in read_only.rglob("*"))
    done = _child(_ORDINARY + _READER, str(read_only))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("8 The archive's folder is read-only: its database was built in a temporary folder.")
    assert lines[1].startswith("ArchiveError The archive's folder is read-only")
    assert [line for line in lines if line.startswith("ArchiveError")][1:] == [
        f"ArchiveError The archive cannot be locked for writing: {read_only}"
    ] * 2
    assert sorted(str(path) for path in read_only.rglob("*")) == before


# ---------------------------------------------------------------- rows


def test_rows_are_drawn_from_the_record_alone() -> None:
    spec = factories.spec()
    entry = records.Entry(format="kv-ledger/entry/1", sequence=0, kind="spec", record=records.identify(spec), recorded_at=factories.NOW)
    assert rows_of(entry, spec) == rows_of(entry, spec)
    with pytest.raises(TypeError, match="need its result"):
        rows_of(entry, factories.run(spec, factories.result(spec, {})))


def test_a_run_that_was_withdrawn_replaces_no_other(archive: Archive) -> None:
    first, second, third = (append_run(archive, seed=seed).record for seed in range(3))
    archive.append(_supersede(first, second))
    archive.append(_retract(third))
    for run, by in ((second, first), (second, third)):
        with pytest.raises(InputError, match="withdrawn itself"):
            archive.append(_supersede(run, by))
