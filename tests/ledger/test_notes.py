"""Signed notes, keys, checkpoints and proofs, against the specification's own examples and an implementation that is not ours."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import log, notes
from ledger.errors import InputError
from ledger.notes import LOG, WITNESS, Checkpoint, Key, Note, Proof, Signature, Signer

KNOWN = json.loads((Path(__file__).parent.parent / "vectors" / "tlog.json").read_text())
SIGNER = Signer.new("example.org/kv-ledger", seed=bytes.fromhex(KNOWN["seed"]))
WITNESSES = [Key.parse(text) for text in KNOWN["witnesses"]]
# the example of golang.org/x/mod/sumdb/note
GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_SECRET = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
# the example of c2sp.org/tlog-cosignature; its keys are not published
COSIGNED = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
    "— witness.example.com/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==\n"
)


def test_go_s_example_is_read_verified_and_signed_again() -> None:
    note, key, signer = Note.parse(GO_NOTE.encode()), Key.parse(GO_KEY), Signer.parse(GO_SECRET)
    assert note.signed([key]) == {key: 0}
    assert signer.key == key
    assert signer.encode() == GO_SECRET
    assert Note(note.text, (signer.sign(note.text),)).encode() == GO_NOTE.encode()


def test_the_specification_s_cosigned_checkpoint_is_read() -> None:
    note = Note.parse(COSIGNED.encode())
    found = Checkpoint.parse(note.text)
    assert (found.origin, found.head.size) == ("example.com/behind-the-sofa", 20852163)
    assert found.text() == note.text
    assert note.encode() == COSIGNED.encode()
    assert int.from_bytes(note.signatures[1].data[:8], "big") == 1679315147


@pytest.mark.parametrize("known", KNOWN["logs"], ids=lambda known: str(known["size"]))
def test_another_implementation_s_heads_verify_and_ours_are_the_same_bytes(known: dict[str, object]) -> None:
    note = Note.parse(str(known["note"]).encode())
    assert str(SIGNER.key) == KNOWN["log"]
    assert note.signed([SIGNER.key, *WITNESSES]) == {SIGNER.key: 0, WITNESSES[0]: 1700000000, WITNESSES[1]: 1700000001}
    head = Checkpoint.parse(note.text).head
    seconds = (Signer.new(key.name, WITNESS, bytes([at + 1]) * 32).sign(note.text, 1700000000 + at) for at, key in enumerate(WITNESSES))
    assert notes.signed_head(head, SIGNER, tuple(seconds)).encode() == note.encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no verifier key"),
        ("a+b", "no verifier key"),
        (GO_KEY.replace("c74f20a3", "c74f20a4"), "contradicts its own key ID"),
        (GO_KEY.replace("PeterNeumann", "Peter Neumann"), "no key name"),
        (GO_KEY[:-1], "base64"),
        (GO_KEY + "AAAA", "kind that is not read"),
        ("x+00000000+AgAA", "kind that is not read"),
        ("x+00000000+", "a type and a key"),
    ],
)
def test_what_is_no_verifier_key_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Key.parse(text)


@pytest.mark.parametrize("y", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18, 2**255 - 1, *sorted(notes._SMALL)])
@pytest.mark.parametrize("sign", [0, 1 << 255])
def test_a_key_that_anybody_can_sign_for_is_refused(y: int, sign: int) -> None:
    key = Key("weak.example", LOG, (y | sign).to_bytes(32, "little"))
    with pytest.raises(InputError, match="weak"):
        Key.parse(str(key))


def test_a_signing_key_never_shows_in_an_error_or_in_its_representation() -> None:
    secret = GO_SECRET.rpartition("+")[2]
    for text in (GO_SECRET[:-4], GO_SECRET.replace("c74f20a3", "00000000"), GO_SECRET + "AAAA", "PRIVATE+KEY+" + secret):
        with pytest.raises(InputError, match="no signing key") as caught:
            Signer.parse(text)
        assert secret[:20] not in str(caught.value)
    assert secret not in repr(Signer.parse(GO_SECRET))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no signed note"),
        (b"text\n", "no signed note"),
        (b"text\n\n", "no signed note"),
        (b"\n\n" + GO_NOTE.splitlines()[-1].encode() + b"\n", "no signed note"),
        (GO_NOTE.rstrip("\n").encode(), "no signed note"),
        (GO_NOTE.encode() + b"\n", "no signed note"),
        (GO_NOTE.replace("— ", "- ").encode(), "no signature line"),
        (GO_NOTE.replace("\n", "\r\n").encode(), "control character"),
        (GO_NOTE.replace("A", "\0").encode(), "control character"),
        (b"\xff\n\n" + GO_NOTE.encode(), "no UTF-8"),
        (b"a\n\n" + "— x AAAA\n".encode(), "too short"),
        (b"a\n\n" + "— x AAAAAAB=\n".encode(), "canonical"),
        (b"a\n\n" + "— x AAAAAAA=\n".encode() * 101, "no signed note"),
        (b"a" * (notes.LARGEST_NOTE + 1), "too large"),
    ],
)
def test_what_is_no_note_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Note.parse(data)


def test_a_known_key_s_signature_must_verify_and_an_unknown_one_s_is_ignored() -> None:
    note, key = Note.parse(GO_NOTE.encode()), Key.parse(GO_KEY)
    assert note.signed([]) == {}
    assert note.signed([Key("PeterNeumann", WITNESS, key.public), Key("Another", LOG, key.public)]) == {}
    for changed in (Note(note.text + "x\n", note.signatures), Note(note.text, (Signature(key.name, key.id, b"\0" * 64),))):
        with pytest.raises(InputError, match="does not verify"):
            changed.signed([key])
    with pytest.raises(InputError, match="does not verify"):
        Note(note.text, (Signature(key.name, key.id, note.signatures[0].data + b"\0"),)).signed([key])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\n",
        "a\n1\n",
        "\n1\n" + "A" * 43 + "=\n",
        "a\n01\n" + "A" * 43 + "=\n",
        "a\n1\n" + "A" * 42 + "B=\n",
        "a\n1\n" + "A" * 43 + "=\n\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        Checkpoint.parse(text)


def test_an_extension_line_is_kept_and_signed() -> None:
    text = "a\n1\n" + "A" * 43 + "=\nmore\n"
    assert Checkpoint.parse(text).extensions == ("more",)
    assert Checkpoint.parse(text).text() == text


def test_a_witness_s_key_signs_no_head() -> None:
    with pytest.raises(InputError, match="witness"):
        notes.signed_head(log.Head.over(()), Signer.new("w.example", WITNESS))


def a_proof(size: int = 5, index: int = 3) -> Proof:
    entries = [f"entry {at}".encode() for at in range(size)]
    leaves = [log.leaf_hash(entry) for entry in entries]
    note = notes.signed_head(log.Head.over(leaves), SIGNER)
    return Proof(entries[index], index, tuple(log.inclusion_proof(leaves, index)), note)


@pytest.mark.parametrize(("size", "index"), [(1, 0), (2, 1), (5, 4), (8, 3)])
def test_a_proof_survives_its_text_and_leads_to_its_head(size: int, index: int) -> None:
    proof = a_proof(size, index)
    read = Proof.parse(proof.encode())
    assert read == proof
    assert read.check().head.size == size


@pytest.mark.parametrize(
    "change",
    [
        lambda proof: Proof(proof.entry + b"x", proof.index, proof.hashes, proof.note),
        lambda proof: Proof(proof.entry, proof.index - 1, proof.hashes, proof.note),
        lambda proof: Proof(proof.entry, proof.index, proof.hashes[:-1], proof.note),
        lambda proof: Proof(proof.entry, proof.index, proof.hashes[::-1], proof.note),
        lambda proof: Proof(proof.entry, proof.index, proof.hashes, a_proof(6).note),
    ],
)
def test_a_proof_of_anything_else_is_refused(change: object) -> None:
    with pytest.raises(InputError, match="does not lead"):
        change(a_proof()).check()  # type: ignore[operator]


@pytest.mark.parametrize(
    "old, new", [("tlog-proof@v1", "tlog-proof@v2"), ("index 3", "index 03"), ("index 3\n", ""), ("extra ", "extra"), ("\n\n", "\n")]
)
def test_what_is_no_proof_is_refused(old: str, new: str) -> None:
    with pytest.raises(InputError):
        Proof.parse(a_proof().encode().replace(old.encode(), new.encode(), 1))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (
        Note.parse,
        Proof.parse,
        lambda found: Key.parse(found.decode("latin-1")),
        lambda found: Checkpoint.parse(found.decode("latin-1")),
    ):
        with contextlib.suppress(InputError):
            read(data)


@given(st.data())
def test_a_note_with_one_byte_changed_never_verifies_as_it_was(data: st.DataObject) -> None:
    raw = bytearray(GO_NOTE.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    key = Key.parse(GO_KEY)
    with contextlib.suppress(InputError):
        assert not Note.parse(bytes(raw)).signed([key])
