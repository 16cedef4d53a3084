"""Reports, recipes and their retractions: tables more, every row of the others as it was."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "retractions",
        sa.Column("record", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["record"], ["entries.record"], name=op.f("fk_retractions_record")),
        sa.ForeignKeyConstraint(["subject"], ["entries.record"], name=op.f("fk_retractions_subject")),
        sa.PrimaryKeyConstraint("record", name=op.f("pk_retractions")),
    )
    op.create_index(op.f("ix_retractions_subject"), "retractions", ["subject"], unique=False)
    op.create_table(
        "reports",
        sa.Column("report", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("license", sa.Text(), nullable=False),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["report"], ["entries.record"], name=op.f("fk_reports_report")),
        sa.PrimaryKeyConstraint("report", name=op.f("pk_reports")),
    )
    op.create_index(op.f("ix_reports_sha256"), "reports", ["sha256"], unique=False)
    op.create_table(
        "facts",
        sa.Column("report", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("says", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["report"], ["reports.report"], name=op.f("fk_facts_report")),
        sa.PrimaryKeyConstraint("report", "position", name=op.f("pk_facts")),
    )
    op.create_table(
        "recipes",
        sa.Column("recipe", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("policy_json", sa.Text(), nullable=False),
        sa.Column("steps_json", sa.Text(), nullable=False),
        sa.Column("requirements_json", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["recipe"], ["entries.record"], name=op.f("fk_recipes_recipe")),
        sa.PrimaryKeyConstraint("recipe", name=op.f("pk_recipes")),
    )
    op.create_index(op.f("ix_recipes_name"), "recipes", ["name"], unique=False)
    op.create_index(op.f("ix_recipes_checkpoint"), "recipes", ["checkpoint"], unique=False)
    op.create_table(
        "recipe_claims",
        sa.Column("recipe", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["recipe"], ["recipes.recipe"], name=op.f("fk_recipe_claims_recipe")),
        sa.PrimaryKeyConstraint("recipe", "position", name=op.f("pk_recipe_claims")),
    )
    op.create_index(op.f("ix_recipe_claims_key"), "recipe_claims", ["key"], unique=False)
    op.create_table(
        "attachments",
        sa.Column("record", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["record"], ["entries.record"], name=op.f("fk_attachments_record")),
        sa.PrimaryKeyConstraint("record", "position", name=op.f("pk_attachments")),
    )
    op.create_index(op.f("ix_attachments_sha256"), "attachments", ["sha256"], unique=False)
