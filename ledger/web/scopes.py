"""The parts of a run's page that scopes without a dataset have: what was asked, a table of cases, and a table of checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ledger.web import words
from ledger.web.pages import Document
from ledger.web.runmodel import CaseCell, CaseRow, CaseTable, CheckCell, CheckRow, CheckTable

Pairs = list[tuple[str, Any]]

_COPY = "copy"
DIGESTS = ("task definition sha256", "questions sha256", "worked examples sha256")
"""Facts of a task that are digests."""


def asked(spec: Document) -> Pairs:
    """What a spec without a dataset asks for, as names and values."""
    found, fed, held = spec.get("performance"), spec.get("production"), spec.get("memory")
    pairs: Pairs = [("device", spec.get("device", "cpu"))]
    if found:
        pairs += [
            ("cases", words.counted(len(found["cases"]), "case")),
            (
                "samples",
                f"{found['repeats']} of each case and arm, each of {words.counted(found['launches'], 'launch', 'launches')}; "
                "of one a buffer where there are more, of fewer where they take long",
            ),
            ("buffers rotated over", f"at least {words.size(found['rotate_bytes'])}"),
            ("page", words.counted(found["page"], "token")),
            (
                "cache budget of capacity",
                words.size(found["budget_bytes"]) if found.get("budget_bytes") else "none: no case is of capacity",
            ),
            ("seed", found["seed"]),
        ]
    if fed:
        pairs += [
            ("prompts", f"{fed['batch']} of up to {words.counted(fed['prompt_tokens'], 'token')}, drawn from seed {fed['seed']}"),
            ("continued by", words.counted(fed["new_tokens"], "token")),
        ]
    if held:
        pairs += [
            ("contexts", f"{words.listed([f'{context:,}' for context in held['contexts']])} tokens of one sequence, seed {held['seed']}"),
            ("chunk", f"{words.counted(held['chunk'], 'token')} written to the cache at a time"),
            ("cache budget", f"{words.size(held['budget_bytes'])}; a context that does not fit is said not to"),
        ]
    if spec.get("task"):
        pairs += _task(spec["task"])
    return pairs


def _task(found: Document) -> Pairs:
    """What a task asks, as names and values."""
    files = {
        side: f"{found[side]['name']}, {words.counted(found[f'{side}_items'], 'item')}, {found[side]['license']}"
        for side in ("test", "train")
    }
    form = "through the chat template" if found["chat_template"] else "as plain text"
    return [
        ("task", f"{found['definition']} of lm-eval {found['version']}"),
        ("task definition sha256", found["definition_sha256"]),
        ("questions", f"{words.counted(len(found['items']), 'item')} of {files['test']}: {words.ranges(found['items'])}"),
        ("questions sha256", found["test"]["sha256"]),
        ("worked examples", f"the first {found['shots']} of {files['train']}"),
        ("worked examples sha256", found["train"]["sha256"]),
        ("asked", f"{form}, {'with' if found['bos'] else 'without'} BOS"),
        ("answers", f"greedy, at most {words.counted(found['new_tokens'], 'token')}, batch {found['batch']}"),
        ("chunk", f"{words.counted(found['chunk'], 'token')} of a prompt written to the cache at a time"),
        ("margin", f"{found['margin']:g} of accuracy, one-sided {100 * found['confidence']:g} %"),
    ]


def intervals(spec: Document) -> str:
    """How the intervals of a run's measurements came about."""
    if spec.get("task"):
        return "Intervals are two-sided, 95 %: Wilson's of a share, Tango's and Newcombe's of a paired difference of shares, over items."
    return "Intervals are two-sided, 95 %, Student's t over documents."


def captured(spec: Document) -> Pairs:
    """What a capability or calibration asks for behind its documents, as names and values."""
    found = spec.get("capture")
    if not found:
        return []
    return [
        ("continued by", f"{words.counted(found['new_tokens'], 'greedy token')} a document, forced: the end token is ignored, not masked"),
        ("cache budget", f"{words.size(found['budget_bytes'])}, enforced"),
        ("suppressed ids", ", ".join(map(str, found["suppressed"])) or "none is declared"),
        ("modalities", "language only" if found["language_only"] else "all"),
    ]


