"""The page of one run: what ran, what the runtime did, what the gates say, and the bytes it all came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ledger.web import plots, words
from ledger.web.pages import Document, Page, RunLink, run_link
from ledger.web.plots import Plot
from ledger.web.words import Figure, Hash, Mark


@dataclass(frozen=True)
class Fact:
    """A name and what is known about it. ``code`` marks text to be copied whole, such as a digest."""

    name: str
    text: str
    code: bool = False


@dataclass(frozen=True)
class PolicyCell:
    """One field of an arm's policy, from one side; ``agrees`` is False where it is not what was requested."""

    text: str
    agrees: bool


@dataclass(frozen=True)
class PolicyRow:
    """An arm's policy from one side: as requested, said to be effective, or measured."""

    side: str
    cells: tuple[PolicyCell, ...]


@dataclass(frozen=True)
class ArmRow:
    """One arm: its policy as requested, said to be effective, and measured."""

    name: str
    role: str
    mark: Mark
    reason: str
    policy: tuple[PolicyRow, ...]
    contradictions: tuple[str, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class GateRow:
    """One gate: its numbers, what follows from them in words, and the drawing, where the numbers can be drawn."""

    statistic: str
    estimate: Figure
    lower: Figure
    upper: Figure
    bound: Figure
    harm: Figure
    floor: Figure
    met: bool
    harmed: bool
    verdict: str
    method: str
    plot: Plot | None


@dataclass(frozen=True)
class DecisionRow:
    """What one contrast's gates say."""

    candidate: str
    baseline: str
    family: str
    confidence: str
    mark: Mark
    reason: str
    p_values: str
    gates: tuple[GateRow, ...]


@dataclass(frozen=True)
class Reading:
    """A measured figure in a cell of the matrix, with its interval in words and its exact form."""

    figure: Figure
    interval: str


@dataclass(frozen=True)
class MeasureRow:
    """One measure over all columns; an empty cell is None: not measured, which is not zero."""

    name: str
    unit: str
    cells: tuple[Reading | None, ...]


@dataclass(frozen=True)
class Column:
    """An arm, or one arm ``against`` another."""

    arm: str
    against: str


@dataclass(frozen=True)
class Matrix:
    """Measures by arm, or by pair of arms."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[MeasureRow, ...]


@dataclass(frozen=True)
class GeometryRow:
    """The cache geometry that some arms share, equal layers told once."""

    arms: str
    lines: tuple[str, ...]
    note: str
    agrees: bool


@dataclass(frozen=True)
class BackingSum:
    """Backings of one arm that hold the same thing in the same format."""

    arm: str
    holds: str
    kind: str
    dtype: str
    count: str
    layers: str
    total: Figure
    tokens: str


@dataclass(frozen=True)
class BackingRow:
    """One physical allocation."""

    arm: str
    address: str
    holds: str
    kind: str
    dtype: str
    layers: str
    bytes: str
    tokens: str


@dataclass(frozen=True)
class ArmTotal:
    """All backings of one arm together."""

    arm: str
    total: Figure
    exact: str


@dataclass(frozen=True)
class FileRow:
    """One file with its digest in full; ``href`` downloads it, ``preview`` shows its beginning, where it is text."""

    name: str
    sha256: str
    size: str
    media_type: str
    href: str
    preview: str


@dataclass(frozen=True)
class RelationRow:
    """A correction or a reproduction that names this run or is named by it."""

    kind: str
    mark: Mark | None
    text: str
    recorded_at: str
    run: RunLink | None
    details: tuple[Fact, ...]


@dataclass(frozen=True)
class ClaimRow:
    """A claim that this run supports."""

    arm: str
    baseline: str
    mark: Mark
    reason: str
    href: str


@dataclass(frozen=True)
class RunPage(Page):
    """The page of one run."""

    study: str
    model: str
    scope: str
    id: str
    mark: Mark
    reason: str
    recorded: str
    entry: Hash
    alerts: tuple[str, ...]
    warnings: tuple[str, ...]
    claims: tuple[ClaimRow, ...]
    checkpoint: tuple[Fact, ...]
    checkpoint_files: tuple[FileRow, ...]
    synthetic: str
    workload: tuple[Fact, ...]
    tokenizer: tuple[Fact, ...]
    policy_fields: tuple[str, ...]
    arms: tuple[ArmRow, ...]
    decisions: tuple[DecisionRow, ...]
    matrices: tuple[Matrix, ...]
    geometry: tuple[GeometryRow, ...]
    totals: tuple[ArmTotal, ...]
    sums: tuple[BackingSum, ...]
    backings: tuple[BackingRow, ...]
    backings_count: str
    evidence: tuple[FileRow, ...]
    evidence_summary: str
    harness: tuple[Fact, ...]
    sources: tuple[Fact, ...]
    sources_count: str
    host: tuple[Fact, ...]
    packages: tuple[Fact, ...]
    relations: tuple[RelationRow, ...]
    compare_href: str


def _facts(pairs: Iterable[tuple[str, Any]], code: Sequence[str] = ()) -> tuple[Fact, ...]:
    return tuple(Fact(name, words.flat(value), name in code) for name, value in pairs)


# ---------------------------------------------------------------- checkpoint and workload


def _checkpoint(found: Document) -> tuple[Fact, ...]:
    pairs: list[tuple[str, Any]] = [("name", found["name"]), ("source", found["source"])]
    if found.get("revision"):
        pairs.append(("revision", found["revision"]))
    if found.get("seed") is not None:
        pairs.append(("seed", found["seed"]))
    pairs += [("license", found["license"]), ("record digest", found["digest"])]
    alteration = found.get("alteration")
    if alteration:
        pairs.append(
            (
                "alteration",
                f"key channels of RoPE pairs {words.ranges(alteration['pairs'])} multiplied by 2^{alteration['exponent']}, "
                f"query channels by 2^{-alteration['exponent']}: equal attention in exact arithmetic",
            )
        )
    if found.get("config"):
        pairs.append(("configuration", found["config"]))
    return _facts(pairs, ("source", "revision", "record digest"))


def _workload(document: Document) -> tuple[Fact, ...]:
    spec = document["spec"]
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
        ("inputs kept", "as token ids, among the evidence" if load["inputs"] == "store" else "as digests alone: the licence of a text may forbid a copy"),
        ("chunk", f"{words.counted(load['chunk'], 'token')} written to the cache at a time, batch {load['batch']}"),
        (
            "greedy continuation",
            f"{words.counted(greedy['new_tokens'], 'new token')} after the first {words.counted(greedy['prompt_tokens'], 'token')} "
            f"of {words.counted(greedy['documents'], 'document')}"
            if greedy
            else "none",
        ),
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


def _arm(arm: Document) -> ArmRow:
    tried = [
        f"{backend['name']} accepted" if backend["accepted"] else f"{backend['name']} refused: {backend['reason'] or 'no reason given'}"
        for backend in arm.get("backends") or ()
    ]
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


def _decision(decision: Document, families: dict[str, Document]) -> DecisionRow:
    p_values = [
        f"{label} {words.figure(decision[name]).text}"
        for name, label in (("p_bound", "p of meeting every bound"), ("p_harm", "p of harm"))
        if decision.get(name) is not None
    ]
    family = families.get(decision["family"], {})
    confidence = words.number(family.get("confidence"))
    return DecisionRow(
        candidate=decision["candidate"],
        baseline=decision["baseline"],
        family=decision["family"],
        confidence="" if confidence is None else f"{confidence:.4g} confidence, bounds as frozen in the spec",
        mark=words.mark(decision["status"]),
        reason=decision["reason"],
        p_values=", ".join(p_values) + (" (adjusted by Holm within the spec)" if p_values else ""),
        gates=tuple(_gate(gate) for gate in decision["gates"]),
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
    dims = f"dim {layer['key_dim']}" if layer["key_dim"] == layer["value_dim"] else f"key dim {layer['key_dim']}, value dim {layer['value_dim']}"
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
                total=words.figure(sum(words.number(backing["bytes"]) or 0 for backing in each), "bytes"),
                tokens=f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}",
            )
        )
    return rows


def _backing(arm: str, backing: Document) -> BackingRow:
    address = words.number(backing["address"]) or 0
    return BackingRow(
        arm=arm,
        address=f"{int(address):#x}",
        holds=backing["holds"].replace("_", " "),
        kind=backing["kind"],
        dtype=backing["dtype"],
        layers=words.ranges(backing["layers"]),
        bytes=words.figure(backing["bytes"]).exact,
        tokens=words.figure(backing["tokens"]).exact,
    )


def _total(arm: Document) -> ArmTotal:
    held = sum(words.number(backing["bytes"]) or 0 for backing in arm["backings"])
    return ArmTotal(arm["name"], words.figure(held, "bytes"), f"{held:,} bytes")


# ---------------------------------------------------------------- evidence, harness, relations


def previewable(media_type: str) -> bool:
    """Whether an object of this type is text whose beginning can be shown."""
    return media_type.startswith("text/") or media_type in ("application/json", "application/jsonl", "application/x-ndjson", "application/toml")


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
                (f"segment {index}", f"documents {part['first']} to {part['last']}, {words.instant(part['started'])} to {words.instant(part['stopped'])}")
                for index, part in enumerate(document.get("segments") or (), 1)
            ),
        ]
    )


def _relation(found: Document) -> RelationRow:
    verdict = found.get("verdict")
    details: list[tuple[str, Any]] = []
    for each in found.get("differences") or ():
        within = "within" if each["within"] else "outside"
        details.append((each["name"], f"{words.flat(each['original'])} became {words.flat(each['reproduced'])}: {within} tolerance {words.flat(each['tolerance'])}"))
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
            alerts.append(f"This run is {found['kind']}{' ' + found['run'][:10] if found.get('run') else ''}: {found.get('reason') or 'no reason given'}")
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
        tokenizer=_facts(sorted(document["tokenizer"].items()), tuple(name for name in document["tokenizer"] if "sha256" in name or "digest" in name)),
        policy_fields=tuple(arms[0]["requested"]) if arms else (),
        arms=tuple(_arm(arm) for arm in arms),
        decisions=tuple(_decision(decision, families) for decision in document["decisions"]),
        matrices=_matrices(arms),
        geometry=_geometry(arms),
        totals=tuple(_total(arm) for arm in arms if arm["backings"]),
        sums=tuple(each for arm in arms for each in _sums(arm)),
        backings=backings,
        backings_count=words.counted(len(backings), "backing"),
        evidence=tuple(_file(file) for file in evidence),
        evidence_summary=f"{words.counted(len(evidence), 'file')}, {words.size(sum(int(words.number(file['size']) or 0) for file in evidence))}",
        harness=_harness(document["harness"]),
        sources=tuple(Fact(path, sha, True) for path, sha in sorted(document["sources"].items())),
        sources_count=words.counted(len(document["sources"]), "source file"),
        host=_host(document),
        packages=_facts(sorted(document["host"]["packages"].items())),
        relations=tuple(_relation(found) for found in document["relations"]),
        compare_href=f"/compare?a={document['id']}",
    )
