"""Raw samples are parsed strictly, and every figure is what its definition says."""

from __future__ import annotations

import math
from itertools import permutations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from scipy import stats

from ledger import digest, measures, records
from ledger.errors import InputError
from ledger.records import consistency
from tests import factories


def _small(losses: dict[str, list[list[float]]], **extra: object) -> tuple[records.Spec, measures.Samples]:
    """A spec of as many documents as ``losses`` has, and samples of those losses alone."""
    count = len(next(iter(losses.values())))
    frozen = factories.spec(workload=factories.workload(count))
    samples = measures.Samples()
    for arm, documents in losses.items():
        samples.loss[arm] = {d: np.array(values, np.float64) for d, values in enumerate(documents)}
        samples.top1[arm] = {d: np.zeros(len(values), np.int32) for d, values in enumerate(documents)}
    return frozen, samples


def _figures(frozen: records.Spec, samples: measures.Samples) -> dict[tuple[str, str, str | None], records.Measurement]:
    found = measures.measure(frozen, factories.result(frozen, {}, arms=()), samples)
    return {(m.arm, m.name, m.against): m for m in found}


def _edit(data: bytes, **changes: np.ndarray | None) -> bytes:
    tensors = load(data)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    return save(tensors)


def test_samples_of_the_standard_arms_are_read_in_double_precision() -> None:
    frozen = factories.spec()
    samples = measures.read_samples(frozen, {**factories.samples(frozen), "result.json": b"not looked at"})
    assert samples.documents("native", "k16v8", "k8v8") == (0, 1, 2, 3)
    assert samples.loss["k16v8"][3].dtype == np.float64
    assert samples.top1["k16v8"][3].dtype == np.int32
    assert set(samples.kl) == {
        ("own-fp32", "native"),
        ("k16v16", "native"),
        ("k16v16-repeat", "k16v16"),
        ("k16v8", "k16v16"),
        ("k8v8", "k16v16"),
    }
    assert set(samples.gap) == {("own-fp32", "native")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k16v8.kl.k16v16": None}, "lacks the tensor 'k16v8.kl.k16v16'"),
        ({"k16v8.loss": None}, "lacks the tensor 'k16v8.loss'"),
        ({"own-fp32.gap.native": None}, "lacks the tensor 'own-fp32.gap.native'"),
        ({"k16v8.kl.native": np.zeros(31, np.float32)}, "does not ask for"),
        ({"stranger.loss": np.zeros(31, np.float32)}, "does not ask for"),
        ({"k16v8.loss.x": np.zeros(31, np.float32)}, "does not ask for"),
        ({"k16v8.loss": np.zeros(30, np.float32)}, "found: F32 [30]"),
        ({"k16v8.loss": np.zeros((31, 1), np.float32)}, "found: F32 [31, 1]"),
        ({"k16v8.loss": np.zeros(31, np.float64)}, "found: F64 [31]"),
        ({"k16v8.top1": np.zeros(31, np.int64)}, "expected: I32 [31]"),
        ({"k16v8.top1": np.zeros(31, np.float32)}, "expected: I32 [31]"),
    ],
)
def test_a_tensor_that_is_missing_extra_or_misshapen_is_refused_by_name(change: dict[str, np.ndarray | None], words: str) -> None:
    frozen = factories.spec()
    files = factories.samples(frozen)
    files["samples/0002.safetensors"] = _edit(files["samples/0002.safetensors"], **change)
    with pytest.raises(InputError) as caught:
        measures.read_samples(frozen, files)
    assert "samples/0002.safetensors" in str(caught.value)
    assert words in str(caught.value)
    assert next(iter(change)) in str(caught.value)


@pytest.mark.parametrize("name", ["samples/0004.safetensors", "samples/1.safetensors", "samples/0000.npy", "samples/x/0000.safetensors"])
def test_a_sample_file_of_no_document_is_refused(name: str) -> None:
    frozen = factories.spec()
    with pytest.raises(InputError, match="belongs to no document"):
        measures.read_samples(frozen, {name: b""})


