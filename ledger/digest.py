"""Canonical JSON (RFC 8785) and SHA-256 digests; numbers that JSON cannot hold.

The canonical bytes of a value are its RFC 8785 form, made by :mod:`rfc8785`. Four
kinds of number have no faithful RFC 8785 form, and are written as an object
with the single key ``number``:

    {"number": "NaN"}   {"number": "Infinity"}   {"number": "-Infinity"}
    {"number": "-0.0"}  {"number": "9007199254740993"}   (integers beyond ±(2**53 - 1))

:func:`parse` turns these back. An ordinary object whose only key is ``number``
is refused by :func:`canonical`, so that the two can never be confused.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import rfc8785

from ledger.errors import InputError

_LARGEST = 2**53 - 1
_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "-0.0": -0.0}
_BLOCK = 1 << 20

MAX_JSON_BYTES = 64 << 20
"""Largest JSON document that :func:`parse` accepts, in bytes."""


def jsonable(value: Any) -> Any:
    """``value`` with every number that JSON cannot hold in its tagged form.

    Takes dicts with string keys, lists, tuples, strings, numbers, booleans and None.
    Raises InputError for anything else, and for lone surrogates in a string.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError("A string is not valid Unicode.", found=repr(value[:80])) from error
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value <= _LARGEST else {"number": str(value)}
    if isinstance(value, float):
        if math.isnan(value):
            return {"number": "NaN"}
        if math.isinf(value):
            return {"number": "Infinity" if value > 0 else "-Infinity"}
        if value == 0 and math.copysign(1.0, value) < 0:
            return {"number": "-0.0"}
        return value
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"number"}:
            raise InputError('An object whose only key is "number" is reserved for numbers that JSON cannot hold.')
        for key in value:
            if not isinstance(key, str):
                raise InputError("A JSON key must be a string.", found=repr(key))
        return {jsonable(key): jsonable(item) for key, item in value.items()}
    raise InputError("A value has no JSON form.", found=type(value).__name__)


def canonical(value: Any) -> bytes:
    """The canonical bytes (RFC 8785, UTF-8) of a JSON value."""
    return rfc8785.dumps(jsonable(value))


def _object(pairs: list[tuple[str, Any]]) -> Any:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError("A JSON object names a key twice.", found=repr(twice[:80]))
    if keys == ["number"]:
        return _number(pairs[0][1])
    return dict(pairs)


def _number(text: Any) -> float | int:
    if isinstance(text, str):
        if text in _NAMED:
            return _NAMED[text]
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 400 and digits[0] != "0":
            number = int(text)
            if abs(number) > _LARGEST:
                return number
    raise InputError(
        "A tagged number is not one of the known forms.",
        expected='"NaN", "Infinity", "-Infinity", "-0.0" or an integer beyond 2**53 - 1',
        found=repr(text)[:80],
    )


def _constant(text: str) -> Any:
    raise InputError(
        "JSON holds a bare constant that the JSON standard does not have.",
        expected=f'{{"number": "{text}"}}',
        found=text,
    )


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InputError("JSON holds a number beyond the range of a double.", expected='{"number": "Infinity"}', found=text[:80])
    return number


def _int(text: str) -> int | float:
    # RFC 8785 writes an integral double below 1e21 without a point: beyond 2**53 - 1, where integers are tagged,
    # bare digits are a double.
    number = int(text)
    return number if -_LARGEST <= number <= _LARGEST else _float(text)


def parse(data: bytes) -> Any:
    """Parse JSON bytes strictly: UTF-8, no duplicate keys, no bare NaN or Infinity.

    Tagged numbers come back as Python numbers. Raises InputError.
    """
    if len(data) > MAX_JSON_BYTES:
        raise InputError("A JSON document is too large.", expected=f"at most {MAX_JSON_BYTES} bytes", found=f"{len(data)} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("JSON is not valid UTF-8.", found=f"byte {data[error.start]:#04x} at offset {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except json.JSONDecodeError as error:
        raise InputError(
            "This is not JSON.", expected="one JSON value", found=f"line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise InputError("JSON is nested too deeply.") from error
    except ValueError as error:  # an integer literal of thousands of digits
        raise InputError("JSON holds a number that cannot be read.", found=str(error)[:120]) from error
    if "\\ud" in text.lower():  # an escaped surrogate: alone, it has no UTF-8 form
        jsonable(value)
    return value


def untagged(value: Any) -> Any:
    """A number of a JSON document as a Python number again, where :func:`jsonable` had to tag it."""
    return _number(value["number"]) if isinstance(value, dict) and set(value) == {"number"} else value


def sha256(data: bytes) -> str:
    """Lower-case hex SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a file, read in blocks of 1 MiB."""
    state = hashlib.sha256()
    size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            state.update(block)
            size += len(block)
    return state.hexdigest(), size


def digest_of(value: Any) -> str:
    """SHA-256 (hex) of the canonical bytes of a JSON value."""
    return sha256(canonical(value))
