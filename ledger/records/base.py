"""What every record is made of: the struct, and the words and numbers that its fields may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""SHA-256, 64 lower-case hex digits."""
Revision = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
"""A git commit or a hub revision, 40 lower-case hex digits; never a branch, a tag or a short form."""
Name = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
"""Name of a study, an arm or a gate family: lower-case letters, digits and hyphens."""
Path = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*\Z", max_length=200)]
"""Relative path of an evidence file: no leading slash, no ``..``, no percent signs, no control characters."""
LONGEST_TEXT = 8192
"""Characters of the longest text in a record, whatever it is."""
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
"""Free text: a title, a reason, an error."""
Word = Annotated[str, Meta(max_length=200)]
"""A short name that others chose: a dtype, a backend, a field of a policy."""
Instant = Annotated[str, Meta(pattern=r"\A\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?Z\Z")]
"""UTC, ISO 8601 with a final Z."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Address = Annotated[int, Meta(ge=0)]
"""Of memory: below 2**64, which :func:`convert` checks, since msgspec's bounds end at 2**63 - 1."""

Format = Literal["fp32", "bf16", "fp16", "fp8_e4m3"]
Scope = Literal["capability", "calibration", "quality.loss", "quality.task", "state memory", "production", "performance", "reproduction"]
Status = Literal[
    "established",
    "not established",
    "degraded",
    "passes",
    "fails",
    "measured",
    "measured, not qualified",
    "unsupported",
    "invalid",
    "not measured",
    "retracted",
    "reported",
]


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: frozen, keyword-only, unknown keys refused."""


def missing(name: str) -> Any:
    """Raise KeyError: for an ``or`` after a search that found nothing."""
    raise KeyError(name)
