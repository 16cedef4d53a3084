"""Tiny frozen folders for the runner: a seeded llama, a page of text, the standard arms."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ledger import digest, records
from ledger.records import consistency
from runners import oracle

TEXT = "".join(f"{n} is followed by {n + 1}, and the quick brown fox jumps over {n} lazy dogs.\n" for n in range(400))
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
"""Qwen3.5: recurrent layers three to one, and states of two shapes."""
GLOBAL: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
"""Gemma 4: two head dimensions, and global layers whose values come from the key projection."""
SHARED: dict[str, Any] = GLOBAL | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
"""Gemma 4 whose last three layers read the keys and values of layers 1, 1 and 2."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_hidden_layers": 2}),
    "ministral3": ("Ministral3", {"head_dim": 8, "num_hidden_layers": 2}),
    "gemma2": ("Gemma2", {"head_dim": 16, "num_hidden_layers": 2, "sliding_window": 8}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3.5": ("Qwen3_5Text", LINEAR),
    "qwen3.5-experts": ("Qwen3_5MoeText", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "gemma4": ("Gemma4Text", GLOBAL),
    "gemma4-shared": ("Gemma4Text", SHARED),
    "gemma4-experts": ("Gemma4Text", GLOBAL | EXPERTS | {"enable_moe_block": True, "top_k_experts": 2}),
    "gemma4-unified": ("Gemma4UnifiedText", GLOBAL),
    "gemma4-unified-shared": ("Gemma4UnifiedText", SHARED),
}
"""Configurations of Transformers by a short name: one for every kind of layer that a cache can have."""


def config(name: str) -> PreTrainedConfig:
    """A tiny configuration of :data:`MODELS`."""
    kind, more = MODELS[name]
    made: PreTrainedConfig = getattr(transformers, f"{kind}Config")(**SMALL | more)
    return made


def model(name: str, dtype: torch.dtype = torch.float32, backend: str = "sdpa") -> PreTrainedModel:
    """A seeded model of :data:`MODELS`."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config(name), dtype=dtype, attn_implementation=backend).eval()


def arm(name: str, role: str, keys: str = "fp32", values: str = "fp32", **more: Any) -> records.Arm:
    if "fp8_e4m3" in (keys, values):
        more = {"scales": "unit"} | more
    given = {"name": name, "role": role, "implementation": "reference", "compute": "fp32", "keys": keys, "values": values} | more
    return records.convert(records.Arm, given, "arm")


ARMS = (
    arm("native", "control", implementation="native"),
    arm("own-fp32", "candidate"),
    arm("k16v16", "control", "bf16", "bf16"),
    arm("k16v16-repeat", "repeat", "bf16", "bf16", repeats="k16v16", chunk=16),
    arm("k16v8", "candidate", "bf16", "fp8_e4m3"),
    arm("k8v16", "candidate", "fp8_e4m3", "bf16"),
    arm("k8v8", "candidate", "fp8_e4m3", "fp8_e4m3"),
)
CONTRASTS = tuple(
    records.Contrast(candidate=candidate, baseline=baseline, family=family)
    for candidate, baseline, family in (
        ("own-fp32", "native", "identity"),
        ("k16v16", "native", "loss"),
        ("k16v8", "k16v16", "loss"),
        ("k8v16", "k16v16", "loss"),
        ("k8v8", "k16v16", "loss"),
        ("k16v8", "k8v8", "advantage"),
    )
)


def family(name: str, statistic: str, bound: float, harm: float = 1.0) -> records.Family:
    gate = records.convert(records.Gate, {"statistic": statistic, "bound": bound, "harm": harm}, "gate")
    return records.Family(name=name, gates=(gate,))


FAMILIES = (
    family("identity", "bit_equal", 0.0, 0.0),
    family("loss", "loss_difference_mean", 0.1),
    family("advantage", "kl_difference_mean", 0.0),
)


def llama(seed: int = 7, alteration: records.RescaledKeys | None = None, **changes: Any) -> records.Checkpoint:
    return records.Checkpoint(
        name="tiny", source=f"random:llama#{seed}", license="CC0-1.0", config=CONFIG | changes, seed=seed, alteration=alteration
    )


def spec(documents: int = 2, tokens: int = 40, **changes: Any) -> records.Spec:
    """``tokens`` counts dataset tokens, BOS excluded. Fields of the workload are changed like those of the spec."""
    text = TEXT.encode()
    workload = records.Workload(
        dataset=records.Dataset(name="tiny text", file="tiny.txt", sha256=digest.sha256(text), size=len(text), license="CC0-1.0"),
        inputs="store",
        spans=tuple(records.Span(start=n * tokens, tokens=tokens) for n in range(documents)),
        bos=True,
        split_special_tokens=True,
        chunk=8,
        greedy=records.Greedy(documents=1, prompt_tokens=12, new_tokens=4),
    )
    own = {name: changes.pop(name) for name in list(changes) if name in records.Workload.__struct_fields__}
    found = records.Spec(
        format="kv-ledger/spec/1",
        study="tiny",
        title="A tiny study",
        scope=changes.pop("scope", "quality.loss"),
        checkpoint=changes.pop("checkpoint", llama()),
        workload=msgspec.structs.replace(workload, **own),
        arms=changes.pop("arms", ARMS),
        contrasts=changes.pop("contrasts", CONTRASTS),
        families=changes.pop("families", FAMILIES),
        **changes,
    )
    consistency.check(found)
    return found


def freeze(folder: Path, frozen: records.Spec) -> Path:
    """Lay out a frozen folder."""
    (folder / "inputs").mkdir(parents=True)
    (folder / "spec.json").write_bytes(records.encode(frozen))
    (folder / "inputs" / frozen.workload.dataset.file).write_text(TEXT, encoding="utf-8")
    return folder


class NoPlan:
    """The oracle plans nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def update(self, lengths: Any) -> None: ...


ORACLE = SimpleNamespace(
    write=oracle.write,
    decode=oracle.decode,
    prefill=oracle.prefill,
    Plan=NoPlan,
    available=lambda device: "",
    describe=lambda pages, batch=1: "oracle",
)
"""The kernels' reference in their place, for tests of what stands around them: patch ``geometry.kernels``."""


class Kept:
    """A result folder in memory, of a run that may go on behind ``items`` that are done and without the arms that ``stopped``.

    And a progress that says nothing.
    """

    items = 0
    stopped: dict[str, records.ArmResult] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fields: dict[str, Any] = {}

    def add(self, name: str, data: bytes, media_type: str) -> None:
        self.files[name] = data

    def append(self, name: str, data: bytes) -> None:
        self.files[name] = self.files.get(name, b"") + data

    def update(self, **changes: Any) -> None:
        self.fields |= changes

    def grown(self, name: str) -> bytes:
        return self.files.get(name, b"")

    def keep(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def before(self, arm: str) -> float:
        return 0.0

    def ended(self) -> dict[str, records.ArmResult]:
        return self.stopped

    def done(self) -> int:
        return self.items

    def say(self, line: str) -> None: ...

    def start(self, total: int) -> None: ...

    def advance(self, tokens: int, doing: str) -> None: ...

    def arm(self, name: str) -> records.ArmResult:
        found: records.ArmResult = next(arm for arm in self.fields["arms"] if arm.name == name)
        return found


def sizes(arm: records.ArmResult) -> list[tuple[int, tuple[int, ...]]]:
    """What an arm's cache was found to be, without the addresses."""
    return [(backing.bytes, backing.layers) for backing in arm.backings]
