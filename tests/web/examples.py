"""An archive with something of everything, made from the factories: what the pages and their tests show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ledger import digest, gates, measures, records
from ledger.archive import Archive
from tests import factories
from tests.conftest import claim_of

HOSTILE = "</title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
"""A name that would run, if any page wrote it as markup."""


@dataclass(frozen=True)
class Example:
    """An archive's folder and the runs in it, by what is notable about them."""

    folder: Path
    runs: dict[str, str]
    log: str
    """Digest of a text file among the evidence of the run ``good``."""


def record(
    archive: Archive,
    spec: records.Spec,
    *,
    seed: int = 0,
    result: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    more: dict[str, tuple[bytes, str]] | None = None,
    noise: dict[str, tuple[float, float]] | None = None,
) -> str:
    """Append ``spec`` and a run of it; ``more`` is evidence beside the samples: bytes and media type by name."""
    archive.append(spec)
    files = factories.samples(spec, seed, noise)
    found = factories.result(spec, files, **(result or {}))
    extra = tuple(
        records.Evidence(name=name, sha256=digest.sha256(data), size=len(data), media_type=kind)
        for name, (data, kind) in (more or {}).items()
    )
    found = msgspec.structs.replace(found, evidence=(*found.evidence, *extra))
    samples = measures.read_samples(spec, files)
    derived = {
        "measurements": measures.measure(spec, found, samples),
        "decisions": gates.decide(spec, found, samples, factories.harness()),
    }
    made = factories.run(spec, found, **{**derived, **(run or {})})
    data = [records.encode(found), *files.values(), *(content for content, _ in (more or {}).values())]
    archive.append(made, {digest.sha256(content): content for content in data})
    return records.identify(made)


def ignoring(arm: records.Arm) -> records.ArmResult:
    """An arm whose runtime ignored the request: its tensors are of another format than was asked for."""
    ran = factories.arm_result(msgspec.structs.replace(arm, keys="bf16"))
    return msgspec.structs.replace(ran, effective={**ran.effective, "keys": arm.keys})


def fill(folder: Path, documents: int = 4) -> Example:
    """Make the archive."""
    runs: dict[str, str] = {}
    greedy = b'{"arm":"native","document":0,"ids":[1,2,3],"prompt_tokens":8}\n' + b"<script>document.title='owned'</script>\n"
    with Archive.create(folder) as archive:
        spec = factories.spec(title="A toy study of cheap caches", workload=factories.workload(documents, 64))
        tokenizer = {"class": "PreTrainedTokenizerFast", "bos_token": "<s>", "sha256": "ab" * 32}
        runs["good"] = record(
            archive,
            spec,
            result={"tokenizer": tokenizer, "warnings": ("The model declares a BOS, and no document begins with it.",)},
            more={"log.txt": (greedy, "text/plain"), "page.html": (b"<script>document.title='owned'</script>", "text/html")},
        )
        runs["again"] = record(archive, spec, seed=1)
        names = {name: f"{name} {HOSTILE}" for name in ("model", "policy", "says")}
        archive.append(
            factories.report(title=HOSTILE, facts=(factories.fact(), factories.fact(**names))),
            {digest.sha256(factories.DOCUMENT): factories.DOCUMENT},
        )
        lock = {digest.sha256(factories.LOCK): factories.LOCK}
        archive.append(factories.recipe((claim_of(archive),), title=HOSTILE, steps=(HOSTILE, "make demo")), lock)
        broken = factories.spec(study="ignored", title="A runtime that ignores its flag", workload=factories.workload(documents, 32))
        arms = tuple(ignoring(arm) if arm.name == "k8v8" else factories.arm_result(arm) for arm in broken.arms)
        runs["ignored"] = record(archive, broken, result={"arms": arms})
        hostile = factories.spec(
            study="hostile", title=HOSTILE, checkpoint=factories.checkpoint(name=HOSTILE), workload=factories.workload(documents, 48)
        )
        odd = (
            records.Measurement(arm="k16v8", name="loss_mean", value=math.nan, unit="nats", lower=-math.inf, upper=math.inf),
            records.Measurement(
                arm="k16v8", name="loss_difference_mean", value=-0.0, unit="nats", against="k16v16", lower=None, upper=None
            ),
            records.Measurement(arm="k16v8", name="cache_bytes", value=2**53 + 1, unit="bytes"),
        )
        gate = records.GateOutcome(
            statistic="loss_difference_mean",
            estimate=math.nan,
            lower=-math.inf,
            upper=math.inf,
            bound=0.02,
            harm=0.02,
            met=False,
            harmed=False,
            method="none",
        )
        verdict = records.Decision(
            candidate="k16v8", baseline="k16v16", family="loss", status="invalid", reason="a loss is NaN", gates=(gate,)
        )
        runs["hostile"] = record(archive, hostile, run={"measurements": odd, "decisions": (verdict,), "warnings": (HOSTILE,)})
        altered = factories.checkpoint(name="Toy-1M", alteration=records.RescaledKeys(pairs=(0, 1, 2, 7), exponent=6))
        control = factories.spec(
            study="rescaled", title="A positive control: key channels rescaled", checkpoint=altered, workload=spec.workload
        )
        runs["synthetic"] = record(archive, control, noise={"k8v8": (1.2, 0.9)})
        killed = factories.spec(study="killed", title="A run that was killed", workload=factories.workload(2, 32))
        runs["failed"] = record(
            archive,
            killed,
            result={"outcome": "interrupted", "arms": (), "stopped": None, "peak_memory_bytes": None},
            run={"outcome": "failed", "reason": "the runner was killed", "measurements": (), "decisions": ()},
        )
        author = {"author": "the maintainers", "reason": "the first run used a noisy machine"}
        archive.append(records.Supersede(format="kv-ledger/supersede/1", run=runs["good"], by=runs["again"], **author))
        archive.append(
            records.Retract(format="kv-ledger/retract/1", run=runs["failed"], author="the maintainers", reason="it proves nothing")
        )
        archive.append(
            records.Reproduction(
                format="kv-ledger/reproduction/1",
                original=runs["good"],
                reproduced=runs["again"],
                verdict="outside",
                reason="one figure is beyond its tolerance",
                same_hardware=True,
                harness="current",
                differences=(records.Difference(name="k8v8 loss_mean", original=3.25, reproduced=math.nan, tolerance=0.0, within=False),),
                environment=(records.Difference(name="packages.torch", original="2.12.0", reproduced="2.13.0"),),
                divergence=records.Divergence(
                    evidence="samples/0000.safetensors", series="k8v8.loss", position=3, original=1.5, reproduced=1.75
                ),
            )
        )
    return Example(folder, runs, digest.sha256(greedy))
