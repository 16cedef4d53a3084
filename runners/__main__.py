"""``python -m runners FROZEN_DIR OUT [--resume] [--quiet]``: a frozen spec in, a result folder out.

FROZEN_DIR holds ``spec.json`` and ``inputs/``; OUT must not exist or be empty, or with ``--resume`` hold a run that was interrupted or
killed: it goes on where it stopped, as another segment, on equal spec, sources and host alone. An arm that had failed or was refused
stays so, with the answers it gave. ``OUT/result.json`` is there from the
start, with outcome ``running``; it is replaced after every document, batch, check or case and at the end, so that a killed run says what it
had finished. Every file is written beside its place, made durable and renamed: what has its final name is whole. Files of lines
alone (``.jsonl``) are appended to: of one that a killed run left, the beginning that is listed is whole, and the rest counts for nothing.
``python -m runners FROZEN_DIR --tokenise`` runs nothing: it lays the documents' token ids into ``inputs/`` and prints their digest.
Names that begin with a dot are unfinished writes and belong to nothing.

Exit status: 0 completed; 2 failed, with the message on stderr and, where it can still be written, in ``result.json``;
130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ledger import digest, records
from ledger.errors import InputError, LedgerError, RefusedError
from ledger.records import consistency

TESTS = {
    "capability": "captures",
    "calibration": "captures",
    "quality.loss": "losses",
    "quality.task": "tasks",
    "state memory": "memory",
    "production": "production",
    "performance": "performance",
}
"""The module of ``runners`` that tests a scope: its ``run(spec, inputs, folder, progress)``."""
RESUMED = ("quality.loss", "quality.task", "capability")
"""Scopes whose test goes on where it was interrupted."""
_LINES = "application/x-ndjson"
_EVERY = 5.0
"""Seconds between two plain progress lines."""
_ROOM = "make room on the disk, or name a folder that can be written, and run the frozen folder again."


def now() -> str:
    """The present instant, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---------------------------------------------------------------- result folder


