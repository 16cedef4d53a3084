"""How the archive is kept: which keys sign its head, and which bytes were taken out of it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ledger.records.base import Digest, Record
from ledger.records.outside import Said


class KeyChange(Record, frozen=True, kw_only=True):
    """A key begins or ends to sign the heads of this log. ``key`` is a verifier key as c2sp.org/signed-note writes it.

    It counts for every head that covers this entry: a head of more entries than this one's number. Rotation is an ``add`` and a
    ``revoke``.
    """

    format: Literal["kv-ledger/key/1"]
    action: Literal["add", "revoke"]
    key: Annotated[str, Meta(pattern=r"\A[^\s+]{1,255}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{43,44}={0,2}\Z", max_length=400)]
    author: Said
    reason: Said


class Redaction(Record, frozen=True, kw_only=True):
    """The bytes of one evidence object were removed; its digest, and all that was derived from it, stand."""

    format: Literal["kv-ledger/redaction/1"]
    object: Digest
    author: Said
    reason: Said
