from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from ledger import digest, measures, records
from ledger.errors import InputError, ProvenanceError
from runners import geometry, losses

from . import tiny


def run(folder: Path, frozen: records.Spec) -> tuple[tiny.Kept, list[dict[str, np.ndarray]]]:
    kept = tiny.Kept()
    losses.run(frozen, tiny.freeze(folder, frozen) / "inputs", kept, kept)
    return kept, [load(data) for name, data in sorted(kept.files.items()) if name.startswith("samples/")]


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny.Kept, list[dict[str, np.ndarray]]]:
    return run(tmp_path_factory.mktemp("standard") / "frozen", tiny.spec())


def test_every_arm_completes_and_every_series_has_one_sample_a_predicted_token(standard):
    kept, documents = standard
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}
    assert len(documents) == 2
    for document in documents:
        assert set(document) == {
            *(f"{arm.name}.{kind}" for arm in tiny.ARMS for kind in ("loss", "top1")),
            *(f"{name}.kl.k16v16" for name in ("k16v16-repeat", "k16v8", "k8v16", "k8v8")),
            *("own-fp32.kl.native", "k16v16.kl.native", "own-fp32.gap.native"),
        }
        for name, values in document.items():
            assert values.shape == (40,) and np.isfinite(values).all()
            assert values.dtype == (np.int32 if name.endswith("top1") else np.float32)


def test_our_own_cache_at_the_compute_format_is_the_stock_cache_bit_for_bit(standard):
    for document in standard[1]:
        assert not document["own-fp32.gap.native"].any()
        assert not document["own-fp32.kl.native"].any()
        assert (document["own-fp32.loss"] == document["native.loss"]).all()


def test_the_formats_that_differ_give_samples_that_differ(standard):
    document = standard[1][0]
    series = [document[f"{name}.loss"].tobytes() for name in ("native", "k16v16", "k16v8", "k8v16", "k8v8")]
    assert len(set(series)) == 5
    assert document["k8v8.kl.k16v16"].mean() > document["k16v16-repeat.kl.k16v16"].mean()


def test_losses_are_those_of_one_pass_over_the_whole_document(standard):
    kept, documents = standard
    model, _ = losses.checkpoints.load(tiny.llama(), "fp32")
    ids = torch.from_numpy(load(kept.files["inputs.safetensors"])["0001"].astype(np.int64))
    with torch.inference_mode():
        expected = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    np.testing.assert_allclose(documents[1]["native.loss"], expected.numpy(), atol=2e-6)


def test_the_facts_of_an_arm_are_measured_on_its_cache(standard):
    arm = standard[0].arm("k16v8")
    assert (arm.measured["keys"], arm.measured["values"], arm.measured["scales"]) == ("bf16", "fp8_e4m3", "unit")
    assert arm.effective["compute"] == arm.measured["compute"] == "fp32"
    assert {backing.tokens for backing in arm.backings} == {41}
    assert sum(backing.bytes for backing in arm.backings) == 41 * 2 * 2 * 16 * (2 + 1)
    assert arm.geometry is not None and arm.geometry.declared == arm.geometry.measured
    assert arm.census.keys() == {"fp32"} and arm.backends[0].accepted


def test_a_greedy_continuation_is_a_canonical_line_an_arm(standard):
    lines = standard[0].files["greedy.jsonl"].decode().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == [arm.name for arm in tiny.ARMS]
    assert all(line == json.dumps(json.loads(line), sort_keys=True, separators=(",", ":")) for line in lines)
    assert all(len(json.loads(line)["ids"]) == 4 and json.loads(line)["prompt_tokens"] == 12 for line in lines)


def test_documents_begin_with_bos_and_hold_the_bytes_of_their_span(standard):
    kept, _ = standard
    ids = load(kept.files["inputs.safetensors"])["0001"]
    assert ids[0] == 1 and bytes(ids[1:].astype(np.uint8)) == tiny.TEXT.encode()[40:80]
    assert kept.fields["documents"][1] == records.Document(tokens=41, sha256=losses.digest.sha256(ids.astype("<i4").tobytes()))


