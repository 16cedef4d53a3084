"""Raw timings become figures, a verdict and a claim; what cannot be is refused or said."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from ledger import deriving, digest, performance, records
from ledger.errors import InputError
from ledger.records import consistency
from tests import factories

SPEC = factories.performance_spec()
YARD = "decode/b32/c8192/d128"
MIXED = "decode/b64/c128-32768/d128"
APPEND, STEP = "append/b32/c8192/d128", "step/b32/c8192"


def derive(files: dict[str, bytes], spec: records.Spec = SPEC, **changes: Any) -> deriving.Derived:
    return deriving.derive(spec, factories.result(spec, files, **changes), files, factories.harness())


def figures(found: deriving.Derived) -> dict[str, float | int]:
    return {measurement.name: measurement.value for measurement in found.measurements}


def decision(found: deriving.Derived, arm: str = "k16v8") -> records.Decision:
    return next(decision for decision in found.decisions if decision.candidate == arm)


def results(name: str, **changes: Any) -> tuple[records.ArmResult, ...]:
    """What the arms did, one of them changed."""
    return tuple(factories.arm_result(arm, **(changes if arm.name == name else {})) for arm in SPEC.arms)


# ---------------------------------------------------------------- figures


def test_a_case_gives_its_median_spread_share_and_ratio() -> None:
    found = figures(derive(factories.timings(SPEC)))
    samples = 190.0 * (1 + 0.01 * np.arange(7))
    name = "decode/k16v8/b32/c8192/d128"
    assert found[f"{name}/median_us"] == np.median(samples)
    assert found[f"{name}/spread_us"] == pytest.approx(np.quantile(samples, 0.75) - np.quantile(samples, 0.25))
    copy = found["copy/bytes"] / found["copy/median_us"]
    assert found[f"{name}/share_of_copy"] == pytest.approx(found[f"{name}/bytes"] / np.median(samples) / copy)
    assert found[f"{name}/relative_error"] == 0.002
    assert found[f"{name}/relative_error_unquantised"] == 0.02


def test_the_denominator_is_the_fastest_that_stores_16_bit_our_own_included() -> None:
    found = figures(derive(factories.timings(SPEC)))
    assert found["decode/k16v8/b32/c8192/d128/ratio_to_best_native"] == pytest.approx(190 / 248)
    assert found["decode/k16v16/b32/c8192/d128/ratio_to_best_native"] == 1
    # a native peer in 8 bit is shown and is no denominator
    assert found["decode/flashinfer-e4m3/b32/c8192/d128/ratio_to_best_native"] == pytest.approx(240 / 248)


def test_a_contender_whose_result_is_off_is_no_denominator() -> None:
    found = figures(derive(factories.timings(SPEC, {(YARD, "k16v16"): {"relative_error": 0.3}})))
    assert found["decode/k16v8/b32/c8192/d128/ratio_to_best_native"] == pytest.approx(190 / 250)


def test_a_step_is_named_by_its_model_and_mixed_lengths_by_their_range() -> None:
    found = figures(derive(factories.timings(SPEC)))
    assert found["step/Toy-1M/k16v8/b32/c8192/ratio_to_best_native"] == pytest.approx(190 / 248)
    assert f"decode/k16v8/{MIXED.removeprefix('decode/')}/median_us" in found
    assert "prefill/sdpa-flash/b1/c8192/d128/q2048/median_us" in found


def test_capacity_is_counted_and_compared_with_the_fused_16_bit_arm() -> None:
    found = figures(derive(factories.timings(SPEC)))
    assert found["capacity/k16v16/b1/c8192/tokens"] == 6000
    assert found["capacity/k16v8/b1/c8192/ratio"] == pytest.approx(4 / 3)
    assert "capacity/k16v8/b1/c8192/median_us" not in found


def test_every_figure_has_the_unit_of_its_last_word_and_a_place_in_its_group() -> None:
    found = derive(factories.timings(SPEC))
    groups = {performance.group(SPEC.checkpoint.name, kernel.case, kernel.arm) for kernel in found.kernels}
    for measurement in found.measurements:
        of, _, word = measurement.name.rpartition("/")
        assert measurement.unit == records.FIGURES[word]
        assert of in groups


def test_the_kernel_that_ran_is_kept_or_why_none_did() -> None:
    found = derive(factories.timings(SPEC, {(YARD, "flashinfer"): {"refused": "flashinfer is not installed", "kernel": ""}}))
    kernels = {(kernel.case, kernel.arm): kernel for kernel in found.kernels}
    assert kernels["copy", ""].kernel == "torch.neg int32"
    assert kernels[YARD, "k16v8"].kernel == "kv_fused bf16/fp8_e4m3"
    assert kernels[YARD, "flashinfer"].refused == "flashinfer is not installed"
    assert "decode/flashinfer/b32/c8192/d128/median_us" not in figures(found)


# ---------------------------------------------------------------- decisions


def test_every_fused_arm_is_measured_and_the_yardstick_is_said() -> None:
    found = derive(factories.timings(SPEC))
    assert [(decision.candidate, decision.status) for decision in found.decisions] == [
        ("k16v16", "measured"),
        ("k16v8", "measured"),
        ("k8v8", "measured"),
    ]
    assert "0.766 of the best native (k16v16)" in decision(found).reason


SLOW = {(YARD, arm): {"times": np.full(7, 300.0)} for arm in ("sdpa-flash", "flashinfer", "k16v16")}


def test_a_run_whose_best_native_is_under_95_percent_of_the_copy_is_void() -> None:
    found = derive(factories.timings(SPEC, SLOW))
    assert {decision.status for decision in found.decisions} == {"invalid"}
    assert decision(found).reason.startswith(f"void: the best native {YARD}")
    assert "under 95 %" in decision(found).reason
    assert found.measurements  # what was timed is kept


def test_a_run_without_a_yardstick_is_void() -> None:
    timed = msgspec.structs.replace(SPEC.performance, cases=factories.CASES[1:])  # type: ignore[type-var]
    spec = factories.performance_spec(performance=timed)
    assert "no case tells" in decision(derive(factories.timings(spec), spec)).reason


BROKEN = [
    ({(YARD, "k16v8"): {"times": None}}, "missing evidence: decode/b32/c8192/d128 was not timed for k16v8"),
    ({(MIXED, "sdpa-flash"): {"times": None}}, f"missing evidence: {MIXED} was not timed for sdpa-flash"),
    ({(MIXED, "k16v8"): {"times": [190.0] * 6 + [math.nan]}}, "a time that no clock gives"),
    ({(MIXED, "k16v8"): {"times": [190.0] * 6 + [0.0]}}, "a time that no clock gives"),
    ({(MIXED, "k16v8"): {"relative_error": 0.2}}, "is another result: 0.2 from the oracle"),
    ({(MIXED, "k16v8"): {"relative_error": math.nan}}, "is another result"),
    ({(MIXED, "k16v8"): {"relative_error": None}}, "was not compared with the oracle"),
    ({(APPEND, "k16v8"): {"relative_error": None}}, f"missing evidence: {APPEND} of k16v8 was not compared with the oracle"),
    ({(APPEND, "k16v8"): {"relative_error": math.nan}}, f"{APPEND} of k16v8 is another result"),
    ({(APPEND, "k16v8"): {"relative_error": 0.011}}, f"{APPEND} of k16v8 is another result"),
    ({(STEP, "k16v8"): {"relative_error": math.inf}}, f"{STEP} of k16v8 is another result"),
    ({(MIXED, "k16v8"): {"times": [1e300] * 7}}, "a time that no clock gives"),
    ({(MIXED, "k16v8"): {"times": [5e-324] * 7}}, "a time that no clock gives"),
]


@pytest.mark.parametrize(("changes", "reason"), BROKEN)
def test_what_breaks_the_figures_of_an_arm_makes_it_invalid(changes: Any, reason: str) -> None:
    found = decision(derive(factories.timings(SPEC, changes)))
    assert found.status == "invalid"
    assert reason in found.reason


def test_a_case_that_was_refused_is_no_missing_evidence() -> None:
    found = decision(derive(factories.timings(SPEC, {(MIXED, "k16v8"): {"refused": "budget: too little"}})))
    assert found.status == "measured"
    assert "5 cases, 1 refused" in found.reason


def test_an_arm_that_was_refused_everywhere_is_unsupported() -> None:
    changes: Any = {(case.name, "k8v8"): {"refused": "device: no FP8"} for case in factories.CASES}
    found = decision(derive(factories.timings(SPEC, changes)), "k8v8")
    assert (found.status, found.reason) == ("unsupported", "every case was refused: device: no FP8")


def test_a_line_of_a_contender_that_is_missing_is_missing_evidence() -> None:
    files = factories.timings(SPEC)
    files["cases.jsonl"] = b"".join(line + b"\n" for line in files["cases.jsonl"].splitlines() if b'"flashinfer"' not in line)
    assert "says nothing of decode/b32/c8192/d128 for flashinfer" in decision(derive(files)).reason
    arms = results("flashinfer", outcome="refused", reason="not installed")
    assert "is said to be refused, and was timed" in decision(derive(files, arms=arms)).reason
    silent = factories.timings(SPEC, {(case.name, "flashinfer"): {"times": None} for case in factories.CASES})
    found = decision(derive({**silent, "cases.jsonl": files["cases.jsonl"]}, arms=arms))
    assert (found.status, "contenders left out: flashinfer (not timed in 3 of 3 cases)" in found.reason) == ("measured", True)


@pytest.mark.parametrize("name", ["sdpa-flash", "k16v16"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outcome": "failed", "reason": "CUDA error"}, "arm {} failed: CUDA error"),
        ({"measured": {"keys": "fp8_e4m3", "values": "bf16"}}, "arm {} did not do what was asked: keys: requested bf16, measured fp8_e4m3"),
        ({"effective": {"values": "fp16"}}, "arm {} did not do what was asked: values: requested bf16, effective fp16"),
    ],
)
def test_a_contender_that_failed_or_did_something_else_makes_the_ratios_invalid(name: str, changes: dict[str, Any], words: str) -> None:
    found = decision(derive(factories.timings(SPEC), arms=results(name, **changes)))
    assert (found.status, words.format(name) in found.reason) == ("invalid", True)


def test_what_a_peer_that_is_no_contender_did_breaks_nothing() -> None:
    arms = results("flashinfer-e4m3", outcome="failed", reason="CUDA error")
    assert decision(derive(factories.timings(SPEC), arms=arms)).status == "measured"


NATIVES = ("sdpa-flash", "flashinfer")


@pytest.mark.parametrize(
    "change", [{"refused": "not installed"}, {"relative_error": 0.5}, {"relative_error": math.nan}, {"relative_error": None}]
)
def test_a_run_in_which_no_native_contender_counted_is_void(change: dict[str, Any]) -> None:
    found = derive(factories.timings(SPEC, {(case.name, arm): change for case in factories.CASES for arm in NATIVES}))
    assert {decision.status for decision in found.decisions} == {"invalid"}
    assert decision(found).reason.startswith(f"void: no native contender was timed in {YARD}; contenders left out: sdpa-flash (")
    assert "decode/k16v8/b32/c8192/d128/ratio_to_best_native" not in figures(found)
    assert "step/Toy-1M/k16v8/b32/c8192/ratio_to_best_native" in figures(found)  # a case of its own, with a contender of its own


def test_a_case_without_a_native_contender_has_no_ratio() -> None:
    found = derive(factories.timings(SPEC, {(MIXED, arm): {"refused": "no mixed lengths"} for arm in NATIVES}))
    for name in (f"decode/k16v8/{MIXED.removeprefix('decode/')}", "append/k16v8/b32/c8192/d128"):
        assert f"{name}/median_us" in figures(found) and f"{name}/ratio_to_best_native" not in figures(found)
    said = decision(found)
    assert said.status == "measured"
    assert "contenders left out: sdpa-flash (refused in 1 of 3 cases), flashinfer (refused in 1 of 3 cases)" in said.reason


def test_a_result_that_is_both_refused_and_timed_is_invalid() -> None:
    files = factories.timings(SPEC)
    files["cases.jsonl"] = factories.timings(SPEC, {(MIXED, "flashinfer"): {"refused": "too fast"}})["cases.jsonl"]
    assert f"{MIXED} of flashinfer is said to be refused, and was timed" in decision(derive(files)).reason


def test_a_copy_that_moved_nothing_is_no_bandwidth() -> None:
    files = factories.timings(SPEC)
    files["cases.jsonl"] = files["cases.jsonl"].replace(b'"bytes":8400000,"case":"copy"', b'"bytes":0,"case":"copy"')
    assert decision(derive(files)).reason.startswith("missing evidence: the copy was not timed")


def test_an_arm_that_stored_another_format_is_invalid() -> None:
    wrong = {"keys": "bf16", "values": "bf16"}
    arms = tuple(
        factories.arm_result(arm, measured=wrong, backings=(), geometry=None) if arm.name == "k16v8" else factories.arm_result(arm)
        for arm in SPEC.arms
    )
    found = decision(derive(factories.timings(SPEC), arms=arms))
    assert (found.status, "values: requested fp8_e4m3, measured bf16" in found.reason) == ("invalid", True)


def test_an_arm_that_measured_its_formats_needs_neither_backings_nor_geometry() -> None:
    arms = tuple(factories.arm_result(arm, backings=(), geometry=None) for arm in SPEC.arms)
    assert decision(derive(factories.timings(SPEC), arms=arms)).status == "measured"


# ---------------------------------------------------------------- bad input


def lines(change: Any) -> dict[str, bytes]:
    """Evidence whose second line was changed."""
    files = factories.timings(SPEC)
    values = [digest.parse(line) for line in files["cases.jsonl"].splitlines()]
    values[1] |= change
    return {"cases.jsonl": b"".join(digest.canonical(value) + b"\n" for value in values)}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"cases.jsonl": b"{}\n"}, "Line 1 of cases.jsonl has other keys"),
        ({"cases.jsonl": b'{"case":1'}, "ends in the middle of a line"),
        (lines({"case": "decode/b1/c1/d1"}), "Line 2 of cases.jsonl names no case"),
        (lines({"arm": ""}), "names no case"),
        (lines({"case": "copy", "arm": ""}), "repeats case 'copy'"),
        (lines({"bytes": 10**399}), "a value that cannot be"),
        (lines({"launches": 1 << 63}), "a value that cannot be"),
        (lines({"relative_error": 10**399}), "a value that cannot be"),
        (lines({"relative_error": -0.5}), "a value that cannot be"),
        (lines({"relative_error": True}), "a value that cannot be"),
        (lines({"arm": "transformers"}), "no arm that takes part in it"),
        (lines({"arm": ["k16v8"]}), "names no case"),
        (lines({"arm": "flashinfer"}), f"Line 3 of cases.jsonl repeats case '{YARD}', arm 'flashinfer'"),
        (lines({"bytes": -1}), "a value that cannot be"),
        (lines({"relative_error": "0"}), "a value that cannot be"),
        (lines({"refused": None}), "a value that cannot be"),
        ({"timings/first.safetensors": save({})}, "is no file of timings"),
        ({"timings/0000.safetensors": b"\x08"}, "timings/0000.safetensors is not a safetensors file"),
        ({"timings/0000.safetensors": save({f"{YARD}|transformers": np.ones(7)})}, "does not ask for"),
        ({"timings/0000.safetensors": save({"copy|": np.ones((2, 2))})}, "another type or shape"),
        ({"timings/0000.safetensors": save({"decode": np.zeros(7)})}, "does not ask for"),
        ({"timings/0000.safetensors": save({f"{YARD}|nobody": np.zeros(7)})}, "does not ask for"),
        ({"timings/0000.safetensors": save({f"{YARD}|k16v8": np.zeros(6)})}, "another type or shape"),
        ({"timings/0000.safetensors": save({f"{YARD}|k16v8": np.zeros(7, np.float32)})}, "another type or shape"),
        (
            {f"timings/000{n}.safetensors": save({f"{YARD}|k16v8": np.ones(7)}) for n in range(2)},
            "times 'decode/b32/c8192/d128|k16v8' again",
        ),
    ],
)
def test_evidence_that_a_runner_would_not_write_is_refused(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(InputError) as caught:
        performance.read(SPEC, files)
    assert words in str(caught.value)


def timed(**changes: Any) -> records.Spec:
    return factories.performance_spec(performance=msgspec.structs.replace(SPEC.performance, **changes))  # type: ignore[type-var]


CASE = factories.CASES[0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (timed(cases=()), "no case"),
        (timed(cases=(CASE, CASE)), "a case stands twice"),
        (timed(repeats=4), "too few samples"),
        (timed(rotate_bytes=(64 << 20) - 1), "may stay in the cache of the device"),
        (timed(budget_bytes=None), "a budget is what capacity is measured under"),
        (timed(cases=(msgspec.structs.replace(CASE, head_dim=None),)), "one head dimension"),
        (timed(cases=(records.Case(kind="step", batch=1, context=8, head_dim=64),)), "one head dimension"),
        (timed(cases=(msgspec.structs.replace(CASE, chunk=64),)), "prefill runs in chunks"),
        (timed(cases=(records.Case(kind="prefill", batch=1, context=100, head_dim=64, chunk=64),)), "no whole number of chunks"),
        (timed(cases=(msgspec.structs.replace(CASE, shortest=8192),)), "no lengths to draw from"),
        (timed(cases=(msgspec.structs.replace(CASE, soft_cap=0.0),)), "impossible soft cap"),
        (timed(cases=(records.Case(kind="write", batch=1, context=64, head_dim=64, window=8),)), "has a window"),
        (factories.performance_spec(production=records.Production(prompt_tokens=1, new_tokens=1, batch=1)), "has a production"),
        (factories.performance_spec(performance=None), "lacks its performance"),
        (factories.performance_spec(workload=factories.workload()), "has a workload"),
        (factories.performance_spec(families=factories.FAMILIES), "has families"),
        (factories.performance_spec(arms=factories.CONTENDERS), "no fused arm"),
        (factories.performance_spec(arms=(*factories.CONTENDERS, factories.fused("a", "bf16", "bf16", backend="sdpa"))), "kv_fused"),
        (
            factories.performance_spec(
                arms=(*factories.CONTENDERS, factories.fused("a", "bf16", "fp8_e4m3", scales="dynamic", granularity="page_head"))
            ),
            "of a token and head",
        ),
        (factories.performance_spec(arms=(*factories.CONTENDERS, factories.fused("a", "fp16", "bf16"))), "computes in 16 bits"),
        (factories.performance_spec(tolerances={"loss_mean": 0.1}), "no measurement 'loss_mean'"),
        (factories.performance_spec(tolerances={"tokens": 0.1}), "a count is equal or not"),
        (factories.spec(arms=(*factories.ARMS, factories.CONTENDERS[3])), "its cache holds the compute dtype"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(spec: records.Spec, words: str) -> None:
    with pytest.raises(InputError) as caught:
        consistency.check(spec)
    assert words in str(caught.value)


def test_the_spec_of_the_factory_agrees_with_itself() -> None:
    consistency.check(SPEC)
    consistency.check(factories.production_spec())
    consistency.check(timed(rotate_bytes=64 << 20))
    consistency.check(msgspec.structs.replace(timed(rotate_bytes=1000), device="cpu"))


def test_a_spec_of_format_1_knows_no_device_and_keeps_its_bytes() -> None:
    frozen = factories.spec()
    data = records.encode(frozen)
    assert b"device" not in data and b"performance" not in data
    assert records.decode(records.Spec, data, "the spec") == frozen
    assert records.decode(records.Spec, records.encode(SPEC), "the spec") == SPEC
    for changes in ({"device": "cuda"}, {"workload": None}):
        with pytest.raises(ValueError, match="format 1"):
            factories.spec(**changes)
    with pytest.raises(InputError, match="format 1"):
        records.convert(records.Spec, records.plain(SPEC) | {"format": "kv-ledger/spec/1"}, "the spec")
