"""What must hold before anything is judged: the run ended, its arms did what was asked, and the code that ran is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ledger.records import Arm, ArmResult, Backing, Geometry, Harness, Result, Spec, Status

_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1}
_FIELDS = ("implementation", "compute", "keys", "values", "scales", "granularity")


def contradictions(arm: Arm, result: ArmResult, *, whole: bool = True) -> list[str]:
    """Where requested, effective and measured policy differ: one clause a field, naming it and both values.

    What a runner could not know may be absent, but not the stored formats: ``keys`` and ``values`` must have been measured.
    The dtype of every backing that holds keys or values counts as measured, whatever word it is. Declared and measured
    geometry must agree, and an arm that completed must have measured both it and its backings. Where attention backends
    were accepted, the one that was asked for must be among them.

    ``whole`` is False for scopes that make a cache anew for every case or check: backings and geometry may then be absent,
    and only fused arms must have measured the formats that they store.
    """
    found = []
    for field in _FIELDS:
        requested = str(getattr(arm, field))
        sources: Sequence[tuple[str, Mapping[str, str]]] = (("effective", result.effective), ("measured", result.measured))
        for source, policy in sources:
            if policy.get(field, requested) != requested:
                found.append(f"{field}: requested {requested}, {source} {policy[field]}")
        if field in ("keys", "values"):
            if field not in result.measured and (whole or arm.implementation == "fused"):
                found.append(f"{field}: requested {requested}, not measured")
            stored = {b.dtype for b in result.backings if b.holds == field and b.kind != "scales"}
            found += [f"{field}: requested {requested}, backing holds {dtype}" for dtype in sorted(stored - {requested})]
    ran = [backend.name for backend in result.backends if backend.accepted]
    if ran and arm.backend not in ran:  # refused, and another took its place without a word
        found.append(f"backend: requested {arm.backend}, accepted {', '.join(ran)}")
    completed = result.outcome == "completed" and whole
    if completed and not result.backings:
        found.append("backings: none were measured")
    if completed and result.geometry is None:
        found.append("geometry: not measured")
    if result.geometry is not None and result.geometry.declared != result.geometry.measured:
        found.append(f"geometry: {_geometry_difference(result.geometry)}")
    elif result.geometry is not None:
        found += _too_small(result.geometry, result.backings)
    return found


def _too_small(geometry: Geometry, backings: Sequence[Backing]) -> list[str]:
    """Backings with fewer bytes than their tokens, heads and dimensions need. More is no contradiction: it is shown."""
    found = []
    layers = {layer.layer: layer for layer in geometry.measured}
    for backing in backings:
        if backing.holds not in ("keys", "values") or backing.dtype not in _WIDTH or not set(backing.layers) <= set(layers):
            continue
        held = [layers[name] for name in backing.layers]
        values = sum(layer.kv_heads * (layer.key_dim if backing.holds == "keys" else layer.value_dim) for layer in held)
        needed = values * backing.tokens * _WIDTH[backing.dtype]
        if backing.bytes < needed:
            found.append(f"{backing.holds}: {backing.bytes} bytes for layers {backing.layers}, whose states need {needed}")
    return found


def _geometry_difference(geometry: Geometry) -> str:
    if len(geometry.declared) != len(geometry.measured):
        return f"declared {len(geometry.declared)} layers, measured {len(geometry.measured)}"
    declared, measured = next((d, m) for d, m in zip(geometry.declared, geometry.measured, strict=True) if d != m)
    field = next(name for name in declared.__struct_fields__ if getattr(declared, name) != getattr(measured, name))
    return f"layer {declared.layer}: declared {field} {getattr(declared, field)}, measured {getattr(measured, field)}"


def refusal(spec: Spec, result: Result, harness: Harness, arms: Sequence[str]) -> tuple[Status, str] | None:
    """Status and reason where nothing can be said of ``arms``; None where something can."""
    if result.outcome != "completed":
        outcome = "was killed" if result.outcome == "running" else f"was {result.outcome}" if result.outcome == "interrupted" else "failed"
        return "invalid", f"the run {outcome}" + (f": {result.reason}" if result.reason else "")
    outcomes = {arm.name: arm for arm in result.arms}
    for name in arms:
        if name in outcomes and outcomes[name].outcome == "refused":
            return "unsupported", f"arm {name} was refused: {outcomes[name].reason}"
    for name in arms:
        if name not in outcomes:
            return "invalid", f"missing evidence: the result says nothing of arm {name}"
        if outcomes[name].outcome == "failed":
            return "invalid", f"arm {name} failed: {outcomes[name].reason}"
    for name in arms:
        wrong = contradictions(spec.arm(name), outcomes[name], whole=spec.workload is not None or spec.task is not None)
        if wrong:
            return "invalid", f"arm {name} did not do what was asked: " + "; ".join(wrong)
    if harness.matched == "none":
        return "invalid", "the harness is unmatched: the sources that ran are found at no commit and in no distribution"
    return None
