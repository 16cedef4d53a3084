"""capability and calibration: documents are read, then continued by a forced number of greedy tokens, and every step is looked at.

Each arm reads a document into a cache of its own, in the workload's chunks, and takes ``new_tokens`` steps. The length is
forced by ignoring the end token, which is a token like any other and is not masked. Of the raw logits of a step it is counted how many
are NaN or infinite; of the scores after the suppressed ids of the checkpoint's generation config, which are -inf and
which of them, and how many are NaN or +inf. No infinity is written down (:mod:`ledger.captures` says how a line looks and judges it).

The budget is enforced twice: an arm whose longest document cannot fit is refused before anything is allocated, and one whose
allocations exceed it after some chunk or step is refused there, with what it had captured.

A capability run that was stopped goes on behind the last document that was listed; a calibration does not, as what it has seen so far
is not written down.

A calibration watches the states of its arm as they reach the cache, before anything is stored: of each layer and KV head the
largest absolute value, and 99.9 % and 99.99 % of all of them. These quantiles are exact: the largest thousandth of the
values is kept, which holds both.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.numpy import save
from transformers import SuppressTokensLogitsProcessor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ledger import digest, records
from ledger.errors import InputError, RefusedError
from runners import caches, checkpoints, geometry, losses
from runners.slots import stored_bytes

FILE = "captures.jsonl"
LISTED = 1000
"""Most masked ids that a line lists."""
SHARES = {"p999": (999, 1000), "p9999": (9999, 10_000)}
"""Quantiles of a calibration, as exact fractions."""
_PENDING = {"cpu": 1 << 16, "cuda": 1 << 20}
"""Most values of a head that wait to be merged with those kept: on a GPU a merge takes long by its launches, not by its values."""


# ---------------------------------------------------------------- suppressed ids and the budget


def suppressed(spec: records.Spec, model: Any) -> list[int]:
    """The ids to suppress: those of the checkpoint's generation config, which must be those that the spec froze.

    A seeded model has no generation config of its own: the spec's ids stand in for it. Raises InputError.
    """
    asked = list(spec.capture.suppressed) if spec.capture else []
    if spec.checkpoint.config is None:
        declared = sorted(set(getattr(model.generation_config, "suppress_tokens", None) or ()))
        if declared != asked:
            raise InputError(
                "The checkpoint's generation config suppresses other ids than the spec says.",
                expected=f"suppressed = {asked[:20]}",
                found=str(declared[:20]),
                next="correct capture.suppressed in the study, and freeze it again.",
            )
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if any(not 0 <= name < vocabulary for name in asked):
        raise InputError(
            "A suppressed id lies outside the vocabulary.",
            expected=f"ids below {vocabulary}",
            found=", ".join(str(name) for name in asked if not 0 <= name < vocabulary)[:200],
            next="correct capture.suppressed in the study, and freeze it again.",
        )
    return asked


def least_bytes(config: Any, arm: records.Arm, tokens: int) -> int:
    """Fewest bytes that an arm's keys and values need for one sequence of so many tokens. Scales and states are not counted.

    What a layer holds by its declared geometry; a real allocation is never smaller.
    """
    bare = msgspec.structs.replace(arm, scales="none")
    return sum(
        stored_bytes(bare, layer, min(tokens, layer.window - 1 if layer.window else tokens))
        for layer in geometry.declared(config)
        if layer.kind != "recurrent"
    )


def held_bytes(cache: Any) -> int:
    """Bytes of a cache's allocations as they are now."""
    return sum(backing.bytes for backing in caches.backings(cache))


def over_budget(bytes: int, budget: int, what: str) -> RefusedError:
    """The refusal of a cache that does not fit."""
    return RefusedError(
        "budget", what, expected=f"at most {budget} bytes", found=f"{bytes} bytes", next="raise budget_bytes, or ask for shorter documents."
    )


# ---------------------------------------------------------------- the states that reach a cache


