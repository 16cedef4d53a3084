"""What a study asks for and whether this host can do it, without the network: ``ledger run STUDY --dry-run``.

A study may say in ``[expects]`` what its author saw or estimates; that is no part of the spec. A suite is a TOML file that names
studies, one after the other: ``suite``, ``title``, ``studies``. Those that ship lie in ``runners/studies/suites``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ledger import freezing, records, scopes, sources
from ledger.errors import InputError, LedgerError

NEEDED = ("torch", "transformers", "safetensors")
"""Packages without which no test runs."""
UNLIMITED = 1 << 60
"""A memory limit of a control group from which on it is none."""


class Expects(records.Record, frozen=True, kw_only=True):
    """The ``[expects]`` table. ``minutes`` and the bytes are of the whole study on ``on``; ``validates`` is what a result speaks for."""

    install: records.Text
    on: records.Text
    minutes: records.Positive
    memory_bytes: records.Positive
    gpu_memory_bytes: records.Count = 0
    download_bytes: records.Count = 0
    validates: records.Text


class Suite(records.Record, frozen=True, kw_only=True):
    """Studies that belong together, in the order in which they run."""

    suite: records.Name
    title: records.Text
    studies: tuple[records.Text, ...]


def suite_of(name_or_path: str) -> Suite | None:
    """The suite of that name or file; None where it is a study, or nothing. Raises InputError for a file that is no TOML."""
    folder = freezing.packaged()
    shipped = folder / "suites" / f"{name_or_path}.toml" if folder and "/" not in name_or_path and os.sep not in name_or_path else None
    path = shipped if shipped is not None and shipped.is_file() else Path(name_or_path)
    if not path.is_file() or path.stat().st_size > freezing.MAX_STUDY:
        return None
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ValueError):
        return None  # whoever reads it as a study says what is wrong
    if "suite" not in table:
        return None
    found = sources.section(Suite, table, "")
    if not found.studies:
        raise InputError(f"The suite {found.suite!r} names no study.", expected='studies = ["…"]', next="correct the suite.")
    place = path.parent
    return Suite(suite=found.suite, title=found.title, studies=tuple(_beside(name, place) for name in found.studies))


def _beside(name: str, place: Path) -> str:
    return str(place / name) if name.endswith(".toml") else name


def look(study: str, calibration: str | None = None) -> dict[str, Any]:
    """What the study asks for, and what this host says to it; ``calibration`` stands for its own. Raises InputError where it is wrong."""
    table, base = freezing.load_study(study, calibration)
    draft = freezing.draft_of(table)
    checkpoint = sources.section(sources.CheckpointTable, table["checkpoint"], "checkpoint")
    expects = sources.section(Expects, table["expects"], "expects") if "expects" in table else None
    checks = list(_checks(draft, table, base, expects))
    return {
        "study": draft.study,
        "title": draft.title,
        "scope": draft.scope,
        "device": draft.device,
        "checkpoint": {"name": checkpoint.name, "source": checkpoint.source, "license": checkpoint.license, "pinned": _pinned(checkpoint)},
        "arms": [records.plain(arm) for arm in draft.arms],
        "documents": [records.plain(span) for span in draft.documents],
        "calibration": next((arm["scale_source"] for arm in table["arms"] if "scale_source" in arm), None),
        "power": draft.task.power if draft.task else None,
        "expects": None if expects is None else records.plain(expects),
        "checks": checks,
        "can_run": all(check["met"] for check in checks),
    }


def _pinned(checkpoint: sources.CheckpointTable) -> str:
    """How the checkpoint is pinned, in words."""
    kind, _, rest = checkpoint.source.partition(":")
    if kind != "hf":
        return "by digest" if kind != "random" else "by its configuration and seed"
    revision = rest.partition("@")[2]
    whole = len(revision) == 40 and all(char in "0123456789abcdef" for char in revision)
    return f"at commit {revision}" if whole else f"{revision or 'no revision'} is resolved to a commit, and frozen, at the first run"


# ---------------------------------------------------------------- this host


def _check(what: str, needed: str, found: str, met: bool) -> dict[str, Any]:
    return {"what": what, "needed": needed, "found": found, "met": met}


def _checks(draft: records.Spec, table: dict[str, Any], base: Path, expects: Expects | None) -> Iterator[dict[str, Any]]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    yield _check("packages", ", ".join(NEEDED), f"without {', '.join(missing)}" if missing else "installed", not missing)
    if draft.workload is not None:
        try:
            _, path = sources.resolve_dataset(table["workload"], base)
            yield _check("dataset", "the pinned bytes", str(path.name), True)
        except LedgerError as error:
            yield _check("dataset", error.expected or "the pinned bytes", error.found or error.what, False)
    if draft.task is not None:
        try:
            _, files = scopes.resolve_task(draft.task, table["task"], base)
            yield _check("dataset", "the pinned bytes, every item whole", ", ".join(sorted(files)), True)
        except LedgerError as error:
            yield _check("dataset", error.expected or "the pinned bytes", error.found or error.what, False)
    gpus = accelerators()
    if draft.device == "cuda":
        found = ", ".join(f"{name}, {gibibytes(size)}" for name, size in gpus) or "none"
        yield _check("GPU", "a CUDA device", found, bool(gpus))
    if expects is not None:
        yield _check("memory", gibibytes(expects.memory_bytes), gibibytes(memory()), memory() >= expects.memory_bytes)
        if expects.gpu_memory_bytes and draft.device == "cuda":
            most = max((size for _, size in gpus), default=0)
            yield _check("GPU memory", gibibytes(expects.gpu_memory_bytes), gibibytes(most), most >= expects.gpu_memory_bytes)
        if expects.download_bytes:
            free = shutil.disk_usage(_existing(cache())).free
            yield _check("disk for weights", gibibytes(expects.download_bytes), gibibytes(free), free >= expects.download_bytes)


def gibibytes(size: int) -> str:
    """Bytes in words: ``23.4 GiB``."""
    return f"{size / 2**30:.1f} GiB"


def cache() -> Path:
    """The folder that weights are fetched into: a hub's or, for packages, ours."""
    return Path(os.environ.get("HF_HOME") or os.environ.get("LEDGER_CACHE") or Path.home() / ".cache")


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.is_dir())


def memory() -> int:
    """Bytes of memory that a process here may use: the machine's, or less where a control group says so."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(place).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < UNLIMITED:
            return min(total, int(limit))
    return total


def accelerators() -> list[tuple[str, int]]:
    """Names and bytes of memory of the NVIDIA GPUs here; none where their driver's tool is missing or says nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.rpartition(",") for line in said.splitlines() if line.strip()]
    return [(name.strip(), int(size) << 20) for name, _, size in lines if size.strip().isdigit()]
