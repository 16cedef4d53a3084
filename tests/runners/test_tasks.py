"""Answers of tiny seeded models: greedy, batched, through every arm's own cache, and resumed without a sample lost or repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save
from triton.runtime import interpreter

from ledger import agreement, deriving, digest, records, tasks
from ledger.errors import InputError, ProvenanceError
from ledger.records import gsm8k
from runners import __main__ as command
from runners import checkpoints, geometry
from runners import fused as kernels
from runners import tasks as runner
from tests import factories, taskfiles

from . import tiny
from .test_main import ROOT, finish, result_of, start

ARMS = (
    tiny.arm("native", "control", implementation="native"),
    tiny.arm("k16v16", "control", "bf16", "bf16"),
    tiny.arm("k16v16-repeat", "repeat", "bf16", "bf16", repeats="k16v16", chunk=16),
    tiny.arm("k16v8", "candidate", "bf16", "fp8_e4m3"),
)


def spec(items: int = 5, **changes: Any) -> records.Spec:
    return taskfiles.spec(items, **{"checkpoint": tiny.llama(), "arms": ARMS, "bos": True} | changes)


def freeze(folder: Path, frozen: records.Spec) -> Path:
    (folder / "inputs").mkdir(parents=True)
    (folder / "spec.json").write_bytes(records.encode(frozen))
    (folder / "inputs" / "test.jsonl").write_bytes(taskfiles.TEST)
    (folder / "inputs" / "train.jsonl").write_bytes(taskfiles.TRAIN)
    return folder


def ran(tmp_path: Path, frozen: records.Spec, kept: tiny.Kept | None = None) -> tiny.Kept:
    kept = kept or tiny.Kept()
    folder = tmp_path / digest.digest_of(records.plain(frozen))
    runner.run(frozen, (folder if folder.exists() else freeze(folder, frozen)) / "inputs", kept, kept)
    return kept


def answers(kept: tiny.Kept) -> dict[tuple[str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in kept.files["answers.jsonl"].splitlines()]
    return {(line["arm"], line["item"]): line for line in lines}


# ---------------------------------------------------------------- answers


def test_the_evidence_of_a_run_is_what_the_ledger_reads(tmp_path: Path) -> None:
    frozen = spec()
    kept = ran(tmp_path, frozen)
    read = tasks.read(frozen, kept.files)
    assert {arm: tuple(of) for arm, of in read.of.items()} == {arm.name: frozen.task.items for arm in ARMS}
    assert all(arm.outcome == "completed" and arm.backings and arm.geometry for arm in kept.fields["arms"])
    assert kept.arm("k16v8").measured["values"] == "fp8_e4m3" and kept.fields["last"] == 5
    documents = kept.fields["documents"]
    assert [(found.tokens, found.sha256) for found in documents] == [
        (len(gsm8k.GSM8K.prompt(taskfiles.ITEMS[number], taskfiles.SHOTS[:1]).encode()) + 1, read.of["native"][number].prompt_ids)
        for number in frozen.task.items
    ]
    result = factories.result(frozen, kept.files, arms=kept.fields["arms"], documents=documents)
    assert not list(agreement.result_faults(frozen, result))
    found = deriving.derive(frozen, result, kept.files, factories.harness())
    assert [decision.status for decision in found.decisions] == ["invalid", "invalid"]  # a seeded model knows nothing
    assert all(decision.reason.startswith(("task insensitive", "suspicious")) for decision in found.decisions)


def test_answers_are_those_of_transformers_own_greedy_generation(tmp_path: Path) -> None:
    frozen = spec(items=3, batch=1)
    model, _ = checkpoints.load(frozen.checkpoint, "fp32")
    found = answers(ran(tmp_path, frozen))
    for number in frozen.task.items:
        prompt = gsm8k.GSM8K.prompt(taskfiles.ITEMS[number], taskfiles.SHOTS[:1]).encode()
        ids = torch.tensor([[model.config.bos_token_id, *prompt]])
        assert found["native", number]["prompt_ids"] == digest.sha256(ids[0].numpy().astype("<i4").tobytes())
        said = model.generate(ids, max_new_tokens=frozen.task.new_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
        assert found["native", number]["tokens"] == len(said)
        assert found["native", number]["ids"] == digest.sha256(np.asarray(said, "<i4").tobytes())


SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
GEMMA = records.Checkpoint(name="tiny", source="random:gemma3_text#7", license="none", config=tiny.CONFIG | SLIDING, seed=7)


@pytest.mark.parametrize("checkpoint", [tiny.llama(), GEMMA], ids=["full", "sliding"])
def test_neither_batch_nor_padding_changes_an_answer_in_fp32(tmp_path: Path, checkpoint: records.Checkpoint) -> None:
    """Prompts of a batch differ in length, so that padding is there to be masked; chunks end inside and outside of it."""
    same: dict[str, Any] = {"items": 12, "checkpoint": checkpoint, "arms": (ARMS[0], tiny.arm("own", "candidate")), "contrasts": ()}
    one = answers(ran(tmp_path, spec(batch=1, **same)))
    several = answers(ran(tmp_path, spec(batch=5, chunk=7, **same)))
    assert one == several
    assert len({line["prompt_ids"] for line in one.values()}) == 12 and len({line["text"] for line in one.values()}) > 1
    assert all(one["native", number]["ids"] == one["own", number]["ids"] for number in range(12))


def test_the_cache_is_read_in_prefill_so_that_formats_differ(tmp_path: Path) -> None:
    """Keys of 8 bit in a model whose attention is sharp give other answers than the native cache."""
    arms = (ARMS[0], tiny.arm("k8v8", "candidate", "fp8_e4m3", "fp8_e4m3"))
    found = answers(ran(tmp_path, spec(items=12, arms=arms, contrasts=())))
    assert any(found["native", number]["ids"] != found["k8v8", number]["ids"] for number in range(12))


@pytest.mark.parametrize(
    ("text", "ended", "tokens"), [("Question: what", "stop", 9), ("ab\x02cdefghijklmn", "end", 3), ("nothing ends here", "length", 12)]
)
def test_an_answer_ends_at_a_stop_string_at_the_end_token_or_out_of_tokens(text: str, ended: str, tokens: int) -> None:
    """A model that says a text, byte by byte; its second row says nothing but zeros until it is out of tokens."""
    said = torch.tensor([list(text.encode()), [0] * len(text)])
    given: dict[str, list[runner.Given]] = {}
    batch = runner.Batch([runner.Asked(n, taskfiles.ITEMS[n], "", np.zeros(2 + n, "<i4")) for n in range(2)], "cpu")
    step = iter(range(said.shape[1]))

    def model(ids: torch.Tensor, **options: Any) -> Any:
        at = next(step) if options["attention_mask"].shape[1] >= 3 else 0
        return SimpleNamespace(logits=torch.nn.functional.one_hot(said[:, at], 256)[:, None].float())

    class Model:
        config = SimpleNamespace(_attn_implementation="sdpa", get_text_config=lambda: SimpleNamespace(vocab_size=256, bos_token_id=None))

        def forward(self, past_key_values: Any = None) -> None: ...

        def __call__(self, ids: torch.Tensor, **options: Any) -> Any:
            return model(ids, **options)

    state: Any = SimpleNamespace(name="native", model=Model(), arm=ARMS[0], chunk=8, device="cpu", seconds=0.0, cache=None, fixed=None)
    words = runner.Words(taskfiles.task(), None, Model.config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.caches, "build", lambda *arguments: None)
        batch.answer(state, 12, words, {2}, given)
    first, second = given["native"]
    assert (first.ended, len(first.ids), first.text) == (ended, tokens, text[:tokens])
    assert (second.ended, len(second.ids)) == ("length", 12)


# ---------------------------------------------------------------- fused arms


HALF = {"compute": "fp16"}
NATIVE16 = tiny.arm("native", "control", "fp16", "fp16", implementation="native", **HALF)
REFERENCE_8 = tiny.arm("k16v8", "control", "fp16", "fp8_e4m3", **HALF)


def fused(name: str, keys: str = "fp16", values: str = "fp16", role: str = "candidate", **more: Any) -> records.Arm:
    return tiny.arm(name, role, keys, values, **HALF | {"implementation": "fused", "backend": records.FUSED_BACKEND} | more)


SHARP = tiny.CONFIG | {"head_dim": 64, "initializer_range": 0.1, "bos_token_id": 1}
SMALL = {
    name: records.Checkpoint(name="tiny", source=f"random:{kind}#{seed}", license="none", config=SHARP | more, seed=seed)
    for name, kind, seed, more in (
        ("llama", "llama", 7, {}),
        ("qwen3", "qwen3", 13, {}),
        ("gemma3", "gemma3_text", 12, SLIDING | {"sliding_window": 24, "query_pre_attn_scalar": 64}),
    )
}
"""With seeds of which the two largest logits are never equal in fp16."""
PAIRS = (("f16v16", "native"), ("f16v8", "k16v8"))
FUSED = (NATIVE16, REFERENCE_8, fused("f16v16"), fused("f16v8", values="fp8_e4m3"))
INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy")


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' reference in their place: quick, and all that stands around it is what a run has."""
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose bits do not depend on the rows beside them, as those of torch's and numpy's BLAS do on some processors.

    Of linear layers and of the interpreted kernels' tiles, whose rows the matrix unit of a GPU treats alike: so that
    the order of work alone is asked whether bits depend on it.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias=None: (x.double() @ weight.double().mT).to(x.dtype))

    def product(a: Any, b: Any, dtype: Any) -> Any:
        with np.errstate(all="ignore"):  # what a mask leaves out may be anything
            return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(interpreter, "np", SimpleNamespace(**vars(np) | {"matmul": product}))


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """By arm, the logits of every step behind the prompts."""
    kept: dict[str, list[torch.Tensor]] = {}
    forward = runner.forward

    def listening(state: Any, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        found = forward(state, ids, *arguments)
        if ids.shape[1] == 1:
            kept.setdefault(state.name, []).append(found)
        return found

    monkeypatch.setattr(runner, "forward", listening)
    return kept


def _alike(kept: tiny.Kept, logits: dict[str, list[torch.Tensor]], items: tuple[int, ...]) -> None:
    """Fused arms gave the answers of the others, by logits that differ in the order of sums alone; what 8 bit changes is larger."""
    found = answers(kept)
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}
    steps = {name: torch.cat(each) for name, each in logits.items()}
    for own, theirs in PAIRS:
        assert [found[own, number]["ids"] for number in items] == [found[theirs, number]["ids"] for number in items]
        assert len(steps[own]) == len(steps[theirs]) > 0
        assert float((steps[own] - steps[theirs]).abs().max() / steps[theirs].std()) < 0.02
    measured = kept.arm("f16v8").measured
    assert (measured["implementation"], measured["keys"], measured["values"]) == ("fused", "fp16", "fp8_e4m3")
    assert kept.arm("f16v8").backends[0].name == records.FUSED_BACKEND and kept.arm("f16v8").backings


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("name", SMALL)
def test_the_kernels_answer_as_the_stock_cache_and_in_8_bit_as_the_reference(tmp_path: Path, exact: None, logits: Any, name: str) -> None:
    """Under Triton's interpreter: prompts of unlike lengths in one batch, and no two tokens that tie for the best."""
    assert kernels.interpreting(), "Triton was loaded before TRITON_INTERPRET was set"
    frozen = spec(items=11, batch=2, checkpoint=SMALL[name], arms=FUSED, contrasts=(), shots=0)
    frozen = msgspec.structs.replace(frozen, task=msgspec.structs.replace(frozen.task, items=(7, 10), new_tokens=6))
    kept = ran(tmp_path, frozen)
    assert len({line["prompt_ids"] for line in answers(kept).values()}) == 2
    _alike(kept, logits, (7, 10))


