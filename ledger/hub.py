"""A revision of a model hub's repository, resolved to a commit and to the digests of its files.

Online, one answer of the hub gives the commit and the list of files with their digests: SHA-256 for large files,
git blob ids for small ones, which are fetched by commit, checked and hashed. Offline, the same is read from the
cache of ``huggingface_hub``, whose blobs are named by these digests, and everything is hashed:

    models--org--name/refs/<branch>            a commit
    models--org--name/snapshots/<commit>/file  a link to ../../blobs/<digest>

Links inside the cache are followed; one that leaves it, or that leads nowhere, is refused.
Only weights that load without running code, configurations and tokenizers are taken, from the repository's root.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from ledger import digest
from ledger.errors import InputError, LedgerError, ProvenanceError
from ledger.records import CheckpointFile

INDEX = "model.safetensors.index.json"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SOURCE = re.compile(r"hf:([A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?)@([A-Za-z0-9][A-Za-z0-9._/-]{0,200})")
_WEIGHTS = (".safetensors", ".gguf")
# Tokenizers come as JSON, as a sentencepiece model, or as lists in plain text; a chat template as Jinja.
_TEXTS = frozenset({"tokenizer.model", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"})


def parse(source: str) -> tuple[str, str]:
    """Repository and revision of ``hf:org/name@revision``. Raises InputError."""
    match = _SOURCE.fullmatch(source)
    if match is None or ".." in source:
        raise InputError(
            "The study cannot be used: checkpoint.source names no revision of a repository.",
            expected="hf:org/name@revision",
            found=source[:200],
            next="correct the study.",
        )
    return match[1], match[2]


def allowed(name: str) -> bool:
    """Whether a file of this name loads without running code and can belong to a checkpoint."""
    return bool(_NAME.fullmatch(name)) and (name.endswith((*_WEIGHTS, ".json")) or name in _TEXTS)


def select(names: list[str], index: Path | None) -> list[str]:
    """The files, of those in a folder, that make the checkpoint.

    One set of weights: ``model.safetensors``, or the shards that the file ``index`` lists, or all safetensors,
    or the one GGUF. Raises ProvenanceError.
    """
    taken = [name for name in names if allowed(name)]
    tensors = [name for name in taken if name.endswith(".safetensors")]
    ggufs = [name for name in taken if name.endswith(".gguf")]
    if "model.safetensors" in tensors:
        weights = ["model.safetensors"]
    elif INDEX in taken and index is not None:
        weights = _shards(index)
        if missing := sorted(set(weights) - set(tensors)):
            raise ProvenanceError(f"The checkpoint lacks shards that {INDEX} lists.", found="missing: " + ", ".join(missing)[:500])
    elif tensors:
        weights = tensors
    elif len(ggufs) > 1:
        raise ProvenanceError("The checkpoint holds several GGUF files.", expected="one", found=", ".join(ggufs)[:500])
    else:
        weights = ggufs
    if not weights:
        raise ProvenanceError(
            "The checkpoint holds no weights that load without running code.",
            expected="safetensors or GGUF",
            found=", ".join(names)[:500] or "no file",
            next="choose a revision that has safetensors; pickles (.bin, .pt) are never read.",
        )
    return [name for name in taken if name in weights or not name.endswith(_WEIGHTS)]


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ProvenanceError(
            f"{INDEX} cannot be read.", expected="a weight_map", found=f"{type(error).__name__}: {error}"[:500]
        ) from error
    return [str(shard) for shard in shards]


def resolve(repository: str, revision: str) -> tuple[str, tuple[CheckpointFile, ...]]:
    """The commit that ``revision`` names and the files of the checkpoint there, in order of name.

    Raises ProvenanceError: what was asked for, what the hub or the cache said, what to do.
    """
    if _offline():
        return _from_cache(repository, revision)
    try:
        return _online(repository, revision)
    except _Unreachable as error:
        # The cache can stand in for a commit, which never changes; for a branch it may be out of date.
        if _COMMIT.fullmatch(revision):
            try:
                return _from_cache(repository, revision)
            except ProvenanceError:
                pass
        raise error.reason from error


# ---------------------------------------------------------------- online


class _Unreachable(Exception):
    def __init__(self, reason: ProvenanceError) -> None:
        self.reason = reason
        super().__init__(reason.message())


def _offline() -> bool:
    from huggingface_hub import constants

    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE") or constants.HF_HUB_OFFLINE


def _endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE)


def _online(repository: str, revision: str) -> tuple[str, tuple[CheckpointFile, ...]]:
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=_endpoint()).model_info(repository, revision=revision, files_metadata=True, timeout=30)
    except Exception as error:
        raise _explained(error, repository, revision) from error
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit) or (_COMMIT.fullmatch(revision) and commit != revision):
        raise ProvenanceError(
            f"The hub did not resolve {repository}@{revision} to a commit.",
            expected=revision if _COMMIT.fullmatch(revision) else "40 hexadecimal digits",
            found=commit[:100] or "nothing",
        )
    listed = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    index = _fetch(repository, commit, INDEX) if INDEX in listed and "model.safetensors" not in listed else None
    files = [_listed(repository, commit, listed[name]) for name in select(sorted(listed), index)]
    return commit, tuple(files)


def _listed(repository: str, commit: str, sibling: Any) -> CheckpointFile:
    """One file of the hub's list: a large one by the hub's SHA-256, a small one fetched and checked."""
    name = sibling.rfilename
    if sibling.lfs is not None:
        if not _SHA256.fullmatch(sibling.lfs.sha256):
            raise ProvenanceError(f"The hub gives no SHA-256 for {name} of {repository}@{commit}.", found=str(sibling.lfs.sha256)[:100])
        return CheckpointFile(path=name, sha256=sibling.lfs.sha256, size=sibling.lfs.size)
    if not sibling.blob_id:
        raise ProvenanceError(f"The hub gives no digest for {name} of {repository}@{commit}.", expected="a git blob id or a SHA-256")
    return _checked(_fetch(repository, commit, name), name, sibling.blob_id)


def _fetch(repository: str, commit: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    cache = _cache()
    try:
        path = hf_hub_download(repository, name, revision=commit, endpoint=_endpoint(), cache_dir=cache)
    except Exception as error:
        raise _explained(error, repository, commit, name) from error
    return _contained(Path(path), cache)


def _explained(error: Exception, repository: str, revision: str, name: str = "") -> Exception:
    """What a failure of the hub's library means for the user; anything that it does not raise on purpose comes back as it is."""
    from huggingface_hub import errors

    # The library's own errors derive from the HTTP client's, and which client that is differs between its versions.
    transport = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    if not isinstance(error, (transport, OSError, ValueError, errors.EntryNotFoundError)):
        return error
    what = f"{name} of {repository}@{revision}" if name else f"{repository}@{revision}"
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else None
    found = f"{type(error).__name__}: {error}"[:1000]
    if isinstance(error, errors.RevisionNotFoundError):
        return ProvenanceError(
            f"The hub has no revision {revision!r} of {repository}.",
            expected="a branch, a tag or a commit",
            found="RevisionNotFound",
            next="correct checkpoint.source.",
        )
    if status in (401, 403):
        return ProvenanceError(
            f"The hub does not let you read {what}.",
            expected="a public repository, or a token with access",
            found=f"HTTP {status}",
            next=f"accept the licence at {_endpoint()}/{repository} if there is one, and set HF_TOKEN to a token with read access.",
        )
    if status == 404:
        return ProvenanceError(f"The hub does not have {what}.", found=f"HTTP {status}", next="correct checkpoint.source.")
    return _Unreachable(
        ProvenanceError(
            f"The hub could not be read: {what}.",
            expected=f"an answer from {_endpoint()}",
            found=found,
            next="check the network and HF_ENDPOINT and try again; with HF_HUB_OFFLINE=1 the cache alone is used.",
        )
    )


