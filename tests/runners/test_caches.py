"""Physical caches on tiny seeded models: what is stored, what is read back, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ledger.errors import RefusedError
from ledger.records import Arm, ArmResult, Geometry
from ledger.validity import contradictions
from runners import caches, fp8, geometry, scales
from tests.runners import tiny

torch.set_num_threads(1)

FORMATS = {
    "own-fp32": ("fp32", "fp32", "none", "none"),
    "k16v16": ("bf16", "bf16", "none", "none"),
    "half": ("fp16", "fp16", "none", "none"),
    "k16v8": ("bf16", "fp8_e4m3", "unit", "none"),
    "k8v16": ("fp8_e4m3", "bf16", "unit", "none"),
    "k8v8": ("fp8_e4m3", "fp8_e4m3", "unit", "none"),
    "k16v8-dynamic": ("bf16", "fp8_e4m3", "dynamic", "token_head"),
    "k8v8-dynamic": ("fp8_e4m3", "fp8_e4m3", "dynamic", "token_head"),
    "k16v8-page": ("bf16", "fp8_e4m3", "dynamic", "page_head"),
    "k8v8-page": ("fp8_e4m3", "fp8_e4m3", "dynamic", "page_head"),
    "k8v8-head": ("fp8_e4m3", "fp8_e4m3", "dynamic", "head"),
    "k8v16-tensor": ("fp8_e4m3", "bf16", "dynamic", "tensor"),
    "k16v8-fixed": ("bf16", "fp8_e4m3", "fixed", "tensor"),
    "k8v8-fixed": ("fp8_e4m3", "fp8_e4m3", "fixed", "head"),
}
PREFILL_IN_CHUNKS = [5, 5, 1, 1, 1, 3, 12, 1, 1, 1]  # crosses the window of 8, then a chunk longer than it, then decode
LONG_PREFILL = [20, 1, 1, 2, 1]


def arm(name: str, compute: str = "fp32", backend: str = "sdpa") -> Arm:
    if name == "native":
        return Arm(name=name, role="control", implementation="native", compute=compute, keys=compute, values=compute, backend=backend)
    keys, values, policy, granularity = FORMATS[name]
    return Arm(
        name=name,
        role="candidate",
        implementation="reference",
        compute=compute,
        keys=keys,
        values=values,
        scales=policy,
        granularity=granularity,
        scale_source="0" * 64 if policy == "fixed" else None,
        backend=backend,
    )


def fixed(name: str, formats: str) -> scales.FixedScales | None:
    """Scales as of a calibration, for every layer of a model: of a head 0.01, 0.02 and so on."""
    if FORMATS[formats][2] != "fixed":
        return None
    granularity = FORMATS[formats][3]
    found = {
        one.layer: torch.full((one.kv_heads,), 0.01) if granularity == "tensor" else torch.arange(1, one.kv_heads + 1) * 0.01
        for one in geometry.declared(tiny.config(name))
        if one.kind != "recurrent" and one.kv_heads
    }
    return scales.FixedScales(granularity, found, found)


def cache_of(name: str, formats: str, compute: str = "fp32") -> Cache:
    given = None if formats == "native" else fixed(name, formats)
    return caches.build(tiny.config(name), arm(formats, compute, backend(name)), fixed=given)


def backend(name: str) -> str:
    """Gemma 2 caps its scores, which ``sdpa`` leaves out."""
    return "eager" if name == "gemma2" else "sdpa"


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: tiny.model(name, backend=backend(name)) for name in tiny.MODELS}


@torch.inference_mode()
def feed(model: PreTrainedModel, cache: Cache, chunks: list[int], batch: int = 1, seed: int = 3) -> torch.Tensor:
    """Logits [batch, tokens, vocabulary] of random tokens, written to the cache chunk by chunk."""
    ids = torch.randint(3, 97, (batch, sum(chunks)), generator=torch.Generator().manual_seed(seed))
    return torch.cat(
        [model(part, **{caches.cache_argument(model): cache}, use_cache=True).logits for part in ids.split(chunks, dim=1)], dim=1
    )


def states(tokens: int, batch: int = 2, heads: int = 2, dim: int = 8, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, tokens, dim, generator=made) for _ in range(2))  # type: ignore[return-value]


def layer(name: str, sliding: bool = False) -> caches.ReferenceLayer:
    policy = caches.Policy("fp32", *FORMATS[name])
    given = {side: torch.tensor(0.02) if policy.granularity == "tensor" else torch.tensor([0.01, 0.02]) for side in ("keys", "values")}
    return caches.ReferenceSlidingLayer(policy, 8, given) if sliding else caches.ReferenceLayer(policy, given)


def held(of: caches.ReferenceLayer) -> dict[str, torch.Tensor]:
    """The stored tensors, fp8 as bytes."""
    named = {name: getattr(of, name) for name in ("keys", "values", "key_scales", "value_scales")}
    return {name: t.view(torch.uint8) if t.dtype == fp8.E4M3 else t for name, t in named.items() if t is not None}


def largest(states: torch.Tensor, granularity: str) -> torch.Tensor:
    """What one write of ``states`` has its dynamic scales decided by, in the broadcast shape of an oracle of its own."""
    if granularity == "page_head":
        pages = [part.abs().amax(dim=(2, 3), keepdim=True).expand(-1, -1, part.shape[2], 1) for part in states.split(64, dim=2)]
        return torch.cat(pages, dim=2)
    dims = {"tensor": (1, 2, 3), "head": (2, 3), "token_head": (3,)}[granularity]
    return states.abs().amax(dim=dims, keepdim=True)


def as_stored(one: caches.ReferenceLayer, side: str, states: torch.Tensor) -> torch.Tensor:
    """``states`` [B, 2, T, D] as one write to an empty layer makes them, in float32."""
    policy = one.policy
    if getattr(policy, side) != "fp8_e4m3":
        return states.to(geometry.DTYPES[getattr(policy, side)]).float()
    factors = torch.tensor(1.0)
    if policy.scales == "dynamic":
        factors = largest(states, policy.granularity) / 448
    elif policy.scales == "fixed":
        factors = one.fixed[side] if policy.granularity == "tensor" else one.fixed[side][:, None, None]
    return (states / factors).clamp(-448, 448).to(torch.float8_e4m3fn).float() * factors


# ---------------------------------------------------------------- equality with the stock cache


@pytest.mark.parametrize("chunks", [PREFILL_IN_CHUNKS, LONG_PREFILL, [1] * 20, [7, 1, 1], [8, 1, 1]], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_own_cache_at_the_compute_format_gives_the_stock_logits_bit_for_bit(
    models: dict[str, PreTrainedModel], name: str, backend: str, chunks: list[int]
) -> None:
    model = models[name]
    model.set_attn_implementation("eager" if name == "gemma2" else backend)
    try:
        own = feed(model, cache_of(name, "own-fp32"), chunks, batch=2)
        stock = feed(model, cache_of(name, "native"), chunks, batch=2)
    finally:
        model.set_attn_implementation("eager" if name == "gemma2" else "sdpa")
    assert own.isfinite().all()
    assert torch.equal(own.view(torch.int32), stock.view(torch.int32))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_own_cache_at_bf16_gives_the_stock_logits_of_bf16_bit_for_bit(name: str) -> None:
    model = tiny.model(name, torch.bfloat16, backend(name))
    own = feed(model, cache_of(name, "k16v16", compute="bf16"), PREFILL_IN_CHUNKS)
    stock = feed(model, cache_of(name, "native", compute="bf16"), PREFILL_IN_CHUNKS)
    assert own.dtype == torch.bfloat16 and torch.equal(own, stock)


def test_a_native_arm_gets_the_stock_cache() -> None:
    cache = cache_of("gemma3", "native")
    assert type(cache) is DynamicCache
    assert cache.is_sliding == [True, False, True, True]


def test_the_same_layers_slide_as_in_the_stock_cache() -> None:
    cache = cache_of("gemma3", "k16v8")
    assert cache.is_sliding == [True, False, True, True]
    assert [getattr(one, "sliding_window", None) for one in cache.layers] == [8, None, 8, 8]


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("formats", ["k16v16", "k16v8", "k8v8", "k8v8-dynamic", "k8v8-fixed"])
def test_chunked_and_single_token_writes_attend_to_the_same_stored_values(
    models: dict[str, PreTrainedModel], name: str, formats: str
) -> None:
    model = models[name]
    once = feed(model, cache_of(name, formats), [12])
    single = feed(model, cache_of(name, formats), [1] * 12)
    stock = feed(model, cache_of(name, "native"), [12])
    # Rounding in the products differs by 1e-6 and may move a value to the next code; an unread cache would differ not at all.
    assert (once - single).abs().max() < 0.5 * (once - stock).abs().max()
    assert (once - stock).abs().max() > 0


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("formats", FORMATS)
def test_every_layout_in_every_format_is_what_was_asked_for_and_contradicts_nothing(
    models: dict[str, PreTrainedModel], name: str, formats: str
) -> None:
    asked = arm(formats, backend=backend(name))
    cache = cache_of(name, formats)
    logits = feed(models[name], cache, PREFILL_IN_CHUNKS, batch=2)
    assert logits.isfinite().all()
    requested = {field: getattr(asked, field) for field in ("implementation", "compute", "keys", "values", "scales", "granularity")}
    assert caches.measured_policy(cache, torch.float32) == caches.effective_policy(cache) == requested
    layers = geometry.declared(models[name].config)
    assert geometry.measured(cache) == layers
    listed = caches.backings(cache)
    result = ArmResult(
        name=formats,
        outcome="completed",
        effective=caches.effective_policy(cache),
        measured=caches.measured_policy(cache, "fp32"),
        geometry=Geometry(declared=layers, measured=geometry.measured(cache)),
        backings=listed,
    )
    assert contradictions(asked, result) == []
    assert {number for backing in listed for number in backing.layers} == set(range(len(layers)))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(cache)}
    assert {backing.address: backing.bytes for backing in listed} == storages
    width = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1}
    for backing in listed:
        own = [layers[number] for number in backing.layers if layers[number].kv_heads]
        assert len(own) == 1 or own[0].kind == "recurrent"
        if backing.holds in ("keys", "values"):
            dim = own[0].key_dim if backing.holds == "keys" else own[0].value_dim
            assert backing.dtype == getattr(asked, backing.holds) and backing.kind == own[0].kind
            assert backing.tokens == min(31, (own[0].window or 32) - 1)
            assert backing.bytes == 2 * own[0].kv_heads * backing.tokens * dim * width[backing.dtype]
        elif backing.holds != "state":
            assert (backing.kind, backing.dtype) == ("scales", "fp32")
            assert backing.bytes == 4 * scales_of(asked, own[0].kv_heads, backing.tokens)


def scales_of(asked: Arm, heads: int, tokens: int, batch: int = 2) -> int:
    """How many scales a side has: 31 tokens are on one page."""
    if asked.scales == "fixed":
        return 1 if asked.granularity == "tensor" else heads
    return batch * {"tensor": 1, "head": heads, "page_head": heads, "token_head": heads * tokens}[asked.granularity]


def tensors(cache: Cache) -> list[torch.Tensor]:
    """Every tensor that a cache's layers hold."""
    found = []
    for one in cache.layers:
        if hasattr(one, "recurrent_states"):
            found += [state for states in geometry.recurrent_states(one).values() for state in states]
        else:
            named = (getattr(one, name, None) for name in ("keys", "values", "key_scales", "value_scales"))
            found += [tensor for tensor in named if tensor is not None]
    return found


