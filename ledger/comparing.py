"""Two recorded runs of one spec -> how they compare.

    bit-identical     every byte of every raw sample is equal, and every exact fact
    within            samples differ, every measurement stays inside the tolerance that its spec declared
    outside           a measurement or an exact fact (arms, geometry, bytes, counts) differs by more than that
    not comparable    different specs or token ids, or a run that did not complete

Tolerances stand in the spec, frozen before the first run; a measurement without one must be equal. Seconds are
facts about a machine, not about a format: without a tolerance of their own they are shown and decide nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from ledger import digest, records
from ledger.archive import Archive

Which = Literal["recorded", "current"]
TIMES = ("seconds", "microseconds")


def compare(archive: Archive, original: str, reproduced: str, *, harness: Which = "recorded") -> records.Reproduction:
    """Compare two recorded runs, named by digest, under the tolerances of the original's spec. Appends nothing."""
    first, second = archive.run(original), archive.run(reproduced)
    one, two = archive.result(first), archive.result(second)
    spec = archive.spec(first.spec)
    environment = tuple(_environment(first, one, second, two))
    same = _hardware(one.host) == _hardware(two.host)
    reason = _incomparable(first, one, second, two)
    if reason:
        return records.Reproduction(
            format="kv-ledger/reproduction/1",
            original=original,
            reproduced=reproduced,
            verdict="not comparable",
            reason=reason,
            same_hardware=same,
            harness=harness,
            environment=environment,
        )
    differences = (*_facts(one, two), *_measurements(spec, first, second))
    equal = {item.name: item.sha256 for item in one.evidence} == {item.name: item.sha256 for item in two.evidence}
    divergence = None if equal else first_divergence(spec, evidence(archive, one), evidence(archive, two))
    broken = [item.name for item in differences if not item.within]
    verdict: Literal["bit-identical", "within", "outside"]
    if broken:
        verdict = "outside"
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        reason = f"Outside tolerance: {', '.join(broken[:3])}{more}."
    elif equal:
        verdict, reason = "bit-identical", "Every raw sample is equal, byte for byte."
    else:
        verdict, reason = "within", "Raw samples differ; every measurement is within the tolerance of its spec."
    return records.Reproduction(
        format="kv-ledger/reproduction/1",
        original=original,
        reproduced=reproduced,
        verdict=verdict,
        reason=reason,
        same_hardware=same,
        harness=harness,
        differences=differences,
        environment=environment,
        divergence=divergence,
    )


def evidence(archive: Archive, result: records.Result) -> dict[str, bytes]:
    """What the runner wrote beside ``result.json``, by name; each checked against its digest."""
    return {item.name: archive.evidence(item.sha256) for item in result.evidence}


def _incomparable(first: records.Run, one: records.Result, second: records.Run, two: records.Result) -> str:
    if first.spec != second.spec:
        return f"The runs are of different specs: {first.spec} and {second.spec}."
    for which, run in (("original run", first), ("reproduction", second)):
        if run.outcome != "completed":
            return f"The {which} did not complete ({run.outcome}): {run.reason or 'no reason is recorded'}"[:8000]
    for index, (left, right) in enumerate(zip(one.documents, two.documents, strict=False)):
        if left != right:
            return (
                f"Document {index} has different token ids: {left.tokens} tokens with sha256 {left.sha256} in the original, "
                f"{right.tokens} tokens with sha256 {right.sha256} in the reproduction. The tokeniser or the dataset is another."
            )
    if len(one.documents) != len(two.documents):
        return f"The original has {len(one.documents)} documents, the reproduction {len(two.documents)}."
    return ""


def _hardware(host: records.Host) -> tuple[str, str, str | None]:
    return host.machine, host.processor, host.accelerator


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right):
        return True
    return bool(left == right)


def _environment(first: records.Run, one: records.Result, second: records.Run, two: records.Result) -> Iterator[records.Difference]:
    facts = [
        (f"host.{name}", getattr(one.host, name), getattr(two.host, name))
        for name in ("system", "machine", "processor", "cores", "memory_bytes", "accelerator", "threads", "python")
    ]
    names = sorted({*one.host.packages, *two.host.packages})
    facts += [(f"package.{name}", one.host.packages.get(name), two.host.packages.get(name)) for name in names]
    facts += [
        ("harness.revision", first.harness.revision, second.harness.revision),
        ("harness.state", first.harness.state, second.harness.state),
    ]
    sources = sorted(name for name in {*one.sources, *two.sources} if one.sources.get(name) != two.sources.get(name))
    facts += [(f"source.{name}", one.sources.get(name), two.sources.get(name)) for name in sources]
    for name, left, right in facts:
        if not _same(left, right):
            yield records.Difference(name=name, original=left, reproduced=right)


