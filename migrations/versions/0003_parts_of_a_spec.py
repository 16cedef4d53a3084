"""What specs of format 3 say besides: one table more, every row of the others as it was."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spec_parts",
        sa.Column("spec", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("part_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["spec"], ["specs.spec"], name=op.f("fk_spec_parts_spec")),
        sa.PrimaryKeyConstraint("spec", "name", name=op.f("pk_spec_parts")),
    )
