"""Production checks: with the oracle in the place of the kernels, whole and broken; and once with the kernels themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from ledger import digest, records
from ledger import production as judging
from ledger.errors import InputError, ProvenanceError
from runners import checkpoints, fp8, geometry, host, kernelchecks, oracle, production
from runners.findings import Finding
from runners.kernelchecks import Attention, Rig
from runners.serving import FusedCache

from . import tiny

PLAN = records.Production(prompt_tokens=12, new_tokens=2, batch=2, seed=5)


class Kernels:
    """The oracle with the kernels' other names; ``changes`` replace its functions."""

    SHORTEST, SEGMENTS = 256, 16

    def __init__(self, **changes: Any) -> None:
        self.__dict__ |= {"write": oracle.write} | changes

    def prefill(self, query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return oracle.prefill(query, *arguments, **options).to(query.dtype)

    def decode(self, query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return oracle.decode(query, *arguments, **options).to(query.dtype)

    def describe(self, pages: Any, batch: int = 1) -> str:
        stored = f"{geometry.word(pages.keys.dtype)}/{geometry.word(pages.values.dtype)}".replace("fp8_", "")
        return f"fused decode {stored} d{pages.keys.shape[-1]} page{pages.page} tile64"

    def available(self, device: str) -> str:
        return ""

    def crowd(self, pages: Any) -> int:
        return 0

    class Plan:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

        def update(self, lengths: torch.Tensor) -> None: ...


def fused(name: str, keys: str = "bf16", values: str = "fp8_e4m3", compute: str = "bf16", **more: Any) -> records.Arm:
    return tiny.arm(name, "candidate", keys, values, implementation="fused", compute=compute, backend="kv_fused", **more)


def spec(*arms: records.Arm, plan: records.Production = PLAN, **config: Any) -> records.Spec:
    native = tiny.arm("native", "control", "bf16", "bf16", implementation="native", compute="bf16")
    shape = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return records.Spec(
        format="kv-ledger/spec/2", study="tiny-serving", title="Tiny checks", scope="production", checkpoint=tiny.llama(**shape | config),
        workload=None, arms=(native, *arms), contrasts=(), families=(), production=plan,
    )  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, frozen: records.Spec, **changes: Any) -> tuple[tiny.Kept, dict[tuple[str, str], dict[str, Any]]]:
    """The run with the oracle as kernels, and its lines by arm and check."""
    kernels = Kernels(**changes)
    monkeypatch.setattr(geometry, "kernels", lambda: kernels)
    kept = tiny.Kept()
    production.run(frozen, Path("inputs"), kept, kept)
    lines = [json.loads(line) for line in kept.files["checks.jsonl"].decode().splitlines()]
    return kept, {(line["arm"], line["check"]): line for line in lines}


def passes(line: dict[str, Any]) -> bool:
    within = line["tolerance"] is None or line["largest"] <= line["tolerance"]
    return line["compared"] > 0 and line["differing"] == 0 and within


# ---------------------------------------------------------------- every check passes what is right

ARMS = (
    fused("k16v16", "bf16", "bf16"),
    fused("k16v8"),
    fused("k16v8-fp16", "fp16", "fp8_e4m3", "fp16"),
    fused("k8v8", "fp8_e4m3", "fp8_e4m3"),
    fused("k8v8-dynamic", "fp8_e4m3", "fp8_e4m3", scales="dynamic", granularity="token_head"),
    fused("k16v8-fixed", scales="fixed", granularity="head", scale_source="0" * 64),
)


@pytest.mark.parametrize("shape", [Attention(4, 2, 64), Attention(2, 1, 64, window=33, soft_cap=30.0)], ids=str)
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_oracle_passes_the_checks_of_kernels_at_every_format(arm: records.Arm, shape: Attention) -> None:
    for check in kernelchecks.CHECKS:
        finding = Finding(check.__name__, arm.name)
        finding.attempt(check, Rig(Kernels(), arm, shape, PLAN, "cpu"), finding)
        assert finding.passes is (check is not kernelchecks.unsupported_refused), finding.line()


def test_a_run_has_a_line_for_every_check_and_arm_and_the_facts_of_each_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lines = run(monkeypatch, spec(*ARMS[:2], ARMS[4]))
    assert set(lines) == {(arm, check) for arm in ("k16v16", "k16v8", "k8v8-dynamic") for check in production.NAMES}
    assert {check for (_, check), line in lines.items() if not passes(line)} == {"graph_replay_equals_eager", "unsupported_refused"}
    assert set(judging.CHECKS) == set(production.NAMES)
    assert len(judging.read(spec(*ARMS[:2], ARMS[4]), kept.files).lines) == len(lines)
    arm = kept.arm("k16v8")
    assert arm.outcome == "completed" and arm.effective == arm.measured and arm.measured["values"] == "fp8_e4m3"
    assert (
        [backing.holds for backing in arm.backings] == ["keys", "values"]
        and arm.geometry
        and arm.geometry.declared == arm.geometry.measured
    )
    assert [backend.name for backend in arm.backends] == ["kv_fused", "fused decode bf16/e4m3 d64 page64 tile64"]
    assert kept.arm("native").outcome == "refused" and kept.arm("native").reason.startswith("not_asked: ")


def test_an_arm_of_fixed_scales_is_served_by_those_of_its_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layers = [layer for layer in geometry.declared(checkpoints.load(spec(ARMS[1]).checkpoint, "bf16")[0].config) if layer.kv_heads]
    data = save({f"values.amax/{layer.layer}": np.full(layer.kv_heads, 4, np.float32) for layer in layers})
    (tmp_path / "scales.safetensors").write_bytes(data)
    frozen = spec(fused("k16v8-fixed", scales="fixed", granularity="head", scale_source=digest.sha256(data)))
    monkeypatch.setattr(geometry, "kernels", Kernels)
    kept = tiny.Kept()
    production.run(frozen, tmp_path, kept, kept)
    lines = {line["check"]: line for line in map(json.loads, kept.files["checks.jsonl"].decode().splitlines())}
    assert {check for check, line in lines.items() if not passes(line)} == {"graph_replay_equals_eager", "unsupported_refused"}
    measured = kept.arm("k16v8-fixed").measured
    assert (measured["scales"], measured["granularity"]) == ("fixed", "head")
    assert any("names no checkpoint" in warning for warning in kept.fields["warnings"])
    with pytest.raises(ProvenanceError, match="not the one that the spec pins"):
        production.run(spec(ARMS[5]), tmp_path, kept, kept)


def test_a_graph_that_cannot_be_captured_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = run(monkeypatch, spec(ARMS[1]))
    line = lines["k16v8", "graph_replay_equals_eager"]
    assert (line["compared"], line["detail"]) == (0, "not run: there are no graphs on cpu")


def test_every_geometry_of_the_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    checkpoint = records.Checkpoint(
        name="tiny", source="random:gemma3_text#3", license="CC0-1.0", seed=3,
        config=tiny.CONFIG | {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1} | config,
    )  # fmt: skip
    frozen = records.convert(records.Spec, records.plain(spec(ARMS[1])) | {"checkpoint": records.plain(checkpoint)}, "spec")
    _, lines = run(monkeypatch, frozen)
    detail = lines["k16v8", "page_independence"]["detail"]
    assert detail.count("attention 2/1 d64 window 8 of ") == 1 and detail.count("attention 2/1 d64 of ") == 1
    assert {check for (_, check), line in lines.items() if not passes(line)} == {"graph_replay_equals_eager", "unsupported_refused"}


# ---------------------------------------------------------------- every check finds what is wrong


def on_batch(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    found = oracle.decode(query, *arguments, **options)
    return (found + 1e-2 * found.mean(dim=0)).to(query.dtype)


def on_places(query: torch.Tensor, pages: Any, table: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    found = oracle.decode(query, pages, table, *arguments, **options)
    return (found * (1 + table[:, 0, None, None] / 64)).to(query.dtype)


def on_the_rest_of_a_page(query: torch.Tensor, pages: Any, table: torch.Tensor, lengths: torch.Tensor, **options: Any) -> torch.Tensor:
    further = torch.minimum(lengths + 1, torch.tensor(table.shape[1] * pages.page))
    return oracle.decode(query, pages, table, further, **options).to(query.dtype)


def on_a_crowd(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    found = oracle.decode(query, *arguments, **options)
    return (found * (1 + (len(query) >= 20) / 64)).to(query.dtype)


def without_the_past(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    window = min(options.pop("window") or query.shape[1], query.shape[1])
    return oracle.prefill(query, *arguments, window=window, **options).to(query.dtype)


def twice_at_a_border(
    pages: Any, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, counts: Any = None
) -> None:
    border = (lengths % pages.page == 0) & torch.tensor(keys.shape[1] == 1)
    oracle.write(pages, torch.where(border[:, None, None, None], 2 * keys, keys), values, table, lengths, counts)


def short_of_a_whole_page(query: torch.Tensor, pages: Any, table: torch.Tensor, lengths: torch.Tensor, **options: Any) -> torch.Tensor:
    return oracle.decode(query, pages, table, lengths - (lengths == pages.page).int(), **options).to(query.dtype)


def with_another_scale(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    return oracle.prefill(query, *arguments, **options | {"scale": 1.02 * options["scale"]}).to(query.dtype)


def towards_zero(pages: Any, keys: torch.Tensor, values: torch.Tensor, *arguments: Any) -> None:
    oracle.write(pages, keys, values * (1 - 1 / 64), *arguments)


BROKEN: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("batch_independence", "decode", on_batch),
    ("page_independence", "decode", on_places),
    ("poisoned_pages", "decode", on_the_rest_of_a_page),
    ("returned_pages", "decode", on_the_rest_of_a_page),
    ("chunked_equals_one_shot", "prefill", without_the_past),
    ("page_border_appends", "write", twice_at_a_border),
    ("border_lengths", "decode", short_of_a_whole_page),
    ("oracle_error", "prefill", with_another_scale),
    ("quantise_all_inputs", "write", towards_zero),
    ("kernel_recorded", "describe", lambda pages, batch=1: "fused decode bf16/bf16 d64 page64"),
)


@pytest.mark.parametrize(("name", "function", "broken"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_kernel_that_is_broken_is_found(name: str, function: str, broken: Callable[..., Any]) -> None:
    finding = Finding(name, "k16v8")
    rig = Rig(Kernels(**{function: broken}), ARMS[1], Attention(4, 2, 64), PLAN, "cpu")
    finding.attempt(getattr(kernelchecks, name), rig, finding)
    line = json.loads(finding.line())
    assert not finding.passes and not passes(line) and line["differing"] > 0 and line["compared"] > 0


def test_a_kernel_that_sums_otherwise_in_a_crowd_is_found_where_crowds_are_compiled_otherwise() -> None:
    for crowd, passing in ((0, True), (19, True), (20, False)):
        finding = Finding("batch_independence", "k16v8")
        rig = Rig(Kernels(decode=on_a_crowd, crowd=lambda pages, crowd=crowd: crowd), ARMS[1], Attention(4, 2, 64), PLAN, "cpu")
        kernelchecks.batch_independence(rig, finding)
        assert finding.passes is passing, finding.line()
        assert f"decoded among {max(crowd, 7)} by fused decode bf16/e4m3 d64" in finding.notes[0]


@pytest.mark.parametrize(
    ("name", "function", "broken"),
    [
        ("batch_independence", "decode", on_batch),
        ("page_independence", "decode", on_places),
        ("poisoned_pages", "decode", on_the_rest_of_a_page),
        ("returned_pages", "decode", on_the_rest_of_a_page),
        ("chunked_equals_one_shot", "prefill", without_the_past),
    ],
)
def test_a_model_that_is_served_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, function: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(kernelchecks, "CHECKS", ())
    _, lines = run(monkeypatch, spec(ARMS[1], initializer_range=0.3), **{function: broken})
    assert not passes(lines["k16v8", name]) and "logits" in lines["k16v8", name]["detail"]


def test_another_kernel_in_a_layer_than_the_arm_asks_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"batch": PLAN.batch, "max_tokens": PLAN.prompt_tokens + PLAN.new_tokens}
    monkeypatch.setattr(kernelchecks, "CHECKS", ())
    monkeypatch.setattr(production.Served, "cache", lambda self, seed=None: FusedCache(self.model.config, ARMS[0], **size, device="cpu"))
    _, lines = run(monkeypatch, spec(ARMS[1]))
    line = lines["k16v8", "kernel_recorded"]
    assert not passes(line) and "launched ['write bf16/bf16 d64', 'prefill bf16/bf16 d64'" in line["detail"]


def test_a_check_that_stops_on_an_error_is_not_passed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("the kernel stopped " + "and stopped " * 1000)

    finding = Finding("batch_independence", "k16v8")
    finding.fact(True, "")
    finding.attempt(kernelchecks.batch_independence, Rig(Kernels(decode=stop), ARMS[1], Attention(2, 1, 64), PLAN, "cpu"), finding)
    line = json.loads(finding.line())
    assert line["compared"] == 0 and not finding.passes
    assert line["detail"].startswith("could not be made: RuntimeError: the kernel stopped") and len(line["detail"]) <= 2000


@pytest.mark.slow
def test_the_kernels_pass_every_check_under_the_interpreter_but_for_the_graph(tmp_path: Path) -> None:
    frozen, out = tmp_path / "frozen", tmp_path / "out"
    (frozen / "inputs").mkdir(parents=True)
    (frozen / "spec.json").write_bytes(records.encode(spec(ARMS[1])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "runners", str(frozen), str(out)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = records.decode(records.Result, (out / "result.json").read_bytes(), "result.json")
    assert result.outcome == "completed" and result.arm("k16v8").outcome == "completed"
    assert {"runners/production.py", "runners/fused.py", "runners/serving.py"} <= set(result.sources)
    lines = {line["check"]: line for line in map(json.loads, (out / "checks.jsonl").read_text().splitlines())}
    assert set(lines) == set(production.NAMES)
    assert [name for name, line in lines.items() if not passes(line)] == ["graph_replay_equals_eager"], done.stderr


# ---------------------------------------------------------------- how comparisons count


def test_bits_are_compared_and_not_values() -> None:
    finding = Finding("any", "arm")
    finding.same(torch.tensor([0.0, 1.0, float("nan")]), torch.tensor([-0.0, 1.0, float("nan")]), "signs")
    assert (finding.compared, finding.differing, finding.largest) == (3, 1, float("inf"))
    other = Finding("any", "arm")
    other.same(torch.full((2,), 0x38, dtype=torch.uint8).view(fp8.E4M3), torch.tensor([1.0, 2.0]).to(fp8.E4M3), "codes")
    assert (other.compared, other.differing, other.largest) == (2, 1, 1.0)


def test_unlike_shapes_and_dtypes_differ() -> None:
    finding = Finding("any", "arm")
    finding.same(torch.zeros(2), torch.zeros(3), "shape")
    finding.same(torch.zeros(2), torch.zeros(2).half(), "dtype")
    assert (finding.compared, finding.differing) == (2, 2) and "torch.float16" in json.loads(finding.line())["detail"]


def test_the_comparison_nearest_to_its_tolerance_stands_in_the_line() -> None:
    finding = Finding("any", "arm")
    one = torch.ones(4)
    finding.near(one * 1.002, one, 3e-3, "first")
    finding.near(one * 1.01, one, 3e-2, "second")
    assert finding.passes and finding.tolerance == 3e-3 and finding.largest == pytest.approx(0.002, rel=1e-3)
    finding.near(one * 1.06, one, 3e-2, "third")
    assert not finding.passes and finding.tolerance == 3e-2 and finding.differing == 4
    assert json.loads(finding.line())["detail"] == "third: relative error 0.06 > 0.03"


def test_what_differs_fails_a_check_that_has_a_tolerance() -> None:
    for wrong in (lambda finding: finding.fact(False, "a fact"), lambda finding: finding.same(torch.ones(2), torch.zeros(2), "bits")):
        finding = Finding("any", "arm")
        finding.near(torch.ones(4), torch.ones(4), 1e-2, "near")
        assert finding.passes
        wrong(finding)
        assert not finding.passes and not passes(json.loads(finding.line()))


def test_an_error_that_is_no_number_is_beyond_every_tolerance() -> None:
    finding = Finding("any", "arm")
    finding.near(torch.tensor([float("nan")]), torch.ones(1), 1.0, "NaN")
    assert not finding.passes and json.loads(finding.line())["largest"] == {"number": "Infinity"}


# ---------------------------------------------------------------- what is not run


def test_an_arm_that_the_guard_refuses_is_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lines = run(monkeypatch, spec(fused("k16v8-fp32", "fp32", "fp8_e4m3", "fp32"), ARMS[1]))
    assert kept.arm("k16v8-fp32").outcome == "refused" and kept.arm("k16v8-fp32").reason.startswith("dtype: ")
    assert kept.arm("k16v8").outcome == "completed" and {arm for arm, _ in lines} == {"k16v8"}


def test_a_head_dimension_that_the_kernels_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lines = run(monkeypatch, spec(ARMS[1], head_dim=80))
    assert kept.arm("k16v8").reason.startswith("head_dim: ") and not lines


def test_an_arm_that_is_not_asked_about_leaves_the_decisions_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = spec(ARMS[1])
    kept, _ = run(monkeypatch, frozen)
    result = records.Result(
        format="kv-ledger/result/1", spec="0" * 64, outcome="completed", started="2026-01-01T00:00:00Z", host=host.measure(), sources={},
        arms=kept.fields["arms"],
    )  # fmt: skip
    (decision,) = judging.decide(frozen, result, judging.read(frozen, kept.files), records.Harness(matched="commit", commit="0" * 40))
    assert decision.status == "fails" and "not_asked" not in decision.reason  # there is no graph on a CPU


def test_what_was_found_stays_where_a_later_arm_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(production.Served):
        def __init__(self, model: Any, arm: records.Arm, *rest: Any) -> None:
            if arm.name == "k8v8":
                raise torch.OutOfMemoryError("the device is gone")
            super().__init__(model, arm, *rest)

    monkeypatch.setattr(production, "Served", Broken)
    monkeypatch.setattr(geometry, "kernels", lambda: Kernels())
    kept = tiny.Kept()
    with pytest.raises(torch.OutOfMemoryError):
        production.run(spec(ARMS[1], ARMS[3]), Path("inputs"), kept, kept)
    lines = [json.loads(line) for line in kept.files["checks.jsonl"].splitlines()]
    assert {line["check"] for line in lines} == set(production.NAMES) and {line["arm"] for line in lines} == {"k16v8"}
    assert [arm.name for arm in kept.fields["arms"]] == ["native", "k16v8"]


def test_what_is_refused_is_said_with_the_guard_that_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = run(monkeypatch, spec(ARMS[1]))
    detail = lines["k16v8", "unsupported_refused"]["detail"]
    said = dict(part.split(": ", 1) for part in detail.split("; ") if part.startswith("refused by "))
    assert {"pages of a freed sequence", "pages twice in a table", "a length beyond the table"} <= set(
        said["refused by the pool"].split(", ")
    )
    assert "a page twice in a table" in said["refused by check_table, of tables made by hand"]
    assert "more tokens than it has room for" in said["refused by the served cache"]
    assert not [part for part in detail.split("; ") if "not refused by" in part and "by the kernels" not in part]


def test_warming_up_launches_every_kernel_and_keeps_its_faults_to_itself() -> None:
    called: list[str] = []

    def stop(*arguments: Any, **options: Any) -> None:
        called.append("decode")
        raise RuntimeError("the kernel stopped")

    good, bad = (
        Rig(kernels, ARMS[1], Attention(2, 1, 64), PLAN, "cpu") for kernels in (production.Recorder(Kernels()), Kernels(decode=stop))
    )
    kernelchecks.warm([good, bad])
    assert called and {word.split()[0] for word in good.kernels.ran} == set(production.LAUNCHED)


def test_a_spec_without_production_is_refused() -> None:
    with pytest.raises(InputError, match="does not say what the production checks feed"):
        production.run(tiny.spec(), Path("inputs"), tiny.Kept(), tiny.Kept())


def test_more_pages_than_a_pool_has_are_refused_for_that_reason():
    requests = dict(kernelchecks._wrong_pools(Rig(tiny.ORACLE, ARMS[1], Attention(2, 1, 64), PLAN, "cpu")))
    with pytest.raises(InputError, match=r"no .*page"):
        requests["more pages than there are"]()
