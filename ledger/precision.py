"""Precision and scaling: what one checkpoint's runs of loss and of a task say, in one table. Pure, over the documents of ``queries.run``.

A row is a stored policy: what an arm keeps, in which format, under which scales (their calibration included), in which
implementation and compute dtype. The figures of a task stand beside those of losses where the policy is one; all of a row are
of one checkpoint, the alteration of its weights included, while text, questions and hardware are those of each run, which is
named beside each figure. Chunks are no part of the row: under dynamic scales of a tensor or a head they decide the scale, and
each run's own page says them.

    {"model", "checkpoint", "synthetic",
     "runs": {"loss": {"run", "study", "hardware", "others"}, "task": {…, "items"}},        None where there is none
     "rows": [{"arm", "role", "policy", "baseline",
               "loss": {"run", "difference", "spread", "kl_p999", "kl_mean", "top1"},   figures: {"value", "lower", "upper"}
               "gates": [{"run", "family", "status", "reason", "gates": [{"statistic", "verdict", "upper", "bound"}]}],
               "advantages": [{"run", "over", "family", "status", "reason", "gates"}],
               "task": {"run", "readings": {"strict": {"preservation", "difference", "status", "reason"}, "flexible": {…}}},
               "bytes": {"run", "tokens", "keys", "values", "scales", "of": name, "ratio", "keys_ratio", "values_ratio"}}]}

A run is chosen by what it covers and never by what it says: of each scope the completed one of most 8-bit policies, among
equals the first recorded, so that to repeat one changes nothing here; the others are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ledger import digest

Document = Mapping[str, Any]
Row = dict[str, Any]

SCOPES = {"loss": "quality.loss", "task": "quality.task"}
"""The runs that a table is made of, and their scopes."""
POLICY = ("implementation", "compute", "keys", "values", "scales", "granularity", "scale_source", "backend")
"""What a row is about."""
READINGS = ("strict", "flexible")

_LOSS = {
    "difference": "loss_difference_mean",
    "spread": "loss_difference_sd",
    "kl_p999": "kl_p999",
    "kl_mean": "kl_mean",
    "top1": "top1_disagreement",
}


def chosen(runs: Sequence[Document]) -> tuple[Document | None, list[Document]]:
    """Of the runs of one scope and checkpoint, in the order of the log, the one that the table shows, and the others.

    Each has ``policies``, how many 8-bit policies its spec has.
    """
    best = max(runs, key=lambda run: run["policies"], default=None)
    return best, [run for run in runs if run is not best]


def joined(loss: Document | None, task: Document | None) -> list[Row]:
    """The rows: those of the losses in the order of their arms, then those that only the task has."""
    found: dict[tuple[Any, ...], Row] = {}
    for name, document in (("loss", loss), ("task", task)):
        for row in [] if document is None else _rows(document, name):
            key = (row["role"] == "repeat", *row["policy"].values())
            if name in found.get(key, ()):  # a second arm of one policy, such as one of another chunk: a row of its own
                key = (*key, row["arm"])
            held = found.setdefault(key, row)
            if held is row:
                continue
            held[name] = row[name]
            held["advantages"] = [*held["advantages"], *row["advantages"]]
            held["bytes"] = held["bytes"] or row["bytes"]
            held["baseline"] = held["baseline"] or row["baseline"]
    return [{"loss": None, "task": None, **row} for row in found.values()]


def _rows(document: Document, name: str) -> Iterable[Row]:
    asked = {arm["name"]: arm for arm in document["spec"]["arms"]}
    controls = {arm["name"] for arm in asked.values() if arm["role"] == "control"}
    for arm in document["arms"]:
        ask = asked[arm["name"]]
        decisions = [item for item in document["decisions"] if item["candidate"] == arm["name"]]
        against = [item for item in decisions if item["baseline"] in controls]
        baseline = ask["repeats"] or next((item["baseline"] for item in against), None)
        row: Row = {
            "arm": arm["name"],
            "role": ask["role"],
            "policy": {field: ask[field] for field in POLICY},
            "baseline": baseline,
            "gates": [],
            "advantages": [{**_judged(document, item), "over": item["baseline"]} for item in decisions if item not in against],
            "bytes": _bytes(document, arm, baseline),
        }
        figures = {item["name"]: item for item in arm["measurements"] if item["against"] == baseline}
        if name == "loss":
            row["gates"] = [_judged(document, item) for item in against if item["baseline"] == baseline]
            row["loss"] = {"run": document["id"], **{key: _figure(figures.get(figure)) for key, figure in _LOSS.items()}}
        else:
            verdicts = {item["family"]: item for item in against if item["baseline"] == baseline}
            row["task"] = {"run": document["id"], "readings": {reading: _read(reading, figures, verdicts) for reading in READINGS}}
        yield row


def _figure(item: Document | None) -> Row | None:
    return None if item is None else {key: item[key] for key in ("value", "lower", "upper")}


def _judged(document: Document, decision: Document) -> Row:
    gates = [
        {
            "statistic": gate["statistic"],
            "verdict": "harm" if gate["harmed"] else "met" if gate["met"] else "not met",
            "upper": gate["upper"],
            "bound": gate["bound"],
        }
        for gate in decision["gates"]
    ]
    return {"run": document["id"], **{key: decision[key] for key in ("family", "status", "reason")}, "gates": gates}


def _read(reading: str, figures: Mapping[str, Document], verdicts: Mapping[str, Document]) -> Row:
    decision = verdicts.get(reading)
    return {
        "preservation": _figure(figures.get(f"{reading}/answer_preservation")),
        "difference": _figure(figures.get(f"{reading}/accuracy_difference")),
        "status": None if decision is None else decision["status"],
        "reason": "" if decision is None else decision["reason"],
    }


def _held(arm: Document) -> dict[str, int]:
    """Bytes of keys, values and scales as allocated, and tokens held; an allocation counts once."""
    found = {"keys": 0, "values": 0, "scales": 0, "tokens": 0}
    seen: dict[Any, Any] = {}
    for backing in arm["backings"]:
        side = "scales" if backing["kind"] == "scales" else str(backing["holds"])
        address = str(digest.untagged(backing["address"]))
        if side in found and address not in seen:
            seen[address] = None
            found[side] += int(digest.untagged(backing["bytes"]))
            found["tokens"] = max(found["tokens"], int(digest.untagged(backing["tokens"])))
    return found


def _bytes(document: Document, arm: Document, baseline: str | None) -> Row | None:
    """What an arm's cache takes, keys and values apart, and beside what its baseline takes at the same number of tokens."""
    if not arm["backings"]:
        return None
    own = _held(arm)
    other = next((_held(each) for each in document["arms"] if each["name"] == baseline), None)
    sides: dict[str, tuple[str, ...]] = {"ratio": ("keys", "values", "scales"), "keys_ratio": ("keys",), "values_ratio": ("values",)}
    ratios: dict[str, float | None] = dict.fromkeys(sides)
    if other is not None and other["tokens"] == own["tokens"]:
        for name, those in sides.items():
            theirs = sum(other[side] for side in those)
            ratios[name] = sum(own[side] for side in those) / theirs if theirs else None
    return {"run": document["id"], **own, "of": baseline, **ratios}
