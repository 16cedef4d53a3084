"""The archive that ships: it verifies, says what README and docs/results.md say, and tells the formats apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ledger import queries
from ledger.archive import Archive
from ledger.verify import verify

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence"
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
STUDIES = ("smollm2-135m-loss", "gemma3-270m-loss", "smollm2-135m-rescaled-loss")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An index of its own, so that a test leaves the checkout as it was."""
    return f"sqlite:///{tmp_path_factory.mktemp('index')}/ledger.db"


@pytest.fixture(scope="module")
def archive(url: str) -> Iterator[Archive]:
    with Archive.open(EVIDENCE, url) as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(archive: Archive) -> dict[str, dict[str, Any]]:
    """The first run of each study that still counts, as ``show --json`` has it."""
    found: dict[str, dict[str, Any]] = {}
    for row in queries.runs(archive):
        if not row["superseded_by"] and not row["retracted"]:
            found.setdefault(row["study"], queries.run(archive, row["id"]))
    return found


def figures(run: dict[str, Any], arm: str, against: str | None = None) -> dict[str, Any]:
    """Measurements of an arm by name."""
    found = next(item for item in run["arms"] if item["name"] == arm)
    return {item["name"]: item["value"] for item in found["measurements"] if item["against"] == against}


def verdict(run: dict[str, Any], candidate: str, baseline: str) -> str:
    """Status of a contrast."""
    return next(str(item["status"]) for item in run["decisions"] if (item["candidate"], item["baseline"]) == (candidate, baseline))


def test_it_verifies_with_its_index(archive: Archive, url: str) -> None:
    report = verify(EVIDENCE, url)
    assert report.findings == []
    assert not report.notes
    assert report.measurements > 0


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_was_recorded_clean_from_a_commit(runs: dict[str, dict[str, Any]], study: str) -> None:
    run = runs[study]
    assert (run["outcome"], run["warnings"]) == ("completed", [])
    assert (run["harness"]["matched"], run["harness"]["state"]) == ("commit", "clean")
    assert run["spec"]["workload"]["inputs"] == "digest"
    assert not any(item["name"] == "inputs.safetensors" for item in run["evidence"])


@pytest.mark.parametrize("study", STUDIES)
def test_our_cache_in_the_compute_format_is_the_stock_cache(runs: dict[str, dict[str, Any]], study: str) -> None:
    assert verdict(runs[study], "own-fp32", "native") == "passes"


@pytest.mark.parametrize("study", STUDIES)
def test_storage_is_measured_at_three_quarters_and_at_half(runs: dict[str, dict[str, Any]], study: str) -> None:
    for arm, share in (("k16v8", 0.75), ("k8v8", 0.5), ("k16v8-dynamic", 0.75), ("k8v8-dynamic", 0.5)):
        found = figures(runs[study], arm, "k16v16")
        assert found["cache_ratio"] == pytest.approx(share, rel=0.01)
        assert (found["cache_ratio_with_scales"] > found["cache_ratio"]) == arm.endswith("dynamic")


@pytest.mark.parametrize("study", STUDIES)
def test_values_in_fp8_move_losses_far_less_than_keys_in_fp8(runs: dict[str, dict[str, Any]], study: str) -> None:
    run = runs[study]
    for narrow, wide in (("k16v8", "k8v8"), ("k16v8-dynamic", "k8v8-dynamic")):
        one, other = figures(run, narrow, "k16v16"), figures(run, wide, "k16v16")
        assert one["loss_difference_sd"] < 0.5 * other["loss_difference_sd"]
        assert one["kl_mean"] < 0.2 * other["kl_mean"]
        assert verdict(run, narrow, wide) == "established"
    assert verdict(run, "k16v8", "k16v16") == "established"


def test_the_positive_control_separates_the_formats(runs: dict[str, dict[str, Any]]) -> None:
    run, unaltered = runs["smollm2-135m-rescaled-loss"], runs["smollm2-135m-loss"]
    assert verdict(run, "k8v8", "k16v16") == "degraded"
    assert verdict(run, "k8v16", "k16v16") == "degraded"
    assert all(claim["claim"].startswith("synthetic ") for claim in run["claims"])
    assert figures(run, "native") == figures(unaltered, "native")  # in fp32 nothing has changed


