"""Scopes without a dataset from a study to a page: frozen, recorded, verified, claimed, compared and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ledger import claims, comparing, digest, freezing, queries, recording, records, sidebyside, terminal, web
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.verify import verify
from ledger.web import pages, runpage
from tests import factories
from tests.ledger.test_claims import Log

PERFORMANCE = """
study = "toy-speed"
title = "How fast a toy is"
scope = "performance"
device = "cuda"

[checkpoint]
name = "Toy 1M"
source = "random:llama#7"
license = "none"

[checkpoint.config]
hidden_size = 256
num_attention_heads = 2

[performance]
repeats = 7
launches = 5
rotate_bytes = 67108864

[[performance.cases]]
kind = "decode"
batch = [1, 32]
context = [1024, 8192]

[[performance.cases]]
kind = "step"
batch = 32
context = 8192

[[arms]]
name = "sdpa-flash"
role = "control"
implementation = "native"
compute = "bf16"
keys = "bf16"
values = "bf16"
backend = "sdpa:flash"

[[arms]]
name = "k16v8"
role = "candidate"
implementation = "fused"
compute = "bf16"
keys = "bf16"
values = "fp8_e4m3"
scales = "unit"
backend = "kv_fused"
"""

PRODUCTION = (
    PERFORMANCE.partition("[performance]")[0].replace('"performance"', '"production"')
    + """[production]
prompt_tokens = 300
new_tokens = 20
batch = 4

[[arms]]"""
    + PERFORMANCE.partition("[[arms]]")[2].replace("sdpa:flash", "sdpa")
)


def study(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


def recorded(archive: Archive, spec: records.Spec, files: dict[str, bytes], folder: Path, **changes: Any) -> str:
    """Record a result folder of ``spec``; the run's digest."""
    archive.append(spec)
    return recording.record(archive, factories.write_result_folder(folder, factories.result(spec, files, **changes), files)).record


# ---------------------------------------------------------------- freezing


def test_a_case_of_lists_stands_for_every_pair_of_them(tmp_path: Path) -> None:
    spec = freezing.freeze(study(tmp_path, PERFORMANCE), None, tmp_path / "frozen")
    assert spec.format == "kv-ledger/spec/2" and spec.workload is None and spec.device == "cuda"
    assert spec.performance is not None
    assert [case.name for case in spec.performance.cases] == [
        "decode/b1/c1024/d128",
        "decode/b1/c8192/d128",
        "decode/b32/c1024/d128",
        "decode/b32/c8192/d128",
        "step/b32/c8192",
    ]
    assert (tmp_path / "frozen" / "spec.json").read_bytes() == records.encode(spec)
    assert (tmp_path / "frozen" / "inputs").is_dir()


