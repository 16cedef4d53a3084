"""What a model really has: its geometry, declared against measured; and the guard.

The guard refuses, before anything is allocated, what the runner cannot do honestly. Reason codes:

    architecture       a model type whose caches are not tested here
    recurrent_layers   layers that keep a state instead of keys and values
    shared_backing     a layer that keeps a state beside its keys and values, in one backing with them
    latent_attention   keys and values are kept compressed (or indexed), not per head
    shared_kv_layers   layers that read another layer's cache, under the fused implementation; or no layer that keeps one
    multimodal_input   a model of images or sound beside text
    mixed_head_dim     head dimensions that differ between keys and values, or between layers of a model not tested so
    head_dim           a head dimension that is not declared, or that the kernels do not have
    sliding_window     a sliding layer without a usable window
    layer_kind         a kind of layer that is neither full nor sliding attention, or attention that is not causal
    logit_softcap      attention scores are capped, which the chosen backend leaves out, or by what is no positive number
    implementation     an implementation of the cache that does not exist here
    dtype              a compute or storage format that the implementation does not do
    scale_policy       a scale policy that is missing or not supported
    backend            an attention backend that does not belong to the implementation, or is not installed
    device             a device that is not there, or that the kernels do not run on
    budget             a cache that does not fit its byte budget

What each implementation does, beyond full and sliding attention of one head dimension:

    native      layers of two head dimensions and layers that share keys and values (Gemma 4), recurrent layers (Qwen3.5),
                capped scores (``eager``)
    reference   all of native
    fused       all of native but shared keys and values, and a few model types; bf16 and fp16 compute; head dimensions 64,
                128, 256 and 512
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ledger.errors import RefusedError
from ledger.records import FUSED_BACKEND, Arm, LayerGeometry
from runners import fp8

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": fp8.E4M3,
}
"""The words of ``records.Format`` and what they mean to torch."""

ARCHITECTURES = frozenset(
    {
        "llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_5_text", "gemma4_text", "gemma4_unified_text",
    }
)  # fmt: skip
"""Model types whose caches are tested under every implementation. A type joins by a test."""
BEYOND_FUSED = frozenset({"qwen3_5_moe_text"})
"""Model types that are tested under the native and the reference implementation alone."""
HEAD_DIMS = (64, 128, 256, 512)
"""Head dimensions that the kernels have."""

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_COMPUTE = ("fp32", "bf16", "fp16")
_WITH_STATES = {"qwen3_5_text", "qwen3_5_moe_text"}
_TWO_HEAD_DIMS = {"gemma4_text", "gemma4_unified_text"}
_RECURRENT = {"conv", "linear_attention", "mamba", "mamba2", "recurrent"}
_BOTH = {"hybrid", "hybrid_sliding"}
_LATENT = {"indexed_attention", "heavily_compressed_attention", "compressed_sparse_attention"}


def word(dtype: torch.dtype) -> str:
    """The word of ``records.Format`` for a dtype; torch's own name for any other."""
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def _refuse(code: str, what: str, *, expected: str = "", found: str = "", next: str = "choose another checkpoint.") -> NoReturn:
    raise RefusedError(code, what, expected=expected, found=found, next=next)


# ---------------------------------------------------------------- geometry


def declared(config: PreTrainedConfig) -> tuple[LayerGeometry, ...]:
    """Geometry of each layer's cache by the configuration; kinds are those that the stock cache chooses.

    A recurrent layer's is that of its state: value heads, key dimension, value dimension. A layer that reads the keys and
    values of another has no KV heads of its own: its geometry is that of the other, with ``kv_heads`` 0. Raises RefusedError
    for a model that no implementation does.
    """
    check_model(config)
    text = config.get_text_config(decoder=True)
    layers: list[LayerGeometry] = []
    readers = sharing(config)
    stock = DynamicCache(config=text).layers
    for index in range(text.num_hidden_layers):
        if index in readers:
            layers.append(_reading(layers[readers[index]], index))
            continue
        layer = stock[index]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            heads, key_dim, value_dim = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
            layers.append(LayerGeometry(layer=index, kind="recurrent", kv_heads=heads, key_dim=key_dim, value_dim=value_dim))
            continue
        heads, dim = _attention(text, index)
        sliding = type(layer) is DynamicSlidingWindowLayer
        layers.append(
            LayerGeometry(
                layer=index,
                kind="sliding" if sliding else "attention",
                kv_heads=heads,
                key_dim=dim,
                value_dim=dim,
                window=layer.sliding_window if sliding else None,
            )
        )
    return tuple(layers)


