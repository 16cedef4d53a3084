"""Every class of byte of an archive is changed in turn, and the verification names it; unchanged, it is clean."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import load, save

from ledger import database as databases
from ledger import deriving, digest, gates, measures, recording, records
from ledger.archive import Archive
from ledger.errors import ArchiveError, InputError
from ledger.log import Head, leaf_hash
from ledger.store import FolderStore
from ledger.tables import TABLES, Number
from ledger.verify import Report, verify
from tests import factories
from tests.conftest import append_outside, append_performance
from tests.ledger import test_captures
from tests.ledger.test_captures import calibration

SCALES = calibration()
FIXED = records.Arm(
    name="k16v8-fixed",
    role="candidate",
    implementation="reference",
    compute="fp32",
    keys="bf16",
    values="fp8_e4m3",
    scales="fixed",
    granularity="head",
    scale_source=digest.sha256(SCALES),
)


def frozen_spec(**changes: Any) -> records.Spec:
    """Small, but with everything that a spec can have."""
    workload = factories.workload(2, 12, inputs="store", greedy=records.Greedy(documents=1, prompt_tokens=4, new_tokens=3))
    families = tuple(msgspec.structs.replace(family, resamples=99) for family in factories.FAMILIES)
    fields = {"workload": workload, "families": families, "arms": (*factories.ARMS, FIXED), "tolerances": {"loss_mean": 0.001}}
    return factories.spec(**{**fields, **changes})


def found_files(frozen: records.Spec, seed: int) -> tuple[dict[str, bytes], tuple[records.Document, ...]]:
    """All evidence of a run but ``result.json``, and its documents."""
    files = factories.samples(frozen, seed, {FIXED.name: (0.03, 5e-4)})
    ids = [np.arange(span.start, span.start + span.tokens, dtype=np.int32) for span in frozen.workload.spans]
    files["inputs.safetensors"] = save({f"{at:04}": values for at, values in enumerate(ids)})
    lines = [{"arm": arm.name, "document": 0, "prompt_tokens": 4, "ids": [1, 2, 3]} for arm in frozen.arms]
    files["greedy.jsonl"] = b"".join(digest.canonical(line) + b"\n" for line in lines)
    return files, tuple(records.Document(tokens=len(values), sha256=digest.sha256(values.tobytes())) for values in ids)


def add_run(archive: Archive, frozen: records.Spec, seed: int, result: dict[str, Any] | None = None, **changes: Any) -> str:
    """Append a run as the recorder would; its digest. ``changes`` go to the run after all was derived."""
    files, documents = found_files(frozen, seed)
    scales = records.Backing(bytes=64, dtype="fp32", kind="scales", layers=(0,), holds="value_scales", address=2**60 + 1, tokens=12)
    arms = tuple(factories.arm_result(arm, 12) for arm in frozen.arms)
    arms = (*arms[:-1], msgspec.structs.replace(arms[-1], backings=(*arms[-1].backings, scales)))
    found = factories.result(frozen, files, **{"documents": documents, "arms": arms, "warnings": ("a warning",), **(result or {})})
    samples = measures.read_samples(frozen, files)
    harness = factories.harness()
    outcome = "failed" if found.outcome == "running" else found.outcome
    run = factories.run(
        frozen,
        found,
        outcome=outcome,
        measurements=measures.measure(frozen, found, samples),
        decisions=gates.decide(frozen, found, samples, harness),
        warnings=(*found.warnings, *measures.suspicions(frozen, samples)),
    )
    run = msgspec.structs.replace(run, **changes)
    evidence = {item.sha256: files[item.name] for item in found.evidence}
    return archive.append(run, {records.identify(found): records.encode(found), **evidence}).record


def calibrate(
    archive: Archive,
    result: dict[str, Any] | None = None,
    lines: dict[tuple[str, int], dict[str, Any] | None] | None = None,
    sizes: dict[str, Any] | None = None,
    **changes: Any,
) -> str:
    """Append a calibration whose sizes are :data:`SCALES`, and the run that measured them; the run's digest.

    ``changes`` go to the spec, ``sizes`` to its file, ``lines`` and ``result`` to what was captured and what the runner says.
    """
    frozen = test_captures.spec("calibration", **changes)
    files = test_captures.files(frozen, lines, **(sizes or {}))
    found = factories.result(frozen, files, **(result or {}))
    derived = deriving.derive(frozen, found, files, factories.harness())
    archive.append(frozen)
    run = factories.run(
        frozen,
        found,
        outcome=found.outcome,
        reason=found.reason,
        measurements=derived.measurements,
        decisions=derived.decisions,
        warnings=(*found.warnings, *derived.warnings),
    )
    return archive.append(run, {digest.sha256(data): data for data in (records.encode(found), *files.values())}).record


def fill(archive: Archive) -> list[str]:
    """Put at least one row into every table but those of performance; the runs."""
    frozen = frozen_spec()
    calibrate(archive)
    archive.append(frozen)
    runs = [add_run(archive, frozen, seed) for seed in range(3)]
    archive.append(
        records.Reproduction(
            format="kv-ledger/reproduction/1",
            original=runs[0],
            reproduced=runs[1],
            verdict="outside",
            reason="losses differ",
            same_hardware=True,
            harness="recorded",
            differences=(records.Difference(name="loss_mean", original=1.0, reproduced=2.0, tolerance=0.001, within=False),),
            divergence=records.Divergence(
                evidence="samples/0000.safetensors", series="native.loss", position=0, original=1.0, reproduced=2.0
            ),
        )
    )
    archive.append(records.Supersede(format="kv-ledger/supersede/1", run=runs[0], by=runs[1], author="the maintainers", reason="longer"))
    archive.append(records.Retract(format="kv-ledger/retract/1", run=runs[2], author="the maintainers", reason="wrong text"))
    return runs


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive on SQLite that nobody changes."""
    folder = tmp_path_factory.mktemp("verify") / "archive"
    with Archive.create(folder) as archive:
        fill(archive)
    return folder


