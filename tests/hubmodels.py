"""Tiny seeded checkpoints as the hub lays them out, one for each model of the seed: what stands under its id in these tests.

Each has the architecture of its model: the wrapper of several modalities where the id on the hub is one, layers of the same
kinds in the same order, shards and their index, a generation config, a tokenizer. Widths, depths and vocabularies are small;
head dimensions are those of the model where its fused kernels are tested. Nothing here was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IDS = {
    "ministral-3-8b": "mistralai/Ministral-3-8B-Instruct-2512",
    "qwen3-5-9b": "Qwen/Qwen3.5-9B",
    "gemma-4-12b": "google/gemma-4-12B-it",
    "qwen3-8-27b": "Qwen/Qwen3.8-27B",
    "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen2-5-7b": "Qwen/Qwen2.5-7B-Instruct",
}
"""Repositories by the name of the model's suite."""
SUPPRESSED = (258882, 258883)
"""Ids that the generation config of the 12B Gemma 4 declares suppressed."""

_VOCABULARY = 384
_DENSE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_THREE_TO_ONE: dict[str, Any] = _DENSE | {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "model_type": "qwen3_5_text",
}
_FIVE_TO_ONE: dict[str, Any] = _DENSE | {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256, "max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "enable_moe_block": True}
_SIGHT = {
    "hidden_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2, "intermediate_size": 32,
    "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral-3-8b": ("mistral3", _DENSE | {"head_dim": 64, "model_type": "ministral3", "rope_parameters": _YARN}),
    "qwen3-5-9b": ("qwen3_5", _THREE_TO_ONE),
    "gemma-4-12b": ("gemma4_unified", _FIVE_TO_ONE | {"model_type": "gemma4_unified_text", "vocab_size": 262144}),
    "qwen3-8-27b": ("qwen3_5", _THREE_TO_ONE | {"num_hidden_layers": 8, "layer_types": _THREE_TO_ONE["layer_types"] * 2}),
    "gemma-4-26b-a4b": ("gemma4", _FIVE_TO_ONE | _EXPERTS | {"model_type": "gemma4_text"}),
    "qwen3-8b": ("qwen3", _DENSE | {"head_dim": 64}),
    "qwen2-5-7b": ("qwen2", _DENSE),
}
"""Model type on the hub, and the decoder's configuration."""
WITH_BOS = ("ministral-3-8b", "gemma-4-12b", "gemma-4-26b-a4b")


def _tokenizer(bos: bool) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE, trained on a few lines: every text is tokens, and back."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the tide came in over the flat sand, and went out again before the children were awake."], trainer)
    more = {"bos_token": "<bos>"} if bos else {}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", **more)


def _model(model: str) -> Any:
    kind, text = _TEXTS[model]
    torch.manual_seed(7)
    ids = {"pad_token_id": 0, "bos_token_id": 1 if model in WITH_BOS else None, "eos_token_id": 2}
    if kind in ("qwen2", "qwen3"):
        config = transformers.AutoConfig.for_model(kind, **text, **ids)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config = transformers.AutoConfig.for_model(kind, text_config=text | ids, tie_word_embeddings=text["tie_word_embeddings"])
    for side in ("vision_config", "audio_config"):
        if getattr(config, side, None) is not None:
            for name in _SIGHT.keys() & set(dir(getattr(config, side))):
                setattr(getattr(config, side), name, _SIGHT[name])
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The decoder's projections in fp8 beside one scale each, all other tensors as they are: so Ministral 3 is published."""
    made = dict(tensors)
    for name in [name for name in tensors if "language_model" in name and name.endswith("proj.weight")]:
        scale = tensors[name].float().abs().max() / 448
        made[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        made |= {
            f"{name}_scale_inv": scale.bfloat16(),
            name.replace("proj.weight", "proj.activation_scale"): torch.ones((), dtype=torch.bfloat16),
        }
    return made


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "dequantize": False,
    "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}
"""What the configuration of such a checkpoint says of it."""


def store_in_fp8(folder: Path, declared: dict[str, Any]) -> None:
    """Rewrite a checkpoint in ``folder`` with its projections in fp8; ``declared`` is its ``quantization_config``, if any."""
    where: dict[str, str] = {}
    for shard in sorted(folder.glob("model*.safetensors")):
        tensors = in_fp8(load_file(shard))
        where |= dict.fromkeys(tensors, shard.name)
        save_file(tensors, shard, metadata={"format": "pt"})
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    if index.exists():
        index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": where}), encoding="utf-8")
    said = json.loads(config.read_text()) | ({"quantization_config": declared} if declared else {})
    config.write_text(json.dumps(said), encoding="utf-8")


def files(model: str, folder: Path) -> dict[str, bytes]:
    """The files of a model's repository by name; ``folder`` is an empty one to make them in."""
    made = _model(model).eval()
    if model == "gemma-4-12b":
        made.generation_config.suppress_tokens = list(SUPPRESSED)
    made.save_pretrained(folder, max_shard_size="256KB")
    _tokenizer(model in WITH_BOS).save_pretrained(folder)
    if model == "ministral-3-8b":
        store_in_fp8(folder, FP8)
        (folder / "consolidated.safetensors").write_bytes(b"the same weights once more, in another layout")
    (folder / "README.md").write_text("A tiny seeded model.\n", encoding="utf-8")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