class Folder:
    """The result folder: evidence files and ``result.json``, each written durably.

    A file that was added is listed by the next :meth:`update`, together with what is said about it there; what an
    interrupt leaves unlisted is removed by :meth:`finish`, so that list and folder agree. A file of lines may grow: of it every
    update lists what it has by then. So the list of a run that is killed names whole lines, a beginning of the file that lies there.
    """

    def __init__(self, path: Path, result: records.Result) -> None:
        self.path = path
        self.result = result
        self._added: tuple[records.Evidence, ...] = ()
        self._growing = {item.name: Growth(self.grown(item.name)[: item.size]) for item in result.evidence if self._outgrew(item)}
        self._before = {arm.name: arm.seconds or 0.0 for arm in result.arms}
        self._ended = {arm.name: arm for arm in result.arms if has_ended(arm)}
        self._done = result.segments[-1].first if result.segments else 0
        self.write("result.json", records.encode(result))

    def _outgrew(self, item: records.Evidence) -> bool:
        place = self.path / item.name
        return place.exists() and place.stat().st_size > item.size

    def append(self, name: str, data: bytes) -> None:
        """Append whole lines durably to an evidence file that grows while the run lasts; no bytes begin an empty one."""
        growth = self._growing.get(name) or Growth()
        place = self.path / name
        if not place.exists():
            self.write(name, b"")
        self._growing[name] = growth
        if not data:
            return
        with place.open("r+b") as stream:
            stream.seek(growth.size)
            stream.truncate()  # what a write left that failed on the way
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        growth.add(data)

    def grown(self, name: str) -> bytes:
        """What an earlier stretch of this run left in a growing file; nothing where there was none."""
        place = self.path / name
        return place.read_bytes() if place.exists() else b""

    def keep(self, name: str, data: bytes) -> None:
        """Cut a growing file back to ``data``, its beginning."""
        if not (self.path / name).exists():
            self.write(name, b"")
        self._growing[name] = Growth(data)
        self.update()  # before the cut, so that what is listed lies there at every moment
        self._cut(name, len(data))

    def _cut(self, name: str, size: int) -> None:
        """In place, since the disk may be full."""
        with (self.path / name).open("r+b") as stream:
            stream.truncate(size)
            os.fsync(stream.fileno())

    def before(self, arm: str) -> float:
        """Seconds that an arm took in earlier stretches of this run."""
        return self._before.get(arm, 0.0)

    def ended(self) -> dict[str, records.ArmResult]:
        """Arms that failed or were refused in earlier stretches of this run, and stay so."""
        return dict(self._ended)

    def done(self) -> int:
        """How many documents or items earlier stretches of this run had done, by what they listed."""
        return self._done

    def add(self, name: str, data: bytes, media_type: str) -> None:
        """Write an evidence file."""
        self.write(name, data)
        self._added += (records.Evidence(name=name, sha256=digest.sha256(data), size=len(data), media_type=media_type),)

    def update(self, **changes: Any) -> None:
        """Change fields of the result, list what was added, and replace ``result.json``.

        ``last`` says how many items are done, where they are no documents. All is changed at once, so that what is listed, what arms
        did and how far the run has come agree whenever it is stopped.
        """
        last = changes.pop("last", len(changes["documents"]) if "documents" in changes else None)
        if last is not None:
            segment = msgspec.structs.replace(self.result.segments[-1], stopped=now(), last=last)
            changes["segments"] = (*self.result.segments[:-1], segment)
        others = [item for item in (*self.result.evidence, *self._added) if item.name not in self._growing]
        listed = {item.name: item for item in others}  # a resumed run writes some again
        self._added = ()
        grown = (growth.described(name) for name, growth in self._growing.items())
        self.result = msgspec.structs.replace(self.result, evidence=(*listed.values(), *grown), **changes)
        self.write("result.json", records.encode(self.result))

    def finish(self, **changes: Any) -> None:
        """The last update, after the run has ended in whatever way."""
        self._added = ()
        for name in self._growing:
            data = self.grown(name)
            whole = data[: data.rfind(b"\n") + 1]  # an interrupt or a full disk may have cut the last line
            self._cut(name, len(whole))
            self._growing[name] = Growth(whole)
        listed = {self.path / item.name for item in self.result.evidence}
        listed |= {self.path / name for name in (*self._growing, "result.json")}
        for path in self.path.rglob("*"):
            if path.is_file() and path not in listed:
                path.unlink()
        self.update(**changes)

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to ``name`` so that a crash leaves the old file or the new one."""
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f".{place.name}.part")
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(place)
        handle = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def has_ended(arm: records.ArmResult) -> bool:
    """Whether an arm failed or was refused; one that still ran when the run was stopped did not."""
    return arm.outcome != "completed" and not arm.reason.startswith("unfinished: ")


class Growth:
    """How far a growing file has come: its size and digest without reading it again."""

    def __init__(self, data: bytes = b"") -> None:
        self.size, self._sha256 = 0, hashlib.sha256()
        self.add(data)

    def add(self, data: bytes) -> None:
        """These bytes were appended."""
        self._sha256.update(data)
        self.size += len(data)

    def described(self, name: str) -> records.Evidence:
        """The file as it is now."""
        return records.Evidence(name=name, sha256=self._sha256.hexdigest(), size=self.size, media_type=_LINES)


# ---------------------------------------------------------------- progress


def _clock(seconds: float) -> str:
    """Hours, where there are any, minutes and seconds: ``2:03:04`` or ``3:04 min``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


