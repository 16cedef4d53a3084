"""Time every shape that the fused kernels could be compiled in: ``python -m runners.tuning decode|prefill|write``, on a GPU host.

    --dim 128       head dimension
    --heads 32 8    query heads and KV heads
    --out FILE      all samples as JSON, with the bandwidth of a copy, the host and versions

Candidates and cases are the fixed lists below. In each case and each format a candidate's result is compared with that of the
first candidate that runs; then all are replayed in turn (:mod:`runners.timing`). One table is printed: a row a candidate, a
column a case, medians in µs; ``*`` marks what :mod:`runners.fused` holds, ``–`` what does not run, with the reason below.

Nothing is changed by this. A person puts the choice into ``fused.DECODE``, ``PREFILL`` or ``WRITE``, since a shape decides the order
of sums: a search at run time would make results differ from process to process. docs/kernel-log.md holds what came of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ledger import records
from ledger.errors import InputError, LedgerError, RefusedError
from runners import fused, host, slots
from runners.geometry import DTYPES
from runners.timing import COPIED, Clock, Copy

Candidate = tuple[int, ...]
"""Fields of a ``fused.Shape``, or a value of ``fused.PREFILL`` or ``fused.WRITE``."""

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "decode": (
        (64, 4, 4), (64, 1, 3), (64, 1, 4), (64, 1, 5), (64, 1, 6), (64, 2, 3), (64, 2, 4), (64, 2, 5), (64, 2, 6), (64, 4, 2), (64, 4, 3),
        (64, 4, 5), (64, 8, 3), (32, 1, 4), (32, 2, 4), (32, 2, 6), (32, 4, 3), (32, 4, 4), (32, 4, 5),
    ),
    "prefill": (
        (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 3), (64, 32, 4, 4), (64, 32, 8, 1), (64, 32, 8, 2), (64, 128, 4, 2),
        (128, 32, 8, 3), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
    ),
    "write": ((32, 4), (32, 2), (32, 8), (16, 2), (16, 4), (64, 2), (64, 4), (64, 8)),
}  # fmt: skip


FORMATS = {
    name: records.Arm(
        name="fused",
        role="candidate",
        implementation="fused",
        compute="bf16",
        keys=keys,
        values=values,
        scales=scales,
        backend=records.FUSED_BACKEND,
    )
    for name, keys, values, scales in (
        ("16/16", "bf16", "bf16", "none"),
        ("K16/V8", "bf16", "fp8_e4m3", "unit"),
        ("8/8", "fp8_e4m3", "fp8_e4m3", "unit"),
    )
}


@dataclass(frozen=True)
class Case:
    """Sequences of so many tokens; of a prefill, ``chunk`` of them a call."""

    name: str
    lengths: tuple[int, ...]
    chunk: int = 0


_DRAWN = torch.randint(128, 32768 + 1, (63,), generator=torch.Generator().manual_seed(1)).tolist()
_EVEN = ((32, 8192), (8, 32768), (1, 8192), (32, 1024), (128, 1024))
CASES = {
    "decode": (*(Case(f"{batch}x{context}", (context,) * batch) for batch, context in _EVEN), Case("mixed", (32768, *_DRAWN))),
    "prefill": (Case("8192/2048", (8192,), 2048),),
    "write": (Case("8192", (8192,)),),
}
COMPILED = {"decode": Case("", (1024,)), "prefill": Case("", (1024,), 256), "write": Case("", (1024,))}
"""Small cases for which Triton compiles the same: their sizes and strides too are multiples of 16, the block table's included."""
PAGE = 64
ROTATE = 400_000_000
"""Bytes that the slots of a case hold at least, stored: more than a GPU's cache."""
REPEATS, LAUNCHES, SEED = 15, 8, 1
WORKERS = 14
"""Most processes that compile."""
TOLERANCE = 2.0**-7
"""Most ‖result − first‖ / ‖first‖: the precision of bf16."""


@dataclass(frozen=True)
class Setting:
    """What is tuned and where; ``heads`` are query heads and KV heads, ``rotate`` the bytes that slots hold at least."""

    kind: str
    dim: int
    heads: tuple[int, int]
    device: torch.device
    page: int = PAGE
    rotate: int = ROTATE


def _key(setting: Setting, format: str) -> tuple[int, int, int]:
    return setting.dim, DTYPES[FORMATS[format].keys].itemsize, DTYPES[FORMATS[format].values].itemsize


