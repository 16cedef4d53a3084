"""A whole decode step of a model, captured: Transformers at its best over a static cache, and the fused one.

Caches are filled with numbers from a seed: a short prompt goes through the model, so that every layer has what it needs,
then lengths are set and keys and values drawn. The native step always fills the last place of a static cache that is
exactly full, and its lengths are put back within the graph. So nothing need be masked, and SDPA may be asked without a mask: it
then shares KV heads instead of repeating them, which is Transformers' best. A fused step grows its cache by a token a
step; the last one that is timed reaches the case's context.

Fused steps run on the streamlined model (:mod:`runners.streamline`); Transformers' step runs on the plain and on the streamlined one,
and the faster counts. What is said of a kernel tells which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any

import torch
from transformers import AttentionInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from ledger import records
from ledger.errors import InputError, RefusedError
from runners import caches, serving
from runners.slots import stored_bytes
from runners.timing import Clock, Replay

UNMASKED = "sdpa_unmasked"
ATTENTION = {UNMASKED: "sdpa without a mask", "sdpa": "sdpa", "eager": "eager"}
LEAN = ", streamlined"
"""What is said of a step of a streamlined model."""
CHOICES = {(name, lean): words + LEAN * lean for lean in (False, True) for name, words in ATTENTION.items()}
"""Attention implementations that are tried over a static cache, on the plain and the streamlined model, and what they are called."""
PROMPT = 4
"""Tokens that go through the model before a cache is filled."""

AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, lambda *args, **kwargs: None)


def _streamline() -> Any:
    """The module of the streamlined step. Raises RefusedError (``backend``) without Triton: nothing is ever streamlined then."""
    from runners import streamline

    return streamline


def _room(context: int, steps: int) -> int:
    """Tokens held before so many steps. Raises InputError where there is no room for them."""
    start = context - steps
    if start < PROMPT:
        raise InputError(
            "The context is too short for the steps that are timed.",
            expected=f"{steps + PROMPT} tokens or more",
            found=str(context),
            next="time a longer context, or fewer repeats.",
        )
    return start


def _prompt(model: Any, cache: Any, batch: int, device: torch.device) -> None:
    ids = torch.arange(batch * PROMPT, device=device).view(batch, PROMPT) % model.config.get_text_config(decoder=True).vocab_size
    model(ids, **{caches.cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1})


def _draw(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Standard normal numbers in place, in whatever format the tensor has."""
    if tensor.dtype.itemsize > 1:
        tensor.normal_(generator=generator)
    else:
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device=tensor.device, generator=generator).to(tensor.dtype))


def _slide(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' update of a full window by one token, without the index that it makes on the host, which no graph can hold."""
    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.copy_(torch.cat((held[:, :, 1:], new), dim=2))
    return layer.keys, layer.values


class Native:
    """A static cache, exactly full, and the step over it under any of :data:`CHOICES`."""

    def __init__(self, model: Any, batch: int, context: int, seed: int, device: torch.device) -> None:
        self.model, self.context = model, context
        with suppress(RefusedError):
            _streamline().merge(model)  # weights must not move once a step is captured
        self.cache = StaticCache(config=model.config, max_cache_len=context)
        model.set_attn_implementation("sdpa")
        _room(context, 1)
        _prompt(model, self.cache, batch, device)
        generator = torch.Generator(device).manual_seed(seed)
        self.lengths = []
        for layer in self.cache.layers:
            if getattr(layer, "keys", None) is not None:
                _draw(layer.keys, generator)
                _draw(layer.values, generator)
                if layer.max_cache_len >= context:  # a full window counts no further
                    self.lengths.append(layer.cumulative_length)
                else:
                    layer.update = MethodType(_slide, layer)
        for length in self.lengths:
            length.fill_(context - 1)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.full((batch, 1), context - 1, device=device)

    def ready(self, choice: tuple[str, bool], clock: Clock) -> Replay:
        """The captured step under that attention, streamlined or not. Raises whatever refuses it."""
        implementation, lean = choice
        with suppress(RefusedError):
            _streamline().restore(self.model)
        if lean and not _streamline().streamline(self.model):
            raise RefusedError(
                "backend",
                "Nothing of this model can be streamlined.",
                expected="norms, activations or rotary embeddings that runners.streamline knows",
                found=type(self.model).__name__,
                next="time the plain model.",
            )
        self.model.set_attn_implementation(implementation)
        return clock.ready(self.step, 1, 1)

    def step(self, slot: int = 0) -> torch.Tensor:
        """Logits ``[B, vocabulary]``; the cache is as it was before, but for its last place."""
        for layer in self.cache.layers:
            if getattr(layer, "is_sliding", False):
                layer.cumulative_length_int = self.context - 1
        options = {caches.cache_argument(self.model): self.cache, "position_ids": self.positions, "use_cache": True}
        logits: torch.Tensor = self.model(self.ids, **options).logits[:, -1]
        torch._foreach_sub_(self.lengths, 1)
        return logits


def fused(
    model: Any, arm: records.Arm, *, batch: int, context: int, steps: int, page: int, seed: int, device: torch.device
) -> tuple[Callable[[], torch.Tensor], serving.FusedCache, str]:
    """The captured step of a fused arm, to be called ``steps`` times at most, its cache, and its kernels in words.

    Raises RefusedError and InputError.
    """
    start = _room(context, steps)
    lean = bool(_streamline().streamline(model))
    cache = serving.FusedCache(model.config, arm, batch=batch, max_tokens=context, chunk=page, page=page, device=device, seed=seed)
    model.set_attn_implementation(records.FUSED_BACKEND)
    _prompt(model, cache, batch, device)
    for held in range(PROMPT, start, page):  # a window takes no more than a chunk at a time
        cache.pool.extend(cache.sequences, min(page, start - held))
    cache.seen = start
    generator = torch.Generator(device).manual_seed(seed)
    for layer in cache.fused:
        layer.seen = start
        _draw(layer.pages.keys, generator)
        _draw(layer.pages.values, generator)
        for scales in (layer.pages.key_scales, layer.pages.value_scales):
            if scales is not None and scales.dim() == 3:
                scales.fill_(1 / 64)
    graph = serving.DecodeGraph(model, cache)
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    return lambda: graph.step(ids), cache, ", ".join(cache.describe()) + LEAN * lean


def bytes_of(model: Any, arm: records.Arm, layers: tuple[records.LayerGeometry, ...], batch: int, context: int) -> int:
    """Bytes that a step must read: all weights but an embedding that is only looked up, and what is attended to."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    total = sum(weight.nbytes for weight in model.parameters() if tied or weight is not embedding)
    attending = (layer for layer in layers if layer.kind != "recurrent")
    return total + sum(stored_bytes(arm, layer, batch * min(context, layer.window or context)) for layer in attending)
