"""Raw samples -> measurements. A runner writes samples only; every figure is derived here.

Samples of document ``NNNN`` are the tensors of ``samples/NNNN.safetensors``, each of shape ``[tokens - 1]``,
where ``tokens`` counts the BOS if the workload has one:

    <arm>.loss            F32  nats: -log p(next token)
    <arm>.top1            I32  id of the most probable token
    <arm>.kl.<control>    F32  nats: KL(control || arm), for every arm of ``Spec.references``
    <arm>.gap.<baseline>  F32  largest absolute difference of any logit, for every arm of ``Spec.gaps``

An arm that was refused, or failed, has no tensor in a document; an arm that has one has all of them, except those
that compare it with an absent arm. ``greedy.jsonl`` has one line an arm and document.

Definitions, all in double precision and in the order of the spec, so that they can be repeated:

    loss_mean                       mean over documents of the mean loss of a document
    loss_difference_mean            the same of the difference, arm less other, on the same tokens
    loss_difference_sd              standard deviation of that difference over all tokens (n - 1)
    worst_document_loss_difference  largest mean difference of a document
    kl_mean                         mean over documents of the mean KL of a document
    kl_median, kl_p999              quantile over all tokens: numpy's linear method for the median; for 99.9 % its
                                    "higher" method, the smallest sample that at least the share lies at or below
    kl_difference_mean              mean over documents of the KL to the common control, arm less other
    top1_disagreement               mean over documents of the fraction of tokens with another most probable token
    logit_gap_max                   largest difference of any logit
    greedy_agreement_tokens/NNNN    leading tokens of the greedy continuation that equal the other arm's
    cache_bytes, scale_bytes        bytes of the measured allocations, each address once; scales apart
    cache_bytes_per_token           cache_bytes over the tokens held
    cache_ratio(_with_scales)       bytes over those of the 16-bit control at the same number of tokens

Intervals are two-sided, 95 %, Student's t over documents. They are absent under two documents or where a sample
is not finite. NaN and infinities are data: they are kept and they show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
from scipy import special

from ledger import digest
from ledger.errors import InputError
from ledger.records import Arm, ArmResult, Backing, Measurement, Result, Spec, ids_digest

Floats = npt.NDArray[np.float64]
Unit = Literal["nats", "fraction", "bytes", "tokens", "ratio", "count", "seconds", "microseconds", "logits", "states"]

_SAMPLE = re.compile(r"samples/(\d{4})\.safetensors\Z")
_TAIL = 0.999
_ROUNDING = 1e-3  # of a softmax in fp32 over a large vocabulary, nats; seen: 3e-7
_GREEDY_KEYS = {"arm", "document", "prompt_tokens", "ids"}
_DTYPES: dict[str, Any] = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4")}
_AS_LEFT = "record the folder as the runner left it."
_WIDE = ("bf16", "fp16")


@dataclass(frozen=True)
class Samples:
    """Raw samples by arm (or pair) and document. Losses, KLs and gaps ``float64 [tokens - 1]``, ids ``int32``."""

    loss: dict[str, dict[int, Floats]] = field(default_factory=dict)
    top1: dict[str, dict[int, npt.NDArray[np.int32]]] = field(default_factory=dict)
    kl: dict[tuple[str, str], dict[int, Floats]] = field(default_factory=dict)
    gap: dict[tuple[str, str], dict[int, Floats]] = field(default_factory=dict)
    greedy: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    def documents(self, *arms: str) -> tuple[int, ...]:
        """Indices, ascending, of the documents for which every one of ``arms`` has samples."""
        found = [set(self.loss.get(arm, {})) for arm in arms]
        return tuple(sorted(set.intersection(*found))) if found else ()

    def flaw(self, arm: str) -> str:
        """The first series of ``arm`` that cannot be judged, and why; the empty string where there is none.

        NaN and infinities, and values that no softmax gives: a loss or a KL below 0 by more than rounding, a negative id or gap.
        """
        series: list[tuple[str, Mapping[int, npt.NDArray[Any]]]] = [
            (f"{arm}.loss", self.loss.get(arm, {})),
            (f"{arm}.top1", self.top1.get(arm, {})),
        ]
        series += [(f"{a}.kl.{b}", found) for (a, b), found in self.kl.items() if a == arm]
        series += [(f"{a}.gap.{b}", found) for (a, b), found in self.gap.items() if a == arm]
        for name, documents in series:
            for document, values in documents.items():
                if not np.isfinite(values).all():
                    return f"{name} of document {document} holds a NaN or an infinity"
                if values.size and values.min() < -_ROUNDING:
                    return f"{name} of document {document} holds {values.min():g}, which cannot be"
        return ""


# ---------------------------------------------------------------- what a spec asks for


def others(spec: Spec, arm: Arm) -> tuple[str, ...]:
    """The arms with which ``arm`` is compared, in the order of the spec's arms."""
    wanted = {c.baseline for c in spec.contrasts if c.candidate == arm.name} | set(spec.references()[arm.name])
    return tuple(other.name for other in spec.arms if other.name in wanted)