@pytest.mark.parametrize("name", SMALL)
def test_fused_arms_answer_as_the_stock_cache_and_in_8_bit_as_the_reference(tmp_path: Path, oracle: None, logits: Any, name: str) -> None:
    _alike(ran(tmp_path, spec(items=12, batch=5, checkpoint=SMALL[name], arms=FUSED, contrasts=())), logits, tuple(range(12)))


def test_what_fused_arms_answer_is_what_the_ledger_reads_and_judges(tmp_path: Path, oracle: None) -> None:
    pairs = ((own, theirs, reading) for own, theirs in PAIRS for reading in records.ANSWERS)
    contrasts = tuple(records.Contrast(candidate=own, baseline=theirs, family=reading) for own, theirs, reading in pairs)
    frozen = spec(checkpoint=SMALL["llama"], arms=FUSED, contrasts=contrasts)
    kept = ran(tmp_path, frozen)
    result = factories.result(frozen, kept.files, arms=kept.fields["arms"])
    found = deriving.derive(frozen, result, kept.files, factories.harness())
    assert [decision.status for decision in found.decisions] == ["invalid"] * 4  # a seeded model knows nothing
    assert all(decision.reason.startswith(("task insensitive", "suspicious")) for decision in found.decisions)
    same = {(one.arm, one.against): one.value for one in found.measurements if one.name == "identical_answers"}
    assert {same[pair] for pair in PAIRS} == {5}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_fused_answer_is_that_of_the_prompt_alone_whatever_stands_beside_it(tmp_path: Path, oracle: None, exact: None, name: str) -> None:
    """Prompts of 80 and 82 tokens in chunks of 9: a last chunk of 8, and one of a single token."""
    same: dict[str, Any] = {"items": 12, "checkpoint": SMALL[name], "contrasts": (), "chunk": 9, "shots": 0}
    same["arms"] = (fused("f16v16", role="control"), FUSED[3])
    one, several = (answers(ran(tmp_path, spec(batch=batch, **same))) for batch in (1, 5))
    assert one == several