@pytest.mark.parametrize("cut", [0, 4, 8, 200, -1])
def test_a_truncated_sample_file_is_refused(cut: int) -> None:
    frozen = factories.spec()
    files = factories.samples(frozen)
    files["samples/0001.safetensors"] = files["samples/0001.safetensors"][:cut]
    with pytest.raises(InputError, match=r"samples/0001\.safetensors is not a safetensors file"):
        measures.read_samples(frozen, files)


def test_an_arm_without_any_tensor_is_absent_and_so_is_what_compares_with_it() -> None:
    frozen = factories.spec()
    files = factories.samples(frozen)
    for name, data in files.items():
        files[name] = save({k: v for k, v in load(data).items() if not k.startswith("native.") and not k.endswith(".native")})
    samples = measures.read_samples(frozen, files)
    assert samples.documents("native") == ()
    assert samples.documents("k16v16") == (0, 1, 2, 3)
    assert ("k16v16", "native") not in samples.kl


def test_a_run_that_was_cut_short_is_measured_as_far_as_it_got() -> None:
    frozen = factories.spec()
    files = factories.samples(frozen)
    del files["samples/0002.safetensors"], files["samples/0003.safetensors"]
    samples = measures.read_samples(frozen, files)
    found = measures.measure(frozen, factories.result(frozen, files, outcome="interrupted"), samples)
    value = next(m.value for m in found if (m.arm, m.name) == ("native", "loss_mean"))
    assert value == measures.mean([measures.mean(samples.loss["native"][d]) for d in (0, 1)])


def test_a_run_without_samples_has_only_what_its_arms_measured() -> None:
    frozen = factories.spec()
    found = measures.measure(frozen, factories.result(frozen, {}), measures.Samples())
    assert {m.unit for m in found} == {"bytes", "ratio"}


def test_figures_of_a_worked_example() -> None:
    # document means of the difference: 0.5, 1.5 -> mean 1, t interval with one degree of freedom
    frozen, samples = _small({"k16v16": [[1, 1], [2, 2]], "k16v8": [[1, 2], [3, 4]]})
    samples.top1["k16v8"][1][0] = 7
    samples.kl["k16v8", "k16v16"] = {0: np.array([0.0, 0.5]), 1: np.array([1.0, 2.0])}
    found = _figures(frozen, samples)
    mean = found["k16v8", "loss_difference_mean", "k16v16"]
    assert mean.value == 1.0
    half = stats.t.ppf(0.975, 1) * 0.5  # s.d. of (0.5, 1.5) over sqrt(2) is 0.5
    assert mean.lower == pytest.approx(1 - half)
    assert mean.upper == pytest.approx(1 + half)
    assert found["k16v8", "loss_difference_sd", "k16v16"].value == pytest.approx(np.std([0, 1, 1, 2], ddof=1))
    assert found["k16v8", "worst_document_loss_difference", "k16v16"].value == 1.5
    assert found["k16v8", "kl_mean", "k16v16"].value == 0.875
    assert found["k16v8", "kl_median", "k16v16"].value == 0.75
    assert found["k16v8", "kl_p999", "k16v16"].value == 2.0
    assert found["k16v8", "top1_disagreement", "k16v16"].value == 0.25


def test_documents_weigh_alike_whatever_their_length() -> None:
    frozen, samples = _small({"k16v16": [[0], [0, 0, 0]], "k16v8": [[1], [2, 2, 2]]})
    assert _figures(frozen, samples)["k16v8", "loss_difference_mean", "k16v16"].value == 1.5


def test_intervals_agree_with_scipy() -> None:
    values = np.random.default_rng(3).normal(size=11)
    low, high = stats.t.interval(0.9, 10, values.mean(), stats.sem(values))
    assert measures.interval(values, 0.9) == pytest.approx((low, high), rel=1e-12)


def test_all_equal_documents_have_an_interval_of_width_zero_and_one_document_has_none() -> None:
    assert measures.interval([0.1, 0.1, 0.1]) == (measures.mean([0.1] * 3), measures.mean([0.1] * 3))
    assert measures.interval([0.1]) == (None, None)
    assert measures.spread([0.1] * 7) == 0.0


