"""The page of one run: what ran, what the runtime did, what the gates say, and the bytes it all came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ledger.web import plots, scopes, words
from ledger.web.pages import Document, run_link
from ledger.web.runmodel import (
    ArmRow,
    ArmTotal,
    BackingRow,
    BackingSum,
    ClaimRow,
    Column,
    DecisionRow,
    Fact,
    FileRow,
    GateRow,
    GeometryRow,
    Matrix,
    MeasureRow,
    PolicyCell,
    PolicyRow,
    Reading,
    RelationRow,
    RunPage,
)
from ledger.web.words import Hash

LONGEST_REASON = 240
"""Characters of a backend's refusal that the page shows."""


def _facts(pairs: Iterable[tuple[str, Any]], code: Sequence[str] = ()) -> tuple[Fact, ...]:
    return tuple(Fact(name, words.flat(value), name in code) for name, value in pairs)


# ---------------------------------------------------------------- checkpoint and workload


def _checkpoint(found: Document) -> tuple[Fact, ...]:
    pairs: list[tuple[str, Any]] = [("name", found["name"]), ("source", found["source"])]
    if found.get("revision"):
        pairs.append(("revision", found["revision"]))
    if found.get("seed") is not None:
        pairs.append(("seed", found["seed"]))
    pairs += [("license", found["license"]), ("checkpoint digest", found["digest"])]
    alteration = found.get("alteration")
    if alteration and alteration["kind"] == "scaled_queries":
        pairs.append(("alteration", f"query norms multiplied by 2^{alteration['exponent']}: seeded scores spread as trained ones do"))
    elif alteration:
        pairs.append(
            (
                "alteration",
                f"key channels of RoPE pairs {words.ranges(alteration['pairs'])} multiplied by 2^{alteration['exponent']}, "
                f"query channels by 2^{-alteration['exponent']}: equal attention in exact arithmetic",
            )
        )
    if found.get("config"):
        pairs.append(("configuration", found["config"]))
    return _facts(pairs, ("source", "revision", "checkpoint digest"))


def _workload(document: Document) -> tuple[Fact, ...]:
    spec = document["spec"]
    if spec["workload"] is None:
        tolerated = ("tolerances of a reproduction", spec.get("tolerances") or "exact in everything but times")
        return _facts([*scopes.asked(spec), tolerated, ("frozen spec", document["spec_digest"])], ("frozen spec", *scopes.DIGESTS))
    load, data = spec["workload"], spec["workload"]["dataset"]
    spans = load["spans"]
    lengths = sorted({span["tokens"] for span in spans})
    tokens = sum(span["tokens"] for span in spans)
    end = max((span["start"] + span["tokens"] for span in spans), default=0)
    per = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}" if lengths else "0"
    greedy = load.get("greedy")
    pairs = [
        ("dataset", f"{data['name']} ({data['file']}, {data['size']:,} bytes, {data['license']})"),
        ("dataset sha256", data["sha256"]),
        (
            "documents",
            f"{words.counted(len(spans), 'span')} of {per} dataset tokens, {tokens:,} in all, "
            f"from token {spans[0]['start'] if spans else 0:,} to {end:,}",
        ),
        ("BOS", "put before each document" if load["bos"] else "none is put before a document"),
        (
            "special tokens",
            "text such as <unk> is split and read as plain text"
            if load["split_special_tokens"]
            else "text such as <unk> is read as a special token",
        ),
        ("inputs kept", "as token ids, among the evidence" if load["inputs"] == "store" else "as digests, without the text or its ids"),
        ("chunk", f"{words.counted(load['chunk'], 'token')} written to the cache at a time, batch {load['batch']}"),
        (
            "greedy continuation",
            f"{words.counted(greedy['new_tokens'], 'new token')} after the first {words.counted(greedy['prompt_tokens'], 'token')} "
            f"of {words.counted(greedy['documents'], 'document')}"
            if greedy
            else "none",
        ),
        *scopes.captured(spec),
        *([("device", spec["device"])] if "device" in spec else []),
        ("tolerances of a reproduction", spec.get("tolerances") or "exact in everything"),
        ("frozen spec", document["spec_digest"]),
    ]
    return _facts(pairs, ("dataset sha256", "frozen spec"))


