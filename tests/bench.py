"""``python -m tests.bench``: how fast this machine verifies, appends and runs. A reading, not a test; nothing is asserted.

Everything is made by rule, of the size of a small study. Times are wall clock, best of three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ledger import recording, records
from ledger.archive import Archive
from ledger.verify import verify
from tests import factories

RUNS = 20


def best(action: Callable[[], object], times: int = 3) -> float:
    """Shortest wall-clock seconds of ``action``."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return min(found)


def archive_rates(place: Path) -> None:
    """Print what recording, verifying and rebuilding take."""
    spec = factories.spec(workload=factories.workload(documents=8, tokens=512))
    files = factories.samples(spec)
    with Archive.create(place / "archive") as archive:
        archive.append(spec)
        started = time.perf_counter()
        for index in range(RUNS):
            folder = place / f"result-{index}"
            folder.mkdir()
            found = factories.result(spec, files, started=f"2026-01-02T03:04:{index:02}Z")
            recording.record(archive, factories.write_result_folder(folder, found, files))
        rate = RUNS / (time.perf_counter() - started)
        print(f"record    {rate:8.2f} runs/s ({len(spec.arms)} arms, 8 x 512 tokens, derived and durable)")
        entries = len(archive.entries())
        started = time.perf_counter()
        for index in range(RUNS):
            archive.append(factories.spec(title=f"Study {index}"))
        print(f"append    {RUNS / (time.perf_counter() - started):8.2f} entries/s (specs, durable, after {entries} entries)")
    report = verify(place / "archive").document()
    seconds = best(lambda: verify(place / "archive"))
    size = report["checked"]["bytes"] / 1e6
    print(f"verify    {size / seconds:8.2f} MB/s ({size:.1f} MB, all derived again)")
    with Archive.at(place / "archive") as archive:
        print(f"rebuild   {entries / best(archive.rebuild):8.2f} entries/s")


def runner_rate(place: Path) -> None:
    """Print the runner's tokens a second on the study of ``make demo``."""
    subprocess.run([sys.executable, "-m", "ledger.cli", "init", str(place / "demo")], check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "ledger.cli", "--archive", str(place / "demo"), "run", "demo", "--keep", str(place / "kept"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"runner    not measured: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
        return
    document = json.loads(done.stdout)
    spec = records.decode(records.Spec, (place / "kept/frozen/spec.json").read_bytes(), "spec.json")
    tokens = sum(span.tokens + int(spec.workload.bos) for span in spec.workload.spans)
    print(f"runner    {spec.checkpoint.name}, {tokens} tokens an arm, peak {document['peak_memory_bytes'] / 2**30:.2f} GiB")
    for arm in document["arms"]:
        if arm.get("seconds"):
            print(f"          {tokens / arm['seconds']:8.0f} tokens/s  {arm['name']}")


def main() -> None:
    """Print all readings."""
    with tempfile.TemporaryDirectory(prefix="ledger-bench-") as name:
        archive_rates(Path(name))
        runner_rate(Path(name))


if __name__ == "__main__":
    main()
