"""The command line, as a user meets it: real processes, real archives, a real runner on a seeded model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ledger import records
from tests import factories

ROOT = Path(__file__).resolve().parents[2]
TEXT = ("The tide came in over the flat sand, and went out again before the children were awake. " * 400).encode()


class Ledger:
    """Runs ``ledger`` of one checkout in one folder."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self.folder = checkout, folder
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("LEDGER_", "GIT_"))}
        self.environment |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "LEDGER_CACHE": str(folder / "cache"), "COLUMNS": "80"}

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-P", "-W", "error", "-m", "ledger.cli", *map(str, arguments)]

    def __call__(self, *arguments: object, expect: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if expect is not None:
            assert done.returncode == expect, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *arguments: object, expect: int = 0) -> Any:
        """The document that a command writes: strict JSON and nothing else."""

        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is no JSON")

        return json.loads(self(*arguments, "--json", expect=expect).stdout, parse_constant=refuse)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def study(path: Path, *, checkpoint: str, documents: int = 3, bos: str = "true", bound: float = 0.05) -> Path:
    """A small study beside its text."""
    import hashlib

    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "tide.txt").write_bytes(TEXT)
    arms = (("native", "control", "native", "fp32", "fp32", ""), ("k16v16", "control", "reference", "bf16", "bf16", ""))
    arms += (("k16v8", "candidate", "reference", "bf16", "fp8_e4m3", 'scales = "unit"'),)
    path.write_text(
        f"""
study = "tide"
title = "A seeded model over a small text"
scope = "quality.loss"
[checkpoint]
{checkpoint}
[workload]
dataset = "tide.txt"
dataset_name = "The tide"
dataset_license = "CC0-1.0"
sha256 = "{hashlib.sha256(TEXT).hexdigest()}"
inputs = "store"
documents = {documents}
tokens = 48
bos = {bos}
split_special_tokens = true
chunk = 16
[[contrasts]]
candidate = "k16v16"
baseline = "native"
family = "loss"
[[contrasts]]
candidate = "k16v8"
baseline = "k16v16"
family = "loss"
[families.loss]
resamples = 199
[[families.loss.gates]]
statistic = "loss_difference_mean"
bound = {bound}
harm = {max(bound, 0.1)}
"""
        + "".join(
            f'[[arms]]\nname = "{name}"\nrole = "{role}"\nimplementation = "{how}"\ncompute = "fp32"\n'
            f'keys = "{keys}"\nvalues = "{values}"\n{more}\n'
            for name, role, how, keys, values, more in arms
        ),
        encoding="utf-8",
    )
    return path


SEEDED = """
name = "Seeded llama"
source = "random:llama#7"
license = "CC0-1.0"
config = {hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, \
head_dim = 8, vocab_size = 256, max_position_embeddings = 256, bos_token_id = 1}
"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean git repository with this code, so that a run can be matched to a commit whatever is being edited here."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("ledger", "runners", "migrations", "templates"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    (place / ".gitignore").write_text("__pycache__/\n")
    plain = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=Tester", "-c", "user.email=tester@example.org", "commit", "-q", "-m", "All of it"],
    ):
        subprocess.run(["git", *command], cwd=place, env=plain, check=True)
    return place


@pytest.fixture
def ledger(checkout: Path, tmp_path: Path) -> Ledger:
    found = Ledger(checkout, tmp_path)
    found("init")
    return found


@pytest.fixture(scope="module")
def recorded(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ledger, str]:
    """An archive with one real run, and its digest. Tests that append take a copy."""
    found = Ledger(checkout, tmp_path_factory.mktemp("recorded"))
    study(found.folder / "tide.toml", checkpoint=SEEDED)
    found("init")
    found("run", "tide.toml")
    return found, found.json("runs")[0]["id"]


@pytest.fixture
def copied(recorded: tuple[Ledger, str], tmp_path: Path) -> tuple[Ledger, str]:
    original, run = recorded
    shutil.copytree(original.folder, tmp_path / "copy")
    return Ledger(original.checkout, tmp_path / "copy"), run


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 120) -> Any:
    """What ``condition`` gives once it is true; fails where the process ends first."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)  # between two looks at a file that another process writes
    raise AssertionError("it did not come to that")


