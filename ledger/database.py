"""The database behind the archive: SQLite by default, PostgreSQL by URL.

Readers get one snapshot for all that they ask; writers are serialised (SQLite ``BEGIN IMMEDIATE``, PostgreSQL an
advisory lock). Every error of the driver becomes an ArchiveError without the URL's password; an UnreachableError where
nothing was learnt about what the database holds.

Nothing is ever written into tables that are not ours: a database that has some of our names but not our version table
is refused, and left as it is.
"""

from __future__ import annotations

import re
import sqlite3
import stat
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
_FULL = "the disk may be full: free space on its file system, then repeat the command; nothing recorded is lost."
_LOOKED_AT = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH)
"""SQLite's primary codes that tell of the file's content; all others tell of the disk, the rights or another process."""
_CONTENT = ("22", "23", "3F", "42", "XX")
"""The same for PostgreSQL: classes of SQLSTATE."""


class UnreachableError(ArchiveError):
    """The database could not be looked at, so that nothing is known of what it holds."""


class Database:
    """One database. ``own`` is the file where it is the archive's own SQLite file, which may be thrown away and made anew."""

    def __init__(self, url: str | URL, own: Path | None = None) -> None:
        self.own = own
        self.url = _parsed(url)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._engine: Engine | None = None

    def __str__(self) -> str:
        return _without_options(self.url.render_as_string(hide_password=True))

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
                raise UnreachableError(
                    "PostgreSQL needs a driver that is not installed.",
                    expected="psycopg 3",
                    next="pip install 'kv-evidence-ledger[postgresql]'",
                ) from error
            except (sa.exc.ArgumentError, TypeError, ValueError) as error:
                raise self._misread(error) from error
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
        with self._mapped(), self._connected() as connection:
            yield connection.execution_options(**options)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """The one writer's connection, in a transaction. Commits at the end unless that was done. Raises ArchiveError."""
        with self._mapped(), self._connected() as plain:
            connection = plain.execution_options(kv_ledger_writer=True)
            with connection.begin() as transaction:
                yield connection
                if transaction.is_active:
                    transaction.commit()

    def _connected(self) -> Connection:
        try:
            return self._connect().connect()
        except (sa.exc.ArgumentError, TypeError, ValueError) as error:  # an option of the URL that the driver cannot read
            raise self._misread(error) from error

    def _misread(self, error: Exception) -> ArchiveError:
        return UnreachableError(
            f"The database URL {self} cannot be used.", found=f"an option that is wrong ({type(error).__name__})", next="correct the URL."
        )

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
        if self.sqlite:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the low byte is the primary code
            kind, advice = ArchiveError if code in _LOOKED_AT else UnreachableError, self._sqlite_advice(code, text)
        else:
            state = str(getattr(error, "sqlstate", None) or "")
            known = state[:2] in _CONTENT and state != "42501"  # insufficient_privilege
            kind, advice = ArchiveError if known else UnreachableError, self._postgresql_advice(state, text)
        return kind(f"The database {self} cannot be used.", found=text, next=advice)

    def _sqlite_advice(self, code: int, text: str) -> str:
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return _FULL
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return "another writer holds it: repeat when that one is done."
        if code not in _LOOKED_AT:
            return "check that its folder exists and that this user may read and write there."
        if "already exists" in text:
            return "choose another database."
        if self.own is None and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return "choose another database; or, if this file is the archive's, move it away and run `ledger rebuild`."
        return "run `ledger rebuild`, which makes it anew from the objects."

    def _postgresql_advice(self, state: str, text: str) -> str:
        if state.startswith("53") or "no space" in text.lower():
            return _FULL
        if state == "42501":
            return f"give this role the right to the schema {SCHEMA} and its tables, or name another role in the URL."
        if state.startswith(("40", "55")):
            return "another writer holds it: repeat when that one is done."
        if "already exists" in text:
            return "choose another database."
        if state[:2] in _CONTENT:
            return "run `ledger rebuild`, which makes it anew from the objects."
        return "check that the server runs, and that the URL names a role and a database that exist there."

    # ------------------------------------------------------------ schema

    def exists(self) -> bool:
        """False where the SQLite file is missing or empty: nothing was built yet. Raises UnreachableError where none could be."""
        if not self.sqlite:
            return True
        path = Path(str(self.url.database))
        try:
            link = path.is_symlink()
            if not link and not path.exists():
                if path.parent.is_dir():
                    return False
                raise self._blocked("its folder does not exist", "make the folder, or correct the URL.")
            if link and not path.exists():
                raise self._blocked("a link that leads nowhere", "remove the link, or restore what it leads to.")
            found = path.stat()
        except OSError as error:
            raise self._blocked(str(error.strerror), "give this user the right to it, or correct the URL.") from error
        if not stat.S_ISREG(found.st_mode):
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "no plain file"
            raise self._blocked(what, "move it away, or choose another database.")
        return found.st_size > 0

    def _blocked(self, found: str, advice: str) -> ArchiveError:
        return UnreachableError(f"The database {self} cannot be used.", expected="a file, or none yet", found=found, next=advice)

    def names(self, connection: Connection) -> set[str]:
        """Names of the tables and views that stand where ours do, and of SQLite's triggers and indexes. Raises UnreachableError."""
        if self.sqlite:
            return set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'").scalars())
        # the catalogue shows every role everything; the information schema would hide what a role has no right to
        usage = connection.exec_driver_sql(
            f"SELECT has_schema_privilege(oid, 'USAGE') FROM pg_catalog.pg_namespace WHERE nspname = '{SCHEMA}'"
        ).scalar()
        if usage is False:
            raise UnreachableError(
                f"The database {self} cannot be used.",
                found=f"its role may not see the schema {SCHEMA}",
                next=self._postgresql_advice("42501", ""),
            )
        listing = (
            "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            f"WHERE n.nspname = '{SCHEMA}' AND c.relkind IN ('r', 'v', 'm', 'p', 'f')"
        )
        return set(connection.exec_driver_sql(listing).scalars())

    def extra_columns(self, connection: Connection, tables: set[str]) -> list[str]:
        """Columns of our ``tables``, as ``table.column``, that the schema does not declare."""
        inspector, schema = sa.inspect(connection), None if self.sqlite else SCHEMA
        return [
            f"{name}.{column['name']}"
            for name in sorted(tables & TABLES.keys())
            for column in inspector.get_columns(name, schema)
            if column["name"] not in TABLES[name].columns
        ]

    def revision(self) -> str | None:
        """Revision of the schema, or None where there is none yet. Raises ArchiveError."""
        if not self.exists():
            return None
        with self.reading() as connection:
            names = self.names(connection)
            if VERSION_TABLE not in names:
                self._refuse_foreign(names)
                return None
            found = list(connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars())
        if len(found) != 1 or not isinstance(found[0], str):
            raise ArchiveError(
                f"The database {self} does not say which schema it has.", found=f"{len(found)} revisions", next="run `ledger rebuild`."
            )
        return found[0]

    def _refuse_foreign(self, names: set[str]) -> None:
        """Refuse ``names``, of a database without our version table, where some of them are ours."""
        ours = {*TABLES, *(str(index.name) for table in TABLES.values() for index in table.indexes)}
        taken = sorted(name for name in names if name.lower() in ours)  # SQLite does not tell cases apart
        if not taken:
            return
        if self.own:
            raise SchemaError(f"The database {self} does not say which schema it has.", next="run `ledger rebuild`.")
        raise self._foreign(f"{', '.join(taken[:5])}, and no table {VERSION_TABLE}")

    def _foreign(self, found: str) -> ArchiveError:
        return ArchiveError(
            f"The database {self} holds tables that are not this archive's.", found=found, next="choose another database with --database."
        )

    def refuse_others(self, connection: Connection, leaves: set[str]) -> None:
        """Refuse to drop tables that are not those of the log whose entries have these leaf hashes. Raises ArchiveError.

        One entry in common is enough: a damaged index, or one of an older state of the log, may be made anew.
        The archive's own file is never refused.
        """
        if self.own:
            return
        names = self.names(connection)
        if VERSION_TABLE not in names:
            self._refuse_foreign(names)
            return
        entries = TABLES["entries"]
        schema = None if self.sqlite else SCHEMA
        if "entries" not in names or "leaf_hash" not in {c["name"] for c in sa.inspect(connection).get_columns("entries", schema)}:
            raise self._foreign("an index that does not say whose it is")
        found = set(connection.execute(sa.select(entries.c.leaf_hash)).scalars())
        if found and not found & leaves:
            raise self._foreign("the index of another archive")

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


