"""The log as tiles: the layout of the specification, the tiles of an implementation that is not ours, and proofs from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import log, tiles
from ledger.errors import InputError

KNOWN = json.loads((Path(__file__).parent.parent / "vectors" / "tlog.json").read_text())["logs"]


def entries(size: int) -> list[bytes]:
    return [f"entry {at}".encode() for at in range(size)]


def laid(size: int) -> dict[str, bytes]:
    """All tiles and bundles of a log of ``size`` entries."""
    found = entries(size)
    made = dict(tiles.lay([log.leaf_hash(entry) for entry in found]))
    for at in range(0, size, tiles.WIDTH):
        part = found[at : at + tiles.WIDTH]
        made[tiles.path(tiles.ENTRIES, at // tiles.WIDTH, len(part))] = tiles.bundle(part)
    return made


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: str(known["size"]))
def test_tiles_and_proofs_are_those_of_another_implementation(known: dict[str, dict[str, object]]) -> None:
    size = int(str(known["size"]))
    made = laid(size)
    whole = hashlib.sha256(b"".join(name.encode() + b"\n" + hashlib.sha256(made[name]).digest() for name in sorted(made))).hexdigest()
    assert {"count": len(made), "sha256": whole} == known["tiles"]
    tree = tiles.Tiles(made.__getitem__, size)
    for index, proof in known["inclusion"].items():
        assert [item.hex() for item in log.inclusion_by(tree.root_of, int(index), size)] == proof
    for older, proof in known["consistency"].items():
        assert [item.hex() for item in log.consistency_by(tree.root_of, int(older), size)] == proof


def test_the_specification_s_examples() -> None:
    assert tiles.path(0, 1234067) == "tile/0/x001/x234/067"
    assert tiles.path(1, 0, 1) == "tile/1/000.p/1"
    found = [(level, index, width) for level, index, width in tiles.layout(70_000)]
    assert len([tile for tile in found if tile[0] == 0 and tile[2] == 256]) == 273
    assert found[273:] == [(0, 273, 112), (1, 0, 256), (1, 1, 17), (2, 0, 1)]
    assert list(tiles.layout(256)) == [(0, 0, 256), (1, 0, 1)]
    assert list(tiles.layout(0)) == []


@given(st.sampled_from([*range(64), tiles.ENTRIES]), st.integers(0, 10**12), st.integers(1, 256))
def test_a_path_is_read_as_it_was_written(level: int | str, index: int, width: int) -> None:
    assert tiles.place(tiles.path(level, index, width)) == (level, index, width)


@pytest.mark.parametrize(
    "name",
    [
        "tile/0/000.p/0",
        "tile/0/000.p/256",
        "tile/0/000.p/01",
        "tile/00/000",
        "tile/64/000",
        "tile/0/x000/000",
        "tile/0/0",
        "tile/0/../000",
        "tile/-1/000",
        "tile/0/000/",
        "tile/x/000",
        "xtile/0/000",
        "tile/0/\u0660\u0660\u0660",
    ],
)
def test_another_path_is_none(name: str) -> None:
    assert tiles.place(name) is None


@given(st.integers(0, 1500))
def test_the_layout_is_what_is_laid(size: int) -> None:
    assert [tiles.path(*tile) for tile in tiles.layout(size)] == [name for name, _ in tiles.lay([bytes(32)] * size)]


def test_a_bundle_is_read_as_it_was_made() -> None:
    assert tiles.unbundle(tiles.bundle([b"", b"a", b"b" * 65535])) == [b"", b"a", b"b" * 65535]
    with pytest.raises(InputError, match="too long"):
        tiles.bundle([b"a" * 65536])
    for data in (b"\0", b"\0\2a", tiles.bundle([b"abc"])[:-1]):
        with pytest.raises(InputError, match="in the middle"):
            tiles.unbundle(data)


def test_a_tile_of_another_size_is_refused() -> None:
    made = laid(300)
    tree = tiles.Tiles(lambda name: made[name] + b"x", 300)
    with pytest.raises(InputError, match="another size"):
        tree.root_of(0, 300)
    with pytest.raises(InputError, match="another size"):
        tree.leaf(299)
