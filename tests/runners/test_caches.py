"""Physical caches on tiny seeded models: what is stored, what is read back, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Cache,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from ledger.errors import RefusedError
from ledger.records import Arm
from runners import caches, fp8

torch.set_num_threads(1)

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, num_hidden_layers=2),
    "qwen3": Qwen3Config(**COMMON, head_dim=16, num_hidden_layers=2),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
}
FORMATS = {
    "own-fp32": ("fp32", "fp32", "none", "none"),
    "k16v16": ("bf16", "bf16", "none", "none"),
    "half": ("fp16", "fp16", "none", "none"),
    "k16v8": ("bf16", "fp8_e4m3", "unit", "none"),
    "k8v16": ("fp8_e4m3", "bf16", "unit", "none"),
    "k8v8": ("fp8_e4m3", "fp8_e4m3", "unit", "none"),
    "k16v8-dynamic": ("bf16", "fp8_e4m3", "dynamic", "token_head"),
    "k8v8-dynamic": ("fp8_e4m3", "fp8_e4m3", "dynamic", "token_head"),
}
PREFILL_IN_CHUNKS = [5, 5, 1, 1, 1, 3, 12, 1, 1, 1]  # crosses the window of 8, then a chunk longer than it, then decode
LONG_PREFILL = [20, 1, 1, 2, 1]


def arm(name: str, compute: str = "fp32") -> Arm:
    if name == "native":
        return Arm(name=name, role="control", implementation="native", compute=compute, keys=compute, values=compute)
    keys, values, scales, granularity = FORMATS[name]
    return Arm(
        name=name,
        role="candidate",
        implementation="reference",
        compute=compute,
        keys=keys,
        values=values,
        scales=scales,
        granularity=granularity,
    )


def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(7)
    return Auto.from_config(CONFIGS[name], dtype=dtype, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: model_of(name) for name in CONFIGS}


@torch.inference_mode()
def feed(model: PreTrainedModel, cache: Cache, chunks: list[int], batch: int = 1, seed: int = 3) -> torch.Tensor:
    """Logits [batch, tokens, vocabulary] of random tokens, written to the cache chunk by chunk."""
    ids = torch.randint(3, 97, (batch, sum(chunks)), generator=torch.Generator().manual_seed(seed))
    return torch.cat([model(part, cache=cache, use_cache=True).logits for part in ids.split(chunks, dim=1)], dim=1)


def states(tokens: int, batch: int = 2, heads: int = 2, dim: int = 8, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, tokens, dim, generator=made) for _ in range(2))  # type: ignore[return-value]


def layer(name: str, sliding: bool = False) -> caches.ReferenceLayer:
    policy = caches.Policy("fp32", *FORMATS[name])
    return caches.ReferenceSlidingLayer(policy, 8) if sliding else caches.ReferenceLayer(policy)


def held(of: caches.ReferenceLayer) -> dict[str, torch.Tensor]:
    """The stored tensors, fp8 as bytes."""
    named = {name: getattr(of, name) for name in ("keys", "values", "key_scales", "value_scales")}
    return {name: t.view(torch.uint8) if t.dtype == fp8.E4M3 else t for name, t in named.items() if t is not None}


# ---------------------------------------------------------------- equality with the stock cache


@pytest.mark.parametrize("chunks", [PREFILL_IN_CHUNKS, LONG_PREFILL, [1] * 20, [7, 1, 1], [8, 1, 1]], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_own_cache_at_the_compute_format_gives_the_stock_logits_bit_for_bit(
    models: dict[str, PreTrainedModel], name: str, backend: str, chunks: list[int]
) -> None:
    model = models[name]
    model.set_attn_implementation(backend)
    try:
        own = feed(model, caches.build(model.config, arm("own-fp32")), chunks, batch=2)
        stock = feed(model, caches.build(model.config, arm("native")), chunks, batch=2)
    finally:
        model.set_attn_implementation("sdpa")
    assert own.isfinite().all()
    assert torch.equal(own.view(torch.int32), stock.view(torch.int32))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_own_cache_at_bf16_gives_the_stock_logits_of_bf16_bit_for_bit(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    own = feed(model, caches.build(model.config, arm("k16v16", compute="bf16")), PREFILL_IN_CHUNKS)
    stock = feed(model, caches.build(model.config, arm("native", compute="bf16")), PREFILL_IN_CHUNKS)
    assert own.dtype == torch.bfloat16 and torch.equal(own, stock)


def test_a_native_arm_gets_the_stock_cache() -> None:
    cache = caches.build(CONFIGS["gemma3"], arm("native"))
    assert type(cache) is DynamicCache
    assert cache.is_sliding == [True, False, True, True]


def test_the_same_layers_slide_as_in_the_stock_cache() -> None:
    cache = caches.build(CONFIGS["gemma3"], arm("k16v8"))
    assert cache.is_sliding == [True, False, True, True]
    assert [getattr(one, "sliding_window", None) for one in cache.layers] == [8, None, 8, 8]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("formats", ["k16v16", "k16v8", "k8v8", "k8v8-dynamic"])
def test_chunked_and_single_token_writes_attend_to_the_same_stored_values(
    models: dict[str, PreTrainedModel], name: str, formats: str
) -> None:
    model = models[name]
    once = feed(model, caches.build(model.config, arm(formats)), [12])
    single = feed(model, caches.build(model.config, arm(formats)), [1] * 12)
    stock = feed(model, caches.build(model.config, arm("native")), [12])
    # Rounding in the products differs by 1e-6 and may move a value to the next code; an unread cache would differ not at all.
    assert (once - single).abs().max() < 0.5 * (once - stock).abs().max()
    assert (once - stock).abs().max() > 0


# ---------------------------------------------------------------- update


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
def test_update_returns_the_current_chunk_as_it_is_stored(formats: str, sliding: bool) -> None:
    keys, values = states(6)
    one = layer(formats, sliding)
    read_keys, read_values = one.update(keys, values)
    for read, given, format in ((read_keys, keys, one.policy.keys), (read_values, values, one.policy.values)):
        assert read.dtype == torch.float32 and read.shape == given.shape
        if format == "fp8_e4m3":
            codes, scales = fp8.quantise(given, one.policy.scales, one.policy.granularity)
            expected = codes.float() if scales is None else codes.float() * scales
        else:
            expected = given.to(caches.DTYPES[format]).float()
        assert torch.equal(read, expected)
        assert torch.equal(read, given) == (format == "fp32")


def test_a_sliding_layer_returns_the_window_before_the_chunk_and_the_chunk() -> None:
    keys, values = states(30)
    one = layer("k8v8-dynamic", sliding=True)
    full = layer("k8v8-dynamic")
    start = 0
    for size in (5, 1, 1, 1, 1, 12, 2, 7):
        sizes = one.get_mask_sizes(size)
        part = slice(start, start + size)
        read = one.update(keys[:, :, part], values[:, :, part])
        whole = full.update(keys[:, :, part], values[:, :, part])
        start += size
        visible = min(start, 7 + size)
        assert sizes == (visible, start - visible)
        assert all(torch.equal(mine, all_of[:, :, -visible:]) for mine, all_of in zip(read, whole, strict=True))
        assert one.keys.shape[-2] == one.value_scales.shape[-2] == min(start, 7)
        assert one.get_seq_length() == start


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_states_of_another_dtype_come_back_in_it(compute: torch.dtype) -> None:
    one = layer("k8v8-dynamic")
    keys, values = (side.to(compute) for side in states(4))
    read, _ = one.update(keys, values)
    codes, scales = fp8.quantise(keys, "dynamic", "token_head")
    assert torch.equal(read, (codes.float() * scales).to(compute))


# ---------------------------------------------------------------- bytes


def total(cache: Cache, *kinds: str) -> int:
    return sum(backing.bytes for backing in caches.backings(cache) if backing.kind in kinds)


@pytest.mark.parametrize("name", CONFIGS)
def test_k16v8_takes_three_quarters_of_16_bit_and_8_bit_a_half_and_scales_are_apart(models: dict[str, PreTrainedModel], name: str) -> None:
    sizes, scales = {}, {}
    for formats in FORMATS:
        cache = caches.build(CONFIGS[name], arm(formats))
        feed(models[name], cache, PREFILL_IN_CHUNKS)
        sizes[formats], scales[formats] = total(cache, "attention", "sliding"), total(cache, "scales")
    base = sizes["k16v16"]
    assert {formats: size / base for formats, size in sizes.items()} == {
        "own-fp32": 2.0,
        "k16v16": 1.0,
        "half": 1.0,
        "k16v8": 0.75,
        "k8v16": 0.75,
        "k8v8": 0.5,
        "k16v8-dynamic": 0.75,
        "k8v8-dynamic": 0.5,
    }
    one_side = base // 4 // (8 if name == "llama" else 16) * 4  # 4 bytes a head and token, where 16-bit takes 2 · head dim on each side
    assert {formats: size for formats, size in scales.items() if size} == {"k16v8-dynamic": one_side, "k8v8-dynamic": 2 * one_side}


@pytest.mark.parametrize("formats", FORMATS)
def test_each_backing_is_an_allocation_of_exactly_what_it_shows(models: dict[str, PreTrainedModel], formats: str) -> None:
    cache = caches.build(CONFIGS["gemma3"], arm(formats))
    feed(models["gemma3"], cache, PREFILL_IN_CHUNKS, batch=2)
    listed = caches.backings(cache)
    assert len({backing.address for backing in listed}) == len(listed) == 4 * len(held(cache.layers[0]))
    for backing in listed:
        tensor = getattr(cache.layers[backing.layers[0]], backing.holds)
        assert backing.address == tensor.data_ptr()
        assert backing.bytes == tensor.numel() * tensor.element_size()
        assert backing.tokens == tensor.shape[-2] == (31 if backing.layers == (1,) else 7)
        expected = "scales" if "scales" in backing.holds else "attention" if backing.layers == (1,) else "sliding"
        assert backing.kind == expected
        assert backing.dtype == ("fp32" if expected == "scales" else getattr(arm(formats), backing.holds))


def test_a_stock_sliding_layer_is_listed_with_the_allocation_behind_its_view(models: dict[str, PreTrainedModel]) -> None:
    cache = caches.build(CONFIGS["gemma3"], arm("native"))
    feed(models["gemma3"], cache, [20])
    sliding = [backing for backing in caches.backings(cache) if backing.kind == "sliding"]
    assert [backing.tokens for backing in sliding] == [7] * 6
    assert [backing.bytes for backing in sliding] == [20 * 2 * 16 * 4] * 6
    assert {backing.dtype for backing in sliding} == {"fp32"}


def test_layers_that_share_one_allocation_are_listed_together() -> None:
    cache = Cache(layers=[layer("k16v8"), layer("k16v8"), layer("k16v8")])
    for index in range(3):
        cache.update(*states(4, seed=index), index)
    cache.layers[2].keys = cache.layers[0].keys[:, :, 1:]
    listed = {(backing.holds, backing.layers): backing for backing in caches.backings(cache)}
    assert set(listed) == {("keys", (0, 2)), ("keys", (1,)), ("values", (0,)), ("values", (1,)), ("values", (2,))}
    assert listed["keys", (0, 2)].tokens == 4


def test_an_empty_cache_has_no_backings() -> None:
    assert caches.backings(caches.build(CONFIGS["gemma3"], arm("k8v8"))) == ()
    assert caches.backings(caches.build(CONFIGS["gemma3"], arm("native"))) == ()


# ---------------------------------------------------------------- everything else that changes a cache

CHANGES: dict[str, tuple[Callable[[Cache], None], Callable[[torch.Tensor], torch.Tensor]]] = {
    "crop": (lambda cache: cache.crop(-2), lambda t: t[:, :, :-2]),
    "crop nothing": (lambda cache: cache.crop(0), lambda t: t),
    "crop more than is held": (lambda cache: cache.crop(-9), lambda t: t[:, :, :0]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda t: t[[1, 1]]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), lambda t: t[[0, 0, 0, 1, 1, 1]]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda t: t[[1]]),
    "offload": (lambda cache: cache.layers[0].offload(), lambda t: t),
    "prefetch": (lambda cache: cache.layers[0].prefetch(), lambda t: t),
}


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_keeps_values_and_scales_together(change: str, formats: str, sliding: bool) -> None:
    cache = Cache(layers=[layer(formats, sliding)])
    one = cache.layers[0]
    cache.update(*states(6), 0)
    before = held(one)
    act, expected = CHANGES[change]
    act(cache)
    after = held(one)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, expected(before[name])), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
    assert cache.get_seq_length() == after["keys"].shape[-2]
    keys, values = states(2, batch=after["keys"].shape[0], seed=9)
    read = cache.update(keys, values, 0)  # and it can go on
    assert read[0].shape[-2] == after["keys"].shape[-2] + 2


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
def test_a_reset_cache_behaves_as_a_new_one(formats: str, sliding: bool) -> None:
    cache = Cache(layers=[layer(formats, sliding)])
    cache.update(*states(12), 0)
    cache.reset()
    assert held(cache.layers[0]) == {} and cache.get_seq_length() == 0 and caches.backings(cache) == ()
    keys, values = states(3, batch=1, seed=8)
    read = cache.update(keys, values, 0)
    fresh = layer(formats, sliding).update(keys, values)
    assert all(torch.equal(mine, other) for mine, other in zip(read, fresh, strict=True))


@pytest.mark.parametrize("formats", FORMATS)
def test_prefetch_moves_values_and_scales_to_the_layers_device(formats: str) -> None:
    one = layer(formats)
    one.update(*states(4))
    one.device = torch.device("meta")
    one.prefetch()
    assert {tensor.device.type for tensor in held(one).values()} == {"meta"}


@pytest.mark.parametrize("formats", ["own-fp32", "k8v8-dynamic"])
def test_a_layer_initialised_early_is_empty_and_then_fills(formats: str) -> None:
    cache = Cache(layers=[layer(formats), layer(formats, sliding=True)])
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0 and caches.backings(cache) == ()
    keys, values = states(4)
    for index in range(2):
        read = cache.update(keys, values, index)
        assert all(torch.equal(mine, other) for mine, other in zip(read, layer(formats).update(keys, values), strict=True))


def test_changes_to_an_uninitialised_cache_do_nothing() -> None:
    cache = Cache(layers=[layer("k8v8-dynamic"), layer("k8v8-dynamic", sliding=True)])
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    for one in cache.layers:
        one.offload()
        one.prefetch()
    assert cache.get_seq_length() == 0 and not cache.is_initialized


def test_a_sliding_layer_beyond_its_window_is_cropped_only_after_its_past_was_recorded() -> None:
    one = layer("k8v8-dynamic", sliding=True)
    one.update(*states(9))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        one.crop(-1)


def test_a_positive_crop_is_refused() -> None:
    one = layer("k8v8-dynamic")
    one.update(*states(4))
    with pytest.raises(ValueError, match="negative"):
        one.crop(2)


@pytest.mark.parametrize("removed", [0, 1, 3])
def test_recorded_past_rolls_back_as_in_the_stock_cache(models: dict[str, PreTrainedModel], removed: int) -> None:
    model = models["gemma3"]
    logits = []
    for name in ("own-fp32", "native"):
        cache = caches.build(model.config, arm(name))
        cache.activate_past_recording()
        feed(model, cache, [6, 5])
        cache.crop(-removed)
        assert cache.get_seq_length() == 11 - removed
        logits.append(feed(model, cache, [2, 1, 6, 1], seed=4))
    assert torch.equal(*logits)


# ---------------------------------------------------------------- policy: effective, measured


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("formats", FORMATS)
def test_a_faithful_cache_measures_as_requested(models: dict[str, PreTrainedModel], name: str, formats: str) -> None:
    asked = arm(formats)
    cache = caches.build(CONFIGS[name], asked)
    feed(models[name], cache, [4, 1])
    requested = {field: getattr(asked, field) for field in ("implementation", "compute", "keys", "values", "scales", "granularity")}
    assert caches.measured_policy(cache, torch.float32) == requested
    assert caches.effective_policy(cache) == requested


def test_a_stock_cache_measures_as_native_and_states_no_formats(models: dict[str, PreTrainedModel]) -> None:
    cache = caches.build(CONFIGS["gemma3"], arm("native"))
    feed(models["gemma3"], cache, [4, 1])
    assert caches.measured_policy(cache, "fp32") == {
        "implementation": "native",
        "compute": "fp32",
        "keys": "fp32",
        "values": "fp32",
        "scales": "none",
        "granularity": "none",
    }
    assert caches.effective_policy(cache) == {"implementation": "native"}


class Ignoring(caches.ReferenceLayer):
    """A runtime that takes the request and stores bf16 all the same."""

    def write(self, states: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return states.to(torch.bfloat16), None


class Unscaled(caches.ReferenceLayer):
    """A runtime that is asked for dynamic scales and silently uses 1.0."""

    def write(self, states: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return fp8.quantise(states, "unit", "none")


def test_a_cache_that_ignores_the_request_is_seen_in_its_tensors() -> None:
    cache = Cache(layers=[Ignoring(caches.Policy("fp32", *FORMATS["k8v8"]))])
    cache.update(*states(4), 0)
    measured, effective = caches.measured_policy(cache, "fp32"), caches.effective_policy(cache)
    assert (effective["keys"], effective["values"], effective["scales"]) == ("fp8_e4m3", "fp8_e4m3", "unit")
    assert (measured["keys"], measured["values"], measured["scales"]) == ("bf16", "bf16", "none")


def test_one_layer_that_ignores_the_request_is_seen_among_others() -> None:
    policy = caches.Policy("fp32", *FORMATS["k16v8"])
    cache = Cache(layers=[caches.ReferenceLayer(policy), Ignoring(policy)])
    for index in range(2):
        cache.update(*states(4), index)
    assert caches.measured_policy(cache, "fp32")["values"] == "bf16+fp8_e4m3"


def test_scales_that_were_asked_for_and_are_not_there_are_missed() -> None:
    cache = Cache(layers=[Unscaled(caches.Policy("fp32", *FORMATS["k8v8-dynamic"]))])
    cache.update(*states(4), 0)
    assert caches.measured_policy(cache, "fp32")["scales"] == "unit"


def test_states_in_another_dtype_than_the_arm_computes_in_are_seen() -> None:
    cache = Cache(layers=[layer("k8v8")])
    cache.update(*(side.to(torch.bfloat16) for side in states(4)), 0)
    assert caches.measured_policy(cache, torch.float32)["compute"] == "bf16+fp32"
    assert caches.effective_policy(cache)["compute"] == "fp32"


def test_a_refused_arm_gets_no_cache() -> None:
    given = {"name": "a", "role": "candidate", "keys": "bf16", "values": "bf16", "backend": "kv_fused"}
    with pytest.raises(RefusedError) as caught:
        caches.build(CONFIGS["llama"], Arm(implementation="fused", compute="fp32", **given))
    assert caught.value.code == "dtype"
