"""The database's tables: an index over records, evidence and log, never the truth.

Every row is made from records by ``archive.rows_of`` and nothing else, so the whole database can be made anew.
Lists and nested facts that are shown but not searched are canonical JSON in a text column whose name ends in
``_json``. Figures are :class:`Number`; counts are 64-bit integers.

On PostgreSQL the tables stand in the schema ``kv_ledger``; on SQLite in the file's own. The revision of the schema
stands in the table ``kv_ledger_version``.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Dialect, ForeignKey, ForeignKeyConstraint, MetaData, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ledger import digest
from ledger.errors import InputError

REVISION = "0005"
"""The schema's revision that this version of the project reads and writes."""
VERSION_TABLE = "kv_ledger_version"
SCHEMA = "kv_ledger"
"""Schema on PostgreSQL."""

_LARGEST = 2**53 - 1


class Number(TypeDecorator[float | int]):
    """A number as the text of its canonical JSON, so that any database keeps it.

    ``0.5``, ``{"number":"NaN"}``, ``{"number":"-0.0"}``, ``{"number":"9007199254740993"}``. A float of integral
    value comes back as an int where it is below 2**53: both have one canonical form.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: float | int | None, dialect: Dialect) -> str | None:
        """Canonical JSON of the number."""
        return None if value is None else digest.canonical(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> float | int | None:
        """The number. Raises InputError where the column holds anything else."""
        return None if value is None else number(value)


def number(text: str) -> float | int:
    """The number in a canonical text. Raises InputError."""
    value = digest.parse(text.encode())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError("A column of the database holds no number.", found=repr(text[:80]), next="run `ledger verify`.")
    if isinstance(value, int) and abs(value) > _LARGEST and not text.startswith("{"):
        return float(value)  # untagged, so it was a float: RFC 8785 writes 2.0**60 without a point
    return value


class Base(DeclarativeBase):
    """Base of all tables; constraints have names on every database."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map = {str: Text(), int: BigInteger(), bool: Boolean(create_constraint=False), float: Number()}  # noqa: RUF012


def _key(target: str | None = None) -> Any:
    """A primary key column that is given, never counted by the database."""
    if target is None:
        return mapped_column(primary_key=True, autoincrement=False)
    return mapped_column(ForeignKey(target), primary_key=True, autoincrement=False)


class EntryRow(Base):
    """The log, in its order. ``leaf_hash`` is hex."""

    __tablename__ = "entries"
    sequence: Mapped[int] = _key()
    kind: Mapped[str]
    record: Mapped[str] = mapped_column(unique=True)
    recorded_at: Mapped[str]
    leaf_hash: Mapped[str]


class SpecRow(Base):
    """A frozen spec. ``checkpoint`` is :func:`ledger.claims.checkpoint_id`, ``workload`` the digest of the workload.

    Of a spec without a dataset, what is about one is empty: texts, counts, and ``null`` as ``workload_json``.
    """

    __tablename__ = "specs"
    spec: Mapped[str] = _key("entries.record")
    study: Mapped[str] = mapped_column(index=True)
    title: Mapped[str]
    scope: Mapped[str]
    checkpoint: Mapped[str] = mapped_column(index=True)
    checkpoint_name: Mapped[str]
    checkpoint_source: Mapped[str]
    checkpoint_revision: Mapped[str | None]
    checkpoint_license: Mapped[str]
    checkpoint_json: Mapped[str]
    synthetic: Mapped[bool]
    workload: Mapped[str]
    dataset_name: Mapped[str]
    dataset_sha256: Mapped[str]
    documents: Mapped[int]
    inputs: Mapped[str]
    workload_json: Mapped[str]
    contrasts_json: Mapped[str]
    families_json: Mapped[str]
    tolerances_json: Mapped[str]


class SpecExtraRow(Base):
    """What a spec of format 2 says besides; one of format 1 has no such row."""

    __tablename__ = "spec_extras"
    spec: Mapped[str] = _key("specs.spec")
    format: Mapped[str]
    device: Mapped[str]
    performance_json: Mapped[str]
    production_json: Mapped[str]


class SpecPartRow(Base):
    """A part that specs of format 3 may have: ``capture``, ``memory`` or ``task``. Others have no such row."""

    __tablename__ = "spec_parts"
    spec: Mapped[str] = _key("specs.spec")
    name: Mapped[str] = mapped_column(primary_key=True)
    part_json: Mapped[str]


class SpecArmRow(Base):
    """An arm as the spec asks for it, in the spec's order."""

    __tablename__ = "spec_arms"
    spec: Mapped[str] = _key("specs.spec")
    position: Mapped[int] = _key()
    name: Mapped[str]
    role: Mapped[str]
    implementation: Mapped[str]
    compute: Mapped[str]
    keys: Mapped[str]
    values: Mapped[str]
    scales: Mapped[str]
    granularity: Mapped[str]
    scale_source: Mapped[str | None]
    backend: Mapped[str]
    chunk: Mapped[int | None]
    repeats: Mapped[str | None]


