"""What a result folder holds when its run is killed, at every moment, and when the disk is full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ledger import comparing, digest, recording, records
from ledger.archive import Archive
from ledger.verify import verify
from runners import __main__ as command
from runners import captures, host, losses, memory

from . import test_captures, test_memory, test_performance, test_production, tiny
from .test_main import ROOT, result_of

RESULT = records.Result(
    format="kv-ledger/result/1",
    spec="0" * 64,
    outcome="running",
    started="2026-01-02T03:04:05Z",
    host=host.measure(),
    sources={},
    segments=(records.Segment(started="2026-01-02T03:04:05Z", stopped="2026-01-02T03:04:05Z", first=0, last=0),),
)


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def frozen(folder: Path, spec: records.Spec) -> Path:
    (folder / "inputs").mkdir(parents=True)
    (folder / "spec.json").write_bytes(records.encode(spec))
    return folder


def listed(out: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file that ``result.json`` lists: whole ones, of its size and digest."""
    item = next(item for item in result_of(out).evidence if item.name == name)
    data = (out / name).read_bytes()[: item.size]
    assert digest.sha256(data) == item.sha256 and len(data) == item.size and (not data or data.endswith(b"\n"))
    return [json.loads(line) for line in data.splitlines()]


def recorded(place: Path, spec: records.Spec, out: Path) -> tuple[records.Run, dict[str, bytes], tuple[str, ...]]:
    """The run that ``ledger record`` makes of a folder, its evidence, and what was said of the rest."""
    Archive.create(place)
    with Archive.open(place, write=True) as archive:
        archive.append(spec)
        made = archive.run(recording.record(archive, out).record)
        kept, notices = comparing.evidence(archive, archive.result(made)), tuple(archive.notices)
    assert not verify(place).findings
    return made, kept, notices


# ---------------------------------------------------------------- the folder, at every moment

DIES = """
import os, signal, sys
from pathlib import Path
from runners import __main__ as command
from ledger import records
at, out = int(sys.argv[1]), Path(sys.argv[2])
result = records.decode(records.Result, sys.stdin.buffer.read(), "result")
out.mkdir()
count = 0
def last(frame, event, argument):
    # every line of these functions is a moment at which the process may end
    global count
    if event == "line" and frame.f_code.co_name in ("append", "update", "write", "keep", "_cut"):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
    return last
sys.settrace(last)
folder = command.Folder(out, result)
folder.add("other.bin", b"other", "application/octet-stream")
folder.append("lines.jsonl", b"")
for number in range(3):
    folder.append("lines.jsonl", b'{"line":%d}\\n' % number * 3)
    folder.update()
folder.keep("lines.jsonl", b'{"line":0}\\n')
sys.settrace(None)
print(count)
"""


def test_a_folder_is_as_it_says_at_every_moment(tmp_path: Path) -> None:
    def dies(at: int) -> tuple[int, bytes]:
        words = [sys.executable, "-c", DIES, str(at), str(tmp_path / str(at))]
        done = subprocess.run(words, cwd=ROOT, input=records.encode(RESULT), capture_output=True, check=False)
        return done.returncode, done.stdout

    code, moments = dies(0)
    assert code == 0 and int(moments) > 100
    found = set()
    for at in range(9, int(moments), 7):
        code, _ = dies(at)
        assert code == -signal.SIGKILL
        out = tmp_path / str(at)
        if not (out / "result.json").exists():
            continue
        folder = recording.read_folder(out)
        assert folder.outcome == "failed"
        found |= {len(listed(out, item.name)) for item in folder.result.evidence if item.name == "lines.jsonl"}
    assert {3, 6, 9} <= found <= {0, 1, 3, 6, 9}