@pytest.mark.parametrize("name", ["gemma4-shared", "gemma4-unified-shared"])
def test_layers_that_share_are_those_in_which_the_model_itself_makes_no_keys(models: dict[str, PreTrainedModel], name: str) -> None:
    model = models[name]
    readers = geometry.sharing(model.config)
    assert readers == {3: 1, 4: 1, 5: 2}
    attention = [layer.self_attn for layer in model.model.layers]
    assert [number for number, one in enumerate(attention) if one.is_kv_shared_layer] == list(readers)
    assert {number for number, one in enumerate(attention) if one.store_full_length_kv} == set(readers.values())
    for formats in ("own-fp32", "native"):
        cache = cache_of(name, formats)
        feed(model, cache, [4, 1])
        listed = [backing.layers for backing in caches.backings(cache) if backing.holds == "keys"]
        assert listed == [(0,), (1, 3, 4), (2, 5)]


def test_layers_that_share_read_the_stored_bytes_of_the_layer_that_they_read(models: dict[str, PreTrainedModel]) -> None:
    model = models["gemma4-shared"]
    seen: list[torch.Tensor] = []
    handle = model.model.layers[5].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["shared_kv_states"]["full_attention"]), with_kwargs=True
    )
    cache = cache_of("gemma4-shared", "k8v8-dynamic")
    try:
        feed(model, cache, [6])
    finally:
        handle.remove()
    source = cache.layers[2]
    for read, codes, factors in ((seen[0], source.keys, source.key_scales), (seen[1], source.values, source.value_scales)):
        assert torch.equal(read, codes.float() * factors)