class RunRow(Base):
    """A recorded result, with the facts of its ``result.json``."""

    __tablename__ = "runs"
    run: Mapped[str] = _key("entries.record")
    spec: Mapped[str] = mapped_column(ForeignKey("specs.spec"), index=True)
    result: Mapped[str] = mapped_column(unique=True)
    rules: Mapped[str]
    outcome: Mapped[str]
    reason: Mapped[str]
    result_outcome: Mapped[str]
    result_reason: Mapped[str]
    started: Mapped[str]
    stopped: Mapped[str | None]
    hardware_class: Mapped[str]
    accelerator: Mapped[str | None]
    host_json: Mapped[str]
    harness_matched: Mapped[str]
    harness_revision: Mapped[str]
    harness_state: Mapped[str]
    harness_json: Mapped[str]
    tokenizer_json: Mapped[str]
    documents_json: Mapped[str]
    segments_json: Mapped[str]
    sources_json: Mapped[str]
    warnings_json: Mapped[str]
    result_warnings_json: Mapped[str]
    peak_memory_bytes: Mapped[int | None]


class ArmRow(Base):
    """What one arm of a run did. ``role`` and ``requested_json`` come from the spec; None where it asks for no such arm."""

    __tablename__ = "arms"
    run: Mapped[str] = _key("runs.run")
    position: Mapped[int] = _key()
    name: Mapped[str]
    role: Mapped[str | None]
    outcome: Mapped[str]
    reason: Mapped[str]
    requested_json: Mapped[str | None]
    effective_json: Mapped[str]
    measured_json: Mapped[str]
    backends_json: Mapped[str]
    census_json: Mapped[str]
    has_geometry: Mapped[bool]
    seconds: Mapped[float | None]


class LayerRow(Base):
    """Geometry of one layer's cache; ``side`` is ``declared`` or ``measured``."""

    __tablename__ = "layers"
    __table_args__ = (ForeignKeyConstraint(["run", "arm"], ["arms.run", "arms.position"]),)
    run: Mapped[str] = _key()
    arm: Mapped[int] = _key()
    side: Mapped[str] = _key()
    position: Mapped[int] = _key()
    layer: Mapped[int]
    kind: Mapped[str]
    kv_heads: Mapped[int]
    key_dim: Mapped[int]
    value_dim: Mapped[int]
    window: Mapped[int | None]


class BackingRow(Base):
    """One physical allocation of an arm's cache."""

    __tablename__ = "backings"
    __table_args__ = (ForeignKeyConstraint(["run", "arm"], ["arms.run", "arms.position"]),)
    run: Mapped[str] = _key()
    arm: Mapped[int] = _key()
    position: Mapped[int] = _key()
    bytes: Mapped[int]
    dtype: Mapped[str]
    kind: Mapped[str]
    layers_json: Mapped[str]
    holds: Mapped[str]
    address: Mapped[float] = mapped_column(Number())  # an address may need all 64 bits
    tokens: Mapped[int]


class MeasurementRow(Base):
    """A figure derived from raw samples, in the run's order."""

    __tablename__ = "measurements"
    run: Mapped[str] = _key("runs.run")
    position: Mapped[int] = _key()
    arm: Mapped[str]
    name: Mapped[str]
    against: Mapped[str | None]
    value: Mapped[float]
    unit: Mapped[str]
    lower: Mapped[float | None]
    upper: Mapped[float | None]


class KernelRow(Base):
    """What ran in a case of performance for one arm, or why nothing did. The copy has no arm."""

    __tablename__ = "kernels"
    run: Mapped[str] = _key("runs.run")
    position: Mapped[int] = _key()
    case: Mapped[str]
    arm: Mapped[str]
    kernel: Mapped[str]
    refused: Mapped[str]


class DecisionRow(Base):
    """What the gates of one contrast say."""

    __tablename__ = "decisions"
    run: Mapped[str] = _key("runs.run")
    position: Mapped[int] = _key()
    candidate: Mapped[str]
    baseline: Mapped[str]
    family: Mapped[str]
    status: Mapped[str]
    reason: Mapped[str]
    p_bound: Mapped[float | None]
    p_harm: Mapped[float | None]


class GateRow(Base):
    """One gate's numbers within a decision."""

    __tablename__ = "gates"
    __table_args__ = (ForeignKeyConstraint(["run", "decision"], ["decisions.run", "decisions.position"]),)
    run: Mapped[str] = _key()
    decision: Mapped[int] = _key()
    position: Mapped[int] = _key()
    statistic: Mapped[str]
    estimate: Mapped[float]
    lower: Mapped[float]
    upper: Mapped[float]
    bound: Mapped[float]
    harm: Mapped[float]
    floor: Mapped[float | None]
    p_bound: Mapped[float | None]
    p_harm: Mapped[float | None]
    met: Mapped[bool]
    harmed: Mapped[bool]
    method: Mapped[str]


