"""Decisions follow from samples and the spec's bounds alone, and validity comes first."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save
from scipy import stats

from ledger import gates, measures, records, validity
from tests import factories

LOSS = factories.FAMILIES[1]
GATE = records.Gate(statistic="loss_difference_mean", bound=0.02, harm=0.02)


def _decide(
    frozen: records.Spec, files: dict[str, bytes], harness: records.Harness | None = None, **result: Any
) -> dict[tuple[str, str], records.Decision]:
    found = gates.decide(
        frozen, factories.result(frozen, files, **result), measures.read_samples(frozen, files), harness or factories.harness()
    )
    return {(decision.candidate, decision.baseline): decision for decision in found}


def _spec(documents: int = 8, tokens: int = 256, **changes: Any) -> records.Spec:
    return factories.spec(workload=factories.workload(documents, tokens), **changes)


def _arms(frozen: records.Spec, **changes: dict[str, Any]) -> tuple[records.ArmResult, ...]:
    return tuple(factories.arm_result(arm, **changes.get(arm.name.replace("-", "_"), {})) for arm in frozen.arms)


# ---------------------------------------------------------------- what is decided


def test_each_contrast_gets_one_decision_in_the_order_of_the_spec() -> None:
    frozen = _spec()
    found = _decide(frozen, factories.samples(frozen))
    assert list(found) == [(c.candidate, c.baseline) for c in frozen.contrasts]
    assert {pair: decision.status for pair, decision in found.items()} == {
        ("own-fp32", "native"): "passes",
        ("k16v16", "native"): "established",
        ("k16v8", "k16v16"): "established",
        ("k8v8", "k16v16"): "not established",
        ("k16v8", "k8v8"): "established",
    }


def test_the_bounds_shown_are_those_of_the_spec() -> None:  # case 20
    family = records.Family(name="loss", resamples=199, gates=(records.Gate(statistic="loss_difference_mean", bound=0.0123, harm=0.0456),))
    frozen = _spec(families=(factories.FAMILIES[0], family, factories.FAMILIES[2]))
    decision = _decide(frozen, factories.samples(frozen))["k16v8", "k16v16"]
    assert [(gate.bound, gate.harm) for gate in decision.gates] == [(0.0123, 0.0456)]
    assert "0.0123" in decision.reason


def test_harm_is_degraded_and_the_reason_names_gate_and_numbers() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    for name, data in files.items():
        tensors = load(data)
        tensors["k8v8.loss"] = tensors["k8v8.loss"] + np.float32(0.9)
        files[name] = save(tensors)
    decision = _decide(frozen, files)["k8v8", "k16v16"]
    assert decision.status == "degraded"
    assert "loss_difference_mean: lower bound 0.8" in decision.reason
    assert "is above the harm 0.02" in decision.reason
    assert decision.p_harm is not None
    assert decision.p_harm < 0.05


def test_a_bound_that_is_not_met_without_harm_is_not_established() -> None:
    frozen = _spec()
    decision = _decide(frozen, factories.samples(frozen))["k8v8", "k16v16"]
    assert decision.status == "not established"
    assert "kl_p999: upper bound 0.0" in decision.reason
    assert "is above 0.05" in decision.reason
    assert [gate.met for gate in decision.gates] == [True, False, False]


def test_a_logit_that_differs_fails_and_one_that_does_not_passes() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    tensors = load(files["samples/0003.safetensors"])
    tensors["own-fp32.gap.native"][7] = 1e-6
    files["samples/0003.safetensors"] = save(tensors)
    decision = _decide(frozen, files)["own-fp32", "native"]
    assert decision.status == "fails"
    assert "bit_equal: largest difference 1e-06 is above 0" in decision.reason
    assert decision.p_bound is None


def test_a_gap_of_zero_with_other_losses_contradicts_itself() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    tensors = load(files["samples/0003.safetensors"])
    tensors["own-fp32.loss"][7] += 1
    files["samples/0003.safetensors"] = save(tensors)
    decision = _decide(frozen, files)["own-fp32", "native"]
    assert decision.status == "invalid"
    assert "contradict themselves" in decision.reason


def test_one_document_is_enough_for_a_bit_comparison_and_too_little_for_an_interval() -> None:
    frozen = _spec(documents=1)
    found = _decide(frozen, factories.samples(frozen))
    assert found["own-fp32", "native"].status == "passes"
    assert found["k16v8", "k16v16"].status == "invalid"
    assert "1 document: an interval over documents needs at least two" in found["k16v8", "k16v16"].reason


def test_two_documents_give_a_wide_interval() -> None:
    frozen = _spec(documents=2)
    gate = _decide(frozen, factories.samples(frozen))["k16v8", "k16v16"].gates[0]
    assert gate.upper > gate.estimate > gate.lower


# ---------------------------------------------------------------- intervals


def test_bounds_of_a_mean_are_the_wider_of_student_and_scipys_bootstrap() -> None:
    values = np.random.default_rng(11).gamma(0.4, 0.05, 12)
    found = gates.mean_bounds(list(values), GATE, LOSS)
    half = stats.t.ppf(0.95, 11) * stats.sem(values)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=LOSS.resamples, confidence_level=0.9, method="BCa", rng=np.random.default_rng(LOSS.seed)
    ).confidence_interval
    assert found.estimate == pytest.approx(values.mean(), rel=1e-14)
    assert found.lower == pytest.approx(min(values.mean() - half, expected.low), rel=1e-12)
    assert found.upper == pytest.approx(max(values.mean() + half, expected.high), rel=1e-12)
    assert "upper from the bootstrap" in found.method  # skewed to the right: BCa reaches further there
    assert "lower from t" in found.method


def test_p_values_of_a_mean_are_those_of_scipys_one_sided_t_test() -> None:
    values = np.random.default_rng(6).normal(0.03, 0.02, 9)
    found = gates.mean_bounds(list(values), GATE, LOSS)
    assert found.p_bound == pytest.approx(stats.ttest_1samp(values, 0.02, alternative="less").pvalue, rel=1e-10)
    assert found.p_harm == pytest.approx(stats.ttest_1samp(values, 0.02, alternative="greater").pvalue, rel=1e-10)


@pytest.mark.parametrize(("value", "p_bound", "p_harm"), [(0.01, 0.0, 1.0), (0.02, 0.0, 1.0), (0.03, 1.0, 0.0)])
def test_all_equal_documents_are_a_defined_case(value: float, p_bound: float, p_harm: float) -> None:
    found = gates.mean_bounds([value] * 5, GATE, LOSS)
    assert found.lower == found.upper == found.estimate == pytest.approx(value)
    assert (found.p_bound, found.p_harm) == (p_bound, p_harm)
    assert "all 5 documents equal" in found.method


def test_a_bootstrap_without_bca_says_so_and_warns_of_nothing() -> None:
    family = records.Family(name="loss", resamples=1, gates=(GATE,))
    found = gates.mean_bounds([0.0, 1.0, 5.0], GATE, family)
    assert "bootstrap percentile" in found.method
    assert np.isfinite([found.lower, found.upper]).all()


@pytest.mark.parametrize("sizes", [[700] * 6, [40, 3000, 500, 1200], [3, 5], [1, 1, 1]])
def test_the_tails_bounds_equal_a_plain_bootstrap_of_pooled_tokens(sizes: list[int]) -> None:
    rng = np.random.default_rng(8)
    documents = [rng.gamma(0.3, 0.01 * (1 + at), size).round(4) for at, size in enumerate(sizes)]  # rounded: with ties
    gate = records.Gate(statistic="kl_p999", bound=0.1, harm=0.2)

    def plainly(drawn: np.ndarray) -> float:
        return float(np.quantile(np.concatenate([documents[int(at)] for at in drawn]), 0.999, method="higher"))

    expected = stats.bootstrap(
        (np.arange(len(sizes)),),
        plainly,
        n_resamples=LOSS.resamples,
        vectorized=False,
        confidence_level=0.9,
        method="percentile",
        rng=np.random.default_rng(LOSS.seed),
    )
    found = gates.tail_bounds(documents, gate, LOSS)
    assert (found.lower, found.upper) == pytest.approx(tuple(expected.confidence_interval))
    drawn = expected.bootstrap_distribution
    assert found.p_bound == (1 + (drawn > 0.1).sum()) / (LOSS.resamples + 1)
    assert found.p_harm == (1 + (drawn <= 0.2).sum()) / (LOSS.resamples + 1)
    assert found.estimate == plainly(np.arange(len(sizes)))


def test_the_tail_of_equal_documents_has_an_interval_of_width_zero() -> None:
    found = gates.tail_bounds([np.full(50, 0.25)] * 4, records.Gate(statistic="kl_p999", bound=0.1, harm=0.2), LOSS)
    assert found.lower == found.upper == found.estimate == 0.25


def test_decisions_do_not_depend_on_what_else_the_spec_asks() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    alone = _spec(contrasts=frozen.contrasts[2:3])
    for name, data in files.items():
        files[name] = save({k: v for k, v in load(data).items() if not k.endswith(".native") and not k.startswith("k8v8.kl")})
    gate = _decide(alone, files)["k16v8", "k16v16"].gates[1]
    other = _decide(frozen, factories.samples(frozen))["k16v8", "k16v16"].gates[1]
    assert (gate.lower, gate.upper) == (other.lower, other.upper)


# ---------------------------------------------------------------- Holm


def test_holm_by_hand() -> None:
    # sorted: 0.01·4 = 0.04, 0.02·3 = 0.06, 0.03·2 = 0.06, 0.5·1 = 0.5; never decreasing
    assert gates.holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert gates.holm([0.4, 0.9]) == [0.8, 0.9]
    assert gates.holm([0.6, 0.7]) == [1.0, 1.0]
    assert gates.holm([]) == []


def test_a_contrasts_p_value_is_its_worst_gates_after_holm() -> None:
    frozen = _spec()
    found = _decide(frozen, factories.samples(frozen))
    raw = [max(g.p_bound or 0 for g in found[pair].gates) for pair in list(found)[1:]]  # the first has no statistics
    assert [found[pair].p_bound for pair in list(found)[1:]] == gates.holm(raw)


def test_a_bound_met_alone_may_fail_after_holm() -> None:
    family = records.Family(name="loss", resamples=19, gates=(records.Gate(statistic="kl_p999", bound=1.0, harm=2.0),))
    frozen = _spec(families=(factories.FAMILIES[0], family, factories.FAMILIES[2]))
    decision = _decide(frozen, factories.samples(frozen))["k16v8", "k16v16"]
    assert decision.gates[0].met
    assert decision.gates[0].p_bound == 0.05  # the least that 19 resamples can say
    assert decision.status == "not established"
    assert "not after Holm's correction" in decision.reason


def test_a_contrast_that_cannot_be_judged_does_not_ease_the_others() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    before = _decide(frozen, files)["k16v8", "k16v16"]
    wrong = _arms(frozen, k8v8={"measured": {"keys": "bf16", "values": "fp8_e4m3"}})
    after = _decide(frozen, files, arms=wrong)["k16v8", "k16v16"]
    assert after.p_bound is not None
    assert before.p_bound is not None
    assert after.p_bound >= before.p_bound


# ---------------------------------------------------------------- validity


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outcome": "interrupted", "reason": "interrupted by the user"}, "the run was interrupted: interrupted by the user"),
        ({"outcome": "failed", "reason": "out of memory"}, "the run failed: out of memory"),
        ({"outcome": "running"}, "the run was killed"),
    ],
)
def test_a_run_that_did_not_complete_decides_nothing(changes: dict[str, Any], words: str) -> None:
    frozen = _spec()
    found = _decide(frozen, factories.samples(frozen), **changes)
    assert {decision.status for decision in found.values()} == {"invalid"}
    assert {decision.reason for decision in found.values()} == {words}


def test_an_unmatched_harness_cannot_qualify() -> None:
    frozen = _spec()
    found = _decide(frozen, factories.samples(frozen), records.Harness(matched="none"))
    assert {decision.status for decision in found.values()} == {"invalid"}
    assert all("harness is unmatched" in decision.reason for decision in found.values())


@pytest.mark.parametrize(
    ("field", "asked", "effective", "measured"),
    [
        ("keys", "fp8_e4m3", "fp8_e4m3", "bf16"),
        ("keys", "fp8_e4m3", "bf16", "bf16"),
        ("values", "fp8_e4m3", "fp8_e4m3", "fp32"),
        ("compute", "fp32", "bf16", "bf16"),
        ("implementation", "reference", "native", "native"),
        ("scales", "unit", "dynamic", "dynamic"),
        ("granularity", "none", "tensor", "tensor"),
    ],
)
def test_a_policy_that_was_ignored_is_invalid_and_the_field_is_named(
    field: str, asked: str, effective: str, measured: str
) -> None:  # case 3
    frozen = _spec()
    honest = factories.arm_result(frozen.arm("k8v8"))
    arms = _arms(frozen, k8v8={"effective": {**honest.effective, field: effective}, "measured": {**honest.measured, field: measured}})
    found = _decide(frozen, factories.samples(frozen), arms=arms)
    for pair in (("k8v8", "k16v16"), ("k16v8", "k8v8")):
        assert found[pair].status == "invalid"
        assert f"{field}: requested {asked}, measured {measured}" in found[pair].reason
        assert (f"{field}: requested {asked}, effective {effective}" in found[pair].reason) == (effective != asked)
    assert found["k16v8", "k16v16"].status == "established"


def test_backings_of_another_dtype_than_asked_are_a_contradiction() -> None:  # case 3
    frozen = _spec()
    backings = factories.arm_result(frozen.arm("k16v8")).backings
    arms = _arms(frozen, k8v8={"backings": backings})
    decision = _decide(frozen, factories.samples(frozen), arms=arms)["k8v8", "k16v16"]
    assert decision.status == "invalid"
    assert "keys: requested fp8_e4m3, backing holds bf16" in decision.reason


def test_backings_of_a_dtype_that_is_no_known_format_are_a_contradiction() -> None:  # case 3
    frozen = _spec()
    plain = factories.arm_result(frozen.arm("k8v8")).backings
    arms = _arms(frozen, k8v8={"backings": tuple(msgspec.structs.replace(item, dtype="int8") for item in plain)})
    decision = _decide(frozen, factories.samples(frozen), arms=arms)["k8v8", "k16v16"]
    assert decision.status == "invalid"
    assert "keys: requested fp8_e4m3, backing holds int8" in decision.reason
    assert "values: requested fp8_e4m3, backing holds int8" in decision.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backings": ()}, "backings: none were measured"),
        ({"geometry": None}, "geometry: not measured"),
        ({"measured": {}}, "keys: requested fp8_e4m3, not measured"),
    ],
)
def test_an_arm_of_which_nothing_was_measured_is_invalid(changes: dict[str, Any], words: str) -> None:
    frozen = _spec()
    decision = _decide(frozen, factories.samples(frozen), arms=_arms(frozen, k8v8=changes))["k8v8", "k16v16"]
    assert decision.status == "invalid"
    assert decision.reason.startswith(f"arm k8v8 did not do what was asked: {words}")


def test_a_backend_that_silently_took_the_place_of_another_is_a_contradiction() -> None:
    arm = factories.ARMS[4]
    refused = records.Backend(name="sdpa", accepted=False, reason="no kernel")
    taken = factories.arm_result(arm, backends=(refused, records.Backend(name="eager", accepted=True)))
    assert validity.contradictions(arm, taken) == ["backend: requested sdpa, accepted eager"]
    # tried, refused, and accepted at the second attempt; and a runtime that names none
    again = (refused, records.Backend(name="sdpa", accepted=True))
    assert validity.contradictions(arm, factories.arm_result(arm, backends=again)) == []
    assert validity.contradictions(arm, factories.arm_result(arm, backends=())) == []


def test_a_long_reason_is_cut_so_that_the_decision_can_be_recorded() -> None:
    many = tuple(records.Gate(statistic="loss_difference_mean", bound=0.02, harm=0.02) for _ in range(150))
    family = records.Family(name="loss", resamples=9, gates=many)
    frozen = _spec(families=(factories.FAMILIES[0], family, factories.FAMILIES[2]))
    decision = _decide(frozen, factories.samples(frozen))["k16v8", "k16v16"]
    assert len(decision.reason) == 8000
    assert records.decode(records.Decision, records.encode(decision), "the decision") == decision


def test_a_stored_format_that_was_not_measured_is_a_contradiction() -> None:
    arm = factories.ARMS[4]
    assert validity.contradictions(arm, factories.arm_result(arm)) == []
    halves = factories.arm_result(arm, measured={"keys": "bf16"})
    assert validity.contradictions(arm, halves) == ["values: requested fp8_e4m3, not measured"]
    # what a runtime cannot say may be absent
    assert validity.contradictions(arm, factories.arm_result(arm, effective={})) == []


@pytest.mark.parametrize("side", ["k16v8", "k16v16", "k16v16_repeat"])
def test_a_refused_arm_is_unsupported_with_the_guards_reason(side: str) -> None:
    frozen = _spec()
    arms = _arms(frozen, **{side: {"outcome": "refused", "reason": "sliding_window: layer 3 slides"}})
    decision = _decide(frozen, factories.samples(frozen), arms=arms)["k16v8", "k16v16"]
    assert decision.status == "unsupported"
    assert decision.reason == f"arm {side.replace('_', '-')} was refused: sliding_window: layer 3 slides"


def test_an_arm_that_failed_or_is_absent_is_invalid() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    failed = _decide(frozen, files, arms=_arms(frozen, k16v8={"outcome": "failed", "reason": "CUDA error"}))["k16v8", "k16v16"]
    assert (failed.status, failed.reason) == ("invalid", "arm k16v8 failed: CUDA error")
    absent = _decide(frozen, files, arms=tuple(arm for arm in _arms(frozen) if arm.name != "k16v8"))["k16v8", "k16v16"]
    assert (absent.status, absent.reason) == ("invalid", "missing evidence: the result says nothing of arm k16v8")


def test_missing_documents_are_missing_evidence() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    del files["samples/0005.safetensors"], files["samples/0006.safetensors"]
    found = _decide(frozen, files)
    assert {decision.status for decision in found.values()} == {"invalid"}
    assert found["k16v8", "k16v16"].reason == "missing evidence: arm k16v8 has no samples of document 5, 6"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_make_only_their_own_contrasts_invalid(bad: float) -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    tensors = load(files["samples/0001.safetensors"])
    tensors["k8v8.kl.k16v16"][3] = bad
    files["samples/0001.safetensors"] = save(tensors)
    found = _decide(frozen, files)
    assert found["k8v8", "k16v16"].status == found["k16v8", "k8v8"].status == "invalid"
    assert "k8v8.kl.k16v16 of document 1 holds a NaN or an infinity" in found["k8v8", "k16v16"].reason
    assert found["k16v8", "k16v16"].status == "established"


def test_an_arm_whose_cache_was_not_read_is_invalid() -> None:  # case 18
    frozen = _spec()
    files = factories.samples(frozen)
    for name, data in files.items():
        tensors = load(data)
        tensors |= {"k8v8.loss": tensors["k16v16.loss"], "k8v8.top1": tensors["k16v16.top1"]}
        tensors["k8v8.kl.k16v16"] = np.zeros_like(tensors["k16v16.loss"])
        files[name] = save(tensors)
    found = _decide(frozen, files)
    assert found["k8v8", "k16v16"].status == found["k16v8", "k8v8"].status == "invalid"
    assert "suspicious: k16v16 and k8v8 agree in every bit" in found["k8v8", "k16v16"].reason
    assert found["k16v8", "k16v16"].status == "established"  # the control is not to blame


def test_a_bound_tighter_than_the_control_floor_is_invalid_not_failed() -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    for name, data in files.items():
        tensors = load(data)
        tensors["k16v16-repeat.loss"] = tensors["k16v16.loss"] + np.float32(0.03)
        files[name] = save(tensors)
    decision = _decide(frozen, files)["k16v8", "k16v16"]
    assert decision.status == "invalid"
    assert decision.reason.startswith(
        "floor exceeded: loss_difference_mean has the bound 0.02, but k16v16-repeat alone differs from k16v16 by 0.03"
    )
    assert decision.gates[0].floor == pytest.approx(0.03, abs=1e-6)


def test_a_baseline_without_a_repeat_has_no_floor() -> None:
    frozen = _spec()
    found = _decide(frozen, factories.samples(frozen))
    assert {gate.floor for gate in found["k16v16", "native"].gates} == {None}
    assert {gate.floor for gate in found["k16v8", "k16v16"].gates} == {0.0}


def test_a_gate_on_a_kl_that_no_runner_records_is_invalid() -> None:
    frozen = _spec(contrasts=(records.Contrast(candidate="k16v8", baseline="k8v8", family="loss"),))
    files = {
        name: save({k: v for k, v in load(data).items() if ".kl." not in k and ".gap." not in k} | _repeats(data))
        for name, data in factories.samples(frozen).items()
    }
    decision = _decide(frozen, files)["k16v8", "k8v8"]
    assert decision.status == "invalid"
    assert "kl_p999 needs a KL of k16v8 and k8v8" in decision.reason


def _repeats(data: bytes) -> dict[str, np.ndarray]:
    return {k: v for k, v in load(data).items() if k == "k16v16-repeat.kl.k16v16"}


def test_nine_arms_of_sixteen_documents_are_decided_in_seconds() -> None:
    extra = tuple(
        records.Arm(name=name, role="candidate", implementation="reference", compute="fp32", keys=k, values=v, scales=s, granularity=g)
        for name, k, v, s, g in (
            ("k8v16", "fp8_e4m3", "bf16", "unit", "none"),
            ("k16v8-dynamic", "bf16", "fp8_e4m3", "dynamic", "token_head"),
            ("k8v8-dynamic", "fp8_e4m3", "fp8_e4m3", "dynamic", "token_head"),
        )
    )
    families = (
        factories.FAMILIES[0],
        records.Family(name="loss", gates=LOSS.gates),
        records.Family(name="advantage", gates=factories.FAMILIES[2].gates),
    )
    contrasts = (*factories.CONTRASTS, *(records.Contrast(candidate=arm.name, baseline="k16v16", family="loss") for arm in extra))
    frozen = _spec(16, 1024, arms=(*factories.ARMS, *extra), contrasts=contrasts, families=families)
    files = factories.samples(frozen, noise={arm.name: (0.05, 1e-3) for arm in extra})
    started = time.process_time()
    assert len(_decide(frozen, files)) == 8
    assert time.process_time() - started < 5


def test_a_backing_smaller_than_what_it_is_said_to_hold_is_a_contradiction() -> None:
    frozen = _spec()
    plain = factories.arm_result(frozen.arm("k16v8")).backings
    arms = _arms(frozen, k16v8={"backings": tuple(msgspec.structs.replace(item, bytes=item.bytes - 1) for item in plain)})
    decision = _decide(frozen, factories.samples(frozen), arms=arms)["k16v8", "k16v16"]
    assert decision.status == "invalid"
    assert "values: 1023 bytes for layers (0,), whose states need 1024" in decision.reason


@pytest.mark.parametrize(("series", "value"), [("loss", -5.0), ("kl.k16v16", -5.0), ("top1", -(2**31))])
def test_values_that_no_softmax_gives_are_invalid(series: str, value: float) -> None:
    frozen = _spec()
    files = factories.samples(frozen)
    tensors = load(files["samples/0001.safetensors"])
    tensors[f"k16v8.{series}"][3] = value
    files["samples/0001.safetensors"] = save(tensors)
    decision = _decide(frozen, files)["k16v8", "k16v16"]
    assert (decision.status, decision.reason.split(" holds ")[0]) == ("invalid", f"k16v8.{series} of document 1")
