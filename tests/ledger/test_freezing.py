"""Studies, frozen specs and frozen folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ledger import freezing, records
from ledger.archive import Archive
from ledger.errors import InputError, LedgerError, ProvenanceError

PROSE = ("The cache holds what was written into it.\n" * 40).encode()
SHA = hashlib.sha256(PROSE).hexdigest()

STUDY = f"""
study = "small"
title = "A small study"
scope = "quality.loss"

[checkpoint]
name = "Small Llama"
source = "random:llama#7"
license = "none"
[checkpoint.config]
hidden_size = 64
limits = [0.0, inf]

[workload]
dataset = "prose.txt"
dataset_name = "Prose"
dataset_license = "Apache-2.0"
sha256 = "{SHA}"
inputs = "store"
documents = 3
tokens = 16
first = 5
bos = true
split_special_tokens = true
chunk = 8
[workload.greedy]
documents = 1
prompt_tokens = 8
new_tokens = 4

[[arms]]
name = "k16v16"
role = "control"
implementation = "reference"
compute = "fp32"
keys = "bf16"
values = "bf16"

[[arms]]
name = "k16v8"
role = "candidate"
implementation = "reference"
compute = "fp32"
keys = "bf16"
values = "fp8_e4m3"
scales = "unit"

[[contrasts]]
candidate = "k16v8"
baseline = "k16v16"
family = "loss"

[families.loss]
confidence = 0.95
[[families.loss.gates]]
statistic = "loss_difference_mean"
bound = 0.02
harm = 0.05

[tolerances]
loss_mean = 0.0
"""


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    with Archive.create(tmp_path / "archive") as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study and its dataset."""
    monkeypatch.delenv("LEDGER_DATA", raising=False)
    place = tmp_path / "studies"
    place.mkdir()
    (place / "small.toml").write_text(STUDY)
    (place / "prose.txt").write_bytes(PROSE)
    return place


def study(folder: Path, old: str = "", new: str = "", *more: tuple[str, str]) -> Path:
    """The study with some of its text replaced."""
    text = STUDY
    for before, after in ((old, new), *more):
        assert before in text
        text = text.replace(before, after, 1) if before else text
    path = folder / "changed.toml"
    path.write_text(text)
    return path


def spec_of(path: Path) -> tuple[records.Spec, dict[str, Path]]:
    return freezing.spec_of(*freezing.load_study(path))


def test_a_study_becomes_a_spec_with_every_name_resolved(folder: Path) -> None:
    spec, files = spec_of(folder / "small.toml")
    assert spec.workload.dataset == records.Dataset(name="Prose", file="prose.txt", sha256=SHA, size=len(PROSE), license="Apache-2.0")
    assert spec.checkpoint.seed == 7 and spec.checkpoint.config is not None and spec.checkpoint.config["hidden_size"] == 64
    assert [(span.start, span.tokens) for span in spec.workload.spans] == [(5, 15), (20, 15), (35, 15)]
    assert spec.family("loss").resamples == 1999 and spec.tolerances == {"loss_mean": 0.0}
    assert spec.workload.greedy == records.Greedy(documents=1, prompt_tokens=8, new_tokens=4)
    assert files == {"prose.txt": folder / "prose.txt"}
    assert records.decode(records.Spec, records.encode(spec), "spec") == spec


def test_without_bos_every_token_comes_from_the_dataset(folder: Path) -> None:
    spec, _ = spec_of(study(folder, "bos = true", "bos = false"))
    assert [(span.start, span.tokens) for span in spec.workload.spans] == [(5, 16), (21, 16), (37, 16)]


def test_a_stride_leaves_gaps(folder: Path) -> None:
    spec, _ = spec_of(study(folder, "first = 5", "stride = 20"))
    assert [(span.start, span.tokens) for span in spec.workload.spans] == [(0, 15), (20, 15), (40, 15)]


def test_the_same_study_gives_the_same_bytes(folder: Path) -> None:
    first, second = (records.encode(spec_of(folder / "small.toml")[0]) for _ in range(2))
    assert first == second