def _parsed(url: str | URL) -> URL:
    """``url`` read and checked. Raises ArchiveError, which never shows a password."""
    expected = "sqlite:////path/to/file.db or postgresql://user@host/name"
    text = url if isinstance(url, str) else url.render_as_string(hide_password=True)
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ArchiveError("This is no database URL.", expected=expected, found=_discreet(text), next="correct the URL.") from error
    if "\0" in text:
        raise ArchiveError("This is no database URL.", expected=expected, found="a NUL character", next="correct the URL.")
    backend, _, driver = parsed.drivername.partition("+")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ArchiveError("This database is not supported.", expected=expected, found=backend, next="choose SQLite or PostgreSQL.")
    if driver not in ("", "pysqlite"):
        raise ArchiveError(
            "This driver of SQLite is not supported.", expected=expected, found=parsed.drivername, next="write sqlite:// alone."
        )
    if parsed.host or parsed.username or parsed.password or parsed.port or parsed.query:
        raise ArchiveError(
            "This is no URL of an SQLite file.",
            expected="sqlite:////path/to/file.db, or sqlite:///file.db in this folder, without options",
            found=_discreet(text),
            next="correct the URL.",
        )
    if not parsed.database or parsed.database == ":memory:":
        raise ArchiveError("A database in memory cannot be shared.", expected="sqlite:////path/to/file.db", next="name a file.")
    return parsed.set(drivername="sqlite")


def _discreet(text: str) -> str:
    """``text`` of a URL that could not be read, without what may be a password, wherever it stands."""
    return _without_options(re.sub(r"(?s)\A([\w+.-]+://)?.*@", r"\1…@", text))[:200]


def _without_options(text: str) -> str:
    return re.sub(r"(?i)(\w*pass\w*)=[^&]*", r"\1=…", text)


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
    # the journal's mode stays with the file: one that is another tool's keeps its own
    names = {name for (name,) in cursor.execute("SELECT name FROM sqlite_master").fetchall()}
    if not names or VERSION_TABLE in names:
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
