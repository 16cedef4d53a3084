"""Specs that contradict themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ledger import gates, records
from ledger.errors import InputError
from ledger.records import consistency
from tests import factories


def _arm(index: int, **changes: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        arms = [records.plain(arm) for arm in factories.ARMS]
        arms[index] |= changes
        return {"arms": arms}

    return make


def _family(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"families": [{**records.plain(family), **changes} for family in factories.FAMILIES]}


def _gate(**changes: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        families = [records.plain(family) for family in factories.FAMILIES]
        families[1]["gates"][0].update(changes)
        return {"families": families}

    return make


def _identity(**changes: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        families = [records.plain(family) for family in factories.FAMILIES]
        families[0]["gates"][0].update(changes)
        return {"families": families}

    return make


def _chunk(chunk: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"workload": records.plain(factories.workload(chunk=chunk))}


def _contrast(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"contrasts": [{**records.plain(factories.CONTRASTS[0]), **changes}]}


def _spans(*spans: tuple[int, int]) -> Callable[[], dict[str, Any]]:
    workload = records.plain(factories.workload())
    return lambda: {"workload": {**workload, "spans": [{"start": start, "tokens": tokens} for start, tokens in spans]}}


OTHERWISE: dict[str, dict[str, Any]] = {
    "implementation": {"implementation": "fused"},
    "compute": {"compute": "bf16"},
    "keys": {"keys": "fp16"},
    "values": {"values": "fp8_e4m3", "scales": "unit"},
    "backend": {"backend": "eager"},
}
"""A repeat that does something else, by the first field in which it does."""


def _lonely() -> dict[str, Any]:
    """The only control is the candidate of an advantage: it would be nearest to itself."""
    arms = [records.plain(factories.ARMS[at]) for at in (2, 5)]
    contrast = records.Contrast(candidate="k16v16", baseline="k8v8", family="advantage")
    return {"arms": arms, "contrasts": [records.plain(contrast)]}


def test_the_spec_of_the_factories_is_sound() -> None:
    consistency.check(factories.spec())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (_arm(1, name="native"), "two arms have one name"),
        (lambda: {"arms": [records.plain(factories.ARMS[1])], "contrasts": []}, "no arm is a control"),
        (_spans(), "no document"),
        (_spans((0, 10), (9, 10)), "overlap or are out of order"),
        (_spans((20, 10), (0, 10)), "overlap or are out of order"),
        (_arm(3, repeats="absent"), "repeats no arm"),
        (_arm(3, repeats=None), "repeats no arm"),
        (_arm(3, repeats="k16v16-repeat"), "repeats no arm"),
        (_arm(1, repeats="native"), "names an arm to repeat"),
        (_arm(1, compute="fp8_e4m3"), "computes in fp8"),
        (_arm(4, scales="none"), "silent scale of 1.0"),
        (_arm(1, scales="unit"), "stores no fp8"),
        (_arm(4, scales="dynamic"), "need a granularity"),
        (_arm(4, granularity="head"), "need a granularity"),
        (_arm(4, scales="fixed", granularity="head"), "digest of their calibration"),
        (_arm(4, scale_source="0" * 64), "digest of their calibration"),
        (_arm(4, scales="fixed", granularity="token_head", scale_source="0" * 64), "of a layer or a head"),
        (_arm(0, keys="bf16"), "is native"),
        (lambda: {"families": [records.plain(factories.FAMILIES[0])] * 2, "contrasts": []}, "two gate families"),
        (_contrast(candidate="absent"), "names no arm"),
        (_contrast(baseline="own-fp32"), "with itself"),
        (_contrast(family="absent"), "names no gate family"),
        (_family(confidence=1.0), "impossible confidence"),
        (_family(confidence=0.5), "impossible confidence"),
        (_family(confidence=math.nan), "impossible confidence"),
        (_family(gates=[]), "has no gate"),
        (_gate(bound=math.nan), "no finite number"),
        (_gate(harm=math.inf), "no finite number"),
        (_gate(bound=0.5, harm=0.1), "calls harm what its bound allows"),
        (lambda: {"tolerances": {"loss_mean": math.nan}}, "no finite number from 0 up"),
        (lambda: {"tolerances": {"loss_mean": -0.1}}, "no finite number from 0 up"),
        (lambda: {"tolerances": {"loss": 0.1}}, "no measurement 'loss'"),
        (lambda: {"tolerances": {"greedy_agreement_token/0000": 1.0}}, "no measurement"),
        (lambda: {"tolerances": {"greedy_agreement_tokens/0000": 1.0}}, "counted in tokens"),
        (lambda: {"tolerances": {"cache_bytes_per_token": 1.0}}, "counted in bytes"),
        *((_arm(3, **change), f"with another {field}") for field, change in OTHERWISE.items()),
        (_arm(3, chunk=8), "under the same chunk"),
        (_arm(3, chunk=None), "under the same chunk"),
        (_arm(2, chunk=16), "under the same chunk"),
        (_arm(3, chunk=129), "meet too rarely"),
        (_chunk(1 << 40), "meet too rarely"),
        (_identity(bound=-1.0), "its bound is not zero"),
        (_identity(harm=1e-6), "its harm is not zero"),
        (lambda: {"contrasts": [records.plain(factories.CONTRASTS[at]) for at in (0, 1, 0)]}, "a contrast stands twice"),
        (_family(gates=[records.plain(factories.FAMILIES[1].gates[0])] * 2), "two gates of one statistic"),
        (_family(resamples=98), "unusable number of resamples"),
        (_family(resamples=100_001), "unusable number of resamples"),
        (_family(confidence=0.99), "too few resamples for its kl_p999"),
        (_lonely, "has no control to which"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes: Callable[[], dict[str, Any]], what: str) -> None:
    spec = records.convert(records.Spec, {**records.plain(factories.spec()), **changes()}, "the spec")
    with pytest.raises(InputError, match=what) as caught:
        consistency.check(spec)
    assert caught.value.next


def test_a_repeat_is_told_apart_by_its_scales() -> None:
    fixed = records.Arm(
        name="fixed", role="candidate", implementation="reference", compute="fp32", keys="bf16", values="fp8_e4m3",
        scales="fixed", granularity="head", scale_source="0" * 64,
    )  # fmt: skip
    again = msgspec.structs.replace(fixed, name="again", role="repeat", repeats="fixed", chunk=16)
    consistency.check(factories.spec(arms=(*factories.ARMS, fixed, again)))
    for field, changes in (
        ("scales", {"scales": "dynamic", "scale_source": None}),
        ("granularity", {"granularity": "tensor"}),
        ("scale_source", {"scale_source": "1" * 64}),
    ):
        with pytest.raises(InputError, match=f"with another {field}"):
            consistency.check(factories.spec(arms=(*factories.ARMS, fixed, msgspec.structs.replace(again, **changes))))


def test_a_repeat_whose_documents_end_before_the_chunks_differ_is_refused() -> None:
    workload = factories.workload(documents=4, tokens=8)
    with pytest.raises(InputError, match="under the same chunk"):
        consistency.check(factories.spec(workload=workload))


def test_a_document_without_a_token_to_predict_is_refused() -> None:
    for bos, tokens in ((False, 1), (False, 2), (True, 1)):
        arms = tuple(arm for arm in factories.ARMS if arm.role != "repeat")
        spec = factories.spec(arms=arms, workload=factories.workload(tokens=tokens, bos=bos))
        if tokens + bos < 2:
            with pytest.raises(InputError, match="no token to predict"):
                consistency.check(spec)
        else:
            consistency.check(spec)


def test_a_chunk_of_any_length_is_allowed_where_all_arms_have_it() -> None:
    arms = tuple(arm for arm in factories.ARMS if arm.role != "repeat")
    consistency.check(factories.spec(arms=arms, workload=factories.workload(chunk=4095)))


@pytest.mark.parametrize(("contrasts", "resamples"), [(5, 99), (6, 119), (20, 399)])
def test_the_fewest_resamples_that_holm_can_decide_are_allowed(contrasts: int, resamples: int) -> None:
    extra = tuple(msgspec.structs.replace(factories.ARMS[5], name=f"arm-{number}") for number in range(contrasts))
    pairs = tuple(records.Contrast(candidate=arm.name, baseline="k16v16", family="loss") for arm in extra)
    family = msgspec.structs.replace(factories.FAMILIES[1], resamples=resamples)
    frozen = factories.spec(arms=(*factories.ARMS, *extra), contrasts=pairs, families=(family,))
    consistency.check(frozen)
    adjusted = gates.holm([1 / (resamples + 1)] * contrasts)
    assert max(adjusted) <= 1 - family.confidence
    if resamples > 99:
        fewer = msgspec.structs.replace(family, resamples=resamples - 1)
        with pytest.raises(InputError, match=f"at least {resamples} resamples|at least {resamples + 1} resamples"):
            consistency.check(msgspec.structs.replace(frozen, families=(fewer,)))


def test_a_family_that_no_contrast_uses_needs_no_resamples_for_its_tail() -> None:
    family = msgspec.structs.replace(factories.FAMILIES[1], name="spare", confidence=0.999)
    consistency.check(factories.spec(families=(*factories.FAMILIES, family)))
