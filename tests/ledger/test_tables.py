"""Numbers and rows in both databases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sqlalchemy as sa

from ledger import digest, records, tables
from ledger.archive import Archive
from ledger.database import check_rows
from ledger.errors import InputError
from ledger.tables import MeasurementRow, number
from tests.conftest import append_run

ODD: tuple[float | int, ...] = (
    math.nan, math.inf, -math.inf, -0.0, 0.0, 0, 2**53 - 1, 2**53, 2**60, -(2**70), 2.0**60, 1e300, 5e-324, 0.1, 1e21, -1e21
)  # fmt: skip


def _same(left: Any, right: Any) -> bool:
    return digest.canonical(left) == digest.canonical(right)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_number_survives_its_text(value: float | int) -> None:
    assert _same(number(digest.canonical(value).decode()), value)


@pytest.mark.parametrize("text", ["", "NaN", "true", "null", '"1"', "[1]", '{"number":"1"}', "1 2", "0x10", "\uff11"])
def test_other_text_is_no_number(text: str) -> None:
    with pytest.raises(InputError):
        number(text)


def test_numbers_that_json_cannot_hold_survive_the_database(archive: Archive) -> None:
    odd = [value for value in ODD if value != 2.0**60]
    found = tuple(
        records.Measurement(arm="native", name=f"odd.{index}", value=value, unit="nats", lower=-math.inf, upper=math.nan)
        for index, value in enumerate(odd)
    )
    run = append_run(archive, measurements=found)
    with archive.reading() as connection:
        rows = connection.execute(
            sa.select(MeasurementRow.value, MeasurementRow.lower, MeasurementRow.upper).order_by(MeasurementRow.position)
        ).all()
    assert len(rows) == len(odd)
    for (value, lower, upper), expected, measurement in zip(rows, odd, archive.run(run.record).measurements, strict=True):
        assert _same(value, expected)
        assert _same(measurement.value, expected)
        assert lower == -math.inf
        assert math.isnan(upper)


def test_every_constraint_has_a_name_by_the_convention() -> None:
    for table in tables.TABLES.values():
        for constraint in table.constraints:
            assert str(constraint.name).startswith(("pk_", "fk_", "uq_")), table.name


def test_no_column_holds_a_binary_float() -> None:
    for table in tables.TABLES.values():
        assert not [column.name for column in table.columns if isinstance(column.type, sa.Float)], table.name


def test_a_count_beyond_64_bits_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"too large: backings\.bytes"):
        check_rows({"backings": [{"bytes": 2**63}]}, "The run")
