"""What a page says about an outcome or a number: words, never colour alone.

Pure. ``Mark`` is an outcome of the status vocabulary ready to be shown; ``Figure``
a number with its exact form beside the short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ledger import recipes, reports

MEANINGS = {
    "established": "every bound was met; harm beyond the margins is ruled out for what was tested",
    "not established": "a bound was not met; no harm is shown",
    "degraded": "harm is shown: a lower bound lies beyond its margin",
    "passes": "a check without statistics succeeded, under the settings shown and no others",
    "fails": "a check without statistics did not succeed",
    "measured": "figures were taken; they carry no verdict of their own",
    "measured, not qualified": "figures were taken, but quality is not established, so they recommend nothing",
    "unsupported": "the guard refused this configuration, with a reason; nothing was measured",
    "invalid": "a validity condition broke, so the figures say neither yes nor no",
    "not measured": "nobody has run this; it says nothing about how it would end",
    "retracted": "withdrawn with author and reason; it stays readable and no longer counts",
    "reported": "said by a document outside this archive; no evidence for it is held here",
}
"""The status vocabulary in the order of the legend, and what each word means."""

MINUS, DASH = "\u2212", "\u2013"

SYNTHETIC = "seeded or altered weights: a statement about the test, not about any published model"

OUTCOMES = {
    "completed": "ran to its end",
    "interrupted": "stopped before its end; what was finished is kept",
    "failed": "ended by an error or killed; what was finished is kept",
    "running": "not finished when this was written",
    "refused": "the guard refused it, with a reason",
    "not run": "asked for by the spec, but no result of it exists",
    "bit-identical": "every raw sample is equal, bit for bit",
    "within": "every difference is within the tolerance declared beforehand",
    "outside": "a difference is beyond the tolerance declared beforehand",
    "not comparable": "the two runs do not measure the same thing, or nothing could be run",
}
"""Outcomes of runs, arms and reproductions."""

RECIPES = recipes.WORDS
"""What is said of a recipe."""

REPORTED = reports.OUTCOMES
"""How a document outside says that something came out. They get no mark: they are no outcomes of this archive."""


@dataclass(frozen=True)
class Mark:
    """An outcome: its ``words``, what they mean, and ``shape``, the name of its icon and style class."""

    words: str
    shape: str
    meaning: str
    synthetic: bool = False


@dataclass(frozen=True)
class Figure:
    """A number: ``text`` to read, ``exact`` in full."""

    text: str
    exact: str


@dataclass(frozen=True)
class Hash:
    """A digest: ``short`` to read, ``full`` to copy."""

    short: str
    full: str


def mark(words: str) -> Mark:
    """The mark of an outcome; ``synthetic …`` keeps the shape of what follows it. An unknown word gets the plain shape."""
    synthetic = words.startswith("synthetic ")
    status = words.removeprefix("synthetic ")
    meaning = MEANINGS.get(status) or OUTCOMES.get(status) or RECIPES.get(status)
    shape = status.replace(",", "").replace(" ", "-") if meaning else "unknown"
    return Mark(status, shape, meaning or "a word that this version does not know", synthetic)


def legend() -> tuple[Mark, ...]:
    """Every word of the status vocabulary, in order."""
    return tuple(mark(status) for status in MEANINGS)


def legend_of_recipes() -> tuple[Mark, ...]:
    """Every word that is said of a recipe, but for those of the status vocabulary, in order."""
    return tuple(mark(word) for word in RECIPES if word not in MEANINGS)


def hash_of(full: str | None) -> Hash | None:
    """A digest or revision with its first ten characters; None stays None."""
    return None if full is None else Hash(full[:10], full)


def number(value: Any) -> int | float | None:
    """The number that a JSON document holds, tagged or plain; None for anything else."""
    if isinstance(value, dict) and set(value) == {"number"}:
        text = value["number"]
        return float(text) if text in ("NaN", "Infinity", "-Infinity", "-0.0") else int(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value


def finite(*values: int | float | None) -> bool:
    """Whether all are numbers that can be drawn."""
    return all(value is not None and abs(value) < 1e300 for value in values)


def _float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return f"{MINUS}0" if math.copysign(1.0, value) < 0 else "0"
    text = f"{value:.4g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", MINUS)


def size(count: int) -> str:
    """A number of bytes in binary units, three digits: ``1.50 MiB``."""
    amount, names = float(count), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    at = 0
    while amount >= 1024 and at < len(names) - 1:
        amount, at = amount / 1024, at + 1
    return f"{count} B" if at == 0 else f"{amount:.2f} {names[at]}" if amount < 100 else f"{amount:.0f} {names[at]}"


def figure(value: Any, unit: str = "") -> Figure:
    """A number of a document, to read and in full. Absent is said, never shown as zero."""
    found = number(value)
    if found is None:
        return Figure(DASH, "absent")
    exact = (f"{found:,}" if isinstance(found, int) else repr(found)) + (f" {unit}" if unit else "")
    if isinstance(found, float):
        return Figure(_float(found), exact)
    if unit == "bytes" and found >= 1024:
        return Figure(size(found), exact)
    return Figure(f"{found:,}".replace("-", MINUS), exact)


def ranges(values: Iterable[int]) -> str:
    """``0-4, 6, 8-9``, with true dashes, for whole numbers."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(f"{first}{DASH}{last}" if last > first else f"{first}" for first, last in runs)


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "none"


def counted(count: int, one: str, many: str | None = None) -> str:
    """``1 layer``, ``30 layers``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def instant(text: str | None) -> str:
    """``2026-01-02 03:04 UTC`` for an instant of a record."""
    return DASH if text is None else f"{text[:10]} {text[11:16]} UTC"


def flat(value: Any) -> str:
    """Any value of a document in one line of text, numbers untagged, with None as ``absent``."""
    found = number(value)
    if found is not None:
        return figure(value).exact
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(flat(item) for item in value) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {flat(item)}" for key, item in value.items()) or "none"
    return str(value)