@pytest.mark.slow
@INTERPRETED
def test_the_kernels_give_a_sequence_the_same_bits_whatever_stands_beside_it(tmp_path: Path, exact: None, logits: Any) -> None:
    frozen = spec(items=1, checkpoint=SMALL["gemma3"], arms=(fused("f16v8", values="fp8_e4m3", role="control"),), contrasts=(), shots=0)
    found = []
    for items in ((9, 10), (9,), (10,)):
        task = msgspec.structs.replace(frozen.task, items=items, batch=2, new_tokens=4, chunk=27)
        ran(tmp_path, msgspec.structs.replace(frozen, task=task))
        found.append(torch.stack(logits.pop("f16v8")))
    assert torch.equal(found[0], torch.cat(found[1:], dim=1)) and len(found[0]) == 3


def test_each_prompt_reaches_a_fused_cache_in_chunks_of_its_own() -> None:
    asked = [runner.Asked(n, taskfiles.ITEMS[n], "", np.arange(1, length + 1, dtype="<i4")) for n, length in enumerate((9, 3, 4))]
    parts = list(runner.Batch(asked, "cpu").ragged(4, 2))
    assert [part.ids.tolist() for part in parts] == [
        [[1, 2, 3, 4], [0, 1, 2, 3], [1, 2, 3, 4]],
        [[5, 6, 7, 8], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[0, 9], [0, 0], [0, 0]],
    ]
    assert [part.ends.tolist() for part in parts] == [[False, True, True], [False, False, False], [True, False, False]]
    assert parts[-1].mask.tolist() == [[1] * 8 + [0, 1], [0, 1, 1, 1] + [0] * 6, [1] * 4 + [0] * 6]
    assert [part.positions[0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 8]]
    assert [part.positions[1].tolist() for part in parts[:1]] == [[0, 0, 1, 2]]


