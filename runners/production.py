"""production: whether the fused path may serve. Named checks, each with what it compared and how far that lay apart.

A check of kernels runs over seeded random states, once for each distinct attention geometry of the model; a check of the
model runs its decode steps over seeded random prompts. Bit for bit means the same bytes; a tolerance is a relative error, the
norm of the difference by the norm of what was expected. All checks of an arm are made, whatever the first of them finds.

Evidence is ``checks.jsonl``, one canonical line a check and arm: ``compared`` values, of which ``differing`` differ (or stand in
a comparison beyond its tolerance), the ``largest`` difference or relative error, its ``tolerance`` (null: bit for bit), and a
``detail`` in words. Where comparisons have different tolerances, the line has the one that comes nearest to its own, or lies
furthest beyond. A check passes where something was compared, and nothing differs or the largest is within the tolerance; one
that could not be made compared nothing, says why, and does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ledger import digest, records
from ledger.errors import LedgerError
from runners import fp8, oracle
from runners.geometry import DTYPES
from runners.paged import PAGE, Pages

TOLERANCES = {
    "bf16": {"oracle": 3e-3, "chunks": 4e-3, "logits": 5e-2},
    "fp16": {"oracle": 3e-3, "chunks": 1e-3, "logits": 1e-2},
}
"""Relative errors that are allowed, by compute dtype: attention to the float32 oracle on the same stored bytes; attention in
chunks to one shot; and a model's logits in chunks to one shot, whose other sums also change with the shape."""
UNQUANTISED = {"keys": 6e-2, "values": 3e-2, "": 3e-3}
"""Relative error of attention to unquantised states that is allowed, by the most delicate side that is stored in fp8."""
LONGEST_DETAIL = 1000


# ---------------------------------------------------------------- findings


