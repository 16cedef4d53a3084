"""Signed heads of a real archive: keys as entries, tiles beside the objects, proofs, and what verification finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ledger import cli, log, notes, records, signing, tiles
from ledger.archive import Archive
from ledger.errors import ArchiveError, InputError
from ledger.notes import WITNESS, Note, Proof, Signer
from ledger.policies import Policy
from ledger.verify import verify
from tests import factories
from tests.conftest import append_derived_run
from tests.ledger.test_archive import assert_whole

KEY = Signer.new("example.org/kv", seed=b"\1" * 32)
NEXT = Signer.new("example.org/kv", seed=b"\2" * 32)
WITNESS_KEY = Signer.new("w.example", WITNESS, b"\3" * 32)
TRUST = Policy.parse(f"log {KEY.key}\nquorum none\n".encode())


def change(signer: Signer, action: str = "add") -> records.KeyChange:
    return records.KeyChange(format="kv-ledger/key/1", action=action, key=str(signer.key), author="the maintainers", reason="because")  # type: ignore[arg-type]


@pytest.fixture
def signed(archive: Archive) -> Archive:
    """An archive of a few entries whose head is signed."""
    archive.append(change(KEY))
    append_derived_run(archive, 1)
    archive.sign(KEY)
    return archive


def kinds(archive: Archive, policy: Policy | None = None) -> list[str]:
    url = None if archive.database.own else archive.database.url.render_as_string(hide_password=False)
    return [finding.kind for finding in verify(archive.folder, url, policy).findings]


def test_a_signed_archive_verifies_and_says_by_whom(signed: Archive) -> None:
    assert_whole(signed)
    assert kinds(signed, TRUST) == []
    report = verify(signed.folder, None if signed.database.own else signed.database.url.render_as_string(hide_password=False), TRUST)
    assert report.signed == {"origin": "example.org/kv", "size": 3, "keys": [f"example.org/kv ({KEY.key.id.hex()})"], "policy": True}
    assert sorted(signed.store.published()) == ["checkpoint", "tile/0/000.p/3", "tile/entries/000.p/3"]
    assert tiles.unbundle(signed.store.read_published("tile/entries/000.p/3")) == list(signed.store.entries(3))


def test_an_unsigned_archive_works_and_says_that_it_is_unsigned(archive: Archive) -> None:
    append_derived_run(archive, 1)
    assert_whole(archive)
    assert kinds(archive) == []
    assert kinds(archive, TRUST) == ["policy"]
    with pytest.raises(InputError, match="unsigned"):
        signing.prove(archive.store, 0)


def test_only_a_key_that_an_entry_adds_may_sign(archive: Archive) -> None:
    with pytest.raises(InputError, match="does not sign heads"):
        archive.sign(KEY)
    archive.append(change(KEY))
    archive.append(change(WITNESS_KEY))
    with pytest.raises(InputError, match="does not sign heads"):
        archive.sign(NEXT)
    with pytest.raises(InputError, match="witness"):
        archive.sign(WITNESS_KEY)
    assert archive.store.published() == []
    archive.sign(KEY)


def test_keys_rotate_and_a_revoked_one_signs_no_more(signed: Archive) -> None:
    for wrong in (change(NEXT, "revoke"), change(KEY)):
        if wrong.action == "revoke":
            with pytest.raises(InputError, match="does not sign here"):
                signed.append(wrong)
    signed.append(change(NEXT))
    signed.append(change(KEY, "revoke"))
    assert kinds(signed) == []  # what it signed before stays signed
    with pytest.raises(InputError, match="does not sign heads"):
        signed.sign(KEY)
    forged = notes.signed_head(signed.head, KEY)
    signed.store.publish("checkpoint", forged.encode())
    assert "checkpoint" in kinds(signed)
    signed.sign(NEXT)
    assert kinds(signed) == []
    with pytest.raises(InputError, match="added before"):
        signed.append(records.KeyChange(format="kv-ledger/key/1", action="add", key=str(KEY.key), author="them", reason="again"))


@pytest.mark.parametrize("key", ["a+00000000+" + "A" * 44, "weak+00000000+AQAA" + "A" * 40])
def test_a_change_of_no_key_is_refused(archive: Archive, key: str) -> None:
    with pytest.raises(InputError):
        archive.append(records.KeyChange(format="kv-ledger/key/1", action="add", key=key, author="them", reason="why"))
    assert archive.head.size == 0


def test_entries_after_the_head_are_said_to_be_unsigned_until_it_is_signed_anew(signed: Archive) -> None:
    append_derived_run(signed, 2)
    url = None if signed.database.own else signed.database.url.render_as_string(hide_password=False)
    report = verify(signed.folder, url)
    assert report.ok and any("last entry is unsigned" in note for note in report.notes)
    signed.sign(KEY)
    assert kinds(signed) == []


def test_a_log_of_many_entries_keeps_no_partial_tile_that_is_full(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    archive.append(change(KEY))
    archive.sign(KEY)
    for at in range(260):
        archive.append(factories.spec(title=f"Study {at}"))
        if at in (100, 254):
            archive.sign(KEY)
    archive.sign(KEY)
    assert kinds(archive) == []
    assert archive.store.published() == [
        "checkpoint", "tile/0/000", "tile/0/001.p/5", "tile/1/000.p/1", "tile/entries/000", "tile/entries/001.p/5",
    ]  # fmt: skip
    leaves = [log.leaf_hash(data) for data in archive.store.entries(261)]
    for sequence in (0, 255, 256, 260):
        assert signing.prove(archive.store, sequence).check().head == archive.head
    old = log.Head.over(leaves[:200])
    request = signing.prove_since(archive.store, old).decode()
    hashes = [notes.decode64(line) for line in request.partition("\n\n")[0].splitlines()[1:]]
    assert request.startswith("old 200\n") and log.verify_consistency(200, 261, old.root, archive.head.root, hashes)
    with pytest.raises(InputError, match="two histories"):
        signing.prove_since(archive.store, log.Head(200, b"\0" * 32))
    with pytest.raises(InputError, match="no such older head"):
        signing.prove_since(archive.store, log.Head(262, b"\0" * 32))


# ---------------------------------------------------------------- what an attacker does


def _flip(path: Path, at: int = -10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


MUTATIONS: dict[str, tuple[Callable[[Archive], object], set[str]]] = {
    "the signature": (lambda archive: _flip(archive.folder / "checkpoint"), {"checkpoint"}),
    "the signed size": (lambda archive: _flip(archive.folder / "checkpoint", len("example.org/kv\n")), {"checkpoint"}),
    "the signed root": (lambda archive: _flip(archive.folder / "checkpoint", len("example.org/kv\n3\n") + 5), {"checkpoint"}),
    "a tile": (lambda archive: _flip(archive.folder / "tile/0/000.p/3"), {"tile_changed"}),
    "a tile's length": (lambda archive: (archive.folder / "tile/0/000.p/3").write_bytes(b"x"), {"tile_changed"}),
    "a bundle of entries": (lambda archive: _flip(archive.folder / "tile/entries/000.p/3"), {"tile_changed"}),
    "a tile removed": (lambda archive: (archive.folder / "tile/0/000.p/3").unlink(), {"tile_missing"}),
    "a tile too many": (lambda archive: archive.store.publish("tile/0/000.p/4", b"\0" * 128), {"stray_file"}),
    "a tile of a level too high": (lambda archive: archive.store.publish("tile/5/000.p/1", b"\0" * 32), {"stray_file"}),
    "a file of no tile's name": (lambda archive: (archive.folder / "tile/0/readme").write_bytes(b"x"), {"stray_file"}),
    "an unknown signer": (
        lambda archive: archive.store.publish("checkpoint", notes.signed_head(archive.head, Signer.new("evil.example")).encode()),
        {"checkpoint", "policy"},
    ),
    "the right name with the wrong key": (
        lambda archive: archive.store.publish("checkpoint", notes.signed_head(archive.head, Signer.new("example.org/kv")).encode()),
        {"checkpoint", "policy"},
    ),
    "a head of another history, signed with the stolen key": (
        lambda archive: archive.store.publish("checkpoint", notes.signed_head(log.Head(3, b"\7" * 32), KEY).encode()),
        {"split_view"},
    ),
    "a longer log, signed and rolled back": (
        lambda archive: archive.store.publish("checkpoint", notes.signed_head(log.Head(9, b"\7" * 32), KEY).encode()),
        {"rollback"},
    ),
    "no note at all": (lambda archive: archive.store.publish("checkpoint", b"nothing"), {"checkpoint"}),
    "the signed head removed": (lambda archive: (archive.folder / "checkpoint").unlink(), {"policy"}),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_every_change_of_the_signed_log_is_found(make_archive: Callable[..., Archive], what: str) -> None:
    archive = make_archive()
    archive.append(change(KEY))
    append_derived_run(archive, 1)
    archive.sign(KEY)
    mutate, expected = MUTATIONS[what]
    mutate(archive)
    assert set(kinds(archive, TRUST)) >= expected
    assert set(kinds(archive, TRUST)) <= expected | {"policy"}


def test_the_newest_entries_removed_with_head_and_rows_are_a_rollback(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    archive.append(change(KEY))
    archive.append(factories.spec())
    shutil.copytree(archive.folder, archive.folder.with_name("earlier"))
    archive.append(factories.spec(title="another"))
    archive.sign(KEY)
    earlier = archive.folder.with_name("earlier")
    for name in archive.store.published():
        (earlier / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(archive.folder / name, earlier / name)
    found = {finding.kind for finding in verify(earlier).findings}
    assert "rollback" in found
    with Archive.open(earlier, write=True) as opened, pytest.raises(InputError, match="two histories"):
        opened.sign(KEY)


def test_another_history_is_never_signed_over_the_old_one(make_archive: Callable[..., Archive]) -> None:
    one, two = make_archive("one"), make_archive("two")
    for archive, title in ((one, "one"), (two, "two")):
        archive.append(change(KEY))
        archive.append(factories.spec(title=title))
    one.sign(KEY)
    two.store.publish("checkpoint", one.store.read_published("checkpoint"))
    with pytest.raises(InputError, match="two histories"):
        two.sign(KEY)
    assert "split_view" in kinds(two)


def test_an_archive_opened_for_reading_signs_nothing(signed: Archive) -> None:
    url = None if signed.database.own else signed.database.url.render_as_string(hide_password=False)
    with Archive.open(signed.folder, url) as reader, pytest.raises(ArchiveError, match="reading only"):
        reader.sign(KEY)


# ---------------------------------------------------------------- as a user does it


def test_the_whole_journey_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LEDGER_ARCHIVE", "LEDGER_DATABASE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(cli.app, list(arguments))
        assert done.exit_code == status, done.output
        return done.stdout

    run("init", "evidence")
    assert "unsigned" in run("verify")
    run("prove", "abcd", status=2)
    vkey = run("key", "new", "example.org/mine", "-o", "secret").strip()
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    run("key", "new", "example.org/mine", "-o", "secret", status=2)
    run("sign", "--key", "secret", status=2)
    run("key", "add", vkey, "--author", "me", "--reason", "the first key")
    with Archive.open(tmp_path / "evidence", write=True) as archive:
        entry = append_derived_run(archive, 1)
    text = run("sign", "--key", "secret")
    assert text.startswith("example.org/mine\n3\n")
    (tmp_path / "head").write_text(text)
    (tmp_path / "policy").write_text(f"log {vkey}\nquorum none\n")
    assert "by the archive's own word" in run("verify")
    assert "under your policy" in run("verify", "--policy", "policy")
    run("prove", entry.record[:12], "-o", "run.tlog-proof")
    assert "ok: the entry stands" in run("verify", "--proof", "run.tlog-proof", "--policy", "policy")
    run("verify", "--proof", "run.tlog-proof", status=2)
    assert Proof.parse((tmp_path / "run.tlog-proof").read_bytes()).index == 2
    run("prove", "--since", "head", status=0)
    run("prove", entry.record, "--since", "head", status=2)
    witness = run("key", "new", "w.example", "--witness", "-o", "witness").strip()
    strict = f"log {vkey}\nwitness W {witness}\nquorum W\n"
    (tmp_path / "strict").write_text(strict)
    assert "quorum W is not reached" in run("verify", "--policy", "strict", status=1)
    signer = Signer.parse((tmp_path / "witness").read_text().strip())
    (tmp_path / "line").write_text(str(signer.sign(Note.parse(text.encode()).text, 1_700_000_000)))
    run("sign", "--key", "secret", "--cosignature", "line")
    assert "under your policy" in run("verify", "--policy", "strict")
    assert json.loads(run("keys", "--json"))[0]["key"] == vkey
    run("key", "revoke", vkey, "--author", "me", "--reason", "leaked")
    run("sign", "--key", "secret", status=2)
    assert vkey in run("keys")
    assert "ok" in run("verify", "--policy", "strict")
