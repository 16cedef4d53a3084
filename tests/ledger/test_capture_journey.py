"""Capability, calibration, fixed scales and state memory from the study to the verification: real processes, a real runner."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.ledger.test_captures import STUDY
from tests.ledger.test_cli import SEEDED, TEXT, Ledger, checkout  # noqa: F401  (a fixture)
from tests.ledger.test_scopes import pages_of

WORKLOAD = STUDY[STUDY.index("[workload]") : STUDY.index("[[arms]]")].replace(
    "documents = 2\ntokens = 32", "documents = [2, 1]\ntokens = [24, 48]"
)
NATIVE = '[[arms]]\nname = "native"\nrole = "control"\nimplementation = "native"\ncompute = "fp32"\nkeys = "fp32"\nvalues = "fp32"\n'
OWN = (
    '[[arms]]\nname = "k16v8"\nrole = "candidate"\nimplementation = "reference"\ncompute = "fp32"\nkeys = "bf16"\nvalues = "fp8_e4m3"\n'
    'scales = "unit"\n'
)
EAGER = 'backend = "eager"\n'
CAPTURE = "[capture]\nnew_tokens = 4\nbudget_bytes = 1048576\nsuppressed = [255]\n"
MEMORY = "[memory]\ncontexts = [16, 48, 512]\nchunk = 16\nbudget_bytes = 1048576\n"


def head(name: str, scope: str) -> str:
    return f'study = "{name}"\ntitle = "A small {scope}"\nscope = "{scope}"\n[checkpoint]\n{SEEDED}\n'


@pytest.fixture(scope="module")
def made(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Ledger:  # noqa: F811
    """An archive with a run of each scope."""
    ledger = Ledger(checkout, tmp_path_factory.mktemp("captures"))
    (ledger.folder / "tide.txt").write_bytes(TEXT)
    text = WORKLOAD.replace("FIRST", "0")
    studies = {
        "able": head("able", "capability") + text + CAPTURE + NATIVE + EAGER + OWN + EAGER,
        "sized": head("sized", "calibration") + text + CAPTURE + NATIVE,
        "held": head("held", "state memory") + MEMORY + NATIVE + OWN,
    }
    ledger("init")
    for name, table in studies.items():
        (ledger.folder / f"{name}.toml").write_text(table)
        ledger("run", f"{name}.toml", "--check")
    return ledger


def test_every_scope_runs_is_shown_and_verifies(made: Ledger) -> None:  # case 4
    runs = {run["study"]: run["id"] for run in made.json("runs")}
    able, sized, held = (made.json("show", runs[name]) for name in ("able", "sized", "held"))
    assert [item["status"] for item in able["decisions"]] == ["passes", "passes"]
    assert [item["status"] for item in sized["decisions"]] == ["measured"]
    assert [item["status"] for item in held["decisions"]] == ["measured", "measured"]
    assert able["spec"]["capture"]["suppressed"] == [255] and held["spec"]["memory"]["contexts"] == [16, 48, 512]
    assert "512 tokens do not fit (positions" in held["decisions"][0]["reason"]
    ratios = {item["name"]: item["value"] for item in held["arms"][1]["measurements"] if item["unit"] == "ratio"}
    assert ratios == {"ratio/c16": 0.375, "ratio/c48": 0.375}
    assert {item["name"] for item in sized["evidence"]} >= {"captures.jsonl", "calibration.safetensors", "inputs.safetensors"}
    words = made("show", runs["able"]).stdout
    assert "suppressed_exactly" in words and "nothing more" in " ".join(words.split())
    assert "state_bytes/total/c48" in made("show", runs["held"]).stdout
    status = made("status").stdout
    assert "calibration" in status and "state memory" in status and " vs \n" not in status
    assert {row["claim"] for row in made.json("status")["rows"]} == {"synthetic passes", "synthetic measured"}
    assert made.json("verify")["ok"]
    pages = pages_of(made.folder / "evidence", *(runs[name] for name in ("able", "sized", "held")))
    assert "Capability checks" in pages[0] and "nothing more" in pages[0] and "language only" in pages[0]
    assert "keys_saturating_heads" in pages[1] and "they carry no verdict" in pages[1].lower()
    assert "state_bytes/total/c48" in pages[2] and "Nothing is inferred" in pages[2] and "16, 48 and 512 tokens" in pages[2]
    assert all("nothing was measured" not in page.lower() for page in pages[:3])


def test_fixed_scales_of_the_calibration_lie_in_the_frozen_folder(made: Ledger, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "copy")
    ledger = Ledger(made.checkout, tmp_path / "copy")
    run = next(run["id"] for run in ledger.json("runs") if run["study"] == "sized")
    study = ledger.folder / "fixed.toml"
    study.write_text(STUDY.replace("FIRST", "90").replace("SOURCE", f"run:{run[:16]}"))
    said = ledger("freeze", "fixed.toml", "-o", "frozen", expect=2).stderr
    assert "tokens that the calibration has seen" in said
    study.write_text(study.read_text().replace("first = 90", "first = 93"))
    ledger("freeze", "fixed.toml", "-o", "frozen")
    spec = json.loads((ledger.folder / "frozen/spec.json").read_bytes())
    scales = (ledger.folder / "frozen/inputs/scales.safetensors").read_bytes()
    file = next(item for item in ledger.json("show", run)["evidence"] if item["name"] == "calibration.safetensors")
    assert spec["arms"][1]["scale_source"] == file["sha256"] and len(scales) == file["size"]
    ledger("run", "fixed.toml")
    document = next(ledger.json("show", run["id"]) for run in ledger.json("runs") if run["study"] == "fixed")
    assert document["arms"][1]["measured"]["scales"] == "fixed" and document["arms"][1]["outcome"] == "completed"
    assert document["decisions"][0]["status"] != "invalid"
    assert ledger.json("verify")["ok"]


def test_a_capture_is_reproduced_bit_for_bit(made: Ledger, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "copy")
    ledger = Ledger(made.checkout, tmp_path / "copy")
    run = next(run["id"] for run in ledger.json("runs") if run["study"] == "sized")
    assert "bit-identical" in ledger("reproduce-run", run).stdout
