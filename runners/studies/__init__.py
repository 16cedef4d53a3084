"""The studies that ship, one TOML file each, and a prose text of our own for the one that needs no other data."""
