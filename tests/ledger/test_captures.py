"""Captures and calibrations: what their evidence may say, what follows from it, and scales that come of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from ledger import captures, claims, deriving, digest, freezing, queries, recording, records, verify
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.records import consistency
from ledger.web import runpage
from tests import factories
from tests.ledger.test_cli import SEEDED, TEXT
from tests.ledger.test_scopes import pages_of

STEPS = 5
NATIVE = records.Arm(name="native", role="control", implementation="native", compute="fp32", keys="fp32", values="fp32", backend="eager")


def spec(scope: str = "capability", **changes: Any) -> records.Spec:
    capture = records.Capture(**{"new_tokens": STEPS, "budget_bytes": 1 << 20, "suppressed": (7, 9), **changes.pop("capture", {})})
    arms = changes.pop("arms", (NATIVE,) if scope == "calibration" else (NATIVE, factories.ARMS[4]))
    fields = {"format": "kv-ledger/spec/3", "scope": scope, "arms": arms, "contrasts": (), "families": (), "capture": capture}
    found = factories.spec(**{**fields, "workload": factories.workload(documents=2), **changes})
    consistency.check(found)
    return found


def files(frozen: records.Spec, changes: dict[tuple[str, int], dict[str, Any] | None] | None = None, **sizes: Any) -> dict[str, bytes]:
    """Evidence of a run in which all is well; ``changes`` go to the line of an arm and document, None leaves it out."""
    lines = []
    for document in range(len(frozen.documents)):
        for arm in frozen.arms:
            line: dict[str, Any] = {"arm": arm.name, "document": document, "vocabulary": 100}
            line["prompt_tokens"] = 32 + int(frozen.text.bos)
            line |= {"ids": [1, 2, 3, 4, 5], "masked": [2] * STEPS, "masked_ids": [{"from": 0, "count": 2, "ids": [7, 9]}]}
            line |= {name: [0] * STEPS for name in ("nan", "infinite", "broken")}
            change = (changes or {}).get((arm.name, document), {})
            if change is not None:
                lines.append(line | change)
    found = {"captures.jsonl": b"".join(digest.canonical(line) + b"\n" for line in lines)}
    if frozen.scope == "calibration":
        found["calibration.safetensors"] = calibration(**sizes)
    return found


def calibration(layers: int = 2, heads: int = 2, **changes: Any) -> bytes:
    """Sizes of two layers; ``changes`` by name with ``_`` for what a keyword cannot hold (``keys_amax_0``)."""
    tensors = {}
    for layer in range(layers):
        for side, amax in (("keys", 500.0), ("values", 3.0)):
            for size, share in (("amax", 1.0), ("p9999", 0.5), ("p999", 0.25)):
                found = changes.get(f"{side}_{size}_{layer}", [amax * share / (head + 1) for head in range(heads)])
                tensors[f"{side}.{size}/{layer}"] = np.asarray(found, np.float32)
    return save(tensors)


def decide(frozen: records.Spec, evidence: dict[str, bytes], **changes: Any) -> dict[str, records.Decision]:
    result = factories.result(frozen, evidence, **changes)
    derived = deriving.derive(frozen, result, evidence, factories.harness())
    return {decision.candidate: decision for decision in derived.decisions}


def test_what_is_whole_passes_and_says_no_more_than_that() -> None:
    found = decide(spec(), files(spec()))
    assert {name: decision.status for name, decision in found.items()} == {"native": "passes", "k16v8": "passes"}
    assert found["k16v8"].reason == "2 captures: loading, execution and capture work under these settings, and nothing more is said"
    assert [gate.statistic for gate in found["k16v8"].gates] == list(captures.CHECKS)


NAN = {"nan": [0, 0, 0, 1, 2]}
LATER = {"masked_ids": [{"from": 0, "count": 2, "ids": [7, 9]}, {"from": 3, "count": 1, "ids": [7]}], "masked": [2, 2, 2, 1, 1]}
FAILS = [
    (NAN, "finite_logits: document 1, step 3: 1 logits are NaN"),
    ({"infinite": [0, 4, 0, 0, 0]}, "finite_logits: document 1, step 1: 4 logits are infinite"),
    ({"broken": [0, 0, 1, 0, 0]}, "finite_scores: document 1, step 2: 1 scores are NaN or +inf"),
    (LATER, "suppressed_exactly: document 1, step 3: 1 of -inf, 2 declared; not masked [9]"),
    (
        {"masked_ids": [{"from": 0, "count": 2, "ids": [7, 8]}]},
        "document 1, step 0: 2 of -inf, 2 declared; not declared [8]; not masked [9]",
    ),
    ({"masked": [2, 2, 3, 2, 2]}, "suppressed_exactly: document 1, step 2: 3 of -inf, 2 declared"),
    ({"ids": [1, 2, 9, 4, 5]}, "suppressed_never_chosen: document 1 holds the suppressed id 9"),
]


@pytest.mark.parametrize(("change", "words"), FAILS)
def test_one_wrong_step_of_one_document_fails_its_arm_alone(change: dict[str, Any], words: str) -> None:
    found = decide(spec(), files(spec(), {("k16v8", 1): change}))
    assert (found["native"].status, found["k16v8"].status) == ("passes", "fails")
    assert words in found["k16v8"].reason
    calibrating = spec("calibration")
    assert decide(calibrating, files(calibrating, {("native", 1): change}))["native"].status == "invalid"


def test_where_nothing_is_declared_nothing_may_be_masked() -> None:
    frozen = spec(capture={"suppressed": ()})
    assert decide(frozen, files(frozen))["native"].status == "fails"
    none = {"masked": [0] * STEPS, "masked_ids": [{"from": 0, "count": 0, "ids": []}]}
    bare = {(arm.name, document): none for arm in frozen.arms for document in range(2)}
    assert decide(frozen, files(frozen, bare))["native"].status == "passes"


SHORT = {name: [0] * 3 for name in ("nan", "infinite", "broken")} | {"ids": [1, 2, 3], "masked": [2] * 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "missing evidence: no capture of document 1"),
        (SHORT, "document 1 has 3 tokens behind 32, the spec asks 5 behind 32"),
        ({"prompt_tokens": 31}, "document 1 has 5 tokens behind 31, the spec asks 5 behind 32"),
    ],
)
def test_what_is_missing_is_invalid_and_no_failure(change: Any, words: str) -> None:
    found = decide(spec(), files(spec(), {("k16v8", 1): change}))
    assert (found["native"].status, found["k16v8"].status) == ("passes", "invalid") and words in found["k16v8"].reason


def test_a_suppressed_id_outside_the_vocabulary_cannot_be_judged() -> None:
    frozen = spec(capture={"suppressed": (7, 100)})
    found = decide(frozen, files(frozen))["native"]
    assert (found.status, found.reason) == ("invalid", "the suppressed id 100 lies outside the vocabulary of 100")


def test_a_cache_beyond_its_budget_fails_by_what_was_measured() -> None:
    frozen = spec(capture={"budget_bytes": 10_000})
    found = decide(frozen, files(frozen))
    assert found["native"].status == "fails" and "cache_budget: 16,384 of 10,000 bytes" in found["native"].reason
    assert found["k16v8"].status == "passes"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"arm": "other"}, "names no arm"),
    ({"document": 2}, "no document"),
    ({"extra": 1}, "has other keys"),
    ({"nan": [0, 0]}, "not of its steps"),
    ({"nan": [0, 0, 0, 0, -1]}, "not of its steps"),
    ({"nan": [0, 0, 0, 0, 0.5]}, "not of its steps"),
    ({"ids": [1, 2, 3, 4, 100]}, "ids below the vocabulary"),
    ({"document": 0}, "repeats arm k16v8, document 0"),
    ({"masked_ids": []}, "at its first step"),
    ({"masked_ids": [{"from": 0, "count": 3, "ids": [7, 9]}]}, "masked ids that cannot be"),
    ({"masked_ids": [{"from": 0, "count": 2, "ids": [9, 7]}]}, "masked ids that cannot be"),
    ({"masked_ids": [{"from": 0, "count": 2, "ids": [7, 100]}]}, "masked ids that cannot be"),
    ({"masked_ids": [{"from": 5, "count": 2, "ids": [7, 9]}]}, "masked ids that cannot be"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_line_that_cannot_be_is_refused_by_its_number(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"(?s)Line 4 of captures.jsonl.*{words}"):
        captures.read(spec(), files(spec(), {("k16v8", 1): change}))


def test_an_infinity_in_the_evidence_is_refused() -> None:
    data = files(spec())["captures.jsonl"].replace(b'"nan":[0,', b'"nan":[-Infinity,', 1)
    with pytest.raises(InputError):
        captures.read(spec(), {"captures.jsonl": data})


# ---------------------------------------------------------------- calibration


def test_a_calibration_measures_the_largest_states_and_the_heads_that_saturate() -> None:
    frozen = spec("calibration")
    evidence = files(frozen)
    assert decide(frozen, evidence)["native"].status == "measured"
    assert decide(frozen, evidence)["native"].reason == "2 layers, keys and values of every head"
    found = captures.measure(frozen, factories.result(frozen, evidence), captures.read(frozen, evidence))
    assert {one.name: one.value for one in found} == {
        "captures": 2, "steps": 10, "cache_bytes": 16384,
        "keys_amax": 500.0, "keys_saturating_heads": 2, "values_amax": 3.0, "values_saturating_heads": 0,
    }  # fmt: skip


def test_one_layer_is_said_as_one() -> None:
    frozen = spec("calibration")
    result = factories.result(frozen, evidence := files(frozen, layers=1))
    one = next(arm for arm in result.arms if arm.geometry is not None)
    geometry = msgspec.structs.replace(one.geometry, declared=one.geometry.declared[:1], measured=one.geometry.measured[:1])
    arms = tuple(msgspec.structs.replace(arm, geometry=geometry) if arm is one else arm for arm in result.arms)
    assert decide(frozen, evidence, arms=arms)["native"].reason == "1 layer, keys and values of every head"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keys_amax_1": [float("nan"), 1.0]}, "keys.amax/1 of head 0 is nan"),
        ({"values_p999_0": [-1.0, 1.0]}, "values.p999/0 of head 0 is -1"),
        ({"values_amax_0": [0.1, 0.1]}, "values.amax/0 is below a quantile"),
        ({"layers": 1}, "has layers and heads 1 × [2], the cache 2 × [2]"),
        ({"heads": 3}, "has layers and heads 2 × [3], the cache 2 × [2]"),
    ],
)
def test_sizes_that_cannot_be_make_a_calibration_invalid(changes: dict[str, Any], words: str) -> None:
    frozen = spec("calibration")
    found = decide(frozen, files(frozen, **changes))["native"]
    assert found.status == "invalid" and words in found.reason


def test_a_calibration_without_its_file_is_invalid() -> None:
    frozen = spec("calibration")
    found = decide(frozen, {"captures.jsonl": files(frozen)["captures.jsonl"]})["native"]
    assert found.status == "invalid" and "missing evidence: calibration.safetensors" in found.reason


@pytest.mark.parametrize(
    "tensor", [{"keys.amax/0": np.ones(2, np.float32)}, {"other": np.ones(2, np.float32)}, {"keys.amax/00": np.ones(2)}]
)
def test_a_calibration_of_other_tensors_is_refused(tensor: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"calibration\.safetensors"):
        captures.read(spec("calibration"), {"calibration.safetensors": save(tensor)})


@pytest.mark.parametrize(
    "arms",
    [
        (NATIVE, factories.ARMS[2]),
        (msgspec.structs.replace(factories.ARMS[4], role="control"),),
        (factories.ARMS[4],),
    ],
)
def test_a_calibration_has_one_arm_that_stores_no_8_bit(arms: tuple[records.Arm, ...]) -> None:
    with pytest.raises(InputError, match=r"calibration is of|no arm is a control"):
        spec("calibration", arms=arms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capture": {"suppressed": (9, 7)}}, "out of order"),
        ({"capture": {"language_only": False}}, "language alone"),
        ({"workload": factories.workload(greedy=records.Greedy(documents=1, prompt_tokens=2, new_tokens=2))}, "by itself"),
        ({"contrasts": factories.CONTRASTS[4:5], "families": factories.FAMILIES}, "has contrasts"),
    ],
)
def test_a_capture_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        spec(**changes)


def test_the_claims_of_other_captures_are_other_claims() -> None:
    def keys(frozen: records.Spec) -> set[str]:
        return {claims.derive([(records.identify(frozen), frozen)], {})[number].key for number in range(len(frozen.arms))}

    base = keys(spec())
    assert len(base) == 2
    others: list[dict[str, Any]] = [{"capture": {"new_tokens": 6}}, {"capture": {"budget_bytes": 5}}, {"capture": {"suppressed": ()}}]
    for changes in (*others, {"workload": factories.workload(documents=3)}, {"device": "cuda"}):
        assert not keys(spec(**changes)) & base
    assert keys(spec(study="another", title="Another")) == base


# ---------------------------------------------------------------- recorded, shown, and made scales of


def recorded(archive: Archive, frozen: records.Spec, evidence: dict[str, bytes], place: Path, **changes: Any) -> str:
    archive.append(frozen)
    place.mkdir(parents=True)
    return recording.record(archive, factories.write_result_folder(place, factories.result(frozen, evidence, **changes), evidence)).record


def test_a_run_is_recorded_shown_and_verified(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    run = recorded(archive, spec(), files(spec(), {("k16v8", 1): NAN}), tmp_path / "one")
    frozen = spec("calibration")
    other = recorded(archive, frozen, files(frozen), tmp_path / "two")
    document = queries.run(archive, run)
    assert document["spec"]["capture"]["suppressed"] == [7, 9]
    page = runpage.run_page(document)
    assert page.checks is not None and "nothing more" in page.note
    assert not any(relation for relation in page.relations)
    archive.close()
    assert [finding.detail for finding in verify.verify(archive.folder).findings] == []
    texts = pages_of(archive.folder, run, other)
    assert "Capability checks" in texts[0] and "document 1, step 3: 1 logits are NaN" in texts[0] and "the end token is ignored" in texts[0]
    assert "keys_amax" in texts[1] and "native</h3>" not in texts[1] and "against native" not in texts[1]


def test_figures_and_decisions_are_derived_again_from_the_evidence(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    frozen = spec("capability")
    evidence = files(frozen, {("k16v8", 1): NAN})
    found = factories.result(frozen, evidence)
    derived = deriving.derive(frozen, found, evidence, factories.harness())
    better = tuple(msgspec.structs.replace(decision, status="passes", reason="") for decision in derived.decisions)
    more = msgspec.structs.replace(derived.measurements[0], value=3)
    forged = factories.run(frozen, found, measurements=(more, *derived.measurements[1:]), decisions=better)
    archive.append(frozen)
    archive.append(forged, {digest.sha256(data): data for data in (records.encode(found), *evidence.values())})
    archive.close()
    said = {(finding.kind, finding.detail.partition(":")[0]) for finding in verify.verify(archive.folder).findings}
    assert ("measurement", "captures of native") in said and ("decision", "k16v8 against native (capability)") in said


STUDY = f"""
study = "fixed"
title = "Fixed scales"
scope = "quality.loss"
[checkpoint]
{SEEDED}
[workload]
dataset = "tide.txt"
dataset_name = "The tide"
dataset_license = "CC0-1.0"
sha256 = "{digest.sha256(TEXT)}"
inputs = "store"
documents = 2
tokens = 32
first = FIRST
bos = true
split_special_tokens = true
chunk = 16
[[arms]]
name = "k16v16"
role = "control"
implementation = "reference"
compute = "fp32"
keys = "bf16"
values = "bf16"
[[arms]]
name = "k16v8"
role = "candidate"
implementation = "reference"
compute = "fp32"
keys = "bf16"
values = "fp8_e4m3"
scales = "fixed"
granularity = "head"
scale_source = "SOURCE"
[[contrasts]]
candidate = "k16v8"
baseline = "k16v16"
family = "loss"
[families.loss]
resamples = 199
[[families.loss.gates]]
statistic = "loss_difference_mean"
bound = 0.05
harm = 0.1
"""


def study(folder: Path, source: str, first: int = 1000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tide.txt").write_bytes(TEXT)
    (folder / "fixed.toml").write_text(STUDY.replace("FIRST", str(first)).replace("SOURCE", source))
    return folder / "fixed.toml"


@pytest.fixture
def calibrated(make_archive: Callable[..., Archive], tmp_path: Path) -> tuple[Archive, str]:
    """An archive with a calibration of the study's checkpoint over the first 64 tokens of its text."""
    archive = make_archive()
    return archive, recorded(archive, _of_the_tide(), files(_of_the_tide()), tmp_path / "calibration")


