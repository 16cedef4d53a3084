"""A study becomes a frozen spec: every name resolved to a digest, before anything runs.

    load_study   TOML by name (the studies that ship) or by path -> tables
    spec_of      tables -> spec, and where its input files lie
    freeze       the spec is appended to the log first, then laid out
    thaw         the frozen folder of a recorded spec, made again from its digests

A frozen folder is ``spec.json`` (canonical bytes) and ``inputs/<file>``. It appears in one rename, so a folder that
was only half laid out never looks frozen.

Documents are consecutive and disjoint: each takes ``tokens`` tokens, BOS included where ``bos`` is set, the first of
them from token ``first`` of the tokenised dataset on. ``stride`` (dataset tokens from one start to the next) may leave
gaps; one that makes documents overlap is refused. Where ``documents`` and ``tokens`` are lists, so many of each length follow each other.

``scale_source = "run:<id>"`` of an arm with fixed scales names a recorded calibration, ``"study:<name>"`` the newest one of that study that
is not withdrawn. It becomes the digest of that run's ``calibration.safetensors``, and the file lies in the frozen folder as
``inputs/scales.safetensors``: one for all arms. ``calibration`` is that source for all arms that name none. A ``[grid]``
(:mod:`ledger.grid`) is written out as arms and contrasts as soon as a study is read.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ledger import captures, claims, digest, grid, records, scopes, sources
from ledger.errors import InputError, ProvenanceError
from ledger.records import consistency

if TYPE_CHECKING:
    from ledger.archive import Archive

MAX_STUDY = 1 << 20
"""Largest study file, in bytes."""
MAX_DOCUMENTS = 100_000
TESTED = ("capability", "calibration", "quality.loss", "quality.task", "state memory", "production", "performance")
"""Scopes that the runners have a test for."""
SCALES = "scales.safetensors"
"""The calibration that fixed scales come from, in a frozen folder's ``inputs/``."""
STORED_INPUTS = "inputs.safetensors"
"""Token ids in place of a dataset that is gone, or of pinned ones, in a thawed folder's ``inputs/``."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class GreedyTable(records.Record, frozen=True, kw_only=True):
    """The ``[workload.greedy]`` table."""

    documents: records.Positive
    prompt_tokens: records.Positive
    new_tokens: records.Positive


class WorkloadTable(records.Record, frozen=True, kw_only=True):
    """The ``[workload]`` table of a study."""

    dataset: records.Text
    dataset_name: records.Text
    dataset_license: records.Text
    sha256: records.Digest
    inputs: str
    ids: records.Digest | None = None
    documents: scopes.Several
    tokens: scopes.Several
    bos: bool
    split_special_tokens: bool
    chunk: records.Positive
    batch: records.Positive = 1
    first: records.Count = 0
    stride: records.Positive | None = None
    greedy: GreedyTable | None = None


class FamilyTable(records.Record, frozen=True, kw_only=True):
    """A ``[families.<name>]`` table."""

    gates: tuple[records.Gate, ...]
    confidence: float = 0.95
    resamples: records.Positive = 1999
    seed: records.Count = 0


class StudyTables(records.Record, frozen=True, kw_only=True):
    """The keys of a study. The tables inside are read one by one, so that an error can name the key."""

    study: records.Name
    title: records.Text
    scope: records.Scope
    checkpoint: dict[str, Any]
    arms: list[dict[str, Any]]
    device: Literal["cpu", "cuda"] = "cpu"
    workload: dict[str, Any] | None = None
    performance: dict[str, Any] | None = None
    production: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    task: dict[str, Any] | None = None
    expects: dict[str, Any] | None = None
    contrasts: list[dict[str, Any]] = msgspec.field(default_factory=list)
    families: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    tolerances: dict[str, float] = msgspec.field(default_factory=dict)


# ---------------------------------------------------------------- studies


def packaged() -> Path | None:
    """The folder of the studies that ship, found without importing :mod:`runners`; None where it is not installed."""
    found = importlib.util.find_spec("runners")
    for location in (found.submodule_search_locations or ()) if found else ():
        if (folder := Path(location) / "studies").is_dir():
            return folder
    return None


def study_names() -> list[str]:
    """Names of the studies that ship."""
    folder = packaged()
    return sorted(path.stem for path in folder.glob("*.toml")) if folder else []


def _find(name_or_path: str | Path) -> Path:
    name = str(name_or_path)
    folder = packaged()
    if _NAME.fullmatch(name) and folder is not None and (folder / f"{name}.toml").is_file():
        return folder / f"{name}.toml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    raise InputError(
        f"There is no study {name!r}.",
        expected="the name of a study that ships, or the path of a TOML file",
        found="studies that ship: " + (", ".join(study_names()) or "none"),
        next="choose one of them, or give the path of your own.",
    )


def load_study(name_or_path: str | Path, calibration: str | None = None) -> tuple[dict[str, Any], Path]:
    """The tables of a study, its grid written out, and the folder that it lies in. Raises InputError.

    ``like`` names another study, one that ships or a file in the same folder, whose keys and tables hold where this one has none.
    ``calibration`` stands for the study's own.
    """
    path = _find(name_or_path)
    table, seen = _read(path), [path]
    while "like" in table:
        name, place = table.pop("like"), seen[-1].parent
        if not isinstance(name, str) or Path(name).name != name:
            raise sources.refuse("like", "names no study.", expected="one that ships, or a file beside this one", found=repr(name)[:100])
        other = _find(place / name if name.endswith(".toml") else name)
        if other in seen:
            raise sources.refuse("like", "goes round in a circle.", found=" -> ".join(one.name for one in (*seen, other)))
        base = _read(other)
        if other.parent != path.parent and _is_beside(base):
            raise sources.refuse("like", "names a study with files beside it, which are not beside this one.", found=name)
        table = base | table
        seen.append(other)
    if calibration is not None:
        table["calibration"] = calibration
    table = grid.written_out(table)
    _tables(table)
    return table, path.parent


def _is_beside(table: dict[str, Any]) -> bool:
    """Whether a study reads files of its own folder."""
    for name, key in (("workload", "dataset"), ("checkpoint", "source")):
        part = table.get(name)
        said = str(part.get(key, "")) if isinstance(part, dict) else ""
        if said.startswith("file:") or (key == "dataset" and said and not said.startswith("data:")):
            return True
    return False


def _read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InputError."""
    try:
        size = path.stat().st_size
        if size > MAX_STUDY:
            raise InputError(f"The study {path} is too large.", expected=f"at most {MAX_STUDY} bytes", found=f"{size} bytes")
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InputError(f"The study {path} cannot be read.", found=str(error)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"The study {path} is not UTF-8.", found=f"byte {error.object[error.start]:#04x} at {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"The study {path} is not TOML.", found=str(error)[:500], next="correct the study.") from error


def _tables(table: dict[str, Any]) -> StudyTables:
    study = sources.section(StudyTables, table, "")
    for where, value in _numbers(table, ""):
        if not math.isfinite(value) and not where.startswith("checkpoint.config"):
            raise sources.refuse(where, "is no finite number.", found=repr(value))
    return study


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _numbers(item, f"{path}[{number}]")


# ---------------------------------------------------------------- the spec


# Stand for what is resolved last, while everything else is checked.
_NO_DATASET = records.Dataset(name="", file="unresolved", sha256="0" * 64, size=1, license="")
_NO_CHECKPOINT = records.Checkpoint(name="", source="", license="")


def _workload(table: dict[str, Any]) -> records.Workload:
    """The workload of a study, its dataset not yet resolved."""
    study = sources.section(WorkloadTable, table, "workload")
    if study.inputs not in ("store", "digest"):
        raise sources.refuse("workload.inputs", "is unknown.", expected='"store" or "digest"', found=repr(study.inputs)[:100])
    counts, sizes = (value if isinstance(value, tuple) else (value,) for value in (study.documents, study.tokens))
    if len(counts) != len(sizes) or not counts:
        found = f"{len(counts)} and {len(sizes)}"
        raise sources.refuse("workload.tokens", "is not a list beside documents.", expected="a length for each number", found=found)
    documents = sum(counts)
    if documents > MAX_DOCUMENTS:
        raise sources.refuse("workload.documents", "is too large.", expected=f"at most {MAX_DOCUMENTS}", found=str(documents))
    if min(sizes) < 2:
        raise sources.refuse("workload.tokens", "leaves nothing to predict.", expected="at least 2", found=str(min(sizes)))
    lengths = [size - int(study.bos) for size in sizes]
    if study.stride is not None and len(counts) > 1:
        raise sources.refuse("workload.stride", "is of documents of one length.", expected="none beside lists")
    if study.stride is not None and study.stride < lengths[0]:
        raise sources.refuse("workload.stride", "makes documents overlap.", expected=f"at least {lengths[0]}", found=str(study.stride))
    greedy = study.greedy
    if greedy is not None and greedy.documents > documents:
        raise sources.refuse("workload.greedy.documents", "exceeds workload.documents.", found=f"{greedy.documents} of {documents}")
    if greedy is not None and greedy.prompt_tokens > min(sizes):
        raise sources.refuse("workload.greedy.prompt_tokens", "exceeds workload.tokens.", found=f"{greedy.prompt_tokens} of {min(sizes)}")
    spans, start = [], study.first
    for count, length in zip(counts, lengths, strict=True):
        for _ in range(count):
            spans.append(records.Span(start=start, tokens=length))
            start += study.stride or length
    return records.Workload(
        dataset=_NO_DATASET,
        inputs="store" if study.inputs == "store" else "digest",
        spans=tuple(spans),
        bos=study.bos,
        split_special_tokens=study.split_special_tokens,
        chunk=study.chunk,
        batch=study.batch,
        greedy=None if greedy is None else records.Greedy(**records.plain(greedy)),
    )


def draft_of(table: dict[str, Any], arms: Sequence[dict[str, Any]] | None = None) -> records.Spec:
    """The spec of a study with neither dataset nor checkpoint resolved: nothing but the study is read.

    ``arms`` stand for the study's own, with the calibration of fixed scales resolved; else it is not looked for.
    Raises InputError that names the key that is wrong.
    """
    study = _tables(table)
    if study.scope not in TESTED:
        raise InputError(
            f"scope: this version has no test for {study.scope!r}, so a spec of it could not be run.",
            expected=" or ".join(TESTED),
            found=study.scope,
            next="correct the study.",
        )
    given = [_uncalibrated(arm) for arm in study.arms] if arms is None else arms
    asked = tuple(sources.section(records.Arm, arm, f"arms[{number}]") for number, arm in enumerate(given))
    contrasts = tuple(sources.section(records.Contrast, item, f"contrasts[{number}]") for number, item in enumerate(study.contrasts))
    families = tuple(
        records.Family(
            name=sources.section(_Named, {"name": name}, f"families.{name}").name,
            **_fields(sources.section(FamilyTable, family, f"families.{name}")),
        )
        for name, family in study.families.items()
    )
    checkpoint = sources.section(sources.CheckpointTable, study.checkpoint, "checkpoint")
    workload = None if study.workload is None else _workload(study.workload)
    if workload is None and "workload" in records.PARTS[study.scope]:
        raise sources.refuse("workload", "is missing.", expected="the section [workload]")
    if workload is not None and workload.batch != 1:
        raise InputError(
            "workload.batch: this version runs one document at a time.", expected="1", found=str(workload.batch), next="correct the study."
        )
    performance = None if study.performance is None else scopes.performance_of(study.performance, checkpoint.config)
    production = None if study.production is None else scopes.production_of(study.production)
    capture = None if study.capture is None else sources.section(records.Capture, study.capture, "capture")
    memory = None if study.memory is None else sources.section(records.Memory, study.memory, "memory")
    task = None if study.task is None else scopes.task_of(study.task)
    format: Literal["kv-ledger/spec/1", "kv-ledger/spec/2", "kv-ledger/spec/3"] = "kv-ledger/spec/2"
    ids = None if study.workload is None else study.workload.get("ids")
    if any(part is not None for part in (capture, memory, task, ids)):
        format = "kv-ledger/spec/3"
    elif workload is not None and performance is None and production is None and study.device == "cpu":
        format = "kv-ledger/spec/1"
    draft = records.Spec(
        format=format,
        study=study.study,
        title=study.title,
        scope=study.scope,
        checkpoint=_NO_CHECKPOINT,
        workload=workload,
        arms=asked,
        contrasts=contrasts,
        families=families,
        tolerances=study.tolerances,
        device=study.device,
        performance=performance,
        production=production,
        capture=capture,
        memory=memory,
        task=task,
        ids=ids,
    )
    consistency.check(draft)
    return draft


def _uncalibrated(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm of a study with a digest of zeros in the place of a run that is not looked for."""
    named = str(arm.get("scale_source", "")).startswith(grid.NAMED)
    return {**arm, "scale_source": "0" * 64} if named else arm


def spec_of(table: dict[str, Any], base: Path, archive: Archive | None = None) -> tuple[records.Spec, dict[str, Path]]:
    """The spec of a study, and where the files of its frozen ``inputs/`` lie, by name; ``base`` is the study's folder.

    What contradicts itself is refused before any file is read or the hub is asked. ``archive`` holds the calibration that fixed scales
    come from. Raises InputError that names the key, and ProvenanceError.
    """
    study = _tables(table)
    given, calibration = _calibrated_arms(study.arms, archive)
    draft = draft_of(table, given)
    workload, task = draft.workload, draft.task
    files: dict[str, Path] = {}
    if workload is not None and study.workload is not None:
        dataset, path = sources.resolve_dataset(study.workload, base)
        workload = msgspec.structs.replace(workload, dataset=dataset)
        files[dataset.file] = path
    if task is not None and study.task is not None:
        task, files = scopes.resolve_task(task, study.task, base)
    found = sources.resolve_checkpoint(study.checkpoint, base)
    resolved = msgspec.structs.replace(draft, checkpoint=found, workload=workload, task=task)
    spec = records.convert(records.Spec, records.plain(resolved), "The study")
    if found.source.startswith("file:"):
        files |= _beside(study.checkpoint["source"], found, base, files)
    if calibration is not None:
        _check_calibration(spec, calibration)
    return spec, files


# ---------------------------------------------------------------- fixed scales


@dataclass(frozen=True)
class _Calibration:
    """A recorded calibration: its run, spec, and the digest of its sizes."""

    run: str
    spec: records.Spec
    sha256: str


def _calibrated_arms(arms: Sequence[dict[str, Any]], archive: Archive | None) -> tuple[list[dict[str, Any]], _Calibration | None]:
    """The arms with ``run:<id>`` in place of the digest of that calibration, and the calibration; None where none is named."""
    named = {str(arm["scale_source"]) for arm in arms if arm.get("scale_source") is not None}
    if not named:
        return list(arms), None
    where = next(f"arms[{number}].scale_source" for number, arm in enumerate(arms) if arm.get("scale_source") is not None)
    wrong = sorted(name for name in named if not name.startswith(grid.NAMED))
    if wrong:
        expected = '"run:<id of a calibration run>" or "study:<name of one>"'
        raise sources.refuse(where, "names no recorded calibration.", expected=expected, found=wrong[0][:100])
    if len(named) > 1:
        raise sources.refuse(where, "is not the only one: a study has one calibration.", found=", ".join(sorted(named))[:300])
    if archive is None:
        raise sources.refuse(where, "names a run, and there is no archive to look for it in.", found=min(named)[:100])
    kind, _, name = min(named).partition(":")
    found = _calibration(archive, _newest(archive, name, where) if kind == "study" else name, where)
    return [{**arm, "scale_source": found.sha256} if arm.get("scale_source") is not None else arm for arm in arms], found


def _newest(archive: Archive, study: str, where: str) -> str:
    """The newest run of a study that is neither retracted nor superseded. Raises InputError where there is none."""
    for entry in reversed(archive.entries()):
        if entry.kind == "run" and archive.spec(archive.run(entry.record).spec).study == study and not archive.corrections(entry.record):
            return entry.record
    raise sources.refuse(
        where, "names a study without a recorded run.", found=study[:100], next=f"ledger run {study[:100]}, then again; or name another."
    )


def _calibration(archive: Archive, name: str, where: str) -> _Calibration:
    """A calibration run that scales can be made of. Raises InputError where it cannot."""
    again = "name another calibration run."
    identity = archive.resolve(name)
    run = archive.run(identity)
    spec = archive.spec(run.spec)
    what, said = captures.unusable(spec, run, archive.corrections(identity))
    if what:
        raise sources.refuse(where, f"names {what}.", found=f"{identity[:12]}: {said}"[:400], next=again)
    file = str(captures.sizes_of(run))
    flaw = captures.size_flaw(captures.read_sizes(captures.CALIBRATION, archive.store.read(file)), zero=False)
    if flaw:
        raise sources.refuse(where, "names a calibration that no scale can be made of.", found=flaw, next=again)
    return _Calibration(identity, spec, file)


def _check_calibration(spec: records.Spec, calibration: _Calibration) -> None:
    """Refuse the calibration of another checkpoint, of other weights of a seed, or one that saw what is evaluated. Raises InputError.

    Token numbers say what was seen where one dataset was read by one tokenisation: another is refused.
    """
    ours, theirs = (claims.checkpoint_id(each.checkpoint) for each in (spec, calibration.spec))
    if ours != theirs:
        raise sources.refuse(
            "scale_source",
            "names the calibration of another checkpoint.",
            expected=f"{spec.checkpoint.name} ({ours[:12]})",
            found=f"{calibration.spec.checkpoint.name} ({theirs[:12]})",
        )
    if spec.weights != calibration.spec.weights:
        raise sources.refuse(
            "scale_source",
            "names a calibration on another kind of device, where a seed gives other weights.",
            expected=f"one on {spec.device}",
            found=f"run {calibration.run[:12]} on {calibration.spec.device}",
            next="calibrate on this kind of device, and name that run.",
        )
    workload, seen = spec.workload, calibration.spec.text
    if workload is None or workload.dataset.sha256 != seen.dataset.sha256:
        return
    for key in ("bos", "split_special_tokens"):
        if getattr(workload, key) != getattr(seen, key):
            raise sources.refuse(
                f"workload.{key}",
                "is not the calibration's, so that token numbers do not say what it has seen.",
                expected=f"{str(getattr(seen, key)).lower()}, as in run {calibration.run[:12]}",
                found=str(getattr(workload, key)).lower(),
                next="read the dataset as the calibration did, or calibrate anew.",
            )
    for number, span in enumerate(workload.spans):
        for other, held in enumerate(seen.spans):
            if span.start < held.start + held.tokens and held.start < span.start + span.tokens:
                raise sources.refuse(
                    "workload",
                    "evaluates tokens that the calibration has seen.",
                    expected="documents that do not overlap those of the calibration",
                    found=f"document {number} (from token {span.start}) and document {other} of run {calibration.run[:12]} "
                    f"(from token {held.start})",
                    next="move the documents with workload.first.",
                )


def _scales(spec: records.Spec, archive: Archive | None) -> dict[str, bytes]:
    """The calibration's file for the frozen folder, where an arm has fixed scales."""
    names = {arm.scale_source for arm in spec.arms if arm.scale_source is not None}
    if not names or archive is None:
        return {}
    return {SCALES: archive.store.read(min(names))}


class _Named(records.Record, frozen=True, kw_only=True):
    name: records.Name


def _fields(table: FamilyTable) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.__struct_fields__}


def _beside(source: str, checkpoint: records.Checkpoint, base: Path, others: Mapping[str, Path]) -> dict[str, Path]:
    place = base / source.removeprefix("file:")
    files = {file.path: place / file.path if place.is_dir() else place for file in checkpoint.files}
    taken = sorted(files.keys() & {*others, STORED_INPUTS, SCALES})
    if taken:
        raise sources.refuse("checkpoint.source", "has a file of the dataset's name.", found=taken[0], next="rename one of them.")
    return files


# ---------------------------------------------------------------- the frozen folder


def freeze(name_or_path: str | Path, archive: Archive | None, out: Path, calibration: str | None = None) -> records.Spec:
    """Freeze a study into ``out``, which must be new or empty; the spec is appended to ``archive`` first.

    ``calibration`` stands for the study's own. Raises InputError and ProvenanceError; ``out`` is then as it was.
    """
    _refuse_full(out)
    table, base = load_study(name_or_path, calibration)
    spec, files = spec_of(table, base, archive)
    if archive is not None:
        archive.append(spec)
    _lay_out(spec, files, _scales(spec, archive), out)
    return spec


def thaw(
    archive: Archive,
    spec: str,
    out: Path,
    *,
    stored_inputs: bytes | None = None,
    search: Sequence[Path] = (),
) -> records.Spec:
    """Make the frozen folder of the recorded spec of digest ``spec`` again, in ``out``.

    Inputs are found by size and SHA-256 in the folders of ``search``, among the studies that ship, and under LEDGER_DATA.
    Where the workload stores its inputs, ``stored_inputs`` (the bytes of the recorded ``inputs.safetensors``) is laid out as
    ``inputs/inputs.safetensors``: in place of a dataset that nothing holds, or beside it where the spec pins its token ids, which
    the tokenizer of this host need not give. A checkpoint file that is not found is left to
    the runner, which has a cache of its own. Raises ProvenanceError.
    """
    _refuse_full(out)
    found = archive.spec(spec)
    dataset = found.workload.dataset if found.workload else None
    wanted = {dataset.file: (dataset.sha256, dataset.size)} if dataset else {}
    asked = tuple(found.task.files.values()) if found.task else ()
    wanted |= {each.file: (each.sha256, each.size) for each in asked}
    if found.checkpoint.source.startswith("file:"):
        wanted |= {file.path: (file.sha256, file.size) for file in found.checkpoint.files}
    folders = [*search, *_folders()]
    files = _by_digest(wanted, folders) if wanted else {}
    data = _scales(found, archive)
    if dataset is not None:
        kept = stored_inputs if found.text.inputs == "store" else None
        gone = dataset.file not in files
        if gone and kept is None:
            raise _nowhere(dataset, folders)
        if kept is not None and (gone or found.ids is not None):
            data[STORED_INPUTS] = kept
    for each in asked:
        if each.file not in files:
            raise _nowhere(each, folders)
    _lay_out(found, files, data, out)
    return found


def _nowhere(dataset: records.Dataset, folders: Sequence[Path]) -> ProvenanceError:
    return ProvenanceError(
        f"The dataset {dataset.name} ({dataset.file}) is nowhere to be found.",
        expected=f"sha256 {dataset.sha256}, {dataset.size} bytes",
        found="not in " + (", ".join(str(folder) for folder in folders) or "any folder"),
        next="set LEDGER_DATA to a folder that holds it.",
    )


def _folders() -> list[Path]:
    shared = os.environ.get("LEDGER_DATA", "")
    places = [packaged(), Path(shared) if shared else None]
    return [place for place in places if place is not None and place.is_dir()]


def _by_digest(wanted: Mapping[str, tuple[str, int]], folders: Sequence[Path]) -> dict[str, Path]:
    """For each name, a file with its SHA-256 and size somewhere under the folders, whatever it is called there."""
    found: dict[str, Path] = {}
    sizes = {size for _, size in wanted.values()}
    for folder in folders:
        for root, _, names in os.walk(folder):
            for path in (Path(root) / name for name in sorted(names)):
                try:
                    if not path.is_file() or path.stat().st_size not in sizes:
                        continue
                    held = digest.sha256_file(path)
                except OSError:
                    continue
                found |= {name: path for name, digest_and_size in wanted.items() if digest_and_size == held and name not in found}
            if found.keys() == wanted.keys():
                return found
    return found


def _refuse_full(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
        raise InputError(
            f"The folder {out} is in use.", expected="a new or an empty folder", found="something is there", next="choose another."
        )


def _lay_out(spec: records.Spec, files: Mapping[str, Path], data: Mapping[str, bytes], out: Path) -> None:
    """Write the folder beside ``out`` and rename it: whoever sees ``out`` with a spec sees all of it."""
    pinned = {file.path: file.sha256 for file in spec.checkpoint.files}
    if spec.workload is not None:
        pinned[spec.workload.dataset.file] = spec.workload.dataset.sha256
    if spec.task is not None:
        pinned |= {each.file: each.sha256 for each in spec.task.files.values()}
    staging: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = out.parent / f".{out.name}-{secrets.token_hex(8)}.unfinished"
        staging.mkdir()
        for name, path in files.items():
            _place(path, staging / "inputs" / name, pinned[name])
        for name, content in data.items():
            _write(staging / "inputs" / name, content)
        _write(staging / "spec.json", records.encode(spec))
        (staging / "inputs").mkdir(exist_ok=True)
        for folder in (staging / "inputs", staging):
            _sync(folder)
        staging.rename(out)
        staging = None
        _sync(out.parent)
    except OSError as error:
        raise InputError(f"The frozen folder {out} cannot be written.", found=str(error), next="choose another folder.") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _place(source: Path, target: Path, expected: str) -> None:
    """A copy of ``source`` with the pinned bytes: what has changed since it was hashed is refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("xb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
        write.flush()
        os.fsync(write.fileno())
    found, _ = digest.sha256_file(target)
    if found != expected:
        raise ProvenanceError(
            f"The file {source} changed while it was frozen.", expected=f"sha256 {expected}", found=f"sha256 {found}", next="freeze again."
        )


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
