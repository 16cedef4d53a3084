from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from ledger import digest, records
from runners import __main__ as command

from . import tiny

ROOT = Path(__file__).parents[2]


def start(frozen: Path, out: Path, *more: str, largest: int | None = None) -> subprocess.Popen[str]:
    """The runner as a process; ``largest`` bounds the files that it may write, in bytes, as a full disk would."""
    words = [sys.executable, "-m", "runners", str(frozen), str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def limit() -> None:
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def result_of(out: Path) -> records.Result:
    return records.decode(records.Result, (out / "result.json").read_bytes(), "result.json")


def begun(process: subprocess.Popen[str], out: Path, documents: int = 2) -> None:
    """Wait until so many documents are in the folder, by reading what the runner itself makes durable."""
    while process.poll() is None:
        if (out / "result.json").exists() and len(result_of(out).documents) >= documents:
            return
    pytest.fail("the runner ended before it could be interrupted: " + process.communicate()[1])


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    base = tmp_path_factory.mktemp("run")
    code, errors = finish(start(tiny.freeze(base / "frozen", tiny.spec()), base / "out"))
    assert code == 0, errors
    return base, errors


def test_a_completed_run_lists_exactly_the_files_of_its_folder(completed):
    out = completed[0] / "out"
    result = result_of(out)
    assert result.outcome == "completed" and result.stopped is not None
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "result.json",
        *(item.name for item in result.evidence),
    }
    for item in result.evidence:
        assert digest.sha256_file(out / item.name) == (item.sha256, item.size)
    assert [item.name for item in result.evidence] == [
        "inputs.safetensors", "samples/0000.safetensors", "samples/0001.safetensors", "greedy.jsonl"
    ]  # fmt: skip


def test_the_result_names_its_spec_its_host_and_every_source_that_was_loaded(completed):
    base, _ = completed
    result = result_of(base / "out")
    assert result.spec == digest.sha256((base / "frozen" / "spec.json").read_bytes())
    assert result.host.threads == 1 and result.host.packages["torch"] and result.host.memory_bytes
    for name in ("ledger/digest.py", "ledger/__init__.py", "runners/__main__.py", "runners/losses.py", "runners/caches.py"):
        assert result.sources[name] == digest.sha256_file(ROOT / name)[0]
    assert result.peak_memory_bytes and result.peak_memory_bytes > 1 << 20
    assert (result.segments[0].first, result.segments[0].last) == (0, 2)


def test_a_run_loads_neither_database_nor_archive(completed):
    sources = {name.removesuffix(".py") for name in result_of(completed[0] / "out").sources if name.startswith("ledger/")}
    rooms = {name for name in sources if not name.startswith("ledger/records/")}
    assert rooms == {"ledger/__init__", "ledger/errors", "ledger/digest"}
    assert "ledger/records/__init__" in sources


def test_plain_progress_is_a_few_lines_without_bars_or_warnings(completed):
    lines = completed[1].splitlines()
    assert lines[0].startswith("loading torch") and lines[-1].startswith("completed: ")
    assert not any("Warning" in line or "\r" in line or "it/s" in line for line in lines)


def test_ids_are_laid_into_the_frozen_folder_and_their_digest_is_printed(completed, tmp_path, capsys):
    frozen = tiny.freeze(tmp_path / "frozen", tiny.spec())
    assert command.main([str(frozen), "--tokenise", "--quiet"]) == 0
    result = result_of(completed[0] / "out")
    assert capsys.readouterr().out.strip() == records.ids_digest([document.sha256 for document in result.documents])
    assert (frozen / "inputs/inputs.safetensors").read_bytes() == (completed[0] / "out/inputs.safetensors").read_bytes()
    assert command.main([str(frozen), "--tokenise", "--quiet"]) == 2
    assert "already" in capsys.readouterr().err


def test_a_second_run_writes_the_same_evidence(completed, tmp_path):
    base, _ = completed
    code, errors = finish(start(base / "frozen", tmp_path / "out", "--quiet"))
    assert (code, errors) == (0, "")
    assert result_of(tmp_path / "out").evidence == result_of(base / "out").evidence