def under_way(folder: Path) -> bool:
    """Whether the runner has finished a document but not all of them."""
    try:
        found = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return False
    return found["outcome"] == "running" and len(found["documents"]) > 0


def runner_of(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


# ---------------------------------------------------------------- the parser


def test_help_is_quick_and_names_every_command(ledger):
    from ledger import cli

    ledger("--help")
    started = time.monotonic()
    text = ledger("--help").stdout
    assert time.monotonic() - started < 2.0  # 0.3 s on an idle machine
    for found in cli.app.registered_commands:
        assert str(found.name) in text


def test_the_version_is_printed(ledger):
    from ledger import __version__

    assert ledger("--version").stdout == f"kv-evidence-ledger {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["show"], ["verify", "--nonsense"], ["serve", "--port", "70000"], ["supersede", "abcd"], ["freeze", "demo"]],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(ledger, arguments):
    done = ledger(*arguments, expect=2)
    assert done.stdout == "" and done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["show", "abcd"], "No run of this archive begins so"),
        (["show", "xyz"], "names no run"),
        (["compare", "abcd", "abcd"], "No run"),
        (["retract", "abcd", "--author", "A", "--reason", "R"], "No run"),
        (["reproduce-run", "abcd"], "No run"),
        (["run", "no-such-study"], "There is no study"),
        (["freeze", "no-such-study", "-o", "frozen"], "There is no study"),
        (["record", "nowhere"], "does not exist"),
        (["init"], "archive already"),
        (["--archive", "elsewhere", "status"], "ledger init"),
        (["status", "--archive", "elsewhere"], "ledger init"),
        (["verify", "--archive", "elsewhere"], "archive"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_exits_with_2_and_says_what_to_do(ledger, arguments, named):
    done = ledger(*arguments, expect=2)
    assert done.stdout == ""
    assert named in done.stderr and done.stderr.startswith("error: ")


def test_the_archive_is_chosen_before_or_after_the_command_or_by_the_environment(ledger):
    ledger("--archive", "one", "init")
    assert ledger.json("--archive", "one", "runs") == []
    assert ledger.json("runs", "--archive", "one") == []
    assert json.loads(ledger("runs", "--json", LEDGER_ARCHIVE="one").stdout) == []
    assert (ledger.folder / "one/log/head").is_file()
    ledger("init", "two")
    assert (ledger.folder / "two/log/head").is_file()


def test_another_database_is_used_where_a_url_names_it(ledger):
    ledger("--database", f"sqlite:///{ledger.folder}/index.db", "rebuild")
    assert (ledger.folder / "index.db").is_file()
    assert ledger.json("--database", f"sqlite:///{ledger.folder}/index.db", "runs") == []


def test_an_empty_archive_verifies_and_shows_empty_tables(ledger):
    assert ledger.json("verify")["ok"] is True
    assert ledger.json("status") == {"rows": [], "reported": [], "recipes": []}
    assert "ledger run demo" in ledger("status").stdout and "ledger run demo" in ledger("runs").stdout


def test_a_file_where_the_archive_should_be_is_an_error_without_a_traceback(ledger):
    (ledger.folder / "file").write_text("x")
    assert "error: " in ledger("--archive", "file", "init", expect=2).stderr


# ---------------------------------------------------------------- a real run


def test_a_run_is_recorded_matched_to_its_commit_and_verifies(recorded):
    ledger, run = recorded
    document = ledger.json("show", run[:6])
    assert document["id"] == run and document["outcome"] == "completed"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ledger.checkout, capture_output=True, text=True, check=True).stdout.strip()
    assert document["harness"]["matched"] == "commit" and document["harness"]["commit"] == commit
    report = ledger.json("verify")
    assert report["ok"] is True and report["findings"] == []
    assert set(report["checked"]) == {"entries", "objects", "bytes", "measurements"}
    assert report["checked"]["entries"] == 2 and report["checked"]["measurements"] > 0


