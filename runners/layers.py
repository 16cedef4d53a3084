"""Physical cache layers for Transformers: keys and values are stored in the requested formats, and read from there.

Write, then read: ``update()`` stores the new chunk and then returns every attended position, the chunk's
own included, as read back from the stored bytes. So prefill and decode attend to the same values, and a layer that
reads another layer's keys and values reads those bytes too.

Shapes, with B batch, H KV heads, T tokens held, D head dimension (keys and values may differ in D):

    keys, values               [B, H, T, D]   fp32, bf16, fp16 or fp8_e4m3
    key_scales, value_scales   fp32, shaped as :mod:`runners.fp8` says for policy and granularity; None where a side needs none

Each of these tensors is one allocation of exactly its own size, so that the storage's size is the true
size of the cache. A sliding layer keeps its last ``window - 1`` tokens between updates, like the stock one.
A value beyond the range of fp16 is stored as infinity, as the cast gives it.

Scales move with what they scale: reordering, repeating and selecting sequences takes their scales along, cropping and sliding
keep those of the tokens that are left. A page or a layer that is cropped keeps the scale that it had, which may be larger
than its remaining tokens would need; one that is cropped to nothing decides anew. ``fixed`` scales are of the layer and
stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from runners import fp8
from runners.geometry import DTYPES

TENSORS = ("keys", "values", "key_scales", "value_scales")
"""What a layer holds, in the words of ``records.Backing``."""


@dataclass(frozen=True)
class Policy:
    """Storage of one layer, in the words of ``records.Arm``. ``compute`` is what the arm asked to compute in."""

    compute: str
    keys: str
    values: str
    scales: str
    granularity: str


class ReferenceLayer(CacheLayerMixin):
    """Full attention: grows with every token. ``fixed`` holds fp32 ``keys`` and ``values``, of each side that is scaled so."""

    is_sliding = False
    is_croppable = True
    implementation = "reference"

    def __init__(self, policy: Policy, fixed: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.fixed = dict(fixed or {})
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        self.states_dtype: torch.dtype | None = None
        self.first = 0
        """Position of the first token held: how many have left the window."""

    def begin(self, side: str, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An empty store for ``states`` [B, H, any, D] of ``side`` (``keys`` or ``values``), and its scales, where any are stored."""
        format: str = getattr(self.policy, side)
        batch, heads, _, dim = states.shape
        stored = torch.empty((batch, heads, 0, dim), dtype=DTYPES[format], device=states.device)
        if format != "fp8_e4m3" or self.policy.scales == "unit":
            return stored, None
        if self.policy.scales == "fixed":
            return stored, self.fixed[side].to(states.device, copy=True)
        return stored, fp8.undecided(batch, heads, self.policy.granularity, states.device)

    def write(
        self, side: str, stored: torch.Tensor, scales: torch.Tensor | None, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``stored`` of ``side`` with ``states`` [B, H, T, D] behind it, and the scales of both."""
        if getattr(self.policy, side) != "fp8_e4m3":
            return fp8.join(stored, states.to(DTYPES[getattr(self.policy, side)])), None
        if scales is None:
            return fp8.join(stored, fp8.quantise(states, "unit", "none")[0]), None
        return fp8.append(stored, scales, states, self.first)

    def read(self, stored: torch.Tensor, scales: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """The last ``tokens`` positions of a side, in the dtype of the states that came in. Not a copy where the formats are one."""
        dtype = self.states_dtype or DTYPES[self.policy.compute]
        held = stored.shape[2]
        tokens = min(tokens, held)
        last = stored[:, :, held - tokens :]
        if stored.dtype != fp8.E4M3:
            return last.to(dtype)
        if scales is None:
            return fp8.dequantise(last, None, dtype)
        scales = fp8.within(scales, self.first, held - tokens, held)
        return fp8.dequantise(last, fp8.spread(scales, self.first + held - tokens, tokens), dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.states_dtype = key_states.dtype
        self.keys, self.key_scales = self.begin("keys", key_states)
        self.values, self.value_scales = self.begin("values", value_states)
        self.is_initialized = True

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store the chunk behind what is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for side, name, states in (("keys", "key_scales", key_states), ("values", "value_scales", value_states)):
            stored, scales = self.write(side, getattr(self, side), getattr(self, name), states)
            setattr(self, side, owned(stored))
            setattr(self, name, None if scales is None else owned(scales))

    def _read_last(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(self.keys, self.key_scales, tokens), self.read(self.values, self.value_scales, tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a chunk [B, H, T, D]; all positions held, in the dtype of the states."""
        self._append(key_states, value_states)
        return self._read_last(self.keys.shape[-2])

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor], *, sequences: bool = False) -> None:
        """Apply ``change`` to all that is held, scales included, or with ``sequences`` to what has a batch: all but ``fixed`` scales.

        It sees fp8 as bytes, which every operation of torch takes.
        """
        for name in TENSORS:
            tensor = getattr(self, name)
            if tensor is not None and not (sequences and tensor.dim() < 2):
                setattr(self, name, owned(change(_raw(tensor)).view(tensor.dtype)))

    def _keep(self, start: int, stop: int) -> None:
        """Let go of all tokens but those from ``start`` up to ``stop`` of the ones held, and of their scales."""
        for side, name in (("keys", "key_scales"), ("values", "value_scales")):
            scales = getattr(self, name)
            if scales is not None:
                setattr(self, name, owned(fp8.within(scales, self.first, start, stop)))
            setattr(self, side, owned(_raw(getattr(self, side))[:, :, start:stop].view(getattr(self, side).dtype)))
        self.first += start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.first + self.keys.shape[-2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Drop everything, scales included; the policy stays, and with it what ``fixed`` scales are."""
        for name in TENSORS:
            setattr(self, name, None)
        self.first = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)), sequences=True)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0), sequences=True)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda tensor: tensor[indices, ...], sequences=True)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises ValueError for a positive number, as the stock layer does."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}.")
        if self.is_initialized and tokens_to_remove:
            self._keep(0, max(self.keys.shape[-2] + tokens_to_remove, 0))


class ReferenceSlidingLayer(ReferenceLayer):
    """Sliding-window attention: keeps ``sliding_window - 1`` tokens between updates."""

    is_sliding = True

    def __init__(self, policy: Policy, sliding_window: int, fixed: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(policy, fixed)
        self.sliding_window = sliding_window
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Keep every token until the next ``crop``, so that a rollback is possible."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a chunk [B, H, T, D]; the ``sliding_window - 1`` positions before it and its own, in the dtype of the states."""
        self._append(key_states, value_states)
        states = self._read_last(self.sliding_window - 1 + key_states.shape[-2])
        if not self.record_past:
            self._restrict()
        return states

    def _restrict(self) -> None:
        held = self.keys.shape[-2] if self.is_initialized else 0
        if held >= self.sliding_window:
            self._keep(held - self.sliding_window + 1, held)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.get_seq_length()
        held = min(seen, self.sliding_window - 1)
        return held + query_length, seen - held

    def get_max_length(self) -> int:
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """As the stock layer: beyond the window only after ``activate_past_recording``. Raises RuntimeError, ValueError."""
        if self.get_seq_length() >= self.sliding_window and not self.record_past:
            raise RuntimeError("A sliding layer beyond its window can only be cropped after activate_past_recording.")
        super().crop(tokens_to_remove)
        self._restrict()


class RecurrentLayer(LinearAttentionLayer):
    """Recurrent and convolution states, native, as the stock layer keeps them; it can also change its batch, and forget it."""

    implementation = "reference"

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = change(state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Those sequences alone."""
        self._map(lambda state: state[indices, ...])

    def reset(self) -> None:
        """Drop the states: the next ones may be of another batch."""
        recording = self.record_past
        LinearAttentionLayer.__init__(self, self.number_of_states)
        self.record_past = recording


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == fp8.E4M3 else tensor


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where its storage is larger than itself: a view would keep, and report, what it hides."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
