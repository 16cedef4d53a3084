"""performance: how long attention, writing and a whole decode step take, every contender in one process.

A case gives all arms the same numbers in the formats that they ask for. What an arm computes is compared with the float32
reference before it is timed; a native contender whose result is off is refused, since it computes something else. Then
the arms are replayed in turn (:mod:`runners.timing`), and a copy is timed after every case, so that each share of the
bandwidth is of that very run. Raw samples alone are written, no figure is derived here:

    cases.jsonl                 a canonical JSON line for each case and arm: kernel, bytes, launches, errors, or why it was refused
    timings/NNNN.safetensors    case NNNN: float64 microseconds a launch ``[repeats]`` as ``<case>|<arm>``, and ``copy|``

``bytes`` are the fewest that must move: in decode the stored keys, values and scales of all attended positions; in writing
the states that are read and what is stored; in prefill, for each chunk, what it attends to, its queries and its results; in
a step the weights and the stored cache. For ``capacity`` they are what the allocator gave.

A replay goes over all slots of a case, except where these take longer than :data:`runners.timing.LONGEST_US`: then the same first
slots are launched again and again, and the line's kernel says of how many (``3 of 8 slots a sample``).

What one append writes is so little that it stays in a cache of the device: its launch takes longer than its bytes do. A
whole step does not fit the memory once for every arm, so that its arms cannot take turns: each is timed twice, half
of its samples in the order of the spec and half in the reverse.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.numpy import save

from ledger import digest, records
from ledger.errors import InputError, RefusedError
from runners import caches, checkpoints, contenders, fp8, geometry, host, oracle, slots, steps
from runners.contenders import REFUSALS, Launch, Problem
from runners.findings import relative
from runners.geometry import DTYPES
from runners.losses import Folder, Progress
from runners.pages import Pages
from runners.slots import Slots, stored_bytes
from runners.timing import COPIED, Clock, Copy, Replay
from runners.words import said

FILE = "cases.jsonl"
COPIES = 10
"""Copies timed before the first case, and after each."""
ROWS = 4
"""Sequences whose results are compared with the reference."""
TRIES = 3
"""Replays by which the fastest way of one contender is chosen."""
LAST = 64
"""Query tokens of a prefill, from its end, whose results are compared."""
WRONG = {"bf16": 0.01, "fp16": 0.01, "fp8_e4m3": 0.1}
"""Relative error to unquantised attention beyond which a native contender, by the format of its cache, computes something else.

