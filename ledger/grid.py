"""A grid of a study: formats x scale policies x granularities, written out as ordinary arms and contrasts; nothing is read.

    [grid]
    baseline = "k16v16"                   # the arm that a cell is, but for what it stores in 8 bit
    formats = ["k16v8", "k8v16", "k8v8"]
    scales = ["unit", "fixed", "dynamic"]
    granularity = ["tensor", "head", "page_head", "token_head"]
    families = ["loss"]                   # each cell against the baseline

    [[grid.advantages]]                   # under each scale policy and granularity
    candidate = "k16v8"
    over = "k8v8"
    family = "advantage"

A cell is named by what it stores: ``k16v8-unit``, ``k16v8-fixed-head``, ``k8v8-dynamic-token-head``. Unit scales have no
granularity, fixed ones are of a tensor or a head, dynamic ones of each that is listed. Since a study with a grid becomes the
same study with its arms written out, nothing behind freezing knows of grids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from ledger import records, sources

Eight = Literal["k16v8", "k8v16", "k8v8"]
FIXED = ("tensor", "head")
"""Granularities of scales that a calibration gives."""
NAMED = ("run:", "study:")
"""How a calibration is named in a study."""
NONE = "none"
"""In place of a calibration: cells of fixed scales are left out."""


class AdvantageTable(records.Record, frozen=True, kw_only=True):
    """A ``[[grid.advantages]]`` table: cells of ``candidate`` against those of ``over``, under the gates of ``family``."""

    candidate: Eight
    over: Eight
    family: records.Name


class GridTable(records.Record, frozen=True, kw_only=True):
    """The ``[grid]`` table of a study."""

    baseline: records.Name
    formats: tuple[Eight, ...]
    scales: tuple[Literal["unit", "fixed", "dynamic"], ...]
    families: tuple[records.Name, ...]
    granularity: tuple[Literal["tensor", "head", "page_head", "token_head"], ...] = ()
    advantages: tuple[AdvantageTable, ...] = ()


def written_out(table: dict[str, Any]) -> dict[str, Any]:
    """A study with its grid as arms and contrasts behind its own, and its ``calibration`` as the source of fixed scales.

    A calibration that no arm would take is refused. Raises InputError that names the key that is wrong.
    """
    found = {key: value for key, value in table.items() if key not in ("grid", "calibration")}
    source = table.get("calibration")
    if source is not None:
        source = _source(source)
    if "grid" in table:
        grid = sources.section(GridTable, table["grid"], "grid")
        for key in ("arms", "contrasts"):
            if not isinstance(found.get(key, []), list):
                raise sources.refuse(key, "is no list of tables.", expected=f"[[{key}]]")
        cells = list(_cells(grid, _baseline(grid, found.get("arms", [])), source))
        if not cells:
            raise sources.refuse("grid", "is empty without its fixed scales.", expected="a calibration", found=f'calibration = "{NONE}"')
        found["arms"] = [*found["arms"], *(arm for arm, _ in cells)]
        found["contrasts"] = [*found.get("contrasts", []), *_contrasts(grid, cells)]
    elif source == NONE:
        raise sources.refuse("calibration", "leaves out cells of fixed scales, and there is no grid.", expected="[grid]")
    if source is not None and isinstance(found.get("arms"), list):
        asked = table["grid"].get("scales", ()) if source == NONE else ()
        found["arms"] = [_sourced(arm, source) for arm in found["arms"]]
        if "fixed" not in asked and not any(isinstance(arm, dict) and _takes(arm, source) for arm in found["arms"]):
            raise sources.refuse(
                "calibration", "is used by no arm.", expected="an arm of fixed scales that names no other", found=source[:100]
            )
    return found


def _source(given: Any) -> str:
    """The source of fixed scales as a study names it. Raises InputError."""
    expected = f'"study:<name>" or "run:<id>", or "{NONE}"'
    if not isinstance(given, str):
        raise sources.refuse("calibration", "is no text.", expected=expected, found=repr(given)[:100])
    if given != NONE and not any(given.startswith(prefix) and given != prefix for prefix in NAMED):
        raise sources.refuse("calibration", "names no recorded calibration.", expected=expected, found=repr(given)[:100])
    return given


def _takes(arm: dict[str, Any], source: str) -> bool:
    return arm.get("scales") == "fixed" and arm.get("scale_source") == source


def _sourced(arm: Any, source: str) -> Any:
    """An arm of fixed scales with the study's calibration, where it names none."""
    lacks = isinstance(arm, dict) and arm.get("scales") == "fixed" and "scale_source" not in arm
    return {**arm, "scale_source": source} if lacks else arm


