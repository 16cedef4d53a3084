"""Errors in words, as evidence holds them."""

from __future__ import annotations

import pytest
import torch

from ledger.errors import InputError, RefusedError
from runners import words


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RefusedError("dtype", "No.", found="x"), "dtype: No.\nfound: x"),
        (InputError("The file /a/b/c.txt is gone."), "The file /a/b/c.txt is gone."),
        (torch.OutOfMemoryError("2 GiB"), "memory: 2 GiB"),
        (ValueError("in /build/host/.cache/lib-1.0/decode.cu:12 and x/y"), "ValueError: in decode.cu:12 and x/y"),
        (RuntimeError("see https://example.org/a/b.html"), "RuntimeError: see https://example.org/a/b.html"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_said_without_the_folders_of_whoever_compiled_a_library(error: Exception, said: str) -> None:
    assert words.said(error) == said
