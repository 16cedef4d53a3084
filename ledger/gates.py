"""Samples and bounds frozen beforehand -> decisions, one a contrast (protocols: tests, loss).

The unit is the document. Every statistic but ``kl_p999`` and ``bit_equal`` is a mean over documents; its one-sided
bounds at the family's confidence come from Student's t and from ``scipy.stats.bootstrap`` over documents (BCa;
the percentile method where BCa is undefined), and the larger upper and the smaller lower bound decide. ``kl_p999``
has the bootstrap alone: documents are drawn, their tokens pooled, the quantile taken (percentile method, since the
jackknife behind BCa is not consistent for a quantile). Documents that are all equal have an interval of width zero.

p-values: of ``bound``, that the statistic is above it; of ``harm``, that it is at or below it. From Student's t, or
from the bootstrap as (1 + resamples on the wrong side) / (1 + resamples). A gate's own are unadjusted. A
contrast's ``p_bound`` is the largest of its gates (all must hold: intersection-union), adjusted by Holm over the contrasts
of the spec; its ``p_harm`` the smallest of its gates after Holm over all gates of all contrasts. What
cannot be judged counts there with p = 1, so that an invalid contrast never makes the others easier.

    established      every gate's upper bound is at most its bound, and p_bound is at most 1 - confidence
    degraded         some gate's lower bound is above its harm, and its adjusted p is at most 1 - confidence
    not established  otherwise
    passes, fails    families of bit_equal alone
    unsupported      the guard refused one of the two arms
    invalid          a validity condition broke; checked before anything is judged

Resamples come from numpy's ``default_rng(seed)`` of the family, anew for every gate, so that a decision does not
depend on what else the spec asks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special
from scipy.stats import DegenerateDataWarning, bootstrap

from ledger import measures, validity
from ledger.measures import Floats, Samples
from ledger.records import Contrast, Decision, Family, Gate, GateOutcome, Harness, Result, Spec, Status

# ---------------------------------------------------------------- validity


def _repeat(spec: Spec, name: str) -> str | None:
    return next((arm.name for arm in spec.arms if arm.repeats == name), None)


def _refusal(spec: Spec, result: Result, samples: Samples, harness: Harness, contrast: Contrast) -> tuple[Status, str] | None:
    """Status and reason where the contrast cannot be judged; None where it can."""
    sides = [contrast.candidate, contrast.baseline]
    repeat = _repeat(spec, contrast.baseline)
    if repeat is not None and any(gate.statistic != "bit_equal" for gate in spec.family(contrast.family).gates):
        sides.append(repeat)
    refused = validity.refusal(spec, result, harness, sides)
    if refused is not None:
        return refused
    for side in sides:
        missing = [str(d) for d in range(len(spec.documents)) if d not in set(samples.documents(side))]
        if missing:
            return "invalid", f"missing evidence: arm {side} has no samples of document {', '.join(missing[:8])}"
    for side in sides:
        flaw = samples.flaw(side)
        if flaw:
            return "invalid", flaw
    for left, right in measures.identical_pairs(spec, samples):
        for side in _blamed(spec, left, right):
            if side in sides:
                return "invalid", (
                    f"suspicious: {left} and {right} agree in every bit although they store different formats; "
                    f"the cache of {side} was probably not read"
                )
    return None


def _blamed(spec: Spec, left: str, right: str) -> tuple[str, ...]:
    """Of two arms that should differ, those that did not do as asked: a candidate before a control, a native cache last."""

    def rank(name: str) -> int:
        arm = spec.arm(name)
        return 0 if arm.implementation == "native" else 2 if arm.role == "candidate" else 1

    return (left, right) if rank(left) == rank(right) else (max(left, right, key=rank),)


# ---------------------------------------------------------------- intervals


@dataclass(frozen=True)
class Bounds:
    """A statistic with its one-sided bounds and p-values (unadjusted), and in words how they came about."""

    estimate: float
    lower: float
    upper: float
    p_bound: float
    p_harm: float
    method: str


def mean_bounds(values: Sequence[float], gate: Gate, family: Family) -> Bounds:
    """Bounds of the mean of ``values`` [documents], at least two, all finite."""
    array = np.asarray(values, np.float64)
    centre, deviation = measures.mean(array), measures.spread(array)
    percent = f"one-sided {100 * family.confidence:g} %"
    if deviation == 0:
        return Bounds(
            centre,
            centre,
            centre,
            float(centre > gate.bound),
            float(centre <= gate.harm),
            f"{percent}: all {array.size} documents equal",
        )
    error, freedom = deviation / math.sqrt(array.size), array.size - 1
    half = float(special.stdtrit(freedom, family.confidence)) * error
    name = "BCa"
    low, high, _ = _bootstrap(array, np.mean, family, name)
    if not (math.isfinite(low) and math.isfinite(high)):
        name = "percentile (BCa is undefined)"
        low, high, _ = _bootstrap(array, np.mean, family, "percentile")
    method = (
        f"{percent} over {array.size} documents: Student's t [{centre - half:.6g}, {centre + half:.6g}], "
        f"bootstrap {name}, {family.resamples} resamples [{low:.6g}, {high:.6g}]; "
        f"lower from {'t' if centre - half <= low else 'the bootstrap'}, upper from {'t' if centre + half >= high else 'the bootstrap'}"
    )
    return Bounds(
        estimate=centre,
        lower=min(centre - half, low),
        upper=max(centre + half, high),
        p_bound=float(special.stdtr(freedom, (centre - gate.bound) / error)),
        p_harm=float(special.stdtr(freedom, (gate.harm - centre) / error)),
        method=method,
    )


def _bootstrap(data: Floats, statistic: Callable[..., Floats], family: Family, method: str) -> tuple[float, float, Floats]:
    """Lower and upper one-sided bound and the distribution, by scipy. The bounds are NaN where the method is undefined."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # BCa is undefined: the caller sees the NaN
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's standard error, not used here, needs two resamples
        found = bootstrap(
            (data,),
            statistic,
            n_resamples=family.resamples,
            vectorized=True,
            axis=-1,
            confidence_level=2 * family.confidence - 1,
            method=method,
            rng=np.random.default_rng(family.seed),
        )
    return float(found.confidence_interval.low), float(found.confidence_interval.high), found.bootstrap_distribution