def test_keys_equal_to_values_are_stored_twice() -> None:
    one = layer("k16v8")
    same = states(4)[0]
    keys, values = one.update(same, same)
    assert torch.equal(keys, as_stored(one, "keys", same)) and torch.equal(values, as_stored(one, "values", same))
    assert len({backing.address for backing in caches.backings(Cache(layers=[one]))}) == 2


def test_keys_and_values_may_have_dimensions_of_their_own() -> None:
    one = layer("k8v8-page")
    keys, values = states(4, dim=8)[0], states(4, dim=6)[1]
    read = one.update(keys, values)
    assert [side.shape for side in read] == [keys.shape, values.shape]
    assert geometry.measured(Cache(layers=[one]))[0].value_dim == 6


# ---------------------------------------------------------------- update


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
def test_update_returns_the_current_chunk_as_it_is_stored(formats: str, sliding: bool) -> None:
    keys, values = states(6)
    one = layer(formats, sliding)
    read_keys, read_values = one.update(keys, values)
    for read, given, side in ((read_keys, keys, "keys"), (read_values, values, "values")):
        assert read.dtype == torch.float32 and read.shape == given.shape
        assert torch.equal(read, as_stored(one, side, given))
        assert torch.equal(read, given) == (getattr(one.policy, side) == "fp32")


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


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_k16v8_takes_three_quarters_of_16_bit_and_8_bit_a_half_and_scales_are_apart(models: dict[str, PreTrainedModel], name: str) -> None:
    sizes, scales = {}, {}
    for formats in list(FORMATS)[:8]:
        cache = cache_of(name, formats)
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


