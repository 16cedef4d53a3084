"""Specs without a dataset, and the kernels that ran: two tables more, every row of the others as it was."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spec_extras",
        sa.Column("spec", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("performance_json", sa.Text(), nullable=False),
        sa.Column("production_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["spec"], ["specs.spec"], name=op.f("fk_spec_extras_spec")),
        sa.PrimaryKeyConstraint("spec", name=op.f("pk_spec_extras")),
    )
    op.create_table(
        "kernels",
        sa.Column("run", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("case", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("refused", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], name=op.f("fk_kernels_run")),
        sa.PrimaryKeyConstraint("run", "position", name=op.f("pk_kernels")),
    )
