"""Files that people write by hand, TOML or JSON, read strictly: for reports and recipes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ledger import digest
from ledger.errors import InputError

LARGEST = 4 << 20
"""Largest file that is read, in bytes."""


def contents(path: Path, what: str) -> bytes:
    """The bytes of a plain file of at most 4 MiB; ``what`` names it in an error. Raises InputError."""
    try:
        if not path.is_file():
            raise InputError(f"There is no {what} at {path}.", expected="the path of a file", next="correct the path.")
        size = path.stat().st_size
        if size > LARGEST:
            raise InputError(f"The {what} {path} is too large.", expected=f"at most {LARGEST} bytes", found=f"{size} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The {what} {path} cannot be read.", found=str(error.strerror), next="give this user the right to it.") from error


def table(path: Path, what: str, made: tuple[str, ...]) -> dict[str, Any]:
    """The keys of a file, JSON where its name ends in ``.json`` and else TOML; ``made`` are none of its own. Raises InputError."""
    data = contents(path, what)
    if path.suffix.lower() == ".json":
        try:
            found = digest.parse(data)
        except InputError as error:
            raise InputError(
                f"The {what} {path} cannot be read: {error.what}", expected=error.expected, found=error.found, next=f"correct the {what}."
            ) from error
    else:
        found = _toml(data, path, what)
    if not isinstance(found, Mapping):
        raise InputError(f"The {what} {path} holds no keys.", expected="an object", found=type(found).__name__)
    for name in made:
        if name in found:
            raise InputError(f"The {what} {path} has a key that is not its own to give: {name}", next="remove it; it is made on recording.")
    return dict(found)


def _toml(data: bytes, path: Path, what: str) -> Any:
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"The {what} {path} is not UTF-8.", found=f"byte {data[error.start]:#04x} at {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"The {what} {path} is not TOML.", found=str(error)[:500], next=f"correct the {what}.") from error
