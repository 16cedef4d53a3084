"""The fused kernels, interpreted on the CPU, against the oracle on the same stored bytes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from ledger.errors import InputError, LedgerError, RefusedError
from runners import fp8, fused, kernels, oracle
from runners.pages import Pages
from tests import sanitize

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, fp8.E4M3
TOLERANCE = {BF16: 3e-3, FP16: 5e-4}
"""Relative error to the float32 oracle, by the dtype of the result: a few of its rounding steps."""


def empty(count: int, heads: int, dim: int, keys: torch.dtype, values: torch.dtype, scales: str = "unit", page: int = 64) -> Pages:
    """Pages in which every byte that nobody wrote is NaN."""

    def stored(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype == E4M3:
            return torch.full(shape, 0x7F, dtype=torch.uint8).view(E4M3)
        return torch.full(shape, float("nan"), dtype=dtype)

    def factors(dtype: torch.dtype) -> torch.Tensor | None:
        if dtype != E4M3 or scales == "unit":
            return None
        return torch.rand(heads) + 0.5 if scales == "fixed" else torch.full((count, heads, page), float("nan"))

    transposed = values == E4M3
    return Pages(
        stored(keys, (count, heads, page, dim)),
        stored(values, (count, heads, dim, page) if transposed else (count, heads, page, dim)),
        factors(keys),
        factors(values),
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def copy(pages: Pages) -> Pages:
    sides = (pages.keys, pages.values, pages.key_scales, pages.value_scales)
    return Pages(*(None if side is None else raw(side).clone().view(side.dtype) for side in sides))


def tensors(pages: Pages) -> Iterator[torch.Tensor]:
    return (side for side in (pages.keys, pages.values, pages.key_scales, pages.value_scales) if side is not None)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


def places(batch: int, width: int, count: int) -> torch.Tensor:
    return torch.randperm(count)[: batch * width].reshape(batch, width).to(torch.int32)


def states(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As a model has them: [B, H, T, D], seen as [B, T, H, D]."""
    return torch.randn(batch, heads, tokens, dim).to(dtype).transpose(1, 2)


def filled(lengths: list[int], heads: int, dim: int, keys: torch.dtype, values: torch.dtype, scales: str = "unit", page: int = 64) -> tuple:
    """Pages that hold ``lengths`` random tokens, their table and the lengths."""
    width = -(-max(lengths) // page) + 1
    count = len(lengths) * width + 2
    pages, table = empty(count, heads, dim, keys, values, scales, page), places(len(lengths), width, count)
    held = torch.tensor(lengths, dtype=torch.int32)
    dtype = FP16 if FP16 in (keys, values) else BF16
    new = [states(len(lengths), max(lengths), heads, dim, dtype) for _ in range(2)]
    fused.write(pages, *new, table, torch.zeros_like(held), held)
    return pages, table, held


# ---------------------------------------------------------------- e4m3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the NaN and infinities that are meant
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_16_bit_number_is_quantised_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, 512, 1, 128)
    pages, table = empty(8, 1, 128, dtype, E4M3), torch.arange(8, dtype=torch.int32)[None]
    fused.write(pages, every, every, table, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(raw(pages.keys), raw(every.reshape(pages.keys.shape)))
    found = raw(pages.values).reshape(8, 128, 64).transpose(1, 2).reshape(every.shape)
    truth = raw(every.float().clamp(-448, 448).to(E4M3))
    numbers = ~every.isnan()
    assert torch.equal(found[numbers], truth[numbers])
    assert ((found[~numbers] & 0x7F) == 0x7F).all()


# ---------------------------------------------------------------- write


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("key_width", "value_width", "scales"),
    [(2, 2, "unit"), (2, 1, "unit"), (2, 1, "fixed"), (2, 1, "dynamic"), (1, 2, "fixed"), (1, 1, "dynamic")],
)
def test_what_is_written_has_the_bytes_of_the_oracle(dtype: torch.dtype, key_width: int, value_width: int, scales: str) -> None:
    torch.manual_seed(0)
    keys, values = (dtype if width == 2 else E4M3 for width in (key_width, value_width))
    pages, table = empty(16, 2, 64, keys, values, scales), places(3, 4, 16)
    truth = copy(pages)
    held, counts = torch.zeros(3, dtype=torch.int32), torch.tensor([130, 65, 1], dtype=torch.int32)
    for tokens, new in ((130, counts), (1, None), (70, torch.tensor([70, 0, 3], dtype=torch.int32))):
        chunk = [states(3, tokens, 2, 64, dtype) * 300 for _ in range(2)]
        fused.write(pages, *chunk, table, held, new)
        oracle.write(truth, *chunk, table, held, new)
        held = held + (new if new is not None else tokens)
    for found, expected in zip(tensors(pages), tensors(truth), strict=True):
        assert torch.equal(raw(found), raw(expected))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the NaN and infinities that are meant
