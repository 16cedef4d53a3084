"""quality.task: greedy answers of every arm to the same prompts, each through its own cache, written in chunks, then read back.

Items are asked ``batch`` at a time, and a batch by all arms in turn; the last batch holds what is left. Where layers keep a state that
padding would reach, a batch holds prompts of one length alone, and so fewer where fewer have it. Else prompts of a batch are
padded on the left, and padding is masked and has no position. A fused cache holds no padding: there each sequence is written in
chunks that count from its own first token, and decoded at its own length, so that attention does for it what it does for it alone.
A sequence that has ended is fed on, unread, until all of its batch have; that is looked for every few tokens, as a look waits for
the device. Raw answers alone are written, to ``answers.jsonl`` (:mod:`ledger.tasks` says how a line looks); nothing is scored
here. The lines of a batch are appended together and listed with what arms did in it, so that a run that was killed goes on behind
the last batch that was listed; an arm that had failed or was refused by then is not asked again.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ledger import digest, records
from ledger.errors import InputError, ProvenanceError
from ledger.records import gsm8k
from runners import caches, checkpoints, geometry, losses, scales

FILE = "answers.jsonl"
LINES = "application/x-ndjson"


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
        self.task, self.tokenizer, self.definition = task, tokenizer, gsm8k.DEFINITIONS[task.definition]
        self.vocabulary = config.get_text_config().vocab_size
        self.bos = tokenizer.bos_token_id if tokenizer is not None else config.get_text_config().bos_token_id
        if task.chat_template and not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "The spec asks through a chat template, and the tokenizer has none.", next="set chat_template = false in the study."
            )
        if task.bos and self.bos is None:
            raise InputError("The task begins prompts with BOS, but the tokenizer has none.", next="set bos = false in the study.")

    def ids(self, text: str, turns: Sequence[tuple[str, str]] = ()) -> np.ndarray:
        """A prompt as token ids, int32, little-endian; in a chat of several turns it is these, each of a role, and else one of the user."""
        if self.tokenizer is None:
            found = [byte % self.vocabulary for byte in text.encode()]
        elif self.task.chat_template:
            said = turns if self.task.chat_template == "multiturn" else (("user", text),)
            chat = [{"role": role, "content": content} for role, content in said]
            shown = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
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
        text = words.definition.prompt(items[number], shots)
        asked = Asked(number, items[number], text, words.ids(text, words.definition.turns(items[number], shots)))
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

    def take(self, more: Sequence[int], limit: int, words: Words, ending: set[int]) -> None:
        """Grow by ``more`` token ids, up to that with which the answer ends: a stop string, an end token, or the ``limit``-th."""
        for token in more:
            if self.ended:
                return
            self.ids.append(token)
            self.text = words.text(self.ids)
            stopped = words.definition.cut(self.text) != self.text
            self.ended = "stop" if stopped else "end" if token in ending else "length" if len(self.ids) == limit else ""


LOOK = 8
"""Tokens that are chosen on the device before anyone looks whether answers have ended."""


@dataclass(frozen=True)
class Part:
    """What one forward pass of a prefill takes, int64: ids and positions ``[B, n]``, the mask of all positions so far ``[B, seen + n]``.

    ``ends`` [B] says whose prompt ends here: the last column is then its last token.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor


