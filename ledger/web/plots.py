"""The drawing of one gate: an interval on a line, beside its bound, its harm margin and its floor.

Pure. Coordinates are numbers in SVG user units; the template only writes them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ledger.web import words

WIDTH, LEFT, RIGHT = 300.0, 10.0, 290.0


@dataclass(frozen=True)
class Plot:
    """Positions along the line. ``label`` says in words what is drawn; ``zero`` is None where zero is off the line."""

    label: str
    lower: float
    upper: float
    estimate: float
    bound: float
    harm: float
    harm_width: float
    floor: float | None
    zero: float | None


def gate(
    estimate: float | int | None,
    lower: float | int | None,
    upper: float | int | None,
    bound: float | int | None,
    harm: float | int | None,
    floor: float | int | None,
) -> Plot | None:
    """A plot, or None where a number is not finite and nothing honest can be drawn."""
    if estimate is None or lower is None or upper is None or bound is None or harm is None:
        return None
    if not words.finite(estimate, lower, upper, bound, harm):
        return None
    shown = [float(value) for value in (estimate, lower, upper, bound, harm)]
    if floor is not None and words.finite(floor):
        shown.append(float(floor))
    low, high = min(shown), max(shown)
    if min(abs(low), abs(high)) < 0.75 * (high - low) or low == high:  # zero is near: show it
        low, high = min(low, 0.0), max(high, 0.0)
    span = (high - low) or max(abs(high), 1.0)
    low, high = low - 0.08 * span, high + 0.08 * span

    def at(value: float | int) -> float:
        return round(LEFT + (float(value) - low) / (high - low) * (RIGHT - LEFT), 1)

    text = words.figure
    return Plot(
        label=(
            f"estimate {text(estimate).text}, interval {text(lower).text} to {text(upper).text}, "
            f"bound {text(bound).text}, harm from {text(harm).text}"
        ),
        lower=at(lower),
        upper=at(upper),
        estimate=at(estimate),
        bound=at(bound),
        harm=at(harm),
        harm_width=round(WIDTH - at(harm), 1),
        floor=at(floor) if floor is not None and words.finite(floor) else None,
        zero=at(0) if low <= 0 <= high else None,
    )