def test_what_is_not_a_finite_number_stays_visible() -> None:
    chunk = torch.ones(1, 4, 1, 64, dtype=BF16)
    chunk[0, 1, 0, 3], chunk[0, 2, 0, 5] = float("inf"), float("nan")
    pages, table, none = empty(2, 1, 64, BF16, E4M3), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    fused.write(pages, chunk, chunk, table, none)
    values = oracle.read(pages, table[0], 4)[1][:, 0]
    assert values[1, 3] == 448 and values[2, 5].isnan() and values[0].isfinite().all()
    found = fused.decode(torch.ones(1, 1, 64, dtype=BF16), pages, table, torch.full((1,), 4, dtype=torch.int32), scale=0.1)
    assert found.isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the NaN and infinities that are meant
def test_a_dynamic_scale_of_a_row_with_nan_or_infinity_makes_nan_of_the_row() -> None:
    chunk = torch.ones(1, 3, 1, 64, dtype=BF16)
    chunk[0, 0, 0, 3], chunk[0, 1, 0, 5] = float("inf"), float("nan")
    pages, table, none = empty(2, 1, 64, BF16, E4M3, "dynamic"), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    fused.write(pages, chunk, chunk, table, none)
    values = oracle.read(pages, table[0], 3)[1][:, 0]
    assert values[:2].isnan().all() and (values[2] == 1).all()


# ---------------------------------------------------------------- attention

