"""Production checks of the kernels, over seeded random states of one attention geometry, stored as an arm asks.

Each check takes a :class:`Rig` and compares into a :class:`runners.findings.Finding`. Bit for bit means the same bytes; a
tolerance is a relative error, the norm of the difference by the norm of what was expected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ledger import records
from ledger.errors import InputError, RefusedError
from runners import fp8, oracle
from runners.findings import TOLERANCES, Finding, bits, relative
from runners.geometry import DTYPES
from runners.paged import PAGE, Pool
from runners.pages import Group, Pages, check_table
from runners.words import formats

# ---------------------------------------------------------------- states and pages


@dataclass(frozen=True)
class Attention:
    """Attention of one kind of layer; ``window`` 0 sees everything, ``soft_cap`` 0 caps nothing."""

    query_heads: int
    kv_heads: int
    dim: int
    window: int = 0
    soft_cap: float = 0.0

    def __str__(self) -> str:
        more = (f" window {self.window}" if self.window else "") + (f" cap {self.soft_cap:g}" if self.soft_cap else "")
        return f"{self.query_heads}/{self.kv_heads} d{self.dim}{more}"


@dataclass(frozen=True)
class Tokens:
    """States of one sequence of n tokens: queries [n, H_q, D], keys and values [n, H, D]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, first: int, last: int) -> Tokens:
        """Tokens from ``first`` up to, not including, ``last``."""
        return Tokens(self.queries[first:last], self.keys[first:last], self.values[first:last])


@dataclass
class Placed:
    """Pages, and where in them each sequence of a batch is: table int32 [B, width], lengths int32 [B] of what is stored."""

    pages: Pages
    table: torch.Tensor
    lengths: torch.Tensor


