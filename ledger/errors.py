"""Errors that a user can act on.

    LedgerError
    ├── InputError        a study, a result folder, a record or a command's argument is unusable
    ├── ProvenanceError   a harness, a checkpoint or a dataset is not what it is said to be
    ├── RefusedError      the guard refuses an arm; carries the reason code
    └── ArchiveError      the archive cannot be read or written
        ├── SchemaError   the database is of another schema
        └── RedactedError  the bytes that are asked for were taken out, by an entry that says why

Every message says what was expected, what was found and what to do next.
The command line maps all of them to exit code 2, once, in ``ledger/cli.py``.
"""

from __future__ import annotations


class LedgerError(Exception):
    """Base of every error that this project raises on purpose.

    ``what`` names the thing in one sentence; ``expected``, ``found`` and ``next``
    complete it. Any of the three may be empty where it would say nothing.
    """

    def __init__(self, what: str, *, expected: str = "", found: str = "", next: str = "") -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.next = next
        super().__init__(self.message())

    def message(self) -> str:
        """The whole message, one clause a line."""
        lines = [self.what]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.found:
            lines.append(f"found: {self.found}")
        if self.next:
            lines.append(f"next: {self.next}")
        return "\n".join(lines)


class InputError(LedgerError):
    """A study, a result folder, a record or an argument cannot be used."""


class ProvenanceError(LedgerError):
    """A harness, a checkpoint or a dataset is not what it is said to be."""


class RefusedError(LedgerError):
    """The guard refuses an arm. ``code`` is one of the guard's reason codes."""

    def __init__(self, code: str, what: str, *, expected: str = "", found: str = "", next: str = "") -> None:
        self.code = code
        super().__init__(what, expected=expected, found=found, next=next)


class ArchiveError(LedgerError):
    """The archive cannot be opened, read or written."""


class SchemaError(ArchiveError):
    """The database has another schema than this version of the project."""


class RedactedError(ArchiveError):
    """The bytes of an evidence object were taken out of the archive by an entry that says why."""