def test_the_status_document_has_its_shape(recorded):
    ledger, run = recorded
    rows = ledger.json("status")["rows"]
    wanted = {"model", "checkpoint", "arm", "scope", "workload", "hardware", "claim", "reason", "runs"}
    assert rows and all(wanted <= set(row) for row in rows)
    assert all(row["runs"] == [run] and row["claim"].startswith("synthetic ") for row in rows)


def test_the_runs_document_has_its_shape(recorded):
    ledger, run = recorded
    (row,) = ledger.json("runs")
    assert {"id", "sequence", "study", "model", "scope", "outcome", "recorded_at"} <= set(row)
    assert (row["id"], row["study"], row["outcome"]) == (run, "tide", "completed")


def test_the_show_document_has_its_shape(recorded):
    ledger, run = recorded
    document = ledger.json("show", run)
    assert {"spec", "arms", "decisions", "evidence", "harness", "checkpoint", "host", "relations"} <= set(document)
    for arm in document["arms"]:
        assert {"name", "role", "outcome", "requested", "effective", "measured", "geometry", "backings", "measurements"} <= set(arm)
        assert {"implementation", "compute", "keys", "values", "scales"} <= set(arm["requested"])
        assert all({"bytes", "dtype", "kind", "layers"} <= set(backing) for backing in arm["backings"])
    for item in document["evidence"]:
        assert {"name", "sha256", "size", "media_type"} <= set(item)


def test_piped_text_has_no_escape_codes_and_cuts_nothing(recorded):
    ledger, run = recorded
    for arguments in (["status"], ["runs"], ["show", run], ["compare", run, run], ["verify"]):
        text = ledger(*arguments, FORCE_COLOR="1", TERM="xterm-256color").stdout
        assert "\x1b" not in text and "…" not in text
    assert run in ledger("show", run).stdout
    for item in ledger.json("show", run)["evidence"]:
        assert item["sha256"] in ledger("show", run).stdout


def test_a_locale_of_ascii_alone_spoils_nothing(recorded):
    ledger, run = recorded
    assert ledger("show", run, PYTHONIOENCODING="ascii", LC_ALL="C").stdout


def test_check_turns_a_failed_decision_into_exit_1(copied):
    ledger, run = copied
    assert all(item["status"] == "established" for item in ledger.json("show", run)["decisions"])
    ledger("show", run, "--check")
    strict = study(ledger.folder / "strict" / "tide.toml", checkpoint=SEEDED, bound=-0.01)
    ledger("run", strict, "--check", expect=1)


def test_two_runs_are_compared(recorded):
    ledger, run = recorded
    document = ledger.json("compare", run, run)
    assert document["same_spec"] is True and not any(item["differ"] for item in document["facts"])


def test_a_changed_byte_makes_verify_exit_with_1_and_name_the_object(copied):
    ledger, run = copied
    path = next(
        ledger.folder / "evidence/objects" / item["sha256"][:2] / item["sha256"][2:]
        for item in ledger.json("show", run)["evidence"]
        if item["name"] == "samples/0000.safetensors"
    )
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    report = ledger.json("verify", expect=1)
    assert report["ok"] is False
    assert all({"kind", "object", "detail", "next"} <= set(item) for item in report["findings"])
    assert any(path.parent.name + path.name in item["object"] + item["detail"] for item in report["findings"])
    assert "finding" in ledger("verify", expect=1).stdout


def test_a_run_is_superseded_and_retracted_and_both_stay_readable(copied):
    ledger, run = copied
    again = study(ledger.folder / "again" / "tide.toml", checkpoint=SEEDED, documents=2)
    ledger("run", again)
    other = next(row["id"] for row in ledger.json("runs") if row["id"] != run)
    ledger("supersede", run[:8], "--by", other[:8], "--author", "the maintainers", "--reason", "more documents")
    ledger("retract", other, "--author", "the maintainers", "--reason", "of no use")
    rows = {row["id"]: row for row in ledger.json("runs")}
    assert rows[run]["superseded_by"] == other and rows[other]["retracted"]
    assert "of no use" in ledger("show", other).stdout and "more documents" in ledger("show", run).stdout
    assert ledger.json("verify")["ok"] is True