CASES = [
    # keys, values, scales, heads, group, dim, window, soft cap
    (BF16, BF16, "unit", 2, 3, 64, 0, 0.0),
    (BF16, E4M3, "unit", 1, 4, 128, 0, 0.0),
    (BF16, E4M3, "dynamic", 2, 7, 64, 0, 0.0),
    (BF16, E4M3, "fixed", 1, 4, 64, 100, 0.0),
    (E4M3, BF16, "fixed", 1, 4, 64, 0, 20.0),
    (E4M3, E4M3, "unit", 2, 1, 64, 64, 0.0),
    (E4M3, E4M3, "dynamic", 1, 16, 64, 70, 5.0),
    (FP16, FP16, "unit", 1, 4, 64, 65, 0.0),
    (FP16, E4M3, "unit", 1, 4, 256, 0, 0.0),
    (BF16, E4M3, "unit", 1, 16, 512, 0, 30.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_and_prefill_agree_with_the_oracle_whatever_unused_bytes_hold(case: tuple) -> None:
    keys, values, scales, heads, group, dim, window, cap = case
    torch.manual_seed(1)
    pages, table, held = filled([200, 129, 64, 1], heads, dim, keys, values, scales)
    dtype = FP16 if FP16 in (keys, values) else BF16
    options = {"scale": dim**-0.5, "window": window, "soft_cap": cap}
    query = torch.randn(4, heads * group, dim).to(dtype)
    truth = oracle.decode(query, pages, table, held, **options)
    found = fused.decode(query, pages, table, held, **options)
    assert found.dtype == dtype and error(found, truth) < TOLERANCE[dtype]
    chunk = states(4, 20, heads * group, dim, dtype)
    counts = torch.tensor([20, 3, 20, 1], dtype=torch.int32)
    truth = oracle.prefill(chunk, pages, table, held, counts, **options)
    found = fused.prefill(chunk, pages, table, held, counts, **options)
    assert error(found, truth) < TOLERANCE[dtype]
    assert not found[1, :17].any() and not found[3, :19].any()


@pytest.mark.parametrize("window", [0, 200])
def test_a_sequence_has_the_same_bits_however_the_work_is_shared_out(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SHORTEST", 32)  # so that short sequences have up to 16 segments
    monkeypatch.setattr(fused, "ALIGN", 16)
    torch.manual_seed(2)
    pages, table, held = filled([500, 129, 1, 320, 421], 1, 64, BF16, E4M3, page=16)
    query = torch.randn(5, 3, 64).to(BF16)
    found, runs = [], set()
    for slots in (1, 2, 4, 8, 40):
        plan = fused.Plan(5, 1, table.shape[1] * 16, window, device="cpu")
        plan.slots, plan.items = slots, torch.zeros(96, fused.FIELDS.value, dtype=torch.int32)
        plan.capacity = 96
        plan.update(held)
        runs.update(plan.items[: int(plan.total), 6].tolist())
        found.append(fused.decode(query, pages, table, held, scale=0.125, window=window, plan=plan))
        assert not plan.arrived.any(), "the counters are left as they were found"
    assert window or runs == {1, 2, 4, 8, 16}
    alone = [fused.decode(query[row, None], pages, table[row, None], held[row, None], scale=0.125, window=window) for row in range(5)]
    assert error(found[0], oracle.decode(query, pages, table, held, scale=0.125, window=window)) < TOLERANCE[BF16]
    assert all(torch.equal(other, found[0]) for other in (*found, torch.cat(alone)))


def test_a_sequence_of_no_tokens_has_a_result_of_zero() -> None:
    pages, table, _ = filled([1, 70], 1, 64, BF16, E4M3)
    found = fused.decode(torch.randn(2, 4, 64).to(BF16), pages, table, torch.tensor([0, 70], dtype=torch.int32), scale=0.1)
    assert not found[0].any() and found[1].isfinite().all()


def test_a_plan_covers_every_token_once_and_never_outgrows_its_list() -> None:
    for lengths in ([1], [0, 5000, 64], [8192] * 32, [32768, 128, 129] * 5):
        held = torch.tensor(lengths, dtype=torch.int32)
        for window in (0, 1024):
            plan = fused.Plan(len(lengths), 8, max(*lengths, 1), window, device="cpu")
            plan.slots = 264
            plan.capacity = min(
                len(lengths) * fused.SEGMENTS, len(lengths) + -(-plan.slots * fused.UNEVEN.value // 8)
            )  # as on a device of 132 processors
            plan.items = torch.full((plan.capacity, fused.FIELDS.value), -1, dtype=torch.int32)
            plan.update(held)
            items = plan.items[: int(plan.total)].tolist()
            assert int(plan.total) <= plan.capacity
            for row, length in enumerate(lengths):
                mine = [item for item in items if item[0] == row]
                low = max(length - window, 0) if window else 0
                assert mine[0][1] <= low and mine[-1][2] == length
                assert all(one[2] == other[1] for one, other in pairwise(mine))


def test_offsets_beyond_31_bits_reach_their_page() -> None:
    count = (1 << 31) // (64 * 128) + 2  # never touched but for one page: address space, not memory
    pages = Pages(torch.empty(count, 1, 64, 128, dtype=BF16), torch.empty(count, 1, 128, 64, dtype=torch.uint8).view(E4M3))
    table, none = torch.tensor([[count - 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    chunk = states(1, 40, 1, 128, BF16)
    fused.write(pages, chunk, chunk, table, none)
    query, held = torch.randn(1, 4, 128).to(BF16), torch.full((1,), 40, dtype=torch.int32)
    small = Pages(pages.keys[-1:], pages.values.view(torch.uint8)[-1:].view(E4M3))
    truth = oracle.decode(query, small, torch.zeros_like(table), held, scale=0.1)
    assert error(fused.decode(query, pages, table, held, scale=0.1), truth) < TOLERANCE[BF16]
    assert error(fused.prefill(query[:, None], pages, table, held, scale=0.1)[:, 0], truth) < TOLERANCE[BF16]


@pytest.mark.parametrize("name", ["keys", "values", "queries"])
def test_heads_beyond_31_bits_are_refused(name: str) -> None:
    gap = (1 << 30) // (64 * 64)  # four heads, 2**30 numbers apart: the third one's offset is no int32
    far = {"keys": gap, "values": gap, "queries": gap}
    far = {side: count if side == name else 2 for side, count in far.items()}
    keys = torch.empty(4, far["keys"], 64, 64, dtype=torch.uint8).view(E4M3).transpose(0, 1)[:2]
    values = torch.empty(4, far["values"], 64, 64, dtype=torch.uint8).view(E4M3).transpose(0, 1)[:2]
    heads = torch.empty(4, far["queries"] * 64, 64, dtype=BF16)[None, :, :1]
    pages, table, held = Pages(keys, values), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    calls = [
        lambda: fused.write(pages, heads.transpose(1, 2), heads.transpose(1, 2), table, held),
        lambda: fused.decode(heads[:, :, 0], pages, table, held, scale=0.1),
        lambda: fused.prefill(heads.transpose(1, 2), pages, table, held, scale=0.1),
    ]
    for call in calls:
        with pytest.raises(InputError, match="too far apart"):
            call()


def test_more_than_one_launch_holds_is_refused() -> None:
    many = 1 << 16
    pages, one = Pages(torch.zeros(1, 1, 64, 64, dtype=BF16), torch.zeros(1, 1, 64, 64, dtype=BF16)), torch.zeros(1, 1, dtype=torch.int32)
    chunk, long = torch.zeros(1, 1, 1, 64, dtype=BF16), torch.zeros(1, 1, dtype=torch.int32).expand(1, many)
    calls = [
        lambda: fused.write(pages, chunk.expand(many, -1, -1, -1), chunk.expand(many, -1, -1, -1), one.expand(many, -1), many_of(many)),
        lambda: fused.prefill(chunk.expand(many, -1, -1, -1), pages, one.expand(many, -1), many_of(many), scale=0.1),
        lambda: fused.write(pages, tall, tall, long.contiguous(), many_of(1)),
        lambda: fused.prefill(chunk, pages, long.contiguous(), many_of(1), scale=0.1),
    ]
    tall = chunk.expand(-1, many * 32, -1, -1)
    for call in calls:
        with pytest.raises(InputError, match="larger than one launch"):
            call()


def many_of(batch: int) -> torch.Tensor:
    return torch.ones(batch, dtype=torch.int32)


def test_a_window_of_a_decode_step_is_looked_at_from_its_first_token_on() -> None:
    pages, table, held = filled([130], 1, 64, BF16, E4M3)
    query = torch.randn(1, 1, 64).to(BF16)
    table[0, 0] = 99  # given back: the window's first token is the second page's first
    fused.decode(query, pages, table, held, scale=0.1, window=66)
    fused.prefill(query[:, None], pages, table, held, scale=0.1, window=66)
    for call, asked in ((fused.decode, query), (fused.prefill, query[:, None])):
        with pytest.raises(InputError, match="does not exist"):
            call(asked, pages, table, held, scale=0.1, window=67)


# ---------------------------------------------------------------- what is refused before a launch


def _call(**changes: object) -> None:
    torch.manual_seed(0)
    pages, table, held = filled([70, 3], 2, 64, BF16, E4M3)
    given = {"query": torch.randn(2, 4, 64).to(BF16), "pages": pages, "table": table, "lengths": held} | changes
    fused.decode(given["query"], given["pages"], given["table"], given["lengths"], scale=0.1, plan=given.get("plan"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"query": torch.randn(2, 4, 64)}, "dtype"),
        ({"query": torch.randn(2, 4, 64).to(FP16)}, "dtype"),
        ({"query": torch.randn(2, 4, 128).to(BF16)}, "head dimension 64"),
        ({"query": torch.randn(2, 3, 64).to(BF16)}, "multiple of 2"),
        ({"query": torch.randn(2, 4, 128).to(BF16)[..., ::2]}, "stride 1"),
        ({"query": torch.zeros(0, 4, 64, dtype=BF16), "lengths": torch.zeros(0, dtype=torch.int32)}, "batch of 1"),
        ({"table": torch.zeros(2, 3, dtype=torch.int64)}, "int32"),
        ({"table": torch.zeros(2, 0, dtype=torch.int32)}, "width at least 1"),
        ({"table": torch.zeros(2, 1, dtype=torch.int32)}, "beyond its block table"),
        ({"table": torch.full((2, 3), 999, dtype=torch.int32)}, "does not exist"),
        ({"lengths": torch.tensor([70, -1], dtype=torch.int32)}, "Lengths and counts"),
        ({"lengths": torch.zeros(2)}, "int32"),
        ({"lengths": torch.tensor([70, 0, 3, 0], dtype=torch.int32)[::2]}, "contiguous"),
        ({"query": torch.randn(2, 1, 4, 64).to(BF16)}, "3 dimensions"),
        ({"pages": empty(0, 2, 64, BF16, E4M3)}, "no pages"),
        ({"pages": empty(4, 2, 80, BF16, E4M3)}, "head_dim"),
        ({"pages": empty(4, 2, 64, torch.float32, E4M3)}, "dtype"),
        ({"pages": empty(4, 2, 64, BF16, E4M3, page=48)}, "power of two"),
        ({"pages": empty(1, 2, 64, BF16, E4M3, page=1 << 15)}, "from 16 to 16384"),
        ({"plan": fused.Plan(3, 2, 128, device="cpu")}, "another step"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_what_the_kernels_would_read_wrongly_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(LedgerError) as refused:
        _call(**changes)
    assert word in str(refused.value) or word == getattr(refused.value, "code", "")


@pytest.mark.parametrize(
    "options",
    [{"scale": value} for value in (0.0, -1.0, float("inf"), float("nan"), 1e300, 1e-300, True, None, torch.tensor(0.1))]
    + [{"window": value} for value in (-5, 1.5, 8.0, float("nan"), True, None, 2**31)]
    + [{"soft_cap": value} for value in (-3.0, float("nan"), float("inf"), 1e39, 1e-46, True, False, None)],
    ids=str,
)
def test_a_scale_a_window_or_a_cap_that_means_nothing_is_refused(options: dict[str, float]) -> None:
    pages, table, held = filled([3], 1, 64, BF16, E4M3)
    query = torch.ones(1, 1, 64, dtype=BF16)
    for call, asked in ((fused.decode, query), (fused.prefill, query[:, None])):
        with pytest.raises(InputError, match=r"scale|window|cap"):
            call(asked, pages, table, held, **{"scale": 0.1} | options)


def test_a_chunk_longer_than_its_table_is_refused() -> None:
    pages, table, chunk = empty(4, 2, 64, BF16, E4M3), torch.zeros(1, 1, dtype=torch.int32), states(1, 70, 2, 64, BF16)
    for held in (0, 64, 70):
        lengths = torch.tensor([held], dtype=torch.int32)
        with pytest.raises(InputError, match="longer than the block table"):
            fused.write(pages, chunk, chunk, table, lengths)
        with pytest.raises(InputError, match="longer than the block table"):
            fused.prefill(chunk, pages, table, lengths, scale=0.1)
    real = torch.tensor([3], dtype=torch.int32)  # the others are padding
    fused.write(pages, chunk, chunk, table, torch.zeros_like(real), real)
    assert fused.prefill(chunk, pages, table, real, real, scale=0.1).isfinite().all()


@pytest.mark.parametrize(
    ("entries", "lengths", "counts", "word"),
    [
        ([0, 1], [120], None, "beyond its block table"),
        ([0, 1], [60], [70], "beyond its block table"),
        ([0, 4], [50], None, "does not exist"),
        ([0, -1], [50], None, "does not exist"),
        ([0, 1], [0], [71], "Lengths and counts"),
        ([0, 1], [0], [-1], "Lengths and counts"),
        ([0, 1], [-1], None, "Lengths and counts"),
    ],
)
def test_the_interpreter_writes_only_into_pages(entries: list[int], lengths: list[int], counts: list[int] | None, word: str) -> None:
    pages, chunk = empty(4, 2, 64, BF16, E4M3), states(1, 70, 2, 64, BF16)
    table, held, new = (None if numbers is None else torch.tensor(numbers, dtype=torch.int32) for numbers in ([entries], lengths, counts))
    assert table is not None and held is not None
    with pytest.raises(InputError, match=word):
        fused.write(pages, chunk[:, :70], chunk[:, :70], table, held, new)
    assert all(bool(side.float().isnan().all()) for side in (pages.keys, pages.values))


def test_two_rows_never_write_to_one_page() -> None:
    pages, chunk = empty(4, 2, 64, BF16, E4M3), states(2, 3, 2, 64, BF16)
    table, held = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32), torch.tensor([10, 20], dtype=torch.int32)
    with pytest.raises(InputError, match="Two places of the table would write to one page"):
        fused.write(pages, chunk, chunk, table, held)
    assert bool(pages.values.float().isnan().all())
    fused.write(pages, chunk, chunk, table, held, torch.tensor([3, 0], dtype=torch.int32))  # the second writes nothing
    fused.write(pages, chunk, chunk, table, torch.tensor([64, 64], dtype=torch.int32))  # what they share is full, and not written to


def test_the_interpreter_reads_a_chunk_only_where_it_is_held() -> None:
    pages, table, held = filled([70], 2, 64, BF16, E4M3)
    query = states(1, 80, 4, 64, BF16)
    with pytest.raises(InputError, match="no more than are held"):
        fused.prefill(query, pages, table, held, scale=0.1)
    table[0, 1] = 99
    with pytest.raises(InputError, match="does not exist"):
        fused.prefill(query[:, :5], pages, table, held, scale=0.1)


def test_a_backward_pass_through_a_result_is_refused() -> None:
    pages, table, held = filled([70, 3], 2, 64, BF16, E4M3)
    query = torch.randn(2, 4, 64).to(BF16)
    calls = (
        lambda query: fused.decode(query, pages, table, held, scale=0.1),
        lambda query: fused.prefill(query[:, None], pages, table, held, scale=0.1),
    )
    for call in calls:
        plain, asked = call(query), call(query.clone().requires_grad_())
        assert torch.equal(plain, asked) and asked.requires_grad and not plain.requires_grad
        with pytest.raises(RefusedError, match="has no gradient") as refused:
            asked.sum().backward()
        assert refused.value.code == "backend" and refused.value.next
        with torch.no_grad():
            assert not call(query.clone().requires_grad_()).requires_grad


def test_counts_that_do_not_fit_are_refused() -> None:
    pages, table, held = filled([70, 3], 2, 64, BF16, E4M3)
    chunk = states(2, 3, 2, 64, BF16)
    for counts in (torch.ones(1, dtype=torch.int32), torch.ones(2), torch.ones(4, dtype=torch.int32)[::2]):
        with pytest.raises(InputError, match="counts"):
            fused.write(pages, chunk, chunk, table, held, counts)
        with pytest.raises(InputError, match="counts"):
            fused.prefill(chunk, pages, table, held, counts, scale=0.1)


@pytest.mark.parametrize("cap", [0.5, 50.0, 1e6])
def test_a_soft_cap_is_exact_where_it_hardly_bends(cap: float) -> None:
    torch.manual_seed(4)
    pages, table, held = filled([70], 1, 64, FP16, FP16)
    query = torch.randn(1, 4, 64).to(FP16) * 4
    truth = oracle.decode(query, pages, table, held, scale=0.125, soft_cap=cap)
    assert error(fused.decode(query, pages, table, held, scale=0.125, soft_cap=cap), truth) < TOLERANCE[FP16]
    assert error(fused.prefill(query[:, None], pages, table, held, scale=0.125, soft_cap=cap)[:, 0], truth) < TOLERANCE[FP16]


def test_large_finite_values_come_out_finite() -> None:
    pages, table = empty(2, 1, 64, BF16, BF16), torch.zeros(1, 1, dtype=torch.int32)
    chunk = torch.full((1, 3, 1, 64), 1e36, dtype=BF16)
    fused.write(pages, torch.ones_like(chunk), chunk, table, torch.zeros(1, dtype=torch.int32))
    held, query = torch.full((1,), 3, dtype=torch.int32), torch.ones(1, 1, 64, dtype=BF16)
    assert fused.decode(query, pages, table, held, scale=0.1).isfinite().all()
    assert fused.prefill(query[:, None], pages, table, held, scale=0.1).isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of the infinities and NaN that are meant
@pytest.mark.parametrize("infinite", [5, 63, 64])
def test_scores_of_minus_infinity_are_left_out_unless_a_first_tile_has_nothing_else(infinite: int) -> None:
    torch.manual_seed(6)
    pages, table, none = empty(4, 1, 64, BF16, E4M3), places(1, 2, 4), torch.zeros(1, dtype=torch.int32)
    keys, values = (states(1, 100, 1, 64, BF16) for _ in range(2))
    keys[0, :infinite, 0, 3] = float("-inf")
    fused.write(pages, keys, values, table, none)
    query, held = torch.ones(1, 2, 64).to(BF16), none + 100
    truth = oracle.decode(query, pages, table, held, scale=0.1)
    found = fused.decode(query, pages, table, held, scale=0.1), fused.prefill(query[:, None], pages, table, held, scale=0.1)[:, 0]
    assert truth.isfinite().all()
    for one in found:
        assert bool(one.isnan().all()) if infinite == 64 else error(one, truth) < TOLERANCE[BF16]


def test_scaled_keys_are_as_exact_in_a_chunk_as_in_a_step() -> None:
    torch.manual_seed(5)
    pages, table, none = empty(4, 2, 64, E4M3, E4M3, "dynamic"), places(1, 3, 4), torch.zeros(1, dtype=torch.int32)
    chunk = [states(1, 150, 2, 64, BF16) * 6 for _ in range(2)]
    fused.write(pages, *chunk, table, none)
    query, held = states(1, 150, 4, 64, BF16), torch.full((1,), 150, dtype=torch.int32)
    truth = oracle.prefill(query, pages, table, held, scale=0.125)
    assert error(fused.prefill(query, pages, table, held, scale=0.125), truth) < TOLERANCE[BF16]


def test_a_plan_serves_the_lengths_that_it_was_made_for_and_no_others() -> None:
    pages, table, held = filled([70, 3], 2, 64, BF16, E4M3)
    query = torch.randn(2, 4, 64).to(BF16)
    plan = fused.Plan(2, 2, table.shape[1] * 64, device="cpu")
    with pytest.raises(InputError, match="never called"):
        fused.decode(query, pages, table, held, scale=0.1, plan=plan)
    plan.update(held)
    fused.decode(query, pages, table, held, scale=0.1, plan=plan)
    with pytest.raises(InputError, match="other lengths"):
        fused.decode(query, pages, table, held.clone(), scale=0.1, plan=plan)
    for window in (-3, 1.5, True):
        with pytest.raises(InputError, match="window"):
            fused.Plan(2, 2, 64, window=window, device="cpu")  # type: ignore[arg-type]
    short = fused.Plan(2, 2, 70, device="cpu")
    short.update(held)
    with pytest.raises(InputError, match="shorter sequences"):
        fused.decode(query, pages, table, held, scale=0.1, plan=short)
    one, other = plan.space(4, 128), plan.space(8, 64)
    assert [space.numel() for space in (*one, *other)] == [
        2 * 2 * 16 * 4 * 128,
        2 * 2 * 16 * 4 * 2,
        2 * 2 * 16 * 8 * 64,
        2 * 2 * 16 * 8 * 2,
    ]


def test_a_padded_sequence_reads_no_page_that_its_window_gave_back() -> None:
    torch.manual_seed(3)
    pages, table = empty(12, 1, 64, BF16, E4M3, page=16), places(2, 6, 12)
    held, counts = torch.tensor([80, 96], dtype=torch.int32), torch.tensor([1, 32], dtype=torch.int32)
    chunk = [states(2, 96, 1, 64, BF16) for _ in range(2)]
    fused.write(pages, *chunk, table, torch.zeros_like(held), held)
    query = states(2, 32, 2, 64, BF16)
    truth = oracle.prefill(query, pages, table, held, counts, scale=0.1, window=20)
    pages.values.view(torch.uint8)[table[0, :3].long()] = 0x7F  # given back, and taken by somebody else
    pages.keys[table[0, :3].long()] = float("nan")
    found = fused.prefill(query, pages, table, held, counts, scale=0.1, window=20)
    assert error(found, truth) < TOLERANCE[BF16]


def test_a_device_without_e4m3_and_one_that_is_missing_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.available("cpu") == "" and "CPU alone" in fused.available("cuda")
    monkeypatch.setattr(fused, "interpreting", lambda: False)
    assert "needs a CUDA device" in fused.available("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in fused.available("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "8.0, and e4m3 needs 8.9" in fused.available("cuda") and "8.0" in fused.available("cuda:0")
    assert "current device, cuda:0, not on cuda:1" in fused.available("cuda:1")


def test_without_triton_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("kernels_without_triton", kernels.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(RefusedError, match="Triton, which is not installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_kernel_that_runs_is_named() -> None:
    assert fused.describe(empty(1, 1, 128, BF16, E4M3)) == "fused decode bf16/e4m3 d128 page64 tile64 warps4 stages4"


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN):RuntimeWarning")  # of slots that nobody wrote, which are masked
def test_what_the_sanitizer_runs_is_right(capsys):
    assert sanitize.main(64, "K16/V8", "cpu", (((100, 77, 73), 2),)) == 0
    assert capsys.readouterr().out.count("d64") == 8


@pytest.mark.parametrize(
    ("keys", "heads", "batch", "stages"),
    [(BF16, 4, 128, 4), (BF16, 4, 197, 4), (BF16, 4, 198, 3), (BF16, 8, 96, 4), (BF16, 8, 98, 4), (BF16, 8, 99, 3), (BF16, 8, 128, 3),
     (E4M3, 8, 49, 6), (E4M3, 8, 50, 4)],
)  # fmt: skip
def test_fewer_stages_are_for_full_rounds_of_programs(
    keys: torch.dtype, heads: int, batch: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "programs", lambda dim, device: 264)  # an H200
    assert fused.describe(empty(1, heads, 128, keys, E4M3), batch).endswith(f"stages{stages}")


def test_where_programs_change_their_stages_is_told_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "programs", lambda dim, device: 264)
    for dim, keys, heads in ((128, BF16, 8), (128, E4M3, 4), (64, BF16, 8), (256, BF16, 1)):
        pages = empty(1, heads, dim, keys, E4M3)
        crowd = fused.crowd(pages)
        assert (crowd == 0) is (dim != 128)
        assert not crowd or fused.describe(pages, crowd) != fused.describe(pages, crowd - 1) == fused.describe(pages)


def test_lengths_beyond_a_plan_are_refused_and_never_leave_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fused.Plan(1, 1, 64, dim=64, device="cpu")
    for length in (100_000, -1):
        with pytest.raises(InputError, match="plan is for other lengths"):
            plan.update(torch.tensor([length], dtype=torch.int32))
    whole = torch.full((64, 8), -7, dtype=torch.int32)
    plan.items = whole[: plan.capacity]
    monkeypatch.setattr(fused, "interpreting", lambda: False)
    plan.update(torch.tensor([100_000], dtype=torch.int32))
    assert int(plan.total) <= plan.capacity and (whole[plan.capacity :] == -7).all()


@pytest.mark.parametrize(("batch", "heads"), [(1, 0), (1 << 21, 1)])
def test_a_plan_of_no_heads_or_more_than_a_launch_is_refused(batch: int, heads: int) -> None:
    with pytest.raises(InputError, match="one launch"):
        fused.Plan(batch, heads, 64, device="cpu")


def test_a_plan_takes_contiguous_lengths_alone() -> None:
    with pytest.raises(InputError, match="do not fit the plan"):
        fused.Plan(2, 1, 64, device="cpu").update(torch.ones(4, dtype=torch.int32)[::2])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_fixed_scales_that_are_none_are_refused(scale: float) -> None:
    pages, table, held = filled([1], 1, 64, BF16, E4M3)
    wrong = Pages(pages.keys, pages.values, None, torch.full((1,), scale))
    with pytest.raises(InputError, match="no scale"):
        fused.decode(torch.ones(1, 1, 64, dtype=BF16), wrong, table, held, scale=0.1)


def test_pages_that_overlap_are_refused() -> None:
    pages, table, held = filled([1], 1, 64, BF16, BF16)
    wrong = Pages(pages.keys[:1].expand(4, -1, -1, -1), pages.values[:1].expand(4, -1, -1, -1))
    with pytest.raises(InputError, match="overlap"):
        fused.decode(torch.ones(1, 1, 64, dtype=BF16), wrong, table, held, scale=0.1)
