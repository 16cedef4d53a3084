"""How two runs of one spec compare, and what a reproduction says where nothing can be run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from ledger import comparing, digest, launching, recording, records, reproduce
from ledger.archive import Archive
from tests import factories
from tests.ledger.test_provenance import PACKAGES, SOURCES, distribution

SPEC = factories.spec(tolerances={"loss_mean": 0.5, "loss_difference_mean": 0.5, "loss_difference_sd": 0.5})
FILES = factories.samples(SPEC)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    Archive.create(tmp_path / "archive").close()
    with Archive.open(tmp_path / "archive", write=True) as opened:
        opened.append(SPEC)
        yield opened


class Recorder:
    """Records results in turn, each with a start of its own."""

    def __init__(self, archive: Archive, place: Path) -> None:
        self.archive, self.place, self.count = archive, place, 0

    def __call__(self, files: dict[str, bytes] = FILES, spec: records.Spec = SPEC, **changes: Any) -> str:
        self.count += 1
        started = f"2026-01-02T03:04:{self.count:02}Z"
        found = factories.result(spec, files, **{"started": started, **changes})
        folder = self.place / f"result-{self.count}"
        folder.mkdir()
        return recording.record(self.archive, factories.write_result_folder(folder, found, files)).record


@pytest.fixture
def record(archive: Archive, tmp_path: Path) -> Recorder:
    return Recorder(archive, tmp_path)


def moved(name: str, series: str, position: int, by: float) -> dict[str, bytes]:
    """The samples with one value changed."""
    tensors = {key: value.copy() for key, value in load(FILES[name]).items()}
    tensors[series][position] += np.float32(by)
    return {**FILES, name: save(tensors)}


def test_equal_samples_are_bit_identical(archive, record):
    found = comparing.compare(archive, record(), record())
    assert (found.verdict, found.differences, found.divergence, found.same_hardware) == ("bit-identical", (), None, True)


def test_a_small_difference_of_a_tolerated_measurement_is_within(archive, record):
    before = record()
    # top-1 ids, KL and the rest stay; the losses move
    found = comparing.compare(archive, before, record(moved("samples/0002.safetensors", "k16v8.loss", 7, 1e-3)))
    worst = [item for item in found.differences if not item.within]
    assert {item.name.split(".")[1].split(" ")[0] for item in worst} <= {"worst_document_loss_difference"}
    assert found.divergence is not None
    assert (found.divergence.evidence, found.divergence.series, found.divergence.position) == ("samples/0002.safetensors", "k16v8.loss", 7)
    assert math.isclose(found.divergence.reproduced - found.divergence.original, 1e-3, rel_tol=1e-2)


def test_differences_inside_declared_tolerances_give_within(archive, record):
    inexact = [name for name, unit in records.MEASUREMENTS.items() if unit not in records.EXACT_UNITS]
    frozen = factories.spec(title="Tolerant", tolerances=dict.fromkeys(inexact, 1.0))
    archive.append(frozen)
    before = record(spec=frozen)
    found = comparing.compare(archive, before, record(moved("samples/0002.safetensors", "k16v8.loss", 7, 1e-3), spec=frozen))
    assert found.verdict == "within"
    assert found.differences and all(item.within and item.tolerance == 1.0 for item in found.differences)


def test_a_measurement_without_a_tolerance_must_be_equal(archive, record):
    frozen = factories.spec(title="Exact", tolerances={})
    archive.append(frozen)
    before = record(spec=frozen)
    found = comparing.compare(archive, before, record(moved("samples/0000.safetensors", "k8v8.loss", 0, 1e-4), spec=frozen))
    assert found.verdict == "outside"
    assert any(item.name.startswith("k8v8.loss_mean") and item.tolerance == 0.0 for item in found.differences)


def test_a_not_a_number_in_both_is_no_difference_and_in_one_is_outside(archive, record):
    before = record()
    broken = moved("samples/0000.safetensors", "k8v8.loss", 3, math.nan)
    one = record(broken)
    assert comparing.compare(archive, one, record(broken)).verdict == "bit-identical"
    found = comparing.compare(archive, before, one)
    assert found.verdict == "outside"
    assert found.divergence is not None and found.divergence.position == 3 and math.isnan(found.divergence.reproduced)


def test_bytes_of_a_cache_are_exact_whatever_the_tolerances_say(archive, record):
    arms = tuple(factories.arm_result(arm) for arm in SPEC.arms)
    grown = msgspec.structs.replace(arms[2].backings[0], bytes=arms[2].backings[0].bytes + 256)
    other = msgspec.structs.replace(arms[2], backings=(grown, *arms[2].backings[1:]))
    found = comparing.compare(archive, record(), record(arms=(*arms[:2], other, *arms[3:])))
    assert found.verdict == "outside"
    assert any(item.name == "k16v16.backings" for item in found.differences)


def test_addresses_of_allocations_do_not_count(archive, record):
    arms = tuple(
        msgspec.structs.replace(arm, backings=tuple(msgspec.structs.replace(item, address=item.address + 64) for item in arm.backings))
        for arm in (factories.arm_result(arm) for arm in SPEC.arms)
    )
    assert comparing.compare(archive, record(), record(arms=arms)).verdict == "bit-identical"


@pytest.mark.parametrize("fact", ["effective", "measured", "census", "geometry", "outcome"])
def test_exact_facts_of_an_arm_decide(archive, record, fact):
    arms = tuple(factories.arm_result(arm) for arm in SPEC.arms)
    changes: dict[str, Any] = {"effective": {}, "measured": {"keys": "bf16"}, "census": {"fp32": 1}, "geometry": None, "outcome": "failed"}
    other = msgspec.structs.replace(arms[1], **{fact: changes[fact]})
    found = comparing.compare(archive, record(), record(arms=(arms[0], other, *arms[2:])))
    assert found.verdict == "outside"
    assert f"own-fp32.{fact}" in {item.name for item in found.differences}


def test_other_token_ids_are_not_comparable(archive, record):
    documents = list(factories.result(SPEC, FILES).documents)
    documents[1] = records.Document(tokens=documents[1].tokens, sha256=digest.sha256(b"others"))
    found = comparing.compare(archive, record(), record(documents=tuple(documents)))
    assert found.verdict == "not comparable"
    assert "Document 1 has different token ids" in found.reason and digest.sha256(b"others") in found.reason


def test_a_run_that_failed_is_not_comparable_and_says_why(archive, record):
    found = comparing.compare(archive, record(), record({}, outcome="failed", reason="no memory", documents=(), arms=()))
    assert found.verdict == "not comparable" and "no memory" in found.reason


def test_different_hardware_and_packages_are_listed_and_do_not_decide(archive, record):
    other = factories.host(processor="Another CPU", packages={"torch": "2.14.0", "numpy": "2.4"})
    found = comparing.compare(archive, record(), record(host=other))
    assert found.verdict == "bit-identical" and found.same_hardware is False
    assert {item.name for item in found.environment} == {"host.processor", "package.torch", "package.numpy"}


def test_the_first_divergence_is_of_the_lowest_position_then_the_first_arm(archive, record):
    tensors = {key: value.copy() for key, value in load(FILES["samples/0001.safetensors"]).items()}
    tensors["k8v8.loss"][4] += 1
    tensors["k16v8.loss"][4] += 1
    tensors["native.loss"][9] += 1
    files = {**FILES, "samples/0001.safetensors": save(tensors)}
    found = comparing.first_divergence(SPEC, FILES, files)
    assert found is not None
    assert (found.evidence, found.series, found.position) == ("samples/0001.safetensors", "k16v8.loss", 4)


def test_a_greedy_continuation_that_differs_is_found_by_its_token():
    line = '{"arm":"native","document":0,"ids":[%s],"prompt_tokens":4}\n'
    one, two = ({"greedy.jsonl": (line % ids).encode()} for ids in ("5,6,7", "5,8,7"))
    found = comparing.first_divergence(SPEC, one, two)
    assert found == records.Divergence(evidence="greedy.jsonl", series="native.0", position=1, original=6.0, reproduced=8.0)


def test_a_series_that_ends_early_diverges_where_it_ends():
    one, two = ({"x.safetensors": save({"native.loss": np.zeros(size, np.float32)})} for size in (5, 3))
    found = comparing.first_divergence(SPEC, one, two)
    assert found is not None and found.position == 3 and math.isnan(found.reproduced)


def test_other_framing_of_equal_values_is_within_and_diverges_nowhere(archive, record):
    framed = save(load(FILES["samples/0000.safetensors"]), metadata={"written": "again"})
    found = comparing.compare(archive, record(), record({**FILES, "samples/0000.safetensors": framed}))
    assert (found.verdict, found.divergence) == ("within", None)


# ---------------------------------------------------------------- nothing can be run


def test_a_run_whose_code_is_nowhere_is_not_comparable_and_that_is_appended(archive, record, tmp_path, monkeypatch):
    monkeypatch.setenv("LEDGER_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "any.txt").write_bytes(b"toy text")
    original = record(sources={"ledger/digest.py": "0" * 64})
    found = reproduce.reproduce(archive, original, progress=False)
    assert (found.verdict, found.reproduced, found.same_hardware) == ("not comparable", None, None)
    assert "--current-harness" in found.reason
    assert archive.record(archive.entries()[-1].record) == found


def test_a_dataset_that_is_gone_is_not_comparable_by_name_and_digest(archive, record, tmp_path, monkeypatch):
    monkeypatch.setenv("LEDGER_DATA", str(tmp_path))
    found = reproduce.reproduce(archive, record(), progress=False)
    assert found.verdict == "not comparable"
    assert "toy text" in found.reason and SPEC.workload.dataset.sha256 in found.reason


@pytest.fixture
def wheel(archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Recorder) -> str:
    """A run whose code is an installed distribution alone; its inputs at hand, and a runner that gives the same result again."""
    distribution(tmp_path / "site", PACKAGES)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LEDGER_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toy.txt").write_bytes(b"toy text")
    (tmp_path / "data" / "toy.safetensors").write_bytes(b"toy weights")

    def again(frozen: Path, out: Path, root: Path | None, *, progress: bool) -> launching.Ended:
        assert root is None  # what is installed runs
        out.mkdir()
        factories.write_result_folder(out, factories.result(SPEC, FILES, sources=SOURCES), FILES)
        return launching.Ended(status=0, words="", interrupted=False)

    monkeypatch.setattr(launching, "launch", again)
    monkeypatch.setattr(launching, "check_installed", lambda: None)
    original = record(sources=SOURCES)
    assert archive.run(original).harness.matched == "distribution"
    return original


def _replace(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def test_a_run_of_an_installed_distribution_is_run_again_by_it(archive, wheel):
    assert reproduce.reproduce(archive, wheel, progress=False).verdict == "bit-identical"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda info: _replace(info / "RECORD", b"\r\n", b"\n"), "with another RECORD"),
        (lambda info: _replace(info / "METADATA", b"9.9", b"9.10"), "kv-evidence-ledger==9.10"),
        (lambda info: (info / "RECORD").unlink(), "without a RECORD"),
    ],
    ids=["another record", "another version", "no record"],
)
def test_a_run_of_another_distribution_is_not_comparable(archive, wheel, tmp_path, change, words):
    change(tmp_path / "site" / "kv_evidence_ledger-9.9.dist-info")
    found = reproduce.reproduce(archive, wheel, progress=False)
    assert found.verdict == "not comparable" and words in found.reason
