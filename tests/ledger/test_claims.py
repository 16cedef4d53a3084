"""A claim is what all runs of its key say together: the most adverse valid one decides, and all are listed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ledger import claims, digest, records
from tests import factories, taskfiles

CONTRAST = records.Contrast(candidate="k16v8", baseline="k16v16", family="loss")


def _frozen(**changes: Any) -> records.Spec:
    return factories.spec(**{"contrasts": (CONTRAST,), **changes})


class Log:
    """Records in order, and the results of the runs among them."""

    def __init__(self) -> None:
        self.records: list[tuple[str, records.Body]] = []
        self.results: dict[str, records.Result] = {}

    def add(self, body: Any) -> str:
        name = records.identify(body)
        self.records.append((name, body))
        return name

    def run(self, frozen: records.Spec, status: str, why: str = "because", *, result: dict[str, Any] | None = None, **changes: Any) -> str:
        at = f"2026-01-02T03:04:{len(self.records):02}Z"  # two runs never have one result
        result = factories.result(frozen, {}, started=at, **(result or {}))
        decisions = tuple(
            records.Decision(candidate=c.candidate, baseline=c.baseline, family=c.family, status=status, reason=why)  # type: ignore[arg-type]
            for c in frozen.questions()
        )
        name = self.add(factories.run(frozen, result, **{"decisions": decisions, **changes}))
        self.results[name] = result
        return name

    def retract(self, run: str) -> None:
        self.add(records.Retract(format="kv-ledger/retract/1", run=run, author="the maintainers", reason="wrong dataset"))

    def supersede(self, run: str, by: str) -> None:
        self.add(records.Supersede(format="kv-ledger/supersede/1", run=run, by=by, author="the maintainers", reason="longer run"))

    def claims(self) -> tuple[records.Claim, ...]:
        return claims.derive(self.records, self.results)

    def claim(self) -> records.Claim:
        (found,) = self.claims()
        return found


def _otherwise(frozen: records.Spec) -> dict[str, Any]:
    """Of a result whose tokenizer read the text otherwise."""
    return {"documents": tuple(records.Document(tokens=span.tokens, sha256=f"{at:064x}") for at, span in enumerate(frozen.documents))}


def _log(frozen: records.Spec) -> Log:
    log = Log()
    log.add(frozen)
    return log


def test_a_frozen_spec_without_a_run_is_not_measured() -> None:
    log = Log()
    log.add(factories.spec())
    found = log.claims()
    assert [claim.status for claim in found] == ["not measured"] * len(factories.CONTRASTS)
    assert {claim.runs for claim in found} == {()}
    assert {claim.hardware for claim in found} == {"not run"}


def test_runs_of_other_token_ids_do_not_add_up() -> None:
    frozen = _frozen()
    log = _log(frozen)
    first, second = log.run(frozen, "established"), log.run(frozen, "established")
    other = log.run(frozen, "degraded", result=_otherwise(frozen))
    same, apart = log.claims()
    assert (same.status, same.runs) == ("established", (second, first))
    assert (apart.status, apart.runs) == ("degraded", (other,))
    assert apart.reason.startswith("of other token ids than the first run that asked this; ")
    assert same.key != apart.key and len({*log.claims()}) == 2


def test_answers_to_prompts_of_other_token_ids_do_not_add_up() -> None:
    """A run that does not say what it fed counts with the first."""
    frozen = taskfiles.spec(items=3, contrasts=taskfiles.CONTRASTS[:1])
    log = _log(frozen)
    first = log.run(frozen, "established", result={"documents": taskfiles.documents(frozen)})
    again = log.run(frozen, "established", result={"documents": taskfiles.documents(frozen)})
    silent = log.run(frozen, "established")
    other = log.run(frozen, "degraded", result={"documents": taskfiles.documents(frozen, "others")})
    same, apart = log.claims()
    assert (same.status, set(same.runs)) == ("established", {first, again, silent})
    assert (apart.status, apart.runs) == ("degraded", (other,)) and apart.reason.startswith("of other token ids")


def test_no_later_entry_changes_the_key_of_a_claim_on_other_token_ids() -> None:
    frozen = _frozen()
    log = _log(frozen)
    first = log.run(frozen, "degraded", result=_otherwise(frozen))
    second = log.run(frozen, "established")
    before = [(claim.key, claim.status, claim.runs) for claim in log.claims()]
    assert [(status, runs) for _, status, runs in before] == [("degraded", (first,)), ("established", (second,))]
    log.retract(first)
    after = [(claim.key, claim.status, claim.runs) for claim in log.claims()]
    assert after == [(before[0][0], "retracted", (first,)), before[1]]


def test_a_run_that_was_cut_short_counts_with_the_others() -> None:
    frozen = _frozen()
    log = _log(frozen)
    whole = log.run(frozen, "established")
    cut = log.run(frozen, "established", result={"documents": ()}, outcome="interrupted", reason="interrupted by SIGINT")
    assert (log.claim().status, log.claim().runs) == ("established", (whole, cut))


def test_pinned_token_ids_are_part_of_what_is_claimed() -> None:
    plain = _frozen(format="kv-ledger/spec/3")
    pinned = msgspec.structs.replace(plain, ids="a" * 64)
    log = _log(plain)
    log.add(pinned)
    first, second = log.claims()
    assert first.key != second.key


def test_one_claim_a_contrast_says_what_was_tested_in_words() -> None:
    frozen = _frozen(workload=factories.workload(16, 1023, bos=True, chunk=64))
    log = _log(frozen)
    run = log.run(frozen, "established", "all bounds met")
    claim = log.claim()
    assert claim.arm == "k16v8: K bf16 / V fp8_e4m3, unit scales, reference, fp32 compute"
    assert claim.baseline == "k16v16: K bf16 / V bf16, reference, fp32 compute"
    assert claim.workload == "16 × 1,024 tokens of toy text, chunk 64, BOS"
    assert (claim.model, claim.hardware, claim.study, claim.scope) == ("Toy-1M", "CPU x86_64", "toy", "quality.loss")
    assert (claim.status, claim.reason, claim.runs) == ("established", "all bounds met", (run,))
    assert claim.words == "established"


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        (
            {"scales": "dynamic", "granularity": "token_head"},
            "K bf16 / V fp8_e4m3, dynamic scales per token and head, reference, fp32 compute",
        ),
        (
            {"scales": "fixed", "granularity": "head", "scale_source": "ab" * 32},
            "K bf16 / V fp8_e4m3, fixed scales (abababab) per head, reference, fp32 compute",
        ),
        ({"backend": "eager", "chunk": 128}, "K bf16 / V fp8_e4m3, unit scales, reference, fp32 compute, eager, chunk 128"),
    ],
)
def test_whatever_tells_policies_apart_stands_in_the_label(changes: dict[str, Any], label: str) -> None:
    assert claims.arm_label(msgspec.structs.replace(factories.ARMS[4], **changes)) == label


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "2 × 32 tokens of toy text, chunk 8, no BOS"),
        ({"split_special_tokens": False, "batch": 4}, "2 × 32 tokens of toy text, chunk 8, no BOS, special tokens parsed, batch 4"),
        (
            {"spans": (records.Span(start=64, tokens=9), records.Span(start=73, tokens=5))},
            "2 documents, 14 tokens of toy text from token 64, chunk 8, no BOS",
        ),
    ],
)
def test_whatever_tells_workloads_apart_stands_in_the_label(changes: dict[str, Any], label: str) -> None:
    assert claims.workload_label(factories.workload(2, **changes)) == label


def test_spans_with_gaps_are_told_apart_by_a_digest() -> None:
    gaps = factories.workload(spans=(records.Span(start=0, tokens=9), records.Span(start=20, tokens=9)))
    assert "(spans " in claims.workload_label(gaps)


@pytest.mark.parametrize(
    ("statuses", "decides"),
    [
        (["established", "established"], "established"),
        (["established", "not established"], "not established"),
        (["not established", "established"], "not established"),
        (["established", "degraded", "not established"], "degraded"),
        (["degraded", "established"], "degraded"),
        (["passes", "fails"], "fails"),
        (["fails", "passes", "passes"], "fails"),
        (["invalid", "established"], "established"),
        (["established", "invalid"], "established"),
        (["degraded", "invalid"], "degraded"),
        (["unsupported", "established"], "established"),
        (["unsupported", "invalid"], "unsupported"),
        (["invalid", "unsupported"], "unsupported"),
        (["invalid", "invalid"], "invalid"),
    ],
)
def test_the_most_adverse_valid_run_decides_and_all_are_listed(statuses: list[str], decides: str) -> None:
    frozen = _frozen()
    log = _log(frozen)
    runs = [log.run(frozen, status, f"run {at}") for at, status in enumerate(statuses)]
    claim = log.claim()
    assert claim.status == decides
    assert sorted(claim.runs) == sorted(runs)
    deciding = max(at for at, status in enumerate(statuses) if status == decides)  # among equals the latest
    assert claim.runs[0] == runs[deciding]
    alike = statuses.count(decides)
    assert claim.reason == f"{decides} in {alike} of {len(runs)} runs: run {deciding}"


def test_a_failed_run_is_invalid_with_its_reason_and_yields_to_one_that_completed() -> None:
    frozen = _frozen()
    log = _log(frozen)
    failed = log.run(frozen, "established", outcome="failed", reason="because")
    failed_reason = log.claim().reason
    assert log.claim().status == "invalid"
    assert failed_reason == "the run failed: because"
    valid = log.run(frozen, "established")
    assert log.claim().status == "established"
    assert log.claim().runs == (valid, failed)


def test_an_interrupted_run_says_so() -> None:
    frozen = _frozen()
    log = _log(frozen)
    log.run(frozen, "invalid", outcome="interrupted", reason="killed by the user")
    assert (log.claim().status, log.claim().reason) == ("invalid", "the run was interrupted: killed by the user")


def test_a_run_without_a_decision_is_invalid() -> None:
    frozen = _frozen()
    log = _log(frozen)
    log.run(frozen, "established", decisions=())
    assert (log.claim().status, log.claim().reason) == ("invalid", "the run holds no decision on this contrast")


def test_a_retracted_run_does_not_count_and_alone_it_says_who_and_why() -> None:
    frozen = _frozen()
    log = _log(frozen)
    bad = log.run(frozen, "degraded")
    log.retract(bad)
    claim = log.claim()
    assert (claim.status, claim.reason, claim.runs) == ("retracted", "retracted by the maintainers: wrong dataset", (bad,))
    good = log.run(frozen, "established")
    assert log.claim().status == "established"
    assert log.claim().runs == (good, bad)
    assert "1 run withdrawn: retracted by the maintainers: wrong dataset" in log.claim().reason


def test_a_superseded_run_does_not_count_but_the_one_that_replaces_it_does() -> None:
    frozen = _frozen()
    log = _log(frozen)
    old, new = log.run(frozen, "degraded"), log.run(frozen, "established")
    assert log.claim().status == "degraded"
    log.supersede(old, new)
    assert (log.claim().status, log.claim().runs) == ("established", (new, old))
    assert f"superseded by {new[:12]} (the maintainers: longer run)" in log.claim().reason
    log.retract(new)
    assert log.claim().status == "retracted"


def test_a_run_superseded_by_one_of_another_key_leaves_its_key_retracted() -> None:
    frozen, other = _frozen(), _frozen(workload=factories.workload(8))
    log = _log(frozen)
    log.add(other)
    old, new = log.run(frozen, "degraded"), log.run(other, "established")
    log.supersede(old, new)
    assert [(claim.status, claim.runs) for claim in log.claims()] == [("retracted", (old,)), ("established", (new,))]


FAMILY = factories.FAMILIES[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"study": "another", "title": "Another title"},
        {"tolerances": {"loss_mean": 0.5}},
        {"workload": factories.workload(inputs="store")},
        {"families": (msgspec.structs.replace(FAMILY, seed=7, resamples=99),)},
        {"families": (msgspec.structs.replace(FAMILY, gates=FAMILY.gates[::-1]),)},
        {"checkpoint": factories.checkpoint(name="Another name", source="file:elsewhere.safetensors", license="MIT")},
    ],
)
def test_what_does_not_change_the_test_does_not_change_the_row(changes: dict[str, Any]) -> None:
    frozen, again = _frozen(families=(FAMILY,)), _frozen(**{"families": (FAMILY,), **changes})
    assert records.identify(frozen) != records.identify(again)
    log = _log(frozen)
    log.add(again)
    runs = {log.run(frozen, "degraded"), log.run(again, "established")}
    assert set(log.claim().runs) == runs
    assert log.claim().status == "degraded"  # nobody retries until it passes


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": factories.workload(8)},
        {"workload": factories.workload(chunk=16)},
        {"workload": factories.workload(bos=True)},
        {"workload": factories.workload(split_special_tokens=False)},
        {"workload": factories.workload(batch=2)},
        {"families": (msgspec.structs.replace(FAMILY, confidence=0.99),)},
        {"families": (msgspec.structs.replace(FAMILY, gates=FAMILY.gates[:2]),)},
        {"checkpoint": factories.checkpoint(files=(records.CheckpointFile(path="toy.safetensors", sha256=digest.sha256(b"x"), size=1),))},
        {"checkpoint": factories.checkpoint(alteration=records.RescaledKeys(pairs=(0,), exponent=6))},
        {"arms": tuple(msgspec.structs.replace(arm, backend="eager") if arm.name == "k16v8" else arm for arm in factories.ARMS)},
    ],
)
def test_unlike_settings_never_share_a_row(changes: dict[str, Any]) -> None:
    frozen, other = _frozen(families=(FAMILY,)), _frozen(**{"families": (FAMILY,), **changes})
    log = _log(frozen)
    log.add(other)
    log.run(frozen, "degraded")
    log.run(other, "established")
    assert [claim.status for claim in log.claims()] == ["degraded", "established"]
    assert len({claim.key for claim in log.claims()}) == 2


def test_unlike_hardware_never_shares_a_row() -> None:
    frozen = _frozen()
    log = _log(frozen)
    log.run(frozen, "degraded", result={"host": factories.host(accelerator="Toy GPU")})
    log.run(frozen, "established")
    assert [(claim.hardware, claim.status) for claim in log.claims()] == [("CPU x86_64", "established"), ("Toy GPU", "degraded")]


def test_a_spec_frozen_again_is_not_said_to_be_unmeasured() -> None:
    frozen = _frozen()
    log = _log(frozen)
    log.run(frozen, "established")
    log.add(_frozen(title="The same under another title"))
    assert log.claim().status == "established"


@pytest.mark.parametrize(
    "checkpoint",
    [
        factories.checkpoint(source="random:llama#7", files=(), config={"model_type": "llama"}, seed=7),
        factories.checkpoint(alteration=records.RescaledKeys(pairs=(0, 1), exponent=6)),
    ],
)
def test_seeded_and_altered_weights_are_synthetic(checkpoint: records.Checkpoint) -> None:
    frozen = _frozen(checkpoint=checkpoint)
    log = _log(frozen)
    log.run(frozen, "established")
    assert log.claim().synthetic
    assert log.claim().words == "synthetic established"


def test_claims_are_in_a_fixed_order_and_their_keys_are_distinct() -> None:
    log = Log()
    frozen = factories.spec()
    log.add(frozen)
    log.run(frozen, "established")
    first = log.claims()
    assert first == log.claims()
    assert len({claim.key for claim in first}) == len(first) == len(frozen.contrasts)
    assert all(records.encode(claim) for claim in first)


def test_a_run_of_a_spec_that_is_not_there_says_nothing() -> None:
    log = Log()
    log.run(_frozen(), "established")
    assert log.claims() == ()