@pytest.fixture
def copy(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def said(report: Report) -> str:
    return json.dumps(report.document()["findings"])


def flip(path: Path, at: int) -> None:
    """Change one byte at equal size and time."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def objects(folder: Path) -> list[str]:
    return list(FolderStore(folder).digests())


def path_of(folder: Path, name: str) -> Path:
    return FolderStore(folder).object_path(name)


# ---------------------------------------------------------------- clean


def test_an_unchanged_archive_is_clean_and_says_what_was_checked(copy: Path) -> None:
    before = sorted(path for path in copy.rglob("*") if path.name not in ("ledger.db-wal", "ledger.db-shm"))
    report = verify(copy)
    assert report.findings == []
    assert report.notes == []
    names = objects(copy)
    document = report.document()
    assert document["ok"] is True
    assert document["checked"]["entries"] == 9
    assert document["checked"]["objects"] == len(names)
    assert document["checked"]["bytes"] == sum(path_of(copy, name).stat().st_size for name in names)
    assert document["checked"]["measurements"] > 100
    assert sorted(path for path in copy.rglob("*") if path.name not in ("ledger.db-wal", "ledger.db-shm")) == before


def test_an_empty_archive_is_clean(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    assert verify(archive.folder).document() == {
        "ok": True,
        "checked": {"entries": 0, "objects": 0, "bytes": 0, "measurements": 0},
        "signed": None,
        "findings": [],
        "notes": [],
        "head": {"size": 0, "root": "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="},  # SHA-256 of nothing
    }


def test_an_archive_without_a_database_is_clean_and_none_is_built(copy: Path) -> None:
    (copy / "ledger.db").unlink()
    report = verify(copy)
    assert report.ok
    assert report.notes == ["There is no database: it is built at first use."]
    assert not (copy / "ledger.db").exists()


def test_an_archive_that_is_written_to_meanwhile_is_clean(copy: Path) -> None:
    with Archive.open(copy, write=True) as archive:
        archive.append(frozen_spec(title="Another"))
        assert verify(copy).ok


def test_a_folder_that_is_no_archive_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="is no archive"):
        verify(tmp_path)
    with pytest.raises(ArchiveError, match="is no archive"):
        verify(tmp_path / "nowhere")


def test_an_incomplete_run_with_its_partial_evidence_is_clean(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    frozen = frozen_spec()
    calibrate(archive)
    archive.append(frozen)
    _, documents = found_files(frozen, 0)
    add_run(archive, frozen, 0, result={"outcome": "running", "documents": documents[:1]})
    assert verify(archive.folder).findings == []


def test_samples_that_are_not_finite_are_clean_when_recorded_as_such(
    make_archive: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = factories.samples

    def broken(frozen: records.Spec, seed: int = 0, noise: Any = None) -> dict[str, bytes]:
        files = made(frozen, seed, noise)
        tensors = load(files["samples/0001.safetensors"])
        tensors["k16v8.loss"][3], tensors["k8v8.kl.k16v16"][2] = np.nan, np.inf
        return {**files, "samples/0001.safetensors": save(tensors)}

    monkeypatch.setattr(factories, "samples", broken)
    archive = make_archive()
    frozen = frozen_spec()
    calibrate(archive)
    archive.append(frozen)
    add_run(archive, frozen, 0)
    assert verify(archive.folder).findings == []


# ---------------------------------------------------------------- objects and files


def test_one_byte_flipped_in_any_object_is_found_by_name(copy: Path) -> None:  # cases 14 and 15
    names = objects(copy)
    # records; scales, and the captures and result of their calibration; results and samples; greedy and inputs, equal in all runs
    assert len(names) == 9 + 3 + 3 * 3 + 2
    for number, name in enumerate(names):
        path = path_of(copy, name)
        data = path.read_bytes()
        flip(path, number * 7919 % len(data))
        report = verify(copy)
        assert [finding.object for finding in report.findings if finding.kind == "object_changed"] == [name]
        assert all(finding.next for finding in report.findings)
        path.write_bytes(data)
    assert verify(copy).ok


def test_an_object_that_a_stopped_append_announced_is_noted_and_its_damage_found(copy: Path) -> None:
    store = FolderStore(copy)
    name = digest.sha256(b"left over")
    store.announce([name])
    store.put(b"left over")
    report = verify(copy)
    assert report.ok
    assert ["An append that was stopped left objects" in note for note in report.notes] == [True]
    flip(path_of(copy, name), 0)
    assert [(finding.kind, finding.object) for finding in verify(copy).findings] == [("object_changed", name)]


def test_a_missing_object_is_found_by_name_and_owner(copy: Path) -> None:
    for name in objects(copy):
        path = path_of(copy, name)
        data = path.read_bytes()
        path.unlink()
        missing = [finding for finding in verify(copy).findings if finding.kind == "object_missing"]
        assert [finding.object for finding in missing] == [name]
        assert "it is " in missing[0].detail
        path.write_bytes(data)


def test_damaged_evidence_names_its_run_and_file(copy: Path) -> None:
    with Archive.open(copy) as archive:
        runs = [entry.record for entry in archive.entries() if entry.kind == "run"]
        item = next(item for item in archive.run(runs[1]).evidence if item.name == "samples/0001.safetensors")
    flip(path_of(copy, item.sha256), 500)
    (finding,) = verify(copy).findings
    assert finding.kind == "object_changed"
    assert f"samples/0001.safetensors of run {runs[1]}" in finding.detail


def test_an_object_that_no_record_names_is_stray(copy: Path) -> None:
    name = FolderStore(copy).put(b"left over")
    assert [(finding.kind, finding.object) for finding in verify(copy).findings] == [("stray_object", name)]


@pytest.mark.parametrize(
    "name", ["note.txt", "objects/README", "objects/ab/short", "log/000000000.json.bak", "log/7.json", "extra/deep/file", ".hidden"]
)
def test_a_file_that_does_not_belong_is_found_by_name(copy: Path, name: str) -> None:
    path = copy / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"hello")
    assert [(finding.kind, finding.object) for finding in verify(copy).findings] == [("stray_file", name)]


def test_a_link_in_place_of_an_object_is_found(copy: Path, tmp_path: Path) -> None:
    name = objects(copy)[0]
    moved = tmp_path / "elsewhere"
    path_of(copy, name).rename(moved)
    path_of(copy, name).symlink_to(moved)
    assert name in said(verify(copy))
    assert not verify(copy).ok


# ---------------------------------------------------------------- the log


def test_any_byte_flipped_in_any_entry_is_found_by_name(copy: Path) -> None:
    for sequence in range(9):
        path = copy / "log" / f"{sequence:09}.json"
        data = path.read_bytes()
        for at in range(sequence, len(data), 41):
            flip(path, at)
            report = verify(copy)
            assert "entry" in kinds(report)
            assert f"log/{sequence:09}.json" in [finding.object for finding in report.findings]
            path.write_bytes(data)
    assert verify(copy).ok


@pytest.mark.parametrize("sequence", [0, 3, 6])
def test_a_missing_entry_is_found_by_name(copy: Path, sequence: int) -> None:
    (copy / "log" / f"{sequence:09}.json").unlink()
    assert ("entry_missing", f"log/{sequence:09}.json") in [(finding.kind, finding.object) for finding in verify(copy).findings]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_each_line_of_the_head_counts(copy: Path, line: int) -> None:
    path = copy / "log" / "head"
    lines = path.read_bytes().split(b"\n")
    lines[line] = {0: b"another-ledger", 1: b"6", 2: lines[2][:-3] + b"AA="}[line]
    path.write_bytes(b"\n".join(lines))
    assert "log/head" in [finding.object for finding in verify(copy).findings]


@pytest.mark.parametrize("data", [b"", b"kv-evidence-ledger\n", b"\xff\xfe"])
def test_an_unreadable_head_is_a_finding(copy: Path, data: bytes) -> None:
    (copy / "log" / "head").write_bytes(data)
    assert [(finding.kind, finding.object) for finding in verify(copy).findings] == [("head", "log/head")]


def test_a_missing_head_is_a_finding(copy: Path) -> None:
    (copy / "log" / "head").unlink()
    assert [(finding.kind, finding.object) for finding in verify(copy).findings] == [("head", "log/head")]


def test_a_head_that_counts_billions_is_a_finding_soon(copy: Path) -> None:
    path = copy / "log" / "head"
    path.write_bytes(path.read_bytes().replace(b"\n9\n", b"\n900000000\n"))
    assert ("entry_missing", "log/000000009.json") in [(finding.kind, finding.object) for finding in verify(copy).findings]


def turn_back(store: FolderStore) -> records.Entry:
    """Put the head one entry back, as if the writer had been killed before it replaced it; the entry that is beyond it."""
    data = list(store.entries(store.read_head().size))
    store.write_head(Head.over([leaf_hash(item) for item in data[:-1]]))
    return records.decode(records.Entry, data[-1], "the entry")


def test_an_announced_entry_beyond_the_head_is_noted_until_a_writer_completes_it(copy: Path) -> None:
    store = FolderStore(copy)
    store.announce([turn_back(store).record])
    report = verify(copy)
    assert report.findings == []
    assert report.notes == ["An append was cut off before it could replace the head (log/000000008.json); the next writer completes it."]
    (copy / "ledger.db").unlink()
    assert verify(copy).ok  # with and without its rows
    with Archive.open(copy, write=True):
        pass
    assert (verify(copy).findings, verify(copy).notes) == ([], [])


@pytest.mark.parametrize("fault", ["unreadable", "another number", "another record", "no object"])
def test_an_entry_beyond_the_head_that_no_append_can_have_left_is_a_finding(copy: Path, fault: str) -> None:
    store = FolderStore(copy)
    entry = turn_back(store)
    store.announce([entry.record, "0" * 64])
    path = copy / "log" / "000000008.json"
    if fault == "unreadable":
        path.write_bytes(b"{}")
    elif fault == "another number":
        path.write_bytes(records.encode(msgspec.structs.replace(entry, sequence=9)))
    elif fault == "another record":
        path.write_bytes(records.encode(msgspec.structs.replace(entry, record=objects(copy)[0])))
    else:
        path.write_bytes(records.encode(msgspec.structs.replace(entry, record="0" * 64)))
    assert ("unfinished_append", "log/000000008.json") in [(finding.kind, finding.object) for finding in verify(copy).findings]


def test_an_entry_beyond_the_head_that_no_append_announced_is_found_and_no_writer_adopts_it(copy: Path) -> None:
    turn_back(FolderStore(copy))
    with pytest.raises(ArchiveError, match="no append announced its record"):
        Archive.open(copy, write=True)
    with Archive.at(copy) as archive, pytest.raises(ArchiveError, match="no append announced its record"):
        archive.rebuild()
    (finding,) = verify(copy).findings
    assert (finding.kind, finding.object) == ("unfinished_append", "log/000000008.json")


def test_a_database_of_foreign_tables_in_the_place_of_ours_is_found(copy: Path) -> None:
    (copy / "ledger.db").unlink()
    with closing(sqlite3.connect(copy / "ledger.db")) as connection:
        connection.execute("CREATE TABLE foo (a)")
    report = verify(copy)
    assert [(finding.kind, finding.object) for finding in report.findings] == [("table_extra", "foo")]


def test_a_head_whose_line_endings_were_changed_says_how_that_comes(copy: Path) -> None:
    head = copy / "log/head"
    head.write_bytes(head.read_bytes().replace(b"\n", b"\r\n"))
    finding = verify(copy).findings[0]
    assert (finding.kind, "gitattributes" in finding.detail) == ("head", True)


def test_entries_far_beyond_the_head_do_not_belong(copy: Path) -> None:
    store = FolderStore(copy)
    (copy / "log" / "000000011.json").write_bytes(store.read_entry(8))
    assert [(finding.kind, finding.object) for finding in verify(copy).findings] == [("entry_extra", "log/000000011.json")]


# ---------------------------------------------------------------- records that lie


def _without_a_run(archive: Archive) -> None:
    archive.append(frozen_spec(), {FIXED.scale_source: SCALES})


def _before_its_run(archive: Archive) -> None:
    _without_a_run(archive)
    calibrate(archive)


def _of_another_checkpoint(archive: Archive) -> None:
    calibrate(archive, checkpoint=factories.checkpoint(alteration=records.RescaledKeys(pairs=(0,), exponent=6)))
    archive.append(frozen_spec())


def _retracted_before(archive: Archive) -> None:
    run = calibrate(archive)
    archive.append(records.Retract(format="kv-ledger/retract/1", run=run, author="the maintainers", reason="wrong text"))
    archive.append(frozen_spec())


def _superseded_before(archive: Archive) -> None:
    run, newer = calibrate(archive), calibrate(archive, study="newer", sizes={"values_amax_0": [5.0, 5.0]})
    signed = {"author": "the maintainers", "reason": "wrong text"}
    archive.append(records.Supersede(format="kv-ledger/supersede/1", run=run, by=newer, **signed))
    archive.append(frozen_spec())


def _interrupted(archive: Archive) -> None:
    calibrate(archive, result={"outcome": "interrupted", "reason": "stopped"})
    archive.append(frozen_spec())


def _not_measured(archive: Archive) -> None:
    calibrate(archive, lines={("native", 0): {"nan": [0, 0, 0, 1, 2]}})
    archive.append(frozen_spec())


def _of_another_scope(archive: Archive) -> None:
    """The same bytes, as evidence of a run that is no calibration."""
    frozen = msgspec.structs.replace(test_captures.spec(), capture=records.Capture(new_tokens=5, budget_bytes=1 << 20, suppressed=(7, 9)))
    files = {**test_captures.files(frozen), "calibration.safetensors": SCALES}
    found = factories.result(frozen, files)
    derived = deriving.derive(frozen, found, files, factories.harness())
    archive.append(frozen)
    run = factories.run(frozen, found, measurements=derived.measurements, decisions=derived.decisions, warnings=derived.warnings)
    archive.append(run, {digest.sha256(data): data for data in (records.encode(found), *files.values())})
    archive.append(frozen_spec())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (_without_a_run, "which is no calibration that an earlier run recorded"),
        (_before_its_run, "which is no calibration that an earlier run recorded"),
        (_of_another_scope, "which is no calibration that an earlier run recorded"),
        (_of_another_checkpoint, "which is the calibration of another checkpoint"),
        (_retracted_before, "which is of a run that is retracted: wrong text"),
        (_superseded_before, "which is of a run that is superseded by"),
        (_interrupted, "which is of a calibration that measured nothing usable: invalid: the run was interrupted: stopped"),
        (_not_measured, "which is of a calibration that measured nothing usable: invalid: the captures fail"),
    ],
)
def test_scales_of_no_calibration_of_this_checkpoint_recorded_before_are_found(
    make_archive: Callable[..., Archive], made: Callable[[Archive], None], said: str
) -> None:
    archive = make_archive()
    made(archive)
    (finding,) = verify(archive.folder).findings
    assert (finding.kind, finding.object) == ("reference", records.identify(frozen_spec()))
    assert finding.detail.startswith(f"arm k16v8-fixed takes its scales from {FIXED.scale_source}, {said}")


def test_of_two_calibrations_of_the_same_sizes_one_that_stands_is_enough(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    _retracted_before(archive)
    calibrate(archive, study="again")
    archive.append(frozen_spec(study="later"))
    assert [finding.object for finding in verify(archive.folder).findings] == [records.identify(frozen_spec())]


def test_scales_that_freezing_would_not_make_are_found(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    sizes = {"values_amax_0": [0.0, 1.0], "values_p9999_0": [0.0, 0.5], "values_p999_0": [0.0, 0.25]}
    calibrate(archive, sizes=sizes)
    flawed = digest.sha256(calibration(**sizes))
    archive.append(frozen_spec(arms=(*factories.ARMS, msgspec.structs.replace(FIXED, scale_source=flawed))))
    (finding,) = verify(archive.folder).findings
    assert finding.detail.endswith("of a calibration that no scale can be made of: values.amax/0 of head 0 is 0")


def test_seeded_weights_of_a_gpu_take_no_scales_of_a_cpu(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    seeded = records.Checkpoint(name="Tiny", source="random:qwen3#7", license="CC0-1.0", config={"hidden_size": 64}, seed=7)
    calibrate(archive, checkpoint=seeded)
    archive.append(frozen_spec(checkpoint=seeded, format="kv-ledger/spec/2"))
    other = frozen_spec(checkpoint=seeded, format="kv-ledger/spec/2", device="cuda")
    archive.append(other)
    (finding,) = verify(archive.folder).findings
    assert finding.object == records.identify(other) and "calibration of another checkpoint" in finding.detail


def test_scales_of_a_calibration_that_was_retracted_later_stand(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    run = calibrate(archive)
    archive.append(frozen_spec())
    archive.append(records.Retract(format="kv-ledger/retract/1", run=run, author="the maintainers", reason="wrong text"))
    assert verify(archive.folder).findings == []


def forged(make: Callable[..., Archive], result: dict[str, Any] | None = None, **changes: Any) -> tuple[str, Report]:
    """An archive whose only run was recorded with something changed; the run and the report."""
    archive = make()
    frozen = frozen_spec()
    calibrate(archive)
    archive.append(frozen)
    run = add_run(archive, frozen, 0, result, **changes)
    return run, verify(archive.folder)


def honest(make: Callable[..., Archive]) -> records.Run:
    archive = make("honest")
    frozen = frozen_spec()
    calibrate(archive)
    archive.append(frozen)
    return archive.run(add_run(archive, frozen, 0))


@pytest.mark.parametrize("by", [1e-6, float("nan")])
def test_a_measurement_that_does_not_follow_from_the_samples_is_found(make_archive: Callable[..., Archive], by: float) -> None:
    measured = honest(make_archive).measurements
    changed = msgspec.structs.replace(measured[0], value=measured[0].value + by)
    run, report = forged(make_archive, measurements=(changed, *measured[1:]))
    (finding,) = report.findings
    assert (finding.kind, finding.object) == ("measurement", run)
    assert "loss_mean of native: value is recorded as" in finding.detail


def test_the_last_bits_of_a_float_may_differ_and_those_of_a_count_may_not(make_archive: Callable[..., Archive]) -> None:
    measured = honest(make_archive).measurements
    near = [msgspec.structs.replace(m, value=m.value * (1 + 1e-12)) if m.name == "loss_mean" else m for m in measured]
    assert forged(lambda: make_archive("near"), measurements=tuple(near))[1].ok
    count = [msgspec.structs.replace(m, value=m.value + 1) if (m.arm, m.name) == ("native", "cache_bytes") else m for m in measured]
    _, report = forged(lambda: make_archive("count"), measurements=tuple(count))
    assert ["cache_bytes of native" in finding.detail for finding in report.findings] == [True]


def test_measurements_left_out_or_invented_are_found(make_archive: Callable[..., Archive]) -> None:
    measured = honest(make_archive).measurements
    invented = msgspec.structs.replace(measured[0], name="better_than_all")
    _, report = forged(make_archive, measurements=(*measured[1:], invented))
    assert {finding.detail for finding in report.findings} == {
        "better_than_all of native is recorded, but does not follow from the samples",
        "loss_mean of native follows from the samples, but is not recorded",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"status": "established"},
        {"reason": "all is well"},
        {"p_bound": 0.001},
        {"gates": ()},
    ],
)
def test_a_decision_that_does_not_follow_from_the_samples_is_found(make_archive: Callable[..., Archive], change: dict[str, Any]) -> None:
    decisions = honest(make_archive).decisions
    assert decisions[3].status == "not established"
    changed = msgspec.structs.replace(decisions[3], **change)
    run, report = forged(make_archive, decisions=(*decisions[:3], changed, *decisions[4:]))
    (finding,) = report.findings
    assert (finding.kind, finding.object) == ("decision", run)
    assert f"k8v8 against k16v16 (loss): {next(iter(change))} is recorded as" in finding.detail


def test_a_decision_left_out_is_found(make_archive: Callable[..., Archive]) -> None:
    _, report = forged(make_archive, decisions=honest(make_archive).decisions[1:])
    assert [finding.detail for finding in report.findings] == ["own-fp32 against native (identity) is not recorded"]


def test_a_warning_left_out_is_found(make_archive: Callable[..., Archive]) -> None:
    _, report = forged(make_archive, warnings=())
    assert [(finding.kind, finding.detail) for finding in report.findings] == [("warning", "the run does not keep this warning: a warning")]


def _kept(*left_out: str) -> tuple[records.Evidence, ...]:
    files = {name: data for name, data in found_files(frozen_spec(), 0)[0].items() if name not in left_out}
    return factories.result(frozen_spec(), files).evidence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"documents": found_files(frozen_spec(), 0)[1][:1]}, "1 documents, the spec has 2"),
        ({"documents": (records.Document(tokens=11, sha256="0" * 64),) * 2}, "document 0 has 11 tokens, the spec asks 12"),
        ({"evidence": _kept("greedy.jsonl")}, "evidence greedy.jsonl is missing"),
        ({"evidence": _kept("samples/0001.safetensors")}, "evidence samples/0001.safetensors is missing"),
    ],
    ids=["documents", "tokens", "greedy", "samples"],
)
def test_a_result_that_the_recorder_would_refuse_is_found(
    make_archive: Callable[..., Archive], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    run, report = forged(make_archive, result=changes)
    assert ("result", run, words) in [(finding.kind, finding.object, finding.detail) for finding in report.findings]
    frozen = frozen_spec()
    files, documents = found_files(frozen, 0)
    found = factories.result(frozen, files, **{"documents": documents, **changes})
    files = {item.name: files[item.name] for item in found.evidence}
    with Archive.open(tmp_path / "archive", write=True) as archive, pytest.raises(InputError, match=words):
        recording.record(archive, factories.write_result_folder(tmp_path / "result", found, files))


def test_inputs_that_are_not_those_of_the_result_are_found(make_archive: Callable[..., Archive]) -> None:
    wrong = tuple(records.Document(tokens=12, sha256="0" * 64) for _ in range(2))
    _, report = forged(make_archive, result={"documents": wrong})
    assert kinds(report) == {"samples"}
    assert "token ids of document 0 have another digest" in said(report)


# ---------------------------------------------------------------- the database


OF_PERFORMANCE = ("spec_extras", "spec_parts", "kernels")
OF_OUTSIDE = ("reports", "facts", "recipes", "recipe_claims", "attachments", "retractions", "key_changes", "redactions")
OTHERS = [table for table in TABLES if table not in (*OF_PERFORMANCE, *OF_OUTSIDE)]


def test_every_table_has_a_row_to_be_changed(pristine: Path) -> None:
    with closing(sqlite3.connect(pristine / "ledger.db")) as connection:
        assert [table for table in OTHERS if not connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]] == []


def another(column: sa.Column[Any], value: Any) -> Any:
    """Some other value of the column's kind, as the database stores it."""
    if isinstance(column.type, Number):
        return "7.25"
    if isinstance(column.type, sa.Boolean):
        return not value
    if isinstance(column.type, sa.BigInteger):
        return (value or 0) + 1000
    return f"{value or ''}x"


def change_columns(execute: Callable[..., list[Any]], table: str, check: Callable[[], Report], together: bool = False) -> None:
    """Change every column of the last row in turn, check that the report names it, and change it back.

    ``together`` changes those that are no key at once.
    """
    columns = {column.name: column for column in TABLES[table].columns}
    keys = [column.name for column in TABLES[table].primary_key.columns]
    names = ", ".join(f'"{name}"' for name in columns)
    order = ", ".join(f'"{key}" DESC' for key in keys)
    row = dict(zip(columns, execute(f'SELECT {names} FROM "{table}" ORDER BY {order} LIMIT 1')[0], strict=True))
    others = [name for name in columns if name not in keys]
    for group in (*([key] for key in keys), *([others] if together else [[name] for name in others])):
        changed = {**row, **{name: another(columns[name], row[name]) for name in group}}

        def update(old: dict[str, Any], new: dict[str, Any], group: list[str] = group) -> None:
            put = ", ".join(f'"{name}" = :new_{name}' for name in group)
            where = " AND ".join(f'"{key}" = :{key}' for key in keys)
            values = {**{f"new_{name}": new[name] for name in group}, **{key: old[key] for key in keys}}
            execute(f'UPDATE "{table}" SET {put} WHERE {where}', values)

        if group:
            update(row, changed)
            report = check()
            update(changed, row)
            found = [finding for finding in report.findings if finding.object.startswith(f"{table} [")]
            if group[0] in keys:
                assert {finding.kind for finding in found} == {"row_missing", "row_extra"}, group
            else:
                assert {finding.kind for finding in found} == {"row_changed"}, group
                assert [finding.detail.split(":")[0] for finding in found] == [f"column {name}" for name in group]
            assert len(report.findings) == len(found), group


@pytest.fixture
def sqlite_execute(copy: Path) -> Iterator[Callable[..., list[Any]]]:
    """Run SQL on the copy's database with nothing enforced."""

    def execute(statement: str, values: dict[str, Any] | None = None) -> list[Any]:
        with closing(sqlite3.connect(copy / "ledger.db", isolation_level=None)) as connection:
            return connection.execute(statement, values or {}).fetchall()

    yield execute


@pytest.mark.parametrize("table", OTHERS)
def test_every_column_of_every_table_is_checked(copy: Path, sqlite_execute: Callable[..., list[Any]], table: str) -> None:
    change_columns(sqlite_execute, table, lambda: verify(copy))
    assert verify(copy).ok


@pytest.mark.parametrize("table", (*OF_PERFORMANCE, *OF_OUTSIDE))
def test_every_column_of_the_other_tables_is_checked(copy: Path, sqlite_execute: Callable[..., list[Any]], table: str) -> None:
    with Archive.open(copy, write=True) as archive:
        if table in OF_PERFORMANCE:
            append_performance(archive)
            archive.append(factories.memory_spec())
        else:
            append_outside(archive)
    assert verify(copy).ok
    change_columns(sqlite_execute, table, lambda: verify(copy))
    assert verify(copy).ok
    sqlite_execute(f'DELETE FROM "{table}"')
    assert {finding.kind for finding in verify(copy).findings} == {"row_missing"}


@pytest.mark.parametrize("table", OTHERS)
def test_a_row_removed_or_added_is_found(copy: Path, sqlite_execute: Callable[..., list[Any]], table: str) -> None:
    columns = list(TABLES[table].columns)
    names = ", ".join(f'"{column.name}"' for column in columns)
    row = sqlite_execute(f'SELECT {names} FROM "{table}" LIMIT 1')[0]
    new = {column.name: another(column, value) for column, value in zip(columns, row, strict=True)}
    sqlite_execute(f'INSERT INTO "{table}" ({names}) VALUES ({", ".join(f":{name}" for name in new)})', new)
    assert [finding.kind for finding in verify(copy).findings if finding.object.startswith(f"{table} [")] == ["row_extra"]
    sqlite_execute(f'DELETE FROM "{table}"')
    found = verify(copy).findings
    assert {finding.kind for finding in found} == {"row_missing"}
    assert all(finding.object.startswith(f"{table} [") for finding in found)


@pytest.mark.slow
def test_every_column_of_every_table_is_checked_on_postgresql(make_archive: Callable[..., Archive], postgresql_url: str) -> None:
    archive = make_archive(url=postgresql_url)
    fill(archive)
    append_performance(archive)
    archive.append(factories.memory_spec())
    append_outside(archive)
    assert verify(archive.folder, postgresql_url).findings == []
    engine = sa.create_engine(sa.make_url(postgresql_url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")

    def execute(statement: str, values: dict[str, Any] | None = None) -> list[Any]:
        with engine.connect() as connection:
            connection.execute(sa.text("SET search_path TO kv_ledger"))
            connection.execute(sa.text("SET session_replication_role = replica"))  # no foreign key is enforced
            result = connection.execute(sa.text(statement), values or {})
            return [tuple(row) for row in result] if result.returns_rows else []

    for table in TABLES:
        change_columns(execute, table, lambda: verify(archive.folder, postgresql_url), together=True)
    execute("UPDATE kv_ledger_version SET version_num = 'x'")
    assert kinds(verify(archive.folder, postgresql_url)) == {"schema"}
    engine.dispose()


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("UPDATE kv_ledger_version SET version_num = '9999'", "schema"),
        ("DELETE FROM kv_ledger_version", "database"),
        ("DROP TABLE kv_ledger_version", "schema"),
        ("DROP TABLE claims", "database"),
        ("ALTER TABLE runs DROP COLUMN harness_state", "database"),
        ("CREATE TABLE more (x)", "table_extra"),
        ("CREATE INDEX more ON runs (reason)", "table_extra"),
        ("ALTER TABLE runs ADD COLUMN more TEXT", "column_extra"),
        ("CREATE VIEW more AS SELECT 1", "table_extra"),
        ("CREATE TRIGGER more AFTER INSERT ON runs BEGIN SELECT 1; END", "table_extra"),
        ("UPDATE claims SET reason = x'ff'", "row_changed"),
        ("UPDATE runs SET reason = CAST(x'ff' AS TEXT)", "database"),
    ],
)
def test_another_schema_is_a_finding(copy: Path, sqlite_execute: Callable[..., list[Any]], statement: str, kind: str) -> None:
    sqlite_execute("PRAGMA writable_schema = ON")
    sqlite_execute(statement)
    assert kinds(verify(copy)) == {kind}


@pytest.mark.parametrize("data", [b"not a database at all" * 400, b"SQLite format 3\0" + bytes(5000)])
def test_a_database_that_cannot_be_read_is_a_finding(copy: Path, data: bytes) -> None:
    (copy / "ledger.db").write_bytes(data)
    report = verify(copy)
    assert kinds(report) == {"database"}
    assert "ledger rebuild" in report.findings[0].next


def block(path: Path, by: str) -> None:
    """Put ``by`` in the place of the database."""
    path.unlink(missing_ok=True)
    if by == "folder":
        path.mkdir()
    elif by == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("by", ["folder", "pipe", "link"])
@pytest.mark.parametrize("own", [True, False])
def test_a_database_that_cannot_be_looked_at_is_no_verdict(copy: Path, tmp_path: Path, own: bool, by: str) -> None:
    path = copy / "ledger.db" if own else tmp_path / "other.db"
    block(path, by)
    with pytest.raises(ArchiveError, match="cannot be used"):
        verify(copy, None if own else f"sqlite:///{path}")
    with pytest.raises(ArchiveError, match="cannot be used"), Archive.at(copy, None if own else f"sqlite:///{path}") as archive:
        archive.rebuild()


def test_a_place_that_cannot_hold_a_database_is_no_verdict_and_an_absent_file_is_a_note(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="folder does not exist"):
        verify(copy, f"sqlite:///{tmp_path / 'absent' / 'x.db'}")
    with pytest.raises(ArchiveError, match="cannot be used"):
        verify(copy, "postgresql://nobody@127.0.0.1:1/none")
    report = verify(copy, f"sqlite:///{tmp_path / 'x.db'}")
    assert (report.ok, report.notes) == (True, ["There is no database: it is built at first use."])


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY])
def test_a_fault_of_the_disk_is_no_verdict_on_the_database(copy: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: Any) -> None:
        error = sqlite3.OperationalError("a fault")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(databases, "_sqlite_begins", fail)
    with pytest.raises(ArchiveError, match="cannot be used") as caught:
        verify(copy)
    assert "rebuild" not in caught.value.next