class Batch:
    """The prompts of one batch: ``lengths`` [B], int64, and the longest of them, ``width``."""

    def __init__(self, asked: Sequence[Asked], device: str) -> None:
        self.asked, self.device = asked, device
        self.lengths = np.array([len(each.ids) for each in asked], np.int64)
        self.width = int(self.lengths.max())

    def padded(self, chunk: int) -> Iterator[Part]:
        """Prompts padded on the left as wholes, and then cut into chunks."""
        ids, mask = self._rows(np.zeros_like(self.lengths), self.lengths, self.width)
        positions = (mask.cumsum(1) - 1).clip(0)
        for first, last in losses.blocks(self.width, chunk):
            ends = np.full(len(self.asked), last == self.width)
            yield self._part(ids[:, first:last], mask[:, :last], positions[:, first:last], ends)

    def ragged(self, chunk: int, least: int) -> Iterator[Part]:
        """Every prompt cut into chunks from its first token on, and padded on the left within each; ``least`` columns or more.

        With 2 a last chunk of one token is a chunk in every batch, and never a step of decode in some.
        """
        seen = np.zeros((len(self.asked), 0), np.int64)
        for first in range(0, self.width, chunk):
            counts = (self.lengths - first).clip(0, chunk)
            ids, mask = self._rows(np.full_like(counts, first), counts, max(least, int(counts.max())))
            seen = np.concatenate([seen, mask], axis=1)
            positions = first + (mask.cumsum(1) - 1).clip(0)
            yield self._part(ids, seen, positions, (counts > 0) & (self.lengths <= first + chunk))

    def _rows(self, first: np.ndarray, counts: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """So many ids of each prompt from the ``first`` on, behind zeros, and their mask: int64 ``[B, width]``."""
        ids = np.zeros((len(self.asked), width), np.int64)
        mask = np.zeros_like(ids)
        for row, (each, start, count) in enumerate(zip(self.asked, first, counts, strict=True)):
            ids[row, width - count :] = each.ids[start : start + count]
            mask[row, width - count :] = 1
        return ids, mask

    def _part(self, *arrays: np.ndarray) -> Part:
        return Part(*(torch.from_numpy(array).to(self.device) for array in arrays))

    def prefill(self, state: losses.Running) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits ``[B, vocabulary]`` behind the prompts, which are written to an empty cache ``state.chunk`` tokens at a time.

        And the mask of all positions; None for a fused cache, which holds no padding.
        """
        fused = state.arm.implementation == "fused"
        states = fused and recurrent(state.model.config)
        if states:
            state.cache = None  # its states are of as many sequences as the last batch had
        losses.begin(state)
        parts = self.ragged(state.chunk, 1 if states else 2) if fused else self.padded(state.chunk)
        logits, mask = None, None
        for part in parts:
            found, mask = forward(state, part.ids, part.mask, part.positions), part.mask
            logits = found if logits is None else torch.where(part.ends[:, None], found, logits)
        assert logits is not None
        return logits, None if fused else mask

    def answer(self, state: losses.Running, limit: int, words: Words, ending: set[int], into: dict[str, list[Given]]) -> None:
        """Greedy answers of at most ``limit`` tokens; the arm's go to ``into``. Raises InputError where logits are not finite."""
        given = [Given([]) for _ in self.asked]
        started = time.perf_counter()
        logits, mask = self.prefill(state)
        lengths = torch.from_numpy(self.lengths).to(self.device)[:, None]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), limit)], dim=1)
        chosen: list[torch.Tensor] = []
        finite: list[torch.Tensor] = []
        for count in range(1, limit + 1):
            last = logits.argmax(dim=-1)
            chosen.append(last)
            finite.append(torch.isfinite(logits).all())
            if count == limit or len(chosen) == LOOK:
                tokens, sound = torch.stack(chosen, dim=1).tolist(), torch.stack(finite).tolist()
                state.seconds += time.perf_counter() - started
                if not all(sound):
                    raise InputError(
                        "The model gave logits that are not finite, so that nothing can be chosen.",
                        found=f"after {self.width + count - len(sound) + sound.index(False)} tokens",
                    )
                for answer, more in zip(given, tokens, strict=True):
                    answer.take(more, limit, words, ending)
                if all(answer.ended for answer in given):
                    into[state.name] = given
                    return
                chosen, finite, started = [], [], time.perf_counter()
            logits = forward(state, last[:, None], None if mask is None else mask[:, : self.width + count], lengths + (count - 1))


