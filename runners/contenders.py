"""The native peers of the fused kernels: torch's SDPA backends and FlashInfer, each at its best.

A backend is asked in every way in which it takes the same attention, on the layout that it likes; each way is an
:class:`Offer`. What an offer needs beside its inputs (masks, copies in another layout, plans) is made before anything is
timed. :mod:`runners.performance` keeps the fastest offer whose result is right; what refuses is recorded in its own words, and an
error that is none of :data:`REFUSALS` fails the arm.

    sdpa:<backend>         flash, cudnn, efficient or math, on contiguous caches [B, H, L, D]:
        gqa                query heads share a KV head by ``enable_gqa``
        packed             decode: the query heads of a KV head are rows of one query, which is the same sum without any copy
        expanded           prefill: keys and values repeated for every query head, beforehand
        varlen             mixed lengths: sequences end to end, without padding (torch's flash attention by cumulative lengths)
    flashinfer             decode on tensor cores over pages of 16 and of 64 tokens; prefill by FA3 and by FA2
    flashinfer:cuda-cores  decode on CUDA cores

A decode query attends to everything (or to a window's last places), so a window of sequences of one length is a slice of the
cache. Mixed lengths are padded on the left and masked where a backend has no other way. SDPA has no soft cap.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ledger.errors import RefusedError
from runners import fp8
from runners.words import said

BACKENDS = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
FLASHINFER = ("flashinfer", "flashinfer:cuda-cores")
PAGE_SIZES = (64, 16)
"""Tokens a page that FlashInfer is offered."""
WORKSPACE = 256 << 20
"""Bytes that FlashInfer may use for the parts of split sequences."""

REFUSALS = (RefusedError, ImportError, NotImplementedError, RuntimeError, ValueError)
"""Errors by which a library refuses what it is asked, running out of memory among them. Any other is a fault of the code that asks."""

Launch = Callable[[int], torch.Tensor]
"""One launch over the slot of that number; its result."""


@dataclass(frozen=True)
class Problem:
    """Attention in ``S`` slots of one shape and different numbers, over which launches rotate.

        queries        [S, B, T, H_q, D]   16 bit; T is 1 in decode
        keys, values   [S, B, H, L, D]     16 bit; a sequence's tokens stand at the end, padding before them

    ``lengths`` are the tokens of each sequence, L at most. ``chunk`` is 0 in decode; in prefill all T = L tokens are queries,
    ``chunk`` of them a call, and each attends to what stands before it and to itself. ``window`` 0 and ``soft_cap`` 0 are none.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: tuple[int, ...]
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    chunk: int = 0
    seed: int = 0
    shared: dict[Any, Any] = field(default_factory=dict)
    """Copies in other layouts that several offers read."""

    @property
    def slots(self) -> int:
        """Number of slots."""
        return int(self.queries.shape[0])

    @property
    def heads(self) -> int:
        """KV heads."""
        return int(self.keys.shape[2])

    @property
    def longest(self) -> int:
        """Places a sequence."""
        return int(self.keys.shape[3])

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.queries.device

    def chunks(self) -> list[tuple[int, int]]:
        """The first query of each call of a prefill, and the one behind its last."""
        return [(first, first + self.chunk) for first in range(0, self.longest, self.chunk)]


@dataclass(frozen=True)
class Offer:
    """One way of asking a backend. ``prepare`` makes what it needs and gives its launch; it or the launch raises where refused."""

    kernel: str
    prepare: Callable[[], Launch]


def offers(backend: str, problem: Problem, stored: str) -> list[Offer]:
    """Every way to ask ``backend``; ``stored`` is the cache's format, a word of ``records.Format``.

    Raises RefusedError (``backend``) for a backend that is none of attention alone.
    """
    if backend in BACKENDS:
        if stored == "fp8_e4m3":
            _refuse("dtype", "SDPA reads no e4m3 cache.", "a 16-bit cache")
        return _sdpa_prefill(backend, problem) if problem.chunk else _sdpa_decode(backend, problem)
    if backend in FLASHINFER:
        if problem.chunk:
            return _flashinfer_prefill(backend, problem, stored)
        return [Offer(f"{backend} page{page}", lambda page=page: _flashinfer_decode(backend, problem, page, stored)) for page in PAGE_SIZES]
    _refuse("backend", f"No contender is called {backend!r}.", ", ".join((*BACKENDS, *FLASHINFER)))


def _refuse(code: str, what: str, expected: str, found: str = "") -> NoReturn:
    raise RefusedError(code, what, expected=expected, found=found, next="compare with another backend.")


def say_why(error: Exception, heard: list[warnings.WarningMessage]) -> str:
    """A backend's own words: its error, and what it warned of before."""
    words = [said(error), *(str(warning.message) for warning in heard)]
    return "\n".join(dict.fromkeys(words))[:4000]