def test_the_tables_of_another_tool_are_a_finding(copy: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection, connection:
        connection.execute("CREATE TABLE runs (id)")
    (finding,) = verify(copy, f"sqlite:///{tmp_path / 'other.db'}").findings
    assert (finding.kind, "not this archive's" in finding.detail) == ("database", True)


def test_on_postgresql_what_was_added_is_found_and_what_may_not_be_seen_is_no_verdict(copy: Path, postgresql_url: str) -> None:
    import psycopg

    Archive.open(copy, postgresql_url).close()
    assert verify(copy, postgresql_url).ok
    url = sa.make_url(postgresql_url)
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kv_ledger.more (x int); ALTER TABLE kv_ledger.runs ADD COLUMN more text")
        report = verify(copy, postgresql_url)
        assert [(finding.kind, finding.object) for finding in report.findings] == [("table_extra", "more"), ("column_extra", "runs.more")]
        connection.execute("DROP ROLE IF EXISTS outsider")
        connection.execute("CREATE ROLE outsider LOGIN PASSWORD 'secret'")
        outsider = url.set(username="outsider", password="secret").render_as_string(hide_password=False)
        try:
            with pytest.raises(ArchiveError, match=r"(?s)may not see the schema.*give this role"):
                verify(copy, outsider)
            with pytest.raises(ArchiveError, match=r"(?s)may not see the schema.*give this role"):
                Archive.open(copy, outsider)
            connection.execute("GRANT USAGE ON SCHEMA kv_ledger TO outsider")
            with pytest.raises(ArchiveError, match=r"(?s)permission denied.*give this role"):
                verify(copy, outsider)
        finally:
            connection.execute("REVOKE ALL ON SCHEMA kv_ledger FROM outsider; DROP ROLE outsider")
    for wrong in (url.set(database="absent"), url.set(username="absent")):
        with pytest.raises(ArchiveError, match=r"(?s)cannot be used.*check that the server runs"):
            verify(copy, wrong.render_as_string(hide_password=False))


@pytest.mark.parametrize("fault", ["no log", "no head", "an unreadable head", "a shorter head", "a missing entry", "an unreadable entry"])
def test_an_object_is_not_called_stray_where_the_log_could_not_be_read_in_full(copy: Path, fault: str) -> None:
    store = FolderStore(copy)
    if fault == "no log":
        shutil.rmtree(copy / "log")
    elif fault == "no head":
        (copy / "log" / "head").unlink()
        (copy / "log" / "000000008.json").unlink()
    elif fault == "an unreadable head":
        (copy / "log" / "head").write_bytes(b"?")
    elif fault == "a shorter head":
        store.write_head(Head.over([leaf_hash(data) for data in store.entries(2)]))
    elif fault == "a missing entry":
        (copy / "log" / "000000002.json").unlink()
    else:
        (copy / "log" / "000000002.json").write_bytes(b"{}")
    store.put(b"left over")
    report = verify(copy)
    assert "stray_object" not in kinds(report)
    assert any(note.startswith("No record that could be read names ") for note in report.notes)
    assert not report.ok


def test_a_database_of_another_archive_is_a_finding(copy: Path, make_archive: Callable[..., Archive]) -> None:
    other = make_archive("other")
    calibrate(other)
    other.append(frozen_spec(title="Another"))
    other.close()
    shutil.copyfile(other.folder / "ledger.db", copy / "ledger.db")
    assert {"row_missing", "row_extra"} <= kinds(verify(copy))


def test_a_rebuilt_database_is_clean(copy: Path, sqlite_execute: Callable[..., list[Any]]) -> None:
    sqlite_execute("UPDATE measurements SET value = '0'")
    assert not verify(copy).ok
    with Archive.at(copy) as archive:
        archive.rebuild()
    assert verify(copy).ok


def test_all_findings_are_reported_not_only_the_first(copy: Path, sqlite_execute: Callable[..., list[Any]]) -> None:
    sqlite_execute("UPDATE measurements SET value = '0' WHERE position = 0")
    flip(path_of(copy, objects(copy)[0]), 3)
    (copy / "note.txt").write_bytes(b"")
    (copy / "log" / "000000011.json").write_bytes(b"{}")
    assert {"object_changed", "stray_file", "entry_extra", "row_changed"} <= kinds(verify(copy))