@pytest.mark.parametrize(("study", "arm"), [(study, arm) for study in STUDIES for arm in ("k16v8", "k8v8")], ids=lambda value: str(value))
def test_the_readme_prints_the_recorded_figures(runs: dict[str, dict[str, Any]], study: str, arm: str) -> None:
    readme = README.read_text(encoding="utf-8")
    run = runs[study]
    found = figures(run, arm, "k16v16")
    tail = f"{found['kl_p999']:.3f}" if found["kl_p999"] < 1 else f"{found['kl_p999']:.1f}"
    row = (
        f"| {found['loss_difference_mean']:+.4f} | {found['loss_difference_sd']:.3f} | {tail} "
        f"| {100 * found['top1_disagreement']:.1f} % | {found['cache_ratio']:.3f} |"
    )
    words = {"k16v8": "K16/V8 against 16/16", "k8v8": "symmetric FP8 against 16/16"}
    said = ("*synthetic* " if run["checkpoint"]["synthetic"] else "") + f"**{verdict(run, arm, 'k16v16')}**"
    assert any(words[arm] in line and row in line and said in line for line in readme.splitlines()), row
    assert run["id"][:12] in readme


# ---------------------------------------------------------------- on a GPU

PRODUCTION = (
    "smollm2-135m-production",
    "gemma3-270m-production",
    "qwen3-8b-seeded-production",
    "qwen3-5-9b-seeded-production",
    "gemma-4-12b-seeded-production",
)
PERFORMANCE = (
    "performance-qwen3-8b",
    "performance-qwen2-5-7b",
    "performance-ministral-3-8b",
    "performance-qwen3-5-9b",
    "performance-gemma-3",
    "performance-gemma-3-27b",
)
GPU = (
    *PRODUCTION,
    *PERFORMANCE,
    *(
        f"{model}-{scope}"
        for model in ("smollm2-135m", "gemma3-270m")
        for scope in ("fused-loss", "loss-8k", "calibration", "state-memory", "capability", "grid-loss")
    ),
    *(
        f"smollm2-135m-{scope}"
        for scope in ("fused-decode-loss", "gsm8k", "fused-gsm8k", "grid-task", "rescaled-grid-loss", "rescaled-grid-task")
    ),
    *(f"{model}-seeded-{scope}" for model in ("ministral-3-8b", "qwen3-5-9b", "gemma-4-12b") for scope in ("capability", "state-memory")),
)
CASES = {
    "performance-qwen3-8b": (
        "decode/b32/c8192/d128",
        "decode/b8/c32768/d128",
        "decode/b128/c1024/d128",
        "decode/b32/c1024/d128",
        "decode/b1/c8192/d128",
        "decode/b64/c128-32768/d128",
        "decode/b32/c8192/d128/w1024",
        "decode/b32/c8192/d128/cap50",
        "prefill/b1/c8192/d128/q2048",
        "step/b32/c8192",
    ),
    "performance-qwen3-5-9b": ("decode/b32/c8192/d256",),
}
"""Cases that the README's table shows."""


def timed(run: dict[str, Any], case: str) -> dict[str, dict[str, Any]]:
    """The timed arms of a case, by name."""
    return {group["arm"]: group for group in run["groups"].values() if group["case"] == case and "median_us" in group and group["arm"]}


def case_row(run: dict[str, Any], case: str) -> str:
    """A row of the README's table of times: the best native, then each fused format against it."""
    arms = timed(run, case)
    best = min((arm for arm in arms.values() if arm["ratio_to_best_native"] >= 1), key=lambda arm: arm["ratio_to_best_native"])
    cells = [f"`{case}`", f"{best['median_us']:,.1f} ({best['arm'].replace('k16v16', 'our 16/16')})"]
    ratios = [f"{arms[name]['ratio_to_best_native']:.2f}" for name in ("k16v16", "k16v8", "k8v8")]
    cells += [ratios[0], f"**{ratios[1]}**", f"{arms['k16v8']['median_us']:,.1f}", ratios[2]]
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("study", GPU)
def test_every_gpu_study_was_recorded_clean_from_a_commit(runs: dict[str, dict[str, Any]], study: str) -> None:
    run = runs[study]
    assert run["outcome"] == "completed"
    assert (run["harness"]["matched"], run["harness"]["state"]) == ("commit", "clean")
    assert run["host"]["accelerator"] == "NVIDIA H200"


