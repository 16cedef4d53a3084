"""The table of precision and scaling: which runs it joins and which never; and that every gate of a grid can fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ledger import deriving, digest, freezing, grid, precision, queries, records
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.records import consistency
from ledger.web import precisionpage
from tests import factories, taskfiles
from tests.ledger.test_captures import recorded

ALTERED = factories.checkpoint(alteration=records.RescaledKeys(pairs=(0, 1), exponent=6))
CELLS = [f"{format}-{rest}" for rest in ("unit", "fixed-head", "dynamic-token-head") for format in ("k16v8", "k8v16", "k8v8")]
SIZES = {digest.sha256(data): data for data in (b"sizes of one text", b"sizes of another")}
ONE, OTHER = SIZES
"""Calibrations, by digest."""
NOISE = {name: (0.02, 4e-4) if name.startswith("k16v8") else (0.1, 4e-3) for name in CELLS} | {"k16v16": (0.004, 1e-5)}


@cache
def arms(source: str = ONE) -> tuple[records.Arm, ...]:
    """Control, its repeat, and a grid of them."""
    table = {"baseline": "k16v16", "formats": ["k16v8", "k8v16", "k8v8"], "scales": ["unit", "fixed", "dynamic"]}
    table |= {"granularity": ["head", "token_head"], "families": ["loss"]}
    listed = [records.plain(arm) for arm in factories.ARMS if arm.name in ("native", "k16v16", "k16v16-repeat")]
    written = grid.written_out({"arms": listed, "grid": table, "calibration": "study:x"})["arms"]
    found = [records.convert(records.Arm, arm if arm["scales"] != "fixed" else arm | {"scale_source": source}, "arm") for arm in written]
    return tuple(arm for arm in found if arm.name != "k16v8-dynamic-head" and (arm.scales, arm.granularity) != ("dynamic", "head"))


def contrasts(*families: str) -> tuple[records.Contrast, ...]:
    return tuple(records.Contrast(candidate=name, baseline="k16v16", family=family) for name in CELLS for family in families)


def losses(source: str = ONE, **changes: Any) -> records.Spec:
    over = tuple(
        records.Contrast(candidate=name, baseline=name.replace("k16v8", "k8v8"), family="advantage") for name in CELLS if "k16v8" in name
    )
    native = records.Contrast(candidate="k16v16", baseline="native", family="loss")
    families = tuple(msgspec.structs.replace(family, resamples=199) for family in factories.FAMILIES if family.name != "identity")
    found = factories.spec(
        **{"study": "grid-loss", "arms": arms(source), "contrasts": (native, *contrasts("loss"), *over), "families": families, **changes}
    )
    consistency.check(found)
    return found


def answers(source: str = ONE, **changes: Any) -> records.Spec:
    return taskfiles.spec(**{"study": "grid-task", "arms": arms(source), "contrasts": contrasts(*records.ANSWERS), **changes})


def worse(shares: dict[str, int]) -> taskfiles.Say:
    """All right but for one in so many of the arms that are named."""
    return lambda arm, number: (taskfiles.wrong if arm in shares and number % shares[arm] == 1 else taskfiles.right)(arm, number)


def keep_sizes(archive: Archive, spec: records.Spec) -> None:
    """Append a spec with the calibration that its fixed scales come from."""
    archive.append(spec, {arm.scale_source: SIZES[arm.scale_source] for arm in spec.arms if arm.scale_source})


def record_losses(archive: Archive, spec: records.Spec, place: Path, **changes: Any) -> str:
    keep_sizes(archive, spec)
    return recorded(archive, spec, factories.samples(spec, noise=NOISE), place, **changes)


def record_answers(archive: Archive, spec: records.Spec, place: Path, say: taskfiles.Say = taskfiles.right) -> str:
    keep_sizes(archive, spec)
    return recorded(archive, spec, taskfiles.evidence(spec, say), place)


def by_arm(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {row["arm"]: row for row in table["rows"]}
    assert len(found) == len(table["rows"])
    return found


# ---------------------------------------------------------------- what is joined


def test_a_row_is_a_stored_policy_with_its_losses_and_its_answers(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    loss = record_losses(archive, losses(), tmp_path / "1")
    task = record_answers(archive, answers(items=60), tmp_path / "2", worse({"k8v8-unit": 3}))
    (table,) = queries.precision_tables(archive)
    rows = by_arm(table)
    assert list(rows) == [arm.name for arm in arms()] and not table["synthetic"]
    assert (table["runs"]["loss"]["run"], table["runs"]["task"]["run"], table["runs"]["task"]["items"]) == (loss, task, 60)
    shown = {arm["name"]: arm for arm in queries.run(archive, loss)["arms"]}
    for name in CELLS:
        row = rows[name]
        assert row["baseline"] == "k16v16" and row["loss"]["run"] == row["bytes"]["run"] == loss and row["task"]["run"] == task
        figures = {item["name"]: item for item in shown[name]["measurements"] if item["against"] == "k16v16"}
        assert row["loss"]["difference"] == {key: figures["loss_difference_mean"][key] for key in ("value", "lower", "upper")}
        assert row["loss"]["kl_p999"]["value"] == figures["kl_p999"]["value"] and row["loss"]["spread"]["value"] > 0
        assert row["bytes"]["ratio"] == pytest.approx({"k16v8": 0.75, "k8v16": 0.75, "k8v8": 0.5}[name.partition("-")[0]])
        assert row["bytes"]["keys_ratio"] == (0.5 if "k8v" in name else 1) and row["bytes"]["values_ratio"] == (0.5 if "v8" in name else 1)
    assert [item["over"] for item in rows["k16v8-fixed-head"]["advantages"]] == ["k8v8-fixed-head"]
    assert not rows["k8v8-unit"]["advantages"] and rows["k16v8-fixed-head"]["policy"]["scale_source"] == ONE
    kept = {name: rows[name]["task"]["readings"]["strict"]["preservation"]["value"] for name in ("k8v8-unit", "k16v8-unit")}
    assert kept == {"k8v8-unit": 40 / 60, "k16v8-unit": 1.0}
    assert rows["k16v16-repeat"]["role"] == "repeat" and rows["k16v16"]["role"] == "control"
    assert {gate["statistic"] for gate in rows["k8v8-unit"]["gates"][0]["gates"]} == {
        "loss_difference_mean",
        "kl_p999",
        "top1_disagreement",
    }


def test_nothing_of_another_checkpoint_or_alteration_stands_in_a_row(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    record_losses(archive, losses(), tmp_path / "1")
    altered = record_answers(archive, answers(items=40, checkpoint=ALTERED), tmp_path / "2", taskfiles.wrong)
    other = factories.checkpoint(name="Toy-1M", files=(records.CheckpointFile(path="w.gguf", sha256="9" * 64, size=3),))
    elsewhere = record_losses(archive, losses(checkpoint=other), tmp_path / "3")
    plain, third, rescaled = queries.precision_tables(archive)
    plain, third = (plain, third) if plain["runs"]["loss"]["run"] != elsewhere else (third, plain)
    assert rescaled["synthetic"] and rescaled["runs"]["loss"] is None and rescaled["runs"]["task"]["run"] == altered
    assert third["runs"]["loss"]["run"] == elsewhere and third["checkpoint"] != plain["checkpoint"] != rescaled["checkpoint"]
    assert all(row["task"] is None for row in (*plain["rows"], *third["rows"]))
    assert all(row["loss"] is None and row["task"]["run"] == altered for row in rescaled["rows"])
    assert [table["checkpoint"] for table in queries.precision_tables(archive, rescaled["checkpoint"][:8])] == [rescaled["checkpoint"]]
    with pytest.raises(InputError, match="stands for that model"):
        queries.precision_tables(archive, "Toy-2M")
    with pytest.raises(InputError, match="No spec of this archive"):
        queries.precision_table(archive, "0" * 64)


def test_scales_of_another_calibration_are_another_policy(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    record_losses(archive, losses(), tmp_path / "1")
    record_answers(archive, answers(OTHER, items=20), tmp_path / "2")
    (table,) = queries.precision_tables(archive)
    fixed = [row for row in table["rows"] if row["policy"]["scales"] == "fixed"]
    assert {(row["policy"]["scale_source"], row["loss"] is None, row["task"] is None) for row in fixed} == {
        (ONE, False, True),
        (OTHER, True, False),
    }
    assert all(row["loss"] and row["task"] for row in table["rows"] if row["policy"]["scales"] != "fixed")


def test_the_run_shown_is_the_first_of_most_policies_that_stands_and_the_others_are_listed(
    make_archive: Callable[..., Archive], tmp_path: Path
) -> None:
    archive = make_archive()
    spec = losses()
    narrow = record_losses(archive, factories.spec(study="narrow"), tmp_path / "0")
    stopped = record_losses(archive, spec, tmp_path / "1", outcome="interrupted", reason="the power went")
    first = record_losses(archive, spec, tmp_path / "2", started="2026-01-03T03:04:05Z")
    again = record_losses(archive, spec, tmp_path / "3", started="2026-01-04T03:04:05Z")
    (table,) = queries.precision_tables(archive)
    assert (table["runs"]["loss"]["run"], table["runs"]["loss"]["others"]) == (first, [narrow, again]) and stopped
    archive.append(records.Retract(format="kv-ledger/retract/1", run=first, author="A. Reader", reason="a noisy machine"))
    (table,) = queries.precision_tables(archive)
    assert (table["runs"]["loss"]["run"], table["runs"]["loss"]["others"]) == (again, [narrow])
    assert precision.chosen([]) == (None, [])


def test_an_insensitive_task_has_no_figure_of_accuracy_and_keeps_its_answers(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    record_answers(archive, answers(items=40), tmp_path / "1", taskfiles.wrong)
    (table,) = queries.precision_tables(archive)
    reading = by_arm(table)["k8v8-unit"]["task"]["readings"]["strict"]
    assert reading["status"] == "invalid" and reading["reason"].startswith("task insensitive") and reading["preservation"]["value"] == 1
    page = precisionpage.precision_page(table)
    cells = {cell.heading: cell for cell in next(row for row in page.rows if row.arm == "k8v8-unit").cells}
    assert [line.figure.text for line in cells["Accuracy"].lines] == ["invalid: task insensitive"] * 2
    assert [line.label for line in cells["Answer kept"].lines] == ["strict", "flexible"] and not cells["Loss difference"].lines


# ---------------------------------------------------------------- every gate can fail


def shipped(name: str, **changes: Any) -> records.Spec:
    """A grid that ships, on a toy checkpoint and a few short documents or invented items; its arms, contrasts and bounds as they are."""
    draft = freezing.draft_of(freezing.load_study(name)[0])
    found = msgspec.structs.replace(draft, checkpoint=factories.checkpoint(), **changes)
    consistency.check(found)
    return found


def decided(spec: records.Spec, evidence: dict[str, bytes]) -> dict[tuple[str, str], records.Decision]:
    derived = deriving.derive(spec, factories.result(spec, evidence), evidence, factories.harness())
    return {(item.candidate, item.family): item for item in derived.decisions}


def test_every_gate_of_the_losses_grid_holds_where_nothing_is_lost_and_fails_where_much_is() -> None:
    plain = freezing.draft_of(freezing.load_study("smollm2-135m-grid-loss")[0])
    families = tuple(msgspec.structs.replace(family, resamples=499) for family in plain.families)
    spec = shipped("smollm2-135m-grid-loss", workload=factories.workload(16, 128, greedy=None), families=families)
    cells = [contrast.candidate for contrast in spec.contrasts if contrast.baseline == "k16v16"]
    quiet = {name: (0.01, 1e-5) for name in ("k16v16", "k16v16-repeat")}
    little = decided(spec, factories.samples(spec, noise=quiet | {name: (0.01, 1e-4 if "k16v8" in name else 1.6e-3) for name in cells}))
    assert {little[name, "loss"].status for name in cells} == {"established"}
    over = [contrast.candidate for contrast in spec.contrasts if contrast.family == "advantage"]
    assert len(over) == 7 and {little[name, "advantage"].status for name in over} == {"established"}
    # much is lost by every cell, and more by those that keep their keys: no bound is met, and no advantage is left
    much = decided(spec, factories.samples(spec, noise=quiet | {name: (6.0, 2.0 if "k16v8" in name else 1.0) for name in cells}))
    for name in cells:
        assert much[name, "loss"].status == "degraded"
        assert {gate.statistic: (gate.met, gate.harmed) for gate in much[name, "loss"].gates} == {
            gate.statistic: (False, True) for gate in spec.family("loss").gates
        }
    assert {much[name, "advantage"].status for name in over} == {"degraded"}


@pytest.mark.parametrize(("one_in", "status"), [(10**6, "established"), (25, "not established"), (4, "degraded")])
def test_the_tasks_gate_of_every_cell_holds_or_fails_by_what_the_cell_answers(one_in: int, status: str) -> None:
    spec = shipped("smollm2-135m-rescaled-grid-task", task=taskfiles.task(margin=0.05))
    cells = {contrast.candidate for contrast in spec.contrasts if contrast.baseline == "k16v16"}
    found = decided(spec, taskfiles.evidence(spec, worse(dict.fromkeys(cells, one_in))))
    assert len(cells) == 21 and {found[name, reading].status for name in cells for reading in records.ANSWERS} == {status}
