"""The page of precision and scaling: a checkpoint's stored policies in one table, made from ``queries.precision_table``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ledger.web import words
from ledger.web.pages import Document, Page, RunLink, run_link
from ledger.web.words import Figure, Hash, Mark


@dataclass(frozen=True)
class SourceRun:
    """A run that figures come from, what they are, and the runs of its scope that are not shown."""

    gives: str
    link: RunLink
    setting: str
    others: tuple[RunLink, ...]


@dataclass(frozen=True)
class Line:
    """One line of a cell: a figure that leads to its run, under a label, with its interval below; or words in its place."""

    label: str
    href: str
    figure: Figure
    interval: str


@dataclass(frozen=True)
class Cell:
    """The lines under one heading; none where nothing was measured."""

    heading: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Verdict:
    """What a decision says: ``of`` which question, and of losses each gate, with its bound in full."""

    href: str
    mark: Mark
    of: str
    gates: tuple[Figure, ...]
    reason: str


@dataclass(frozen=True)
class PolicyRow:
    """One stored policy."""

    arm: str
    stored: str
    under: str
    against: str
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...]
    advantages: tuple[Verdict, ...]


@dataclass(frozen=True)
class PrecisionPage(Page):
    """The table of one checkpoint; without rows where no run of it stands."""

    model: str
    source: str
    checkpoint: Hash
    synthetic: str
    runs: tuple[SourceRun, ...]
    headings: tuple[str, ...]
    rows: tuple[PolicyRow, ...]


HEADINGS = (
    "Loss difference",
    "Spread",
    "KL, 99.9 %",
    "KL, mean",
    "Top-1 differs",
    "Answer kept",
    "Accuracy",
    "Keys",
    "Values",
    "State",
    "Scales",
    "In all",
)
_READINGS = ("strict", "flexible")


def _run_href(run: str) -> str:
    return f"/runs/{run}"


def _line(run: str, item: Any, unit: str, label: str = "") -> Line:
    """A figure of a document, with its interval where it has one."""
    held = item if isinstance(item, Mapping) and "value" in item else {"value": item, "lower": None, "upper": None}
    interval = ""
    if held["lower"] is not None and held["upper"] is not None:
        interval = f"{words.figure(held['lower']).text} to {words.figure(held['upper']).text}"
    return Line(label, _run_href(run), words.figure(held["value"], unit), interval)


def _losses(loss: Document | None) -> list[tuple[Line, ...]]:
    names = (("difference", "nats"), ("spread", "nats"), ("kl_p999", "nats"), ("kl_mean", "nats"), ("top1", "fraction"))
    if loss is None:
        return [()] * len(names)
    return [() if loss[name] is None else (_line(loss["run"], loss[name], unit),) for name, unit in names]


def _answers(task: Document | None) -> list[tuple[Line, ...]]:
    if task is None:
        return [(), ()]
    kept, accuracy = [], []
    for reading in _READINGS:
        found = task["readings"][reading]
        if found["preservation"] is not None:
            kept.append(_line(task["run"], found["preservation"], "fraction", reading))
        if found["status"] == "invalid":
            text = f"invalid: {found['reason'].partition(':')[0]}"
            accuracy.append(Line(reading, _run_href(task["run"]), Figure(text, found["reason"]), ""))
        elif found["difference"] is not None:
            accuracy.append(_line(task["run"], found["difference"], "fraction", reading))
    return [tuple(kept), tuple(accuracy)]


def _bytes(held: Document | None) -> list[tuple[Line, ...]]:
    if held is None:
        return [(), (), (), (), ()]
    run = held["run"]

    def side(name: str) -> tuple[Line, ...]:
        ratio = held.get(f"{name}_ratio")
        line = _line(run, held[name], "bytes")
        return (line if ratio is None else Line("", line.href, line.figure, f"{words.figure(ratio).text} of {held['of']}"),)

    found = [side(name) for name in ("keys", "values", "state", "scales")]
    whole = words.number(held["ratio"])
    total = f"{words.counted(held['tokens'], 'token')} held"
    beside = () if whole is None else (Line("", _run_href(run), words.figure(whole), f"of {held['of']}, {total}"),)
    return [*found, beside]


def _verdict(item: Document, synthetic: bool, of: str) -> Verdict:
    return Verdict(
        href=_run_href(item["run"]),
        mark=words.mark(("synthetic " if synthetic else "") + item["status"]),
        of=of,
        gates=tuple(
            Figure(
                f"{gate['statistic'].replace('_', ' ')}: {gate['verdict']}",
                f"at most {words.figure(gate['upper']).text}, bound {words.figure(gate['bound']).text}",
            )
            for gate in item.get("gates", ())
        ),
        reason=item["reason"],
    )


def _stored(policy: Document) -> tuple[str, str]:
    """What is stored, under which scales; and what runs it."""
    grain = "" if policy["granularity"] == "none" else f" by {policy['granularity'].replace('_', ' and ')}"
    source = f", calibration {policy['scale_source'][:10]}" if policy["scale_source"] else ""
    scales = "no scales" if policy["scales"] == "none" else f"{policy['scales']} scales{grain}{source}"
    ran = f"{policy['implementation']}, {policy['compute']} compute, {policy['backend']}"
    return f"K {policy['keys']} / V {policy['values']}, {scales}", ran


def _question(row: Document, item: Document, beside: str) -> str:
    """What a decision asks: the family, or the reading of a task's answers, and which arm it is beside."""
    task = row["task"]
    family = f"accuracy, {item['family']} reading" if task is not None and item["run"] == task["run"] else item["family"]
    return f"{family}, {beside}"


