"""One table with the seed's rows, each with its own word: what was kept, what was not shown, what cannot run, what nobody measured.

The figures are made by rule and are no measurements of these models; their specs, runs and claims are recorded, derived, verified and
shown as real ones are.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from ledger import claims, deriving, digest, queries, records, terminal
from ledger.archive import Archive
from ledger.verify import verify
from ledger.web import create_app, words
from tests import factories, taskfiles
from tests.ledger import test_captures

REPOSITORIES = {
    "Ministral-3-8B-Instruct-2512": "mistralai/Ministral-3-8B-Instruct-2512",
    "Qwen3.5-9B": "Qwen/Qwen3.5-9B",
    "Gemma-4-12B-it": "google/gemma-4-12B-it",
    "Qwen3.8-27B": "Qwen/Qwen3.8-27B",
    "Gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B-it",
    "Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
}
LOST = {"k16v8": 18}
"""Answers that a candidate loses of 400: more than the margin lets pass, fewer than would show harm."""
QUIET, LOUD, BROKEN = (0.002, 1e-6), (0.03, 8e-3), (3.0, 5e-2)
"""Spread of a token's loss and mean divergence: within every bound, beyond one, and far beyond the harm."""
SHARED = "shared_backing: three recurrent layers and one attention layer share each backing, so that keys and values are no regions of it"
CAPPED = "mixed_head_dim: head dimensions 256 and 512 under capped scores are outside the asymmetric implementation"


def of(model: str) -> records.Checkpoint:
    """A model of the seed at a revision that is made up."""
    revision = digest.sha256(model.encode())[:40]
    source = f"hf:{REPOSITORIES[model]}@{revision}"
    file = records.CheckpointFile(path="model.safetensors", sha256=digest.sha256(f"weights of {model}".encode()), size=11)
    return factories.checkpoint(name=model, source=source, revision=revision, license="Apache-2.0", files=(file,))


def add(archive: Archive, frozen: records.Spec, files: dict[str, bytes], **changes: Any) -> None:
    """Append a spec and its run, with everything derived from ``files``; ``changes`` go to the result."""
    found = factories.result(frozen, files, **changes)
    derived = deriving.derive(frozen, found, files, factories.harness())
    figures = {"measurements": derived.measurements, "decisions": derived.decisions, "kernels": derived.kernels}
    format = "kv-ledger/run/2" if derived.kernels else "kv-ledger/run/1"
    run = factories.run(frozen, found, format=format, warnings=(*found.warnings, *derived.warnings), **figures)
    archive.append(frozen)
    archive.append(run, {digest.sha256(data): data for data in (records.encode(found), *files.values())})


def losses(archive: Archive, model: str, **noise: tuple[float, float]) -> None:
    frozen = factories.spec(study="loss", checkpoint=of(model), workload=factories.workload(documents=16, tokens=256))
    quiet = {"k16v16": QUIET, "k16v16-repeat": QUIET}
    add(archive, frozen, factories.samples(frozen, 0, quiet | noise))


def captured(archive: Archive, model: str, refusal: str, suppressed: tuple[int, ...] = ()) -> None:
    """Native captures that pass, and an asymmetric arm that the guard refuses."""
    frozen = test_captures.spec(study="capability", checkpoint=of(model), capture={"suppressed": suppressed})
    changes: dict[tuple[str, int], Any] = {("k16v8", document): None for document in range(2)}
    masked = {
        "vocabulary": 262144,
        "masked": [len(suppressed)] * 5,
        "masked_ids": [{"from": 0, "count": len(suppressed), "ids": [*suppressed]}],
    }
    changes |= {("native", document): masked for document in range(2)}
    native, other = frozen.arms
    refused = records.ArmResult(name=other.name, outcome="refused", reason=refusal)
    add(archive, frozen, test_captures.files(frozen, changes), arms=(factories.arm_result(native), refused))


def say(arm: str, number: int) -> str:
    return (taskfiles.wrong if number < 40 + LOST.get(arm, 0) else taskfiles.right)(arm, number)


@pytest.fixture
def seeded(make_archive: Callable[..., Archive]) -> Archive:
    """The seed's rows."""
    archive = make_archive()
    task = taskfiles.spec(study="gsm8k", checkpoint=of("Ministral-3-8B-Instruct-2512"))
    add(archive, task, taskfiles.evidence(task, say))
    serving = factories.production_spec(checkpoint=of("Ministral-3-8B-Instruct-2512"))
    add(archive, serving, factories.checks(serving))
    timed = factories.performance_spec(checkpoint=of("Ministral-3-8B-Instruct-2512"))
    add(archive, timed, factories.timings(timed))
    captured(archive, "Qwen3.5-9B", SHARED)
    captured(archive, "Gemma-4-12B-it", CAPPED, (258882, 258883))
    losses(archive, "Qwen3.8-27B", k16v8=QUIET, k8v8=QUIET)
    losses(archive, "Gemma-4-26B-A4B-it", k16v8=LOUD, k8v8=LOUD)
    losses(archive, "Qwen3-8B", k16v8=QUIET, k8v8=LOUD)
    losses(archive, "Qwen2.5-7B-Instruct", k16v8=QUIET, k8v8=BROKEN)
    archive.append(factories.production_spec(checkpoint=of("Qwen2.5-7B-Instruct"), study="frozen-alone"))
    (row,) = claims_on(archive, "Qwen3-8B", "quality.loss", "k16v8", "k16v16")
    recipe = factories.recipe(
        (row["key"],), checkpoint=claims.checkpoint_id(of("Qwen3-8B")), name="qwen3-8b-k16v8", title="Qwen3-8B with cheap values"
    )
    archive.append(recipe, {digest.sha256(factories.LOCK): factories.LOCK})
    facts = (factories.fact(model="Qwen3-8B", says="The recipe keeps its own scope."),)
    archive.append(factories.report(facts=facts), {digest.sha256(factories.DOCUMENT): factories.DOCUMENT})
    return archive