BAD: list[tuple[str, str, str]] = [
    ('study = "small"', 'study = "Small Study"', "study"),
    ('study = "small"', 'study = "small"\ncolour = "red"', "colour"),
    ('study = "small"', 'study = "small"\nfirst = 2026-01-01', "first"),
    ('title = "A small study"', "", "title"),
    ('title = "A small study"', "title = 7", "title"),
    ('title = "A small study"', 'title = "' + "x" * 9000 + '"', "title"),
    ('scope = "quality.loss"', 'scope = "quality"', "scope"),
    ("[checkpoint]\n", "[checkpoint]\ntrust_remote_code = true\n", "checkpoint.trust_remote_code"),
    ('license = "none"', "", "checkpoint.license"),
    ("random:llama#7", "random:llama", "checkpoint.source"),
    ("random:llama#7", "s3://bucket/x", "checkpoint.source"),
    ('license = "none"', f'license = "none"\nsha256 = "{SHA}"', "checkpoint.sha256"),
    ("[workload]\n", "[workload]\nshuffle = true\n", "workload.shuffle"),
    ("tokens = 16", "", "workload.tokens"),
    ("tokens = 16", 'tokens = "16"', "workload.tokens"),
    ("tokens = 16", "tokens = 1", "workload.tokens"),
    ("documents = 3", "documents = 0", "workload.documents"),
    ("documents = 3", "documents = -1", "workload.documents"),
    ("documents = 3", "documents = 100001", "workload.documents"),
    ("documents = 3", "documents = true", "workload.documents"),
    ("first = 5", "first = -5", "workload.first"),
    ("first = 5", "stride = 14", "workload.stride"),
    ('inputs = "store"', 'inputs = "maybe"', "workload.inputs"),
    (f'sha256 = "{SHA}"', "", "workload.sha256"),
    (f'sha256 = "{SHA}"', 'sha256 = "abc"', "workload.sha256"),
    (f'sha256 = "{SHA}"', f'sha256 = "{SHA.upper()}"', "workload.sha256"),
    (f'sha256 = "{SHA}"', f'sha256 = "{"0" * 64}"', "workload.sha256"),
    ('dataset = "prose.txt"', 'dataset = "../prose.txt"', "workload.dataset"),
    ('dataset = "prose.txt"', 'dataset = "/etc/passwd"', "workload.dataset"),
    ('dataset = "prose.txt"', 'dataset = "gone.txt"', "workload.dataset"),
    ('dataset = "prose.txt"', 'dataset = ""', "workload.dataset"),
    ('dataset = "prose.txt"', 'dataset = "data:prose.txt"', "LEDGER_DATA"),
    ("documents = 1", "documents = 4", "workload.greedy.documents"),
    ("prompt_tokens = 8", "prompt_tokens = 17", "workload.greedy.prompt_tokens"),
    ("new_tokens = 4", "", "workload.greedy.new_tokens"),
    ('keys = "bf16"', 'keys = "int4"', "arms[0].keys"),
    ('role = "candidate"', 'role = "candidate"\nspeed = 1', "arms[1].speed"),
    ('scales = "unit"', "", "scale policy"),
    ('name = "k16v8"', 'name = "k16v16"', "k16v16"),
    ('role = "control"', 'role = "candidate"', "control"),
    ('baseline = "k16v16"', 'baseline = "k16"', "k16"),
    ('family = "loss"', 'family = "task"', "contrast"),
    ('family = "loss"', "", "contrasts[0].family"),
    ("[families.loss]", '[families."Loss!"]', "families"),
    ("bound = 0.02", "bound = nan", "families.loss.gates[0].bound"),
    ("harm = 0.05", "harm = inf", "families.loss.gates[0].harm"),
    ("harm = 0.05", "", "families.loss.gates[0].harm"),
    ("harm = 0.05", "harm = 0.01", "harm"),
    ("confidence = 0.95", "confidence = nan", "families.loss.confidence"),
    ("confidence = 0.95", "confidence = 95", "confidence"),
    ("confidence = 0.95", "sigma = 3", "families.loss.sigma"),
    ('statistic = "loss_difference_mean"', 'statistic = "vibes"', "families.loss.gates[0].statistic"),
    ("loss_mean = 0.0", "loss_mean = nan", "tolerances.loss_mean"),
    ("loss_mean = 0.0", "loss_mean = -1.0", "loss_mean"),
    ("loss_mean = 0.0", 'loss_mean = "none"', "tolerances"),
    ("[workload]", "[workload", "TOML"),
    ("[workload]\n", "[workload]\ntokens = 16\n", "TOML"),
]


@pytest.mark.parametrize(("old", "new", "words"), BAD, ids=[f"{new.strip()[:40]!r} for {old.strip()[:30]!r}" for old, new, _ in BAD])
def test_a_bad_study_is_refused_and_the_key_is_named(folder: Path, old: str, new: str, words: str) -> None:
    with pytest.raises((InputError, ProvenanceError)) as caught:
        spec_of(study(folder, old, new))
    assert words in caught.value.message()


