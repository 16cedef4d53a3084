"""performance: how long attention, writing and a whole decode step take, every contender in one process.

A case gives all arms the same numbers in the formats that they ask for. What an arm computes is compared with the float32
reference before it is timed; a native contender whose result is off is refused, since it computes something else. Then
the arms are replayed in turn (:mod:`runners.timing`), and a copy is timed after every case, so that each share of the
bandwidth is of that very run. Raw samples alone are written, no figure is derived here:

    cases.jsonl                 a canonical JSON line for each case and arm: kernel, bytes, launches, errors, or why it was refused
    timings/NNNN.safetensors    case NNNN: float64 microseconds a launch ``[repeats]`` as ``<case>|<arm>``, and ``copy|``

``bytes`` are the fewest that must move: in decode the stored keys, values and scales of all attended positions; in writing
the states that are read and what is stored; in prefill, of each chunk, what it attends to, its queries and results; in a
step the weights and the stored cache. For ``capacity`` they are what the allocator gave.

What one append writes is so little that it stays in a cache of the device, as its launch takes longer than its bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save

from ledger import digest, records
from ledger.errors import InputError, LedgerError, RefusedError
from runners import checkpoints, contenders, fp8, fused, geometry, oracle
from runners.contenders import Launch, Problem
from runners.geometry import DTYPES, word
from runners.losses import Folder, Progress
from runners.paged import Group, Pages, Pool
from runners.timing import COPIED, Clock, Copy, Replay

COPIES = 10
"""Copies timed before the first case, and after each."""
ROWS = 4
"""Sequences whose results are compared with the reference."""
LAST = 64
"""Query tokens of a prefill, from its end, whose results are compared."""
WRONG = {"bf16": 0.02, "fp16": 0.02, "fp8_e4m3": 0.1}
"""Relative error to unquantised attention beyond which a native contender, by the format of its cache, computes something else."""
ROOM = 8 << 30
"""Most bytes of the cache of an append, over all slots."""

STEP = "transformers"
"""The native contender of a whole step."""


@dataclass
class Line:
    """A line of ``cases.jsonl``."""

    case: str
    arm: str
    kernel: str = ""
    bytes: int = 0
    launches: int = 0
    refused: str = ""
    relative_error: float | None = None
    relative_error_unquantised: float | None = None
    tokens: int | None = None

    def encode(self) -> bytes:
        """Canonical JSON and a line feed; ``tokens`` only where they were counted."""
        fields = {name: value for name, value in vars(self).items() if name != "tokens" or value is not None}
        return digest.canonical(digest.jsonable(fields)) + b"\n"


@dataclass
class Racer:
    """An arm that is ready to be timed in a case."""

    line: Line
    replay: Replay


@dataclass
class Seen:
    """What is known of an arm so far. Facts are of the first case that it took part in."""

    arm: records.Arm
    ran: bool = False
    refused: str = ""
    failed: str = ""
    backends: list[records.Backend] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    microseconds: float = 0.0

    def heard(self, accepted: bool, words: str) -> None:
        """A backend was tried: what it said, once."""
        backend = records.Backend(name=self.arm.backend, accepted=accepted, reason=words[:8192])
        if backend not in self.backends:
            self.backends.append(backend)

    def result(self) -> records.ArmResult:
        """The arm's part of the result."""
        outcome = "failed" if self.failed else "completed" if self.ran else "refused"
        return records.ArmResult(
            name=self.arm.name,
            outcome=outcome,  # type: ignore[arg-type]
            reason=self.failed or ("" if self.ran else self.refused or "backend: no case is of this arm"),
            backends=tuple(self.backends),
            seconds=self.microseconds / 1e6,
            **self.facts,
        )