# ---------------------------------------------------------------- arms


def _policy(arm: Document) -> tuple[PolicyRow, ...]:
    missing = "not run" if arm["outcome"] == "not run" else "not said"
    return tuple(
        PolicyRow(
            side,
            tuple(
                PolicyCell(arm[side].get(name, missing), side == "requested" or arm[side].get(name, asked) == asked)
                for name, asked in arm["requested"].items()
            ),
        )
        for side in ("requested", "effective", "measured")
    )


def _brief(text: str) -> str:
    """The beginning of a text; ``result.json`` holds all of it."""
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON].rsplit(' ', 1)[0]} …"


def _arm(arm: Document) -> ArmRow:
    tried = dict.fromkeys(  # a run of many cases tries one backend often
        f"{backend['name']} accepted"
        if backend["accepted"]
        else f"{backend['name']} refused: {_brief(backend['reason']) or 'no reason given'}"
        for backend in arm.get("backends") or ()
    )
    facts: list[tuple[str, Any]] = [("backend", f"{arm['backend']} asked for; {'; '.join(tried) or 'none said'}")]
    if arm.get("chunk"):
        facts.append(("chunk", words.counted(arm["chunk"], "token")))
    if arm.get("census"):
        facts.append(("parameters", "; ".join(f"{words.flat(count)} {dtype}" for dtype, count in arm["census"].items())))
    if arm.get("seconds") is not None:
        facts.append(("time", f"{words.figure(arm['seconds']).text} s"))
    role = f"repeat of {arm['repeats']}" if arm.get("repeats") else arm["role"]
    contradictions = tuple(arm["contradictions"])
    return ArmRow(arm["name"], role, words.mark(arm["outcome"]), arm["reason"], _policy(arm), contradictions, _facts(facts))


# ---------------------------------------------------------------- decisions


def _gate(gate: Document) -> GateRow:
    values = {name: words.number(gate.get(name)) for name in ("estimate", "lower", "upper", "bound", "harm", "floor")}
    shown = {name: words.figure(gate.get(name)) for name in values}
    if not words.finite(values["estimate"], values["lower"], values["upper"]):
        says = "no interval of finite numbers"
    elif gate["harmed"]:
        says = f"harm shown: even the lower limit {shown['lower'].text} lies beyond {shown['harm'].text}"
    elif gate["met"]:
        says = f"met: the upper limit {shown['upper'].text} is within the bound {shown['bound'].text}"
    else:
        says = f"not met: the upper limit {shown['upper'].text} exceeds the bound {shown['bound'].text}"
    return GateRow(
        statistic=gate["statistic"],
        **shown,
        met=gate["met"],
        harmed=gate["harmed"],
        verdict=says,
        method=gate["method"],
        plot=plots.gate(**values),
    )


def _decision(decision: Document, families: dict[str, Document], gates: bool, timed: bool) -> DecisionRow:
    p_values = [
        f"{label} {words.figure(decision[name]).text}"
        for name, label in (("p_bound", "p-value against a bound being exceeded"), ("p_harm", "p-value for harm"))
        if decision.get(name) is not None
    ]
    family = families.get(decision["family"], {})
    confidence = words.number(family.get("confidence"))
    return DecisionRow(
        candidate=decision["candidate"],
        baseline="the best native"
        if timed
        else decision["baseline"]
        if decision["baseline"] != decision["candidate"]
        else "",  # of each case; which one, the table says
        family=decision["family"],
        confidence="" if confidence is None else f"{confidence:.4g} confidence, bounds as frozen in the spec",
        mark=words.mark(decision["status"]),
        reason=decision["reason"],
        p_values=", ".join(p_values) + (" (adjusted by Holm within the spec)" if p_values else ""),
        gates=tuple(_gate(gate) for gate in decision["gates"]) if gates else (),
    )


# ---------------------------------------------------------------- measurements


def _reading(found: Document) -> Reading:
    interval = ""
    if found.get("lower") is not None or found.get("upper") is not None:
        interval = f"{words.figure(found['lower']).text} to {words.figure(found['upper']).text}"
    return Reading(words.figure(found["value"], found["unit"]), interval)


