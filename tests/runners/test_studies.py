from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from ledger import records
from ledger.records import consistency
from runners import losses, studies

from . import tiny

FOLDER = Path(str(studies.__file__)).parent
NAMES = ("demo", "gemma3-270m-loss", "smollm2-135m-loss", "smollm2-135m-rescaled-loss")


def study(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def test_the_studies_that_ship_are_these():
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.toml"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_named_like_its_file_and_agrees_with_itself(name):
    table = study(name)
    assert table["study"] == name
    frozen = tiny.spec(
        arms=tuple(records.convert(records.Arm, arm, name) for arm in table["arms"]),
        contrasts=tuple(records.convert(records.Contrast, contrast, name) for contrast in table["contrasts"]),
    )
    families = tuple(records.convert(records.Family, {"name": key} | family, name) for key, family in table["families"].items())
    consistency.check(msgspec.structs.replace(frozen, families=families, tolerances=table["tolerances"]))


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_stands_in_a_contrast_or_repeats(name):
    table = study(name)
    compared = {contrast[side] for contrast in table["contrasts"] for side in ("candidate", "baseline")}
    assert all(arm["name"] in compared or "repeats" in arm for arm in table["arms"])


def test_the_bounds_of_the_positive_control_are_those_of_the_unaltered_model():
    assert study("smollm2-135m-rescaled-loss")["families"] == study("smollm2-135m-loss")["families"]


def test_the_demo_pins_the_prose_that_ships():
    data = (FOLDER / "prose.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() == study("demo")["workload"]["sha256"]
    assert len(data) > 13_000 and data.isascii()


@pytest.mark.slow
def test_keys_in_8_bit_spread_the_losses_of_a_trained_model_more_than_values_do(tmp_path):
    table = study("demo")
    given = table["checkpoint"]
    file = records.CheckpointFile(path=given["source"].rpartition("/")[2], sha256=given["sha256"], size=given["size"])
    checkpoint = records.Checkpoint(name=given["name"], source=given["source"], license=given["license"], files=(file,))
    text = (FOLDER / "prose.txt").read_bytes()
    frozen = tiny.spec(
        checkpoint=checkpoint,
        arms=tuple(records.convert(records.Arm, arm, "demo") for arm in table["arms"]),
        dataset=records.Dataset(name="prose", file="prose.txt", sha256=hashlib.sha256(text).hexdigest(), size=len(text), license="CC0-1.0"),
        spans=tuple(records.Span(start=n * 127, tokens=127) for n in range(2)),
        chunk=64,
        greedy=None,
    )
    inputs = tiny.freeze(tmp_path / "frozen", frozen) / "inputs"
    (inputs / "prose.txt").write_bytes(text)
    kept = tiny.Kept()
    losses.run(frozen, inputs, kept, kept)
    documents = [load(data) for name, data in kept.files.items() if name.startswith("samples/")]
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}

    def series(name: str) -> np.ndarray:
        return np.concatenate([document[name] for document in documents]).astype(np.float64)

    spread = {name: np.std(series(f"{name}.loss") - series("k16v16.loss")) for name in ("k16v16-repeat", "k16v8", "k8v16", "k8v8")}
    assert not series("own-fp32.gap.native").any()
    assert (
        spread["k16v16-repeat"] < spread["k16v8"] / 3 and spread["k16v8"] < spread["k8v16"] / 1.5 and spread["k16v8"] < spread["k8v8"] / 1.5
    )
    assert 2 < series("native.loss").mean() < 5