@pytest.mark.parametrize("study", PERFORMANCE)
def test_times_are_measured_and_say_that_quality_is_not_established(runs: dict[str, dict[str, Any]], study: str) -> None:
    assert {claim["claim"] for claim in runs[study]["claims"]} == {"synthetic measured, not qualified"}


@pytest.mark.parametrize(("study", "case"), [(study, case) for study, cases in CASES.items() for case in cases])
def test_the_readme_prints_the_recorded_times(runs: dict[str, dict[str, Any]], study: str, case: str) -> None:
    readme = README.read_text(encoding="utf-8")
    row = case_row(runs[study], case)
    assert row in readme, row
    assert runs[study]["id"][:12] in readme


@pytest.mark.parametrize("study", PRODUCTION)
def test_every_fused_format_passes_every_check(runs: dict[str, dict[str, Any]], study: str) -> None:
    run = runs[study]
    found = {item["candidate"]: item["status"] for item in run["decisions"]}
    dynamic = () if study == "gemma-4-12b-seeded-production" else ("k16v8-dynamic",)
    assert found == dict.fromkeys(("k16v16", "k16v8", "k8v8", *dynamic), "passes")
    assert all(len(item["gates"]) == 12 for item in run["decisions"])
    assert run["id"][:12] in RESULTS.read_text(encoding="utf-8")


FUSED = {"smollm2-135m-fused-loss": "not established", "gemma3-270m-fused-loss": "established"}
"""Studies of losses through the fused kernels, and what came out for K16/V8 against 16/16."""


@pytest.mark.parametrize("study", FUSED)
def test_the_fused_kernels_move_losses_as_the_reference_caches_do(runs: dict[str, dict[str, Any]], study: str) -> None:
    run = runs[study]
    assert verdict(run, "k16v16", "native") == verdict(run, "fused-k16v16", "native") == "established"
    assert verdict(run, "fused-k16v8", "k16v8") == verdict(run, "fused-k16v8", "fused-k8v8") == "established"
    assert verdict(run, "fused-k16v8", "fused-k16v16") == FUSED[study]
    assert verdict(run, "fused-k8v8", "fused-k16v16") == "not established"
    whole = figures(run, "fused-k16v16", "native")["cache_ratio"]
    for arm, share in (("fused-k16v8", 0.75), ("fused-k8v8", 0.5)):
        assert figures(run, arm, "native")["cache_ratio"] / whole == pytest.approx(share, rel=0.01)


def loss_row(found: dict[str, Any], words: str, status: str) -> str:
    """A row of the tables of losses on a GPU, without the model."""
    return (
        f"| {words} | {found['loss_difference_mean']:+.4f} | {found['loss_difference_sd']:.3f} | {found['kl_p999']:.3f} "
        f"| {100 * found['top1_disagreement']:.1f} % | {found['cache_ratio']:.3f} | **{status}** |"
    )


@pytest.mark.parametrize("study", FUSED)
def test_the_results_prints_the_fused_losses(runs: dict[str, dict[str, Any]], study: str) -> None:
    results, run = RESULTS.read_text(encoding="utf-8"), runs[study]
    whole = figures(run, "fused-k16v16", "native")["cache_ratio"]
    for arm, words in (("fused-k16v8", "fused K16/V8"), ("fused-k8v8", "fused symmetric FP8")):
        share = figures(run, arm, "native")["cache_ratio"] / whole
        row = loss_row({**figures(run, arm, "fused-k16v16"), "cache_ratio": share}, words, verdict(run, arm, "fused-k16v16"))
        assert row in results, row
    assert run["id"][:12] in results


def test_the_results_print_the_losses_of_the_decode_kernels(runs: dict[str, dict[str, Any]]) -> None:
    results, run = RESULTS.read_text(encoding="utf-8"), runs["smollm2-135m-fused-decode-loss"]
    whole = figures(run, "fused-k16v16", "k16v16")["cache_ratio"]
    for arm, against, words in (
        ("fused-k16v16", "k16v16", "fused 16/16 against the reference cache"),
        ("fused-k16v8", "fused-k16v16", "fused K16/V8 against fused 16/16"),
    ):
        share = figures(run, arm, "k16v16")["cache_ratio"] / whole
        row = loss_row({**figures(run, arm, against), "cache_ratio": share}, words, verdict(run, arm, against))
        assert row in results, row
        assert verdict(run, arm, against) == "not established"
    assert f"{100 * figures(run, 'fused-k16v16-repeat', 'fused-k16v16')['top1_disagreement']:.1f} % of top-1" in results
    assert run["id"][:12] in results


