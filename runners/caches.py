"""Caches of an arm for Transformers: built by its policy, and measured by their tensors.

:mod:`runners.layers` says what a layer stores. A cache has one of them for each layer of the model:

    full attention          grows with every token
    sliding attention       its last ``window - 1`` tokens
    recurrent               recurrent and convolution states, native, of the whole past
    shared keys and values  nothing of its own: the model hands it what an earlier layer of its kind has read back from its
                            store. ``Cache.sharing`` maps such layers to the one that they read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ledger.errors import InputError
from ledger.records import Arm, Backing
from runners import fp8, geometry, scales
from runners.geometry import word
from runners.layers import TENSORS, Policy, RecurrentLayer, ReferenceLayer, ReferenceSlidingLayer
from runners.scales import FixedScales

__all__ = [
    "Policy",
    "RecurrentLayer",
    "ReferenceLayer",
    "ReferenceSlidingLayer",
    "backings",
    "build",
    "cache_argument",
    "effective_policy",
    "measured_policy",
]

# ---------------------------------------------------------------- build, and what was built


def build(config: PreTrainedConfig, arm: Arm, device: str = "cpu", fixed: FixedScales | None = None) -> Cache:
    """An empty cache for ``arm``: the stock DynamicCache (native) or the layers of :mod:`runners.layers` (reference).

    Which layers slide is decided by the stock cache itself. ``fixed`` are the scales of an arm that asks for them. Raises
    RefusedError, before anything is allocated. A fused cache has a size: :class:`runners.serving.FusedCache` builds it.
    """
    geometry.guard(config, arm, device)
    if arm.implementation == "fused":
        raise InputError("A fused cache is built with its size.", next="use runners.serving.FusedCache.")
    text = config.get_text_config(decoder=True)
    sharing = geometry.sharing(config)
    cache: Cache = DynamicCache(config=text)
    if arm.implementation != "native":
        cache = Cache(layers=_layers(config, arm, cache.layers, sharing, fixed))
    cache.sharing = sharing
    return cache


def _layers(config: PreTrainedConfig, arm: Arm, stock: list[Any], sharing: Mapping[int, int], fixed: FixedScales | None) -> list[Any]:
    declared = geometry.declared(config)
    given = scales.by_layer(arm, declared, fixed)
    policy = Policy(arm.compute, arm.keys, arm.values, arm.scales, arm.granularity)
    layers: list[Any] = []
    for index, layer in enumerate(declared):
        if layer.kind == "recurrent":
            layers.append(RecurrentLayer(stock[index].number_of_states))
        elif index in sharing:
            layers += stock[index : index + 1]  # a layer without tensors, or none at all in older Transformers
        elif layer.window is None:
            layers.append(ReferenceLayer(policy, given.get(index)))
        else:
            layers.append(ReferenceSlidingLayer(policy, layer.window, given.get(index)))
    return layers


def cache_argument(model: Any) -> str:
    """The name under which the model takes a cache: ``past_key_values``, which newer Transformers call ``cache``."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def backings(cache: Cache) -> tuple[Backing, ...]:
    """Every distinct allocation of a cache, in order of layers; a pool's first.

    ``bytes`` is the size of the whole storage, also where a layer shows only a part of it (as stock sliding layers do:
    their tokens are a view); ``tokens`` is what the layer shows, of scales: what they scale. Layers on one storage are listed
    together, under what the first of them holds there; so are those that read keys and values of another layer. Storages of
    no bytes are no allocations and left out. A recurrent layer holds states, of the whole past, and no tokens.
    """
    pool = getattr(cache, "pool", None)
    found: dict[tuple[str, int], dict] = {}
    for index, layer in enumerate(cache.layers):
        for kind, holds, tensor in _held(layer):
            if tensor is None or tensor.untyped_storage().nbytes() == 0:
                continue
            storage = tensor.untyped_storage()
            backing = found.setdefault(
                (str(tensor.device), storage.data_ptr()),
                {
                    "bytes": storage.nbytes(),
                    "dtype": word(tensor.dtype),
                    "kind": kind,
                    "layers": [],
                    "holds": holds,
                    "address": storage.data_ptr(),
                    "tokens": 0,
                },
            )
            if index not in backing["layers"]:
                backing["layers"].append(index)
            if holds != "state":
                backing["tokens"] = max(backing["tokens"], layer.keys.shape[-2])
    sharing = getattr(cache, "sharing", {})
    for backing in found.values():
        readers = [reader for reader, source in sharing.items() if source in backing["layers"] and reader not in backing["layers"]]
        backing["layers"] = tuple(sorted([*backing["layers"], *readers]))
    listed = tuple(Backing(**backing) for backing in found.values())
    return listed if pool is None else (*pool.backings(), *listed)


