"""The archive's folder: durable, idempotent, and trusting no name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ledger import digest
from ledger.errors import ArchiveError
from ledger.log import Head
from ledger.store import FolderStore

DATA = b"some evidence"
NAME = digest.sha256(DATA)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    folder = tmp_path / "store"
    folder.mkdir()
    return FolderStore(folder)


def _files(store: FolderStore) -> list[str]:
    return sorted(str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file())


def test_an_object_stands_under_its_digest(store: FolderStore) -> None:
    assert store.put(DATA) == NAME
    assert _files(store) == [f"objects/{NAME[:2]}/{NAME[2:]}"]
    assert store.read(NAME) == DATA
    assert store.size(NAME) == len(DATA)
    assert store.hash(NAME) == (NAME, len(DATA))
    assert list(store.digests()) == [NAME]


def test_storing_twice_is_storing_once(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    store.put(DATA)
    before = store.object_path(NAME).stat()
    assert store.put(DATA) == NAME
    assert store.put_file(tmp_path / "file") == (NAME, len(DATA))
    after = store.object_path(NAME).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_file_is_stored_in_blocks(store: FolderStore, tmp_path: Path) -> None:
    data = os.urandom(3 * (1 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert store.put_file(tmp_path / "file", expected=digest.sha256(data)) == (digest.sha256(data), len(data))
    assert store.read(digest.sha256(data)) == data


def test_a_file_that_is_not_what_was_said_is_refused_and_leaves_nothing(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with pytest.raises(ArchiveError, match="not what the record says") as caught:
        store.put_file(tmp_path / "file", expected="0" * 64)
    assert (caught.value.expected, caught.value.found) == ("0" * 64, NAME)
    assert _files(store) == []


@pytest.mark.parametrize("change", [b"some Evidence", b"", DATA + b"x", DATA[:-1]], ids=["flipped", "emptied", "longer", "shorter"])
def test_changed_bytes_are_never_returned_nor_repaired_in_silence(store: FolderStore, change: bytes) -> None:
    store.put(DATA)
    store.object_path(NAME).write_bytes(change)
    with pytest.raises(ArchiveError, match="damaged") as caught:
        store.read(NAME)
    assert (caught.value.expected, caught.value.found) == (NAME, digest.sha256(change))
    with pytest.raises(ArchiveError, match="damaged"):
        store.put(DATA)
    assert store.object_path(NAME).read_bytes() == change


def test_what_is_too_large_is_not_read(store: FolderStore) -> None:
    store.put(DATA)
    with pytest.raises(ArchiveError, match="too large"):
        store.read(NAME, limit=len(DATA) - 1)
    assert store.read(NAME, limit=len(DATA)) == DATA


@pytest.mark.parametrize("name", ["", "abc", "../" * 20 + "etc/passwd", NAME.upper(), NAME + "\n", "g" * 64, "0" * 63 + "/", "٣" * 64])
def test_a_name_that_is_no_digest_is_refused(store: FolderStore, name: str) -> None:
    for use in (store.read, store.has, store.open, store.size):
        with pytest.raises(ArchiveError, match="no digest"):
            use(name)


def test_a_missing_object_is_a_clear_error(store: FolderStore) -> None:
    with pytest.raises(ArchiveError, match="No such file"):
        store.read(NAME)


@pytest.mark.parametrize("linked", ["object", "folder", "objects"])
def test_symbolic_links_inside_the_archive_are_refused(store: FolderStore, tmp_path: Path, linked: str) -> None:
    store.put(DATA)
    path = {"object": store.object_path(NAME), "folder": store.object_path(NAME).parent, "objects": store.path / "objects"}[linked]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArchiveError, match="symbolic link"):
        store.read(NAME)
    with pytest.raises(ArchiveError, match="symbolic link"):
        store.put(DATA)
    assert list(store.strays()) == [str(path.relative_to(store.path))]


def test_the_archive_itself_may_be_reached_through_a_link(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.path)
    assert FolderStore(tmp_path / "link").put(DATA) == NAME
    assert store.read(NAME) == DATA


def test_a_pipe_is_no_object_and_holds_nobody_up(store: FolderStore) -> None:
    store.object_path(NAME).parent.mkdir(parents=True)
    os.mkfifo(store.object_path(NAME))
    with pytest.raises(ArchiveError, match="no plain file"):
        store.read(NAME)
    assert store.strays() == [f"objects/{NAME[:2]}/{NAME[2:]}"]


def test_strangers_are_listed(store: FolderStore) -> None:
    store.put(DATA)
    store.write_entry(0, b"{}")
    store.write_head(Head.over([b"0" * 32]))
    assert store.strays() == []
    strangers = ["README", "ledger.db.bak", "log/1.json", "log/head.sig", "objects/ab/short", "objects/loose", "sub/folder/file"]
    for name in strangers:
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
        (store.path / name).write_bytes(b"x")
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "tmp/lock"):
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
        (store.path / name).write_bytes(b"x")
    assert store.strays() == strangers


def test_an_entry_is_never_replaced(store: FolderStore) -> None:
    store.write_entry(0, b"first")
    with pytest.raises(ArchiveError, match="already holds"):
        store.write_entry(0, b"second")
    assert store.read_entry(0) == b"first"
    store.write_entry(2, b"third")
    assert store.sequences() == [0, 2]
    assert (store.has_entry(1), store.has_entry(2)) == (False, True)


def test_an_entry_of_great_size_is_not_read(store: FolderStore) -> None:
    store.write_entry(0, b"x" * (1 << 20))
    with pytest.raises(ArchiveError, match="too large"):
        store.read_entry(0)


def test_the_log_ends_at_nine_digits(store: FolderStore) -> None:
    with pytest.raises(ArchiveError, match="full"):
        store.write_entry(10**9, b"x")


def test_the_head_is_replaced_whole(store: FolderStore) -> None:
    assert not store.has_head()
    for size in range(3):
        head = Head.over([b"0" * 32] * size)
        store.write_head(head)
        assert store.read_head() == head
    assert store.has_head()


def test_pending_objects_are_noted_until_they_arrive(store: FolderStore) -> None:
    store.announce(["a" * 64, "b" * 64])
    store.announce(["c" * 64])
    store.arrived(["a" * 64])
    assert store.pending() == {"b" * 64, "c" * 64}
    store.arrived(["b" * 64, "c" * 64])
    assert store.pending() == set()
    assert _files(store) == []


def _fault(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int, at: int) -> Callable[[], int]:
    """Make call number ``at`` of ``owner.name`` fail with ``code``; gives the count of calls."""
    real, calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return lambda: calls


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [(os, "fsync", 1), (os, "fsync", 2), (os, "fsync", 3), (Path, "replace", 1), (Path, "open", 1), (Path, "mkdir", 1)],
)
def test_a_fault_of_the_disk_is_a_clear_error_and_leaves_no_staging_file(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, code: int
) -> None:
    with monkeypatch.context() as patch:
        calls = _fault(patch, owner, name, code, at)
        with pytest.raises(ArchiveError) as caught:
            store.put(DATA)
        assert calls() == at
    assert os.strerror(code) in str(caught.value)
    assert caught.value.next
    assert not list(store.path.glob("tmp/stage-*"))
    assert store.put(DATA) == NAME  # once the fault is gone, the same command works
    assert store.read(NAME) == DATA


def test_a_full_disk_in_the_midst_of_a_file_leaves_nothing(store: FolderStore, tmp_path: Path) -> None:
    """A real limit: the kernel refuses to let the staging file grow."""
    (tmp_path / "large").write_bytes(b"x" * (1 << 20))
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from ledger.store import FolderStore; from ledger.errors import ArchiveError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: FolderStore(Path(sys.argv[1])).put_file(Path(sys.argv[2]))\n"
        "except ArchiveError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(store.path), str(tmp_path / "large")], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert _files(store) == []


def test_leftovers_of_a_killed_writer_go_with_the_next_lock(store: FolderStore) -> None:
    (store.path / "tmp").mkdir()
    (store.path / "tmp" / "stage-1-abc").write_bytes(b"half")
    with store.lock(), store.lock():  # it may be nested
        assert _files(store) == ["tmp/lock"]


def test_a_second_process_waits_for_the_lock(store: FolderStore) -> None:
    script = (
        "import fcntl, sys\n"
        "with open(sys.argv[1]) as stream:\n"
        "    try: fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError: print('held')\n"
        "    else: print('free')\n"
    )

    def ask() -> str:
        command = [sys.executable, "-c", script, str(store.path / "tmp" / "lock")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with store.lock():
        assert ask() == "held"
    assert ask() == "free"