class Rig:
    """Seeded states of one shape, stored as an arm asks, and the kernels that write and read them.

    ``kernels`` has the functions of :mod:`runners.fused`.
    """

    def __init__(self, kernels: Any, arm: records.Arm, shape: Attention, plan: records.Production, device: str) -> None:
        self.kernels, self.arm, self.shape, self.plan, self.device = kernels, arm, shape, plan, device
        self.dtype = DTYPES[arm.compute]
        self.random = torch.Generator().manual_seed(plan.seed)  # on the CPU: the same numbers for every device
        self.options: dict[str, Any] = {"scale": shape.dim**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}

    def lengths(self) -> list[int]:
        """Lengths about every border: of pages, of the window, of the segments that a long sequence is split into; and the plan's own."""
        most = max(2 * PAGE, self.plan.prompt_tokens + self.plan.new_tokens)
        found = {1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, most}
        shortest, segments = self.kernels.SHORTEST, self.kernels.SEGMENTS
        for border in (self.shape.window, shortest, 2 * shortest, segments * shortest, 2 * segments * shortest):
            found |= {border - 1, border, border + 1}
        return sorted(length for length in found if 1 <= length <= most)

    def tokens(self, lengths: Sequence[int]) -> list[Tokens]:
        """Seeded normal states, in the arm's compute dtype."""
        heads = (self.shape.query_heads, self.shape.kv_heads, self.shape.kv_heads)
        return [Tokens(*(self._normal(length, count, self.shape.dim) for count in heads)) for length in lengths]

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random).to(self.device, self.dtype)

    def pages(self, count: int, poison: bool = False) -> Pages:
        """Empty pages as the arm asks: of zeros, or of NaN."""
        heads, dim = self.shape.kv_heads, self.shape.dim
        made = {
            side: empty(
                format, (count, heads, dim, PAGE) if (side, format) == ("values", "fp8_e4m3") else (count, heads, PAGE, dim), poison
            )
            for side, format in (("keys", self.arm.keys), ("values", self.arm.values))
        }
        scales: dict[str, torch.Tensor | None] = {}
        for side, stored in made.items():
            if stored.dtype != fp8.E4M3 or self.arm.scales == "unit":
                scales[side] = None
            elif self.arm.scales == "fixed":
                scales[side] = torch.linspace(1.0, 1.5, heads, device=self.device) * 8 / fp8.LARGEST  # beyond all that is drawn
            else:
                scales[side] = torch.full((count, heads, PAGE), math.nan if poison else 1.0, device=self.device)
        return Pages(made["keys"].to(self.device), made["values"].to(self.device), scales["keys"], scales["values"])

    def place(self, lengths: Sequence[int], order: int = 0, poison: bool = False) -> Placed:
        """Pages for sequences of up to ``lengths`` tokens, shuffled by the seed ``order``. What none needs names one spare page."""
        needed = [-(-length // PAGE) for length in lengths]
        numbers = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(order)).tolist()
        table = torch.full((len(lengths), max(needed) + 1), sum(needed), dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)])
        zeros = torch.zeros(len(lengths), dtype=torch.int32, device=self.device)
        return Placed(self.pages(sum(needed) + 1, poison), table.to(self.device), zeros)

    def write(self, stored: Placed, parts: Sequence[Tokens], kernels: Any = None) -> None:
        """Append to each sequence its part, in one launch: shorter parts are padded on the left."""
        keys, values = padded([part.keys for part in parts]), padded([part.values for part in parts])
        counts = self.counts(parts, keys.shape[1])
        (kernels or self.kernels).write(stored.pages, keys, values, stored.table, stored.lengths, counts)
        stored.lengths = stored.lengths + (keys.shape[1] if counts is None else counts)

    def prefill(self, stored: Placed, parts: Sequence[Tokens], kernels: Any = None) -> list[torch.Tensor]:
        """Attention of the parts that were written last: [n, H_q, D] for each. Two queries or more: one token alone is decoded."""
        queries = padded([part.queries for part in parts], 2)
        attend = (kernels or self.kernels).prefill
        found = attend(queries, stored.pages, stored.table, stored.lengths, self.counts(parts, queries.shape[1]), **self.options)
        return [rows[queries.shape[1] - len(part) :] for rows, part in zip(found, parts, strict=True)]

    def decode(self, stored: Placed, parts: Sequence[Tokens], kernels: Any = None) -> torch.Tensor:
        """Attention of each part's last token: [B, H_q, D]."""
        queries = torch.stack([part.queries[-1] for part in parts])
        return (kernels or self.kernels).decode(queries, stored.pages, stored.table, stored.lengths, **self.options)

    def crowd(self, others: int = 0) -> list[Tokens]:
        """As many copies of a short sequence as, beside ``others``, make a batch for which decode is compiled as for a crowd."""
        (short,) = self.tokens([PAGE + 1])
        return [short] * (self.kernels.crowd(self.pages(1)) - others)

    def counts(self, parts: Sequence[Tokens], width: int) -> torch.Tensor | None:
        """Tokens of each part, int32 [B]; None, as a server says it, where nothing is padded to that width."""
        if all(len(part) == width for part in parts):
            return None
        return torch.tensor([len(part) for part in parts], dtype=torch.int32, device=self.device)

    def attend(self, sequences: Sequence[Tokens], order: int = 0, poison: bool = False) -> list[torch.Tensor]:
        """For each sequence, its prefill in one shot and then the decode of its last token: [n + 1, H_q, D]."""
        stored = self.place([len(sequence) for sequence in sequences], order, poison)
        self.write(stored, sequences)
        decoded = self.decode(stored, sequences)
        return [torch.cat([rows, last[None]]) for rows, last in zip(self.prefill(stored, sequences), decoded, strict=True)]


def empty(format: str, size: tuple[int, ...], poison: bool = False) -> torch.Tensor:
    """A tensor of zeros, or of NaN."""
    if format == "fp8_e4m3":
        return torch.full(size, 0x7F if poison else 0, dtype=torch.uint8).view(fp8.E4M3)
    return torch.full(size, math.nan if poison else 0.0, dtype=DTYPES[format])


def padded(parts: Sequence[torch.Tensor], least: int = 1) -> torch.Tensor:
    """Parts [n, H, D] as one tensor [B, T, H, D], each at its end; zeros before. T is ``least`` or more."""
    longest = max(least, *(len(part) for part in parts))
    whole = parts[0].new_zeros((len(parts), longest, *parts[0].shape[1:]))
    for row, part in enumerate(parts):
        whole[row, longest - len(part) :] = part
    return whole


def warm(rigs: Sequence[Rig]) -> None:
    """Have compiled what the checks launch, of several rigs at a time; compilers run beside each other.

    What fails here fails again in the check that needs it, and is told there.
    """

    def launch(rig: Rig) -> None:
        with suppress(Exception), torch.inference_mode():
            for lengths in ((PAGE + 2, PAGE + 3), (PAGE + 3,), (PAGE,), (1,)):
                rig.attend(rig.tokens(lengths))
            if crowd := rig.crowd():
                rig.attend(crowd)

    with ThreadPoolExecutor(max(1, len(rigs))) as pool:
        list(pool.map(launch, rigs))


