"""What is not measured here: what a document outside says, and how to set up what claims have shown."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ledger.records.base import LONGEST_TEXT, Digest, Format, Name, Positive, Record, Scope, Text
from ledger.records.result import Evidence
from ledger.records.spec import Granularity, Scales

MAX_FACTS = 1000
"""Most facts of a report."""
MAX_CLAIMS = 200
"""Most claims that a recipe cites."""

Said = Annotated[str, Meta(pattern=r"\S", max_length=LONGEST_TEXT)]
"""A text that may not be blank."""

Outcome = Literal["passes", "bound not met", "harm", "unsupported", "measured", "no benefit", "not measured", "declined"]
"""How what a document says came out, by its own account; never a status of this archive. The meanings are the pages' to tell:
``bound not met`` shows no harm, ``declined`` is a conclusion that the document expressly does not draw."""


class Fact(Record, frozen=True, kw_only=True):
    """One thing that a document says of a model under a cache policy, in the reporter's words."""

    model: Said
    policy: Said
    scope: Scope
    outcome: Outcome
    says: Said


class Report(Record, frozen=True, kw_only=True):
    """What an outside document says: claims of status ``reported``, for which there is no evidence here.

    ``sha256`` and ``size`` are of the document's bytes, ``place`` is where it was found: an address, or words. ``license`` is empty
    where it is not known. ``bytes`` says whether the document itself is kept, which its licence must allow: then ``evidence``
    lists it, and nothing else.
    """

    format: Literal["kv-ledger/report/1"]
    title: Said
    place: Said
    sha256: Digest
    size: Positive
    license: Text
    bytes: Literal["kept", "digest only"]
    facts: Annotated[tuple[Fact, ...], Meta(min_length=1, max_length=MAX_FACTS)]
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        if self.bytes == "digest only":
            if self.evidence:
                raise ValueError("a report that keeps the digest only lists no evidence")
        elif [(item.sha256, item.size) for item in self.evidence] != [(self.sha256, self.size)]:
            raise ValueError("a report that keeps its document lists that document, and nothing else, as evidence")
        elif not self.license.strip():
            raise ValueError("a report keeps its document only where a license is named that allows it")
        about = [(fact.model, fact.policy, fact.scope) for fact in self.facts]
        if twice := next((item for item in about if about.count(item) > 1), None):
            raise ValueError(f"two facts are about one model, policy and scope: {', '.join(twice)[:300]}")


class Policy(Record, frozen=True, kw_only=True):
    """A cache policy: the fields of an arm that say what is stored, and by what."""

    implementation: Literal["native", "reference", "fused"]
    compute: Format
    keys: Format
    values: Format
    scales: Scales = "none"
    granularity: Granularity = "none"
    scale_source: Digest | None = None


class Requirement(Record, frozen=True, kw_only=True):
    """A package that is installed: an exact version, and the SHA-256 of each file that may be taken for it."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?\Z")]
    version: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}\Z")]
    sha256: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=500)]


class Recipe(Record, frozen=True, kw_only=True):
    """How to set up one policy on one checkpoint, and the claims that validate it: supported as far as they reach, and no further.

    ``checkpoint`` and ``claims`` are digests as claims have them. What ``steps`` install is pinned: by ``requirements``, or by a lock file,
    the one item of ``evidence``; exactly one of the two. Whether a recipe is supported is derived by :mod:`ledger.recipes`, never typed.
    """

    format: Literal["kv-ledger/recipe/1"]
    name: Name
    title: Said
    checkpoint: Digest
    policy: Policy
    steps: Annotated[tuple[Said, ...], Meta(min_length=1, max_length=100)]
    claims: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_CLAIMS)]
    requirements: Annotated[tuple[Requirement, ...], Meta(max_length=1000)] = ()
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        if len(self.evidence) != (0 if self.requirements else 1):
            raise ValueError("a recipe is pinned by requirements or by one lock file: exactly one of the two")
        for names, what in ((self.claims, "claim"), ([item.name.lower() for item in self.requirements], "requirement")):
            if len(set(names)) != len(names):
                raise ValueError(f"a {what} stands twice: {next(name for name in names if list(names).count(name) > 1)}")
