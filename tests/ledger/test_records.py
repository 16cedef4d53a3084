"""Records: strict reading, and what a spec asks a runner for."""

from __future__ import annotations

import math
import re
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
        records.Retract(format="kv-ledger/retract/2", record=name, author="a", reason="b"),
        factories.report(),
        factories.recipe((name,)),
        factories.memory_spec(),
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


# ---------------------------------------------------------------- what is too large to be a fact


def _result(*path: Any, value: Any) -> dict[str, Any]:
    """A plain result with ``value`` at ``path``."""
    frozen = factories.spec(workload=factories.workload(1))
    plain = records.plain(factories.result(frozen, factories.samples(frozen), tokenizer={"class": "bytes"}))
    place: Any = plain
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return plain


LONG = "x" * 8193
HUGE = 10**399


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("arms", 0, "effective"), {"keys": "x" * 201}, r"\$\.arms\[0\]\.effective"),
        (("arms", 0, "effective"), {"x" * 201: "fp32"}, r"\$\.arms\[0\]\.effective"),
        (("arms", 0, "measured"), {"keys": LONG}, r"\$\.arms\[0\]\.measured"),
        (("arms", 0, "census"), {"fp32": -1}, r"\$\.arms\[0\]\.census"),
        (("arms", 0, "census"), {"fp32": HUGE}, r"\$\.arms\[0\]\.census"),
        (("arms", 0, "census"), {"x" * 201: 1}, r"\$\.arms\[0\]\.census"),
        (("arms", 1, "backings", 0, "bytes"), HUGE, r"\$\.arms\[1\]\.backings\[0\]\.bytes"),
        (("arms", 1, "backings", 0, "bytes"), 2**63, r"\$\.arms.*\.bytes"),
        (("arms", 1, "backings", 0, "tokens"), 2**63, r"\$\.arms.*\.tokens"),
        (("arms", 1, "backings", 0, "address"), 2**64, r"\$\.arms\[1\]\.backings\[0\]\.address"),
        (("arms", 1, "backings", 0, "address"), -1, r"\$\.arms.*\.address"),
        (("arms", 1, "backings", 0, "dtype"), "x" * 201, r"\$\.arms.*\.dtype"),
        (("arms", 1, "backends", 0, "name"), "x" * 201, r"\$\.arms.*\.name"),
        (("arms", 1, "geometry", "declared", 0, "kv_heads"), 2**63, r"\$\.arms.*\.kv_heads"),
        (("host", "packages"), {"x" * 201: "1"}, r"\$\.host\.packages"),
        (("host", "packages"), {"torch": LONG}, r"\$\.host\.packages\.torch"),
        (("host", "memory_bytes"), 2**63, r"\$\.host\.memory_bytes"),
        (("host", "cores"), 2**63, r"\$\.host\.cores"),
        (("sources",), {"../up.py": "0" * 64}, r"\$\.sources"),
        (("sources",), {"x" * 201: "0" * 64}, r"\$\.sources"),
        (("tokenizer", "rule"), LONG, r"\$\.tokenizer\.rule"),
        (("tokenizer", "deep"), [{"a": [LONG]}], r"\$\.tokenizer\.deep\[0\]\.a\[0\]"),
        (("tokenizer", LONG), 1, r"the keys of \$\.tokenizer"),
        (("tokenizer", "vocabulary"), -HUGE, r"\$\.tokenizer\.vocabulary"),
        (("peak_memory_bytes",), HUGE, r"\$\.peak_memory_bytes"),
        (("reason",), LONG, r"\$\.reason"),
    ],
)  # fmt: skip
def test_a_result_with_a_number_or_a_text_beyond_all_facts_is_refused_by_path(path: tuple[Any, ...], value: Any, named: str) -> None:
    with pytest.raises(InputError, match="is not a valid Result") as caught:
        records.decode(records.Result, digest.canonical(_result(*path, value=value)), "result.json")
    assert re.search(named, caught.value.found), caught.value.found
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("arms", 1, "backings", 0, "bytes"), 2**63 - 1),
        (("arms", 1, "backings", 0, "address"), 2**64 - 1),
        (("arms", 0, "effective"), {"keys": "x" * 200}),
        (("tokenizer", "rule"), "x" * 8192),
    ],
)
def test_the_largest_facts_are_taken(path: tuple[Any, ...], value: Any) -> None:
    records.decode(records.Result, digest.canonical(_result(*path, value=value)), "result.json")


# ---------------------------------------------------------------- what a spec asks a runner for


def test_sides_without_a_control_of_their_own_are_compared_with_the_first() -> None:
    only = factories.spec(contrasts=factories.CONTRASTS[-1:])
    assert only.common_control(only.contrasts[0]) == "native"
    assert only.references()["k16v8"] == only.references()["k8v8"] == ("native",)


def test_sides_with_different_controls_are_compared_with_the_first_of_the_two() -> None:
    pairs = (("k8v8", "k16v16", "loss"), ("k16v8", "native", "loss"), ("k16v8", "k8v8", "advantage"))
    frozen = factories.spec(contrasts=tuple(records.Contrast(candidate=a, baseline=b, family=f) for a, b, f in pairs))
    assert frozen.common_control(frozen.contrasts[2]) == "native"
    assert frozen.references()["k16v8"] == ("native",) and frozen.references()["k8v8"] == ("native", "k16v16")


def test_a_candidate_is_never_its_own_control() -> None:
    frozen = factories.spec(contrasts=(records.Contrast(candidate="native", baseline="k8v8", family="advantage"),))
    assert frozen.common_control(frozen.contrasts[0]) == "k16v16"
    assert frozen.references()["native"] == ("k16v16",)


def test_the_standard_arms_are_compared_as_the_method_says() -> None:
    frozen = factories.spec()
    assert frozen.references() == {
        "native": (),
        "own-fp32": ("native",),
        "k16v16": ("native",),
        "k16v16-repeat": ("k16v16",),
        "k16v8": ("k16v16",),
        "k8v8": ("k16v16",),
    }
    assert {name for name, others in frozen.gaps().items() if others} == {"own-fp32"} and frozen.gaps()["own-fp32"] == ("native",)