@pytest.mark.parametrize("look", [1, 5, 64])
def test_when_ends_are_looked_for_changes_no_answer(tmp_path: Path, oracle: None, monkeypatch: pytest.MonkeyPatch, look: int) -> None:
    frozen = spec(checkpoint=SMALL["llama"], arms=FUSED, contrasts=())
    expected = ran(tmp_path, frozen).files
    monkeypatch.setattr(runner, "LOOK", look)
    assert ran(tmp_path, frozen).files == expected


def test_logits_that_are_no_numbers_end_the_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runner.forward

    def poisoned(state: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found = forward(state, ids, mask, positions)
        return found * float("nan") if state.name == "k16v8" and ids.shape[1] == 1 else found

    monkeypatch.setattr(runner, "forward", poisoned)
    arm = ran(tmp_path, spec(batch=5)).arm("k16v8")
    width = max(len(gsm8k.GSM8K.prompt(taskfiles.ITEMS[number], taskfiles.SHOTS[:1])) for number in range(5)) + 1
    assert arm.outcome == "failed" and "not finite" in arm.reason and f"after {width + 1} tokens" in arm.reason


def test_fused_arms_go_on_where_they_stopped(tmp_path: Path, oracle: None) -> None:
    frozen = spec(checkpoint=SMALL["llama"], arms=FUSED, contrasts=())
    whole = ran(tmp_path, frozen)
    lines = whole.files["answers.jsonl"].splitlines(True)
    for left, items in ((0, 0), (12, 3), (20, 5)):
        kept = tiny.Kept()
        kept.items = items
        kept.files["answers.jsonl"] = b"".join(lines[:left])
        assert ran(tmp_path, frozen, kept).files == whole.files
        assert all(arm.outcome == "completed" and arm.backings for arm in kept.fields["arms"])


WITHOUT = [
    ({"head_dim": 16}, "head_dim: "),
    ({"attention_dropout": 0.0, "num_attention_heads": 4}, "device: "),
]


@pytest.mark.parametrize(("more", "code"), WITHOUT, ids=[code for _, code in WITHOUT])
def test_what_the_kernels_do_not_do_is_refused_and_the_others_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], code: str
) -> None:
    missing = SimpleNamespace(available=lambda device: "no kernels here")
    monkeypatch.setattr(geometry, "kernels", lambda: missing)
    checkpoint = records.Checkpoint(name="tiny", source="random:llama#7", license="none", config=SHARP | more, seed=7)
    kept = ran(tmp_path, spec(checkpoint=checkpoint, arms=FUSED, contrasts=()))
    for name in ("f16v16", "f16v8"):
        assert kept.arm(name).outcome == "refused" and kept.arm(name).reason.startswith(code)
    assert kept.arm("native").outcome == "completed" and len(answers(kept)) == 10


def test_a_fused_cache_that_does_not_fit_is_refused_before_anything_is_asked(
    tmp_path: Path, oracle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runners import paged

    monkeypatch.setattr(paged, "_free_bytes", lambda device: 1000)
    kept = ran(tmp_path, spec(checkpoint=SMALL["llama"], arms=FUSED, contrasts=()))
    assert kept.arm("f16v16").outcome == "refused" and kept.arm("f16v16").reason.startswith("budget: ")
    assert {arm for arm, _ in answers(kept)} == {"native", "k16v8"}


# ---------------------------------------------------------------- refusals


def test_a_tokenizer_without_a_chat_template_is_refused_where_one_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="asks through a chat template, and the tokenizer has none"):
        ran(tmp_path, spec(chat_template=True, bos=False))


@pytest.mark.parametrize("name", ["test.jsonl", "train.jsonl"])
@pytest.mark.parametrize("data", [None, b"", taskfiles.TEST.replace(b"jars", b"cups")])
def test_a_dataset_that_is_missing_or_another_is_refused_and_never_replaced(
    tmp_path: Path, name: str, data: bytes | None
) -> None:  # case 19
    place = freeze(tmp_path / "frozen", spec()) / "inputs" / name
    place.unlink()
    if data is not None:
        place.write_bytes(data)
    kept = tiny.Kept()
    with pytest.raises(ProvenanceError, match="nothing takes its place"):
        runner.run(spec(), tmp_path / "frozen" / "inputs", kept, kept)
    assert not kept.files


def test_a_prompt_is_never_cut_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Item 0 does not fit into the model's context"):
        ran(tmp_path, spec(checkpoint=tiny.llama(max_position_embeddings=64)))