ASKED = {
    "smollm2-135m-gsm8k": {
        ("k16v16", "native"): "16/16 against the stock cache, fp32",
        ("k16v16-repeat", "k16v16"): "16/16 in other chunks",
        ("k16v8", "k16v16"): "K16/V8 against 16/16",
        ("k8v8", "k16v16"): "symmetric FP8 against 16/16",
    },
    "smollm2-135m-fused-gsm8k": {
        ("fused-k16v16", "native"): "fused 16/16 against the stock cache, bf16",
        ("fused-k16v8", "fused-k16v16"): "fused K16/V8 against fused 16/16",
        ("fused-k8v8", "fused-k16v16"): "fused symmetric FP8 against fused 16/16",
    },
}
"""Tasks, and what the results call an arm against another."""


def answer_row(run: dict[str, Any], arm: str, against: str, words: str) -> str:
    """A row of the table of answers: right of all, the same of those that can be compared, the same text."""
    alone, paired = figures(run, arm), figures(run, arm, against)
    right = [f"{round(alone['items'] * alone[f'{how}/accuracy'])} of {alone['items']}" for how in ("strict", "flexible")]
    same = [f"{100 * paired[f'{how}/answer_preservation']:.0f} % of {paired[f'{how}/answers_compared']}" for how in ("strict", "flexible")]
    return "| " + " | ".join([words, *right, *same, f"{100 * paired['identical_answers'] / alone['items']:.0f} %"]) + " |"


@pytest.mark.parametrize("study", ASKED)
def test_a_task_beyond_the_model_is_insensitive_and_its_answers_are_compared(runs: dict[str, dict[str, Any]], study: str) -> None:
    results, run = RESULTS.read_text(encoding="utf-8"), runs[study]
    assert all(item["status"] == "invalid" and item["reason"].startswith("task insensitive") for item in run["decisions"])
    for (arm, against), words in ASKED[study].items():
        row = answer_row(run, arm, against, words)
        assert row in results, row
    assert run["id"][:12] in results


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_a_trained_model_is_captured(runs: dict[str, dict[str, Any]], model: str) -> None:
    run = runs[f"{model}-capability"]
    assert {claim["claim"] for claim in run["claims"]} == {"passes"}
    assert figures(run, "native")["captures"] == figures(run, "k16v8")["captures"] == 32
    assert run["id"][:12] in RESULTS.read_text(encoding="utf-8")


SCALES = {
    "unit": "1",
    "fixed-tensor": "fixed, a layer",
    "fixed-head": "fixed, a head",
    "dynamic-tensor": "dynamic, a layer",
    "dynamic-head": "dynamic, a head",
    "dynamic-page-head": "dynamic, a page and head",
    "dynamic-token-head": "dynamic, a token and head",
}
"""Scale policies and granularities of the grids, and what the results call them."""
GRIDS = {
    "smollm2-135m-grid": ("smollm2-135m-grid-loss", "smollm2-135m-grid-task"),
    "smollm2-135m-rescaled-grid": ("smollm2-135m-rescaled-grid-loss", "smollm2-135m-rescaled-grid-task"),
    "gemma3-270m-grid": ("gemma3-270m-grid-loss", None),
}


def grid_row(losses: dict[str, Any], answers: dict[str, Any] | None, scales: str) -> str:
    """A row of a grid: each format's tail of KL, top-1 and result, then the answers kept, then the bytes with their scales."""
    cells = [SCALES[scales]]
    kept, share = [], []
    for form in ("k16v8", "k8v16", "k8v8"):
        arm = f"{form}-{scales}"
        found = figures(losses, arm, "k16v16")
        tail = f"{found['kl_p999']:.3f}" if found["kl_p999"] < 1 else f"{found['kl_p999']:.1f}"
        cells.append(f"{tail}, {100 * found['top1_disagreement']:.1f} %: {verdict(losses, arm, 'k16v16')}")
        share.append(f"{found['cache_ratio_with_scales']:.3f}")
        if answers is not None:
            kept.append(f"{100 * figures(answers, arm, 'k16v16')['strict/answer_preservation']:.0f} %")
    return "| " + " | ".join([*cells, *([" / ".join(kept)] if kept else []), f"{share[0]} / {share[2]}"]) + " |"


