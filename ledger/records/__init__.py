"""Frozen records: what the archive holds, field by field.

A record is a :class:`msgspec.Struct`: immutable, typed, and strict, so that an
unknown key or a wrong type is refused with the path at which it stands. Its bytes are
the canonical JSON of :mod:`ledger.digest`; its name is the SHA-256 of those bytes.

    Spec          what will be measured, frozen before anything runs
    Result        what a runner measured: facts and the list of evidence files
    Run           one recorded result: spec, result, harness, and what was derived from it
    Reproduction  a recorded run compared with the run that repeated it
    Supersede, Retract    corrections; both sides stay readable
    Entry         one line of the log: which record, when

``decode`` reads a record from bytes, ``encode`` gives its canonical bytes. Whether a spec agrees with itself is
:mod:`ledger.records.consistency`'s to say.
"""

from __future__ import annotations

from ledger.records.base import (
    LONGEST_TEXT,
    Address,
    Count,
    Digest,
    Format,
    Instant,
    Name,
    Path,
    Positive,
    Record,
    Revision,
    Scope,
    Status,
    Text,
    Word,
)
from ledger.records.codec import convert, decode, encode, identify, plain
from ledger.records.result import ArmResult, Backend, Backing, Document, Evidence, Geometry, Host, LayerGeometry, Result, Segment
from ledger.records.run import (
    EXACT_UNITS,
    FIGURES,
    KINDS,
    MEASUREMENTS,
    Body,
    Claim,
    Decision,
    Difference,
    Distribution,
    Divergence,
    Entry,
    GateOutcome,
    Harness,
    Kernel,
    Measurement,
    Reproduction,
    Retract,
    Run,
    Supersede,
)
from ledger.records.spec import (
    FUSED_BACKEND,
    STEP_BACKEND,
    Arm,
    Case,
    Checkpoint,
    CheckpointFile,
    Contrast,
    Dataset,
    Family,
    Gate,
    Granularity,
    Greedy,
    Performance,
    Production,
    RescaledKeys,
    Scales,
    Span,
    Spec,
    Workload,
    takes_part,
)

__all__ = [
    "EXACT_UNITS",
    "FIGURES",
    "FUSED_BACKEND",
    "KINDS",
    "LONGEST_TEXT",
    "MEASUREMENTS",
    "STEP_BACKEND",
    "Address",
    "Arm",
    "ArmResult",
    "Backend",
    "Backing",
    "Body",
    "Case",
    "Checkpoint",
    "CheckpointFile",
    "Claim",
    "Contrast",
    "Count",
    "Dataset",
    "Decision",
    "Difference",
    "Digest",
    "Distribution",
    "Divergence",
    "Document",
    "Entry",
    "Evidence",
    "Family",
    "Format",
    "Gate",
    "GateOutcome",
    "Geometry",
    "Granularity",
    "Greedy",
    "Harness",
    "Host",
    "Instant",
    "Kernel",
    "LayerGeometry",
    "Measurement",
    "Name",
    "Path",
    "Performance",
    "Positive",
    "Production",
    "Record",
    "Reproduction",
    "RescaledKeys",
    "Result",
    "Retract",
    "Revision",
    "Run",
    "Scales",
    "Scope",
    "Segment",
    "Span",
    "Spec",
    "Status",
    "Supersede",
    "Text",
    "Word",
    "Workload",
    "convert",
    "decode",
    "encode",
    "identify",
    "plain",
    "takes_part",
]
