"""Answers to a task -> measurements and decisions: everything is read again from the raw texts.

Evidence of a run, beside ``result.json``:

    task/test.jsonl    the file of questions, whole: it has the spec's digest, and the right answers come from it
    task/shots.jsonl   the worked examples: the first lines of the file that shots come from; absent where there are none, or the
                       definition's own
    answers.jsonl      one line of canonical JSON an item and arm:
        item, arm      the question's number in the file, and who answered
        question       SHA-256 of the question's text
        prompt         SHA-256 of the whole prompt's text, and ``prompt_ids`` that of its token ids (int32, little-endian)
        ids, tokens    SHA-256 of the answer's token ids, and how many there are
        text           what they say, uncut
        ended          ``stop`` at a stop string, ``end`` at the model's end token, ``length`` out of tokens

The result of a run that asked everything lists each prompt's token ids as a document, in the order of the spec's items.

Measurements (``strict/`` and ``flexible/`` are the two readings of :mod:`ledger.records.gsm8k`; an arm's own, and against
each arm that it is compared with, over the items that both answered):

    items, answer_tokens, out_of_tokens   counts
    readings_differ                       items in which both readings find something, and not the same
    <reading>/accuracy                    share of right answers, Wilson's interval
    <reading>/unparsed                    items in which the reading finds nothing; they count as wrong
    <reading>/accuracy_difference         arm less other, Tango's interval; ``_newcombe``: the same with Newcombe's method 10
    <reading>/both_right, gained, lost, both_wrong    the paired table; gained: the arm alone is right
    <reading>/discordance                 (gained + lost) / items
    <reading>/mcnemar_p                   exact, two-sided
    <reading>/answer_preservation         of the items in which the reading finds the other's answer (``answers_compared``): the
                                          share in which the arm's is the same, right or wrong; Wilson's interval
    identical_answers                     items with the same token ids

Intervals are two-sided, 95 %. Decisions, one a contrast, whose family is the reading:

    invalid          a validity condition broke, among them: answers are missing; one side gives the answers of another arm, token by
                     token, although one of the two stores 8 bit where the other does not; task insensitive: the lower limit of the
                     baseline's accuracy is under five margins; floor exceeded: baseline and repeat differ in more than the margin
    degraded         Tango's lower bound of the loss of accuracy, at the spec's one-sided confidence, is above the margin
    established      its upper bound is at most the margin
    not established  otherwise

p-values are of Tango's statistic at the margin, after Holm over the contrasts of the spec; what cannot be judged counts there with
p = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from ledger import digest, gates, measures, proportions, validity
from ledger.errors import InputError
from ledger.proportions import Paired
from ledger.records import ANSWERS, Arm, Contrast, Decision, GateOutcome, Harness, Measurement, Result, Spec, Status, Task, gsm8k

FILE = "answers.jsonl"
TEST = "task/test.jsonl"
SHOTS = "task/shots.jsonl"
SENSITIVE = 5
"""How many margins the control's accuracy must be sure of, so that losing one would show."""

_KEYS = {"arm", "item", "question", "prompt", "prompt_ids", "ids", "tokens", "text", "ended"}
_ENDS = ("stop", "end", "length")
_AS_LEFT = "record the folder as the runner left it."


@dataclass(frozen=True)
class Answer:
    """One line of ``answers.jsonl``, and how it is read."""

    definition: gsm8k.Definition
    item: gsm8k.Item
    prompt_ids: str
    ids: str
    tokens: int
    text: str
    ended: str

    @cached_property
    def found(self) -> dict[str, str | None]:
        """What each reading finds, as it is compared."""
        shown = self.definition.cut(self.text)
        return {name: read(self.definition, shown) for name, read in gsm8k.READINGS.items()}

    def right(self, reading: str) -> bool:
        """Whether a reading finds the item's answer."""
        return self.found[reading] == gsm8k.normalised(self.item.answer)


