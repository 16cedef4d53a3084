"""The JSON documents: their shapes, their order, and that they come from the database."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ledger import digest, queries, records
from ledger.archive import Archive
from ledger.claims import checkpoint_id
from ledger.errors import InputError
from tests import factories
from tests.web.examples import Example, fill


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return fill(tmp_path_factory.mktemp("queries") / "archive")


@pytest.fixture
def archive(example: Example) -> Any:
    with Archive.open(example.folder) as opened:
        yield opened


def every_document(archive: Archive, example: Example) -> list[Any]:
    shown = [queries.run(archive, run) for run in example.runs.values()]
    pair = queries.compare(archive, example.runs["good"], example.runs["hostile"])
    return [queries.status(archive), queries.runs(archive), queries.log(archive), pair, *shown]


def test_every_document_is_strict_json_that_comes_back_equal(archive: Archive, example: Example) -> None:
    for document in every_document(archive, example):
        text = json.dumps(document, allow_nan=False)
        assert json.loads(text) == document
        digest.parse(text.encode())


def test_status_rows_hold_what_a_claim_is_about(archive: Archive, example: Example) -> None:
    rows = queries.status(archive)["rows"]
    expected = {"model", "checkpoint", "arm", "baseline", "scope", "workload", "hardware", "claim", "reason", "runs", "study", "key"}
    assert all(expected <= set(row) for row in rows)
    assert len({row["key"] for row in rows}) == len(rows)
    claims = {(row["study"], row["claim"]) for row in rows}
    assert ("rescaled", "synthetic degraded") in claims
    assert ("rescaled", "synthetic established") in claims
    assert ("ignored", "invalid") in claims
    assert ("killed", "retracted") in claims
    assert all(row["claim"].startswith("synthetic ") == row["synthetic"] for row in rows)
    assert {run for row in rows for run in row["runs"]} == set(example.runs.values())


def test_runs_are_listed_in_the_order_of_the_log_with_their_corrections(archive: Archive, example: Example) -> None:
    listed = queries.runs(archive)
    assert [run["id"] for run in listed] == list(example.runs.values())
    assert all({"id", "sequence", "study", "model", "scope", "outcome", "recorded_at"} <= set(run) for run in listed)
    by_id = {run["id"]: run for run in listed}
    assert by_id[example.runs["good"]]["superseded_by"] == example.runs["again"]
    assert by_id[example.runs["failed"]]["retracted"] is True
    assert by_id[example.runs["good"]]["warnings"] == 1


def test_a_run_is_shown_in_full(archive: Archive, example: Example) -> None:
    document = queries.run(archive, example.runs["good"])
    run = archive.run(example.runs["good"])
    spec, result = archive.spec(run.spec), archive.result(run)
    assert document["spec"] == digest.jsonable(records.plain(spec))
    assert document["entry"] == records.identify(archive.entries()[document["sequence"]])
    assert document["host"] == digest.jsonable(records.plain(result.host)) | {"hardware_class": "CPU x86_64"}
    assert document["harness"]["revision"] == "a" * 40
    assert document["checkpoint"]["digest"] == checkpoint_id(spec.checkpoint)
    assert document["evidence"] == [records.plain(file) for file in run.evidence]
    assert document["decisions"] == digest.jsonable([records.plain(decision) for decision in run.decisions])
    assert [arm["name"] for arm in document["arms"]] == [arm.name for arm in spec.arms]
    for arm, asked, did in zip(document["arms"], spec.arms, result.arms, strict=True):
        plain = digest.jsonable(records.plain(did))
        assert {name: arm[name] for name in plain} == plain
        assert arm["role"] == asked.role
        assert set(arm["requested"]) == {"implementation", "compute", "keys", "values", "scales", "granularity"}
        assert arm["contradictions"] == []
        mine = [records.plain(found) for found in run.measurements if found.arm == arm["name"]]
        assert arm["measurements"] == digest.jsonable([{key: value for key, value in found.items() if key != "arm"} for found in mine])
    assert {backing["kind"] for arm in document["arms"] for backing in arm["backings"]} == {"attention"}
    assert all(
        {"bytes", "dtype", "kind", "layers", "holds", "tokens", "address"} == set(b) for arm in document["arms"] for b in arm["backings"]
    )
    assert len(document["claims"]) == len(spec.contrasts)


def test_numbers_that_json_cannot_hold_survive(archive: Archive, example: Example) -> None:
    document = queries.run(archive, example.runs["hostile"])
    (gate,) = document["decisions"][0]["gates"]
    assert (gate["estimate"], gate["lower"], gate["upper"]) == ({"number": "NaN"}, {"number": "-Infinity"}, {"number": "Infinity"})
    figures = {found["name"]: found["value"] for arm in document["arms"] for found in arm["measurements"]}
    assert figures["cache_bytes"] == {"number": "9007199254740993"}
    assert figures["loss_difference_mean"] == {"number": "-0.0"}


def test_an_arm_that_ignored_its_request_is_contradicted(archive: Archive, example: Example) -> None:
    document = queries.run(archive, example.runs["ignored"])
    said = {arm["name"]: arm["contradictions"] for arm in document["arms"]}
    assert said.pop("k8v8") == ["keys: requested fp8_e4m3, measured bf16", "keys: requested fp8_e4m3, backing holds bf16"]
    assert not any(said.values())


def test_an_arm_without_a_result_is_not_run(archive: Archive, example: Example) -> None:
    document = queries.run(archive, example.runs["failed"])
    assert {arm["outcome"] for arm in document["arms"]} == {"not run"}
    assert all(arm["geometry"] is None and arm["backings"] == [] and arm["contradictions"] == [] for arm in document["arms"])
    assert document["stopped"] is None
    assert document["peak_memory_bytes"] is None


def test_relations_name_the_other_run(archive: Archive, example: Example) -> None:
    good, again = queries.run(archive, example.runs["good"]), queries.run(archive, example.runs["again"])
    assert [(found["kind"], found["run"]) for found in good["relations"]] == [
        ("superseded by", example.runs["again"]),
        ("reproduced by", example.runs["again"]),
    ]
    assert [(found["kind"], found["run"]) for found in again["relations"]] == [
        ("supersedes", example.runs["good"]),
        ("reproduces", example.runs["good"]),
    ]
    comparison = good["relations"][1]
    assert comparison["differences"][0]["reproduced"] == {"number": "NaN"}
    assert comparison["divergence"]["position"] == 3
    (withdrawn,) = queries.run(archive, example.runs["failed"])["relations"]
    assert (withdrawn["kind"], withdrawn["run"], withdrawn["author"]) == ("retracted", None, "the maintainers")


def test_a_run_compared_with_itself_differs_in_nothing(archive: Archive, example: Example) -> None:
    same = queries.compare(archive, example.runs["hostile"], example.runs["hostile"])
    assert same["same_spec"]
    assert not any(found["differ"] for part in ("facts", "measurements", "decisions") for found in same[part])


def test_a_comparison_names_what_differs(archive: Archive, example: Example) -> None:
    pair = queries.compare(archive, example.runs["good"], example.runs["ignored"])
    differing = {found["name"]: found for found in pair["facts"] if found["differ"]}
    assert not pair["same_spec"]
    assert differing["arms.k8v8.measured.keys"] == {"name": "arms.k8v8.measured.keys", "a": "fp8_e4m3", "b": "bf16", "differ": True}
    assert differing["tokenizer.class"]["b"] is None
    assert "checkpoint.digest" not in differing
    assert any(found["differ"] for found in pair["measurements"])
    assert {"k8v8"} <= {found["candidate"] for found in pair["decisions"] if found["differ"]}


def test_the_log_says_what_each_entry_is(archive: Archive, example: Example) -> None:
    log = queries.log(archive)
    entries = archive.entries()
    assert log["head"] == {"size": len(entries), "root": archive.head.root.hex(), "text": archive.head.encode().decode()}
    assert [entry["record"] for entry in log["entries"]] == [entry.record for entry in entries]
    said = [entry["says"] for entry in log["entries"][-3:]]
    assert said == [
        f"superseded by {example.runs['again'][:10]}, the maintainers: the first run used a noisy machine",
        "retracted, the maintainers: it proves nothing",
        "outside: one figure is beyond its tolerance",
    ]


def test_an_unknown_run_is_an_error_that_says_what_to_do(archive: Archive) -> None:
    with pytest.raises(InputError, match="ledger runs"):
        queries.run(archive, "0000000000")


def test_documents_are_equal_after_a_rebuild_and_need_no_object(example: Example, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(example.folder, folder)
    with Archive.open(folder) as archive:
        before = every_document(archive, example)
    with Archive.open(folder, write=True) as archive:
        archive.rebuild()
    with Archive.open(folder) as archive:
        assert every_document(archive, example) == before
        shutil.rmtree(folder / "objects")
        assert every_document(archive, example) == before


def test_evidence_and_records_are_known_and_nothing_else(archive: Archive, example: Example) -> None:
    found = queries.evidence(archive, example.log)
    assert found is not None
    assert (found["name"], found["media_type"]) == ("log.txt", "text/plain")
    record = queries.evidence(archive, example.runs["good"])
    assert record is not None
    assert record["name"] == "run.json"
    assert queries.evidence(archive, digest.sha256(b"never stored")) is None


def test_a_spec_without_a_run_is_shown_as_its_claims_say(tmp_path: Path) -> None:
    with Archive.create(tmp_path / "archive") as archive:
        archive.append(factories.spec())
        rows = queries.status(archive)["rows"]
        assert {row["claim"] for row in rows} <= {"not measured"}
        assert queries.runs(archive) == []
