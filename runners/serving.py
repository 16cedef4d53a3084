"""The fused cache in a Transformers model: an attention function, its mask function, a cache, and a captured decode step.

    model.set_attn_implementation("kv_fused")
    cache = FusedCache(model.config, arm, batch=8, max_tokens=4096, device="cuda")
    model(ids, cache=cache), model.generate(ids, cache=cache, ...)

A layer's ``update()`` cannot give keys and values back, since they live in pages: it returns a :class:`Handle`, which
the model passes on to :func:`attention` in their place. That writes the chunk and then attends to the stored bytes, in
prefill and in decode. Masks are not materialised: causality and windows are the kernels' own, and a 2D padding mask is
read as the number of real tokens of each row, which must stand at its end (left padding). A sequence holds its real
tokens only.

Recurrent layers stand beside the attention layers as Transformers' own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from ledger.errors import InputError, RefusedError
from ledger.records import FUSED_BACKEND, Arm
from runners import caches, geometry, scales
from runners.paged import PAGE, Pool, device_of
from runners.pages import Group, check_page, whole, without_gradient
from runners.scales import FixedScales

COLUMNS = 16
"""Prefill gets so many columns of a block table, or a multiple of it: its workspaces then have few sizes."""


def groups(config: PreTrainedConfig, arm: Arm) -> tuple[Group, ...]:
    """The groups of the model's attention layers: by geometry and window, in the order of their first layers."""
    found: dict[tuple[int, int, int, int | None], list[int]] = {}
    for layer in geometry.declared(config):
        if layer.kind != "recurrent":
            found.setdefault((layer.kv_heads, layer.key_dim, layer.value_dim, layer.window), []).append(layer.layer)
    return tuple(
        Group(tuple(layers), heads, key_dim, value_dim, arm.keys, arm.values, arm.scales, arm.granularity, window)
        for (heads, key_dim, value_dim, window), layers in found.items()
    )


@dataclass
class Step:
    """One forward pass: T tokens of each of B sequences. Lengths are int32 ``[B]`` on the device.

    A table is as wide as the pool's for a decode step, which may be captured, and else as the longest sequence needs.
    """

    tokens: int
    before: torch.Tensor
    after: torch.Tensor
    counts: torch.Tensor | None
    """Real tokens of each sequence, int32 ``[B]``; None where all are."""
    tables: dict[Group, torch.Tensor] = field(default_factory=dict)
    plans: dict[Group, Any] = field(default_factory=dict)


class FusedLayer(CacheLayerMixin):
    """One attention layer: its pages, and how many positions (padding included) it has seen."""

    supports_early_init = False
    implementation = "fused"

    def __init__(self, cache: FusedCache, index: int, policy: caches.Policy) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # a cycle would keep a dropped cache's memory until Python looks for cycles
        self.index, self.policy = index, policy
        self.group = cache.pool.group(index)
        self.pages = cache.pool.pages(index)
        self.keys, self.values = self.pages.keys, self.pages.values
        self.key_scales, self.value_scales = self.pages.key_scales, self.pages.value_scales
        self.transposed = self.group.values == "fp8_e4m3"
        self.sliding_window = self.group.window
        self.is_sliding = self.group.window is not None
        self.is_croppable = not self.is_sliding
        self.is_initialized = True
        self.states_dtype: torch.dtype | None = None
        self.seen = 0

    @property
    def cache(self) -> FusedCache:
        """The cache that the layer is of. Raises InputError where that is gone."""
        cache = self._cache()
        if cache is None:
            raise InputError(
                "The layer's cache is gone.",
                expected="a FusedCache",
                found="one that was dropped",
                next="keep the cache while its layers are in use.",
            )
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: pages exist from the beginning."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> tuple[Any, Any]:
        """A handle, twice, in place of the keys and values [B, H, T, D] that :func:`attention` is to store."""
        self.states_dtype = key_states.dtype
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.cache.pool.tokens

    def offload(self) -> None:
        raise RefusedError(
            "device",
            "Pages stay on their device.",
            expected="a cache that is not offloaded",
            found="offload",
            next="use another cache for offloading.",
        )

    def prefetch(self) -> None:
        """Nothing: pages are on their device."""

    def reset(self) -> None:
        self.seen = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise InputError(
            "Layers share their sequences.", expected="the whole cache", found=f"layer {self.index} alone", next="reorder the whole cache."
        )