@dataclass(frozen=True)
class Answers:
    """Answers by arm and item number."""

    of: dict[str, dict[int, Answer]] = field(default_factory=dict)

    def both(self, spec: Spec, *arms: str) -> tuple[int, ...]:
        """The items, in the spec's order, that every one of ``arms`` answered."""
        return tuple(item for item in task(spec).items if all(item in self.of.get(arm, {}) for arm in arms))

    def table(self, spec: Spec, reading: str, arm: str, other: str) -> Paired:
        """The paired table of two arms under a reading."""
        pairs = [(self.of[arm][item], self.of[other][item]) for item in self.both(spec, arm, other)]
        return proportions.paired((mine.right(reading), theirs.right(reading)) for mine, theirs in pairs)

    def preserved(self, spec: Spec, reading: str, arm: str, other: str) -> tuple[int, int]:
        """Items in which the reading finds the same in both; and those in which it finds something in the other's answer."""
        pairs = [(self.of[arm][item].found[reading], self.of[other][item].found[reading]) for item in self.both(spec, arm, other)]
        compared = [(mine, theirs) for mine, theirs in pairs if theirs is not None]
        return sum(mine == theirs for mine, theirs in compared), len(compared)

    def identical(self, spec: Spec, arm: str, other: str) -> int:
        """Items to which both answered with the same token ids."""
        return sum(self.of[arm][item].ids == self.of[other][item].ids for item in self.both(spec, arm, other))


def task(spec: Spec) -> Task:
    """The task of a spec. Raises ValueError for one that has none."""
    if spec.task is None:
        raise ValueError(f"a spec of scope {spec.scope!r} has no task")
    return spec.task


# ---------------------------------------------------------------- reading


def read(spec: Spec, evidence: Mapping[str, bytes]) -> Answers:
    """Parse the answers strictly; they may be missing, or not all there. Raises InputError that names the line.

    Every line must be of a question of the pinned file, asked by the prompt that the spec calls for, in the same token ids by every arm.
    """
    found = Answers()
    if FILE not in evidence:
        return found
    asked = task(spec)
    definition = gsm8k.DEFINITIONS[asked.definition]
    items = gsm8k.items(TEST, _pinned(evidence, TEST, asked.test.sha256), asked.test_items)
    if definition.shots is not None:
        shots = definition.shots[: asked.shots]
    else:
        shots = gsm8k.items(SHOTS, _pinned(evidence, SHOTS, None), asked.shots) if asked.shots else ()
    prompts = {number: digest.sha256(definition.prompt(items[number], shots).encode()) for number in asked.items if number < len(items)}
    for number, value in measures.json_lines(FILE, evidence[FILE]):
        _read_line(spec, f"Line {number} of {FILE}", value, items, prompts, found)
    return found


def _pinned(evidence: Mapping[str, bytes], name: str, sha256: str | None) -> bytes:
    data = evidence.get(name)
    if data is None:
        raise InputError(f"{name} is missing: nothing says what was asked.", next=_AS_LEFT)
    if sha256 is not None and digest.sha256(data) != sha256:
        raise InputError(f"{name} is not the file that the spec pins.", expected=sha256, found=digest.sha256(data), next=_AS_LEFT)
    return data


