"""Precision and scaling: what one checkpoint's runs of loss and of a task say, in one table. Pure, over the documents of ``queries.run``.

A row is a stored policy beside that of its baseline: what an arm keeps, in which format, under which scales (their calibration
included), in which implementation and compute dtype. The figures of a task stand beside those of losses where both policies are
one, whatever the arms are called; an arm that a run compares with no baseline has no figure there, and joins any row of its policy.
All of a row are of one checkpoint, the alteration of its weights included, and of one kind of device where they are seeded, while
text, questions and hardware are those of each run, which is named beside each figure. Chunks are no part of the row: under dynamic
scales of a tensor or a head they decide the scale, and each run's own page says them.

    {"model", "checkpoint", "source", "synthetic",
     "runs": {"loss": {"run", "study", "hardware", "documents", "others"},                  None where there is none
              "task": {"run", "study", "hardware", "items", "others"}},
     "rows": [{"arm", "role", "policy", "baseline": name, "baseline_policy",                None where an arm is compared with none
               "loss": {"run", "difference", "spread", "kl_p999", "kl_mean", "top1"},   figures: {"value", "lower", "upper"}
               "gates": [{"run", "against", "family", "status", "reason", "gates": [{"statistic", "verdict", "upper", "bound"}]}],
               "advantages": [{"run", "over", "family", "status", "reason", "gates"}],
               "task": {"run", "readings": {"strict": {"preservation", "difference", "status", "reason"}, "flexible": {…}}},
               "bytes": {"run", "tokens", "keys", "values", "state", "scales",
                         "of": name, "ratio", "keys_ratio", "values_ratio"}}]}

Every decision on an arm stands in its row, whatever it is against: the task's against the row's baseline under ``readings``, those
of a family whose bounds are all below zero, which asks for less than the other has, under ``advantages``, the rest under ``gates``.
``ratio`` is of all bytes, the state of recurrent layers included, to the baseline's at the same number of tokens.

A run is chosen by what it covers and never by what it says: of each scope the completed one of known sources in which most 8-bit
arms ran to their end, among equals the first recorded, so that to repeat one changes nothing here; the others are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ledger import digest, measures, records

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

    Each has ``covered``, how many of its 8-bit arms ran to their end.
    """
    best = max(runs, key=lambda run: run["covered"], default=None)
    return best, [run for run in runs if run is not best]


def joined(loss: Document | None, task: Document | None) -> list[Row]:
    """The rows: those of the losses in the order of their arms, then those that only the task has."""
    rows: list[Row] = []
    apart = loss is not None and task is not None and _drawn_on(loss) != _drawn_on(task)
    for name, document in (("loss", loss), ("task", task)):
        for row in [] if document is None else _rows(document, name):
            # a second arm of one policy, such as one of another chunk, is a row of its own
            alike = [each for each in rows if name not in each and not apart and _alike(each, row)]
            if not alike:
                rows.append(row)
                continue
            held = min(alike, key=lambda each: bool(each["arm"] != row["arm"]))
            held[name] = row[name]
            for decisions in ("gates", "advantages"):
                held[decisions] = [*held[decisions], *row[decisions]]
            held["bytes"] = held["bytes"] or row["bytes"]
            if held["baseline"] is None and row["baseline"] is not None:
                held |= {field: row[field] or held[field] for field in ("baseline", "baseline_policy", "bytes")}
    return [{"loss": None, "task": None, **row} for row in rows]


def _drawn_on(document: Document) -> str:
    """The kind of device where seeded weights were drawn, which are others on another; an empty string where a file gives them."""
    return str(document["spec"].get("device", "cpu")) if document["spec"]["checkpoint"].get("config") is not None else ""


def _alike(one: Row, other: Row) -> bool:
    """Whether two rows are of one policy, to a baseline of one policy where both have one."""
    if (one["role"] == "repeat", one["policy"]) != (other["role"] == "repeat", other["policy"]):
        return False
    return one["baseline"] is None or other["baseline"] is None or bool(one["baseline_policy"] == other["baseline_policy"])


