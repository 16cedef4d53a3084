"""The result: what a runner measured, and where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from ledger.records.base import Address, Count, Digest, Instant, Name, Path, Positive, Record, Text, Word, missing


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
    """Geometry of one layer's cache. ``kind`` as in :class:`Backing`; ``window`` in tokens for sliding layers.

    A layer that keeps nothing and reads the keys and values of another has the other's geometry, and ``kv_heads`` 0.
    """

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
        return next((arm for arm in self.arms if arm.name == name), None) or missing(name)