def tail_bounds(documents: Sequence[Floats], gate: Gate, family: Family) -> Bounds:
    """Bounds of the 99.9 % quantile of all tokens, documents drawn whole. At least two documents, all finite."""
    # Of a draw's pooled tokens only the largest few can be the quantile. Where k tokens lie above it, a document has at most
    # its own largest k + 1 at or above it: those, weighted by how often their document was drawn, are all that is needed.
    count = len(documents)
    sizes = np.array([values.size for values in documents], np.int64)
    depth = int(measures.tail_rank(count * sizes.max(keepdims=True))[0]) + 1
    largest = [np.sort(values)[::-1][:depth] for values in documents]
    owner = np.repeat(np.arange(count), [values.size for values in largest])
    pooled = np.concatenate(largest)
    order = np.argsort(-pooled, kind="stable")
    pooled, owner = pooled[order], owner[order]

    def statistic(drawn: Floats, axis: int) -> Floats:
        rows = drawn.astype(np.int64).reshape(-1, count)
        times = np.zeros((len(rows), count), np.int64)
        for column in range(count):
            np.add.at(times, (np.arange(len(rows)), rows[:, column]), 1)
        above = measures.tail_rank(times @ sizes)
        first = (np.cumsum(times[:, owner], axis=1) > above[:, None]).argmax(axis=1)
        quantiles: Floats = pooled[first].reshape(drawn.shape[:-1])
        return quantiles

    low, high, drawn = _bootstrap(np.arange(count, dtype=np.float64), statistic, family, "percentile")
    return Bounds(
        estimate=measures.tail(np.concatenate(documents)),
        lower=low,
        upper=high,
        p_bound=float(1 + np.count_nonzero(drawn > gate.bound)) / (family.resamples + 1),
        p_harm=float(1 + np.count_nonzero(drawn <= gate.harm)) / (family.resamples + 1),
        method=(
            f"one-sided {100 * family.confidence:g} % over {count} documents, tokens pooled: "
            f"bootstrap percentile, {family.resamples} resamples"
        ),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


# ---------------------------------------------------------------- one gate


def _per_document(spec: Spec, samples: Samples, gate: Gate, contrast: Contrast, left: str, right: str) -> list[Floats] | list[float] | None:
    """What the statistic is taken of, by document, between ``left`` and ``right``; None where it was not recorded."""
    if gate.statistic == "loss_difference_mean":
        return [measures.mean(values) for values in measures.loss_differences(samples, left, right)]
    if gate.statistic == "top1_disagreement":
        return measures.disagreements(samples, left, right)
    if gate.statistic == "kl_p999":
        return measures.divergences(samples, left, right)
    control = spec.common_control(contrast)
    return None if control is None else measures.divergence_differences(samples, left, right, control)


def _floor(spec: Spec, samples: Samples, gate: Gate, contrast: Contrast) -> float | None:
    """Size of the statistic between the baseline and its repeat; None where there is no repeat."""
    repeat = _repeat(spec, contrast.baseline)
    if repeat is None:
        return None
    values = _per_document(spec, samples, gate, contrast, repeat, contrast.baseline)
    if not values:
        return None
    if gate.statistic == "kl_p999":
        return measures.tail(np.concatenate(values))
    return abs(measures.mean([float(value) for value in values]))


def _bit_equal(samples: Samples, gate: Gate, contrast: Contrast) -> GateOutcome | str:
    left, right = contrast.candidate, contrast.baseline
    gaps = samples.gap.get((left, right))
    if not gaps:
        return f"missing evidence: no logit differences of {left} to {right} were recorded"
    gap = max(float(values.max()) for values in gaps.values())
    same = all(
        samples.loss[left][d].tobytes() == samples.loss[right][d].tobytes() and (samples.top1[left][d] == samples.top1[right][d]).all()
        for d in samples.documents(left, right)
    )
    if gap == 0 and not same:
        return f"the samples contradict themselves: logits of {left} and {right} are said to be equal, but their losses differ"
    return GateOutcome(
        statistic=gate.statistic,
        estimate=gap,
        lower=gap,
        upper=gap,
        bound=gate.bound,
        harm=gate.harm,
        met=gap <= gate.bound,
        harmed=gap > gate.harm,
        method="largest absolute difference of any logit at any position; no statistics",
    )


def _judge(spec: Spec, samples: Samples, gate: Gate, contrast: Contrast) -> GateOutcome | str:
    """One gate's numbers, or in words why there are none."""
    if gate.statistic == "bit_equal":
        return _bit_equal(samples, gate, contrast)
    values = _per_document(spec, samples, gate, contrast, contrast.candidate, contrast.baseline)
    if values is None:
        return f"missing evidence: {gate.statistic} needs a KL of {contrast.candidate} and {contrast.baseline} that was not recorded"
    if len(values) < 2:
        return f"{len(values)} document: an interval over documents needs at least two"
    family = spec.family(contrast.family)
    if gate.statistic == "kl_p999":
        bounds = tail_bounds([np.asarray(value) for value in values], gate, family)
    else:
        bounds = mean_bounds([float(value) for value in values], gate, family)
    return GateOutcome(
        statistic=gate.statistic,
        estimate=bounds.estimate,
        lower=bounds.lower,
        upper=bounds.upper,
        bound=gate.bound,
        harm=gate.harm,
        floor=_floor(spec, samples, gate, contrast),
        p_bound=bounds.p_bound,
        p_harm=bounds.p_harm,
        met=bounds.upper <= gate.bound,
        harmed=bounds.lower > gate.harm,
        method=bounds.method,
    )


# ---------------------------------------------------------------- a contrast, a spec


def _assess(spec: Spec, result: Result, samples: Samples, harness: Harness, contrast: Contrast) -> Decision | list[GateOutcome]:
    """A decision where the contrast cannot be judged, else its gates."""

    def invalid(reason: str, status: str = "invalid", gates: Sequence[GateOutcome] = ()) -> Decision:
        return Decision(
            candidate=contrast.candidate,
            baseline=contrast.baseline,
            family=contrast.family,
            status="unsupported" if status == "unsupported" else "invalid",
            reason=reason[:8000],
            gates=tuple(gates),
        )

    refused = _refusal(spec, result, samples, harness, contrast)
    if refused is not None:
        return invalid(refused[1], refused[0])
    gates = []
    for gate in spec.family(contrast.family).gates:
        outcome = _judge(spec, samples, gate, contrast)
        if isinstance(outcome, str):
            return invalid(outcome)
        gates.append(outcome)
    for outcome in gates:
        if outcome.floor is not None and abs(outcome.bound) < outcome.floor:
            return invalid(
                f"floor exceeded: {outcome.statistic} has the bound {outcome.bound:g}, but {_repeat(spec, contrast.baseline)} "
                f"alone differs from {contrast.baseline} by {outcome.floor:.4g}",
                gates=gates,
            )
    return gates


def _conclude(contrast: Contrast, family: Family, gates: Sequence[GateOutcome], p_bound: float | None, p_harm: Sequence[float]) -> Decision:
    """``p_bound`` and ``p_harm`` (one a gate with statistics, in order) are adjusted."""
    alpha = 1 - family.confidence
    statistical = [gate for gate in gates if gate.p_harm is not None]
    exact = [gate for gate in gates if gate.p_harm is None]
    unmet = [f"{g.statistic}: upper bound {g.upper:.4g} is above {g.bound:g} (estimate {g.estimate:.4g})" for g in gates if not g.met]
    met = "; ".join(f"{g.statistic}: upper bound {g.upper:.4g} is at most {g.bound:g}" for g in gates)
    harm = [
        f"{g.statistic}: lower bound {g.lower:.4g} is above the harm {g.harm:g} (estimate {g.estimate:.4g}, adjusted p {p:.2g})"
        for g, p in zip(statistical, p_harm, strict=True)
        if g.harmed and p <= alpha
    ] + [f"{g.statistic}: {g.estimate:.4g} is above the harm {g.harm:g}" for g in exact if g.harmed]
    if not statistical:
        status, reason = ("fails", "; ".join(unmet)) if unmet else ("passes", met)
        reason = reason.replace("upper bound", "largest difference")
    elif harm:
        status, reason = "degraded", "; ".join(harm)
    elif unmet:
        weak = [f"{g.statistic}: harm is seen, but not after Holm's correction" for g in statistical if g.harmed]
        status, reason = "not established", "; ".join(unmet + weak)
    elif p_bound is not None and p_bound > alpha:
        status, reason = "not established", f"every bound is met alone, but not after Holm's correction (adjusted p {p_bound:.2g})"
    else:
        status, reason = "established", met
    return Decision(
        candidate=contrast.candidate,
        baseline=contrast.baseline,
        family=contrast.family,
        status=status,  # type: ignore[arg-type]
        reason=reason[:8000],
        p_bound=p_bound,
        p_harm=min(p_harm, default=None),
        gates=tuple(gates),
    )


def decide(spec: Spec, result: Result, samples: Samples, harness: Harness) -> tuple[Decision, ...]:
    """One decision a contrast, in the order of the spec. Bounds come from the spec alone."""
    assessed = [_assess(spec, result, samples, harness, contrast) for contrast in spec.contrasts]
    # Every hypothesis of the spec takes part in Holm's correction, those that could not be judged with p = 1.
    bounds: dict[int, float] = {}
    harms: dict[tuple[int, int], float] = {}
    for at, (contrast, found) in enumerate(zip(spec.contrasts, assessed, strict=True)):
        frozen = [gate for gate in spec.family(contrast.family).gates if gate.statistic != "bit_equal"]
        judged = [] if isinstance(found, Decision) else [gate for gate in found if gate.p_bound is not None]
        if frozen:
            bounds[at] = max((gate.p_bound or 0.0 for gate in judged), default=1.0)
            harms |= {(at, number): 1.0 if not judged else judged[number].p_harm or 0.0 for number in range(len(frozen))}
    p_bound = dict(zip(bounds, holm(list(bounds.values())), strict=True))
    p_harm = dict(zip(harms, holm(list(harms.values())), strict=True))
    return tuple(
        found
        if isinstance(found, Decision)
        else _conclude(contrast, spec.family(contrast.family), found, p_bound.get(at), [p for (of, _), p in p_harm.items() if of == at])
        for at, (contrast, found) in enumerate(zip(spec.contrasts, assessed, strict=True))
    )
