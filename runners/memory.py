"""state memory: what a cache really takes at each context, allocation by allocation, beside a second count.

Every context has a new cache, filled with random token ids by the model itself, ``chunk`` at a time. The cache's backings
are then listed (:func:`runners.caches.backings`), and counted a second way: on a GPU by what torch's allocator has been asked for,
and not got back, since before the cache was made; on a CPU, where torch counts nothing, by the distinct storages that are reachable from
the cache, whoever holds them.

A context beyond the budget or the model's positions is recorded as not fitting, and the others are measured all the same.
Evidence is ``memory.jsonl`` (:mod:`ledger.memory` says how a line looks and judges it).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch

from ledger import digest, records
from ledger.errors import InputError, RefusedError
from runners import captures, checkpoints, losses, scales

FILE = "memory.jsonl"
WARM = 2
"""Chunks that go through the model before anything is counted, so that libraries have their workspaces, those of a later chunk too."""


def storages(root: Any) -> int:
    """Bytes of the distinct storages of all tensors that are reachable from an object's attributes, lists and dicts."""
    found: dict[tuple[str, int], int] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[str(item.device), storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set)):
            waiting += item
        elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module)):
            waiting += vars(item).values()
    return sum(found.values())


def _allocated(device: str) -> int:
    """Bytes that torch's allocator was asked for on a GPU and that are still in use, weights included.

    Not what it has given out: a block that it takes from its pool may be up to 1 MiB larger than the tensor in it.
    """
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats(torch.device(device)).get("requested_bytes.all.current", 0))


def _line(state: losses.Running, context: int, refused: str, counted: int = 0, backings: tuple[records.Backing, ...] = ()) -> bytes:
    fields = ("kind", "holds", "dtype", "bytes", "layers")
    value = {
        "arm": state.name,
        "context": context,
        "refused": refused,
        "backings": [{name: records.plain(backing)[name] for name in fields} for backing in backings],
        "counted": counted,
        "method": "allocator" if torch.device(state.device).type == "cuda" else "storages",
    }
    return digest.canonical(value) + b"\n"


def _check_fits(state: losses.Running, context: int, budget: int) -> None:
    """Raises RefusedError (``positions``, ``budget``) before anything is allocated."""
    most = getattr(state.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and context > most:
        raise RefusedError("positions", "The context lies beyond the model's positions.", expected=f"at most {most}", found=str(context))
    least = captures.least_bytes(state.model.config, state.arm, context)
    if least > budget:
        raise captures.over_budget(least, budget, "The context does not fit the cache budget.")


def _fill(state: losses.Running, ids: torch.Tensor, budget: int, progress: losses.Progress) -> None:
    """A new cache that holds ``ids`` ``[context]``. Raises RefusedError (``budget``)."""
    state.tokens = len(ids)
    losses.begin(state)
    for first, last in losses.blocks(len(ids), state.chunk):
        state.forward(ids[first:last], last=True)
        held = captures.held_bytes(state.cache)
        if held > budget:
            raise captures.over_budget(held, budget, "The cache grew beyond its budget.")
        progress.advance(last - first, f"{state.name}, {len(ids)} tokens")


def _measured(state: losses.Running, ids: torch.Tensor, plan: records.Memory, progress: losses.Progress) -> bytes:
    """The line of one context; the cache is left to be looked at."""
    context = len(ids)
    cuda = torch.device(state.device).type == "cuda"
    state.cache = None
    try:
        _check_fits(state, context, plan.budget_bytes)
        before = _allocated(state.device) if cuda else 0
        _fill(state, ids, plan.budget_bytes, progress)
    except RefusedError as error:
        state.cache = None
        if error.code not in ("positions", "budget"):
            raise
        return _line(state, context, f"{error.code}: {error}"[:2000])
    counted = _allocated(state.device) - before if cuda else storages(state.cache)
    return _line(state, context, "", counted, losses.caches.backings(state.cache))


def warm(state: losses.Running, ids: torch.Tensor, plan: records.Memory, progress: losses.Progress) -> None:
    """What goes through the model before anything is counted: on a GPU alone, whose libraries take memory of their own."""
    if torch.device(state.device).type == "cuda":
        _fill(state, ids[: min(WARM * state.chunk, plan.contexts[0])], sys.maxsize, progress)


def measure(state: losses.Running, ids: torch.Tensor, plan: records.Memory, lines: list[bytes], progress: losses.Progress) -> None:
    """One context of an arm, ``ids`` ``[context]``; the longest that fits is looked at last, for the arm's facts."""
    lines.append(_measured(state, ids, plan, progress))
    if state.cache is not None:
        losses.measure_cache(state)


def run(spec: records.Spec, inputs: Path, folder: losses.Folder, progress: losses.Progress) -> None:
    """Fill a cache of every arm at every context; evidence and facts go to ``folder``.

    ``inputs`` is the frozen folder's ``inputs/``. Raises InputError and ProvenanceError where nothing can be run; what fails in one arm is
    recorded there.
    """
    plan = spec.memory
    if plan is None:
        raise InputError("The spec does not say at what contexts.", expected="[memory]", next="choose a study of that scope.")
    models = {
        compute: checkpoints.load(spec.checkpoint, compute, progress.say, inputs, spec.device)[0]
        for compute in dict.fromkeys(arm.compute for arm in spec.arms)
    }
    calibration = scales.read(spec.arms, inputs)
    warnings = checkpoints.cautions(spec.checkpoint, spec.device, next(iter(models.values()))) + scales.cautions(calibration)
    folder.update(warnings=tuple(warnings))
    states = [losses.admit(arm, plan, models, max(plan.contexts), spec.device, calibration, spec.weights) for arm in spec.arms]
    progress.start(sum(plan.contexts) * sum(not state.outcome for state in states))
    vocabulary = next(iter(models.values())).config.get_text_config(decoder=True).vocab_size
    random = torch.Generator().manual_seed(plan.seed)
    ids = torch.randint(vocabulary, (max(plan.contexts),), generator=random).to(spec.device)
    folder.append(FILE, b"")
    try:
        with torch.inference_mode():
            for state in states:
                _measure_all(state, ids, plan, states, folder, progress)
    finally:
        folder.update(arms=tuple(state.result("unfinished") for state in states))


def _measure_all(
    state: losses.Running,
    ids: torch.Tensor,
    plan: records.Memory,
    states: list[losses.Running],
    folder: losses.Folder,
    progress: losses.Progress,
) -> None:
    """All contexts of one arm, each durable once it is measured."""
    if not state.outcome:
        state.attempt(warm, state, ids, plan, progress)
    for context in plan.contexts:
        if state.outcome:
            return
        lines: list[bytes] = []
        state.attempt(measure, state, ids[:context], plan, lines, progress)
        folder.append(FILE, b"".join(lines))
        folder.update(arms=tuple(each.result("unfinished") for each in states))
    state.cache, state.backends = None, list(dict.fromkeys(state.backends))
    state.outcome = state.outcome or "completed"
