"""A result folder -> one appended run.

A folder is checked whole before a byte of it is stored, every fault is named, and nothing in it is
changed. What each outcome asks for:

    completed             every document, arm and file of samples, cases or checks of the spec; no file that is not listed
    failed, interrupted   the listed files, whole; a half-written file that is not listed stays behind, and that is said
    running               the runner was killed; recorded as failed, otherwise as above. Of a file of lines that had grown since it was
                          listed, the listed beginning is kept

Recording a folder twice records it once: a run is found again by the digest of its ``result.json``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import ledger
from ledger import agreement, comparing, deriving, digest, provenance, records
from ledger.archive import Archive
from ledger.errors import InputError

RESULT = "result.json"
LINES = "application/x-ndjson"
KILLED = "the runner was killed"
NAMED = 20
"""How many faults of one folder a message lists; the rest is counted."""


@dataclass(frozen=True)
class ResultFolder:
    """A checked result folder: the bytes of ``result.json``, what they say, and where each evidence file lies.

    ``left_behind`` are the files that no list names, possible only where the run did not complete. ``outgrown`` are the files of
    lines of which a killed run lists a beginning.
    """

    path: Path
    data: bytes
    result: records.Result
    files: Mapping[str, Path]
    left_behind: tuple[str, ...]
    outgrown: frozenset[str] = frozenset()

    @property
    def outcome(self) -> str:
        """The outcome to record: a folder that still says ``running`` has failed."""
        return "failed" if self.result.outcome == "running" else self.result.outcome

    @property
    def reason(self) -> str:
        """Why the run did not complete, or the empty string."""
        if self.result.outcome == "running":
            return KILLED
        return self.result.reason


def record(archive: Archive, folder: Path, *, reproduces: str | None = None, checkout: Path | None = None) -> records.Entry:
    """Check ``folder`` against its frozen spec and append it as a run; the entry of the run.

    ``reproduces`` is the digest of a recorded run that this one repeats: their comparison is appended too. ``checkout`` is where
    the code that ran lies, if not where this code does.
    Raises InputError for an unusable folder, ArchiveError where the archive cannot be written.
    """
    found = read_folder(folder)
    spec = _frozen_spec(archive, found)
    _check_against(spec, found)
    original = archive.run(reproduces) if reproduces is not None else None
    if original is not None and original.spec != found.result.spec:
        raise InputError(
            "The result cannot reproduce that run: it was made from another spec.",
            expected=f"spec {original.spec}",
            found=f"spec {found.result.spec}",
            next="name a run of the same spec, or record the result without --reproduces.",
        )
    entry = _recorded(archive, digest.sha256(found.data))
    if entry is not None and entry.record == reproduces:
        raise InputError(
            "This result is that run, so it cannot reproduce it.",
            found=f"run {entry.record} was recorded from the same result.json",
            next="record it without --reproduces, or name the run that it repeats.",
        )
    entry = entry or _append(archive, spec, found, checkout)
    if reproduces is not None:
        archive.append(comparing.compare(archive, reproduces, entry.record))
    if found.left_behind:
        archive.notices.append(f"Not kept, because the run did not list them: {_listed(found.left_behind)}.")
    return entry


def _recorded(archive: Archive, result: str) -> records.Entry | None:
    run = archive.find_result(result)
    if run is None:
        return None
    return next(entry for entry in archive.entries() if entry.kind == "run" and entry.record == run)


def _append(archive: Archive, spec: records.Spec, found: ResultFolder, checkout: Path | None) -> records.Entry:
    result = found.result
    evidence = _read_evidence(found)
    harness, extra = provenance.harness(checkout or Path(ledger.__file__).parent, result.sources, archive.folder)
    derived = deriving.derive(spec, result, evidence, harness)
    _check_inputs(spec, found, derived.wrong_inputs)
    for name in extra:
        if name in found.files or name == RESULT:
            raise InputError("The result lists a file under a name that the recorder needs.", found=name, next="run the study again.")
    listed = (
        _described(RESULT, found.data, "application/json"),
        *result.evidence,
        *(_described(name, data, "text/plain") for name, data in sorted(extra.items())),
    )
    run = records.Run(
        format="kv-ledger/run/2" if derived.kernels else "kv-ledger/run/1",
        rules="1",
        spec=result.spec,
        result=digest.sha256(found.data),
        outcome=found.outcome,  # type: ignore[arg-type]
        reason=found.reason,
        harness=harness,
        evidence=listed,
        measurements=derived.measurements,
        decisions=derived.decisions,
        warnings=(*result.warnings, *derived.warnings),
        kernels=derived.kernels,
    )
    contents: dict[str, Path | bytes] = {digest.sha256(found.data): found.data}
    for item in result.evidence:
        path = found.files[item.name]
        contents[item.sha256] = _beginning(path, item.size) if item.name in found.outgrown else path
    contents.update({digest.sha256(data): data for data in extra.values()})
    return archive.append(run, contents)


def _read_evidence(found: ResultFolder) -> dict[str, bytes]:
    """What figures follow from, by name; the rest is streamed into the store. Raises InputError where a file is no longer as listed."""
    evidence: dict[str, bytes] = {}
    for item in found.result.evidence:
        if not agreement.is_sample(item.name):
            continue
        try:
            path = found.files[item.name]
            data = _beginning(path, item.size) if item.name in found.outgrown else path.read_bytes()
        except OSError as error:
            raise _changed(found, item, f"it cannot be read any more: {error.strerror}") from error
        # The folder was checked before: what is measured must be the bytes that are listed, not what stands there by now.
        if digest.sha256(data) != item.sha256:
            raise _changed(found, item, f"sha256 {digest.sha256(data)}")
        evidence[item.name] = data
    return evidence


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(size)


def _changed(found: ResultFolder, item: records.Evidence, instead: str) -> InputError:
    return InputError(
        f"{item.name} changed while the result folder {found.path} was being recorded.",
        expected=f"sha256 {item.sha256}, as listed",
        found=instead,
        next="record the folder again when nothing writes to it; nothing was recorded.",
    )


def _check_inputs(spec: records.Spec, found: ResultFolder, wrong: tuple[str, ...]) -> None:
    """Refuse token ids that are not those of the documents, or that the spec does not keep. Raises InputError."""
    fed = "the ids that were fed to the model"
    if wrong:
        raise InputError(
            f"The token ids kept in {found.path} are not those of its documents.",
            expected=fed if spec.workload is None else f'{fed}, where the spec says inputs = "store"; it says "{spec.text.inputs}"',
            found=_listed(wrong, "\n       "),
            next="run the frozen folder again; nothing was recorded or changed.",
        )


def _described(name: str, data: bytes, media_type: str) -> records.Evidence:
    return records.Evidence(name=name, sha256=digest.sha256(data), size=len(data), media_type=media_type)


def _frozen_spec(archive: Archive, found: ResultFolder) -> records.Spec:
    wanted = found.result.spec
    for entry in archive.entries():
        if entry.kind == "spec" and entry.record == wanted:
            return archive.spec(wanted)
    raise InputError(
        "The result was made from a spec that this archive did not freeze.",
        expected="a spec that stands in this archive's log since before the run",
        found=f"spec {wanted} in {found.path / RESULT}",
        next="choose the archive that froze it (--archive DIR), or freeze it here with `ledger freeze STUDY -o DIR` and run DIR again.",
    )


# ---------------------------------------------------------------- the folder on its own


def read_folder(folder: Path) -> ResultFolder:
    """Read and check a result folder on its own. Raises InputError that names every fault; changes nothing."""
    if not folder.is_dir():
        raise InputError(
            "There is no result folder here.",
            expected=f"a folder with {RESULT}, written by `python -m runners DIR OUT`",
            found=f"{folder} " + ("is no folder" if os.path.lexists(folder) else "does not exist"),
            next="name the OUT folder of a run.",
        )
    present, faults = _walk(folder)
    if RESULT not in present:
        raise _refused(folder, faults or [f"missing: {RESULT}"])
    data = _read_result(folder / RESULT)
    result = _parse_result(data, folder / RESULT)
    names = [item.name for item in result.evidence]
    faults += [f"listed twice: {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    if RESULT in names:
        faults.append(f"listed as its own evidence: {RESULT}")
    extra = sorted(present - set(names) - {RESULT})
    missing: dict[str, str] = {}
    outgrown: list[records.Evidence] = []
    for item in result.evidence:
        if item.name == RESULT:
            continue
        if item.name not in present:
            missing[item.name] = item.sha256
            continue
        if result.outcome == "running" and item.media_type == LINES and (folder / item.name).lstat().st_size > item.size:
            outgrown.append(item)
        faults += _compare(folder / item.name, item, item in outgrown)
    unlisted = list(extra)
    for name, wanted in sorted(missing.items()):
        moved = next((other for other in unlisted if digest.sha256_file(folder / other)[0] == wanted), None)
        if moved is None:
            faults.append(f"missing: {name}")
        else:
            unlisted.remove(moved)
            faults.append(f"renamed: {name} is here as {moved}")
    if result.outcome == "completed":
        faults += [f"extra: {name} is listed nowhere" for name in unlisted]
        unlisted = []
    if faults:
        raise _refused(folder, faults)
    return ResultFolder(
        path=folder,
        data=data,
        result=result,
        files={item.name: folder / item.name for item in result.evidence},
        left_behind=(*unlisted, *(f"{item.name} behind its first {item.size} bytes" for item in outgrown)),
        outgrown=frozenset(item.name for item in outgrown),
    )


def _refused(folder: Path, faults: list[str]) -> InputError:
    return InputError(
        f"The result folder {folder} is not what its {RESULT} says.",
        expected="every listed file with its digest and size, regular files only, and nothing else",
        found=_listed(faults, "\n       "),
        next="copy the folder again from where it was made, or run again; nothing was recorded or changed.",
    )


def _listed(items: list[str] | tuple[str, ...], joint: str = ", ") -> str:
    shown = [_shown(item) for item in items[:NAMED]]
    if len(items) > NAMED:
        shown.append(f"and {len(items) - NAMED} more")
    return joint.join(shown)


def _shown(text: str) -> str:
    """Text that a terminal may print: control characters and lone surrogates as escapes, at most 300 characters."""
    cut = text if len(text) <= 300 else text[:300] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in cut)


def _walk(folder: Path) -> tuple[set[str], list[str]]:
    """Names of the regular files under ``folder``, with ``/`` between folders, and what else lies there as faults."""
    present: set[str] = set()
    faults: list[str] = []
    for name, entry in _entries(folder, ""):
        if not _is_unicode(name):
            faults.append(f"a file name is not valid UTF-8: {os.fsencode(name)!r}")
        elif entry.is_symlink():
            faults.append(f"a symbolic link, not a file: {name}")
        elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            present.add(name)
        else:
            faults.append(f"neither a file nor a folder: {name}")
    return present, faults


def _entries(folder: Path, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda item: item.name):
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path), name + "/")
            else:
                yield name, entry


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _compare(path: Path, item: records.Evidence, outgrown: bool) -> list[str]:
    size = path.lstat().st_size
    if size < item.size:
        return [f"truncated: {item.name} has {size} of {item.size} bytes"]
    if size > item.size and not outgrown:
        return [f"too long: {item.name} has {size} bytes, listed with {item.size}"]
    found = digest.sha256(_beginning(path, item.size)) if outgrown else digest.sha256_file(path)[0]
    if found != item.sha256:
        return [f"changed: {item.name} has sha256 {found}, listed with {item.sha256}"]
    return []


# ---------------------------------------------------------------- result.json


def _read_result(path: Path) -> bytes:
    size = path.lstat().st_size
    if size > digest.MAX_JSON_BYTES:
        raise InputError(f"{path} is too large.", expected=f"at most {digest.MAX_JSON_BYTES} bytes", found=f"{size} bytes")
    return path.read_bytes()


def _parse_result(data: bytes, path: Path) -> records.Result:
    kept = "run again, or get the file from where it was made; the folder was left as it is."
    try:
        value = digest.parse(data)
    except InputError as error:
        brace = data.find(b"{")
        if not data.strip():
            found = "an empty file"
        elif brace > 0 and data[:brace].strip():
            first = data[:brace].strip().splitlines()[0].decode("utf-8", "replace")
            found = f"{_shown(first[:120])!r} before the JSON"
        else:
            found = error.found or error.what
        expected = error.expected or "one JSON object in canonical form (RFC 8785), and nothing before or after it"
        raise InputError(f"{path} cannot be read as a result: {error.what}", expected=expected, found=_shown(found), next=kept) from error
    _refuse_escapes(value, path)
    _refuse_short_digests(value, path)
    try:
        return records.decode(records.Result, data, str(path))
    except InputError as error:
        raise InputError(error.what, expected=error.expected, found=_shown(error.found), next=kept) from error


def decoded(name: str) -> str:
    """``name`` with every layer of percent encoding removed."""
    for _ in range(8):
        plain = unquote(name, errors="surrogateescape")
        if plain == name:
            break
        name = plain
    return name


def escapes(name: str) -> bool:
    """True where a name, decoded, would leave its folder or confuse a file system."""
    plain = decoded(name).replace("\\", "/")
    return plain.startswith("/") or ".." in plain.split("/") or any(ord(char) < 32 for char in plain) or ":" in plain.split("/")[0]


def _refuse_escapes(value: Any, path: Path) -> None:
    listed = value.get("evidence") if isinstance(value, dict) else None
    names = [item.get("name") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    bad = [name for name in names if isinstance(name, str) and escapes(name)]
    if bad:
        raise InputError(
            f"{path} lists a file that would lie outside the result folder.",
            expected="relative names of letters, digits, dots, hyphens and underscores, with no part of ..",
            found=_listed([repr(name)[:200] for name in bad]),
            next="do not trust this folder; get it again from where it was made. Nothing was recorded or changed.",
        )


def _refuse_short_digests(value: Any, path: Path) -> None:
    """Say plainly that an abbreviated identifier is none, before a pattern says it obscurely."""
    if not isinstance(value, dict):
        return
    named = [("spec", value.get("spec"))]
    sources = value.get("sources")
    if isinstance(sources, dict):
        named += [(f"sources of {key}", item) for key, item in sources.items()]
    for where, text in named:
        if isinstance(text, str) and 4 <= len(text) < 64 and all(char in "0123456789abcdef" for char in text.lower()):
            raise InputError(
                f"{path} names its {_shown(where)} by a short identifier.",
                expected="all 64 lower-case hexadecimal digits of a SHA-256",
                found=f"{text!r}, {len(text)} digits",
                next="write the whole digest; an abbreviation or a commit id pins nothing here. The folder was left as it is.",
            )


# ---------------------------------------------------------------- the folder against its spec


def _check_against(spec: records.Spec, found: ResultFolder) -> None:
    """Refuse a result that is not of ``spec``: documents, arms and sample files. Raises InputError."""
    faults = list(agreement.result_faults(spec, found.result))
    if faults:
        arms = ", ".join(arm.name for arm in spec.arms)
        raise InputError(
            f"The result in {found.path} is not of its spec {found.result.spec}.",
            expected=f"what study {spec.study!r} froze: {len(spec.documents)} documents, arms {arms}",
            found=_listed(faults, "\n       "),
            next="run the frozen folder again; nothing was recorded or changed.",
        )
