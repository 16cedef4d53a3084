"""A result folder is checked whole, recorded once, and never changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from ledger import digest, recording, records
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.verify import verify
from tests import factories

SPEC = factories.spec()
FILES = factories.samples(SPEC)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    place = tmp_path / "archive"
    Archive.create(place)
    with Archive.open(place, write=True) as opened:
        opened.append(SPEC)
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return factories.write_result_folder(tmp_path / "result", factories.result(SPEC, FILES), FILES)


def contents(folder: Path) -> dict[str, Any]:
    """Everything under a folder, so that a change would show."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder))
        found[repr(name)] = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


def rewrite(folder: Path, **changes: Any) -> records.Result:
    """Write another ``result.json``."""
    found = records.decode(records.Result, (folder / "result.json").read_bytes(), "result.json")
    changed = msgspec.structs.replace(found, **changes)
    (folder / "result.json").write_bytes(records.encode(changed))
    return changed


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the plain values of ``result.json`` past what records would allow."""
    value = json.loads((folder / "result.json").read_bytes())
    change(value)
    (folder / "result.json").write_bytes(digest.canonical(value))


# ---------------------------------------------------------------- a good folder


def test_a_completed_folder_becomes_a_run_with_figures_decisions_and_evidence(archive, folder):
    entry = recording.record(archive, folder)
    run = archive.run(entry.record)
    assert entry.kind == "run"
    assert run.outcome == "completed" and run.spec == records.identify(SPEC)
    assert {item.name for item in run.evidence} >= {"result.json", *FILES}
    assert run.measurements and len(run.decisions) == len(SPEC.contrasts)
    assert archive.samples(run)["samples/0000.safetensors"] == FILES["samples/0000.safetensors"]


def test_recording_leaves_the_folder_as_it_is(archive, folder):
    before = contents(folder)
    recording.record(archive, folder)
    assert contents(folder) == before


def test_recording_twice_is_recording_once(archive, folder):
    first = recording.record(archive, folder)
    entries = archive.entries()
    assert recording.record(archive, folder) == first
    assert archive.entries() == entries


def test_warnings_of_the_runner_are_kept(archive, folder):
    rewrite(folder, warnings=("the model declares a BOS and got none",))
    run = archive.run(recording.record(archive, folder).record)
    assert "the model declares a BOS and got none" in run.warnings


def test_arms_that_are_identical_where_their_formats_differ_are_flagged(archive, tmp_path):
    files = factories.samples(SPEC, noise={"k16v8": (0.0, 0.0), "k8v8": (0.0, 0.0)})
    folder = factories.write_result_folder(tmp_path / "same", factories.result(SPEC, files), files)
    assert archive.run(recording.record(archive, folder).record).warnings


# ---------------------------------------------------------------- runs that did not complete


def partial(folder: Path, outcome: str, reason: str = "") -> Path:
    """A folder whose run ended after two of four documents, with a third half written."""
    found = records.decode(records.Result, (folder / "result.json").read_bytes(), "result.json")
    kept = [item for item in found.evidence if item.name <= "samples/0001.safetensors"]
    rewrite(folder, outcome=outcome, reason=reason, documents=found.documents[:2], evidence=tuple(kept), stopped=None)
    (folder / "samples/0003.safetensors").unlink()
    (folder / "samples/0002.safetensors").rename(folder / "samples/.0002.safetensors.part")
    with (folder / "samples/.0002.safetensors.part").open("r+b") as stream:
        stream.truncate(10)
    return folder


def test_a_killed_run_is_recorded_as_failed_and_its_evidence_kept(archive, folder):
    run = archive.run(recording.record(archive, partial(folder, "running")).record)
    assert (run.outcome, run.reason) == ("failed", "the runner was killed")
    assert [item.name for item in run.evidence if item.name.startswith("samples/")] == [
        "samples/0000.safetensors",
        "samples/0001.safetensors",
    ]
    assert any(".0002.safetensors.part" in notice for notice in archive.notices)
    assert all(decision.status == "invalid" for decision in run.decisions)


def grown(folder: Path, outcome: str = "running") -> Path:
    """A folder that lists one line of a file that has two and a half."""
    lines = b'{"line":1}\n'
    found = partial(folder, outcome)
    listed = records.decode(records.Result, (folder / "result.json").read_bytes(), "result.json").evidence
    more = records.Evidence(name="lines.jsonl", sha256=digest.sha256(lines), size=len(lines), media_type="application/x-ndjson")
    rewrite(folder, evidence=(*listed, more))
    (folder / "lines.jsonl").write_bytes(lines * 2 + lines[:4])
    return found


def test_of_a_file_that_grew_behind_its_listing_the_listed_beginning_is_kept(archive, folder):
    run = archive.run(recording.record(archive, grown(folder)).record)
    kept = next(item for item in run.evidence if item.name == "lines.jsonl")
    assert archive.store.read(kept.sha256) == b'{"line":1}\n' and run.outcome == "failed"
    assert any("lines.jsonl behind its first 11 bytes" in notice for notice in archive.notices)
    assert (folder / "lines.jsonl").stat().st_size == 26


def test_only_a_killed_run_leaves_a_file_longer_than_listed_and_only_of_lines(archive, folder):
    with pytest.raises(InputError, match=r"too long: lines\.jsonl has 26 bytes, listed with 11"):
        recording.record(archive, grown(folder, "interrupted"))
    rewrite(folder, outcome="running")
    (folder / "lines.jsonl").write_bytes(b'{"line":2}\n{"line":3}\n')
    with pytest.raises(InputError, match=r"changed: lines\.jsonl"):
        recording.record(archive, folder)
    (folder / "lines.jsonl").write_bytes(b'{"line":1}\n')
    with (folder / "samples/0001.safetensors").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(InputError, match=r"too long: samples/0001"):
        recording.record(archive, folder)


def test_an_interrupted_run_is_recorded_as_interrupted_with_its_reason(archive, folder):
    run = archive.run(recording.record(archive, partial(folder, "interrupted", "interrupted by SIGINT")).record)
    assert (run.outcome, run.reason) == ("interrupted", "interrupted by SIGINT")


def test_a_run_that_failed_before_its_first_document_is_recorded(archive, tmp_path):
    found = factories.result(SPEC, {}, outcome="failed", reason="no memory", documents=(), arms=())
    (tmp_path / "failed").mkdir()
    folder = factories.write_result_folder(tmp_path / "failed", found, {})
    assert archive.run(recording.record(archive, folder).record).outcome == "failed"


# ---------------------------------------------------------------- what is taken verifies

STORED = factories.spec(workload=factories.workload(inputs="store", greedy=records.Greedy(documents=1, prompt_tokens=4, new_tokens=3)))


def stored_folder(folder: Path, change: Callable[[dict[str, np.ndarray]], None] = lambda ids: None) -> Path:
    """A folder that keeps its token ids; ``change`` alters those that are kept, after the documents took their digests."""
    ids = {f"{at:04}": np.arange(span.start, span.start + span.tokens, dtype=np.int32) for at, span in enumerate(STORED.workload.spans)}
    documents = tuple(records.Document(tokens=len(values), sha256=digest.sha256(values.tobytes())) for values in ids.values())
    change(ids)
    lines = ({"arm": arm.name, "document": 0, "prompt_tokens": 4, "ids": [1, 2, 3]} for arm in STORED.arms)
    greedy = b"".join(digest.canonical(line) + b"\n" for line in lines)
    files = {**factories.samples(STORED), "inputs.safetensors": save(ids), "greedy.jsonl": greedy}
    return factories.write_result_folder(folder, factories.result(STORED, files, documents=documents), files)


def _with_more(folder: Path) -> None:
    """Listed evidence that no figure follows from."""
    (folder / "notes.txt").write_bytes(b"as it went")
    more = records.Evidence(name="notes.txt", sha256=digest.sha256(b"as it went"), size=10, media_type="text/plain")
    found = records.decode(records.Result, (folder / "result.json").read_bytes(), "result.json")
    rewrite(folder, evidence=(*found.evidence, more))


def _failed_at_once(folder: Path) -> None:
    for path in (folder / "samples").iterdir():
        path.unlink()
    rewrite(folder, outcome="failed", reason="no memory", documents=(), arms=(), evidence=())


TAKEN: dict[str, Callable[[Path], object]] = {
    "complete": lambda folder: None,
    "killed": lambda folder: partial(folder, "running"),
    "interrupted": lambda folder: partial(folder, "interrupted", "interrupted by SIGINT"),
    "failed at once": _failed_at_once,
    "with more evidence": _with_more,
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("inputs", ["digest", "store"])
def test_whatever_is_recorded_verifies_clean(archive, folder, tmp_path, inputs, how):
    if inputs == "store":
        archive.append(STORED)
        folder = stored_folder(tmp_path / "stored")
    if inputs == "store" and how in ("killed", "interrupted"):
        (folder / "greedy.jsonl").rename(folder / ".greedy.jsonl.part")
        found = records.decode(records.Result, (folder / "result.json").read_bytes(), "result.json")
        rewrite(folder, evidence=tuple(item for item in found.evidence if item.name != "greedy.jsonl"))
    TAKEN[how](folder)
    recording.record(archive, folder)
    assert verify(archive.folder).findings == []


# ---------------------------------------------------------------- folders that are refused


def _missing(folder: Path) -> None:
    (folder / "samples/0001.safetensors").unlink()


def _extra(folder: Path) -> None:
    (folder / "notes.txt").write_text("more")


def _truncated(folder: Path) -> None:
    data = (folder / "samples/0001.safetensors").read_bytes()
    (folder / "samples/0001.safetensors").write_bytes(data[:-1])


def _grown(folder: Path) -> None:
    with (folder / "samples/0001.safetensors").open("ab") as stream:
        stream.write(b"x")


def _flipped(folder: Path) -> None:
    data = bytearray((folder / "samples/0001.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "samples/0001.safetensors").write_bytes(bytes(data))


def _renamed(folder: Path) -> None:
    (folder / "samples/0001.safetensors").rename(folder / "samples/1.safetensors")


def _swapped(folder: Path) -> None:
    one, two = folder / "samples/0000.safetensors", folder / "samples/0001.safetensors"
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def _symlink(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    (folder / "samples/0001.safetensors").rename(target)
    (folder / "samples/0001.safetensors").symlink_to(target)


def _linked_folder(folder: Path) -> None:
    (folder / "samples").rename(folder.parent / "samples")
    (folder / "samples").symlink_to(folder.parent / "samples")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _directory_for_file(folder: Path) -> None:
    (folder / "samples/0001.safetensors").unlink()
    (folder / "samples/0001.safetensors").mkdir()


def _bad_name(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9")).write_bytes(b"x")


def _control_name(folder: Path) -> None:
    (folder / "a\x1b[2Jb").write_bytes(b"x")


def _no_result(folder: Path) -> None:
    (folder / "result.json").unlink()


def _result_link(folder: Path) -> None:
    (folder / "result.json").rename(folder.parent / "r.json")
    (folder / "result.json").symlink_to(folder.parent / "r.json")


BROKEN_FOLDERS = [
    (_missing, "missing: samples/0001.safetensors"),
    (_extra, "extra: notes.txt"),
    (_truncated, "truncated: samples/0001.safetensors"),
    (_grown, "too long: samples/0001.safetensors"),
    (_flipped, "changed: samples/0001.safetensors"),
    (_renamed, "renamed: samples/0001.safetensors is here as samples/1.safetensors"),
    (_swapped, "changed: samples/0000.safetensors"),
    (_symlink, "a symbolic link, not a file: samples/0001.safetensors"),
    (_linked_folder, "a symbolic link, not a file: samples"),
    (_pipe, "neither a file nor a folder: pipe"),
    (_directory_for_file, "missing: samples/0001.safetensors"),
    (_bad_name, "not valid UTF-8"),
    (_control_name, "extra: a\\x1b[2Jb"),
    (_no_result, "missing: result.json"),
    (_result_link, "a symbolic link, not a file: result.json"),
]


@pytest.mark.parametrize(("spoil", "named"), BROKEN_FOLDERS, ids=lambda value: getattr(value, "__name__", "").strip("_"))
def test_a_spoilt_folder_is_refused_by_name_and_left_alone(archive, folder, spoil, named):
    spoil(folder)
    before, entries = contents(folder), archive.entries()
    with pytest.raises(InputError) as caught:
        recording.record(archive, folder)
    assert named in caught.value.message()
    assert caught.value.next
    assert contents(folder) == before and archive.entries() == entries


def _entry(value: dict[str, Any], **changes: Any) -> None:
    value["evidence"][1].update(changes)


BROKEN_RESULTS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("dots", lambda v: _entry(v, name="../outside"), "outside the result folder"),
    ("encoded dots", lambda v: _entry(v, name="samples/%2e%2e/%2e%2e/outside"), "outside the result folder"),
    ("twice encoded dots", lambda v: _entry(v, name="%252e%252e/outside"), "outside the result folder"),
    ("backslashes", lambda v: _entry(v, name="..\\outside"), "outside the result folder"),
    ("leading slash", lambda v: _entry(v, name="/etc/passwd"), "outside the result folder"),
    ("encoded slash", lambda v: _entry(v, name="%2fetc/passwd"), "outside the result folder"),
    ("drive", lambda v: _entry(v, name="C:/outside"), "outside the result folder"),
    ("nul", lambda v: _entry(v, name="a\x00b"), "outside the result folder"),
    ("hash sign", lambda v: _entry(v, name="a#b"), "evidence"),
    ("empty name", lambda v: _entry(v, name=""), "evidence"),
    ("long name", lambda v: _entry(v, name="a" * 201), "evidence"),
    ("duplicate", lambda v: _entry(v, name="samples/0000.safetensors"), "listed twice: samples/0000.safetensors"),
    ("itself", lambda v: _entry(v, name="result.json"), "listed as its own evidence"),
    ("negative size", lambda v: _entry(v, size=-1), "evidence"),
    ("huge string", lambda v: v.update(reason="x" * (10 << 20)), "8192"),
    ("unknown key", lambda v: v.update(colour="blue"), "colour"),
    ("unknown outcome", lambda v: v.update(outcome="fine"), "outcome"),
    ("short spec", lambda v: v.update(spec=v["spec"][:12]), "short identifier"),
    ("short commit", lambda v: v.update(sources={"ledger/digest.py": "abc1234"}), "short identifier"),
    ("another spec", lambda v: v.update(spec="0" * 64), "did not freeze"),
    ("missing document", lambda v: v["documents"].pop(), "3 documents, the spec has 4"),
    ("extra document", lambda v: v["documents"].append(v["documents"][0]), "5 documents, the spec has 4"),
    ("other length", lambda v: v["documents"][2].update(tokens=31), "document 2 has 31 tokens, the spec asks 32"),
    ("missing arm", lambda v: v["arms"].pop(), "arm k8v8 is missing"),
    ("double arm", lambda v: v["arms"].append(v["arms"][0]), "arm native stands twice"),
    ("other arm", lambda v: v["arms"][0].update(name="other"), "arm other is not in the spec"),
    ("infinite seconds", lambda v: v["arms"][0].update(seconds={"a": 1}), "seconds"),
    ("bytes as text", lambda v: v.update(peak_memory_bytes="0"), "peak_memory_bytes"),
]


@pytest.mark.parametrize(("change", "named"), [pytest.param(c, n, id=i) for i, c, n in BROKEN_RESULTS])
def test_an_unusable_result_is_refused_by_what_is_wrong_with_it(archive, folder, change, named):
    edit(folder, change)
    before, entries = contents(folder), archive.entries()
    with pytest.raises(InputError) as caught:
        recording.record(archive, folder)
    message = caught.value.message()
    assert named in message and caught.value.next
    assert len(message) < 8000
    assert contents(folder) == before and archive.entries() == entries


BROKEN_BYTES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("log line", lambda data: b"INFO loading model\n" + data, "'INFO loading model' before the JSON"),
    ("something after", lambda data: data + b"\ndone\n", "Extra data"),
    ("infinity", lambda data: data.replace(b'"size":', b'"size":Infinity,"old":', 1), "Infinity"),
    ("nan", lambda data: data.replace(b'"size":', b'"size":NaN,"old":', 1), "NaN"),
    ("overflow", lambda data: data.replace(b'"seconds":1.5', b'"seconds":1e999', 1), "range of a double"),
    ("invalid utf-8", lambda data: data.replace(b"Toy CPU", b"Toy \xff CPU", 1), "not valid UTF-8"),
    ("lone surrogate", lambda data: data.replace(b"Toy CPU", b"Toy \\ud800 CPU", 1), "not valid Unicode"),
    ("duplicate key", lambda data: data.replace(b'"size":', b'"size":1,"size":', 1), "a key twice"),
    ("truncated", lambda data: data[: len(data) // 2], "not JSON"),
    ("empty", lambda data: b"", "an empty file"),
    ("pretty", lambda data: json.dumps(json.loads(data), indent=2).encode(), "canonical"),
    ("list", lambda data: b"[]", "Result"),
    ("deep", lambda data: b"[" * 200_000, "result"),
    ("escape codes", lambda data: b"\x1b[31mred\x1b[0m\n" + data, "\\x1b[31m"),
]


@pytest.mark.parametrize(("change", "named"), [pytest.param(c, n, id=i) for i, c, n in BROKEN_BYTES])
def test_bytes_that_are_no_result_are_refused_and_kept(archive, folder, change, named):
    path = folder / "result.json"
    path.write_bytes(change(path.read_bytes()))
    before, entries = contents(folder), archive.entries()
    with pytest.raises(InputError) as caught:
        recording.record(archive, folder)
    assert named in caught.value.message()
    assert str(path) in caught.value.message() and "left as it is" in caught.value.message()
    assert contents(folder) == before and archive.entries() == entries


def test_a_result_beyond_the_bound_is_refused_unread(archive, folder):
    with (folder / "result.json").open("r+b") as stream:
        stream.truncate(digest.MAX_JSON_BYTES + 1)
    with pytest.raises(InputError, match="too large"):
        recording.record(archive, folder)


def test_all_faults_are_named_at_once(archive, folder):
    _missing(folder)
    _extra(folder)
    with pytest.raises(InputError) as caught:
        recording.record(archive, folder)
    assert "missing: samples/0001.safetensors" in caught.value.found and "extra: notes.txt" in caught.value.found


def test_a_folder_that_is_not_there_is_named(archive, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        recording.record(archive, tmp_path / "nowhere")


def test_a_completed_result_without_a_listed_sample_file_is_refused(archive, folder):
    found = records.decode(records.Result, (folder / "result.json").read_bytes(), "result.json")
    rewrite(folder, evidence=found.evidence[:-1])
    (folder / "samples/0003.safetensors").unlink()
    with pytest.raises(InputError, match=r"evidence samples/0003\.safetensors is missing"):
        recording.record(archive, folder)


def test_samples_that_do_not_load_are_refused(archive, tmp_path):
    files = {**FILES, "samples/0000.safetensors": b"not tensors"}
    folder = factories.write_result_folder(tmp_path / "odd", factories.result(SPEC, files), files)
    with pytest.raises(InputError, match="not a safetensors file"):
        recording.record(archive, folder)


def test_the_stored_dataset_ids_are_required_where_the_spec_stores_inputs(tmp_path):
    frozen = factories.spec(workload=factories.workload(inputs="store"))
    files = factories.samples(frozen)
    Archive.create(tmp_path / "other")
    folder = factories.write_result_folder(tmp_path / "result", factories.result(frozen, files), files)
    with Archive.open(tmp_path / "other", write=True) as opened:
        opened.append(frozen)
        with pytest.raises(InputError, match=r"evidence inputs\.safetensors is missing"):
            recording.record(opened, folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda ids: ids["0002"].__setitem__(3, 7), "the token ids of document 2 have another digest"),
        (lambda ids: ids.pop("0001"), "holds no 32 token ids of document 1"),
        (lambda ids: ids.update({"0009": ids["0001"]}), "holds ids of no document: '0009'"),
    ],
    ids=["other ids", "missing ids", "more ids"],
)
def test_token_ids_that_are_not_those_of_the_documents_are_refused(archive, tmp_path, change, named):
    archive.append(STORED)
    folder = stored_folder(tmp_path / "stored", change)
    before, entries = contents(folder), archive.entries()
    with pytest.raises(InputError) as caught:
        recording.record(archive, folder)
    assert named in caught.value.message() and caught.value.next
    assert contents(folder) == before and archive.entries() == entries


def test_token_ids_are_refused_where_the_spec_keeps_their_digests_alone(archive, tmp_path):
    files = {**FILES, "inputs.safetensors": save({"0000": np.arange(32, dtype=np.int32)})}
    folder = factories.write_result_folder(tmp_path / "kept", factories.result(SPEC, files), files)
    entries = archive.entries()
    with pytest.raises(InputError, match="keeps inputs by digest alone"):
        recording.record(archive, folder)
    assert archive.entries() == entries


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_changes_after_the_folder_was_checked_is_refused(archive, folder, monkeypatch, gone):
    check = recording.read_folder

    def then_change(path: Path) -> recording.ResultFolder:
        found = check(path)
        _missing(path) if gone else _flipped(path)
        return found

    monkeypatch.setattr(recording, "read_folder", then_change)
    entries = archive.entries()
    with pytest.raises(InputError, match=r"samples/0001\.safetensors changed while the result folder"):
        recording.record(archive, folder)
    assert archive.entries() == entries


def test_evidence_from_which_no_figure_follows_is_never_held_in_memory(archive, folder, monkeypatch):
    _with_more(folder)
    read, real = [], Path.read_bytes

    def spy(path: Path) -> bytes:
        read.append(path)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", spy)
    recording.record(archive, folder)
    assert folder / "samples/0000.safetensors" in read and folder / "notes.txt" not in read


@pytest.mark.parametrize(
    ("name", "outside"),
    [("samples/0000.safetensors", False), ("a.b/c", False), ("..", True), ("a/%2E%2E/b", True), ("%00", True), ("a\nb", True)],
)
def test_names_are_decoded_before_they_are_judged(name, outside):
    assert recording.escapes(name) is outside


# ---------------------------------------------------------------- --reproduces


def test_a_result_recorded_as_a_reproduction_is_compared_with_the_original(archive, folder, tmp_path):
    original = recording.record(archive, folder).record
    again = factories.result(SPEC, FILES, started="2026-01-02T04:04:05Z")
    other = factories.write_result_folder(tmp_path / "again", again, FILES)
    repeated = recording.record(archive, other, reproduces=original).record
    last = archive.record(archive.entries()[-1].record)
    assert isinstance(last, records.Reproduction)
    assert (last.original, last.reproduced, last.verdict) == (original, repeated, "bit-identical")


def test_a_result_of_another_spec_reproduces_nothing(archive, folder, tmp_path):
    original = recording.record(archive, folder).record
    frozen = factories.spec(title="Another")
    archive.append(frozen)
    other = factories.write_result_folder(tmp_path / "other", factories.result(frozen, FILES), FILES)
    entries = archive.entries()
    with pytest.raises(InputError, match="another spec"):
        recording.record(archive, other, reproduces=original)
    assert archive.entries() == entries