def _of_the_tide(**changes: Any) -> records.Spec:
    import tomllib

    checkpoint = tomllib.loads(SEEDED)
    found = records.Checkpoint(**checkpoint, seed=7)
    data = records.Dataset(name="The tide", file="tide.txt", sha256=digest.sha256(TEXT), size=len(TEXT), license="CC0-1.0")
    return spec("calibration", **{"checkpoint": found, "workload": factories.workload(documents=2, dataset=data, bos=True), **changes})


def test_fixed_scales_come_from_a_recorded_calibration(calibrated: tuple[Archive, str], tmp_path: Path) -> None:
    archive, run = calibrated
    frozen = freezing.freeze(study(tmp_path / "s", f"run:{run[:12]}"), archive, tmp_path / "frozen")
    assert frozen.arm("k16v8").scale_source == digest.sha256(calibration()) and frozen.arm("k16v16").scale_source is None
    assert (tmp_path / "frozen/inputs/scales.safetensors").read_bytes() == calibration()
    again = freezing.thaw(archive, records.identify(frozen), tmp_path / "thawed", search=[tmp_path / "s"])
    assert again == frozen and (tmp_path / "thawed/inputs/scales.safetensors").read_bytes() == calibration()
    archive.close()
    assert [finding.detail for finding in verify.verify(archive.folder).findings] == []