# ---------------------------------------------------------------- checks of the kernels


def batch_independence(rig: Rig, finding: Finding) -> None:
    """A sequence alone; among others of other lengths; and decoded in a crowd.

    There programs share out the work otherwise, and where the kernel is compiled otherwise for a crowd, it is at least that large.
    """
    sequences = rig.tokens(rig.lengths())
    crowd = [*sequences, *rig.tokens([len(sequences[-1])] * rig.plan.batch)]
    crowd += rig.crowd(len(crowd))
    stored = rig.place([len(sequence) for sequence in crowd])
    rig.write(stored, crowd)
    crowded = rig.decode(stored, crowd)[: len(sequences)]
    for sequence, together, decoded in zip(sequences, rig.attend(sequences), crowded, strict=True):
        (alone,) = rig.attend([sequence])
        finding.same(together, alone, f"{rig.shape}, {len(sequence)} tokens among {len(sequences)} sequences")
        finding.same(decoded, alone[-1], f"{rig.shape}, {len(sequence)} tokens, decoded among {len(crowd)} sequences")
    finding.notes.append(f"{_words(rig, sequences)}; decoded among {len(crowd)} by {rig.kernels.describe(stored.pages, len(crowd))}")


def page_independence(rig: Rig, finding: Finding) -> None:
    """The same sequences in other pages."""
    sequences = rig.tokens(rig.lengths())
    for sequence, one, other in zip(sequences, rig.attend(sequences), rig.attend(sequences, order=1), strict=True):
        finding.same(other, one, f"{rig.shape}, {len(sequence)} tokens in other pages")
    finding.notes.append(_words(rig, sequences))


def poisoned_pages(rig: Rig, finding: Finding) -> None:
    """Pages that were full of NaN before anything was written, the spare page and the rest of the last pages included."""
    sequences = rig.tokens(rig.lengths())
    for sequence, one, other in zip(sequences, rig.attend(sequences), rig.attend(sequences, poison=True), strict=True):
        finding.same(other, one, f"{rig.shape}, {len(sequence)} tokens in poisoned pages")
    finding.notes.append(_words(rig, sequences))


def returned_pages(rig: Rig, finding: Finding) -> None:
    """Pages that other sequences filled before."""
    lengths = rig.lengths()
    former, sequences = rig.tokens(lengths), rig.tokens(lengths)
    stored = rig.place(lengths)
    rig.write(stored, former)
    stored.lengths = torch.zeros_like(stored.lengths)
    shorter = [sequence.part(0, max(1, len(sequence) - 3)) for sequence in sequences]
    rig.write(stored, shorter)
    for sequence, rows, last, fresh in zip(
        shorter, rig.prefill(stored, shorter), rig.decode(stored, shorter), rig.attend(shorter), strict=True
    ):
        finding.same(torch.cat([rows, last[None]]), fresh, f"{rig.shape}, {len(sequence)} tokens in returned pages")
    finding.notes.append(_words(rig, shorter))


def chunked_equals_one_shot(rig: Rig, finding: Finding) -> None:
    """Prefill in chunks that end within pages."""
    longest = max(rig.lengths())
    (sequence,) = rig.tokens([longest])
    size = longest // 3 + 1
    stored, rows = rig.place([longest]), []
    for first in range(0, longest, size):
        part = sequence.part(first, min(longest, first + size))
        rig.write(stored, [part])
        rows += rig.prefill(stored, [part])
    whole = rig.attend([sequence])[0][:-1]
    finding.near(torch.cat(rows), whole, TOLERANCES[rig.arm.compute]["chunks"], f"{rig.shape}, chunks of {size}")
    finding.notes.append(f"attention {rig.shape} of {longest} tokens in chunks of {size}")


def page_border_appends(rig: Rig, finding: Finding) -> None:
    """Single tokens appended across page borders, against one write of all."""
    starts, steps = (0, PAGE - 2, PAGE, 2 * PAGE - 1), 3
    sequences = rig.tokens([start + steps for start in starts])
    whole, grown = (rig.place([len(sequence) for sequence in sequences]) for _ in range(2))
    rig.write(whole, sequences)
    rig.write(grown, [sequence.part(0, start) for sequence, start in zip(sequences, starts, strict=True)])
    for step in range(steps):
        rig.write(grown, [sequence.part(start + step, start + step + 1) for sequence, start in zip(sequences, starts, strict=True)])
    for side in ("keys", "values", "key_scales", "value_scales"):
        one, other = getattr(whole.pages, side), getattr(grown.pages, side)
        if one is not None:
            finding.same(other, one, f"{rig.shape}, stored {side}")
    finding.notes.append(f"{steps} appends behind {', '.join(str(start) for start in starts)} tokens")


