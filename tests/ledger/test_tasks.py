"""Raw answers become figures and decisions: read strictly, paired by question, judged by the margin alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ledger import agreement, deriving, digest, recording, records, scopes, tasks, verify
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.records import consistency, gsm8k
from tests import factories, taskfiles

SPEC = taskfiles.spec()
LOSSES: dict[str, int] = {"k16v8": 2, "k16v16-repeat": 3}
"""Items that an arm answers wrongly where the others are right."""


def usual(arm: str, number: int) -> str:
    """Nine of ten right; the candidate and the repeat lose a few more."""
    lost = number in range(11, 11 + LOSSES.get(arm, 0))
    return (taskfiles.wrong if number % 10 == 0 or lost else taskfiles.right)(arm, number)


def derive(frozen: records.Spec, files: dict[str, bytes], **changes: Any) -> deriving.Derived:
    return deriving.derive(frozen, factories.result(frozen, files, **changes), files, factories.harness())


def decide(frozen: records.Spec, say: taskfiles.Say = usual) -> dict[tuple[str, str], records.Decision]:
    found = derive(frozen, taskfiles.evidence(frozen, say))
    return {(decision.candidate, decision.family): decision for decision in found.decisions}


def figures(found: deriving.Derived, arm: str, against: str | None = None) -> dict[str, records.Measurement]:
    return {item.name: item for item in found.measurements if (item.arm, item.against) == (arm, against)}


# ---------------------------------------------------------------- what was fed


def test_the_token_ids_that_a_result_lists_are_those_of_the_answers(make_archive: Callable[..., Archive], tmp_path: Path) -> None:
    frozen = taskfiles.spec(items=3)
    files, listed = taskfiles.evidence(frozen), taskfiles.documents(frozen)
    assert not derive(frozen, files, documents=listed).wrong_inputs and not derive(frozen, files).wrong_inputs
    wrong = (*listed[:2], msgspec.structs.replace(listed[2], sha256="0" * 64))
    (clause,) = derive(frozen, files, documents=wrong).wrong_inputs
    assert clause == f"item 2 was answered by a prompt of token ids {listed[2].sha256}, and the result lists {'0' * 64}"
    assert not derive(frozen, {tasks.TEST: files[tasks.TEST]}, documents=wrong).wrong_inputs  # nothing was answered
    archive = make_archive()
    archive.append(frozen)
    for at, documents in enumerate((wrong, listed[:2], listed)):
        found = factories.result(frozen, files, documents=documents)
        faults = list(agreement.result_faults(frozen, found))
        assert faults == (["2 documents, the spec has 3 items; a task lists one an item, or none"] if at == 1 else [])
        folder = factories.write_result_folder(tmp_path / str(at), found, files)
        if documents is listed:
            recording.record(archive, folder)
            continue
        with pytest.raises(InputError, match="not those of its documents" if at == 0 else "spec|documents"):
            recording.record(archive, folder)
    archive.close()
    assert not verify.verify(archive.folder).findings


def test_a_recorded_list_of_other_token_ids_is_a_finding(
    make_archive: Callable[..., Archive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, archive = taskfiles.spec(items=3), make_archive()
    archive.append(frozen)
    files = taskfiles.evidence(frozen)
    result = factories.result(frozen, files, documents=taskfiles.documents(frozen, "others"))
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_check_inputs", lambda *arguments: None)
        recording.record(archive, factories.write_result_folder(tmp_path / "out", result, files))
    archive.close()
    found = verify.verify(archive.folder).findings
    assert len(found) == 3 and {finding.kind for finding in found} == {"samples"} and "the result lists" in found[0].detail


# ---------------------------------------------------------------- figures


def test_every_figure_of_an_arm_follows_from_its_texts() -> None:
    found = derive(SPEC, taskfiles.evidence(SPEC, usual))
    own, against = figures(found, "k16v8"), figures(found, "k16v8", "k16v16")
    assert {name.rpartition("/")[2]: item.unit for name, item in (own | against).items()} == records.ANSWER_FIGURES
    assert (own["items"].value, own["answer_tokens"].value, own["out_of_tokens"].value) == (400, 2000, 0)
    assert own["strict/accuracy"].value == own["flexible/accuracy"].value == 358 / 400
    low, high = own["strict/accuracy"].lower, own["strict/accuracy"].upper
    assert low is not None and high is not None and low < 358 / 400 < high
    table = {name: against[f"strict/{name}"].value for name in ("both_right", "gained", "lost", "both_wrong")}
    assert table == {"both_right": 358, "gained": 0, "lost": 2, "both_wrong": 40}
    assert against["strict/accuracy_difference"].value == -2 / 400 == against["strict/accuracy_difference_newcombe"].value
    assert against["strict/mcnemar_p"].value == 0.5 and against["strict/discordance"].value == 2 / 400
    assert against["strict/answers_compared"].value == 400 and against["strict/answer_preservation"].value == 398 / 400
    assert figures(found, "k16v16-repeat", "k16v16")["strict/discordance"].value == 3 / 400


def test_what_the_readings_miss_and_where_they_differ_is_counted() -> None:
    said = {0: " it is 1", 1: " no idea", 2: " #### 7 or 8", 3: " #### 10"}
    frozen = taskfiles.spec(items=4)
    own = figures(derive(frozen, taskfiles.evidence(frozen, lambda arm, number: said[number])), "k16v8")
    assert (own["strict/unparsed"].value, own["flexible/unparsed"].value, own["readings_differ"].value) == (2, 1, 1)
    assert (own["strict/accuracy"].value, own["flexible/accuracy"].value) == (2 / 4, 2 / 4)


def test_what_stands_behind_a_stop_string_is_not_read() -> None:
    frozen = taskfiles.spec(items=4)
    found = derive(frozen, taskfiles.evidence(frozen, lambda arm, number: f" #### {3 * number + 1}\n\nQuestion: and 7? #### 7"))
    assert figures(found, "k16v8")["flexible/accuracy"].value == 1


def test_a_run_that_was_cut_short_has_figures_of_what_was_answered_and_no_decision() -> None:
    files = taskfiles.evidence(SPEC, usual)
    files[tasks.FILE] = b"".join(files[tasks.FILE].splitlines(True)[: 4 * 50 + 2])
    found = derive(SPEC, files, outcome="interrupted")
    assert figures(found, "native")["items"].value == 51 and figures(found, "k16v8")["items"].value == 50
    assert {decision.status for decision in found.decisions} == {"invalid"}


# ---------------------------------------------------------------- decisions


def test_a_small_loss_is_established_within_the_margin() -> None:
    found = decide(SPEC)
    for reading in records.ANSWERS:
        decision = found["k16v8", reading]
        (gate,) = decision.gates
        assert decision.status == "established" and gate.statistic == "accuracy_loss"
        assert gate.estimate == pytest.approx(0.005) and gate.lower < gate.estimate < gate.upper <= 0.05
        assert gate.floor == 3 / 400 and gate.p_bound is not None and decision.p_bound == pytest.approx(2 * gate.p_bound)
        assert re.search(r"Tango's score interval; Newcombe's method 10 \[.*358 right in both, 0 gained, 2 lost, 40 wrong", gate.method)


@pytest.mark.parametrize(
    ("lost", "status", "words"),
    [
        (13, "not established", "the margin is met alone, but not after Holm's correction"),
        (18, "not established", "is above the margin 0.05"),
        (60, "degraded", "is above the margin 0.05"),
    ],
)
def test_a_larger_loss_is_not_established_and_a_sure_one_is_harm(
    monkeypatch: pytest.MonkeyPatch, lost: int, status: str, words: str
) -> None:
    monkeypatch.setitem(LOSSES, "k16v8", lost)
    found = decide(SPEC)
    assert {decision.status for decision in found.values()} == {status}
    assert words in found["k16v8", "strict"].reason


def test_a_swapped_pairing_is_seen_in_the_sign() -> None:
    contrasts = (records.Contrast(candidate="k16v16", baseline="k16v8", family="strict"),)
    arms = tuple(arm for arm in SPEC.arms if arm.role != "repeat")
    (gate,) = decide(msgspec.structs.replace(SPEC, contrasts=contrasts, arms=arms))["k16v16", "strict"].gates
    assert gate.estimate == pytest.approx(-0.005)


def test_a_weak_control_makes_the_task_insensitive_but_answers_stay_comparable() -> None:
    found = derive(
        SPEC, taskfiles.evidence(SPEC, lambda arm, number: (taskfiles.right if number % 4 == 0 else taskfiles.wrong)(arm, number))
    )
    for decision in found.decisions:
        assert decision.status == "invalid" and decision.reason.startswith("task insensitive: k16v16 is right in 100 of 400 items")
        assert "preserved in 400 of 400" in decision.reason and decision.gates
    assert figures(found, "k16v8", "k16v16")["strict/answer_preservation"].value == 1


def test_a_margin_tighter_than_the_floor_is_invalid_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "k16v16-repeat", 24)
    decision = decide(SPEC)["k16v8", "strict"]
    assert decision.status == "invalid"
    assert decision.reason.startswith("floor exceeded: the margin is 0.05, but k16v16-repeat alone differs from k16v16 in a share of 0.055")


def test_readings_are_judged_apart() -> None:
    def say(arm: str, number: int) -> str:
        text = usual(arm, number)
        return text.replace("####", "the answer is") if arm == "k16v8" else text

    found = decide(SPEC, say)
    assert (found["k16v8", "strict"].status, found["k16v8", "flexible"].status) == ("degraded", "established")


def test_a_reused_control_is_suspicious_and_establishes_nothing() -> None:
    files = taskfiles.evidence(SPEC, lambda arm, number: usual("k16v16", number))
    found = derive(SPEC, files)
    assert any("k16v16 and k16v8 give the same answers, token by token" in words for words in found.warnings)
    assert {decision.status for decision in found.decisions} == {"invalid"}
    assert found.decisions[0].reason.startswith("suspicious: ")


def test_a_contradiction_of_policy_stands_before_every_figure() -> None:
    files = taskfiles.evidence(SPEC, usual)
    result = factories.result(SPEC, files)
    arms = tuple(
        msgspec.structs.replace(arm, measured={**arm.measured, "values": "bf16"}) if arm.name == "k16v8" else arm for arm in result.arms
    )
    found = deriving.derive(SPEC, msgspec.structs.replace(result, arms=arms), files, factories.harness())
    assert {decision.status for decision in found.decisions} == {"invalid"} and "values: requested fp8_e4m3" in found.decisions[0].reason


def test_an_arm_without_all_its_answers_is_judged_by_none() -> None:
    files = taskfiles.evidence(SPEC, usual)
    files[tasks.FILE] = b"".join(
        line for line in files[tasks.FILE].splitlines(True) if b'"arm":"k16v8"' not in line or b'"item":7,' not in line
    )
    found = derive(SPEC, files)
    assert {decision.reason for decision in found.decisions} == {"missing evidence: arm k16v8 has no answer to item 7"}


# ---------------------------------------------------------------- a wrong parser, a shifted document


def test_a_wrong_parser_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = derive(SPEC, taskfiles.evidence(SPEC, usual)).measurements
    monkeypatch.setitem(gsm8k.READINGS, "strict", lambda definition, text: definition.flexible(text.replace("####", "")) and "0")
    after = derive(SPEC, taskfiles.evidence(SPEC, usual)).measurements
    assert any("strict/accuracy of k16v8" in fault for fault in agreement.measurement_faults(before, after))


def _other_question(line: bytes) -> bytes:
    return line.replace(taskfiles.ITEMS[3].sha256.encode(), taskfiles.ITEMS[4].sha256.encode())


def _shift(frozen: records.Spec) -> bytes:
    """The candidate's answers, each under the number of the item before."""
    kept = [line for line in taskfiles.evidence(frozen)[tasks.FILE].splitlines(True) if b'"arm":"k16v8"' not in line]
    lines = [
        taskfiles.line(frozen, "k16v8", number + 1, " 1").replace(b'"item":%d' % (number + 1), b'"item":%d' % number) for number in range(3)
    ]
    return b"".join((*kept, *lines))


