"""Bytes that are taken out of an archive: one evidence object for a stated reason, and what no entry names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from ledger import cli, digest, records
from ledger.archive import Archive
from ledger.errors import InputError, RedactedError
from ledger.verify import Report, verify
from ledger.web import create_app
from tests import factories
from tests.conftest import append_derived_run
from tests.ledger.test_archive import assert_whole

WHEN_OLD = time.time() - 30 * 86_400


def redaction(name: str, reason: str = "a name stands in it") -> records.Redaction:
    return records.Redaction(format="kv-ledger/redaction/1", object=name, author="the maintainers", reason=reason)


def checked(archive: Archive) -> Report:
    return verify(archive.folder, None if archive.database.own else archive.database.url.render_as_string(hide_password=False))


def a_sample(archive: Archive) -> tuple[records.Run, str]:
    """A run, and one of its raw samples."""
    run = archive.run(append_derived_run(archive, 1).record)
    return run, next(item.sha256 for item in run.evidence if item.name.startswith("samples/"))


def test_a_redacted_object_is_gone_and_not_missing(archive: Archive) -> None:
    run, name = a_sample(archive)
    head = archive.head
    archive.redact(redaction(name))
    assert not archive.store.has(name)
    report = checked(archive)
    assert report.findings == []
    assert any(note.startswith(f"Object {name} is redacted by entry {head.size}; it was samples/") for note in report.notes)
    assert any("not derived again, since entry" in note for note in report.notes)
    assert archive.run(digest.sha256(records.encode(run))) == run  # what was derived stands
    archive.rebuild()
    assert_whole(archive)
    with pytest.raises(InputError, match="redacted is not taken in again"):
        files = factories.samples(factories.spec(title="another"), 1)
        frozen = factories.spec(title="another")
        archive.append(frozen)
        found = factories.result(frozen, files)
        archive.append(factories.run(frozen, found), {digest.sha256(data): data for data in (records.encode(found), *files.values())})


def test_a_redaction_that_was_killed_is_found_and_finished(archive: Archive) -> None:
    _, name = a_sample(archive)
    archive.append(redaction(name))  # killed before the bytes were removed
    assert [finding.kind for finding in checked(archive).findings] == ["redacted_present"]
    size = archive.head.size
    archive.redact(redaction(name))
    assert (checked(archive).findings, archive.head.size) == ([], size)
    with pytest.raises(InputError, match="redacted before"):
        archive.redact(redaction(name, "another reason"))


def test_what_is_redacted_is_said_to_be_gone_wherever_it_is_asked_for(archive: Archive, database_url: str | None) -> None:
    run, name = a_sample(archive)
    archive.redact(redaction(name))
    with pytest.raises(RedactedError, match=r"(?s)were redacted.*entry \d+, the maintainers: a name stands in it"):
        archive.samples(run)
    with TestClient(create_app(archive.folder, database_url), base_url="http://127.0.0.1") as client:
        for path in (f"/objects/{name}", f"/objects/{name}/preview"):
            assert (client.get(path).status_code, "redacted" in client.get(path).text) == (410, True)
        assert client.get(f"/objects/{run.result}").status_code == 200
        assert client.get(f"/runs/{digest.sha256(records.encode(run))}").status_code == 200


def test_a_missing_object_is_no_redacted_one(archive: Archive) -> None:
    run, name = a_sample(archive)
    archive.redact(redaction(name))
    other = next(item.sha256 for item in run.evidence if item.name.startswith("samples/") and item.sha256 != name)
    archive.store.remove(other)
    assert [finding.kind for finding in checked(archive).findings] == ["object_missing"]


def test_only_evidence_can_be_redacted(archive: Archive) -> None:
    run, _ = a_sample(archive)
    for name in (run.result, run.spec, digest.sha256(records.encode(run)), "0" * 64):
        with pytest.raises(InputError, match="cannot be redacted"):
            archive.redact(redaction(name))
        assert name == "0" * 64 or archive.store.has(name)
    assert checked(archive).findings == []


def test_collection_removes_only_what_nothing_names_after_its_time(archive: Archive) -> None:
    a_sample(archive)
    named = set(archive.store.digests())
    old, young, announced = (archive.store.put(data) for data in (b"old", b"young", b"announced"))
    archive.store.announce({announced})
    for name in (*named, old, announced):
        os.utime(archive.store.object_path(name), (WHEN_OLD, WHEN_OLD))
    assert archive.unnamed(14 * 86_400) == [(old, 3)]
    assert archive.store.has(old)
    assert archive.collect(14 * 86_400) == [(old, 3)]
    assert set(archive.store.digests()) == named | {young, announced}
    assert archive.collect(14 * 86_400) == []


def test_collection_looks_at_the_log_and_not_at_a_database_behind_it(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    a_sample(archive)
    archive.close()
    (archive.folder / "ledger.db").unlink()
    with Archive.open(archive.folder, write=True) as opened:
        assert opened.collect(0) == []
        assert_whole(opened)


def test_both_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LEDGER_ARCHIVE", "LEDGER_DATABASE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(cli.app, list(arguments))
        assert done.exit_code == status, done.output
        return done.stdout

    run("init", "evidence")
    with Archive.open(tmp_path / "evidence", write=True) as archive:
        _, name = a_sample(archive)
        stray = archive.store.put(b"stray")
        os.utime(archive.store.object_path(stray), (WHEN_OLD, WHEN_OLD))
    assert f"{stray}  5 bytes\n1 object of 5 bytes would be removed" in run("gc")
    assert "0 objects" in run("gc", "--grace", "60")
    assert "removed." in run("gc", "--remove")
    assert "are gone: entry 2" in run("redact", name, "--author", "me", "--reason", "a name stands in it")
    run("redact", "1234", "--author", "me", "--reason", "why", status=2)
    assert "ok:" in run("verify")