@pytest.mark.parametrize("formats", list(FORMATS)[:8])
def test_each_backing_is_an_allocation_of_exactly_what_it_shows(models: dict[str, PreTrainedModel], formats: str) -> None:
    cache = cache_of("gemma3", formats)
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
    cache = cache_of("gemma3", "native")
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
    assert caches.backings(cache_of("gemma3", "k8v8")) == ()
    assert caches.backings(cache_of("gemma3", "native")) == ()


# ---------------------------------------------------------------- everything else that changes a cache

Change = tuple[Callable[[Cache], None], Callable[[torch.Tensor], torch.Tensor]]
CHANGES: dict[str, Change] = {
    "crop": (lambda cache: cache.crop(-2), lambda t: t[:, :, :-2]),
    "crop nothing": (lambda cache: cache.crop(0), lambda t: t),
    "crop all": (lambda cache: cache.crop(-6), lambda t: t[:, :, :0]),
    "crop more than is held": (lambda cache: cache.crop(-9), lambda t: t[:, :, :0]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda t: t[[1, 1]]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), lambda t: t[[0, 0, 0, 1, 1, 1]]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda t: t[[1]]),
    "offload": (lambda cache: cache.layers[0].offload(), lambda t: t),
    "prefetch": (lambda cache: cache.layers[0].prefetch(), lambda t: t),
}
"""What is done to a cache, and to the states that one directly in that state is built of."""


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("change", CHANGES)
def test_after_every_change_a_cache_is_as_one_built_directly_in_that_state(change: str, formats: str, sliding: bool) -> None:
    keys, values = states(6)
    for side in (keys, values):  # the first four tokens of each sequence hold its largest values
        side[:, :, 4:] *= 0.01
        side[1] *= 3
    cache, direct = (Cache(layers=[layer(formats, sliding)]) for _ in range(2))
    act, expected = CHANGES[change]
    for part in (slice(0, 4), slice(4, 6)):
        cache.update(keys[:, :, part], values[:, :, part], 0)
        direct.update(expected(keys)[:, :, part], expected(values)[:, :, part], 0)
    act(cache)
    for _ in range(2):
        after = held(cache.layers[0])
        assert after.keys() == held(direct.layers[0]).keys()
        for name, tensor in held(direct.layers[0]).items():
            assert torch.equal(after[name], tensor), name
            assert after[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
        assert cache.get_seq_length() == direct.get_seq_length()
        more = states(2, batch=after["keys"].shape[0], seed=9)
        read, other = cache.update(*more, 0), direct.update(*more, 0)  # and they go on alike
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, other, strict=True))