def _facts(one: records.Result, two: records.Result) -> Iterator[records.Difference]:
    """What must be equal whatever the tolerances say: outcomes, policies, geometry, parameter census, backings."""
    others = {arm.name: arm for arm in two.arms}
    for arm in one.arms:
        other = others.get(arm.name)
        if other is None:
            yield records.Difference(name=f"{arm.name}.outcome", original=arm.outcome, reproduced=None, within=False)
            continue
        for name in ("outcome", "effective", "measured", "geometry", "census"):
            left, right = _plain(getattr(arm, name)), _plain(getattr(other, name))
            if left != right:
                yield records.Difference(name=f"{arm.name}.{name}", original=left, reproduced=right, within=False)
        if _allocations(arm) != _allocations(other):
            yield records.Difference(
                name=f"{arm.name}.backings",
                original=sum(item.bytes for item in arm.backings),
                reproduced=sum(item.bytes for item in other.backings),
                within=False,
            )


def _plain(value: Any) -> Any:
    return records.plain(value) if isinstance(value, records.Record) else value


def _allocations(arm: records.ArmResult) -> Counter[tuple[Any, ...]]:
    """Backings without their addresses, which no two processes share."""
    return Counter((item.bytes, item.dtype, item.kind, item.layers, item.holds, item.tokens) for item in arm.backings)


def _measurements(spec: records.Spec, first: records.Run, second: records.Run) -> Iterator[records.Difference]:
    left = {(item.arm, item.name, item.against): item for item in first.measurements}
    right = {(item.arm, item.name, item.against): item for item in second.measurements}
    for key in [*left, *(key for key in right if key not in left)]:
        arm, name, against = key
        label = f"{arm}.{name}" + (f" against {against}" if against else "")
        if key not in left or key not in right:
            values = [side[key].value if key in side else None for side in (left, right)]
            yield records.Difference(name=label, original=values[0], reproduced=values[1], within=False)
            continue
        one, two = left[key], right[key]
        if _same(one.value, two.value):
            continue
        known = spec.tolerances.get(name, spec.tolerances.get(name.rpartition("/")[2]))  # of performance, by the last word
        declared = None if one.unit in records.EXACT_UNITS else known
        if declared is None and one.unit in TIMES:
            yield records.Difference(name=label, original=one.value, reproduced=two.value)
            continue
        tolerance = declared or 0.0
        gap = abs(one.value - two.value)  # NaN against a number is NaN, and so not within
        yield records.Difference(name=label, original=one.value, reproduced=two.value, tolerance=tolerance, within=gap <= tolerance)


# ---------------------------------------------------------------- the first sample that differs


def first_divergence(spec: records.Spec, one: Mapping[str, bytes], two: Mapping[str, bytes]) -> records.Divergence | None:
    """The first raw sample that differs: by evidence name, then position, then the order of the spec's arms.

    A side that has no value there counts as NaN. None where every value is equal and only the files' framing differs.
    """
    order = {arm.name: index for index, arm in enumerate(spec.arms)}
    for name in sorted({*one, *two}):
        if one.get(name) == two.get(name):
            continue
        series = [_series(name, side.get(name)) for side in (one, two)]
        found = []
        for title in sorted({*series[0], *series[1]}, key=lambda title: (order.get(title.split(".")[0], len(order)), title)):
            empty = np.empty(0)
            position, left, right = _first(series[0].get(title, empty), series[1].get(title, empty))
            if position is not None:
                found.append((position, title, left, right))
        if found:
            position, title, left, right = min(found, key=lambda item: item[0])
            return records.Divergence(evidence=name, series=title, position=position, original=left, reproduced=right)
    return None


def _first(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> tuple[int | None, float, float]:
    left, right = left.reshape(-1), right.reshape(-1)
    shared = min(left.size, right.size)
    a, b = left[:shared].astype(np.float64), right[:shared].astype(np.float64)
    differs = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
    if differs.size:
        at = int(differs[0])
        return at, float(a[at]), float(b[at])
    if left.size != right.size:
        rest = [float(side[shared]) if side.size > shared else math.nan for side in (left, right)]
        return shared, rest[0], rest[1]
    return None, 0.0, 0.0


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The series of a line: the ids of a continuation; of a case or a check, each number that it holds."""
    if "ids" in line:
        yield f"{line['arm']}.{line['document']}", np.asarray(line["ids"])
        return
    what = line.get("case") or line.get("check") or line.get("context")
    for key, value in line.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{line['arm']}.{what}.{key}", np.asarray([value])


def _series(name: str, data: bytes | None) -> dict[str, np.ndarray[Any, Any]]:
    """The series of an evidence file by title; nothing for a file of another kind."""
    if data is None:
        return {}
    if name.endswith(".safetensors"):
        from safetensors.numpy import load

        tensors: dict[str, np.ndarray[Any, Any]] = load(data)
        return tensors
    if name.endswith(".jsonl"):
        lines = [digest.parse(line) for line in data.splitlines() if line]
        return {title: values for line in lines for title, values in _numbers(line)}
    return {}