def run(spec: records.Spec, inputs: Path, folder: Folder, progress: Progress) -> None:
    """Time the spec's cases; evidence and facts go to ``folder``.

    Raises RefusedError (``device``) where the spec's device is not here, and InputError for cases that cannot be.
    """
    bench = Bench(spec, inputs, progress)
    with torch.inference_mode():
        copies = bench.copy()
        for number, case in enumerate(bench.settings.cases):
            samples = bench.case(number, case)
            bench.clock.release()
            samples["copy|"] = np.concatenate([copies, bench.copy()])
            copies = np.empty(0)
            folder.add(f"timings/{number:04d}.safetensors", save(samples), "application/vnd.safetensors")
            folder.update(arms=tuple(seen.result() for seen in bench.seen.values()))
    folder.add("cases.jsonl", b"".join(line.encode() for line in bench.lines), "application/x-ndjson")
    folder.update(arms=tuple(seen.result() for seen in bench.seen.values()))


def find_device(name: str) -> torch.device:
    """The device of that name. Raises RefusedError (``device``) where it is not here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RefusedError(
            "device",
            "The study runs on a CUDA device, and there is none.",
            expected="a CUDA device",
            found=f"torch {torch.__version__}",
            next="run the frozen folder on a host with a GPU.",
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


class Bench:
    """The cases of a spec on a device, and what came of them."""

    def __init__(self, spec: records.Spec, inputs: Path, progress: Progress) -> None:
        if spec.performance is None:
            raise InputError("The spec says nothing of what to time.", expected="[performance]", next="choose a study of that scope.")
        self.spec, self.settings, self.inputs, self.progress = spec, spec.performance, inputs, progress
        self.device = find_device(spec.device)
        computes = {arm.compute for arm in spec.arms}
        if len(computes) > 1 or "fp32" in computes:
            raise InputError(
                "Arms that are compared compute in one 16-bit dtype.", expected="bf16 or fp16", found=", ".join(sorted(computes))
            )
        self.compute = computes.pop()
        self.dtype = DTYPES[self.compute]
        self.model: Any = None
        self.config = self._config()
        self.layers = geometry.declared(self.config)
        for case in self.settings.cases:
            self.layer(case)
        self.clock = Clock(self.device, self.settings.launches)
        self.copier = Copy(self.clock, COPIED if self.clock.cuda else max(4096, self.settings.rotate_bytes))
        self.lines = [Line("copy", "", self.copier.kernel, self.copier.bytes, 1)]
        self.seen = {arm.name: Seen(arm) for arm in spec.arms}

    def _config(self) -> Any:
        checkpoint = self.spec.checkpoint
        if checkpoint.config is None:
            self.load()
            return self.model.config
        kind = checkpoint.source.removeprefix("random:").partition("#")[0]
        try:
            return transformers.AutoConfig.for_model(kind, **checkpoint.config)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"The configuration of {checkpoint.name!r} cannot be read.", found=str(error)[:2000]) from error

    def load(self) -> Any:
        """The model on the device; loaded once."""
        if self.model is None:
            self.model, _ = checkpoints.load(self.spec.checkpoint, self.compute, self.progress.say, self.inputs)
            self.model.to(self.device)
        return self.model

    def layer(self, case: records.Case) -> records.LayerGeometry:
        """The first layer of the case's head dimension; of any, for a case of all layers. Raises InputError."""
        for layer in self.layers:
            if layer.kind != "recurrent" and case.head_dim in (None, layer.key_dim):
                return layer
        dims = sorted({layer.key_dim for layer in self.layers if layer.kind != "recurrent"})
        raise InputError(
            f"Case {case.name!r} is of layers that the model does not have.",
            expected=f"head dimension {' or '.join(map(str, dims))}",
            found=str(case.head_dim),
            next="choose another checkpoint, or another head dimension.",
        )

    @property
    def query_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.config.get_text_config(decoder=True).num_attention_heads)

    def copy(self) -> np.ndarray:
        """Microseconds of each of some copies."""
        found = self.copier.samples(COPIES)
        self.clock.release()
        return found

    # ------------------------------------------------------------ one case

    def case(self, number: int, case: records.Case) -> dict[str, np.ndarray]:
        """Time one case: its samples by ``<case>|<arm>``."""
        kinds = {
            "decode": self._attention,
            "prefill": self._attention,
            "append": self._writing,
            "write": self._writing,
            "step": self._step,
            "capacity": self._capacity,
        }
        self.progress.say(f"{number + 1} of {len(self.settings.cases)}: {case.name}")
        try:
            racers = kinds[case.kind](number, case)
        except torch.OutOfMemoryError as error:
            self._refuse_all(case, f"memory: {error}")
            return {}
        return self._race(case, racers)

    def _race(self, case: records.Case, racers: dict[str, Racer]) -> dict[str, np.ndarray]:
        for racer in racers.values():
            racer.replay()
        found = self.clock.race({name: racer.replay for name, racer in racers.items()}, self.settings.repeats)
        for name, samples in found.items():
            self.seen[name].microseconds += float(samples.sum())
            samples /= racers[name].line.launches
        if found:
            self.progress.say("  " + ", ".join(f"{name} {np.median(samples):.1f} µs" for name, samples in found.items()))
        return {f"{case.name}|{name}": samples for name, samples in found.items()}

    def _refuse_all(self, case: records.Case, words: str) -> None:
        """The case itself does not fit: every arm of it is refused."""
        known = {line.arm for line in self.lines if line.case == case.name}
        for arm in self.arms(case):
            if arm.name not in known:
                self.lines.append(Line(case.name, arm.name, refused=words[:4000]))
                self.seen[arm.name].refused = self.seen[arm.name].refused or words[:8192]

    def arms(self, case: records.Case) -> list[records.Arm]:
        """The arms that take part in a case of that kind."""
        if case.kind in ("decode", "prefill"):
            return [arm for arm in self.spec.arms if arm.backend != STEP]
        natives = (STEP,) if case.kind == "step" else ()
        return [arm for arm in self.spec.arms if arm.implementation == "fused" or arm.backend in natives]

    def enter(self, case: records.Case, arm: records.Arm, prepare: Callable[[Seen, Line], Replay]) -> Racer | None:
        """An arm that is ready for the case; None where it was refused, in whose words the line says."""
        seen, line = self.seen[arm.name], Line(case.name, arm.name)
        self.lines.append(line)
        try:
            replay = prepare(seen, line)
        except Exception as error:
            words = _words(error)
            line.refused = words[:4000]
            if isinstance(error, (RefusedError, torch.OutOfMemoryError)):
                seen.refused = seen.refused or words[:8192]
                seen.heard(False, f"{case.name}: {words}")
            else:  # a fault, and not an answer
                seen.failed = seen.failed or f"{case.name}: {words}"[:8192]
            self.progress.say(f"  {arm.name} refused: {words.splitlines()[0]}")
            del error
            self.clock.release()
            return None
        seen.ran = True
        return Racer(line, replay)

    # ------------------------------------------------------------ attention

    def _attention(self, number: int, case: records.Case) -> dict[str, Racer]:
        layer = self.layer(case)
        problem = self.problem(number, case, layer)
        truth = _reference(problem)
        racers = {}
        for arm in self.arms(case):
            prepare = self._fused if arm.implementation == "fused" else self._native
            racer = self.enter(case, arm, lambda seen, line, prepare=prepare: prepare(seen, line, layer, problem, truth))
            if racer is not None:
                racers[arm.name] = racer
        return racers

    def problem(self, number: int, case: records.Case, layer: records.LayerGeometry) -> Problem:
        """Queries, keys and values of a case: standard normal, from the spec's seed and the case's number."""
        seed = self.settings.seed * 100_003 + number
        lengths = [case.context] * case.batch
        if case.shortest is not None:
            drawn = torch.randint(case.shortest, case.context + 1, (case.batch,), generator=torch.Generator().manual_seed(seed))
            lengths = drawn.tolist()
        longest = max(lengths)
        seen = sum(min(length, case.window or length) for length in lengths)
        slots = self.slots(min(stored_bytes(arm, layer, seen) for arm in self.spec.arms))
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(slots, case.batch, *shape, dtype=self.dtype, device=self.device, generator=generator)

        return Problem(
            queries=normal(longest if case.chunk else 1, self.query_heads, layer.key_dim),
            keys=normal(layer.kv_heads, longest, layer.key_dim),
            values=normal(layer.kv_heads, longest, layer.value_dim),
            lengths=tuple(lengths),
            scale=layer.key_dim**-0.5,
            window=case.window or 0,
            soft_cap=case.soft_cap or 0.0,
            chunk=case.chunk or 0,
            seed=seed,
        )

    def slots(self, bytes: int) -> int:
        """Slots of so many bytes that buffers rotate over; no more than a replay has launches."""
        return max(1, min(self.settings.launches, -(-self.settings.rotate_bytes // bytes)))

    def _native(self, seen: Seen, line: Line, layer: records.LayerGeometry, problem: Problem, truth: torch.Tensor) -> Replay:
        """The fastest offer of a native backend whose result is right."""
        arm, best, refusals = seen.arm, None, []
        for offer in contenders.offers(arm.backend, problem, arm.values):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    launch = offer.prepare()
                    error = _error(_rows(problem, launch(0)), truth)
                    if not error <= WRONG[arm.values]:
                        raise RefusedError("wrong", "Its result is not that attention.", found=f"relative error {error:.3g}")
                    estimate = self.clock.estimate(launch, problem.slots)
                    count = self.clock.count(estimate)
                    replay = self.clock.ready(launch, problem.slots, count)
                except Exception as refusal:  # a contender may refuse by any error; its words are kept
                    refusals.append(f"{offer.kernel}: {contenders.say_why(refusal, heard)}")
                    seen.heard(False, f"{line.case}: {refusals[-1]}")
                    launch = replay = None
                    continue
            seen.heard(True, offer.kernel)
            if best is None or estimate < best[0]:
                best = (estimate, offer.kernel, error, count, replay)
        if best is None:
            raise RefusedError("backend", "The backend refuses this attention.", found="\n".join(refusals)[:3800])
        _, line.kernel, error, line.launches, replay = best
        line.bytes = self.attended_bytes(arm, layer, problem)
        line.relative_error = error if arm.values != "fp8_e4m3" else None
        line.relative_error_unquantised = error
        if not seen.facts:
            seen.facts = _contiguous_facts(arm, problem, layer)
        return replay

    def _fused(self, seen: Seen, line: Line, layer: records.LayerGeometry, problem: Problem, truth: torch.Tensor) -> Replay:
        """The fused kernels over pages of the arm's formats."""
        stored = self.store(seen.arm, layer, problem.keys.transpose(2, 3), problem.values.transpose(2, 3), problem.lengths)
        options = {"scale": problem.scale, "window": problem.window, "soft_cap": problem.soft_cap}
        launch = self._prefills(problem, stored, options) if problem.chunk else self._decodes(problem, stored, options)
        line.kernel = fused.describe(stored.pages[0]) if not problem.chunk else stored.describe("prefill")
        out = _rows(problem, launch(0))
        line.relative_error = _error(out, _reference(problem, stored))
        line.relative_error_unquantised = _error(out, truth)
        if not math.isfinite(line.relative_error):
            raise InputError("The fused result is not finite.", found=str(line.relative_error))
        line.bytes = self.attended_bytes(seen.arm, layer, problem)
        line.launches = self.clock.count(self.clock.estimate(launch, problem.slots))
        if not seen.facts:
            seen.facts = stored.facts(seen.arm, layer)
        return self.clock.ready(launch, problem.slots, line.launches)

    def _decodes(self, problem: Problem, stored: Stored, options: dict[str, Any]) -> Launch:
        # As in a step, the plan is made once for all layers; each slot stands for a layer.
        plan = fused.Plan(len(problem.lengths), problem.heads, max(problem.lengths), problem.window, device=self.device)
        plan.update(stored.lengths)
        queries = problem.queries[:, :, 0]
        return lambda slot: fused.decode(queries[slot], stored.pages[slot], stored.table, stored.lengths, plan=plan, **options)

    def _prefills(self, problem: Problem, stored: Stored, options: dict[str, Any]) -> Launch:
        ends = [torch.full_like(stored.lengths, end) for _, end in problem.chunks()]

        def launch(slot: int) -> torch.Tensor:
            out = problem.queries
            for (first, end), lengths in zip(problem.chunks(), ends, strict=True):
                table = stored.table[:, : -(-end // self.settings.page)]
                out = fused.prefill(problem.queries[slot, :, first:end], stored.pages[slot], table, lengths, **options)
            return out

        return launch

    def attended_bytes(self, arm: records.Arm, layer: records.LayerGeometry, problem: Problem) -> int:
        """Bytes that must move in one launch."""
        if not problem.chunk:
            return stored_bytes(arm, layer, sum(min(length, problem.window or length) for length in problem.lengths))
        batch, tokens = problem.queries.shape[1:3]
        reads = sum(min(end, problem.window + problem.chunk - 1) if problem.window else end for _, end in problem.chunks())
        states = batch * tokens * self.query_heads * (layer.key_dim + layer.value_dim) * self.dtype.itemsize
        return stored_bytes(arm, layer, batch * reads) + states

    # ------------------------------------------------------------ pages

    def store(
        self,
        arm: records.Arm,
        layer: records.LayerGeometry,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: Sequence[int],
        room: int = 0,
    ) -> Stored:
        """``keys`` and ``values`` [S, B, T, H, D] (the last of each sequence, if it has fewer) in pages of the arm's formats.

        ``room`` tokens more are reserved behind each sequence. Raises RefusedError (``device`` and the pool's codes).
        """
        reason = fused.available(self.device)
        if reason:
            raise RefusedError("device", "The fused kernels cannot run here.", expected="a CUDA device with e4m3", found=reason)
        slots, batch = keys.shape[:2]
        group = Group(
            layers=tuple(range(slots)),
            kv_heads=layer.kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            keys=arm.keys,
            values=arm.values,
            scales=arm.scales,
            granularity=arm.granularity,
        )
        pool = Pool(
            [group],
            tokens=max(lengths) + room,
            sequences=batch,
            total=sum(lengths) + batch * room,
            page=self.settings.page,
            device=self.device,
            seed=self.settings.seed,
        )
        sequences = [pool.add() for _ in lengths]
        pool.extend(sequences, [length + room for length in lengths])
        if arm.scales == "fixed":
            _calibrate(pool, arm, keys, values)
        stored = Stored(pool, sequences)
        counts = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        for slot in range(slots):
            fused.write(stored.pages[slot], keys[slot], values[slot], stored.table, torch.zeros_like(counts), counts)
        return stored

    # ------------------------------------------------------------ writing

    def _writing(self, number: int, case: records.Case) -> dict[str, Racer]:
        layer = self.layer(case)
        tokens, before = (1, case.context) if case.kind == "append" else (case.context, 0)
        arms = self.arms(case)
        slots = self.slots(min((self.written_bytes(arm, layer, case.batch * tokens) for arm in arms), default=1))
        if before:
            slots = max(1, min(slots, ROOM // (case.batch * before * stored_bytes(self.spec.arms[0], layer, 1))))
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * 100_003 + number)
        keys, values = (
            torch.randn(slots, case.batch, tokens, layer.kv_heads, dim, dtype=self.dtype, device=self.device, generator=generator)
            for dim in (layer.key_dim, layer.value_dim)
        )

        def prepare(seen: Seen, line: Line) -> Replay:
            stored = self.store(seen.arm, layer, keys[:, :, :1], values[:, :, :1], [1] * case.batch, before + tokens - 1)
            lengths = torch.full_like(stored.lengths, before)

            def launch(slot: int) -> None:
                fused.write(stored.pages[slot], keys[slot], values[slot], stored.table, lengths)

            launch(0)
            line.kernel = stored.describe("write")
            line.bytes = self.written_bytes(seen.arm, layer, case.batch * tokens)
            line.launches = self.clock.count(self.clock.estimate(launch, slots))
            self._check_written(seen.arm, line, stored, keys[0], values[0], before)
            if not seen.facts:
                seen.facts = stored.facts(seen.arm, layer)
            return self.clock.ready(launch, slots, line.launches)

        entered = {arm.name: self.enter(case, arm, prepare) for arm in arms}
        return {name: racer for name, racer in entered.items() if racer is not None}

    def _check_written(self, arm: records.Arm, line: Line, stored: Stored, keys: torch.Tensor, values: torch.Tensor, before: int) -> None:
        """Errors of what was stored of the last sequence: to what torch quantises, and to the states themselves."""
        row, tokens = len(keys) - 1, keys.shape[1]
        held = oracle.read(stored.pages[0], stored.table[row], before + tokens)
        expected, states = [], []
        for side, format in ((keys[row], arm.keys), (values[row], arm.values)):
            states.append(side.float())
            expected.append(side.float())
            if format == "fp8_e4m3" and arm.scales != "fixed":
                codes, scales = fp8.quantise(side, arm.scales, arm.granularity)
                expected[-1] = fp8.dequantise(codes, scales, torch.float32)
        out = torch.cat([side[before:].flatten() for side in held])
        line.relative_error_unquantised = _error(out, torch.cat([side.flatten() for side in states]))
        if arm.scales != "fixed":
            line.relative_error = _error(out, torch.cat([side.flatten() for side in expected]))

    def written_bytes(self, arm: records.Arm, layer: records.LayerGeometry, tokens: int) -> int:
        """Bytes that are read and stored when so many tokens are written to one layer."""
        states = tokens * layer.kv_heads * (layer.key_dim + layer.value_dim) * self.dtype.itemsize
        return states + stored_bytes(arm, layer, tokens)

    # ------------------------------------------------------------ capacity

    def _capacity(self, number: int, case: records.Case) -> dict[str, Racer]:
        for arm in self.arms(case):
            self.enter(case, arm, lambda seen, line: self._fill(seen, line, case))
        return {}

    def _fill(self, seen: Seen, line: Line, case: records.Case) -> Replay:
        """The largest pool under the budget, made and filled for real."""
        page, budget = self.settings.page, self.settings.budget_bytes
        groups = groups_of(self.layers, seen.arm)

        def make(pages: int) -> Pool:
            sequences = max(case.batch, -(-pages * page // case.context))
            return Pool(
                groups,
                tokens=case.context,
                sequences=sequences,
                total=pages * page,
                chunk=page,
                budget_bytes=budget,
                page=page,
                device=self.device,
            )

        def fits(pages: int) -> bool:
            try:
                make(pages)
            except RefusedError as error:
                if error.code != "budget":
                    raise
                return False
            return True

        make(1)
        low, high = 1, max(2, (budget or 0) // min(group.bytes(1, page) for group in groups))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        pool = make(low)
        held = _fill_up(pool, case.context)
        backings = pool.backings()
        line.kernel = f"{len(groups)} groups of layers, pages of {page} tokens, {pool.sequences} sequences"
        line.tokens = held
        line.bytes = sum(backing.bytes for backing in backings) if pool.allocated_bytes is None else pool.allocated_bytes
        if not seen.facts:
            seen.facts = {
                "effective": _policy(seen.arm),
                "measured": {"keys": seen.arm.keys, "values": seen.arm.values},
                "geometry": records.Geometry(declared=self.layers, measured=self.layers),
                "backings": backings,
            }
        return lambda: None

    # ------------------------------------------------------------ a whole step

    def _step(self, number: int, case: records.Case) -> dict[str, Racer]:
        raise NotImplementedError


# ---------------------------------------------------------------- pages and facts


class Stored:
    """Pages of every slot, and who holds them."""

    def __init__(self, pool: Pool, sequences: list[int]) -> None:
        self.pool = pool
        self.pages: list[Pages] = [pool.pages(slot) for slot in pool.groups[0].layers]
        self.table, self.lengths = pool.table(0, sequences), pool.lengths(sequences)

    def describe(self, what: str) -> str:
        """A kernel other than decode on these pages, in words."""
        keys, values = (word(side.dtype).removeprefix("fp8_") for side in (self.pages[0].keys, self.pages[0].values))
        return f"fused {what} {keys}/{values} d{self.pages[0].keys.shape[-1]} page{self.pages[0].page}"

    def facts(self, arm: records.Arm, layer: records.LayerGeometry) -> dict[str, Any]:
        """What the pages are, for the result; each slot counts as a layer."""
        pages = self.pages[0]
        values = pages.values.shape[2 if pages.values.dtype == fp8.E4M3 else 3]
        measured = records.LayerGeometry(
            layer=0, kind="attention", kv_heads=pages.heads, key_dim=pages.keys.shape[-1], value_dim=int(values)
        )
        return {
            "effective": _policy(arm),
            "measured": {"keys": word(pages.keys.dtype), "values": word(pages.values.dtype)} | _scales(pages),
            "geometry": _slots(len(self.pages), layer, measured),
            "backings": self.pool.backings(),
        }


def _policy(arm: records.Arm) -> dict[str, str]:
    return {name: str(getattr(arm, name)) for name in ("implementation", "compute", "keys", "values", "scales", "granularity")}


def _scales(pages: Pages) -> dict[str, str]:
    scales = pages.key_scales if pages.key_scales is not None else pages.value_scales
    if scales is None:
        eight = fp8.E4M3 in (pages.keys.dtype, pages.values.dtype)
        return {"scales": "unit" if eight else "none", "granularity": "none"}
    return {"scales": "fixed", "granularity": "head"} if scales.dim() == 1 else {"scales": "dynamic", "granularity": "token_head"}


def _slots(count: int, layer: records.LayerGeometry, measured: records.LayerGeometry) -> records.Geometry:
    def numbered(one: records.LayerGeometry) -> tuple[records.LayerGeometry, ...]:
        return tuple(
            records.LayerGeometry(layer=slot, kind="attention", kv_heads=one.kv_heads, key_dim=one.key_dim, value_dim=one.value_dim)
            for slot in range(count)
        )

    return records.Geometry(declared=numbered(layer), measured=numbered(measured))


def _contiguous_facts(arm: records.Arm, problem: Problem, layer: records.LayerGeometry) -> dict[str, Any]:
    """What a native contender's cache is; copies in a layout of its own hold the same."""
    sides = {"keys": problem.keys, "values": problem.values}
    if arm.values == "fp8_e4m3":
        copies = next(copy for key, copy in problem.shared.items() if key[0] == "paged" and key[2] == arm.values)
        sides = {"keys": copies[0], "values": copies[1]}
    measured = records.LayerGeometry(
        layer=0,
        kind="attention",
        kv_heads=problem.heads,
        key_dim=int(problem.keys.shape[-1]),
        value_dim=int(problem.values.shape[-1]),
    )
    return {
        "effective": _policy(arm),
        "measured": {name: word(side.dtype) for name, side in sides.items()},
        "geometry": _slots(problem.slots, layer, measured),
        "backings": tuple(
            records.Backing(
                bytes=side.untyped_storage().nbytes(),
                dtype=word(side.dtype),
                kind="attention",
                layers=tuple(range(problem.slots)),
                holds=name,  # type: ignore[arg-type]
                address=side.untyped_storage().data_ptr(),
                tokens=sum(problem.lengths),
            )
            for name, side in sides.items()
        ),
    }


def stored_bytes(arm: records.Arm, layer: records.LayerGeometry, tokens: int) -> int:
    """Bytes of keys, values and scales of so many tokens of one layer, as the arm stores them; scales of a head are not counted."""
    bytes = 0
    for format, dim in ((arm.keys, layer.key_dim), (arm.values, layer.value_dim)):
        bytes += dim * DTYPES[format].itemsize + (4 if arm.scales == "dynamic" and format == "fp8_e4m3" else 0)
    return tokens * layer.kv_heads * bytes


def groups_of(layers: Sequence[records.LayerGeometry], arm: records.Arm) -> list[Group]:
    """Groups of a model's layers that keep keys and values, by geometry and window."""
    found: dict[Any, list[int]] = {}
    for layer in layers:
        if layer.kind != "recurrent":
            found.setdefault((layer.kv_heads, layer.key_dim, layer.value_dim, layer.window), []).append(layer.layer)
    return [
        Group(
            layers=tuple(numbers),
            kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            keys=arm.keys,
            values=arm.values,
            scales=arm.scales,
            granularity=arm.granularity,
            window=window,
        )
        for (heads, key_dim, value_dim, window), numbers in found.items()
    ]


def _fill_up(pool: Pool, context: int) -> int:
    """Append whole pages to sequences of at most ``context`` tokens until the pool has no page left; the tokens that it holds."""
    held = 0
    for _ in range(pool.sequences):
        sequence = pool.add()
        while pool.length(sequence) < context:
            more = min(pool.page, context - pool.length(sequence))
            try:
                pool.append(sequence, more)
            except InputError:  # no page left
                return held
            held += more
    return held


def _calibrate(pool: Pool, arm: records.Arm, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Scales per head from the states themselves: amax / 448."""
    sides = [
        (name, states)
        for name, states, format in (("key_scales", keys, arm.keys), ("value_scales", values, arm.values))
        if format == "fp8_e4m3"
    ]
    for slot in pool.groups[0].layers:
        pool.set_scales(slot, {name: states[slot].abs().amax(dim=(0, 1, 3)).float() / fp8.LARGEST for name, states in sides})


# ---------------------------------------------------------------- errors


def _compared(problem: Problem) -> tuple[list[int], int]:
    """Sequences whose results are compared, the longest and the shortest among them; and how many of their last queries."""
    order = sorted(range(len(problem.lengths)), key=lambda row: (problem.lengths[row], row))
    picked = [order[round(at * (len(order) - 1) / (ROWS - 1))] for at in range(ROWS)]
    return sorted(set(picked)), min(problem.chunk or 1, LAST)


def _rows(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """The compared part of a result [B, H_q, D] of decode or [B, chunk, H_q, D] of prefill's last chunk: [R, last, H_q, D]."""
    rows, last = _compared(problem)
    return (out if problem.chunk else out[:, None])[rows, -last:].float()


def _reference(problem: Problem, stored: Stored | None = None) -> torch.Tensor:
    """Float32 attention of the first slot's compared rows over what is stored, or over the states themselves."""
    rows, last = _compared(problem)
    found = []
    for row in rows:
        length = problem.lengths[row]
        lengths = torch.tensor([length], dtype=torch.int32, device=problem.device)
        if stored is not None:
            pages, table = stored.pages[0], stored.table[row : row + 1]
        else:  # a sequence as one page of its own length
            first = problem.longest - length
            pages = Pages(problem.keys[0, row, None, :, first:], problem.values[0, row, None, :, first:])
            table = torch.zeros(1, 1, dtype=torch.int32, device=problem.device)
        queries = problem.queries[0, row, None, -last:]
        found.append(oracle.prefill(queries, pages, table, lengths, scale=problem.scale, window=problem.window, soft_cap=problem.soft_cap))
    return torch.cat(found)


def _error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """‖out − truth‖ / ‖truth‖."""
    return float(torch.linalg.vector_norm(out - truth) / torch.linalg.vector_norm(truth))


def _words(error: Exception) -> str:
    if isinstance(error, RefusedError):
        return f"{error.code}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"memory: {error}"
    return str(error) if isinstance(error, LedgerError) else f"{type(error).__name__}: {error}"