def test_an_arm_that_fails_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runner.forward

    def faulty(state: Any, *arguments: Any) -> Any:
        if state.name == "k16v8":
            raise InputError("no more")
        return forward(state, *arguments)

    monkeypatch.setattr(runner, "forward", faulty)
    kept = ran(tmp_path, spec())
    assert {arm.name: arm.outcome for arm in kept.fields["arms"]} == dict.fromkeys(("native", "k16v16", "k16v16-repeat"), "completed") | {
        "k16v8": "failed"
    }
    assert len(answers(kept)) == 15


# ---------------------------------------------------------------- going on


def test_what_was_left_is_gone_on_with_and_gives_the_same_bytes(tmp_path: Path) -> None:
    whole = ran(tmp_path, spec())
    lines = whole.files["answers.jsonl"].splitlines(True)
    for left, items in ((0, 0), (1, 0), (11, 0), (12, 0), (12, 3), (13, 3), (19, 3), (20, 3), (20, 5)):  # 12 and 8 lines, 3 and 2 items
        kept = tiny.Kept()
        kept.items = items
        kept.files["answers.jsonl"] = b"".join(lines[:left]) + b'{"arm":"nat'
        assert ran(tmp_path, spec(), kept).files == whole.files
        assert all(arm.outcome == "completed" and arm.backings for arm in kept.fields["arms"])


def test_what_another_run_left_is_refused(tmp_path: Path) -> None:
    kept = ran(tmp_path, spec(items=5))
    kept.items = 3
    other = spec(items=5, shots=2)
    with pytest.raises(InputError, match="Line 1 of the answers is not one that this run would have written"):
        ran(tmp_path, other, kept)


def _asked(*numbers: int) -> list[runner.Asked]:
    return [runner.Asked(n, taskfiles.ITEMS[n], f"q{n}", np.asarray([n, 1], "<i4")) for n in numbers]


def _lines(arm: str, *numbers: int) -> bytes:
    return b"".join(runner.line(arm, each, runner.Given([1], "x", "end")) for each in _asked(*numbers))


def test_of_an_arm_that_ended_the_lines_that_it_left_are_kept() -> None:
    batches, arms = [_asked(0, 1), _asked(2, 3), _asked(4, 5)], ["a", "b", "c"]
    first = _lines("a", 0, 1) + _lines("b", 0, 1) + _lines("c", 0, 1)
    second = _lines("a", 2, 3) + _lines("c", 2, 3)
    third = _lines("a", 4, 5) + _lines("c", 4, 5)
    assert runner.whole(first + second + third, batches, arms, {"b"}, 6) == (3, first + second + third)
    assert runner.whole(first + second + third[:9], batches, arms, {"b"}, 4) == (2, first + second)
    assert runner.whole(first + second, batches, arms, (), 2) == (1, first)  # b failed in a batch that was never listed
    assert runner.whole(second + third, batches[1:], arms, {"b"}, 4) == (2, second + third)
    assert runner.whole(_lines("a", 0, 1) + _lines("b", 0, 1), batches, arms, {"b", "c"}, 2)[0] == 1
    for data, ended in ((first + second, ()), (first, {"b"}), (first + second[:-1], {"b"}), (second + first, {"b"})):
        with pytest.raises(InputError, match="is not one that this run would have written"):
            runner.whole(data, batches, arms, ended, 4)


def test_an_arm_that_had_failed_stays_failed_and_is_not_asked_again(tmp_path: Path) -> None:
    failed = records.ArmResult(name="k16v8", outcome="failed", reason="OutOfMemoryError: no more", seconds=3.0)
    lines = ran(tmp_path, spec()).files["answers.jsonl"].splitlines(True)
    kept = tiny.Kept()
    kept.items, kept.stopped = 3, {"k16v8": failed}
    kept.files["answers.jsonl"] = b"".join(lines[:9])
    ran(tmp_path, spec(), kept)
    assert kept.files["answers.jsonl"] == b"".join(lines[:9] + lines[12:18]) and kept.arm("k16v8") == failed
    assert [arm.outcome for arm in kept.fields["arms"]] == ["completed"] * 3 + ["failed"]


STOPPED = """
import json, os, signal, sys
from pathlib import Path
from runners import __main__ as command
from runners import tasks
frozen, base, moments = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
sync, answer = os.fsync, tasks.Batch.answer
def run(out, name, at=0, how="kill", resume=False):
    # in a process of its own, which ends at its at-th durable write; an arm runs out of memory from item 2 on
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count, asked = 0, []
    def stopping(handle):
        nonlocal count
        count += 1
        if count == at and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == at:
            raise KeyboardInterrupt("SIGINT")
        sync(handle)
    def failing(batch, state, *arguments):
        if state.name == "k16v8":
            asked.append(batch.asked[0].number)
            if asked[-1] >= 2:
                raise MemoryError("no more")
        answer(batch, state, *arguments)
    os.fsync, tasks.Batch.answer = stopping, failing
    code = command.execute(frozen, out, command.Progress(quiet=True), resume)
    (base / f"{name}.json").write_text(json.dumps({"code": code, "writes": count, "asked": asked}))
    os._exit(code)
run(base / "whole", "whole")
for at, how in moments:
    out = base / f"{how}{at}"
    run(out, f"{how}{at}", at, how)
    (base / f"{how}{at}.before.json").write_bytes((out / "result.json").read_bytes())
    assert run(out, f"{how}{at}.again", resume=True) == 0
"""


