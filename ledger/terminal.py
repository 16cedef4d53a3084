"""The documents of :mod:`ledger.queries` as text: rich tables on a terminal, aligned columns when piped.

Piped text carries no escape codes and nothing is cut. Whatever comes out of an archive is foreign text: control
characters are shown as escapes, so that a recorded name can neither colour nor clear a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from ledger import digest

SHORT = 12
"""Digits of a digest in a table; a unique prefix of it is enough to name a run."""

STYLES = {
    "established": "green",
    "passes": "green",
    "measured": "cyan",
    "not established": "yellow",
    "measured, not qualified": "yellow",
    "unsupported": "magenta",
    "not measured": "dim",
    "retracted": "dim strike",
    "reported": "italic",
    "supported": "green",
    "supported in part": "yellow",
    "not supported": "bold red",
    "lapsed": "bold magenta",
    "degraded": "bold red",
    "fails": "bold red",
    "invalid": "bold magenta",
    "bit-identical": "green",
    "within": "green",
    "outside": "bold red",
    "not comparable": "bold magenta",
    "completed": "",
    "failed": "bold red",
    "interrupted": "yellow",
}
"""Colour beside the words, which say everything by themselves."""


def clean(text: str) -> str:
    """``text`` with control characters, line breaks and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text)


def number(value: Any) -> str:
    """A number of a document, tagged or plain, for people: six significant digits, counts whole; ``–`` for none."""
    if value is None:
        return "–"
    if isinstance(value, Mapping) and set(value) == {"number"}:
        return str(value["number"])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return clean(str(value))


def plain(value: Any) -> str:
    """Any leaf of a document as one line."""
    if isinstance(value, (Mapping, list)) and set(value) != {"number"}:
        return clean(json.dumps(value, ensure_ascii=False, sort_keys=True))
    return number(value)