def test_what_others_say_and_a_recipe_are_recorded_shown_apart_and_retracted(copied):
    ledger, run = copied
    report, recipe = ledger.folder / "report.json", ledger.folder / "recipe.json"
    said = records.plain(factories.report())
    report.write_text(json.dumps({name: value for name, value in said.items() if name not in ("format", "evidence")}))
    (ledger.folder / "document").write_bytes(factories.DOCUMENT)
    assert "give the document's file with --document" in ledger("report", report, expect=2).stderr
    assert "Recorded as entry" in ledger("report", report, "--document", "document").stdout
    assert "Recorded already" in ledger("report", report, "--document", "document").stdout
    rows = ledger.json("status")["rows"]
    row = next(row for row in rows if run in row["runs"] and row["arm"].startswith("k16v8:"))
    policy = {"implementation": "reference", "compute": "fp32", "keys": "bf16", "values": "fp8_e4m3", "scales": "unit"}
    needs = [{"name": "msgspec", "version": "0.23.0", "sha256": ["ab" * 32]}]
    fields = {"name": "tide", "title": "The tide", "checkpoint": row["checkpoint"], "policy": policy, "steps": ["pip install -r tide.txt"]}
    recipe.write_text(json.dumps({**fields, "requirements": needs, "claims": ["0" * 64]}))
    assert "cites what cannot validate it" in ledger("recipe", "add", recipe, expect=2).stderr
    recipe.write_text(json.dumps({**fields, "requirements": needs, "claims": [row["key"]]}))
    assert "It is synthetic" in ledger("recipe", "add", recipe).stdout
    (shown,) = ledger.json("recipes")
    assert [claim["key"] for claim in shown["claims"]] == [row["key"]] and shown["word"].startswith("synthetic ")
    document = ledger.json("status")
    assert document["rows"] == rows and document["recipes"] == [shown]
    assert {item["status"] for item in document["reported"]} == {"reported"}
    text = ledger("status").stdout
    assert text.index("The tide") < text.index("REPORTED by documents outside") < text.index("Model B")
    assert "tide" in ledger("recipes").stdout
    for name in (document["reported"][0]["report"], shown["recipe"]):
        ledger("retract", name[:10], "--author", "the maintainers", "--reason", "of no use")
    after = ledger.json("status")
    assert {item["status"] for item in after["reported"]} == {"retracted"} and after["recipes"][0]["word"] == "retracted"
    assert ledger.json("verify")["ok"] is True
    ledger("rebuild")
    assert ledger.json("status") == after


@pytest.mark.parametrize("reason", ["", "   "])
def test_a_correction_without_a_reason_is_refused(copied, reason):
    ledger, run = copied
    assert "reason" in ledger("retract", run, "--author", "A", "--reason", reason, expect=2).stderr


def test_a_run_cannot_supersede_itself(copied):
    ledger, run = copied
    ledger("supersede", run, "--by", run, "--author", "A", "--reason", "R", expect=2)


def test_the_database_is_made_anew_and_answers_the_same(copied):
    ledger, run = copied
    before = ledger.json("show", run), ledger.json("status"), ledger.json("runs")
    ledger("rebuild")
    assert (ledger.json("show", run), ledger.json("status"), ledger.json("runs")) == before
    (ledger.folder / "evidence/ledger.db").unlink()
    assert (ledger.json("show", run), ledger.json("status"), ledger.json("runs")) == before


def test_the_database_migrates_only_when_told(copied):
    ledger, _ = copied
    ledger("migrate")
    assert ledger.json("verify")["ok"] is True


def test_freeze_run_and_record_are_three_steps_and_recording_twice_is_once(ledger):
    study(ledger.folder / "tide.toml", checkpoint=SEEDED, documents=2)
    ledger("freeze", "tide.toml", "-o", "frozen")
    assert records.decode(records.Spec, (ledger.folder / "frozen/spec.json").read_bytes(), "spec.json").study == "tide"
    subprocess.run(
        [sys.executable, "-P", "-m", "runners", "frozen", "out"], cwd=ledger.folder, env=ledger.environment, capture_output=True, check=True
    )
    first, second = ledger.json("record", "out"), ledger.json("record", "out")
    assert first["id"] == second["id"] and len(ledger.json("runs")) == 1
    assert "cannot reproduce it" in ledger("record", "out", "--reproduces", first["id"][:8], expect=2).stderr
    assert ledger.json("verify")["ok"] is True