def sixteen_bit_control(spec: Spec) -> str | None:
    """The first control that stores 16-bit keys and values, or None."""
    return next((arm.name for arm in spec.arms if arm.role == "control" and arm.keys in _WIDE and arm.values in _WIDE), None)


# ---------------------------------------------------------------- reading


def tensors(name: str, data: bytes) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file by name: ``dtype``, ``shape`` and ``data``. Raises InputError."""
    try:
        return dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InputError(
            f"{name} is not a safetensors file.",
            found=str(error)[:200],
            next=_AS_LEFT,
        ) from error


def is_count(value: Any) -> bool:
    """Whether a value of JSON is a whole number that counts something: from 0, in 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that a double can be; NaN and infinities are."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def json_lines(name: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and value of each line of a JSON Lines file. Raises InputError that names the line."""
    if data and not data.endswith(b"\n"):
        raise InputError(f"{name} ends in the middle of a line.", next=_AS_LEFT)
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield number, digest.parse(line)
        except InputError as error:
            raise InputError(
                f"Line {number} of {name} cannot be read: {error.what}", expected=error.expected, found=error.found, next=_AS_LEFT
            ) from error


def _expected(spec: Spec, present: set[str]) -> dict[str, str]:
    """Tensor name to dtype, for a document in which the arms ``present`` ran."""
    names: dict[str, str] = {}
    known, gaps = spec.references(), spec.gaps()
    for arm in spec.arms:
        if arm.name in present:
            names[f"{arm.name}.loss"] = "F32"
            names[f"{arm.name}.top1"] = "I32"
            names.update({f"{arm.name}.kl.{other}": "F32" for other in known[arm.name] if other in present})
            names.update({f"{arm.name}.gap.{other}": "F32" for other in gaps[arm.name] if other in present})
    return names


def _read_document(spec: Spec, name: str, index: int, data: bytes, into: Samples) -> None:
    held = tensors(name, data)
    present = {arm.name for arm in spec.arms if any(tensor.startswith(f"{arm.name}.") for tensor in held)}
    expected = _expected(spec, present)
    length = spec.documents[index].tokens + int(spec.text.bos) - 1
    again = "run the study again; do not edit samples."
    for tensor in expected:
        if tensor not in held:
            raise InputError(f"{name} lacks the tensor {tensor!r}.", expected=", ".join(sorted(expected))[:400], next=again)
    for tensor, content in held.items():
        if tensor not in expected:
            raise InputError(f"{name} holds a tensor that the spec does not ask for.", found=repr(tensor[:200]), next=again)
        wanted, found = (expected[tensor], [length]), (content["dtype"], list(content["shape"]))
        if wanted != found:
            raise InputError(
                f"{name}: the tensor {tensor!r} has another type or shape.",
                expected=f"{wanted[0]} {wanted[1]}",
                found=f"{found[0]} {found[1]}",
                next=again,
            )
        values = np.frombuffer(bytes(content["data"]), _DTYPES[wanted[0]])
        arm, kind, *other = tensor.split(".")
        if kind == "top1":
            into.top1.setdefault(arm, {})[index] = values.astype(np.int32)
        elif kind == "loss":
            into.loss.setdefault(arm, {})[index] = values.astype(np.float64)
        else:
            series = into.kl if kind == "kl" else into.gap
            series.setdefault((arm, other[0]), {})[index] = values.astype(np.float64)


