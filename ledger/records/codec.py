"""Records and their bytes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ledger import digest
from ledger.errors import InputError
from ledger.records.base import LONGEST_TEXT, Record
from ledger.records.run import Run

R = TypeVar("R", bound=Record)

_ABSENT = {
    "kv-ledger/spec/1": ("device", "performance", "production", "capture", "memory", "task", "ids"),
    "kv-ledger/spec/2": ("capture", "memory", "task", "ids"),
    "kv-ledger/run/1": ("kernels",),
    "kv-ledger/retract/1": ("record",),
    "kv-ledger/retract/2": ("run",),
}
"""Fields that a format does not know, so that its records keep their bytes; each record refuses to hold anything in them."""


def plain(record: Record) -> dict[str, Any]:
    """The record as dicts, lists, strings and numbers; NaN and infinities as Python floats."""
    value: dict[str, Any] = msgspec.to_builtins(record)
    for name in _ABSENT.get(value.get("format", ""), ()):
        del value[name]
    return value


def encode(record: Record) -> bytes:
    """Canonical bytes of a record."""
    return digest.canonical(plain(record))


def identify(record: Record) -> str:
    """SHA-256 (hex) of a record's canonical bytes: its id."""
    return digest.sha256(encode(record))


def _bound(value: Any, kind: type[Record], what: str) -> None:
    """Refuse a number or a text, at whatever depth and under whatever type, that is beyond what a record may hold."""
    bits = 1000 if kind is Run else 64  # a run's measurements add facts up; a double holds the sum
    waiting = [("$", value)]
    while waiting:
        path, item = waiting.pop()
        expected = ""
        if isinstance(item, str) and len(item) > LONGEST_TEXT:
            expected, found = f"at most {LONGEST_TEXT} characters", f"{len(item)} characters"
        elif isinstance(item, int) and item.bit_length() > bits:
            expected, found = f"an integer of at most {bits} bits", f"one of {item.bit_length()} bits"
        elif isinstance(item, dict):
            waiting += [(f"the keys of {path}", key) for key in item]
            waiting += [(f"{path}.{str(key)[:100]}", inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)):
            waiting += [(f"{path}[{at}]", inner) for at, inner in enumerate(item)]
        if expected:
            raise InputError(
                f"{what} is not a valid {kind.__name__}.",
                expected=expected,
                found=f"{found} - at `{path[:400]}`",
                next=f"correct the field that is named, or regenerate {what}.",
            )


def convert(kind: type[R], value: Any, what: str) -> R:
    """A record from plain values. ``what`` names the source in the error. Raises InputError."""
    _bound(value, kind, what)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{what} is not a valid {kind.__name__}.",
            expected=f"the fields of ledger.records.{kind.__name__}, no others",
            found=str(error),
            next=f"correct the field that is named, or regenerate {what}.",
        ) from error


def decode(kind: type[R], data: bytes, what: str) -> R:
    """A record from its bytes, which must be canonical. Raises InputError."""
    try:
        value = digest.parse(data)
    except InputError as error:
        again = error.next or f"regenerate {what}, or restore it from a copy."
        raise InputError(f"{what} cannot be read: {error.what}", expected=error.expected, found=error.found, next=again) from error
    record = convert(kind, value, what)
    if encode(record) != data:
        raise InputError(f"{what} is not in canonical form (RFC 8785).", next=f"regenerate {what}; do not edit it.")
    return record
