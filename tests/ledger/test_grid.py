"""A grid written out: names, counts, what is refused, and where fixed scales come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ledger import digest, dryrun, freezing, grid, records
from ledger.archive import Archive
from ledger.errors import InputError
from tests.ledger.test_captures import STUDY, TEXT, _of_the_tide, calibration, files, recorded

ARM = {"name": "k16v16", "role": "control", "implementation": "reference", "compute": "fp32", "keys": "bf16", "values": "bf16", "chunk": 8}
EVERY = ["tensor", "head", "page_head", "token_head"]


def table(calibration: str | None = "run:ab", **changes: Any) -> dict[str, Any]:
    """A study of one arm with a grid; a change of None leaves a key of the grid out."""
    asked = {"baseline": "k16v16", "formats": ["k16v8", "k8v16", "k8v8"], "scales": ["unit", "fixed", "dynamic"], "families": ["loss"]}
    asked |= {"granularity": EVERY, "advantages": [{"candidate": "k16v8", "over": "k8v8", "family": "advantage"}]} | changes
    found = {"study": "s", "arms": [ARM], "grid": {key: value for key, value in asked.items() if value is not None}}
    return found if calibration is None else found | {"calibration": calibration}


def test_a_grid_is_every_format_under_every_policy_and_granularity() -> None:
    found = grid.written_out(table())
    names = [arm["name"] for arm in found["arms"]]
    assert "grid" not in found and "calibration" not in found and names[0] == "k16v16" and len(names) == 1 + 3 * (1 + 2 + 4)
    assert {name.removeprefix("k16v8-") for name in names if name.startswith("k16v8-")} == {
        "unit", "fixed-tensor", "fixed-head", "dynamic-tensor", "dynamic-head", "dynamic-page-head", "dynamic-token-head",
    }  # fmt: skip
    arms = {arm["name"]: records.convert(records.Arm, arm | {"scale_source": "0" * 64}, "an arm") for arm in found["arms"]}
    cell = arms["k8v16-dynamic-page-head"]
    assert (cell.keys, cell.values, cell.scales, cell.granularity) == ("fp8_e4m3", "bf16", "dynamic", "page_head")
    assert (cell.role, cell.implementation, cell.compute, cell.chunk) == ("candidate", "reference", "fp32", 8)
    assert {arm["name"] for arm in found["arms"] if arm.get("scale_source") == "run:ab"} == {name for name in names if "fixed" in name}


def test_every_cell_meets_the_baseline_and_the_formats_meet_each_other_under_one_policy() -> None:
    found = grid.written_out(table() | {"contrasts": [{"candidate": "own", "baseline": "native", "family": "identity"}]})["contrasts"]
    assert found[0]["family"] == "identity" and len(found) == 1 + 21 + 7
    assert {item["baseline"] for item in found if item["family"] == "loss"} == {"k16v16"}
    advantages = [(item["candidate"], item["baseline"]) for item in found if item["family"] == "advantage"]
    assert ("k16v8-fixed-head", "k8v8-fixed-head") in advantages
    assert all(one.removeprefix("k16v8") == other.removeprefix("k8v8") for one, other in advantages)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"formats": []}, "grid.formats is empty"),
        ({"scales": []}, "grid.scales is empty"),
        ({"families": []}, "grid.families is empty"),
        ({"formats": ["k4v4"]}, r"grid\.formats\[0\]"),
        ({"scales": ["guessed"]}, r"grid\.scales\[0\]"),
        ({"granularity": ["channel"]}, r"grid\.granularity\[0\]"),
        ({"sides": ["keys"]}, "sides"),
        ({"formats": ["k16v8", "k16v8"], "advantages": None}, "grid.formats names one twice"),
        ({"granularity": ["token_head"]}, "has none for fixed scales"),
        ({"granularity": None, "scales": ["dynamic"]}, "has none for dynamic scales"),
        ({"scales": ["unit"]}, "is of no scales of the grid"),
        ({"baseline": "k32v32"}, "names no arm"),
        ({"advantages": [{"candidate": "k16v8", "over": "k16v8", "family": "advantage"}]}, r"advantages\[0\] is not of two formats"),
        ({"formats": ["k16v8"]}, r"advantages\[0\] is not of two formats"),
        ({"calibration": None}, "asks for fixed scales, and no calibration is named"),
        ({"calibration": "none", "scales": ["fixed"], "granularity": ["head"]}, "empty without its fixed scales"),
    ],
)
def test_a_grid_that_would_say_less_than_it_seems_to_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        grid.written_out(table(**changes))
    assert error.value.next


@pytest.mark.parametrize("change", [{"role": "candidate"}, {"keys": "fp32"}, {"implementation": "native"}, {"values": "fp8_e4m3"}])
def test_cells_differ_from_a_16_bit_control_in_format_alone(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"grid\.baseline is no control"):
        grid.written_out(table() | {"arms": [ARM | change]})


def test_without_a_calibration_the_cells_of_fixed_scales_are_left_out_only_where_that_is_asked() -> None:
    found = grid.written_out(table("none"))
    assert len(found["arms"]) == 1 + 3 * 5 and not any(arm.get("scales") == "fixed" for arm in found["arms"])
    assert not any("fixed" in item["candidate"] for item in found["contrasts"])
    with pytest.raises(InputError, match="there is no grid"):
        grid.written_out({"arms": [ARM], "calibration": "none"})


@pytest.mark.parametrize("source", ["garbage", "", "run:", "study:", "0" * 64, 5])
def test_a_calibration_is_named_by_a_run_or_a_study(source: object) -> None:
    with pytest.raises(InputError, match=r"calibration (names no recorded calibration|is no text)"):
        grid.written_out(table() | {"calibration": source})


@pytest.mark.parametrize("source", ["run:ab", "study:able", "none"])
def test_a_calibration_that_no_arm_takes_is_refused(source: str) -> None:
    with pytest.raises(InputError, match="calibration is used by no arm"):
        grid.written_out(table(source, scales=["unit", "dynamic"]))
    own = ARM | {"name": "k16v8", "role": "candidate", "values": "fp8_e4m3", "scales": "fixed", "granularity": "head"}
    if source != "none":
        for arms in ([ARM], [ARM, own | {"scale_source": "run:other"}]):
            with pytest.raises(InputError, match="calibration is used by no arm"):
                grid.written_out({"arms": arms, "calibration": source})
        assert grid.written_out({"arms": [ARM, own], "calibration": source})["arms"][1]["scale_source"] == source


# ---------------------------------------------------------------- frozen


GRID = (
    '[grid]\nbaseline = "k16v16"\nformats = ["k16v8", "k8v8"]\nscales = ["fixed"]\ngranularity = ["tensor", "head"]\nfamilies = ["loss"]\n'
)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study with a grid of fixed scales of the study ``able``, beside its text."""
    (tmp_path / "tide.txt").write_bytes(TEXT)
    text = STUDY.replace("FIRST", "1000").replace('study = "fixed"', 'study = "policies"\ncalibration = "study:able"')
    head, _, rest = text.partition('[[arms]]\nname = "k16v8"')
    path = tmp_path / "policies.toml"
    path.write_text(head + GRID + rest[rest.index("[families.loss]") :])
    return path