def held(setting: Setting, format: str) -> Candidate:
    """What the table in :mod:`runners.fused` holds."""
    if setting.kind == "decode":
        return astuple(fused.shape(*_key(setting, format)))[:3]  # not the stages of a crowd: those are a candidate of their own
    return fused.PREFILL[setting.dim] if setting.kind == "prefill" else fused.WRITE


@contextmanager
def using(setting: Setting, format: str, candidate: Any) -> Iterator[None]:
    """Launch with this candidate meanwhile."""
    before = fused.DECODE, fused.PREFILL, fused.WRITE
    try:
        if setting.kind == "decode":
            fused.DECODE = fused.DECODE | {_key(setting, format): fused.Shape(*candidate)}
        elif setting.kind == "prefill":
            fused.PREFILL = fused.PREFILL | {setting.dim: candidate}
        else:
            fused.WRITE = candidate
        yield
    finally:
        fused.DECODE, fused.PREFILL, fused.WRITE = before


def launches(setting: Setting, format: str, case: Case) -> tuple[Callable[[int], Any], Callable[[], torch.Tensor], int]:
    """A launch of the case over the slot of a number; one launch's result; the number of slots. States are standard normal."""
    kind, dim, (query_heads, heads), longest = setting.kind, setting.dim, setting.heads, max(case.lengths)
    layer = records.LayerGeometry(layer=0, kind="attention", kv_heads=heads, key_dim=dim, value_dim=dim)
    count = -(-setting.rotate // slots.stored_bytes(FORMATS[format], layer, sum(case.lengths)))
    generator = torch.Generator(setting.device).manual_seed(SEED)
    queries, keys, values = (
        torch.randn(count, len(case.lengths), *shape, dim, dtype=torch.bfloat16, device=setting.device, generator=generator)
        for shape in ((longest if case.chunk else 1, query_heads), (longest, heads), (longest, heads))
    )
    lengths, room = ([0] * len(case.lengths), longest) if kind == "write" else (case.lengths, 0)
    stored = slots.store(FORMATS[format], keys, values, lengths, page=setting.page, seed=SEED, room=room)
    plan = fused.Plan(len(case.lengths), heads, longest, dim=dim, device=setting.device)
    if kind == "decode":
        plan.update(stored.lengths)
    nothing = torch.zeros_like(stored.lengths)
    ends = [(end, torch.full_like(nothing, end)) for end in range(case.chunk, longest + 1, case.chunk)] if case.chunk else []

    def launch(slot: int) -> Any:
        pages, table, scale, out = stored.pages[slot], stored.table, dim**-0.5, None
        if kind == "write":
            return fused.write(pages, keys[slot], values[slot], table, nothing)
        if kind == "decode":
            return fused.decode(queries[slot, :, 0], pages, table, stored.lengths, scale=scale, plan=plan)
        for end, tokens in ends:
            query = queries[slot, :, end - case.chunk : end]
            out = fused.prefill(query, pages, table[:, : -(-end // setting.page)], tokens, scale=scale)
        return out

    def result() -> torch.Tensor:
        if kind != "write":
            return launch(0).float()
        for side in (stored.pages[0].keys, stored.pages[0].values):
            side.view(torch.uint8).zero_()
        launch(0)
        return torch.cat([side.float().flatten() for side in (stored.pages[0].keys, stored.pages[0].values)])

    return launch, result, count


def measure(setting: Setting, format: str, case: Case, candidates: tuple[Candidate, ...], clock: Clock, repeats: int) -> dict[str, Any]:
    """A column of the table: of each candidate the microseconds of a launch ``[repeats]``, or why there are none."""
    launch, result, count = launches(setting, format, case)
    first, ready, numbers, refused = None, {}, {}, {}
    for candidate in candidates:
        name = say(candidate)
        try:
            with using(setting, format, candidate):
                out = result()
                truth = out if first is None else first
                error = float((out - truth).norm() / truth.norm())
                if not error <= TOLERANCE:
                    raise InputError("Its result is not the first one's.", expected=f"at most {TOLERANCE} off", found=f"{error:.3g}")
                first, numbers[name] = truth, clock.count(clock.estimate(launch, count), count)
                ready[name] = clock.ready(launch, count, numbers[name])
        except Exception as error:  # a compiler may refuse by any error: its words are kept
            refused[name] = f"{type(error).__name__}: {error}"[:2000]
    for replay in ready.values() if clock.cuda else ():
        replay()
    samples = {name: (found / numbers[name]).tolist() for name, found in clock.race(ready, repeats).items()}
    return {"format": format, "case": case.name, "held": say(held(setting, format)), "us": samples, "refused": refused}


@torch.inference_mode()
def tune(
    setting: Setting, cases: tuple[Case, ...], candidates: tuple[Candidate, ...], repeats: int = REPEATS, copied: int = COPIED
) -> dict[str, Any]:
    """Time all candidates in all cases and formats; what ``--out`` writes."""
    clock = Clock(setting.device, LAUNCHES)
    columns = []
    for format in FORMATS:
        for case in cases:
            columns.append(measure(setting, format, case, candidates, clock, repeats))
            clock.release()
            print(f"timed {format} {case.name}", file=sys.stderr, flush=True)
    copy = Copy(clock, copied)
    return {
        "kind": setting.kind,
        "head_dim": setting.dim,
        "heads": list(setting.heads),
        "page": setting.page,
        "candidates": [say(candidate) for candidate in candidates],
        "columns": columns,
        "copy_bytes_per_second": copy.bytes / float(np.median(copy.samples(repeats))) * 1e6,
        "host": msgspec.to_builtins(host.measure(setting.device.type)),
        "cuda": torch.version.cuda,
        "fused_sha256": host.sources()["runners/fused.py"],
    }


def say(candidate: Candidate) -> str:
    """A candidate in words: ``64/4/4``."""
    return "/".join(map(str, candidate))


def table(found: dict[str, Any]) -> str:
    """The table of what :func:`tune` found, and why candidates are missing."""
    columns = found["columns"]
    rows = [["", *(column["format"] + " " for column in columns)], ["µs", *(column["case"] + " " for column in columns)]]
    for name in found["candidates"]:
        cells = [f"{np.median(column['us'][name]):.1f}" if name in column["us"] else "–" for column in columns]
        rows.append([name, *(cell + " *"[name == column["held"]] for cell, column in zip(cells, columns, strict=True))])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    holds = {column["format"]: column["held"] for column in columns}
    lines.append("* fused.py holds " + ", ".join(f"{name} for {format}" for format, name in holds.items()))
    lines.append(f"copy: {found['copy_bytes_per_second'] / 1e9:.0f} GB/s")
    for column in columns:
        for name, words in column["refused"].items():
            lines.append(f"– {name}, {column['format']} {column['case']}: {' '.join(words.split())[:160]}")
    return "\n".join(lines)


def _compile(job: tuple[Setting, str, Candidate]) -> None:
    setting, format, candidate = job
    # What does not compile is said where it would be timed.
    with suppress(Exception), torch.inference_mode(), using(setting, format, candidate):
        launches(setting, format, COMPILED[setting.kind])[0](0)


def compile_ahead(setting: Setting, candidates: tuple[Candidate, ...]) -> None:
    """Fill Triton's cache in parallel."""
    jobs = [(replace(setting, rotate=1), format, candidate) for candidate in candidates for format in FORMATS]
    try:
        with ProcessPoolExecutor(min(WORKERS, host.cores()), mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile, jobs))
    except BrokenProcessPool as error:
        print(f"Compiling ahead ended early, the rest is compiled one by one: {error}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 where it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m runners.tuning", description="Time candidate shapes of the fused kernels.")
    parser.add_argument("kind", choices=tuple(CANDIDATES))
    parser.add_argument("--dim", type=int, choices=fused.HEAD_DIMS, default=128, help="head dimension")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("QUERY", "KV"), help="query heads and KV heads")
    parser.add_argument("--out", type=Path, help="file for all samples, as JSON")
    given = parser.parse_args(arguments)
    try:
        reason = fused.available("cuda")
        if reason:
            what, expected = "Shapes are timed where the kernels run.", "a CUDA device with e4m3"
            raise RefusedError("device", what, expected=expected, found=reason, next="run this on a host with a GPU.")
        query, heads = given.heads
        if heads < 1 or query < 1 or query % heads:
            raise InputError("Query heads share KV heads evenly.", expected="a multiple of the KV heads", found=f"{query} on {heads}")
        if given.out is not None and not given.out.parent.is_dir():
            raise InputError("The file's folder is not there.", found=str(given.out.parent), next="make it, or name another file.")
        setting = Setting(given.kind, given.dim, (query, heads), torch.device("cuda", 0))
        compile_ahead(setting, CANDIDATES[given.kind])
        found = tune(setting, CASES[given.kind], CANDIDATES[given.kind])
        print(table(found))
        if given.out is not None:
            given.out.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except LedgerError as error:
        print(f"{error.code}: {error}" if isinstance(error, RefusedError) else error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
