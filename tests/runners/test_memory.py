"""What caches take at each context, counted twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ledger import memory as judging
from ledger import records
from ledger.records import consistency
from runners import captures, geometry, memory
from tests import factories

from . import tiny
from .test_scales import LAYOUTS

NATIVE = tiny.arm("native", "control", "bf16", "bf16", implementation="native", compute="bf16")
K16V8 = tiny.arm("k16v8", "candidate", "bf16", "fp8_e4m3", compute="bf16")
DYNAMIC = tiny.arm("k8v8", "candidate", "fp8_e4m3", "fp8_e4m3", compute="bf16", scales="dynamic", granularity="token_head")
CONTEXTS = (16, 40)
GEMMA = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
QWEN = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def spec(*arms: records.Arm, checkpoint: records.Checkpoint | None = None, **changes: Any) -> records.Spec:
    plan = records.Memory(**{"contexts": CONTEXTS, "chunk": 16, "budget_bytes": 1 << 20, **changes})
    found = records.Spec(
        format="kv-ledger/spec/3", study="tiny-memory", title="Tiny", scope="state memory", checkpoint=checkpoint or tiny.llama(),
        workload=None, arms=arms or (NATIVE, K16V8, DYNAMIC), contrasts=(), families=(), memory=plan,
    )  # fmt: skip
    consistency.check(found)
    return found


def seeded(kind: str, config: dict[str, Any]) -> records.Checkpoint:
    return records.Checkpoint(name="tiny", source=f"random:{kind}#7", license="none", config=tiny.CONFIG | config, seed=7)


def run(frozen: records.Spec) -> tiny.Kept:
    folder = tiny.Kept()
    memory.run(frozen, Path("nowhere"), folder, folder)
    return folder


def lines(folder: tiny.Kept) -> dict[tuple[str, int], dict[str, Any]]:
    found = [json.loads(line) for line in folder.files["memory.jsonl"].splitlines()]
    return {(line["arm"], line["context"]): line for line in found}


def judged(frozen: records.Spec, folder: tiny.Kept) -> tuple[dict[str, records.Decision], dict[tuple[str, str], float]]:
    result = factories.result(frozen, folder.files, arms=folder.fields["arms"])
    found = judging.read(frozen, folder.files)
    harness = factories.harness()
    decisions = {decision.candidate: decision for decision in judging.decide(frozen, result, found, harness)}
    return decisions, {(one.arm, one.name): one.value for one in judging.measure(frozen, found)}


def test_bytes_by_kind_are_measured_at_every_context() -> None:
    frozen = spec()
    folder = run(frozen)
    decisions, figures = judged(frozen, folder)
    assert {decision.status for decision in decisions.values()} == {"measured"}
    for context in CONTEXTS:
        values = 2 * 2 * 16 * context  # layers, heads, dimension
        assert figures["native", f"state_bytes/attention/c{context}"] == figures["native", f"state_bytes/total/c{context}"] == 4 * values
        assert figures["k16v8", f"state_bytes/total/c{context}"] == 3 * values and figures["k16v8", f"ratio/c{context}"] == 0.75
        assert figures["k8v8", f"state_bytes/attention/c{context}"] == 2 * values
        assert figures["k8v8", f"state_bytes/scales/c{context}"] == 2 * 2 * 2 * context * 4
        for arm in ("native", "k16v8", "k8v8"):
            assert figures[arm, f"allocator_bytes/c{context}"] == figures[arm, f"state_bytes/total/c{context}"]
    assert ("native", "ratio/c16") not in figures
    assert {line["method"] for line in lines(folder).values()} == {"storages"}
    assert max(backing.tokens for backing in folder.arm("k8v8").backings) == 40


def test_a_window_holds_no_more_at_a_longer_context() -> None:
    frozen = spec(K16V8_CONTROL, checkpoint=seeded("gemma3_text", GEMMA))
    decisions, figures = judged(frozen, run(frozen))
    assert decisions["own"].status == "measured"
    assert figures["own", "state_bytes/sliding/c16"] == figures["own", "state_bytes/sliding/c40"] == 2 * 7 * 16 * 3
    assert figures["own", "state_bytes/attention/c40"] == 2 * 40 * 16 * 3


K16V8_CONTROL = tiny.arm("own", "control", "bf16", "fp8_e4m3", compute="bf16")


def test_recurrent_and_convolution_states_are_kinds_of_their_own() -> None:
    native = tiny.arm("native", "control", "fp32", "fp32", implementation="native")
    frozen = spec(native, checkpoint=seeded("qwen3_5_text", QWEN))
    decisions, figures = judged(frozen, run(frozen))
    assert (decisions["native"].status, decisions["native"].reason) == ("measured", "at 16, 40 tokens")
    for kind in ("recurrent", "convolution"):
        assert figures["native", f"state_bytes/{kind}/c16"] == figures["native", f"state_bytes/{kind}/c40"] > 0
    assert figures["native", "state_bytes/attention/c40"] > figures["native", "state_bytes/attention/c16"]


@pytest.mark.parametrize(("plan", "code"), [({"budget_bytes": 4 * 2 * 2 * 16 * 39}, "budget"), ({"contexts": (16, 513)}, "positions")])
def test_a_context_that_does_not_fit_is_said_not_to_and_fails_nothing(plan: dict[str, Any], code: str) -> None:
    frozen = spec(NATIVE, **plan)
    folder = run(frozen)
    decisions, figures = judged(frozen, folder)
    assert folder.arm("native").outcome == "completed"
    last = lines(folder)["native", frozen.memory.contexts[1]]
    assert last["refused"].startswith(f"{code}: ") and (last["backings"], last["counted"]) == ([], 0)
    assert decisions["native"].status == "measured"
    assert decisions["native"].reason.startswith("at 16 tokens; ") and f"do not fit ({code}" in decisions["native"].reason
    assert {name for _, name in figures} == {"state_bytes/attention/c16", "state_bytes/total/c16", "allocator_bytes/c16"}


def test_an_arm_of_which_no_context_fits_is_unsupported() -> None:
    frozen = spec(NATIVE, budget_bytes=100)
    decisions, figures = judged(frozen, run(frozen))
    assert decisions["native"].status == "unsupported" and not figures


def test_a_cache_that_takes_more_than_it_should_meets_the_budget_by_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "least_bytes", lambda *arguments: 0)
    frozen = spec(NATIVE, budget_bytes=4 * 2 * 2 * 16 * 32)
    assert "grew beyond" in lines(run(frozen))["native", 40]["refused"]


def test_storages_that_no_backing_shows_make_the_arm_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = memory.losses.begin

    def begin(state: Any) -> None:
        plain(state)
        state.cache.hidden = {"kept": [torch.zeros(25)]}

    monkeypatch.setattr(memory.losses, "begin", begin)
    frozen = spec(NATIVE)
    decisions, _ = judged(frozen, run(frozen))
    assert decisions["native"].status == "invalid" and "the backings have 4,096 bytes and the storages 4,196" in decisions["native"].reason


def test_storages_are_counted_once_wherever_they_are_held() -> None:
    base = torch.zeros(10)
    assert memory.storages({"a": [base, base[2:]], "b": (base.view(2, 5), {"c": torch.zeros(3)})}) == 52


def test_a_fused_cache_has_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    fused = tiny.arm("fused", "candidate", "bf16", "fp8_e4m3", implementation="fused", compute="bf16", backend="kv_fused")
    shape = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    frozen = spec(NATIVE, fused, checkpoint=tiny.llama(**shape))
    decisions, figures = judged(frozen, run(frozen))
    assert {decision.status for decision in decisions.values()} == {"measured"}, decisions
    assert figures["fused", "state_bytes/total/c40"] >= 40 * 64 * 3


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ({"counted": 4096}, "measured"),
        ({"counted": 4096 + 512 * 4 + (2 << 20)}, "measured"),
        ({"counted": 4096 + 512 * 4 + (2 << 20) + 1}, "invalid"),
        ({"counted": 4095}, "invalid"),
        ({"counted": 4096 + 16 * 4, "method": "storages"}, "measured"),
        ({"counted": 4096 + 16 * 4 + 1, "method": "storages"}, "invalid"),
        ({"counted": 4095, "method": "storages"}, "invalid"),
        (None, "invalid"),
    ],
)
def test_the_two_counts_must_agree(line: dict[str, Any] | None, status: str) -> None:
    from ledger import digest

    frozen = spec(NATIVE, contexts=(16,))
    backings = [{"kind": "attention", "holds": "keys", "dtype": "bf16", "bytes": 1024, "layers": [layer]} for layer in range(4)]
    value = {"arm": "native", "context": 16, "refused": "", "backings": backings, "counted": 0, "method": "allocator"}
    files = {"memory.jsonl": b"" if line is None else digest.canonical(value | line) + b"\n"}
    result = factories.result(frozen, files)
    found = judging.decide(frozen, result, judging.read(frozen, files), factories.harness())
    assert found[0].status == status


def test_a_spec_of_repeated_or_no_contexts_is_refused() -> None:
    for contexts in ((), (16, 16), (40, 16)):
        with pytest.raises(Exception, match="context"):
            spec(contexts=contexts)
    assert msgspec.structs.asdict(spec())["memory"].contexts == CONTEXTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_counted_twice(name: str) -> None:
    config = {**tiny.SMALL, **tiny.MODELS[name][1], "max_position_embeddings": 512}
    checkpoint = records.Checkpoint(name="tiny", source=f"random:{LAYOUTS[name]}#7", license="CC0-1.0", config=config, seed=7)
    paged = tiny.arm("paged", "candidate", "bf16", "fp8_e4m3", compute="bf16", scales="dynamic", granularity="page_head")
    frozen = spec(NATIVE, K16V8, paged, checkpoint=checkpoint)
    decisions, figures = judged(frozen, run(frozen))
    assert {arm: decision.reason for arm, decision in decisions.items() if decision.status != "measured"} == {}
    assert figures["k16v8", "state_bytes/attention/c40"] == 0.75 * figures["native", "state_bytes/attention/c40"]


def test_on_a_gpu_what_was_asked_for_counts_and_not_what_a_pool_gave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"requested_bytes.all.current": 5, "allocated_bytes.all.current": 512})
    assert memory._allocated("cuda") == 5