# ---------------------------------------------------------------- performance


def _cell(found: Document) -> CaseCell:
    if found.get("refused"):
        return CaseCell(None, (), found["refused"], found["kernel"])
    if "tokens" in found:
        lines = [f"{words.figure(found['bytes'], 'bytes').text}"]
        if found.get("ratio") is not None:
            lines.append(f"{words.figure(found['ratio']).text} of 16/16")
        return CaseCell(words.figure(found["tokens"], "tokens"), tuple(lines), "", found["kernel"])
    if "median_us" not in found:
        return CaseCell(None, (), "not timed", found["kernel"])
    lines = [f"± {words.figure(found['spread_us']).text}"]
    share, ratio = words.number(found.get("share_of_copy")), words.number(found.get("ratio_to_best_native"))
    if share is not None:
        lines.append(f"{100 * share:.1f} % of copy")
    lines.append("no native contender" if ratio is None else f"{ratio:.3f} of best native")
    error = found.get("relative_error")
    if error is not None:
        lines.append(f"error {words.figure(error).text}")
    return CaseCell(words.figure(found["median_us"], "microseconds"), tuple(lines), "", found["kernel"])


def case_tables(groups: dict[str, Document], arms: Sequence[str]) -> tuple[CaseTable, ...]:
    """Times, and apart from them capacities: rows are cases, columns the arms that any of them has."""
    cells: dict[str, dict[str, CaseCell]] = {}
    for found in groups.values():
        if found["case"] != _COPY:
            cells.setdefault(found["case"], {})[found["arm"]] = _cell(found)
    tables = []
    kinds = (("Microseconds a launch, medians and interquartile ranges", False), ("Tokens that fit into the cache budget", True))
    for caption, capacity in kinds:
        rows = {case: held for case, held in cells.items() if case.startswith("capacity/") == capacity}
        columns = tuple(arm for arm in arms if any(arm in held for held in rows.values()))
        if rows:
            lines = tuple(CaseRow(case, tuple(held.get(arm) for arm in columns)) for case, held in rows.items())
            tables.append(CaseTable(caption, columns, lines))
    return tuple(tables)


def copied(groups: dict[str, Document]) -> str:
    """The copy bandwidth of the run in words, or an empty string."""
    found = groups.get(_COPY, {})
    median, moved = words.number(found.get("median_us")), words.number(found.get("bytes"))
    if not median or moved is None:
        return ""
    return f"Copy bandwidth measured in this run: {moved / median / 1000:,.0f} GB/s ({found['kernel']}, {words.size(int(moved))} a copy)."


# ---------------------------------------------------------------- production


NOTES = {
    "production": "Every check is a pass or a fail without statistics, under the settings shown and no others; one that compared nothing, "
    "or was held to another bar than the ledger's, is invalid.",
    "capability": "Passing says that loading, execution and capture work under these settings, and nothing more: nothing of quality, of "
    "speed, or of other lengths.",
    "calibration": "Sizes of the states that reached the cache over these documents. They carry no verdict; fixed scales may come of them.",
    "state memory": "Bytes of the allocations at the contexts that were filled. Nothing is inferred for another context or model, and no "
    "saving from how many layers attend.",
}
"""What is said above the decisions of scopes that have no bounds."""


def check_table(decisions: Sequence[Document], scope: str) -> CheckTable | None:
    """Checks by arm: passed, failed or invalid, with what was compared. None where there is none."""
    names = list(dict.fromkeys(gate["statistic"] for decision in decisions for gate in decision["gates"]))
    held = {
        (gate["statistic"], decision["candidate"]): CheckCell(
            words.mark("passes" if gate["met"] else "fails" if gate["harmed"] else "invalid"), gate["method"]
        )
        for decision in decisions
        for gate in decision["gates"]
    }
    arms = tuple(decision["candidate"] for decision in decisions)
    rows = tuple(CheckRow(name, tuple(held.get((name, arm)) for arm in arms)) for name in names)
    return CheckTable(f"{scope.capitalize()} checks", arms, rows) if rows else None