def refused(archive: Archive, path: Path, out: Path, words: str) -> None:
    before = archive.head
    with pytest.raises(InputError, match=f"(?s){words}"):
        freezing.freeze(path, archive, out)
    assert not out.exists() and archive.head == before


def test_evaluating_what_the_calibration_has_seen_is_refused(calibrated: tuple[Archive, str], tmp_path: Path) -> None:
    archive, run = calibrated
    for first in (0, 63):
        words = "tokens that the calibration has seen.*document 0"
        refused(archive, study(tmp_path / "s", f"run:{run}", first), tmp_path / "out", words)
    freezing.freeze(study(tmp_path / "s", f"run:{run}", 64), archive, tmp_path / "out")


@pytest.mark.parametrize("key", ["bos", "split_special_tokens"])
def test_where_tokens_are_numbered_otherwise_nothing_says_what_the_calibration_has_seen(
    calibrated: tuple[Archive, str], tmp_path: Path, key: str
) -> None:
    archive, run = calibrated
    path = study(tmp_path / "s", f"run:{run}")
    path.write_text(path.read_text().replace(f"{key} = true", f"{key} = false"))
    refused(archive, path, tmp_path / "out", rf"workload\.{key} is not the calibration's.*true, as in run {run[:12]}.*false")


def test_seeded_weights_of_another_kind_of_device_are_others(calibrated: tuple[Archive, str], tmp_path: Path) -> None:
    archive, run = calibrated
    path = study(tmp_path / "s", f"run:{run}")
    path.write_text(path.read_text().replace("scope =", 'device = "cuda"\nscope ='))
    refused(archive, path, tmp_path / "out", "another kind of device.*one on cuda.*on cpu")
    seeded, published = _of_the_tide(), spec("calibration")
    assert seeded.weights == seeded.checkpoint.identity != msgspec.structs.replace(seeded, device="cuda").weights
    assert published.weights == msgspec.structs.replace(published, device="cuda").weights


