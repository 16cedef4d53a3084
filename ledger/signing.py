"""Signing the log's head, laying its tiles beside the objects, and proofs from them.

Which keys may sign is said by entries of the log itself: a key counts for a head that covers the entry which adds it, until a head
covers the one which revokes it. That binds the archive to its own word; whom to trust is for the reader's policy to say.

A head is signed when its owner says so, not at each append: the key need not be where writers are. Until then the archive is
complete, and says that its newest entries are unsigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ledger import notes, tiles
from ledger.errors import ArchiveError, InputError
from ledger.log import Head, consistency_by, inclusion_by, leaf_hash, root
from ledger.notes import Checkpoint, Key, Note, Proof, Signature, Signer
from ledger.records import KeyChange
from ledger.store import FolderStore

Changes = Sequence[tuple[int, KeyChange]]
"""Entries of kind ``key`` with their numbers, in the order of the log."""


def standing(changes: Changes, size: int) -> list[Key]:
    """The keys that count for a head of ``size`` entries."""
    found: dict[str, Key] = {}
    for sequence, change in changes:
        if sequence < size:
            if change.action == "add":
                found[change.key] = Key.parse(change.key)
            else:
                found.pop(change.key, None)
    return list(found.values())


def change_fault(changes: Changes, change: KeyChange) -> str:
    """Why a change of keys may not follow on ``changes``, or an empty string. Raises InputError where it holds no key."""
    key = Key.parse(change.key)
    before = [other.action for _, other in changes if other.key == change.key]
    if change.action == "add" and before:
        return f"the key {key.name} ({key.id.hex()}) was added before" + (" and revoked; make a new one" if before[-1] == "revoke" else "")
    if change.action == "revoke" and before[-1:] != ["add"]:
        return f"the key {key.name} ({key.id.hex()}) does not sign here"
    return ""


# ---------------------------------------------------------------- signing


def sign(store: FolderStore, leaves: Sequence[bytes], changes: Changes, signer: Signer, cosignatures: Sequence[Signature] = ()) -> Note:
    """Sign the log's head and lay its tiles; the signed head. Called under the store's lock.

    ``leaves`` are the leaf hashes of all entries. Raises InputError where the key may not sign or a head that was signed before is
    no prefix of this log, ArchiveError where it cannot be written.
    """
    head = store.read_head()
    if Head.over(leaves) != head:
        raise ArchiveError("The log's entries do not agree with its head.", next="run `ledger verify`, which names the entry.")
    if signer.key not in standing(changes, head.size):
        raise InputError(
            f"The key {signer.key.name} ({signer.key.id.hex()}) does not sign heads of this log.",
            expected=", ".join(f"{key.name} ({key.id.hex()})" for key in standing(changes, head.size)) or "a key that an entry adds",
            next="add it first: `ledger key add`.",
        )
    _refuse_another_history(store, leaves)
    note = notes.signed_head(head, signer, cosignatures)
    for name, data in _laid(store, leaves):
        store.publish(name, data)
    store.publish(tiles.CHECKPOINT, note.encode())
    for name in list(_outgrown(store.published(), head.size)):
        store.unpublish(name)
    return note


def _refuse_another_history(store: FolderStore, leaves: Sequence[bytes]) -> None:
    """The head signed last must be an earlier state of this log. Raises InputError."""
    if not store.has_published(tiles.CHECKPOINT):
        return
    last = Checkpoint.parse(Note.parse(store.read_published(tiles.CHECKPOINT)).text).head
    if last.size > len(leaves) or root(leaves[: last.size]) != last.root:
        raise InputError(
            "The head that was signed last is no earlier state of this log: signing would show two histories.",
            expected=f"a log that begins with {last.size} entries of root {last.root.hex()}",
            found=f"{len(leaves)} entries",
            next="find out which of the two is right with `ledger verify`, before anything is signed.",
        )


def _laid(store: FolderStore, leaves: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """The tiles that are missing or not as they should be."""
    wanted = {name for kind, name, _ in tile_faults(store, leaves, len(leaves)) if kind != "stray_file"}
    yield from ((name, data) for name, data in tiles.lay(leaves) if name in wanted)
    for index, width in bundles(len(leaves)):
        name, first = tiles.path(tiles.ENTRIES, index, width), index * tiles.WIDTH
        if name in wanted:
            entries = [store.read_entry(sequence) for sequence in range(first, first + width)]
            for at, entry in enumerate(entries, start=first):
                if leaf_hash(entry) != leaves[at]:
                    raise ArchiveError(f"Entry {at} of the log is not what the head covers.", next="run `ledger verify`.")
            yield name, tiles.bundle(entries)


def bundles(size: int) -> Iterator[tuple[int, int]]:
    """Index and width of every bundle of entries of a log of ``size`` entries: those of the tiles of level 0."""
    return ((index, width) for level, index, width in tiles.layout(size) if level == 0)


def _outgrown(names: Iterable[str], size: int) -> Iterator[str]:
    """Partial tiles whose full tile is there: nobody needs them any more."""
    for name in names:
        found = tiles.place(name)
        if found is not None and found[2] < tiles.WIDTH:
            level = 0 if found[0] == tiles.ENTRIES else int(found[0])
            if (found[1] + 1) * tiles.WIDTH <= size >> (8 * level):
                yield name


# ---------------------------------------------------------------- proofs


def prove(store: FolderStore, sequence: int) -> Proof:
    """The proof that entry ``sequence`` stands under the signed head, from the tiles. Raises InputError, ArchiveError."""
    note, found = signed(store)
    if sequence >= found.head.size:
        raise InputError(
            f"Entry {sequence} is not under the signed head yet.",
            found=f"a head of {found.head.size} entries",
            next="sign the head anew: `ledger sign`.",
        )
    log = tiles.Tiles(store.read_published, found.head.size)
    hashes = inclusion_by(log.root_of, sequence, found.head.size)
    proof = Proof(store.read_entry(sequence), sequence, tuple(hashes), note)
    proof.check()
    return proof


def prove_since(store: FolderStore, older: Head) -> bytes:
    """The proof that the signed head's log begins with ``older``: what c2sp.org/tlog-witness asks of a log. Raises InputError."""
    note, found = signed(store)
    if not 1 <= older.size <= found.head.size:
        raise InputError("There is no such older head.", expected=f"1 to {found.head.size} entries", found=f"{older.size} entries")
    log = tiles.Tiles(store.read_published, found.head.size)
    if log.root_of(0, older.size) != older.root:
        raise InputError(
            "This log does not begin with that head: they are two histories.",
            expected=f"root {older.root.hex()} over {older.size} entries",
            found=log.root_of(0, older.size).hex(),
            next="keep both heads: they show that the log was changed after one of them was seen.",
        )
    hashes = consistency_by(log.root_of, older.size, found.head.size)
    return "".join(f"{line}\n" for line in (f"old {older.size}", *map(notes.encode64, hashes))).encode() + b"\n" + note.encode()


