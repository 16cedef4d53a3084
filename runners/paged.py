"""Stored pages of keys and values: what the kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pages:
    """One layer's stored pages: views into its group's backings.

    With P pages of ``page`` tokens, H KV heads and head dimensions D_k and D_v:

        keys     [P, H, page, D_k]   bf16, fp16 or e4m3
        values   [P, H, page, D_v]   bf16 or fp16
                 [P, H, D_v, page]   e4m3: transposed, so that consecutive tokens lie side by side, as the matrix unit takes them
        scales   None (16 bit, or ``unit``), fp32 [H] (``fixed``), or fp32 [P, H, page] (``dynamic``, per token and head)
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def page(self) -> int:
        """Tokens a page."""
        return int(self.keys.shape[2])

    @property
    def heads(self) -> int:
        """KV heads."""
        return int(self.keys.shape[1])
