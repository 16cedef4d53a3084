"""Whom a reader trusts: the policy file of c2sp.org/tlog-policy."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import notes
from ledger.errors import InputError
from ledger.log import Head, leaf_hash
from ledger.notes import LOG, WITNESS, Note, Signer
from ledger.policies import Policy

LOG_KEY = Signer.new("example.org/log", LOG, b"\1" * 32)
OTHER = Signer.new("example.org/log", LOG, b"\2" * 32)
WITNESSES = {name: Signer.new(f"{name.lower()}.example", WITNESS, name.encode().ljust(32, b"w")) for name in ("X1", "X2", "X3", "Y1", "Y2")}
NESTED = "\n".join(
    [
        "# two groups",
        f"log {LOG_KEY.key} https://example.org/log",
        *(f"\twitness {name} {signer.key}" for name, signer in WITNESSES.items()),
        "group X 2 X1 X2 X3",
        "group Y any Y1 Y2",
        "group both all X Y",
        "quorum both",
        "",
    ]
).encode()


def head(*by: str, signer: Signer = LOG_KEY) -> Note:
    """A signed head with the cosignatures of the witnesses ``by``."""
    bare = notes.signed_head(Head.over([leaf_hash(b"a")]), signer)
    return Note(bare.text, (*bare.signatures, *(WITNESSES[name].sign(bare.text, 1_700_000_000) for name in by)))


@pytest.mark.parametrize(
    ("by", "reached"),
    [
        (("X1", "X2", "Y1"), True),
        (("X1", "X3", "Y2"), True),
        (("X1", "X2", "X3", "Y1", "Y2"), True),
        (("X1", "X2"), False),
        (("X1", "Y1", "Y2"), False),
        (("X1", "X1", "Y1"), False),
        ((), False),
    ],
)
def test_a_quorum_of_groups_is_counted(by: tuple[str, ...], reached: bool) -> None:
    faults = Policy.parse(NESTED).faults(head(*by))
    assert (faults == []) is reached
    assert reached or "quorum both is not reached" in faults[0]


def test_the_right_name_with_the_wrong_key_is_nobody() -> None:
    policy = Policy.parse(f"log {LOG_KEY.key}\nquorum none\n".encode())
    assert policy.faults(head()) == []
    assert policy.faults(head(signer=OTHER)) == ["no log key of the policy signed the head of example.org/log"]
    two = Policy.parse(f"log {LOG_KEY.key}\nlog {OTHER.key}\nquorum none\n".encode())
    assert two.faults(head(signer=OTHER)) == []


def test_a_key_of_another_name_does_not_vouch_for_this_log() -> None:
    stranger = Signer.new("elsewhere.example", LOG, b"\3" * 32)
    note = head()
    both = Note(note.text, (stranger.sign(note.text),))
    assert Policy.parse(f"log {stranger.key}\nquorum none".encode()).faults(both) == [
        "no log key of the policy signed the head of example.org/log"
    ]


def test_a_forged_cosignature_of_a_known_witness_is_refused() -> None:
    note, other = head("X1", "X2", "Y1"), notes.signed_head(Head.over([leaf_hash(b"b")]), LOG_KEY)
    with pytest.raises(InputError, match=r"x1\.example .* does not verify"):
        Policy.parse(NESTED).faults(Note(other.text, (*other.signatures, note.signatures[1])))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no quorum"),
        ("quorum none\nquorum none", "Line 2 .*second quorum"),
        ("quorum X", "no line above defines"),
        ("quorum", "none that a policy has"),
        ("lock x\nquorum none", "none that a policy has"),
        ("log x\nquorum none", "Line 1 .*no verifier key"),
        (f"log {WITNESSES['X1'].key}\nquorum none", "another kind"),
        (f"witness A {LOG_KEY.key}\nquorum none", "another kind"),
        (f"log {LOG_KEY.key}\nlog {LOG_KEY.key}\nquorum none", "stands twice"),
        (f"log {LOG_KEY.key}\nlog {notes.Key('another.example', LOG, LOG_KEY.key.public)}\nquorum none", "stands twice"),
        (f"witness none {WITNESSES['X1'].key}\nquorum none", "name is taken"),
        (f"witness A {WITNESSES['X1'].key}\nwitness A {WITNESSES['X2'].key}\nquorum A", "name is taken"),
        (f"witness A {WITNESSES['X1'].key}\ngroup A all A\nquorum A", "name is taken"),
        (f"witness A {WITNESSES['X1'].key}\ngroup G 2 A\nquorum G", "asks for what it cannot have"),
        (f"witness A {WITNESSES['X1'].key}\ngroup G 0 A\nquorum G", "asks for what it cannot have"),
        (f"witness A {WITNESSES['X1'].key}\ngroup G 01 A\nquorum G", "asks for what it cannot have"),
        (f"witness A {WITNESSES['X1'].key}\ngroup G all A A\nquorum G", "member twice"),
        (f"witness A {WITNESSES['X1'].key}\ngroup G all A\ngroup H all A\nquorum G", "member twice"),
        ("group G all A\nquorum G", "no line above defines"),
        ("group G all\nquorum G", "none that a policy has"),
        ("group G all none\nquorum G", "no line above defines"),
        ("quorum none\r\n", "control character"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_by_its_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Policy.parse(text.encode())


def test_names_are_opaque_octets() -> None:
    kelvin = f"witness K {WITNESSES['X1'].key}\nwitness \u212a {WITNESSES['X2'].key}\nquorum \u212a\n"
    policy = Policy.parse(kelvin.encode())
    assert policy.faults(head("X1"))[0].startswith("no log key")
    assert len(policy.witnesses) == 2


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for text in (data, b"quorum none\n" + data):
        with contextlib.suppress(InputError):
            Policy.parse(text)
