"""Recipes: a file -> a record, what a recipe may cite, and the rule that says how far it is supported.

A recipe names a checkpoint, a cache policy, what to install, and the claims that validate it. It may cite only claims that are here,
that come of a run, and that are of its own checkpoint and its own policy: nothing passes from one model to another. The rule, on the
claims as they stand now:

- ``retracted`` where the recipe was withdrawn.
- ``lapsed`` where a claim that it cites is withdrawn: every run of it was superseded or retracted.
- ``not supported`` where a claim that it cites shows harm (``degraded``, ``fails``), or where no scope is supported.
- A scope is supported where every claim of it that the recipe cites is ``established`` or ``passes``. With every scope that it cites
  the recipe is ``supported``, with some of them ``supported in part``.

On seeded or altered weights the word is prefixed ``synthetic``, as that of the claims is. Nothing of it is stored: it is derived
whenever it is shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger import handwritten, records
from ledger.errors import InputError

GOOD = ("established", "passes")
"""Statuses that support a recipe."""
HARM = ("degraded", "fails")

WORDS: dict[str, str] = {
    "supported": "every claim that it cites is established or passes, for the scopes shown and no others",
    "supported in part": "some scopes that it cites are established or pass, others are not",
    "not supported": "no scope that it cites is established or passes, or a claim shows harm",
    "lapsed": "a claim that it cites was withdrawn, superseded or retracted",
    "retracted": "withdrawn with author and reason; it stays readable and no longer counts",
}
"""What is said of a recipe as a whole, and what that means."""


@dataclass(frozen=True)
class Cited:
    """A claim of the archive that comes of a run, and the policy of its candidate."""

    claim: records.Claim
    policy: records.Policy


def policy_of(arm: records.Arm) -> records.Policy:
    """The policy that an arm runs."""
    return records.Policy(**{name: getattr(arm, name) for name in records.Policy.__struct_fields__})


def candidate(claim: records.Claim) -> str:
    """Name of a claim's arm in the spec of its deciding run."""
    return claim.arm.partition(":")[0]


def faults(recipe: records.Recipe, known: Mapping[str, Cited]) -> Iterator[str]:
    """Why a recipe may not cite what it cites, one clause each; ``known`` are the archive's claims by key."""
    for key in recipe.claims:
        found = known.get(key)
        if found is None:
            yield f"claim {key} is not in this archive, or comes of no run"
        elif found.claim.checkpoint != recipe.checkpoint:
            yield f"claim {key} is on checkpoint {found.claim.checkpoint} ({found.claim.model}), the recipe on {recipe.checkpoint}"
        elif found.policy != recipe.policy:
            differ = [
                f"{name}: {getattr(found.policy, name)}, the recipe has {getattr(recipe.policy, name)}"
                for name in records.Policy.__struct_fields__
                if getattr(found.policy, name) != getattr(recipe.policy, name)
            ]
            yield f"claim {key} is of another policy ({'; '.join(differ)})"


@dataclass(frozen=True)
class Verdict:
    """How far a recipe is supported: the ``word``, the ``scopes`` that are supported, in the order in which they are cited, and why."""

    word: str
    scopes: tuple[str, ...]
    reason: str


def judge(claims: Sequence[Mapping[str, Any]], withdrawn: str = "") -> Verdict:
    """The verdict on a recipe. ``claims``: key, scope, status and synthetic of each that it cites. ``withdrawn`` says why, if it was."""
    synthetic = "synthetic " if any(claim["synthetic"] for claim in claims) else ""
    if withdrawn:
        return Verdict("retracted", (), withdrawn)
    lapsed = [claim for claim in claims if claim["status"] == "retracted"]
    if lapsed:
        return Verdict(f"{synthetic}lapsed", (), f"withdrawn: {_listed(lapsed)}")
    cited = list(dict.fromkeys(claim["scope"] for claim in claims))
    lacking = [claim for claim in claims if claim["status"] not in GOOD]
    good = tuple(scope for scope in cited if scope not in {claim["scope"] for claim in lacking})
    harm = [claim for claim in claims if claim["status"] in HARM]
    if harm or not good:
        return Verdict(f"{synthetic}not supported", (), _listed(harm or lacking) or "it cites no claim")
    if lacking:
        return Verdict(f"{synthetic}supported in part", good, f"for {', '.join(good)}; not for {_listed(lacking)}")
    return Verdict(f"{synthetic}supported", good, f"for {', '.join(good)}, as far as its claims reach")


def _listed(claims: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(f"{claim['scope']} ({claim['status']}, claim {claim['key'][:12]})" for claim in claims))


def read(path: Path) -> tuple[records.Recipe, dict[str, Path | bytes]]:
    """The recipe of a file, and its lock file as evidence where it names one. Raises InputError.

    ``lock`` is the path of the lock file from the recipe's folder on, ``lock_sha256`` its digest.
    """
    table = handwritten.table(path, "recipe", ("format", "evidence"))
    lock, named = table.pop("lock", None), table.pop("lock_sha256", None)
    evidence: dict[str, Path | bytes] = {}
    if lock is not None or named is not None:
        if not (isinstance(lock, str) and lock and isinstance(named, str)):
            raise InputError(
                f"The recipe {path} needs both lock and lock_sha256.", expected="a path and its SHA-256", found=repr(lock)[:100]
            )
        data = handwritten.contents(path.parent / lock, "lock file")
        found = hashlib.sha256(data).hexdigest()
        if found != named or not data.strip():
            raise InputError(
                f"The lock file {path.parent / lock} is not the one that the recipe names.",
                expected=f"SHA-256 {named[:80]}, of a file that is not empty",
                found=f"{found}, {len(data)} bytes",
                next="restore the file, or correct lock_sha256.",
            )
        table["evidence"] = [{"name": Path(lock).name, "sha256": found, "size": len(data), "media_type": "text/plain"}]
        evidence[found] = data
    recipe = records.convert(records.Recipe, {**table, "format": "kv-ledger/recipe/1"}, f"The recipe {path}")
    return recipe, evidence
