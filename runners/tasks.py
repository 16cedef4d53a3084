"""quality.task: greedy answers of every arm to the same prompts, each through its own cache, written in chunks, then read back.

Items are asked ``batch`` at a time, and a batch by all arms in turn; the last batch holds what is left. Prompts of a batch are
padded on the left, and padding is masked and has no position. A sequence that has ended is fed on, unread, until all of its
batch have. Raw answers alone are written, to ``answers.jsonl`` (:mod:`ledger.tasks` says how a line looks); nothing is scored
here. The lines of a batch are appended together, so that a run that was killed goes on behind the last whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ledger import digest, records
from ledger.errors import InputError, ProvenanceError, RefusedError
from ledger.records import gsm8k
from runners import caches, checkpoints, geometry, losses, scales

FILE = "answers.jsonl"
LINES = "application/x-ndjson"


class Folder(losses.Folder, Protocol):
    """The result folder, as this test sees it."""

    def append(self, name: str, data: bytes) -> None:
        """Append lines durably to an evidence file that grows while the run lasts."""

    def grown(self, name: str) -> bytes:
        """What an earlier stretch of this run left in a growing file."""

    def keep(self, name: str, data: bytes) -> None:
        """Cut a growing file back to ``data``, its beginning."""

    def reached(self, last: int) -> None:
        """So many items are answered."""

    def before(self, arm: str) -> float:
        """Seconds that an arm took in earlier stretches of this run."""


# ---------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Asked:
    """An item as it is asked: its number, its prompt's text, and the token ids, int32 ``[tokens]``."""

    number: int
    item: gsm8k.Item
    text: str
    ids: np.ndarray


def read(dataset: records.Dataset, inputs: Path) -> bytes:
    """A file of the task, from the frozen folder. Raises ProvenanceError where its bytes are not the pinned ones."""
    path = inputs / dataset.file
    again = "freeze the study again from the right file; nothing takes its place."
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProvenanceError(f"The dataset {path} cannot be read.", found=str(error), next=again) from error
    if digest.sha256(data) != dataset.sha256:
        raise ProvenanceError(
            f"The dataset {path} is not the one that the spec pins.", expected=dataset.sha256, found=digest.sha256(data), next=again
        )
    return data


class Words:
    """Text to token ids and back. Without a tokenizer (seeded weights) a token is a byte of the text modulo the vocabulary."""

    def __init__(self, task: records.Task, tokenizer: Any | None, config: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.vocabulary = config.get_text_config().vocab_size
        self.bos = tokenizer.bos_token_id if tokenizer is not None else config.get_text_config().bos_token_id
        if task.chat_template and not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "The spec asks through a chat template, and the tokenizer has none.", next="set chat_template = false in the study."
            )
        if task.bos and self.bos is None:
            raise InputError("The task begins prompts with BOS, but the tokenizer has none.", next="set bos = false in the study.")

    def ids(self, text: str) -> np.ndarray:
        """A prompt as token ids, int32, little-endian."""
        if self.tokenizer is None:
            found = [byte % self.vocabulary for byte in text.encode()]
        elif self.task.chat_template:
            turns = [{"role": "user", "content": text}]
            shown = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            found = self.tokenizer(shown, add_special_tokens=False)["input_ids"]
        else:
            found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return np.asarray([self.bos, *found] if self.task.bos else found, "<i4")

    def text(self, ids: Sequence[int]) -> str:
        """What token ids say, without special tokens."""
        if self.tokenizer is None:
            return bytes(number % 256 for number in ids).decode("utf-8", "replace")
        said: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return said

    def facts(self) -> dict[str, Any]:
        """Facts for the record."""
        found: dict[str, Any] = {"bos_token_id": self.bos, "bos": self.task.bos, "chat_template": self.task.chat_template}
        if self.tokenizer is None:
            return found | {"class": "bytes", "rule": "token id = byte value modulo vocabulary size", "vocabulary": self.vocabulary}
        found |= {"class": type(self.tokenizer).__name__, "vocabulary": len(self.tokenizer)}
        if getattr(self.tokenizer, "is_fast", False):
            found["sha256"] = digest.sha256(self.tokenizer.backend_tokenizer.to_str().encode())
        if self.task.chat_template:
            found["chat_template_sha256"] = digest.sha256(str(self.tokenizer.chat_template).encode())
        return found