def _held(layer: Any) -> list[tuple[str, str, torch.Tensor | None]]:
    """Kind, what it holds, and the tensor, of each tensor of a layer that owns its tensors."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return [(kind, "state", state) for kind, states in geometry.recurrent_states(layer).items() for state in states]
    if hasattr(layer, "pages"):
        return []
    kind = "sliding" if getattr(layer, "is_sliding", False) else "attention"
    return [("scales" if name.endswith("scales") else kind, name, getattr(layer, name, None)) for name in TENSORS]


def measured_policy(cache: Cache, compute: torch.dtype | str) -> dict[str, str]:
    """The policy as the tensors show it; words that differ between layers are joined by ``+``.

    ``compute`` is the dtype that the runner saw the model compute in; where a layer saw states of another, both stand there.
    fp8 without a scale tensor is scaled by 1, so ``unit``. A cache that holds nothing yet has formats of none. Recurrent
    layers keep no keys and values, and say nothing.
    """
    layers = _attending(cache)
    words: dict[str, set[str]] = {
        "implementation": {_implementation(layer) for layer in layers},
        "compute": {word(compute) if isinstance(compute, torch.dtype) else compute},
    }
    for layer in layers:
        if getattr(layer, "states_dtype", None) is not None:
            words["compute"].add(word(layer.states_dtype))
        for side in ("key", "value"):
            tensor = getattr(layer, f"{side}s", None)
            if tensor is None:
                continue
            words.setdefault(f"{side}s", set()).add(word(tensor.dtype))
            scales, granularity = _scales(tensor, getattr(layer, f"{side}_scales", None), paged=hasattr(layer, "pages"))
            words.setdefault("scales", set()).add(scales)
            words.setdefault("granularity", set()).add(granularity)
    for name in ("scales", "granularity"):  # a side that is not scaled says nothing about how the other is
        if len(words.get(name, ())) > 1:
            words[name].discard("none")
    return _joined(words)


def effective_policy(cache: Cache) -> dict[str, str]:
    """The policy as the cache object states it: its classes and its settings. The stock cache states no formats."""
    words: dict[str, set[str]] = {"implementation": {_implementation(layer) for layer in _attending(cache)}}
    for layer in cache.layers:
        if hasattr(layer, "policy"):
            for name in ("compute", "keys", "values", "scales", "granularity"):
                words.setdefault(name, set()).add(getattr(layer.policy, name))
    return _joined(words)


def _attending(cache: Cache) -> list[Any]:
    """The layers that keep keys and values of their own."""
    sharing = getattr(cache, "sharing", {})
    own = [layer for index, layer in enumerate(cache.layers) if index not in sharing]
    return [layer for layer in own if not isinstance(layer, LinearAttentionCacheLayerMixin)]


def _implementation(layer: object) -> str:
    if hasattr(layer, "implementation"):
        return str(layer.implementation)
    return "native" if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else type(layer).__name__


def _scales(stored: torch.Tensor, scales: torch.Tensor | None, *, paged: bool) -> tuple[str, str]:
    """Policy and granularity of one side, by shape: of a layer's own tensors (:mod:`runners.fp8`), or of its pages."""
    if scales is None:
        return ("unit" if stored.dtype == fp8.E4M3 else "none"), "none"
    if paged:
        if scales.dim() == 3 and scales.shape[:2] == stored.shape[:2]:
            return "dynamic", "token_head"
        known: dict[str, tuple[int, ...]] = {}
    else:
        batch, heads, tokens, _ = stored.shape
        known = {"tensor": (batch, 1), "head": (batch, heads, 1), "token_head": (batch, heads, tokens, 1)}
        if scales.dim() == 5:
            known = {"page_head": (batch, heads, scales.shape[2], 1, 1)}
    for granularity, shape in known.items():
        if scales.shape == shape:
            return "dynamic", granularity
    if scales.dim() == 0:
        return "fixed", "tensor"
    if scales.shape == stored.shape[1:2]:
        return "fixed", "head"
    return "unrecognised", "x".join(str(size) for size in scales.shape)


def _joined(words: dict[str, Iterable[str]]) -> dict[str, str]:
    return {name: "+".join(sorted(found)) for name, found in words.items() if found}
