"""Intervals of paired shares against published worked examples, and against each other.

Fagerland, Lydersen and Laake, Recommended tests and confidence intervals for paired binomial proportions, Statistics in Medicine 33
(2014) 2850: airway hyper-responsiveness before and after stem cell transplantation (Bentur et al. 2009), 1, 1, 7 and 12 of 21
children: difference -0.286, Tango -0.517 to -0.026, Newcombe -0.507 to -0.026; exact McNemar p 0.0703.
Newcombe, Statistics in Medicine 17 (1998) 2635: 36, 12, 2 and 0 of 50: difference 0.2, method 10: 0.0569 to 0.3404.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import proportions
from ledger.proportions import Paired

BENTUR = Paired(both=1, gained=1, lost=7, neither=12)
NEWCOMBE = Paired(both=36, gained=12, lost=2, neither=0)


def test_published_examples_are_met_to_every_digit_that_was_printed() -> None:
    assert BENTUR.difference == pytest.approx(-0.286, abs=5e-4)
    assert proportions.tango(BENTUR) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert proportions.newcombe(BENTUR) == pytest.approx((-0.507, -0.026), abs=5e-4)
    assert proportions.mcnemar(BENTUR) == pytest.approx(0.0703, abs=5e-5)
    assert NEWCOMBE.difference == pytest.approx(0.2)
    assert proportions.newcombe(NEWCOMBE) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_a_sample_without_discordance_still_has_an_interval() -> None:
    table = Paired(both=90, gained=0, lost=0, neither=10)
    low, high = proportions.tango(table)
    # z² / (n + z²): the root of n Δ² = z² Δ (1 - Δ), in closed form
    assert (low, high) == pytest.approx((-(1.959964**2) / (100 + 1.959964**2), 1.959964**2 / (100 + 1.959964**2)), rel=1e-6)
    assert proportions.mcnemar(table) == 1.0 and proportions.newcombe(table)[0] < 0 < proportions.newcombe(table)[1]


counts = st.integers(0, 60)


@given(counts, counts, counts, counts, st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_score_interval_holds_the_difference_and_turns_with_the_sides(a: int, b: int, c: int, d: int, confidence: float) -> None:
    if a + b + c + d == 0:
        return
    table, turned = Paired(a, b, c, d), Paired(a, c, b, d)
    low, high = proportions.tango(table, confidence)
    assert -1 <= low <= table.difference <= high <= 1
    assert proportions.tango(turned, confidence) == pytest.approx((-high, -low), abs=1e-6)
    for side in (low, high):
        if abs(side) < 1 - 1e-9:
            assert abs(proportions.tango_statistic(table, side)) == pytest.approx(abs(_z(confidence)), rel=1e-4)


@given(counts, counts, counts, counts)
def test_a_p_value_and_its_bound_say_the_same(a: int, b: int, c: int, d: int) -> None:
    if a + b + c + d == 0:
        return
    table, margin = Paired(a, b, c, d), 0.05
    low, high = proportions.tango(table, 0.9)
    p_bound, p_harm = proportions.inferior_p(table, margin)
    assert p_bound + p_harm == pytest.approx(1)
    if abs(low + margin) > 1e-9:
        assert (p_bound < 0.05) == (low > -margin)
    if abs(high + margin) > 1e-9:
        assert (p_harm < 0.05) == (high < -margin)


def _z(confidence: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf((1 + confidence) / 2)


def test_a_table_counts_pairs_by_what_both_sides_said() -> None:
    verdicts = [(True, True), (True, False), (True, False), (False, True), (False, False)]
    table = proportions.paired(verdicts)
    assert (table.both, table.gained, table.lost, table.neither) == (1, 2, 1, 1)
    assert (table.items, table.difference) == (5, 0.2) and math.isclose(table.discordance, 0.6)