class Progress:
    """Progress on stderr: a bar where rich is installed and stderr is a terminal, else a plain line now and then.

    The unit is a token through one arm.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.total = self.done = 0
        self.started = self.spoken = time.monotonic()
        self.bar: Any = None
        self.task: Any = None

    def say(self, line: str) -> None:
        """One line about slow work."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def start(self, total: int) -> None:
        """So many tokens are to come."""
        self.total, self.done = max(1, total), 0
        self.started = self.spoken = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} % {task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("starting", total=self.total, rate="")
        self.bar.start()

    def advance(self, tokens: int, doing: str) -> None:
        """So many tokens are done."""
        self.done += tokens
        present = time.monotonic()
        rate = self.done / max(1e-6, present - self.started)
        if self.bar is not None:
            self.bar.update(self.task, advance=tokens, description=doing, rate=f"{rate:.0f} tok/s")
        elif not self.quiet and present - self.spoken >= _EVERY:
            self.spoken = present
            left = max(0, self.total - self.done) / rate
            self.say(f"{doing}: {100 * self.done / self.total:.0f} %, {rate:.0f} tok/s, {_clock(left)} left")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


# ---------------------------------------------------------------- the command


def read_spec(frozen: Path) -> tuple[records.Spec, str]:
    """The frozen spec and its digest. Raises InputError."""
    path = frozen / "spec.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"The frozen spec {path} cannot be read.", found=str(error), next="make the folder with: ledger freeze STUDY -o DIR"
        ) from error
    spec = records.decode(records.Spec, data, str(path))
    if spec.scope not in TESTS:
        raise InputError("This runner has no test for the spec's scope.", expected=", ".join(TESTS), found=spec.scope)
    consistency.check(spec)
    return spec, digest.sha256(data)