def ask(task: records.Task, items: Sequence[gsm8k.Item], shots: tuple[gsm8k.Item, ...], words: Words, longest: int | None) -> list[Asked]:
    """Every item of the spec as it is asked, in order. Raises InputError for one that, with its answer, is beyond ``longest`` tokens."""
    listed = []
    for number in task.items:
        text = gsm8k.prompt(items[number], shots)
        asked = Asked(number, items[number], text, words.ids(text))
        if longest is not None and len(asked.ids) + task.new_tokens > longest:
            raise InputError(
                f"Item {number} does not fit into the model's context with its answer.",
                expected=f"at most {longest} tokens",
                found=f"{len(asked.ids)} of the prompt and {task.new_tokens} of the answer",
                next="ask with fewer shots, or for shorter answers; a prompt is never cut.",
            )
        listed.append(asked)
    return listed


def ends(model: Any, tokenizer: Any | None) -> set[int]:
    """The ids of the model's end tokens."""
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        found |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return found


# ---------------------------------------------------------------- answers


@dataclass
class Given:
    """An answer while it grows."""

    ids: list[int]
    text: str = ""
    ended: str = ""


class Batch:
    """Prompts of one batch, padded on the left: ids, mask and positions ``[B, width]``, int64."""

    def __init__(self, asked: Sequence[Asked], device: str) -> None:
        self.asked = asked
        self.width = max(len(each.ids) for each in asked)
        ids = np.zeros((len(asked), self.width), np.int64)
        mask = np.zeros_like(ids)
        for row, each in enumerate(asked):
            ids[row, self.width - len(each.ids) :] = each.ids
            mask[row, self.width - len(each.ids) :] = 1
        self.ids, self.mask = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def prefill(self, state: losses.Running) -> torch.Tensor:
        """Logits ``[B, vocabulary]`` behind the prompts, which are written to a new cache ``state.chunk`` tokens at a time."""
        state.cache = caches.build(state.model.config, state.arm, state.device, state.fixed)
        positions = (self.mask.cumsum(dim=1) - 1).clamp_min(0)
        for first, last in losses.blocks(self.width, state.chunk):
            logits = forward(state, self.ids[:, first:last], self.mask[:, :last], positions[:, first:last])
        return logits

    def answer(self, state: losses.Running, limit: int, words: Words, ending: set[int], into: dict[str, list[Given]]) -> None:
        """Greedy answers of at most ``limit`` tokens; the arm's go to ``into``."""
        given = [Given([]) for _ in self.asked]
        logits, mask, length = self.prefill(state), self.mask, self.mask.sum(dim=1)
        while True:
            chosen = logits.argmax(dim=-1)
            for answer, token in zip(given, chosen.tolist(), strict=True):
                if not answer.ended:
                    answer.ids.append(token)
                    answer.text = words.text(answer.ids)
                    stopped = gsm8k.cut(answer.text) != answer.text
                    answer.ended = "stop" if stopped else "end" if token in ending else "length" if len(answer.ids) == limit else ""
            if all(answer.ended for answer in given):
                into[state.name] = given
                return
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = forward(state, chosen[:, None], mask, length[:, None])
            length = length + 1


