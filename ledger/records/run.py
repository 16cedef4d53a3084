"""The run and what is derived from it, corrections, entries of the log, claims."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from ledger.records.base import Count, Digest, Instant, Name, Path, Record, Revision, Scope, Status, Text, Word
from ledger.records.keeping import KeyChange, Redaction
from ledger.records.outside import Recipe, Report
from ledger.records.result import Evidence
from ledger.records.spec import Spec


class Distribution(Record, frozen=True, kw_only=True):
    """An installed distribution: its version and the SHA-256 of its RECORD file."""

    name: Word
    version: Word
    record_sha256: Digest


class Harness(Record, frozen=True, kw_only=True):
    """The code that ran.

    ``matched`` says whether the result's source digests were found: at ``commit`` (``commit``), in an installed
    distribution (``distribution``), or nowhere (``none``, which cannot qualify). ``state`` is that of the working tree
    where the result was recorded; ``diff`` names the evidence that holds its diff.
    """

    matched: Literal["commit", "distribution", "none"]
    commit: Revision | None = None
    repository: Text | None = None
    state: Literal["clean", "dirty", "none"] = "none"
    detail: Text = ""
    diff: Path | None = None
    untracked: dict[Text, Digest] = {}
    distribution: Distribution | None = None

    @property
    def revision(self) -> str:
        """The commit, ``name==version``, or ``unmatched``."""
        if self.matched == "commit" and self.commit:
            return self.commit
        if self.matched == "distribution" and self.distribution:
            return f"{self.distribution.name}=={self.distribution.version}"
        return "unmatched"


class Measurement(Record, frozen=True, kw_only=True):
    """A figure derived from raw samples. ``against`` names the other arm where it is a comparison.

    ``lower`` and ``upper`` bound a two-sided 95 % interval, where one exists: of Student's t over documents, of a task as
    :mod:`ledger.tasks` says.
    """

    arm: Name
    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_/.-]{1,100}\Z")]
    value: float | int
    unit: Literal["nats", "fraction", "bytes", "tokens", "ratio", "count", "seconds", "microseconds", "logits", "states"]
    against: Name | None = None
    lower: float | None = None
    upper: float | None = None


MEASUREMENTS: dict[str, str] = {
    "loss_mean": "nats",
    "loss_difference_mean": "nats",
    "loss_difference_sd": "nats",
    "worst_document_loss_difference": "nats",
    "kl_mean": "nats",
    "kl_median": "nats",
    "kl_p999": "nats",
    "kl_difference_mean": "nats",
    "top1_disagreement": "fraction",
    "logit_gap_max": "logits",
    "greedy_agreement_tokens/": "tokens",
    "cache_bytes": "bytes",
    "cache_bytes_per_token": "bytes",
    "scale_bytes": "bytes",
    "cache_ratio": "ratio",
    "cache_ratio_with_scales": "ratio",
    "captures": "count",
    "steps": "count",
    "keys_amax": "states",
    "values_amax": "states",
    "keys_saturating_heads": "count",
    "values_saturating_heads": "count",
    "state_bytes/": "bytes",
    "allocator_bytes/": "bytes",
    "ratio/": "ratio",
}
"""Every measurement and its unit; a name that ends in a slash goes on with a document's number, or with what it is of.

Defined in :mod:`ledger.measures`, and from ``captures`` on in :mod:`ledger.captures` and :mod:`ledger.memory`. ``states`` are numbers
as keys and values hold them.
"""

FIGURES: dict[str, str] = {
    "median_us": "microseconds",
    "spread_us": "microseconds",
    "share_of_copy": "fraction",
    "ratio_to_best_native": "ratio",
    "relative_error": "fraction",
    "relative_error_unquantised": "fraction",
    "bytes": "bytes",
    "tokens": "tokens",
    "ratio": "ratio",
}
"""Last words of the measurements of performance and their units, such as of ``decode/k16v8/b32/c8192/d128/median_us``."""

ANSWER_FIGURES: dict[str, str] = {
    "items": "count",
    "answer_tokens": "tokens",
    "out_of_tokens": "count",
    "readings_differ": "count",
    "identical_answers": "count",
    "accuracy": "fraction",
    "unparsed": "count",
    "accuracy_difference": "fraction",
    "accuracy_difference_newcombe": "fraction",
    "both_right": "count",
    "gained": "count",
    "lost": "count",
    "both_wrong": "count",
    "discordance": "fraction",
    "mcnemar_p": "fraction",
    "answers_compared": "count",
    "answer_preservation": "fraction",
}
"""Measurements of a task and their units; from ``accuracy`` on, of each reading: ``strict/accuracy``. Defined in :mod:`ledger.tasks`."""

EXACT_UNITS = ("bytes", "tokens", "count")
"""Units of what is counted: no tolerance applies."""


class GateOutcome(Record, frozen=True, kw_only=True):
    """One gate's numbers. ``floor`` is the same statistic between the baseline and its repeat."""

    statistic: Text
    estimate: float
    lower: float
    upper: float
    bound: float
    harm: float
    floor: float | None = None
    p_bound: float | None = None
    p_harm: float | None = None
    met: bool
    harmed: bool
    method: Text


