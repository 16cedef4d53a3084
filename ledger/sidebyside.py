"""Two runs side by side: which facts, figures and verdicts differ. Pure, over the documents of ``queries.run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ledger import digest

_ARM_FACTS = ("outcome", "reason", "effective", "measured", "backends", "census", "geometry", "contradictions")


def _leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Dotted name and value of every leaf. A list is one leaf, so is a tagged number; an empty object has none."""
    if isinstance(value, dict) and set(value) != {"number"}:
        for key, item in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value


def _facts(document: Mapping[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in document["spec"].items() if key not in ("arms", "checkpoint", "format")}
    kernels = {of: found["kernel"] or f"refused: {found['refused']}" for of, found in document["groups"].items()}
    arms = {arm["name"]: {"requested": arm["requested"], **{key: arm.get(key) for key in _ARM_FACTS}} for arm in document["arms"]}
    bytes_held = {
        arm["name"]: {
            "backings": len(arm["backings"]),
            "backing_bytes": digest.jsonable(sum(digest.untagged(found["bytes"]) for found in arm["backings"])),
        }
        for arm in document["arms"]
    }
    chosen = {
        "outcome": document["outcome"],
        "reason": document["reason"],
        "spec": spec,
        "checkpoint": document["checkpoint"],
        "tokenizer": document["tokenizer"],
        "documents": [found["sha256"] for found in document["documents"]],
        "harness": document["harness"],
        "host": document["host"],
        "peak_memory_bytes": document["peak_memory_bytes"],
        "arms": {name: {**facts, **bytes_held[name]} for name, facts in arms.items()},
        "kernels": kernels,
    }
    return dict(_leaves("", chosen))


def _figures(document: Mapping[str, Any]) -> dict[tuple[str, str, str | None], Mapping[str, Any]]:
    return {(arm["name"], found["name"], found["against"]): found for arm in document["arms"] for found in arm["measurements"]}


def _both(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> list[Any]:
    return [*left, *(key for key in right if key not in left)]


_HEAD = ("id", "sequence", "recorded_at", "study", "title", "model", "scope", "outcome")


def side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two documents of :func:`run`. Each fact and figure says whether the two ``differ``; absent is None."""
    left, right = _facts(a), _facts(b)
    facts = [
        {"name": name, "a": left.get(name), "b": right.get(name), "differ": left.get(name) != right.get(name)}
        for name in _both(left, right)
    ]
    ours, theirs = _figures(a), _figures(b)
    measurements = []
    for key in _both(ours, theirs):
        one, two = ours.get(key), theirs.get(key)
        arm, name, against = key
        values = one and one["value"], two and two["value"]
        known: Mapping[str, Any] = one or two or {}
        measurements.append(
            {
                "arm": arm,
                "name": name,
                "against": against,
                "unit": known["unit"],
                "a": values[0],
                "b": values[1],
                "differ": values[0] != values[1],
            }
        )
    verdicts = [
        {(found["candidate"], found["baseline"], found["family"]): found["status"] for found in document["decisions"]}
        for document in (a, b)
    ]
    decisions = [
        {
            "candidate": key[0],
            "baseline": key[1],
            "family": key[2],
            "a": verdicts[0].get(key),
            "b": verdicts[1].get(key),
            "differ": verdicts[0].get(key) != verdicts[1].get(key),
        }
        for key in _both(verdicts[0], verdicts[1])
    ]
    return {
        "a": {name: a[name] for name in _HEAD},
        "b": {name: b[name] for name in _HEAD},
        "same_spec": a["spec_digest"] == b["spec_digest"],
        "facts": facts,
        "measurements": measurements,
        "decisions": decisions,
    }
