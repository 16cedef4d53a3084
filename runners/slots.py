"""Pages of a timed case in an arm's formats, and what can be said of them: formats, geometry, backings, bytes.

A case has slots of one shape and different numbers. They stand for the layers of a model: each is a layer of one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ledger import records
from ledger.errors import InputError, RefusedError
from runners import fp8, geometry, serving
from runners.contenders import Problem
from runners.geometry import DTYPES, word
from runners.paged import Pool
from runners.pages import Group, Pages
from runners.words import formats


class Slots:
    """Pages of every slot, and who holds them: ``table`` int32 [B, width], ``lengths`` int32 [B]."""

    def __init__(self, pool: Pool, sequences: list[int]) -> None:
        self.pool = pool
        self.pages: list[Pages] = [pool.pages(slot) for slot in pool.groups[0].layers]
        self.table, self.lengths = pool.table(0, sequences), pool.lengths(sequences)

    def describe(self, what: str) -> str:
        """A kernel other than decode on these pages, in words."""
        pages = self.pages[0]
        stored = formats(word(pages.keys.dtype), word(pages.values.dtype))
        return f"fused {what} {stored} d{pages.keys.shape[-1]} page{pages.page}"

    def facts(self, layer: records.LayerGeometry) -> dict[str, Any]:
        """What the pages are, for the result."""
        pages = self.pages[0]
        return {
            "measured": _formats(pages),
            "geometry": _geometry(len(self.pages), layer, (pages.heads, pages.keys.shape[-1], _value_dim(pages))),
            "backings": self.pool.backings(),
        }


def store(
    arm: records.Arm, keys: torch.Tensor, values: torch.Tensor, lengths: Sequence[int], *, page: int, seed: int, room: int = 0
) -> Slots:
    """``keys`` and ``values`` [S, B, T, H, D] in shuffled pages of the arm's formats, written by the fused kernel.

    Of each sequence the last ``lengths[b]`` tokens are stored, none where all are 0, and ``room`` more are reserved behind them.
    ``fixed`` scales are amax / 448 a head of these very states. Raises RefusedError with the pool's and the kernels' codes.
    """
    device = keys.device
    slots, batch, _, heads, key_dim = keys.shape
    group = Group(tuple(range(slots)), heads, key_dim, values.shape[-1], arm.keys, arm.values, arm.scales, arm.granularity)
    pool = Pool(
        [group],
        tokens=max(lengths) + room,
        sequences=batch,
        total=sum(lengths) + batch * room,
        page=page,
        device=device,
        seed=seed,
    )
    sequences = [pool.add() for _ in lengths]
    pool.extend(sequences, [length + room for length in lengths])
    if arm.scales == "fixed":
        eight = [
            (f"{side}_scales", states) for side, states in (("key", keys), ("value", values)) if getattr(arm, f"{side}s") == "fp8_e4m3"
        ]
        for slot in range(slots):
            pool.set_scales(slot, {name: states[slot].abs().amax(dim=(0, 1, 3)).float() / fp8.LARGEST for name, states in eight})
    stored = Slots(pool, sequences)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    for slot in range(slots if any(lengths) else 0):
        geometry.kernels().write(stored.pages[slot], keys[slot], values[slot], stored.table, torch.zeros_like(counts), counts)
    return stored


def _formats(pages: Pages) -> dict[str, str]:
    """What is stored, by the tensors."""
    found = {"keys": word(pages.keys.dtype), "values": word(pages.values.dtype)}
    scales = pages.key_scales if pages.key_scales is not None else pages.value_scales
    if scales is None:
        return found | {"scales": "unit" if "fp8_e4m3" in found.values() else "none", "granularity": "none"}
    return found | ({"scales": "fixed", "granularity": "head"} if scales.dim() == 1 else {"scales": "dynamic", "granularity": "token_head"})


def _value_dim(pages: Pages) -> int:
    return int(pages.values.shape[2 if pages.values.dtype == fp8.E4M3 else 3])


def _geometry(count: int, layer: records.LayerGeometry, measured: tuple[int, int, int]) -> records.Geometry:
    """Of so many slots: that of the model's layer, and that of the tensors (heads, key and value dimension)."""

    def slots(heads: int, key_dim: int, value_dim: int) -> tuple[records.LayerGeometry, ...]:
        return tuple(
            records.LayerGeometry(layer=slot, kind="attention", kv_heads=heads, key_dim=key_dim, value_dim=value_dim)
            for slot in range(count)
        )

    return records.Geometry(declared=slots(layer.kv_heads, layer.key_dim, layer.value_dim), measured=slots(*measured))