Pair = tuple[str, str | None]


def _matrix(caption: str, found: dict[Pair, list[Document]]) -> Matrix:
    cells = {(column, each["name"]): _reading(each) for column, readings in found.items() for each in readings}
    measures = {each["name"]: each["unit"] for readings in found.values() for each in readings}
    return Matrix(
        caption=caption,
        columns=tuple(Column(arm, against or "") for arm, against in found),
        rows=tuple(MeasureRow(name, unit, tuple(cells.get((column, name)) for column in found)) for name, unit in measures.items()),
    )


def _matrices(arms: Sequence[Document]) -> tuple[Matrix, ...]:
    alone, pairs, sizes = "Figures of each arm", "Each arm beside another, on the same tokens", "Cache bytes as a ratio"
    found: dict[str, dict[Pair, list[Document]]] = {alone: {}, pairs: {}, sizes: {}}
    for arm in arms:
        for each in arm["measurements"]:
            kind = alone if each["against"] is None else sizes if each["unit"] == "ratio" else pairs
            found[kind].setdefault((arm["name"], each["against"]), []).append(each)
    return tuple(_matrix(caption, columns) for caption, columns in found.items() if columns)


# ---------------------------------------------------------------- geometry and backings


def _shape(layer: Document) -> str:
    dims = (
        f"dim {layer['key_dim']}"
        if layer["key_dim"] == layer["value_dim"]
        else f"key dim {layer['key_dim']}, value dim {layer['value_dim']}"
    )
    window = f", window {layer['window']:,}" if layer.get("window") is not None else ""
    return f"{layer['kind']}, {words.counted(layer['kv_heads'], 'KV head')}, {dims}{window}"


def _layers(layers: Sequence[Document]) -> tuple[str, ...]:
    shapes: dict[str, list[int]] = {}
    for layer in layers:
        shapes.setdefault(_shape(layer), []).append(layer["layer"])
    return tuple(f"{'layer' if len(at) == 1 else 'layers'} {words.ranges(at)}: {shape}" for shape, at in shapes.items())


def _geometry(arms: Sequence[Document]) -> tuple[GeometryRow, ...]:
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for arm in arms:
        if arm.get("geometry"):
            shape = (_layers(arm["geometry"]["measured"]), _layers(arm["geometry"]["declared"]))
            alike.setdefault(shape, []).append(arm["name"])
    return tuple(
        GeometryRow(
            arms=words.listed(names),
            lines=measured,
            note="measured as the configuration declares"
            if measured == declared
            else f"contradiction: the configuration declares {'; '.join(declared) or 'nothing'}",
            agrees=measured == declared,
        )
        for (measured, declared), names in alike.items()
    )


def _whole(value: Any) -> int:
    """A count of a document as an int; absent counts as nothing in a sum."""
    return int(words.number(value) or 0)


def _sums(arm: Document) -> list[BackingSum]:
    alike: dict[tuple[str, str, str], list[Document]] = {}
    for backing in arm["backings"]:
        alike.setdefault((backing["holds"], backing["kind"], backing["dtype"]), []).append(backing)
    rows = []
    for (holds, kind, dtype), each in alike.items():
        layers = {layer for backing in each for layer in backing["layers"]}
        shared = max(len(backing["layers"]) for backing in each)
        tokens = sorted({backing["tokens"] for backing in each})
        rows.append(
            BackingSum(
                arm=arm["name"],
                holds=holds.replace("_", " "),
                kind=kind,
                dtype=dtype,
                count=f"{len(each):,}",
                layers=words.ranges(layers) + (f" (up to {shared} share one)" if shared > 1 else ""),
                total=words.figure(sum(_whole(backing["bytes"]) for backing in each), "bytes"),
                tokens=f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}",
            )
        )
    return rows


def _backing(arm: str, backing: Document) -> BackingRow:
    return BackingRow(
        arm=arm,
        address=f"{_whole(backing['address']):#x}",
        holds=backing["holds"].replace("_", " "),
        kind=backing["kind"],
        dtype=backing["dtype"],
        layers=words.ranges(backing["layers"]),
        bytes=words.figure(backing["bytes"]).exact,
        tokens=words.figure(backing["tokens"]).exact,
    )


