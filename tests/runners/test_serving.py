"""Fused caches in Transformers models: tiny seeded ones, against the stock cache, by logits."""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ledger.errors import InputError, RefusedError
from ledger.records import Arm
from runners import caches, geometry, scales, serving
from runners.serving import DecodeGraph, FusedCache

from . import tiny

torch.set_num_threads(1)

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
ALTERNATING = {"num_hidden_layers": 4, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "ministral3": ("Ministral3", {"max_position_embeddings": 262144}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6}),
    "gemma3": ("Gemma3Text", {**ALTERNATING, "query_pre_attn_scalar": 64}),
    "gemma2": ("Gemma2", {**ALTERNATING, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0}),
    "qwen3_5": (
        "Qwen3_5Text",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            **ALTERNATING,
            "global_head_dim": 128,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
}
CONFIGS["gemma4_unified"] = ("Gemma4UnifiedText", CONFIGS["gemma4"][1])
STOCK = {"gemma2": "eager"}
CLOSE = 0.02
"""Largest difference of two logits in units of their spread, where only the order of sums differs."""
FORMATS = {
    "k16v16": ("fp16", "fp16", "none", "none"),
    "k16v8": ("fp16", "fp8_e4m3", "unit", "none"),
    "k16v8-dynamic": ("fp16", "fp8_e4m3", "dynamic", "token_head"),
    "k8v16": ("fp8_e4m3", "fp16", "dynamic", "token_head"),
    "k8v8": ("fp8_e4m3", "fp8_e4m3", "dynamic", "token_head"),
}
CHUNKS = [20, 13, 1, 1, 40, 1, 1, 1]
"""Crosses pages of 16 and the window of 24, then a chunk longer than the window, then decode."""


@pytest.fixture(autouse=True)
def _oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' reference in their place: this file is about what stands around them."""
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)


def arm(name: str = "k16v16", **more: Any) -> Arm:
    keys, values, scales, granularity = FORMATS[name]
    given = {"compute": "fp16", "keys": keys, "values": values, "scales": scales, "granularity": granularity, "backend": "kv_fused"}
    return Arm(name=name, role="candidate", **{"implementation": "fused"} | given | more)


def model_of(name: str) -> PreTrainedModel:
    """In fp16: its products are eight times finer than those of bf16, so that a wrong position or window stands out."""
    kind, more = CONFIGS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**COMMON | more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().requires_grad_(False)
    for layer in model.model.layers if name.startswith("gemma4") else ():
        layer.self_attn.q_norm.weight *= 0.1  # its scores are not scaled: untrained norms make them chaotic
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: model_of(name) for name in CONFIGS}


def using(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    model.set_attn_implementation(backend)
    assert model.config._attn_implementation == backend
    return model


def fused(model: PreTrainedModel, name: str = "k16v16", batch: int = 1, tokens: int = 128, **more: Any) -> FusedCache:
    using(model, "kv_fused")
    return FusedCache(model.config, arm(name), batch=batch, max_tokens=tokens, page=16, seed=3, **more)


def words(batch: int, tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor, chunks: list[int], poison: bool = False) -> torch.Tensor:
    """Float32 logits [batch, tokens, vocabulary], the tokens written to the cache chunk by chunk."""
    out = []
    for part in ids.split(chunks, dim=1):
        if poison:
            cache.pool.poison()
        out.append(model(part, **{caches.cache_argument(model): cache}, use_cache=True).logits.float())
    return torch.cat(out, dim=1)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the spread of the logits."""
    return float((one - other).abs().max() / other.std())


@torch.inference_mode()
def complete(model: PreTrainedModel, cache: Any, ids: torch.Tensor, new: int = 12, **more: Any) -> torch.Tensor:
    """Ids that ``generate`` chooses."""
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new, "min_new_tokens": new} | more
    out = model.generate(ids, **{caches.cache_argument(model): cache}, **given)
    return out[:, ids.shape[1] :]


def stock(model: PreTrainedModel, name: str) -> DynamicCache:
    using(model, STOCK.get(name, "sdpa"))
    return DynamicCache(config=model.config)


def padded(model: PreTrainedModel, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of sequences of these lengths, padded on the left."""
    ids, width = words(len(lengths), max(lengths)), max(lengths)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return ids * mask, mask


# ---------------------------------------------------------------- against the stock cache


@pytest.mark.parametrize("name", CONFIGS)
def test_16_bit_pages_give_the_logits_of_the_stock_cache(models, name):
    model, ids = models[name], words(2, sum(CHUNKS))
    own = feed(model, fused(model, batch=2), ids, CHUNKS, poison=True)
    expected = feed(model, stock(model, name), ids, CHUNKS)
    assert own.isfinite().all() and expected.std() > 0.05
    assert distance(own, expected) < CLOSE


@pytest.mark.parametrize("wrong", [23, 25])
def test_a_window_off_by_one_would_be_seen(models, wrong):
    model, ids = models["gemma3"], words(1, sum(CHUNKS))
    expected = feed(model, stock(model, "gemma3"), ids, CHUNKS)
    cache = fused(model)
    for layer in cache.fused:
        if layer.is_sliding:
            object.__setattr__(layer.group, "window", wrong)
    with pytest.raises(InputError, match="slides otherwise"):
        feed(model, cache, ids, CHUNKS)
    cache.reset()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = wrong if layer.self_attn.is_sliding else None
    try:
        assert distance(feed(model, cache, ids, CHUNKS), expected) > 2 * CLOSE
    finally:
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 24 if layer.self_attn.is_sliding else None


@pytest.mark.parametrize(("name", "passed", "words_"), [("llama", 24, "no window"), ("mistral", None, "a window of 24")])
def test_a_module_and_pages_that_disagree_about_a_window_are_refused_both_ways(models, name, passed, words_):
    model = models[name]
    cache = fused(model)
    states = torch.zeros(1, 2, 3, 64, dtype=torch.float16)
    handle, _ = cache.update(states, states, 0)
    with pytest.raises(InputError, match="slides otherwise") as caught:
        serving.attention(model.model.layers[0].self_attn, states, handle, handle, None, sliding_window=passed)
    assert caught.value.expected == words_ and caught.value.found and caught.value.next


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_other_formats_give_the_logits_of_the_reference_cache(models, name, formats):
    model, ids = models[name], words(1, sum(CHUNKS))
    own = feed(model, fused(model, formats), ids, CHUNKS, poison=True)
    using(model, "sdpa")
    reference = caches.build(model.config, arm(formats, implementation="reference", backend="sdpa"))
    expected = feed(model, reference, ids, CHUNKS)
    # A value that lies between two codes may round to either after a product that differs in its last bit.
    assert distance(own, expected) < (CLOSE if formats == "k16v16" else 3 * CLOSE)
    native = feed(model, stock(model, name), ids, CHUNKS)
    assert formats == "k16v16" or distance(own, native) > 2 * distance(own, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "gemma4"])