def _baseline(grid: GridTable, arms: list[Any]) -> dict[str, Any]:
    """The arm that cells are made of: what it says but its name, role and formats."""
    for key in ("formats", "scales", "families"):
        if not getattr(grid, key):
            raise sources.refuse(f"grid.{key}", "is empty, so that there is no cell.", expected="one or more")
    for key in ("formats", "scales", "granularity", "families", "advantages"):
        listed = getattr(grid, key)
        again = next((item for item in listed if listed.count(item) > 1), None)
        if again is not None:
            raise sources.refuse(f"grid.{key}", "names one twice.", found=str(again)[:200])
    _check_granularity(grid)
    for number, pair in enumerate(grid.advantages):
        if pair.candidate == pair.over or not {pair.candidate, pair.over} <= set(grid.formats):
            found = f"{pair.candidate} over {pair.over}"
            raise sources.refuse(
                f"grid.advantages[{number}]", "is not of two formats of the grid.", expected=", ".join(grid.formats), found=found
            )
    arm = next((arm for arm in arms if isinstance(arm, dict) and arm.get("name") == grid.baseline), None)
    if arm is None:
        raise sources.refuse("grid.baseline", "names no arm of this study.", found=grid.baseline)
    asked = sources.section(records.Arm, arm, f"arms ({grid.baseline})")
    if asked.role != "control" or asked.keys != asked.values or asked.keys not in ("bf16", "fp16") or asked.implementation == "native":
        raise sources.refuse(
            "grid.baseline",
            "is no control that cells differ from in format alone.",
            expected="a control, reference or fused, with keys and values of one 16-bit format",
            found=f"{asked.name}: {asked.role}, {asked.implementation}, {asked.keys}/{asked.values}",
        )
    return dict(arm)


def _check_granularity(grid: GridTable) -> None:
    known = {"fixed": FIXED, "dynamic": ("tensor", "head", "page_head", "token_head")}
    for scales, those in known.items():
        if scales in grid.scales and not set(those) & set(grid.granularity):
            raise sources.refuse("grid.granularity", f"has none for {scales} scales.", expected=" or ".join(those))
    idle = [grain for grain in grid.granularity if not any(scales in grid.scales and grain in those for scales, those in known.items())]
    if idle:
        raise sources.refuse("grid.granularity", "is of no scales of the grid.", expected=", ".join(grid.scales), found=", ".join(idle))


def _cells(grid: GridTable, baseline: dict[str, Any], source: str | None) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
    """Each cell's arm, and its format and the rest of its name."""
    if "fixed" in grid.scales and source is None:
        raise sources.refuse(
            "grid.scales",
            "asks for fixed scales, and no calibration is named.",
            expected='calibration = "study:<name>" or "run:<id>"',
            next=f'name one in the study or by --calibration; with "{NONE}" the cells of fixed scales are left out.',
        )
    shared = {key: value for key, value in baseline.items() if key not in ("name", "role", "keys", "values")}
    for scales in grid.scales:
        if scales == "fixed" and source == NONE:
            continue
        grains = {"unit": ("none",), "fixed": tuple(grain for grain in grid.granularity if grain in FIXED)}.get(scales, grid.granularity)
        for grain in grains:
            rest = scales if grain == "none" else f"{scales}-{grain.replace('_', '-')}"
            for format in grid.formats:
                keys, values = ("fp8_e4m3" if side in format else baseline["keys"] for side in ("k8", "v8"))
                arm = {"name": f"{format}-{rest}", "role": "candidate", **shared, "keys": keys, "values": values, "scales": scales}
                yield arm | ({} if grain == "none" else {"granularity": grain}), (format, rest)


def _contrasts(grid: GridTable, cells: list[tuple[dict[str, Any], tuple[str, str]]]) -> Iterator[dict[str, Any]]:
    for arm, _ in cells:
        for family in grid.families:
            yield {"candidate": arm["name"], "baseline": grid.baseline, "family": family}
    for pair in grid.advantages:
        for arm, (format, rest) in cells:
            if format == pair.candidate:
                yield {"candidate": arm["name"], "baseline": f"{pair.over}-{rest}", "family": pair.family}