@pytest.mark.slow
def test_a_run_that_is_stopped_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """One arm fails on the way. Moments are durable writes: of a batch the lines, then ``result.json`` before and behind its renaming."""
    frozen = freeze(tmp_path / "frozen", spec(items=6, batch=2))
    moments = [(at, "kill") for at in (9, 15, 18, 19, 20, 24)] + [(at, "stop") for at in (15, 18, 20)]
    words = [sys.executable, "-c", STOPPED, str(frozen), str(tmp_path), json.dumps(moments)]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, said = result_of(tmp_path / "whole"), json.loads((tmp_path / "whole.json").read_text())
    assert said["asked"] == [0, 2] and [arm.outcome for arm in whole.arms] == ["completed"] * 3 + ["failed"]
    reached = set()
    for at, how in moments:
        name = f"{how}{at}"
        before = records.decode(records.Result, (tmp_path / f"{name}.before.json").read_bytes(), name)
        again = json.loads((tmp_path / f"{name}.again.json").read_text())
        found = result_of(tmp_path / name)
        assert again["code"] == 0 and found.outcome == "completed" and before.outcome == ("running" if how == "kill" else "interrupted")
        assert (tmp_path / name / "answers.jsonl").read_bytes() == (tmp_path / "whole" / "answers.jsonl").read_bytes()
        assert [(arm.name, arm.outcome, arm.reason) for arm in found.arms] == [(arm.name, arm.outcome, arm.reason) for arm in whole.arms]
        assert found.documents == whole.documents and len(found.documents) == 6
        first, second = found.segments
        stopped = before.segments[-1].last
        assert (first.first, first.last, second.first, second.last) == (0, stopped, stopped, 6)
        failed = any(command.has_ended(arm) for arm in before.arms)
        assert failed == (stopped >= 4) and again["asked"] == ([] if failed else [2] if stopped else [0, 2])
        reached.add(stopped)
        (item,) = [item for item in before.evidence if item.name == "answers.jsonl"] or [None]
        assert item is not None or not stopped
    assert reached == {0, 2, 4, 6}


