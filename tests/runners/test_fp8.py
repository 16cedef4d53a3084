"""e4m3 against an independent oracle, bit pattern by bit pattern."""

from __future__ import annotations

import pytest
import torch

from ledger.errors import RefusedError
from runners import fp8

torch.set_num_threads(1)

CODES = torch.arange(256, dtype=torch.uint8)


def every(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a 16-bit format."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def value_of(code: int) -> float:
    """The value of an e4m3 code by the format's definition (OCP 8-bit floating point, E4M3): no torch."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def nearest_code(value: float) -> int:
    """The e4m3 code nearest to a finite value within ±448; of two equally near, the even one."""
    sign = 0x80 if str(value).startswith("-") else 0
    return sign | min(range(127), key=lambda code: (abs(value_of(code) - abs(value)), code & 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_clamped_and_then_cast_as_torch_casts(dtype: torch.dtype) -> None:
    values = every(dtype)
    codes, scales = fp8.quantise(values.view(1, 1, -1, 64), "unit", "none")
    assert scales is None
    assert codes.shape == (1, 1, 1024, 64)
    flat = codes.view(torch.uint8).flatten()
    expected = values.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = values.isnan()
    assert torch.equal(flat[~nan], expected[~nan])
    assert set((flat[nan] & 0x7F).tolist()) == {0x7F}
    assert set((flat[~nan] & 0x7F).tolist()) == set(range(127))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_rounds_to_nearest_even_by_an_oracle_of_its_own(dtype: torch.dtype) -> None:
    values = every(dtype)
    values = values[~values.isnan()]
    codes = fp8.quantise(values.view(1, 1, 1, -1), "unit", "none")[0].view(torch.uint8).flatten()
    grid = torch.tensor([value_of(code) for code in range(127)], dtype=torch.float64)
    middles = (grid[1:] + grid[:-1]) / 2
    size = values.double().abs().clamp(max=448)
    below = torch.searchsorted(middles, size, right=False)  # a value on a middle stays below it
    above = torch.searchsorted(middles, size, right=True)
    magnitude = torch.where(below % 2 == 0, below, above)
    expected = magnitude + 128 * torch.signbit(values)
    assert torch.equal(codes.long(), expected)


@pytest.mark.parametrize(
    ("value", "code"),
    [(448.0, 0x7E), (-448.0, 0xFE), (464.0, 0x7E), (1e30, 0x7E), (float("inf"), 0x7E), (float("-inf"), 0xFE), (0.0, 0), (-0.0, 0x80)],
)
def test_the_edges_are_clamped_and_never_become_nan(value: float, code: int) -> None:
    codes, _ = fp8.quantise(torch.full((1, 1, 1, 4), value), "unit", "none")
    assert codes.view(torch.uint8).unique().tolist() == [code]


@pytest.mark.parametrize("value", [0.3, -0.3, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 2.0**-11, 431.0, 432.0, 433.0])
def test_fp32_values_round_to_the_nearest_code(value: float) -> None:
    codes, _ = fp8.quantise(torch.full((1, 1, 1, 1), value), "unit", "none")
    assert codes.view(torch.uint8).item() == nearest_code(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_reads_back_as_the_value_that_the_format_gives_it(dtype: torch.dtype) -> None:
    read = fp8.dequantise(CODES.view(fp8.E4M3).view(1, 2, 4, 32), None, dtype)
    assert read.dtype == dtype and read.shape == (1, 2, 4, 32)
    expected = torch.tensor([value_of(code) for code in range(256)], dtype=dtype).view(1, 2, 4, 32)
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(read.flatten()[:255]), CODES[:255] > 127)


def test_codes_read_back_from_a_slice_are_those_of_the_slice() -> None:
    states = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(1))
    codes, _ = fp8.quantise(states, "unit", "none")
    assert torch.equal(fp8.dequantise(codes[:, :, 3:], None, torch.float32), codes.float()[:, :, 3:])


def test_dynamic_scales_are_the_largest_magnitude_over_448_for_each_token_and_head() -> None:
    states = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1)) * 1000
    codes, scales = fp8.quantise(states, "dynamic", "token_head")
    assert scales is not None and scales.dtype == torch.float32 and scales.shape == (2, 3, 5, 1)
    assert torch.equal(scales, states.abs().amax(-1, keepdim=True) / 448)
    assert torch.equal(codes.view(torch.uint8), (states / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    read = fp8.dequantise(codes, scales, torch.float32)
    assert torch.equal(read, codes.float() * scales)
    assert ((read - states).abs() <= states.abs() * 2.0**-4 + scales * 2.0**-10).all()


def test_one_token_in_one_chunk_or_two_has_the_same_dynamic_scale() -> None:
    states = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(2))
    whole = fp8.token_head_scales(states)
    assert torch.equal(whole, torch.cat([fp8.token_head_scales(states[:, :, :1]), fp8.token_head_scales(states[:, :, 1:])], dim=2))


def test_an_all_zero_row_has_scale_one() -> None:
    codes, scales = fp8.quantise(torch.zeros(1, 1, 2, 4), "dynamic", "token_head")
    assert scales is not None and scales.flatten().tolist() == [1.0, 1.0]
    assert fp8.dequantise(codes, scales, torch.float32).tolist() == [[[[0.0] * 4] * 2]]


def test_a_row_too_small_for_a_scale_is_stored_as_zeros() -> None:
    codes, scales = fp8.quantise(torch.full((1, 1, 1, 4), 2.0**-149), "dynamic", "token_head")
    assert scales is not None and scales.item() == 1.0
    assert fp8.dequantise(codes, scales, torch.float32).abs().max() == 0


def test_nan_stays_nan_where_it_stands_under_unit_scales() -> None:
    states = torch.tensor([[[[1.0, float("nan"), 2.0, -3.0]]]])
    read = fp8.dequantise(fp8.quantise(states, "unit", "none")[0], None, torch.float32)
    torch.testing.assert_close(read, states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_fault_reads_back_as_nan_whole_under_dynamic_scales(fault: float) -> None:
    states = torch.ones(1, 1, 2, 4)
    states[0, 0, 1, 2] = fault
    read = fp8.dequantise(*fp8.quantise(states, "dynamic", "token_head"), torch.float32)
    assert torch.equal(read[0, 0, 0], states[0, 0, 0])
    assert read[0, 0, 1].isnan().all()


@pytest.mark.parametrize(
    ("scales", "granularity"),
    [
        ("none", "none"),
        ("unit", "head"),
        ("fixed", "tensor"),
        ("fixed", "head"),
        ("dynamic", "none"),
        ("dynamic", "tensor"),
        ("dynamic", "page_head"),
    ],
)
def test_any_other_scale_policy_is_refused(scales: str, granularity: str) -> None:
    with pytest.raises(RefusedError) as caught:
        fp8.quantise(torch.zeros(1, 1, 1, 1), scales, granularity)
    assert caught.value.code == "scale_policy"
    assert scales in caught.value.found


# ---------------------------------------------------------------- scales that are stored beside the codes


def drawn(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, tokens, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scales", [torch.tensor(0.01), torch.tensor([0.01, 0.02, 0.005])], ids=["tensor", "head"])
def test_fixed_scales_stay_what_they_are_and_clamp_what_is_beyond_them(scales: torch.Tensor) -> None:
    states = drawn(5)
    states[0, 0, 4], states[1, 2, 0, 3] = 1e6, float("nan")
    codes, kept = fp8.append(torch.empty(2, 3, 0, 8, dtype=fp8.E4M3), scales, states, 0)
    assert torch.equal(kept, scales)
    factors = fp8.spread(scales, 0, 5)
    read = fp8.dequantise(codes, factors, torch.float32)
    expected = (states / factors).clamp(-448, 448).to(fp8.E4M3).float() * factors
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(read[0, 0, 4], torch.full((8,), 448.0) * scales.flatten()[0])
    assert read.isnan().sum() == 1


@pytest.mark.parametrize("granularity", ["tensor", "head", "page_head", "token_head"])
@pytest.mark.parametrize("first", [0, 3, 63, 64, 130])
def test_scales_belong_to_their_tokens_wherever_the_first_one_stands(granularity: str, first: int) -> None:
    states = drawn(150)
    scales = fp8.undecided(2, 3, granularity, states.device)
    codes, scales = fp8.append(torch.empty(2, 3, 0, 8, dtype=fp8.E4M3), scales, states, first)
    read = fp8.dequantise(codes, fp8.spread(scales, first, 150), torch.float32)
    assert ((read - states).abs() <= states.abs() * 2.0**-4 + fp8.spread(scales, first, 150) * 2.0**-10).all()
    for start, stop in ((0, 150), (1, 150), (61, 62), (64, 129), (149, 150)):
        part = fp8.within(scales, first, start, stop)
        assert torch.equal(
            fp8.dequantise(codes[:, :, start:stop], fp8.spread(part, first + start, stop - start), torch.float32), read[:, :, start:stop]
        )
        if granularity == "page_head":
            assert part.shape[2] == len({(first + token) // fp8.PAGE for token in range(start, stop)})


def test_nothing_written_changes_nothing() -> None:
    scales = fp8.undecided(2, 3, "page_head", torch.device("cpu"))
    codes = torch.empty(2, 3, 0, 8, dtype=fp8.E4M3)
    assert fp8.append(codes, scales, drawn(0), 7) == (codes, scales)


def test_every_policy_of_the_list_is_one_that_scales_know() -> None:
    dynamic = {granularity for scales, granularity in fp8.POLICIES if scales == "dynamic"}
    shapes = {granularity: fp8.undecided(2, 3, granularity, torch.device("cpu")).dim() for granularity in dynamic}
    assert shapes == {"tensor": 2, "head": 3, "page_head": 5, "token_head": 4}
    assert {("unit", "none"), ("fixed", "tensor"), ("fixed", "head"), *(("dynamic", one) for one in dynamic)} == fp8.POLICIES
