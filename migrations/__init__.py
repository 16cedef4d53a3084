"""Alembic migrations of the archive's database. They keep data, and run through `ledger migrate` alone."""