@pytest.mark.parametrize("table", ["[checkpoint]", "[workload]", "[[arms]]"])
def test_a_missing_table_is_named(folder: Path, table: str) -> None:
    start = STUDY.index(table)
    kept = STUDY[:start] + ("" if table == "[[arms]]" else STUDY[STUDY.index("[[arms]]") :])
    if table == "[checkpoint]":
        kept = STUDY[:start] + STUDY[STUDY.index("[workload]") :]
    (folder / "small.toml").write_text(kept)
    with pytest.raises(InputError, match=table.strip("[]")):
        spec_of(folder / "small.toml")


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b'study = "caf\xe9"', b"\0", b"a = " + b"[" * 100_000], ids=["bom", "latin-1", "nul", "deep"]
)
def test_a_file_that_is_no_study_is_refused(folder: Path, data: bytes) -> None:
    (folder / "small.toml").write_bytes(data)
    with pytest.raises(InputError):
        freezing.load_study(folder / "small.toml")


def test_a_huge_study_is_refused(folder: Path) -> None:
    (folder / "small.toml").write_bytes(b"#" * (freezing.MAX_STUDY + 1))
    with pytest.raises(InputError, match="too large"):
        freezing.load_study(folder / "small.toml")


def test_an_unknown_name_lists_the_studies_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "demo.toml").write_text(STUDY)
    monkeypatch.setattr(freezing, "packaged", lambda: shipped)
    with pytest.raises(InputError, match="studies that ship: demo"):
        freezing.load_study("nothing-of-that-name")
    assert freezing.load_study("demo")[1] == shipped


def test_a_folder_named_as_a_study_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "demo.toml").write_text(STUDY)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(freezing, "packaged", lambda: shipped)
    assert freezing.load_study("demo")[1] == shipped


def test_the_spec_is_in_the_log_and_the_folder_holds_it_with_its_inputs(folder: Path, tmp_path: Path, archive: Archive) -> None:
    out = tmp_path / "frozen"
    spec = freezing.freeze(folder / "small.toml", archive, out)
    assert [(entry.kind, entry.record) for entry in archive.entries()] == [("spec", records.identify(spec))]
    assert (out / "spec.json").read_bytes() == records.encode(spec)
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {"spec.json", "inputs/prose.txt"}
    assert (out / "inputs/prose.txt").read_bytes() == PROSE


def test_the_spec_is_in_the_log_before_the_folder_is_there(folder: Path, tmp_path: Path, archive: Archive) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    with pytest.raises(InputError, match="cannot be written"):
        freezing.freeze(folder / "small.toml", archive, tmp_path / "file/frozen")
    assert len(archive.entries()) == 1
    freezing.freeze(folder / "small.toml", archive, tmp_path / "frozen")
    assert len(archive.entries()) == 1, "the same study frozen again is one entry"


def test_freezing_needs_no_archive_and_takes_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "frozen").mkdir()
    freezing.freeze(folder / "small.toml", None, tmp_path / "frozen")
    assert (tmp_path / "frozen/spec.json").is_file()


def test_a_folder_in_use_is_refused_and_nothing_is_logged(folder: Path, tmp_path: Path, archive: Archive) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for place in ("used", "used/file", "link"):
        with pytest.raises(InputError, match="in use"):
            freezing.freeze(folder / "small.toml", archive, tmp_path / place)
    assert archive.entries() == []


def test_a_crash_while_laying_out_leaves_no_frozen_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "frozen"
    real = os.fsync
    left = 0

    def fail(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fail)
    for allowed in range(4):
        left = allowed
        with pytest.raises(InputError, match="No space left"):
            freezing.freeze(folder / "small.toml", None, out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["studies"]


def test_a_dataset_that_changes_while_it_is_frozen_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = freezing.spec_of

    def meddle(*arguments: Any) -> tuple[records.Spec, dict[str, Path]]:
        found = real(*arguments)
        (folder / "prose.txt").write_bytes(PROSE[::-1])
        return found

    monkeypatch.setattr(freezing, "spec_of", meddle)
    with pytest.raises(ProvenanceError, match="changed while"):
        freezing.freeze(folder / "small.toml", None, tmp_path / "frozen")
    assert not (tmp_path / "frozen").exists()


def test_a_checkpoint_beside_the_study_is_laid_out_with_the_inputs(folder: Path, tmp_path: Path) -> None:
    (folder / "tiny.gguf").write_bytes(b"GGUF tiny")
    config = STUDY[STUDY.index("[checkpoint.config]") : STUDY.index("[workload]")]
    path = study(folder, "random:llama#7", "file:tiny.gguf", (config, ""))
    spec = freezing.freeze(path, None, tmp_path / "frozen")
    assert spec.checkpoint.source == "file:tiny.gguf"
    assert (tmp_path / "frozen/inputs/tiny.gguf").read_bytes() == b"GGUF tiny"


def frozen(archive: Archive, tmp_path: Path, path: Path) -> str:
    return records.identify(freezing.freeze(path, archive, tmp_path / "frozen"))


def same(first: Path, second: Path) -> bool:
    def read(place: Path) -> dict[str, bytes]:
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}

    return read(first) == read(second)


