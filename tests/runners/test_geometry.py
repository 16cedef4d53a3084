"""Declared against measured geometry, the parameter census, and every refusal of the guard."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ledger.errors import RefusedError
from ledger.records import Arm, LayerGeometry
from runners import caches, geometry

torch.set_num_threads(1)

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(name: str, **more: Any) -> PreTrainedConfig:
    return getattr(transformers, f"{name}Config")(**{**TINY, **more})


def arm(**more: Any) -> Arm:
    return Arm(
        **{
            "name": "k16v8",
            "role": "candidate",
            "implementation": "reference",
            "compute": "fp32",
            "keys": "bf16",
            "values": "fp8_e4m3",
            "scales": "unit",
            **more,
        }
    )


NATIVE: dict[str, Any] = {"implementation": "native", "keys": "fp32", "values": "fp32", "scales": "none"}
SUPPORTED = {
    "Llama": ({}, 8, [None] * 3),
    "Mistral": ({"sliding_window": 8}, 8, [8] * 3),
    "Ministral3": ({"head_dim": 8}, 8, [None] * 3),
    "Qwen2": ({}, 8, [None] * 3),
    "Qwen3": ({"head_dim": 16}, 16, [None] * 3),
    "Gemma3Text": (
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        16,
        [8, None, 8],
    ),
}


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("policy", [{}, NATIVE, {"scales": "dynamic", "granularity": "token_head"}], ids=["reference", "native", "dynamic"])
def test_declared_and_measured_geometry_agree_on_every_supported_model(name: str, policy: dict[str, Any]) -> None:
    more, dim, windows = SUPPORTED[name]
    made = config(name, **more)
    expected = tuple(
        LayerGeometry(layer=index, kind="sliding" if window else "attention", kv_heads=2, key_dim=dim, value_dim=dim, window=window)
        for index, window in enumerate(windows)
    )
    assert geometry.declared(made) == expected
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    cache = caches.build(model.config, arm(**policy))
    assert geometry.measured(cache) == ()
    with torch.inference_mode():
        model(torch.arange(3, 15)[None], **{caches.cache_argument(model): cache})
    assert geometry.measured(cache) == expected


def test_every_supported_architecture_is_tested_here() -> None:
    cases = [(name, more) for name, (more, *_) in [*SUPPORTED.items(), *BEYOND.items()]]
    assert {config(name, **more).model_type for name, more in cases} == geometry.ARCHITECTURES | geometry.BEYOND_FUSED


def test_measured_geometry_is_that_of_the_tensors_and_not_of_the_configuration() -> None:
    cache = caches.build(config("Llama"), arm())
    cache.update(torch.zeros(1, 3, 4, 6), torch.zeros(1, 3, 4, 10), 1)
    assert geometry.measured(cache) == (LayerGeometry(layer=1, kind="attention", kv_heads=3, key_dim=6, value_dim=10),)


def test_the_census_counts_parameters_by_dtype_and_tied_ones_once() -> None:
    model = AutoModelForCausalLM.from_config(config("Llama", tie_word_embeddings=True), dtype=torch.float32)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert geometry.census(model) == {"fp32": total}
    model.model.norm.to(torch.bfloat16)
    assert geometry.census(model) == {"bf16": 32, "fp32": total - 32}


FUSED: dict[str, Any] = {"implementation": "fused", "compute": "bf16", "backend": "kv_fused"}
BEYOND = {
    "Gemma2": ({"head_dim": 64, "sliding_window": 8}, [(2, 64, 8), (2, 64, None), (2, 64, 8)]),
    "Gemma4Text": (
        {
            "head_dim": 64,
            "global_head_dim": 128,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
        },
        [(2, 64, 8), (2, 64, 8), (1, 128, None)],
    ),
    "Qwen3_5Text": (
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
        [(4, 16, 8), (4, 16, 8), (2, 64, None)],
    ),
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
BEYOND["Qwen3_5MoeText"] = ({**BEYOND["Qwen3_5Text"][0], **EXPERTS}, BEYOND["Qwen3_5Text"][1])
BEYOND["Gemma4UnifiedText"] = BEYOND["Gemma4Text"]
"""Model types of several kinds of layer: KV heads, head dimension and window of each (of a state: its shape)."""
FUSED_TOO = ["Gemma2", "Gemma4Text", "Gemma4UnifiedText", "Qwen3_5Text"]


def beyond(name: str) -> tuple[LayerGeometry, ...]:
    layers = []
    for index, (heads, dim, window) in enumerate(BEYOND[name][1]):
        if name.startswith("Qwen") and index < 2:
            layers.append(LayerGeometry(layer=index, kind="recurrent", kv_heads=heads, key_dim=dim, value_dim=window))
        else:
            kind = "sliding" if window else "attention"
            layers.append(LayerGeometry(layer=index, kind=kind, kv_heads=heads, key_dim=dim, value_dim=dim, window=window))
    return tuple(layers)


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("policy", [{}, NATIVE], ids=["reference", "native"])
def test_declared_and_measured_geometry_agree_where_layers_are_of_several_kinds(name: str, policy: dict[str, Any]) -> None:
    made = config(name, **BEYOND[name][0])
    assert geometry.declared(made) == beyond(name)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    cache = caches.build(model.config, arm(**policy, backend="eager"))
    with torch.inference_mode():
        model(torch.arange(3, 15)[None], **{caches.cache_argument(model): cache})
    assert geometry.measured(cache) == beyond(name)
    assert caches.effective_policy(cache)["implementation"] == policy.get("implementation", "reference")


def test_a_static_window_is_as_long_as_what_it_holds() -> None:
    made = config("Gemma4UnifiedText", **BEYOND["Gemma4UnifiedText"][0])
    model, cache = (
        AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval(),
        transformers.StaticCache(config=made, max_cache_len=32),
    )
    with torch.inference_mode():
        model(torch.arange(3, 15)[None], **{caches.cache_argument(model): cache})
    assert geometry.measured(cache) == geometry.declared(made)


def test_layers_that_share_have_the_geometry_of_what_they_read_and_no_heads_of_their_own() -> None:
    more = {**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    made = config("Gemma4Text", **more)
    assert geometry.sharing(made) == {2: 0, 3: 1}
    layers = geometry.declared(made)
    assert [(one.layer, one.kind, one.kv_heads, one.key_dim, one.window) for one in layers[2:]] == [
        (2, "sliding", 0, 64, 8),
        (3, "attention", 0, 128, None),
    ]
    geometry.guard(made, arm())
    geometry.guard(made, arm(**NATIVE))
    with pytest.raises(RefusedError) as caught:
        geometry.guard(made, arm(**FUSED))
    assert caught.value.code == "shared_kv_layers"


@pytest.mark.parametrize("name", ["Qwen3_5MoeText"])
def test_fused_arms_are_refused_for_what_they_are_not_tested_with(name: str) -> None:
    made = config(name, **BEYOND[name][0])
    assert made.model_type in geometry.BEYOND_FUSED
    with pytest.raises(RefusedError) as caught:
        geometry.guard(made, arm(**FUSED))
    assert caught.value.code in ("architecture", "recurrent_layers")


REFUSED_MODELS = [
    ("recurrent_layers", lambda: config("Qwen3Next")),
    ("multimodal_input", lambda: transformers.Qwen3_5Config()),
    ("multimodal_input", lambda: transformers.Gemma4Config()),
    ("shared_backing", lambda: _with(config("Llama"), layer_types=["hybrid", "full_attention", "hybrid"])),
    ("shared_kv_layers", lambda: _with(config("Gemma4Text", **GEMMA4), num_kv_shared_layers=1)),
    ("shared_kv_layers", lambda: _with(config("Gemma4Text", **GEMMA4), num_kv_shared_layers=3)),
    ("shared_kv_layers", lambda: _with(config("Qwen3"), num_kv_shared_layers=1)),
    ("layer_kind", lambda: config("Gemma3Text", use_bidirectional_attention=True)),
    ("layer_kind", lambda: config("Gemma4Text", use_bidirectional_attention="all", **GEMMA4)),
    ("recurrent_layers", lambda: config("Lfm2", layer_types=["conv", "full_attention", "conv"])),
    ("latent_attention", lambda: config("DeepseekV3")),
    ("shared_kv_layers", lambda: config("Gemma3nText", num_kv_shared_layers=1)),
    ("multimodal_input", lambda: transformers.Gemma3Config()),
    ("multimodal_input", lambda: transformers.LlavaConfig()),
    ("architecture", lambda: config("Cohere")),
    ("recurrent_layers", lambda: transformers.MambaConfig()),
    ("architecture", lambda: transformers.T5Config()),
    ("architecture", lambda: transformers.GPT2Config()),
    ("layer_kind", lambda: _with(config("Llama"), layer_types=["full_attention", "moe", "full_attention"])),
    ("layer_kind", lambda: _with(config("Llama"), layer_types=["full_attention", "spiral_attention", "full_attention"])),
    ("mixed_head_dim", lambda: _with(config("Llama"), v_head_dim=16)),
    ("head_dim", lambda: _with(config("Qwen2"), hidden_size=30, head_dim=None)),
    ("sliding_window", lambda: config("Mistral", sliding_window=1)),
]


GEMMA4: dict[str, Any] = BEYOND["Gemma4Text"][0]


def _with(made: PreTrainedConfig, **more: Any) -> PreTrainedConfig:
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("code", "make"), REFUSED_MODELS, ids=[f"{i}-{code}" for i, (code, _) in enumerate(REFUSED_MODELS)])
@pytest.mark.parametrize("policy", [{}, NATIVE, FUSED], ids=["reference", "native", "fused"])
def test_a_model_that_cannot_be_measured_honestly_is_refused(code: str, make: Any, policy: dict[str, Any]) -> None:
    made = make()
    for attempt in (geometry.guard, caches.build):
        with pytest.raises(RefusedError) as caught:
            attempt(made, arm(**policy))
        assert caught.value.code == code
        assert caught.value.next
    with pytest.raises(RefusedError):
        geometry.declared(made)


REFUSED_ARMS: list[tuple[str, dict[str, Any]]] = [
    ("implementation", {"implementation": "quantised"}),
    ("backend", {"backend": "flash_attention_2"}),
    ("backend", {"backend": "kv_fused"}),
    ("backend", {**FUSED, "backend": "sdpa"}),
    ("dtype", {**FUSED, "compute": "fp32"}),
    ("dtype", {**FUSED, "keys": "fp16"}),
    ("dtype", {**FUSED, "values": "fp32", "scales": "none"}),
    ("head_dim", FUSED),
    ("scale_policy", {**FUSED, "scales": "none"}),
    ("dtype", {"compute": "fp8_e4m3"}),
    ("dtype", {"values": "int8"}),
    ("dtype", {**NATIVE, "values": "bf16"}),
    ("dtype", {**NATIVE, "keys": "fp8_e4m3", "values": "fp8_e4m3", "scales": "unit"}),
    ("scale_policy", {"scales": "none"}),
    ("scale_policy", {"scales": "fixed", "granularity": "token_head", "scale_source": "0" * 64}),
    ("scale_policy", {"scales": "unit", "granularity": "head"}),
    ("scale_policy", {"scales": "dynamic"}),
    ("scale_policy", {**FUSED, "scales": "fixed", "granularity": "tensor", "scale_source": "0" * 64}),
    ("scale_policy", {**FUSED, "scales": "dynamic", "granularity": "page_head"}),
    ("scale_policy", {"values": "bf16"}),
]


@pytest.mark.parametrize(("code", "more"), REFUSED_ARMS)
def test_an_arm_that_cannot_be_run_is_refused_with_what_to_do(code: str, more: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        geometry.guard(config("Llama"), arm(**more))
    assert caught.value.code == code
    assert caught.value.next


def test_capped_attention_scores_need_the_eager_backend() -> None:
    capped = config("Gemma3Text", head_dim=16, attn_logit_softcapping=30.0)
    with pytest.raises(RefusedError) as caught:
        geometry.guard(capped, arm())
    assert caught.value.code == "logit_softcap"
    geometry.guard(capped, arm(backend="eager"))


@pytest.mark.parametrize("cap", [float("nan"), float("inf"), -5.0, 0.0, 1e300, 1e-300])
@pytest.mark.parametrize("policy", [{"backend": "eager"}, FUSED], ids=["reference", "fused"])
def test_a_cap_that_is_no_positive_number_is_refused(cap: float, policy: dict[str, Any]) -> None:
    capped = config("Gemma3Text", head_dim=64)
    capped.attn_logit_softcapping = cap
    with pytest.raises(RefusedError, match="soft cap cannot be used") as caught:
        geometry.guard(capped, arm(**policy))
    assert caught.value.code == "logit_softcap" and caught.value.expected and caught.value.found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta"])
@pytest.mark.parametrize("policy", [{}, NATIVE, FUSED], ids=["reference", "native", "fused"])
def test_a_device_that_is_not_there_is_refused(device: str, policy: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        geometry.guard(config("Qwen3", head_dim=64), arm(**policy), device=device)
    assert caught.value.code == "device"


def _forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: Any, **options: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", nothing)
    monkeypatch.setattr(torch, "zeros", nothing)


@pytest.mark.parametrize("dim", geometry.HEAD_DIMS)
@pytest.mark.parametrize("scales", [{}, {"scales": "dynamic", "granularity": "token_head"}])
def test_fused_arms_are_admitted_by_configuration_alone(monkeypatch: pytest.MonkeyPatch, dim: int, scales: dict[str, Any]) -> None:
    _kernels(monkeypatch)
    _forbid(monkeypatch)
    geometry.guard(config("Llama", head_dim=dim), arm(**FUSED, **scales))


@pytest.mark.parametrize("name", FUSED_TOO)
def test_layouts_left_the_list_of_what_fused_arms_are_refused_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _kernels(monkeypatch)
    geometry.guard(config(name, **BEYOND[name][0]), arm(**FUSED))


def test_windows_and_capped_scores_left_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _kernels(monkeypatch)
    geometry.guard(config("Gemma3Text", head_dim=64, sliding_window=8, attn_logit_softcapping=30.0), arm(**FUSED))


def _kernels(monkeypatch: pytest.MonkeyPatch, reason: str = "") -> None:
    monkeypatch.setattr(geometry, "kernels", lambda: SimpleNamespace(available=lambda device: reason))


def test_kernels_that_do_not_run_here_are_a_refusal_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _kernels(monkeypatch, "the device has compute capability 8.0, and e4m3 needs 8.9")
    with pytest.raises(RefusedError, match=r"capability 8\.0") as caught:
        geometry.guard(config("Qwen3", head_dim=64), arm(**FUSED))
    assert caught.value.code == "device"


def test_a_missing_triton_is_a_refusal() -> None:
    program = """
import sys
sys.modules["triton"] = None
from ledger.errors import RefusedError
from runners import geometry, serving
try:
    geometry.kernels()
except RefusedError as error:
    print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["backend"]


def test_every_reason_code_is_described_in_the_module() -> None:
    codes = {code for code, _ in REFUSED_MODELS} | {code for code, _ in REFUSED_ARMS} | {"logit_softcap", "device", "budget"}
    table = (geometry.__doc__ or "").partition("Reason codes:")[2].partition("What each")[0]
    described = {line.split()[0] for line in table.splitlines() if line.startswith("    ")}
    assert codes == described
