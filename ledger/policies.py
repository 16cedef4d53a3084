"""Whom a reader trusts: a policy file (c2sp.org/tlog-policy) of log keys, witness keys and the quorum of witnesses.

    log <vkey> [<url>]                     heads signed by any one of these are accepted
    witness <name> <vkey> [<url>]
    group <name> all|any|<k> <name>…       witnessed where so many of its members, witnesses or groups, have witnessed
    quorum <name>|none                     exactly one such line

A reader keeps it apart from the archive, whose own word on keys proves nothing to who does not trust the archive. Pure: no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ledger.errors import InputError
from ledger.notes import LOG, WITNESS, Checkpoint, Key, Note

LARGEST = 1 << 20
"""Bytes of the largest policy that is read."""
_MOST = 1000
_NONE = "none"


@dataclass(frozen=True)
class Policy:
    """A parsed policy. ``groups`` holds, by name, how many of which members are asked for."""

    logs: tuple[Key, ...]
    witnesses: dict[str, Key]
    groups: dict[str, tuple[int, tuple[str, ...]]]
    quorum: str

    @classmethod
    def parse(cls, data: bytes) -> Policy:
        """The policy in ``data``. Raises InputError, which names the line."""
        if len(data) > LARGEST:
            raise InputError("The policy is too large.", expected=f"at most {LARGEST} bytes", found=f"{len(data)}")
        made = _Reader()
        for number, raw in enumerate(data.split(b"\n"), start=1):
            if re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", raw):
                raise InputError(f"Line {number} of the policy holds a control character.", next="save it with plain newlines.")
            # octets with the high bit set are opaque: one character each, whatever their encoding
            words = [word for word in re.split(r"[ \t]+", raw.decode("latin-1")) if word]
            if not words or words[0].startswith("#"):
                continue
            try:
                made.line(words)
            except InputError as error:
                raise InputError(f"Line {number} of the policy: {error.what}", expected=error.expected, found=error.found) from error
        return made.done()

    def faults(self, note: Note) -> list[str]:
        """Why a signed head is not to be believed under this policy: empty where it is. Raises InputError for a forged signature."""
        checkpoint = Checkpoint.parse(note.text)
        signed = note.signed((*self.logs, *self.witnesses.values()))
        found = []
        if not any(key in signed and key.name == checkpoint.origin for key in self.logs):
            found.append(f"no log key of the policy signed the head of {checkpoint.origin}")
        if self.quorum != _NONE and not self._witnessed(self.quorum, signed):
            names = [name for name, key in self.witnesses.items() if key in signed]
            found.append(f"the quorum {self.quorum} is not reached: cosigned by {', '.join(names) or 'no witness of the policy'}")
        return found

    def _witnessed(self, name: str, signed: dict[Key, int]) -> bool:
        if name in self.witnesses:
            return self.witnesses[name] in signed
        wanted, members = self.groups[name]
        return sum(self._witnessed(member, signed) for member in members) >= wanted


class _Reader:
    def __init__(self) -> None:
        self.logs: list[Key] = []
        self.witnesses: dict[str, Key] = {}
        self.groups: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.quorum: str | None = None
        self.members: set[str] = set()

    def line(self, words: list[str]) -> None:
        match words:
            case ["log", text] | ["log", text, _]:
                self.logs.append(self._key(text, LOG))
            case ["witness", name, text] | ["witness", name, text, _]:
                self._new(name)
                self.witnesses[name] = self._key(text, WITNESS)
            case ["group", name, count, *members] if members:
                self._group(name, count, members)
            case ["quorum", name]:
                if self.quorum is not None:
                    raise InputError("a second quorum.", expected="exactly one")
                if name != _NONE:
                    self._known(name)
                self.quorum = name
            case _:
                raise InputError(
                    "it is none that a policy has.",
                    expected="log, witness, group or quorum, each with its parts",
                    found=" ".join(words)[:80],
                )

    def _key(self, text: str, type: int) -> Key:
        # a key's name is text, not opaque octets: back to the bytes that stood there
        key = Key.parse(text.encode("latin-1").decode("utf-8", "replace"))
        if key.type != type:
            raise InputError("the key is of another kind.", expected=f"signature type {type}", found=f"{key.type}")
        others = self.logs if type == LOG else list(self.witnesses.values())
        if any(other.public == key.public for other in others):
            raise InputError("the same public key stands twice.", found=str(key))
        if len(others) >= _MOST:
            raise InputError("there are too many keys.", expected=f"at most {_MOST}")
        return key

    def _new(self, name: str) -> None:
        if name == _NONE or name in self.witnesses or name in self.groups:
            raise InputError("the name is taken.", found=name[:80])

    def _known(self, name: str) -> None:
        if name not in self.witnesses and name not in self.groups:
            raise InputError("it names what no line above defines.", found=name[:80])

    def _group(self, name: str, count: str, members: list[str]) -> None:
        self._new(name)
        for member in members:
            self._known(member)
            if member in self.members:
                raise InputError("a name is a member twice.", expected="each witness or group in one group at most", found=member[:80])
            self.members.add(member)
        wanted = {"all": len(members), "any": 1}.get(count) or (int(count) if re.fullmatch(r"[1-9][0-9]{0,3}", count, re.ASCII) else 0)
        if not 1 <= wanted <= len(members):
            raise InputError("the group asks for what it cannot have.", expected=f"all, any, or 1 to {len(members)}", found=count[:20])
        self.groups[name] = (wanted, tuple(members))

    def done(self) -> Policy:
        if self.quorum is None:
            raise InputError("The policy has no quorum.", expected="one line `quorum <name>` or `quorum none`")
        return Policy(tuple(self.logs), self.witnesses, self.groups, self.quorum)