def empty_folder(path: Path) -> None:
    """Make the result folder. Raises InputError where something stands in it already."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = next(path.iterdir(), None)
    except OSError as error:
        raise InputError(f"The result folder {path} cannot be made.", found=str(error)) from error
    if taken is not None:
        raise InputError(
            f"The result folder {path} is not empty.", found=taken.name, next="name a new folder; a result is never overwritten."
        )


def unfinished(out: Path, spec: records.Spec, identity: str) -> records.Result:
    """What a result folder says of a run that can go on. Raises InputError where there is none, or it is not of this spec."""
    path = out / "result.json"
    anew = "run the frozen folder into a new folder."
    if spec.scope not in RESUMED:
        raise InputError("A run of this scope cannot go on where it stopped.", expected=", ".join(RESUMED), found=spec.scope, next=anew)
    try:
        found = records.decode(records.Result, path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"There is no run in {out} that could go on.", found=str(error), next=anew) from error
    if found.spec != identity:
        raise InputError(f"The run in {out} is of another spec.", expected=identity, found=found.spec, next=anew)
    if found.outcome == "completed":
        raise InputError(f"The run in {out} is complete.", expected="a run that was cut short", found=found.outcome, next=anew)
    ended = {arm.name: arm.reason for arm in found.arms if has_ended(arm)}
    if all(arm.name in ended for arm in spec.arms):
        said = "; ".join(f"{name}: {reason}" for name, reason in ended.items())
        raise InputError(
            f"No arm of the run in {out} could go on.", expected="one that neither failed nor was refused", found=said[:2000], next=anew
        )
    return found


def _same(earlier: records.Result, host: records.Host, sources: dict[str, str]) -> None:
    """Refuse to go on elsewhere, or with other code. Raises InputError."""
    differ = [
        f"{name}: {was!r}, now {is_!r}"
        for name in host.__struct_fields__
        if (was := getattr(earlier.host, name)) != (is_ := getattr(host, name))
    ]
    differ += [f"source {name}" for name, was in earlier.sources.items() if sources.get(name) != was]
    if differ:
        raise InputError(
            "The run can go on only on an equal host, with the same code.",
            expected="the host and the sources that its result.json names",
            found="; ".join(differ)[:2000],
            next="run the frozen folder into a new folder.",
        )


def _settle_torch(device: str) -> None:
    """Fix the number of threads and ask for deterministic algorithms: sums depend on both. On a GPU, float32 stays float32.

    Raises RefusedError (``device``) where the spec's device is not there; no test of a scope looks again.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts; without it cuBLAS may sum in another order
    import torch

    from runners import host

    if device == "cuda" and not torch.cuda.is_available():
        raise RefusedError(
            "device",
            "The spec runs on a GPU, and torch finds none.",
            expected="a CUDA device",
            found=f"torch {torch.__version__}",
            next="run the frozen folder on a GPU host.",
        )
    asked = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdecimal() and int(asked) > 0 else host.cores())
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("highest")  # no TF32, neither here nor in convolutions
    torch.backends.cudnn.allow_tf32 = False


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def execute(frozen: Path, out: Path, progress: Progress, resume: bool = False) -> int:
    """Run a frozen folder into ``out``, or go on there; the exit status. Raises LedgerError where no result folder could be begun."""
    spec, identity = read_spec(frozen)
    earlier = unfinished(out, spec, identity) if resume else None
    if earlier is None:
        empty_folder(out)
    progress.say("loading torch and transformers")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read once, when tqdm is imported: Transformers' GGUF reader draws bars unasked
    _settle_torch(spec.device)
    from runners import host

    test = importlib.import_module(f"runners.{TESTS[spec.scope]}")
    started, machine = now(), host.measure()
    if earlier is None:
        result = records.Result(
            format="kv-ledger/result/1",
            spec=identity,
            outcome="running",
            started=started,
            host=machine,
            sources=host.sources(),
            segments=(records.Segment(started=started, stopped=started, first=0, last=0),),
        )
    else:
        _same(earlier, machine, host.sources(earlier.sources))
        reached = earlier.segments[-1].last
        segment = records.Segment(started=started, stopped=started, first=reached, last=reached)
        result = msgspec.structs.replace(earlier, outcome="running", reason="", stopped=None, segments=(*earlier.segments, segment))
    folder = Folder(out, result)
    outcome, reason, status = "completed", "", 0
    try:
        test.run(spec, frozen / "inputs", folder, progress)
    except KeyboardInterrupt as stop:
        outcome, reason, status = "interrupted", f"interrupted by {stop or 'SIGINT'}", 130
    except LedgerError as error:
        outcome, reason, status = "failed", str(error), 2
    except Exception as error:
        outcome, reason, status = "failed", f"{type(error).__name__}: {error}", 2
        if not isinstance(error, OSError):  # a fault of this program: its place is worth having
            import traceback

            traceback.print_exc()
    for number in (signal.SIGINT, signal.SIGTERM):  # the last write is short and must not be cut off
        signal.signal(number, signal.SIG_IGN)
    progress.close()
    if reason:  # before the last write, which may fail for the same reason
        print(reason, file=sys.stderr)
    folder.finish(
        outcome=outcome,
        reason=reason[:8192],
        stopped=now(),
        sources=host.sources() | folder.result.sources,
        peak_memory_bytes=max(host.peak_memory() or 0, folder.result.peak_memory_bytes or 0) or None,
    )
    progress.say(f"{outcome}: {out / 'result.json'}")
    return status


def tokenise(frozen: Path, progress: Progress) -> int:
    """Lay the documents' token ids into a frozen folder and print their digest. Raises LedgerError."""
    spec, _ = read_spec(frozen)
    os.environ.setdefault("TQDM_DISABLE", "1")
    losses = importlib.import_module("runners.losses")
    print(losses.tokenised(spec, frozen / "inputs", progress.say))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m runners", description="Run a frozen spec into a result folder.")
    parser.add_argument("frozen", metavar="FROZEN_DIR", type=Path, help="folder with spec.json and inputs/")
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="result folder; must not exist or be empty")
    parser.add_argument("--tokenise", action="store_true", help="run nothing: lay the documents' token ids into FROZEN_DIR/inputs")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted or killed run in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    if (given.out is None) != given.tokenise:
        parser.error("--tokenise writes no result folder: leave out OUT" if given.tokenise else "OUT, the result folder, is missing")
    progress = Progress(given.quiet)
    try:
        if given.tokenise:
            return tokenise(given.frozen, progress)
        return execute(given.frozen, given.out, progress, given.resume)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(InputError("The result folder cannot be written.", found=str(error), next=_ROOM), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        progress.close()


if __name__ == "__main__":
    sys.exit(main())
