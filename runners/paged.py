"""The page pool: who holds which stored page, and how pages come and go.

Layers of one geometry and one format form a group. A group has one key backing, one value backing and, where its
format stores scales, backings for these, each a single allocation over all its layers; and one block table for all
of them, since its layers always hold the same tokens. Nothing reinterprets one backing as another, so groups may
differ in format, in head dimension and in window.

Lengths, tables and reference counts are kept on the host, and every wrong use is refused there, before a kernel
starts. A windowed group gives pages back that no later token can see; an entry of its table before the window keeps
its old number, which is a valid page, and is never read.
"""

from __future__ import annotations

import copy
import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch

from ledger.errors import InputError, RefusedError
from ledger.records import Backing
from runners import fp8
from runners.geometry import word
from runners.pages import Group, Pages, few, whole

PAGE = 64
"""Tokens a page, unless said otherwise."""
_SLACK = 2 << 20
"""Bytes by which torch's CUDA allocator may round one allocation up."""
_MOST = (1 << 31) - 1
"""Most tokens of a sequence: lengths are int32."""
_KEPT = 64
"""Bytes of host memory that a page takes in lists of free pages and holds, rounded up."""


class _Held:
    """A group's backings, block tables and reference counts."""

    def __init__(self, group: Group, pages: int, page: int, sequences: int, width: int, device: torch.device, order: np.ndarray) -> None:
        self.group, self.page = group, page
        self.backings = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in group.shapes(pages, page).items()}
        if group.scales == "fixed":
            for name in self.backings.keys() & {"key_scales", "value_scales"}:
                self.backings[name].fill_(float("nan"))
        self.host = torch.zeros(sequences, width, dtype=torch.int32)
        self.device = torch.zeros(sequences, width, dtype=torch.int32, device=device)
        self.rows = self.host.numpy()
        self.dirty = False
        self.first = np.zeros(sequences, np.int64)
        """Of each sequence, the first page of its table that it still holds ..."""
        self.last = np.zeros(sequences, np.int64)
        """... and the one behind its last."""
        self.shares = np.zeros(pages, np.int64)
        self.free: list[int] = order[::-1].tolist()
        self.scaled: set[int] = set()
        """Layers, counted within the group, whose ``fixed`` scales were set."""

    def visible(self, length: int) -> int:
        """The first page of a table that a token behind ``length`` others can still see."""
        return 0 if self.group.window is None else max(0, length - self.group.window + 1) // self.page

    def drop(self, sequence: int, first: int, last: int) -> None:
        """Give back the sequence's hold of entries ``first`` to ``last`` of its table."""
        self.release(self.rows[sequence, first:last])

    def release(self, entries: np.ndarray) -> None:
        """Give back one hold of each of these pages; those that nobody holds any more are free."""
        for page in entries.tolist():
            self.shares[page] -= 1
            if not self.shares[page]:
                self.free.append(page)

    def take(self, sequence: int, entry: int) -> int:
        """A free page for that entry of the table. The caller has seen that there is one."""
        page = self.free.pop()
        self.shares[page] = 1
        self.rows[sequence, entry] = page
        self.dirty = True
        return page

    def copy(self, source: int, target: int) -> None:
        """The bytes of one page to another, in all layers."""
        for name, backing in self.backings.items():
            if self.group.scales != "fixed" or not name.endswith("scales"):
                raw = backing.view(torch.uint8) if backing.dtype == fp8.E4M3 else backing
                raw[:, target].copy_(raw[:, source])