class Sizes:
    """Absolute values of the states of one side of one layer, by KV head: the largest of them exactly, of ``values`` in all."""

    def __init__(self, values: int) -> None:
        self.keep = max(1, above(values, *SHARES["p999"]) + 1)
        self.count = 0
        self.amax: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.pending: torch.Tensor | None = None
        self.waiting = 0

    def add(self, states: torch.Tensor) -> None:
        """Look at states ``[B, H, T, D]``."""
        heads = states.detach().abs().float().transpose(0, 1).flatten(1)
        width = heads.shape[1]
        self.count += width
        largest = heads.amax(dim=1)
        self.amax = largest if self.amax is None else torch.maximum(self.amax, largest, out=self.amax)
        if (
            self.pending is None
        ):  # one place for all: small tensors that stay between those of a growing cache would leave holes too small for it
            self.pending = heads.new_empty(len(heads), _PENDING[heads.device.type])
        if self.waiting + width > self.pending.shape[1]:
            self._merge(heads)
        else:
            self.pending[:, self.waiting : self.waiting + width] = heads
            self.waiting += width

    def _merge(self, *more: torch.Tensor) -> None:
        assert self.pending is not None
        every = torch.cat([*([] if self.kept is None else [self.kept]), self.pending[:, : self.waiting], *more], dim=1)
        self.kept = every.topk(min(self.keep, every.shape[1]), dim=1).values
        self.waiting = 0

    def found(self) -> dict[str, np.ndarray]:
        """``amax``, ``p999`` and ``p9999``, float32 ``[kv_heads]``. A NaN among the values is a NaN in all that it could be in."""
        if self.waiting:
            self._merge()
        assert self.amax is not None and self.kept is not None
        sizes = {"amax": self.amax}
        sizes |= {name: self.kept[:, above(self.count, *share)] for name, share in SHARES.items()}
        return {name: tensor.cpu().numpy().astype("<f4") for name, tensor in sizes.items()}


def above(values: int, part: int, of: int) -> int:
    """How many of so many values stand above the quantile ``part / of`` by numpy's "higher" method, in whole numbers."""
    return values - 1 - -(-(values - 1) * part // of)


class Watch:
    """The sizes of all states that reach the caches of one model, layer by layer; ``tokens`` are those to come in all."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.layers: dict[int, tuple[Sizes, Sizes]] = {}

    def attend(self, cache: Any) -> None:
        """See what every attending layer of a new cache is given, before it stores it."""
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.update = self._seen(index, layer)

    def _seen(self, index: int, layer: Any) -> Callable[..., Any]:
        update, held = type(layer).update, weakref.ref(layer)  # a layer that held itself would outlive its document, tensors and all

        def watched(keys: torch.Tensor, values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if index not in self.layers:
                self.layers[index] = (Sizes(self.tokens * keys.shape[-1]), Sizes(self.tokens * values.shape[-1]))
            for sizes, states in zip(self.layers[index], (keys, values), strict=True):
                sizes.add(states)
            return update(held(), keys, values, *arguments, **options)

        return watched

    def file(self, checkpoint: str) -> bytes:
        """``calibration.safetensors`` of the weights of that digest."""
        tensors = {
            f"{side}.{name}/{index}": found
            for index, layer in sorted(self.layers.items())
            for side, sizes in zip(("keys", "values"), layer, strict=True)
            for name, found in sizes.found().items()
        }
        # one name alone: the library writes several in any order, and equal calibrations would have other bytes
        return save(tensors, metadata={"checkpoint": checkpoint})


# ---------------------------------------------------------------- one document


class Line:
    """What one arm captures behind one document, step by step."""

    def __init__(self, arm: str, document: int, prompt: int) -> None:
        self.fields: dict[str, Any] = {"arm": arm, "document": document, "prompt_tokens": prompt, "vocabulary": 0}
        self.fields |= {name: [] for name in ("ids", "nan", "infinite", "broken", "masked", "masked_ids")}
        self.mask: torch.Tensor | None = None

    def step(self, logits: torch.Tensor, scores: torch.Tensor) -> int:
        """Look at a step's raw ``logits`` and processed ``scores``, float32 ``[vocabulary]``; the id that is chosen."""
        masked = torch.isneginf(scores)
        changed = masked.new_ones(1).sum() if self.mask is None else (masked != self.mask).sum()
        counts = {
            "nan": logits.isnan().sum(),
            "infinite": logits.isinf().sum(),
            "broken": scores.isnan().sum() + torch.isposinf(scores).sum(),
            "masked": masked.sum(),
            "ids": scores.argmax(),
            "changed": changed,
        }
        # one fetch a step, which is what a GPU would wait for
        found = dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True))
        if found.pop("changed"):
            ids = masked.nonzero()[:, 0].tolist()
            self.fields["masked_ids"].append({"from": len(self.fields["ids"]), "count": len(ids), "ids": ids[:LISTED]})
            self.mask = masked
        for name, count in found.items():
            self.fields[name].append(count)
        self.fields["vocabulary"] = len(logits)
        return int(found["ids"])

    def bytes(self) -> bytes:
        """The canonical line."""
        return digest.canonical(self.fields) + b"\n"