def test_digest_inputs_leave_no_ids_behind(tmp_path):
    kept, _ = run(tmp_path / "frozen", tiny.spec(inputs="digest"))
    assert "inputs.safetensors" not in kept.files


def test_a_gone_dataset_is_replaced_by_the_stored_ids(tmp_path, standard):
    frozen = tiny.spec()
    inputs = tiny.freeze(tmp_path / "frozen", frozen) / "inputs"
    (inputs / "tiny.txt").unlink()
    (inputs / "inputs.safetensors").write_bytes(standard[0].files["inputs.safetensors"])
    kept = tiny.Kept()
    losses.run(frozen, inputs, kept, kept)
    assert {n: d for n, d in kept.files.items() if "samples" in n} == {n: d for n, d in standard[0].files.items() if "samples" in n}
    assert "dataset is gone" in kept.fields["warnings"][0]


def pinned(frozen: records.Spec, ids: str) -> records.Spec:
    return msgspec.structs.replace(frozen, format="kv-ledger/spec/3", ids=ids)


def test_a_study_pins_the_ids_of_its_documents(tmp_path, standard):
    given = records.ids_digest([document.sha256 for document in standard[0].fields["documents"]])
    kept, _ = run(tmp_path / "frozen", pinned(tiny.spec(), given))
    assert kept.fields["documents"] == standard[0].fields["documents"]


def test_ids_other_than_the_pinned_ones_are_refused_unless_those_lie_in_the_folder(tmp_path, standard, monkeypatch):
    given = records.ids_digest([document.sha256 for document in standard[0].fields["documents"]])
    frozen = pinned(tiny.spec(), given)
    inputs = tiny.freeze(tmp_path / "frozen", frozen) / "inputs"
    genuine = losses.tokenise

    def otherwise(*args: Any) -> Any:  # as another version of a library does
        ids, facts = genuine(*args)
        return ids[::-1], facts

    monkeypatch.setattr(losses, "tokenise", otherwise)
    with pytest.raises(ProvenanceError, match="tokenizer makes of the text are not those") as refused:
        losses.run(frozen, inputs, tiny.Kept(), tiny.Kept())
    assert refused.value.expected == given and "--tokenise" in (refused.value.next or "")
    (inputs / "inputs.safetensors").write_bytes(standard[0].files["inputs.safetensors"])
    kept = tiny.Kept()
    losses.run(frozen, inputs, kept, kept)
    assert kept.fields["documents"] == standard[0].fields["documents"]
    assert kept.fields["warnings"][0].startswith("The spec pins token ids")
    with pytest.raises(ProvenanceError, match="ids in the frozen folder are not those"):
        losses.run(pinned(tiny.spec(), "0" * 64), inputs, tiny.Kept(), tiny.Kept())


def fused(name: str, values: str = "fp8_e4m3", role: str = "candidate", **more: Any) -> records.Arm:
    given = {"implementation": "fused", "compute": "fp16", "backend": "kv_fused"} | more
    return tiny.arm(name, role, "fp16", values, **given)


def test_a_refused_arm_is_recorded_and_the_others_go_on(tmp_path):
    kept, documents = run(tmp_path / "frozen", tiny.spec(arms=(*tiny.ARMS, fused("fused"))))
    assert kept.arm("fused").outcome == "refused" and kept.arm("fused").reason.startswith("head_dim: ")
    assert kept.arm("k8v8").outcome == "completed" and not any(name.startswith("fused.") for name in documents[0])


