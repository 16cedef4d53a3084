"""quality.loss: next-token losses of every arm over the same tokens, written to each arm's cache, then read back.

All arms walk through one document together, in blocks of the least common multiple of their chunks; each has
its own cache and writes it in its own chunks. So memory holds one block of logits per reference and not one
document of them: the arms that others are compared with (controls, what a repeat repeats, baselines of a ``bit_equal``
gate) go first within a block, their log-probabilities are kept, and the others follow, one chunk at a time. Everything of
the size of the vocabulary stays on the spec's device; samples alone come to the host. A document's samples are listed with what
arms did in it, so that a run that was stopped goes on behind the last one that was listed.

Raw samples alone are written, one safetensors file a document (``<arm>.loss``, ``<arm>.top1``, ``<arm>.kl.<control>``,
``<arm>.gap.<baseline>``); no figure is derived here.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ledger import digest, records
from ledger.errors import InputError, LedgerError, ProvenanceError, RefusedError
from runners import caches, checkpoints, geometry, scales, serving

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits handled at a time by the statistics: rows times vocabulary, so that temporaries stay near 4 MiB (256 MiB) each."""


class Folder(Protocol):
    """The result folder, as this test sees it."""

    def add(self, name: str, data: bytes, media_type: str) -> None:
        """Write an evidence file durably."""

    def append(self, name: str, data: bytes) -> None:
        """Append whole lines durably to an evidence file that grows while the run lasts; no bytes begin an empty one."""

    def update(self, **changes: Any) -> None:
        """Change fields of the result and rewrite ``result.json``."""

    def grown(self, name: str) -> bytes:
        """What an earlier stretch of this run left in a growing file."""

    def keep(self, name: str, data: bytes) -> None:
        """Cut a growing file back to ``data``, its beginning."""

    def before(self, arm: str) -> float:
        """Seconds that an arm took in earlier stretches of this run."""

    def ended(self) -> dict[str, records.ArmResult]:
        """Arms that failed or were refused in earlier stretches of this run."""

    def done(self) -> int:
        """How many documents or items earlier stretches of this run had done, by what they listed."""


class Progress(Protocol):
    """Where progress goes."""

    def say(self, line: str) -> None:
        """One line about slow work."""

    def start(self, total: int) -> None:
        """So many tokens are to come, over all arms."""

    def advance(self, tokens: int, doing: str) -> None:
        """So many tokens are done."""


# ---------------------------------------------------------------- inputs


def read_dataset(dataset: records.Dataset, inputs: Path) -> str:
    """The dataset's text, from the frozen folder. Raises ProvenanceError where its bytes are not the pinned ones."""
    path = inputs / dataset.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProvenanceError(f"The dataset {path} cannot be read.", found=str(error), next="freeze the study again.") from error
    if digest.sha256(data) != dataset.sha256 or len(data) != dataset.size:
        raise ProvenanceError(
            f"The dataset {path} is not the one that the spec pins.",
            expected=f"sha256 {dataset.sha256}, {dataset.size} bytes",
            found=f"sha256 {digest.sha256(data)}, {len(data)} bytes",
            next="freeze the study again from the right file.",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"The dataset {path} is not valid UTF-8.", found=f"offset {error.start}") from error


