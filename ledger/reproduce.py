"""A recorded run -> the same spec run again -> one appended reproduction.

The code is that of the recorded commit, in a temporary git worktree, or with ``current_harness`` what is installed
here, and the reproduction says which. Weights and dataset are found by their digests. What cannot be had makes the
reproduction ``not comparable``, with the reason; :mod:`ledger.comparing` gives every other verdict.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import ledger
from ledger import freezing, launching, provenance, recording, records
from ledger.archive import Archive
from ledger.comparing import Which, compare, evidence
from ledger.errors import InputError, LedgerError, ProvenanceError

__all__ = ["Stopped", "compare", "reproduce"]


class Stopped(KeyboardInterrupt):
    """Ctrl-C while a reproduction ran, after what there was has been recorded."""


def reproduce(
    archive: Archive,
    run: str,
    *,
    current_harness: bool = False,
    keep: Path | None = None,
    search: Sequence[Path] = (),
    progress: bool = True,
) -> records.Reproduction:
    """Run a recorded run's spec again and append how it compares; the appended reproduction.

    ``run`` is the digest of a recorded run. ``keep`` is a folder for the frozen folder and the new result; by default
    they are temporary. ``search`` are folders in which inputs are looked for, by digest. What cannot be had (the
    harness, the checkpoint, the dataset) makes it ``not comparable``, which is appended too. Raises InputError where no
    test can run here at all, ArchiveError where nothing can be written, and :class:`Stopped` after Ctrl-C.
    """
    which: Which = "current" if current_harness else "recorded"
    launching.check_installed()
    with _workplace(keep) as place:
        reason, repeated, stopped = _again(archive, run, place, current_harness, search, progress)
    if repeated is None:
        outcome = records.Reproduction(
            format="kv-ledger/reproduction/1",
            original=run,
            reproduced=None,
            verdict="not comparable",
            reason=reason[:8000],
            same_hardware=None,
            harness=which,
        )
    else:
        outcome = compare(archive, run, repeated, harness=which)
    archive.append(outcome)
    if stopped:
        raise Stopped(outcome.reason)
    return outcome


@contextlib.contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ledger-reproduce-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise InputError("The folder to keep the reproduction in is not empty.", found=str(keep), next="choose a new folder.")
    yield keep


def _again(archive: Archive, run: str, place: Path, current: bool, search: Sequence[Path], progress: bool) -> tuple[str, str | None, bool]:
    """Why nothing was recorded, or the digest of the new run; and whether Ctrl-C ended it."""
    frozen, out = place / "frozen", place / "result"
    original = archive.run(run)
    with contextlib.ExitStack() as stack:
        try:
            stored = evidence(archive, archive.result(original)).get(freezing.STORED_INPUTS)
            freezing.thaw(archive, original.spec, frozen, stored_inputs=stored, search=search)
            root = stack.enter_context(_harness(original, place / "harness", current))
            ended = launching.launch(frozen, out, root, progress=progress)
        except (ProvenanceError, InputError) as error:
            return _one_line(error), None, False
        if not (out / recording.RESULT).is_file():
            return ended.words or f"The runner ended with status {ended.status} before it wrote a result.", None, ended.interrupted
        found = recording.read_folder(out)
        if found.outcome == "failed" and not found.result.documents:
            # Nothing was measured: a run of it would say no more than this reproduction does.
            return found.reason or ended.words, None, ended.interrupted
        # Recorded while the worktree stands: what ran is its commit, whatever is being edited here.
        return "", recording.record(archive, out, checkout=root).record, ended.interrupted


def _one_line(error: LedgerError) -> str:
    return " ".join(line.strip() for line in error.message().splitlines())


@contextlib.contextmanager
def _harness(original: records.Run, target: Path, current: bool) -> Iterator[Path | None]:
    """The root of the code to run: None for what is installed here, else a worktree at the recorded commit."""
    harness = original.harness
    if current:
        yield None
    elif harness.matched == "commit" and harness.commit is not None:
        with provenance.worktree(Path(ledger.__file__).parent, harness.commit, target) as root:
            yield root
    elif harness.matched == "distribution" and harness.distribution is not None:
        _require_distribution(harness.distribution)
        yield None
    else:
        raise ProvenanceError(
            "The code that made this run is in no commit and no distribution, so it cannot be had again.",
            expected="a harness matched to a commit",
            found=f"matched: {harness.matched}",
            next="use --current-harness, which the reproduction then says.",
        )


def _require_distribution(wanted: records.Distribution) -> None:
    here = provenance.installed()
    if here == wanted:
        return
    if here is None:
        found = "not installed, or without a RECORD"
    else:
        found = f"{here.name}=={here.version}" + (", with another RECORD" if here.version == wanted.version else "")
    raise ProvenanceError(
        "The distribution that made this run is not the one installed here.",
        expected=f"{wanted.name}=={wanted.version} whose RECORD has sha256 {wanted.record_sha256}",
        found=found,
        next=f"pip install {wanted.name}=={wanted.version} in another environment, or use --current-harness.",
    )