def measured(cache: Cache) -> tuple[LayerGeometry, ...]:
    """Geometry of each layer by the tensors that reached the cache. Layers that hold nothing are left out.

    A layer that shares keys and values holds nothing: its geometry is that of the tensors that it reads, with no heads of its own.
    """
    layers: list[LayerGeometry] = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for state in recurrent_states(layer)["recurrent"]:
                _, heads, key_dim, value_dim = state.shape
                layers.append(LayerGeometry(layer=index, kind="recurrent", kv_heads=heads, key_dim=key_dim, value_dim=value_dim))
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or values.dim() != 4 or not layer.get_seq_length():
            continue
        sliding = bool(getattr(layer, "is_sliding", False))
        layers.append(
            LayerGeometry(
                layer=index,
                kind="sliding" if sliding else "attention",
                kv_heads=keys.shape[1],
                key_dim=keys.shape[-1],
                value_dim=values.shape[2 if getattr(layer, "transposed", False) else 3],
                window=getattr(layer, "sliding_window", None) or layer.max_cache_len if sliding else None,  # a static one keeps its length
            )
        )
    held = {layer.layer: layer for layer in layers}
    layers += [_reading(held[source], index) for index, source in getattr(cache, "sharing", {}).items() if source in held]
    return tuple(sorted(layers, key=lambda layer: layer.layer))


def sharing(config: PreTrainedConfig) -> dict[int, int]:
    """Layers that keep no keys and values and read those of an earlier layer: their numbers, and the one that each reads.

    That is the last layer of their kind that keeps its own, as in Gemma 4. Raises RefusedError (``shared_kv_layers``) where
    there is none.
    """
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_kv_shared_layers", 0) or 0
    if not count:
        return {}
    kinds = list(text.layer_types)
    own = kinds[: len(kinds) - count]
    for index in range(len(own), len(kinds)):
        if kinds[index] not in own:
            found = f"layer {index}: {kinds[index]}"
            _refuse("shared_kv_layers", "A layer reads the cache of another, and none of its kind keeps one.", found=found)
    return {index: max(at for at, kind in enumerate(own) if kind == kinds[index]) for index in range(len(own), len(kinds))}


def _reading(source: LayerGeometry, index: int) -> LayerGeometry:
    return msgspec.structs.replace(source, layer=index, kv_heads=0)


def recurrent_states(layer: Any) -> dict[str, list[torch.Tensor]]:
    """States of a recurrent layer, by kind of backing: ``convolution`` and ``recurrent``; none before its first token."""
    found = {}
    for kind, states in (("convolution", layer.conv_states), ("recurrent", layer.recurrent_states)):
        listed = states.values() if isinstance(states, dict) else [states]  # one tensor in older Transformers
        found[kind] = [state for state in listed if state is not None]
    return found


