"""The archive: records, evidence, log, database, claims and the pages over them.

This package knows no torch, no Triton and no Transformers. The tests that fill
it live in :mod:`runners`, on the other side of a process and a folder.
"""

from pathlib import Path

__version__ = "0.1.0"


def home(name: str) -> Path:
    """The folder of ``migrations`` or ``templates``: inside the package where it is installed, beside it in a checkout."""
    inside = Path(__file__).parent / name
    return inside if inside.is_dir() else Path(__file__).parent.parent / name
