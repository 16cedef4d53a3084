"""Keys that sign the log's heads, and bytes that were taken out: tables more, every row of the others as it was."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "key_changes",
        sa.Column("record", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["record"], ["entries.record"], name=op.f("fk_key_changes_record")),
        sa.PrimaryKeyConstraint("record", name=op.f("pk_key_changes")),
    )
    op.create_table(
        "redactions",
        sa.Column("record", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["record"], ["entries.record"], name=op.f("fk_redactions_record")),
        sa.PrimaryKeyConstraint("record", name=op.f("pk_redactions")),
    )
    op.create_index(op.f("ix_redactions_object"), "redactions", ["object"], unique=False)
