"""The database behind the archive: SQLite by default, PostgreSQL by URL.

Readers get one snapshot for all that they ask; writers are serialised (SQLite ``BEGIN IMMEDIATE``, PostgreSQL an
advisory lock). Every error of the driver becomes an ArchiveError without the URL's password.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.pool import NullPool

import ledger
from ledger import digest
from ledger.errors import ArchiveError, InputError, SchemaError
from ledger.rows import Rows
from ledger.tables import REVISION, SCHEMA, TABLES, VERSION_TABLE, Number

_ADVISORY = 0x6B765F6C65646765  # "kv_ledge": one lock for all writers of one PostgreSQL database
_BUSY_MS = 60_000


class Database:
    """One database. ``own`` is the file where it is the archive's own SQLite file, which may be thrown away and made anew."""

    def __init__(self, url: str | URL, own: Path | None = None) -> None:
        self.own = own
        try:
            self.url = sa.make_url(url)
        except sa.exc.ArgumentError as error:
            raise ArchiveError(
                "This is no database URL.",
                expected="sqlite:////path/to/file.db or postgresql://user@host/name",
                found=re.sub(r"//[^@/]*@", "//…@", str(url))[:200],
            ) from error
        backend = self.url.get_backend_name()
        if backend == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        elif backend != "sqlite":
            raise ArchiveError("This database is not supported.", expected="SQLite or PostgreSQL", found=backend)
        elif not self.url.database or self.url.database == ":memory:":
            raise ArchiveError("A database in memory cannot be shared.", expected="sqlite:////path/to/file.db")
        self.sqlite = backend == "sqlite"
        self._engine: Engine | None = None

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @classmethod
    def file(cls, path: Path) -> Database:
        """The archive's own SQLite file at ``path``."""
        return cls(URL.create("sqlite", database=str(path)), own=path)

    # ------------------------------------------------------------ connections

    def _connect(self) -> Engine:
        if self._engine is None:
            try:
                # a connection for each transaction, so that no process keeps a file open that another has replaced
                self._engine = sa.create_engine(self.url, poolclass=NullPool) if self.sqlite else sa.create_engine(self.url)
            except ModuleNotFoundError as error:
                raise ArchiveError(
                    "PostgreSQL needs a driver that is not installed.",
                    expected="psycopg 3",
                    next="pip install 'kv-evidence-ledger[postgresql]'",
                ) from error
            event.listen(self._engine, "connect", _sqlite_connected if self.sqlite else _postgresql_connected, insert=True)
            event.listen(self._engine, "begin", _sqlite_begins if self.sqlite else _postgresql_begins)
        return self._engine

    def close(self) -> None:
        """Close all connections."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection whose queries all see one state. Raises ArchiveError."""
        options: dict[str, Any] = {} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        with self._mapped(), self._connect().connect() as connection:
            yield connection.execution_options(**options)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """The one writer's connection, in a transaction. Commits at the end unless that was done. Raises ArchiveError."""
        with self._mapped(), self._connect().connect() as plain:
            connection = plain.execution_options(kv_ledger_writer=True)
            with connection.begin() as transaction:
                yield connection
                if transaction.is_active:
                    transaction.commit()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise self._failed(error.orig) from error.orig
        except sqlite3.Error as error:  # from a connection's first statements, which the toolkit does not wrap
            raise self._failed(error) from error

    def _failed(self, error: BaseException | None) -> ArchiveError:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return ArchiveError(f"The database {self} cannot be used.", found=text, next=self._advice(text))

    def _advice(self, text: str) -> str:
        low = text.lower()
        if "full" in low or "no space" in low:
            return "free space on its file system, then repeat the command."
        if "locked" in low:
            return "another writer holds it: repeat when that one is done."
        if "malformed" in low or "not a database" in low or "no such" in low or "does not exist" in low:
            return "run `ledger rebuild`, which makes it anew from the objects."
        if "unable to open" in low or "readonly" in low or "read-only" in low or "permission" in low:
            return "check that its folder exists and that this user may write there."
        return "check that the server runs and that the URL is right." if not self.sqlite else "run `ledger rebuild`."

    # ------------------------------------------------------------ schema

    def exists(self) -> bool:
        """False where the SQLite file is missing or empty: nothing was built yet."""
        if not self.sqlite:
            return True
        path = Path(str(self.url.database))
        return path.is_file() and path.stat().st_size > 0

    def revision(self) -> str | None:
        """Revision of the schema, or None where there is none yet. Raises ArchiveError."""
        if not self.exists():
            return None
        with self.reading() as connection:
            if not sa.inspect(connection).has_table(VERSION_TABLE):
                return None
            found = list(connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars())
        if len(found) != 1 or not isinstance(found[0], str):
            raise ArchiveError(
                f"The database {self} does not say which schema it has.", found=f"{len(found)} revisions", next="run `ledger rebuild`."
            )
        return found[0]

    def check_revision(self, found: str, older: bool = False) -> None:
        """Refuse another schema than this version's; ``older`` allows those that can be migrated. Raises SchemaError."""
        if found == REVISION:
            return
        known = {path.name[:4] for path in (ledger.home("migrations") / "versions").glob("[0-9][0-9][0-9][0-9]_*.py")}
        if found not in known:
            raise SchemaError(
                f"The database {self} has a schema that this version does not know.",
                expected=f"revision {REVISION} or older",
                found=f"revision {found[:40]}",
                next=f"upgrade: pip install --upgrade kv-evidence-ledger (this is {ledger.__version__}); "
                "or run `ledger rebuild` to make the database anew for this version.",
            )
        if not older:
            raise SchemaError(
                f"The database {self} has an older schema.",
                expected=f"revision {REVISION}",
                found=f"revision {found}",
                next="run `ledger migrate`, which keeps every row.",
            )

    def upgrade(self, connection: Connection) -> None:
        """Bring the schema to this version's revision, within the caller's transaction."""
        from alembic import command

        if not self.sqlite:
            connection.execute(sa.schema.CreateSchema(SCHEMA, if_not_exists=True))
        command.upgrade(alembic_config(connection), "head")

    def drop(self, connection: Connection) -> None:
        """Remove every table of ours, within the caller's transaction."""
        if not self.sqlite:
            connection.execute(sa.schema.DropSchema(SCHEMA, cascade=True, if_exists=True))
            return
        names = [*reversed(TABLES), VERSION_TABLE]
        if self.own:
            found = connection.execute(
                sa.text("SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'")
            )
            others = [(kind, name) for kind, name in found if name not in names]
        else:
            others = []
        quote = connection.dialect.identifier_preparer.quote
        for kind, name in [*others, *(("table", name) for name in names)]:
            connection.exec_driver_sql(f"DROP {kind.upper()} IF EXISTS {quote(name)}")

    def unusable(self, error: ArchiveError) -> bool:
        """Whether ``error`` says that the archive's own SQLite file cannot be read as a database, or not as ours."""
        code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        return self.own is not None and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

    def remove_file(self) -> None:
        """Remove the archive's own SQLite file, which is unusable. The file goes first: a write-ahead log without it is inert."""
        if self.own is None:
            raise ArchiveError(f"The database {self} is damaged.", next="remove it by hand, then run `ledger rebuild`.")
        self.close()
        for suffix in ("", "-wal", "-shm", "-journal"):
            self.own.with_name(self.own.name + suffix).unlink(missing_ok=True)

    # ------------------------------------------------------------ rows

    def insert(self, connection: Connection, rows: Rows) -> None:
        """Insert checked rows."""
        for name, table in TABLES.items():
            if rows.get(name):
                connection.execute(sa.insert(table), rows[name])

    def stored_rows(self) -> Rows:
        """All rows as the database stores them, unread: figures are text. For comparing with :func:`stored_form`."""
        rows: Rows = {}
        with self.reading() as connection:
            quote = connection.dialect.identifier_preparer.quote
            for name, table in TABLES.items():
                columns = ", ".join(quote(column.name) for column in table.columns)
                found = connection.exec_driver_sql(f"SELECT {columns} FROM {quote(name)}")
                rows[name] = [dict(zip(table.columns.keys(), row, strict=True)) for row in found]
        return rows


