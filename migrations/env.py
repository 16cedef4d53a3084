"""Runs migrations on the connection, and in the transaction, that ``ledger.database`` hands over."""

from alembic import context

from ledger.tables import VERSION_TABLE, Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("Migrations run through `ledger migrate`, which holds the archive's lock.")
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    compare_type=True,
    compare_server_default=True,
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