def census(model: PreTrainedModel) -> dict[str, int]:
    """Number of parameters by dtype word. Tied parameters count once."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        counts[word(parameter.dtype)] = counts.get(word(parameter.dtype), 0) + parameter.numel()
    return dict(sorted(counts.items()))


def _attention(text: PreTrainedConfig, index: int) -> tuple[int, int]:
    """KV heads and head dimension of one attention layer."""
    layers = getattr(text, "per_layer_config", None)
    one: Any = text if layers is None else layers[index]
    heads = getattr(one, "num_key_value_heads", None) or one.num_attention_heads
    dim = _head_dim(one)
    if layers is None and getattr(text, "global_head_dim", None) and text.layer_types[index] == "full_attention":
        dim = int(text.global_head_dim)  # Transformers before per-layer configurations
        if getattr(text, "attention_k_eq_v", False):
            heads = getattr(text, "num_global_key_value_heads", None) or heads
    return int(heads), dim


def _head_dim(text: PreTrainedConfig) -> int:
    dim = getattr(text, "head_dim", None)
    if dim is not None:
        return int(dim)
    if text.hidden_size % text.num_attention_heads:
        _refuse(
            "head_dim",
            "The configuration declares no head dimension, and the hidden size is no multiple of the heads.",
            found=f"hidden size {text.hidden_size}, {text.num_attention_heads} heads",
        )
    return int(text.hidden_size // text.num_attention_heads)


# ---------------------------------------------------------------- guard


def guard(config: PreTrainedConfig, arm: Arm, device: str = "cpu") -> None:
    """Refuse what cannot be run honestly. Allocates nothing. Raises RefusedError with a reason code."""
    check_model(config, arm.implementation)
    _check_arm(arm)
    text = config.get_text_config(decoder=True)
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float) or not 2.0**-126 <= cap < 2.0**127):
        expected = "a positive number in the range of float32"
        _refuse("logit_softcap", "The model's soft cap cannot be used.", expected=expected, found=repr(cap))
    if cap is not None and arm.backend not in ("eager", FUSED_BACKEND):
        _refuse(
            "logit_softcap",
            "The model caps its attention scores, which this attention backend leaves out.",
            expected='backend "eager"',
            found=f'backend "{arm.backend}"',
            next="set the arm's backend in the study.",
        )
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        _refuse("device", "The device is not there.", expected="cpu, or cuda on a host that has it", found=device, next="run it elsewhere.")
    if arm.implementation == "fused":
        _check_fused(config, device)


def _check_fused(config: PreTrainedConfig, device: str) -> None:
    dims = sorted({layer.key_dim for layer in declared(config) if layer.kind != "recurrent"} - set(HEAD_DIMS))
    if dims:
        _refuse(
            "head_dim",
            "The kernels do not have this head dimension.",
            expected=", ".join(str(dim) for dim in HEAD_DIMS),
            found=", ".join(str(dim) for dim in dims),
        )
    reason = kernels().available(device)
    if reason:
        _refuse("device", "The kernels do not run here.", found=reason, next="run it on a CUDA device with FP8.")


def kernels() -> Any:
    """The module of the kernels, loaded when a fused arm asks for it. Raises RefusedError (``backend``) without Triton."""
    from runners import fused

    return fused


def check_model(config: PreTrainedConfig, implementation: str = "native") -> None:
    """Refuse a model whose cache the implementation does not do. Raises RefusedError."""
    text = config.get_text_config(decoder=True)
    if text is not config and not getattr(config, "is_encoder_decoder", False):
        _refuse("multimodal_input", "The text model is a part of a larger one.", expected="a text model", found=config.model_type)
    known = ARCHITECTURES if implementation == "fused" else ARCHITECTURES | BEYOND_FUSED
    tested = text.model_type in known
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if kinds & _BOTH:
        found = ", ".join(sorted(kinds & _BOTH))
        _refuse("shared_backing", "The model has layers that keep a state beside keys and values, in one backing.", found=found)
    if kinds & _RECURRENT and not (tested and text.model_type in _WITH_STATES):
        _refuse("recurrent_layers", "The model has layers that keep a recurrent state.", found=", ".join(sorted(kinds & _RECURRENT)))
    if getattr(text, "kv_lora_rank", None) or kinds & _LATENT:
        _refuse("latent_attention", "The model keeps its keys and values in a compressed form.", found=text.model_type)
    shares = getattr(text, "num_kv_shared_layers", 0) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ())
    if shares and (implementation == "fused" or text.model_type not in _TWO_HEAD_DIMS):
        _refuse("shared_kv_layers", "The model has layers that read the cache of another layer.", found=text.model_type)
    if not tested or getattr(config, "is_encoder_decoder", False):
        _refuse(
            "architecture",
            "The caches of this model type are not tested here.",
            expected=", ".join(sorted(known)),
            found=text.model_type,
        )
    _check_layers(text)


def _check_layers(text: PreTrainedConfig) -> None:
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or not getattr(text, "is_causal", True):
        _refuse("layer_kind", "The model's attention is not causal.", found=text.model_type)
    readers = sharing(text)
    try:
        layers = DynamicCache(config=text).layers
    except KeyError as error:
        _refuse("layer_kind", "The stock cache knows no such kind of layer.", found=str(error))
    dims = {getattr(text, "v_head_dim", None)} - {None}
    for index, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            if text.model_type not in _WITH_STATES:
                _refuse("recurrent_layers", "The model has layers that keep a recurrent state.", found=f"layer {index}: {layer!r}")
            continue
        if index in readers:
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            _refuse("layer_kind", "A layer is neither full nor sliding attention.", found=f"layer {index}: {layer!r}")
        dims.add(_attention(text, index)[1])
        window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else 2
        # At window 1 the stock layer keeps everything (its slice starts at -0): there would be nothing to compare with.
        if not isinstance(window, int) or window < 2:
            found = f"layer {index}: {window}"
            _refuse("sliding_window", "A sliding layer has no usable window.", expected="2 tokens or more", found=found)
    if len(dims) > 1 and text.model_type not in _TWO_HEAD_DIMS:
        found = ", ".join(str(dim) for dim in sorted(dims))
        _refuse("mixed_head_dim", "Head dimensions differ within the model.", found=found)


def _check_arm(arm: Arm) -> None:
    change = f"change arm {arm.name} in the study."
    if arm.implementation not in ("native", "reference", "fused"):
        expected = "native, reference or fused"
        _refuse("implementation", f"There is no {arm.implementation} cache here.", expected=expected, next=change)
    fused = arm.implementation == "fused"
    backends = (FUSED_BACKEND,) if fused else ("sdpa", "eager")
    if arm.backend not in backends:
        expected = " or ".join(backends)
        _refuse("backend", "This attention backend is not supported.", expected=expected, found=arm.backend, next=change)
    computed = _COMPUTE[1:] if fused else _COMPUTE
    if arm.compute not in computed:
        _refuse("dtype", "This format cannot be computed in.", expected=", ".join(computed), found=arm.compute, next=change)
    _check_formats((arm.keys, arm.values), (arm.compute, "fp8_e4m3") if fused else DTYPES, change)
    if arm.implementation == "native" and not arm.compute == arm.keys == arm.values:
        _refuse(
            "dtype",
            "The stock cache holds the compute format alone.",
            expected=f"keys and values in {arm.compute}",
            found=f"keys {arm.keys}, values {arm.values}",
            next=change,
        )
    check_scales(arm.keys, arm.values, arm.scales, arm.granularity, reference=arm.implementation == "reference", next=change)


def check_scales(keys: str, values: str, scales: str, granularity: str, *, reference: bool = False, next: str = "") -> None:
    """Refuse scales that nothing here stores. Words are those of ``records.Arm``. Raises RefusedError (``scale_policy``).

    The ``reference`` stores every policy of :data:`runners.fp8.POLICIES`. Pages store fewer; ``fixed`` scales, one a head, are given
    to them before they are used.
    """
    allowed = {("none", "none"): 'scales "none", as neither side is fp8_e4m3'}
    if "fp8_e4m3" in (keys, values) and reference:
        allowed = {pair: 'scales "{}" with granularity "{}"'.format(*pair) for pair in sorted(fp8.POLICIES)}
    elif "fp8_e4m3" in (keys, values):
        allowed = {
            ("unit", "none"): 'scales "unit"',
            ("fixed", "head"): 'scales "fixed" with granularity "head"',
            ("dynamic", "token_head"): 'scales "dynamic" with granularity "token_head"',
        }
    if (scales, granularity) not in allowed:
        _refuse(
            "scale_policy",
            "These scales are not stored.",
            expected=", or ".join(allowed.values()),
            found=f'scales "{scales}", granularity "{granularity}"',
            next=next or "choose what is expected.",
        )


def _check_formats(formats: Iterable[str], known: Iterable[str], change: str) -> None:
    for format in formats:
        if format not in known:
            _refuse("dtype", "This storage format is not supported.", expected=", ".join(known), found=format, next=change)
