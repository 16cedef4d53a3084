"""Captures behind documents: forced lengths, suppressed ids, budgets, and the sizes of states."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from ledger import captures as judging
from ledger import records
from ledger.errors import InputError
from ledger.records import consistency
from runners import caches, captures, checkpoints, geometry, losses, scales

from . import tiny
from .test_scales import LAYOUTS

NATIVE = tiny.arm("native", "control", implementation="native", backend="eager")
K16V8 = tiny.arm("k16v8", "candidate", "bf16", "fp8_e4m3", backend="eager")
HARNESS = records.Harness(matched="commit", commit="a" * 40, state="clean")


def spec(*arms: records.Arm, scope: str = "capability", capture: dict[str, Any] | None = None, **changes: Any) -> records.Spec:
    base = tiny.spec(greedy=None, **{"tokens": 39, **changes}, contrasts=(), families=())
    plan = records.Capture(**{"new_tokens": 6, "budget_bytes": 1 << 20, **(capture or {})})
    found = msgspec.structs.replace(base, format="kv-ledger/spec/3", scope=scope, arms=arms or (NATIVE, K16V8), capture=plan)
    consistency.check(found)
    return found


def run(tmp_path: Path, frozen: records.Spec) -> tiny.Kept:
    folder = tiny.Kept()
    inputs = tmp_path / f"frozen-{len(list(tmp_path.iterdir()))}"
    captures.run(frozen, tiny.freeze(inputs, frozen) / "inputs", folder, folder)
    return folder


def lines(folder: tiny.Kept) -> dict[tuple[str, int], dict[str, Any]]:
    found = [json.loads(line) for line in folder.files["captures.jsonl"].splitlines()]
    return {(line["arm"], line["document"]): line for line in found}


def outcome(folder: tiny.Kept, name: str) -> records.ArmResult:
    return next(arm for arm in folder.fields["arms"] if arm.name == name)


def decisions(frozen: records.Spec, folder: tiny.Kept, **changes: Any) -> dict[str, records.Decision]:
    from tests import factories

    result = factories.result(frozen, folder.files, documents=folder.fields["documents"], arms=folder.fields["arms"], **changes)
    found = judging.read(frozen, folder.files)
    return {decision.candidate: decision for decision in judging.decide(frozen, result, found, HARNESS)}


def patched(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Every last logits of a forward pass changed, by the number of the pass (of one token; prompts are 0)."""
    plain, count = losses.Running.forward, 0

    def forward(self: losses.Running, ids: torch.Tensor, last: bool = False) -> torch.Tensor:
        nonlocal count
        count = count + 1 if len(ids) == 1 else 0
        return change(count, plain(self, ids, last))

    monkeypatch.setattr(losses.Running, "forward", forward)


def test_every_document_is_continued_and_passes(tmp_path: Path) -> None:
    frozen = spec(capture={"suppressed": (3, 200)})
    folder = run(tmp_path, frozen)
    assert set(lines(folder)) == {(arm, document) for arm in ("native", "k16v8") for document in range(2)}
    for line in lines(folder).values():
        assert len(line["ids"]) == 6 and line["prompt_tokens"] == 40 and line["vocabulary"] == 256
        assert (line["nan"], line["infinite"], line["broken"], line["masked"]) == ([0] * 6, [0] * 6, [0] * 6, [2] * 6)
        assert line["masked_ids"] == [{"from": 0, "count": 2, "ids": [3, 200]}]
    assert b"nfinity" not in folder.files["captures.jsonl"] and b"NaN" not in folder.files["captures.jsonl"]
    assert {name: decision.status for name, decision in decisions(frozen, folder).items()} == {"native": "passes", "k16v8": "passes"}
    assert "nothing more" in decisions(frozen, folder)["native"].reason
    native, cache = outcome(folder, "native"), 2 * 2 * 2 * 16 * 4
    assert sum(backing.bytes for backing in native.backings) == cache * (40 + 5)  # the last token is chosen, not written