def test_the_mean_is_exactly_rounded() -> None:
    assert measures.mean([1e16, 1.0, -1e16, 1.0]) == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_stay_and_show(bad: float) -> None:
    frozen = factories.spec()
    files = factories.samples(frozen)
    tensors = load(files["samples/0001.safetensors"])
    for name in ("k16v8.loss", "k16v16.loss", "k16v8.kl.k16v16"):
        tensors[name] = tensors[name].copy()
        tensors[name][5] = bad
    files["samples/0001.safetensors"] = save(tensors)
    samples = measures.read_samples(frozen, files)
    assert samples.flaw("k16v8") == "k16v8.loss of document 1 holds a NaN or an infinity"
    assert samples.flaw("k8v8") == ""
    found = {(m.arm, m.name, m.against): m for m in measures.measure(frozen, factories.result(frozen, files), samples)}
    assert str(found["k16v8", "loss_mean", None].value) == str(bad)
    difference = found["k16v8", "loss_difference_mean", "k16v16"]  # inf - inf
    assert math.isnan(difference.value)
    assert difference.lower is None
    assert str(found["k16v8", "kl_mean", "k16v16"].value) == str(bad)
    assert all(records.encode(m) for m in found.values())


def test_the_tail_is_the_sample_that_999_in_1000_lie_at_or_below() -> None:
    assert measures.tail(np.arange(1001, dtype=np.float64)) == 999.0
    assert measures.tail(np.arange(1002, dtype=np.float64)) == 1000.0
    assert measures.tail(np.array([5.0])) == 5.0
    for count in (1, 2, 999, 1000, 1001, 1002, 16_368):
        values = np.random.default_rng(count).normal(size=count)
        rank = int(measures.tail_rank(np.array([count]))[0])
        assert measures.tail(values) == np.sort(values)[::-1][rank]


def test_cache_bytes_are_the_measured_ones_and_scales_are_apart() -> None:
    frozen = factories.spec()
    arms = {arm.name: factories.arm_result(arm) for arm in frozen.arms}
    scales = records.Backing(bytes=64, dtype="fp32", kind="scales", layers=(0,), holds="value_scales", address=999_999, tokens=32)
    # a second layer that shares the first one's allocation costs nothing
    shared = records.Backing(
        bytes=32 * 2 * 16,
        dtype="fp8_e4m3",
        kind="attention",
        layers=(2,),
        holds="values",
        address=arms["k16v8"].backings[1].address,
        tokens=32,
    )
    changed = factories.arm_result(frozen.arm("k16v8"), backings=(*arms["k16v8"].backings, scales, shared))
    result = factories.result(frozen, {}, arms=tuple({**arms, "k16v8": changed}.values()))
    found = {(m.arm, m.name, m.against): m.value for m in measures.measure(frozen, result, measures.Samples())}
    assert found["k16v16", "cache_bytes", None] == 2 * 2 * 32 * 2 * 16 * 2
    assert found["k16v8", "cache_bytes", None] == 6144
    assert found["k16v8", "scale_bytes", None] == 64
    assert found["k16v8", "cache_bytes_per_token", None] == 192
    assert found["k16v8", "cache_ratio", "k16v16"] == 0.75
    assert found["k16v8", "cache_ratio_with_scales", "k16v16"] == (6144 + 64) / 8192
    assert found["native", "cache_ratio", "k16v16"] == 2
    assert ("k16v16", "cache_ratio", "k16v16") not in found


def test_no_ratio_is_inferred_between_caches_of_different_lengths() -> None:  # case 4
    frozen = factories.spec()
    arms = tuple(factories.arm_result(arm, tokens=64 if arm.name == "k8v8" else 32) for arm in frozen.arms)
    found = {(m.arm, m.name) for m in measures.measure(frozen, factories.result(frozen, {}, arms=arms), measures.Samples())}
    assert ("k16v8", "cache_ratio") in found
    assert ("k8v8", "cache_ratio") not in found
    assert ("k8v8", "cache_bytes") in found


