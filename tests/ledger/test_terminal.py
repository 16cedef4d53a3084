"""Documents as text: what a table must never lose."""

from __future__ import annotations

import re

import pytest

from ledger import terminal


def row(arm: str, policy: str, claim: str, reason: str, run: str = "a" * 64) -> dict[str, object]:
    """A row of the status document."""
    fixed = {"model": "Toy-1M", "checkpoint": "c" * 64, "scope": "quality.loss", "workload": "4 documents", "hardware": "CPU x86_64"}
    return {**fixed, "arm": f"{arm}: {policy}", "baseline": "k16v16: K bf16 / V bf16", "claim": claim, "reason": reason, "runs": [run]}


def test_an_arms_name_stands_alone_where_it_means_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.status({"rows": [row("k16v8", "K bf16 / V fp8_e4m3", "established", "all met")]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("CPU x86_64; run aaaaaaaaaaaa")
    assert lines[2].split("  ")[0] == "k16v8 vs k16v16"
    assert lines[-2:] == ["k16v8   K bf16 / V fp8_e4m3", "k16v16  K bf16 / V bf16"]


def test_one_name_for_two_policies_is_told_apart_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("k16v8", f"{scales} scales", claim, "why") for scales, claim in (("unit", "established"), ("dynamic", "degraded"))]
    terminal.status({"rows": rows})
    out = capsys.readouterr().out
    assert re.search(r"k16v8: unit scales vs k16v16 +established", out)
    assert re.search(r"k16v8: dynamic scales vs k16v16 +degraded", out)


def test_a_narrow_terminal_cuts_no_letter_of_a_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [row("a" * 64, "p", "synthetic not established", "a bound was not met", run) for run in ("b" * 64, "d" * 64)]
    terminal.status({"rows": rows})
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    letters = re.sub(r"\s", "", text)
    for words in ("b" * 12, "d" * 12):
        assert words in letters
    for word in ("synthetic", "not", "established", "bound", "was", "met"):
        assert word in text
    assert letters.count("a" * 8) >= 4  # the long names are folded, not cut