def test_a_write_that_fails_on_the_way_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = command.Folder(tmp_path, RESULT)
    folder.append("lines.jsonl", b"1\n")
    folder.update()
    sync = os.fsync

    def full(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        os.ftruncate(handle, 5)
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.append("lines.jsonl", b"2\n3\n4\n")
    assert (tmp_path / "lines.jsonl").read_bytes() == b"1\n2\n3" and len(listed(tmp_path, "lines.jsonl")) == 1
    folder.append("lines.jsonl", b"5\n")
    folder.update()
    assert (tmp_path / "lines.jsonl").read_bytes() == b"1\n5\n" and len(listed(tmp_path, "lines.jsonl")) == 2
    folder.finish(outcome="failed", reason="the disk was full")
    assert recording.read_folder(tmp_path).left_behind == ()


# ---------------------------------------------------------------- killed runs of every scope

HIDDEN = """
import gc, importlib, resource, sys
if len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
sys.modules["triton"] = sys.modules["flashinfer"] = None
from runners import __main__ as command
for name in command.TESTS.values():  # no scope needs it to be loaded
    importlib.import_module(f"runners.{name}")
gc.freeze()  # what is loaded need not be looked through after every case
sys.exit(command.main([*sys.argv[1:3], "--quiet"]))
"""
"""The runner where Triton cannot be imported; a third word bounds the files that it may write, in bytes, as a full disk would."""
KILLED = """
import gc, os, signal, sys
if "without triton" in sys.argv:
    sys.modules["triton"] = sys.modules["flashinfer"] = None
from runners import __main__ as command, geometry, kernelchecks
from tests.runners import test_production
if "without triton" not in sys.argv:
    geometry.kernels = test_production.Kernels
kernelchecks.CHECKS = ()
append, at, half = command.Folder.append, int(sys.argv[3]), int(sys.argv[4])
def dying(folder, name, data):
    global at
    at -= bool(data)
    if not at:  # within a write, or behind it
        append(folder, name, data[:half] if half else data)
        os.kill(os.getpid(), signal.SIGKILL)
    append(folder, name, data)
command.Folder.append = dying
gc.freeze()
sys.exit(command.main([*sys.argv[1:3], "--quiet"]))
"""


def test_a_killed_production_run_keeps_the_checks_that_were_made(tmp_path: Path) -> None:
    spec, out = test_production.spec(*test_production.ARMS[:2]), tmp_path / "out"
    done = run(KILLED, str(frozen(tmp_path / "frozen", spec)), str(out), "16", "0")
    assert done.returncode == -signal.SIGKILL, done.stderr
    result = result_of(out)
    assert result.outcome == "running" and [arm.outcome for arm in result.arms] == ["refused", "completed"]
    lines = listed(out, "checks.jsonl")
    assert len(lines) == 15 and {line["arm"] for line in lines} == {"k16v16", "k16v8"}
    made, evidence, notices = recorded(tmp_path / "archive", spec, out)
    assert (made.outcome, made.reason) == ("failed", "the runner was killed")
    assert all(decision.status == "invalid" for decision in made.decisions)
    assert [json.loads(line) for line in evidence["checks.jsonl"].splitlines()] == lines
    size = len(evidence["checks.jsonl"])
    assert notices == (f"Not kept, because the run did not list them: checks.jsonl behind its first {size} bytes.",)


CASES = tuple(records.Case(kind="decode", batch=1, context=24 + number, head_dim=64) for number in range(12))


def natives(count: int) -> tuple[records.Arm, ...]:
    arms = (test_performance.arm(f"native-{number}", "native", "sdpa:math") for number in range(count))
    return (*arms, test_performance.FUSED[0])


def test_a_killed_performance_run_keeps_the_lines_of_the_cases_that_were_timed(tmp_path: Path) -> None:
    spec, out = test_performance.spec(CASES[:4], natives(1), repeats=5, budget_bytes=None), tmp_path / "out"
    done = run(KILLED, str(frozen(tmp_path / "frozen", spec)), str(out), "3", "9", "without triton")
    assert done.returncode == -signal.SIGKILL, done.stderr
    cases = [case.name for case in CASES[:2] for _ in range(2)]
    assert [line["case"] for line in listed(out, "cases.jsonl")] == ["copy", *cases]
    made, evidence, notices = recorded(tmp_path / "archive", spec, out)
    assert made.outcome == "failed" and {"cases.jsonl", "timings/0000.safetensors", "timings/0001.safetensors"} == set(evidence)
    assert len(made.kernels) == 5 and "timings/0002.safetensors" in notices[0]


def test_a_disk_that_fills_while_cases_are_timed_fails_the_run_in_words(tmp_path: Path) -> None:
    spec, out = test_performance.spec(CASES, natives(12), repeats=5, budget_bytes=None), tmp_path / "out"
    done = run(HIDDEN, str(frozen(tmp_path / "frozen", spec)), str(out), "24000")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "OSError" in done.stderr, done.stderr
    result = result_of(out)
    assert result.outcome == "failed" and "OSError" in result.reason
    lines = listed(out, "cases.jsonl")
    assert lines[0]["case"] == "copy" and len(lines) > len(CASES) and recording.read_folder(out).left_behind == ()
    assert recorded(tmp_path / "archive", spec, out)[0].outcome == "failed"


def walk(module: Any, spec: records.Spec, folder: Path, out: Path) -> list[list[int]]:
    """How many lines were listed at each update of a whole run, by file; and nothing is listed that the folder does not hold."""
    seen: list[list[int]] = []

    class Watched(command.Folder):
        def update(self, **changes: Any) -> None:
            super().update(**changes)
            sizes = [len(listed(self.path, item.name)) for item in self.result.evidence if item.name.endswith(".jsonl")]
            if not seen or seen[-1] != sizes:
                seen.append(sizes)

    out.mkdir()
    watched = Watched(out, RESULT)
    module.run(spec, folder / "inputs", watched, tiny.Kept())
    watched.finish(outcome="completed")
    return seen


@pytest.mark.parametrize(
    ("module", "spec", "counts"),
    [
        (captures, lambda: test_captures.spec(), [2, 4]),
        (memory, lambda: test_memory.spec(), [1, 2, 3, 4, 5, 6]),
        (losses, lambda: tiny.spec(documents=1, greedy=records.Greedy(documents=1, prompt_tokens=4, new_tokens=2)), [1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=["captures", "memory", "greedy"],
)
def test_lines_are_listed_as_they_are_found(tmp_path: Path, module: Any, spec: Callable[[], records.Spec], counts: list[int]) -> None:
    made = spec()
    folder = tiny.freeze(tmp_path / "frozen", made) if made.workload else frozen(tmp_path / "frozen", made)
    seen = walk(module, made, folder, tmp_path / "out")
    assert [sizes[0] for sizes in seen if sizes] == counts


# ---------------------------------------------------------------- without Triton


def test_a_performance_run_without_triton_refuses_its_fused_arms_and_times_the_others(tmp_path: Path) -> None:
    arms = (test_performance.NATIVES[2], test_performance.NATIVES[5], *test_performance.FUSED[:2])
    cases = [case for case in test_performance.CASES if case.kind in ("decode", "append", "step", "capacity") and not case.soft_cap]
    spec, out = test_performance.spec(tuple(cases), arms, repeats=5), tmp_path / "out"
    done = run(HIDDEN, str(frozen(tmp_path / "frozen", spec)), str(out))
    assert (done.returncode, done.stderr) == (0, "")
    result = result_of(out)
    assert {arm.name: arm.outcome for arm in result.arms} == {
        "sdpa-math": "completed", "transformers": "completed", "k16v16": "refused", "k16v8": "refused"
    }  # fmt: skip
    for name in ("k16v16", "k16v8"):
        assert result.arm(name).reason.startswith("backend: The fused kernels need Triton")
    lines = {(line["case"], line["arm"]): line for line in listed(out, "cases.jsonl")}
    refused = {arm for (_, arm), line in lines.items() if line["refused"]}
    assert refused == {"k16v16", "k16v8"} and len(lines) == 1 + 3 + 2 + 3 + 2
    made, _, _ = recorded(tmp_path / "archive", spec, out)
    assert made.decisions and {decision.status for decision in made.decisions} == {"unsupported"}