def test_a_result_of_another_archive_is_refused_and_names_what_to_do(ledger):
    frozen = factories.spec()
    files = factories.samples(frozen)
    factories.write_result_folder(ledger.folder / "out", factories.result(frozen, files), files)
    done = ledger("record", "out", expect=2)
    assert "ledger freeze" in done.stderr and "--archive" in done.stderr
    assert ledger.json("verify")["ok"] is True


def test_a_place_to_keep_the_run_is_kept(ledger):
    study(ledger.folder / "tide.toml", checkpoint=SEEDED, documents=2)
    document = ledger.json("run", "tide.toml", "--keep", "kept")
    assert document["outcome"] == "completed"
    assert (ledger.folder / "kept/result/result.json").is_file() and (ledger.folder / "kept/frozen/spec.json").is_file()
    assert "not empty" in ledger("run", "tide.toml", "--keep", "kept", expect=2).stderr


def test_a_study_that_cannot_run_is_recorded_as_failed_with_its_reason(ledger):
    study(ledger.folder / "tide.toml", checkpoint=SEEDED.replace(", bos_token_id = 1", ", bos_token_id = 999"), documents=2)
    done = ledger("run", "tide.toml", expect=2)
    (row,) = ledger.json("runs")
    assert row["outcome"] == "failed" and row["reason"]
    assert row["reason"].splitlines()[0] in done.stdout + done.stderr
    assert ledger.json("verify")["ok"] is True