def border_lengths(rig: Rig, finding: Finding) -> None:
    """Each length by itself, against the oracle over bytes that the oracle stored."""
    sequences = rig.tokens(rig.lengths())
    for sequence in sequences:
        stored, own = rig.place([len(sequence)]), rig.place([len(sequence)])
        rig.write(stored, [sequence])
        rig.write(own, [sequence], oracle)
        expected = torch.cat([*rig.prefill(own, [sequence], oracle), rig.decode(own, [sequence], oracle)])
        found = torch.cat([*rig.prefill(stored, [sequence]), rig.decode(stored, [sequence])])
        finding.near(found, expected, TOLERANCES[rig.arm.compute]["oracle"], f"{rig.shape}, {len(sequence)} tokens")
    finding.notes.append(_words(rig, sequences))


def oracle_error(rig: Rig, finding: Finding) -> None:
    """A batch of long sequences: against the oracle on the same stored bytes, and on states that were never quantised."""
    longest = max(rig.lengths())
    sequences = rig.tokens([max(1, longest - row) for row in range(rig.plan.batch)])
    stored = rig.place([len(sequence) for sequence in sequences])
    rig.write(stored, sequences)
    plain = Rig(oracle, _unquantised(rig.arm), rig.shape, rig.plan, rig.device)
    exact = plain.place([len(sequence) for sequence in sequences])
    plain.write(exact, sequences)
    allowed, eight = TOLERANCES[rig.arm.compute]["oracle"], TOLERANCES["fp8_e4m3"]
    lost = eight["keys"] if rig.arm.keys == "fp8_e4m3" else eight["values"] if rig.arm.values == "fp8_e4m3" else allowed
    for kind in ("prefill", "decode"):
        found, same, other = (
            _joined(getattr(each, kind)(where, sequences, kernels))
            for each, where, kernels in ((rig, stored, None), (rig, stored, oracle), (plain, exact, None))
        )
        finding.near(found, same, allowed, f"{rig.shape}, {kind}, same bytes")
        finding.near(found, other, lost, f"{rig.shape}, {kind}, unquantised")
        finding.notes.append(f"{rig.shape} {kind} {relative(found, same):.2e} on the same bytes, {relative(found, other):.2e} unquantised")


def quantise_all_inputs(rig: Rig, finding: Finding) -> None:
    """Every bit pattern of 16-bit floats through the write kernel: torch's cast after clamping where fp8 is stored, else itself."""
    for word in ("fp16", "bf16"):
        inputs = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[word]).to(rig.device)
        stores = {side: format if format == "fp8_e4m3" else word for side, format in (("keys", rig.arm.keys), ("values", rig.arm.values))}
        arm = records.Arm(
            name="all-inputs", role="candidate", implementation="fused", compute=word, **stores,  # type: ignore[arg-type]
            scales="unit" if "fp8_e4m3" in stores.values() else "none",
        )  # fmt: skip
        one = Rig(rig.kernels, arm, rig.shape, rig.plan, rig.device)
        states = inputs.view(-1, 1, rig.shape.dim).repeat(1, rig.shape.kv_heads, 1)  # all of them in every head
        stored = one.place([len(states)])
        one.write(stored, [Tokens(states, states, states)])
        places = stored.table[0, : len(states) // PAGE].long()
        for side, format in stores.items():
            pages = getattr(stored.pages, side)
            found = bits(pages)[places].transpose(0, 1)
            found = found.transpose(2, 3) if (side, format) == ("values", "fp8_e4m3") else found
            expected = inputs.clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.E4M3) if format == "fp8_e4m3" else inputs
            expected = bits(expected).repeat(rig.shape.kv_heads).view(expected.dtype)
            found, missing = found.reshape(-1).view(pages.dtype), expected.float().isnan()
            finding.fact(bool(found.float()[missing].isnan().all()), f"{side}: a NaN in {word} is stored as a number")
            finding.same(bits(found)[~missing], bits(expected)[~missing], f"{side}, every {word}")
    finding.notes.append("65,536 inputs of fp16 and of bf16")