class Decision(Record, frozen=True, kw_only=True):
    """What the gates of one contrast say. ``p_bound`` and ``p_harm`` are Holm-adjusted within the spec."""

    candidate: Name
    baseline: Name
    family: Name
    status: Status
    reason: Text = ""
    p_bound: float | None = None
    p_harm: float | None = None
    gates: tuple[GateOutcome, ...] = ()


class Kernel(Record, frozen=True, kw_only=True):
    """What ran in a case for one arm, in its own words; ``refused`` says why nothing did. The copy has no arm."""

    case: Word
    arm: Annotated[str, Meta(pattern=r"\A([a-z0-9][a-z0-9-]{0,63})?\Z")]
    kernel: Text
    refused: Text = ""


class Run(Record, frozen=True, kw_only=True):
    """One recorded result. Its digest is its id. Facts stay in the result, which is evidence named ``result.json``.

    A run of format 1 knows no ``kernels``: they are no part of its bytes. One of a performance spec has format 2.
    """

    format: Literal["kv-ledger/run/1", "kv-ledger/run/2"]
    rules: Literal["1"]
    spec: Digest
    result: Digest
    outcome: Literal["completed", "interrupted", "failed"]
    reason: Text
    harness: Harness
    evidence: tuple[Evidence, ...]
    measurements: tuple[Measurement, ...] = ()
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[Text, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    def __post_init__(self) -> None:
        if self.format == "kv-ledger/run/1" and self.kernels:
            raise ValueError("a run of format 1 names no kernels")


class Difference(Record, frozen=True, kw_only=True):
    """One measurement, or one fact of the environment, of two runs side by side."""

    name: Text
    original: Any
    reproduced: Any
    tolerance: float | None = None
    within: bool = True


class Divergence(Record, frozen=True, kw_only=True):
    """The first raw sample that differs: which evidence, which tensor, which position."""

    evidence: Path
    series: Text
    position: Count
    original: float
    reproduced: float


class Reproduction(Record, frozen=True, kw_only=True):
    """A run compared with the run that repeated it. ``reproduced`` is None where nothing could be run."""

    format: Literal["kv-ledger/reproduction/1"]
    original: Digest
    reproduced: Digest | None
    verdict: Literal["bit-identical", "within", "outside", "not comparable"]
    reason: Text
    same_hardware: bool | None
    harness: Literal["recorded", "current"]
    differences: tuple[Difference, ...] = ()
    environment: tuple[Difference, ...] = ()
    divergence: Divergence | None = None


class Supersede(Record, frozen=True, kw_only=True):
    """``run`` is replaced by ``by``; both stay readable."""

    format: Literal["kv-ledger/supersede/1"]
    run: Digest
    by: Digest
    author: Text
    reason: Text


class Retract(Record, frozen=True, kw_only=True):
    """A run no longer counts, or, by format 2, the report or recipe ``record``; it stays readable.

    One of format 1 knows no ``record``, one of format 2 no ``run``: they are no part of its bytes.
    """

    format: Literal["kv-ledger/retract/1", "kv-ledger/retract/2"]
    author: Text
    reason: Text
    run: Digest | None = None
    record: Digest | None = None

    def __post_init__(self) -> None:
        own, other = (self.run, self.record) if self.format == "kv-ledger/retract/1" else (self.record, self.run)
        if own is None or other is not None:
            raise ValueError("a retraction of format 1 names a `run`, one of format 2 a `record`, and neither names both")

    @property
    def subject(self) -> str:
        """What is retracted, a run or another record."""
        return str(self.run or self.record)


Body = Spec | Run | Reproduction | Supersede | Retract | Report | Recipe | KeyChange | Redaction
"""What an entry of the log can name."""

KINDS: dict[str, type[Record]] = {
    "spec": Spec,
    "run": Run,
    "reproduction": Reproduction,
    "supersede": Supersede,
    "retract": Retract,
    "report": Report,
    "recipe": Recipe,
    "key": KeyChange,
    "redaction": Redaction,
}


class Entry(Record, frozen=True, kw_only=True):
    """One line of the log. Its canonical bytes are the leaf of the Merkle tree; ``sequence`` counts from 0."""

    format: Literal["kv-ledger/entry/1"]
    sequence: Count
    kind: Literal["spec", "run", "reproduction", "supersede", "retract", "report", "recipe", "key", "redaction"]
    record: Digest
    recorded_at: Instant


class Claim(Record, frozen=True, kw_only=True):
    """What the archive says about one key: checkpoint × arm × scope × workload × hardware class.

    Derived by :mod:`ledger.claims` from all runs of the key, never typed. ``runs`` lists all of them, the
    deciding one first.
    """

    key: Digest
    model: Text
    checkpoint: Digest
    arm: Text
    baseline: Text
    scope: Scope
    workload: Text
    hardware: Text
    status: Status
    synthetic: bool
    reason: Text
    study: Name
    runs: tuple[Digest, ...] = ()

    @property
    def words(self) -> str:
        """The status as shown: ``synthetic established`` on seeded or altered weights."""
        return f"synthetic {self.status}" if self.synthetic else self.status