def _answered(process: Any, out: Path, items: int) -> None:
    while process.poll() is None:
        if (out / "result.json").exists() and result_of(out).segments[-1].last >= items:
            return
    pytest.fail("the runner ended before it could be stopped: " + process.communicate()[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_goes_on_as_a_segment(tmp_path: Path, number: signal.Signals) -> None:
    frozen, out = freeze(tmp_path / "frozen", spec(items=120)), tmp_path / "out"
    process = start(frozen, out)
    _answered(process, out, 6)
    process.send_signal(number)
    assert finish(process)[0] == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    stopped = result_of(out).segments[-1].last
    assert 6 <= stopped < 120
    code, errors = finish(start(frozen, out, "--resume"))
    assert code == 0 and "going on behind" in errors, errors
    result = result_of(out)
    assert result.outcome == "completed" and (result.segments[0].first, result.segments[0].last) == (0, stopped)
    assert result.segments[1].first == stopped and result.segments[-1].last == 120
    listed = {item.name: item for item in result.evidence}
    assert set(listed) == {"answers.jsonl", "task/test.jsonl", "task/shots.jsonl"}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {"result.json", *listed}
    assert finish(start(frozen, tmp_path / "again"))[0] == 0
    assert (tmp_path / "again" / "answers.jsonl").read_bytes() == (out / "answers.jsonl").read_bytes()
    code, errors = finish(start(frozen, out, "--resume"))
    assert code == 2 and "is complete" in errors


def _begun(tmp_path: Path, **changes: Any) -> tuple[Path, Path]:
    """A frozen folder, and what a killed run left of it."""
    from runners import host

    frozen, out = freeze(tmp_path / "frozen", spec()), tmp_path / "out"
    out.mkdir()
    result = records.Result(
        format="kv-ledger/result/1",
        spec=digest.sha256((frozen / "spec.json").read_bytes()),
        outcome="running",
        started="2026-01-02T03:04:05Z",
        host=host.measure(),
        sources=host.sources(),
        segments=(records.Segment(started="2026-01-02T03:04:05Z", stopped="2026-01-02T03:04:05Z", first=0, last=0),),
    )
    (out / "result.json").write_bytes(records.encode(msgspec.structs.replace(result, **changes)))
    return frozen, out


GONE_ON: list[tuple[dict[str, Any], str]] = [
    ({"spec": "0" * 64}, "is of another spec"),
    ({"outcome": "completed"}, "is complete"),
    ({"arms": tuple(records.ArmResult(name=arm.name, outcome="failed", reason="no more") for arm in ARMS)}, "No arm of the run"),
]


@pytest.mark.parametrize(("changes", "words"), GONE_ON, ids=[words for _, words in GONE_ON])
def test_a_run_goes_on_only_where_it_is_the_same(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    frozen, out = _begun(tmp_path, **changes)
    with pytest.raises(InputError, match=words):
        command.execute(frozen, out, command.Progress(quiet=True), resume=True)


def test_a_run_goes_on_only_with_the_same_code_on_the_same_host(tmp_path: Path) -> None:
    from runners import host

    found = result_of(_begun(tmp_path)[1])
    command._same(found, found.host, dict(found.sources))
    with pytest.raises(InputError, match="threads: 9, now"):
        command._same(msgspec.structs.replace(found, host=msgspec.structs.replace(found.host, threads=9)), found.host, found.sources)
    with pytest.raises(InputError, match="source runners/tasks"):
        command._same(found, found.host, found.sources | {"runners/tasks.py": "0" * 64})
    assert host.sources(["runners/words.py", "runners/../ledger/tasks.py", "other/x.py"]).keys() - host.sources().keys() <= {
        "runners/words.py"
    }


def test_a_scope_that_cannot_go_on_says_so(tmp_path: Path) -> None:
    calibration = msgspec.structs.replace(
        tiny.spec(greedy=None, contrasts=(), families=()),
        format="kv-ledger/spec/3",
        scope="calibration",
        arms=(tiny.arm("native", "control", implementation="native"),),
        capture=records.Capture(new_tokens=6, budget_bytes=1 << 20),
    )
    frozen = tiny.freeze(tmp_path / "frozen", calibration)
    with pytest.raises(InputError, match="cannot go on where it stopped"):
        command.execute(frozen, tmp_path / "out", command.Progress(quiet=True), resume=True)


def test_a_folder_that_fails_on_resuming_keeps_its_answers(tmp_path: Path) -> None:
    listed = records.Evidence(name="answers.jsonl", sha256=digest.sha256(b"one\n"), size=4, media_type="application/x-ndjson")
    _, out = _begun(tmp_path, evidence=(listed,))
    (out / "answers.jsonl").write_bytes(b"one\ntwo\nthr")
    folder = command.Folder(out, result_of(out))
    folder.update()
    assert result_of(out).evidence == (listed,)
    folder.finish(outcome="failed", reason="the disk is full")
    assert (out / "answers.jsonl").read_bytes() == b"one\ntwo\n" == folder.grown("answers.jsonl")
    assert [(item.name, item.size) for item in result_of(out).evidence] == [("answers.jsonl", 8)]


# ---------------------------------------------------------------- tokenizers


def _tokenizer(**more: Any) -> Any:
    """A tokenizer of single characters with a BOS, made here."""
    import tokenizers
    import transformers

    letters = {chr(number): number for number in range(32, 127)} | {"<s>": 0, "\n": 1, "<turn>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", additional_special_tokens=["<turn>"])
    for name, value in more.items():
        setattr(tokenizer, name, value)
    return tokenizer


CONFIG: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=128, bos_token_id=0))


def test_a_prompt_stands_behind_bos_and_special_tokens_in_it_are_plain_text() -> None:
    words = runner.Words(taskfiles.task(bos=True), _tokenizer(), CONFIG)
    ids = words.ids("Question: <turn>\nAnswer:")
    assert ids.dtype == np.dtype("<i4") and ids[0] == 0 and 2 not in ids
    assert words.text(ids.tolist()) == "Question: <turn>\nAnswer:"
    assert len(words.facts()["sha256"]) == 64


def test_a_chat_template_wraps_the_whole_prompt_as_one_turn() -> None:
    turn = "{% for message in messages %}<turn>{{ message.role }}:{{ message.content }}{% endfor %}"
    template = turn + "{% if add_generation_prompt %}<turn>{% endif %}"
    words = runner.Words(taskfiles.task(chat_template=True), _tokenizer(chat_template=template), CONFIG)
    ids = words.ids("Question: how many?\nAnswer:").tolist()
    assert (ids[0], ids[-1], ids.count(2)) == (2, 2, 2) and words.text(ids) == "user:Question: how many?\nAnswer:"
    assert words.facts()["chat_template_sha256"] == digest.sha256(template.encode())


def test_a_chat_of_several_turns_has_one_of_each_side_for_every_shot() -> None:
    template = "{% for message in messages %}<turn>{{ message.role }}:{{ message.content }}{% endfor %}<turn>"
    words = runner.Words(taskfiles.task(chat_template="multiturn"), _tokenizer(chat_template=template), CONFIG)
    asked = runner.ask(words.task, taskfiles.ITEMS, taskfiles.SHOTS[:1], words, None)[3]
    shot, item = taskfiles.SHOTS[0], taskfiles.ITEMS[3]
    turns = f"user:Question: {shot.question}\nAnswer:assistant:{shot.answer}user:Question: {item.question}\nAnswer:"
    assert words.text(asked.ids.tolist()) == turns and asked.ids.tolist().count(2) == 4
    assert asked.text == gsm8k.GSM8K.prompt(item, (shot,)) and words.facts()["chat_template"] == "multiturn"


def test_a_task_asks_by_worked_examples_of_its_own(tmp_path: Path) -> None:
    frozen = spec(items=2, checkpoint=tiny.llama(max_position_embeddings=4096), arms=ARMS[:1], contrasts=(), **taskfiles.COT, shots=8)
    kept = ran(tmp_path, frozen)
    assert set(kept.files) == {"answers.jsonl", "task/test.jsonl"}
    prompt = gsm8k.GSM8K_COT.prompt(taskfiles.ITEMS[1], gsm8k.GSM8K_COT.shots or ())
    assert answers(kept)["native", 1]["prompt"] == digest.sha256(prompt.encode())
    assert prompt.count("The answer is") == 8 and len(tasks.read(frozen, kept.files).of["native"]) == 2


MIXED = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 512, "bos_token_id": 1, "initializer_range": 0.1,
}  # fmt: skip


