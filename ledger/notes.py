"""Signed notes, keys, and the signed head of the log: the text formats of C2SP.

    note             text, a blank line, then lines ``— <key name> <base64(key ID || signature)>``   c2sp.org/signed-note
    verifier key     ``<name>+<key ID, hex>+<base64(type || public key)>``                            the same
    checkpoint       a note whose text is origin, size and root of a log; the origin is the key's name  c2sp.org/tlog-checkpoint
    cosignature      a witness's statement, with a time, that it saw the log only grow                c2sp.org/tlog-cosignature
    tlog-proof       an entry's inclusion proof with the checkpoint it leads to                       c2sp.org/tlog-proof

Keys are Ed25519 (RFC 8032), of signature type 1 (a log) or 4 (a witness's cosignature); a key ID is the first four bytes of
SHA-256(name || 0x0A || type || public key). A signing key is written as Go's ``sumdb/note`` writes it:
``PRIVATE+KEY+<name>+<key ID, hex>+<base64(type || seed)>``. Base64 is standard, padded, and of its several spellings of one
value only the canonical one is read. Pure: no I/O. What is wrong with a text raises InputError.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ledger.errors import InputError
from ledger.log import HASH_BYTES, Head, leaf_hash, verify_inclusion

LOG, WITNESS = 1, 4
"""Signature types: Ed25519 over the note's text; Ed25519 over it behind a time."""
LARGEST_NOTE = 1 << 20
"""Bytes of the largest note, or proof, that is read."""
_LARGEST_SIGNATURES = 100
_LARGEST_NAME = 255
_SIGNATURE = {LOG: 64, WITNESS: 8 + 64}
_TYPES = {LOG: "of a log", WITNESS: "of a witness"}
_LINE = "— "
_ROOT = re.compile(r"(0|[1-9][0-9]{0,17})\n([A-Za-z0-9+/]{43}=)\n", re.ASCII)
_PRIVATE = "PRIVATE+KEY+"
_PROOF = "c2sp.org/tlog-proof@v1"
_P = 2**255 - 19
# y of the points of small order on edwards25519, the sign bit cleared: under such a "public key" anybody can sign
_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_SMALL = {0, 1, _P - 1, _ORDER_8, _P - _ORDER_8}


def encode64(data: bytes) -> str:
    """Standard base64 with padding."""
    return base64.b64encode(data).decode()


def decode64(text: str, what: str = "This text") -> bytes:
    """What :func:`encode64` wrote; any other spelling is refused. Raises InputError."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{what} is no base64.", found=repr(text[:80])) from error
    if encode64(data) != text:
        raise InputError(f"{what} is not the canonical base64 of its bytes.", found=repr(text[:80]))
    return data


def check_name(name: str) -> str:
    """A key's name, which is its log's origin too: no spaces, no ``+``, no control characters, 1 to 255 bytes. Raises InputError."""
    if (
        not name
        or len(name.encode("utf-8", "replace")) > _LARGEST_NAME
        or any(c == "+" or c.isspace() or not c.isprintable() for c in name)
    ):
        raise InputError(
            "This is no key name.",
            expected="1 to 255 bytes without spaces, + or control characters, such as example.org/kv-ledger",
            found=repr(name[:80]),
        )
    return name


# ---------------------------------------------------------------- keys


@dataclass(frozen=True)
class Key:
    """A verifier key: name, signature type (LOG or WITNESS) and the 32 bytes of an Ed25519 public key."""

    name: str
    type: int
    public: bytes

    @property
    def id(self) -> bytes:
        """The key ID, 4 bytes."""
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([self.type]) + self.public).digest()[:4]

    def __str__(self) -> str:
        return f"{self.name}+{self.id.hex()}+{encode64(bytes([self.type]) + self.public)}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """The verifier key in ``text``. Raises InputError: a weak key is refused as well."""
        name, id, data = _key_parts(text, "verifier key")
        key = cls(name, data[0], data[1:])
        if key.type not in _SIGNATURE or len(key.public) != 32:
            raise InputError(
                "This verifier key is of a kind that is not read here.",
                expected="Ed25519: type 1 or 4, then 32 bytes",
                found=f"type {key.type}, then {len(key.public)} bytes",
            )
        if key.id != id:
            raise InputError("A verifier key contradicts its own key ID.", expected=key.id.hex(), found=id.hex())
        _refuse_weak(key.public)
        return key

    def signs(self, signature: bytes, text: str) -> int | None:
        """The time of a cosignature (seconds since the epoch), 0 of a log's signature; None where it does not verify."""
        if len(signature) != _SIGNATURE[self.type]:
            return None
        time = int.from_bytes(signature[:-64], "big")
        message = _cosigned(text, time) if self.type == WITNESS else text.encode()
        if time >= 1 << 63:
            return None
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature[-64:], message)
        except InvalidSignature:
            return None
        return time