@pytest.mark.parametrize("formats", ["k8v8-page", "k8v8-head", "k8v16-tensor"])
def test_a_crop_keeps_a_scale_that_only_the_cropped_tokens_needed(formats: str) -> None:
    keys, values = states(6)
    keys[:, :, 5] = 1000
    one = layer(formats)
    one.update(keys, values)
    before = one.key_scales
    one.crop(-1)
    assert torch.equal(one.key_scales, before) and one.key_scales.max() == 1000 / 448
    read, _ = one._read_last(5)
    assert ((read - keys[:, :, :5]).abs() <= keys[:, :, :5].abs() * 2.0**-4 + 1000 / 448 * 2.0**-10).all()


@pytest.mark.parametrize("change", ["reorder", "repeat", "select"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-experts", "gemma4-shared"])
def test_whole_caches_change_their_batch_states_included(models: dict[str, PreTrainedModel], name: str, change: str) -> None:
    cache = cache_of(name, "k8v8-page")
    feed(models[name], cache, [5, 1], batch=2)
    before = [tensor.clone() for tensor in tensors(cache)]
    act, expected = CHANGES[change]
    act(cache)
    raw = [tensor.view(torch.uint8) if tensor.dtype == fp8.E4M3 else tensor for tensor in tensors(cache)]
    was = [tensor.view(torch.uint8) if tensor.dtype == fp8.E4M3 else tensor for tensor in before]
    assert all(torch.equal(after, expected(tensor)) for after, tensor in zip(raw, was, strict=True))
    assert feed(models[name], cache, [1, 2], batch=raw[0].shape[0], seed=4).isfinite().all()


@pytest.mark.parametrize("formats", ["own-fp32", "k8v8-page", "k8v8-fixed"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_cache_of_any_layout_is_new_after_a_reset(models: dict[str, PreTrainedModel], name: str, formats: str) -> None:
    cache = cache_of(name, formats)
    feed(models[name], cache, [9, 2], batch=2)
    cache.reset()
    again, fresh = feed(models[name], cache, [4, 1], seed=8), feed(models[name], cache_of(name, formats), [4, 1], seed=8)
    assert torch.equal(again, fresh)


# ---------------------------------------------------------------- dynamic scales of more than a token


CHUNKS = {"one": [200], "pages": [64, 64, 72], "odd": [5, 60, 1, 1, 70, 63], "tokens": [1] * 200}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_the_scale_of_a_page_is_that_of_all_its_tokens_however_they_came(chunks: str) -> None:
    keys, values = states(200)
    one = layer("k8v8-page")
    for part in zip(keys.split(CHUNKS[chunks], dim=2), values.split(CHUNKS[chunks], dim=2), strict=True):
        read = one.update(*part)
    for side, stored, states_, last in (("keys", one.key_scales, keys, read[0]), ("values", one.value_scales, values, read[1])):
        assert stored.shape == (2, 2, 4, 1, 1)
        factors = largest(states_, "page_head") / 448
        assert torch.equal(stored.flatten(2), factors[:, :, ::64, 0])
        # Half a step of the code, and as much again for each time that the page was rounded anew.
        rounded = 1 if chunks in ("one", "pages") else 12
        assert ((last - states_).abs() <= rounded * (states_.abs() * 2.0**-4 + factors * 2.0**-10)).all(), side
        if chunks in ("one", "pages"):
            assert torch.equal(last, as_stored(one, side, states_))


def test_a_larger_value_rounds_what_its_page_holds_once_more_and_nothing_else() -> None:
    keys, values = states(70)
    one = layer("k8v8-page")
    one.update(keys, values)
    codes, scales, read = held(one)["keys"].clone(), one.key_scales.clone(), one._read_last(70)[0]
    keys, values = states(1, seed=6)
    keys[0, 1] = 100.0
    keys[0, 0] = keys[1] = 1e-3
    one.update(keys, values)
    changed = torch.tensor([[False, True], [False, False]])
    assert torch.equal((one.key_scales != scales).flatten(2), torch.stack([torch.zeros_like(changed), changed], dim=2))
    assert one.key_scales[0, 1, 1] == torch.tensor(100.0) / 448
    assert torch.equal(held(one)["keys"][:, :, :64], codes[:, :, :64])
    assert torch.equal(held(one)["keys"][:, :, 64:70][~changed], codes[:, :, 64:][~changed])
    again = one._read_last(71)[0][0, 1, 64:70]
    assert torch.equal(again, (read[0, 1, 64:] / (100 / 448)).to(torch.float8_e4m3fn).float() * one.key_scales[0, 1, 1, 0])


@pytest.mark.parametrize("formats", FORMATS)
def test_a_sliding_layer_reads_what_a_full_one_reads_across_borders_of_pages(formats: str) -> None:
    keys, values = states(200)
    one, full = layer(formats, sliding=True), layer(formats)
    start = 0
    for size in (5, 50, 8, 1, 1, 1, 5, 70, 1, 40, 9, 9):
        part = slice(start, start + size)
        visible = one.get_mask_sizes(size)[0]
        read, whole = one.update(keys[:, :, part], values[:, :, part]), full.update(keys[:, :, part], values[:, :, part])
        start += size
        assert all(torch.equal(mine, theirs[:, :, -visible:]) for mine, theirs in zip(read, whole, strict=True))
        assert one.keys.shape[-2] == min(start, 7) and one.get_seq_length() == start
        if formats == "k8v8-page":
            assert one.key_scales.shape[2] == (start - 1) // 64 - (start - min(start, 7)) // 64 + 1
    assert start == 200


@pytest.mark.parametrize("removed", [1, 3])
@pytest.mark.parametrize("formats", FORMATS)
def test_a_recorded_past_is_rolled_back_across_a_border_of_pages(formats: str, removed: int) -> None:
    keys, values = states(68)
    for side in (keys, values):
        side[:, :, 68 - removed :] *= 0.01
    one, direct = layer(formats, sliding=True), layer(formats, sliding=True)
    one.activate_past_recording()
    for part in (slice(0, 60), slice(60, 68 - removed), slice(68 - removed, 68)):
        one.update(keys[:, :, part], values[:, :, part])
        if part.stop < 68:
            one.crop(0)
            direct.update(keys[:, :, part], values[:, :, part])
    one.crop(-removed)
    assert one.get_seq_length() == direct.get_seq_length() == 68 - removed
    for name, tensor in held(direct).items():
        assert torch.equal(held(one)[name], tensor), name


@pytest.mark.parametrize("formats", ["k8v8-head", "k8v16-tensor"])
def test_the_first_chunk_decides_the_scale_of_a_layer_and_later_values_are_clamped(formats: str) -> None:
    keys, values = states(6)
    one = layer(formats)
    one.update(keys[:, :, :4], values[:, :, :4])
    decided = one.key_scales.clone()
    dims = (2, 3) if formats == "k8v8-head" else (1, 2, 3)
    assert torch.equal(decided, (keys[:, :, :4].abs().amax(dim=dims) / 448)[..., None])
    keys[:, :, 4] = -1e4
    read, _ = one.update(keys[:, :, 4:], values[:, :, 4:])
    assert torch.equal(one.key_scales, decided)
    assert torch.equal(read[:, :, 4, 0], (-448 * decided.view(2, -1)).expand(2, 2))


@pytest.mark.parametrize("formats", ["k8v8-page", "k8v8-head", "k8v16-tensor"])
def test_zeros_decide_no_scale(formats: str) -> None:
    one = layer(formats)
    zeros = torch.zeros(2, 2, 3, 8)
    assert not one.update(zeros, zeros)[0].any() and not one.key_scales.any()
    keys, values = (side * 1e-4 for side in states(5))
    read, _ = one.update(keys, values)
    assert not read[:, :, :3].any()
    assert torch.equal(read[:, :, 3:], as_stored(one, "keys", keys))


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("formats", ["k8v8-page", "k8v8-head", "k8v16-tensor"])
def test_a_fault_spoils_all_that_its_scale_is_of_and_no_other_sequence(formats: str, fault: float) -> None:
    keys, values = states(70)
    keys[0, 1, 66, 2] = fault
    one = layer(formats)
    read, _ = one.update(keys, values)
    spoiled = torch.zeros(2, 2, 70, dtype=torch.bool)
    spoiled[{"k8v8-page": (0, 1, slice(64, 70)), "k8v8-head": (0, 1), "k8v16-tensor": (0,)}[formats]] = True
    assert torch.equal(read.isnan().any(-1), spoiled) and torch.equal(read.isnan().all(-1), spoiled)


# ---------------------------------------------------------------- resets, devices, early beginnings


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


@pytest.mark.parametrize("formats", ["own-fp32", "native"])
def test_recurrent_states_cannot_be_cropped_and_say_so_before_anything_is(models: dict[str, PreTrainedModel], formats: str) -> None:
    cache = cache_of("qwen3.5", formats)
    feed(models["qwen3.5"], cache, [4])
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    assert cache.get_seq_length() == 4 and not all(layer.is_croppable for layer in cache.layers)


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


def test_a_stock_cache_measures_as_native_and_states_no_formats(models: dict[str, PreTrainedModel]) -> None:
    cache = cache_of("gemma3", "native")
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

    def begin(self, side: str, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return states[:, :, :0].to(torch.bfloat16, copy=True), None

    def write(
        self, side: str, stored: torch.Tensor, scales: torch.Tensor | None, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.cat([stored, states.to(torch.bfloat16)], dim=2), None


class Unscaled(caches.ReferenceLayer):
    """A runtime that is asked for dynamic scales and silently uses 1.0."""

    def write(
        self, side: str, stored: torch.Tensor, scales: torch.Tensor | None, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().write(side, stored, None, states)


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
        caches.build(tiny.config("llama"), Arm(implementation="fused", compute="fp32", **given))
    assert caught.value.code == "dtype"