def forward(state: losses.Running, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Write ``ids`` ``[B, n]`` to the cache; the last position's logits ``[B, vocabulary]``. Raises InputError if they are not finite."""
    started = time.perf_counter()
    if state.model.config._attn_implementation != state.arm.backend:
        state.model.set_attn_implementation(state.arm.backend)
    options = {caches.cache_argument(state.model): state.cache, "attention_mask": mask, "position_ids": positions, "use_cache": True}
    logits: torch.Tensor = state.model(ids, **options, logits_to_keep=1).logits[:, -1].float()
    if not torch.isfinite(logits).all():
        raise InputError("The model gave logits that are not finite, so that nothing can be chosen.", found=f"after {mask.shape[1]} tokens")
    state.seconds += time.perf_counter() - started
    return logits


def line(arm: str, asked: Asked, given: Given) -> bytes:
    """One line of ``answers.jsonl``."""
    fields = {
        "arm": arm,
        "item": asked.number,
        "question": asked.item.sha256,
        "prompt": digest.sha256(asked.text.encode()),
        "prompt_ids": digest.sha256(asked.ids.tobytes()),
        "ids": digest.sha256(np.asarray(given.ids, "<i4").tobytes()),
        "tokens": len(given.ids),
        "text": given.text,
        "ended": given.ended,
    }
    return digest.canonical(fields) + b"\n"


# ---------------------------------------------------------------- the run


def whole(data: bytes, batches: Sequence[Sequence[Asked]], arms: Sequence[str]) -> tuple[int, bytes]:
    """Of what an earlier stretch left: how many batches are whole, and their lines. Raises InputError for lines that are not this run's."""
    lines = data.split(b"\n")[:-1]
    done, at = 0, 0
    for batch in batches:
        expected = [(arm, each) for arm in arms for each in batch]
        if at + len(expected) > len(lines):
            break
        for number, (arm, each) in enumerate(expected, at + 1):
            found = digest.parse(lines[number - 1])
            said = tuple(found.get(name) for name in ("arm", "item", "prompt_ids")) if isinstance(found, dict) else ()
            wanted = (arm, each.number, digest.sha256(each.ids.tobytes()))
            if said != wanted:
                raise InputError(
                    f"Line {number} of the answers is not one that this run would have written.",
                    expected=repr(wanted),
                    found=repr(said)[:300],
                    next="run the frozen folder into a new folder.",
                )
        at += len(expected)
        done += 1
    return done, b"".join(line + b"\n" for line in lines[:at])


def admit(
    arm: records.Arm, task: records.Task, models: dict[str, Any], device: str, calibration: bytes = b"", checkpoint: str = ""
) -> losses.Running:
    """An arm, ready or refused by its backend, the guard, its scales, or for layers that padding would reach."""
    state = losses.admit(arm, task, models, device=device, calibration=calibration, checkpoint=checkpoint)

    def check() -> None:
        kinds = {layer.kind for layer in geometry.declared(state.model.config)}
        if task.batch > 1 and "recurrent" in kinds:
            raise RefusedError(
                "recurrent_layers",
                "Padding would reach the state of recurrent layers.",
                expected="batch = 1",
                found=f"batch = {task.batch}",
            )

    if not state.outcome:
        state.attempt(check)
    return state


def run(spec: records.Spec, inputs: Path, folder: Folder, progress: losses.Progress) -> None:
    """Ask every arm of the spec the items of its task; evidence and facts go to ``folder``, behind what stands there already.

    ``inputs`` is the frozen folder's ``inputs/``. Raises InputError and ProvenanceError where nothing can be run; what fails in
    one arm is recorded there.
    """
    task = spec.task
    if task is None:
        raise InputError("The spec has no task.", expected="[task]", next="choose a study of that scope.")
    test, train = read(task.test, inputs), read(task.train, inputs)
    items = gsm8k.items(task.test.file, test, task.test_items)
    shots = gsm8k.items(task.train.file, train, task.train_items)[: task.shots]
    progress.say(task.power)
    models, tokenizer = {}, None
    for compute in dict.fromkeys(arm.compute for arm in spec.arms):
        models[compute], tokenizer = checkpoints.load(spec.checkpoint, compute, progress.say, inputs, spec.device)
    model = next(iter(models.values()))
    words = Words(task, tokenizer, model.config)
    asked = ask(task, items, shots, words, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    batches = [asked[first:last] for first, last in losses.blocks(len(asked), task.batch)]
    folder.add("task/test.jsonl", test, LINES)
    if shots:
        folder.add("task/shots.jsonl", b"".join(part + b"\n" for part in train.split(b"\n")[: task.shots]), LINES)
    folder.update(tokenizer=words.facts(), warnings=tuple(checkpoints.cautions(spec.checkpoint, spec.device, model)))

    calibration = scales.read(spec.arms, inputs)
    states = [admit(arm, task, models, spec.device, calibration, spec.checkpoint.identity) for arm in spec.arms]
    live = [state for state in states if not state.outcome]
    if not live:
        folder.update(arms=tuple(state.result() for state in states))
        raise InputError("No arm could be run.", found="; ".join(f"{state.name}: {state.reason}" for state in states)[:4000])
    for state in live:
        state.seconds = folder.before(state.name)
    done, kept = whole(folder.grown(FILE), batches, [state.name for state in live])
    folder.keep(FILE, kept)
    if done:
        progress.say(f"going on behind {sum(map(len, batches[:done]))} of {len(asked)} items")
    progress.start(sum(len(each.ids) + task.new_tokens for batch in batches[done:] for each in batch) * len(live))
    ending = ends(model, tokenizer)
    with torch.inference_mode():
        for number, some in enumerate(batches[done:], done + 1):
            batch, given = Batch(some, spec.device), dict[str, list[Given]]()
            for state in live:
                if not state.outcome:
                    state.attempt(batch.answer, state, task.new_tokens, words, ending, given)
                progress.advance(sum(len(each.ids) + task.new_tokens for each in some), f"batch {number} of {len(batches)}, {state.name}")
            lines = [line(state.name, *pair) for state in live if state.name in given for pair in zip(some, given[state.name], strict=True)]
            folder.append(FILE, b"".join(lines))
            answered = sum(map(len, batches[:number]))
            folder.reached(answered)
            folder.update(arms=tuple(state.result(f"unfinished: {answered} of {len(asked)} items") for state in states))
        for state in live:
            if not state.outcome and state.cache is None:  # killed behind the last batch: the prompts alone say what the cache is
                state.attempt(Batch(batches[-1], spec.device).prefill, state)
            if not state.outcome:
                state.attempt(losses.measure_cache, state)
    for state in states:
        state.outcome = state.outcome or "completed"
    folder.update(arms=tuple(state.result() for state in states))
