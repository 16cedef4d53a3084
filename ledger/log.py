"""The append-only log: a Merkle tree hash over its entries, proofs, and the head.

Hashes and proofs are those of RFC 9162 section 2.1 (the same as RFC 6962 section 2.1)
with SHA-256:

    leaf hash   SHA-256(0x00 || entry bytes)
    node hash   SHA-256(0x01 || left || right)
    empty tree  SHA-256("")

The head is the exact text of a tlog-checkpoint body (https://c2sp.org/tlog-checkpoint):

    kv-evidence-ledger\\n
    <number of entries, decimal, no leading zero>\\n
    <root hash, 32 bytes in standard base64 with padding>\\n

and nothing before, between or after. Pure: no I/O.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ledger.errors import InputError

ORIGIN = "kv-evidence-ledger"
HASH_BYTES = 32
_HEAD = re.compile(rb"\Akv-evidence-ledger\n(0|[1-9][0-9]{0,17})\n([A-Za-z0-9+/]{43}=)\n\Z")


def leaf_hash(data: bytes) -> bytes:
    """Hash of a leaf; ``data`` is the canonical bytes of an entry. 32 bytes."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node. 32 bytes."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def _split(size: int) -> int:
    """The largest power of two below ``size`` (which is at least 2)."""
    return 1 << (size - 1).bit_length() - 1


def root(leaf_hashes: Sequence[bytes]) -> bytes:
    """Merkle tree hash (RFC 9162 section 2.1.1) over leaf hashes, in the order of the log. 32 bytes."""
    if not leaf_hashes:
        return hashlib.sha256(b"").digest()
    level = list(leaf_hashes)
    while len(level) > 1:  # pairing from the left gives the split at powers of two; an odd last node moves up unhashed
        paired = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(level) & ~1 :]
    return level[0]


RootOf = Callable[[int, int], bytes]
"""Merkle tree hash over the leaves from one index up to, and without, another."""


def _of_list(leaf_hashes: Sequence[bytes]) -> RootOf:
    return lambda first, end: root(leaf_hashes[first:end])


def inclusion_proof(leaf_hashes: Sequence[bytes], index: int) -> list[bytes]:
    """Proof that leaf ``index`` is in the tree over ``leaf_hashes`` (RFC 9162 section 2.1.3.1). Raises InputError."""
    return inclusion_by(_of_list(leaf_hashes), index, len(leaf_hashes))


def inclusion_by(root_of: RootOf, index: int, size: int) -> list[bytes]:
    """:func:`inclusion_proof` in a tree of ``size`` leaves that is known by the hashes of its parts. Raises InputError."""
    if not 0 <= index < size:
        raise InputError("There is no such entry in the log.", expected=f"an index from 0 to {size - 1}", found=str(index))
    found: list[bytes] = []
    first, end = 0, size
    while end - first > 1:
        middle = first + _split(end - first)
        if index < middle:
            found.append(root_of(middle, end))
            end = middle
        else:
            found.append(root_of(first, middle))
            first = middle
    return found[::-1]


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], expected: bytes) -> bool:
    """Whether ``proof`` shows ``leaf`` (a leaf hash) at ``index`` of the tree of ``size`` leaves with root ``expected``.

    RFC 9162 section 2.1.3.2.
    """
    if not 0 <= index < size or any(len(item) != HASH_BYTES for item in (leaf, expected, *proof)):
        return False
    fn, sn, found = index, size - 1, leaf
    for item in proof:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            found = node_hash(item, found)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            found = node_hash(found, item)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and found == expected


def consistency_proof(leaf_hashes: Sequence[bytes], size: int) -> list[bytes]:
    """Proof that the tree over the first ``size`` leaves is a prefix of the whole (RFC 9162 section 2.1.4.1).

    Raises InputError unless ``1 <= size <= len(leaf_hashes)``.
    """
    return consistency_by(_of_list(leaf_hashes), size, len(leaf_hashes))


def consistency_by(root_of: RootOf, older: int, size: int) -> list[bytes]:
    """:func:`consistency_proof` in a tree of ``size`` leaves that is known by the hashes of its parts. Raises InputError."""
    if not 1 <= older <= size:
        raise InputError("There is no such older log.", expected=f"a size from 1 to {size}", found=str(older))
    found: list[bytes] = []
    first, end, complete = 0, size, True
    while older < end:
        middle = first + _split(end - first)
        if older <= middle:
            found.append(root_of(middle, end))
            end = middle
        else:
            found.append(root_of(first, middle))
            first, complete = middle, False
    return [*([] if complete else [root_of(first, end)]), *found[::-1]]


def verify_consistency(size1: int, size2: int, root1: bytes, root2: bytes, proof: Sequence[bytes]) -> bool:
    """Whether ``proof`` shows that the tree (``size1``, ``root1``) is a prefix of (``size2``, ``root2``).

    RFC 9162 section 2.1.4.2. An empty older tree proves nothing and is refused.
    """
    if not 1 <= size1 <= size2:
        return False
    if size1 == size2:
        return not proof and root1 == root2
    if any(len(item) != HASH_BYTES for item in (root1, root2, *proof)):
        return False
    path = list(proof)
    if size1 & (size1 - 1) == 0:  # a complete older tree is itself the first node, and is left out of the proof
        path.insert(0, root1)
    if not path:
        return False
    fn, sn = size1 - 1, size2 - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    old = new = path[0]
    for item in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            old, new = node_hash(item, old), node_hash(item, new)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            new = node_hash(new, item)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and old == root1 and new == root2


@dataclass(frozen=True)
class Head:
    """The head of the log: how many entries, and the root hash over them (32 bytes)."""

    size: int
    root: bytes

    @classmethod
    def over(cls, leaf_hashes: Sequence[bytes]) -> Head:
        """The head of the log with these leaf hashes."""
        return cls(len(leaf_hashes), root(leaf_hashes))

    def encode(self) -> bytes:
        """The head's exact bytes."""
        return f"{ORIGIN}\n{self.size}\n{base64.b64encode(self.root).decode()}\n".encode()

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """The head in ``data``; any other byte is refused. Raises InputError."""
        match = _HEAD.match(data)
        if match is not None:
            try:
                head = cls(int(match[1]), base64.b64decode(match[2], validate=True))
            except binascii.Error:
                pass
            else:
                if head.encode() == data:  # base64 has several spellings of one value; one of them is the head
                    return head
        raise InputError(
            "The head of the log is not readable.",
            expected=f'"{ORIGIN}", the number of entries and the root hash in base64, each on a line of its own',
            found=repr(data[:120]),
            next=(
                "a checkout has changed its line endings: put `* -text` into .gitattributes and check the archive out again."
                if b"\r\n" in data
                else "restore log/head from a copy, then run `ledger verify`."
            ),
        )
