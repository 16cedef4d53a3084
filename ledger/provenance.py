"""Facts about the harness: which code ran, and in what state its repository is.

A result carries the SHA-256 of every source file that it loaded. :func:`harness` looks for exactly these bytes,
first in the history of the git repository around ``start``, then in the installed distribution. What is found
nowhere is recorded as ``none``, and cannot qualify.

    matched      the tree of ``commit`` holds every source at its path (package roots are relative to the root)
    state        the working tree as it is now: staged, unstaged or untracked changes make it ``dirty``
    evidence     ``harness/diff.patch`` and ``harness/untracked/…``, where there are any

A repository that holds none of the sources is somebody else's: nothing of it is recorded.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ledger import digest, records
from ledger.repository import find, line, output, url_of, worktree

if TYPE_CHECKING:
    import git

__all__ = ["DIFF", "MAX_COMMITS", "MAX_DIFF", "MAX_UNTRACKED", "UNTRACKED", "harness", "installed", "worktree"]

DISTRIBUTION = "kv-evidence-ledger"
PACKAGES = ("ledger", "runners")
DIFF = "harness/diff.patch"
UNTRACKED = "harness/untracked/"

MAX_COMMITS = 2000
"""How many commits that touch the sources are looked at, HEAD aside."""
MAX_DIFF = 16 << 20
"""Largest diff kept as evidence, in bytes; of a larger one the digest alone is recorded."""
MAX_UNTRACKED = 1 << 20
"""Largest untracked source file kept as evidence, in bytes."""


def _is_path(name: str) -> bool:
    """Whether ``name`` is a :data:`ledger.records.Path`, and so may name a source and a file of evidence."""
    try:
        msgspec.convert(name, records.Path)
    except msgspec.ValidationError:
        return False
    return True


# ---------------------------------------------------------------- the commit that holds the sources


def _holds(commit: git.Commit, sources: Mapping[str, str], known: dict[str, str]) -> bool:
    """Whether the commit's tree holds exactly these bytes. ``known`` caches blob id to SHA-256."""
    import git

    for path, wanted in sources.items():
        try:
            blob = commit.tree.join(path)
        except KeyError:
            return False
        if not isinstance(blob, git.Blob) or stat.S_ISLNK(blob.mode):
            return False
        if blob.hexsha not in known:
            known[blob.hexsha] = hashlib.sha256(blob.data_stream.read()).hexdigest()
        if known[blob.hexsha] != wanted:
            return False
    return True


def _find_commit(repository: git.Repo, sources: Mapping[str, str]) -> tuple[str | None, bool]:
    """The commit whose tree holds the sources, HEAD first; and whether the search came to its bound."""
    known: dict[str, str] = {}
    head = repository.head.commit
    if _holds(head, sources, known):
        return head.hexsha, False
    seen = 0
    # HEAD's own history first, then what other branches hold. Full history: the usual simplification
    # leaves out side branches whose changes a merge dropped, and a run may have been made on one.
    for revisions in (["HEAD"], ["--branches", "--remotes", "--tags", "--not", "HEAD"]):
        listing = line(repository, "rev-list", "--full-history", f"--max-count={MAX_COMMITS - seen + 1}", *revisions, "--", *sources)
        for commit in listing.split():
            seen += 1
            if seen > MAX_COMMITS:
                return None, True
            if _holds(repository.commit(commit), sources, known):
                return commit, False
    return None, False


# ---------------------------------------------------------------- the state of the working tree


def _escaped(path: bytes) -> str:
    r"""A path as text: bytes that are not UTF-8 as ``\xe9``, a backslash doubled so that the two cannot be confused."""
    text = path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return "./number" if text == "number" else text  # an object whose only key is "number" is reserved


def _pathspecs(root: Path, exclude: Path | None) -> list[str]:
    """Pathspecs that leave the archive's own folder out."""
    if exclude is None:
        return []
    try:
        inside = exclude.resolve().relative_to(root.resolve())
    except ValueError:
        return []
    return ["--", ".", f":(top,exclude,literal){inside.as_posix()}"] if inside.parts else []


def _untracked(root: Path, paths: Sequence[bytes], evidence: dict[str, bytes], notes: list[str]) -> dict[str, str]:
    """Digest of each untracked file; contents of the small ones under the harness's packages go to ``evidence``."""
    digests: dict[str, str] = {}
    for path in sorted(paths):
        name, file = _escaped(path), root / os.fsdecode(path)
        try:
            if path.endswith(b"/"):
                notes.append(f"the nested repository {name} is not read")
            elif file.is_symlink():
                digests[name] = digest.sha256(b"link " + os.fsencode(file.readlink()))
            else:
                digests[name], size = digest.sha256_file(file)
                stored = UNTRACKED + name
                wanted = name.split("/")[0] in PACKAGES and _is_path(stored)
                if wanted and size <= MAX_UNTRACKED:
                    data = file.read_bytes()
                    digests[name], evidence[stored] = digest.sha256(data), data
        except OSError as error:
            notes.append(f"the untracked file {name} cannot be read ({error.strerror})")
    return digests


def _changes(repository: git.Repo, root: Path, exclude: Path | None, born: bool) -> tuple[list[bytes], bytes, bool]:
    """Untracked paths, the diff against HEAD, and whether anything tracked changed."""
    only = _pathspecs(root, exclude)
    listing = output(
        repository, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=none", *only
    )
    entries = [entry for entry in listing.split(b"\0") if entry]
    untracked = [entry[3:] for entry in entries if entry.startswith(b"?? ")]
    changed = len(untracked) < len(entries)
    if not changed:
        return untracked, b"", False
    form = [
        "--binary",
        "--full-index",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--no-renames",
        "--src-prefix=a/",
        "--dst-prefix=b/",
    ]
    sides = [["HEAD"]] if born else [["--cached"], []]
    return untracked, b"".join(output(repository, "diff", *form, *side, *only) for side in sides), True