def _key_parts(text: str, what: str) -> tuple[str, bytes, bytes]:
    parts = text.split("+", 2)
    if len(parts) != 3 or not re.fullmatch(r"[0-9a-f]{8}", parts[1]):
        raise InputError(f"This is no {what}.", expected="<name>+<8 hex digits>+<base64>", found=repr(text[:80]))
    data = decode64(parts[2], f"The last part of a {what}")
    if not data:
        raise InputError(f"This is no {what}.", expected="a type and a key", found="nothing")
    return check_name(parts[0]), bytes.fromhex(parts[1]), data


def _refuse_weak(public: bytes) -> None:
    y = int.from_bytes(public, "little") & ((1 << 255) - 1)
    if y >= _P or y in _SMALL:
        raise InputError(
            "This public key is weak: anybody could sign for it.", found=public.hex(), next="make a key with `ledger key new`."
        )


@dataclass(frozen=True, repr=False)
class Signer:
    """A signing key: its verifier key and the 32 bytes of the seed, which must stay secret."""

    key: Key
    seed: bytes

    @classmethod
    def new(cls, name: str, type: int = LOG, seed: bytes | None = None) -> Signer:
        """A new key, of the system's randomness unless ``seed`` is given. Raises InputError."""
        seed = os.urandom(32) if seed is None else seed
        return cls(Key(check_name(name), type, Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()), seed)

    def encode(self) -> str:
        """The signing key as one line, without a newline."""
        return f"{_PRIVATE}{self.key.name}+{self.key.id.hex()}+{encode64(bytes([self.key.type]) + self.seed)}"

    @classmethod
    def parse(cls, text: str) -> Signer:
        """The signing key in ``text``; no message shows any of it. Raises InputError."""
        try:
            if not text.startswith(_PRIVATE):
                raise InputError("no signing key")
            name, id, data = _key_parts(text[len(_PRIVATE) :], "signing key")
            signer = cls.new(name, data[0], data[1:]) if len(data) == 33 and data[0] in _SIGNATURE else None
        except InputError:
            signer = None
        if signer is None or signer.key.id != id:
            raise InputError(
                "This file holds no signing key.", expected="one line that begins with PRIVATE+KEY+", next="make one: `ledger key new`."
            )
        return signer

    def sign(self, text: str, time: int = 0) -> Signature:
        """The signature of a note's text; of a witness, at ``time`` (seconds since the epoch)."""
        private = Ed25519PrivateKey.from_private_bytes(self.seed)
        if self.key.type == WITNESS:
            return Signature(self.key.name, self.key.id, time.to_bytes(8, "big") + private.sign(_cosigned(text, time)))
        return Signature(self.key.name, self.key.id, private.sign(text.encode()))