# ---------------------------------------------------------------- the cache


def _from_cache(repository: str, revision: str) -> tuple[str, tuple[CheckpointFile, ...]]:
    cache = _cache()
    folder = cache / ("models--" + repository.replace("/", "--"))
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise _not_cached(repository, revision, f"no such branch or tag in {folder / 'refs'}") from error
        if not _COMMIT.fullmatch(commit):
            raise _not_cached(repository, revision, f"the cached reference holds {commit[:60]!r}")
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        raise _not_cached(repository, revision, f"no folder {snapshot}")
    present = sorted(entry.name for entry in snapshot.iterdir() if entry.is_symlink() or entry.is_file())
    listed = _cached_listing(repository, commit, cache)
    index = snapshot / INDEX
    try:
        names = select(sorted({*listed, *present}), _contained(index, cache) if index.is_symlink() or index.exists() else None)
    except ProvenanceError as error:
        raise _not_cached(repository, revision, f"{error.what} {error.found}".strip()) from error
    if missing := [name for name in names if name not in present]:
        raise _not_cached(repository, revision, "missing: " + ", ".join(missing)[:500])
    return commit, tuple(_cached_file(snapshot / name, cache) for name in names)


def _not_cached(repository: str, revision: str, found: str) -> LedgerError:
    return ProvenanceError(
        f"{repository}@{revision} is not complete in the hub's cache, and the hub is not asked.",
        expected=f"a whole revision in {_cache()}",
        found=found,
        next="unset HF_HUB_OFFLINE, or fill the cache where there is a network.",
    )


