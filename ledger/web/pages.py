"""What the templates are given: one frozen dataclass a page, made from the documents of :mod:`ledger.queries`.

Templates decide nothing and compute nothing; every word, number and address that a page shows is made here.
The page of one run is in :mod:`ledger.web.runpage`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ledger.errors import LedgerError
from ledger.web import words
from ledger.web.words import Figure, Hash, Mark

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Page:
    """What every page has: its ``title``, which ``section`` of the navigation it belongs to, and its JSON ``twin``."""

    title: str
    section: str
    twin: str


@dataclass(frozen=True)
class RunLink:
    """A link to the page of one run."""

    href: str
    hash: Hash


def run_link(digest: str) -> RunLink:
    """The link to a run's page."""
    return RunLink(f"/runs/{digest}", Hash(digest[:10], digest))


# ---------------------------------------------------------------- status


@dataclass(frozen=True)
class StatusRow:
    """One claim: what was tested, on what, and what came of it."""

    anchor: str
    arm: str
    baseline: str
    scope: str
    workload: str
    hardware: str
    study: str
    mark: Mark
    reason: str
    runs: tuple[RunLink, ...]


@dataclass(frozen=True)
class CheckpointGroup:
    """The claims on one checkpoint of a model. ``revision`` is the hub's, or else the digest of what makes the checkpoint itself.

    ``table`` is the address of its table of precision and scaling, empty where no claim is of losses or of a task.
    """

    source: str
    revision: Hash
    revision_of: str
    synthetic: bool
    table: str
    rows: tuple[StatusRow, ...]


@dataclass(frozen=True)
class ModelGroup:
    """The claims on one model."""

    model: str
    anchor: str
    checkpoints: tuple[CheckpointGroup, ...]


@dataclass(frozen=True)
class Tally:
    """How many rows have one outcome."""

    mark: Mark
    count: str


@dataclass(frozen=True)
class RecipeClaim:
    """A claim beside a recipe; ``href`` leads to its row."""

    scope: str
    href: str
    hash: Hash
    against: str
    mark: Mark
    workload: str
    hardware: str


@dataclass(frozen=True)
class LinkedHash:
    """A digest and where its bytes are."""

    href: str
    hash: Hash
    name: str


@dataclass(frozen=True)
class RecipeView:
    """A recipe as far as its claims reach: those that it cites, and those on the same checkpoint and policy that it does not."""

    anchor: str
    name: str
    title: str
    record: LinkedHash
    mark: Mark
    reason: str
    model: str
    checkpoint: Hash
    policy: str
    steps: tuple[str, ...]
    needs: tuple[str, ...]
    lock: LinkedHash | None
    claims: tuple[RecipeClaim, ...]
    beside: tuple[RecipeClaim, ...]


@dataclass(frozen=True)
class FactRow:
    """One thing that a document outside says. ``outcome`` is the document's own word, and ``meaning`` what that says."""

    model: str
    policy: str
    scope: str
    mark: Mark
    outcome: str
    meaning: str
    says: str


@dataclass(frozen=True)
class ReportView:
    """A document outside and what it says; nothing of it is evidence. ``copy`` is None where its bytes are not kept."""

    anchor: str
    title: str
    place: str
    digest: str
    size: str
    license: str
    copy: LinkedHash | None
    record: LinkedHash
    withdrawn: str
    facts: tuple[FactRow, ...]


@dataclass(frozen=True)
class StatusPage(Page):
    """The status table, grouped by model and checkpoint, with the legend of its words; apart from it recipes, and what was reported."""

    summary: str
    models: tuple[ModelGroup, ...]
    tallies: tuple[Tally, ...]
    recipes: tuple[RecipeView, ...]
    reports: tuple[ReportView, ...]
    legend: tuple[Mark, ...]
    of_recipes: tuple[Mark, ...]
    synthetic: str


def _status_row(row: Document) -> StatusRow:
    return StatusRow(
        anchor=f"claim-{row['key'][:16]}",
        arm=row["arm"],
        baseline=row["baseline"],
        scope=row["scope"],
        workload=row["workload"],
        hardware=row["hardware"],
        study=row["study"],
        mark=words.mark(row["claim"]),
        reason=row["reason"],
        runs=tuple(run_link(run) for run in row["runs"]),
    )


