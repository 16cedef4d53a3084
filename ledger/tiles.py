"""The log as static tiles (c2sp.org/tlog-tiles), and proofs from them: whoever can fetch files can follow the log.

    checkpoint                    the signed head
    tile/<L>/<N>[.p/<W>]          256 consecutive hashes of level L, or of the last tile the W that there are; those of level 0 are
                                  leaf hashes, one of level L + 1 is the tree hash over a full tile of level L
    tile/entries/<N>[.p/<W>]      the entries of a tile of level 0, each behind its length (16 bits, big endian)

``<N>`` is written in groups of three digits, all but the last behind an ``x``: tile 1234067 is ``x001/x234/067``.
Pure: what is fetched comes through a function that is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from ledger.errors import InputError
from ledger.log import HASH_BYTES, node_hash, root

WIDTH = 256
"""Hashes of a full tile."""
CHECKPOINT = "checkpoint"
ENTRIES = "entries"
"""In place of a level: the entries themselves."""
_HEIGHT = 8
_PATH = re.compile(r"\Atile/(entries|0|[1-9]|[1-5][0-9]|6[0-3])/((?:x[0-9]{3}/)*[0-9]{3})(?:\.p/([1-9][0-9]{0,2}))?\Z", re.ASCII)


def path(level: int | str, index: int, width: int = WIDTH) -> str:
    """Where a tile, or with ENTRIES as level a bundle of entries, stands below the log's address."""
    digits = f"{index:03}"
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    place = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
    return f"tile/{level}/{place}" + (f".p/{width}" if width < WIDTH else "")


def place(name: str) -> tuple[int | str, int, int] | None:
    """Level, index and width of a tile's path, or None where that is no such path."""
    match = _PATH.match(name)
    if match is None:
        return None
    index, width = int(match[2].replace("x", "").replace("/", "")), int(match[3] or WIDTH)
    level: int | str = match[1] if match[1] == ENTRIES else int(match[1])
    return (level, index, width) if path(level, index, width) == name else None


def layout(size: int) -> Iterator[tuple[int, int, int]]:
    """Level, index and width of every tile of a log of ``size`` entries."""
    level = 0
    while size:
        yield from ((level, index, min(WIDTH, size - index * WIDTH)) for index in range(-(-size // WIDTH)))
        level, size = level + 1, size // WIDTH


def levels(leaves: Sequence[bytes]) -> list[Sequence[bytes]]:
    """The hashes of every level of tiles over ``leaves`` (leaf hashes), those of level 0 first; none where there are no leaves."""
    found: list[Sequence[bytes]] = []
    hashes = leaves
    while hashes:
        found.append(hashes)
        hashes = [root(hashes[at : at + WIDTH]) for at in range(0, len(hashes) - WIDTH + 1, WIDTH)]
    return found


def lay(leaves: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of every tile over ``leaves`` (leaf hashes)."""
    above = levels(leaves)
    for level, index, width in layout(len(leaves)):
        yield path(level, index, width), b"".join(above[level][index * WIDTH : index * WIDTH + width])


def bundle(entries: Sequence[bytes]) -> bytes:
    """Entries as the bytes of a bundle. Raises InputError where one is longer than 65,535 bytes."""
    for entry in entries:
        if len(entry) > 0xFFFF:
            raise InputError("An entry is too long for a bundle.", expected="at most 65535 bytes", found=f"{len(entry)}")
    return b"".join(len(entry).to_bytes(2, "big") + entry for entry in entries)


def unbundle(data: bytes) -> list[bytes]:
    """The entries of a bundle. Raises InputError."""
    found, at = [], 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        if at + 2 > len(data) or end > len(data):
            raise InputError("A bundle of entries ends in the middle of one.", found=f"{len(data)} bytes")
        found.append(data[at + 2 : end])
        at = end
    return found


class Tiles:
    """A log of ``size`` entries, known by its tiles; ``fetch`` gives a tile's bytes by its path.

    Nothing is proved by a tile alone: what is computed from them must be checked against a head that is trusted.
    """

    def __init__(self, fetch: Callable[[str], bytes], size: int) -> None:
        self.size = size
        self._fetch = fetch
        self._tile = lru_cache(maxsize=256)(self._read)

    def _read(self, level: int, index: int) -> tuple[bytes, ...]:
        there = self.size >> (_HEIGHT * level)
        width = min(WIDTH, there - index * WIDTH)
        name = path(level, index, width)
        data = self._fetch(name)
        if len(data) != width * HASH_BYTES:
            raise InputError(f"A tile of the log has another size: {name}", expected=f"{width * HASH_BYTES} bytes", found=f"{len(data)}")
        return tuple(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))

    def leaf(self, index: int) -> bytes:
        """The leaf hash of an entry. Raises InputError."""
        return self._tile(0, index // WIDTH)[index % WIDTH]

    def root_of(self, first: int, end: int) -> bytes:
        """Tree hash over the entries from ``first`` up to ``end``, a part of the tree as RFC 9162 splits it. Raises InputError."""
        count = end - first
        if count & (count - 1) == 0 and first % count == 0:  # complete: within one tile of the level that it is high enough for
            high = count.bit_length() - 1
            level = high // _HEIGHT
            across = count >> (_HEIGHT * level)
            at = first >> (_HEIGHT * level)
            return root(self._tile(level, at // WIDTH)[at % WIDTH : at % WIDTH + across])
        middle = first + (1 << (count - 1).bit_length() - 1)
        return node_hash(self.root_of(first, middle), self.root_of(middle, end))