def stored_form(rows: Rows) -> Rows:
    """``rows`` of every table as a database stores them, columns in the table's order: figures as text, all else as it is.

    A boolean stays one; it equals the 1 or 0 of SQLite.
    """
    return {
        name: [{c.name: _stored(c, row[c.name]) for c in table.columns} for row in rows.get(name, ())] for name, table in TABLES.items()
    }


def _stored(column: sa.Column[Any], value: Any) -> Any:
    return digest.canonical(value).decode() if value is not None and isinstance(column.type, Number) else value


def check_rows(rows: Rows, what: str) -> None:
    """Refuse what some database could not hold: a NUL character, or a count beyond 64 bits. Raises InputError."""
    for name, found in rows.items():
        counts = {column.name for column in TABLES[name].columns if isinstance(column.type, sa.BigInteger)}
        for row in found:
            for column, value in row.items():
                if isinstance(value, str) and "\0" in value:
                    raise nul(what, f"{name}.{column}")
                if column in counts and isinstance(value, int) and not -(2**63) <= value < 2**63:
                    raise InputError(
                        f"{what} holds a count that is too large: {name}.{column}", expected="below 2**63", found=str(value)[:80]
                    )


def nul(what: str, where: str) -> InputError:
    """The error for a NUL character."""
    return InputError(
        f"{what} holds a NUL character in {where}.",
        expected="text without NUL, which databases cannot hold",
        next="remove the character where that text is made.",
    )


def alembic_config(connection: Connection | None = None) -> Any:
    """Alembic's configuration for the migrations that came with this package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(ledger.home("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _sqlite_connected(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself; _sqlite_begins does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # a commit that was reported survives a loss of power
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begins(connection: Connection) -> None:
    # a deferred transaction that reads first and writes later fails when another writer came between
    writer = connection.get_execution_options().get("kv_ledger_writer")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")


def _postgresql_connected(connection: Any, record: Any) -> None:
    before, connection.autocommit = connection.autocommit, True
    cursor = connection.cursor()
    cursor.execute(f"SET SESSION search_path TO {SCHEMA}")
    cursor.close()
    connection.autocommit = before


def _postgresql_begins(connection: Connection) -> None:
    if connection.get_execution_options().get("kv_ledger_writer"):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY})")