def test_missing_runners_are_named_with_the_command_that_installs_them(ledger, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(ledger.checkout, bare, ignore=shutil.ignore_patterns("runners", ".git"))
    (bare / "runners").mkdir()  # a package without tests, before any that this interpreter has installed
    (bare / "runners/__init__.py").touch()
    done = Ledger(bare, ledger.folder)("run", "demo", expect=2)
    assert "pip install 'kv-evidence-ledger[runners]'" in done.stderr


# ---------------------------------------------------------------- interrupted


def long_run(ledger: Ledger) -> tuple[subprocess.Popen[str], Path]:
    study(ledger.folder / "tide.toml", checkpoint=SEEDED, documents=600)
    process = ledger.start("run", "tide.toml", "--keep", "kept")
    result = ledger.folder / "kept/result"
    wait_until(lambda: under_way(result), process)
    return process, result


def test_ctrl_c_ends_the_run_once_and_records_it_as_interrupted(ledger):
    process, _ = long_run(ledger)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, output + errors
    (row,) = ledger.json("runs")
    assert row["outcome"] == "interrupted" and row["id"] in errors
    assert ledger.json("show", row["id"])["documents"]
    assert ledger.json("verify")["ok"] is True


def test_a_runner_killed_half_way_is_recorded_as_failed_with_its_evidence(ledger):
    process, _ = long_run(ledger)
    os.kill(runner_of(process), signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2, output + errors
    (row,) = ledger.json("runs")
    assert (row["outcome"], row["reason"]) == ("failed", "the runner was killed")
    document = ledger.json("show", row["id"])
    assert any(item["name"].startswith("samples/") for item in document["evidence"])
    assert all(item["status"] == "invalid" for item in document["decisions"])
    assert ledger.json("verify")["ok"] is True


def test_a_ledger_killed_half_way_leaves_an_archive_that_verifies_and_a_result_to_record(ledger):
    process, result = long_run(ledger)
    runner = runner_of(process)
    process.kill()
    process.communicate()
    os.kill(runner, signal.SIGKILL)
    assert ledger.json("verify")["ok"] is True
    assert ledger.json("record", result)["outcome"] == "failed"
    assert ledger.json("verify")["ok"] is True


# ---------------------------------------------------------------- reproduced


def test_a_run_is_reproduced_bit_for_bit_from_its_commit(copied):
    ledger, run = copied
    # The code at hand has moved on; what runs is the recorded commit.
    document = ledger.json("reproduce-run", run[:8])
    assert (document["verdict"], document["harness"], document["same_hardware"]) == ("bit-identical", "recorded", True)
    assert len(ledger.json("runs")) == 2
    assert "bit-identical" in ledger("show", run).stdout
    assert ledger.json("verify")["ok"] is True


def test_a_run_is_reproduced_with_the_code_at_hand_where_asked_and_the_record_says_so(copied):
    ledger, run = copied
    document = ledger.json("reproduce-run", run, "--current-harness")
    assert (document["verdict"], document["harness"]) == ("bit-identical", "current")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint on disk: weights, configuration, tokenizer."""
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    place = tmp_path_factory.mktemp("checkpoint") / "tiny"
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator([TEXT.decode()], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<unk>"], show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>").save_pretrained(place)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=300, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


def test_a_changed_weight_byte_is_not_comparable_and_the_file_is_named(checkout, tiny, tmp_path):
    ledger = Ledger(checkout, tmp_path)
    shutil.copytree(tiny, tmp_path / "tiny")
    study(tmp_path / "tide.toml", checkpoint='name = "Tiny"\nsource = "file:tiny"\nlicense = "CC0-1.0"', documents=2)
    ledger("init")
    run = ledger.json("run", "tide.toml")["id"]
    weights = tmp_path / "tiny/model.safetensors"
    before = next(item for item in ledger.json("show", run)["checkpoint"]["files"] if item["path"] == "model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    document = ledger.json("reproduce-run", run, "--inputs", tmp_path, expect=4)
    assert (document["verdict"], document["reproduced"]) == ("not comparable", None)
    assert "model.safetensors" in document["reason"] and before["sha256"] in document["reason"]
    assert re.search(r"found: sha256 [0-9a-f]{64}", document["reason"])
    assert [row["id"] for row in ledger.json("runs")] == [run]
    assert ledger.json("verify")["ok"] is True
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert ledger.json("reproduce-run", run, "--inputs", tmp_path)["verdict"] == "bit-identical"


def test_a_closed_standard_output_is_no_fault(ledger: Ledger) -> None:
    ledger("init", "archive")
    command = ledger.command("status", "--archive", "archive")
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command],
        cwd=ledger.folder,
        env=ledger.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- dry runs and suites


def test_a_dry_run_says_what_is_asked_for_and_records_nothing(ledger):
    study(ledger.folder / "tide.toml", checkpoint=SEEDED, documents=2)
    before = ledger.json("runs")
    said = ledger("run", "tide.toml", "--dry-run").stdout
    assert "This host can run it." in said
    document = ledger.json("run", "tide.toml", "--dry-run")
    assert (document["study"], document["can_run"]) == ("tide", True)
    assert ledger.json("runs") == before
    (ledger.folder / "tide.txt").unlink()
    assert "cannot run it" in ledger("run", "tide.toml", "--dry-run").stdout
    ledger("run", "tide.toml", "--dry-run", "--check", expect=1)


def test_a_suite_runs_its_studies_one_after_the_other(ledger):
    study(ledger.folder / "tide.toml", checkpoint=SEEDED, documents=2)
    (ledger.folder / "both.toml").write_text('suite = "both"\ntitle = "Twice"\nstudies = ["tide.toml", "again.toml"]\n', encoding="utf-8")
    text = (ledger.folder / "tide.toml").read_text(encoding="utf-8")
    (ledger.folder / "again.toml").write_text(text.replace('study = "tide"', 'study = "again"'), encoding="utf-8")
    assert [study["study"] for study in ledger.json("run", "both.toml", "--dry-run")["studies"]] == ["tide", "again"]
    document = ledger.json("run", "both.toml", "--keep", "kept")
    assert [run["study"] for run in document["runs"]] == ["tide", "again"]
    assert sorted(path.name for path in (ledger.folder / "kept").iterdir()) == ["again", "tide"]