def test_a_recorded_spec_thaws_to_the_same_folder(folder: Path, tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    name = frozen(archive, tmp_path, folder / "small.toml")
    data = tmp_path / "data/deep"
    data.mkdir(parents=True)
    (folder / "prose.txt").rename(data / "under another name")
    (data / "decoy").write_bytes(PROSE[::-1])
    monkeypatch.setenv("LEDGER_DATA", str(tmp_path / "data"))
    freezing.thaw(archive, name, tmp_path / "thawed")
    assert same(tmp_path / "frozen", tmp_path / "thawed")
    monkeypatch.delenv("LEDGER_DATA")
    freezing.thaw(archive, name, tmp_path / "again", search=[tmp_path / "frozen/inputs"])
    assert same(tmp_path / "frozen", tmp_path / "again")


def test_stored_inputs_stand_in_for_a_dataset_that_is_gone(folder: Path, tmp_path: Path, archive: Archive) -> None:
    name = frozen(archive, tmp_path, folder / "small.toml")
    freezing.thaw(archive, name, tmp_path / "thawed", stored_inputs=b"ids")
    assert (tmp_path / "thawed/inputs/inputs.safetensors").read_bytes() == b"ids"
    assert not (tmp_path / "thawed/inputs/prose.txt").exists()


def test_stored_inputs_lie_beside_a_dataset_whose_token_ids_are_pinned(folder: Path, tmp_path: Path, archive: Archive) -> None:
    pinned = study(folder, 'inputs = "store"', f'inputs = "store"\nids = "{"a" * 64}"')
    name = frozen(archive, tmp_path, pinned)
    freezing.thaw(archive, name, tmp_path / "thawed", stored_inputs=b"ids", search=[folder])
    assert (tmp_path / "thawed/inputs/inputs.safetensors").read_bytes() == b"ids"
    assert (tmp_path / "thawed/inputs/prose.txt").exists()
    freezing.thaw(archive, name, tmp_path / "bare", search=[folder])
    assert same(tmp_path / "frozen", tmp_path / "bare")


@pytest.mark.parametrize("stored", [None, b"ids"])
def test_a_dataset_that_is_gone_is_refused_where_only_digests_were_kept(
    folder: Path, tmp_path: Path, archive: Archive, stored: bytes | None
) -> None:
    name = frozen(archive, tmp_path, study(folder, 'inputs = "store"', 'inputs = "digest"'))
    with pytest.raises(ProvenanceError, match="LEDGER_DATA"):
        freezing.thaw(archive, name, tmp_path / "thawed", stored_inputs=stored)
    assert not (tmp_path / "thawed").exists()


def test_every_error_says_what_to_do(folder: Path) -> None:
    faults: list[Any] = [("documents = 3", "documents = 0"), ('dataset = "prose.txt"', 'dataset = "gone.txt"')]
    for old, new in faults:
        with pytest.raises(LedgerError, match="next: "):
            spec_of(study(folder, old, new))


# ---------------------------------------------------------------- like another


def test_a_study_takes_what_it_does_not_say_from_the_one_that_it_is_like(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('like = "smollm2-135m-loss"\nstudy = "mine"\ntitle = "Mine"\n[tolerances]\n', encoding="utf-8")
    (tmp_path / "next.toml").write_text('like = "mine.toml"\nstudy = "next"\n', encoding="utf-8")
    mine, place = freezing.load_study(tmp_path / "mine.toml")
    other, _ = freezing.load_study("smollm2-135m-loss")
    assert place == tmp_path
    assert mine == other | {"study": "mine", "title": "Mine", "tolerances": {}}
    assert freezing.load_study(tmp_path / "next.toml")[0] == mine | {"study": "next"}


@pytest.mark.parametrize(
    ("like", "named"),
    [
        ("3", "names no study"),
        ('"../other"', "names no study"),
        ('"no-such-study"', "There is no study"),
        ('"demo"', "files beside it"),
        ('"circle.toml"', "goes round in a circle"),
    ],
)
def test_what_a_study_cannot_be_like_is_refused(tmp_path: Path, like: str, named: str) -> None:
    (tmp_path / "circle.toml").write_text('like = "mine.toml"\nstudy = "circle"\n', encoding="utf-8")
    (tmp_path / "mine.toml").write_text(f'like = {like}\nstudy = "mine"\ntitle = "Mine"\n', encoding="utf-8")
    with pytest.raises(InputError, match=named):
        freezing.load_study(tmp_path / "mine.toml")
