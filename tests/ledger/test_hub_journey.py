"""The studies that ship for the seed's models, end to end: each runs on a tiny checkpoint that the tests' hub serves under its own id.

A study of these tests is ``like`` the one that ships, and overrides what would take a GPU or hours: the device, the texts, how much of
them, the items, the contexts. Its checkpoint, arms, contrasts, families and tolerances are those that ship. The fused kernels
run under Triton's interpreter.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ledger import dryrun, freezing, queries
from ledger.archive import Archive
from ledger.web import create_app
from tests import hub as hubs
from tests import hubmodels, taskfiles
from tests.ledger.test_cli import Ledger, checkout  # noqa: F401  (a fixture)

TEXT = b"The tide came in over the flat sand, and went out again before the children were awake.\n" * 2000
OURS = {"dataset": "tide.txt", "dataset_name": "The tide", "dataset_license": "CC0-1.0", "sha256": hashlib.sha256(TEXT).hexdigest()}

TRAIN = taskfiles.lines(range(1000, 1006))
INTERPRETED = ("ministral-3-8b-loss", "qwen3-8b-loss", "qwen2-5-7b-loss")
"""Studies whose fused arms run under Triton's interpreter. Production checks would take minutes there, so that the guard refuses."""
pytestmark = pytest.mark.slow


def toml(table: dict[str, Any], path: str = "") -> str:
    """A table of a study, written."""
    below = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if key not in below)
    head = f"[{path}]\n" if path else ""
    return head + lines + "".join(toml(value, f"{path}.{key}" if path else key) for key, value in below.items())


def shrunk(name: str) -> dict[str, Any]:
    """What a study of the test overrides of the one that ships."""
    shipped, _ = freezing.load_study(name)
    table: dict[str, Any] = {"like": name, "study": f"{name}-tiny", "title": shipped["title"], "device": "cpu"}
    if "workload" in shipped:
        several = isinstance(shipped["workload"]["documents"], list)
        size = {"documents": [2, 1], "tokens": [24, 48]} if several else {"documents": 2, "tokens": 40}
        table["workload"] = shipped["workload"] | OURS | size | {"chunk": 16}
        if "greedy" in shipped["workload"]:
            table["workload"]["greedy"] = {"documents": 1, "prompt_tokens": 12, "new_tokens": 3}
    if "capture" in shipped:
        table["capture"] = shipped["capture"] | {"new_tokens": 4}
    if "production" in shipped:
        table["production"] = shipped["production"] | {"prompt_tokens": 12, "new_tokens": 2, "batch": 2}
    if "memory" in shipped:
        table["memory"] = shipped["memory"] | {"contexts": [16, 48, 96], "chunk": 16}
    if "task" in shipped:
        files = {
            side: {"dataset": f"{side}.jsonl", "dataset_name": f"Jars, {side}", "dataset_license": "CC0-1.0",
                   "sha256": hashlib.sha256(data).hexdigest(), "items": data.count(b"\n")}
            for side, data in (("test", taskfiles.TEST), ("train", TRAIN))
        }  # fmt: skip
        table["task"] = shipped["task"] | {"items": 4, "shots": 1, "new_tokens": 6} | files
    return table


class Models:
    """One archive, and the runs of each model's suite in it; a suite runs when it is first asked for."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.commits: dict[str, str] = {}
        self.requests: dict[str, list[str]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the status table."""
        with Archive.open(self.ledger.folder / "evidence") as archive:
            found: list[dict[str, Any]] = queries.status(archive)["rows"]
        return found

    def run(self, run: str) -> dict[str, Any]:
        """The document of one run."""
        with Archive.open(self.ledger.folder / "evidence") as archive:
            return queries.run(archive, run)

    def ran(self, model: str) -> str:
        """The commit that the hub served when the suite of ``model`` ran."""
        if model not in self.commits:
            self.commits[model] = self._run(model)
        return self.commits[model]

    def _run(self, model: str) -> str:
        ledger, folder = self.ledger, self.ledger.folder
        fused = [name for name in studies(model) if name in INTERPRETED]
        place = folder / f"made-{model}"
        place.mkdir()
        with hubs.serve(hubmodels.IDS[model]) as hub:
            commit = hub.commit(hubmodels.files(model, place))
            for names, environment in ((fused, {"TRITON_INTERPRET": "1"}), ([name for name in studies(model) if name not in fused], {})):
                for name in names:
                    (folder / f"{name}.toml").write_text(toml(shrunk(name)), encoding="utf-8")
                suite = {"suite": model, "title": "The suite that ships, shrunk", "studies": [f"{name}.toml" for name in names]}
                (folder / "suite.toml").write_text(toml(suite), encoding="utf-8")
                if names:
                    found = ledger("run", "suite.toml", "--json", HF_ENDPOINT=hub.url, **environment)
                    assert [run["outcome"] for run in json.loads(found.stdout)["runs"]] == ["completed"] * len(names)
            self.requests[model] = hub.requests
        return commit