# ---------------------------------------------------------------- SDPA


def _sdpa_decode(backend: str, problem: Problem) -> list[Offer]:
    if problem.soft_cap:
        _refuse("logit_softcap", "SDPA has no soft cap.", "a case without one")
    found = []
    if len(set(problem.lengths)) > 1 and backend == "sdpa:flash":
        found.append(Offer(f"{backend} varlen", lambda: _varlen(problem)))
    for name, packed in (("packed", True), ("gqa", False)):
        found.append(Offer(f"{backend} {name}", lambda packed=packed: _padded(backend, problem, packed)))
    return found


def _padded(backend: str, problem: Problem, packed: bool) -> Launch:
    """Decode over contiguous caches; sequences of several lengths under a mask."""
    slots, batch, _, query_heads, dim = problem.queries.shape
    shape = (slots, batch, problem.heads, query_heads // problem.heads, dim) if packed else (slots, batch, query_heads, 1, dim)
    queries = problem.queries.reshape(shape)
    reach = [min(length, problem.window or length) for length in problem.lengths]
    first = problem.longest - max(reach)
    mask = None
    if len(set(reach)) > 1:
        places = torch.arange(problem.longest - first, device=problem.device)
        starts = problem.longest - first - torch.tensor(reach, device=problem.device)
        mask = torch.zeros(batch, 1, 1, len(places), dtype=queries.dtype, device=problem.device)
        mask.masked_fill_((places < starts[:, None])[:, None, None], float("-inf"))

    def launch(slot: int) -> torch.Tensor:
        keys, values = problem.keys[slot, :, :, first:], problem.values[slot, :, :, first:]
        with sdpa_kernel([BACKENDS[backend]]):
            out = F.scaled_dot_product_attention(queries[slot], keys, values, mask, scale=problem.scale, enable_gqa=not packed)
        return out.reshape(batch, query_heads, dim)

    return launch


def _varlen(problem: Problem) -> Launch:
    """Decode over sequences that stand end to end, by torch's own flash attention; query heads packed as rows."""
    _, batch, _, query_heads, dim = problem.queries.shape
    group = query_heads // problem.heads
    reach = [min(length, problem.window or length) for length in problem.lengths]
    sides = [
        torch.stack(
            [torch.cat([side[slot, row, :, -count:].transpose(0, 1) for row, count in enumerate(reach)]) for slot in range(problem.slots)]
        )
        for side in (problem.keys, problem.values)
    ]
    ends = torch.tensor([0, *reach], device=problem.device).cumsum(0).int()
    rows = torch.arange(0, (batch + 1) * group, group, device=problem.device, dtype=torch.int32)
    queries = problem.queries.reshape(problem.slots, batch, problem.heads, group, dim).transpose(2, 3)

    def launch(slot: int) -> torch.Tensor:
        out = torch.ops.aten._flash_attention_forward(
            queries[slot].reshape(batch * group, problem.heads, dim), sides[0][slot], sides[1][slot],
            rows, ends, group, max(reach), 0.0, False, False, scale=problem.scale,
        )[0]  # fmt: skip
        return out.view(batch, group, problem.heads, dim).transpose(1, 2).reshape(batch, query_heads, dim)

    return launch


def _sdpa_prefill(backend: str, problem: Problem) -> list[Offer]:
    if problem.soft_cap:
        _refuse("logit_softcap", "SDPA has no soft cap.", "a case without one")
    return [
        Offer(f"{backend} {name}", lambda expanded=expanded: _causal(backend, problem, expanded))
        for name, expanded in (("gqa", False), ("expanded", True))
    ]


def _causal(backend: str, problem: Problem, expanded: bool) -> Launch:
    """Prefill, chunk after chunk; flash and efficient are causal by themselves, the others take a mask made beforehand."""
    queries = problem.queries.transpose(2, 3)
    sides = [problem.keys, problem.values]
    if expanded:
        group = queries.shape[2] // problem.heads
        sides = [_shared(problem, ("expanded", at), lambda side=side: side.repeat_interleave(group, 2)) for at, side in enumerate(sides)]
    biases: list[Any] = []
    for first, end in problem.chunks():
        if backend in ("sdpa:flash", "sdpa:efficient") and not problem.window:
            biases.append(causal_lower_right(end - first, end))
        elif not first and not problem.window:
            biases.append(None)
        else:
            seen = torch.ones(end - first, end, dtype=torch.bool, device=problem.device).tril(first)
            if problem.window:
                seen = seen.triu(first - problem.window + 1)
            biases.append(torch.zeros(seen.shape, dtype=queries.dtype, device=problem.device).masked_fill_(~seen, float("-inf")))

    def launch(slot: int) -> torch.Tensor:
        out = queries
        with sdpa_kernel([BACKENDS[backend]]):
            for (first, end), bias in zip(problem.chunks(), biases, strict=True):
                keys, values = (side[slot, :, :, :end] for side in sides)
                out = F.scaled_dot_product_attention(
                    queries[slot, :, :, first:end], keys, values, bias,
                    is_causal=bias is None, scale=problem.scale, enable_gqa=not expanded,
                )  # fmt: skip
        return out.transpose(1, 2)

    return launch


def _shared(problem: Problem, key: Any, make: Callable[[], Any]) -> Any:
    if key not in problem.shared:
        problem.shared[key] = make()
    return problem.shared[key]


# ---------------------------------------------------------------- FlashInfer


def _flashinfer(problem: Problem) -> Any:
    if problem.device.type != "cuda":
        _refuse("device", "FlashInfer needs a CUDA device.", "cuda", str(problem.device))
    try:
        import flashinfer
    except Exception as error:  # its import reaches into drivers and compilers, and fails in ways of its own
        raise RefusedError(
            "backend", "FlashInfer cannot be imported.", found=f"{type(error).__name__}: {error}"[:2000], next="install flashinfer-python."
        ) from error
    return flashinfer


def paged(problem: Problem, page: int, stored: str) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Keys and values as shuffled pages ``[S, P, H, page, D]``; the pages of all sequences in order, and where each begins."""
    counts = [-(-length // page) for length in problem.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(problem.seed))
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    dtype = fp8.E4M3 if stored == "fp8_e4m3" else problem.keys.dtype
    sides = []
    for side in (problem.keys, problem.values):
        dim = side.shape[-1]
        raw = torch.uint8 if dtype == fp8.E4M3 else dtype
        pages = torch.zeros(problem.slots, sum(counts), problem.heads, page, dim, dtype=raw, device=problem.device)
        for row, (length, count) in enumerate(zip(problem.lengths, counts, strict=True)):
            places = order[starts[row] : starts[row + 1]].to(problem.device)
            for slot in range(problem.slots):
                states = F.pad(side[slot, row, :, problem.longest - length :], (0, 0, 0, count * page - length))
                if dtype == fp8.E4M3:
                    states = fp8.quantise(states, "unit", "none")[0].view(raw)
                pages[slot, places] = states.view(problem.heads, count, page, dim).transpose(0, 1)
        sides.append(pages.view(dtype))
    return sides[0], sides[1], order.tolist(), starts


def _flashinfer_decode(backend: str, problem: Problem, page: int, stored: str) -> Launch:
    flashinfer = _flashinfer(problem)
    keys, values, order, starts = _shared(problem, ("paged", page, stored), lambda: paged(problem, page, stored))
    workspace = _shared(problem, "workspace", lambda: torch.zeros(WORKSPACE, dtype=torch.uint8, device=problem.device))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=backend == "flashinfer")
    integers: dict[str, Any] = {"dtype": torch.int32, "device": problem.device}
    wrapper.plan(
        torch.tensor(starts, **integers),
        torch.tensor(order, **integers),
        torch.tensor([(length - 1) % page + 1 for length in problem.lengths], **integers),
        problem.queries.shape[3],
        problem.heads,
        problem.queries.shape[4],
        page,
        window_left=problem.window - 1,
        logits_soft_cap=problem.soft_cap or None,
        q_data_type=problem.queries.dtype,
        kv_data_type=keys.dtype,
        sm_scale=problem.scale,
    )
    return lambda slot: wrapper.run(problem.queries[slot, :, 0], (keys[slot], values[slot]))


def _flashinfer_prefill(backend: str, problem: Problem, stored: str) -> list[Offer]:
    if backend != "flashinfer":
        _refuse("backend", "FlashInfer's prefill has no kernel on CUDA cores.", "flashinfer")
    if stored == "fp8_e4m3":
        _refuse("dtype", "The causal contender reads a 16-bit cache.", "16 bit")
    if problem.queries.shape[1] != 1:
        _refuse("backend", "FlashInfer's single prefill takes one sequence.", "batch 1", f"batch {problem.queries.shape[1]}")
    return [Offer(f"{backend} {kind}", lambda kind=kind: _single_prefill(problem, kind)) for kind in ("fa3", "fa2")]


def _single_prefill(problem: Problem, kind: str) -> Launch:
    flashinfer = _flashinfer(problem)
    keys, values = _shared(
        problem, "tokens first", lambda: tuple(side[:, 0].transpose(1, 2).contiguous() for side in (problem.keys, problem.values))
    )

    def launch(slot: int) -> torch.Tensor:
        out = problem.queries
        for first, end in problem.chunks():
            out = flashinfer.single_prefill_with_kv_cache(
                problem.queries[slot, 0, first:end], keys[slot, :end], values[slot, :end], causal=True, backend=kind,
                sm_scale=problem.scale, window_left=problem.window - 1, logits_soft_cap=problem.soft_cap or None,
            )  # fmt: skip
        return out[None]

    return launch