def capture(
    state: losses.Running,
    ids: np.ndarray,
    line: Line,
    plan: records.Capture,
    banned: list[int],
    watch: Watch | None,
    progress: losses.Progress,
) -> None:
    """Read a document (``ids``) and take its steps. Raises RefusedError (``budget``) where the cache grows beyond its budget."""
    losses.begin(state)
    if watch is not None:
        watch.attend(state.cache)
    process = SuppressTokensLogitsProcessor(banned, device=state.device) if banned else None
    prompt = torch.from_numpy(ids.astype(np.int64)).to(state.device)
    doing = f"{state.name}, document {line.fields['document'] + 1}"
    for first, last in losses.blocks(len(prompt), state.chunk):
        logits = state.forward(prompt[first:last], last=True)[-1]
        check_budget(state, plan.budget_bytes)
        progress.advance(last - first, doing)
    for number in range(plan.new_tokens):
        scores = logits if process is None else process(prompt[None], logits[None].clone())[0]
        chosen = line.step(logits, scores)
        if number + 1 < plan.new_tokens:
            logits = state.forward(torch.tensor([chosen], device=state.device), last=True)[-1]
            check_budget(state, plan.budget_bytes)
        progress.advance(1, doing)


def check_budget(state: losses.Running, budget: int) -> None:
    """Raises RefusedError (``budget``) where the cache's allocations exceed the budget."""
    held = held_bytes(state.cache)
    if held > budget:
        raise over_budget(held, budget, "The cache grew beyond its budget.")


# ---------------------------------------------------------------- the run


def admit(arm: records.Arm, workload: records.Workload, models: dict[str, Any], tokens: int, device: str, budget: int) -> losses.Running:
    """An arm ready to run, or already refused: by its backend, the guard, or the budget."""
    state = losses.admit(arm, workload, models, tokens, device)
    if not state.outcome:

        def check() -> None:
            least = least_bytes(state.model.config, arm, tokens)
            if least > budget:
                raise over_budget(least, budget, "The longest document does not fit the cache budget.")

        state.attempt(check)
    return state


