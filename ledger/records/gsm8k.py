"""GSM8K as ``lm-eval`` 0.4.13 defines it, in two ways: items, prompts, stops, and what is read as the answer.

Pure, and known to both sides of the border: the runner makes prompts with it, the ledger reads answers.

    item       one line of JSON, ``question`` and ``answer``; the answer ends in ``#### `` and a number
    right      equal to the item's answer once both lost commas, dollar signs, all up to ``#### `` and a last full stop
    flexible   the last thing that looks like a number (filter ``flexible-extract``)

    ``gsm8k`` (``lm_eval/tasks/gsm8k/gsm8k.yaml``)
    prompt     shots, each ``Question: …\\nAnswer: …`` and an empty line, then ``Question: …\\nAnswer:``
    strict     the first ``#### `` with a number behind it (filter ``strict-match``)
    shots      the task draws them at random for each item; a spec takes the first of ``train``, as the task does with its
               sampler ``first_n``. A prompt is otherwise the task's, character by character.

    ``gsm8k_cot`` (``gsm8k-cot.yaml`` beside it)
    prompt     the same with ``Q: …\\nA: …``
    strict     the first ``The answer is `` with a number and one more character behind it, which is usually a full stop
    shots      eight, written out in the definition; their sampler is ``first_n``

With a chat template a prompt is one turn of the user (``--fewshot_as_multiturn false``), or each shot is a turn of the user and one
of the assistant, without what parts them in the text (``lm-eval``'s own choice with ``--apply_chat_template``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ledger import digest
from ledger.errors import InputError

VERSION = "0.4.13"
"""The version of ``lm-eval`` whose definitions these are."""

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


def normalised(text: str) -> str:
    """A text without what the task's ``exact_match`` ignores."""
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


# ---------------------------------------------------------------- definitions


@dataclass(frozen=True)
class Definition:
    """How a task is asked and read. ``sha256`` is that of its file, ``until`` where an answer ends besides the model's end token."""

    name: str
    sha256: str
    question: str
    answer: str
    until: tuple[str, ...]
    strictly: re.Pattern[str]
    shots: tuple[Item, ...] | None = None
    """Worked examples of its own; without any they come from a file."""

    def turns(self, item: Item, shots: tuple[Item, ...]) -> tuple[tuple[str, str], ...]:
        """What the user and the assistant say, in turn; the last is the question that is asked."""
        said: list[tuple[str, str]] = []
        for shot in shots:
            said += [("user", self._asked(shot)), ("assistant", shot.answer)]
        return (*said, ("user", self._asked(item)))

    def _asked(self, item: Item) -> str:
        return f"{self.question}{item.question}\n{self.answer}"

    def prompt(self, item: Item, shots: tuple[Item, ...]) -> str:
        """The same as one text."""
        worked = "".join(f"{self._asked(shot)} {shot.answer}\n\n" for shot in shots)
        return worked + self._asked(item)

    def cut(self, text: str) -> str:
        """An answer up to the first stop string in it."""
        for stop in self.until:
            text = text.split(stop)[0]
        return text

    def strict(self, text: str) -> str | None:
        """What the strict reading finds in an answer that was cut, as it is compared; None where it finds nothing."""
        found = self.strictly.search(text)
        return normalised(found[1].strip()) if found else None

    def flexible(self, text: str) -> str | None:
        """What the flexible reading finds in an answer that was cut, as it is compared; None where it finds nothing."""
        found = _FLEXIBLE.findall(text)
        return normalised((found[-1][0] or found[-1][1]).strip()) if found else None


READINGS: dict[str, Callable[[Definition, str], str | None]] = {"strict": Definition.strict, "flexible": Definition.flexible}
"""Both readings by name."""

GSM8K = Definition(
    name="gsm8k",
    sha256="82eb1780b263bc040729032b3e076990c7933f42163c91e359f38820dd1d8833",
    question="Question: ",
    answer="Answer:",
    until=("Question:", "</s>", "<|im_end|>"),
    strictly=re.compile(r"#### (\-?[0-9\.\,]+)"),
)

# Wei et al., Chain-of-thought prompting (2022), table 20, as the definition has them.
_WORKED = (
    Item(
        "There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, there will "
        "be 21 trees. How many trees did the grove workers plant today?",
        "There are 15 trees originally. Then there were 21 trees after some more were planted. So there must have been 21 - 15 "
        "= 6. The answer is 6.",
    ),
    Item(
        "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?",
        "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5.",
    ),
    Item(
        "Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left in total?",
        "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. After eating 35, they had "
        "74 - 35 = 39. The answer is 39.",
    ),
    Item(
        "Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many lollipops did Jason give to Denny?",
        "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave Denny 20 - 12 = 8. The answer is 8.",
    ),
    Item(
        "Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he have now?",
        "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = 9. The answer is 9.",
    ),
    Item(
        "There were nine computers in the server room. Five more computers were installed each day, from monday to thursday. "
        "How many computers are now in the server room?",
        "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 * 4 = 20 computers were "
        "added. 9 + 20 is 29. The answer is 29.",
    ),
    Item(
        "Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How many golf balls did "
        "he have at the end of wednesday?",
        "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. After losing 2 more, he had 35 - "
        "2 = 33 golf balls. The answer is 33.",
    ),
    Item(
        "Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
        "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has 23 - 15 dollars left. 23 - "
        "15 is 8. The answer is 8.",
    ),
)
GSM8K_COT = Definition(
    name="gsm8k_cot",
    sha256="7c9dd2561fe334a55f62bdc6a876f045e6dc7f53714c7a9db506b89c6de6bc96",
    question="Q: ",
    answer="A:",
    until=("Q:", "</s>", "<|im_end|>"),
    strictly=re.compile(r"The answer is (\-?[0-9\.\,]+)."),
    shots=_WORKED,
)
DEFINITIONS = {definition.name: definition for definition in (GSM8K, GSM8K_COT)}
"""By name."""