def test_a_retracted_or_superseded_calibration_is_refused(calibrated: tuple[Archive, str], tmp_path: Path) -> None:
    archive, run = calibrated
    changed = files(_of_the_tide(), values_amax_0=[5.0, 5.0])
    newer = recorded(archive, _of_the_tide(), changed, tmp_path / "newer", started="2026-01-03T03:04:05Z")
    signed = {"author": "A. Tester", "reason": "the wrong text"}
    archive.append(records.Supersede(format="kv-ledger/supersede/1", run=run, by=newer, **signed))
    refused(archive, study(tmp_path / "s", f"run:{run}"), tmp_path / "out", f"superseded by {newer[:12]}.*the wrong text")
    archive.append(records.Retract(format="kv-ledger/retract/1", run=newer, **signed))
    refused(archive, study(tmp_path / "s", f"run:{newer}"), tmp_path / "out", "retracted.*the wrong text")


def test_only_a_usable_calibration_of_this_checkpoint_is_one(calibrated: tuple[Archive, str], tmp_path: Path) -> None:
    archive, _ = calibrated
    path = tmp_path / "s"
    other = recorded(archive, spec("calibration"), files(spec("calibration")), tmp_path / "1")
    refused(archive, study(path, f"run:{other}"), tmp_path / "out", "calibration of another checkpoint.*Toy-1M")
    capable = recorded(archive, spec(), files(spec()), tmp_path / "2")
    refused(archive, study(path, f"run:{capable}"), tmp_path / "out", "is no calibration.*capability")
    wrongs = [([0.0, 1.0], "no scale can be made of.*values.amax/0 of head 0 is 0"), ([float("nan"), 1.0], "measured nothing usable.*nan")]
    wrongs.append(([-1.0, 1.0], "measured nothing usable.*head 0 is -1"))
    for number, (amax, words) in enumerate(wrongs):
        low = {"values_p9999_0": [0.0, 0.5], "values_p999_0": [0.0, 0.25]}
        evidence = files(_of_the_tide(), values_amax_0=amax, **low)
        bad = recorded(archive, _of_the_tide(study=f"bad{number}"), evidence, tmp_path / f"bad{number}")
        refused(archive, study(path, f"run:{bad}"), tmp_path / "out", words)
    stopped = recorded(archive, _of_the_tide(study="stopped"), files(_of_the_tide()), tmp_path / "3", outcome="interrupted", reason="x")
    refused(archive, study(path, f"run:{stopped}"), tmp_path / "out", "measured nothing usable")
    refused(archive, study(path, "0" * 64), tmp_path / "out", "names no recorded calibration.*run:")
    refused(archive, study(path, "run:ffff"), tmp_path / "out", "ffff")
    with pytest.raises(InputError, match="no archive"):
        freezing.freeze(study(path, "run:ffff"), None, tmp_path / "out")


def test_documents_may_have_several_lengths(tmp_path: Path) -> None:
    path = study(tmp_path / "s", "x", 10)
    text = path.read_text().replace("documents = 2\ntokens = 32", "documents = [2, 1]\ntokens = [32, 64]")
    path.write_text(text.replace('scales = "fixed"\ngranularity = "head"\nscale_source = "x"', 'scales = "unit"'))
    found, _ = freezing.spec_of(*freezing.load_study(path))
    assert [(span.start, span.tokens) for span in found.documents] == [(10, 31), (41, 31), (72, 63)]
    for old, new, words in (("[2, 1]", "[2]", "list beside documents"), ("chunk = 16", "chunk = 16\nstride = 90", "one length")):
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(InputError, match=words):
            freezing.spec_of(*freezing.load_study(path))
        path.write_text(path.read_text().replace(new, old))