def test_fused_arms_give_the_losses_of_the_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    half = {"compute": "fp16"}
    arms = (
        tiny.arm("native", "control", "fp16", "fp16", implementation="native", **half),
        tiny.arm("k16v8", "control", "fp16", "fp8_e4m3", **half),
        fused("f16v16", "fp16"),
        fused("f16v8"),
        fused("f16v8-repeat", role="repeat", repeats="f16v8", chunk=5),
    )
    pairs = (("f16v16", "native", "loss"), ("f16v8", "k16v8", "loss"))
    sharp = {"head_dim": 64, "initializer_range": 0.1}
    kept, documents = run(tmp_path / "frozen", tiny.spec(checkpoint=tiny.llama(**sharp), arms=arms, contrasts=contrasts(*pairs)))
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}
    for document in documents:
        format_harm = np.abs(document["k16v8.loss"] - document["native.loss"]).max()
        for name, control in (("f16v16", "native"), ("f16v8", "k16v8")):
            difference = np.abs(document[f"{name}.loss"] - document[f"{control}.loss"]).max()
            assert 0 < difference < min(format_harm / 4, 0.01)
            assert document[f"{name}.kl.{control}"].max() < 1e-4
        assert np.abs(document["f16v8-repeat.loss"] - document["f16v8.loss"]).max() < 0.01
    arm = kept.arm("f16v8")
    assert (
        arm.effective
        == arm.measured
        == {
            "implementation": "fused",
            "compute": "fp16",
            "keys": "fp16",
            "values": "fp8_e4m3",
            "scales": "unit",
            "granularity": "none",
        }
    )
    assert arm.geometry is not None and arm.geometry.declared == arm.geometry.measured
    assert [backing.layers for backing in arm.backings] == [(0, 1), (0, 1)] and {backing.tokens for backing in arm.backings} == {41}
    assert sum(backing.bytes for backing in arm.backings) == 64 * 2 * 2 * 64 * (2 + 1)
    assert [backend.name for backend in arm.backends] == ["kv_fused", "oracle"]
    lines = [json.loads(line) for line in kept.files["greedy.jsonl"].splitlines()]
    chosen = {line["arm"]: line["ids"] for line in lines}
    assert chosen["f16v16"] == chosen["native"] and chosen["f16v8"] == chosen["k16v8"] == chosen["f16v8-repeat"]


def test_a_fused_arm_of_fixed_scales_loses_what_the_reference_of_the_same_calibration_loses(tmp_path, monkeypatch):
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    checkpoint = tiny.llama(head_dim=64, initializer_range=0.1)
    sizes = {f"values.amax/{layer}": np.array([0.5, 900], np.float32) for layer in range(2)}
    for named, outcome in ((checkpoint.identity, "completed"), ("0" * 64, "refused")):
        data = save(sizes, {"checkpoint": named})
        own = {"scales": "fixed", "granularity": "head", "scale_source": digest.sha256(data)}
        arms = (
            tiny.arm("native", "control", "fp16", "fp16", implementation="native", compute="fp16"),
            tiny.arm("k16v8", "control", "fp16", "fp8_e4m3", compute="fp16", **own),
            fused("fixed", **own),
            fused("unit"),
        )
        frozen = tiny.spec(checkpoint=checkpoint, arms=arms, contrasts=contrasts(("fixed", "k16v8", "loss")))
        inputs = tiny.freeze(tmp_path / named, frozen) / "inputs"
        (inputs / "scales.safetensors").write_bytes(data)
        kept = tiny.Kept()
        losses.run(frozen, inputs, kept, kept)
        assert kept.arm("fixed").outcome == kept.arm("k16v8").outcome == outcome
        if outcome == "completed":
            found = load(kept.files["samples/0000.safetensors"])
            assert np.abs(found["fixed.loss"] - found["k16v8.loss"]).max() < 0.01 < np.abs(found["fixed.loss"] - found["unit.loss"]).max()
            assert kept.arm("fixed").measured["scales"] == "fixed" and "scales" in {each.kind for each in kept.arm("fixed").backings}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_is_said_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(losses.checkpoints, "load", lambda *arguments: pytest.fail("loaded"))
    frozen = tiny.spec()
    inputs = tiny.freeze(tmp_path / "frozen", frozen) / "inputs"
    on_cuda = msgspec.structs.replace(frozen, format="kv-ledger/spec/2", device="cuda")
    with pytest.raises(InputError, match="device is not there"):
        losses.run(on_cuda, inputs, tiny.Kept(), tiny.Kept())


def test_an_unknown_backend_is_refused_in_words(tmp_path):
    other = tiny.arm("other", "candidate", "bf16", "bf16", backend="someone/kernels")
    kept, _ = run(tmp_path / "frozen", tiny.spec(arms=(*tiny.ARMS, other)))
    arm = kept.arm("other")
    assert arm.outcome == "refused" and arm.reason.startswith("backend: ") and not arm.backends[0].accepted