class Handle:
    """Stands for keys and values on their way from ``update()`` to :func:`attention`."""

    def __init__(self, layer: FusedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def to(self, *args: object, **kwargs: object) -> Handle:
        """Itself: what device maps do to keys and values does not concern it."""
        return self

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float, soft_cap: float) -> torch.Tensor:
        """Store the chunk, then attend: ``query`` [B, H_q, T, D_k] -> [B, T, H_q, D_v]."""
        layer, cache = self.layer, self.layer.cache
        step = cache.begin(layer, query.shape[0], query.shape[2], mask)
        group, kernels = layer.group, cache.kernels
        table = step.tables[group]
        settings = {"scale": scale, "window": group.window or 0, "soft_cap": soft_cap}
        try:
            kernels.write(layer.pages, self.keys.transpose(1, 2), self.values.transpose(1, 2), table, step.before, step.counts)
            if step.tokens == 1 and step.counts is None:
                out = kernels.decode(query[:, :, 0], layer.pages, table, step.after, plan=step.plans[group], **settings)[:, None]
            else:
                out = kernels.prefill(query.transpose(1, 2), layer.pages, table, step.after, step.counts, **settings)
        except BaseException:  # tokens are counted that may not be stored
            cache.broken = True
            raise
        return without_gradient(out, query, self.keys, self.values).to(query.dtype)