def _cached_listing(repository: str, commit: str, cache: Path) -> list[str]:
    """Names of the whole commit, where a download of it left its list in the cache; newer versions of the library do."""
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:
        return []
    try:
        return [file.path for file in get_cached_repo_tree(repository, revision=commit, cache_dir=cache)]
    except CachedRepoTreeNotFoundError:
        return []


def _contained(path: Path, cache: Path) -> Path:
    """``path``, where its links stay in the cache and lead to a file. Raises ProvenanceError."""
    target = path.resolve()
    if not target.is_relative_to(cache.resolve()):
        raise ProvenanceError(
            f"A link in the hub's cache leaves it: {path.name}.",
            expected=f"a file in {cache}",
            found=str(target),
            next=f"remove {path}; it is fetched again.",
        )
    if not target.is_file():
        raise ProvenanceError(
            f"A link in the hub's cache leads nowhere: {path.name}.",
            expected=str(target),
            found="no such file",
            next=f"remove {path}; it is fetched again.",
        )
    return path


def _cached_file(path: Path, cache: Path) -> CheckpointFile:
    _contained(path, cache)
    # The first link names the blob by the hub's digest; the blob may itself be a link into a store that revisions share.
    name = path.readlink().name if path.is_symlink() else ""
    if not (_COMMIT.fullmatch(name) or _SHA256.fullmatch(name)):
        raise ProvenanceError(
            f"The cached file {path.name} cannot be checked: the cache does not tell the hub's digest.",
            expected="a link to a blob that is named by its digest",
            found=str(path),
            next="unset HF_HUB_OFFLINE, so that the hub can be asked.",
        )
    return _checked(path, path.name, name)


def _checked(path: Path, name: str, expected: str) -> CheckpointFile:
    """The file, where its bytes have the hub's digest: SHA-256, or the git blob id of 40 digits. Raises ProvenanceError."""
    sha256, size = digest.sha256_file(path)
    found = sha256 if len(expected) == 64 else _blob_id(path, size)
    if found != expected:
        raise ProvenanceError(
            f"The file {name} is not the one that the hub lists.",
            expected=f"{'sha256' if len(expected) == 64 else 'git blob'} {expected}",
            found=f"{found}, {size} bytes",
            next=f"remove {path.resolve()}; it is fetched again.",
        )
    return CheckpointFile(path=name, sha256=sha256, size=size)


def _blob_id(path: Path, size: int) -> str:
    state = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()