class EvidenceRow(Base):
    """A raw file of a run."""

    __tablename__ = "evidence"
    run: Mapped[str] = _key("runs.run")
    position: Mapped[int] = _key()
    name: Mapped[str]
    sha256: Mapped[str] = mapped_column(index=True)
    size: Mapped[int]
    media_type: Mapped[str]


class RelationRow(Base):
    """A correction: ``kind`` is ``supersede`` (``by`` is set) or ``retract``."""

    __tablename__ = "relations"
    record: Mapped[str] = _key("entries.record")
    kind: Mapped[str]
    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), index=True)
    by: Mapped[str | None] = mapped_column(ForeignKey("runs.run"))
    author: Mapped[str]
    reason: Mapped[str]


class RetractionRow(Base):
    """A retraction of a report or a recipe; one of a run is a :class:`RelationRow`."""

    __tablename__ = "retractions"
    record: Mapped[str] = _key("entries.record")
    subject: Mapped[str] = mapped_column(ForeignKey("entries.record"), index=True)
    author: Mapped[str]
    reason: Mapped[str]


class KeyChangeRow(Base):
    """A key that begins or ends to sign the log's heads, in the order of the entries."""

    __tablename__ = "key_changes"
    record: Mapped[str] = _key("entries.record")
    action: Mapped[str]
    key: Mapped[str]
    author: Mapped[str]
    reason: Mapped[str]


class RedactionRow(Base):
    """An evidence object whose bytes were removed."""

    __tablename__ = "redactions"
    record: Mapped[str] = _key("entries.record")
    object: Mapped[str] = mapped_column(index=True)
    author: Mapped[str]
    reason: Mapped[str]


class ReportRow(Base):
    """What an outside document is; ``kept`` where its bytes are evidence here."""

    __tablename__ = "reports"
    report: Mapped[str] = _key("entries.record")
    title: Mapped[str]
    place: Mapped[str]
    sha256: Mapped[str] = mapped_column(index=True)
    size: Mapped[int]
    license: Mapped[str]
    kept: Mapped[bool]


class FactRow(Base):
    """One thing that an outside document says, in the report's order."""

    __tablename__ = "facts"
    report: Mapped[str] = _key("reports.report")
    position: Mapped[int] = _key()
    model: Mapped[str]
    policy: Mapped[str]
    scope: Mapped[str]
    outcome: Mapped[str]
    says: Mapped[str]


class RecipeRow(Base):
    """How to set up a policy on a checkpoint. Whether it is supported follows from the claims and is no column."""

    __tablename__ = "recipes"
    recipe: Mapped[str] = _key("entries.record")
    name: Mapped[str] = mapped_column(index=True)
    title: Mapped[str]
    checkpoint: Mapped[str] = mapped_column(index=True)
    policy_json: Mapped[str]
    steps_json: Mapped[str]
    requirements_json: Mapped[str]


class RecipeClaimRow(Base):
    """A claim that a recipe cites, in its order. No key to the claims, which are derived again and again."""

    __tablename__ = "recipe_claims"
    recipe: Mapped[str] = _key("recipes.recipe")
    position: Mapped[int] = _key()
    key: Mapped[str] = mapped_column(index=True)


class AttachmentRow(Base):
    """A file of a report or a recipe: the document, or the lock."""

    __tablename__ = "attachments"
    record: Mapped[str] = _key("entries.record")
    position: Mapped[int] = _key()
    name: Mapped[str]
    sha256: Mapped[str] = mapped_column(index=True)
    size: Mapped[int]
    media_type: Mapped[str]


class ReproductionRow(Base):
    """A run compared with the run that repeated it."""

    __tablename__ = "reproductions"
    record: Mapped[str] = _key("entries.record")
    original: Mapped[str] = mapped_column(ForeignKey("runs.run"), index=True)
    reproduced: Mapped[str | None] = mapped_column(ForeignKey("runs.run"))
    verdict: Mapped[str]
    reason: Mapped[str]
    same_hardware: Mapped[bool | None]
    harness: Mapped[str]
    differences_json: Mapped[str]
    environment_json: Mapped[str]
    divergence_json: Mapped[str | None]


class ClaimRow(Base):
    """What the archive says about one key; derived from all its runs by :mod:`ledger.claims`.

    ``position`` counts the claims on one checkpoint, in the order in which their keys were frozen.
    """

    __tablename__ = "claims"
    key: Mapped[str] = _key()
    position: Mapped[int]
    model: Mapped[str]
    checkpoint: Mapped[str] = mapped_column(index=True)
    arm: Mapped[str]
    baseline: Mapped[str]
    scope: Mapped[str]
    workload: Mapped[str]
    hardware: Mapped[str]
    status: Mapped[str]
    synthetic: Mapped[bool]
    reason: Mapped[str]
    study: Mapped[str]


class ClaimRunRow(Base):
    """The runs of a claim, the deciding one first."""

    __tablename__ = "claim_runs"
    key: Mapped[str] = _key("claims.key")
    position: Mapped[int] = _key()
    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), index=True)


TABLES = {table.name: table for table in Base.metadata.sorted_tables}
"""All tables by name, each after those it refers to."""