class FusedCache(Cache):
    """A Transformers cache whose attention layers store into a :class:`runners.paged.Pool`.

    ``batch`` sequences of up to ``max_tokens`` real tokens (None: as many as ``budget_bytes`` holds), written at most
    ``chunk`` at a time (None: any number; a window needs room for that many more). Allocated at once. ``fixed`` are the scales of an arm
    that asks for them. Raises RefusedError with the guard's codes, ``scale_policy`` where such scales are missing or do not fit, and
    ``budget``, before anything is allocated; InputError for sizes and devices that are none, and pages that the kernels do not read.
    What raises InputError changes nothing, unless it says that the cache is to be reset.

    A deep copy is a cache of its own, pages included, that goes on from where this one is.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        arm: Arm,
        *,
        batch: int,
        max_tokens: int | None,
        budget_bytes: int | None = None,
        device: torch.device | str = "cpu",
        chunk: int | None = None,
        page: int = PAGE,
        seed: int | None = None,
        fixed: FixedScales | None = None,
    ) -> None:
        if arm.implementation != "fused":
            raise InputError(
                "This cache is for fused arms.", expected="fused", found=arm.implementation, next="use runners.caches.build for the others."
            )
        device = device_of(device)
        geometry.guard(config, arm, str(device))
        self.kernels = geometry.kernels()
        given = scales.by_layer(arm, geometry.declared(config), fixed)
        asked = groups(config, arm)
        for group in asked:
            check_page(whole(page, "page"), group.key_dim)
        self.pool = Pool(
            asked,
            tokens=max_tokens,
            sequences=batch,
            chunk=chunk,
            budget_bytes=budget_bytes,
            page=page,
            device=device,
            seed=seed,
        )
        for index, sides in given.items():
            self.pool.set_scales(index, {f"{side.removesuffix('s')}_scales": scale for side, scale in sides.items()})
        policy = caches.Policy(arm.compute, arm.keys, arm.values, arm.scales, arm.granularity)
        self._text = config.get_text_config(decoder=True)
        stock = DynamicCache(config=self._text).layers
        layers = [one if isinstance(one, LinearAttentionCacheLayerMixin) else FusedLayer(self, n, policy) for n, one in enumerate(stock)]
        super().__init__(layers=layers)
        self.fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
        self.sequences: list[int] = []
        self.seen = 0
        """Positions of the last forward pass that was begun, padding included."""
        self._step: Step | None = None
        self._plans: dict[tuple[Group, int], Any] = {}
        self._stepping = False
        self._spoiled = False
        """Whether a pass was refused or undone behind recurrent layers that had taken it in."""
        self.broken = False
        """Whether a pass broke off behind tokens that were counted, and may not be stored: nothing goes on until a reset."""

    def __deepcopy__(self, memo: dict[int, object]) -> FusedCache:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for shared in (self.kernels, self._text):
            memo[id(shared)] = shared
        state = vars(self) | {"_step": None, "_plans": {}}
        with torch.inference_mode(False):  # as the pool's, its recurrent states may then be written to anywhere
            for name, value in state.items():
                setattr(twin, name, copy.deepcopy(value, memo))
        for layer in twin.fused:
            layer._cache = weakref.ref(twin)
        return twin

    # ------------------------------------------------------------ a forward pass

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As of any cache. Asked before any layer runs: a next token without room is refused before recurrent layers take it in."""
        if query_length == 1 and self.sequences and not self._stepping:
            self.pool.check_room(self.sequences, 1)
        return super().get_mask_sizes(query_length, layer_idx)

    def begin(self, layer: FusedLayer, batch: int, tokens: int, mask: torch.Tensor | None) -> Step:
        """The forward pass that ``layer`` takes part in: begun by the first layer that comes to it, then the same for all."""
        self._check_unbroken()
        if self.layers[layer.index] is not layer:
            raise InputError(
                f"Layer {layer.index} is a copy of the cache's, or of another cache.",
                expected="the cache's own layer",
                found="another that names this cache",
                next="make a deep copy of the whole cache.",
            )
        if layer.seen == self.seen:
            try:
                self._step = self._advance(batch, tokens, mask)
            except Exception:
                self._refused()
                raise
            self.seen += tokens
        step = self._step
        layer.seen += tokens
        if step is None or layer.seen != self.seen or tokens != step.tokens or batch != step.before.shape[0]:
            raise InputError(
                f"Layer {layer.index} is out of step with the others.",
                expected=f"{self.seen} positions, batch {len(self.sequences)}",
                found=f"{layer.seen} positions, batch {batch}",
                next="reset the cache after a forward pass that failed.",
            )
        return step

    def _check_unbroken(self) -> None:
        if self._spoiled:
            raise InputError(
                "The recurrent states are ahead of the pages.",
                expected="states of the tokens that are held",
                found="those of a forward pass that was refused",
                next="reset the cache.",
            )
        if self.broken:
            raise InputError(
                "A forward pass broke off.",
                expected="every token that is counted stored",
                found="some that may not be",
                next="reset the cache.",
            )

    def check_whole(self) -> None:
        """Raises InputError where a forward pass broke off, so that layers do not hold the same tokens."""
        self._check_unbroken()
        behind = [layer for layer in self.fused if layer.seen != self.seen]
        if behind:
            raise InputError(
                f"Layer {behind[0].index} is out of step with the others.",
                expected=f"{self.seen} positions",
                found=f"{behind[0].seen} positions",
                next="reset the cache after a forward pass that failed.",
            )

    def undo(self, seen: int, tokens: int) -> None:
        """After a step that failed: as many positions as before it, its ``tokens`` of each sequence forgotten.

        Recurrent layers may have taken them in: a cache that has some is refused until it is reset.
        """
        for sequence in self.sequences:
            self.pool.crop(sequence, tokens)
        self.seen, self.broken = seen, False
        for layer in self.fused:
            layer.seen = seen
        self._spoiled = len(self.fused) != len(self.layers)
        self.pool.flush()

    def _refused(self) -> None:
        """A pass was refused: attention layers know nothing of it, recurrent ones before them have taken it in."""
        if self.seen:
            self._spoiled = len(self.fused) != len(self.layers)
            return
        stock = DynamicCache(config=self._text).layers  # nothing was held, so new layers are as the old ones were
        self.layers = [layer if layer in self.fused else new for layer, new in zip(self.layers, stock, strict=True)]
        self.reset()

    def _advance(self, batch: int, tokens: int, mask: torch.Tensor | None) -> Step:
        if batch > self.pool.sequences:
            raise InputError(
                "The batch is larger than the cache.",
                expected=f"at most {self.pool.sequences} sequences",
                found=str(batch),
                next="make a cache for a larger batch.",
            )
        if not self.sequences:
            self.sequences = self.pool.add_all(batch)
        if batch != len(self.sequences):
            raise InputError("The batch changed.", expected=str(len(self.sequences)), found=str(batch), next="reset the cache.")
        if self._stepping:  # the pages are reserved already, and the lengths advanced on the device
            step = Step(1, self.pool.lengths(self.sequences) - 1, self.pool.lengths(self.sequences), None)
        else:
            real = None if mask is None else self._real(mask, tokens)
            self.pool.extend(self.sequences, tokens if real is None else real)
            after = self.pool.lengths(self.sequences)
            counts = None if real is None else torch.tensor(real, dtype=torch.int32, device=self.pool.device)
            step = Step(tokens, after - (tokens if counts is None else counts), after, counts)
        for group in self.pool.groups:
            table = self.pool.table(group.layers[0], self.sequences)
            if tokens == 1 and step.counts is None:
                step.plans[group] = self._plan(group, batch)
                step.plans[group].update(step.after)
            else:
                longest = max(self.pool.length(sequence) for sequence in self.sequences)
                table = table[:, : -(-longest // (self.pool.page * COLUMNS)) * COLUMNS]
            step.tables[group] = table
        return step

    def _plan(self, group: Group, batch: int) -> Any:
        if (group, batch) not in self._plans:
            self._plans[group, batch] = self.kernels.Plan(
                batch, group.kv_heads, self.pool.tokens, window=group.window or 0, dim=group.key_dim, device=self.pool.device
            )
        return self._plans[group, batch]

    def _real(self, mask: torch.Tensor, tokens: int) -> list[int] | None:
        """Real tokens of each row of the chunk, by a padding mask [B, positions]; None where all are. Raises InputError."""
        positions = self.seen + tokens
        if mask.shape != (len(self.sequences), positions):
            raise InputError(
                "The attention mask is not a padding mask of all positions.",
                expected=f"[{len(self.sequences)}, {positions}]",
                found=str(list(mask.shape)),
                next="give one column for each position, those held included.",
            )
        mask = (mask != 0).to(torch.int32)
        told = torch.cat([mask[:, :-tokens].sum(dim=1, keepdim=True), mask[:, -tokens:]], dim=1).cpu()  # one copy
        chunk = told[:, 1:]
        for sequence, row, held in zip(self.sequences, chunk, told[:, 0].tolist(), strict=True):
            if (row.diff() < 0).any() or held != self.pool.length(sequence):
                raise InputError(
                    "The attention mask is not one of left padding.",
                    expected=f"{self.pool.length(sequence)} tokens held, and zeros before ones in the chunk",
                    found=f"{held} ones before the chunk" if held != self.pool.length(sequence) else "a zero behind a one",
                    next="pad on the left.",
                )
        return None if bool(chunk.all()) else chunk.sum(dim=1).tolist()

    def describe(self) -> list[str]:
        """The decode kernel of each group, in words: of the sequences that take part, before the first pass of all that may."""
        batch = len(self.sequences) or self.pool.sequences
        return list(dict.fromkeys(self.kernels.describe(self.pool.pages(group.layers[0]), batch) for group in self.pool.groups))

    # ------------------------------------------------------------ what else changes a cache

    def reset(self) -> None:
        """Forget everything; pages go back to the pool, recurrent states to zero."""
        self.pool.reset()
        self.sequences, self.seen, self._step, self._spoiled, self.broken = [], 0, None, False, False
        with torch.inference_mode():  # recurrent states are zeroed in place, and may have been made in it
            super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every sequence, or of none.

        Raises ValueError for a positive number, InputError where a sequence holds fewer or a window forbids it, and
        RefusedError (``recurrent_layers``), as recurrent states have no way back.
        """
        tokens = -whole(tokens_to_remove, "tokens to remove")
        if tokens < 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}.")
        if not tokens or not self.seen:
            return
        self.check_whole()
        if len(self.fused) != len(self.layers):
            raise RefusedError(
                "recurrent_layers",
                "Recurrent states have no way back.",
                expected="a model of attention layers alone",
                found=f"{len(self.layers) - len(self.fused)} recurrent layers",
                next="reset the cache, and prefill what is to stay.",
            )
        for sequence in self.sequences:
            self.pool.check_crop(sequence, tokens)
        for sequence in self.sequences:
            self.pool.crop(sequence, tokens)
        self.seen -= tokens
        for layer in self.fused:
            layer.seen = self.seen

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each sequence go on from the one that ``beam_idx`` [B] names. Raises InputError for other indices."""
        chosen = self._chosen(beam_idx, len(self.sequences))
        self.pool.rearrange({own: self.sequences[one] for own, one in zip(self.sequences, chosen, strict=True)})
        for layer in self.layers:
            if layer not in self.fused:
                layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences alone: numbers, or a mask [B]. Raises InputError for other indices."""
        if indices.dtype == torch.bool and indices.shape == (len(self.sequences),):
            indices = indices.nonzero().reshape(-1)
        self._become([self.sequences[one] for one in self._chosen(indices)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, side by side. Raises InputError where the pool has no room."""
        if whole(repeats, "repeats") < 1:
            raise InputError("A batch is repeated at least once.", expected="1 or more", found=str(repeats), next="use reset to empty it.")
        self._become([sequence for sequence in self.sequences for _ in range(repeats)])

    def _chosen(self, indices: torch.Tensor, count: int | None = None) -> list[int]:
        """Positions in the batch, ``count`` of them (None: any number but zero). Raises InputError."""
        batch = len(self.sequences)
        integers = not (indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool)
        chosen: list[int] = indices.tolist() if integers and indices.dim() == 1 else []
        if not chosen or len(chosen) != (count or len(chosen)) or not all(0 <= one < batch for one in chosen):
            raise InputError(
                "The indices do not name sequences of the batch.",
                expected=f"{count or 'one or more'} integers from 0 to {batch - 1}" if batch else "a cache that holds a batch",
                found=str(indices.tolist())[:100] if batch else "an empty one",
                next="name sequences that the cache holds." if batch else "prefill first.",
            )
        return chosen

    def _become(self, sources: Sequence[int]) -> None:
        if len(self.fused) != len(self.layers):
            raise RefusedError(
                "recurrent_layers",
                "Recurrent states cannot be cut or repeated along the batch.",
                expected="a model of attention layers alone",
                found=f"{len(self.layers) - len(self.fused)} recurrent layers",
                next="prefill a cache of the batch that is wanted.",
            )
        if not sources:
            raise InputError("The cache holds no batch.", expected="sequences", found="an empty cache", next="prefill first.")
        old = self.sequences
        new = [*old, *self.pool.add_all(max(0, len(sources) - len(old)))][: len(sources)]
        self.pool.rearrange(dict(zip(new, sources, strict=True)))
        for sequence in old[len(new) :]:
            self.pool.free(sequence)
        self.sequences = new


# ---------------------------------------------------------------- what Transformers calls


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` [B, H_q, T, D_k] through the pages behind ``key``; [B, T, H_q, D_v], and no weights.

    Raises RefusedError without a :class:`FusedCache`, and for what the kernels leave out.
    """
    if not isinstance(key, Handle) or key is not value:
        raise RefusedError(
            "implementation",
            "Fused attention works through a fused cache alone.",
            expected="a FusedCache",
            found="another cache, or none",
            next="pass a FusedCache to the model.",
        )
    sinks = kwargs.get("s_aux") is not None
    if dropout or sinks:
        raise RefusedError(
            "backend",
            "Fused attention has neither dropout nor attention sinks.",
            expected="neither",
            found=f"{'attention sinks' if sinks else f'dropout of {dropout}'} in {type(module).__name__}",
            next="call eval() on the model, or use another attention backend.",
        )
    if sliding_window != key.layer.group.window:
        raise InputError(
            f"Layer {key.layer.index} slides otherwise than its pages.",
            expected=_window(key.layer.group.window),
            found=_window(sliding_window),
            next="make the cache from the model's own configuration.",
        )
    cap = softcap if softcap is not None else getattr(module, "attn_logit_softcapping", None)
    return key.attend(query, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling, cap or 0.0), None


def padding_mask(*args: object, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: object) -> Any:
    """The 2D padding mask as it came, or None: a causal or sliding mask is the kernels' own. Raises RefusedError for any other."""
    if not allow_is_causal_skip:
        raise RefusedError(
            "layer_kind",
            "Fused attention has causal and sliding masks alone.",
            expected="a causal or sliding mask, and padding on the left",
            found="a mask of another form",
            next="use another attention backend.",
        )
    return attention_mask


def _window(tokens: int | None) -> str:
    return "no window" if tokens is None else f"a window of {tokens}"


AttentionInterface.register(FUSED_BACKEND, attention)
AttentionMaskInterface.register(FUSED_BACKEND, padding_mask)


# ---------------------------------------------------------------- one step, captured


class DecodeGraph:
    """A decode step of all the cache's sequences: captured once as a CUDA graph, replayed for every token.

    The cache holds its prompts already. On a CPU, or with ``capture=False``, the same step runs eagerly. The graph stays
    right while the cache keeps its batch, after ``reset`` and a new prompt too; a step whose recurrent states lie
    elsewhere than when it was captured (``reorder_cache`` makes new ones) is captured again. Raises InputError where the
    cache is empty or full, and leaves it as it was.
    """

    def __init__(self, model: Any, cache: FusedCache, *, capture: bool | None = None) -> None:
        if not cache.sequences or cache.sequences != list(range(len(cache.sequences))):
            raise InputError(
                "A captured step needs a cache that holds its prompts.",
                expected="sequences 0 to B - 1",
                found=", ".join(map(str, cache.sequences)) or "an empty cache",
                next="prefill first.",
            )
        if model.config._attn_implementation != FUSED_BACKEND:
            raise InputError(
                "The model does not attend through the cache.",
                expected=FUSED_BACKEND,
                found=model.config._attn_implementation,
                next="call set_attn_implementation on the model.",
            )
        cache.check_whole()
        self.model, self.cache = model, cache
        self.argument = caches.cache_argument(model)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        device = cache.pool.device
        with torch.inference_mode(False):
            self.ids = torch.zeros(len(cache.sequences), 1, dtype=torch.int64, device=device)
        self.lengths = cache.pool.lengths(cache.sequences)
        self.logits: torch.Tensor | None = None
        self.graph: Any = None
        self._captured: tuple[int, ...] = ()
        self.captures = device.type == "cuda" if capture is None else capture
        """Whether steps are replayed; otherwise they run eagerly."""
        if self.captures:
            self._capture()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, vocabulary]`` after one more token ``ids`` [B] of each sequence. The next step overwrites them.

        Ids on the host are checked against the vocabulary; those on a device are not, as that would wait for it. A step that
        fails leaves the cache as it was, or, where recurrent layers may have taken it in, refused until it is reset.
        """
        cache = self.cache
        if ids.numel() != len(self.ids) or cache.sequences != list(range(len(self.ids))):
            raise InputError(
                "The step is for another batch.",
                expected=f"{len(self.ids)} ids, and as many sequences",
                found=f"{ids.numel()} ids, and {len(cache.sequences)} sequences",
                next="make a step for this batch.",
            )
        vocabulary = self.vocabulary
        if ids.is_floating_point() or (ids.device.type == "cpu" and not bool(((ids >= 0) & (ids < vocabulary)).all())):
            raise InputError(
                "The ids are not of the vocabulary.",
                expected=f"integers from 0 to {vocabulary - 1}",
                found=str(ids.dtype) if ids.is_floating_point() else str(ids.reshape(-1).tolist())[:100],
                next="give ids of the model's own tokenizer.",
            )
        cache.check_whole()
        if self.captures and self._captured != self._addresses():
            self._capture()
        seen = cache.seen
        cache.pool.extend(cache.sequences, 1, told=False)
        try:
            cache.pool.flush()
            self.ids.copy_(ids.reshape(-1, 1))
            if not self.captures:
                self.logits = self._forward()
            else:
                self.graph.replay()
                cache.seen += 1
                for layer in cache.fused:
                    layer.seen = cache.seen
        except BaseException:
            cache.undo(seen, 1)
            raise
        assert self.logits is not None
        return self.logits

    def _addresses(self) -> tuple[int, ...]:
        """Where that lies which a captured step reads and others may put elsewhere."""
        states = (state for layer in self.cache.layers if layer not in self.cache.fused for state in _states(layer))
        return (*self.cache.pool.addresses(), *(state.data_ptr() for state in states))

    def _forward(self) -> torch.Tensor:
        """The step itself: nothing in it waits for the device."""
        self.lengths.add_(1)
        self.cache._stepping = True
        try:
            positions = (self.lengths - 1).long()[:, None]
            options = {self.argument: self.cache, "position_ids": positions, "use_cache": True}
            with torch.no_grad():
                logits: torch.Tensor = self.model(self.ids, **options).logits[:, -1]
        finally:
            self.cache._stepping = False
        return logits

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture the step. The cache is left as it was, whether that succeeds or not."""
        cache = self.cache
        self.graph, self._captured = None, ()
        states = [state for layer in cache.layers if layer not in cache.fused for state in _states(layer)]
        kept = [state.clone() for state in states]
        cache.pool.extend(cache.sequences, 1, told=False)  # the warm-up writes where the first token will stand
        cache.pool.flush()
        lengths, seen = self.lengths.clone(), cache.seen

        def undo() -> None:
            self.lengths.copy_(lengths)
            for state, old in zip(states, kept, strict=True):
                state.copy_(old)
            cache.seen, cache.broken, cache._spoiled = seen, False, False
            for layer in cache.fused:
                layer.seen = seen

        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._forward()
                    undo()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._forward()
        finally:
            undo()
            for sequence in cache.sequences:
                cache.pool.crop(sequence, 1)
            cache.pool.flush()
        self.graph, self._captured = graph, self._addresses()


def _states(layer: Any) -> list[torch.Tensor]:
    return [state for states in geometry.recurrent_states(layer).values() for state in states]
