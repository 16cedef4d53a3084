"""The schema: its migrations, and databases that are older or newer than this version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

import ledger
from ledger import database, tables
from ledger.archive import Archive
from ledger.errors import ArchiveError, SchemaError
from tests.conftest import append_outside, append_run
from tests.ledger.test_archive import ROOT, assert_whole

NEXT = '''"""Another schema, for a test."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("specs", sa.Column("note", sa.Text(), nullable=True))
    op.execute("UPDATE specs SET note = study")
'''


def test_the_migrations_make_the_tables_that_the_code_declares(archive: Archive) -> None:
    with archive.database.writing() as connection:
        command.check(database.alembic_config(connection))


def test_the_newest_migration_is_the_one_that_the_code_names() -> None:
    scripts = ScriptDirectory.from_config(database.alembic_config())
    assert scripts.get_heads() == [tables.REVISION]
    assert sorted(script.revision for script in scripts.walk_revisions()) == [
        f"{number:04}" for number in range(1, int(tables.REVISION) + 1)
    ]


def test_the_revision_stands_in_a_table_and_a_schema_of_our_own(archive: Archive) -> None:
    with archive.reading() as connection:
        names = set(sa.inspect(connection).get_table_names(schema=None if archive.database.sqlite else "kv_ledger"))
    assert names == {*tables.TABLES, "kv_ledger_version"}


def _stamp(archive: Archive, revision: str) -> None:
    with archive.database.writing() as connection:
        connection.execute(sa.text("UPDATE kv_ledger_version SET version_num = :revision"), {"revision": revision})


@pytest.mark.parametrize("revision", ["0006", "9999", "abc", "", "0005 "])
def test_a_schema_that_is_unknown_asks_for_an_upgrade(archive: Archive, database_url: str | None, revision: str) -> None:
    append_run(archive)
    _stamp(archive, revision)
    for write in (False, True):
        with pytest.raises(SchemaError, match=r"(?s)does not know.*found: revision .*pip install --upgrade"):
            Archive.open(archive.folder, database_url, write=write)
    with pytest.raises(SchemaError, match="does not know"), Archive.at(archive.folder, database_url) as newer:
        newer.migrate()
    with Archive.at(archive.folder, database_url) as newer:
        newer.rebuild()
        assert_whole(newer)


@pytest.mark.parametrize("statement", ["DELETE FROM kv_ledger_version", "INSERT INTO kv_ledger_version VALUES ('0006')"])
def test_a_database_of_no_or_two_revisions_is_refused(archive: Archive, database_url: str | None, statement: str) -> None:
    with archive.database.writing() as connection:
        connection.execute(sa.text(statement))
    with pytest.raises(ArchiveError, match=r"(?s)does not say which schema.*ledger rebuild"):
        Archive.open(archive.folder, database_url)


def test_an_older_schema_names_the_command_which_keeps_every_row(
    archive: Archive, database_url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_run(archive)
    before = archive.stored_rows()
    newer = tmp_path / "migrations"
    shutil.copytree(ledger.home("migrations"), newer, ignore=shutil.ignore_patterns("__pycache__"))
    (newer / "versions" / "0006_another.py").write_text(NEXT)
    monkeypatch.setattr(ledger, "home", lambda name: newer)
    monkeypatch.setattr(database, "REVISION", "0006")
    for write in (False, True):
        with pytest.raises(SchemaError, match=r"(?s)older schema.*found: revision 0005.*ledger migrate"):
            Archive.open(archive.folder, database_url, write=write)
    for _ in range(2):
        with Archive.at(archive.folder, database_url) as older:
            older.migrate()
    with Archive.open(archive.folder, database_url, write=True) as migrated:
        assert migrated.stored_rows() == before
        with migrated.reading() as connection:
            assert connection.execute(sa.text("SELECT note FROM specs")).scalars().all() == ["toy"]


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004"])
def test_every_older_schema_is_migrated_with_every_row(archive: Archive, database_url: str | None, revision: str) -> None:
    append_run(archive)
    before = archive.stored_rows()
    with archive.database.writing() as connection:
        archive.database.drop(connection)
        if not archive.database.sqlite:
            connection.execute(sa.schema.CreateSchema("kv_ledger"))
        command.upgrade(database.alembic_config(connection), revision)
        there = set(sa.inspect(connection).get_table_names(schema=None if archive.database.sqlite else "kv_ledger"))
        for name in tables.TABLES:
            assert name in there or not before[name], f"{name} holds rows that revision {revision} has no table for"
            for row in before[name]:
                quoted = ", ".join(f'"{column}"' for column in row)
                statement = f'INSERT INTO "{name}" ({quoted}) VALUES ({", ".join(f":{column}" for column in row)})'
                connection.execute(sa.text(statement), row)
    with pytest.raises(SchemaError, match=rf"(?s)older schema.*found: revision {revision}.*ledger migrate"):
        Archive.open(archive.folder, database_url, write=True)
    with Archive.at(archive.folder, database_url) as older:
        older.migrate()
    with Archive.open(archive.folder, database_url, write=True) as migrated:
        assert migrated.stored_rows() == before
        append_outside(migrated)
        assert_whole(migrated)


def test_migrating_a_current_or_missing_database_is_safe(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    append_run(archive)
    archive.migrate()
    assert_whole(archive)
    for path in archive.folder.glob("ledger.db*"):
        path.unlink()
    archive.migrate()
    assert_whole(archive)


def test_two_processes_migrate_one_after_the_other(make_archive: Callable[..., Archive], postgresql_url: str) -> None:
    archive = make_archive(url=postgresql_url)
    append_run(archive)
    with archive.database.writing() as connection:
        archive.database.drop(connection)
    script = (
        "import sys; from pathlib import Path; from ledger.archive import Archive; Archive.at(Path(sys.argv[1]), sys.argv[2]).migrate()"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(archive.folder), postgresql_url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in "ab"
    ]
    for process in both:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    assert_whole(archive)


def test_migrations_run_through_the_project_alone() -> None:
    with pytest.raises(SystemExit, match="ledger migrate"):
        command.upgrade(database.alembic_config(), "head")