def test_the_newest_run_of_the_named_study_that_stands_gives_the_scales(
    make_archive: Callable[..., Archive], study: Path, tmp_path: Path
) -> None:
    archive = make_archive()
    with pytest.raises(InputError, match="without a recorded run"):
        freezing.freeze(study, archive, tmp_path / "out")
    first = recorded(archive, _of_the_tide(study="able"), files(_of_the_tide(study="able")), tmp_path / "1")
    frozen = freezing.freeze(study, archive, tmp_path / "frozen")
    assert {arm.scale_source for arm in frozen.arms if arm.scales == "fixed"} == {digest.sha256(calibration())}
    assert [arm.name for arm in frozen.arms][1:3] == ["k16v8-fixed-tensor", "k8v8-fixed-tensor"] and len(frozen.arms) == 5
    archive.append(records.Retract(format="kv-ledger/retract/1", run=first, author="A. Reader", reason="measured on another text"))
    with pytest.raises(InputError, match="without a recorded run"):
        freezing.freeze(study, archive, tmp_path / "out")
    other = recorded(archive, _of_the_tide(study="other"), files(_of_the_tide(study="other")), tmp_path / "2")
    assert freezing.freeze(study, archive, tmp_path / "named", f"run:{other}").arms == frozen.arms


def test_a_dry_run_says_where_fixed_scales_come_from_and_reads_no_archive(study: Path) -> None:
    assert dryrun.look(str(study))["calibration"] == "study:able"
    assert len(dryrun.look(str(study), "run:abc")["arms"]) == 5
    with pytest.raises(InputError, match="empty without its fixed scales"):
        dryrun.look(str(study), "none")
