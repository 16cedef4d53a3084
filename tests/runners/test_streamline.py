"""A streamlined model against the plain one, on a CPU under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ledger import records
from ledger.errors import RefusedError
from runners import caches, fused, geometry, streamline
from runners.serving import DecodeGraph, FusedCache

from . import tiny

torch.set_num_threads(1)

SMALL = tiny.CONFIG | {"head_dim": 64, "intermediate_size": 72, "initializer_range": 0.1, "pad_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "ministral3": ("Ministral3", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6}),
    "gemma3": ("Gemma3Text", {"sliding_window": 16, "query_pre_attn_scalar": 64}),
}
SHORT = {"llama": "Llama", "mistral": "Mistral", "ministral3": "Ministral3", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}


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


def words(tokens: int) -> torch.Tensor:
    return torch.randint(3, 256, (2, tokens), generator=torch.Generator().manual_seed(3))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the logits' spread."""
    return float((found.float() - expected.float()).pow(2).mean().sqrt() / expected.float().std())


def outcomes(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a whole prompt under SDPA, and of six steps over a fused cache."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        whole = model(words(20)).logits
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    given = {"implementation": "fused", "compute": "bf16", "backend": "kv_fused"}
    arm = tiny.arm("k16v16", "candidate", "bf16", "bf16", **given)
    model.set_attn_implementation("kv_fused")
    cache = FusedCache(model.config, arm, batch=2, max_tokens=64, page=16, seed=3)
    with torch.inference_mode():
        model(words(12), **{caches.cache_argument(model): cache}, use_cache=True)
        graph = DecodeGraph(model, cache)
        steps = torch.stack([graph.step(words(20)[:, at]).clone() for at in range(12, 18)], dim=1)
    return whole, steps


@pytest.mark.parametrize("name", KINDS)
def test_a_streamlined_model_says_the_same(name, monkeypatch):
    model = model_of(name)
    plain, exact = outcomes(model, monkeypatch), outcomes(model.float(), monkeypatch) if name == "never" else None
    assert exact is None
    names = streamline.streamline(model)
    short = SHORT[name]
    assert names == (f"{short}Attention.apply_rotary_pos_emb", f"{short}MLP", f"{short}RMSNorm")
    for found, expected in zip(outcomes(model, monkeypatch), plain, strict=True):
        assert 0 <= distance(found, expected) < 0.02
    assert streamline.streamline(model) == names
    streamline.restore(model)
    for found, expected in zip(outcomes(model, monkeypatch), plain, strict=True):
        assert torch.equal(found, expected)


def test_other_models_of_the_same_classes_stay_as_they_are():
    lean, other = model_of("llama"), model_of("llama")
    streamline.streamline(lean)
    assert not any("forward" in module.__dict__ for module in other.modules())
    assert not any("forward" in module.__dict__ for module in lean.modules() if type(module) is torch.nn.Linear)
