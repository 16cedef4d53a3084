"""The tuning of the fused kernels at tiny size on a CPU, under Triton's interpreter; its times say nothing there."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
import torch

from runners import fused, tuning
from runners.timing import Clock
from runners.tuning import CANDIDATES, CASES, COMPILED, FORMATS, PAGE, Case, Setting

# Places behind a sequence's end hold whatever the memory held: numpy warns of sums that the kernel's masks then drop.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TINY = {
    "decode": (Case("mixed", (7, 33)),),
    "prefill": (Case("32/16", (32,), 16),),
    "write": (Case("20", (20,)),),
}
FEW = {"decode": ((16, 1, 2), (32, 2, 2)), "prefill": ((16, 16, 1, 1), (32, 16, 1, 1)), "write": ((16, 1), (32, 1))}


def shape(kind):
    return {"decode": astuple(fused.shape(64, 2, 2))[:3], "prefill": fused.PREFILL[64], "write": fused.WRITE}[kind]


def setting(kind):
    return Setting(kind, 64, (2, 1), torch.device("cpu"), page=32, rotate=1)


def column(kind, candidates, format="K16/V8"):
    return tuning.measure(setting(kind), format, TINY[kind][0], candidates, Clock(torch.device("cpu"), 1), repeats=1)


def lines(columns, names):
    return tuning.table({"columns": columns, "candidates": names, "copy_bytes_per_second": 4.2e12}).splitlines()


@pytest.fixture(autouse=True)
def one_launch_a_sample(monkeypatch):
    monkeypatch.setattr(tuning, "LAUNCHES", 1)


@pytest.mark.parametrize("kind", list(CANDIDATES))
def test_every_candidate_is_timed_in_every_case_and_format_and_the_tables_stay_as_they_were(kind, monkeypatch):
    before = dict(fused.DECODE), dict(fused.PREFILL), fused.WRITE
    seen, real = [], getattr(fused, kind)
    monkeypatch.setattr(fused, kind, lambda *given, **options: seen.append(shape(kind)) or real(*given, **options))
    found = tuning.tune(setting(kind), TINY[kind], FEW[kind], repeats=2, copied=4096)
    assert before == (fused.DECODE, fused.PREFILL, fused.WRITE)
    assert set(FEW[kind]) <= set(seen)
    assert [(one["format"], one["case"]) for one in found["columns"]] == [(format, case.name) for format in FORMATS for case in TINY[kind]]
    names = [tuning.say(candidate) for candidate in FEW[kind]]
    for column in found["columns"]:
        assert not column["refused"]
        assert list(column["us"]) == names and all(len(samples) == 2 and min(samples) > 0 for samples in column["us"].values())
    assert found["copy_bytes_per_second"] > 0 and found["host"]["packages"]["triton"] and len(found["fused_sha256"]) == 64
    assert json.loads(json.dumps(found)) == found
    printed = tuning.table(found).splitlines()
    assert [line.split()[0] for line in printed[2:4]] == names and len(printed) == 6


def test_the_table_shows_medians_and_marks_what_is_held():
    given = {"case": "1x8192", "refused": {}, "us": {"64/4/4": [14.0, 15.0, 90.0], "64/1/4": [22.0]}}
    columns = [given | {"format": "16/16", "held": "64/4/4"}, given | {"format": "8/8", "held": "64/1/4"}]
    assert [line.split() for line in lines(columns, ["64/4/4", "64/1/4"])] == [
        ["16/16", "8/8"],
        ["µs", "1x8192", "1x8192"],
        ["64/4/4", "15.0*", "15.0"],
        ["64/1/4", "22.0", "22.0*"],
        ["*", "fused.py", "holds", "64/4/4", "for", "16/16,", "64/1/4", "for", "8/8"],
        ["copy:", "4200", "GB/s"],
    ]


def test_a_candidate_that_does_not_compile_is_shown_as_such_and_the_others_are_timed(monkeypatch):
    real = fused.write

    def write(*given):
        if fused.WRITE == (32, 1):
            raise ValueError("out of resource: shared memory")
        real(*given)

    monkeypatch.setattr(fused, "write", write)
    found = column("write", ((32, 1), (16, 1)))
    assert list(found["us"]) == ["16/1"]
    printed = lines([found], ["32/1", "16/1"])
    assert printed[2].split() == ["32/1", "–"]
    assert printed[-1] == "– 32/1, K16/V8 20: ValueError: out of resource: shared memory"


@pytest.mark.parametrize("kind", ["decode", "write"])
def test_a_candidate_whose_result_differs_from_the_first_ones_is_not_timed(kind, monkeypatch):
    wrong, real = FEW[kind][1], getattr(fused, kind)

    def off(states, *given, **options):
        if kind == "decode":
            return real(states, *given, **options) * (1.02 if fused.shape(64, 2, 1) == fused.Shape(*wrong) else 1)
        return None if wrong == fused.WRITE else real(states, *given, **options)  # it writes nothing

    monkeypatch.setattr(fused, kind, off)
    found = column(kind, FEW[kind])
    assert list(found["us"]) == [tuning.say(FEW[kind][0])]
    assert "not the first one's" in found["refused"][tuning.say(wrong)]


def test_candidates_stand_once_and_hold_what_fused_holds_and_what_its_tiles_allow():
    for kind, candidates in CANDIDATES.items():
        assert len(set(candidates)) == len(candidates)
        for dim in fused.HEAD_DIMS:
            for format in FORMATS:
                assert tuning.held(Setting(kind, dim, (32, 8), torch.device("cpu")), format) in candidates
    assert all(tile <= fused.ALIGN for tile, _, _ in CANDIDATES["decode"])


@pytest.mark.parametrize("kind", list(CANDIDATES))
def test_what_is_compiled_ahead_has_sizes_of_the_same_divisibility(kind):
    for case in (COMPILED[kind], *CASES[kind]):
        longest = max(case.lengths)
        assert longest % (16 * PAGE) == 0 and case.chunk % 16 == 0 and bool(case.chunk) == (kind == "prefill")


def test_without_a_gpu_it_refuses_in_words(monkeypatch, capsys):
    monkeypatch.setattr(fused, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuning.main(["decode"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("device: ") and "found: no CUDA device is available" in said.err and "next: " in said.err and not said.out


def test_under_the_interpreter_it_refuses_in_words(capsys):
    assert tuning.main(["write", "--dim", "64", "--heads", "8", "2"]) == 2
    assert "Triton's interpreter runs on the CPU alone" in capsys.readouterr().err