def kernel_recorded(rig: Rig, finding: Finding) -> None:
    """The kernels say themselves which one runs on these pages."""
    said, asked = rig.kernels.describe(rig.pages(1)), f"fused decode {formats(rig.arm.keys, rig.arm.values)} d{rig.shape.dim} page{PAGE}"
    finding.fact(f"{said} ".startswith(f"{asked} "), f"{said!r} instead of {asked!r}")
    finding.notes.append(said)


def unsupported_refused(rig: Rig, finding: Finding) -> None:
    """What is not supported raises, each where a server would come upon it, and leaves the stored bytes as they were.

    The kernels look at shapes and formats and read no data; that every place of a table is right is the pool's work, or that of
    ``check_table`` for a table that no pool made.
    """
    (sequence,) = rig.tokens([PAGE + 1])
    stored = rig.place([PAGE + 1])
    rig.write(stored, [sequence])
    before = [bits(side).clone() for side in (stored.pages.keys, stored.pages.values)]
    refuse(finding, "the kernels", _wrong_calls(rig, stored, sequence))
    refuse(finding, "the pool", _wrong_pools(rig))
    refuse(finding, "check_table, of tables made by hand", _wrong_tables(rig))
    for side, was in zip((stored.pages.keys, stored.pages.values), before, strict=True):
        finding.same(bits(side), was, "stored bytes after what was refused")


Requests = Iterator[tuple[str, Callable[[], object]]]