SMALL = taskfiles.spec(items=4)
FILES = taskfiles.evidence(SMALL)
ONE = taskfiles.line(SMALL, "native", 0, " 1")
DAMAGED = [
    ({tasks.FILE: _shift(SMALL)}, "answers another question than item 0"),
    ({tasks.FILE: _other_question(FILES[tasks.FILE])}, "answers another question than item 3"),
    ({tasks.TEST: taskfiles.lines(range(1, 401))}, "is not the file that the spec pins"),
    ({tasks.TEST: None}, "task/test.jsonl is missing"),
    ({tasks.SHOTS: taskfiles.lines(range(1001, 1002))}, "was asked by another prompt"),
    ({tasks.SHOTS: taskfiles.lines(range(1000, 1002))}, "another number of items"),
    ({tasks.SHOTS: None}, "task/shots.jsonl is missing"),
    ({tasks.FILE: ONE + ONE}, "Line 2 of answers.jsonl repeats arm 'native', item 0"),
    ({tasks.FILE: taskfiles.line(SMALL, "k8v8", 0, " 1")}, "is of no arm or item of the spec"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 4, " 1")}, "is of no arm or item of the spec"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", item=True)}, "is of no arm or item of the spec"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", tokens=13)}, "holds a value that cannot be"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", tokens=0)}, "holds a value that cannot be"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", ended="length")}, "holds a value that cannot be"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", ended="stop")}, "holds a value that cannot be"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1</s>", ended="end")}, "holds a value that cannot be"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", ids="short")}, "holds a value that cannot be"),
    ({tasks.FILE: taskfiles.line(SMALL, "native", 0, " 1", strict=True)}, "has other keys"),
    ({tasks.FILE: ONE + taskfiles.line(SMALL, "k16v8", 0, " 1", prompt_ids="0" * 64)}, "in other token ids"),
    ({tasks.FILE: ONE[:-1]}, "ends in the middle of a line"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_answers_that_are_not_to_the_questions_asked_are_refused(change: dict[str, bytes | None], words: str) -> None:
    files = {name: data for name, data in (FILES | change).items() if data is not None}
    with pytest.raises(InputError) as error:
        tasks.read(SMALL, files)
    assert words in str(error.value)


# ---------------------------------------------------------------- specs

SPECS: list[tuple[dict[str, Any], str]] = [
    ({"definition": "gsm8k_cot"}, "knows no such definition"),
    ({"version": "0.4.12"}, "knows no such definition"),
    ({"definition_sha256": gsm8k.GSM8K_COT.sha256}, "knows no such definition"),
    ({"train": None, "train_items": None}, "the task gsm8k has worked examples from train"),
    ({"train_items": None}, "the task gsm8k has worked examples from train"),
    (taskfiles.COT | {"train_items": 4}, "the task gsm8k_cot has worked examples of its own"),
    (
        {**taskfiles.COT, "train": taskfiles.dataset("train", taskfiles.TRAIN), "train_items": 4},
        "the task gsm8k_cot has worked examples of its own",
    ),
    (taskfiles.COT | {"shots": 9}, "fewer worked examples than shots"),
    ({"items": ()}, "there is no item to ask"),
    ({"margin": 0.2}, "the margin cannot be shown"),
    ({"margin": 0.0}, "the margin cannot be shown"),
    ({"confidence": 1.0}, "the confidence is impossible"),
    ({"shots": 5}, "fewer worked examples than shots"),
    ({"test_items": 399}, "an item is asked that the file of questions does not hold"),
    ({"chat_template": True, "bos": True}, "brings its own BOS"),
    ({"families": factories.FAMILIES}, "a task has families"),
    ({"contrasts": (records.Contrast(candidate="k16v8", baseline="k16v16", family="loss"),)}, "names no gate family"),
    ({"arms": tuple(msgspec.structs.replace(arm, chunk=64) if arm.repeats else arm for arm in SPEC.arms)}, "under the same chunk"),
    ({"tolerances": {"strict/lost": 1.0}}, "a count is equal or not"),
    ({"tolerances": {"loss_mean": 1.0}}, "there is no measurement"),
]


@pytest.mark.parametrize(("changes", "words"), SPECS, ids=[words for _, words in SPECS])
def test_a_spec_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        if "items" in changes:
            consistency.check(msgspec.structs.replace(SPEC, task=taskfiles.task(0)))
        else:
            taskfiles.spec(**changes)
    assert words in str(error.value)


def test_a_task_with_worked_examples_of_its_own_is_read_by_its_own_readings() -> None:
    frozen = taskfiles.spec(items=3, **taskfiles.COT, shots=8)
    said = (" 3 and 1. The answer is 1.", " The answer is 5.\n\nQ: and 9? #### 9", " #### 7")
    files = taskfiles.evidence(frozen, lambda arm, number: said[number])
    assert set(files) == {tasks.TEST, tasks.FILE}
    answers = tasks.read(frozen, files).of["k16v8"]
    assert [answer.found for answer in answers.values()] == [
        {"strict": "1", "flexible": "1"}, {"strict": "5", "flexible": "5"}, {"strict": None, "flexible": "7"}
    ]  # fmt: skip
    assert [answer.right("strict") for answer in answers.values()] == [True, False, False]
    assert records.decode(records.Spec, records.encode(frozen), "spec.json") == frozen


def test_a_study_of_such_a_task_names_one_file(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(taskfiles.TEST)
    sha256 = digest.sha256(taskfiles.TEST)
    file = {"dataset": "test.jsonl", "dataset_name": "Jars", "dataset_license": "CC0-1.0", "sha256": sha256, "items": taskfiles.LINES}
    own = {"definition": "gsm8k_cot", "version": gsm8k.VERSION, "definition_sha256": gsm8k.GSM8K_COT.sha256, "shots": 8}
    table = own | {
        "test": file,
        "items": 5,
        "chat_template": "multiturn",
        "bos": False,
        "new_tokens": 9,
        "batch": 2,
        "chunk": 8,
        "margin": 0.05,
    }
    task, files = scopes.resolve_task(scopes.task_of(table), table, tmp_path)
    assert set(files) == {"test.jsonl"} and task.train is None and task.chat_template == "multiturn"
    with pytest.raises(InputError, match="chat_template"):
        scopes.task_of(table | {"chat_template": "several"})


def test_the_power_of_a_study_is_said_in_items() -> None:
    task = taskfiles.task(margin=0.02)
    assert task.needed(0.05) == 775  # 6.2 * 0.05 / 0.02²
    assert "775 at a discordance of 5%" in task.power and "this study has 400 items" in task.power