def _read_greedy(spec: Spec, data: bytes, into: Samples) -> None:
    greedy = spec.text.greedy
    if greedy is None:
        raise InputError("greedy.jsonl is present, but the spec asks for no greedy continuation.", next=_AS_LEFT)
    names = {arm.name for arm in spec.arms}
    for number, value in json_lines("greedy.jsonl", data):
        where = f"Line {number} of greedy.jsonl"
        if not isinstance(value, dict) or set(value) != _GREEDY_KEYS:
            raise InputError(f"{where} has other keys.", expected=", ".join(sorted(_GREEDY_KEYS)), found=repr(value)[:200])
        arm, document, ids = value["arm"], value["document"], value["ids"]
        if (
            not isinstance(arm, str)
            or arm not in names
            or type(document) is not int
            or not 0 <= document < min(greedy.documents, len(spec.documents))
        ):
            raise InputError(f"{where} names no arm or document of the spec.", found=f"arm {arm!r}, document {document!r}"[:200])
        if value["prompt_tokens"] != greedy.prompt_tokens:
            raise InputError(
                f"{where} has another prompt.", expected=f"{greedy.prompt_tokens} tokens", found=repr(value["prompt_tokens"])[:80]
            )
        if not isinstance(ids, list) or len(ids) > greedy.new_tokens or any(type(i) is not int or i < 0 for i in ids):
            raise InputError(f"{where} holds no list of at most {greedy.new_tokens} token ids.", found=repr(ids)[:80])
        if document in into.greedy.setdefault(arm, {}):
            raise InputError(f"{where} repeats arm {arm!r}, document {document}.")
        into.greedy[arm][document] = tuple(ids)


def read_samples(spec: Spec, evidence: Mapping[str, bytes]) -> Samples:
    """Parse the samples among ``evidence`` (name to bytes) strictly; other evidence is left alone.

    Documents may be missing (a run that was cut short). Raises InputError naming the file and the tensor for
    a file that is not safetensors, a missing or extra tensor, another dtype or shape, or a document beyond the spec.
    """
    samples = Samples()
    for name in sorted(evidence):
        if not name.startswith("samples/"):
            continue
        match = _SAMPLE.match(name)
        if match is None or int(match[1]) >= len(spec.documents):
            raise InputError(
                f"{name} belongs to no document of the spec.",
                expected=f"samples/0000.safetensors to samples/{len(spec.documents) - 1:04}.safetensors",
                next=_AS_LEFT,
            )
        _read_document(spec, name, int(match[1]), evidence[name], samples)
    if "greedy.jsonl" in evidence:
        _read_greedy(spec, evidence["greedy.jsonl"], samples)
    return samples


def check_inputs(spec: Spec, result: Result, data: bytes | None) -> list[str]:
    """What is wrong with the token ids, pinned or kept (``inputs.safetensors``): one clause each.

    Tensor ``NNNN`` is I32 ``[tokens]``, and has the digest that the result gives for document ``NNNN``. Raises InputError
    where the file cannot be parsed.
    """
    wrong = []
    if spec.ids is not None and len(result.documents) == len(spec.documents):
        fed = ids_digest([document.sha256 for document in result.documents])
        wrong += [] if fed == spec.ids else [f"the documents' token ids have the digest {fed}, and the spec pins {spec.ids}"]
    return wrong + _check_kept(spec, result, data)


def _check_kept(spec: Spec, result: Result, data: bytes | None) -> list[str]:
    if spec.text.inputs != "store":
        return [] if data is None else ["inputs.safetensors is present, but the spec keeps inputs by digest alone"]
    if data is None:
        return ["inputs.safetensors is missing"] if result.outcome == "completed" else []
    held = tensors("inputs.safetensors", data)
    found = []
    for at, document in enumerate(result.documents):
        content = held.pop(f"{at:04}", None)
        if content is None or content["dtype"] != "I32" or list(content["shape"]) != [document.tokens]:
            found.append(f"inputs.safetensors holds no {document.tokens} token ids of document {at}")
        elif digest.sha256(bytes(content["data"])) != document.sha256:
            found.append(f"inputs.safetensors: the token ids of document {at} have another digest than the result says")
    later = {f"{at:04}" for at in range(len(result.documents), len(spec.documents))}  # kept before the run was cut short
    return found + [f"inputs.safetensors holds ids of no document: {name[:80]!r}" for name in held if name not in later]


# ---------------------------------------------------------------- arithmetic


def mean(values: Sequence[float] | Floats) -> float:
    """Exactly rounded sum over count; NaN or an infinity where a value is one."""
    array = np.asarray(values, np.float64)
    if not np.isfinite(array).all():
        with np.errstate(all="ignore"):
            return float(array.mean())
    return math.fsum(array.tolist()) / array.size


def spread(values: Sequence[float] | Floats) -> float:
    """Standard deviation (n - 1), exactly zero where all values are equal. Needs two values; NaN otherwise."""
    array = np.asarray(values, np.float64)
    if array.size < 2 or not np.isfinite(array).all():
        return math.nan
    if (array == array[0]).all():
        return 0.0
    centre = mean(array)
    return math.sqrt(math.fsum(((array - centre) ** 2).tolist()) / (array.size - 1))


def tail(values: Floats) -> float:
    """The 99.9 % quantile of ``values`` by numpy's ``higher`` method."""
    return float(np.quantile(values, _TAIL, method="higher"))