def _read_line(spec: Spec, where: str, value: Any, items: Sequence[gsm8k.Item], prompts: Mapping[int, str], into: Answers) -> None:
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_KEYS)), found=repr(value)[:200], next=_AS_LEFT)
    arm, number, tokens, text, ended = (value[name] for name in ("arm", "item", "tokens", "text", "ended"))
    limit, definition = task(spec).new_tokens, gsm8k.DEFINITIONS[task(spec).definition]
    if arm not in [arm.name for arm in spec.arms] or type(number) is not int or number not in prompts:
        raise InputError(f"{where} is of no arm or item of the spec.", found=f"arm {arm!r}, item {number!r}"[:300], next=_AS_LEFT)
    if number in into.of.get(arm, {}):
        raise InputError(f"{where} repeats arm {arm!r}, item {number}.", next=_AS_LEFT)
    digests = [value[name] for name in ("question", "prompt", "prompt_ids", "ids")]
    if (
        not all(isinstance(one, str) and len(one) == 64 and set(one) <= set("0123456789abcdef") for one in digests)
        or not measures.is_count(tokens)
        or not 1 <= tokens <= limit
        or not isinstance(text, str)
        or ended not in _ENDS
        or (ended == "length" and tokens != limit)
        or (ended == "stop") != (definition.cut(text) != text)
    ):
        raise InputError(
            f"{where} holds a value that cannot be.",
            expected=f"digests, 1 to {limit} tokens, a text, and how it ended: at a stop string in it, at the end token, at {limit} tokens",
            found=repr(value)[:300],
            next=_AS_LEFT,
        )
    if value["question"] != items[number].sha256:
        raise InputError(
            f"{where} answers another question than item {number} of the pinned file.",
            expected=items[number].sha256,
            found=value["question"],
            next=_AS_LEFT,
        )
    if value["prompt"] != prompts[number]:
        raise InputError(
            f"{where} was asked by another prompt than the task's.", expected=prompts[number], found=value["prompt"], next=_AS_LEFT
        )
    for other, theirs in into.of.items():
        if number in theirs and theirs[number].prompt_ids != value["prompt_ids"]:
            raise InputError(
                f"{where}: {arm} and {other} were asked item {number} in other token ids.",
                expected=theirs[number].prompt_ids,
                found=value["prompt_ids"],
                next=_AS_LEFT,
            )
    into.of.setdefault(arm, {})[number] = Answer(definition, items[number], value["prompt_ids"], value["ids"], tokens, text, ended)


def check_documents(spec: Spec, result: Result, answers: Answers) -> list[str]:
    """Where the token ids that the result lists, one document an item in the spec's order, are not those that an item was answered by."""
    wrong = []
    for item, document in zip(task(spec).items, result.documents, strict=False):
        given = next((of[item].prompt_ids for of in answers.of.values() if item in of), document.sha256)
        if given != document.sha256:
            wrong.append(f"item {item} was answered by a prompt of token ids {given}, and the result lists {document.sha256}")
    return wrong


# ---------------------------------------------------------------- measurements


def measure(spec: Spec, answers: Answers) -> tuple[Measurement, ...]:
    """Figures of every arm that answered anything, in the order of the spec."""
    found: list[Measurement] = []
    for arm in spec.arms:
        if not answers.both(spec, arm.name):
            continue
        found += _own(spec, answers, arm.name)
        for other in measures.others(spec, arm):
            if answers.both(spec, arm.name, other):
                found += _against(spec, answers, arm.name, other)
    return tuple(found)


def _own(spec: Spec, answers: Answers, arm: str) -> list[Measurement]:
    given = [answers.of[arm][item] for item in answers.both(spec, arm)]
    differ = sum(
        answer.found["strict"] is not None and answer.found["flexible"] is not None and answer.found["strict"] != answer.found["flexible"]
        for answer in given
    )
    found = [
        Measurement(arm=arm, name="items", value=len(given), unit="count"),
        Measurement(arm=arm, name="answer_tokens", value=sum(answer.tokens for answer in given), unit="tokens"),
        Measurement(arm=arm, name="out_of_tokens", value=sum(answer.ended == "length" for answer in given), unit="count"),
        Measurement(arm=arm, name="readings_differ", value=differ, unit="count"),
    ]
    for reading in ANSWERS:
        right = sum(answer.right(reading) for answer in given)
        low, high = proportions.wilson(right, len(given))
        unparsed = sum(answer.found[reading] is None for answer in given)
        found += [
            Measurement(arm=arm, name=f"{reading}/accuracy", value=right / len(given), unit="fraction", lower=low, upper=high),
            Measurement(arm=arm, name=f"{reading}/unparsed", value=unparsed, unit="count"),
        ]
    return found


