"""The git repository around a folder: found in spite of the environment, read as bytes, checked out aside.

    find        the repository around a folder, or the reason why there is none
    output      what a git command prints, as bytes, since paths need not be UTF-8
    url_of      the remote's URL, without credentials and without local paths
    worktree    a commit checked out into a temporary folder

No hook and no monitor of the repository runs. A repository that git refuses is an error that says what to do.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ledger.errors import ProvenanceError

if TYPE_CHECKING:
    import git

# What `git rev-parse --local-env-vars` lists, and what bends the search or the diff: set by hooks and by
# other tools, they would make git answer for another repository than the one around `start`.
_MISLEADING = frozenset(
    {
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_GRAFT_FILE",
        "GIT_IMPLICIT_WORK_TREE",
        "GIT_INTERNAL_SUPER_PREFIX",
        "GIT_PREFIX",
        "GIT_REPLACE_REF_BASE",
        "GIT_SHALLOW_FILE",
        "GIT_NAMESPACE",
        "GIT_CONFIG",
        "GIT_CEILING_DIRECTORIES",
        "GIT_EXTERNAL_DIFF",
        "GIT_DIFF_OPTS",
        "GIT_LITERAL_PATHSPECS",
        "GIT_GLOB_PATHSPECS",
        "GIT_NOGLOB_PATHSPECS",
        "GIT_ICASE_PATHSPECS",
        "GIT_DEFAULT_HASH",
        "GIT_ATTR_SOURCE",
    }
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@contextmanager
def _environment() -> Iterator[None]:
    """git's environment variables out of the way, for the time of the block."""
    before = {name: value for name, value in os.environ.items() if name.startswith("GIT_")}
    try:
        for name in _MISLEADING & before.keys():
            del os.environ[name]
        os.environ["GIT_NO_REPLACE_OBJECTS"] = "1"  # a replaced object has other bytes than its id says
        os.environ["GIT_OPTIONAL_LOCKS"] = "0"  # looking must not write the index
        yield
    finally:
        for name in ("GIT_NO_REPLACE_OBJECTS", "GIT_OPTIONAL_LOCKS"):
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def find(start: Path) -> Iterator[git.Repo | str]:
    """The repository around ``start``, or the reason why there is none."""
    try:
        import git  # looks for the git program when it is imported
    except ImportError:
        yield "git is not installed"
        return
    with _environment():
        try:
            repository = git.Repo(start, search_parent_directories=True)
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            yield "no repository"
            return
        with repository:
            if repository.bare or repository.working_tree_dir is None:
                yield "a bare repository has no working tree"
                return
            _refuse_dubious(repository)
            if line(repository, "rev-parse", "--show-object-format") != "sha1":
                yield "a repository with SHA-256 object ids is not read"
                return
            yield repository


def _refuse_dubious(repository: git.Repo) -> None:
    import git

    try:
        output(repository, "rev-parse", "--git-dir")
    except git.GitCommandError as error:
        root = repository.working_tree_dir
        if "dubious ownership" in str(error.stderr):
            raise ProvenanceError(
                "git refuses this repository: it belongs to another user (dubious ownership).",
                expected="a repository of the user who records the run",
                found=str(root),
                next=f"if you trust it: git config --global --add safe.directory {root}",
            ) from error
        raise ProvenanceError(
            "git cannot read this repository.",
            found=str(error.stderr).strip()[:500],
            next=f"see what `git -C {root} status` says.",
        ) from error


def output(repository: git.Repo, *arguments: str) -> bytes:
    """Standard output of a git command, as bytes: paths need not be UTF-8. Raises git.GitCommandError."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *arguments]
    printed = repository.git.execute(command, stdout_as_string=False, strip_newline_in_stdout=False)
    assert isinstance(printed, bytes)
    return printed


def line(repository: git.Repo, *arguments: str) -> str:
    """:func:`output` as text, without the final line break."""
    return os.fsdecode(output(repository, *arguments)).rstrip("\n")


def public_url(url: str) -> str | None:
    """A remote's URL without user, password, query or fragment; None for a local path or an unknown transport."""
    if "://" in url:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            return None
        if parts.scheme not in ("http", "https", "ssh", "git", "git+ssh", "git+https") or not parts.hostname:
            return None
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
    # The short form of ssh, [user@]host:path. A single letter before the colon is a drive.
    short = re.fullmatch(r"(?:[^/]*@)?([A-Za-z0-9.-]{2,}):(?!:)(.+)", url)
    return f"ssh://{short[1]}/{short[2].lstrip('/')}" if short else None


def url_of(repository: git.Repo) -> str | None:
    """:func:`public_url` of ``origin``, or of the first remote where there is no ``origin``."""
    remotes = {remote.name: remote for remote in repository.remotes}
    if not remotes:
        return None
    remote = remotes.get("origin") or next(iter(remotes.values()))
    url = remote.config_reader.get_value("url", default="")
    return public_url(str(url))


@contextmanager
def worktree(repository: Path, commit: str, target: Path) -> Iterator[Path]:
    """Check ``commit`` out into a temporary git worktree at ``target``, which must not exist; removed afterwards.

    No hook runs. Raises ProvenanceError where the commit is not there or git refuses.
    """
    if not _COMMIT.fullmatch(commit):
        raise ProvenanceError("A harness revision is a full commit id.", expected="40 hexadecimal digits", found=repr(commit)[:100])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ProvenanceError("The folder for the harness is not empty.", found=str(target), next="choose a new folder.")
    with find(repository) as found:
        if isinstance(found, str):
            raise ProvenanceError(
                "The harness of this run cannot be checked out.",
                expected=f"a repository that holds commit {commit}",
                found=found,
                next="run this inside a clone of the harness, or with --current-harness.",
            )
        import git

        try:
            output(found, "cat-file", "-e", f"{commit}^{{commit}}")
        except git.GitCommandError as error:
            shallow = line(found, "rev-parse", "--is-shallow-repository") == "true"
            raise ProvenanceError(
                f"The repository does not hold commit {commit}.",
                found="a shallow clone" if shallow else "a full clone without this commit",
                next="git fetch --unshallow" if shallow else "fetch the branch that holds it, or use --current-harness.",
            ) from error
        try:
            output(found, "-c", "core.autocrlf=false", "worktree", "add", "--detach", "--quiet", str(target.absolute()), commit)
        except git.GitCommandError as error:
            raise ProvenanceError("git cannot check the harness out.", found=str(error.stderr).strip()[:500]) from error
    try:
        yield target
    finally:
        with find(repository) as found:
            if not isinstance(found, str):
                # Twice forced: files written by the run, and a lock, must not keep it alive. What git cannot remove goes
                # without it: a folder that stays behind must not cost what was measured in it.
                try:
                    output(found, "worktree", "remove", "--force", "--force", str(target.absolute()))
                except git.GitCommandError:
                    shutil.rmtree(target, ignore_errors=True)
                    with suppress(git.GitCommandError):
                        output(found, "worktree", "prune")