def refuse(finding: Finding, guard: str, requests: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Each request has to raise a refusal; the finding says which ``guard`` gave it."""
    names = []
    for name, request in requests:
        names.append(name)
        try:
            request()
        except (RefusedError, InputError):
            finding.fact(True, name)
        except Exception as error:
            finding.fact(False, f"{name}: {type(error).__name__} instead of a refusal by {guard}")
        else:
            finding.fact(False, f"{name}: not refused by {guard}")
    finding.notes.append(f"refused by {guard}: {', '.join(names)}")


def _wrong_calls(rig: Rig, stored: Placed, sequence: Tokens) -> Requests:
    """Calls of the kernels that their checks have to stop."""
    kernels, shape, pages, options = rig.kernels, rig.shape, stored.pages, rig.options
    query, keys = sequence.queries[-1:], sequence.keys[None, -1:]
    table, lengths = stored.table, stored.lengths
    other = torch.float16 if rig.dtype == torch.bfloat16 else torch.bfloat16

    def decode(query: torch.Tensor = query, pages: Pages = pages, table: torch.Tensor = table, lengths: torch.Tensor = lengths) -> object:
        return kernels.decode(query, pages, table, lengths, **options)

    odd = Rig(kernels, rig.arm, dataclasses.replace(shape, dim=80), rig.plan, rig.device)
    yield "head dim 80", lambda: decode(odd.tokens([1])[0].queries, odd.pages(2))
    yield "float32 query", lambda: decode(query.float())
    yield "float32 keys", lambda: kernels.write(pages, keys.float(), keys, table, lengths - 1)
    yield "batch of zero", lambda: decode(query[:0], pages, table[:0], lengths[:0])
    yield "a query whose last dimension is not contiguous", lambda: decode(query.repeat(1, 1, 2)[..., ::2])
    yield (
        "keys whose last dimension is not contiguous",
        lambda: kernels.write(pages, keys.repeat(1, 1, 1, 2)[..., ::2], keys, table, lengths - 1),
    )
    yield "int64 table", lambda: decode(table=table.long())
    yield "int64 lengths", lambda: decode(lengths=lengths.long())
    yield "a table of another batch", lambda: decode(table=table.repeat(2, 1))
    yield "another head dimension than the pages'", lambda: decode(query[..., : shape.dim // 2].contiguous())
    yield "no tokens", lambda: kernels.prefill(query[:, None][:, :0], pages, table, lengths, **options)
    yield "keys of other heads", lambda: kernels.write(pages, keys.repeat(1, 1, 2, 1), keys.repeat(1, 1, 2, 1), table, lengths - 1)
    yield (
        "scales in float64",
        lambda: decode(pages=dataclasses.replace(pages, value_scales=torch.ones(shape.kv_heads, dtype=torch.float64))),
    )
    if rig.arm.keys != "fp8_e4m3":
        yield "a query of another dtype than the keys", lambda: decode(query.to(other))
    if shape.kv_heads > 1:
        yield "query heads that are no multiple of the KV heads", lambda: decode(torch.cat([query, query[:, :1]], dim=1))


def _wrong_tables(rig: Rig) -> Requests:
    """Hand-made block tables and lengths, over four pages."""
    whole = rig.pages(4)

    def check(table: list[list[int]], lengths: list[int], pages: Pages = whole) -> None:
        given = (torch.tensor(numbers, dtype=torch.int32, device=rig.device) for numbers in (table, lengths))
        check_table(pages, *given)

    yield "a length beyond the table", lambda: check([[0, 1]], [2 * PAGE + 1])
    yield "a page twice in a table", lambda: check([[1, 1]], [2 * PAGE])
    yield "an open page of two sequences", lambda: check([[0], [0]], [1, 1])
    yield "a page that does not exist", lambda: check([[4]], [1])
    if rig.arm.values == "fp8_e4m3":
        zeros = torch.zeros(rig.shape.kv_heads, device=rig.device)
        yield "a zero scale", lambda: check([[0]], [1], dataclasses.replace(whole, value_scales=zeros))


def _wrong_pools(rig: Rig) -> Requests:
    """Wrong uses of a pool."""
    arm, shape = rig.arm, rig.shape

    def pool(**changes: Any) -> Pool:
        policy = {"keys": arm.keys, "values": arm.values, "scales": arm.scales, "granularity": arm.granularity}
        group = Group(layers=(0,), kv_heads=shape.kv_heads, key_dim=shape.dim, value_dim=shape.dim, **policy | changes.pop("policy", {}))
        return Pool([group], **{"tokens": 2 * PAGE, "device": rig.device} | changes)

    def freed(use: Callable[[Pool, int], object]) -> object:
        made = pool()
        sequence = made.add()
        made.append(sequence, 1)
        made.free(sequence)
        return use(made, sequence)

    def scaled(scale: float) -> None:
        eight = {"keys": arm.compute, "values": "fp8_e4m3", "scales": "fixed", "granularity": "head"}
        pool(policy=eight).set_scales(0, {"value_scales": torch.full((shape.kv_heads,), scale, device=rig.device)})

    def held(use: Callable[[Pool, int], object]) -> object:
        made = pool()
        sequence = made.add()
        made.append(sequence, PAGE + 1)
        return use(made, sequence)

    def crowded(made: Pool) -> None:
        made.extend([made.add(), made.add()], 2 * PAGE)

    yield "a length beyond the table", lambda: held(lambda made, sequence: made.append(sequence, PAGE))
    yield "more pages than there are", lambda: crowded(pool(sequences=2, total=PAGE))
    yield "pages of a freed sequence", lambda: freed(lambda made, sequence: made.table(0, [sequence]))
    yield "its length", lambda: freed(lambda made, sequence: made.lengths([sequence]))
    yield "appending to it", lambda: freed(lambda made, sequence: made.append(sequence, 1))
    yield "freeing it twice", lambda: freed(lambda made, sequence: made.free(sequence))
    yield "pages twice in a table", lambda: held(lambda made, sequence: made.table(0, [sequence, sequence]))
    yield "pages twice in a write", lambda: held(lambda made, sequence: made.extend([sequence, sequence], 1))
    yield "a zero scale", lambda: scaled(0.0)
    yield "a NaN scale", lambda: scaled(math.nan)
    yield "a budget too small", lambda: pool(budget_bytes=1)


def _unquantised(arm: records.Arm) -> records.Arm:
    return records.Arm(
        name=arm.name, role=arm.role, implementation=arm.implementation, compute=arm.compute, keys=arm.compute, values=arm.compute
    )


def _joined(found: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else torch.cat(found)


def _words(rig: Rig, sequences: Sequence[Tokens]) -> str:
    return f"attention {rig.shape} of " + ", ".join(str(len(sequence)) for sequence in sequences) + " tokens"


CHECKS: tuple[Callable[[Rig, Finding], None], ...] = (
    batch_independence,
    page_independence,
    chunked_equals_one_shot,
    page_border_appends,
    border_lengths,
    poisoned_pages,
    returned_pages,
    kernel_recorded,
    unsupported_refused,
    oracle_error,
    quantise_all_inputs,
)
"""Each is known by its name."""