def test_a_killed_run_says_that_it_runs_and_lists_the_documents_it_finished(tmp_path):
    process = start(tiny.freeze(tmp_path / "frozen", tiny.spec(documents=400)), tmp_path / "out")
    begun(process, tmp_path / "out")
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    result = result_of(tmp_path / "out")
    assert result.outcome == "running" and 2 <= len(result.documents) < 400 and result.segments[0].last == len(result.documents)
    assert result.arm("k8v8").outcome == "failed" and result.arm("k8v8").reason.startswith("unfinished: ")
    for item in result.evidence:
        assert digest.sha256_file(tmp_path / "out" / item.name) == (item.sha256, item.size)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_keeps_what_is_whole(tmp_path, number):
    process = start(tiny.freeze(tmp_path / "frozen", tiny.spec(documents=400)), tmp_path / "out")
    begun(process, tmp_path / "out")
    process.send_signal(number)
    code, errors = finish(process)
    result = result_of(tmp_path / "out")
    assert code == 130 and f"interrupted by {number.name}" in errors
    assert result.outcome == "interrupted" and result.stopped is not None and result.reason.endswith(number.name)
    listed = {"result.json", *(item.name for item in result.evidence)}
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()} == listed
    assert sum(name.startswith("samples/") for name in listed) == len(result.documents)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_goes_on_as_a_segment_and_loses_nothing(tmp_path, number):
    frozen, out = tiny.freeze(tmp_path / "frozen", tiny.spec(documents=60)), tmp_path / "out"
    process = start(frozen, out)
    begun(process, out)
    process.send_signal(number)
    finish(process)
    stopped = result_of(out).segments[-1].last
    assert 2 <= stopped < 60
    code, errors = finish(start(frozen, out, "--resume"))
    assert code == 0 and f"going on behind {stopped} of 60 documents" in errors, errors
    assert finish(start(frozen, tmp_path / "whole"))[0] == 0
    found, whole = result_of(out), result_of(tmp_path / "whole")
    assert [(segment.first, segment.last) for segment in found.segments] == [(0, stopped), (stopped, 60)]
    assert sorted(found.evidence, key=lambda item: item.name) == sorted(whole.evidence, key=lambda item: item.name)
    assert (found.outcome, found.documents) == ("completed", whole.documents)


def test_a_run_that_cannot_go_on_is_failed_with_its_message(tmp_path):
    frozen = tiny.freeze(tmp_path / "frozen", tiny.spec())
    (frozen / "inputs" / "tiny.txt").write_text("another text", encoding="utf-8")
    code, errors = finish(start(frozen, tmp_path / "out"))
    result = result_of(tmp_path / "out")
    assert code == 2 and "is not the one that the spec pins" in errors and "Traceback" not in errors
    assert result.outcome == "failed" and "is not the one that the spec pins" in result.reason


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda frozen, out: (frozen / "spec.json").unlink(), "cannot be read"),
        (lambda frozen, out: (frozen / "spec.json").write_bytes(b"{}"), "not a valid Spec"),
        (lambda frozen, out: (frozen / "spec.json").write_bytes((frozen / "spec.json").read_bytes() + b"\n"), "not in canonical form"),
        (lambda frozen, out: (frozen / "spec.json").write_bytes(b'{"a":1,"a":2}'), "names a key twice"),
        (
            lambda frozen, out: (frozen / "spec.json").write_bytes(
                records.encode(msgspec.structs.replace(tiny.spec(), scope="reproduction"))
            ),
            "no test for the spec's scope",
        ),
        pytest.param(
            lambda frozen, out: (frozen / "spec.json").write_bytes(
                records.encode(msgspec.structs.replace(tiny.spec(), format="kv-ledger/spec/2", device="cuda"))
            ),
            "torch finds none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there"),
        ),
        (lambda frozen, out: (out.mkdir(), (out / "old").touch()), "is not empty"),
        (lambda frozen, out: out.touch(), "cannot be made"),
    ],
)
def test_an_unusable_folder_is_refused_before_anything_is_written(tmp_path, change, expected):
    frozen, out = tiny.freeze(tmp_path / "frozen", tiny.spec()), tmp_path / "out"
    change(frozen, out)
    code, errors = finish(start(frozen, out))
    assert code == 2 and expected in errors and "Traceback" not in errors
    assert not (out / "result.json").exists()


def test_a_disk_too_full_for_a_result_is_one_message_without_a_traceback(tmp_path):
    code, errors = finish(start(tiny.freeze(tmp_path / "frozen", tiny.spec()), tmp_path / "out", largest=100))
    assert code == 2 and "Traceback" not in errors
    assert "The result folder cannot be written." in errors and "next: make room on the disk" in errors
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_disk_that_fills_on_the_way_fails_the_run_in_words(tmp_path):
    frozen = tiny.freeze(tmp_path / "frozen", tiny.spec(tokens=400, documents=1))
    code, errors = finish(start(frozen, tmp_path / "out", largest=12_000))
    assert code == 2 and "Traceback" not in errors and "OSError" in errors
    assert result_of(tmp_path / "out").outcome == "failed"


def test_a_last_write_that_fails_is_said_after_the_reason(tmp_path, monkeypatch, capsys):
    def full(folder: object, **changes: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    frozen = tiny.freeze(tmp_path / "frozen", tiny.spec())
    (frozen / "inputs" / "tiny.txt").write_text("another text", encoding="utf-8")
    monkeypatch.setattr(command.Folder, "finish", full)
    monkeypatch.setattr(command, "_settle_torch", lambda device: None)
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    assert command.main([str(frozen), str(tmp_path / "out"), "--quiet"]) == 2
    errors = capsys.readouterr().err
    assert errors.index("is not the one that the spec pins") < errors.index("The result folder cannot be written.")