def _checkpoint_group(rows: Sequence[Document]) -> CheckpointGroup:
    first = rows[0]
    revision = first.get("revision")
    return CheckpointGroup(
        source=first.get("source") or "",
        revision=words.hash_of(revision or first["checkpoint"]) or Hash("", ""),
        revision_of="hub revision" if revision else "checkpoint digest",
        synthetic=any(row["claim"].startswith("synthetic ") for row in rows),
        table=f"/precision/{first['checkpoint']}" if any(row["scope"] in ("quality.loss", "quality.task") for row in rows) else "",
        rows=tuple(_status_row(row) for row in rows),
    )


def _groups(rows: Sequence[Document], key: str) -> list[list[Document]]:
    found: dict[str, list[Document]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return list(found.values())


def _object(digest: str, name: str) -> LinkedHash:
    return LinkedHash(f"/objects/{digest}", Hash(digest[:10], digest), name)


def _recipe_claims(rows: Sequence[Document]) -> tuple[RecipeClaim, ...]:
    return tuple(
        RecipeClaim(
            scope=row["scope"],
            href=f"#claim-{row['key'][:16]}",
            hash=Hash(row["key"][:10], row["key"]),
            against=row["baseline"].partition(":")[0],
            mark=words.mark(row["claim"]),
            workload=row["workload"],
            hardware=row["hardware"],
        )
        for row in rows
    )


def _recipe(row: Document) -> RecipeView:
    policy = row["policy"]
    scales = "" if policy["scales"] == "none" else f", {policy['scales']} scales"
    grain = "" if policy["granularity"] == "none" else f" by {policy['granularity']}"
    source = f" from {policy['scale_source'][:10]}" if policy["scale_source"] else ""
    formats = f"K {policy['keys']} / V {policy['values']}{scales}{grain}{source}"
    return RecipeView(
        anchor=f"recipe-{row['recipe'][:16]}",
        name=row["name"],
        title=row["title"],
        record=_object(row["recipe"], "record"),
        mark=words.mark(row["word"]),
        reason=row["reason"],
        model=row["model"],
        checkpoint=Hash(row["checkpoint"][:10], row["checkpoint"]),
        policy=f"{formats}, {policy['implementation']}, {policy['compute']} compute",
        steps=tuple(row["steps"]),
        needs=tuple(f"{item['name']}=={item['version']}, sha256 {' or '.join(item['sha256'])}" for item in row["requirements"]),
        lock=_object(row["lock"]["sha256"], row["lock"]["name"]) if row["lock"] else None,
        claims=_recipe_claims(row["claims"]),
        beside=_recipe_claims(row["beside"]),
    )


def _report(rows: Sequence[Document]) -> ReportView:
    first, of = rows[0], rows[0]["document"]
    return ReportView(
        anchor=f"report-{first['report'][:16]}",
        title=of["title"],
        place=of["place"],
        digest=of["sha256"],
        size=f"{of['size']:,} bytes",
        license=of["license"] or "not known",
        copy=_object(of["sha256"], "document") if of["kept"] else None,
        record=_object(first["report"], "record"),
        withdrawn=first["reason"],
        facts=tuple(
            FactRow(
                model=row["model"],
                policy=row["policy"],
                scope=row["scope"],
                mark=words.mark(row["status"]),
                outcome=row["outcome"],
                meaning=words.REPORTED[row["outcome"]],
                says=row["says"],
            )
            for row in rows
        ),
    )


def status_page(document: Document) -> StatusPage:
    """The page of ``queries.status``."""
    rows: Sequence[Document] = document["rows"]
    models = tuple(
        ModelGroup(
            model=of_model[0]["model"],
            anchor=f"model-{index}",
            checkpoints=tuple(_checkpoint_group(of_checkpoint) for of_checkpoint in _groups(of_model, "checkpoint")),
        )
        for index, of_model in enumerate(_groups(rows, "model"))
    )
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["claim"]] = counts.get(row["claim"], 0) + 1
    every = [*words.MEANINGS, *(f"synthetic {status}" for status in words.MEANINGS)]  # never counted together
    runs = {run for row in rows for run in row["runs"]}
    reports = _groups(document.get("reported", ()), "report")
    apart = f" {words.counted(len(reports), 'document')} outside {'says' if len(reports) == 1 else 'say'} more, without evidence here."
    return StatusPage(
        title="Status",
        section="status",
        twin="/status.json",
        summary=(f"{words.counted(len(rows), 'claim')} on {words.counted(len(models), 'model')}, from {words.counted(len(runs), 'run')}.")
        + (apart if reports else ""),
        models=models,
        tallies=tuple(Tally(words.mark(claim), str(counts[claim])) for claim in every if claim in counts),
        recipes=tuple(_recipe(row) for row in document.get("recipes", ())),
        reports=tuple(_report(of_report) for of_report in reports),
        legend=words.legend(),
        of_recipes=words.legend_of_recipes() if document.get("recipes") else (),
        synthetic=words.SYNTHETIC,
    )


