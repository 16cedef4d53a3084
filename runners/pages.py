"""Stored pages: what the kernels read and write, what a group of layers stores, and the checks of pages and tables made by hand.

A pool (:mod:`runners.paged`) makes pages and tables that are right by construction; here stands what is refused of others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from ledger.errors import InputError, RefusedError
from runners.geometry import DTYPES, check_scales

SMALLEST = 16
"""Tokens of the smallest page that the kernels read."""
_BLOCK = 1 << 20
"""Numbers in the largest block of a Triton program; one gathers a page of a head."""
_STORED = ("bf16", "fp16", "fp8_e4m3")


@dataclass(frozen=True)
class Pages:
    """One layer's stored pages: views into its group's backings.

    With P pages of ``page`` tokens, H KV heads and head dimensions D_k and D_v:

        keys     [P, H, page, D_k]   bf16, fp16 or e4m3
        values   [P, H, page, D_v]   bf16 or fp16
                 [P, H, D_v, page]   e4m3: transposed, so that consecutive tokens lie side by side, as the matrix unit takes them
        scales   None (16 bit, or ``unit``), fp32 [H] (``fixed``), or fp32 [P, H, page] (``dynamic``, per token and head)
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def page(self) -> int:
        """Tokens a page."""
        return int(self.keys.shape[2])

    @property
    def heads(self) -> int:
        """KV heads."""
        return int(self.keys.shape[1])