@pytest.mark.parametrize(("grid", "scales"), [(grid, scales) for grid in GRIDS for scales in SCALES])
def test_the_results_print_the_grids(runs: dict[str, dict[str, Any]], grid: str, scales: str) -> None:
    results = RESULTS.read_text(encoding="utf-8")
    losses, answers = (runs.get(name or "") for name in GRIDS[grid])
    assert losses is not None
    row = grid_row(losses, answers, scales)
    assert row in results, row
    assert all(run["id"][:12] in results for run in (losses, answers) if run)
    assert verdict(losses, f"k16v8-{scales}", f"k8v8-{scales}") == "established"


def test_no_scale_saves_8_bit_keys_of_the_positive_control(runs: dict[str, dict[str, Any]]) -> None:
    losses, answers = runs["smollm2-135m-rescaled-grid-loss"], runs["smollm2-135m-rescaled-grid-task"]
    assert figures(losses, "native") == figures(runs["smollm2-135m-grid-loss"], "native")  # in fp32 nothing has changed
    for scales in SCALES:
        for form in ("k8v16", "k8v8"):
            decided = next(item for item in losses["decisions"] if (item["candidate"], item["baseline"]) == (f"{form}-{scales}", "k16v16"))
            assert decided["status"] == "degraded"
            assert all(gate["harmed"] for gate in decided["gates"])
            assert figures(answers, f"{form}-{scales}", "k16v16")["strict/answer_preservation"] < 0.05
        assert figures(answers, f"k16v8-{scales}", "k16v16")["strict/answer_preservation"] > 0.75
    assert {item["status"] for item in answers["decisions"]} == {"invalid"}


@pytest.mark.parametrize("study", ["smollm2-135m-loss-8k", "gemma3-270m-loss-8k"])
def test_the_results_prints_the_losses_at_8k(runs: dict[str, dict[str, Any]], study: str) -> None:
    results, run = RESULTS.read_text(encoding="utf-8"), runs[study]
    for arm, words in (("k16v8", "K16/V8"), ("k8v8", "symmetric FP8")):
        row = loss_row(figures(run, arm, "k16v16"), words, verdict(run, arm, "k16v16"))
        assert row in results, row
    assert verdict(run, "k16v8", "k16v16") == verdict(run, "k16v8", "k8v8") == "established"
    assert run["id"][:12] in results


SEEDED = {"ministral-3-8b": "Ministral 3 8B", "qwen3-5-9b": "Qwen3.5 9B", "gemma-4-12b": "Gemma 4 12B"}
"""Seeded full-size configurations, and how the results call them."""


@pytest.mark.parametrize("model", SEEDED)
def test_the_results_prints_the_bytes_of_every_context(runs: dict[str, dict[str, Any]], model: str) -> None:
    results, run = RESULTS.read_text(encoding="utf-8"), runs[f"{model}-seeded-state-memory"]
    for context in (1024, 8192, 32768):
        taken = {arm: figures(run, arm)[f"state_bytes/total/c{context}"] for arm in ("native", "k16v16", "k16v8", "k8v8")}
        cells = [f"{context:,}", *(f"{taken[arm] / 2**20:,.1f}" for arm in ("native", "k16v16"))]
        cells += [f"{taken[arm] / 2**20:,.1f} ({taken[arm] / taken['k16v16']:.2f})" for arm in ("k16v8", "k8v8")]
        row = " | ".join(cells)
        assert any(row in line and (context > 1024 or SEEDED[model] in line) for line in results.splitlines()), row
    assert run["id"][:12] in results
    assert {claim["claim"] for claim in run["claims"]} == {"synthetic measured"}


@pytest.mark.parametrize("model", SEEDED)
def test_a_seeded_model_is_captured_without_a_claim_about_quality(runs: dict[str, dict[str, Any]], model: str) -> None:
    run = runs[f"{model}-seeded-capability"]
    assert {claim["claim"] for claim in run["claims"]} == {"synthetic passes"}
    assert run["id"][:12] in RESULTS.read_text(encoding="utf-8")
