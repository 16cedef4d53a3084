"""Physical caches for Transformers: keys and values are stored in the requested formats, and read from there.

Write, then read: ``update()`` stores the new chunk and then returns every attended position, the chunk's
own included, as read back from the stored bytes. So prefill and decode attend to the same values.

Shapes, with B batch, H KV heads, T tokens held, D head dimension:

    keys, values               [B, H, T, D]   fp32, bf16, fp16 or fp8_e4m3
    key_scales, value_scales   [B, H, T, 1]   fp32; None where a side needs no stored scale

Each of these tensors is one allocation of exactly its own size, so that the storage's size is the true
size of the cache. A sliding layer keeps its last ``window - 1`` tokens between updates, like the stock one.
A value beyond the range of fp16 is stored as infinity, as the cast gives it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ledger.errors import InputError
from ledger.records import Arm, Backing
from runners import fp8, geometry
from runners.geometry import DTYPES, word

_TENSORS = ("keys", "values", "key_scales", "value_scales")


@dataclass(frozen=True)
class Policy:
    """Storage of one layer, in the words of ``records.Arm``. ``compute`` is what the arm asked to compute in."""

    compute: str
    keys: str
    values: str
    scales: str
    granularity: str


class ReferenceLayer(CacheLayerMixin):
    """Full attention: grows with every token."""

    is_sliding = False
    is_croppable = True
    implementation = "reference"

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        self.states_dtype: torch.dtype | None = None

    def write(self, states: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``states`` [B, H, T, D] in their stored format, and their scales [B, H, T, 1] or None."""
        if format == "fp8_e4m3":
            return fp8.quantise(states, self.policy.scales, self.policy.granularity)
        return states.to(DTYPES[format]), None

    def read(self, stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """What ``write`` stored, in the dtype of the states that came in. Not a copy where the formats are one."""
        dtype = self.states_dtype or DTYPES[self.policy.compute]
        if stored.dtype == fp8.E4M3:
            return fp8.dequantise(stored, scales, dtype)
        return stored.to(dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.states_dtype = key_states.dtype
        self.keys, self.key_scales = self.write(key_states[:, :, :0], self.policy.keys)
        self.values, self.value_scales = self.write(value_states[:, :, :0], self.policy.values)
        self._map(torch.clone)  # an empty slice would keep the whole of the states alive
        self.is_initialized = True

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store the chunk behind what is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_keys, new_key_scales = self.write(key_states, self.policy.keys)
        new_values, new_value_scales = self.write(value_states, self.policy.values)
        self.keys = _join(self.keys, new_keys)
        self.values = _join(self.values, new_values)
        if new_key_scales is not None:
            self.key_scales = _join(self.key_scales, new_key_scales)
        if new_value_scales is not None:
            self.value_scales = _join(self.value_scales, new_value_scales)

    def _read_last(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last ``tokens`` positions, or all where fewer are held, read from the stored bytes."""
        keys, values, key_scales, value_scales = (
            None if tensor is None else _last(tensor, tokens) for tensor in (getattr(self, name) for name in _TENSORS)
        )
        assert keys is not None and values is not None
        return self.read(keys, key_scales), self.read(values, value_scales)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a chunk [B, H, T, D]; all positions held, in the dtype of the states."""
        self._append(key_states, value_states)
        return self._read_last(self.keys.shape[-2])

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to all that is held, scales included. It sees fp8 as bytes, which every operation of torch takes."""
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, _owned(change(_raw(tensor)).view(tensor.dtype)))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Drop everything, scales included; the policy stays."""
        for name in _TENSORS:
            setattr(self, name, None)
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda tensor: tensor[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises ValueError for a positive number, as the stock layer does."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}.")
        if self.is_initialized and tokens_to_remove:
            kept = max(self.keys.shape[-2] + tokens_to_remove, 0)
            self._map(lambda tensor: tensor[:, :, :kept])


class ReferenceSlidingLayer(ReferenceLayer):
    """Sliding-window attention: keeps ``sliding_window - 1`` tokens between updates."""

    is_sliding = True

    def __init__(self, policy: Policy, sliding_window: int) -> None:
        super().__init__(policy)
        self.sliding_window = sliding_window
        self.cumulative_length = 0
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Keep every token until the next ``crop``, so that a rollback is possible."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a chunk [B, H, T, D]; the ``sliding_window - 1`` positions before it and its own, in the dtype of the states."""
        self._append(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        states = self._read_last(self.sliding_window - 1 + key_states.shape[-2])
        if not self.record_past:
            self._restrict()
        return states

    def _restrict(self) -> None:
        self._map(lambda tensor: _last(tensor, self.sliding_window - 1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = min(self.cumulative_length, self.sliding_window - 1)
        return held + query_length, self.cumulative_length - held

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.sliding_window

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """As the stock layer: beyond the window only after ``activate_past_recording``. Raises RuntimeError, ValueError."""
        if self.cumulative_length >= self.sliding_window and not self.record_past:
            raise RuntimeError("A sliding layer beyond its window can only be cropped after activate_past_recording.")
        super().crop(tokens_to_remove)
        self.cumulative_length = max(self.cumulative_length + tokens_to_remove, 0)
        self._restrict()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == fp8.E4M3 else tensor


def _join(held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Both in a new allocation of exactly their size."""
    if held is None:
        return _owned(new)
    return _owned(torch.cat([_raw(held), _raw(new)], dim=-2).view(new.dtype))


def _last(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    return tensor[:, :, max(tensor.shape[-2] - tokens, 0) :]


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where its storage is larger than itself: a view would keep, and report, what it hides."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- build, and what was built


def build(config: PreTrainedConfig, arm: Arm, device: str = "cpu") -> Cache:
    """An empty cache for ``arm``: the stock DynamicCache (native) or this module's layers (reference).

    Which layers slide is decided by the stock cache itself. Raises RefusedError, before anything is allocated. A fused
    cache has a size: :class:`runners.serving.FusedCache` builds it.
    """
    geometry.guard(config, arm, device)
    if arm.implementation == "fused":
        raise InputError("A fused cache is built with its size.", next="use runners.serving.FusedCache.")
    text = config.get_text_config(decoder=True)
    if arm.implementation == "native":
        return DynamicCache(config=text)
    policy = Policy(arm.compute, arm.keys, arm.values, arm.scales, arm.granularity)
    windows = [layer.window for layer in geometry.declared(config)]
    return Cache(layers=[ReferenceLayer(policy) if window is None else ReferenceSlidingLayer(policy, window) for window in windows])


def cache_argument(model: Any) -> str:
    """The name under which the model takes a cache: ``past_key_values``, which newer Transformers call ``cache``."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def backings(cache: Cache) -> tuple[Backing, ...]:
    """Every distinct allocation of a cache, in order of layers; a pool's first.

    ``bytes`` is the size of the whole storage, also where a layer shows only a part of it (as stock sliding layers do:
    their tokens are a view); ``tokens`` is what the layer shows. Layers on one storage are listed together, under
    what the first of them holds there. Storages of no bytes are no allocations and left out. A recurrent layer holds
    states, of the whole past, and no tokens.
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
                backing["tokens"] = max(backing["tokens"], tensor.shape[-2])
    listed = tuple(Backing(**{**backing, "layers": tuple(backing["layers"])}) for backing in found.values())
    return listed if pool is None else (*pool.backings(), *listed)


def _held(layer: Any) -> list[tuple[str, str, torch.Tensor | None]]:
    """Kind, what it holds, and the tensor, of each tensor of a layer that owns its tensors."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return [(kind, "state", state) for kind, states in geometry.recurrent_states(layer).items() for state in states]
    if hasattr(layer, "pages"):
        return []
    kind = "sliding" if getattr(layer, "is_sliding", False) else "attention"
    return [("scales" if name.endswith("scales") else kind, name, getattr(layer, name, None)) for name in _TENSORS]


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
            scales, granularity = _scales(tensor, getattr(layer, f"{side}_scales", None))
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
    return [layer for layer in cache.layers if not isinstance(layer, LinearAttentionCacheLayerMixin)]


def _implementation(layer: object) -> str:
    if hasattr(layer, "implementation"):
        return str(layer.implementation)
    return "native" if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else type(layer).__name__


def _scales(stored: torch.Tensor, scales: torch.Tensor | None) -> tuple[str, str]:
    """Policy and granularity of one side, by shape: of a layer's own tensors, or of its pages."""
    if scales is None:
        return ("unit" if stored.dtype == fp8.E4M3 else "none"), "none"
    if scales.shape == (*stored.shape[:-1], 1) or (scales.dim() == 3 and scales.shape[:2] == stored.shape[:2]):
        return "dynamic", "token_head"
    if scales.shape == stored.shape[1:2]:
        return "fixed", "head"
    return "unrecognised", "x".join(str(size) for size in scales.shape)


def _joined(words: dict[str, Iterable[str]]) -> dict[str, str]:
    return {name: "+".join(sorted(found)) for name, found in words.items() if found}