def test_pages_of_other_numbers_and_sizes_give_the_same_bits(models, name):
    model, ids = models[name], words(1, sum(CHUNKS))
    using(model, "kv_fused")
    one = [
        FusedCache(model.config, arm("k16v8"), batch=1, max_tokens=80, page=page, seed=seed) for page, seed in ((16, 1), (16, 2), (32, 3))
    ]
    logits = [feed(model, cache, ids, CHUNKS) for cache in one]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_chooses_what_it_chooses_from_the_stock_cache(models, name):
    model, ids = models[name], words(2, 30)
    expected = complete(model, stock(model, name), ids)
    assert torch.equal(complete(model, fused(model, batch=2), ids), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding_is_left_out_of_the_cache_and_changes_nothing(models, name):
    model = models[name]
    ids, mask = padded(model, [30, 17, 3])
    cache = fused(model, batch=3)
    own = complete(model, cache, ids, attention_mask=mask)
    assert [cache.pool.length(sequence) for sequence in range(3)] == [41, 28, 14] and cache.get_seq_length() == 41
    for row, length in enumerate([30, 17, 3]):
        alone = complete(model, fused(model), ids[row : row + 1, 30 - length :])
        assert torch.equal(own[row : row + 1], alone)


@torch.inference_mode()
def test_a_chunk_may_be_padding_alone_for_some_sequences(models):
    model = models["gemma3"]
    ids, mask = padded(model, [30, 3, 14])
    cache, logits, seen = fused(model, batch=3), [], 0
    for size in (1, 9, 10, 10):
        seen += size
        positions = (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, -size:]
        part = {"attention_mask": mask[:, :seen], "position_ids": positions, caches.cache_argument(model): cache}
        logits.append(model(ids[:, seen - size : seen], **part).logits.float())
    for row, length in enumerate([30, 3, 14]):
        alone = feed(model, fused(model), ids[row : row + 1, 30 - length :], [length])
        assert distance(torch.cat(logits, dim=1)[row : row + 1, 30 - length :], alone) < CLOSE


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_beams_go_their_own_ways(models, name):
    model, ids = models[name], words(2, 21)
    expected = complete(model, stock(model, name), ids, num_beams=3)
    assert torch.equal(complete(model, fused(model, batch=6), ids, num_beams=3), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_beams_share_the_one_page_that_each_may_have(models, name):
    model, ids = models[name], words(1, 21)
    cache = FusedCache(using(model, "kv_fused").config, arm(), batch=2, max_tokens=60)
    feed(model, cache, ids.expand(2, 21), [21])
    cache.reorder_cache(torch.tensor([0, 0]))
    feed(model, cache, words(2, 1), [1])
    cache.reset()
    own = complete(model, cache, ids, num_beams=2)
    assert torch.equal(own, complete(model, stock(model, name), ids, num_beams=2))


def test_prefill_gets_no_more_of_a_table_than_the_longest_sequence_needs_and_decode_all_of_it(models, monkeypatch):
    model, given = models["llama"], []
    cache = fused(model, batch=2, tokens=1000)

    def noting(kind: str) -> Any:
        kernel = getattr(tiny.ORACLE, kind)

        def call(query: torch.Tensor, pages: Any, table: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            given.append((kind, table.shape[1], table.stride(0)))
            return kernel(query, pages, table, *rest, **more)

        return call

    both = {kind: noting(kind) for kind in ("prefill", "decode")}
    cache.kernels = types.SimpleNamespace(**{**{name: getattr(tiny.ORACLE, name) for name in ("write", "Plan")}, **both})
    feed(model, cache, words(2, 300), [250, 6, 1, 43])
    assert given == [("prefill", 16, 63)] * 4 + [("decode", 63, 63)] * 2 + [("prefill", 32, 63)] * 2


# ---------------------------------------------------------------- the captured step, run eagerly


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_step_gives_the_bits_of_an_ordinary_forward_pass(models, name):
    model = models[name]
    prompt, more = words(2, 30), words(2, 40, seed=4)
    ordinary, stepped = (fused(model, "k16v8", batch=2) for _ in range(2))
    for cache in (ordinary, stepped):
        feed(model, cache, prompt, [30])
    expected = feed(model, ordinary, more, [1] * 40)
    step = DecodeGraph(model, stepped)
    assert torch.equal(torch.stack([step.step(more[:, n]).float() for n in range(40)], dim=1), expected)
    assert stepped.get_seq_length() == 70 and stepped.pool.length(1) == 70
    assert torch.equal(feed(model, stepped, more, [40]), feed(model, ordinary, more, [40]))  # and either goes on


@torch.inference_mode()
def test_a_step_counts_on_from_each_sequences_own_length(models):
    model = models["llama"]
    ids, mask = padded(model, [20, 5])
    more = words(2, 6, seed=4)
    cache = fused(model, batch=2)
    model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **{caches.cache_argument(model): cache})
    step = DecodeGraph(model, cache)
    found = torch.stack([step.step(more[:, n]).float() for n in range(6)], dim=1)
    for row, length in enumerate([20, 5]):
        whole = torch.cat([ids[row : row + 1, 20 - length :], more[row : row + 1]], dim=1)
        alone = feed(model, fused(model), whole, [length, *[1] * 6])
        assert distance(found[row : row + 1], alone[:, length:]) < CLOSE


@torch.inference_mode()
def test_a_step_outlives_a_reset_and_a_crop(models):
    model = models["qwen3"]
    prompt, more = words(2, 10), words(2, 3, seed=4)
    cache = fused(model, batch=2)
    feed(model, cache, prompt, [10])
    step = DecodeGraph(model, cache)
    first = [step.step(more[:, n]).clone() for n in range(3)]
    cache.crop(-3)
    assert all(torch.equal(step.step(more[:, n]), first[n]) for n in range(3))
    cache.reset()
    feed(model, cache, prompt, [10])
    assert all(torch.equal(step.step(more[:, n]), first[n]) for n in range(3))


class Graphs:
    """CUDA graphs without CUDA: a replay runs the step again, from the states as they lay when it was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures, self.step = 0, None
        self.fail = False
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextlib.contextmanager
    def capture(self, graph: Graphs) -> Iterator[None]:
        self.captures += 1
        yield
        if self.fail:
            raise RuntimeError("the capture failed")

    def replay(self) -> None:
        step, cache = self.step, self.step.cache
        assert step._captured == step._addresses()
        seen, held = cache.seen, step.logits
        held.copy_(step._forward())
        step.logits, cache.seen = held, seen
        for layer in cache.fused:
            layer.seen = seen


@pytest.mark.parametrize(("name", "captures"), [("llama", 1), ("qwen3_5", 3)])
@torch.inference_mode()
def test_a_step_is_captured_again_where_its_states_lie_elsewhere(models, monkeypatch, name, captures):
    model, graphs = models[name], Graphs(monkeypatch)
    ids, more = words(2, 20), words(2, 6, seed=4)
    eager, captured = (fused(model, batch=2) for _ in range(2))
    steps = []
    for cache in (eager, captured):
        feed(model, cache, ids, [20])
        steps.append(DecodeGraph(model, cache, capture=cache is captured))
    graphs.step = steps[1]
    orders = {2: [1, 1], 4: [1, 0]}
    for n in range(6):
        for cache in (eager, captured) if n in orders else ():
            cache.reorder_cache(torch.tensor(orders[n]))
        assert torch.equal(steps[1].step(more[:, n]), steps[0].step(more[:, n]))
        assert captured.pool.length(0) == eager.pool.length(0) == captured.seen == 21 + n
    assert graphs.captures == captures
    if name == "qwen3_5":
        captured.reorder_cache(torch.tensor([0, 1]))
        graphs.fail = True
        for _ in range(2):  # it does not go on eagerly
            with pytest.raises(RuntimeError, match="capture failed"):
                steps[1].step(more[:, 0])
        assert captured.pool.lengths([0, 1]).tolist() == [26, 26]
        graphs.fail = False
        assert torch.equal(steps[1].step(more[:, 0]), steps[0].step(more[:, 0]))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
@torch.inference_mode()
def test_a_capture_that_fails_leaves_the_cache_as_it_was(models, monkeypatch, name):
    model, graphs = models[name], Graphs(monkeypatch)
    ids, more = words(2, 32), words(2, 4, seed=4)
    tried, plain = (fused(model, batch=2) for _ in range(2))
    for cache in (tried, plain):
        feed(model, cache, ids, [32])
    graphs.fail = True
    with pytest.raises(RuntimeError, match="capture failed"):
        DecodeGraph(model, tried, capture=True)
    assert [tried.pool.length(row) for row in (0, 1)] == [32, 32] and tried.get_seq_length() == 32
    assert tried.pool.lengths([0, 1]).tolist() == [32, 32]
    assert torch.equal(feed(model, tried, more, [1, 3]), feed(model, plain, more, [1, 3]))


def explained(error: InputError) -> bool:
    return bool(error.expected and error.found and error.next)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_generate_beyond_the_cache_says_so_and_the_cache_goes_on(models, name):
    model, ids = models[name], words(1, 6)
    cache, plain = fused(model, tokens=8), fused(model, tokens=32)
    with pytest.raises(InputError, match="longer than its table") as caught:
        complete(model, cache, ids, new=9)
    assert explained(caught.value) and caught.value.found == "8 held, and 1 more"
    assert cache.pool.length(0) == cache.get_seq_length() == 8
    if name == "llama":
        cache.crop(-2)
        feed(model, plain, ids, [6])
        assert torch.equal(feed(model, cache, ids[:, :2], [2]), feed(model, plain, ids[:, :2], [2]))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize(("batch", "tokens", "words_"), [(2, 9, "longer than its table"), (3, 4, "larger than the cache")])
def test_a_prompt_that_does_not_fit_leaves_an_empty_cache(models, name, batch, tokens, words_):
    model = models[name]
    cache, plain = (fused(model, batch=2, tokens=8) for _ in range(2))
    with pytest.raises(InputError, match=words_) as caught:
        feed(model, cache, words(batch, tokens), [tokens])
    assert explained(caught.value) and not cache.sequences and cache.get_seq_length() == 0
    assert torch.equal(feed(model, cache, words(2, 8), [7, 1]), feed(model, plain, words(2, 8), [7, 1]))


def test_recurrent_states_that_took_in_a_refused_chunk_are_not_used(models):
    model = models["qwen3_5"]
    cache, plain = (fused(model, tokens=8) for _ in range(2))
    feed(model, cache, words(1, 4), [4])
    with pytest.raises(InputError, match="longer than its table"):
        feed(model, cache, words(1, 5), [5])
    with pytest.raises(InputError, match="ahead of the pages") as caught:
        feed(model, cache, words(1, 1), [1])
    assert explained(caught.value)
    cache.reset()
    assert torch.equal(feed(model, cache, words(1, 8), [8]), feed(model, plain, words(1, 8), [8]))


def test_a_step_needs_a_prompt_and_room(models):
    model = models["llama"]
    cache = fused(model, tokens=4)
    with pytest.raises(InputError, match="holds its prompts"):
        DecodeGraph(model, cache)
    feed(model, cache, words(1, 4), [4])
    step = DecodeGraph(model, cache)
    with pytest.raises(InputError, match="longer than its table") as caught:
        step.step(torch.tensor([5]))
    assert explained(caught.value) and cache.pool.length(0) == cache.seen == int(step.lengths) == 4
    using(model, "sdpa")
    with pytest.raises(InputError, match="does not attend through the cache"):
        DecodeGraph(model, cache)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("ids", [[1, 2000], [-1, 1], [1.0, 2.0]])
@torch.inference_mode()
def test_ids_outside_the_vocabulary_are_refused_before_a_step(models, monkeypatch, captured, ids):
    model, graphs = models["llama"], Graphs(monkeypatch)
    cache, plain = (fused(model, batch=2) for _ in range(2))
    for one in (cache, plain):
        feed(model, one, words(2, 6), [6])
    step = graphs.step = DecodeGraph(model, cache, capture=captured)
    with pytest.raises(InputError, match="not of the vocabulary") as caught:
        step.step(torch.tensor(ids))
    assert explained(caught.value) and cache.seen == cache.pool.length(0) == int(step.lengths[0]) == 6
    assert torch.equal(step.step(torch.tensor([5, 6])), feed(model, plain, torch.tensor([[5], [6]]), [1])[:, -1].half())


@pytest.mark.parametrize("place", ["embedding", "kernel", "head"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@torch.inference_mode()
def test_a_step_that_fails_is_undone_or_refused_until_a_reset(models, monkeypatch, name, captured, place):
    model, graphs = models[name], Graphs(monkeypatch)
    prompt, more = words(2, 32), words(2, 3, seed=4)
    cache, plain = (fused(model, batch=2) for _ in range(2))
    for one in (cache, plain):
        feed(model, one, prompt, [32])
    step = graphs.step = DecodeGraph(model, cache, capture=captured)

    def fail(*args: Any, **more: Any) -> None:
        raise RuntimeError("broke off")

    with monkeypatch.context() as patch:
        if place == "kernel":
            parts = {part: getattr(tiny.ORACLE, part) for part in ("write", "prefill", "Plan")}
            patch.setattr(cache, "kernels", types.SimpleNamespace(decode=fail, **parts))
        else:
            patch.setattr(model.get_input_embeddings() if place == "embedding" else model.lm_head, "forward", fail)
        with pytest.raises(RuntimeError, match="broke off"):
            step.step(more[:, 0])
    assert [cache.pool.length(row) for row in (0, 1)] == step.lengths.tolist() == [32, 32] and cache.get_seq_length() == 32
    if name == "qwen3_5":
        for act in (lambda: step.step(more[:, 0]), lambda: feed(model, cache, more[:, :1], [1])):
            with pytest.raises(InputError, match="ahead of the pages"):
                act()
        cache.reset()
        feed(model, cache, prompt, [32])
    expected = feed(model, plain, more, [1, 1, 1])
    for n in range(3):
        assert torch.equal(step.step(more[:, n]).float(), expected[:, n])


@torch.inference_mode()
def test_a_pass_whose_last_layer_failed_to_store_is_refused_until_a_reset(models, monkeypatch):
    model, count = models["llama"], []
    cache = fused(model)
    feed(model, cache, words(1, 4), [4])

    def write(*args: Any) -> None:
        count.append(1)
        if len(count) == len(cache.fused):
            raise RuntimeError("broke off")
        tiny.ORACLE.write(*args)

    parts = {part: getattr(tiny.ORACLE, part) for part in ("decode", "prefill", "Plan")}
    cache.kernels = types.SimpleNamespace(write=write, **parts)
    with pytest.raises(RuntimeError, match="broke off"):
        feed(model, cache, words(1, 1), [1])
    for act in (lambda: feed(model, cache, words(1, 1), [1]), lambda: cache.crop(-1), lambda: DecodeGraph(model, cache)):
        with pytest.raises(InputError, match="broke off") as caught:
            act()
        assert explained(caught.value)
    cache.reset()
    feed(model, cache, words(1, 4), [4])


# ---------------------------------------------------------------- what else changes a cache


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been(models, name):
    model, ids = models[name], words(2, 20)
    cropped, plain = fused(model, "k16v8", batch=2), fused(model, "k16v8", batch=2)
    feed(model, cropped, ids, [15, 5])
    cropped.crop(-5)
    cropped.crop(0)
    feed(model, plain, ids[:, :15], [15])
    assert torch.equal(feed(model, cropped, ids, [20]), feed(model, plain, ids, [20]))
    with pytest.raises(ValueError, match="negative"):
        cropped.crop(1)


def test_a_cache_is_cropped_into_a_window_only_as_far_as_it_is_held(models):
    model = models["mistral"]
    cache = fused(model)
    feed(model, cache, words(1, 70), [60, 10])
    assert not cache.is_croppable
    cache.crop(-10)
    with pytest.raises(InputError, match="its window of 24"):
        cache.crop(-20)


@torch.inference_mode()
def test_all_sequences_are_cropped_or_none(models):
    model = models["llama"]
    ids, mask = padded(model, [6, 2])
    cache, plain = (fused(model, batch=2) for _ in range(2))
    for one in (cache, plain):
        model(ids, attention_mask=mask, **{caches.cache_argument(model): one})
    with pytest.raises(InputError, match="Sequence 1 cannot be cropped"):
        cache.crop(-4)
    assert [cache.pool.length(row) for row in (0, 1)] == [6, 2] and cache.seen == 6
    assert torch.equal(feed(model, cache, ids[:, :2], [2]), feed(model, plain, ids[:, :2], [2]))


def test_a_recurrent_cache_is_not_cropped_and_goes_on(models):
    model = models["qwen3_5"]
    cache, plain = fused(model), fused(model)
    for one in (cache, plain):
        feed(model, one, words(1, 6), [6])
    with pytest.raises(RefusedError) as caught:
        cache.crop(-2)
    assert caught.value.code == "recurrent_layers" and cache.pool.length(0) == 6
    cache.crop(0)
    assert torch.equal(feed(model, cache, words(1, 2), [2]), feed(model, plain, words(1, 2), [2]))


@pytest.mark.parametrize(
    ("act", "words_"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0])), "do not name"),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), "do not name"),
        (lambda cache: cache.reorder_cache(torch.tensor([0, -1])), "do not name"),
        (lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0])), "do not name"),
        (lambda cache: cache.batch_select_indices(torch.tensor([7])), "do not name"),
        (lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.int64)), "do not name"),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), "do not name"),
        (lambda cache: cache.batch_repeat_interleave(0), "at least once"),
        (lambda cache: cache.batch_repeat_interleave(1.5), "whole number"),
        (lambda cache: cache.batch_repeat_interleave(2), "another 2 sequences"),
        (lambda cache: cache.crop(-1.5), "whole number"),
    ],
)
def test_a_batch_that_cannot_be_leaves_the_cache_as_it_was(models, act, words_):
    model = models["llama"]
    cache, plain = fused(model, batch=3), fused(model, batch=3)
    for one in (cache, plain):
        feed(model, one, words(2, 6), [6])
    with pytest.raises(InputError, match=words_) as caught:
        act(cache)
    assert explained(caught.value) and int(cache.pool._live.sum()) == len(cache.sequences) == 2
    assert torch.equal(feed(model, cache, words(2, 2), [2]), feed(model, plain, words(2, 2), [2]))


@pytest.mark.parametrize(
    "act",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(2),
    ],
)
def test_an_empty_cache_has_no_batch_to_change(models, act):
    with pytest.raises(InputError) as caught:
        act(fused(models["llama"]))
    assert explained(caught.value) and "prefill first" in caught.value.next


def test_a_mask_selects_sequences(models):
    cache = fused(models["llama"], batch=2)
    feed(models["llama"], cache, words(2, 6), [6])
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.sequences == [0]


def test_sequences_are_selected_and_repeated(models):
    model, ids = models["gemma3"], words(3, 30)
    more = words(1, 5, seed=4)
    cache = fused(model, "k16v8", batch=4)
    feed(model, cache, ids, [30])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    found = feed(model, cache, more.expand(4, 5), [3, 1, 1])
    for row, source in enumerate([2, 2, 0, 0]):
        alone = fused(model, "k16v8")
        feed(model, alone, ids[source : source + 1], [30])
        assert distance(found[row : row + 1], feed(model, alone, more, [3, 1, 1])) < CLOSE
    with pytest.raises(InputError, match="no room for another 4"):
        cache.batch_repeat_interleave(2)
    assert int(cache.pool._live.sum()) == 4


def test_recurrent_states_are_neither_cut_nor_repeated(models):
    cache = fused(models["qwen3_5"], batch=2)
    feed(models["qwen3_5"], cache, words(2, 4), [4])
    with pytest.raises(RefusedError) as caught:
        cache.batch_repeat_interleave(2)
    assert caught.value.code == "recurrent_layers"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_a_reset_cache_behaves_as_a_new_one(models, name):
    model = models[name]
    cache, new = fused(model, "k8v8", batch=2), fused(model, "k8v8", batch=2)
    feed(model, cache, words(2, 50, seed=9), [40, 10])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.pool.free_pages(cache.fused[0].index) == new.pool.free_pages(cache.fused[0].index)
    assert torch.equal(feed(model, cache, words(2, 20), [20]), feed(model, new, words(2, 20), [20]))


# ---------------------------------------------------------------- facts


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_cache_measures_as_requested(models, name, formats):
    model, asked = models[name], arm(formats)
    cache = fused(model, formats)
    assert geometry.measured(cache) == ()
    feed(model, cache, words(1, 40), [39, 1])
    requested = {field: getattr(asked, field) for field in ("implementation", "compute", "keys", "values", "scales", "granularity")}
    assert caches.effective_policy(cache) == requested
    assert caches.measured_policy(cache, model.dtype) == requested
    assert geometry.measured(cache) == geometry.declared(model.config)


@pytest.mark.parametrize("name", CONFIGS)
def test_backings_are_one_a_side_and_group_and_the_recurrent_states(models, name):
    model = models[name]
    cache = fused(model, "k16v8-dynamic", batch=2)
    feed(model, cache, words(2, 5), [5])
    listed = caches.backings(cache)
    assert len({backing.address for backing in listed}) == len(listed)
    kinds = [backing.kind for backing in listed]
    groups = 2 if name.startswith("gemma") else 1
    assert kinds.count("scales") == groups and kinds.count("attention") + kinds.count("sliding") == 2 * groups
    assert kinds.count("recurrent") == kinds.count("convolution") == (3 if name == "qwen3_5" else 0)
    layers = sorted(layer for b in listed if b.holds in ("keys", "state") and b.kind != "convolution" for layer in b.layers)
    assert layers == list(range(len(cache.layers)))
    dims = {64, 128} if name.startswith("gemma4") else {64}
    assert {group.key_dim for group in cache.pool.groups} == dims


def test_a_budget_is_enforced_and_can_size_the_cache(models):
    config = models["llama"].config
    with pytest.raises(RefusedError) as caught:
        FusedCache(config, arm(), batch=1, max_tokens=1000, budget_bytes=2**19)
    assert caught.value.code == "budget"
    tokens = {f: FusedCache(config, arm(f), batch=1, max_tokens=None, budget_bytes=3 * 2**20).pool.tokens for f in ("k16v16", "k16v8")}
    assert tokens == {"k16v16": 3072, "k16v8": 4096}


# ---------------------------------------------------------------- refusals


def call(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **more: Any) -> None:
    with torch.inference_mode():
        model(ids, **{caches.cache_argument(model): cache}, **more)


@pytest.mark.parametrize("cache", [None, "stock"])
def test_the_attention_function_wants_its_cache(models, cache):
    model = using(models["llama"], "kv_fused")
    with pytest.raises(RefusedError, match="fused cache") as caught:
        call(model, cache and DynamicCache(config=model.config), words(1, 3), use_cache=cache is not None)
    assert caught.value.code == "implementation"


@pytest.mark.parametrize(
    ("mask", "words_"),
    [
        (torch.tensor([[1, 1, 1, 0]]), "left padding"),
        (torch.tensor([[1, 0, 1, 1]]), "left padding"),
        (torch.tensor([[1, 1, 1]]), "padding mask"),
        (torch.ones(2, 4), "padding mask"),
        (torch.ones(1, 1, 4, 4, dtype=torch.bool), "padding mask"),
    ],
)
def test_a_mask_that_is_not_left_padding_is_refused(models, mask, words_):
    model = models["llama"]
    with pytest.raises(InputError, match=words_):
        call(model, fused(model), words(1, 4), attention_mask=mask)


def test_a_mask_that_disagrees_with_what_is_held_is_refused(models):
    model = models["llama"]
    cache = fused(model)
    call(model, cache, words(1, 4))
    with pytest.raises(InputError, match="3 ones before the chunk"):
        call(model, cache, words(1, 1), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))


def test_another_batch_and_too_many_tokens_are_refused(models):
    model = models["llama"]
    cache = fused(model, batch=2, tokens=8)
    call(model, cache, words(2, 4))
    with pytest.raises(InputError, match="batch changed"):
        call(model, cache, words(1, 1))
    with pytest.raises(InputError, match="longer than its table"):
        call(model, cache, words(2, 5))
    call(model, cache, words(2, 4))  # nothing was changed


def test_a_forward_pass_that_broke_off_is_noticed(models):
    model = models["llama"]
    cache = fused(model)
    states = torch.zeros(1, 2, 3, 64, dtype=torch.float16)
    handle, _ = cache.update(states, states, 0)
    serving.attention(model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 64, dtype=torch.float16), handle, handle, None)
    with pytest.raises(InputError, match="out of step"):
        call(model, cache, words(1, 4))


def test_dropout_and_masks_of_other_forms_are_refused(models):
    with pytest.raises(RefusedError, match="dropout"):
        cache = fused(models["llama"])
        states = torch.zeros(1, 2, 3, 64, dtype=torch.float16)
        handle, _ = cache.update(states, states, 0)
        serving.attention(torch.nn.Identity(), states, handle, handle, None, dropout=0.1)
    with pytest.raises(RefusedError, match="masks alone"):
        serving.padding_mask(attention_mask=None, allow_is_causal_skip=False)


def test_pages_stay_on_their_device_and_layers_are_not_reordered_alone(models):
    layer = fused(models["llama"]).fused[0]
    layer.prefetch()
    with pytest.raises(RefusedError):
        layer.offload()
    with pytest.raises(InputError):
        layer.reorder_cache(torch.tensor([0]))


def test_a_dropped_cache_gives_its_memory_back_at_once(models):
    cache = fused(models["llama"])
    feed(models["llama"], cache, words(1, 3), [2, 1])
    layer, gone = cache.fused[0], weakref.ref(cache.pool)
    del cache
    assert gone() is None
    with pytest.raises(InputError, match="cache is gone"):
        layer.get_max_length()


FIXED = {"keys": "fp8_e4m3", "values": "fp8_e4m3", "scales": "fixed", "granularity": "head", "scale_source": "0" * 64}


def calibrated(model: PreTrainedModel, granularity: str = "head") -> scales.FixedScales:
    """Of a head 0.01, 0.02 and so on; values twice that. Recurrent layers have none."""
    own = [layer for layer in geometry.declared(model.config) if layer.kind != "recurrent"]
    keys = {layer.layer: torch.arange(1, layer.kv_heads + 1) / 100 for layer in own}
    return scales.FixedScales(granularity, keys, {layer: 2 * scale for layer, scale in keys.items()})


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "gemma4", "gemma4_unified"])
def test_fixed_scales_give_the_logits_of_the_reference_that_has_the_same(models, name):
    model, ids = models[name], words(1, sum(CHUNKS))
    own = using(model, "kv_fused") and FusedCache(model.config, arm(**FIXED), batch=1, max_tokens=128, page=16, fixed=calibrated(model))
    logits = feed(model, own, ids, CHUNKS)
    assert caches.measured_policy(own, model.dtype)["scales"] == "fixed" and caches.effective_policy(own)["granularity"] == "head"
    own.reset()
    assert torch.equal(feed(model, own, ids, CHUNKS), logits)
    using(model, STOCK.get(name, "sdpa"))
    asked = arm(**FIXED, implementation="reference", backend="sdpa")
    reference = caches.build(model.config, asked, fixed=calibrated(model))
    assert distance(logits, feed(model, reference, ids, CHUNKS)) < 3 * CLOSE
    other = caches.build(model.config, arm("k8v8", implementation="reference", backend="sdpa"))
    assert distance(logits, feed(model, other, ids, CHUNKS)) > 0


def test_fixed_scales_that_are_missing_or_do_not_fit_are_refused_before_anything_is_allocated(models, monkeypatch):
    monkeypatch.setattr(serving, "Pool", lambda *arguments, **options: pytest.fail("allocated"))
    llama, other = models["llama"], calibrated(models["gemma3"])
    for given, what in (
        (None, "none were given"),
        (other, "not of the model's layers"),
        (calibrated(llama, "tensor"), "are not those that"),
    ):
        with pytest.raises(RefusedError, match=what) as caught:
            FusedCache(llama.config, arm(**FIXED), batch=1, max_tokens=8, fixed=given)
        assert caught.value.code == "scale_policy" and caught.value.next
    with pytest.raises(RefusedError, match="These scales are not stored") as caught:
        FusedCache(llama.config, arm(**FIXED | {"granularity": "tensor"}), batch=1, max_tokens=8)
    assert caught.value.code == "scale_policy" and "token_head" in caught.value.expected


@pytest.mark.parametrize(("device", "error"), [("foo", InputError), ("cuda:99", RefusedError), ("meta", RefusedError)])
def test_a_device_that_is_not_there_is_refused(models, device, error):
    with pytest.raises(error) as caught:
        fused(models["llama"], device=device)
    assert explained(caught.value)


def test_another_arm_gets_no_fused_cache(models):
    with pytest.raises(InputError, match="fused arms"):
        FusedCache(models["llama"].config, arm(implementation="reference", backend="sdpa"), batch=1, max_tokens=8)


@pytest.mark.parametrize("page", [8, 24, 0, -16, 1 << 20, 16.5, None])
def test_pages_that_the_kernels_do_not_read_are_refused_before_anything_is_allocated(models, monkeypatch, page):
    monkeypatch.setattr(serving, "Pool", lambda *arguments, **options: pytest.fail("allocated"))
    with pytest.raises(InputError, match=r"A page has|Not a whole number: page") as caught:
        FusedCache(models["llama"].config, arm(), batch=1, max_tokens=64, page=page)
    assert explained(caught.value)


def test_a_backward_pass_through_the_cache_is_refused(models):
    model = using(models["llama"], "kv_fused")
    ids = words(1, 5)
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(model.model.layers[1].self_attn, part).weight
        weight.requires_grad_(True)
        try:
            logits = model(ids, **{caches.cache_argument(model): fused(model)}, use_cache=True).logits
            with pytest.raises(RefusedError, match="has no gradient"):
                logits.float().sum().backward()
        finally:
            weight.requires_grad_(False)
        assert weight.grad is None
    assert torch.equal(feed(model, fused(model), ids, [5]), logits.float())


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_a_deep_copy_goes_its_own_way(models, name):
    model = models[name]
    ids, other = words(2, 40), words(2, 10, 9)
    prompt, more = ids[:, :30], ids[:, 30:]
    expected = []
    for part in (more, other):
        cache = fused(model, "k16v8-dynamic", batch=2)
        feed(model, cache, prompt, [30])
        expected.append(feed(model, cache, part, [6, 1, 3]))
    cache = fused(model, "k16v8-dynamic", batch=2)
    feed(model, cache, prompt, [30])
    with torch.inference_mode():
        one = copy.deepcopy(cache)
    two = copy.deepcopy(one)
    assert torch.equal(feed(model, one, more, [6, 1, 3]), expected[0])
    assert torch.equal(feed(model, cache, other, [6, 1, 3]), expected[1])
    cache.reset()
    del cache
    two.pool.poison()
    assert torch.equal(feed(model, two, other, [6, 1, 3]), expected[1])
    own = [{backing.address for backing in made.pool.backings()} for made in (one, two)]
    assert not own[0] & own[1]
    assert all(layer.pages.keys.data_ptr() == two.pool.pages(layer.index).keys.data_ptr() for layer in two.fused)


def test_a_step_of_a_deep_copy_is_its_own(models):
    model, ids = models["gemma3"], words(2, 30)
    cache = fused(model, "k16v8", batch=2)
    feed(model, cache, ids, [30])
    twin = copy.deepcopy(cache)
    more = words(2, 2, 4)
    found = DecodeGraph(model, twin).step(more[:, 0])
    assert cache.pool.length(0) == 30 and twin.pool.length(0) == 31
    assert torch.equal(DecodeGraph(model, cache).step(more[:, 0]), found)


def test_layers_that_are_copied_alone_are_refused(models):
    model, ids = models["llama"], words(1, 8)
    cache = fused(model)
    feed(model, cache, ids, [8])
    twin = copy.copy(cache)
    twin.layers = copy.deepcopy(cache.layers)
    with pytest.raises(InputError, match="Layer 0 is a copy") as caught:
        feed(model, twin, ids, [8])
    assert explained(caught.value) and cache.seen == 8
    feed(model, cache, ids, [8])


def test_a_deep_copy_without_memory_is_refused(models, monkeypatch):
    cache = fused(models["llama"])
    monkeypatch.setattr("runners.paged._free_bytes", lambda device: sum(backing.bytes for backing in cache.pool.backings()))
    with pytest.raises(RefusedError) as caught:
        copy.deepcopy(cache)
    assert caught.value.code == "budget"


def test_a_deep_copy_has_the_kernels_themselves(models, _kernels):
    assert copy.deepcopy(fused(models["llama"])).kernels is geometry.kernels()


# ---------------------------------------------------------------- with the kernels themselves, interpreted


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from runners import fused as kernels

    assert kernels.interpreting(), "Triton was loaded before TRITON_INTERPRET was set"
    monkeypatch.setattr(geometry, "kernels", lambda: kernels)


INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy")


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize(("name", "formats"), [("llama", one) for one in FORMATS] + [(one, "k16v8") for one in CONFIGS if one != "llama"])
def test_the_kernels_give_the_logits_of_their_reference(models, monkeypatch, _kernels, name, formats):
    model, ids = models[name], words(1, 40)
    own = feed(model, fused(model, formats), ids, [20, 17, 1, 1, 1], poison=True)
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    expected = feed(model, fused(model, formats), ids, [20, 17, 1, 1, 1])
    assert distance(own, expected) < 3 * CLOSE


@pytest.mark.slow
@INTERPRETED
def test_the_kernels_give_the_logits_of_the_reference_with_the_same_fixed_scales(models, _kernels):
    model, ids = using(models["llama"], "kv_fused"), words(1, 40)
    cache = FusedCache(model.config, arm(**FIXED), batch=1, max_tokens=64, page=16, seed=3, fixed=calibrated(model))
    own = feed(model, cache, ids, [20, 17, 1, 1, 1])
    using(model, "sdpa")
    asked = arm(**FIXED, implementation="reference", backend="sdpa")
    expected = feed(model, caches.build(model.config, asked, fixed=calibrated(model)), ids, [20, 17, 1, 1, 1])
    assert distance(own, expected) < 3 * CLOSE


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.inference_mode()
def test_a_step_of_the_kernels_gives_the_bits_of_a_forward_pass_padded_or_not(models, _kernels, name):
    model = models[name]
    ids, mask = padded(model, [26, 9])
    more = words(2, 3, seed=4)
    caches_ = [fused(model, "k16v8", batch=2) for _ in range(2)]
    for cache in caches_:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions, **{caches.cache_argument(model): cache})
    step = DecodeGraph(model, caches_[0])
    for n in range(3):
        positions = torch.tensor([[26 + n], [9 + n]])
        part = {"position_ids": positions, caches.cache_argument(model): caches_[1]}
        assert torch.equal(step.step(more[:, n]), model(more[:, n : n + 1], **part).logits[:, -1])


def test_what_runs_is_described_for_the_sequences_that_take_part(models, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(tiny.ORACLE, "describe", lambda pages, batch=1: asked.append(batch) or "")
    cache = fused(models["llama"], batch=4)
    cache.describe()
    cache.sequences = [cache.pool.add()]
    cache.describe()
    assert asked == [4, 1]
