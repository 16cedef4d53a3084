"""Fixed scales: from a calibration's bytes, refused where they do not fit, and through a whole loss study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from ledger import digest, records
from ledger.errors import ProvenanceError, RefusedError
from ledger.validity import contradictions
from runners import caches, checkpoints, geometry, losses, scales

from . import tiny

torch.set_num_threads(1)

HEADS = {0: [4.0, 8.0], 1: [448.0, 1.5]}
LAYERS = geometry.declared(tiny.config("qwen3"))


def calibration(changes: dict[str, Any] | None = None, metadata: dict[str, str] | None = None) -> bytes:
    """A file of two layers and two heads; ``changes`` replaces tensors, or takes them away."""
    tensors = {f"{side}.amax/{layer}": np.array(heads, np.float32) for side in ("keys", "values") for layer, heads in HEADS.items()}
    tensors |= {f"{side}.p999/{layer}": np.ones(2, np.float32) for side in ("keys", "values") for layer in HEADS}
    tensors |= changes or {}
    return save({name: value for name, value in tensors.items() if value is not None}, metadata=metadata)


def fixed(granularity: str = "head", **more: Any) -> records.Arm:
    given = {"keys": "bf16", "values": "fp8_e4m3", "scales": "fixed", "granularity": granularity, "scale_source": "0" * 64} | more
    return tiny.arm("fixed", "candidate", **given)


def test_a_scale_is_the_largest_magnitude_over_448_of_a_head_or_of_a_layer() -> None:
    heads, layer = (scales.from_calibration(calibration(), granularity) for granularity in ("head", "tensor"))
    for side in (heads.keys, heads.values):
        assert {number: scale.dtype for number, scale in side.items()} == {0: torch.float32, 1: torch.float32}
        assert torch.equal(side[0], torch.tensor([4.0, 8.0]) / torch.tensor(448.0)) and side[1][0] == 1
    found = layer.of(fixed("tensor", keys="fp8_e4m3"), LAYERS)
    assert {number: scale.shape for number, sides in found.items() for scale in sides.values()} == {0: (), 1: ()}
    assert found[0]["values"] == torch.tensor(8.0) / torch.tensor(448.0) and found[1]["values"] == 1


def test_only_the_sides_that_are_stored_in_8_bits_are_scaled() -> None:
    found = scales.from_calibration(calibration({"keys.amax/0": None, "keys.amax/1": None}), "head")
    assert {layer: set(sides) for layer, sides in found.of(fixed(), LAYERS).items()} == {0: {"values"}, 1: {"values"}}
    with pytest.raises(RefusedError, match="layers none"):
        found.of(fixed(keys="fp8_e4m3"), LAYERS)


@pytest.mark.parametrize("granularity", ["head", "tensor"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"values.amax/1": np.array([0.0, 0.0], np.float32)}, "values of layer 1 cannot be used.*0.0"),
        ({"values.amax/1": np.array([-1.0, -2.0], np.float32)}, "values of layer 1 cannot be used.*-0.00"),
        ({"values.amax/0": np.array([np.nan, 1.0], np.float32)}, "values of layer 0 cannot be used.*nan"),
        ({"values.amax/0": np.array([np.inf, 1.0], np.float32)}, "values of layer 0 cannot be used.*inf"),
        ({"values.amax/1": None}, "not of the model's layers.*layers 0, 1.*layers 0"),
        ({"values.amax/2": np.ones(2, np.float32)}, "not of the model's layers.*layers 0, 1, 2"),
        ({"values.amax/01": np.ones(2, np.float32)}, "names no layer, or one twice"),
        ({"values.amax/x": np.ones(2, np.float32)}, "names no layer, or one twice"),
        ({"values.amax/0": np.ones((1, 2), np.float32)}, "no vector of heads"),
        ({"values.amax/0": np.ones(2, np.float16)}, "no vector of heads"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused_with_the_reason(granularity: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(RefusedError, match=f"(?s){what}") as caught:
        scales.from_calibration(calibration(changes), granularity).of(fixed(granularity), LAYERS)
    assert caught.value.code == "scale_policy" and caught.value.next


@pytest.mark.parametrize("granularity", ["head", "tensor"])
def test_scales_of_other_heads_or_one_bad_head_are_refused_by_head(granularity: str) -> None:
    for heads in (1, 3):
        other = calibration({"values.amax/0": np.ones(heads, np.float32)})
        with pytest.raises(RefusedError, match=rf"(?s)values of layer 0 have another shape.*\[2\].*\[{heads}\]"):
            scales.from_calibration(other, granularity).of(fixed(granularity), LAYERS)
    for bad in (0, -1):
        with pytest.raises(RefusedError, match="for head 1"):
            scales.from_calibration(calibration({"values.amax/0": np.array([1, bad], np.float32)}), granularity).of(
                fixed(granularity), LAYERS
            )


def test_scales_of_another_checkpoint_or_granularity_are_refused() -> None:
    found = scales.from_calibration(calibration(metadata={"checkpoint": "a" * 64}), "head")
    assert found.of(fixed(), LAYERS, "a" * 64).keys() == {0, 1}
    with pytest.raises(RefusedError, match="of another checkpoint"):
        found.of(fixed(), LAYERS, "b" * 64)
    with pytest.raises(RefusedError, match="not those that the arm asks for"):
        found.of(fixed("tensor"), LAYERS, "a" * 64)
    with pytest.raises(RefusedError, match="no such scales"):
        scales.from_calibration(calibration(), "token_head")


@pytest.mark.parametrize("data", [b"nothing", b"\xff" * 40, calibration()[:-3]])
def test_what_is_no_safetensors_file_is_no_calibration(data: bytes) -> None:
    with pytest.raises(RefusedError, match="cannot be read"):
        scales.from_calibration(data, "head")


@pytest.mark.parametrize("name", ["qwen3.5", "gemma4-shared", "gemma4"])
def test_recurrent_layers_and_those_that_share_need_no_scales_and_each_layer_has_its_own_heads(name: str) -> None:
    layers = geometry.declared(tiny.config(name))
    own = [layer for layer in layers if layer.kind != "recurrent" and layer.kv_heads]
    tensors = {f"values.amax/{layer.layer}": np.arange(1, layer.kv_heads + 1, dtype=np.float32) for layer in own}
    found = scales.from_calibration(save(tensors), "head")
    cache = caches.build(tiny.config(name), fixed(), fixed=found)
    for layer in own:
        states = torch.ones(1, layer.kv_heads, 3, layer.key_dim)
        cache.update(states, states, layer.layer)
        assert torch.equal(cache.layers[layer.layer].value_scales, torch.arange(1, layer.kv_heads + 1) / 448)
    assert [backing.bytes for backing in caches.backings(cache) if backing.kind == "scales"] == [4 * layer.kv_heads for layer in own]


def test_an_arm_without_its_scales_gets_no_cache() -> None:
    with pytest.raises(RefusedError, match="no calibration was given"):
        scales.from_calibration(b"", "head")
    with pytest.raises(RefusedError, match="none were given") as caught:
        caches.build(tiny.config("qwen3"), fixed())
    assert caught.value.code == "scale_policy"


# ---------------------------------------------------------------- a loss study


def measured_calibration(metadata: dict[str, str] | None = None) -> bytes:
    """Magnitudes of the tiny llama over a text, as its own cache holds them."""
    model, _ = checkpoints.load(tiny.llama(), "fp32")
    cache = caches.build(model.config, tiny.arm("own", "candidate"))
    with torch.inference_mode():
        model(torch.arange(200)[None], **{caches.cache_argument(model): cache}, use_cache=True)
    tensors = {}
    for number, layer in enumerate(cache.layers):
        for side in ("keys", "values"):
            tensors[f"{side}.amax/{number}"] = getattr(layer, side).abs().amax(dim=(0, 2, 3)).numpy()
    return save(tensors, metadata=metadata)


def study(source: str) -> records.Spec:
    policies = {
        "k8v8-unit": ("unit", "none", None),
        "k8v8-fixed": ("fixed", "tensor", source),
        "k8v8-fixed-head": ("fixed", "head", source),
        "k8v8-tensor": ("dynamic", "tensor", None),
        "k8v8-head": ("dynamic", "head", None),
        "k8v8-page": ("dynamic", "page_head", None),
        "k8v8-token": ("dynamic", "token_head", None),
    }
    made = [
        tiny.arm(name, "candidate", "fp8_e4m3", "fp8_e4m3", scales=policy, granularity=granularity, scale_source=of)
        for name, (policy, granularity, of) in policies.items()
    ]
    arms = (tiny.arm("native", "control", implementation="native"), *made)
    contrasts = tuple(records.Contrast(candidate=arm.name, baseline="native", family="loss") for arm in made)
    return tiny.spec(arms=arms, contrasts=contrasts, families=tiny.FAMILIES[1:2], tokens=100)


def run(folder: Path, frozen: records.Spec, data: bytes | None) -> tiny.Kept:
    kept = tiny.Kept()
    inputs = tiny.freeze(folder, frozen) / "inputs"
    if data is not None:
        (inputs / scales.FILE).write_bytes(data)
    losses.run(frozen, inputs, kept, kept)
    return kept


def test_a_loss_study_asks_for_any_scales_and_gets_them(tmp_path: Path) -> None:
    data = measured_calibration({"checkpoint": tiny.llama().identity})
    frozen = study(digest.sha256(data))
    kept = run(tmp_path / "frozen", frozen, data)
    for arm in frozen.arms:
        result = kept.arm(arm.name)
        assert result.outcome == "completed", result.reason
        assert contradictions(arm, result) == []
        assert (result.measured["scales"], result.measured["granularity"]) == (arm.scales, arm.granularity)
    assert not any("calibration" in warning for warning in kept.fields["warnings"])
    sizes = {
        arm.name: sum(backing.bytes for backing in kept.arm(arm.name).backings if backing.kind == "scales") // 4 for arm in frozen.arms
    }
    # Two layers of two heads, both sides; 101 tokens are on two pages.
    assert sizes == {
        "native": 0,
        "k8v8-unit": 0,
        "k8v8-fixed": 4,
        "k8v8-fixed-head": 8,
        "k8v8-tensor": 4,
        "k8v8-head": 8,
        "k8v8-page": 16,
        "k8v8-token": 8 * 101,
    }
    document = load(kept.files["samples/0001.safetensors"])
    series = {arm.name: document[f"{arm.name}.loss"].tobytes() for arm in frozen.arms}
    assert len(set(series.values())) == len(series)
    assert all(document[f"{arm.name}.kl.native"].mean() < 1e-3 for arm in frozen.arms[1:])


def test_a_calibration_of_another_checkpoint_ends_the_arms_that_need_it_and_no_other(tmp_path: Path) -> None:
    data = measured_calibration({"checkpoint": tiny.llama(seed=8).identity})
    kept = run(tmp_path / "frozen", study(digest.sha256(data)), data)
    outcomes = {arm.name: arm.outcome for arm in kept.fields["arms"]}
    assert {name for name, outcome in outcomes.items() if outcome == "refused"} == {"k8v8-fixed", "k8v8-fixed-head"}
    assert "of another checkpoint" in kept.arm("k8v8-fixed").reason and kept.arm("k8v8-fixed").reason.startswith("scale_policy: ")


def test_a_calibration_that_names_no_checkpoint_is_used_with_a_warning(tmp_path: Path) -> None:
    data = measured_calibration()
    kept = run(tmp_path / "frozen", study(digest.sha256(data)), data)
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}
    assert any("names no checkpoint" in warning for warning in kept.fields["warnings"])


def test_what_is_warned_of_a_calibration_is_that_it_names_no_checkpoint() -> None:
    assert scales.cautions(b"") == scales.cautions(b"no calibration") == []
    assert scales.cautions(measured_calibration({"checkpoint": "0" * 64})) == []
    assert len(scales.cautions(measured_calibration())) == 1


def test_a_calibration_that_is_missing_or_another_ends_the_run(tmp_path: Path) -> None:
    frozen = study("ab" * 32)
    with pytest.raises(ProvenanceError, match="cannot be read"):
        run(tmp_path / "none", frozen, None)
    with pytest.raises(ProvenanceError, match="not the one that the spec pins"):
        run(tmp_path / "another", frozen, measured_calibration())
    two = tuple(msgspec.structs.replace(arm, scale_source="cd" * 32) if arm.name == "k8v8-fixed" else arm for arm in frozen.arms)
    data = measured_calibration()
    with pytest.raises(ProvenanceError, match="cdcdcd"):
        run(tmp_path / "two", msgspec.structs.replace(frozen, arms=two), data)


LAYOUTS = {
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-experts": "qwen3_5_moe_text",
    "gemma4-shared": "gemma4_text",
    "gemma4-unified": "gemma4_unified_text",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_study_runs_on_every_layout(tmp_path: Path, name: str) -> None:
    config = {**tiny.SMALL, **tiny.MODELS[name][1], "max_position_embeddings": 512}
    checkpoint = records.Checkpoint(name="tiny", source=f"random:{LAYOUTS[name]}#7", license="CC0-1.0", config=config, seed=7)
    layers = [layer for layer in geometry.declared(tiny.config(name)) if layer.kind != "recurrent" and layer.kv_heads]
    maxima = {f"values.amax/{layer.layer}": np.full(layer.kv_heads, 4, np.float32) for layer in layers}
    data = save(maxima, metadata={"checkpoint": checkpoint.identity})
    arms = (
        *tiny.ARMS[:2],
        tiny.arm("page", "candidate", "fp8_e4m3", "fp8_e4m3", scales="dynamic", granularity="page_head"),
        msgspec.structs.replace(fixed(), scale_source=digest.sha256(data)),
    )
    contrasts = (tiny.CONTRASTS[0], *(records.Contrast(candidate=arm.name, baseline="native", family="loss") for arm in arms[2:]))
    frozen = tiny.spec(checkpoint=checkpoint, arms=arms, contrasts=contrasts, families=tiny.FAMILIES[:2])
    kept = run(tmp_path / "frozen", frozen, data)
    for arm in frozen.arms:
        result = kept.arm(arm.name)
        assert result.outcome == "completed", result.reason
        assert contradictions(arm, result) == []
    document = load(kept.files["samples/0001.safetensors"])
    assert not document["own-fp32.gap.native"].any()
    assert document["page.kl.native"].any() and document["fixed.kl.native"].any()
    chosen = [json.loads(line)["ids"] for line in kept.files["greedy.jsonl"].splitlines()]
    assert chosen[0] == chosen[1]
