"""Checks become passes and fails, arm by arm; what was not tried is not passed."""

from __future__ import annotations

import math
from typing import Any

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
    ("oracle_error", {"largest": 0.0031}, "by 0.0031 at most"),
    ("oracle_error", {"largest": math.nan}, "by nan at most"),
    ("oracle_error", {"largest": math.inf, "differing": 1000}, "by inf at most"),
    ("poisoned_pages", {"compared": 0}, "nothing was compared"),
    ("poisoned_pages", {"compared": 0, "differing": 2}, "nothing was compared"),
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
    assert decide(factories.checks(SPEC, {("oracle_error", "k16v8"): {"largest": 0.003, "differing": 7}}))["k16v8"].status == "passes"


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