def contiguous_facts(arm: records.Arm, problem: Problem, layer: records.LayerGeometry) -> dict[str, Any]:
    """What a native contender's cache is; copies in a layout that it likes better hold the same."""
    sides = {"keys": problem.keys, "values": problem.values}
    if arm.values == "fp8_e4m3":
        copies = next(copy for key, copy in problem.shared.items() if key[0] == "paged" and key[2] == arm.values)
        sides = {"keys": copies[0], "values": copies[1]}
    measured = problem.heads, int(problem.keys.shape[-1]), int(problem.values.shape[-1])
    return {
        "measured": {name: word(side.dtype) for name, side in sides.items()},
        "geometry": _geometry(problem.slots, layer, measured),
        "backings": tuple(
            records.Backing(
                bytes=side.untyped_storage().nbytes(),
                dtype=word(side.dtype),
                kind="attention",
                layers=tuple(range(problem.slots)),
                holds=name,  # type: ignore[arg-type]
                address=side.untyped_storage().data_ptr(),
                tokens=sum(problem.lengths),
            )
            for name, side in sides.items()
        ),
    }


def stored_bytes(arm: records.Arm, layer: records.LayerGeometry, tokens: int) -> int:
    """Bytes of keys, values and scales of so many tokens of one layer, as the arm stores them; scales of a head are not counted."""
    bytes = 0
    for format, dim in ((arm.keys, layer.key_dim), (arm.values, layer.value_dim)):
        bytes += dim * DTYPES[format].itemsize + (4 if arm.scales == "dynamic" and format == "fp8_e4m3" else 0)
    return tokens * layer.kv_heads * bytes


# ---------------------------------------------------------------- capacity


def fullest(config: Any, arm: records.Arm, *, batch: int, context: int, budget: int, page: int, device: torch.device) -> tuple[Pool, int]:
    """The largest pool of the whole model that the budget takes, filled, and the tokens that it holds.

    Sequences hold ``context`` tokens, the last one what is left; at least ``batch`` may be held. Every size that is tried
    is refused or allocated by the pool itself. Raises RefusedError where not even a page fits.
    """
    groups = serving.groups(config, arm)

    def make(pages: int) -> Pool:
        sequences = max(batch, -(-pages * page // context))
        return Pool(
            groups, tokens=context, sequences=sequences, total=pages * page, chunk=page, budget_bytes=budget, page=page, device=device
        )

    def fits(pages: int) -> bool:
        try:
            make(pages)
        except RefusedError as error:
            if error.code != "budget":
                raise
            return False
        return True

    make(1)
    low, high = 1, max(2, budget // min(group.bytes(1, page) for group in groups) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    pool = make(low)
    return pool, _fill(pool, context)


def pool_facts(pool: Pool, declared: tuple[records.LayerGeometry, ...]) -> dict[str, Any]:
    """What a pool of a whole model is, by its tensors: formats, the geometry of every layer beside the ``declared`` one, backings."""
    policies, layers = [], []
    for group in pool.groups:
        for layer in group.layers:
            if group.scales == "fixed":  # a pool shows no layer without its scales; what they are does not matter here
                names = [f"{side}_scales" for side in ("key", "value") if getattr(group, f"{side}s") == "fp8_e4m3"]
                pool.set_scales(layer, {name: torch.ones(group.kv_heads, device=pool.device) for name in names})
            pages = pool.pages(layer)
            policies.append(_formats(pages))
            layers.append(
                records.LayerGeometry(
                    layer=layer,
                    kind="sliding" if group.window else "attention",
                    kv_heads=pages.heads,
                    key_dim=pages.keys.shape[-1],
                    value_dim=_value_dim(pages),
                    window=group.window,
                )
            )
    return {
        "measured": {name: "+".join(sorted({policy[name] for policy in policies})) for name in policies[0]},
        "geometry": records.Geometry(declared=declared, measured=tuple(sorted(layers, key=lambda one: one.layer))),
        "backings": pool.backings(),
    }


def _fill(pool: Pool, context: int) -> int:
    """Append page after page to sequences of at most ``context`` tokens until none is left; the tokens that are held."""
    held = 0
    for _ in range(pool.sequences):
        sequence = pool.add()
        while pool.length(sequence) < context:
            more = min(pool.page, context - pool.length(sequence))
            try:
                pool.append(sequence, more)
            except InputError:  # no page is left
                return held
            held += more
    return held
