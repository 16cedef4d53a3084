"""Fixed scales: read from a calibration, and checked against the arm and the model that they are for.

A calibration is a safetensors file with the largest magnitudes that it saw, one vector a layer and side:

    keys.amax/<layer>, values.amax/<layer>    float32 [heads]

for every layer that keeps keys and values of its own; other tensors in it are not read. Its metadata may name the
``checkpoint`` that was calibrated, by the digest of its weights. A scale is ``amax / 448``, in float32 (protocols: scale policies).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load

from ledger import digest
from ledger.errors import ProvenanceError, RefusedError
from ledger.records import Arm, LayerGeometry
from runners import fp8

FILE = "scales.safetensors"
"""The calibration's name in a frozen folder's ``inputs/``."""
SIDES = ("keys", "values")


@dataclass(frozen=True)
class FixedScales:
    """Scales of a calibration, fp32 [H] for each layer that it saw, by number; of a ``tensor`` the largest is taken once all are checked.

    ``checkpoint`` is the digest that the file names (:attr:`ledger.records.Spec.weights`), or empty.
    """

    granularity: str
    keys: Mapping[int, torch.Tensor] = field(default_factory=dict)
    values: Mapping[int, torch.Tensor] = field(default_factory=dict)
    checkpoint: str = ""

    def of(self, arm: Arm, layers: Sequence[LayerGeometry], checkpoint: str = "") -> dict[int, dict[str, torch.Tensor]]:
        """For each layer that keeps keys and values, the scales of each side that ``arm`` stores in fp8_e4m3: fp32 [] (``tensor``) or [H].

        Raises RefusedError (``scale_policy``) where they do not fit: the granularity, the layers, their heads, the digest of the
        checkpoint, or a scale that is no finite number above zero.
        """
        if (arm.scales, arm.granularity) != ("fixed", self.granularity):
            _refuse("The scales are not those that the arm asks for.", f"{arm.scales}, {arm.granularity}", f"fixed, {self.granularity}")
        if checkpoint and self.checkpoint and checkpoint != self.checkpoint:
            _refuse("The scales are of another checkpoint.", f"checkpoint {checkpoint}", f"checkpoint {self.checkpoint}")
        own = {layer.layer: layer for layer in layers if layer.kind != "recurrent" and layer.kv_heads}
        sides = [side for side in SIDES if getattr(arm, side) == "fp8_e4m3"]
        for side in sides:
            held: Mapping[int, torch.Tensor] = getattr(self, side)
            if set(held) != set(own):
                _refuse(f"The scales of {side} are not of the model's layers.", _numbers(own), _numbers(held))
            for layer, scale in held.items():
                self._check(f"the {side} of layer {layer}", scale, own[layer].kv_heads)
        return {layer: {side: self._reduced(getattr(self, side)[layer]) for side in sides} for layer in own}

    def _reduced(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.max() if self.granularity == "tensor" else scale

    def _check(self, where: str, scale: torch.Tensor, heads: int) -> None:
        if scale.dtype != torch.float32 or tuple(scale.shape) != (heads,):
            _refuse(f"The scales of {where} have another shape.", f"float32 [{heads}]", f"{scale.dtype} {list(scale.shape)}")
        wrong = ~(torch.isfinite(scale) & (scale > 0))
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            _refuse(f"A scale of {where} cannot be used.", "finite numbers above zero", f"{scale[at].item()!r} for head {at}")


def from_calibration(data: bytes, granularity: str) -> FixedScales:
    """The scales that a calibration (the bytes of its file) gives: ``amax / 448`` a KV head, for arms of that granularity. Pure.

    Whether they can be used, and for what, :meth:`FixedScales.of` says. Raises RefusedError (``scale_policy``) where the file
    is no calibration.
    """
    if granularity not in ("tensor", "head"):
        _refuse("A calibration has no such scales.", 'granularity "tensor" or "head"', f'granularity "{granularity}"')
    if not data:
        _refuse("Fixed scales were asked for, and no calibration was given.", f"{FILE} of the frozen folder", "nothing")
    try:
        tensors = load(data)
        named = checkpoint_of(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        _refuse("The calibration cannot be read.", "a safetensors file", str(error)[:400])
    sides: dict[str, dict[int, torch.Tensor]] = {side: {} for side in SIDES}
    for name, largest in sorted(tensors.items()):
        kind, _, layer = name.partition("/")
        side = kind.removesuffix(".amax")
        if not kind.endswith(".amax") or side not in SIDES:
            continue
        if not layer.isascii() or not layer.isdecimal() or int(layer) in sides[side]:
            _refuse("The calibration names no layer, or one twice.", f"{kind}/<layer>", name)
        if largest.dtype != np.float32 or largest.ndim != 1 or not largest.size:
            _refuse(f"The calibration's {name} is no vector of heads.", "float32 [heads]", f"{largest.dtype} {list(largest.shape)}")
        sides[side][int(layer)] = torch.from_numpy(np.asarray(largest / np.float32(fp8.LARGEST), dtype=np.float32))
    return FixedScales(granularity, sides["keys"], sides["values"], named)


def by_layer(arm: Arm, layers: Sequence[LayerGeometry], given: FixedScales | None) -> dict[int, dict[str, torch.Tensor]]:
    """What a cache of the arm is made with: of each layer the scales of each 8-bit side; nothing where the arm's are not fixed.

    Raises RefusedError (``scale_policy``) where it asks for some and they are missing, or do not fit.
    """
    if arm.scales != "fixed":
        return {}
    if given is None:
        raise RefusedError(
            "scale_policy",
            f"Arm {arm.name} asks for fixed scales, and none were given.",
            expected=f"those of the calibration {arm.scale_source}",
            next="freeze the study with its calibration.",
        )
    return given.of(arm, layers)


def of_arm(arm: Arm, layers: Sequence[LayerGeometry], data: bytes, checkpoint: str) -> FixedScales | None:
    """The scales of the arm from the calibration ``data``, checked against the model and its weights; None where it has none.

    ``checkpoint`` is the digest of these (:attr:`ledger.records.Spec.weights`).

    Raises RefusedError (``scale_policy``).
    """
    if arm.scales != "fixed":
        return None
    found = from_calibration(data, arm.granularity)
    found.of(arm, layers, checkpoint)
    return found


def read(arms: Sequence[Arm], inputs: Path) -> bytes:
    """The calibration in a frozen folder's ``inputs/``, one for all arms; empty where none asks for one.

    Raises ProvenanceError where it is not there, or is not what every ``scale_source`` pins.
    """
    sources = sorted({arm.scale_source for arm in arms if arm.scale_source is not None})
    if not sources:
        return b""
    path = inputs / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProvenanceError(f"The calibration {path} cannot be read.", found=str(error), next="freeze the study again.") from error
    found = digest.sha256(data)
    if sources != [found]:
        raise ProvenanceError(
            f"The calibration {path} is not the one that the spec pins.",
            expected=", ".join(f"sha256 {source}" for source in sources),
            found=f"sha256 {found}",
            next="freeze the study again.",
        )
    return data


def checkpoint_of(data: bytes) -> str:
    """The digest in a safetensors file's metadata (eight bytes of length, then a JSON header), or an empty text. Raises ValueError."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return str((header.get("__metadata__") or {}).get("checkpoint", ""))


def cautions(data: bytes) -> list[str]:
    """What a run warns of its calibration, the bytes of the file; none where there is none, or one that is refused."""
    try:
        named = not data or checkpoint_of(data)
    except (ValueError, AttributeError):
        return []
    return [] if named else ["The calibration's file names no checkpoint: that it is of this one, freezing alone has checked."]


def _numbers(layers: Mapping[int, object]) -> str:
    return "layers " + (", ".join(str(layer) for layer in sorted(layers)) or "none")


def _refuse(what: str, expected: str, found: str) -> NoReturn:
    raise RefusedError("scale_policy", what, expected=expected, found=found, next="name a calibration of this checkpoint in the study.")