class Breaks:
    """Stands for a cache that fails on the way."""

    def __getattr__(self, name):
        raise RuntimeError("the cache broke")


def test_an_arm_that_fails_on_the_way_takes_only_its_comparisons_with_it(tmp_path):
    frozen = tiny.spec()
    model, _ = losses.checkpoints.load(frozen.checkpoint, "fp32")
    states = [losses.admit(arm, frozen.workload, {"fp32": model}) for arm in frozen.arms]
    plan = losses.Plan(frozen)
    ids = torch.arange(41)
    with torch.inference_mode():
        plan.walk(states, ids, tiny.Kept(), "")
        broken = next(state for state in states if state.name == "k16v16")
        broken.attempt(lambda: Breaks().update())
        plan.walk(states, ids, tiny.Kept(), "")
    assert broken.outcome == "failed" and "the cache broke" in broken.reason
    left = {state.name: set(state.samples) for state in states}
    assert left["k16v16"] == set() and left["k8v8"] == {"loss", "top1"} and left["own-fp32"] == {"loss", "top1", "kl.native", "gap.native"}


def test_rescaled_keys_leave_the_native_losses_bit_identical_and_break_unit_scaled_keys(tmp_path):
    sharp = {"initializer_range": 0.3}  # weights of the usual size give seeded models no attention to lose
    _, unaltered = run(tmp_path / "unaltered", tiny.spec(checkpoint=tiny.llama(**sharp)))
    alteration = records.RescaledKeys(pairs=(1, 6), exponent=12)
    _, documents = run(tmp_path / "frozen", tiny.spec(checkpoint=tiny.llama(alteration=alteration, **sharp)))
    for altered, plain in zip(documents, unaltered, strict=True):
        for name in ("native", "own-fp32", "k16v16", "k16v8"):
            assert altered[f"{name}.loss"].tobytes() == plain[f"{name}.loss"].tobytes()
        assert altered["k8v8.kl.k16v16"].mean() > 2 * plain["k8v8.kl.k16v16"].mean()


def test_a_model_without_bos_refuses_a_workload_with_it(tmp_path):
    frozen = tiny.spec(checkpoint=tiny.llama(bos_token_id=None))
    with pytest.raises(InputError, match="the tokenizer has none"):
        run(tmp_path / "frozen", frozen)


def test_a_declared_bos_that_the_workload_leaves_out_is_a_warning(tmp_path):
    kept, documents = run(tmp_path / "frozen", tiny.spec(bos=False))
    assert "declares a BOS" in kept.fields["warnings"][0] and kept.fields["tokenizer"]["bos"] is False
    assert documents[0]["native.loss"].shape == (39,)


def test_a_changed_dataset_is_refused_with_both_digests(tmp_path):
    frozen = tiny.spec()
    path = tiny.freeze(tmp_path / "frozen", frozen) / "inputs" / "tiny.txt"
    path.write_text(tiny.TEXT.replace("fox", "cat"), encoding="utf-8")
    with pytest.raises(ProvenanceError) as caught:
        losses.run(frozen, path.parent, tiny.Kept(), tiny.Kept())
    assert str(path) in str(caught.value) and frozen.workload.dataset.sha256 in caught.value.expected


def test_a_document_beyond_the_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="Document 1 ends beyond"):
        run(tmp_path / "frozen", tiny.spec(spans=(records.Span(start=0, tokens=8), records.Span(start=8, tokens=10**6))))


def test_a_document_may_end_one_token_into_a_block(tmp_path):
    kept, documents = run(tmp_path / "frozen", tiny.spec(documents=1, tokens=32, greedy=None))
    assert documents[0]["k16v16-repeat.kl.k16v16"].shape == (32,) and "greedy.jsonl" not in kept.files