def tokenise(text: str | None, workload: records.Workload, tokenizer: Any | None, config: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Token ids of the whole text, int64 without BOS (empty where there is no text), and facts about the tokenizer.

    Without a tokenizer (seeded weights) a token is a byte of the text modulo the vocabulary, and BOS is the
    configuration's. Raises InputError where BOS is asked for and there is none.
    """
    text_config = config.get_text_config()
    ids = np.zeros(0, np.int64)
    if tokenizer is None:
        bos = text_config.bos_token_id
        if text is not None:
            ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) % text_config.vocab_size
        rule = "token id = byte value modulo vocabulary size"
        facts: dict[str, Any] = {"class": "bytes", "rule": rule, "vocabulary": text_config.vocab_size}
    else:
        bos = tokenizer.bos_token_id
        if text is not None:
            split = workload.split_special_tokens
            ids = np.asarray(tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"], dtype=np.int64)
        facts = {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer), "bos_token": tokenizer.bos_token}
        if getattr(tokenizer, "is_fast", False):
            facts["sha256"] = digest.sha256(tokenizer.backend_tokenizer.to_str().encode())
    if workload.bos and bos is None:
        raise InputError("The workload begins documents with BOS, but the tokenizer has none.", next="set bos = false in the study.")
    facts |= {"bos_token_id": bos, "bos": workload.bos, "split_special_tokens": workload.split_special_tokens, "add_special_tokens": False}
    if text is not None:
        facts["dataset_tokens"] = len(ids)
    return ids, facts


def cut(workload: records.Workload, ids: np.ndarray, bos: int | None) -> list[np.ndarray]:
    """The documents: the spans of ``ids``, each behind BOS where the workload wants it. Raises InputError."""
    documents = []
    for number, span in enumerate(workload.spans):
        if span.start + span.tokens > len(ids):
            raise InputError(
                f"Document {number} ends beyond the dataset.",
                expected=f"at least {span.start + span.tokens} tokens",
                found=f"{len(ids)} tokens in {workload.dataset.name}",
                next="ask for fewer or shorter documents.",
            )
        part = ids[span.start : span.start + span.tokens]
        documents.append(np.concatenate(([bos], part)) if workload.bos else part)
    return documents


def stored(workload: records.Workload, path: Path, bos: int | None) -> list[np.ndarray]:
    """The documents as an earlier run stored them (``inputs.safetensors``), for a dataset that is gone. Raises InputError."""
    try:
        found = load(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"The stored inputs {path} cannot be read.", found=str(error)[:400]) from error
    documents = []
    for number, span in enumerate(workload.spans):
        ids = found.get(f"{number:04d}")
        if ids is None or ids.dtype != np.int32 or ids.shape != (span.tokens + workload.bos,) or (workload.bos and ids[0] != bos):
            raise InputError(
                f"The stored inputs {path} are not those of the spec.",
                expected=f"document {number:04d}: {span.tokens + workload.bos} int32 ids" + (f", the first {bos}" if workload.bos else ""),
                found="none" if ids is None else f"{ids.dtype} {list(ids.shape)}",
            )
        documents.append(ids.astype(np.int64))
    return documents


INPUTS, GREEDY = "inputs.safetensors", "greedy.jsonl"


def kept(documents: Sequence[np.ndarray]) -> bytes:
    """The documents' token ids as a file: tensor ``NNNN`` is document NNNN, int32, BOS included."""
    return save({f"{number:04d}": ids for number, ids in enumerate(documents)})


def prepare(spec: records.Spec, inputs: Path, tokenizer: Any | None, config: Any) -> tuple[list[np.ndarray], dict[str, Any], list[str]]:
    """Documents as little-endian int32, BOS included; facts about the tokenizer; warnings.

    They are what the tokenizer makes of the text. Where the dataset is gone, or the spec pins ids, those that lie in the frozen folder
    come first. Raises InputError, and ProvenanceError where ids are not the pinned ones.
    """
    workload, archived = spec.text, inputs / INPUTS
    gone = not (inputs / workload.dataset.file).exists()
    again = archived.exists() and (gone or spec.ids is not None)
    ids, facts = tokenise(None if again else read_dataset(workload.dataset, inputs), workload, tokenizer, config)
    bos, vocabulary = facts["bos_token_id"], config.get_text_config().vocab_size
    documents = stored(workload, archived, bos) if again else cut(workload, ids, bos)
    warnings = []
    if again:
        why = "The dataset is gone" if gone else "The spec pins token ids"
        warnings.append(f"{why}: the documents are the token ids that lay in the frozen folder.")
    declared = bos if bos is not None else config.get_text_config().bos_token_id
    if not workload.bos and declared is not None:
        warnings.append(f"The model declares a BOS token (id {declared}) and the workload puts none before its documents.")
    for number, document in enumerate(documents):
        if len(document) < 2:
            raise InputError(f"Document {number} has no token to predict.", expected="2 tokens or more", found=str(len(document)))
        if document.min() < 0 or document.max() >= vocabulary:
            raise InputError(
                f"Document {number} has ids outside the vocabulary.", expected=f"below {vocabulary}", found=str(document.max())
            )
    documents = [document.astype("<i4") for document in documents]
    found = records.ids_digest([digest.sha256(document.tobytes()) for document in documents])
    if spec.ids not in (None, found):
        raise ProvenanceError(
            f"The token ids {'in the frozen folder' if again else 'the tokenizer makes of the text'} are not those that the spec pins.",
            expected=spec.ids,
            found=f"{found} (Transformers {transformers.__version__})",
            next=f"where the tokenizer gives them, run: python -m runners FROZEN_DIR --tokenise; and carry its inputs/{INPUTS} here.",
        )
    return documents, facts, warnings


def tokenised(spec: records.Spec, inputs: Path, progress: checkpoints.Say) -> str:
    """Lay the documents' token ids into the frozen folder as ``inputs/inputs.safetensors``; their digest, for a study to pin.

    Raises InputError and ProvenanceError; ids that lie there already are not replaced.
    """
    if spec.workload is None:
        raise InputError("A spec of this scope reads no text.", expected="one with a workload", found=spec.scope)
    if (inputs / INPUTS).exists():
        raise InputError(f"There are token ids in {inputs} already.", found=INPUTS, next="remove them first.")
    model, tokenizer = checkpoints.load(spec.checkpoint, spec.arms[0].compute, progress, inputs)
    documents, _, _ = prepare(spec, inputs, tokenizer, model.config)
    (inputs / INPUTS).write_bytes(kept(documents))
    return records.ids_digest([digest.sha256(ids.tobytes()) for ids in documents])


# ---------------------------------------------------------------- statistics


def slices(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows of ``logits`` [rows, vocabulary] that hold about :data:`ELEMENTS` of them each."""
    rows, vocabulary = logits.shape
    for first, last in blocks(rows, max(1, ELEMENTS[logits.device.type] // vocabulary)):
        yield slice(first, last)


def to_host(values: torch.Tensor) -> np.ndarray:
    """The values as an array, from whatever device."""
    return values.cpu().numpy()


def divergence(reference: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """KL(reference || arm) in nats, float64 ``[rows]``, from float32 log-probabilities ``[rows, vocabulary]``."""
    product = reference - logprobs
    product *= reference.exp()
    return product.sum(dim=-1, dtype=torch.float64)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, kl: dict[str, torch.Tensor], gap: dict[str, torch.Tensor], keep: torch.Tensor | None = None
) -> dict[str, np.ndarray]:
    """``loss`` (nats), ``top1`` (id), ``kl.<reference>`` (nats) and ``gap.<baseline>`` (logits) of ``rows`` positions.

    ``logits`` is float32 ``[rows, vocabulary]``, ``targets`` ``[rows]``; ``kl`` holds references' log-probabilities and
    ``gap`` baselines' logits, of the same shape. Softmax in float32, the sum of KL in float64, nothing clamped. ``keep``
    receives the log-probabilities; it may be ``logits`` itself.
    """
    rows = len(logits)
    out: dict[str, np.ndarray] = {"loss": np.empty(rows, np.float32), "top1": np.empty(rows, np.int32)}
    out |= {f"kl.{name}": np.empty(rows, np.float32) for name in kl} | {f"gap.{name}": np.empty(rows, np.float32) for name in gap}
    for part in slices(logits):
        logprobs = torch.log_softmax(logits[part], dim=-1)
        out["loss"][part] = to_host(-logprobs.gather(1, targets[part, None])[:, 0])
        out["top1"][part] = to_host(logits[part].argmax(dim=-1))
        for name, other in kl.items():
            out[f"kl.{name}"][part] = to_host(divergence(other[part], logprobs))
        for name, other in gap.items():
            out[f"gap.{name}"][part] = to_host((logits[part] - other[part]).abs().amax(dim=-1))
        if keep is not None:
            keep[part] = logprobs
    return out


# ---------------------------------------------------------------- arms


@dataclass
class Running:
    """An arm while it runs. ``outcome`` is empty until it is decided; ``sequences`` of up to ``tokens`` each are to come at a time."""

    arm: records.Arm
    chunk: int
    model: Any
    tokens: int = 0
    device: str = "cpu"
    sequences: int = 1
    outcome: str = ""
    reason: str = ""
    seconds: float = 0.0
    cache: Any = None
    fixed: scales.FixedScales | None = None
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    backends: list[records.Backend] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> bool:
        """Do ``work``; an error ends this arm alone and is kept in its words."""
        try:
            work(*arguments)
        except RefusedError as error:
            self.outcome, self.reason = "refused", f"{error.code}: {error}"[:8192]
        except Exception as error:
            text = str(error) if isinstance(error, LedgerError) else f"{type(error).__name__}: {error}"
            self.outcome, self.reason = "failed", text[:8192]
        else:
            return True
        self.cache, self.samples = None, {}
        return False

    def fill(self, at: int, length: int, series: dict[str, np.ndarray]) -> None:
        """Put ``series`` into this document's samples (``length`` positions) from position ``at`` on."""
        for key, values in series.items():
            self.samples.setdefault(key, np.empty(length, values.dtype))[at : at + len(values)] = values

    def forward(self, ids: torch.Tensor, last: bool = False) -> torch.Tensor:
        """Write ``ids`` ``[n]`` to the cache; float32 logits ``[n, vocabulary]``, or of the last position alone."""
        started = time.perf_counter()
        if self.model.config._attn_implementation != self.arm.backend:
            self.model.set_attn_implementation(self.arm.backend)
        options = {caches.cache_argument(self.model): self.cache, "use_cache": True, "logits_to_keep": 1 if last else 0}
        logits: torch.Tensor = self.model(ids[None], **options).logits[0].float()
        if logits.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started
        return logits

    def go_on(self, folder: Folder) -> None:
        """Take up what earlier stretches of the run say of the arm: one that had failed or was refused stays so."""
        self.seconds = folder.before(self.name)
        if earlier := folder.ended().get(self.name):
            self.outcome, self.reason, self.backends = earlier.outcome, earlier.reason, list(earlier.backends)
            self.facts = {name: getattr(earlier, name) for name in ("effective", "measured", "geometry", "census", "backings")}

    def result(self, unfinished: str = "") -> records.ArmResult:
        """What is known of the arm so far; an arm that still runs counts as failed for the reason ``unfinished``."""
        return records.ArmResult(
            name=self.name,
            outcome=self.outcome or "failed",  # type: ignore[arg-type]
            reason=self.reason if self.outcome else unfinished,
            backends=tuple(self.backends),
            seconds=self.seconds,
            **self.facts,
        )


def admit(
    arm: records.Arm,
    workload: records.Workload | records.Memory | records.Task,
    models: dict[str, Any],
    tokens: int = 0,
    device: str = "cpu",
    calibration: bytes = b"",
    checkpoint: str = "",
) -> Running:
    """An arm ready to run sequences of up to ``tokens``, or already refused: by its backend, its batch, the guard, or its scales.

    ``calibration`` is the file that ``fixed`` scales come from, and ``checkpoint`` the digest of the one that runs.
    """
    state = Running(arm, arm.chunk or workload.chunk, models[arm.compute], tokens, device)

    def check() -> None:
        try:
            geometry.guard(state.model.config, arm, device)
            state.model.set_attn_implementation(arm.backend)
            if state.model.config._attn_implementation != arm.backend:
                raise RefusedError("backend", "The model ignored the attention backend.", expected=arm.backend)
            state.fixed = scales.of_arm(arm, geometry.declared(state.model.config), calibration, checkpoint)
        except (RefusedError, ValueError, ImportError) as error:
            code = error.code if isinstance(error, RefusedError) else "backend"
            if code == "backend":
                state.backends.append(records.Backend(name=arm.backend, accepted=False, reason=str(error)[:8192]))
            if isinstance(error, RefusedError):
                raise
            raise RefusedError("backend", "The model refuses the attention backend.", found=str(error)[:2000]) from error
        state.backends.append(records.Backend(name=arm.backend, accepted=True))

    state.attempt(check)
    return state


def measure_cache(state: Running) -> None:
    """What the arm's cache and weights are, read from their tensors after the last document."""
    config = state.model.config
    effective = caches.effective_policy(state.cache) | {"compute": geometry.word(state.model.dtype)}
    census = geometry.census(state.model)
    state.facts = {
        "effective": effective,
        "measured": caches.measured_policy(state.cache, effective["compute"]),
        "geometry": records.Geometry(declared=tuple(geometry.declared(config)), measured=tuple(geometry.measured(state.cache))),
        "census": dict(census),
        "backings": tuple(caches.backings(state.cache)),
    }
    if isinstance(state.cache, serving.FusedCache):
        state.backends += [records.Backend(name=name, accepted=True) for name in state.cache.describe()]


# ---------------------------------------------------------------- the run


def blocks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most ``size`` that cover ``length``."""
    for first in range(0, length, size):
        yield first, min(length, first + size)


def run(spec: records.Spec, inputs: Path, folder: Folder, progress: Progress) -> None:
    """Run the spec's arms on its documents; evidence and facts go to ``folder``, behind what stands there already.

    ``inputs`` is the frozen folder's ``inputs/``. Raises InputError and ProvenanceError where nothing can be
    run; what fails in one arm is recorded there.
    """
    workload = spec.text
    if workload.batch != 1:
        raise InputError("This test runs one sequence at a time.", expected="batch = 1", found=f"batch = {workload.batch}")
    if (inputs / workload.dataset.file).exists():
        read_dataset(workload.dataset, inputs)  # a wrong dataset is known before minutes are spent on weights
    calibration = scales.read(spec.arms, inputs)
    device = spec.device
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("The spec's device is not there.", expected="cuda", found="no CUDA device", next="run it on a host that has one.")
    models, tokenizer = {}, None
    for compute in dict.fromkeys(arm.compute for arm in spec.arms):
        models[compute], tokenizer = checkpoints.load(spec.checkpoint, compute, progress.say, inputs, device)
    documents, facts, warnings = prepare(spec, inputs, tokenizer, next(iter(models.values())).config)
    if workload.inputs == "store":
        folder.add(INPUTS, kept(documents), "application/octet-stream")

    warnings += checkpoints.cautions(spec.checkpoint, device, next(iter(models.values()))) + scales.cautions(calibration)
    folder.update(tokenizer=facts, warnings=tuple(warnings))

    greedy = workload.greedy
    per_arm, longest = sum(len(ids) for ids in documents), max(len(ids) for ids in documents)
    if greedy is not None:
        _check_greedy(greedy, documents)
        longest = max(longest, greedy.prompt_tokens + greedy.new_tokens)
        per_arm += greedy.documents * (greedy.prompt_tokens + greedy.new_tokens)
    states = [admit(arm, workload, models, longest, device, calibration, spec.weights) for arm in spec.arms]
    for state in states:
        state.go_on(folder)
    done = folder.done()
    if done:
        progress.say(f"going on behind {done} of {len(documents)} documents")
    progress.start((per_arm - sum(len(ids) for ids in documents[:done])) * sum(not state.outcome for state in states))

    plan = Plan(spec)
    with torch.inference_mode():
        for number, ids in enumerate(documents):
            if number < min(done, len(documents) - 1):
                continue
            plan.walk(states, torch.from_numpy(ids.astype(np.int64)).to(device), progress, f"document {number + 1} of {len(documents)}")
            if number < done:
                continue  # the last one again: it says what the caches are
            samples = {f"{state.name}.{key}": values for state in states for key, values in state.samples.items()}
            if not samples:
                folder.update(arms=tuple(state.result() for state in states))
                raise InputError("No arm could be run.", found="; ".join(f"{state.name}: {state.reason}" for state in states)[:4000])
            folder.add(f"samples/{number:04d}.safetensors", save(samples), "application/octet-stream")
            unfinished = f"unfinished: {number + 1} of {len(documents)} documents"
            folder.update(documents=fed(documents[: number + 1]), arms=tuple(state.result(unfinished) for state in states))
        for state in states:
            if not state.outcome:
                state.attempt(measure_cache, state)
        if greedy is not None:
            _continue_all(states, greedy, documents, progress, folder)
    for state in states:
        state.outcome = state.outcome or "completed"
    folder.update(documents=fed(documents), arms=tuple(state.result() for state in states))


def fed(documents: Sequence[np.ndarray]) -> tuple[records.Document, ...]:
    """Documents, as token ids, in the words of the record."""
    return tuple(records.Document(tokens=len(ids), sha256=digest.sha256(ids.tobytes())) for ids in documents)


def _continue_all(states: list[Running], greedy: records.Greedy, documents: list[np.ndarray], progress: Progress, folder: Folder) -> None:
    """The greedy continuations of every arm that still runs; an arm whose lines lie there whole is not asked again."""
    lines = folder.grown(GREEDY).splitlines(True)
    held = Counter(json.loads(line)["arm"] for line in lines if line.endswith(b"\n"))
    whole = {state.name for state in states if held[state.name] == greedy.documents or (held[state.name] and state.outcome)}
    if lines:
        folder.keep(GREEDY, b"".join(line for line in lines if line.endswith(b"\n") and json.loads(line)["arm"] in whole))
    else:
        folder.append(GREEDY, b"")
    for state in states:
        if state.outcome or state.name in whole:
            continue
        given: list[bytes] = []
        state.attempt(continue_greedily, state, greedy, documents, given, progress)
        folder.append(GREEDY, b"".join(given))
        folder.update()


class Plan:
    """Which arms are compared with which, and the walk through a document that compares them."""

    def __init__(self, spec: records.Spec) -> None:
        self.kl, self.gap = spec.references(), spec.gaps()
        self.references = {name for names in (*self.kl.values(), *self.gap.values()) for name in names}
        self.exact = {name for names in self.gap.values() for name in names} | {name for name, names in self.gap.items() if names}

    def walk(self, states: list[Running], ids: torch.Tensor, progress: Progress, doing: str) -> None:
        """One document (``ids``, int64 ``[tokens]``) through all arms that still run; their ``samples`` are filled."""
        for state in states:
            state.samples = {}
            if not state.outcome:
                state.attempt(begin, state)
        size = math.lcm(*(state.chunk for state in states if not state.outcome))
        for first, last in blocks(len(ids), size):
            kept: dict[str, Kept] = {}
            live = [state for state in states if not state.outcome]
            references = [state for state in live if state.name in self.references]
            for state in references:
                state.attempt(self._keep, state, ids, first, last, kept)
                progress.advance(last - first, doing)
            for state in references:
                if not state.outcome:
                    state.attempt(self._compare, state, first, len(ids) - 1, kept)
            for state in live:
                if state not in references:
                    state.attempt(self._follow, state, ids, first, last, kept)
                    progress.advance(last - first, doing)
        whole = {state.name for state in states if not state.outcome}
        for state in states:  # a comparison with an arm that failed on the way has holes
            state.samples = {key: values for key, values in state.samples.items() if "." not in key or key.partition(".")[2] in whole}

    def _keep(self, state: Running, ids: torch.Tensor, first: int, last: int, kept: dict[str, Kept]) -> None:
        """A reference: its losses, and its block kept whole. Its own comparisons wait until every reference is there."""
        targets = ids[first + 1 : last + 1]
        logits = None
        for one, other in blocks(last - first, state.chunk):
            chunk = state.forward(ids[first + one : first + other])
            if logits is None:
                logits = chunk.new_empty(len(targets), chunk.shape[1])
            logits[one:other] = chunk[: len(targets[one:other])]
        assert logits is not None
        logprobs = torch.empty_like(logits) if state.name in self.exact else logits
        state.fill(first, len(ids) - 1, statistics(logits, targets, {}, {}, keep=logprobs))
        kept[state.name] = Kept(logprobs, logits)

    def _compare(self, state: Running, first: int, length: int, kept: dict[str, Kept]) -> None:
        """A reference's comparisons with other references, from their kept blocks."""
        own = kept[state.name]
        rows = len(own.logprobs)
        series = {f"kl.{name}": np.empty(rows, np.float32) for name in self.kl[state.name] if name in kept}
        series |= {f"gap.{name}": np.empty(rows, np.float32) for name in self.gap[state.name] if name in kept}
        for part in slices(own.logprobs):
            for key, values in series.items():
                kind, _, name = key.partition(".")
                if kind == "kl":
                    values[part] = to_host(divergence(kept[name].logprobs[part], own.logprobs[part]))
                else:
                    values[part] = to_host((own.logits[part] - kept[name].logits[part]).abs().amax(dim=-1))
        state.fill(first, length, series)

    def _follow(self, state: Running, ids: torch.Tensor, first: int, last: int, kept: dict[str, Kept]) -> None:
        """An arm that none is compared with: chunk by chunk, nothing kept."""
        for one, other in blocks(last - first, state.chunk):
            chunk = state.forward(ids[first + one : first + other])
            targets = ids[first + one + 1 : first + other + 1]
            rows = slice(one, one + len(targets))
            kl = {name: kept[name].logprobs[rows] for name in self.kl[state.name] if name in kept}
            gap = {name: kept[name].logits[rows] for name in self.gap[state.name] if name in kept}
            state.fill(first + one, len(ids) - 1, statistics(chunk[: len(targets)], targets, kl, gap))


@dataclass
class Kept:
    """A reference's block, float32 ``[rows, vocabulary]``. ``logits`` are overwritten where no gap is asked for."""

    logprobs: torch.Tensor
    logits: torch.Tensor


def begin(state: Running) -> None:
    """An empty cache for the arm: a fused one is made once, for the longest sequence and the largest batch, and emptied."""
    if isinstance(state.cache, serving.FusedCache):
        state.cache.reset()
    elif state.arm.implementation == "fused":
        size = {"batch": state.sequences, "max_tokens": state.tokens, "chunk": state.chunk}
        state.cache = serving.FusedCache(state.model.config, state.arm, **size, device=state.device, fixed=state.fixed)
    else:
        state.cache = caches.build(state.model.config, state.arm, state.device, state.fixed)


def continue_greedily(state: Running, greedy: records.Greedy, documents: list[np.ndarray], lines: list[bytes], progress: Progress) -> None:
    """Append one canonical JSON line a document: the ids that the arm chooses after the prompt, through its own cache.

    The length is forced: an end token is a token like any other.
    """
    for number in range(greedy.documents):
        begin(state)
        prompt = torch.from_numpy(documents[number][: greedy.prompt_tokens].astype(np.int64)).to(state.device)
        for first, last in blocks(len(prompt), state.chunk):
            logits = state.forward(prompt[first:last], last=True)
        chosen = [int(logits[-1].argmax())]
        while len(chosen) < greedy.new_tokens:
            chosen.append(int(state.forward(torch.tensor(chosen[-1:], device=state.device), last=True)[-1].argmax()))
        lines.append(digest.canonical({"arm": state.name, "document": number, "prompt_tokens": len(prompt), "ids": chosen}) + b"\n")
        progress.advance(len(prompt) + greedy.new_tokens, f"greedy, {state.name}")


def _check_greedy(greedy: records.Greedy, documents: list[np.ndarray]) -> None:
    if greedy.documents > len(documents) or any(len(ids) < greedy.prompt_tokens for ids in documents[: greedy.documents]):
        raise InputError(
            "The greedy continuation asks for more than the workload has.",
            expected=f"at most {len(documents)} documents, and prompts no longer than they are",
            found=f"{greedy.documents} documents, {greedy.prompt_tokens} prompt tokens",
        )
