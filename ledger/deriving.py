"""Evidence of a run -> everything that follows from it, whatever its scope: one way for the recorder and the verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ledger import captures, gates, measures, memory, performance, production, tasks
from ledger.records import Decision, Harness, Kernel, Measurement, Result, Spec


@dataclass(frozen=True)
class Derived:
    """What a run records besides its result. ``wrong_inputs`` says, clause by clause, what is wrong with token ids."""

    measurements: tuple[Measurement, ...] = ()
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    wrong_inputs: tuple[str, ...] = ()


def derive(spec: Spec, result: Result, evidence: Mapping[str, bytes], harness: Harness) -> Derived:
    """Figures, decisions and warnings. ``evidence`` maps names to bytes. Raises InputError where a file cannot be parsed."""
    if spec.performance is not None:
        timings = performance.read(spec, evidence)
        return Derived(
            measurements=performance.measure(spec, timings),
            decisions=performance.decide(spec, result, timings, harness),
            kernels=performance.kernels(spec, timings),
        )
    if spec.production is not None:
        return Derived(decisions=production.decide(spec, result, production.read(spec, evidence), harness))
    if spec.task is not None:
        answers = tasks.read(spec, evidence)
        return Derived(
            measurements=tasks.measure(spec, answers),
            decisions=tasks.decide(spec, result, answers, harness),
            warnings=tasks.suspicions(spec, answers),
            wrong_inputs=tuple(tasks.check_documents(spec, result, answers)),
        )
    if spec.capture is not None:
        captured = captures.read(spec, evidence)
        return Derived(
            measurements=captures.measure(spec, result, captured),
            decisions=captures.decide(spec, result, captured, harness),
            warnings=tuple(captures.suspicions(spec, captured)),
            wrong_inputs=tuple(measures.check_inputs(spec, result, evidence.get("inputs.safetensors"))),
        )
    if spec.memory is not None:
        held = memory.read(spec, evidence)
        return Derived(measurements=memory.measure(spec, held), decisions=memory.decide(spec, result, held, harness))
    samples = measures.read_samples(spec, evidence)
    return Derived(
        measurements=measures.measure(spec, result, samples),
        decisions=gates.decide(spec, result, samples, harness),
        warnings=measures.suspicions(spec, samples),
        wrong_inputs=tuple(measures.check_inputs(spec, result, evidence.get("inputs.safetensors"))),
    )
