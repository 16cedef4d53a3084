"""A streamlined model against the plain one, on a CPU under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ledger.errors import RefusedError
from runners import caches, fused, geometry, serving, streamline

from . import tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, of a sigmoid that is zero

SMALL = tiny.CONFIG | {"head_dim": 64, "intermediate_size": 72, "initializer_range": 0.1, "pad_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", {}),
    "Ministral3": ("Ministral3", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"num_attention_heads": 6}),
    "Gemma3": ("Gemma3Text", {"sliding_window": 16, "query_pre_attn_scalar": 64}),
}
CLOSE = 0.02
"""Root mean square of a difference in units of the logits' spread, where bf16 products are summed in another order."""


def model_of(name: str, **more: Any) -> Any:
    """In bf16, with norms that are not all alike."""
    kind, changes = KINDS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes | more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.weight += torch.randn(part.weight.shape) * 0.2
    return model


def part_of(model: Any, ending: str) -> Any:
    return next(module for module in model.modules() if type(module).__name__.endswith(ending))


def numbers(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@torch.inference_mode()
def outcomes(model: Any) -> torch.Tensor:
    """Logits of a prompt and three captured steps, run eagerly, over a fused cache: [sequences, tokens, vocabulary], float32."""
    arm = tiny.arm("k16v16", "candidate", "bf16", "bf16", implementation="fused", compute="bf16", backend="kv_fused")
    model.set_attn_implementation("kv_fused")
    ids = torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(3))
    cache = serving.FusedCache(model.config, arm, batch=2, max_tokens=64, page=16, seed=3)
    prompt = model(ids[:, :6], **{caches.cache_argument(model): cache}, use_cache=True).logits
    graph = serving.DecodeGraph(model, cache)
    return torch.cat([prompt, *(graph.step(ids[:, at])[:, None].clone() for at in range(6, 9))], dim=1).float()


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_a_streamlined_model_says_the_same_and_can_be_restored(name, monkeypatch):
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    model = model_of(name)
    plain = outcomes(model)
    names = streamline.streamline(model)
    lean = outcomes(model)
    assert float((lean - plain).pow(2).mean().sqrt() / plain.std()) < CLOSE
    assert streamline.streamline(model) == names
    streamline.restore(model)
    assert torch.equal(outcomes(model), plain)


@pytest.mark.parametrize("name", KINDS)
def test_norms_rotary_and_gated_mlps_of_every_kind_are_replaced(name):
    model = model_of(name, num_hidden_layers=1)
    assert streamline.streamline(model) == (f"{name}Attention.apply_rotary_pos_emb", f"{name}MLP", f"{name}RMSNorm")
    replaced = [module for module in model.modules() if "forward" in module.__dict__]
    assert len(replaced) == 2 + sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())


def test_other_models_of_the_same_classes_stay_as_they_are():
    lean, other = model_of("Llama", num_hidden_layers=1), model_of("Llama", num_hidden_layers=1)
    streamline.streamline(lean)
    assert not any("forward" in module.__dict__ for module in other.modules())
    streamline.restore(lean)
    assert not any("forward" in module.__dict__ for module in lean.modules())


def test_merged_weights_take_no_more_memory_and_move_once():
    model = model_of("Llama", num_hidden_layers=1)
    mlp = part_of(model, "MLP")
    kept = mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
    parameters = [name for name, _ in model.named_parameters()]
    streamline.merge(model)
    place = mlp.gate_proj.weight.data_ptr()
    streamline.streamline(model)
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert gate.data_ptr() == place and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert gate.untyped_storage().nbytes() == gate.nbytes + up.nbytes
    assert torch.equal(gate, kept[0]) and torch.equal(up, kept[1])
    assert [name for name, _ in model.named_parameters()] == parameters


# ---------------------------------------------------------------- each kernel


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_norm_has_the_modules_roundings(name):
    norm = part_of(model_of(name), "RMSNorm")
    x = numbers(5, 3, 64) * 3
    expected, found = norm(x), streamline._norm(norm)(x)
    off = found != expected
    assert off.float().mean() < 0.01  # where a sum's order decides a rounding
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_rotary_has_the_bits_of_the_function_whatever_the_strides():
    apply = streamline._rotary(apply_rotary_pos_emb)
    q, k = numbers(2, 3, 5, 64).transpose(1, 2), numbers(2, 3, 2, 64, seed=4).transpose(1, 2)
    for rows in (1, 2):
        cos, sin = numbers(rows, 3, 64, seed=5), numbers(rows, 3, 64, seed=6)
        for found, expected in zip(apply(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_rotary_of_another_form_goes_to_the_function_itself():
    apply = streamline._rotary(lambda *given, **named: "itself")
    q, k, cos = numbers(1, 2, 3, 64), numbers(1, 2, 3, 64), numbers(1, 3, 32)
    assert apply(q, k, cos, cos) == "itself"
    assert apply(q, k, numbers(1, 3, 64), numbers(1, 3, 64), 2) == "itself"
    assert apply(q, k, numbers(1, 3, 64).float(), numbers(1, 3, 64).float()) == "itself"


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_gated_mlp_has_the_bits_of_the_activation_and_the_product(name):
    mlp = part_of(model_of(name), "MLP")
    mlp.down_proj = torch.nn.Identity()
    x = numbers(2, 3, 64) * 8
    both = torch.nn.functional.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    expected = mlp.act_fn(both[..., :72]) * both[..., 72:]
    found = streamline._mlp(mlp)(x)
    off = (found - expected).abs() > 1e-4  # a tanh is -1 early, where the sigmoid goes on
    assert off.float().mean() < 0.01  # where the last bit of a float32 sigmoid decides a rounding
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)


# ---------------------------------------------------------------- what is left alone


def test_what_has_another_form_is_left_alone(monkeypatch):
    model = model_of("Llama", num_hidden_layers=1, hidden_act="gelu")  # that of the error function
    monkeypatch.setattr(type(part_of(model, "RMSNorm")), "forward", lambda self, hidden_states: hidden_states * self.weight)
    assert streamline.streamline(model) == ("LlamaAttention.apply_rotary_pos_emb",)
    biased = model_of("Llama", num_hidden_layers=1, mlp_bias=True)
    streamline.streamline(biased)
    assert "forward" not in part_of(biased, "MLP").__dict__


def test_partial_rotary_is_left_alone():
    config = transformers.Qwen3_5TextConfig(
        **SMALL | {"layer_types": ["full_attention"], "num_hidden_layers": 1},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    assert streamline.streamline(model) == ("Qwen3_5MLP", "Qwen3_5RMSNorm")


def test_without_triton_nothing_is_replaced(monkeypatch):
    model = model_of("Llama", num_hidden_layers=1)
    monkeypatch.setattr(fused, "available", lambda device: "no CUDA device is available")
    with pytest.raises(RefusedError, match="needs Triton's kernels"):
        streamline.streamline(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