def tail_rank(count: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many of ``count`` samples lie above the one that :func:`tail` takes."""
    last = count - 1
    above: npt.NDArray[np.int64] = last - np.ceil(last * _TAIL).astype(np.int64)
    return above


def interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> tuple[float, float] | tuple[None, None]:
    """Two-sided interval of the mean by Student's t, or (None, None) under two values or where one is not finite."""
    array = np.asarray(values, np.float64)
    deviation = spread(array)
    if math.isnan(deviation):
        return None, None
    half = float(special.stdtrit(array.size - 1, (1 + confidence) / 2)) * deviation / math.sqrt(array.size)
    return mean(array) - half, mean(array) + half


# ---------------------------------------------------------------- series per document


def _difference(left: Floats, right: Floats) -> Floats:
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and shows as such
        return left - right


def loss_differences(samples: Samples, arm: str, other: str) -> list[Floats]:
    """Per document, ``[tokens - 1]``: loss of ``arm`` less that of ``other``, nats."""
    return [_difference(samples.loss[arm][d], samples.loss[other][d]) for d in samples.documents(arm, other)]


def disagreements(samples: Samples, arm: str, other: str) -> list[float]:
    """Per document: fraction of tokens whose most probable token differs."""
    return [float(np.mean(samples.top1[arm][d] != samples.top1[other][d])) for d in samples.documents(arm, other)]


def divergences(samples: Samples, arm: str, control: str) -> list[Floats] | None:
    """Per document, ``[tokens - 1]``: KL(control || arm), nats; zero against itself; None where it was not recorded."""
    documents = samples.documents(arm, control)
    if arm == control:
        return [np.zeros_like(samples.loss[arm][d]) for d in documents]
    if (arm, control) not in samples.kl:
        return None
    return [samples.kl[arm, control][d] for d in documents]


def divergence_differences(samples: Samples, arm: str, other: str, control: str) -> list[float] | None:
    """Per document: mean KL to ``control`` of ``arm`` less that of ``other``, nats; None where one was not recorded."""
    documents = samples.documents(arm, other, control)
    means = []
    for side in (arm, other):
        if side != control and (side, control) not in samples.kl:
            return None
        means.append([0.0 if side == control else mean(samples.kl[side, control][d]) for d in documents])
    return [float(_difference(np.float64(a), np.float64(b))) for a, b in zip(*means, strict=True)]  # type: ignore[arg-type]


# ---------------------------------------------------------------- measurements


def _figure(arm: str, name: str, per_document: Sequence[float], unit: Unit, against: str | None) -> Measurement:
    lower, upper = interval(per_document)
    return Measurement(arm=arm, name=name, value=mean(per_document), unit=unit, against=against, lower=lower, upper=upper)


def _comparisons(spec: Spec, samples: Samples, arm: Arm, other: str) -> list[Measurement]:
    name = arm.name
    found: list[Measurement] = []

    def add(label: str, value: float | int, unit: Unit) -> None:
        found.append(Measurement(arm=name, name=label, value=value, unit=unit, against=other))

    differences = loss_differences(samples, name, other)
    if differences:
        per_document = [mean(values) for values in differences]
        found.append(_figure(name, "loss_difference_mean", per_document, "nats", other))
        add("loss_difference_sd", spread(np.concatenate(differences)), "nats")
        add("worst_document_loss_difference", float(np.max(per_document)), "nats")
        divergence = divergences(samples, name, other)
        if divergence:
            pooled = np.concatenate(divergence)
            found.append(_figure(name, "kl_mean", [mean(values) for values in divergence], "nats", other))
            add("kl_median", float(np.median(pooled)) if not np.isnan(pooled).any() else math.nan, "nats")
            add("kl_p999", tail(pooled) if not np.isnan(pooled).any() else math.nan, "nats")
        for contrast in spec.contrasts:
            control = spec.common_control(contrast)
            if (contrast.candidate, contrast.baseline) == (name, other) and "kl_difference_mean" in spec.statistics(contrast) and control:
                shift = divergence_differences(samples, name, other, control)
                if shift:
                    found.append(_figure(name, "kl_difference_mean", shift, "nats", other))
                break
        found.append(_figure(name, "top1_disagreement", disagreements(samples, name, other), "fraction", other))
        gaps = samples.gap.get((name, other))
        if gaps:
            add("logit_gap_max", float(np.max([np.max(gaps[d]) for d in sorted(gaps)])), "logits")
    for document, ids in sorted(samples.greedy.get(name, {}).items()):
        theirs = samples.greedy.get(other, {}).get(document)
        if theirs is not None and spec.arm(other).role == "control":
            equal = next((at for at, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), min(len(ids), len(theirs)))
            add(f"greedy_agreement_tokens/{document:04}", equal, "tokens")
    return found


SIDES = ("keys", "values", "state", "scales")
"""What a cache's bytes hold; ``state`` is that of recurrent layers and their convolutions."""


def held(backings: Iterable[Backing]) -> dict[str, int]:
    """Bytes of a cache by side, as allocated, and ``tokens``, those held; one address counts once, where it is listed first."""
    found: dict[tuple[bool, int], tuple[str, int]] = {}
    tokens = 0
    for backing in backings:
        scales = backing.kind == "scales"
        other = backing.holds if backing.holds in SIDES else "state"
        side, size = found.get((scales, backing.address), ("scales" if scales else other, 0))
        found[scales, backing.address] = side, max(size, backing.bytes)
        tokens = max(tokens, backing.tokens)
    return {name: sum(size for side, size in found.values() if side == name) for name in SIDES} | {"tokens": tokens}


def _bytes(arm: ArmResult) -> tuple[int, int, int]:
    """Bytes of the cache without scales, bytes of scales, and tokens held."""
    found = held(arm.backings)
    return found["keys"] + found["values"] + found["state"], found["scales"], found["tokens"]


def _memory(spec: Spec, result: Result, arm: ArmResult) -> list[Measurement]:
    if not arm.backings:
        return []
    cache, scales, tokens = _bytes(arm)
    found = [
        Measurement(arm=arm.name, name="cache_bytes", value=cache, unit="bytes"),
        Measurement(arm=arm.name, name="scale_bytes", value=scales, unit="bytes"),
    ]
    if tokens:
        found.insert(1, Measurement(arm=arm.name, name="cache_bytes_per_token", value=cache / tokens, unit="bytes"))
    control = next((other for other in result.arms if other.name == sixteen_bit_control(spec)), None)
    if control is not None and control.name != arm.name:
        theirs, their_scales, their_tokens = _bytes(control)
        if theirs and tokens == their_tokens:
            for name, value in (("cache_ratio", cache / theirs), ("cache_ratio_with_scales", (cache + scales) / (theirs + their_scales))):
                found.append(Measurement(arm=arm.name, name=name, value=value, unit="ratio", against=control.name))
    return found


def measure(spec: Spec, result: Result, samples: Samples) -> tuple[Measurement, ...]:
    """Every figure of a run, arm by arm in the order of the spec. A run that was cut short is measured as far as it got."""
    found: list[Measurement] = []
    outcomes = {arm.name: arm for arm in result.arms}
    for arm in spec.arms:
        documents = samples.documents(arm.name)
        if documents:
            found.append(_figure(arm.name, "loss_mean", [mean(samples.loss[arm.name][d]) for d in documents], "nats", None))
        for other in others(spec, arm):
            found += _comparisons(spec, samples, arm, other)
        if arm.name in outcomes:
            found += _memory(spec, result, outcomes[arm.name])
    return tuple(found)


# ---------------------------------------------------------------- suspicion


def _identical(samples: Samples, left: str, right: str) -> bool:
    """Whether two arms agree in every bit of every loss, every id, and every KL that tells them apart."""
    documents = samples.documents(left, right)
    for d in documents:
        if samples.loss[left][d].tobytes() != samples.loss[right][d].tobytes() or (samples.top1[left][d] != samples.top1[right][d]).any():
            return False
    for (arm, control), series in samples.kl.items():
        if arm == left and (right, control) in samples.kl:
            theirs = samples.kl[right, control]
            if any(series[d].tobytes() != theirs[d].tobytes() for d in documents if d in series and d in theirs):
                return False
        if {arm, control} == {left, right} and any(values.any() for values in series.values()):
            return False
    return bool(documents)


def identical_pairs(spec: Spec, samples: Samples) -> tuple[tuple[str, str], ...]:
    """Pairs of arms that store different formats, and yet agree in every bit."""
    return tuple(
        (arm.name, other.name)
        for arm, other in combinations(spec.arms, 2)
        if (arm.keys, arm.values) != (other.keys, other.values) and _identical(samples, arm.name, other.name)
    )


def suspicions(spec: Spec, samples: Samples) -> tuple[str, ...]:
    """In words, what :func:`identical_pairs` finds: one warning a pair."""
    stored = {arm.name: f"{arm.name} (K {arm.keys} / V {arm.values})" for arm in spec.arms}
    return tuple(
        f"{stored[left]} and {stored[right]} agree in every bit although they store different formats: "
        "the cache of one of them was probably not read"
        for left, right in identical_pairs(spec, samples)
    )