_COLUMNS = ("model", "checkpoint", "arm", "baseline", "scope", "workload", "hardware", "claim", "reason", "study")


def harmless(cell: str) -> str:
    """A spreadsheet cell that cannot be read as a formula: one that begins like a formula gets an apostrophe before it."""
    return f"'{cell}" if cell.lstrip(" ")[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") and cell else cell


def status_csv(document: Document) -> str:
    """The status table as CSV (RFC 4180), formulas neutralised."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([*_COLUMNS, "runs"])
    for row in document["rows"]:
        writer.writerow([harmless(str(row[column])) for column in _COLUMNS] + [" ".join(row["runs"])])
    return text.getvalue()


# ---------------------------------------------------------------- runs and log


@dataclass(frozen=True)
class RunRow:
    """One run in the list."""

    link: RunLink
    sequence: str
    recorded_at: str
    study: str
    title: str
    model: str
    scope: str
    hardware: str
    mark: Mark
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunsPage(Page):
    """All runs, newest first."""

    summary: str
    runs: tuple[RunRow, ...]


def _run_row(run: Document) -> RunRow:
    notes = []
    if run.get("retracted"):
        notes.append("retracted")
    if run.get("superseded_by"):
        notes.append(f"superseded by {run['superseded_by'][:10]}")
    if run.get("warnings"):
        notes.append(words.counted(run["warnings"], "warning"))
    return RunRow(
        link=run_link(run["id"]),
        sequence=str(run["sequence"]),
        recorded_at=words.instant(run["recorded_at"]),
        study=run["study"],
        title=run.get("title") or "",
        model=run["model"],
        scope=run["scope"],
        hardware=run.get("hardware") or "",
        mark=words.mark(run["outcome"]),
        notes=tuple(notes),
    )


def runs_page(runs: Sequence[Document]) -> RunsPage:
    """The page of ``queries.runs``."""
    newest = sorted(runs, key=lambda run: run["sequence"], reverse=True)
    return RunsPage("Runs", "runs", "/runs.json", words.counted(len(runs), "run") + ".", tuple(_run_row(run) for run in newest))


@dataclass(frozen=True)
class LogRow:
    """One entry of the log."""

    sequence: str
    kind: str
    record: Hash
    object_href: str
    recorded_at: str
    says: str
    run: RunLink | None


@dataclass(frozen=True)
class LogPage(Page):
    """The log, newest entry first, and its head."""

    size: str
    root: str
    head: str
    entries: tuple[LogRow, ...]


def log_page(document: Document) -> LogPage:
    """The page of ``queries.log``."""
    head = document["head"]
    return LogPage(
        title="Log",
        section="log",
        twin="/log.json",
        size=words.counted(head["size"], "entry", "entries"),
        root=head["text"].splitlines()[2],  # as log/head and `ledger verify` write it
        head=head.get("text") or "",
        entries=tuple(
            LogRow(
                sequence=str(entry["sequence"]),
                kind=entry["kind"],
                record=Hash(entry["record"][:10], entry["record"]),
                object_href=f"/objects/{entry['record']}",
                recorded_at=words.instant(entry["recorded_at"]),
                says=entry.get("says") or "",
                run=run_link(entry["run"]) if entry.get("run") else None,
            )
            for entry in reversed(document["entries"])
        ),
    )


# ---------------------------------------------------------------- two runs side by side


@dataclass(frozen=True)
class Choice:
    """A run that can be chosen."""

    id: str
    label: str
    chosen_a: bool
    chosen_b: bool


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    letter: str
    link: RunLink
    label: str
    mark: Mark


@dataclass(frozen=True)
class Pair:
    """One fact or figure in both runs. ``verdict`` says in words whether they differ."""

    name: str
    detail: str
    a: Figure
    b: Figure
    differ: bool
    verdict: str


@dataclass(frozen=True)
class ComparePage(Page):
    """Two runs side by side; or, with no ``sides``, the form that chooses them."""

    choices: tuple[Choice, ...]
    sides: tuple[Side, ...]
    verdict: str
    decisions: tuple[Pair, ...]
    measurements: tuple[Pair, ...]
    different: tuple[Pair, ...]
    equal: tuple[Pair, ...]
    equal_count: str


def _pair(name: str, detail: str, a: Any, b: Any, differ: bool, unit: str = "") -> Pair:
    def shown(value: Any) -> Figure:
        if words.number(value) is not None:
            return words.figure(value, unit)
        text = words.flat(value)
        return Figure(text if len(text) <= 200 else text[:200] + " …", text)

    return Pair(name, detail, shown(a), shown(b), differ, "differs" if differ else "equal")


def _side(letter: str, run: Document) -> Side:
    label = f"{run['study']} on {run['model']}, entry {run['sequence']}, {words.instant(run['recorded_at'])}"
    return Side(letter, run_link(run["id"]), label, words.mark(run["outcome"]))


def compare_page(runs: Sequence[Document], document: Document | None, a: str = "", b: str = "") -> ComparePage:
    """The page of ``queries.compare`` for ``document``, with every run to choose from; ``a`` and ``b`` are chosen."""
    choices = tuple(
        Choice(run["id"], f"{run['id'][:10]} · {run['study']} · {run['model']} · entry {run['sequence']}", run["id"] == a, run["id"] == b)
        for run in sorted(runs, key=lambda run: run["sequence"], reverse=True)
    )
    if document is None:
        return ComparePage("Compare two runs", "compare", "/runs.json", choices, (), "", (), (), (), (), "")
    facts = [_pair(found["name"], "", found["a"], found["b"], found["differ"]) for found in document["facts"]]
    measurements = tuple(
        _pair(
            found["name"],
            f"{found['arm']} against {found['against']}" if found["against"] else found["arm"],
            found["a"],
            found["b"],
            found["differ"],
            found["unit"],
        )
        for found in document["measurements"]
    )
    different, equal = tuple(fact for fact in facts if fact.differ), tuple(fact for fact in facts if not fact.differ)
    moved = sum(found.differ for found in measurements)
    return ComparePage(
        title=f"Compare {a[:10]} and {b[:10]}",
        section="compare",
        twin=f"/compare.json?a={a}&b={b}",
        choices=choices,
        sides=(_side("A", document["a"]), _side("B", document["b"])),
        verdict=(
            f"{'Both runs follow one frozen spec' if document['same_spec'] else 'The two runs follow different specs'}: "
            f"{words.counted(len(different), 'fact')} of {len(facts)} and "
            f"{words.counted(moved, 'measurement')} of {len(measurements)} differ."
        ),
        decisions=tuple(
            _pair(f"{found['candidate']} against {found['baseline']}", found["family"], found["a"], found["b"], found["differ"])
            for found in document["decisions"]
        ),
        measurements=measurements,
        different=different,
        equal=equal,
        equal_count=words.counted(len(equal), "equal fact"),
    )


# ---------------------------------------------------------------- previews and errors


@dataclass(frozen=True)
class PreviewPage(Page):
    """The beginning of one text object."""

    name: str
    digest: str
    href: str
    size: str
    note: str
    text: str


def preview_page(name: str, sha256: str, size: int, head: bytes, cut: bool) -> PreviewPage:
    """The preview of an object whose first bytes are ``head``."""
    shown = f"The first {words.size(len(head))} of {words.size(size)}; download the file for the rest." if cut else "The whole file."
    return PreviewPage(
        title=f"Evidence {name}",
        section="runs",
        twin="",
        name=name,
        digest=sha256,
        href=f"/objects/{sha256}",
        size=f"{size:,} bytes",
        note=shown,
        text=head.decode("utf-8", errors="replace"),
    )


@dataclass(frozen=True)
class ErrorPage(Page):
    """What went wrong, what was expected and found, and what to do next."""

    status: str
    what: str
    expected: str
    found: str
    next: str


def error_page(status: int, error: LedgerError) -> ErrorPage:
    """The page of an error."""
    title = {400: "Refused", 404: "Not found", 405: "Read-only", 503: "Not available"}.get(status, "Cannot be shown")
    return ErrorPage(title, "", "", str(status), error.what, error.expected, error.found, error.next)
