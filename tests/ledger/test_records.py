"""Records: strict reading, and specs that contradict themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ledger import digest, records
from ledger.errors import InputError
from tests import factories


def _every() -> list[records.Record]:
    spec = factories.spec()
    files = factories.samples(spec)
    found = factories.result(spec, files)
    run = factories.run(spec, found)
    name = records.identify(run)
    return [
        spec,
        found,
        run,
        records.Retract(format="kv-ledger/retract/1", run=name, author="a", reason="b"),
        records.Supersede(format="kv-ledger/supersede/1", run=name, by="0" * 64, author="a", reason="b"),
        records.Reproduction(
            format="kv-ledger/reproduction/1",
            original=name,
            reproduced=None,
            verdict="not comparable",
            reason="no weights",
            same_hardware=None,
            harness="current",
            differences=(records.Difference(name="x", original=math.nan, reproduced=-0.0),),
        ),
        records.Entry(format="kv-ledger/entry/1", sequence=0, kind="run", record=name, recorded_at=factories.NOW),
    ]


@pytest.mark.parametrize("record", _every(), ids=lambda record: type(record).__name__)
def test_a_record_reads_back_from_its_bytes(record: records.Record) -> None:
    data = records.encode(record)
    again = records.decode(type(record), data, "it")
    assert records.encode(again) == data
    assert records.identify(again) == digest.sha256(data)


@pytest.mark.parametrize("record", _every(), ids=lambda record: type(record).__name__)
def test_a_record_with_an_unknown_missing_or_null_field_is_refused_by_name(record: records.Record) -> None:
    plain = records.plain(record)
    for changed, named in (
        ({**plain, "surprise": 1}, "surprise"),
        ({key: value for key, value in plain.items() if key != "format"}, "format"),
        ({**plain, "format": None}, "format"),
        ({**plain, "format": "kv-ledger/other/9"}, "format"),
    ):
        with pytest.raises(InputError, match=named):
            records.convert(type(record), changed, "it")


def test_bytes_that_are_not_canonical_are_refused() -> None:
    data = records.encode(_every()[-1])
    for changed in (data + b"\n", b" " + data, data.replace(b'":', b'": ', 1), data.replace(b'"sequence":0', b'"sequence":0.0')):
        with pytest.raises(InputError, match=r"canonical|Entry|JSON"):
            records.decode(records.Entry, changed, "it")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a//b",
        "a/",
        "./a",
        ".hidden",
        "a/.git",
        "%2e%2e/a",
        "a%2fb",
        "a#b",
        "a?b",
        "a b",
        "a\\b",
        "a\0",
        "a\n",
        "a\tb",
        "C:x",
        "é",
        "\u2025/a",
        "x" * 201,
        "~/a",
        "-a",
    ],
)
def test_an_evidence_name_that_could_escape_is_refused(path: str) -> None:
    plain = {"name": path, "sha256": "0" * 64, "size": 0, "media_type": "application/json"}
    with pytest.raises(InputError):
        records.convert(records.Evidence, plain, "it")


@pytest.mark.parametrize("name", ["result.json", "samples/0000.safetensors", "a", "a-b_c.d/e.f", "x" * 200])
def test_an_ordinary_evidence_name_is_taken(name: str) -> None:
    plain = {"name": name, "sha256": "0" * 64, "size": 0, "media_type": "application/vnd.safetensors"}
    assert records.convert(records.Evidence, plain, "it").name == name


@pytest.mark.parametrize("value", ["", "main", "v1.0", "a" * 7, "A" * 40, "g" * 40, "a" * 41, "a" * 40 + "\n", "refs/heads/main"])
def test_only_a_whole_commit_is_a_revision(value: str) -> None:
    with pytest.raises(InputError):
        records.convert(records.Checkpoint, {**records.plain(factories.checkpoint()), "revision": value}, "it")


@pytest.mark.parametrize(
    "value", ["2026-01-02", "2026-01-02T03:04:05", "2026-01-02T03:04:05+00:00", "2026-01-02 03:04:05Z", "now", "2026-01-02T03:04:05Z\n"]
)
def test_an_instant_without_utc_is_refused(value: str) -> None:
    with pytest.raises(InputError):
        records.convert(records.Entry, {**records.plain(_every()[-1]), "recorded_at": value}, "it")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence", -1),
        ("sequence", 1.5),
        ("sequence", "0"),
        ("sequence", True),
        ("kind", "Run"),
        ("kind", "entry"),
        ("record", "0" * 63),
        ("record", "A" * 64),
        ("record", 0),
    ],
)
def test_a_wrong_type_or_value_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        records.convert(records.Entry, {**records.plain(_every()[-1]), field: value}, "it")


def test_text_of_ten_mebibytes_is_refused() -> None:
    with pytest.raises(InputError, match="reason"):
        records.convert(records.Retract, {**records.plain(_every()[3]), "reason": "x" * (10 << 20)}, "it")


# ---------------------------------------------------------------- specs


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


def _contrast(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"contrasts": [{**records.plain(factories.CONTRASTS[0]), **changes}]}


def _spans(*spans: tuple[int, int]) -> Callable[[], dict[str, Any]]:
    workload = records.plain(factories.workload())
    return lambda: {"workload": {**workload, "spans": [{"start": start, "tokens": tokens} for start, tokens in spans]}}


def test_the_spec_of_the_factories_is_sound() -> None:
    factories.spec().check()


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
        (lambda: {"tolerances": {"loss": math.nan}}, "tolerance"),
        (lambda: {"tolerances": {"loss": -0.1}}, "tolerance"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes: Callable[[], dict[str, Any]], what: str) -> None:
    spec = records.convert(records.Spec, {**records.plain(factories.spec()), **changes()}, "the spec")
    with pytest.raises(InputError, match=what) as caught:
        spec.check()
    assert caught.value.next
