"""The table of precision and scaling: which runs it joins and which never; and that every gate of a grid can fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load, save

from ledger import deriving, digest, freezing, grid, precision, queries, records, terminal
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_seeded_weights_of_another_kind_of_device_stand_in_rows_of_their_own(
    make_archive: Callable[..., Archive], tmp_path: Path, device: str
) -> None:
    archive = make_archive()
    seeded = records.Checkpoint(name="Seeded", source="random:llama#1", license="CC0-1.0", config={"hidden_size": 8}, seed=1)
    record_losses(archive, losses(checkpoint=seeded), tmp_path / "losses")
    record_answers(archive, answers(items=20, checkpoint=seeded, device=device), tmp_path / "answers")
    (table,) = queries.precision_tables(archive)
    assert {bool(row["loss"] and row["task"]) for row in table["rows"] if row["arm"] in CELLS} == {device == "cpu"}


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


# ---------------------------------------------------------------- one row, one baseline


def test_answers_to_another_baseline_stand_in_a_row_of_their_own(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    to_native = tuple(records.Contrast(candidate=name, baseline="native", family=family) for name in CELLS for family in records.ANSWERS)
    loss = record_losses(archive, losses(), tmp_path / "1")
    task = record_answers(archive, answers(items=40, contrasts=to_native), tmp_path / "2")
    (table,) = queries.precision_tables(archive)
    for name in CELLS:
        of_losses, of_answers = (row for row in table["rows"] if row["arm"] == name)
        assert (
            of_losses["baseline"] == "k16v16" == of_losses["bytes"]["of"] and of_losses["task"] is None and of_losses["loss"]["run"] == loss
        )
        assert of_answers["baseline"] == "native" == of_answers["bytes"]["of"] and of_answers["loss"] is None
        assert (
            of_answers["task"]["run"] == of_answers["bytes"]["run"] == task and of_answers["bytes"]["ratio"] < of_losses["bytes"]["ratio"]
        )
    # what is compared with nothing in one run has no figure there, and joins
    (control,) = (row for row in table["rows"] if row["arm"] == "k16v16")
    assert control["loss"] and control["task"] and control["baseline"] == "native"


def test_one_name_for_two_baselines_joins_nothing_and_is_told_apart(
    make_archive: Callable[..., Archive], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = make_archive()
    record_losses(archive, losses(), tmp_path / "1")
    wide = tuple(msgspec.structs.replace(arm, keys="fp16", values="fp16") if arm.name.startswith("k16v16") else arm for arm in arms())
    record_answers(archive, answers(items=40, arms=wide), tmp_path / "2")
    (table,) = queries.precision_tables(archive)
    rows = [row for row in table["rows"] if row["arm"] == "k8v8-unit"]
    assert [(row["baseline"], row["baseline_policy"]["keys"], row["loss"] is None) for row in rows] == [
        ("k16v16", "bf16", False),
        ("k16v16", "fp16", True),
    ]
    shown = [row.against for row in precisionpage.precision_page(table).rows if row.arm == "k8v8-unit"]
    assert [text.partition(",")[0] for text in shown] == ["k16v16: K bf16 / V bf16", "k16v16: K fp16 / V fp16"]
    terminal.precision([table])
    out = capsys.readouterr().out
    assert "k16v16: K bf16 V bf16" in out and "k16v16: K fp16 V fp16" in out


def test_one_baseline_under_two_names_is_one(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    record_losses(archive, losses(), tmp_path / "1")
    spec = answers(items=40)
    other = {"k16v16": "whole", "k16v16-repeat": "whole-repeat"}
    renamed = tuple(
        msgspec.structs.replace(arm, name=other.get(arm.name, arm.name), repeats=other.get(arm.repeats or "", arm.repeats))
        for arm in spec.arms
    )
    questions = tuple(msgspec.structs.replace(contrast, baseline="whole") for contrast in spec.contrasts)
    record_answers(archive, answers(items=40, arms=renamed, contrasts=questions), tmp_path / "2")
    (table,) = queries.precision_tables(archive)
    assert list(by_arm(table)) == [arm.name for arm in arms()] and all(row["loss"] and row["task"] for row in table["rows"])


def test_every_decision_on_an_arm_is_listed_and_only_what_asks_for_less_is_an_advantage(
    make_archive: Callable[..., Archive], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = make_archive()
    spec = losses()
    mean = records.Family(name="mean", resamples=299, gates=(records.Gate(statistic="loss_difference_mean", bound=0.02, harm=0.02),))
    families = (*(msgspec.structs.replace(family, resamples=299) for family in spec.families), mean)
    beside = (("native", "loss"), ("k16v8-unit", "mean"))  # a second control, and no control
    more = tuple(records.Contrast(candidate="k8v8-unit", baseline=baseline, family=family) for baseline, family in beside)
    run = record_losses(archive, losses(contrasts=(*spec.contrasts, *more), families=families), tmp_path / "1")
    over = tuple(records.Contrast(candidate="k8v8-unit", baseline="k8v16-unit", family=family) for family in records.ANSWERS)
    task = record_answers(archive, answers(items=40, contrasts=(*answers().contrasts, *over)), tmp_path / "2")
    (table,) = queries.precision_tables(archive)
    row = by_arm(table)["k8v8-unit"]
    told = [(item["run"], item["against"], item["family"]) for item in row["gates"]]
    assert told == [
        (run, "k16v16", "loss"),
        *((run, *item) for item in beside),
        *((task, "k8v16-unit", reading) for reading in records.ANSWERS),
    ]
    decided = {item["baseline"]: item["status"] for item in queries.run(archive, run)["decisions"] if item["candidate"] == "k8v8-unit"}
    assert {item["against"]: item["status"] for item in row["gates"] if item["run"] == run} == decided and not row["advantages"]
    (page,) = (each for each in precisionpage.precision_page(table).rows if each.arm == "k8v8-unit")
    assert [verdict.of for verdict in page.verdicts] == [
        "loss, against k16v16",
        "loss, against native",
        "mean, against k16v8-unit",
        *(f"accuracy, {reading} reading, against {against}" for against in ("k8v16-unit", "k16v16") for reading in records.ANSWERS),
    ]
    terminal.precision([table])
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("k8v8-unit "))
    for item in row["gates"]:
        against = "" if item["against"] == "k16v16" else f" against {item['against']}"
        assert f"{item['family']}{against}: {item['status']}" in line
    assert " over " not in line
    (line,) = (line for line in out.splitlines() if line.startswith("k16v8-unit "))
    assert f"advantage over k8v8-unit: {by_arm(table)['k16v8-unit']['advantages'][0]['status']}" in line


def test_the_state_of_recurrent_layers_counts_in_what_a_cache_takes(
    make_archive: Callable[..., Archive], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # case 4
    archive = make_archive()
    spec = losses()
    kinds: tuple[tuple[Any, int], ...] = (("recurrent", 60_000), ("convolution", 1_000))
    state = tuple(
        records.Backing(bytes=size, dtype="fp32", kind=kind, layers=(2,), holds="state", address=2**60 + at, tokens=32)
        for at, (kind, size) in enumerate(kinds)
    )
    hybrid = tuple(factories.arm_result(arm, backings=(*factories.arm_result(arm).backings, *state, state[0])) for arm in spec.arms)
    run = record_losses(archive, spec, tmp_path / "1", arms=hybrid)
    (table,) = queries.precision_tables(archive)
    shown = {arm["name"]: {item["name"]: item for item in arm["measurements"]} for arm in queries.run(archive, run)["arms"]}
    for name in CELLS:
        held, own = by_arm(table)[name]["bytes"], shown[name]
        assert held["state"] == 61_000 and held["keys"] + held["values"] + held["state"] == own["cache_bytes"]["value"]
        assert held["ratio"] == own["cache_ratio_with_scales"]["value"] and own["cache_ratio_with_scales"]["against"] == held["of"]
    ratio = by_arm(table)["k8v8-unit"]["bytes"]["ratio"]
    assert ratio == (4096 + 61_000) / (8192 + 61_000) > 0.9
    (row,) = (each for each in precisionpage.precision_page(table).rows if each.arm == "k8v8-unit")
    cells = {cell.heading: cell.lines[0].figure for cell in row.cells if cell.lines}
    assert cells["State"].exact == "61,000 bytes" and cells["In all"].exact.startswith(str(ratio))
    terminal.precision([table])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("k8v8-unit "))
    assert "  61,000  " in line and f"  {ratio:.6g}  " in line


def test_a_run_counts_by_what_ran_and_not_by_what_it_asked_for(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make_archive()
    spec = losses()
    unknown = record_losses(archive, spec, tmp_path / "1", sources={"ledger/digest.py": "0" * 64})
    assert queries.precision_tables(archive) == [] and queries.run(archive, unknown)["harness"]["matched"] == "none"
    kept = {arm.name for arm in spec.arms if arm.role != "candidate"}
    evidence = {
        name: save({key: value for key, value in load(data).items() if key.partition(".")[0] in kept})
        for name, data in factories.samples(spec).items()
    }
    broken = tuple(
        factories.arm_result(arm) if arm.name in kept else records.ArmResult(name=arm.name, outcome="failed", reason="out of memory")
        for arm in spec.arms
    )
    failed = recorded(archive, spec, evidence, tmp_path / "2", arms=broken, started="2026-01-03T03:04:05Z")
    (table,) = queries.precision_tables(archive)
    assert (table["runs"]["loss"]["run"], table["runs"]["loss"]["others"]) == (failed, [])
    whole = record_losses(archive, spec, tmp_path / "3", started="2026-01-04T03:04:05Z")
    (table,) = queries.precision_tables(archive)
    assert (table["runs"]["loss"]["run"], table["runs"]["loss"]["others"]) == (whole, [failed])
    assert by_arm(table)["k8v8-unit"]["loss"]["difference"] is not None


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