def test_a_watched_cache_is_gone_with_its_document() -> None:
    model, _ = checkpoints.load(spec().checkpoint, "fp32")
    cache = caches.build(model.config, K16V8)
    captures.Watch(4).attend(cache)
    cache.update(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16), 0)
    held = [weakref.ref(layer) for layer in cache.layers]
    gc.disable()
    try:
        del cache
        assert [layer() for layer in held] == [None] * len(held)
    finally:
        gc.enable()


def test_what_was_left_is_gone_on_with_and_gives_the_same_bytes(tmp_path: Path) -> None:
    whole = run(tmp_path, spec())
    said, inputs = whole.files["captures.jsonl"].splitlines(True), tiny.freeze(tmp_path / "again", spec()) / "inputs"
    for left, done in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (4, 2)):
        kept = tiny.Kept()
        kept.items = done
        kept.files["captures.jsonl"] = b"".join(said[:left]) + b'{"arm":"nat'
        captures.run(spec(), inputs, kept, kept)
        assert kept.files == whole.files
        assert kept.fields["documents"] == whole.fields["documents"]
        assert [tiny.sizes(arm) for arm in kept.fields["arms"]] == [tiny.sizes(arm) for arm in whole.fields["arms"]]


def test_the_ids_are_those_of_transformers_own_greedy_continuation(tmp_path: Path) -> None:
    frozen = spec(NATIVE)
    model, _ = checkpoints.load(frozen.checkpoint, "fp32")
    folder = run(tmp_path, frozen)
    ids = load(folder.files["inputs.safetensors"])["0000"].astype(np.int64)
    model.generation_config.eos_token_id = None
    whole = model.generate(torch.from_numpy(ids)[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert lines(folder)["native", 0]["ids"] == whole[0, len(ids) :].tolist()


def test_the_length_is_forced_past_the_end_token_which_is_not_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = tiny.CONFIG.get("eos_token_id", 2)

    def change(number: int, logits: torch.Tensor) -> torch.Tensor:
        logits[..., end] = 1e4
        return logits

    patched(monkeypatch, change)
    folder = run(tmp_path, spec(NATIVE))
    assert lines(folder)["native", 0]["ids"] == [end] * 6 and lines(folder)["native", 0]["masked"] == [0] * 6


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "finite_logits: document 0, step 4: 1 logits are NaN"),
        (float("inf"), "finite_logits: document 0, step 4: 1 logits are infinite"),
        (float("-inf"), "suppressed_exactly: document 0, step 4: 2 of -inf, 1 declared; not declared [17]"),
    ],
)
def test_one_number_of_one_step_fails_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str) -> None:
    def change(number: int, logits: torch.Tensor) -> torch.Tensor:
        if number == 4:
            logits[..., 17] = value
        return logits

    patched(monkeypatch, change)
    frozen = spec(NATIVE, capture={"suppressed": (5,)})
    folder = run(tmp_path, frozen)
    found = decisions(frozen, folder)["native"]
    assert found.status == "fails" and words in found.reason
    assert len(lines(folder)["native", 0]["ids"]) == 6  # all steps are taken, whatever the fourth one held


def test_suppressed_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)outside the vocabulary.*below 256.*256"):
        run(tmp_path, spec(NATIVE, capture={"suppressed": (5, 256)}))


def test_the_ids_of_the_spec_must_be_those_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = spec(NATIVE, capture={"suppressed": (5,)})
    model, _ = checkpoints.load(frozen.checkpoint, "fp32")
    trained = msgspec.structs.replace(frozen, checkpoint=records.Checkpoint(name="trained", source="file:x", license="none"))
    with pytest.raises(InputError, match="suppresses other ids"):
        captures.suppressed(trained, model)
    model.generation_config.suppress_tokens = [5]
    assert captures.suppressed(trained, model) == [5]