def _row(row: Document, synthetic: bool) -> PolicyRow:
    stored, under = _stored(row["policy"])
    verdicts = [_verdict(item, synthetic, _question(row, item, f"against {item['against']}")) for item in row["gates"]]
    if row["task"] is not None:
        readings = ((name, row["task"]["readings"][name]) for name in _READINGS)
        verdicts += [
            _verdict({**found, "run": row["task"]["run"]}, synthetic, f"accuracy, {name} reading, against {row['baseline']}")
            for name, found in readings
            if found["status"] is not None
        ]
    lines = [*_losses(row["loss"]), *_answers(row["task"]), *_bytes(row["bytes"])]
    return PolicyRow(
        arm=row["arm"],
        stored=stored,
        under=under + ("; the control once more: the floor" if row["role"] == "repeat" else ""),
        against="" if row["baseline"] is None else f"{row['baseline']}: {', '.join(_stored(row['baseline_policy']))}",
        cells=tuple(Cell(heading, each) for heading, each in zip(HEADINGS, lines, strict=True)),
        verdicts=tuple(verdicts),
        advantages=tuple(_verdict(item, synthetic, _question(row, item, f"over {item['over']}")) for item in row["advantages"]),
    )


def precision_page(document: Document) -> PrecisionPage:
    """The page of ``queries.precision_table``."""
    gives = {"loss": ("losses, KL, top-1 and bytes", "documents", "document"), "task": ("answers and accuracy", "items", "item")}
    runs = []
    for name, (what, count, one) in gives.items():
        run = document["runs"][name]
        if run is not None:
            setting = f"study {run['study']}, {words.counted(run[count], one)}, {run['hardware']}"
            runs.append(SourceRun(what, run_link(run["run"]), setting, tuple(run_link(other) for other in run["others"])))
    synthetic = bool(document["synthetic"])
    return PrecisionPage(
        title=f"Precision and scaling: {document['model']}",
        section="status",
        twin=f"/precision/{document['checkpoint']}.json",
        model=document["model"],
        source=document["source"] or "",
        checkpoint=Hash(document["checkpoint"][:10], document["checkpoint"]),
        synthetic=words.SYNTHETIC if synthetic else "",
        runs=tuple(runs),
        headings=HEADINGS,
        rows=tuple(_row(row, synthetic) for row in document["rows"]),
    )