def studies(model: str) -> list[str]:
    """The studies of a suite whose checkpoint comes from the hub; times are of seeded weights."""
    suite = dryrun.suite_of(model)
    assert suite is not None
    return [name for name in suite.studies if freezing.load_study(name)[0]["checkpoint"]["source"].startswith("hf:")]


@pytest.fixture(scope="module")
def models(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:  # noqa: F811
    ledger = Ledger(checkout, tmp_path_factory.mktemp("hub"))
    for name, data in (("tide.txt", TEXT), ("test.jsonl", taskfiles.TEST), ("train.jsonl", TRAIN)):
        (ledger.folder / name).write_bytes(data)
    for name in [name for name in ledger.environment if name.startswith("HF_") or name == "TRITON_INTERPRET"]:
        del ledger.environment[name]
    ledger.environment |= {"HF_HOME": str(ledger.folder / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ledger("init")
    return Models(ledger)


JUDGED = {"established", "not established", "degraded"}
"""What a loss that was measured can come to: nobody knows beforehand what seeded weights make of a format."""


def rows_of(models: Models, model: str) -> list[dict[str, Any]]:
    """The rows of the status table whose weights are those of ``model``'s repository; times are of seeded weights."""
    return [row for row in models.rows() if row["source"].startswith(f"hf:{hubmodels.IDS[model]}@")]


def arm(row: dict[str, Any], side: str = "arm") -> str:
    """The name of a row's arm, or of its baseline."""
    name: str = row[side].partition(":")[0]
    return name


@pytest.mark.parametrize("model", hubmodels.IDS)
def test_the_studies_of_a_model_run_on_what_its_hub_serves_and_stand_in_the_table(models: Models, model: str) -> None:
    commit = models.ran(model)
    rows = rows_of(models, model)
    source = f"hf:{hubmodels.IDS[model]}@{commit}"
    assert {(row["source"], row["revision"]) for row in rows} == {(source, commit)}
    assert {row["study"] for row in rows} == {f"{name}-tiny" for name in studies(model)}
    for name in studies(model):
        shipped, _ = freezing.load_study(name)
        own = [row for row in rows if row["study"] == f"{name}-tiny"]
        (run,) = {run for row in own for run in row["runs"]}
        document = models.run(run)
        spec = document["spec"]
        assert spec["checkpoint"]["source"] == source and spec["checkpoint"]["name"] == shipped["checkpoint"]["name"]
        files = {file["path"] for file in spec["checkpoint"]["files"]}
        assert {"config.json", "generation_config.json", "tokenizer.json"} < files and not files & {"README.md", "consolidated.safetensors"}
        # what was frozen is what ships, but for what the study of the test overrides
        assert [item["name"] for item in spec["arms"]] == [item["name"] for item in shipped["arms"]]
        assert spec["contrasts"] == shipped.get("contrasts", []) and spec["tolerances"] == shipped.get("tolerances", {})
        assert sorted((arm(row), row["status"]) for row in own) == sorted(
            (item["candidate"], item["status"]) for item in document["decisions"]
        )
        assert not any(row["synthetic"] for row in own)
        MEANINGS[spec["scope"]](name, own)
    fetched = [request for request in models.requests[model] if request.startswith("GET") and request.endswith(".safetensors")]
    assert fetched and not any("consolidated" in request for request in fetched)


def of_losses(name: str, rows: list[dict[str, Any]]) -> None:
    """Every contrast is judged by its bounds; the reference cache in the control's format is the stock one, bit for bit."""
    shipped, _ = freezing.load_study(name)
    asked = sorted((one["candidate"], one["baseline"]) for one in shipped["contrasts"])
    assert sorted((arm(row), arm(row, "baseline")) for row in rows) == asked
    assert {row["claim"] for row in rows} <= JUDGED
    (same,) = [row for row in rows if (arm(row), arm(row, "baseline")) == ("k16v16", "native")]
    assert same["claim"] == "established" and "kl_p999: upper bound 0 " in same["reason"]


def of_production(name: str, rows: list[dict[str, Any]]) -> None:
    """Where the kernels do not run, the fused arms are refused, and no check of theirs has failed."""
    assert {arm(row) for row in rows} == {"k16v16", "k16v8", "k8v8", "k16v8-dynamic"}
    assert {row["claim"] for row in rows} == {"unsupported"} and all("device" in row["reason"] for row in rows)


def of_tasks(name: str, rows: list[dict[str, Any]]) -> None:
    """Seeded weights answer nothing right, which says nothing about a format."""
    assert {arm(row) for row in rows} == {"k16v16", "k16v8", "k8v8"} and len(rows) == 6
    assert {row["claim"] for row in rows} == {"invalid"}
    assert all(row["reason"].startswith(("task insensitive: ", "suspicious: ")) for row in rows)


def of_captures(name: str, rows: list[dict[str, Any]]) -> None:
    """Loading, execution and capture work, with exactly the ids suppressed that the generation config declares."""
    assert [(arm(row), row["claim"]) for row in rows] == [("native", "passes")]


def of_measured(name: str, rows: list[dict[str, Any]]) -> None:
    """Figures without a verdict."""
    assert {row["claim"] for row in rows} == {"measured"}


MEANINGS: dict[str, Callable[[str, list[dict[str, Any]]], None]] = {
    "quality.loss": of_losses,
    "quality.task": of_tasks,
    "production": of_production,
    "capability": of_captures,
    "calibration": of_measured,
    "state memory": of_measured,
}


def test_weights_that_are_published_in_fp8_are_said_to_be(models: Models) -> None:
    for model, expected in (("ministral-3-8b", True), ("qwen3-8b", False)):
        models.ran(model)
        for run in {run for row in rows_of(models, model) for run in row["runs"]}:
            assert any("weights in fp8" in warning for warning in models.run(run)["warnings"]) is expected


def test_layers_of_each_kind_are_measured_as_the_model_has_them(models: Models) -> None:
    kinds = {}
    for model in ("qwen3-5-9b", "gemma-4-12b", "qwen3-8-27b", "gemma-4-26b-a4b"):
        models.ran(model)
        (run,) = {run for row in rows_of(models, model) if row["scope"] == "state memory" for run in row["runs"]}
        arms = {item["name"]: item for item in models.run(run)["arms"]}
        kinds[model] = [layer["kind"] for layer in arms["k16v8"]["geometry"]["measured"]]
    assert kinds["qwen3-5-9b"] == ["recurrent", "recurrent", "recurrent", "attention"]
    assert kinds["qwen3-8-27b"] == kinds["qwen3-5-9b"] * 2
    assert kinds["gemma-4-12b"] == kinds["gemma-4-26b-a4b"] == [*["sliding"] * 5, "attention"]


def test_a_branch_that_moved_on_is_another_checkpoint_which_nobody_measured(models: Models) -> None:
    commit = models.ran("qwen3-8b")
    ledger = models.ledger
    with hubs.serve(hubmodels.IDS["qwen3-8b"]) as hub:
        place = ledger.folder / "later"
        place.mkdir()
        made = hubmodels.files("qwen3-8b", place)
        later = hub.commit(made | {"generation_config.json": made["generation_config.json"] + b"\n"})
        ledger("freeze", "qwen3-8b-gsm8k.toml", "-o", "frozen-later", HF_ENDPOINT=hub.url)
    spec = json.loads((ledger.folder / "frozen-later" / "spec.json").read_bytes())
    assert later != commit and spec["checkpoint"]["revision"] == later
    rows = [row for row in rows_of(models, "qwen3-8b") if row["study"] == "qwen3-8b-gsm8k-tiny"]
    assert {(row["revision"], row["claim"]) for row in rows} == {(commit, "invalid"), (later, "not measured")}


def test_one_table_holds_all_seven_models_and_their_times_as_what_they_are(models: Models) -> None:
    for model in hubmodels.IDS:
        models.ran(model)
    ledger = models.ledger
    suites = [suite for model in hubmodels.IDS if (suite := dryrun.suite_of(model)) is not None]
    times = [name for suite in suites for name in suite.studies if name.startswith("performance-")]
    for name in times:
        ledger("freeze", name, "-o", f"frozen-{name}")
    document = ledger.json("status")
    with TestClient(create_app(ledger.folder / "evidence"), base_url="http://127.0.0.1") as client:
        assert client.get("/status.json").json() == document
        page = html.unescape(client.get("/").text)
    table = ledger("status").stdout
    for model, repository in hubmodels.IDS.items():
        name = freezing.load_study(studies(model)[0])[0]["checkpoint"]["name"]
        assert f">{name}</h2>" in page and f"hf:{repository}@{models.commits[model]}" in page and name in table
        assert {row["scope"] for row in rows_of(models, model)} == {freezing.load_study(study)[0]["scope"] for study in studies(model)}
    timed = [row for row in document["rows"] if row["scope"] == "performance"]
    assert {row["study"] for row in timed} == set(times)
    assert {row["claim"] for row in timed} == {"synthetic not measured"}  # frozen, and not run: no word of failure
    assert {row["claim"] for row in document["rows"]} >= {"established", "passes", "measured", "invalid", "unsupported"}
    assert all(row["reason"] for row in document["rows"])
    assert ledger.json("verify")["ok"]
