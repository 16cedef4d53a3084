"""The tables of a study that reads no dataset: what to time, and what the production checks feed.

A case of a study stands for many: ``batch`` and ``context`` may be lists, and every pair of them is a case of the spec, batch
by batch. A case of layers of one head dimension takes the checkpoint's own where it names none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ledger import performance, records, sources
from ledger.records import Case, Performance, Production, Task, gsm8k

MAX_CASES = 1000
"""Most cases of a study."""

Several = records.Positive | tuple[records.Positive, ...]


class CaseTable(records.Record, frozen=True, kw_only=True):
    """A ``[[performance.cases]]`` table."""

    kind: str
    batch: Several
    context: Several
    shortest: records.Positive | None = None
    head_dim: records.Positive | None = None
    window: records.Positive | None = None
    soft_cap: float | None = None
    chunk: records.Positive | None = None


class PerformanceTable(records.Record, frozen=True, kw_only=True):
    """The ``[performance]`` table of a study."""

    cases: tuple[dict[str, Any], ...]
    repeats: records.Positive
    launches: records.Positive
    rotate_bytes: records.Count
    budget_bytes: records.Positive | None = None
    page: records.Positive = 64
    seed: records.Count = 0


def performance_of(table: dict[str, Any], config: dict[str, Any] | None) -> Performance:
    """The ``[performance]`` table with every case written out. Raises InputError.

    ``config`` is the checkpoint's, where the study holds it.
    """
    study = sources.section(PerformanceTable, table, "performance")
    cases: list[Case] = []
    for number, item in enumerate(study.cases):
        path = f"performance.cases[{number}]"
        given = sources.section(CaseTable, item, path)
        fixed = {name: getattr(given, name) for name in ("kind", "shortest", "head_dim", "window", "soft_cap", "chunk")}
        if fixed["head_dim"] is None and given.kind not in ("step", "capacity"):
            fixed["head_dim"] = _head_dim(config, path)
        batches, contexts = (value if isinstance(value, tuple) else (value,) for value in (given.batch, given.context))
        if len(cases) + len(batches) * len(contexts) > MAX_CASES:
            raise sources.refuse("performance.cases", "are too many.", expected=f"at most {MAX_CASES}")
        cases += [sources.section(Case, {**fixed, "batch": batch, "context": context}, path) for batch in batches for context in contexts]
    if not any(performance.is_yardstick(case) for case in cases):
        raise sources.refuse(
            "performance.cases",
            "cannot show that the native contenders were at their best, so that every run would be void.",
            expected="a decode of 32 sequences of 8192 tokens without window and soft cap",
            next="add it.",
        )
    rest = {name: getattr(study, name) for name in ("repeats", "launches", "rotate_bytes", "budget_bytes", "page", "seed")}
    return Performance(cases=tuple(cases), **rest)


def _head_dim(config: dict[str, Any] | None, path: str) -> int:
    """The one head dimension of a configuration, as it says or as it follows."""
    found = (config or {}).get("head_dim")
    if found is None and config and config.get("hidden_size") and config.get("num_attention_heads"):
        found = config["hidden_size"] // config["num_attention_heads"]
    if type(found) is not int:
        raise sources.refuse(f"{path}.head_dim", "is missing, and the checkpoint's configuration does not say it.", next="add it.")
    return found


def production_of(table: dict[str, Any]) -> Production:
    """The ``[production]`` table. Raises InputError."""
    return sources.section(Production, table, "production")


# ---------------------------------------------------------------- tasks


class TaskFileTable(records.Record, frozen=True, kw_only=True):
    """A ``[task.test]`` or ``[task.train]`` table: a file, and how many items it holds."""

    dataset: records.Text
    dataset_name: records.Text
    dataset_license: records.Text
    sha256: records.Digest
    items: records.Positive


class TaskTable(records.Record, frozen=True, kw_only=True):
    """The ``[task]`` table of a study. ``items`` is how many are asked, from ``first`` on, or their numbers."""

    definition: str
    version: records.Word
    definition_sha256: records.Digest
    test: dict[str, Any]
    train: dict[str, Any] | None = None
    items: records.Positive | tuple[records.Count, ...]
    shots: records.Count
    chat_template: bool | str
    bos: bool
    new_tokens: records.Positive
    batch: records.Positive
    chunk: records.Positive
    margin: float
    first: records.Count = 0
    confidence: float = 0.95


def task_of(table: dict[str, Any]) -> Task:
    """The ``[task]`` table of a study, its files not yet resolved. Raises InputError."""
    study = sources.section(TaskTable, table, "task")
    sides = {"test": study.test} | ({} if study.train is None else {"train": study.train})
    files = {side: sources.section(TaskFileTable, given, f"task.{side}") for side, given in sides.items()}
    if isinstance(study.items, tuple) and study.first:
        raise sources.refuse("task.first", "has no meaning where items are numbers.", next="remove it.")
    if isinstance(study.items, int) and study.first + study.items > files["test"].items:
        raise sources.refuse(
            "task.items",
            "are more than the file of questions holds.",
            expected=f"at most {files['test'].items - study.first}",
            found=str(study.items),
        )
    items = study.items if isinstance(study.items, tuple) else tuple(range(study.first, study.first + study.items))
    given = {name: getattr(study, name) for name in TaskTable.__struct_fields__ if name not in ("first", "items", "test", "train")}
    unresolved = {
        side: {"name": file.dataset_name, "file": f"unresolved-{side}", "sha256": file.sha256, "size": 1, "license": file.dataset_license}
        for side, file in files.items()
    }
    counts = {f"{side}_items": file.items for side, file in files.items()}
    return sources.section(Task, {**given, **unresolved, **counts, "items": items}, "task")


def resolve_task(task: Task, table: dict[str, Any], base: Path) -> tuple[Task, dict[str, Path]]:
    """The task with its files resolved and read as strictly as a runner will, and where they lie. Raises InputError and ProvenanceError."""
    found: dict[str, Any] = {}
    files: dict[str, Path] = {}
    counts = {"test": task.test_items, "train": task.train_items}
    for side in task.files:
        dataset, path = sources.resolve_dataset(table[side], base, f"task.{side}")
        if dataset.file in files:
            raise sources.refuse(f"task.{side}.dataset", "has the file name of the other.", found=dataset.file, next="rename one of them.")
        gsm8k.items(str(path), path.read_bytes(), counts[side])
        found[side], files[dataset.file] = dataset, path
    return msgspec.structs.replace(task, **found), files
