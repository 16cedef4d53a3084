"""Items, prompts and readings are those of lm-eval's tasks; a file that is not what it should be is refused by name.

``tests/vectors/gsm8k`` holds items and answers invented for this project, and what lm-eval 0.4.13's own tasks ``gsm8k`` and
``gsm8k_cot`` made of them (``make.py`` there, run once where lm-eval is installed): prompts, as text and as a chat in either form, of
``gsm8k`` with two shots by the sampler ``first_n``, of the other with its own eight; what the filters ``strict-match`` and
``flexible-extract`` extract, and ``exact_match``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import InputError
from ledger.records import gsm8k
from tests import taskfiles

VECTORS = Path(__file__).parents[1] / "vectors" / "gsm8k"
EXPECTED: dict[str, Any] = json.loads((VECTORS / "expected.json").read_text(encoding="utf-8"))
TEST = gsm8k.items("test.jsonl", (VECTORS / "test.jsonl").read_bytes(), 3)
TRAIN = gsm8k.items("train.jsonl", (VECTORS / "train.jsonl").read_bytes(), 3)


DEFINITIONS = gsm8k.DEFINITIONS.values()


def shots(definition: gsm8k.Definition) -> tuple[gsm8k.Item, ...]:
    return (definition.shots or TRAIN)[: EXPECTED[definition.name]["shots"]]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_the_vectors_come_from_the_pinned_definition(definition: gsm8k.Definition) -> None:
    assert (EXPECTED["lm_eval"], EXPECTED[definition.name]["definition_sha256"]) == (gsm8k.VERSION, definition.sha256)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_prompts_are_those_of_lm_eval_as_text_and_in_both_forms_of_a_chat(definition: gsm8k.Definition) -> None:
    expected = EXPECTED[definition.name]
    assert len(shots(definition)) == expected["shots"]
    prompts = [definition.prompt(item, shots(definition)) for item in TEST]
    assert prompts == expected["prompts"]
    assert [[{"role": "user", "content": prompt}] for prompt in prompts] == expected["chats"]
    turns = [[{"role": role, "content": text} for role, text in definition.turns(item, shots(definition))] for item in TEST]
    assert turns == expected["multiturn"]


ANSWERED = [(definition, expected) for definition in DEFINITIONS for expected in EXPECTED[definition.name]["answers"]]


@pytest.mark.parametrize(("definition", "expected"), ANSWERED, ids=[f"{one.name}-{found['text']!r}"[:60] for one, found in ANSWERED])
@pytest.mark.parametrize("reading", ["strict", "flexible"])
def test_both_readings_and_both_scores_are_those_of_lm_eval(reading: str, definition: gsm8k.Definition, expected: dict[str, Any]) -> None:
    found = gsm8k.READINGS[reading](definition, definition.cut(expected["text"]))
    theirs = expected[reading]
    assert found == (None if theirs == "[invalid]" else gsm8k.normalised(theirs))
    assert (found == gsm8k.normalised(TEST[expected["item"]].answer)) == expected[f"{reading}_right"]


GOOD = b'{"question": "One jar?", "answer": "1\\n#### 1"}\n'
REFUSED = [
    (GOOD.replace(b"\n", b"\r\n"), "has CRLF line endings"),
    (GOOD + b'{"question": "Two?\\n", "answer": "2\\n#### 2"}\r\n', "line 2"),
    (GOOD[:-1], "ends in the middle of a line"),
    (b"", "ends in the middle of a line"),
    (GOOD + b"\n", "Line 2 of jars.jsonl cannot be read"),
    (GOOD + b"nothing\n", "Line 2 of jars.jsonl cannot be read"),
    (GOOD + GOOD, "Line 2 of jars.jsonl asks a question twice"),
    (b'{"question": "One jar?"}\n', "Line 1 of jars.jsonl has no answer"),
    (b'{"question": "One jar?", "answer": ""}\n', "has no answer"),
    (b'{"question": " ", "answer": "#### 1"}\n', "has no question"),
    (b'{"question": "One jar?", "answer": "1"}\n', "has no final answer"),
    (b'{"question": "One jar?", "answer": "#### 1 jar"}\n', "has no final answer"),
    (b'{"question": "One jar?", "answer": "#### 1\\n#### 2"}\n', "has no final answer"),
    (b'{"question": "One jar?", "answer": "#### 1", "target": "2"}\n', "is no item"),
    (b'{"question": "One jar?", "answer": 1}\n', "is no item"),
    (b'["One jar?", "#### 1"]\n', "is no item"),
    (GOOD.replace(b"?", b"?\\ud800"), "cannot be read"),
]


@pytest.mark.parametrize(("data", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_file_that_is_not_strictly_one_of_items_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InputError) as error:
        gsm8k.items("jars.jsonl", data)
    assert words in str(error.value)


def test_another_number_of_items_than_the_study_says_is_refused() -> None:
    with pytest.raises(InputError, match="another number of items"):
        gsm8k.items("test.jsonl", taskfiles.TEST, taskfiles.LINES + 1)


def test_all_of_gsm8k_is_read() -> None:
    folder = Path(os.environ.get("LEDGER_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"
    if not folder.is_dir() and not os.environ.get("CI"):
        pytest.skip("LEDGER_DATA names no folder with gsm8k")
    for name, count in (("test", 1319), ("train", 7473)):
        found = gsm8k.items(name, (folder / f"{name}.jsonl").read_bytes(), count)
        assert all(gsm8k.GSM8K.strict(item.answer) == gsm8k.normalised(item.answer) for item in found)
