"""What the template of a run's page is given. Made by :mod:`ledger.web.runpage`."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.web.pages import Page, RunLink
from ledger.web.plots import Plot
from ledger.web.words import Figure, Hash, Mark


@dataclass(frozen=True)
class Fact:
    """A name and what is known about it. ``code`` marks text to be copied whole, such as a digest."""

    name: str
    text: str
    code: bool = False


@dataclass(frozen=True)
class PolicyCell:
    """One field of an arm's policy, from one side; ``agrees`` is False where it is not what was requested."""

    text: str
    agrees: bool


@dataclass(frozen=True)
class PolicyRow:
    """An arm's policy from one side: as requested, said to be effective, or measured."""

    side: str
    cells: tuple[PolicyCell, ...]


@dataclass(frozen=True)
class ArmRow:
    """One arm: its policy as requested, said to be effective, and measured."""

    name: str
    role: str
    mark: Mark
    reason: str
    policy: tuple[PolicyRow, ...]
    contradictions: tuple[str, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class GateRow:
    """One gate: its numbers, what follows from them in words, and the drawing, where the numbers can be drawn."""

    statistic: str
    estimate: Figure
    lower: Figure
    upper: Figure
    bound: Figure
    harm: Figure
    floor: Figure
    met: bool
    harmed: bool
    verdict: str
    method: str
    plot: Plot | None


@dataclass(frozen=True)
class DecisionRow:
    """What one contrast's gates say."""

    candidate: str
    baseline: str
    family: str
    confidence: str
    mark: Mark
    reason: str
    p_values: str
    gates: tuple[GateRow, ...]


@dataclass(frozen=True)
class Reading:
    """A measured figure in a cell of the matrix, with its interval in words and its exact form."""

    figure: Figure
    interval: str


@dataclass(frozen=True)
class MeasureRow:
    """One measure over all columns; an empty cell is None: not measured, which is not zero."""

    name: str
    unit: str
    cells: tuple[Reading | None, ...]


@dataclass(frozen=True)
class Column:
    """An arm, or one arm ``against`` another."""

    arm: str
    against: str


@dataclass(frozen=True)
class Matrix:
    """Measures by arm, or by pair of arms."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[MeasureRow, ...]


@dataclass(frozen=True)
class CaseCell:
    """What an arm did in a case: the ``figure`` and ``lines`` under it, or why there is none; and the kernel that ran."""

    figure: Figure | None
    lines: tuple[str, ...]
    reason: str
    kernel: str


@dataclass(frozen=True)
class CaseRow:
    """One case over all columns; an empty cell is None: the arm takes no part in it."""

    case: str
    cells: tuple[CaseCell | None, ...]


@dataclass(frozen=True)
class CaseTable:
    """Cases of performance by arm."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[CaseRow, ...]


@dataclass(frozen=True)
class CheckCell:
    """What came of a check for one arm."""

    mark: Mark
    text: str


@dataclass(frozen=True)
class CheckRow:
    """One check over all arms; an empty cell is None: it was not made."""

    check: str
    cells: tuple[CheckCell | None, ...]


@dataclass(frozen=True)
class CheckTable:
    """Checks of a production or capability run by arm."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[CheckRow, ...]


@dataclass(frozen=True)
class GeometryRow:
    """The cache geometry that some arms share, equal layers told once."""

    arms: str
    lines: tuple[str, ...]
    note: str
    agrees: bool


@dataclass(frozen=True)
class BackingSum:
    """Backings of one arm that hold the same thing in the same format."""

    arm: str
    holds: str
    kind: str
    dtype: str
    count: str
    layers: str
    total: Figure
    tokens: str


@dataclass(frozen=True)
class BackingRow:
    """One physical allocation."""

    arm: str
    address: str
    holds: str
    kind: str
    dtype: str
    layers: str
    bytes: str
    tokens: str


@dataclass(frozen=True)
class ArmTotal:
    """All backings of one arm together."""

    arm: str
    total: Figure
    exact: str


@dataclass(frozen=True)
class FileRow:
    """One file with its digest in full; ``href`` downloads it, ``preview`` shows its beginning, where it is text."""

    name: str
    sha256: str
    size: str
    media_type: str
    href: str
    preview: str


@dataclass(frozen=True)
class RelationRow:
    """A correction or a reproduction that names this run or is named by it."""

    kind: str
    mark: Mark | None
    text: str
    recorded_at: str
    run: RunLink | None
    details: tuple[Fact, ...]


@dataclass(frozen=True)
class ClaimRow:
    """A claim that this run supports."""

    arm: str
    baseline: str
    mark: Mark
    reason: str
    href: str


@dataclass(frozen=True)
class RunPage(Page):
    """The page of one run."""

    study: str
    model: str
    scope: str
    id: str
    mark: Mark
    reason: str
    recorded: str
    entry: Hash
    alerts: tuple[str, ...]
    warnings: tuple[str, ...]
    claims: tuple[ClaimRow, ...]
    checkpoint: tuple[Fact, ...]
    checkpoint_files: tuple[FileRow, ...]
    synthetic: str
    workload: tuple[Fact, ...]
    tokenizer: tuple[Fact, ...]
    policy_fields: tuple[str, ...]
    arms: tuple[ArmRow, ...]
    decisions: tuple[DecisionRow, ...]
    matrices: tuple[Matrix, ...]
    cases: tuple[CaseTable, ...]
    copied: str
    intervals: str
    checks: CheckTable | None
    note: str
    geometry: tuple[GeometryRow, ...]
    totals: tuple[ArmTotal, ...]
    sums: tuple[BackingSum, ...]
    backings: tuple[BackingRow, ...]
    backings_count: str
    evidence: tuple[FileRow, ...]
    evidence_summary: str
    harness: tuple[Fact, ...]
    sources: tuple[Fact, ...]
    sources_count: str
    host: tuple[Fact, ...]
    packages: tuple[Fact, ...]
    relations: tuple[RelationRow, ...]
    compare_href: str