def forward(state: losses.Running, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """Write ``ids`` ``[B, n]`` to the cache; the last position's logits, float32 ``[B, vocabulary]``. Does not wait for the device."""
    if state.model.config._attn_implementation != state.arm.backend:
        state.model.set_attn_implementation(state.arm.backend)
    options = {caches.cache_argument(state.model): state.cache, "attention_mask": mask, "position_ids": positions, "use_cache": True}
    logits: torch.Tensor = state.model(ids, **options, logits_to_keep=1).logits[:, -1].float()
    return logits


def recurrent(config: Any) -> bool:
    """Whether layers of the model keep a state, which padding would reach."""
    return any(layer.kind == "recurrent" for layer in geometry.declared(config))


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


def whole(data: bytes, batches: Sequence[Sequence[Asked]], arms: Sequence[str], ended: Container[str], items: int) -> tuple[int, bytes]:
    """How many batches make up the ``items`` that an earlier stretch did, and their lines, the first of what it left.

    In a batch each of ``arms`` in turn answered every item; one of those that ``ended`` did not in that in which it failed, and in none
    behind. Lines behind those of the items belong to a batch that was not listed. Raises InputError for lines that are not this run's.
    """
    lines = data.split(b"\n")[:-1]
    done, at = 0, 0
    absent: set[str] = set()
    while sum(map(len, batches[:done])) < items and done < len(batches):
        batch = batches[done]
        for arm in arms:
            if arm in ended and (at == len(lines) or _said(lines[at])[:2] != (arm, batch[0].number)):
                absent.add(arm)
            for each in () if arm in absent else batch:
                said = _said(lines[at]) if at < len(lines) else ()
                wanted = (arm, each.number, digest.sha256(each.ids.tobytes()))
                if said != wanted:
                    raise InputError(
                        f"Line {at + 1} of the answers is not one that this run would have written.",
                        expected=repr(wanted),
                        found=repr(said)[:300],
                        next="run the frozen folder into a new folder.",
                    )
                at += 1
        done += 1
    return done, b"".join(line + b"\n" for line in lines[:at])


def _said(line: bytes) -> tuple[Any, ...]:
    """Arm, item and digest of the prompt's token ids of a line of answers."""
    found = digest.parse(line)
    return tuple(found.get(name) for name in ("arm", "item", "prompt_ids")) if isinstance(found, dict) else ()


def batches_of(asked: Sequence[Asked], size: int, alike: bool) -> list[Sequence[Asked]]:
    """At most ``size`` at a time, in order; if ``alike``, of one number of tokens each, by the length that comes first."""
    groups: dict[int, list[Asked]] = {}
    for each in asked:
        groups.setdefault(len(each.ids) if alike else 0, []).append(each)
    return [group[first:last] for group in groups.values() for first, last in losses.blocks(len(group), size)]


def admit(
    arm: records.Arm,
    task: records.Task,
    models: dict[str, Any],
    device: str,
    calibration: bytes = b"",
    checkpoint: str = "",
    tokens: int = 0,
) -> losses.Running:
    """An arm, ready or refused by its backend, the guard, its scales or its budget.

    ``tokens`` is the longest sequence to come. A fused cache is made here, so that one that does not fit is refused before it is asked.
    """
    state = losses.admit(arm, task, models, tokens, device, calibration, checkpoint)
    state.sequences = min(task.batch, len(task.items))
    if arm.implementation == "fused" and not state.outcome:
        state.attempt(losses.begin, state)
    return state


def run(spec: records.Spec, inputs: Path, folder: losses.Folder, progress: losses.Progress) -> None:
    """Ask every arm of the spec the items of its task; evidence and facts go to ``folder``, behind what stands there already.

    ``inputs`` is the frozen folder's ``inputs/``. Raises InputError and ProvenanceError where nothing can be run; what fails in
    one arm is recorded there.
    """
    task = spec.task
    if task is None:
        raise InputError("The spec has no task.", expected="[task]", next="choose a study of that scope.")
    test = read(task.test, inputs)
    items = gsm8k.items(task.test.file, test, task.test_items)
    train = None if task.train is None else read(task.train, inputs)
    worked = gsm8k.DEFINITIONS[task.definition].shots or ()
    if task.train is not None and train is not None:
        worked = gsm8k.items(task.train.file, train, task.train_items)
    shots = worked[: task.shots]
    progress.say(task.power)
    models, tokenizer = {}, None
    for compute in dict.fromkeys(arm.compute for arm in spec.arms):
        models[compute], tokenizer = checkpoints.load(spec.checkpoint, compute, progress.say, inputs, spec.device)
    model = next(iter(models.values()))
    words = Words(task, tokenizer, model.config)
    asked = ask(task, items, shots, words, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    folder.add("task/test.jsonl", test, LINES)
    if shots and train is not None:
        folder.add("task/shots.jsonl", b"".join(part + b"\n" for part in train.split(b"\n")[: task.shots]), LINES)
    calibration = scales.read(spec.arms, inputs)
    warnings = checkpoints.cautions(spec.checkpoint, spec.device, model) + scales.cautions(calibration)
    folder.update(tokenizer=words.facts(), warnings=tuple(warnings))

    tokens = max(len(each.ids) for each in asked) + task.new_tokens
    ended = folder.ended()
    states = {
        arm.name: admit(arm, task, models, spec.device, calibration, spec.weights, tokens) for arm in spec.arms if arm.name not in ended
    }

    def results(unfinished: str = "") -> tuple[records.ArmResult, ...]:
        """What is known of every arm; of one that ended in an earlier stretch, what was said then."""
        return tuple(ended[arm.name] if arm.name in ended else states[arm.name].result(unfinished) for arm in spec.arms)

    for state in states.values():
        state.seconds = folder.before(state.name)
    live = [state for state in states.values() if not state.outcome]
    if not live:
        folder.update(arms=results())
        raise InputError("No arm could be run.", found="; ".join(f"{arm.name}: {arm.reason}" for arm in results())[:4000])
    batches = batches_of(asked, task.batch, recurrent(model.config))
    done, kept = whole(folder.grown(FILE), batches, [arm.name for arm in spec.arms], ended, folder.done())
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
            folder.update(last=answered, arms=results(f"unfinished: {answered} of {len(asked)} items"))
        for state in live:
            if not state.outcome and done == len(batches):  # killed behind the last batch: the prompts alone say what the cache is
                state.attempt(Batch(batches[-1], spec.device).prefill, state)
            if not state.outcome:
                state.attempt(losses.measure_cache, state)
    for state in states.values():
        state.outcome = state.outcome or "completed"
    folder.update(arms=results(), documents=losses.fed([each.ids for each in asked]))