@dataclass(frozen=True)
class Group:
    """Layers that share backings and a block table. Formats, scales and granularity are words of ``records.Arm``.

    ``window`` w: a token sees itself and the w - 1 tokens before it; None sees everything.
    """

    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    keys: str
    values: str
    scales: str = "none"
    granularity: str = "none"
    window: int | None = None

    def check(self) -> None:
        """Raises RefusedError (``dtype``, ``scale_policy``) and InputError for a group that cannot be stored."""
        for format in (self.keys, self.values):
            if format not in _STORED:
                raise RefusedError(
                    "dtype",
                    "Pages do not hold this format.",
                    expected=", ".join(_STORED),
                    found=format,
                    next="store the keys and values in one of these.",
                )
        check_scales(self.keys, self.values, self.scales, self.granularity)
        for size in (self.kv_heads, self.key_dim, self.value_dim):
            whole(size, "heads and dimensions")
        check_window(0 if self.window is None else self.window)
        if not self.layers or min(self.kv_heads, self.key_dim, self.value_dim) < 1 or (self.window is not None and self.window < 1):
            raise InputError(
                "A group of layers is empty.",
                expected="layers, heads, dimensions and a window of at least 1",
                found=str(self),
                next="give the group layers, and sizes of at least 1.",
            )

    def shapes(self, pages: int, page: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each backing, for so many pages of ``page`` tokens: keys, values, key_scales, value_scales."""
        count, heads = len(self.layers), self.kv_heads
        eight = self.values == "fp8_e4m3"
        found = {
            "keys": ((count, pages, heads, page, self.key_dim), DTYPES[self.keys]),
            "values": ((count, pages, heads, *((self.value_dim, page) if eight else (page, self.value_dim))), DTYPES[self.values]),
        }
        scales = {"fixed": (count, heads), "dynamic": (count, pages, heads, page)}.get(self.scales)
        for side in ("key", "value"):
            if scales and getattr(self, f"{side}s") == "fp8_e4m3":
                found[f"{side}_scales"] = (scales, torch.float32)
        return found

    def bytes(self, pages: int, page: int) -> int:
        """Bytes of all backings."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(pages, page).values())

    def pages(self, tokens: int, chunk: int, page: int) -> int:
        """Pages that one sequence of ``tokens`` needs at most, written in chunks of at most ``chunk``."""
        whole = -(-tokens // page)
        return whole if self.window is None else min(whole, (self.window + chunk + page - 3) // page + 1)


# ---------------------------------------------------------------- checks


class _Stored(torch.autograd.Function):
    """The first of its inputs, as a result of all of them that has no gradient."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise RefusedError(
            "backend",
            "Attention to stored pages has no gradient.",
            expected="a forward pass alone",
            found="a backward pass through the fused attention",
            next="call it under torch.no_grad(), or train with another attention backend.",
        )


def without_gradient(result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """``result`` of attention that was computed from ``inputs``, and from what of them is stored.

    A backward pass through it raises RefusedError (``backend``), rather than to leave the inputs without a gradient.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        found: torch.Tensor = _Stored.apply(result, *inputs)
        return found
    return result


def check_window(window: object) -> None:
    """Raises InputError for what is no number of tokens that a kernel takes. 0 is no window."""
    if type(window) is not int or not 0 <= window < 1 << 31:
        raise InputError(
            "The window is no number of tokens.",
            expected="an integer from 1 to 2**31 - 1, or 0 for none",
            found=repr(window)[:100],
            next="give a window of whole tokens.",
        )


def check_page(page: int, dim: int) -> None:
    """Raises InputError for pages of so many tokens that the kernels do not read, where a head has ``dim`` dimensions."""
    if page < SMALLEST or page & (page - 1) or page * dim > _BLOCK:
        raise InputError(
            "A page has a wrong number of tokens.",
            expected=f"a power of two from {SMALLEST} to {_BLOCK // dim}",
            found=str(page),
            next="make pages of another size.",
        )


def check_reach(pages: Pages, table: torch.Tensor, starts: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """Of each sequence, the entries of its ``table`` row that positions from ``starts`` to ``ends`` [B] lie in.

    A copy to the host. Raises InputError where the table ends before, or an entry is no page.
    """
    count, page, rows = pages.keys.shape[0], pages.page, table.cpu().numpy()
    if ends.min() < 0 or ends.max() > rows.shape[1] * page:
        raise InputError(
            "A length lies beyond its block table.",
            expected=f"0 to {rows.shape[1] * page} tokens",
            found=f"{ends.min()} to {ends.max()}",
            next="make the table wider, or correct the length.",
        )
    used = [row[start // page : -(-end // page)] for row, start, end in zip(rows, starts.tolist(), ends.tolist(), strict=True)]
    entries = np.concatenate(used)
    if len(entries) and (entries.min() < 0 or entries.max() >= count):
        raise InputError(
            "A block table names a page that does not exist.",
            expected=f"0 to {count - 1}",
            found=f"{entries.min()} to {entries.max()}",
            next="name pages of the backing.",
        )
    return used


def check_table(
    pages: Pages, table: torch.Tensor, lengths: torch.Tensor, *, window: int = 0, shared: bool = False, tokens: int = 1, room: int = 0
) -> None:
    """Refuse hand-made pages and a hand-made block table that a kernel would read or write wrongly.

    ``table`` int32 [B, width], ``lengths`` int32 [B]: tokens held. Entries and scales of tokens that a ``window`` (0: none)
    leaves out are not read, and not looked at. ``shared`` declares that sequences share pages: full ones then may stand in
    several rows, and one that is not full still in one row alone, since a write would reach all of them.

    ``tokens`` of those held are attended from (a chunk of prefill; 1: a decode step), and ``room`` more are to be written.

    A copy to the host, so not for every step; tables of a :class:`runners.paged.Pool` are right by construction. Raises InputError: a
    batch or a width of zero, numbers that are not int32, a window that is none, a length below zero or beyond the table, an
    entry that is no page, a page that stands twice, a scale that is not a positive finite number.
    """
    page = pages.page
    if table.dim() != 2 or not table.numel() or lengths.shape != (len(table),) or {table.dtype, lengths.dtype} != {torch.int32}:
        raise InputError(
            "The block table is of the wrong shape, or not of integers.",
            expected="int32 [B, width] and lengths int32 [B], both at least 1",
            found=f"{table.dtype} {list(table.shape)} and lengths {lengths.dtype} {list(lengths.shape)}",
            next="give a row of pages and a length for each sequence.",
        )
    check_window(window)
    rows, held = table.cpu().numpy(), lengths.cpu().numpy()
    tokens, room = whole(tokens, "tokens"), whole(room, "room")
    if tokens < 1 or room < 0:
        raise InputError(
            "The chunk or the room is none.",
            expected="tokens of 1 or more, room of 0 or more",
            found=f"{tokens}, {room}",
            next="give the tokens that are attended from, and those to be written.",
        )
    starts = np.maximum(held.astype(np.int64) - tokens - window + 1, 0) if window else np.zeros_like(held)
    used = check_reach(pages, table, starts, held.astype(np.int64) + room)
    numbers, times = np.unique(np.concatenate(used), return_counts=True)
    often = set(numbers[times > 1].tolist())
    for row, start, length in zip(used, starts, held, strict=True):
        twice = len(np.unique(row)) != len(row)
        reached = often & set(row.tolist()) if not shared else often & set(row[int(length) // page - int(start) // page :].tolist())
        if twice or reached:
            raise InputError(
                "A page stands twice in a block table.",
                expected="each page once; full pages in several rows where sharing is declared",
                found=f"pages {few(sorted(often))}",
                next="give each place a page of its own.",
            )
    for name in ("key_scales", "value_scales"):
        scales = getattr(pages, name)
        if scales is None:
            continue
        if scales.dim() == 1:
            read = scales.cpu()
        else:  # [P, H, page]: of what is held alone, since the rest was never written
            places = [
                np.stack([row[at // page], at % page])
                for row, start, length in zip(rows, starts, held, strict=True)
                if (at := np.arange(start, int(length))).size
            ]
            where = torch.from_numpy(np.concatenate(places, axis=1).astype(np.int64) if places else np.zeros((2, 0), np.int64))
            page_of, slot = where.to(scales.device)
            read = scales[page_of, :, slot].cpu()
        wrong = read[~((read > 0) & read.isfinite())]
        if wrong.numel():
            raise InputError(
                f"The {name} hold a number that is no scale.",
                expected="positive finite numbers",
                found=_scales(wrong),
                next="write the pages, or set their scales, before they are read.",
            )


def whole(number: object, what: str) -> int:
    """A whole number as Python's integer. Raises InputError for any other, rather than to round it."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(
            f"Not a whole number: {what}.", expected="an integer", found=repr(number)[:100], next="give a whole number."
        ) from error


def _scales(numbers: torch.Tensor) -> str:
    listed = numbers.reshape(-1)[:4].tolist()
    return ", ".join(f"{number:g}" for number in listed) + (f", ... ({numbers.numel()})" if numbers.numel() > 4 else "")


def few(numbers: Iterable[int]) -> str:
    listed = [int(number) for number in numbers]
    return ", ".join(str(number) for number in listed[:12]) + (f", ... ({len(listed)})" if len(listed) > 12 else "")