def _cosigned(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


# ---------------------------------------------------------------- notes


@dataclass(frozen=True)
class Signature:
    """One signature line: the key's name, its ID (4 bytes) and the signature's bytes, in whatever kind."""

    name: str
    id: bytes
    data: bytes

    def __str__(self) -> str:
        return f"{_LINE}{self.name} {encode64(self.id + self.data)}\n"

    @classmethod
    def parse(cls, line: str) -> Signature:
        """The signature in ``line``, without its newline. Raises InputError."""
        name, _, data = line.removeprefix(_LINE).partition(" ")
        if not line.startswith(_LINE) or not data:
            raise InputError("This is no signature line.", expected=f"{_LINE}<key name> <base64>", found=repr(line[:80]))
        raw = decode64(data, "A signature")
        if len(raw) < 5:
            raise InputError("A signature is too short.", expected="a key ID of 4 bytes and a signature", found=f"{len(raw)} bytes")
        return cls(check_name(name), raw[:4], raw[4:])


@dataclass(frozen=True)
class Note:
    """A text, its last newline included, and the signatures below it. Nothing is verified yet."""

    text: str
    signatures: tuple[Signature, ...] = ()

    def encode(self) -> bytes:
        """The note's bytes."""
        return (self.text + "\n" + "".join(map(str, self.signatures))).encode()

    @classmethod
    def parse(cls, data: bytes) -> Note:
        """The note in ``data``. Raises InputError."""
        if len(data) > LARGEST_NOTE:
            raise InputError("The note is too large.", expected=f"at most {LARGEST_NOTE} bytes", found=f"{len(data)}")
        try:
            whole = data.decode()
        except UnicodeDecodeError as error:
            raise InputError("The note is no UTF-8.", found=f"byte {error.start}") from error
        if any(c < " " and c != "\n" for c in whole):
            raise InputError("The note holds a control character.", expected="lines that end in a newline alone")
        text, blank, below = whole.rpartition("\n\n")
        lines = below.split("\n")
        if not blank or not text or lines.pop() != "" or not 1 <= len(lines) <= _LARGEST_SIGNATURES:
            raise InputError(
                "This is no signed note.",
                expected=f"a text, a blank line, and 1 to {_LARGEST_SIGNATURES} signature lines",
                found=repr(whole[-80:]),
            )
        return cls(text + "\n", tuple(Signature.parse(line) for line in lines))

    def signed(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Those of ``keys`` that signed this note, with the time of a cosignature (else 0).

        Signatures of unknown keys are ignored. Raises InputError where one with a known key's name and ID does not verify.
        """
        known = {(key.name, key.id): key for key in keys}
        found: dict[Key, int] = {}
        for signature in self.signatures:
            key = known.get((signature.name, signature.id))
            if key is None:
                continue
            time = key.signs(signature.data, self.text)
            if time is None:
                raise InputError(f"A signature of {key.name} ({key.id.hex()}) does not verify.", found=str(signature).strip()[:120])
            found.setdefault(key, time)
        return found


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A log's head under its origin. ``extensions`` are the lines below it, which nothing here reads."""

    origin: str
    head: Head
    extensions: tuple[str, ...] = ()

    def text(self) -> str:
        """The text that a log and its witnesses sign."""
        lines = (self.origin, str(self.head.size), encode64(self.head.root), *self.extensions)
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """The checkpoint in a note's text. Raises InputError."""
        origin, _, rest = text.partition("\n")
        match = _ROOT.match(rest)
        if not origin or match is None:
            raise InputError(
                "This text is no checkpoint.", expected="origin, size and root, each on a line of its own", found=repr(text[:120])
            )
        extensions = rest[match.end() :].split("\n")
        if extensions.pop() != "" or not all(extensions):
            raise InputError("An extension line of the checkpoint is empty.", found=repr(text[:120]))
        return cls(origin, Head(int(match[1]), decode64(match[2], "The root")), tuple(extensions))


def signed_head(head: Head, signer: Signer, others: Sequence[Signature] = ()) -> Note:
    """The checkpoint of ``head`` under the signer's name as origin, signed by it. Raises InputError for a witness's key."""
    if signer.key.type != LOG:
        raise InputError("A witness's key cannot sign the log's head.", expected="a key of type 1", next="make one: `ledger key new NAME`.")
    text = Checkpoint(signer.key.name, head).text()
    return Note(text, (signer.sign(text), *others))


# ---------------------------------------------------------------- proofs


@dataclass(frozen=True)
class Proof:
    """An entry, its number, and the hashes that lead from it to the checkpoint's root."""

    entry: bytes
    index: int
    hashes: tuple[bytes, ...]
    note: Note

    def encode(self) -> bytes:
        """The proof as a ``.tlog-proof`` file; the entry's bytes are its extra data."""
        lines = (_PROOF, f"extra {encode64(self.entry)}", f"index {self.index}", *map(encode64, self.hashes))
        return "".join(f"{line}\n" for line in lines).encode() + b"\n" + self.note.encode()

    @classmethod
    def parse(cls, data: bytes) -> Proof:
        """The proof in ``data``, not yet checked. Raises InputError."""
        if len(data) > LARGEST_NOTE:
            raise InputError("The proof is too large.", expected=f"at most {LARGEST_NOTE} bytes", found=f"{len(data)}")
        above, _, below = data.partition(b"\n\n")
        try:
            first, extra, index, *hashes = above.decode("ascii").split("\n")
        except ValueError as error:
            raise InputError("This is no proof of a log.", expected=f"{_PROOF}, extra, index and hashes, a line each") from error
        if first != _PROOF or not extra.startswith("extra ") or not re.fullmatch(r"index (0|[1-9][0-9]{0,17})", index, re.ASCII):
            raise InputError("This is no proof of a log.", expected=f"{_PROOF}, extra and index, a line each", found=repr(above[:120]))
        path = tuple(decode64(line, "A hash of the proof") for line in hashes)
        if len(path) > 64 or any(len(item) != HASH_BYTES for item in path):
            raise InputError("A hash of the proof has another length.", expected=f"at most 64 of {HASH_BYTES} bytes")
        return cls(decode64(extra[6:], "The entry"), int(index[6:]), path, Note.parse(below))

    def check(self) -> Checkpoint:
        """The checkpoint that the entry is shown to stand under. Signatures are not looked at. Raises InputError."""
        found = Checkpoint.parse(self.note.text)
        if not verify_inclusion(leaf_hash(self.entry), self.index, found.head.size, self.hashes, found.head.root):
            raise InputError(
                "The proof does not lead from its entry to the root of its checkpoint.",
                found=f"entry {self.index} of {found.head.size}, {len(self.hashes)} hashes",
                next="ask for the proof again; the log, the entry or the checkpoint is another.",
            )
        return found
