"""The Merkle log. Vectors: the transparency-dev/merkle test data, and trees that RFC 6962's own examples fix."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import log
from ledger.errors import InputError

KNOWN = json.loads((Path(__file__).parent.parent / "vectors" / "merkle-roots.json").read_text())
LEAVES = [log.leaf_hash(bytes.fromhex(leaf)) for leaf in KNOWN["leaves"]]


def _vectors() -> list[dict[str, object]]:
    path = Path(os.environ.get("LEDGER_DATA", "missing")) / "vectors" / "rfc6962-proofs.jsonl"
    if not path.is_file():
        if os.environ.get("CI"):
            pytest.fail(f"the vectors are missing: {path}")
        pytest.skip("set LEDGER_DATA to the folder that holds vectors/rfc6962-proofs.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_published_proofs_are_judged_as_published() -> None:
    vectors = _vectors()
    assert len(vectors) == 196
    for vector in vectors:
        field = {key: base64.b64decode(value or "") for key, value in vector.items() if key.startswith(("root", "leafHash"))}
        proof = [base64.b64decode(item) for item in vector["proof"] or []]
        if vector["kind"] == "inclusion":
            found = log.verify_inclusion(field["leafHash"], vector["leafIdx"], vector["treeSize"], proof, field["root"])
        else:
            found = log.verify_consistency(vector["size1"], vector["size2"], field["root1"], field["root2"], proof)
        assert found is not vector["wantErr"], vector["name"]


def test_the_empty_tree_has_the_hash_of_nothing() -> None:
    assert log.root([]) == hashlib.sha256(b"").digest()


@pytest.mark.parametrize("size", range(1, 9))
def test_roots_are_the_published_ones(size: int) -> None:
    assert log.root(LEAVES[:size]).hex() == KNOWN["roots"][size - 1]


@pytest.mark.parametrize("size", range(1, 18))
def test_every_leaf_of_every_small_tree_is_proved(size: int) -> None:
    leaves = [log.leaf_hash(bytes([index])) for index in range(size)]
    for index, leaf in enumerate(leaves):
        proof = log.inclusion_proof(leaves, index)
        assert log.verify_inclusion(leaf, index, size, proof, log.root(leaves))
        assert not log.verify_inclusion(leaf, index, size, proof, log.root(leaves[1:]))


@pytest.mark.parametrize("size", range(1, 18))
def test_every_small_tree_is_consistent_with_its_prefixes(size: int) -> None:
    leaves = [log.leaf_hash(bytes([index])) for index in range(size)]
    for older in range(1, size + 1):
        proof = log.consistency_proof(leaves, older)
        assert log.verify_consistency(older, size, log.root(leaves[:older]), log.root(leaves), proof)
        other = [log.leaf_hash(b"other"), *leaves[1:]]
        assert not log.verify_consistency(older, size, log.root(other[:older]), log.root(leaves), proof)


def test_proofs_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(InputError, match="no such entry"):
        log.inclusion_proof(LEAVES, 8)
    with pytest.raises(InputError, match="no such older log"):
        log.consistency_proof(LEAVES, 0)


@given(st.integers(0, 10**18 - 1), st.binary(min_size=32, max_size=32))
def test_a_head_reads_back_from_its_bytes(size: int, root: bytes) -> None:
    head = log.Head(size, root)
    assert log.Head.parse(head.encode()) == head


GOOD = log.Head(7, hashlib.sha256(b"").digest()).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\n",
        GOOD + b"x",
        b"\n" + GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.replace(b"\n7\n", b"\n07\n"),
        GOOD.replace(b"\n7\n", b"\n-7\n"),
        GOOD.replace(b"\n7\n", b"\n+7\n"),
        GOOD.replace(b"\n7\n", b"\n 7\n"),
        GOOD.replace(b"\n7\n", b"\n\n"),
        GOOD.replace(b"\n7\n", b"\n7.0\n"),
        GOOD.replace(b"\n7\n", "\n\u0667\n".encode()),
        GOOD.replace(b"\n7\n", b"\n" + b"9" * 5000 + b"\n"),
        GOOD.replace(b"kv-evidence-ledger", b"another-ledger"),
        GOOD.replace(b"=\n", b"\n"),
        GOOD[:-3] + b"V=\n",  # another spelling of the same 32 bytes
        GOOD[:-5] + b"=\n",
        b"\xff" * 80,
    ],
)
def test_any_other_head_is_refused(data: bytes) -> None:
    assert data != GOOD
    with pytest.raises(InputError, match="head of the log is not readable"):
        log.Head.parse(data)