# ---------------------------------------------------------------- the installed distribution


def installed() -> records.Distribution | None:
    """The installed distribution by the raw bytes of its RECORD; None where there is none, or it has no RECORD."""
    found = _installation()
    return None if found is None else found[0]


def _installation() -> tuple[records.Distribution, dict[str, str]] | None:
    """The installed distribution, and the SHA-256 of its files by path, as its RECORD lists them."""
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    held: dict[str, str] = {}
    record: bytes | None = None
    for file in found.files or ():
        if file.hash is not None and file.hash.mode == "sha256":
            value = file.hash.value
            held[file.as_posix()] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
        elif file.name == "RECORD" and file.parent.name.endswith(".dist-info"):
            # as bytes: pip ends the lines with CRLF, which reading it as text would turn into LF and another digest
            record = Path(str(found.locate_file(file))).read_bytes()
    if record is None:
        return None
    return records.Distribution(name=DISTRIBUTION, version=found.version, record_sha256=digest.sha256(record)), held


def _distribution(sources: Mapping[str, str]) -> records.Distribution | None:
    """The installed distribution, where its RECORD holds every source's digest."""
    found = _installation()
    if found is None or any(found[1].get(path) != wanted for path, wanted in sources.items()):
        return None
    return found[0]


# ---------------------------------------------------------------- harness


def _ours(repository: git.Repo, root: Path, sources: Mapping[str, str], born: bool) -> bool:
    """Whether the repository has any of the sources at its path, committed or not."""
    if any((root / path).is_file() for path in sources):
        # A virtual environment may lie in another project's tree, but never at the root of it.
        return True
    if not born:
        return False
    return bool(output(repository, "ls-tree", "--name-only", "HEAD", "--", *sources))


def harness(start: Path, sources: Mapping[str, str], exclude: Path | None = None) -> tuple[records.Harness, dict[str, bytes]]:
    """Find the code of ``sources`` and describe the working tree around ``start``.

    ``sources`` maps paths such as ``ledger/digest.py`` to SHA-256, as a result carries them. ``exclude`` is the
    archive's own folder, whose changes do not count. Returns the harness and evidence by name.
    Raises ProvenanceError where git refuses the repository.
    """
    notes: list[str] = []
    evidence: dict[str, bytes] = {}
    usable = {path: wanted for path, wanted in sources.items() if _is_path(path)}
    if not sources:
        notes.append("the result names no source file")
    elif usable != dict(sources):
        notes.append("the result names source files by paths that no harness has")
    complete = bool(sources) and usable == dict(sources)

    commit: str | None = None
    url: str | None = None
    state = "none"
    diff = b""
    untracked: dict[str, str] = {}
    with find(start) as repository:
        if isinstance(repository, str):
            notes.append(repository)
        else:
            root = Path(str(repository.working_tree_dir))
            born = repository.head.is_valid()
            if not _ours(repository, root, usable, born):
                notes.append("the repository here holds none of the sources")
            else:
                url = url_of(repository)
                paths, diff, changed = _changes(repository, root, exclude, born)
                untracked = _untracked(root, paths, evidence, notes)
                state = "dirty" if changed or paths else "clean"
                notes += _situation(repository, born)
                if born and complete:
                    commit = _match(repository, usable, notes)

    named: str | None = None
    if diff:
        if len(diff) <= MAX_DIFF:
            named, evidence[DIFF] = DIFF, diff
        else:
            notes.append(f"the diff of {len(diff)} bytes is not kept; its SHA-256 is {digest.sha256(diff)}")
    distribution = _distribution(usable) if complete and commit is None else None
    found = records.Harness(
        matched="commit" if commit else "distribution" if distribution else "none",
        commit=commit,
        repository=url,
        state=state,  # type: ignore[arg-type]
        detail="; ".join(notes)[:8192],
        diff=named,
        untracked=untracked,
        distribution=distribution,
    )
    return records.convert(records.Harness, records.plain(found), "The harness found here"), evidence


def _match(repository: git.Repo, sources: Mapping[str, str], notes: list[str]) -> str | None:
    shallow = line(repository, "rev-parse", "--is-shallow-repository") == "true"
    commit, bounded = _find_commit(repository, sources)
    if commit is None:
        notes.append("no commit holds the sources")
        if shallow:
            notes.append("the clone is shallow and the search ended at its border: `git fetch --unshallow` brings the rest")
        if bounded:
            notes.append(f"the search ended after {MAX_COMMITS} commits")
    elif shallow:
        notes.append("shallow clone")
    head = repository.head.commit.hexsha
    if commit != head:
        notes.append(f"HEAD is {head}")
    return commit


def _situation(repository: git.Repo, born: bool) -> list[str]:
    """What is unusual about the repository, in words."""
    notes = []
    if not born:
        notes.append("no commits yet")
    elif repository.head.is_detached:
        notes.append("detached HEAD")
    if line(repository, "rev-parse", "--show-superproject-working-tree"):
        notes.append("submodule")
    elif line(repository, "rev-parse", "--git-dir") != line(repository, "rev-parse", "--git-common-dir"):
        notes.append("linked worktree")
    return notes