def test_padding_does_not_reach_recurrent_layers_as_a_batch_has_prompts_of_one_length(tmp_path: Path, oracle: None) -> None:
    """Of twelve prompts two are longer; batches of 4, 4, 2 and 2."""
    mixed = records.Checkpoint(name="mixed", source="random:qwen3_5_text#7", license="CC0-1.0", config=MIXED, seed=7)
    for arms in ((ARMS[0], tiny.arm("own", "candidate")), (NATIVE16, FUSED[2])):
        same: dict[str, Any] = {"items": 12, "checkpoint": mixed, "arms": arms, "contrasts": ()}
        kept = ran(tmp_path, spec(batch=4, **same))
        assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"} and kept.fields["last"] == 12
        several, one = answers(kept), answers(ran(tmp_path, spec(batch=1, **same)))
        assert several == one and len({line["ids"] for line in one.values()}) > 1
        assert all(one[arms[0].name, number]["ids"] == one[arms[1].name, number]["ids"] for number in range(12))


def test_prompts_of_one_length_are_asked_together_in_their_order() -> None:
    asked = [runner.Asked(n, taskfiles.ITEMS[n], "", np.zeros(length, "<i4")) for n, length in enumerate((5, 7, 5, 5, 7, 6))]
    alike, any_ = ([[each.number for each in batch] for batch in runner.batches_of(asked, 2, alike)] for alike in (True, False))
    assert (alike, any_) == ([[0, 2], [3], [1, 4], [5]], [[0, 1], [2, 3], [4, 5]])


def test_an_arm_of_fixed_scales_answers_by_those_of_its_calibration(tmp_path: Path) -> None:
    """Fixed scales of 1 are unit scales, so that both arms give the same answers."""
    sizes = {f"{side}.amax/{layer}": np.full(2, 448, np.float32) for side in ("keys", "values") for layer in range(2)}
    data = save(sizes)
    own = {"scales": "fixed", "granularity": "head", "scale_source": digest.sha256(data)}
    frozen = spec(arms=(*ARMS[:1], ARMS[3], tiny.arm("fixed", "candidate", "bf16", "fp8_e4m3", **own)), contrasts=())
    kept = _calibrated(tmp_path, frozen, data)
    assert kept.arm("fixed").outcome == "completed" and kept.arm("fixed").measured["scales"] == "fixed"
    found = answers(kept)
    assert all(found["fixed", number]["ids"] == found["k16v8", number]["ids"] for number in range(5))


def _calibrated(tmp_path: Path, frozen: records.Spec, data: bytes) -> tiny.Kept:
    (freeze(tmp_path / digest.digest_of(records.plain(frozen)), frozen) / "inputs" / "scales.safetensors").write_bytes(data)
    return ran(tmp_path, frozen)


def test_a_fused_arm_of_fixed_scales_answers_by_those_of_its_calibration_or_is_refused(tmp_path: Path, oracle: None, logits: Any) -> None:
    sizes = {f"{side}.amax/{layer}": np.array([3, 5], np.float32) for side in ("keys", "values") for layer in range(2)}
    for names, code in (({"checkpoint": SMALL["llama"].identity}, ""), ({"checkpoint": "0" * 64}, "scale_policy: ")):
        data = save(sizes, names)
        own = {"scales": "fixed", "granularity": "head", "scale_source": digest.sha256(data)}
        reference = tiny.arm("k16v8", "control", "fp16", "fp8_e4m3", **HALF | own)
        arms = (NATIVE16, reference, FUSED[2], fused("f16v8", values="fp8_e4m3", **own))
        kept = _calibrated(tmp_path, spec(checkpoint=SMALL["llama"], arms=arms, contrasts=()), data)
        if code:
            assert all(kept.arm(name).outcome == "refused" and kept.arm(name).reason.startswith(code) for name in ("k16v8", "f16v8"))
        else:
            _alike(kept, logits, tuple(range(5)))
            assert kept.arm("f16v8").measured["scales"] == "fixed" and kept.arm("f16v8").measured["granularity"] == "head"
