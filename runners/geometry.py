"""What a model really has: its geometry, declared against measured; and the guard.

The guard refuses, before anything is allocated, what the runner cannot do honestly. Reason codes:

    architecture       a model type whose caches are not tested here
    recurrent_layers   layers that keep a state instead of keys and values
    latent_attention   keys and values are kept compressed (or indexed), not per head
    shared_kv_layers   layers that read another layer's cache
    multimodal_input   a model of images or sound beside text
    mixed_head_dim     head dimensions that differ between keys and values, or between layers
    head_dim           a head dimension that is not declared and does not follow from the hidden size
    sliding_window     a sliding layer without a usable window
    layer_kind         a kind of layer that is neither full nor sliding attention
    logit_softcap      attention scores are capped, which the chosen backend leaves out
    implementation     an implementation of the cache that does not exist here
    dtype              a compute or storage format that the implementation does not do
    scale_policy       a scale policy that is missing or not supported
    backend            an attention backend other than sdpa and eager
    device             a device other than a CPU
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ledger.errors import RefusedError
from ledger.records import Arm, LayerGeometry
from runners import fp8

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": fp8.E4M3,
}
"""The words of ``records.Format`` and what they mean to torch."""

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})
"""Model types whose caches are tested. A type joins by a test."""

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_COMPUTE = ("fp32", "bf16", "fp16")
_RECURRENT = {"conv", "linear_attention", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
_LATENT = {"indexed_attention", "heavily_compressed_attention", "compressed_sparse_attention"}


def word(dtype: torch.dtype) -> str:
    """The word of ``records.Format`` for a dtype; torch's own name for any other."""
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def _refuse(code: str, what: str, *, expected: str = "", found: str = "", next: str = "choose another checkpoint.") -> NoReturn:
    raise RefusedError(code, what, expected=expected, found=found, next=next)


# ---------------------------------------------------------------- geometry


def declared(config: PreTrainedConfig) -> tuple[LayerGeometry, ...]:
    """Geometry of each layer's cache by the configuration; kinds are those that the stock cache chooses.

    Raises RefusedError for a model that the runner does not do.
    """
    check_model(config)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = _head_dim(text)
    layers = []
    for index, layer in enumerate(DynamicCache(config=text).layers):
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
    """Geometry of each layer by the tensors that reached the cache. Layers that hold nothing are left out."""
    layers = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or values.dim() != 4:
            continue
        sliding = bool(getattr(layer, "is_sliding", False))
        layers.append(
            LayerGeometry(
                layer=index,
                kind="sliding" if sliding else "attention",
                kv_heads=keys.shape[1],
                key_dim=keys.shape[-1],
                value_dim=values.shape[-1],
                window=layer.sliding_window if sliding else None,
            )
        )
    return tuple(layers)


def census(model: PreTrainedModel) -> dict[str, int]:
    """Number of parameters by dtype word. Tied parameters count once."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        counts[word(parameter.dtype)] = counts.get(word(parameter.dtype), 0) + parameter.numel()
    return dict(sorted(counts.items()))


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
    check_model(config)
    _check_arm(arm)
    text = config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None) is not None and arm.backend != "eager":
        _refuse(
            "logit_softcap",
            "The model caps its attention scores, which this attention backend leaves out.",
            expected='backend "eager"',
            found=f'backend "{arm.backend}"',
            next="set the arm's backend in the study.",
        )
    if torch.device(device).type != "cpu":
        _refuse("device", "This test runs on a CPU.", expected="cpu", found=device, next="run it on a CPU.")


def check_model(config: PreTrainedConfig) -> None:
    """Refuse a model whose cache is not keys and values per head of full or sliding layers. Raises RefusedError."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if kinds & _RECURRENT:
        _refuse("recurrent_layers", "The model has layers that keep a recurrent state.", found=", ".join(sorted(kinds & _RECURRENT)))
    if getattr(text, "kv_lora_rank", None) or kinds & _LATENT:
        _refuse("latent_attention", "The model keeps its keys and values in a compressed form.", found=text.model_type)
    if getattr(text, "num_kv_shared_layers", 0) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        _refuse("shared_kv_layers", "The model has layers that read the cache of another layer.", found=text.model_type)
    if text is not config and not getattr(config, "is_encoder_decoder", False):
        _refuse("multimodal_input", "The text model is a part of a larger one.", expected="a text model", found=config.model_type)
    if text.model_type not in ARCHITECTURES or getattr(config, "is_encoder_decoder", False):
        _refuse(
            "architecture",
            "The caches of this model type are not tested here.",
            expected=", ".join(sorted(ARCHITECTURES)),
            found=text.model_type,
        )
    _check_layers(text)


def _check_layers(text: PreTrainedConfig) -> None:
    dim = _head_dim(text)
    others = {getattr(text, name, None) for name in ("global_head_dim", "v_head_dim")} - {None, dim}
    if others:
        _refuse("mixed_head_dim", "Head dimensions differ within the model.", found=", ".join(str(other) for other in (dim, *others)))
    try:
        layers = DynamicCache(config=text).layers
    except KeyError as error:
        _refuse("layer_kind", "The stock cache knows no such kind of layer.", found=str(error))
    for index, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _refuse("recurrent_layers", "The model has layers that keep a recurrent state.", found=f"layer {index}: {layer!r}")
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            _refuse("layer_kind", "A layer is neither full nor sliding attention.", found=f"layer {index}: {layer!r}")
        window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else 2
        # At window 1 the stock layer keeps everything (its slice starts at -0): there would be nothing to compare with.
        if not isinstance(window, int) or window < 2:
            found = f"layer {index}: {window}"
            _refuse("sliding_window", "A sliding layer has no usable window.", expected="2 tokens or more", found=found)


def _check_arm(arm: Arm) -> None:
    change = f"change arm {arm.name} in the study."
    if arm.implementation not in ("native", "reference"):
        _refuse("implementation", f"There is no {arm.implementation} cache here.", expected="native or reference", next=change)
    if arm.backend not in ("sdpa", "eager"):
        _refuse("backend", "This attention backend is not supported.", expected="sdpa or eager", found=arm.backend, next=change)
    if arm.compute not in _COMPUTE:
        _refuse("dtype", "This format cannot be computed in.", expected=", ".join(_COMPUTE), found=arm.compute, next=change)
    _check_formats((arm.keys, arm.values), DTYPES, change)
    if arm.implementation == "native" and not arm.compute == arm.keys == arm.values:
        _refuse(
            "dtype",
            "The stock cache holds the compute format alone.",
            expected=f"keys and values in {arm.compute}",
            found=f"keys {arm.keys}, values {arm.values}",
            next=change,
        )
    if "fp8_e4m3" in (arm.keys, arm.values):
        fp8.check(arm.scales, arm.granularity)
    elif (arm.scales, arm.granularity) != ("none", "none"):
        _refuse("scale_policy", "Scales belong to fp8_e4m3, and this arm stores none.", found=f'scales "{arm.scales}"', next=change)


def _check_formats(formats: Iterable[str], known: Iterable[str], change: str) -> None:
    for format in formats:
        if format not in known:
            _refuse("dtype", "This storage format is not supported.", expected=", ".join(known), found=format, next=change)