def test_a_budget_too_small_for_a_document_is_refused_with_its_reason(tmp_path: Path) -> None:
    least = 2 * 2 * 2 * 16 * 4 * 45
    frozen = spec(capture={"budget_bytes": least - 1})
    folder = run(tmp_path, frozen)
    native = outcome(folder, "native")
    assert native.outcome == "refused" and native.reason.startswith("budget: ") and str(least) in native.reason
    assert outcome(folder, "k16v8").outcome == "completed"
    found = decisions(frozen, folder)
    assert (found["native"].status, found["k16v8"].status) == ("unsupported", "passes")
    assert (
        decisions(spec(capture={"budget_bytes": least}), run(tmp_path, spec(capture={"budget_bytes": least})))["native"].status == "passes"
    )


def test_where_every_arm_is_refused_the_run_still_says_why(tmp_path: Path) -> None:
    frozen = spec(NATIVE, capture={"budget_bytes": 100})
    folder = run(tmp_path, frozen)
    found = decisions(frozen, folder)["native"]
    assert found.status == "unsupported" and "budget: The longest document does not fit" in found.reason
    assert folder.files["captures.jsonl"] == b"" and len(folder.fields["documents"]) == 2


def test_a_cache_that_grows_beyond_its_budget_ends_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "least_bytes", lambda *arguments: 0)
    folder = run(tmp_path, spec(NATIVE, capture={"budget_bytes": 2 * 2 * 2 * 16 * 4 * 43}))
    native = outcome(folder, "native")
    assert native.outcome == "refused" and native.reason.startswith("budget: The cache grew beyond its budget")
    assert len(lines(folder)["native", 0]["ids"]) == 4
    frozen = spec(NATIVE, capture={"budget_bytes": 2 * 2 * 2 * 16 * 4 * 43})
    assert decisions(frozen, folder)["native"].status == "unsupported"


def test_out_of_memory_in_the_middle_is_a_failure_with_what_was_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0

    def change(number: int, logits: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += number == 3
        if passes == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits

    patched(monkeypatch, change)
    frozen = spec(NATIVE)
    folder = run(tmp_path, frozen)
    assert outcome(folder, "native").outcome == "failed" and "out of memory" in outcome(folder, "native").reason
    assert [len(line["ids"]) for line in lines(folder).values()] == [6, 3]
    found = decisions(frozen, folder)["native"]
    assert found.status == "invalid" and "out of memory" in found.reason
    result: Any = judging.read(frozen, folder.files)
    assert [(one.name, one.value) for one in judging.measure(frozen, _result(frozen, folder), result)] == [("captures", 1), ("steps", 9)]


def _result(frozen: records.Spec, folder: tiny.Kept) -> records.Result:
    from tests import factories

    return factories.result(frozen, folder.files, documents=folder.fields["documents"], arms=folder.fields["arms"])


def test_documents_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="beyond the model's positions"):
        run(tmp_path, spec(NATIVE, tokens=508))


def test_fused_arms_capture_through_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    fused = tiny.arm("fused", "candidate", "bf16", "fp8_e4m3", implementation="fused", compute="bf16", backend="kv_fused")
    shape = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    frozen = spec(NATIVE, fused, checkpoint=tiny.llama(**shape), capture={"budget_bytes": 1 << 22})
    folder = run(tmp_path, frozen)
    found = decisions(frozen, folder)
    assert {name: (one.status, one.reason[:60]) for name, one in found.items() if one.status != "passes"} == {}


# ---------------------------------------------------------------- calibration


def test_the_sizes_are_those_of_all_states_that_reach_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_PENDING", {"cpu": 300})  # so that merges happen on the way
    frozen = spec(NATIVE, scope="calibration")
    seen: dict[tuple[int, int], list[torch.Tensor]] = {}
    plain = captures.Sizes.add

    def add(self: captures.Sizes, states: torch.Tensor) -> None:
        seen.setdefault(id(self), []).append(states)
        plain(self, states)

    monkeypatch.setattr(captures.Sizes, "add", add)
    folder = run(tmp_path, frozen)
    sizes = load(folder.files["calibration.safetensors"])
    assert set(sizes) == {f"{side}.{size}/{layer}" for side in judging.SIDES for size in judging.SIZES for layer in range(2)}
    each = iter(torch.cat([states.transpose(0, 1).flatten(1) for states in held], dim=1).abs().numpy() for held in seen.values())
    for layer in range(2):
        for side in judging.SIDES:
            values = next(each)
            assert values.shape == (2, 2 * 45 * 16)
            np.testing.assert_array_equal(sizes[f"{side}.amax/{layer}"], values.max(axis=1))
            np.testing.assert_array_equal(sizes[f"{side}.p999/{layer}"], np.quantile(values, 0.999, axis=1, method="higher"))
            np.testing.assert_array_equal(sizes[f"{side}.p9999/{layer}"], np.quantile(values, 0.9999, axis=1, method="higher"))
    assert decisions(frozen, folder)["native"].status == "measured"