def test_statistics_equal_their_definitions_in_double_precision():
    generator = torch.Generator().manual_seed(3)
    logits, other = (torch.randn(9, 5000, generator=generator) for _ in range(2))
    targets = torch.arange(9)
    reference = torch.log_softmax(other, -1)
    found = losses.statistics(logits, targets, {"c": reference}, {"c": other})
    p, q = torch.log_softmax(other.double(), -1), torch.log_softmax(logits.double(), -1)
    np.testing.assert_allclose(found["kl.c"], (p.exp() * (p - q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found["loss"], -q[torch.arange(9), targets], rtol=1e-5)
    assert (found["gap.c"] == (logits - other).abs().amax(-1).numpy()).all()
    assert (found["top1"] == logits.argmax(-1).numpy()).all()


def contrasts(*pairs: tuple[str, str, str]) -> tuple[records.Contrast, ...]:
    return tuple(records.Contrast(candidate=candidate, baseline=baseline, family=family) for candidate, baseline, family in pairs)


@pytest.mark.parametrize(
    "odd",
    [
        contrasts(("k16v8", "native", "loss"), ("k8v8", "k16v16", "loss"), ("k16v8", "k8v8", "advantage")),
        contrasts(("k16v8", "k8v8", "advantage")),
        contrasts(("native", "k8v8", "advantage"), ("k8v8", "k16v8", "identity"), ("k16v16", "native", "advantage")),
    ],
    ids=["two-controls", "advantage-alone", "a-control-as-candidate"],
)
def test_the_samples_of_an_odd_spec_are_those_that_the_archive_expects(tmp_path, odd):
    frozen = tiny.spec(documents=2, tokens=20, contrasts=odd, greedy=None)
    kept, _ = run(tmp_path / "frozen", frozen)
    samples = measures.read_samples(frozen, {name: data for name, data in kept.files.items() if name.startswith("samples/")})
    assert samples.documents(*(arm.name for arm in frozen.arms)) == (0, 1)
    for contrast in odd:
        if contrast.family == "advantage":
            control = frozen.common_control(contrast)
            assert measures.divergence_differences(samples, contrast.candidate, contrast.baseline, control)


# ---------------------------------------------------------------- a run that goes on


def test_what_was_left_is_gone_on_with_and_gives_the_same_bytes(tmp_path: Path, standard: tuple[tiny.Kept, Any]) -> None:
    whole, inputs = standard[0], tiny.freeze(tmp_path / "frozen", tiny.spec()) / "inputs"
    lines = whole.files["greedy.jsonl"].splitlines(True)
    for done, said in ((0, b""), (1, b""), (2, b""), (2, lines[0]), (2, b"".join(lines[:2]) + lines[2][:9]), (2, b"".join(lines))):
        kept = tiny.Kept()
        kept.items = done
        kept.files = {f"samples/{number:04d}.safetensors": whole.files[f"samples/{number:04d}.safetensors"] for number in range(done)}
        kept.files |= {"greedy.jsonl": said} if said else {}
        losses.run(tiny.spec(), inputs, kept, kept)
        assert kept.files == whole.files
        assert kept.fields["documents"] == whole.fields["documents"]
        assert [tiny.sizes(arm) for arm in kept.fields["arms"]] == [tiny.sizes(arm) for arm in whole.fields["arms"]]


def test_an_arm_that_had_failed_stays_failed_and_is_not_run_again(tmp_path: Path, standard: tuple[tiny.Kept, Any]) -> None:
    failed = records.ArmResult(name="k16v8", outcome="failed", reason="OutOfMemoryError: no more", seconds=3.0)
    kept = tiny.Kept()
    kept.items, kept.stopped = 1, {"k16v8": failed}
    kept.files["samples/0000.safetensors"] = standard[0].files["samples/0000.safetensors"]
    losses.run(tiny.spec(), tiny.freeze(tmp_path / "frozen", tiny.spec()) / "inputs", kept, kept)
    assert (kept.arm("k16v8").outcome, kept.arm("k16v8").reason) == ("failed", failed.reason)
    assert not any(name.startswith("k16v8.") for name in load(kept.files["samples/0001.safetensors"]))
    assert kept.files["samples/0000.safetensors"] == standard[0].files["samples/0000.safetensors"]
