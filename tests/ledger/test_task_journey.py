"""A task from the study to the verification: real processes, a real runner, a tiny seeded model and invented items."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ledger.records import gsm8k
from ledger.web import create_app
from tests import taskfiles
from tests.ledger.test_cli import SEEDED, Ledger, checkout, wait_until  # noqa: F401  (a fixture)

ARMS = (("native", "control", "native", "fp32", "fp32", ""), ("k16v16", "control", "reference", "bf16", "bf16", ""))
ARMS += (("k16v16-repeat", "repeat", "reference", "bf16", "bf16", 'repeats = "k16v16"\nchunk = 32'),)
ARMS += (("k16v8", "candidate", "reference", "bf16", "fp8_e4m3", 'scales = "unit"'),)


def study(folder: Path, *, items: int = 7, test: bytes = taskfiles.TEST, count: int = taskfiles.LINES, more: str = "") -> str:
    """A study beside its files."""
    (folder / "test.jsonl").write_bytes(test)
    (folder / "train.jsonl").write_bytes(taskfiles.TRAIN)
    files = "".join(
        f'[task.{side}]\ndataset = "{side}.jsonl"\ndataset_name = "Jars, {side}"\ndataset_license = "CC0-1.0"\n'
        f'sha256 = "{hashlib.sha256(data).hexdigest()}"\nitems = {number}\n'
        for side, data, number in (("test", test, count), ("train", taskfiles.TRAIN, 4))
    )
    arms = "".join(
        f'[[arms]]\nname = "{name}"\nrole = "{role}"\nimplementation = "{how}"\ncompute = "fp32"\n'
        f'keys = "{keys}"\nvalues = "{values}"\n{own}\n'
        for name, role, how, keys, values, own in ARMS
    )
    contrasts = "".join(
        f'[[contrasts]]\ncandidate = "k16v8"\nbaseline = "k16v16"\nfamily = "{reading}"\n' for reading in ("strict", "flexible")
    )
    (folder / "jars.toml").write_text(
        f'study = "jars"\ntitle = "Jars on shelves"\nscope = "quality.task"\n[checkpoint]\n{SEEDED}\n[task]\n'
        f'definition = "gsm8k"\nversion = "{gsm8k.VERSION}"\ndefinition_sha256 = "{gsm8k.GSM8K.sha256}"\n'
        f"items = {items}\nshots = 0\nchat_template = false\nbos = true\nnew_tokens = 24\nbatch = 3\nchunk = 16\nmargin = 0.02\n"
        f"{more}{files}{arms}{contrasts}",
        encoding="utf-8",
    )
    return "jars.toml"


@pytest.fixture(scope="module")
def made(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ledger, str]:  # noqa: F811
    """An archive with one run of a task, and its id."""
    ledger = Ledger(checkout, tmp_path_factory.mktemp("tasks"))
    ledger("init")
    said = ledger("run", study(ledger.folder)).stderr
    assert "7 items, 4 arms" in said and "A margin of 0.02 asks for about" in said
    return ledger, ledger.json("runs")[0]["id"]


def test_a_task_runs_is_shown_and_verifies(made: tuple[Ledger, str]) -> None:
    ledger, run = made
    found = ledger.json("show", run)
    assert found["outcome"] == "completed" and found["spec"]["task"]["items"] == list(range(7))
    assert [(item["family"], item["status"]) for item in found["decisions"]] == [("strict", "invalid"), ("flexible", "invalid")]
    assert all(item["reason"].startswith(("task insensitive", "suspicious")) for item in found["decisions"])
    assert {item["name"] for item in found["evidence"]} == {"result.json", "answers.jsonl", "task/test.jsonl"}
    figures = {(arm["name"], item["name"]) for arm in found["arms"] for item in arm["measurements"]}
    assert {("k16v8", "strict/accuracy_difference_newcombe"), ("k16v16-repeat", "flexible/discordance")} <= figures
    assert [(segment["first"], segment["last"]) for segment in found["segments"]] == [(0, 7)]
    words = ledger("show", run).stdout
    assert "flexible/accuracy" in words and "identical_answers" in words
    rows = ledger.json("status")["rows"]
    assert {row["claim"] for row in rows} == {"synthetic invalid"} and len(rows) == 2
    assert {row["workload"].rpartition(", ")[2] for row in rows} == {"strict reading", "flexible reading"}
    assert "7 of 400 items of Jars, test" in ledger("status").stdout
    assert ledger.json("verify")["ok"]


def test_a_task_is_frozen_only_from_files_that_hold_what_the_study_says(made: tuple[Ledger, str], tmp_path: Path) -> None:
    ledger = Ledger(made[0].checkout, tmp_path)
    ledger("init")
    for change, words in (
        ({"count": 401}, "another number of items"),
        ({"test": taskfiles.TEST.replace(b"\n", b"\r\n")}, "CRLF line endings"),
        ({"test": taskfiles.TEST + taskfiles.lines(range(1)), "count": 401}, "asks a question twice"),
        ({"more": "confidence = 1\n"}, "the confidence is impossible"),
        ({"more": "seed = 1\n"}, "task.seed"),
        ({"items": 401}, "task.items are more than the file of questions holds"),
    ):
        assert words in ledger("freeze", study(tmp_path, **change), "-o", "frozen", expect=2).stderr  # type: ignore[arg-type]
    assert "A margin of 0.02 asks for about" in ledger("freeze", study(tmp_path), "-o", "frozen").stderr
    assert "A margin of 0.02 asks for about" in ledger("run", study(tmp_path), "--dry-run").stdout
    (tmp_path / "test.jsonl").unlink()
    assert "(task.test.dataset) is missing" in ledger("freeze", "jars.toml", "-o", "other", expect=2).stderr


def test_a_task_is_reproduced_bit_for_bit(made: tuple[Ledger, str], tmp_path: Path) -> None:
    shutil.copytree(made[0].folder, tmp_path / "copy")
    ledger = Ledger(made[0].checkout, tmp_path / "copy")
    assert "bit-identical" in ledger("reproduce-run", made[1], LEDGER_DATA=str(tmp_path / "copy")).stdout
    assert ledger.json("verify")["ok"]


def test_an_answer_that_was_altered_is_found(made: tuple[Ledger, str], tmp_path: Path) -> None:
    shutil.copytree(made[0].folder, tmp_path / "copy")
    ledger = Ledger(made[0].checkout, tmp_path / "copy")
    listed = {item["name"]: item["sha256"] for item in ledger.json("show", made[1])["evidence"]}
    (place,) = [path for path in (ledger.folder / "evidence").rglob("*") if listed["answers.jsonl"][-40:] in path.name]
    place.chmod(0o644)
    place.write_bytes(place.read_bytes().replace(b'"tokens":', b'"tokenz":'))
    found = ledger.json("verify", expect=1)["findings"]
    assert any(listed["answers.jsonl"] in item["object"] for item in found)


def test_a_killed_run_is_resumed_and_recorded_with_its_segments(made: tuple[Ledger, str], tmp_path: Path) -> None:
    ledger = Ledger(made[0].checkout, tmp_path)
    ledger("init")
    ledger("freeze", study(tmp_path, items=200), "-o", "frozen")
    command = [sys.executable, "-P", "-m", "runners", "frozen", "out", "--quiet"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ledger.environment, stderr=subprocess.PIPE, text=True)

    def reached() -> bool:
        try:
            return json.loads((tmp_path / "out/result.json").read_bytes())["segments"][-1]["last"] >= 3
        except (OSError, ValueError):
            return False

    wait_until(reached, process)
    process.kill()
    process.communicate()
    shutil.copytree(tmp_path / "out", tmp_path / "killed")
    assert "failed" in ledger("record", "killed").stdout
    done = subprocess.run([*command, "--resume"], cwd=tmp_path, env=ledger.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ledger("record", "out")
    found = next(ledger.json("show", run["id"]) for run in ledger.json("runs") if run["outcome"] == "completed")
    first, second = found["segments"]
    assert first["first"] == 0 and first["last"] == second["first"] >= 3 and second["last"] == 200
    assert ledger.json("verify")["ok"]


def test_the_page_of_a_run_says_what_was_asked_and_how_intervals_came_about(made: tuple[Ledger, str]) -> None:
    ledger, run = made
    with TestClient(create_app(ledger.folder / "evidence"), base_url="http://127.0.0.1") as client:
        text = client.get(f"/runs/{run}").text
        assert client.get(f"/runs/{run}.json").json()["spec"]["task"]["definition"] == "gsm8k"
        assert "strict reading" in client.get("/").text
    for words in (
        "gsm8k of lm-eval 0.4.13",
        "7 items of Jars, test",
        "Wilson&#39;s of a share",
        "flexible/accuracy_difference_newcombe",
        "answers.jsonl",
    ):
        assert words in text
