"""GSM8K as ``lm-eval`` 0.4.13 defines it (``lm_eval/tasks/gsm8k/gsm8k.yaml``): items, prompts, stops, and what is read as the answer.

Pure, and known to both sides of the border: the runner makes prompts with it, the ledger reads answers.

    item       one line of JSON, ``question`` and ``answer``; the answer ends in ``#### `` and a number
    prompt     shots, each ``Question: …\\nAnswer: …`` and an empty line, then ``Question: …\\nAnswer:``
    strict     the first ``#### `` with a number behind it (the task's filter ``strict-match``)
    flexible   the last thing that looks like a number (``flexible-extract``)
    right      equal to the item's answer once both lost commas, dollar signs, all up to ``#### `` and a last full stop

Which shots: the task draws them at random for each item; a spec takes the first of ``train``, as the task does with its
sampler ``first_n``. A prompt is otherwise the task's, character by character.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ledger import digest
from ledger.errors import InputError

VERSION = "0.4.13"
"""The version of ``lm-eval`` whose definition this is."""
DEFINITION_SHA256 = "82eb1780b263bc040729032b3e076990c7933f42163c91e359f38820dd1d8833"
"""SHA-256 of its ``gsm8k.yaml``."""
UNTIL = ("Question:", "</s>", "<|im_end|>")
"""Where an answer ends, besides the model's end token."""

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))
_ANSWER = re.compile(r"(?s)(?:(?!####).)*#### -?[0-9][0-9,]*(\.[0-9]+)?")


@dataclass(frozen=True)
class Item:
    """A question, and its worked answer."""

    question: str
    answer: str

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the question's UTF-8."""
        return digest.sha256(self.question.encode())


def items(name: str, data: bytes, count: int | None = None) -> tuple[Item, ...]:
    """The items of a file, in its order; ``count`` is how many it must hold. Raises InputError that names the line.

    Refused, and never repaired: carriage returns, a last line that does not end, an empty line, other keys, an answer that
    does not end in ``#### `` and a number, a question that stands twice, another number of items.
    """
    pinned = "get the file that the study pins; nothing takes its place."
    if b"\r" in data:
        place = data.count(b"\n", 0, data.index(b"\r")) + 1
        raise InputError(f"{name} has CRLF line endings, or a carriage return.", expected="LF", found=f"line {place}", next=pinned)
    if not data.endswith(b"\n"):
        raise InputError(f"{name} ends in the middle of a line.", expected="a line feed behind every item", next=pinned)
    found: dict[str, int] = {}
    listed = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        item = _item(f"Line {number} of {name}", line, pinned)
        if item.question in found:
            raise InputError(f"Line {number} of {name} asks a question twice.", found=f"first on line {found[item.question]}", next=pinned)
        found[item.question] = number
        listed.append(item)
    if count is not None and len(listed) != count:
        raise InputError(f"{name} has another number of items.", expected=str(count), found=str(len(listed)), next=pinned)
    return tuple(listed)


def _item(where: str, line: bytes, pinned: str) -> Item:
    try:
        value = digest.parse(line)
    except InputError as error:
        raise InputError(f"{where} cannot be read: {error.what}", expected=error.expected, found=error.found, next=pinned) from error
    if not isinstance(value, dict) or not {"question", "answer"} >= set(value) or not all(isinstance(text, str) for text in value.values()):
        raise InputError(f"{where} is no item.", expected="question and answer, both texts", found=repr(value)[:200], next=pinned)
    for key in ("question", "answer"):
        if not value.get(key, "").strip():
            raise InputError(f"{where} has no {key}.", expected=f"a text as {key}", found=repr(value)[:200], next=pinned)
    if not _ANSWER.fullmatch(value["answer"]):
        raise InputError(
            f"{where} has no final answer.", expected="one '#### ' and a number at the end", found=repr(value["answer"][-80:]), next=pinned
        )
    return Item(value["question"], value["answer"])


def prompt(item: Item, shots: tuple[Item, ...]) -> str:
    """What is asked, behind worked examples."""
    worked = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{worked}Question: {item.question}\nAnswer:"


def cut(text: str) -> str:
    """An answer up to the first stop string in it."""
    for stop in UNTIL:
        text = text.split(stop)[0]
    return text


def strict(text: str) -> str | None:
    """What the strict reading finds in an answer that was cut, as it is compared; None where it finds nothing."""
    found = _STRICT.search(text)
    return normalised(found[1].strip()) if found else None


def flexible(text: str) -> str | None:
    """What the flexible reading finds in an answer that was cut, as it is compared; None where it finds nothing."""
    found = _FLEXIBLE.findall(text)
    return normalised((found[-1][0] or found[-1][1]).strip()) if found else None


def normalised(text: str) -> str:
    """A text without what the task's ``exact_match`` ignores."""
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


READINGS = {"strict": strict, "flexible": flexible}
"""Both readings by name."""