def signed(store: FolderStore) -> tuple[Note, Checkpoint]:
    """The signed head, read and not verified. Raises InputError where there is none."""
    if not store.has_published(tiles.CHECKPOINT):
        raise InputError(
            "The archive is unsigned: no key vouches for its head.", next="sign it: `ledger key new`, `ledger key add`, `ledger sign`."
        )
    note = Note.parse(store.read_published(tiles.CHECKPOINT))
    return note, Checkpoint.parse(note.text)


# ---------------------------------------------------------------- checking


def head_faults(note: Note, changes: Changes, leaves: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """What is wrong with a signed head beside the log with these leaf hashes: kind of the finding, and words."""
    try:
        found = Checkpoint.parse(note.text)
        keys = [key for key in standing(changes, found.head.size) if key.type == notes.LOG]
        signers = note.signed(keys)
    except InputError as error:
        yield "checkpoint", error.message().replace("\n", "; ")
        return
    if not any(key.name == found.origin for key in signers):
        by = ", ".join(f"{line.name} ({line.id.hex()})" for line in note.signatures)
        yield "checkpoint", f"no key that signs for {found.origin} at {found.head.size} entries has signed it, only {by[:300]}"
    if found.head.size > len(leaves):
        yield "rollback", f"a head of {found.head.size} entries was signed, and the log has {len(leaves)}"
    elif root(leaves[: found.head.size]) != found.head.root:
        yield "split_view", f"the signed head and the log differ within their first {found.head.size} entries: two histories"


def tile_faults(store: FolderStore, leaves: Sequence[bytes], size: int) -> Iterator[tuple[str, str, str]]:
    """What is wrong with the tiles: kind of the finding, path and words. ``size`` is that of the signed head, 0 without one."""
    levels = tiles.levels(leaves)
    there = {name for name in store.published() if name != tiles.CHECKPOINT}
    wanted = {tiles.path(*tile) for tile in tiles.layout(size)}
    wanted |= {tiles.path(tiles.ENTRIES, index, width) for index, width in bundles(size)}
    for name in sorted(wanted - there):
        yield "tile_missing", name, f"the signed head of {size} entries needs it"
    for name in sorted(there):
        level, index, width = tiles.place(name) or (0, 0, 0)
        entries = level == tiles.ENTRIES
        hashes: Sequence[bytes] = levels[at] if (at := 0 if entries else int(level)) < len(levels) else ()
        mine = list(hashes[index * tiles.WIDTH : index * tiles.WIDTH + width])
        if len(mine) < width:
            yield "stray_file", name, "the log has no such tile"
            continue
        try:
            data = store.read_published(name)
            held = (
                [leaf_hash(entry) for entry in tiles.unbundle(data)] if entries else [data[at : at + 32] for at in range(0, len(data), 32)]
            )
        except (InputError, ArchiveError) as error:
            yield "tile_changed", name, error.message().replace("\n", "; ")
            continue
        if held != mine:
            yield "tile_changed", name, "its hashes are not those of the log"