def _against(spec: Spec, answers: Answers, arm: str, other: str) -> list[Measurement]:
    found = []

    def say(name: str, value: float, unit: measures.Unit, bounds: tuple[float, float] | tuple[None, None] = (None, None)) -> None:
        found.append(Measurement(arm=arm, name=name, value=value, unit=unit, against=other, lower=bounds[0], upper=bounds[1]))

    for reading in ANSWERS:
        table = answers.table(spec, reading, arm, other)
        say(f"{reading}/accuracy_difference", table.difference, "fraction", proportions.tango(table))
        say(f"{reading}/accuracy_difference_newcombe", table.difference, "fraction", proportions.newcombe(table))
        for name, count in (("both_right", table.both), ("gained", table.gained), ("lost", table.lost), ("both_wrong", table.neither)):
            say(f"{reading}/{name}", count, "count")
        say(f"{reading}/discordance", table.discordance, "fraction")
        say(f"{reading}/mcnemar_p", proportions.mcnemar(table), "fraction")
        same, compared = answers.preserved(spec, reading, arm, other)
        say(f"{reading}/answers_compared", compared, "count")
        if compared:
            say(f"{reading}/answer_preservation", same / compared, "fraction", proportions.wilson(same, compared))
    say("identical_answers", answers.identical(spec, arm, other), "count")
    return found


# ---------------------------------------------------------------- suspicion


def _eight(arm: Arm) -> tuple[bool, bool]:
    return arm.keys == "fp8_e4m3", arm.values == "fp8_e4m3"


def identical_pairs(spec: Spec, answers: Answers) -> tuple[tuple[str, str], ...]:
    """Pairs of arms of which one stores 8 bit where the other does not, and yet every answer is the same, token by token."""
    return tuple(
        (arm.name, other.name)
        for arm, other in combinations(spec.arms, 2)
        if _eight(arm) != _eight(other)
        and (both := answers.both(spec, arm.name, other.name))
        and answers.identical(spec, arm.name, other.name) == len(both)
    )


def suspicions(spec: Spec, answers: Answers) -> tuple[str, ...]:
    """In words, what :func:`identical_pairs` finds: one warning a pair."""
    return tuple(
        f"{left} and {right} give the same answers, token by token, although they store different formats: "
        "the cache of one of them was probably not read, or one's answers were used for both"
        for left, right in identical_pairs(spec, answers)
    )


# ---------------------------------------------------------------- decisions


Pairs = Sequence[tuple[str, str]]


def _refusal(spec: Spec, result: Result, answers: Answers, harness: Harness, alike: Pairs, contrast: Contrast) -> tuple[Status, str] | None:
    """Status and reason where the contrast cannot be judged; None where it can. ``alike`` are :func:`identical_pairs`."""
    repeat = repeat_of(spec, contrast.baseline)
    sides = [contrast.candidate, contrast.baseline, *([repeat] if repeat else [])]
    refused = validity.refusal(spec, result, harness, sides)
    if refused is not None:
        return refused
    for side in sides:
        missing = [str(item) for item in task(spec).items if item not in answers.of.get(side, {})]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            return "invalid", f"missing evidence: arm {side} has no answer to item {', '.join(missing[:8])}{more}"
    for left, right in alike:
        if {left, right} & {contrast.candidate, contrast.baseline}:
            return "invalid", f"suspicious: {left} and {right} give the same answers, token by token, although they store different formats"
    return None


def repeat_of(spec: Spec, name: str) -> str | None:
    """The arm that repeats another, or None."""
    return next((arm.name for arm in spec.arms if arm.repeats == name), None)


def _judge(spec: Spec, answers: Answers, contrast: Contrast) -> GateOutcome:
    asked = task(spec)
    table = answers.table(spec, contrast.family, contrast.candidate, contrast.baseline)
    low, high = proportions.tango(table, 2 * asked.confidence - 1)
    other = proportions.newcombe(table, 2 * asked.confidence - 1)
    repeat = repeat_of(spec, contrast.baseline)
    p_bound, p_harm = proportions.inferior_p(table, asked.margin)
    return GateOutcome(
        statistic="accuracy_loss",
        estimate=0.0 - table.difference,
        lower=0.0 - high,
        upper=0.0 - low,
        bound=asked.margin,
        harm=asked.margin,
        floor=None if repeat is None else answers.table(spec, contrast.family, repeat, contrast.baseline).discordance,
        p_bound=p_bound,
        p_harm=p_harm,
        met=0.0 - low <= asked.margin,
        harmed=0.0 - high > asked.margin,
        method=(
            f"one-sided {100 * asked.confidence:g} % over {table.items} items, {contrast.family} reading: Tango's score interval; "
            f"Newcombe's method 10 [{0.0 - other[1]:.6g}, {0.0 - other[0]:.6g}]; {table.both} right in both, {table.gained} gained, "
            f"{table.lost} lost, {table.neither} wrong in both; exact McNemar p {proportions.mcnemar(table):.4g}"
        ),
    )


