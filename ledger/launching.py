"""A frozen folder -> a result folder, by ``python -m runners`` in a process of its own.

The border between the archive and the tests: ``ledger`` never imports ``runners``, it starts it. What the runner
writes to its standard error (progress, its last words) passes through as it comes, and its end is kept for messages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ledger.errors import InputError

PATIENCE = 120.0
"""Seconds that an interrupted runner gets to finish the document at hand and write its result."""
_TAIL = 4096


@dataclass(frozen=True)
class Ended:
    """How a runner ended: exit status (negative: the signal that killed it), its last words, whether it was interrupted."""

    status: int
    words: str
    interrupted: bool


def runners_root() -> Path | None:
    """The folder that holds the ``runners`` package which this interpreter would import; None where there is none."""
    found = importlib.util.find_spec("runners")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))).parent.resolve()


def check_installed() -> None:
    """Refuse, before anything is frozen, where no test can run here. Raises InputError."""
    root = runners_root()
    if root is None or not (root / "runners" / "__main__.py").is_file() or importlib.util.find_spec("torch") is None:
        raise InputError(
            "The tests cannot run here: torch is not installed." if root else "The tests cannot run here: the runners are not installed.",
            expected="the packages of the extra 'runners' beside this one",
            found=f"{sys.executable} without them",
            next="pip install 'kv-evidence-ledger[runners]'",
        )


def launch(frozen: Path, out: Path, harness: Path | None = None, *, progress: bool = True) -> Ended:
    """Run ``frozen`` into ``out`` under this interpreter; returns when the runner has ended.

    ``harness`` is the root of the checkout whose ``runners`` run; None takes the ones that are installed. Ctrl-C is
    passed on, and the runner is given time to write what it has.
    """
    root = harness or runners_root()
    environment = dict(os.environ)
    if root is not None:
        # The safe path (-P) keeps the current folder out, so what runs is what is named here and nothing else.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "runners", str(frozen), str(out), *([] if progress else ["--quiet"])]
    through = progress and sys.stderr.isatty()
    # A process group of its own: a terminal's Ctrl-C reaches this process alone, which passes it on, once. Twice could
    # hit the runner while it writes its last words.
    runner = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if through else subprocess.PIPE,
        process_group=0,
    )
    words = _Tail(progress)
    reader = None
    if runner.stderr is not None:
        reader = threading.Thread(target=words.follow, args=(runner.stderr,), daemon=True)
        reader.start()
    interrupted = False
    with _signals_as_interrupt():
        try:
            status = runner.wait()
        except KeyboardInterrupt:
            interrupted = True
            status = _stop(runner)
    if reader is not None:
        reader.join()
    return Ended(status=status, words=words.text(), interrupted=interrupted or status == -signal.SIGINT)


def _stop(runner: subprocess.Popen[bytes]) -> int:
    """Let an interrupted runner finish; a second Ctrl-C, or running out of patience, kills it."""
    with contextlib.suppress(ProcessLookupError):
        runner.send_signal(signal.SIGINT)
    try:
        return runner.wait(PATIENCE)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        runner.kill()
        return runner.wait()


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Let a hang-up and a request to end stop the runner too: it would otherwise go on alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Tail:
    """Passes a stream on and remembers its end."""

    def __init__(self, show: bool) -> None:
        self.show = show
        self.kept = b""

    def follow(self, stream: IO[bytes]) -> None:
        while block := os.read(stream.fileno(), 65536):
            self.kept = (self.kept + block)[-_TAIL:]
            if self.show:
                sys.stderr.write(block.decode("utf-8", "replace"))
                sys.stderr.flush()
        stream.close()

    def text(self) -> str:
        lines = [line.split("\r")[-1].rstrip() for line in self.kept.decode("utf-8", "replace").splitlines()]
        return "\n".join(line for line in lines if line)
