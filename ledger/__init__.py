"""The archive: records, evidence, log, database, claims and the pages over them.

This package knows no torch, no Triton and no Transformers. The tests that fill
it live in :mod:`runners`, on the other side of a process and a folder.
"""

__version__ = "0.1.0"