def _weak(spec: Spec, answers: Answers, contrast: Contrast, gate: GateOutcome) -> str:
    """Why the numbers mean nothing, or an empty string."""
    asked = task(spec)
    given = answers.of[contrast.baseline]
    right = sum(given[item].right(contrast.family) for item in asked.items)
    low, _ = proportions.wilson(right, len(asked.items))
    if low < SENSITIVE * asked.margin:
        same, compared = answers.preserved(spec, contrast.family, contrast.candidate, contrast.baseline)
        return (
            f"task insensitive: {contrast.baseline} is right in {right} of {len(asked.items)} items, so that its accuracy may be "
            f"{low:.4g}, under {SENSITIVE} margins of {asked.margin:g}; the answer itself was preserved in {same} of {compared}"
        )
    if gate.floor is not None and asked.margin < gate.floor:
        return (
            f"floor exceeded: the margin is {asked.margin:g}, but {repeat_of(spec, contrast.baseline)} alone differs from "
            f"{contrast.baseline} in a share of {gate.floor:.4g}"
        )
    return ""


def _decision(contrast: Contrast, status: Status, reason: str, gates: Sequence[GateOutcome] = (), **p_values: float) -> Decision:
    return Decision(
        candidate=contrast.candidate,
        baseline=contrast.baseline,
        family=contrast.family,
        status=status,
        reason=reason[:8000],
        gates=tuple(gates),
        **p_values,
    )


def _assess(spec: Spec, result: Result, answers: Answers, harness: Harness, alike: Pairs, contrast: Contrast) -> Decision | GateOutcome:
    refused = _refusal(spec, result, answers, harness, alike, contrast)
    if refused is not None:
        return _decision(contrast, *refused)
    gate = _judge(spec, answers, contrast)
    weak = _weak(spec, answers, contrast, gate)
    return _decision(contrast, "invalid", weak, [gate]) if weak else gate


def _conclude(spec: Spec, contrast: Contrast, gate: GateOutcome, p_bound: float, p_harm: float) -> Decision:
    alpha = 1 - task(spec).confidence
    status: Status = "not established"
    if gate.harmed and p_harm <= alpha:
        status = "degraded"
        reason = f"accuracy loss: lower bound {gate.lower:.4g} is above the margin {gate.bound:g} (estimate {gate.estimate:.4g}, "
        reason += f"adjusted p {p_harm:.2g})"
    elif not gate.met:
        reason = f"accuracy loss: upper bound {gate.upper:.4g} is above the margin {gate.bound:g} (estimate {gate.estimate:.4g})"
        reason += "; harm is seen, but not after Holm's correction" if gate.harmed else ""
    elif p_bound > alpha:
        reason = f"the margin is met alone, but not after Holm's correction (adjusted p {p_bound:.2g})"
    else:
        status = "established"
        reason = f"accuracy loss: upper bound {gate.upper:.4g} is at most the margin {gate.bound:g}"
    return _decision(contrast, status, reason, [gate], p_bound=p_bound, p_harm=p_harm)


def decide(spec: Spec, result: Result, answers: Answers, harness: Harness) -> tuple[Decision, ...]:
    """One decision a contrast, in the order of the spec. The margin comes from the spec alone."""
    alike = identical_pairs(spec, answers)  # of every pair of arms: once for all contrasts, of which a grid has many
    assessed = [_assess(spec, result, answers, harness, alike, contrast) for contrast in spec.contrasts]
    bounds = gates.holm([1.0 if isinstance(found, Decision) or found.p_bound is None else found.p_bound for found in assessed])
    harms = gates.holm([1.0 if isinstance(found, Decision) or found.p_harm is None else found.p_harm for found in assessed])
    return tuple(
        found if isinstance(found, Decision) else _conclude(spec, contrast, found, bound, harm)
        for contrast, found, bound, harm in zip(spec.contrasts, assessed, bounds, harms, strict=True)
    )