def run(spec: records.Spec, inputs: Path, folder: losses.Folder, progress: losses.Progress) -> None:
    """Capture behind every document with every arm; evidence and facts go to ``folder``.

    ``inputs`` is the frozen folder's ``inputs/``. Raises InputError and ProvenanceError where nothing can be run; what fails in one
    arm is recorded there, with what it had captured.
    """
    workload, plan = spec.text, spec.capture
    if plan is None:
        raise InputError("The spec does not say what is captured.", expected="[capture]", next="choose a study of that scope.")
    if (inputs / workload.dataset.file).exists():
        losses.read_dataset(workload.dataset, inputs)  # a wrong dataset is known before minutes are spent on weights
    models, tokenizer = {}, None
    for compute in dict.fromkeys(arm.compute for arm in spec.arms):
        models[compute], tokenizer = checkpoints.load(spec.checkpoint, compute, progress.say, inputs, spec.device)
    model = next(iter(models.values()))
    banned = suppressed(spec, model)
    documents, facts, warnings = losses.prepare(spec, inputs, tokenizer, model.config)
    if workload.inputs == "store":
        folder.add(losses.INPUTS, losses.kept(documents), "application/octet-stream")
    folder.update(tokenizer=facts, warnings=tuple(warnings + checkpoints.cautions(spec.checkpoint, spec.device, model)))

    # the last token that is chosen is not written to the cache
    lengths = [len(ids) + plan.new_tokens - 1 for ids in documents]
    _check_positions(model.config, max(lengths))
    states = [admit(arm, workload, models, max(lengths), spec.device, plan.budget_bytes) for arm in spec.arms]
    for state in states:
        state.go_on(folder)
    done = folder.done()
    if done:
        progress.say(f"going on behind {done} of {len(documents)} documents")
    progress.start((sum(lengths[done:]) + len(documents[done:])) * sum(not state.outcome for state in states))
    watch = Watch(sum(lengths)) if spec.scope == "calibration" else None
    if before := folder.grown(FILE):
        folder.keep(FILE, behind(before, done))
    else:
        folder.append(FILE, b"")
    try:
        with torch.inference_mode():
            _capture_all(states, documents, done, plan, banned, watch, progress, folder)
        for state in states:
            state.outcome = state.outcome or "completed"
    finally:  # what was captured until then stands, whatever stopped it
        if watch is not None and watch.layers and all(state.outcome == "completed" for state in states):
            folder.add("calibration.safetensors", watch.file(spec.weights), "application/octet-stream")
        folder.update(arms=tuple(state.result("unfinished") for state in states))


def behind(data: bytes, done: int) -> bytes:
    """The lines of ``data`` that belong to the first ``done`` documents: those behind were never listed as done."""
    return b"".join(line for line in data.splitlines(True) if line.endswith(b"\n") and json.loads(line)["document"] < done)


def _check_positions(config: Any, tokens: int) -> None:
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise InputError(
            "The longest document and its new tokens lie beyond the model's positions.",
            expected=f"at most {most} tokens",
            found=f"{tokens} tokens",
            next="ask for shorter documents, or fewer new tokens.",
        )


def _capture_all(
    states: list[losses.Running],
    documents: list[np.ndarray],
    done: int,
    plan: records.Capture,
    banned: list[int],
    watch: Watch | None,
    progress: losses.Progress,
    folder: losses.Folder,
) -> None:
    """Document by document through all arms that still run, a line each; the last document's caches are measured.

    The first ``done`` were captured in an earlier stretch. Of a run that was stopped behind its last document that one is captured
    again, for its caches alone.
    """
    last = len(documents) - 1
    for number, ids in enumerate(documents):
        if number < min(done, last):
            continue
        for state in states:
            if state.outcome:
                continue
            line = Line(state.name, number, len(ids))
            try:
                whole = state.attempt(capture, state, ids, line, plan, banned, watch, progress)
            finally:  # an interrupt's too
                folder.append(FILE, line.bytes() if line.fields["ids"] and number >= done else b"")
            if whole and number == last:
                state.attempt(losses.measure_cache, state)
            if not isinstance(state.cache, losses.serving.FusedCache):
                state.cache = None  # arms take turns, and so do their caches
        unfinished = f"unfinished: {number + 1} of {len(documents)} documents"
        folder.update(documents=losses.fed(documents[: number + 1]), arms=tuple(state.result(unfinished) for state in states))