def _rows(document: Document, name: str) -> Iterable[Row]:
    asked = {arm["name"]: arm for arm in document["spec"]["arms"]}
    ahead = {family["name"] for family in document["spec"]["families"] if all(_bound(gate) < 0 for gate in family["gates"])}
    for arm in document["arms"]:
        ask = asked[arm["name"]]
        decisions = [item for item in document["decisions"] if item["candidate"] == arm["name"]]
        controls = (item["baseline"] for item in decisions if asked[item["baseline"]]["role"] == "control")
        baseline = ask["repeats"] or next(controls, None)
        figures = {item["name"]: item for item in arm["measurements"] if item["against"] == baseline}
        read = {item["family"]: item for item in decisions if name == "task" and item["baseline"] == baseline}
        others = [item for item in decisions if item not in read.values()]
        row: Row = {
            "arm": arm["name"],
            "role": ask["role"],
            "policy": _policy(ask),
            "baseline": baseline,
            "baseline_policy": None if baseline is None else _policy(asked[baseline]),
            "gates": [_judged(document, item, "against") for item in others if item["family"] not in ahead],
            "advantages": [_judged(document, item, "over") for item in others if item["family"] in ahead],
            "bytes": _bytes(document, arm, baseline),
        }
        if name == "loss":
            row["loss"] = {"run": document["id"], **{key: _figure(figures.get(figure)) for key, figure in _LOSS.items()}}
        else:
            row["task"] = {"run": document["id"], "readings": {reading: _read(reading, figures, read) for reading in READINGS}}
        yield row


def _policy(ask: Document) -> Row:
    return {field: ask[field] for field in POLICY}


def _bound(gate: Document) -> float:
    return float(digest.untagged(gate["bound"]))


def _figure(item: Document | None) -> Row | None:
    return None if item is None else {key: item[key] for key in ("value", "lower", "upper")}


def _judged(document: Document, decision: Document, word: str) -> Row:
    """A decision with its gates; ``word`` names the arm that it is against."""
    gates = [
        {
            "statistic": gate["statistic"],
            "verdict": "harm" if gate["harmed"] else "met" if gate["met"] else "not met",
            "upper": gate["upper"],
            "bound": gate["bound"],
        }
        for gate in decision["gates"]
    ]
    said = {key: decision[key] for key in ("family", "status", "reason")}
    return {"run": document["id"], word: decision["baseline"], **said, "gates": gates}


def _read(reading: str, figures: Mapping[str, Document], verdicts: Mapping[str, Document]) -> Row:
    decision = verdicts.get(reading)
    return {
        "preservation": _figure(figures.get(f"{reading}/answer_preservation")),
        "difference": _figure(figures.get(f"{reading}/accuracy_difference")),
        "status": None if decision is None else decision["status"],
        "reason": "" if decision is None else decision["reason"],
    }


def _held(arm: Document) -> dict[str, int]:
    """An arm's bytes and tokens, as :func:`ledger.measures.held` counts them."""
    plain = ({field: digest.untagged(value) for field, value in backing.items()} for backing in arm["backings"])
    return measures.held(records.convert(records.Backing, backing, "a backing of a run") for backing in plain)


def _bytes(document: Document, arm: Document, baseline: str | None) -> Row | None:
    """What an arm's cache takes, keys and values apart, and beside what its baseline takes at the same number of tokens."""
    if not arm["backings"]:
        return None
    own = _held(arm)
    other = next((_held(each) for each in document["arms"] if each["name"] == baseline), None)
    sides: dict[str, tuple[str, ...]] = {"ratio": measures.SIDES, "keys_ratio": ("keys",), "values_ratio": ("values",)}
    ratios: dict[str, float | None] = dict.fromkeys(sides)
    if other is not None and other["tokens"] == own["tokens"]:
        for name, those in sides.items():
            theirs = sum(other[side] for side in those)
            ratios[name] = sum(own[side] for side in those) / theirs if theirs else None
    return {"run": document["id"], **own, "of": baseline, **ratios}