def _greedy(*lines: dict[str, object]) -> bytes:
    return b"".join(digest.canonical(line) + b"\n" for line in lines)


GREEDY = records.Greedy(documents=2, prompt_tokens=8, new_tokens=4)


def test_greedy_agreement_counts_the_leading_tokens_that_equal_the_control() -> None:
    frozen = factories.spec(workload=factories.workload(greedy=GREEDY))
    lines = [
        {"arm": arm, "document": document, "prompt_tokens": 8, "ids": ids}
        for arm, document, ids in (
            ("k16v16", 0, [1, 2, 3, 4]),
            ("k16v8", 0, [1, 2, 9, 4]),
            ("k16v16", 1, [5, 6, 7, 8]),
            ("k16v8", 1, [5, 6, 7, 8]),
            ("k8v8", 0, [0, 2, 3, 4]),
        )
    ]
    samples = measures.read_samples(frozen, {"greedy.jsonl": _greedy(*lines)})
    found = {(m.arm, m.name, m.against): m.value for m in measures.measure(frozen, factories.result(frozen, {}, arms=()), samples)}
    assert found == {
        ("k16v8", "greedy_agreement_tokens/0000", "k16v16"): 2,
        ("k16v8", "greedy_agreement_tokens/0001", "k16v16"): 4,
        ("k8v8", "greedy_agreement_tokens/0000", "k16v16"): 0,
    }


GOOD = {"arm": "k16v8", "document": 0, "prompt_tokens": 8, "ids": [1]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_greedy(GOOD, GOOD), "Line 2 of greedy.jsonl repeats"),
        (_greedy({**GOOD, "arm": "stranger"}), "Line 1 of greedy.jsonl names no arm"),
        (_greedy({**GOOD, "document": 2}), "names no arm or document"),
        (_greedy({**GOOD, "document": True}), "names no arm or document"),
        (_greedy({**GOOD, "arm": ["x"]}), "names no arm"),
        (_greedy({**GOOD, "prompt_tokens": 9}), "another prompt"),
        (_greedy({**GOOD, "ids": [1, 2, 3, 4, 5]}), "at most 4"),
        (_greedy({**GOOD, "ids": [-1]}), "at most 4"),
        (_greedy({**GOOD, "ids": "1"}), "at most 4"),
        (_greedy({**GOOD, "extra": 1}), "other keys"),
        (_greedy(GOOD)[:-1], "middle of a line"),
        (b"Loading model...\n", "Line 1 of greedy.jsonl cannot be read"),
        (b"\xff\n", "UTF-8"),
    ],
)
def test_a_greedy_file_that_is_not_as_specified_is_refused(data: bytes, words: str) -> None:
    frozen = factories.spec(workload=factories.workload(greedy=GREEDY))
    with pytest.raises(InputError, match=words):
        measures.read_samples(frozen, {"greedy.jsonl": data})


def test_a_greedy_file_that_the_spec_did_not_ask_for_is_refused() -> None:
    with pytest.raises(InputError, match="asks for no greedy"):
        measures.read_samples(factories.spec(), {"greedy.jsonl": b""})


def test_measurements_have_a_fixed_order_and_distinct_names() -> None:
    frozen = factories.spec()
    files = factories.samples(frozen)
    result = factories.result(frozen, files)
    first = measures.measure(frozen, result, measures.read_samples(frozen, files))
    again = measures.measure(frozen, result, measures.read_samples(frozen, dict(reversed(files.items()))))
    assert first == again
    assert len({(m.arm, m.name, m.against) for m in first}) == len(first)
    assert list(dict.fromkeys(m.arm for m in first)) == [arm.name for arm in frozen.arms]