class Pool:
    """Pages of every group, and the sequences that hold them.

    ``tokens`` is the largest length of a sequence and ``sequences`` how many there may be; each gets room for its
    full length, or all together for ``total`` tokens where that is less. ``chunk`` is the largest number of tokens
    appended to a sequence at once (a window keeps that many more); None is any. Without ``tokens`` the pool is as
    large as ``budget_bytes`` allows: ``pool.tokens`` says how many a sequence may then hold. The budget is that of the
    backings; block tables (4 bytes an entry) and lengths stand beside it, and count where the memory of the device does.
    ``seed`` shuffles the order in which pages are handed out. Page contents are not initialised.

    Raises RefusedError with the code ``budget`` where the backings would exceed ``budget_bytes``, or all of it what the
    device or the host has, before anything is allocated; with ``device`` for one that is not there; and InputError for
    sizes that are none.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        tokens: int | None = None,
        sequences: int = 1,
        total: int | None = None,
        chunk: int | None = None,
        budget_bytes: int | None = None,
        page: int = PAGE,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.device = device_of(device)
        _check_present(self.device)
        sizes = {"page": page, "sequences": sequences, "tokens": tokens, "total": total, "chunk": chunk, "budget_bytes": budget_bytes}
        for name, size in sizes.items():
            if size is not None:
                whole(size, name)
        self.page, self.sequences, self.budget_bytes = page, sequences, budget_bytes
        self._chunk = chunk
        for group in self.groups:
            group.check()
        named = [layer for group in self.groups for layer in group.layers]
        if not named or len(set(named)) != len(named):
            raise InputError(
                "Each layer belongs to one group.",
                expected="layers, each once",
                found=few(sorted(named)) or "none",
                next="name each layer once.",
            )
        if page < 1 or page & (page - 1) or any(size is not None and size < 1 for size in (sequences, tokens, total, chunk)):
            raise InputError(
                "The pool's sizes are none.",
                expected="a page that is a power of two; sequences, tokens, a total and a chunk of at least 1",
                found=f"page {page}, {sequences} sequences, {tokens} tokens, total {total}, chunk {chunk}",
                next="give sizes that are.",
            )
        fits = None if budget_bytes is None else self._largest(budget_bytes, tokens)
        if tokens is None:
            if fits is None:
                raise InputError(
                    "A pool needs a size.", expected="tokens a sequence, or a budget in bytes", found="neither", next="give one of them."
                )
            tokens = fits
            if not fits:
                self._refuse(self._bytes(1, None), 0)
        need = self._bytes(tokens, total)
        if budget_bytes is not None and need > budget_bytes:
            self._refuse(need, fits or 0)
        counts = self._counts(tokens, total)
        self._check_memory(need, sum(counts), -(-tokens // page))
        if tokens > _MOST:
            raise InputError(
                "A sequence is longer than lengths in int32 say.",
                expected=f"at most {_MOST} tokens",
                found=str(tokens),
                next="hold shorter sequences.",
            )
        self.tokens = tokens
        try:
            before, after = self._allocate(counts, -(-tokens // page), seed)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            self._lacking(f"{need} bytes", _free_bytes(self.device))
        self.allocated_bytes = None if before is None or after is None else after - before
        """By how much torch's allocator grew for the backings and tables; None on a CPU, which does not say."""
        self._check_allocator()
        self._of = {layer: (held, index) for held in self._held for index, layer in enumerate(held.group.layers)}
        self._length = np.zeros(sequences, np.int64)
        self._live = np.zeros(sequences, bool)
        self._stale = False

    def __deepcopy__(self, memo: dict[int, object]) -> Pool:
        """A pool of its own that holds the same. Raises RefusedError (``budget``) where the memory for it is not there."""
        need, width = sum(backing.bytes for backing in self.backings()), self._held[0].host.shape[1]
        self._check_memory(need, sum(len(held.shares) for held in self._held), width)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        with torch.inference_mode(False):
            for name, value in vars(self).items():
                setattr(twin, name, copy.deepcopy(value, memo))
        for held in twin._held:
            held.rows = held.host.numpy()
        return twin

    def _allocate(self, counts: Sequence[int], width: int, seed: int | None) -> tuple[int | None, int | None]:
        """Backings, tables and lengths; the bytes that torch's allocator had handed out before and after."""
        generator = None if seed is None else np.random.default_rng(seed)
        self._held = []
        # A pool made in inference mode may be written to outside of it. No garbage of others is freed while memory is counted.
        with torch.inference_mode(False), _uncollected():
            before = _allocated(self.device)
            for group, count in zip(self.groups, counts, strict=True):
                order = np.arange(count) if generator is None else generator.permutation(count)
                self._held.append(_Held(group, count, self.page, self.sequences, width, self.device, order))
            self._lengths = torch.zeros(self.sequences, dtype=torch.int32, device=self.device)
            return before, _allocated(self.device)

    # ------------------------------------------------------------ sizes

    def _counts(self, tokens: int, total: int | None) -> list[int]:
        """Pages of each group."""
        counts = []
        for group in self.groups:
            count = self.sequences * group.pages(tokens, self._chunk or tokens, self.page)
            if total is not None:  # each sequence may waste all but one token of its last page
                count = min(count, -(-total // self.page) + self.sequences)
            counts.append(count)
        return counts

    def _bytes(self, tokens: int, total: int | None) -> int:
        return sum(group.bytes(count, self.page) for group, count in zip(self.groups, self._counts(tokens, total), strict=True))

    def _largest(self, budget: int, asked: int | None) -> int:
        """Tokens a sequence that fit ``budget`` bytes, whole pages, ``asked`` at most; 0 where not even one page fits."""
        low, high = 0, max(1, min(-(-(asked or budget) // self.page), _MOST // self.page))
        while low < high:
            middle = (low + high + 1) // 2
            if self._bytes(middle * self.page, None) <= budget:
                low = middle
            else:
                high = middle - 1
        return low * self.page

    def _check_memory(self, backings: int, pages: int, width: int) -> None:
        """Refuse what the device, or the host for its lists and tables, does not have. Raises RefusedError (``budget``)."""
        tables = 4 * self.sequences * (width * len(self.groups) + 1)
        needs = [(self.device, backings + tables), (torch.device("cpu"), tables + _KEPT * pages)]
        if self.device.type == "cpu":
            needs = [(self.device, sum(need for _, need in needs))]
        for device, need in needs:
            free = _free_bytes(device)
            if free is not None and need > free:
                self._lacking(f"{need} bytes, tables included", free, device)

    def _lacking(self, need: str, free: int | None, device: torch.device | None = None) -> NoReturn:
        device = device or self.device
        has = "less" if free is None else f"{free} bytes"
        raise RefusedError(
            "budget",
            "The cache does not fit the memory that is there.",
            expected=f"at most the memory of {device}: {has}" + (" free" if device.type == "cuda" else ""),
            found=f"{need}, for {self.sequences} sequences",
            next="lower the budget, or hold fewer sequences or tokens.",
        )

    def _refuse(self, need: int, fits: int) -> None:
        raise RefusedError(
            "budget",
            "The cache does not fit its budget.",
            expected=f"at most {self.budget_bytes} bytes",
            found=f"{need} bytes for {self.sequences} sequences",
            next=f"raise the budget, or hold at most {fits} tokens a sequence." if fits else "raise the budget, or hold fewer sequences.",
        )

    def _check_allocator(self) -> None:
        if self.allocated_bytes is None:
            return
        backings = [tensor for held in self._held for tensor in (*held.backings.values(), held.device)] + [self._lengths]
        told = sum(tensor.untyped_storage().nbytes() for tensor in backings)
        if not told <= self.allocated_bytes <= told + _SLACK * len(backings):
            raise InputError(
                "The allocator and the backings disagree.",
                expected=f"{told} bytes, rounded up",
                found=f"{self.allocated_bytes} bytes",
                next="make the pool while no other thread allocates on the device.",
            )

    # ------------------------------------------------------------ sequences

    def add(self) -> int:
        """A new sequence that holds nothing: the lowest free number. Raises InputError where all are taken."""
        return self.add_all(1)[0]

    def add_all(self, count: int) -> list[int]:
        """:meth:`add` so many times: all of them, or none. Raises InputError where so many cannot be added."""
        if whole(count, "sequences") < 0:
            raise InputError(
                "Fewer sequences than none cannot be added.", expected="0 or more", found=str(count), next="use free to give one back."
            )
        free = np.flatnonzero(~self._live)
        if count > len(free):
            raise InputError(
                "The pool has no room for another sequence." if count == 1 else f"The pool has no room for another {count} sequences.",
                expected=f"at most {self.sequences} sequences",
                found=f"{self.sequences - len(free)} in the pool already",
                next="free one first, or make a pool for more.",
            )
        added: list[int] = free[:count].tolist()
        for sequence in added:
            self._live[sequence] = True
            self._set(sequence, 0)
        return added

    def append(self, sequence: int, tokens: int) -> None:
        """Reserve pages for ``tokens`` more tokens of the sequence; its length counts them from now on."""
        self.extend([sequence], [tokens])

    def extend(self, sequences: Sequence[int], tokens: Sequence[int] | int, *, told: bool = True) -> None:
        """:meth:`append` for several sequences at once: all of them, or none.

        Without ``told`` the device's lengths stay as they are: the caller advances them there, as a captured step does.
        Pages that fell out of a group's window are given back first. Raises InputError: a sequence that is not there or
        named twice, a length beyond the table, no page left.
        """
        rows, lengths, more = self.check_room(sequences, tokens)
        ends = -(-(lengths + more) // self.page)
        # Only a page that is not full is written to; shared with another sequence, it is copied first.
        written = [
            (int(row), int(length) // self.page)
            for row, length, grows in zip(rows, lengths, more > 0, strict=True)
            if grows and length % self.page
        ]
        plans = []
        for held in self._held:
            needed = int(np.maximum(ends - held.last[rows], 0).sum())
            released = (
                [(int(row), held.visible(int(length))) for row, length in zip(rows, lengths, strict=True)] if held.group.window else []
            )
            released = [(row, first) for row, first in released if first > held.first[row]]
            dropped = Counter(page for row, first in released for page in held.rows[row, held.first[row] : first].tolist())
            back = sum(int(held.shares[page]) == times for page, times in dropped.items())
            # Of all that hold a page, one may keep it: of those that write to it, the last where no other is left.
            writers = Counter(int(held.rows[row, entry]) for row, entry in written)
            needed += sum(min(times, int(held.shares[page]) - dropped[page] - 1) for page, times in writers.items())
            if needed > len(held.free) + back:
                raise InputError(
                    "The pool has no page left.",
                    expected=f"{needed} free pages for layers {few(held.group.layers)}",
                    found=f"{len(held.free) + back} of {len(held.shares)}",
                    next="free a sequence, or make a larger pool.",
                )
            plans.append((held, released))
        for held, released in plans:
            for row, first in released:
                held.drop(row, int(held.first[row]), first)
                held.first[row] = first
            for row, entry in written:
                if held.shares[held.rows[row, entry]] > 1:  # the last of those that shared it keeps the page
                    self._unshare(held, row, entry)
            for row, end in zip(rows[ends > held.last[rows]], ends[ends > held.last[rows]], strict=True):
                for entry in range(int(held.last[row]), int(end)):
                    held.take(int(row), entry)
                held.last[row] = end
        if not told:
            self.flush()
        self._length[rows] += more
        self._stale |= told

    def check_room(self, sequences: Sequence[int], tokens: Sequence[int] | int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, lengths and tokens to come, int64 [B]. Raises InputError where these would make a sequence longer than its table."""
        rows = self._rows(sequences)
        lengths = self._length[rows]
        if isinstance(tokens, Sequence | np.ndarray | torch.Tensor) and np.ndim(tokens):
            more = [whole(number, "tokens") for number in tokens]
        else:
            more = [whole(tokens, "tokens")] * len(rows)
        if len(more) != len(rows):
            raise InputError(
                "Sequences and tokens are of different number.",
                expected=f"{len(rows)} numbers of tokens",
                found=str(len(more)),
                next="give one number, or one for each sequence.",
            )
        if min(more) < 0:
            raise InputError("A sequence cannot shrink so.", expected="0 tokens or more", found=str(min(more)), next="use crop.")
        for row, length, one in zip(rows.tolist(), lengths.tolist(), more, strict=True):
            if one > self.tokens - length:  # Python's integers: a sum of int64 may wrap
                raise InputError(
                    f"Sequence {row} would be longer than its table.",
                    expected=f"at most {self.tokens} tokens",
                    found=f"{length} held, and {one} more",
                    next="make a pool or cache of more tokens a sequence, or stop before.",
                )
        return rows, lengths, np.array(more, np.int64)

    def _unshare(self, held: _Held, sequence: int, entry: int) -> None:
        source = int(held.rows[sequence, entry])
        held.shares[source] -= 1
        held.copy(source, held.take(sequence, entry))

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens: whole pages are shared, a last page that is not full is copied.

        Raises InputError where the sequence is not there, or there is no room for another or for the copy.
        """
        row = int(self._rows([sequence])[0])
        length = int(self._length[row])
        partial = length % self.page > 0
        if partial and any(not held.free for held in self._held):
            raise InputError(
                "The pool has no page left for the copy of a last page.",
                expected="a free page in every group",
                found=f"none for layers {few(next(held.group.layers for held in self._held if not held.free))}",
                next="free a sequence, or make a larger pool.",
            )
        child = self.add()
        for held in self._held:
            first, last = int(held.first[row]), int(held.last[row])
            held.rows[child] = held.rows[row]
            held.first[child], held.last[child] = first, last
            np.add.at(held.shares, held.rows[row, first:last], 1)
            held.dirty = True
            if partial:
                self._unshare(held, child, last - 1)
        self._set(child, length)
        return child

    def rearrange(self, sources: Mapping[int, int]) -> None:
        """Let each sequence (key) hold what its source (value) holds now, all at once: beams, batches cut or repeated.

        Pages are shared; one that is not full is copied when it is next written to. Raises InputError for a sequence
        that is not there.
        """
        rows = self._rows(list(sources))
        self._rows(sorted({whole(source, "a sequence") for source in sources.values()}))
        origins = np.array(list(sources.values()), np.int64)
        for held in self._held:
            old = [(held.rows[row, held.first[row] : held.last[row]].copy()) for row in rows]
            first, last = held.first[origins], held.last[origins]
            table = held.rows[origins]
            for line, one, other in zip(table, first, last, strict=True):
                np.add.at(held.shares, line[one:other], 1)
            held.rows[rows], held.first[rows], held.last[rows] = table, first, last
            for entries in old:
                held.release(entries)
            held.dirty = True
        self._length[rows] = self._length[origins]
        self._stale = True

    def free(self, sequence: int) -> None:
        """Give the sequence's pages back. Raises InputError where it is not there, so a second time too."""
        row = int(self._rows([sequence])[0])
        for held in self._held:
            held.drop(row, int(held.first[row]), int(held.last[row]))
            held.first[row] = held.last[row] = 0
        self._live[row] = False
        self._set(row, 0)

    def crop(self, sequence: int, tokens: int) -> None:
        """Forget the sequence's last ``tokens`` tokens.

        Raises InputError where it holds fewer, or where a window would need pages that were given back.
        """
        row, kept = self.check_crop(sequence, tokens)
        for held in self._held:
            last = max(-(-kept // self.page), int(held.first[row]))
            held.drop(row, last, int(held.last[row]))
            held.last[row] = last
        self._set(row, kept)

    def check_crop(self, sequence: int, tokens: int) -> tuple[int, int]:
        """Row, and tokens that :meth:`crop` would leave. Raises what that raises, and changes nothing."""
        row = int(self._rows([sequence])[0])
        tokens = whole(tokens, "tokens")
        length = int(self._length[row])
        if not 0 <= tokens <= length:
            raise InputError(
                f"Sequence {sequence} cannot be cropped so.",
                expected=f"0 to {length} tokens",
                found=str(tokens),
                next="remove no more than it holds.",
            )
        kept = length - tokens
        for held in self._held:
            if held.visible(kept) < held.first[row]:
                raise InputError(
                    f"Sequence {sequence} cannot be cropped: its window of {held.group.window} gave back what it would see again.",
                    expected=f"at least {int(held.first[row]) * self.page + (held.group.window or 1) - 1} tokens kept",
                    found=str(kept),
                    next="crop less, or reset and write the tokens again.",
                )
        return row, kept

    def _set(self, sequence: int, length: int) -> None:
        self._length[sequence] = length
        self._stale = True

    def _rows(self, sequences: Sequence[int]) -> np.ndarray:
        """The numbers, each live and named once. Raises InputError."""
        named = [whole(sequence, "a sequence") for sequence in sequences]
        if not named:
            raise InputError(
                "A batch of zero has nothing to compute.", expected="at least one sequence", found="none", next="name a sequence."
            )
        gone = [row for row in named if not (0 <= row < self.sequences and self._live[row])]
        if gone:
            raise InputError(
                f"Sequence {gone[0]} is not in the pool.",
                expected=f"one of {few(np.flatnonzero(self._live)) or 'none, as the pool is empty'}",
                found="it was freed, or never added",
                next="add it first.",
            )
        if len(set(named)) != len(named):
            raise InputError(
                "A sequence is named twice in one batch: its pages would be written twice.",
                expected="each sequence once",
                found=few(named),
                next="fork it, so that each has pages of its own.",
            )
        return np.array(named, np.int64)

    # ------------------------------------------------------------ what the kernels take

    def table(self, layer: int, sequences: Sequence[int]) -> torch.Tensor:
        """Block table of that layer's group for the sequences: int32 ``[B, width]`` on the device.

        Sequences 0 to B - 1 in order get a view at an address that never changes; its contents follow the pool's
        state when it is next asked for anything. It is the sequences' until one of them changes: a write by a table taken before
        a sequence was freed, cropped or rearranged reaches pages of others. Raises InputError.
        """
        rows = self._rows(sequences)
        held, _ = self._find(layer)
        self.flush()
        return _taken(held.device, rows)

    def lengths(self, sequences: Sequence[int]) -> torch.Tensor:
        """Tokens held by each sequence: int32 ``[B]`` on the device; a view as with :meth:`table`."""
        rows = self._rows(sequences)
        self.flush()
        return _taken(self._lengths, rows)

    def length(self, sequence: int) -> int:
        """Tokens that the sequence holds, windows aside."""
        return int(self._length[self._rows([sequence])[0]])

    def addresses(self) -> tuple[int, ...]:
        """Where the device's tables and lengths lie: what a captured step has in it."""
        return (*(held.device.data_ptr() for held in self._held), self._lengths.data_ptr())

    def flush(self) -> None:
        """Bring the device's tables and lengths up to the host's. Not to be called while a graph is captured."""
        for held in self._held:
            if held.dirty:
                held.device.copy_(held.host)
                held.dirty = False
        if self._stale:
            self._lengths.copy_(torch.from_numpy(self._length.astype(np.int32)))
            self._stale = False

    def pages(self, layer: int) -> Pages:
        """The layer's pages. Raises InputError for an unknown layer, and where its ``fixed`` scales were not set."""
        held, index = self._find(layer)
        if held.group.scales == "fixed" and index not in held.scaled:
            raise InputError(
                f"Layer {layer} has no scales.",
                expected='scales of its own, as its group is "fixed"',
                found="none were set",
                next="call set_scales first.",
            )
        views = {name: backing[index] for name, backing in held.backings.items()}
        return Pages(**views)

    def set_scales(self, layer: int, scales: Mapping[str, torch.Tensor]) -> None:
        """``fixed`` scales of one layer: ``key_scales`` and ``value_scales``, ``[H]``, for each side that is fp8_e4m3.

        They are stored as fp32. Raises InputError, and stores none, where one is missing, no tensor of floating-point numbers, of another
        shape, or as it would be stored not finite or not above zero; and where the layer has scales and sequences hold pages.
        """
        held, index = self._find(layer)
        wanted = {name for name in held.backings if name.endswith("scales")}
        if held.group.scales != "fixed" or set(scales) != wanted:
            raise InputError(
                f"Layer {layer} takes other scales.",
                expected=", ".join(sorted(wanted)) if held.group.scales == "fixed" else f'none, as its group is "{held.group.scales}"',
                found=", ".join(sorted(scales)) or "none",
                next="give the expected ones alone.",
            )
        stored = {name: _single(values, held.group.kv_heads) for name, values in scales.items()}
        for name, values in stored.items():
            if values is None:
                given = scales[name]
                raise InputError(
                    f"The {name} of layer {layer} cannot be used.",
                    expected=f"a tensor of {held.group.kv_heads} numbers, finite and above zero in float32",
                    found=f"{given.dtype} {given.tolist()}"[:200] if isinstance(given, torch.Tensor) else repr(given)[:200],
                    next="calibrate the layer again.",
                )
        if index in held.scaled and int(held.last.max(initial=0)):
            raise InputError(
                f"Layer {layer} holds tokens under scales of its own.",
                expected="scales that are set before the first token",
                found="others for tokens that are stored",
                next="reset the pool first.",
            )
        for name, values in stored.items():
            held.backings[name][index].copy_(values)
        held.scaled.add(index)

    def _find(self, layer: int) -> tuple[_Held, int]:
        if layer not in self._of:
            raise InputError(
                f"Layer {layer} has no pages here.",
                expected=f"one of {few(sorted(self._of))}",
                found=str(layer),
                next="name a layer of one of the pool's groups.",
            )
        return self._of[layer]

    def group(self, layer: int) -> Group:
        """The group of a layer. Raises InputError for an unknown one."""
        return self._find(layer)[0].group

    def free_pages(self, layer: int) -> int:
        """Free pages of the layer's group."""
        return len(self._find(layer)[0].free)

    def reset(self) -> None:
        """Free every sequence."""
        for sequence in np.flatnonzero(self._live):
            self.free(int(sequence))

    # ------------------------------------------------------------ facts

    def backings(self) -> tuple[Backing, ...]:
        """Every allocation, by its storage; ``tokens`` are those that the group's sequences hold pages of."""
        found = []
        for held in self._held:
            kind = "attention" if held.group.window is None else "sliding"
            tokens = int((self._length - held.first * self.page)[self._live].sum())
            for name, tensor in held.backings.items():
                storage = tensor.untyped_storage()
                found.append(
                    Backing(
                        bytes=storage.nbytes(),
                        dtype=word(tensor.dtype),
                        kind="scales" if name.endswith("scales") else kind,  # type: ignore[arg-type]
                        layers=held.group.layers,
                        holds=name,  # type: ignore[arg-type]
                        address=storage.data_ptr(),
                        tokens=tokens,
                    )
                )
        return tuple(found)

    def poison(self) -> None:
        """Fill every byte that no sequence has written with NaN: nothing may read it."""
        for held in self._held:
            live = np.flatnonzero(self._live)
            spare = np.ones((len(held.shares), self.page), bool)
            for row in live:
                for entry in range(int(held.first[row]), int(held.last[row])):
                    filled = min(self.page, int(self._length[row]) - entry * self.page)
                    spare[held.rows[row, entry], :filled] = False
            places = torch.from_numpy(spare).to(self.device)
            for name, backing in held.backings.items():
                if name.endswith("scales") and held.group.scales == "fixed":
                    continue
                transposed = name == "values" and backing.dtype == fp8.E4M3
                shape = [1, len(held.shares), 1, self.page] + ([1] if name in ("keys", "values") else [])
                mask = places.view(shape)
                if transposed:
                    mask = mask.transpose(3, 4)
                if backing.dtype == fp8.E4M3:
                    backing.view(torch.uint8).masked_fill_(mask, 0x7F)
                else:
                    backing.masked_fill_(mask, float("nan"))


def device_of(device: torch.device | str) -> torch.device:
    """The device of that name. Raises InputError where there is no such name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            "This names no device.", expected="cpu, cuda, or cuda:0 and so on", found=str(device), next="name one of these."
        ) from error


def _check_present(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= count):
        raise RefusedError(
            "device",
            "The device is not there.",
            expected="cpu" if not count else f"cpu, or cuda:0 to cuda:{count - 1}",
            found=str(device),
            next="run it elsewhere.",
        )


def _free_bytes(device: torch.device) -> int | None:
    """What may be allocated: a CUDA device's free memory and what torch keeps cached of it, a host's memory; None if it does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _single(values: object, heads: int) -> torch.Tensor | None:
    """Scales as they are stored, fp32 [heads]; None for what are none."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point() or values.shape != (heads,):
        return None
    single = values.float()
    return single if bool((torch.isfinite(single) & (single > 0)).all()) else None


def _taken(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if (rows == np.arange(len(rows))).all():
        return tensor[: len(rows)]
    return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


@contextmanager
def _uncollected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None