def _total(arm: Document) -> ArmTotal:
    held = sum(_whole(backing["bytes"]) for backing in arm["backings"])
    return ArmTotal(arm["name"], words.figure(held, "bytes"), f"{held:,} bytes")


# ---------------------------------------------------------------- evidence, harness, relations


_TEXTS = ("application/json", "application/jsonl", "application/x-ndjson", "application/toml")


def previewable(media_type: str) -> bool:
    """Whether an object of this type is text whose beginning can be shown."""
    return media_type.startswith("text/") or media_type in _TEXTS


def _file(file: Document) -> FileRow:
    href = f"/objects/{file['sha256']}"
    preview = f"{href}/preview" if previewable(file["media_type"]) else ""
    return FileRow(file["name"], file["sha256"], f"{file['size']:,}", file["media_type"], href, preview)


def _checkpoint_file(file: Document) -> FileRow:
    return FileRow(file["path"], file["sha256"], f"{file['size']:,}", "", "", "")


def _harness(found: Document) -> tuple[Fact, ...]:
    matched = {
        "commit": "the sources that ran are those of this commit",
        "distribution": "the sources that ran are those of this installed distribution",
        "none": "the sources that ran were found at no commit and in no distribution: this cannot qualify",
    }
    pairs: list[tuple[str, Any]] = [
        ("revision", found["revision"]),
        ("matched", matched.get(found["matched"], found["matched"])),
        ("working tree", found["state"] + (f": {found['detail']}" if found.get("detail") else "")),
    ]
    pairs += [(name, found[name]) for name in ("repository", "diff") if found.get(name)]
    if found.get("distribution"):
        pairs.append(("RECORD sha256", found["distribution"]["record_sha256"]))
    pairs += [(f"untracked {path}", sha) for path, sha in (found.get("untracked") or {}).items()]
    return _facts(pairs, ("revision", "RECORD sha256"))


def _host(document: Document) -> tuple[Fact, ...]:
    found = document["host"]
    memory, peak = words.number(found["memory_bytes"]), words.number(document.get("peak_memory_bytes"))
    fed = "items" if document["spec"].get("task") else "documents"
    return _facts(
        [
            ("hardware class", found["hardware_class"]),
            ("processor", found["processor"]),
            ("accelerator", found["accelerator"] or "none"),
            ("cores", f"{found['cores']}, {words.counted(found['threads'], 'thread')} used"),
            ("memory", "not known" if memory is None else words.size(int(memory))),
            ("peak memory of the run", "not measured" if peak is None else f"{words.size(int(peak))} ({peak:,} bytes)"),
            ("system", f"{found['system']} {found['machine']}"),
            ("Python", found["python"]),
            ("started", words.instant(document["started"])),
            ("stopped", words.instant(document["stopped"]) if document["stopped"] else "never: it was killed"),
            *(
                (
                    f"segment {index}",
                    f"{fed} {part['first']} to {part['last']}, {words.instant(part['started'])} to {words.instant(part['stopped'])}",
                )
                for index, part in enumerate(document.get("segments") or (), 1)
            ),
        ]
    )


def _relation(found: Document) -> RelationRow:
    verdict = found.get("verdict")
    details: list[tuple[str, Any]] = []
    for each in found.get("differences") or ():
        within = f"{'within' if each['within'] else 'outside'} tolerance {words.flat(each['tolerance'])}"
        details.append((each["name"], f"{words.flat(each['original'])} became {words.flat(each['reproduced'])}: {within}"))
    for each in found.get("environment") or ():
        details.append((each["name"], f"{words.flat(each['original'])} became {words.flat(each['reproduced'])}"))
    split = found.get("divergence")
    if split:
        details.append(
            (
                "first difference",
                f"{split['evidence']}, {split['series']}, position {split['position']}: "
                f"{words.flat(split['original'])} became {words.flat(split['reproduced'])}",
            )
        )
    said = [found.get("reason") or "", f"by {found['author']}" if found.get("author") else ""]
    if found.get("same_hardware") is not None:
        said.append("on the same hardware" if found["same_hardware"] else "on other hardware")
    if found.get("harness"):
        said.append(f"with the {found['harness']} harness")
    return RelationRow(
        kind=found["kind"],
        mark=words.mark(verdict) if verdict else None,
        text="; ".join(filter(None, said)),
        recorded_at=words.instant(found.get("recorded_at")),
        run=run_link(found["run"]) if found.get("run") else None,
        details=_facts(details),
    )