def claims_on(archive: Archive, model: str, scope: str, arm: str, baseline: str = "") -> list[dict[str, Any]]:
    return [
        row
        for row in queries.status(archive)["rows"]
        if (row["model"], row["scope"], row["arm"].partition(":")[0], row["baseline"].partition(":")[0]) == (model, scope, arm, baseline)
    ]


ROWS = [
    ("Ministral-3-8B-Instruct-2512", "quality.task", "k16v8", "k16v16", "not established", "is above the margin"),
    ("Ministral-3-8B-Instruct-2512", "production", "k16v8", "native", "passes", "12 checks, every one passed"),
    ("Ministral-3-8B-Instruct-2512", "performance", "k16v8", "best native", "measured, not qualified", "quality.loss is not established"),
    ("Qwen3.5-9B", "capability", "native", "", "passes", "and nothing more is said"),
    ("Qwen3.5-9B", "capability", "k16v8", "", "unsupported", SHARED),
    ("Gemma-4-12B-it", "capability", "native", "", "passes", "and nothing more is said"),
    ("Gemma-4-12B-it", "capability", "k16v8", "", "unsupported", CAPPED),
    ("Qwen3.8-27B", "quality.loss", "k16v8", "k16v16", "established", "upper bound"),
    ("Qwen3.8-27B", "quality.loss", "k8v8", "k16v16", "established", "upper bound"),
    ("Qwen3.8-27B", "quality.loss", "k16v8", "k8v8", "not established", "kl_difference_mean"),
    ("Gemma-4-26B-A4B-it", "quality.loss", "k16v8", "k16v16", "not established", "is above"),
    ("Gemma-4-26B-A4B-it", "quality.loss", "k8v8", "k16v16", "not established", "is above"),
    ("Gemma-4-26B-A4B-it", "quality.loss", "k16v8", "k8v8", "not established", "kl_difference_mean"),
    ("Qwen3-8B", "quality.loss", "k16v8", "k16v16", "established", "upper bound"),
    ("Qwen3-8B", "quality.loss", "k16v8", "k8v8", "established", "kl_difference_mean"),
    ("Qwen2.5-7B-Instruct", "quality.loss", "k8v8", "k16v16", "degraded", "is above the harm"),
    ("Qwen2.5-7B-Instruct", "quality.loss", "k16v8", "k16v16", "established", "upper bound"),
    ("Qwen2.5-7B-Instruct", "production", "k16v8", "native", "not measured", "no run was recorded"),
]
"""Model, scope, arm, baseline, word, and a part of the reason."""


def test_the_table_shows_all_rows_of_the_seed_with_their_own_words(seeded: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    document = queries.status(seeded)
    for model, scope, arm, baseline, word, why in ROWS:
        found = claims_on(seeded, model, scope, arm, baseline)
        assert {row["claim"] for row in found} == {word}, (model, scope, arm, found)
        assert all(why in row["reason"] and row["source"] == of(model).source and row["revision"] == of(model).revision for row in found)
        assert len(found) == (2 if scope == "quality.task" else 1)  # both readings of the answer
    assert {row["model"] for row in document["rows"]} == set(REPOSITORIES)
    # a native capability is no quality and no speed of the asymmetric cache, which has no other row
    for model in ("Qwen3.5-9B", "Gemma-4-12B-it"):
        assert {row["scope"] for row in document["rows"] if row["model"] == model} == {"capability"}
    (recipe,) = document["recipes"]
    assert (recipe["model"], recipe["word"]) == ("Qwen3-8B", "supported")
    (said,) = document["reported"]
    assert (said["model"], said["status"]) == ("Qwen3-8B", "reported")
    terminal.emit(document)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(document))


def test_the_page_and_its_twins_say_the_same_as_the_table(seeded: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    document = queries.status(seeded)
    folder = seeded.folder
    seeded.close()
    with TestClient(create_app(folder), base_url="http://127.0.0.1") as client:
        assert client.get("/status.json").json() == json.loads(json.dumps(document))
        lines = list(csv.DictReader(io.StringIO(client.get("/status.csv").text)))
        text = html.unescape(client.get("/").text)
    terminal.status(document)
    table = capsys.readouterr().out
    assert [(line["model"], line["claim"]) for line in lines] == [(row["model"], row["claim"]) for row in document["rows"]]
    for model in REPOSITORIES:
        section = text[text.index(f">{model}</h2>") :].partition("</section>")[0]
        own = [row for row in document["rows"] if row["model"] == model]
        assert of(model).source in section and section.count('<tr role="row" id="claim-') == len(own)
        for row in own:
            assert f'id="claim-{row["key"][:16]}"' in section and row["reason"] in section and row["reason"] in table
            assert words.mark(row["claim"]).meaning in section
    assert {row["claim"] for row in document["rows"]} == {word for *_, word, _ in ROWS}
    assert len({words.mark(row["claim"]).shape for row in document["rows"]}) == len({word for *_, word, _ in ROWS})
    assert "Reported by others, without evidence here" in text and ">supported<" in text
    assert verify(folder).findings == []