def test_arms_of_different_formats_that_agree_in_every_bit_are_suspicious() -> None:  # case 18
    frozen = factories.spec()
    files = factories.samples(frozen)
    assert measures.suspicions(frozen, measures.read_samples(frozen, files)) == ()
    for name, data in files.items():
        tensors = load(data)
        tensors |= {"k8v8.loss": tensors["k16v16.loss"], "k8v8.top1": tensors["k16v16.top1"]}
        tensors["k8v8.kl.k16v16"] = np.zeros_like(tensors["k16v16.loss"])
        files[name] = save(tensors)
    words = measures.suspicions(frozen, measures.read_samples(frozen, files))
    assert words[0].startswith("k16v16 (K bf16 / V bf16) and k8v8 (K fp8_e4m3 / V fp8_e4m3) agree in every bit")


def test_arms_of_equal_formats_may_agree() -> None:
    frozen = factories.spec()
    samples = measures.read_samples(frozen, factories.samples(frozen, noise={"k16v16": (0.009, 2.5e-5)}))
    assert ("native", "own-fp32") not in measures.identical_pairs(frozen, samples)
    assert ("k16v16", "k16v16-repeat") not in measures.identical_pairs(frozen, samples)


def test_the_kl_of_a_contrast_of_candidates_is_to_the_control_they_share() -> None:
    frozen = factories.spec()
    assert frozen.references()["k8v8"] == ("k16v16",)
    assert frozen.common_control(frozen.contrasts[-1]) == "k16v16"
    alone = factories.spec(contrasts=(records.Contrast(candidate="k16v8", baseline="k8v8", family="advantage"),))
    assert alone.references()["k16v8"] == alone.references()["k8v8"] == ("native",)
    assert alone.common_control(alone.contrasts[0]) == "native"


PAIRS = [(a.name, b.name, family) for a, b in permutations(factories.ARMS, 2) for family in ("identity", "loss", "advantage")]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(PAIRS), max_size=5, unique=True))
def test_whatever_a_sound_spec_contrasts_its_samples_are_read_and_measured(pairs: list[tuple[str, str, str]]) -> None:
    contrasts = tuple(records.Contrast(candidate=a, baseline=b, family=family) for a, b, family in pairs)
    frozen = factories.spec(workload=factories.workload(2, 16), contrasts=contrasts)
    consistency.check(frozen)
    files = factories.samples(frozen)
    samples = measures.read_samples(frozen, files)
    figures = measures.measure(frozen, factories.result(frozen, files), samples)
    found = {(m.arm, m.against) for m in figures if m.name == "kl_difference_mean"}
    advantages = [contrast for contrast in contrasts if contrast.family == "advantage"]
    assert found == {(c.candidate, c.baseline) for c in advantages}
    for contrast in advantages:
        control = frozen.common_control(contrast)
        assert control is not None and control != contrast.candidate and frozen.arm(control).role == "control"


def test_every_measurement_is_listed_with_its_unit() -> None:
    frozen = factories.spec(workload=factories.workload(greedy=GREEDY))
    lines = [{"arm": arm.name, "document": 0, "prompt_tokens": 8, "ids": [1]} for arm in frozen.arms]
    files = factories.samples(frozen) | {"greedy.jsonl": _greedy(*lines)}
    found = measures.measure(frozen, factories.result(frozen, files), measures.read_samples(frozen, files))
    named = {m.name.partition("/")[0] + "/" * ("/" in m.name): m.unit for m in found}
    assert named.items() <= records.MEASUREMENTS.items()
    others = {name.partition("/")[0] for name in records.MEASUREMENTS.keys() - named.keys()}
    assert not any(name.startswith(("loss", "kl", "top1", "greedy", "cache", "logit", "worst")) for name in others)


def test_ids_other_than_the_pinned_ones_are_found() -> None:
    pinned = factories.spec(format="kv-ledger/spec/3", ids="a" * 64)
    found = factories.result(pinned, {})
    fed = records.ids_digest([document.sha256 for document in found.documents])
    (wrong,) = measures.check_inputs(pinned, found, None)
    assert fed in wrong and "a" * 64 in wrong
    assert measures.check_inputs(msgspec.structs.replace(pinned, ids=fed), found, None) == []
    assert measures.check_inputs(pinned, msgspec.structs.replace(found, documents=found.documents[:1]), None) == []