Of 16 bit no more than what ``ledger.performance.MAX_ERROR`` lets count."""
SHORT = (1024, 256)
"""Tokens, and tokens of a chunk, for which kernels are compiled ahead: as divisible as more of them are."""
ROOM = 8 << 30
"""Most bytes of the cache of an append, over all slots."""

Samples = dict[str, np.ndarray]
"""Microseconds a launch, float64 ``[repeats]``, by arm."""


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
class Seen:
    """What is known of an arm so far. Facts are those of the first case that it took part in."""

    arm: records.Arm
    ran: bool = False
    refused: str = ""
    failed: str = ""
    backends: list[records.Backend] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    microseconds: float = 0.0

    def heard(self, accepted: bool, words: str) -> None:
        """A backend was tried, and this is what it said; once."""
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


Prepare = Callable[[Seen, Line], Replay]
"""Makes an arm ready for a case and completes its line; raises where the arm is refused."""


def run(spec: records.Spec, inputs: Path, folder: Folder, progress: Progress) -> None:
    """Time the spec's cases; evidence and facts go to ``folder``.

    The spec's device is here, as :mod:`runners.__main__` has seen. Raises InputError for cases that cannot be.
    """
    with _freely():
        _run(Bench(spec, inputs, progress), folder)


@contextmanager
def _freely() -> Iterator[None]:
    """Contenders may use any algorithm: some of them refuse where deterministic ones are asked for, others slow down."""
    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked)


def _run(bench: Bench, folder: Folder) -> None:
    spec = bench.spec
    folder.update(warnings=tuple(checkpoints.cautions(spec.checkpoint, spec.device)))
    try:
        with torch.inference_mode():
            if bench.clock.cuda:
                bench.compile_ahead()
            copies = bench.copy()
            for number, case in enumerate(bench.settings.cases):
                samples = {f"{case.name}|{name}": values for name, values in bench.case(number, case).items()}
                bench.clock.release()
                samples["copy|"] = np.concatenate([copies, bench.copy()])
                copies = np.empty(0)
                folder.add(f"timings/{number:04d}.safetensors", save(samples), "application/vnd.safetensors")
                _settle(bench, folder)
    finally:  # a device that failed on the way leaves what was known until then
        _settle(bench, folder)


def _settle(bench: Bench, folder: Folder) -> None:
    """Make durable what is known by now: the lines since the last time, and the arms."""
    lines, bench.lines = bench.lines, []
    folder.append(FILE, b"".join(line.encode() for line in lines))
    folder.update(arms=tuple(seen.result() for seen in bench.seen.values()))


class Bench:
    """The cases of a spec on a device, and what came of them."""

    def __init__(self, spec: records.Spec, inputs: Path, progress: Progress) -> None:
        if spec.performance is None:
            raise InputError("The spec says nothing of what to time.", expected="[performance]", next="choose a study of that scope.")
        self.spec, self.settings, self.inputs, self.progress = spec, spec.performance, inputs, progress
        self.device = torch.device("cuda", 0) if spec.device == "cuda" else torch.device(spec.device)
        computes = {arm.compute for arm in spec.arms}
        if len(computes) > 1 or "fp32" in computes:
            found = ", ".join(sorted(computes))
            raise InputError(
                "Arms that are compared compute in one 16-bit dtype.", expected="bf16 or fp16", found=found, next="change the arms."
            )
        self.compute = computes.pop()
        self.dtype = DTYPES[self.compute]
        self._model: Any = None
        self.config = self._config()
        self.layers = geometry.declared(self.config)
        for case in self.settings.cases:  # what cannot be is known before anything is timed
            self.layer(case)
        self.clock = Clock(self.device, self.settings.launches)
        self.copier = Copy(self.clock, COPIED if self.clock.cuda else max(4096, self.settings.rotate_bytes))
        self.lines = [Line("copy", "", self.copier.kernel, self.copier.bytes, 1)]
        self.seen = {arm.name: Seen(arm) for arm in spec.arms}

    def _config(self) -> Any:
        checkpoint = self.spec.checkpoint
        if checkpoint.config is None:
            return self.model().config
        kind = checkpoint.source.removeprefix("random:").partition("#")[0]
        try:
            return checkpoints.configuration(checkpoint)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"The configuration of {checkpoint.name!r} cannot be read.",
                expected=f"fields of a configuration of type {kind!r}",
                found=str(error)[:2000],
                next="correct the study.",
            ) from error

    def model(self) -> Any:
        """The model on the device; loaded once."""
        if self._model is None:
            self._model, _ = checkpoints.load(self.spec.checkpoint, self.compute, self.progress.say, self.inputs, self.spec.device)
        return self._model

    def layer(self, case: records.Case) -> records.LayerGeometry:
        """The first layer of the case's head dimension; of any, for a case of all layers. Raises InputError."""
        attending = [layer for layer in self.layers if layer.kind != "recurrent"]
        for layer in attending:
            if case.head_dim in (None, layer.key_dim):
                return layer
        raise InputError(
            f"Case {case.name!r} is of layers that the model does not have.",
            expected=f"head dimension {' or '.join(str(dim) for dim in sorted({layer.key_dim for layer in attending}))}",
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

    def compile_ahead(self) -> None:
        """Have compiled what fused arms launch, several at a time, over short sequences: compilers run beside each other.

        What is compiled otherwise after all is compiled in its case; what fails here fails there again, and is told there.
        """
        short: dict[records.Case, records.Case] = {}
        for case in self.settings.cases:
            if case.kind not in ("step", "capacity"):
                chunk = None if case.chunk is None else min(case.chunk, SHORT[1])
                small = msgspec.structs.replace(case, context=min(case.context, SHORT[0]), shortest=None, chunk=chunk)
                short.setdefault(msgspec.structs.replace(small, batch=1), small)
        jobs = [(case, arm) for case in short.values() for arm in self.arms(case) if arm.implementation == "fused"]
        self.progress.say(f"compiling the kernels of {len(jobs)} cases")
        with ThreadPoolExecutor(max(1, min(len(jobs), host.cores()))) as pool:
            list(pool.map(lambda job: self._launch_once(*job), jobs))
        self.clock.release()

    def _launch_once(self, case: records.Case, arm: records.Arm) -> None:
        with suppress(Exception), torch.inference_mode():
            layer = self.layer(case)
            problem = self._problem(0, case, layer, only=1)
            keys, values = problem.keys.transpose(2, 3), problem.values.transpose(2, 3)
            if case.kind in ("decode", "prefill"):
                stored = self._store(arm, keys, values, problem.lengths)
                options = {"scale": problem.scale, "window": problem.window, "soft_cap": problem.soft_cap}
                (self._prefills if problem.chunk else self._decodes)(problem, stored, options)(0)
                return
            tokens, before = (1, case.context) if case.kind == "append" else (case.context, 0)
            stored = self._store(arm, keys, values, [0] * case.batch, before + tokens)
            states = (side[0, :, :tokens].contiguous() for side in (keys, values))
            geometry.kernels().write(stored.pages[0], *states, stored.table, torch.full_like(stored.lengths, before))

    # ------------------------------------------------------------ one case

    def case(self, number: int, case: records.Case) -> Samples:
        """Time one case. What does not fit the memory is refused, arm by arm or as a whole."""
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
            found = kinds[case.kind](number, case)
        except torch.OutOfMemoryError as error:
            self._refuse_all(case, said(error))
            return {}
        if found:
            self.progress.say("  " + ", ".join(f"{name} {np.median(samples):.1f} µs" for name, samples in found.items()))
        return found

    def arms(self, case: records.Case) -> list[records.Arm]:
        """The arms that take part in a case."""
        return [arm for arm in self.spec.arms if records.takes_part(arm, case)]

    def enter(self, case: records.Case, arm: records.Arm, prepare: Prepare) -> tuple[Line, Replay] | None:
        """An arm made ready for the case; None where it was refused, in the words that its line keeps."""
        seen, line = self.seen[arm.name], Line(case.name, arm.name)
        self.lines.append(line)
        try:
            if arm.implementation == "fused":
                geometry.kernels()  # refused without Triton, in every case alike
            replay = prepare(seen, line)
        except Exception as error:
            self._refused(line, error)
            return None
        seen.ran = True
        return line, replay

    def _refused(self, line: Line, error: Exception) -> None:
        """An arm's error in a case: a refusal is an answer, anything else a fault of that arm."""
        seen, words = self.seen[line.arm], said(error)
        line.refused = words[:4000]
        if isinstance(error, (RefusedError, torch.OutOfMemoryError)):
            seen.refused = seen.refused or words[:8192]
            seen.heard(False, f"{line.case}: {words}")
        else:
            seen.failed = seen.failed or f"{line.case}: {words}"[:8192]
        self.progress.say(f"  {line.arm} refused: {' '.join(words.split())[:200]}")
        self.clock.release()

    def _refuse_all(self, case: records.Case, words: str) -> None:
        """The case itself does not fit: nothing of it counts."""
        self.lines = [line for line in self.lines if line.case != case.name]
        for arm in self.arms(case):
            self.lines.append(Line(case.name, arm.name, refused=words[:4000]))
            self.seen[arm.name].refused = self.seen[arm.name].refused or words[:8192]

    def race(self, ready: dict[str, tuple[Line, Replay]]) -> Samples:
        """Time the arms that are ready, in turn."""
        if self.clock.cuda:
            for _, replay in ready.values():
                replay()
        found = self.clock.race({name: replay for name, (_, replay) in ready.items()}, self.settings.repeats)
        for name, samples in found.items():
            self.seen[name].microseconds += float(samples.sum())
            samples /= ready[name][0].launches
        return found

    # ------------------------------------------------------------ attention

    def _attention(self, number: int, case: records.Case) -> Samples:
        layer = self.layer(case)
        problem = self._problem(number, case, layer)
        truth = _reference(problem)
        ready = {}
        for arm in self.arms(case):
            kind = self._fused if arm.implementation == "fused" else self._native
            entered = self.enter(case, arm, lambda seen, line, kind=kind: kind(seen, line, layer, problem, truth))
            if entered is not None:
                ready[arm.name] = entered
        return self.race(ready)

    def _problem(self, number: int, case: records.Case, layer: records.LayerGeometry, only: int = 0) -> Problem:
        """Queries, keys and values of a case: standard normal, from the spec's seed and the case's number.

        In as many slots as rotate, or ``only`` so many.
        """
        seed = self.settings.seed * 100_003 + number
        lengths = [case.context] * case.batch
        if case.shortest is not None:
            drawn = torch.randint(case.shortest, case.context + 1, (case.batch,), generator=torch.Generator().manual_seed(seed))
            lengths = drawn.tolist()
        longest = max(lengths)
        attended = sum(min(length, case.window or length) for length in lengths)
        count = only or self._slots(min(stored_bytes(arm, layer, attended) for arm in self.spec.arms))
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(count, case.batch, *shape, dtype=self.dtype, device=self.device, generator=generator)

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

    def _slots(self, bytes: int) -> int:
        """Slots of so many bytes that buffers rotate over."""
        return max(1, -(-self.settings.rotate_bytes // bytes))

    def _native(self, seen: Seen, line: Line, layer: records.LayerGeometry, problem: Problem, truth: torch.Tensor) -> Replay:
        """The fastest offer of a native backend whose result is right, by a few replays of each."""
        arm = seen.arm
        best: tuple[float, str, float, int, Replay] | None = None
        refusals = []
        for offer in contenders.offers(arm.backend, problem, arm.values):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    launch = offer.prepare()
                    error = relative(_rows(problem, launch(0)), truth)
                    if not error <= WRONG[arm.values]:
                        raise RefusedError("wrong", "Its result is not that attention.", found=f"relative error {error:.3g}")
                    count = self.clock.count(self.clock.estimate(launch, problem.slots), problem.slots)
                    replay = self.clock.ready(launch, problem.slots, count)
                    took = self._pick(replay) / count
                except REFUSALS as refusal:
                    refusals.append(f"{offer.kernel}: {contenders.say_why(refusal, heard)}")
                    continue
            seen.heard(True, offer.kernel)
            if best is None or took < best[0]:
                best = took, offer.kernel, error, count, replay
        if best is None:
            raise RefusedError(
                "backend",
                "The backend refuses this attention.",
                expected="one offer that computes it",
                found="\n".join(refusals)[:3700],
                next="compare with another backend.",
            )
        for words in refusals:
            seen.heard(False, f"{line.case}: {words}")
        _, line.kernel, error, line.launches, replay = best
        line.kernel += _some(line.launches, problem.slots)
        line.bytes = self._attended_bytes(arm, layer, problem)
        line.relative_error = error if arm.values != "fp8_e4m3" else None
        line.relative_error_unquantised = error
        seen.facts = seen.facts or slots.contiguous_facts(arm, problem, layer)
        return replay

    def _pick(self, replay: Replay) -> float:
        """Microseconds of a replay, by a few of them: to choose among the ways of one contender."""
        return float(np.median(self.clock.time(replay, TRIES)))

    def _fused(self, seen: Seen, line: Line, layer: records.LayerGeometry, problem: Problem, truth: torch.Tensor) -> Replay:
        """The fused kernels over pages of the arm's formats."""
        stored = self._store(seen.arm, problem.keys.transpose(2, 3), problem.values.transpose(2, 3), problem.lengths)
        options = {"scale": problem.scale, "window": problem.window, "soft_cap": problem.soft_cap}
        launch = self._prefills(problem, stored, options) if problem.chunk else self._decodes(problem, stored, options)
        line.kernel = stored.describe("prefill") if problem.chunk else geometry.kernels().describe(stored.pages[0], len(problem.lengths))
        out = _rows(problem, launch(0))
        line.relative_error = relative(out, _reference(problem, stored))
        line.relative_error_unquantised = relative(out, truth)
        if not math.isfinite(line.relative_error):
            raise InputError(
                "The fused result is not finite.",
                expected="finite attention of normal numbers",
                found=f"relative error {line.relative_error} of {line.kernel}",
                next="run the production checks, which say where.",
            )
        line.bytes = self._attended_bytes(seen.arm, layer, problem)
        seen.heard(True, line.kernel)
        seen.facts = seen.facts or stored.facts(layer)
        return self._ready(line, launch, problem.slots)

    def _ready(self, line: Line, launch: Callable[[int], object], slots: int) -> Replay:
        """A replay of that launch; the line says how many launches it has."""
        line.launches = self.clock.count(self.clock.estimate(launch, slots), slots)
        line.kernel += _some(line.launches, slots)
        return self.clock.ready(launch, slots, line.launches)

    def _decodes(self, problem: Problem, stored: Slots, options: dict[str, Any]) -> Launch:
        # As in a step, the plan is made once for all layers, which the slots stand for.
        longest, dim, fused = max(problem.lengths), problem.queries.shape[-1], geometry.kernels()
        plan = fused.Plan(len(problem.lengths), problem.heads, longest, problem.window, dim=dim, device=self.device)
        plan.update(stored.lengths)
        queries = problem.queries[:, :, 0]
        return lambda slot: fused.decode(queries[slot], stored.pages[slot], stored.table, stored.lengths, plan=plan, **options)

    def _prefills(self, problem: Problem, stored: Slots, options: dict[str, Any]) -> Launch:
        ends, fused = [torch.full_like(stored.lengths, end) for _, end in problem.chunks()], geometry.kernels()

        def launch(slot: int) -> torch.Tensor:
            out = problem.queries
            for (first, end), lengths in zip(problem.chunks(), ends, strict=True):
                table = stored.table[:, : -(-end // self.settings.page)]
                out = fused.prefill(problem.queries[slot, :, first:end], stored.pages[slot], table, lengths, **options)
            return out

        return launch

    def _attended_bytes(self, arm: records.Arm, layer: records.LayerGeometry, problem: Problem) -> int:
        """Bytes that must move in one launch."""
        if not problem.chunk:
            return stored_bytes(arm, layer, sum(min(length, problem.window or length) for length in problem.lengths))
        batch, tokens = problem.queries.shape[1:3]
        reads = sum(min(end, problem.window + problem.chunk - 1) if problem.window else end for _, end in problem.chunks())
        states = batch * tokens * self.query_heads * (layer.key_dim + layer.value_dim) * self.dtype.itemsize
        return stored_bytes(arm, layer, batch * reads) + states

    def _store(self, arm: records.Arm, keys: torch.Tensor, values: torch.Tensor, lengths: Any, room: int = 0) -> Slots:
        return slots.store(arm, keys, values, lengths, page=self.settings.page, seed=self.settings.seed, room=room)

    # ------------------------------------------------------------ writing

    def _writing(self, number: int, case: records.Case) -> Samples:
        layer = self.layer(case)
        tokens, before = (1, case.context) if case.kind == "append" else (case.context, 0)
        arms = self.arms(case)
        count = self._slots(min((self._written_bytes(arm, layer, case.batch * tokens) for arm in arms), default=1))
        if before:
            largest = max((stored_bytes(arm, layer, case.batch * before) for arm in arms), default=1)
            count = max(1, min(count, ROOM // largest))
        generator = torch.Generator(self.device).manual_seed(self.settings.seed * 100_003 + number)
        keys, values = (
            torch.randn(count, case.batch, tokens, layer.kv_heads, dim, dtype=self.dtype, device=self.device, generator=generator)
            for dim in (layer.key_dim, layer.value_dim)
        )

        def prepare(seen: Seen, line: Line) -> Replay:
            stored = self._store(seen.arm, keys, values, [0] * case.batch, before + tokens)
            lengths, fused = torch.full_like(stored.lengths, before), geometry.kernels()

            def launch(slot: int) -> None:
                fused.write(stored.pages[slot], keys[slot], values[slot], stored.table, lengths)

            line.kernel = stored.describe("write")
            line.bytes = self._written_bytes(seen.arm, layer, case.batch * tokens)
            launch(0)
            _check_written(seen.arm, line, stored, keys[0], values[0], before)
            seen.heard(True, line.kernel)
            seen.facts = seen.facts or stored.facts(layer)
            return self._ready(line, launch, count)

        entered = {arm.name: self.enter(case, arm, prepare) for arm in arms}
        return self.race({name: one for name, one in entered.items() if one is not None})

    def _written_bytes(self, arm: records.Arm, layer: records.LayerGeometry, tokens: int) -> int:
        """Bytes that are read and stored when so many tokens are written to one layer."""
        return tokens * layer.kv_heads * (layer.key_dim + layer.value_dim) * self.dtype.itemsize + stored_bytes(arm, layer, tokens)

    # ------------------------------------------------------------ capacity

    def _capacity(self, number: int, case: records.Case) -> Samples:
        page, budget = self.settings.page, self.settings.budget_bytes or 0

        def prepare(seen: Seen, line: Line) -> Replay:
            pool, line.tokens = slots.fullest(
                self.config, seen.arm, batch=case.batch, context=case.context, budget=budget, page=page, device=self.device
            )
            backings = pool.backings()
            line.bytes = sum(backing.bytes for backing in backings) if pool.allocated_bytes is None else pool.allocated_bytes
            line.kernel = f"pool of {len(pool.groups)} groups, pages of {page} tokens, {pool.sequences} sequences"
            attending = tuple(layer for layer in self.layers if layer.kind != "recurrent")
            seen.facts = seen.facts or slots.pool_facts(pool, attending)
            return lambda: None

        for arm in self.arms(case):
            self.enter(case, arm, prepare)
            self.clock.release()
        return {}

    # ------------------------------------------------------------ a whole step

    def _step(self, number: int, case: records.Case) -> Samples:
        model, seed = self.model(), self.settings.seed * 100_003 + number
        first = self.settings.repeats // 2
        found: dict[str, list[np.ndarray]] = {}
        chosen: list[tuple[str, bool]] = []
        for repeats, order in ((first, self.arms(case)), (self.settings.repeats - first, self.arms(case)[::-1])):

            def prepare(seen: Seen, line: Line, repeats: int = repeats) -> Replay:
                line.launches = 1
                line.bytes = steps.bytes_of(model, seen.arm, self.layers, case.batch, case.context)
                if seen.arm.implementation == "native":
                    return self._native_step(seen, line, case, seed, chosen)
                step, cache, words = steps.fused(
                    model,
                    seen.arm,
                    batch=case.batch,
                    context=case.context,
                    steps=repeats + 1,
                    page=self.settings.page,
                    seed=seed,
                    device=self.device,
                )
                line.kernel = f"{self._captured} step: {words}"
                if not bool(torch.isfinite(step()).all()):
                    raise InputError(
                        "The logits of a fused step are not finite.",
                        expected="finite logits over a cache of normal numbers",
                        found=f"NaN or infinity from {words}",
                        next="run the production checks, which say where.",
                    )
                seen.heard(True, line.kernel)
                seen.facts = seen.facts or self._cache_facts(seen.arm, cache)
                return step

            for arm in order:
                line = next((line for line in self.lines if (line.case, line.arm) == (case.name, arm.name)), None)
                if line is not None and line.refused:
                    continue
                try:
                    entered = self.enter(case, arm, prepare) if line is None else (line, prepare(self.seen[arm.name], line))
                    if entered is not None:
                        found.setdefault(arm.name, []).append(self.clock.time(entered[1], repeats))
                except Exception as error:
                    found.pop(arm.name, None)
                    self._refused(self.lines[-1] if line is None else line, error)
                entered = None
                self.clock.release()
        for name, parts in found.items():
            self.seen[name].microseconds += float(sum(part.sum() for part in parts))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _native_step(self, seen: Seen, line: Line, case: records.Case, seed: int, chosen: list[tuple[str, bool]]) -> Replay:
        """Transformers' step as it is fastest, by attention and streamlined or not; what was ``chosen`` before is not tried again."""
        native = steps.Native(self.model(), case.batch, case.context, seed, self.device)
        best: tuple[float, tuple[str, bool], Replay] | None = None
        refusals = []
        for choice in chosen or steps.CHOICES:
            try:
                replay = native.ready(choice, self.clock)
                took = self._pick(replay)
            except REFUSALS as refusal:
                refusals.append(f"{steps.CHOICES[choice]}: {said(refusal)}")
                seen.heard(False, f"{line.case}: {refusals[-1]}")
                continue
            seen.heard(True, f"static cache, {steps.CHOICES[choice]}")
            if best is None or took < best[0]:
                best = took, choice, replay
        if best is None:
            raise RefusedError(
                "backend",
                "No step of Transformers can be captured.",
                expected="one attention over a static cache that can",
                found="\n".join(refusals)[:3700],
                next="compare with attention alone.",
            )
        chosen[:] = [best[1]]
        line.kernel = f"{self._captured} step: static cache, {steps.CHOICES[best[1]]}"
        seen.facts = seen.facts or self._cache_facts(seen.arm, native.cache)
        return best[2]

    @property
    def _captured(self) -> str:
        return "captured" if self.clock.cuda else "eager"

    def _cache_facts(self, arm: records.Arm, cache: Any) -> dict[str, Any]:
        """What a whole model's cache is. A static cache is none that :mod:`runners.caches` has a word for."""
        measured = caches.measured_policy(cache, self.compute)
        effective = caches.effective_policy(cache) | {"compute": self.compute}
        if arm.implementation == "native":
            measured.pop("implementation", None)
            effective.pop("implementation", None)
        return {
            "effective": effective,
            "measured": measured,
            "geometry": records.Geometry(declared=self.layers, measured=tuple(geometry.measured(cache))),
            "census": dict(geometry.census(self.model())),
            "backings": tuple(caches.backings(cache)),
        }


# ---------------------------------------------------------------- errors


def _compared(problem: Problem) -> tuple[list[int], int]:
    """Sequences whose results are compared, the longest and the shortest among them; and how many of their last queries."""
    order = sorted(range(len(problem.lengths)), key=lambda row: (problem.lengths[row], row))
    picked = [order[round(at * (len(order) - 1) / (ROWS - 1))] for at in range(ROWS)]
    return sorted(set(picked)), min(problem.chunk or 1, LAST)


def _rows(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """The compared part of a result [B, H_q, D] of decode, or [B, chunk, H_q, D] of prefill's last chunk: [R, last, H_q, D]."""
    rows, last = _compared(problem)
    return (out if problem.chunk else out[:, None])[rows, -last:].float()


def _reference(problem: Problem, stored: Slots | None = None) -> torch.Tensor:
    """Float32 attention of the first slot's compared rows: over what is stored, or over the states themselves."""
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
        options: dict[str, Any] = {"scale": problem.scale, "window": problem.window, "soft_cap": problem.soft_cap}
        found.append(oracle.prefill(problem.queries[0, row, None, -last:], pages, table, lengths, **options))
    return torch.cat(found)


def _check_written(arm: records.Arm, line: Line, stored: Slots, keys: torch.Tensor, values: torch.Tensor, before: int) -> None:
    """Errors of what was stored of the last sequence's ``keys`` and ``values`` [B, T, H, D]: to what torch stores, and to themselves."""
    held = oracle.read(stored.pages[0], stored.table[-1], before + keys.shape[1])
    states, expected = [], []
    for side, format in ((keys[-1], arm.keys), (values[-1], arm.values)):
        states.append(side.float().flatten())
        if format == "fp8_e4m3" and arm.scales != "fixed":
            side = fp8.dequantise(*fp8.quantise(side, arm.scales, arm.granularity), torch.float32)
        expected.append(side.float().flatten())
    out = torch.cat([side[before:].flatten() for side in held])
    line.relative_error_unquantised = relative(out, torch.cat(states))
    line.relative_error = None if arm.scales == "fixed" else relative(out, torch.cat(expected))


def _some(launches: int, slots: int) -> str:
    """What is said of a replay that does not come to every slot: the working set does not turn over whole."""
    return f", {launches} of {slots} slots a sample" if launches < slots else ""
