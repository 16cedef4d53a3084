"""Dry runs: what a study asks for, whether this host can do it, suites; nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ledger import dryrun, freezing, sources
from ledger.errors import InputError

STUDY = """
study = "small"
title = "A small one"
scope = "quality.loss"

[checkpoint]
name = "Somebody's model"
source = "hf:somebody/model@main"
license = "MIT"

[workload]
dataset = "text.txt"
dataset_name = "A text"
dataset_license = "CC0-1.0"
sha256 = "{sha256}"
inputs = "digest"
documents = 2
tokens = 16
bos = false
split_special_tokens = true
chunk = 8

[expects]
install = "pip install 'kv-evidence-ledger[runners]'"
on = "two cores"
minutes = 3
memory_bytes = {memory}
download_bytes = 1000
validates = "a small text"

[[arms]]
name = "native"
role = "control"
implementation = "native"
compute = "fp32"
keys = "fp32"
values = "fp32"
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of a checkpoint on a hub that must not be asked, beside its text."""
    monkeypatch.setattr(sources.hub, "resolve", lambda *given: pytest.fail("a dry run asked the hub"))
    text = tmp_path / "text.txt"
    text.write_text("words and words\n" * 20, encoding="utf-8")
    path = tmp_path / "small.toml"
    sha256, _ = freezing.digest.sha256_file(text)
    path.write_text(STUDY.format(sha256=sha256, memory=1 << 20), encoding="utf-8")
    return path


def met(found: dict, what: str) -> bool:
    return next(check["met"] for check in found["checks"] if check["what"] == what)


def test_a_study_is_looked_at_without_its_weights(study: Path) -> None:
    found = dryrun.look(str(study))
    assert found["checkpoint"]["pinned"] == "main is resolved to a commit, and frozen, at the first run"
    assert [arm["name"] for arm in found["arms"]] == ["native"]
    assert (len(found["documents"]), found["expects"]["minutes"]) == (2, 3)
    assert found["can_run"]
    assert json.loads(json.dumps(found)) == found


def test_a_pinned_revision_is_said(study: Path) -> None:
    study.write_text(study.read_text(encoding="utf-8").replace("@main", "@" + "ab" * 20), encoding="utf-8")
    assert dryrun.look(str(study))["checkpoint"]["pinned"] == f"at commit {'ab' * 20}"


def test_what_this_host_lacks_is_said(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = study.read_text(encoding="utf-8").replace(f"memory_bytes = {1 << 20}", f"memory_bytes = {1 << 50}\ngpu_memory_bytes = {1 << 34}")
    study.write_text(text.replace('scope = "quality.loss"', 'scope = "quality.loss"\ndevice = "cuda"'), encoding="utf-8")
    (study.parent / "text.txt").unlink()
    monkeypatch.setattr(dryrun, "accelerators", lambda: [("A GPU", 1 << 33)])
    found = dryrun.look(str(study))
    assert not found["can_run"]
    assert [check["what"] for check in found["checks"] if not check["met"]] == ["dataset", "memory", "GPU memory"]
    monkeypatch.setattr(dryrun, "accelerators", list)
    assert not met(dryrun.look(str(study)), "GPU")


def test_packages_that_are_missing_are_named(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "NEEDED", ("json", "no_such_package_at_all"))
    check = dryrun.look(str(study))["checks"][0]
    assert (check["found"], check["met"]) == ("without no_such_package_at_all", False)


def test_what_is_expected_is_no_part_of_the_spec(study: Path) -> None:
    table, _ = freezing.load_study(study)
    with_it = freezing.draft_of(table)
    del table["expects"]
    assert freezing.draft_of(table) == with_it


def test_a_wrong_expectation_names_its_key(study: Path) -> None:
    study.write_text(study.read_text(encoding="utf-8").replace("minutes = 3", 'minutes = "few"'), encoding="utf-8")
    with pytest.raises(InputError, match=r"expects\.minutes"):
        dryrun.look(str(study))


def test_a_suite_names_studies_that_ship_and_files_beside_it(study: Path) -> None:
    suite = study.parent / "all.toml"
    suite.write_text('suite = "all"\ntitle = "Both"\nstudies = ["demo", "small.toml"]\n', encoding="utf-8")
    found = dryrun.suite_of(str(suite))
    assert found is not None
    assert found.studies == ("demo", str(study))
    assert dryrun.suite_of(str(study)) is None
    assert dryrun.suite_of("demo") is None
    assert dryrun.suite_of("nothing of that name") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [('suite = "x"\ntitle = "X"\nstudies = []\n', "names no study"), ('suite = "x"\ntitle = "X"\nstudies = ["demo"]\nmore = 1\n', "more")],
)
def test_a_suite_that_is_wrong_is_refused(tmp_path: Path, text: str, named: str) -> None:
    suite = tmp_path / "x.toml"
    suite.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=named):
        dryrun.suite_of(str(suite))


def test_the_memory_is_what_a_control_group_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = dryrun.memory()
    limit = tmp_path / "memory.max"
    real = dryrun.Path
    monkeypatch.setattr(dryrun, "Path", lambda *given: limit if given == ("/sys/fs/cgroup/memory.max",) else real(*given))
    for text, expected in (("max\n", whole), ("1048576\n", 1 << 20)):
        limit.write_text(text, encoding="ascii")
        assert dryrun.memory() <= expected


def test_gpus_are_those_that_the_drivers_tool_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n", encoding="ascii")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert dryrun.accelerators() == [("NVIDIA H200", 143771 << 20)]
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="ascii")
    assert dryrun.accelerators() == []
