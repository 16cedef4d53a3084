"""What documents outside say: a file of facts in our own words -> one report of the log.

A report names a document by the SHA-256 and the size of its bytes, and states what it says as facts, one for each model, policy and scope.
Their status is ``reported`` and never another: no evidence for them is here, and no rule derives anything from them. What the document
itself says of the outcome stands beside it, in words of its own (:data:`OUTCOMES`), so that a document's "passes" is never read
as this archive's. The document's bytes become evidence only where the file says ``bytes = "kept"``, and names a licence that allows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ledger import digest, handwritten, records
from ledger.errors import InputError

OUTCOMES: dict[str, str] = {
    "passes": "the document says that its own test or check succeeded, under its own settings",
    "bound not met": "the document says that a bound of its own was not met; it shows no harm by that",
    "harm": "the document says that harm was shown",
    "unsupported": "the document says that its implementation refuses this configuration or cannot hold its layout",
    "measured": "the document gives figures, without a verdict",
    "no benefit": "the document says that its tests show no benefit or advantage",
    "not measured": "the document says that nobody measured this",
    "declined": "the document expressly does not draw this conclusion",
}
"""How a document says that something came out, and what that means. None of it is established here."""

_BLOCK = 1 << 20


def key(document: str, fact: Mapping[str, Any]) -> str:
    """Digest of what a reported claim is about: the document, the model, the policy and the scope."""
    return digest.digest_of({"document": document, **{name: fact[name] for name in ("model", "policy", "scope")}})


def read(path: Path, document: Path | None = None) -> tuple[records.Report, dict[str, Path | bytes]]:
    """The report of a file, and the evidence that goes with it. Raises InputError.

    ``document`` is the file that is reported on: where it is given its bytes must be those that the report names, and a report that
    keeps them needs it.
    """
    table = handwritten.table(path, "report", ("format", "evidence"))
    fields: dict[str, Any] = {"license": "", **table, "format": "kv-ledger/report/1"}
    kept = fields.get("bytes") == "kept"
    if kept:
        if document is None:
            raise InputError(
                f"The report {path} keeps its document, which was not given.", next="give the document's file with --document."
            )
        fields["evidence"] = [
            {
                "name": "document",
                "sha256": fields.get("sha256"),
                "size": fields.get("size"),
                "media_type": "application/octet-stream",
            }
        ]
    report = records.convert(records.Report, fields, f"The report {path}")
    if document is not None:
        _check(report, document)
    return report, {report.sha256: document} if kept and document is not None else {}


def _check(report: records.Report, document: Path) -> None:
    state, size = hashlib.sha256(), 0
    try:
        if not document.is_file():
            raise InputError(f"There is no document at {document}.", expected="the path of a file", next="correct the path.")
        with document.open("rb") as stream:
            while block := stream.read(_BLOCK):
                state.update(block)
                size += len(block)
    except OSError as error:
        raise InputError(f"The document {document} cannot be read.", found=str(error.strerror)) from error
    if (state.hexdigest(), size) != (report.sha256, report.size):
        raise InputError(
            f"The document {document} is not the one that the report names.",
            expected=f"{report.size} bytes with SHA-256 {report.sha256}",
            found=f"{size} bytes with SHA-256 {state.hexdigest()}",
            next="report on these bytes in a report of their own, or give the right file.",
        )
