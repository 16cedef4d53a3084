"""Words that several runners say alike: of an error, and of what is stored."""

from __future__ import annotations

import re

import torch

from ledger.errors import LedgerError, RefusedError

_FOLDERS = re.compile(r"(?<![\w./-])/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def said(error: Exception) -> str:
    """An error in words: a refusal's code first, the library's own class where it is no error of this project.

    Folders are cut from the paths in foreign errors: they say where somebody compiled a library, and go into evidence.
    """
    if isinstance(error, RefusedError):
        return f"{error.code}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"memory: {error}"
    return str(error) if isinstance(error, LedgerError) else f"{type(error).__name__}: {_FOLDERS.sub('', str(error))}"


def formats(keys: str, values: str) -> str:
    """What is stored, words of ``records.Format``, as the kernels call it: ``bf16/e4m3``."""
    return f"{keys}/{values}".replace("fp8_", "")
