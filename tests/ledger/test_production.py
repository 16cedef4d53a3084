"""Checks become passes and fails, arm by arm; what was not tried is not passed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ledger import deriving, production, records
from ledger.errors import InputError
from tests import factories

SPEC = factories.production_spec()


def decide(files: dict[str, bytes], **changes: Any) -> dict[str, records.Decision]:
    found = deriving.derive(SPEC, factories.result(SPEC, files, **changes), files, factories.harness())
    return {decision.candidate: decision for decision in found.decisions}


def test_an_arm_passes_where_all_its_checks_do() -> None:
    found = decide(factories.checks(SPEC))
    assert {name: decision.status for name, decision in found.items()} == dict.fromkeys(("k16v16", "k16v8", "k8v8"), "passes")
    assert [gate.statistic for gate in found["k16v8"].gates] == list(production.CHECKS)
    assert found["k16v8"].reason == "12 checks, every one passed"


FAILS = [
    ("batch_independence", {"differing": 3, "largest": 0.5}, "1,000 compared, 3 differ, by 0.5 at most"),
    ("batch_independence", {"largest": 0.5}, "1,000 compared, 0 differ, by 0.5 at most"),
    ("oracle_error", {"largest": 0.031}, "by 0.031 at most of 0.03 allowed"),
    ("oracle_error", {"largest": math.nan}, "by nan at most"),
    ("oracle_error", {"largest": math.inf, "differing": 1000}, "by inf at most"),
    ("oracle_error", {"largest": 0.01, "differing": 7}, "7 differ, by 0.01 at most"),
    ("oracle_error", {"largest": 0.9, "differing": 7, "tolerance": 1.0}, "7 differ, by 0.9 at most"),
    ("poisoned_pages", {"differing": 1, "tolerance": 1.0}, "1 differ"),
]


@pytest.mark.parametrize(("check", "change", "words"), FAILS)
def test_one_check_that_fails_fails_its_arm_alone(check: str, change: dict[str, Any], words: str) -> None:
    found = decide(factories.checks(SPEC, {(check, "k16v8"): change}))
    assert {name: decision.status for name, decision in found.items()} == {"k16v16": "passes", "k16v8": "fails", "k8v8": "passes"}
    assert f"{check}: " in found["k16v8"].reason and words in found["k16v8"].reason
    outcome = next(gate for gate in found["k16v8"].gates if gate.statistic == check)
    assert not outcome.met and outcome.harmed
    assert records.decode(records.Decision, records.encode(found["k16v8"]), "the decision") is not None


def test_a_difference_within_the_tolerance_passes() -> None:
    changes: Any = {("oracle_error", "k16v8"): {"largest": 0.003, "tolerance": 0.003}}
    assert decide(factories.checks(SPEC, changes))["k16v8"].status == "passes"


BARS = [
    ("poisoned_pages", "k16v8", {"tolerance": 0.0}, "it is exact, and was held to a tolerance of 0"),
    ("graph_replay_equals_eager", "k16v8", {"tolerance": 1e9, "largest": 5.0}, "it is exact"),
    ("oracle_error", "k16v16", {"tolerance": 0.0031}, "it was held to a tolerance of 0.0031, above 0.003"),
    ("oracle_error", "k16v8", {"tolerance": 0.031}, "above 0.03"),
    ("oracle_error", "k8v8", {"tolerance": 0.061}, "above 0.06"),
    ("border_lengths", "k8v8", {"tolerance": 0.0031}, "above 0.003"),
    ("chunked_equals_one_shot", "k16v16", {"tolerance": 0.11}, "above 0.1"),
    ("chunked_equals_one_shot", "k16v8", {"tolerance": 0.21}, "above 0.2"),
    ("oracle_error", "k16v8", {"tolerance": None}, "it was held to no tolerance, and has one of at most 0.03"),
]


@pytest.mark.parametrize(("check", "arm", "change", "words"), BARS)
def test_the_evidence_does_not_choose_its_own_bar(check: str, arm: str, change: dict[str, Any], words: str) -> None:
    found = decide(factories.checks(SPEC, {(check, arm): change}))[arm]
    assert found.status == "invalid" and f"{check}: " in found.reason and words in found.reason
    outcome = next(gate for gate in found.gates if gate.statistic == check)
    assert not outcome.met and not outcome.harmed


def test_the_bar_depends_on_the_format() -> None:
    half = msgspec.structs.replace(factories.fused("half", "fp16", "fp16"), compute="fp16")
    keys = factories.fused("k8v16", "fp8_e4m3", "bf16")
    assert [production.bar("chunked_equals_one_shot", arm) for arm in (half, *factories.FUSED)] == [0.02, 0.1, 0.2, 0.2]
    assert [production.bar("oracle_error", arm) for arm in (half, *factories.FUSED, keys)] == [0.003, 0.003, 0.03, 0.06, 0.06]
    exact = {name for name in production.CHECKS if production.bar(name, keys) is None}
    assert set(production.CHECKS) - exact == {"border_lengths", "oracle_error", "chunked_equals_one_shot"}


def test_the_tests_hold_themselves_to_the_bars_of_the_ledger() -> None:
    held = pytest.importorskip("runners.findings").TOLERANCES
    assert {form: held[form]["logits"] for form in held} == production.LOGITS
    assert {side: held["fp8_e4m3"][side] for side in ("keys", "values")} == production.UNQUANTISED
    assert {held[form]["oracle"] for form in ("bf16", "fp16")} == {production.ORACLE}


@pytest.mark.parametrize("change", [{"compared": 0}, {"compared": 0, "differing": 2, "tolerance": None}])
def test_a_check_that_compared_nothing_was_not_tried(change: dict[str, Any]) -> None:
    found = decide(factories.checks(SPEC, {("graph_replay_equals_eager", "k16v8"): change}))
    assert {name: decision.status for name, decision in found.items()} == {"k16v16": "passes", "k16v8": "invalid", "k8v8": "passes"}
    assert found["k16v8"].reason == "graph_replay_equals_eager: nothing was compared; prompts of 1 and 64 tokens"
    outcome = found["k16v8"].gates[0]
    assert not outcome.met and not outcome.harmed


def test_a_check_that_is_missing_is_not_passed() -> None:
    found = decide(factories.checks(SPEC, {("returned_pages", "k16v8"): None}))["k16v8"]
    assert (found.status, found.reason) == ("invalid", "missing evidence: no check returned_pages")


def test_quantisation_is_asked_only_of_arms_that_store_8_bit() -> None:
    found = decide(factories.checks(SPEC, {("quantise_all_inputs", arm.name): None for arm in factories.FUSED}))
    assert {name: decision.status for name, decision in found.items()} == {"k16v16": "passes", "k16v8": "invalid", "k8v8": "invalid"}


def test_a_line_without_an_arm_is_of_all() -> None:
    dropped: Any = {("unsupported_refused", arm.name): None for arm in factories.FUSED[1:]}
    files = factories.checks(SPEC, {**dropped, ("unsupported_refused", "k16v16"): {"arm": ""}})
    assert {decision.status for decision in decide(files).values()} == {"passes"}


def test_an_arm_that_was_refused_is_unsupported() -> None:
    refused = tuple(
        factories.arm_result(arm, outcome="refused", reason="head_dim: 80") if arm.name == "k8v8" else factories.arm_result(arm)
        for arm in SPEC.arms
    )
    found = decide(factories.checks(SPEC), arms=refused)["k8v8"]
    assert (found.status, "head_dim" in found.reason) == ("unsupported", True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"check": "luck"}, "names no check, or no fused arm"),
        ({"arm": "native"}, "names no check, or no fused arm"),
        ({"check": "batch_independence"}, "repeats check 'batch_independence'"),
        ({"compared": -1}, "cannot be"),
        ({"compared": 1.5}, "cannot be"),
        ({"compared": 10**300}, "cannot be"),
        ({"differing": True}, "cannot be"),
        ({"largest": 10**399}, "cannot be"),
        ({"largest": -0.5}, "cannot be"),
        ({"largest": "0"}, "cannot be"),
        ({"tolerance": 10**399}, "cannot be"),
        ({"tolerance": math.nan}, "cannot be"),
        ({"check": ["luck"]}, "names no check"),
        ({"check": "batch_independence", "arm": ""}, "repeats check 'batch_independence', arm ''"),
        ({"largest": None}, "cannot be"),
        ({"tolerance": -1.0}, "cannot be"),
        ({"tolerance": math.inf}, "cannot be"),
        ({"extra": 1}, "has other keys"),
    ],
)
def test_lines_that_a_runner_would_not_write_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        production.read(SPEC, factories.checks(SPEC, {("poisoned_pages", "k16v16"): change}))
    assert words in str(caught.value)