def _alerts(document: Document) -> tuple[str, ...]:
    alerts = []
    for found in document["relations"]:
        if found["kind"] in ("retracted", "superseded by"):
            other = f" {found['run'][:10]}" if found.get("run") else ""
            alerts.append(f"This run is {found['kind']}{other}: {found.get('reason') or 'no reason given'}")
    if document["outcome"] != "completed":
        alerts.append(f"This run {document['outcome']}: {document['reason'] or 'no reason given'}. What it had finished is kept below.")
    if document["harness"]["matched"] == "none":
        alerts.append("The code that ran matches no commit and no distribution, so this run cannot qualify anything.")
    alerts += [f"Arm {arm['name']}: {text}" for arm in document["arms"] for text in arm["contradictions"]]
    return tuple(alerts)


def run_page(document: Document) -> RunPage:
    """The page of ``queries.run``."""
    arms: Sequence[Document] = document["arms"]
    families = {family["name"]: family for family in document["spec"]["families"]}
    groups: dict[str, Document] = document["groups"]
    checked = document["scope"] in ("production", "capability", "calibration")
    backings = tuple(_backing(arm["name"], backing) for arm in arms for backing in arm["backings"])
    evidence: Sequence[Document] = document["evidence"]
    return RunPage(
        title=document["title"],
        section="runs",
        twin=f"/runs/{document['id']}.json",
        study=document["study"],
        model=document["model"],
        scope=document["scope"],
        id=document["id"],
        mark=words.mark(document["outcome"]),
        reason=document["reason"],
        recorded=f"entry {document['sequence']} of the log, {words.instant(document['recorded_at'])}",
        entry=Hash(document["entry"][:10], document["entry"]),
        alerts=_alerts(document),
        warnings=tuple(document["warnings"]),
        claims=tuple(
            ClaimRow(claim["arm"], claim["baseline"], words.mark(claim["claim"]), claim["reason"], f"/#claim-{claim['key'][:16]}")
            for claim in document["claims"]
        ),
        checkpoint=_checkpoint(document["checkpoint"]),
        checkpoint_files=tuple(_checkpoint_file(file) for file in document["checkpoint"]["files"]),
        synthetic=words.SYNTHETIC if document["checkpoint"]["synthetic"] else "",
        workload=_workload(document),
        tokenizer=_facts(sorted(document["tokenizer"].items()), [name for name in document["tokenizer"] if "sha256" in name]),
        policy_fields=tuple(arms[0]["requested"]) if arms else (),
        arms=tuple(_arm(arm) for arm in arms),
        decisions=tuple(
            _decision(decision, families, not checked, document["scope"] == "performance") for decision in document["decisions"]
        ),
        matrices=() if groups else _matrices(arms),
        cases=scopes.case_tables(groups, [arm["name"] for arm in arms]),
        copied=scopes.copied(groups),
        intervals=scopes.intervals(document["spec"]),
        checks=scopes.check_table(document["decisions"], document["scope"]) if checked else None,
        note=scopes.NOTES.get(document["scope"], ""),
        geometry=_geometry(arms),
        totals=tuple(_total(arm) for arm in arms if arm["backings"]),
        sums=tuple(each for arm in arms for each in _sums(arm)),
        backings=backings,
        backings_count=words.counted(len(backings), "backing"),
        evidence=tuple(_file(file) for file in evidence),
        evidence_summary=f"{words.counted(len(evidence), 'file')}, {words.size(sum(_whole(file['size']) for file in evidence))}",
        harness=_harness(document["harness"]),
        sources=tuple(Fact(path, sha, True) for path, sha in sorted(document["sources"].items())),
        sources_count=words.counted(len(document["sources"]), "source file"),
        host=_host(document),
        packages=_facts(sorted(document["host"]["packages"].items())),
        relations=tuple(_relation(found) for found in document["relations"]),
        compare_href=f"/compare?a={document['id']}",
    )
