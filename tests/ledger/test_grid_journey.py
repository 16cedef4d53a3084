"""Precision and scaling from studies with a grid to the table: real processes, a real runner, a tiny seeded model."""

from __future__ import annotations

from pathlib import Path

from tests.ledger.test_capture_journey import CAPTURE, NATIVE, WORKLOAD, head
from tests.ledger.test_cli import TEXT, Ledger, checkout  # noqa: F401  (a fixture)
from tests.ledger.test_task_journey import study as task_study

OWN = (
    '[[arms]]\nname = "k16v16"\nrole = "control"\nimplementation = "reference"\ncompute = "fp32"\nkeys = "bf16"\nvalues = "bf16"\n'
    '[[arms]]\nname = "k16v16-repeat"\nrole = "repeat"\nimplementation = "reference"\ncompute = "fp32"\nkeys = "bf16"\nvalues = "bf16"\n'
    'repeats = "k16v16"\nchunk = 8\n'
)
GRID = (
    '[grid]\nbaseline = "k16v16"\nformats = ["k16v8", "k8v16", "k8v8"]\nscales = ["unit", "fixed", "dynamic"]\n'
    'granularity = ["head", "token_head"]\nfamilies = [FAMILIES]\n'
)
ADVANTAGE = '[[grid.advantages]]\ncandidate = "k16v8"\nover = "k8v8"\nfamily = "advantage"\n'
FAMILIES = (
    '[families.loss]\nresamples = 499\n[[families.loss.gates]]\nstatistic = "loss_difference_mean"\nbound = 0.05\nharm = 0.1\n'
    "[families.advantage]\nresamples = 199\n"
    '[[families.advantage.gates]]\nstatistic = "kl_difference_mean"\nbound = -0.001\nharm = 0.0\n'
)
SOURCE = 'calibration = "study:sized"\n'


def test_a_grid_runs_on_losses_and_a_task_and_both_stand_in_one_table(checkout: Path, tmp_path: Path) -> None:  # noqa: F811
    ledger = Ledger(checkout, tmp_path)
    (tmp_path / "tide.txt").write_bytes(TEXT)
    (tmp_path / "sized.toml").write_text(head("sized", "calibration") + WORKLOAD.replace("FIRST", "0") + CAPTURE + NATIVE)
    losses = SOURCE + head("policies", "quality.loss") + WORKLOAD.replace("FIRST", "1000") + OWN
    (tmp_path / "policies.toml").write_text(losses + GRID.replace("FAMILIES", '"loss"') + ADVANTAGE + FAMILIES)
    asked = f'like = "{task_study(tmp_path, items=3)}"\nstudy = "asked"\n{SOURCE}contrasts = []\n{OWN.replace("chunk = 8", "chunk = 32")}'
    (tmp_path / "asked.toml").write_text(asked + GRID.replace("FAMILIES", '"strict", "flexible"'))
    (tmp_path / "all.toml").write_text('suite = "all"\ntitle = "All of it"\nstudies = ["sized.toml", "policies.toml", "asked.toml"]\n')
    ledger("init")
    assert "name their calibrations" in ledger("run", "all.toml", "--calibration", "none", expect=2).stderr
    ledger("run", "all.toml")
    runs = {run["study"]: run["id"] for run in ledger.json("runs")}

    (table,) = ledger.json("table")
    assert table["synthetic"] and (table["runs"]["loss"]["run"], table["runs"]["task"]["run"]) == (runs["policies"], runs["asked"])
    rows = {row["arm"]: row for row in table["rows"]}
    cells = [name for name in rows if name.startswith("k") and not name.startswith("k16v16")]
    assert len(cells) == 12 and len(rows) == 14
    for name in cells:
        row = rows[name]
        assert row["loss"]["difference"]["value"] is not None and row["loss"]["kl_p999"]["value"] >= 0
        assert row["task"]["readings"]["flexible"]["status"] == "invalid" and row["gates"][0]["status"] != "invalid"
        assert row["bytes"]["keys_ratio"] == (0.5 if "k8" in name else 1) and row["bytes"]["values_ratio"] == (0.5 if "v8" in name else 1)
        assert (row["bytes"]["scales"] > 0) == ("unit" not in name)
        assert len(row["advantages"]) == (1 if name.startswith("k16v8") else 0)
    assert rows["k8v8-dynamic-token-head"]["bytes"]["scales"] > rows["k8v8-dynamic-head"]["bytes"]["scales"]
    text = ledger("table", "Seeded llama").stdout
    assert "k8v8-dynamic-token-head" in text and "invalid: " in text and runs["asked"][:12] in text
    assert ledger.json("verify")["ok"]
