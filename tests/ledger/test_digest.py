"""Canonical JSON, and bad JSON as tables. The RFC 8785 examples are from its sections 3.2.2 and 3.2.3 and appendix B."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import digest
from ledger.errors import InputError

_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT.filter(lambda key: key != "number"), inner),
    max_leaves=20,
)


@given(_JSON)
def test_what_is_written_reads_back_and_is_written_alike(value: Any) -> None:
    data = digest.canonical(value)
    assert digest.canonical(digest.parse(data)) == data


def test_keys_are_sorted_as_the_standard_says() -> None:
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\u00f6": 7}
    assert list(digest.parse(digest.canonical(value))) == ["\r", "1", "\x80", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("41b3de4355555553", "333333333.3333332"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_doubles_are_written_as_the_standard_says(bits: str, text: str) -> None:
    assert digest.canonical(struct.unpack(">d", bytes.fromhex(bits))[0]).decode() == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, '{"number":"NaN"}'),
        (math.inf, '{"number":"Infinity"}'),
        (-math.inf, '{"number":"-Infinity"}'),
        (-0.0, '{"number":"-0.0"}'),
        (2**53, '{"number":"9007199254740992"}'),
        (-(2**60), '{"number":"-1152921504606846976"}'),
        (2**53 - 1, "9007199254740991"),
    ],
)
def test_numbers_that_json_cannot_hold_are_tagged_and_come_back(value: float | int, text: str) -> None:
    assert digest.canonical([value]).decode() == f"[{text}]"
    (found,) = digest.parse(f"[{text}]".encode())
    assert type(found) is type(value)
    assert struct.pack(">d", found) == struct.pack(">d", value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"\xef\xbb\xbf{}",
        b"\xff\xfe",
        b'"\xc3"',
        b"{",
        b"{}{}",
        b"INFO start\n{}",
        b"NaN",
        b'{"a":Infinity}',
        b"[-Infinity]",
        b"1e999",
        b"-1e999",
        b"9" * 5000,
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b'{"number":1}',
        b'{"number":"nan"}',
        b'{"number":"1"}',
        b'{"number":"0.0"}',
        b'{"number":"+9007199254740993"}',
        b'{"number":"09007199254740993"}',
        b'{"number":"9007199254740991"}',
        b'{"number":"-"}',
        b'{"number":""}',
        b'{"number":null}',
        b'{"number":"' + b"9" * 401 + b'"}',
        '{"number":"\u0669007199254740993"}'.encode(),
        b'"\\ud800"',
        b'{"\\udfff":1}',
        b"'a'",
        b"{a:1}",
        b"[1,]",
        b"// no\n1",
        b"01",
        b"+1",
        b".5",
        b'"\x00"',
        b'"\n"',
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
    ids=lambda data: repr(data[:24]),
)
def test_bad_json_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        digest.parse(data)


def test_a_document_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(InputError, match="too large"):
        digest.parse(b" " * (digest.MAX_JSON_BYTES + 1))


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1: 2}, {"number": 1}, {"a": {"number": "x"}}, "\ud800", {"\udfff": 1}, {1, 2}, object(), 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(InputError):
        digest.canonical(value)


def test_a_file_has_the_digest_and_size_of_its_bytes(tmp_path: Path) -> None:
    for size in (0, 1, 1 << 20, (1 << 20) + 1):
        data = b"x" * size
        (tmp_path / "file").write_bytes(data)
        assert digest.sha256_file(tmp_path / "file") == (digest.sha256(data), size)
    assert digest.sha256(b"") == hashlib.sha256(b"").hexdigest()
    assert digest.digest_of({"b": 1, "a": 2}) == digest.sha256(b'{"a":2,"b":1}')
