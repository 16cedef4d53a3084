"""A task of invented items, its specs, and answers made by rule; nothing here is a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ledger import digest, records, tasks
from ledger.records import consistency, gsm8k
from tests import factories

LINES = 400
"""Items of the file of questions."""


def item(number: int) -> dict[str, str]:
    return {
        "question": f"Shelf {number} has {number} rows of 3 jars and one jar more. How many jars?",
        "answer": f"{number} * 3 + 1 = <<{number}*3+1={3 * number + 1}>>{3 * number + 1}\n#### {3 * number + 1:,}",
    }


def lines(numbers: range) -> bytes:
    return b"".join(json.dumps(item(number)).encode() + b"\n" for number in numbers)


TEST, TRAIN = lines(range(LINES)), lines(range(1000, 1004))
ITEMS = gsm8k.items("test.jsonl", TEST)
SHOTS = gsm8k.items("train.jsonl", TRAIN)


def dataset(name: str, data: bytes) -> records.Dataset:
    return records.Dataset(name=f"invented {name}", file=f"{name}.jsonl", sha256=digest.sha256(data), size=len(data), license="CC0-1.0")


COT = {"definition": "gsm8k_cot", "definition_sha256": gsm8k.GSM8K_COT.sha256, "train": None, "train_items": None}
"""Fields of a task that has worked examples of its own."""


def task(items: int = LINES, **changes: Any) -> records.Task:
    fields: dict[str, Any] = {
        "definition": "gsm8k",
        "version": gsm8k.VERSION,
        "definition_sha256": gsm8k.GSM8K.sha256,
        "test": dataset("test", TEST),
        "test_items": LINES,
        "train": dataset("train", TRAIN),
        "train_items": 4,
        "items": tuple(range(items)),
        "shots": 1,
        "chat_template": False,
        "bos": False,
        "new_tokens": 12,
        "batch": 3,
        "chunk": 64,
        "margin": 0.05,
    }
    return records.Task(**{**fields, **changes})


CONTRASTS = tuple(records.Contrast(candidate="k16v8", baseline="k16v16", family=reading) for reading in records.ANSWERS)


def spec(items: int = LINES, **changes: Any) -> records.Spec:
    """Two controls, a repeat, and two candidates; fields of the task are changed like those of the spec."""
    own = {name: changes.pop(name) for name in list(changes) if name in records.Task.__struct_fields__}
    fields: dict[str, Any] = {
        "format": "kv-ledger/spec/3",
        "study": "jars",
        "title": "Jars on shelves",
        "scope": "quality.task",
        "checkpoint": factories.checkpoint(),
        "workload": None,
        "arms": tuple(arm for arm in factories.ARMS if arm.name in ("native", "k16v16", "k16v16-repeat", "k16v8")),
        "contrasts": CONTRASTS,
        "families": (),
        "task": task(items, **own),
    }
    found = records.Spec(**{**fields, **changes})
    consistency.check(found)
    return found


Say = Callable[[str, int], str]
"""Arm and item number to the text of an answer."""


def right(arm: str, number: int) -> str:
    """The right answer, in words that are the arm's own."""
    return f" {arm}: it is {3 * number + 1}\n#### {3 * number + 1:,}"


def wrong(arm: str, number: int) -> str:
    return f" {arm}: it is 0\n#### 0"


def line(frozen: records.Spec, arm: str, number: int, text: str, **changes: Any) -> bytes:
    assert frozen.task is not None
    definition = gsm8k.DEFINITIONS[frozen.task.definition]
    prompt = definition.prompt(ITEMS[number], (definition.shots or SHOTS)[: frozen.task.shots])
    fields = {
        "arm": arm,
        "item": number,
        "question": ITEMS[number].sha256,
        "prompt": digest.sha256(prompt.encode()),
        "prompt_ids": prompt_ids(prompt),
        "ids": digest.sha256(f"ids of {text}".encode()),
        "tokens": 5,
        "text": text,
        "ended": "stop" if definition.cut(text) != text else "end",
    }
    return digest.canonical(fields | changes) + b"\n"


def prompt_ids(prompt: str, read: str = "ids") -> str:
    """An invented digest of what a tokenizer makes of a prompt."""
    return digest.sha256(f"{read} of {prompt}".encode())


def documents(frozen: records.Spec, read: str = "ids") -> tuple[records.Document, ...]:
    """The prompts as a run lists them; ``read`` is another where a tokenizer reads them otherwise."""
    assert frozen.task is not None
    definition = gsm8k.DEFINITIONS[frozen.task.definition]
    shots = (definition.shots or SHOTS)[: frozen.task.shots]
    prompts = [definition.prompt(ITEMS[number], shots) for number in frozen.task.items]
    return tuple(records.Document(tokens=len(prompt), sha256=prompt_ids(prompt, read)) for prompt in prompts)


def evidence(frozen: records.Spec, say: Say = right) -> dict[str, bytes]:
    """The files of a completed run."""
    assert frozen.task is not None
    answers = [line(frozen, arm.name, number, say(arm.name, number)) for number in frozen.task.items for arm in frozen.arms]
    shots = {tasks.SHOTS: b"".join(TRAIN.splitlines(True)[: frozen.task.shots])} if frozen.task.train else {}
    return {tasks.TEST: TEST, **shots, tasks.FILE: b"".join(answers)}