@pytest.mark.parametrize("values", [1, 2, 999, 1000, 1001, 1002, 20_000])
def test_the_quantile_is_numpys_higher_one_at_every_count(values: int) -> None:
    numbers = torch.from_numpy(np.random.default_rng(values).permutation(values).astype(np.float32))
    sizes = captures.Sizes(values)
    for part in numbers.split(300):
        sizes.add(part[None, None, :, None])
    found = sizes.found()
    assert found["amax"] == values - 1
    for name, share in (("p999", 0.999), ("p9999", 0.9999)):
        assert found[name] == np.quantile(numbers.numpy(), share, method="higher")


def test_a_nan_among_the_states_is_kept_and_makes_the_calibration_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = captures.Sizes.add

    def add(self: captures.Sizes, states: torch.Tensor) -> None:
        plain(self, states.clone().index_fill_(1, torch.tensor([1]), float("nan")))

    monkeypatch.setattr(captures.Sizes, "add", add)
    frozen = spec(NATIVE, scope="calibration")
    folder = run(tmp_path, frozen)
    found = decisions(frozen, folder)["native"]
    assert found.status == "invalid" and "keys.amax/0 of head 1 is nan" in found.reason


def test_a_sliding_layer_is_seen_whole_and_not_by_its_window(tmp_path: Path) -> None:
    config = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    gemma = records.Checkpoint(
        name="tiny gemma", source="random:gemma3_text#7", license="CC0-1.0", config=tiny.CONFIG | config | {"bos_token_id": 2}, seed=7
    )
    frozen = spec(NATIVE, scope="calibration", checkpoint=gemma)
    folder = run(tmp_path, frozen)
    assert decisions(frozen, folder)["native"].status == "measured"
    figures = {one.name: one.value for one in judging.measure(frozen, _result(frozen, folder), judging.read(frozen, folder.files))}
    assert figures["captures"] == 2 and figures["keys_saturating_heads"] == 0 and figures["keys_amax"] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_calibrated_in_the_layers_that_keep_keys_and_values(tmp_path: Path, name: str) -> None:
    config = {**tiny.SMALL, **tiny.MODELS[name][1], "max_position_embeddings": 512}
    checkpoint = records.Checkpoint(name="tiny", source=f"random:{LAYOUTS[name]}#7", license="CC0-1.0", config=config, seed=7)
    frozen = spec(NATIVE, scope="calibration", checkpoint=checkpoint)
    folder = run(tmp_path, frozen)
    found = decisions(frozen, folder)["native"]
    assert (found.status, outcome(folder, "native").reason) == ("measured", ""), found.reason
    own = {layer.layer: layer.kv_heads for layer in geometry.declared(tiny.config(name)) if layer.kind != "recurrent" and layer.kv_heads}
    sizes = load(folder.files["calibration.safetensors"])
    assert {int(title.partition("/")[2]): len(values) for title, values in sizes.items()} == own
    # and what was calibrated on serves as fixed scales
    fixed = scales.from_calibration(folder.files["calibration.safetensors"], "head")
    asked = tiny.arm("fixed", "candidate", "bf16", "fp8_e4m3", scales="fixed", granularity="head", scale_source="0" * 64)
    assert set(fixed.of(asked, geometry.declared(tiny.config(name)), checkpoint.identity)) == set(own)
