"""The archive's folder: objects by digest, the files of the log, and its head.

    objects/ab/cdef…     bytes, named by their SHA-256: two hex digits, then the other 62
    log/000000000.json   canonical bytes of one entry, numbered from 0
    log/head             the head of the log
    checkpoint, tile/    the signed head and the log as static tiles, where a key signs it (:mod:`ledger.tiles`)
    tmp/                 staging on the same file system, the lock, and the list of pending objects; nothing that counts

Nothing here trusts a name: what is read is hashed. Nothing is written in place: a file is
staged in ``tmp/``, synced, renamed to its final name, and the folder that holds the name is synced.
Writers hold :meth:`FolderStore.lock`, so that staging files found under it are leftovers of a killed one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ledger import tiles
from ledger.errors import ArchiveError
from ledger.log import Head

_BLOCK = 1 << 20
_DIGEST = re.compile(r"\A[0-9a-f]{64}\Z")
_OBJECT = re.compile(r"\Aobjects/([0-9a-f]{2})/([0-9a-f]{62})\Z")
_LOG = re.compile(r"\Alog/([0-9]{9})\.json\Z")
_LARGEST_ENTRY = 1 << 16
_LARGEST_TILE = 1 << 25
"""256 entries, each of at most 64 KiB behind its length, and some."""
_DATABASE = re.compile(r"\Aledger\.db(-wal|-shm|-journal)?\Z")

LARGEST_SEQUENCE = 10**9 - 1


def _failed(what: str, path: Path, error: OSError) -> ArchiveError:
    """``error`` as an ArchiveError that says what to do about it."""
    advice = {
        errno.ENOSPC: "free space on that file system, then repeat the command; what was recorded before is intact.",
        errno.EDQUOT: "raise the disk quota or free space, then repeat the command; what was recorded before is intact.",
        errno.EIO: "the disk reports a fault: copy the archive to another disk and run `ledger verify` there.",
        errno.EROFS: "the file system is read-only: mount it for writing, or work on a copy of the archive.",
        errno.EACCES: "give this user the right to it, or work on a copy of the archive.",
        errno.EPERM: "give this user the right to it, or work on a copy of the archive.",
        errno.ENOENT: "run `ledger verify`, which lists everything that is missing.",
    }
    return ArchiveError(f"{what}: {path}", found=os.strerror(error.errno or 0), next=advice.get(error.errno or 0, "run `ledger verify`."))


class FolderStore:
    """Objects, log files and head in the folder ``path``. Every method raises ArchiveError."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._depth = 0
        self._mutex = threading.RLock()

    # ------------------------------------------------------------ locking

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the archive for writing; other processes wait. May be nested. Staging files left by a killed writer go."""
        with self._mutex:
            if self._depth:
                yield
                return
            path = self.path / "tmp" / "lock"
            try:
                self._refuse_strangers()
                path.parent.mkdir(exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise _failed("The archive cannot be locked for writing", self.path, error) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel releases it when the process dies, however it dies
                self._depth = 1
                for left in path.parent.iterdir():
                    if left.name.startswith("stage-"):
                        with suppress(OSError):
                            left.unlink()
                yield
            finally:
                self._depth = 0
                os.close(handle)

    def writable(self) -> bool:
        """Whether this process may write into the archive's folder. Raises ArchiveError where something else than rights is wrong."""
        probe = self.path / "tmp"
        try:
            self._refuse_strangers()
            probe.mkdir(exist_ok=True)
            os.close(os.open(probe / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return False
            raise _failed("The archive cannot be locked", self.path, error) from error
        return os.access(self.path, os.W_OK)

    def _refuse_strangers(self) -> None:
        """Refuse anything but a folder as ``tmp`` and a plain file as the lock. Raises OSError too."""
        lock = self.path / "tmp" / "lock"
        self._refuse_links(lock)
        for path, right, expected in ((lock.parent, stat.S_ISDIR, "a folder"), (lock, stat.S_ISREG, "a plain file")):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                return
            if not right(mode):
                raise ArchiveError(
                    f"Something stands where the archive has {expected} of its own: {path}",
                    expected=expected,
                    found="a folder" if stat.S_ISDIR(mode) else "a plain file" if stat.S_ISREG(mode) else "a special file",
                    next="move it away, then repeat the command.",
                )

    # ------------------------------------------------------------ durable writing

    def _write(self, target: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Make ``target`` hold what ``fill`` writes, durably and at once: it is never seen half written.

        Killed before the rename: a staging file is left, which nobody reads and the next writer removes.
        Killed after it: the name may be lost with the folder's cache until the folder is synced, which is why
        the sync comes before anything is written that refers to the name.
        """
        staged = self.path / "tmp" / f"stage-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            staged.parent.mkdir(exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._refuse_links(target)
            try:
                with staged.open("xb") as stream:
                    fill(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                staged.replace(target)
            except BaseException:
                with suppress(OSError):
                    staged.unlink()
                raise
            sync_folder(target.parent)
            sync_folder(target.parent.parent)  # the folder may be new: its own name must be durable too
        except OSError as error:
            raise _failed("The archive cannot be written", target, error) from error

    def _refuse_links(self, target: Path) -> None:
        """Refuse a path inside the archive that goes through a symbolic link, which could lead anywhere."""
        path = self.path
        for part in target.relative_to(self.path).parts:
            path = path / part
            if path.is_symlink():
                raise ArchiveError(
                    f"A symbolic link stands inside the archive: {path}",
                    expected="plain files and folders",
                    next="remove the link, restore the file itself, then run `ledger verify`.",
                )

    def _open(self, path: Path) -> BinaryIO:
        self._refuse_links(path)
        try:
            # non-blocking: a named pipe would otherwise hold the reader for ever
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _failed("A file of the archive cannot be read", path, error) from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ArchiveError(f"This is no plain file: {path}", next="remove it, restore the file itself, then run `ledger verify`.")
        return os.fdopen(handle, "rb")

    # ------------------------------------------------------------ objects

    def object_path(self, digest: str) -> Path:
        """Where the object of that digest is, or would be."""
        if not _DIGEST.match(digest):
            raise ArchiveError("This is no digest.", expected="64 lower-case hex digits", found=repr(digest[:80]))
        return self.path / "objects" / digest[:2] / digest[2:]

    def has(self, digest: str) -> bool:
        """Whether an object of that name exists. Says nothing of its bytes."""
        return _is_file(self.object_path(digest))

    def size(self, digest: str) -> int:
        """Size in bytes of an object's file, as the file system says."""
        with self.open(digest) as stream:
            return os.fstat(stream.fileno()).st_size

    def open(self, digest: str) -> BinaryIO:
        """An object's file for streaming. The caller must hash what it reads, or use :meth:`read`."""
        return self._open(self.object_path(digest))

    def read(self, digest: str, limit: int | None = None) -> bytes:
        """An object's bytes, checked against their digest. ``limit`` refuses larger ones, in bytes."""
        with self.open(digest) as stream:
            size = os.fstat(stream.fileno()).st_size
            if limit is not None and size > limit:
                raise ArchiveError(f"Object {digest} is too large to be read at once.", expected=f"at most {limit} bytes", found=f"{size}")
            try:
                data = stream.read()
            except OSError as error:
                raise _failed("An object cannot be read", self.object_path(digest), error) from error
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise _damaged(digest, found)
        return data

    def hash(self, digest: str) -> tuple[str, int]:
        """SHA-256 (hex) and size in bytes of what an object's file really holds, read in blocks."""
        with self.open(digest) as stream:
            try:
                return _hash(stream)
            except OSError as error:
                raise _failed("An object cannot be read", self.object_path(digest), error) from error

    def put(self, data: bytes) -> str:
        """Store ``data`` durably; the digest. Twice is once."""
        digest = hashlib.sha256(data).hexdigest()
        if not self._holds(digest):
            self._write(self.object_path(digest), lambda stream: stream.write(data))
        return digest

    def put_file(self, path: Path, expected: str | None = None) -> tuple[str, int]:
        """Store a file durably, streaming; its digest and size in bytes. Twice is once.

        ``expected`` refuses any other digest. The file is hashed a second time while it is copied, so that one
        which changes meanwhile is refused and leaves nothing.
        """
        try:
            with path.open("rb") as stream:
                digest, size = _hash(stream)
                if expected is not None and digest != expected:
                    raise ArchiveError(f"A file is not what the record says: {path}", expected=expected, found=digest)
                if self._holds(digest):
                    return digest, size
                stream.seek(0)

                def copy(target: BinaryIO) -> None:
                    state = hashlib.sha256()
                    while block := stream.read(_BLOCK):
                        state.update(block)
                        target.write(block)
                    if state.hexdigest() != digest:
                        raise ArchiveError(f"A file changed while it was being stored: {path}", next="repeat when nothing writes to it.")

                self._write(self.object_path(digest), copy)
                return digest, size
        except OSError as error:
            raise _failed("A file cannot be read", path, error) from error

    def _holds(self, digest: str) -> bool:
        if not self.has(digest):
            return False
        found, _ = self.hash(digest)
        if found != digest:  # never repaired in silence: the archive was changed, and its owner must know
            raise _damaged(digest, found)
        path = self.object_path(digest)
        try:  # its first writer may have been killed between the rename and the sync
            sync_folder(path.parent)
            sync_folder(path.parent.parent)
        except OSError as error:
            raise _failed("The archive cannot be written", path, error) from error
        return True

    def remove(self, digest: str) -> None:
        """Remove an object durably; twice is once."""
        path = self.object_path(digest)
        self._refuse_links(path)
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                sync_folder(path.parent)
        except OSError as error:
            raise _failed("An object cannot be removed", path, error) from error

    def age(self, digest: str) -> float:
        """Seconds since an object was written, as the file system says."""
        path = self.object_path(digest)
        try:
            return time.time() - path.lstat().st_mtime
        except OSError as error:
            raise _failed("An object cannot be looked at", path, error) from error

    def digests(self) -> Iterator[str]:
        """Names of all objects, sorted."""
        for match in filter(None, map(_OBJECT.match, self._files())):
            yield match[1] + match[2]

    # ------------------------------------------------------------ objects on their way into an entry

    def announce(self, digests: Iterable[str]) -> None:
        """Note, before they are written, the objects of an append: one that is killed leaves objects that nothing names."""
        self._write_pending(self.pending() | set(digests))

    def arrived(self, digests: Iterable[str]) -> None:
        """Strike out announced objects: an entry names them now."""
        self._write_pending(self.pending() - set(digests))

    def pending(self) -> set[str]:
        """Digests of objects that an append, killed or refused half-way, may have left without an entry."""
        path = self.path / "tmp" / "pending"
        if not _is_file(path):
            return set()
        with self._open(path) as stream:
            return {line for line in stream.read().decode("ascii", "replace").split("\n") if _DIGEST.match(line)}

    def _write_pending(self, digests: set[str]) -> None:
        path = self.path / "tmp" / "pending"
        if digests:
            self._write(path, lambda stream: stream.write("".join(f"{name}\n" for name in sorted(digests)).encode()))
        else:
            with suppress(FileNotFoundError):
                path.unlink()

    # ------------------------------------------------------------ log

    def _entry_path(self, sequence: int) -> Path:
        if not 0 <= sequence <= LARGEST_SEQUENCE:
            raise ArchiveError("The log is full.", expected=f"at most {LARGEST_SEQUENCE + 1} entries")
        return self.path / "log" / f"{sequence:09}.json"

    def sequences(self) -> list[int]:
        """Numbers of the entry files that exist, sorted; gaps show."""
        return [int(match[1]) for match in filter(None, map(_LOG.match, self._files("log")))]

    def has_entry(self, sequence: int) -> bool:
        """Whether the log holds a file of that number."""
        return _is_file(self._entry_path(sequence))

    def read_entry(self, sequence: int) -> bytes:
        """Bytes of one entry, at most 64 KiB."""
        path = self._entry_path(sequence)
        with self._open(path) as stream:
            data = stream.read(_LARGEST_ENTRY + 1)
        if len(data) > _LARGEST_ENTRY:
            raise ArchiveError(f"An entry of the log is too large: {path}", expected=f"at most {_LARGEST_ENTRY} bytes")
        return data

    def entries(self, size: int) -> Iterator[bytes]:
        """Bytes of the entries 0 … ``size`` - 1."""
        return (self.read_entry(sequence) for sequence in range(size))

    def write_entry(self, sequence: int, data: bytes) -> None:
        """Write one entry durably. An entry that exists is never replaced."""
        path = self._entry_path(sequence)
        if path.exists() or path.is_symlink():
            raise ArchiveError(f"The log already holds this entry: {path}", next="run `ledger verify`.")
        self._write(path, lambda stream: stream.write(data))

    def has_head(self) -> bool:
        """Whether the folder has a head, which is what makes it an archive."""
        return _is_file(self.path / "log" / "head")

    def read_head_bytes(self) -> bytes:
        """The head's bytes as they stand, at most 4 KiB."""
        with self._open(self.path / "log" / "head") as stream:
            return stream.read(4096)

    def read_head(self) -> Head:
        """The head of the log. Raises InputError where it cannot be read as one."""
        return Head.parse(self.read_head_bytes())

    def write_head(self, head: Head) -> None:
        """Replace the head durably. Killed before: the old head stands, one entry behind, and the next writer completes it."""
        self._write(self.path / "log" / "head", lambda stream: stream.write(head.encode()))

    def remove_head(self) -> None:
        """Remove the head of an archive that could not be made. Raises OSError."""
        path = self.path / "log" / "head"
        path.unlink(missing_ok=True)
        sync_folder(path.parent)

    # ------------------------------------------------------------ the signed head and the tiles

    def published(self) -> list[str]:
        """Paths of the signed head and of the tiles that exist, sorted."""
        names = [name for name in self._files("tile") if tiles.place(name)]
        return [tiles.CHECKPOINT, *names] if self.has_published(tiles.CHECKPOINT) else names

    def has_published(self, name: str) -> bool:
        """Whether that path of the published log exists."""
        return _is_file(self._published_path(name))

    def read_published(self, name: str) -> bytes:
        """Bytes of the signed head or of a tile, as they stand."""
        with self._open(self._published_path(name)) as stream:
            data = stream.read(_LARGEST_TILE + 1)
        if len(data) > _LARGEST_TILE:
            raise ArchiveError(f"A tile of the log is too large: {name}", expected=f"at most {_LARGEST_TILE} bytes")
        return data

    def publish(self, name: str, data: bytes) -> None:
        """Write the signed head or a tile durably; a killed one is never seen half written."""
        path = self._published_path(name)
        self._write(path, lambda stream: stream.write(data))

    def unpublish(self, name: str) -> None:
        """Remove a tile, and its folder where nothing else is in it."""
        path = self._published_path(name)
        try:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
        except OSError as error:
            raise _failed("A tile of the log cannot be removed", path, error) from error

    def _published_path(self, name: str) -> Path:
        if name != tiles.CHECKPOINT and tiles.place(name) is None:
            raise ArchiveError("This is no path of a published log.", expected="checkpoint or tile/<L>/<N>", found=repr(name[:80]))
        return self.path / name

    # ------------------------------------------------------------ what does not belong

    def strays(self) -> list[str]:
        """Paths inside the archive, relative to it and sorted, that are none of its files: strangers, links, pipes.

        The database, its side files and ``tmp/`` do not count.
        """
        return [name for name in self._files(every=True) if not self._known(name)]

    def _known(self, name: str) -> bool:
        if name.startswith("tmp/") or _DATABASE.match(name):
            return True
        named = (
            name in ("log/head", tiles.CHECKPOINT) or any(known.match(name) for known in (_OBJECT, _LOG)) or tiles.place(name) is not None
        )
        return named and stat.S_ISREG((self.path / name).lstat().st_mode)

    def _files(self, below: str | None = None, every: bool = False) -> list[str]:
        """Sorted relative paths of everything that is no folder. Links are listed and never followed."""
        found: list[str] = []
        starts = [self.path] if every else [self.path / (below or "objects")]
        try:
            while starts:
                folder = starts.pop()
                if not folder.is_dir() or folder.is_symlink():
                    continue
                with os.scandir(folder) as items:
                    for item in items:
                        if item.is_dir(follow_symlinks=False):
                            starts.append(folder / item.name)
                        else:
                            found.append(os.fsdecode((folder / item.name).relative_to(self.path)))
        except OSError as error:
            raise _failed("The archive's folder cannot be listed", self.path, error) from error
        return sorted(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # no right to look into the folder: neither yes nor no
        raise _failed("The archive's folder cannot be read", path, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(stream: BinaryIO) -> tuple[str, int]:
    state, size = hashlib.sha256(), 0
    while block := stream.read(_BLOCK):
        state.update(block)
        size += len(block)
    return state.hexdigest(), size


def _damaged(digest: str, found: str) -> ArchiveError:
    return ArchiveError(
        f"Object {digest} is damaged: its bytes are not those of its name.",
        expected=digest,
        found=found,
        next="restore that object from a copy of the archive, then run `ledger verify`.",
    )
