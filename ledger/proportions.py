"""Shares of items and their paired differences: intervals and tests from published formulas. Pure.

A paired table counts items by what two arms made of them: ``both`` right, ``gained`` (the first alone is right), ``lost`` (the
second alone), ``neither``. The difference is the first's share less the second's: ``(gained - lost) / items``.

    wilson      E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209; by scipy
    mcnemar     exact: the binomial test of ``gained`` among ``gained + lost`` at 1/2; by scipy
    tango       T. Tango, Statistics in Medicine 17 (1998) 891: the score interval, as the roots of its statistic
    newcombe    R. G. Newcombe, Statistics in Medicine 17 (1998) 2635, method 10: Wilson's intervals, squared and added, with a
                continuity-corrected correlation

The worked examples that the tests check are named there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy import optimize, special
from scipy.stats import binomtest


@dataclass(frozen=True)
class Paired:
    """A paired 2 × 2 table, in items."""

    both: int
    gained: int
    lost: int
    neither: int

    @property
    def items(self) -> int:
        """All of them."""
        return self.both + self.gained + self.lost + self.neither

    @property
    def difference(self) -> float:
        """The first's share less the second's."""
        return (self.gained - self.lost) / self.items

    @property
    def discordance(self) -> float:
        """The share of items of which the two say different things."""
        return (self.gained + self.lost) / self.items


def paired(verdicts: Iterable[tuple[bool, bool]]) -> Paired:
    """The table of pairs of (first is right, second is right)."""
    listed = list(verdicts)
    return Paired(*(listed.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))))


def wilson(successes: int, items: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of a share; at least one item."""
    found = binomtest(successes, items).proportion_ci(confidence_level=confidence, method="wilson")
    return float(found.low), float(found.high)


def mcnemar(table: Paired) -> float:
    """Two-sided exact p-value of no difference; 1 where no item is discordant."""
    discordant = table.gained + table.lost
    return float(binomtest(table.gained, discordant).pvalue) if discordant else 1.0


def tango_statistic(table: Paired, difference: float) -> float:
    """Tango's z of a true ``difference`` in (-1, 1): falls as it rises, and is 0 at the table's own. At least one item.

    The denominator takes the maximum-likelihood share of ``lost`` items under that difference (his equations 9 to 11).
    """
    n, gained, lost = table.items, table.gained, table.lost
    distance = gained - lost - n * difference
    a = 2 * n
    b = -gained - lost + (2 * n - gained + lost) * difference
    c = -lost * difference * (1 - difference)
    share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = n * (2 * share + difference * (1 - difference))
    if variance <= 0:  # only where the statistic's numerator vanishes too, or the share is at its limit
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def tango(table: Paired, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided score interval of the paired difference; at least one item."""
    z = float(special.ndtri((1 + confidence) / 2))
    edge = 1 - 1e-12

    def root(target: float, low: float, high: float) -> float:
        at_low, at_high = (tango_statistic(table, side) - target for side in (low, high))
        if at_low <= 0 or at_high >= 0:  # the statistic does not reach the target before the end of the scale
            return low if at_low <= 0 else high
        return float(optimize.brentq(lambda side: tango_statistic(table, side) - target, low, high, xtol=1e-14, rtol=1e-13))

    centre = min(max(table.difference, -edge), edge)
    return root(z, -edge, centre), root(-z, centre, edge)


def newcombe(table: Paired, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of the paired difference by method 10; at least one item."""
    n, a, b, c, d = table.items, table.both, table.gained, table.lost, table.neither
    first, second = (a + b) / n, (a + c) / n
    (low1, high1), (low2, high2) = wilson(a + b, n, confidence), wilson(a + c, n, confidence)
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    product = a * d - b * c
    corrected = max(product - n / 2, 0) if product > 0 else product
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0))

    return table.difference - reach(first - low1, high2 - second), table.difference + reach(high1 - first, second - low2)


def inferior_p(table: Paired, margin: float) -> tuple[float, float]:
    """p-values by Tango's statistic at ``-margin``: that the first is worse by the margin or more, and that it is not."""
    z = tango_statistic(table, -margin)
    return float(special.ndtr(-z)), float(special.ndtr(z))