def test_a_production_study_freezes_without_a_dataset(tmp_path: Path) -> None:
    spec = freezing.freeze(study(tmp_path, PRODUCTION), None, tmp_path / "frozen")
    assert spec.production == records.Production(prompt_tokens=300, new_tokens=20, batch=4)
    assert [question.candidate for question in spec.questions()] == ["k16v8"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("batch = [1, 32]\ncontext = [1024, 8192]", "batch = 1\ncontext = 64", "at their best"),
        ("batch = [1, 32]", "batch = [1, 1, 32]", "a case stands twice"),
        ("batch = [1, 32]", "batch = []", "at their best"),
        ("batch = [1, 32]", "batch = 0", "performance.cases[0].batch"),
        ("batch = [1, 32]", 'batch = "all"', "performance.cases[0].batch"),
        ('kind = "step"', 'kind = "leap"', "performance.cases[1]"),
        ("hidden_size = 256\n", "", "performance.cases[0].head_dim is missing"),
        ("repeats = 7", "repeats = 2", "too few samples"),
        ("rotate_bytes = 67108864", "rotations = 1", "rotations"),
        ('device = "cuda"', 'device = "tpu"', "device"),
        ("[performance]", "[production]\nprompt_tokens = 1\nnew_tokens = 1\nbatch = 1\n[performance]", "has a production"),
        ('scope = "performance"', 'scope = "production"', "has a performance"),
        ('scope = "performance"', 'scope = "quality.loss"', "workload is missing"),
    ],
)
def test_a_study_that_cannot_be_is_refused_by_the_key(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in PERFORMANCE
    path = study(tmp_path, PERFORMANCE.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        freezing.freeze(path, None, tmp_path / "frozen")
    assert words in caught.value.message()
    assert not (tmp_path / "frozen").exists()


def test_more_cases_than_anyone_waits_for_are_refused(tmp_path: Path) -> None:
    many = list(range(1, 40))
    path = study(tmp_path, PERFORMANCE.replace("[1, 32]", str(many)).replace("[1024, 8192]", str(many)))
    with pytest.raises(InputError, match="too many"):
        freezing.freeze(path, None, tmp_path / "frozen")


# ---------------------------------------------------------------- recorded and verified


def test_a_performance_run_is_recorded_verified_and_shown(
    archive: Archive, database_url: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = factories.performance_spec()
    name = recorded(archive, spec, factories.timings(spec), tmp_path / "result")
    report = verify(archive.folder, database_url)
    assert report.ok, report.findings
    run = archive.run(name)
    assert run.format == "kv-ledger/run/2" and run.kernels
    document = queries.run(archive, name)
    json.dumps(document, allow_nan=False)
    assert digest.canonical(records.plain(archive.spec(run.spec))) == digest.canonical(document["spec"])
    group = document["groups"]["decode/k16v8/b32/c8192/d128"]
    assert group["kernel"] == "kv_fused bf16/fp8_e4m3"
    assert {"median_us", "spread_us", "share_of_copy", "ratio_to_best_native"} <= group.keys()
    assert document["groups"]["step/Toy-1M/k16v8/b32/c8192"]["ratio_to_best_native"] == pytest.approx(190 / 248)
    assert [arm["contradictions"] for arm in document["arms"]] == [[]] * len(spec.arms)
    (row,) = [row for row in queries.status(archive)["rows"] if row["arm"].startswith("k16v8:")]
    assert row["claim"] == "measured, not qualified"
    assert row["workload"].startswith(
        "decode, append, prefill, step, capacity; batch 1 to 64, context 8,192 to 32,768, head dim 128; 6 cases"
    )
    assert row["workload"].endswith("page 64, 7 × 5 launches over 256 MiB")
    assert row["baseline"] == "best native: K bf16 / V bf16, the fastest of sdpa:flash, flashinfer, transformers and fused 16 bit"
    terminal.run(document)
    terminal.status(queries.status(archive))
    text = capsys.readouterr().out
    assert "Copy bandwidth of this run: 4 GB/s (torch.neg int32)" in text
    (line,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["decode/b32/c8192/d128", "k16v8"]]
    assert line[2:] == ["195.7", "5.7", "0.958099", "0.766129", "0.002", "kv_fused", "bf16/fp8_e4m3"]
    assert "Capacity" in text and "8,000" in text
    assert "measured, not qualified" in text


def test_the_baseline_names_the_contenders_that_ran(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive, spec = make_archive(), factories.performance_spec()
    archive.append(spec)
    assert "sdpa:flash, flashinfer, transformers and fused" in queries.status(archive)["rows"][0]["baseline"]
    gone: Any = {(case.name, "flashinfer"): {"refused": "not installed"} for case in factories.CASES}
    arms = tuple(
        factories.arm_result(arm, **({"outcome": "refused", "reason": "not installed"} if arm.name == "flashinfer" else {}))
        for arm in spec.arms
    )
    recorded(archive, spec, factories.timings(spec, gone), tmp_path / "result", arms=arms)
    (row,) = [row for row in queries.status(archive)["rows"] if row["arm"].startswith("k16v8:")]
    assert row["baseline"] == "best native: K bf16 / V bf16, the fastest of sdpa:flash, transformers and fused 16 bit"
    assert row["claim"] == "measured, not qualified" and "contenders left out: flashinfer (refused in 3 of 3 cases)" in row["reason"]
    gone |= {(case.name, arm): {"refused": "no"} for case in factories.CASES for arm in ("sdpa-flash", "transformers")}
    other = factories.performance_spec(study="alone", checkpoint=factories.checkpoint(name="another", source="file:another.safetensors"))
    other = msgspec.structs.replace(other, device="cpu")
    recorded(archive, other, factories.timings(other, gone), tmp_path / "alone")
    (row,) = [row for row in queries.status(archive)["rows"] if row["arm"].startswith("k16v8:") and row["study"] == "alone"]
    assert row["baseline"] == "best native: no native contender was timed"
    assert row["claim"] == "invalid" and row["reason"].startswith("void: no native contender")
    assert verify(archive.folder).ok


def test_a_production_run_is_recorded_verified_and_shown(
    archive: Archive, database_url: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = factories.production_spec()
    files = factories.checks(spec, {("batch_independence", "k8v8"): {"differing": 2, "largest": 0.25}})
    name = recorded(archive, spec, files, tmp_path / "result")
    report = verify(archive.folder, database_url)
    assert report.ok, report.findings
    assert archive.run(name).format == "kv-ledger/run/1"  # it has nothing that format 1 does not know
    rows = {row["arm"].partition(":")[0]: row["claim"] for row in queries.status(archive)["rows"]}
    assert rows == {"k16v16": "passes", "k16v8": "passes", "k8v8": "fails"}
    document = queries.run(archive, name)
    assert document["groups"] == {} and document["spec"]["production"]["prompt_tokens"] == 100
    terminal.run(document)
    text = capsys.readouterr().out
    assert "batch_independence" in text and "1,000 compared, 2 differ, by 0.25 at most" in text


def test_a_completed_run_without_its_evidence_is_refused(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    for spec, missing in ((factories.performance_spec(), "cases.jsonl"), (factories.production_spec(), "checks.jsonl")):
        (tmp_path / spec.study).mkdir()
        with pytest.raises(InputError) as caught:
            recorded(archive, spec, {}, tmp_path / spec.study)
        assert f"evidence {missing} is missing" in caught.value.found


def test_a_run_that_was_cut_short_is_kept_and_judged_invalid(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive, spec = make_archive(), factories.performance_spec()
    files = {name: data for name, data in factories.timings(spec).items() if name.endswith(("0000.safetensors", "0001.safetensors"))}
    name = recorded(archive, spec, files, tmp_path / "result", outcome="interrupted", reason="Ctrl-C")
    assert {decision.status for decision in archive.run(name).decisions} == {"invalid"}
    assert verify(archive.folder).ok


def test_a_void_run_claims_nothing(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive, spec = make_archive(), factories.performance_spec()
    name = recorded(archive, spec, factories.timings(spec, copy_us=1500.0), tmp_path / "result")
    rows = queries.status(archive)["rows"]
    assert {row["claim"] for row in rows} == {"invalid"}
    assert all("void" in row["reason"] for row in rows)
    assert verify(archive.folder).ok
    page = runpage.run_page(queries.run(archive, name))
    assert page.cases  # what was timed is shown all the same


def forged(archive: Archive, spec: records.Spec, files: dict[str, bytes], **changes: Any) -> None:
    """Append a run whose derived parts are not those of its evidence."""
    archive.append(spec)
    found = factories.result(spec, files)
    run = factories.run(spec, found, **changes)
    archive.append(run, {digest.sha256(data): data for data in (records.encode(found), *files.values())})


def test_figures_verdicts_and_kernels_that_do_not_follow_are_found(make_archive: Callable[..., Archive]) -> None:
    archive, spec = make_archive(), factories.performance_spec()
    files = factories.timings(spec)
    faster = records.Measurement(arm="k16v8", name="decode/k16v8/b32/c8192/d128/median_us", value=1.0, unit="microseconds")
    kernel = records.Kernel(case="decode/b32/c8192/d128", arm="k16v8", kernel="magic")
    forged(archive, spec, files, format="kv-ledger/run/2", measurements=(faster,), kernels=(kernel,))
    findings = verify(archive.folder).findings
    assert {finding.kind for finding in findings} == {"measurement", "decision", "kernel"}
    assert any("'magic', the evidence says 'kv_fused bf16/fp8_e4m3'" in finding.detail for finding in findings)
    assert any("median_us of k16v8: value is recorded as 1, " in finding.detail for finding in findings)


def test_a_pass_that_does_not_follow_is_found(make_archive: Callable[..., Archive]) -> None:
    archive, spec = make_archive(), factories.production_spec()
    passed = records.Decision(candidate="k16v8", baseline="native", family="production", status="passes")
    forged(archive, spec, factories.checks(spec, {("poisoned_pages", "k16v8"): {"differing": 1}}), decisions=(passed,))
    details = [finding.detail for finding in verify(archive.folder).findings]
    assert any("status is recorded as 'passes', the samples give 'fails'" in detail for detail in details)


@pytest.mark.parametrize("name", ["cases.jsonl", "timings/0000.safetensors"])
def test_evidence_that_was_altered_is_found(make_archive: Callable[..., Archive], tmp_path: Path, name: str) -> None:
    archive, spec = make_archive(), factories.performance_spec()
    files = factories.timings(spec)
    recorded(archive, spec, files, tmp_path / "result")
    sha256 = digest.sha256(files[name])
    (path,) = [path for path in (archive.folder / "objects").rglob("*") if path.is_file() and path.read_bytes() == files[name]]
    path.chmod(0o600)
    path.write_bytes(files[name].replace(b"190", b"150") + b" ")
    (finding,) = [finding for finding in verify(archive.folder).findings if finding.kind == "object_changed"]
    assert finding.object == sha256 and name in finding.detail


# ---------------------------------------------------------------- claims


def quality(checkpoint: records.Checkpoint, **changes: Any) -> records.Spec:
    """A loss study of the fused K16/V8 arm on a GPU."""
    arms = (factories.CONTENDERS[0], *factories.FUSED)
    arms = (msgspec.structs.replace(arms[0], backend="sdpa"), *arms[1:])
    contrasts = (records.Contrast(candidate="k16v8", baseline="k16v16", family="loss"),)
    fields = {"format": "kv-ledger/spec/2", "device": "cuda", "checkpoint": checkpoint, "arms": arms, "contrasts": contrasts}
    return factories.spec(**{**fields, **changes})


GPU = factories.host(accelerator="NVIDIA H200")
SPEED = factories.performance_spec()


def speed_claim(loss: records.Spec | None, status: str, host: records.Host = GPU) -> records.Claim:
    """The claim on K16/V8's speed, beside a loss study that ended in ``status``."""
    log = Log()
    if loss is not None:
        log.add(loss)
        log.run(loss, status, result={"host": host})
    log.add(SPEED)
    log.run(SPEED, "measured", result={"host": GPU})
    (found,) = [claim for claim in log.claims() if claim.scope == "performance" and claim.arm.startswith("k16v8:")]
    return found


def test_speed_is_measured_only_beside_established_quality_of_the_same_policy() -> None:
    found = speed_claim(quality(SPEED.checkpoint), "established")
    assert found.status == "measured"
    assert found.reason.endswith("quality.loss established by study toy, through prefill in chunks of 8")


@pytest.mark.parametrize(("chunk", "words"), [(32, "through prefill in chunks of 32"), (1, "token by token")])
def test_the_chunk_of_the_arm_itself_is_the_one_that_is_said(chunk: int, words: str) -> None:
    loss = quality(SPEED.checkpoint)
    arms = tuple(msgspec.structs.replace(arm, chunk=chunk) if arm.name == "k16v8" else arm for arm in loss.arms)
    assert speed_claim(msgspec.structs.replace(loss, arms=arms), "established").reason.endswith(words)


ADVANTAGE = (records.Contrast(candidate="k16v8", baseline="k8v8", family="advantage"),)
IDENTITY = (records.Contrast(candidate="k16v8", baseline="k16v16", family="identity"),)
DYNAMIC = (
    *factories.CONTENDERS[:1],
    factories.FUSED[0],
    factories.fused("k16v8", "bf16", "fp8_e4m3", scales="dynamic", granularity="token_head"),
)
REFERENCE = (
    *factories.FUSED[:1],
    msgspec.structs.replace(factories.FUSED[1], implementation="reference", backend="sdpa"),
    msgspec.structs.replace(factories.CONTENDERS[0], backend="sdpa"),
)


@pytest.mark.parametrize(
    ("loss", "status", "host"),
    [
        (None, "", GPU),
        (quality(SPEED.checkpoint), "not established", GPU),
        (quality(SPEED.checkpoint), "degraded", GPU),
        (quality(SPEED.checkpoint), "invalid", GPU),
        (quality(SPEED.checkpoint), "established", factories.host()),
        (quality(factories.checkpoint(source="random:llama#1", files=(), config={}, seed=1)), "established", GPU),
        (quality(SPEED.checkpoint, contrasts=ADVANTAGE), "established", GPU),
        (quality(SPEED.checkpoint, contrasts=IDENTITY), "established", GPU),
        (quality(SPEED.checkpoint, arms=DYNAMIC), "established", GPU),
        (quality(SPEED.checkpoint, arms=REFERENCE), "established", GPU),
    ],
    ids=["none", "bound", "harm", "invalid", "hardware", "checkpoint", "advantage", "identity", "scales", "implementation"],
)
def test_speed_beside_anything_less_is_not_qualified(loss: records.Spec | None, status: str, host: records.Host) -> None:
    found = speed_claim(loss, status, host)
    assert found.status == "measured, not qualified"
    assert "quality.loss is" in found.reason


def test_one_study_that_shows_harm_outweighs_one_that_establishes() -> None:
    log = Log()
    other = msgspec.structs.replace(quality(SPEED.checkpoint, workload=factories.workload(5)), study="wider")
    for loss, status in ((quality(SPEED.checkpoint), "established"), (other, "degraded")):
        log.add(loss)
        log.run(loss, status, result={"host": GPU})
    log.add(SPEED)
    log.run(SPEED, "measured", result={"host": GPU})
    found = next(claim for claim in log.claims() if claim.scope == "performance" and claim.arm.startswith("k16v8:"))
    assert (found.status, "quality.loss is degraded by study wider" in found.reason) == ("measured, not qualified", True)


def test_a_retracted_loss_study_no_longer_qualifies() -> None:
    log = Log()
    loss = quality(SPEED.checkpoint)
    log.add(loss)
    log.retract(log.run(loss, "established", result={"host": GPU}))
    log.add(SPEED)
    log.run(SPEED, "measured", result={"host": GPU})
    assert {claim.status for claim in log.claims() if claim.scope == "performance"} == {"measured, not qualified"}


def test_speed_on_seeded_weights_is_synthetic_and_not_qualified() -> None:
    spec = factories.performance_spec(checkpoint=factories.checkpoint(source="random:llama#0", files=(), config={}, seed=0))
    log = Log()
    log.add(spec)
    log.run(spec, "measured", result={"host": GPU})
    assert {claim.words for claim in log.claims()} == {"synthetic measured, not qualified"}


def test_other_cases_other_contenders_and_other_pages_are_other_claims() -> None:
    def keys(spec: records.Spec) -> set[str]:
        return {claim.key for claim in claims.derive([("a" * 64, spec)], {})}

    timed: Any = SPEED.performance
    again = factories.performance_spec(performance=msgspec.structs.replace(timed, seed=1))
    assert keys(again) == keys(SPEED)  # to choose another seed is to try again
    for changes in (
        {"cases": timed.cases[:3], "budget_bytes": None},
        {"page": 16},
        {"budget_bytes": 1 << 31},
        {"repeats": 30},
        {"launches": 6},
        {"rotate_bytes": 1 << 29},
    ):
        assert not keys(factories.performance_spec(performance=msgspec.structs.replace(timed, **changes))) & keys(SPEED)
    fewer = tuple(arm for arm in SPEED.arms if arm.name != "flashinfer")
    assert not keys(factories.performance_spec(arms=fewer)) & keys(SPEED)


# ---------------------------------------------------------------- compared, and on pages


def test_a_second_run_is_within_where_its_ratios_are(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    spec = factories.performance_spec(tolerances={"share_of_copy": 0.05, "ratio_to_best_native": 0.05, "relative_error": 0.001})
    first = recorded(archive, spec, factories.timings(spec), tmp_path / "first")
    later = {"started": "2026-01-03T03:04:05Z"}
    near: Any = {("decode/b32/c8192/d128", "k16v8"): {"times": [195.0] * 7, "relative_error": 0.0025}}
    far: Any = {("decode/b32/c8192/d128", "k16v8"): {"times": [240.0] * 7}}
    second = recorded(archive, spec, factories.timings(spec, near), tmp_path / "second", **later)
    third = recorded(archive, spec, factories.timings(spec, far), tmp_path / "third", **later)
    assert comparing.compare(archive, first, second).verdict == "within"
    outside = comparing.compare(archive, first, third)
    assert outside.verdict == "outside"
    assert "ratio_to_best_native" in outside.reason
    assert outside.divergence is not None and outside.divergence.series == "decode/b32/c8192/d128|k16v8"
    found = sidebyside.side_by_side(queries.run(archive, first), queries.run(archive, third))
    assert {item["name"] for item in found["measurements"] if item["differ"]} >= {"decode/k16v8/b32/c8192/d128/median_us"}
    assert {item["differ"] for item in found["facts"] if item["name"].startswith("kernels.")} == {False}
    assert pages.compare_page([], found, first, third).measurements


def test_the_pages_show_cases_by_arm_and_checks_by_arm(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    speed, serving = factories.performance_spec(), factories.production_spec()
    refused: Any = {("decode/b32/c8192/d128", "flashinfer"): {"refused": "<b>not</b> installed"}}
    fast = recorded(archive, speed, factories.timings(speed, refused), tmp_path / "speed")
    served = recorded(archive, serving, factories.checks(serving, {("poisoned_pages", "k8v8"): {"compared": 0}}), tmp_path / "serving")
    page = runpage.run_page(queries.run(archive, fast))
    times, capacity = page.cases
    assert times.columns == ("sdpa-flash", "flashinfer", "transformers", "flashinfer-e4m3", "k16v16", "k16v8", "k8v8")
    row = next(row for row in times.rows if row.case == "decode/b32/c8192/d128")
    cell = row.cells[times.columns.index("k16v8")]
    assert cell is not None and cell.figure is not None and cell.figure.text == "195.7"
    append = next(row for row in times.rows if row.case == "append/b32/c8192/d128").cells[times.columns.index("k16v8")]
    assert append is not None and "no native contender" in append.lines
    assert "0.766 of best native" in cell.lines and any("of copy" in line for line in cell.lines)
    assert capacity.columns == ("k16v16", "k16v8", "k8v8") and not page.matrices
    checks = runpage.run_page(queries.run(archive, served)).checks
    assert checks is not None
    states = {row.check: [cell.mark.words for cell in row.cells if cell] for row in checks.rows}
    assert states["poisoned_pages"] == ["passes", "passes", "invalid"]
    archive.close()
    texts = pages_of(archive.folder, fast, served)
    assert "0.766 of best native" in texts[0] and "&lt;b&gt;not&lt;/b&gt; installed" in texts[0] and "<b>not" not in texts[0]
    assert "measured, not qualified" in texts[0]
    assert "Production checks" in texts[1] and "nothing was compared" in texts[1]
    assert "toy-speed" in texts[2]


def pages_of(folder: Path, *runs: str) -> list[str]:
    """The pages of runs, and the list of them, as the server sends them."""
    from fastapi.testclient import TestClient

    with TestClient(web.create_app(folder), base_url="http://127.0.0.1:8000") as client:
        answers = [client.get(path) for path in (*(f"/runs/{run}" for run in runs), "/runs", "/", "/log")]
        for run in runs:
            assert client.get(f"/runs/{run}.json").status_code == 200
    assert {answer.status_code for answer in answers} == {200}
    return [answer.text for answer in answers]