@dataclass
class Finding:
    """What one check found for one arm: a line of ``checks.jsonl``."""

    check: str
    arm: str
    compared: int = 0
    differing: int = 0
    largest: float = 0.0
    tolerance: float | None = None
    broken: bool = False
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def same(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Compare two tensors bit for bit."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.fact(False, f"{what}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}")
            return
        unlike = _bits(found) != _bits(expected)
        self.compared += found.numel()
        if not unlike.any():
            return
        self.differing += int(unlike.sum())
        gap = (found.float() - expected.float()).abs().max().item()
        self.largest = max(self.largest, gap if math.isfinite(gap) else math.inf)
        self.wrong.append(f"{what}: {int(unlike.sum())} of {found.numel()} differ")

    def near(self, found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
        """Compare two tensors of one shape by their relative error."""
        error = relative(found, expected)
        self.compared += found.numel()
        if self.tolerance is None or error / tolerance > self.largest / self.tolerance:
            self.largest, self.tolerance = error, tolerance
        if not error <= tolerance:
            self.differing += found.numel()
            self.wrong.append(f"{what}: relative error {error:.3g} > {tolerance:g}")

    def fact(self, holds: bool, what: str) -> None:
        """Something that holds or does not."""
        self.compared += 1
        if not holds:
            self.differing += 1
            self.wrong.append(what)

    def attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do ``work``; where it cannot be done, the check did not compare all that it has to, and counts as not made."""
        try:
            work(*arguments)
        except Exception as error:
            self.broken = True
            text = str(error) if isinstance(error, LedgerError) else f"{type(error).__name__}: {error}"
            self.wrong.append(f"could not be made: {text[:400]}")

    def line(self) -> bytes:
        """The canonical line."""
        more = [f"and {len(self.wrong) - 4} more"] if len(self.wrong) > 4 else []
        detail = "; ".join([*self.wrong[:4], *more, *dict.fromkeys(self.notes)])
        value = {
            "check": self.check,
            "arm": self.arm,
            "compared": 0 if self.broken else self.compared,
            "differing": self.differing,
            "largest": self.largest,
            "tolerance": self.tolerance,
            "detail": detail[:LONGEST_DETAIL],
        }
        return digest.canonical(value) + b"\n"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous()
    return whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of ``expected``; infinite where it is no number."""
    error = ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()
    return error if math.isfinite(error) else math.inf


# ---------------------------------------------------------------- states and pages


@dataclass(frozen=True)
class Shape:
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
class Stored:
    """Pages, and where in them each sequence of a batch is: table int32 [B, width], lengths int32 [B] of what is stored."""

    pages: Pages
    table: torch.Tensor
    lengths: torch.Tensor


class Bench:
    """Seeded states of one shape, stored as an arm asks, and the kernels that write and read them.

    ``kernels`` has the functions of :mod:`runners.fused`.
    """

    def __init__(self, kernels: Any, arm: records.Arm, shape: Shape, plan: records.Production, device: str) -> None:
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
            side: empty(format, (count, heads, dim, PAGE) if (side, format) == ("values", "fp8_e4m3") else (count, heads, PAGE, dim), poison)
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

    def place(self, lengths: Sequence[int], order: int = 0, poison: bool = False) -> Stored:
        """Pages for sequences that will grow to ``lengths``, shuffled by the seed ``order``. What no sequence needs names one spare page."""
        needed = [-(-length // PAGE) for length in lengths]
        numbers = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(order)).tolist()
        table = torch.full((len(lengths), max(needed) + 1), sum(needed), dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)])
        zeros = torch.zeros(len(lengths), dtype=torch.int32, device=self.device)
        return Stored(self.pages(sum(needed) + 1, poison), table.to(self.device), zeros)

    def write(self, stored: Stored, parts: Sequence[Tokens], kernels: Any = None) -> None:
        """Append to each sequence its part, in one launch: shorter parts are padded on the left."""
        counts = self.counts(parts)
        keys, values = padded([part.keys for part in parts]), padded([part.values for part in parts])
        (kernels or self.kernels).write(stored.pages, keys, values, stored.table, stored.lengths, counts)
        stored.lengths = stored.lengths + counts

    def prefill(self, stored: Stored, parts: Sequence[Tokens], kernels: Any = None) -> list[torch.Tensor]:
        """Attention of the parts that were written last: [n, H_q, D] for each."""
        queries = padded([part.queries for part in parts])
        attend = (kernels or self.kernels).prefill
        found = attend(queries, stored.pages, stored.table, stored.lengths, self.counts(parts), **self.options)
        return [rows[queries.shape[1] - len(part) :] for rows, part in zip(found, parts, strict=True)]

    def decode(self, stored: Stored, parts: Sequence[Tokens], kernels: Any = None) -> torch.Tensor:
        """Attention of each part's last token: [B, H_q, D]."""
        queries = torch.stack([part.queries[-1] for part in parts])
        return (kernels or self.kernels).decode(queries, stored.pages, stored.table, stored.lengths, **self.options)

    def counts(self, parts: Sequence[Tokens]) -> torch.Tensor:
        """Tokens of each part, int32 [B]."""
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


def padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [n, H, D] as one tensor [B, T, H, D], each at its end; zeros before."""
    longest = max(len(part) for part in parts)
    whole = parts[0].new_zeros((len(parts), longest, *parts[0].shape[1:]))
    for row, part in enumerate(parts):
        whole[row, longest - len(part) :] = part
    return whole


# ---------------------------------------------------------------- checks of the kernels


def batch_independence(bench: Bench, finding: Finding) -> None:
    """A sequence alone, and among others in two orders."""
    sequences = bench.tokens(bench.lengths())
    together, reverse = bench.attend(sequences), bench.attend(sequences[::-1])[::-1]
    for sequence, one, other in zip(sequences, together, reverse, strict=True):
        (alone,) = bench.attend([sequence])
        finding.same(one, alone, f"{bench.shape}, {len(sequence)} tokens among {len(sequences)} sequences")
        finding.same(other, alone, f"{bench.shape}, {len(sequence)} tokens among {len(sequences)} sequences in reverse")
    finding.notes.append(f"kernels, lengths {_words(sequences)}")


def page_independence(bench: Bench, finding: Finding) -> None:
    """The same sequences in other pages."""
    sequences = bench.tokens(bench.lengths())
    for sequence, one, other in zip(sequences, bench.attend(sequences), bench.attend(sequences, order=1), strict=True):
        finding.same(other, one, f"{bench.shape}, {len(sequence)} tokens in other pages")


def poisoned_pages(bench: Bench, finding: Finding) -> None:
    """Pages that were full of NaN before anything was written, the spare page and the rest of the last pages included."""
    sequences = bench.tokens(bench.lengths())
    for sequence, one, other in zip(sequences, bench.attend(sequences), bench.attend(sequences, poison=True), strict=True):
        finding.same(other, one, f"{bench.shape}, {len(sequence)} tokens in poisoned pages")


def returned_pages(bench: Bench, finding: Finding) -> None:
    """Pages that other sequences filled before."""
    lengths = bench.lengths()
    former, sequences = bench.tokens(lengths), bench.tokens(lengths)
    stored = bench.place(lengths)
    bench.write(stored, former)
    stored.lengths = torch.zeros_like(stored.lengths)
    shorter = [sequence.part(0, max(1, len(sequence) - 3)) for sequence in sequences]
    bench.write(stored, shorter)
    for sequence, rows, last, fresh in zip(
        shorter, bench.prefill(stored, shorter), bench.decode(stored, shorter), bench.attend(shorter), strict=True
    ):
        finding.same(torch.cat([rows, last[None]]), fresh, f"{bench.shape}, {len(sequence)} tokens in returned pages")


def chunked_equals_one_shot(bench: Bench, finding: Finding) -> None:
    """Prefill in chunks that end within pages."""
    longest = max(bench.lengths())
    (sequence,) = bench.tokens([longest])
    size = longest // 3 + 1
    stored, rows = bench.place([longest]), []
    for first in range(0, longest, size):
        part = sequence.part(first, min(longest, first + size))
        bench.write(stored, [part])
        rows += bench.prefill(stored, [part])
    whole = bench.attend([sequence])[0][:-1]
    finding.near(torch.cat(rows), whole, TOLERANCES[bench.arm.compute]["chunks"], f"{bench.shape}, chunks of {size}")
    finding.notes.append(f"attention of {longest} tokens in chunks of {size}")


def page_border_appends(bench: Bench, finding: Finding) -> None:
    """Single tokens appended across page borders, against one write of all."""
    starts, steps = (0, PAGE - 2, PAGE, 2 * PAGE - 1), 3
    sequences = bench.tokens([start + steps for start in starts])
    whole, grown = (bench.place([len(sequence) for sequence in sequences]) for _ in range(2))
    bench.write(whole, sequences)
    bench.write(grown, [sequence.part(0, start) for sequence, start in zip(sequences, starts, strict=True)])
    for step in range(steps):
        bench.write(grown, [sequence.part(start + step, start + step + 1) for sequence, start in zip(sequences, starts, strict=True)])
    for side in ("keys", "values", "key_scales", "value_scales"):
        one, other = getattr(whole.pages, side), getattr(grown.pages, side)
        if one is not None:
            finding.same(other, one, f"{bench.shape}, stored {side}")
    finding.notes.append(f"{steps} appends behind {', '.join(str(start) for start in starts)} tokens")


def border_lengths(bench: Bench, finding: Finding) -> None:
    """Each length by itself, against the oracle over bytes that the oracle stored."""
    for sequence in bench.tokens(bench.lengths()):
        stored, own = bench.place([len(sequence)]), bench.place([len(sequence)])
        bench.write(stored, [sequence])
        bench.write(own, [sequence], oracle)
        expected = torch.cat([*bench.prefill(own, [sequence], oracle), bench.decode(own, [sequence], oracle)])
        found = torch.cat([*bench.prefill(stored, [sequence]), bench.decode(stored, [sequence])])
        finding.near(found, expected, TOLERANCES[bench.arm.compute]["oracle"], f"{bench.shape}, {len(sequence)} tokens")
        finding.notes.append(f"{len(sequence)} tokens")


def oracle_error(bench: Bench, finding: Finding) -> None:
    """A batch of long sequences: against the oracle on the same stored bytes, and on states that were never quantised."""
    longest = max(bench.lengths())
    sequences = bench.tokens([max(1, longest - row) for row in range(bench.plan.batch)])
    stored = bench.place([len(sequence) for sequence in sequences])
    bench.write(stored, sequences)
    plain = Bench(oracle, _unquantised(bench.arm), bench.shape, bench.plan, bench.device)
    exact = plain.place([len(sequence) for sequence in sequences])
    plain.write(exact, sequences)
    lost = "keys" if bench.arm.keys == "fp8_e4m3" else "values" if bench.arm.values == "fp8_e4m3" else ""
    for kind in ("prefill", "decode"):
        found, same, other = (
            _joined(getattr(each, kind)(where, sequences, kernels))
            for each, where, kernels in ((bench, stored, None), (bench, stored, oracle), (plain, exact, None))
        )
        finding.near(found, same, TOLERANCES[bench.arm.compute]["oracle"], f"{bench.shape}, {kind}, same bytes")
        finding.near(found, other, UNQUANTISED[lost], f"{bench.shape}, {kind}, unquantised")
        finding.notes.append(f"{bench.shape} {kind} {relative(found, same):.2e} on the same bytes, {relative(found, other):.2e} unquantised")


def quantise_all_inputs(bench: Bench, finding: Finding) -> None:
    """Every bit pattern of 16-bit floats through the write kernel: torch's cast after clamping where fp8 is stored, else itself."""
    for word in ("fp16", "bf16"):
        inputs = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[word]).to(bench.device)
        formats = {side: format if format == "fp8_e4m3" else word for side, format in (("keys", bench.arm.keys), ("values", bench.arm.values))}
        arm = records.Arm(
            name="all-inputs", role="candidate", implementation="fused", compute=word, **formats,  # type: ignore[arg-type]
            scales="unit" if "fp8_e4m3" in formats.values() else "none",
        )  # fmt: skip
        one = Bench(bench.kernels, arm, Shape(1, 1, bench.shape.dim), bench.plan, bench.device)
        states = inputs.view(-1, 1, bench.shape.dim)
        stored = one.place([len(states)])
        one.write(stored, [Tokens(states, states, states)])
        places = stored.table[0, : len(states) // PAGE].long()
        for side, format in formats.items():
            pages = getattr(stored.pages, side)
            found = _bits(pages)[places, 0].view(pages.dtype)
            found = found.transpose(1, 2) if (side, format) == ("values", "fp8_e4m3") else found
            expected = inputs.clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.E4M3) if format == "fp8_e4m3" else inputs
            found, missing = found.reshape(-1), expected.float().isnan()
            finding.fact(bool(found.float()[missing].isnan().all()), f"{side}: a NaN in {word} is stored as a number")
            finding.same(_bits(found)[~missing], _bits(expected)[~missing], f"{side}, every {word}")
    finding.notes.append("65,536 inputs of fp16 and of bf16")


def _unquantised(arm: records.Arm) -> records.Arm:
    return records.Arm(
        name=arm.name, role=arm.role, implementation=arm.implementation, compute=arm.compute, keys=arm.compute, values=arm.compute
    )


def _joined(found: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else torch.cat(found)


def _words(sequences: Sequence[Tokens]) -> str:
    return ", ".join(str(len(sequence)) for sequence in sequences)