def emit(document: Any) -> None:
    """A document as strict JSON on standard output. ASCII, so that no locale can spoil it."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def say(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write("\n".join(clean(line) for line in text.split("\n")) + "\n")


def note(text: str) -> None:
    """A line on standard error: notices, progress, errors."""
    sys.stderr.write("\n".join(clean(line) for line in text.split("\n")) + "\n")
    sys.stderr.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", styled: str = "") -> None:
    """A table. ``styled`` names the column whose words choose a row's colour on a terminal."""
    lines = [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich(columns, lines, title, styled)
        return
    if title:
        say(title)
    widths = [max([len(name), *(len(line[at]) for line in lines)]) for at, name in enumerate(columns)]
    for line in [list(columns), *lines]:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def _rich(columns: Sequence[str], lines: Sequence[Sequence[str]], title: str, styled: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(clean(title)) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        drawn.add_column(name, overflow="fold", min_width=12 if name in ("result", "runs") else None)
    at = columns.index(styled) if styled else -1
    for line in lines:
        cells = [Text(cell) for cell in line]
        if at >= 0:
            cells[at].stylize(STYLES.get(line[at].removeprefix("synthetic "), ""))
        drawn.add_row(*cells)
    Console().print(drawn)


# ---------------------------------------------------------------- documents


def status(document: Mapping[str, Any]) -> None:
    """The status table: one block for what is equal (model, scope, workload, hardware), one line a claim. Reports and recipes apart."""
    if document["rows"]:
        _claims(document["rows"])
    else:
        say("No claims yet: no run is recorded. Try `ledger run demo`.")
    if document.get("recipes"):
        say()
        say("RECIPES")
        say()
        recipes(document["recipes"])
    if document.get("reported"):
        say()
        _reported(document["reported"])


def _claims(rows: Sequence[Mapping[str, Any]]) -> None:
    blocks: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        blocks.setdefault(tuple(row[name] for name in ("model", "checkpoint", "scope", "workload", "hardware")), []).append(row)
    policies: dict[str, set[str]] = {}
    for row in rows:
        for side in ("arm", "baseline"):
            name, policy = _named(row[side])
            policies.setdefault(name, set()).add(policy)

    def short(arm: str) -> str:
        """The name alone, where it stands for one policy in the whole table."""
        name, _ = _named(arm)
        return name if len(policies[name]) == 1 else arm

    for at, ((model, checkpoint, scope, workload, hardware), found) in enumerate(blocks.items()):
        if at:
            say()
        listed = {" ".join(run[:SHORT] for run in row["runs"]) for row in found}
        title = f"{model} ({checkpoint[:SHORT]}), {scope}, {workload}, {hardware}"
        if len(listed) == 1:  # as a rule: the claims of one study
            title += f"; {'run ' + min(listed) if min(listed) else 'no run'}"
        table(
            ("test", "result", "why", *(("runs",) if len(listed) > 1 else ())),
            [
                (
                    short(row["arm"]) + (f" vs {short(row['baseline'])}" if row["baseline"] else ""),
                    row["claim"],
                    row["reason"],
                    *((" ".join(run[:SHORT] for run in row["runs"]),) if len(listed) > 1 else ()),
                )
                for row in found
            ],
            title=title,
            styled="result",
        )
    say()
    pairs(dict.fromkeys(_named(row[side]) for row in rows for side in ("arm", "baseline") if row[side]))


def _reported(rows: Sequence[Mapping[str, Any]]) -> None:
    """What documents outside say, a block each, under a heading that says that none of it is shown here."""
    say("REPORTED by documents outside; there is no evidence for any of it in this archive")
    for report in dict.fromkeys(row["report"] for row in rows):
        found = [row for row in rows if row["report"] == report]
        of = found[0]["document"]
        say()
        table(
            ("model", "policy", "scope", "result", "the document's own outcome", "what it says, in the reporter's words"),
            [(row["model"], row["policy"], row["scope"], row["status"], row["outcome"], row["says"]) for row in found],
            title=f"{of['title']} ({of['place']}; sha256 {of['sha256'][:SHORT]}); report {report[:SHORT]}",
            styled="result",
        )
        if found[0]["reason"]:
            say(found[0]["reason"])


def recipes(document: Sequence[Mapping[str, Any]]) -> None:
    """Recipes, each with the status of every claim that it cites."""
    if not document:
        say("No recipe is recorded. Add one with `ledger recipe add FILE`.")
    for at, row in enumerate(document):
        if at:
            say()
        pairs(
            [
                ("recipe", f"{row['name']} ({row['recipe'][:SHORT]}): {row['title']}"),
                ("is", f"{row['word']}: {row['reason']}"),
                ("model", f"{row['model']}, checkpoint {row['checkpoint'][:SHORT]}"),
                ("policy", policy(row["policy"])),
                *(("step", step) for step in row["steps"]),
                *((("lock", f"{row['lock']['name']}, sha256 {row['lock']['sha256']}"),) if row["lock"] else ()),
                *(("needs", f"{item['name']}=={item['version']}, sha256 {' or '.join(item['sha256'])}") for item in row["requirements"]),
            ]
        )
        for title, name in (
            ("Claims that validate it", "claims"),
            ("Claims on the same checkpoint and policy that it does not cite", "beside"),
        ):
            if row[name]:
                say()
                table(
                    ("scope", "against", "result", "workload", "hardware", "claim"),
                    [
                        (item["scope"], _named(item["baseline"])[0], item["claim"], item["workload"], item["hardware"], item["key"][:SHORT])
                        for item in row[name]
                    ],
                    title=title,
                    styled="result",
                )


def policy(found: Mapping[str, Any]) -> str:
    """A recipe's policy in a few words."""
    source = f" from {found['scale_source'][:SHORT]}" if found.get("scale_source") else ""
    grain = "" if found.get("granularity", "none") == "none" else f" by {found['granularity']}"
    return _policy(found) + source + grain


def _named(arm: str) -> tuple[str, str]:
    """An arm's name and its policy, from a claim's ``name: policy``."""
    name, _, policy = arm.partition(": ")
    return name, policy


def precision(document: Sequence[Mapping[str, Any]]) -> None:
    """Tables of precision and scaling: one a checkpoint, a line a stored policy; the runs that its figures come from above it."""
    if not document:
        say("No table yet: no run of losses or of a task stands. Try `ledger run demo`.")
    for at, one in enumerate(document):
        if at:
            say()
        synthetic = ", synthetic weights" if one["synthetic"] else ""
        say(f"{one['model']} ({one['checkpoint'][:SHORT]}){synthetic}")
        for name, words, unit in (("loss", "losses, bytes", "documents"), ("task", "answers", "items")):
            run = one["runs"][name]
            if run is not None:
                more = f"; not shown: {' '.join(other[:SHORT] for other in run['others'])}" if run["others"] else ""
                pairs([(words, f"run {run['run'][:SHORT]}, study {run['study']}, {run[unit]} {unit}, {run['hardware']}{more}")])
        columns = ["arm", "stored", "against", "loss difference", "spread", "KL 99.9 %", "KL mean", "top-1 differs"]
        columns += ["answers kept", "accuracy difference", "keys", "values", "state", "scales", "ratio", "result", "gates", "advantage"]
        known: dict[str, list[str]] = {}
        for row in one["rows"]:
            if row["baseline"] is not None:
                known.setdefault(row["baseline"], []).append(_kept(row["baseline_policy"]))
        several = {name for name, policies in known.items() if len(set(policies)) > 1}
        table(columns, [_precision_row(row, bool(one["synthetic"]), several) for row in one["rows"]], styled="result")
    if document:
        say()
        say("Differences and ratios are to the baseline, which each row names. Two figures are of the strict and the flexible reading.")
        say("A result is against that baseline unless it names another arm; an advantage asks for less than the other has.")
        say("Bytes are of the allocations as measured; the ratio is of all of them, the state of recurrent layers included.")


def _kept(policy: Mapping[str, Any]) -> str:
    """A stored policy: formats, scales and where they come from, implementation, compute and backend."""
    grain = f" {policy['granularity']}" if policy["granularity"] != "none" else ""
    source = f" of {policy['scale_source'][:SHORT]}" if policy["scale_source"] else ""
    scales = "" if policy["scales"] == "none" else f", {policy['scales']}{grain}{source}"
    return f"K {policy['keys']} V {policy['values']}{scales}; {policy['implementation']} {policy['compute']}, {policy['backend']}"


def _precision_row(row: Mapping[str, Any], synthetic: bool, several: Set[str]) -> tuple[str, ...]:
    """A line of the table; ``several`` are the baselines' names that stand for more than one policy there."""
    loss, task, held = row["loss"] or {}, row["task"], row["bytes"] or {}
    readings = [] if task is None else [task["readings"][name] for name in ("strict", "flexible")]
    word = "synthetic " if synthetic else ""
    return (
        row["arm"] + (" (repeat: the floor)" if row["role"] == "repeat" else ""),
        _kept(row["policy"]),
        f"{row['baseline']}: {_kept(row['baseline_policy'])}" if row["baseline"] in several else row["baseline"] or "–",
        _bounded(loss.get("difference")),
        *(_bounded(loss.get(name)).partition(" [")[0] for name in ("spread", "kl_p999", "kl_mean", "top1")),
        _both([_bounded(reading["preservation"]) for reading in readings]),
        _both([_accuracy(reading) for reading in readings]),
        *(number(held.get(name)) for name in ("keys", "values", "state", "scales")),
        number(held.get("ratio")),
        "; ".join(f"{_asked(row, item)}{word}{item['status']}" for item in row["gates"]) or "–",
        "; ".join(_asked(row, item) + _verdicts(item) for item in row["gates"] if item["gates"]) or "–",
        "; ".join(f"{item['family']} over {item['over']}: {word}{item['status']}" for item in row["advantages"]) or "–",
    )


def _asked(row: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    """What a decision is on, where a row has several or it is not against the row's baseline."""
    against = "" if item["against"] == row["baseline"] else f" against {item['against']}"
    return f"{item['family']}{against}: " if against or len(row["gates"]) > 1 else ""


def _verdicts(item: Mapping[str, Any]) -> str:
    return ", ".join(f"{gate['statistic']} {gate['verdict']}" for gate in item["gates"])


def _both(figures: Sequence[str]) -> str:
    """What two readings say, once where neither says anything."""
    return " / ".join(figures) if set(figures) - {"–"} else "–"


def _bounded(figure: Mapping[str, Any] | None) -> str:
    """A figure with its interval."""
    if figure is None:
        return "–"
    value = f"{figure['value']:.3g}" if isinstance(figure["value"], float) else number(figure["value"])
    if figure["lower"] is None or figure["upper"] is None:
        return value
    low, high = (f"{side:.3g}" if isinstance(side, float) else number(side) for side in (figure["lower"], figure["upper"]))
    return f"{value} [{low}, {high}]"


def _accuracy(reading: Mapping[str, Any]) -> str:
    """The difference of accuracy and what its gate says; where that is invalid, why, and no figure."""
    if reading["status"] == "invalid":
        return f"invalid: {reading['reason'].partition(':')[0]}"
    return _bounded(reading["difference"]) + (f" {reading['status']}" if reading["status"] else "")


def runs(document: Sequence[Mapping[str, Any]]) -> None:
    """The list of runs."""
    if not document:
        say("No run is recorded. Try `ledger run demo`.")
        return
    cells = [
        (
            row["id"][:SHORT],
            str(row["sequence"]),
            row["study"],
            row["model"],
            row["scope"],
            row["outcome"],
            row["recorded_at"],
            _correction(row),
        )
        for row in document
    ]
    table(("run", "entry", "study", "model", "scope", "outcome", "recorded at", "corrected"), cells, styled="outcome")


def _correction(row: Mapping[str, Any]) -> str:
    if row.get("retracted"):
        return "retracted"
    by = row.get("superseded_by")
    return f"superseded by {by[:SHORT]}" if by else ""


def pairs(facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    listed = list(facts)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        say(f"{name.ljust(width)}  {value}")


def run(document: Mapping[str, Any]) -> None:
    """One run: facts, arms, measurements, decisions, evidence, relations."""
    harness, checkpoint, host = document["harness"], document["checkpoint"], document["host"]
    facts = [
        ("run", document["id"]),
        ("study", f"{document['study']}: {document['spec']['title']}"),
        ("outcome", document["outcome"] + (f": {document['reason']}" if document.get("reason") else "")),
        *[
            (relation["kind"], f"{relation['run'] or ''} by {relation['author']}: {relation['reason']}".strip())
            for relation in document["relations"]
            if relation["kind"] in ("retracted", "superseded by")
        ],
        ("recorded at", f"{document['recorded_at']} as entry {document['sequence']}"),
        ("spec", document.get("spec_digest", "")),
        ("model", f"{checkpoint['name']} ({checkpoint['source']})"),
        ("harness", f"{harness['revision']} ({harness['state']})" + (f"; {harness['detail']}" if harness.get("detail") else "")),
        ("host", f"{host['hardware_class']}; {host['processor']}; {host['system']}; Python {host['python']}"),
        ("peak memory", f"{number(document.get('peak_memory_bytes'))} bytes"),
    ]
    facts += [("warning", text) for text in document.get("warnings", ())]
    pairs(facts)
    say()
    table(
        ("arm", "role", "outcome", "requested", "measured", "bytes with scales", "contradictions"),
        [
            (
                arm["name"],
                arm["role"],
                arm["outcome"] + (f": {arm['reason']}" if arm.get("reason") else ""),
                _policy(arm["requested"]),
                _policy(arm["measured"]),
                number(sum(digest.untagged(backing["bytes"]) for backing in arm["backings"])),
                "; ".join(arm.get("contradictions", ())) or "–",
            )
            for arm in document["arms"]
        ],
        title="Arms",
    )
    say()
    if document["groups"]:
        _performance(document["groups"])
        say()
    measured = [
        (arm["name"], item["name"], item.get("against") or "–", number(item["value"]), item["unit"], _interval(item))
        for arm in document["arms"]
        for item in arm["measurements"]
    ]
    gated = document["scope"].startswith("quality.")
    if document["scope"] not in ("performance", "production"):
        table(("arm", "measurement", "against", "value", "unit", "95 % interval"), measured, title="Measurements")
        say()
    if document["scope"] in ("production", "capability"):
        _checks(document["decisions"])
        say()
    decided = [
        (
            item["candidate"],
            item["baseline"],
            item["family"],
            item["status"],
            item.get("reason") or "–",
            *((_gates(item),) if gated else ()),
        )
        for item in document["decisions"]
    ]
    gates = ("gates",) if gated else ()
    table(("candidate", "baseline", "family", "decision", "reason", *gates), decided, title="Decisions", styled="decision")
    say()
    kept = [(item["name"], item["sha256"], number(item["size"]), item["media_type"]) for item in document["evidence"]]
    table(("evidence", "sha256", "bytes", "media type"), kept, title="Evidence")
    if document["relations"]:
        say()
        say("Relations")
        for relation in document["relations"]:
            say("  " + ", ".join(f"{key} {plain(value)}" for key, value in relation.items() if value not in (None, "", [])))


def _performance(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Times and capacities, one line a case and arm; the kernel that ran, or why none did."""
    copy = groups.get("copy", {})
    median, moved = (digest.untagged(copy.get(name)) for name in ("median_us", "bytes"))
    if median and moved:
        say(f"Copy bandwidth of this run: {moved / median / 1000:,.0f} GB/s ({copy['kernel']})")
        say()
    timed = [row for row in groups.values() if row["case"] != "copy" and not row["case"].startswith("capacity/")]
    table(
        ("case", "arm", "median µs", "spread µs", "of copy", "to best native", "error", "kernel"),
        [
            (
                row["case"],
                row["arm"],
                *(number(row.get(name)) for name in ("median_us", "spread_us", "share_of_copy")),
                _ratio(row),
                number(row.get("relative_error")),
                _ran(row),
            )
            for row in timed
        ],
        title="Times",
    )
    held = [row for row in groups.values() if row["case"].startswith("capacity/")]
    if held:
        say()
        cells = [
            (
                row["case"],
                row["arm"],
                *(number(row.get(name)) for name in ("tokens", "bytes", "ratio")),
                _ran(row),
            )
            for row in held
        ]
        table(("case", "arm", "tokens", "bytes", "to 16/16", "what was filled"), cells, title="Capacity")


def _ratio(row: Mapping[str, Any]) -> str:
    """The ratio to the best native contender, or that there was none."""
    alone = "median_us" in row and "ratio_to_best_native" not in row
    return "no native contender" if alone else number(row.get("ratio_to_best_native"))


def _ran(row: Mapping[str, Any]) -> str:
    """The kernel that ran, or in one line why none did."""
    return f"refused: {' '.join(row['refused'].split())}" if row["refused"] else str(row["kernel"])


def _checks(decisions: Sequence[Mapping[str, Any]]) -> None:
    """Production checks, one line a check and arm."""
    cells = [
        (gate["statistic"], decision["candidate"], "passes" if gate["met"] else "fails" if gate["harmed"] else "invalid", gate["method"])
        for decision in decisions
        for gate in decision["gates"]
    ]
    table(("check", "arm", "result", "what was compared"), cells, title="Checks", styled="result")


def _policy(policy: Mapping[str, Any]) -> str:
    if not policy:
        return "–"
    sides = f"K {policy.get('keys', '?')} V {policy.get('values', '?')}"
    scales = policy.get("scales", "none")
    return f"{policy.get('implementation', '?')} {policy.get('compute', '?')}, {sides}" + ("" if scales == "none" else f", {scales} scales")


def _interval(item: Mapping[str, Any]) -> str:
    if item.get("lower") is None and item.get("upper") is None:
        return "–"
    return f"{number(item.get('lower'))} to {number(item.get('upper'))}"


def _gates(decision: Mapping[str, Any]) -> str:
    parts = []
    for gate in decision.get("gates", ()):
        word = "harm" if gate["harmed"] else "met" if gate["met"] else "not met"
        parts.append(f"{gate['statistic']} at most {number(gate['upper'])}, bound {number(gate['bound'])}: {word}")
    return "; ".join(parts) or "–"


def compare(document: Mapping[str, Any]) -> None:
    """Two runs side by side: what differs, and all decisions."""
    a, b = document["a"], document["b"]
    pairs([(side, f"{item['id']} {item['study']} {item['outcome']} {item['recorded_at']}") for side, item in (("a", a), ("b", b))])
    say("Both are of the same spec." if document["same_spec"] else "They are of different specs.")
    differing = [item for item in document["facts"] if item["differ"]]
    say()
    table(("fact", "a", "b"), [(item["name"], plain(item["a"]), plain(item["b"])) for item in differing], title="Facts that differ")
    changed = [item for item in document["measurements"] if item["differ"]]
    say()
    table(
        ("arm", "measurement", "against", "a", "b", "unit"),
        [(item["arm"], item["name"], item["against"] or "–", number(item["a"]), number(item["b"]), item["unit"]) for item in changed],
        title=f"Measurements that differ: {len(changed)} of {len(document['measurements'])}",
    )
    say()
    table(
        ("candidate", "baseline", "family", "a", "b"),
        [(item["candidate"], item["baseline"], item["family"], item["a"] or "–", item["b"] or "–") for item in document["decisions"]],
        title="Decisions",
    )


def findings(document: Mapping[str, Any]) -> None:
    """What verify found. What it could not check is said beside, as notes."""
    for text in document["notes"]:
        note(f"note: {text}")
    checked = document["checked"]
    counted = ", ".join(f"{number(checked[name])} {name}" for name in ("entries", "objects", "bytes", "measurements"))
    head = document["head"]
    if head:
        say(f"head: {number(head['size'])} entries, root {head['root']}")
        signed = document["signed"]
        if signed is None:
            say("unsigned: no key vouches for this head; compare it with one that you kept or saw published.")
        else:
            by = ", ".join(signed["keys"]) or "no key of the log"
            own = "by the archive's own word: whether to trust those keys, only a --policy of yours can say"
            trust = "under your policy" if signed["policy"] else own
            say(f"signed: {signed['origin']}, {number(signed['size'])} entries, by {by} ({trust})")
    if document["ok"]:
        say(f"ok: {counted} checked, nothing missing, nothing altered.")
        return
    listed = document["findings"]
    say(f"{len(listed)} finding{'' if len(listed) == 1 else 's'}; {counted} checked.")
    for item in listed:
        say()
        pairs([("finding", item["kind"]), ("object", item["object"]), ("detail", item["detail"]), ("next", item["next"])])


def dry_run(studies: Sequence[Mapping[str, Any]], suite: str | None) -> None:
    """What studies ask for, and whether this host can do them."""
    if suite is not None:
        say(f"{suite}: {len(studies)} studies")
        say()
    for number, study in enumerate(studies):
        if number:
            say()
        expects = study["expects"] or {}
        minutes = f"about {expects['minutes']:,} minutes on {expects['on']}" if expects else "not stated"
        facts = [
            ("study", f"{study['study']}: {study['title']}"),
            ("scope", f"{study['scope']}, on {study['device']}; {len(study['arms'])} arms, {len(study['documents'])} documents"),
            *([("power", study["power"])] if study.get("power") else []),
            *([("fixed scales", f"of {study['calibration']}, found when it is frozen")] if study.get("calibration") else []),
            ("checkpoint", f"{study['checkpoint']['name']} ({study['checkpoint']['source']}), {study['checkpoint']['license']}"),
            ("pinned", study["checkpoint"]["pinned"]),
            ("duration", minutes),
        ]
        if expects:
            facts += [("install", expects["install"]), ("speaks for", expects["validates"])]
        pairs(facts)
        say()
        checks = study["checks"]
        table(["here", "needed", "found", ""], [(c["what"], c["needed"], c["found"], "yes" if c["met"] else "no") for c in checks])
        say(f"This host {'can' if study['can_run'] else 'cannot'} run it.")


def reproduction(document: Mapping[str, Any]) -> None:
    """How a reproduction compares."""
    hardware = {True: "the same hardware", False: "different hardware", None: "no hardware: nothing was run"}[document["same_hardware"]]
    pairs(
        [
            ("verdict", document["verdict"]),
            ("reason", document["reason"]),
            ("original", document["original"]),
            ("reproduced", document["reproduced"] or "–"),
            ("harness", document["harness"]),
            ("on", hardware),
        ]
    )
    found = document["divergence"]
    if found:
        values = f"{number(found['original'])}, now {number(found['reproduced'])}"
        say(f"first diverging sample: {found['evidence']}, {found['series']}, position {found['position']}: {values}")
    for title, name in (("Differences", "differences"), ("Environment", "environment")):
        if document[name]:
            say()
            table(
                ("name", "original", "reproduced", "tolerance", "within"),
                [
                    (item["name"], plain(item["original"]), plain(item["reproduced"]), number(item["tolerance"]), number(item["within"]))
                    for item in document[name]
                ],
                title=title,
            )
