"""The page pool: who holds which page, what it refuses, and that its bytes are what the allocator says."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from ledger.errors import InputError, RefusedError
from runners import fp8, oracle, paged
from runners.paged import Pool
from runners.pages import Group

torch.set_num_threads(1)


def group(layers: tuple[int, ...] = (0, 1), values: str = "fp8_e4m3", **more: Any) -> Group:
    given = {"kv_heads": 2, "key_dim": 8, "value_dim": 8, "keys": "bf16", "values": values, "scales": "unit"} | more
    if "fp8_e4m3" not in (given["keys"], given["values"]):
        given |= {"scales": "none"}
    return Group(layers=layers, **given)


def pool(*groups: Group, **more: Any) -> Pool:
    return Pool(groups or (group(),), **{"tokens": 32, "sequences": 3, "page": 4} | more)


def held(one: Pool, layer: int, sequence: int) -> list[int]:
    """Pages of a sequence, windows aside, in order."""
    state, _ = one._of[layer]
    return state.rows[sequence, state.first[sequence] : state.last[sequence]].tolist()


def check(one: Pool) -> None:
    """Every page is free or held, and counted as often as it is held; the device sees what the host does."""
    for state in one._held:
        live = [row for row in range(one.sequences) if one._live[row]]
        count = Counter(page for row in live for page in held(one, state.group.layers[0], row))
        assert {page: int(times) for page, times in enumerate(state.shares) if times} == dict(count)
        assert sorted([*state.free, *count]) == list(range(len(state.shares)))
        for row in live:
            assert state.last[row] == max(-(-one.length(row) // one.page), state.first[row])
            assert torch.equal(one.table(state.group.layers[0], [row])[0], state.host[row])
            assert int(one.lengths([row])) == one.length(row)


# ---------------------------------------------------------------- pages


def test_tokens_take_a_page_when_the_last_one_is_full():
    one = pool()
    sequence = one.add()
    for tokens, pages in ((3, 1), (1, 1), (1, 2), (7, 3), (0, 3), (20, 8)):
        one.append(sequence, tokens)
        assert len(held(one, 0, sequence)) == pages
        check(one)
    assert one.length(sequence) == 32 and one.free_pages(0) == 3 * 8 - 8


def test_a_freed_sequence_gives_its_pages_to_the_next():
    one = pool(sequences=1)
    first = one.add()
    one.append(first, 32)
    assert one.free_pages(0) == 0
    one.free(first)
    second = one.add()
    one.append(second, 32)
    check(one)


def test_layers_of_a_group_share_one_allocation_a_side_and_one_table():
    one = pool(group((0, 2)), group((1,), values="bf16"))
    a, b, c = one.pages(0), one.pages(2), one.pages(1)
    assert a.keys.untyped_storage().data_ptr() == b.keys.untyped_storage().data_ptr() != c.keys.untyped_storage().data_ptr()
    assert a.keys.data_ptr() != b.keys.data_ptr()
    assert a.keys.shape == (24, 2, 4, 8) and a.values.shape == (24, 2, 8, 4) and c.values.shape == (24, 2, 4, 8)
    sequence = one.add()
    assert one.table(0, [sequence]).data_ptr() == one.table(2, [sequence]).data_ptr() != one.table(1, [sequence]).data_ptr()


@pytest.mark.parametrize(
    ("formats", "key_scales", "value_scales"),
    [
        ({"values": "bf16"}, None, None),
        ({}, None, None),
        ({"scales": "dynamic", "granularity": "token_head"}, None, (24, 2, 4)),
        ({"keys": "fp8_e4m3", "scales": "dynamic", "granularity": "token_head"}, (24, 2, 4), (24, 2, 4)),
    ],
)
def test_scales_are_stored_where_the_policy_has_any(formats, key_scales, value_scales):
    pages = pool(group(**formats)).pages(1)
    assert (pages.key_scales.shape if key_scales else pages.key_scales) == key_scales
    assert (pages.value_scales.shape if value_scales else pages.value_scales) == value_scales


def test_fixed_scales_are_one_a_head_and_must_be_set_before_the_pages_are_used():
    one = pool(group(keys="fp8_e4m3", scales="fixed", granularity="head"))
    with pytest.raises(InputError, match="Layer 1 has no scales"):
        one.pages(1)
    scales = {"key_scales": torch.tensor([0.5, 2.0]), "value_scales": torch.tensor([1.0, 4.0])}
    one.set_scales(1, scales)
    assert torch.equal(one.pages(1).value_scales, scales["value_scales"])
    for wrong in (torch.tensor([0.0, 1.0]), torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 1.0]), torch.ones(3)):
        for side in scales:
            with pytest.raises(InputError, match="cannot be used"):
                one.set_scales(0, scales | {side: wrong})
    with pytest.raises(InputError, match="takes other scales"):
        one.set_scales(0, {"key_scales": torch.ones(2)})
    with pytest.raises(InputError, match="Layer 0 has no scales"):
        one.pages(0)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([1.0, 1e-300], dtype=torch.float64),
        torch.tensor([1e300, 1.0], dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.int64),
        [1.0, 1.0],
        None,
    ],
    ids=str,
)
def test_scales_are_judged_as_they_are_stored(wrong):
    one = pool(group(scales="fixed", granularity="head"))
    one.set_scales(1, {"value_scales": torch.tensor([0.5, 3.0], dtype=torch.float64)})
    assert one.pages(1).value_scales.tolist() == [0.5, 3.0]
    with pytest.raises(InputError, match="cannot be used") as caught:
        one.set_scales(1, {"value_scales": wrong})
    assert one.pages(1).value_scales.tolist() == [0.5, 3.0]
    assert "float32" in caught.value.expected and caught.value.found and caught.value.next


# ---------------------------------------------------------------- windows


def test_a_windowed_group_gives_back_what_no_later_token_can_see():
    one = pool(group((0,), window=6), group((1,)), chunk=4)
    sequence = one.add()
    for _ in range(8):
        one.append(sequence, 4)
        check(one)
    # The first token of the last chunk is at 28 and sees from 23 on: page 5.
    assert len(held(one, 0, sequence)) == 3 and len(held(one, 1, sequence)) == 8
    assert one._of[0][0].first[sequence] == 5


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_a_windowed_pool_has_room_for_its_longest_sequence_in_chunks(window, chunk):
    one = pool(group(window=window), tokens=64, sequences=2, chunk=chunk, seed=1)
    for sequence in (one.add(), one.add()):
        while left := one.tokens - one.length(sequence):
            one.append(sequence, min(chunk, left))
            first = max(0, one.length(sequence) - min(chunk, left) - window + 1)
            assert one._of[0][0].first[sequence] == first // 4
            check(one)


def test_a_window_that_was_given_back_cannot_be_cropped_into_view():
    one = pool(group(window=4))
    sequence = one.add()
    one.append(sequence, 12)
    one.append(sequence, 4)  # positions 9 to 15 are held, from the page of 8 on
    one.crop(sequence, 4)
    check(one)
    with pytest.raises(InputError, match="its window of 4"):
        one.crop(sequence, 3)
    assert one.length(sequence) == 12


# ---------------------------------------------------------------- forks


def states(tokens: int, seed: int, dim: int = 8) -> torch.Tensor:
    return torch.randn(1, tokens, 2, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


def write(one: Pool, sequence: int, tokens: int, seed: int) -> None:
    before = one.lengths([sequence]).clone()
    one.append(sequence, tokens)
    for layer in one._of:
        made = states(tokens, seed * 100 + layer)
        oracle.write(one.pages(layer), made, made * 2, one.table(layer, [sequence]), before)


def read(one: Pool, layer: int, sequence: int) -> torch.Tensor:
    return oracle.read(one.pages(layer), one.table(layer, [sequence])[0], one.length(sequence))[0]


@pytest.mark.parametrize("tokens", [4, 6, 8, 9])
def test_a_fork_shares_whole_pages_and_goes_its_own_way(tokens):
    one = pool(group(scales="dynamic", granularity="token_head"), group((2,), values="bf16"))
    parent = one.add()
    write(one, parent, tokens, 1)
    child = one.fork(parent)
    assert held(one, 0, child)[: tokens // 4] == held(one, 0, parent)[: tokens // 4]
    assert len(set(held(one, 0, child)) & set(held(one, 0, parent))) == tokens // 4
    expected = {layer: read(one, layer, parent) for layer in range(3)}
    write(one, parent, 5, 2)
    write(one, child, 5, 3)
    check(one)
    for layer in range(3):
        for sequence, seed in ((parent, 2), (child, 3)):
            found = read(one, layer, sequence)
            assert torch.equal(found[:tokens], expected[layer])
            assert torch.equal(found[tokens:], states(5, seed * 100 + layer)[0].float())
    one.free(parent)
    check(one)
    assert torch.equal(read(one, 1, child)[:tokens], expected[1])


def test_a_fork_that_is_cropped_into_a_shared_page_copies_it_before_it_writes():
    one = pool()
    parent = one.add()
    write(one, parent, 8, 1)
    child = one.fork(parent)
    before = read(one, 0, parent)
    one.crop(child, 2)
    write(one, child, 1, 2)
    check(one)
    assert torch.equal(read(one, 0, parent), before)
    assert torch.equal(read(one, 0, child)[:6], before[:6])


def test_sequences_that_both_write_to_a_shared_page_lose_no_page():
    one = pool()
    parent = one.add()
    write(one, parent, 8, 1)
    child = one.fork(parent)
    for sequence in (parent, child):
        one.crop(sequence, 2)
    one.extend([parent, child], 1)
    check(one)
    assert held(one, 0, parent)[1] != held(one, 0, child)[1]


def test_rearranged_sequences_hold_what_their_sources_held():
    one = pool(sequences=3)
    for seed in range(3):
        write(one, one.add(), 5 + seed, seed)
    before = [read(one, 0, sequence) for sequence in range(3)]
    one.rearrange({0: 1, 1: 0, 2: 1})
    check(one)
    for sequence, source in enumerate((1, 0, 1)):
        assert torch.equal(read(one, 0, sequence), before[source])
        write(one, sequence, 2, 7 + sequence)
    check(one)
    for sequence, source in enumerate((1, 0, 1)):
        assert torch.equal(read(one, 0, sequence)[:-2], before[source])
        assert torch.equal(read(one, 0, sequence)[-2:], states(2, (7 + sequence) * 100)[0].float())


def test_any_order_of_work_keeps_pages_and_contents_right():
    random = np.random.default_rng(5)
    one = pool(group(), group((2,), values="bf16", window=6), sequences=4, chunk=7, seed=2)
    known: dict[int, list[torch.Tensor]] = {}
    seed = 0
    for _ in range(400):
        act = random.choice(["add", "write", "write", "write", "fork", "free", "crop"])
        try:
            if act == "add":
                known[one.add()] = []
                continue
            if not known:
                continue
            sequence = int(random.choice(list(known)))
            if act == "write":
                tokens, seed = int(random.integers(1, 8)), seed + 1
                write(one, sequence, tokens, seed)
                known[sequence] = [*known[sequence], *states(tokens, seed * 100)[0].float()]
            elif act == "fork":
                known[one.fork(sequence)] = list(known[sequence])
            elif act == "free":
                one.free(sequence)
                del known[sequence]
            else:
                tokens = int(random.integers(0, 4))
                one.crop(sequence, tokens)
                known[sequence] = known[sequence][: len(known[sequence]) - tokens]
        except InputError:
            pass
        check(one)
        for sequence, tokens in known.items():
            assert one.length(sequence) == len(tokens)
            if tokens:
                assert torch.equal(read(one, 0, sequence), torch.stack(tokens))
    assert seed > 60


# ---------------------------------------------------------------- bytes


def test_backings_are_the_allocations_and_add_up_to_the_formula():
    one = pool(group((0, 1), scales="dynamic", granularity="token_head"), group((2,), values="bf16", window=6), chunk=4)
    listed = one.backings()
    assert len({backing.address for backing in listed}) == len(listed) == 5
    assert [(b.holds, b.kind, b.dtype, b.layers) for b in listed] == [
        ("keys", "attention", "bf16", (0, 1)),
        ("values", "attention", "fp8_e4m3", (0, 1)),
        ("value_scales", "scales", "fp32", (0, 1)),
        ("keys", "sliding", "bf16", (2,)),
        ("values", "sliding", "bf16", (2,)),
    ]
    slots = 24 * 4 * 2 * 2  # pages, tokens, heads, layers
    assert [b.bytes for b in listed] == [slots * 8 * 2, slots * 8, slots * 4, 9 * 4 * 2 * 8 * 2, 9 * 4 * 2 * 8 * 2]
    assert sum(b.bytes for b in listed) == sum(t.untyped_storage().nbytes() for s in one._held for t in s.backings.values())
    assert one.allocated_bytes is None  # a CPU's allocator does not say


def test_k16v8_holds_four_thirds_of_the_tokens_of_16_bit_at_one_budget():
    budget = 100 * 4608  # whole pages of both formats: of 1536 and 1152 bytes for all sequences and layers
    tokens = {values: pool(group(values=values), tokens=None, budget_bytes=budget).tokens for values in ("bf16", "fp8_e4m3")}
    assert tokens["fp8_e4m3"] == 4 * tokens["bf16"] // 3
    for values, count in tokens.items():
        one = pool(group(values=values), tokens=count, budget_bytes=budget)
        assert sum(b.bytes for b in one.backings()) <= budget
        with pytest.raises(RefusedError):
            pool(group(values=values), tokens=count + 1, budget_bytes=budget)


def test_a_pool_beyond_its_budget_is_refused_with_what_fits():
    with pytest.raises(RefusedError) as caught:
        pool(budget_bytes=8192)
    assert caught.value.code == "budget"
    assert "8192 bytes" in caught.value.expected and "9216 bytes for 3 sequences" in caught.value.found and "28 tokens" in caught.value.next
    with pytest.raises(RefusedError, match="fewer sequences"):
        pool(tokens=None, budget_bytes=100)


@pytest.mark.parametrize(
    "size", [{"budget_bytes": 10**15}, {"budget_bytes": 10**30}, {"tokens": 10**13}, {"tokens": 10**13, "window": 8}, {"tokens": 2**70}]
)
def test_a_pool_beyond_the_hosts_memory_is_refused_before_anything_is_allocated(monkeypatch, size):
    monkeypatch.setattr(torch, "empty", lambda *args, **more: pytest.fail("allocated"))
    with pytest.raises(RefusedError, match="does not fit the memory") as caught:
        Pool([group(window=size.pop("window", None))], chunk=4, **size)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert caught.value.code == "budget" and str(memory) in caught.value.expected and caught.value.next


def test_what_the_host_has_counts_tables_and_lists_too(monkeypatch):
    monkeypatch.setattr(paged, "_free_bytes", lambda device: 9216)  # the backings alone would fit
    with pytest.raises(RefusedError, match="9216 bytes"):
        pool()
    monkeypatch.setattr(paged, "_free_bytes", lambda device: 20_000)
    pool()


def test_an_allocation_that_fails_is_refused_as_one_that_does_not_fit(monkeypatch):
    def fail(*args: Any, **more: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(RefusedError) as caught:
        pool()
    assert caught.value.code == "budget"


def test_bytes_are_counted_beyond_an_int64():
    assert group().bytes(2**57, 4) == 2**57 * group().bytes(1, 4) > 2**63
    with pytest.raises(RefusedError) as caught:
        Pool([group()], tokens=2**57, budget_bytes=1000)
    assert caught.value.code == "budget" and "at most 1000 bytes" in caught.value.expected


def test_sequences_are_added_all_or_none():
    one = pool()
    one.add()
    with pytest.raises(InputError, match="another 3 sequences"):
        one.add_all(3)
    assert one.add_all(0) == [] and one.add_all(2) == [1, 2]


def test_a_total_below_all_full_lengths_makes_a_smaller_pool():
    one = pool(sequences=3, total=40)
    assert len(one._of[0][0].shares) == 10 + 3
    for tokens in (31, 5, 4):
        one.append(one.add(), tokens)
    check(one)


# ---------------------------------------------------------------- wrong use


def broken(act: str) -> None:
    one = pool(sequences=2)
    first, second = one.add(), one.add()
    one.append(first, 5)
    one.free(second)
    acts: dict[str, Any] = {
        "a freed sequence is appended to": lambda: one.append(second, 1),
        "a freed sequence is read": lambda: one.table(0, [second]),
        "lengths of a freed sequence": lambda: one.lengths([first, second]),
        "a freed sequence is forked": lambda: one.fork(second),
        "a freed sequence is cropped": lambda: one.crop(second, 1),
        "freed twice": lambda: one.free(second),
        "a sequence that never was": lambda: one.append(7, 1),
        "a negative sequence": lambda: one.table(0, [-1]),
        "a sequence twice in a batch": lambda: one.table(0, [first, first]),
        "a batch of zero": lambda: one.table(0, []),
        "beyond the table": lambda: one.append(first, 28),
        "fewer than no tokens": lambda: one.append(first, -1),
        "cropped below zero": lambda: one.crop(first, 6),
        "cropped upwards": lambda: one.crop(first, -1),
        "more than an int64 holds": lambda: one.append(first, 2**63 - 1),
        "far more than an int64 holds": lambda: one.append(first, 2**70),
        "a part of a token": lambda: one.append(first, 1.7),  # type: ignore[arg-type]
        "a part of a sequence": lambda: one.append(0.5, 1),  # type: ignore[arg-type]
        "tokens of more sequences": lambda: one.extend([first], [1, 2]),
        "tokens of fewer sequences": lambda: one.extend([first, one.add()], [1]),
        "cropped by a part of a token": lambda: one.crop(first, 1.5),  # type: ignore[arg-type]
        "an unknown layer": lambda: one.pages(9),
        "fewer sequences than none": lambda: one.add_all(-1),
        "a part of a new sequence": lambda: one.add_all(0.5),  # type: ignore[arg-type]
        "one sequence too many": lambda: [one.add() for _ in range(2)],
    }
    acts[act]()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("a freed sequence is appended to", "not in the pool"),
        ("a freed sequence is read", "not in the pool"),
        ("lengths of a freed sequence", "not in the pool"),
        ("a freed sequence is forked", "not in the pool"),
        ("a freed sequence is cropped", "not in the pool"),
        ("freed twice", "not in the pool"),
        ("a sequence that never was", "not in the pool"),
        ("a negative sequence", "not in the pool"),
        ("a sequence twice in a batch", "named twice"),
        ("a batch of zero", "batch of zero"),
        ("beyond the table", "longer than its table"),
        ("fewer than no tokens", "cannot shrink"),
        ("cropped below zero", "cannot be cropped"),
        ("cropped upwards", "cannot be cropped"),
        ("more than an int64 holds", "longer than its table"),
        ("far more than an int64 holds", "longer than its table"),
        ("a part of a token", "Not a whole number: tokens"),
        ("a part of a sequence", "Not a whole number: a sequence"),
        ("tokens of more sequences", "of different number"),
        ("tokens of fewer sequences", "of different number"),
        ("cropped by a part of a token", "Not a whole number: tokens"),
        ("an unknown layer", "has no pages here"),
        ("fewer sequences than none", "Fewer sequences than none"),
        ("a part of a new sequence", "Not a whole number: sequences"),
        ("one sequence too many", "no room for another"),
    ],
)
def test_wrong_use_is_refused_before_anything_changes(act, words):
    with pytest.raises(InputError, match=words) as caught:
        broken(act)
    assert caught.value.expected or caught.value.found


def test_a_pool_without_a_page_left_says_so_and_changes_nothing():
    one = pool(sequences=2, total=8)
    first, second = one.add(), one.add()
    one.append(first, 15)
    before = held(one, 0, first)
    with pytest.raises(InputError, match="no page left") as caught:
        one.extend([first, second], [1, 1])
    assert "0 of 4" in caught.value.found
    assert held(one, 0, first) == before and one.length(first) == 15 and one.length(second) == 0
    with pytest.raises(InputError, match="no page left"):
        one.fork(first)
    check(one)


def test_sequences_of_one_page_each_may_share_one_and_part_again():
    one = pool(sequences=3, tokens=4)
    rows = [one.add() for _ in range(3)]
    one.extend(rows, 2)
    one.rearrange({0: 0, 1: 0, 2: 0})
    check(one)
    one.extend(rows, 1)
    assert one.free_pages(0) == 0 and len({held(one, 0, row)[0] for row in rows}) == 3
    check(one)


def test_a_page_that_another_still_holds_is_copied_for_each_that_writes_to_it():
    one = pool(sequences=3, tokens=4)
    rows = [one.add() for _ in range(3)]
    one.extend(rows, 2)
    one.rearrange({0: 2, 1: 2})
    one.extend(rows[:2], 1)
    assert one.free_pages(0) == 0 and len({held(one, 0, row)[0] for row in rows}) == 3
    check(one)


def test_pages_that_all_their_sharers_give_back_at_once_are_free_for_them():
    one = pool(group(window=4), sequences=2, total=4, chunk=4)
    rows = [one.add() for _ in range(2)]
    one.extend(rows, 4)
    one.rearrange({1: 0})
    one.extend(rows, 4)
    assert one.free_pages(0) == 0
    one.extend(rows, [4, 0])
    check(one)


@pytest.mark.parametrize("tokens", [-1, [1, -1]])
def test_a_sequence_does_not_grow_by_less_than_nothing(tokens):
    one = pool()
    rows = [one.add(), one.add()]
    with pytest.raises(InputError, match="cannot shrink"):
        one.extend(rows, tokens)


@pytest.mark.parametrize("scales", [("fixed", "tensor"), ("none", "none"), ("dynamic", "page_head")])
def test_a_group_names_the_scales_that_it_takes(scales):
    with pytest.raises(RefusedError) as caught:
        group(scales=scales[0], granularity=scales[1]).check()
    assert all(word in caught.value.expected for word in ("unit", "token_head", '"fixed" with granularity "head"'))
    assert scales[1] in caught.value.found and caught.value.next


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (InputError, lambda: pool(group((0, 1)), group((1,)))),
        (InputError, lambda: Pool((), tokens=4)),
        (InputError, lambda: pool(page=48)),
        (InputError, lambda: pool(tokens=0)),
        (InputError, lambda: pool(sequences=0)),
        (InputError, lambda: pool(tokens=None)),
        (InputError, lambda: pool(tokens=64.5)),
        (InputError, lambda: pool(group(window=64), tokens=2**31, chunk=64, sequences=1, page=65536)),
        (InputError, lambda: pool(total=0)),
        (InputError, lambda: pool(total=-500)),
        (InputError, lambda: pool(budget_bytes=1e9)),
        (InputError, lambda: pool(device="foo")),
        (RefusedError, lambda: pool(device="meta")),
        (InputError, lambda: pool(group(key_dim=8.5))),
        (InputError, lambda: pool(group(kv_heads=0))),
        (InputError, lambda: pool(group(window=0))),
        (InputError, lambda: pool(group(window=True))),
        (InputError, lambda: pool(group(window=2**31))),
        (RefusedError, lambda: pool(group(values="fp32", scales="none"))),
        (RefusedError, lambda: pool(group(scales="none"))),
        (RefusedError, lambda: pool(Group((0,), 1, 8, 8, "bf16", "bf16", "unit"))),
        (RefusedError, lambda: pool(group(scales="dynamic", granularity="page_head"))),
    ],
)
def test_a_pool_that_cannot_be_is_refused(error, make):
    with pytest.raises(error) as caught:
        make()
    assert caught.value.expected and caught.value.found and caught.value.next


# ---------------------------------------------------------------- poison


@pytest.mark.parametrize("formats", [{}, {"values": "bf16"}, {"keys": "fp8_e4m3", "scales": "dynamic", "granularity": "token_head"}])
def test_poison_reaches_every_byte_that_is_not_held_and_no_other(formats):
    one = pool(group(**formats), sequences=2, seed=3)
    sequence = one.add()
    write(one, sequence, 6, 1)
    before = [side.clone() for side in oracle.read(one.pages(1), one.table(1, [sequence])[0], 6)]
    one.poison()
    assert all(
        torch.equal(mine, other) for mine, other in zip(before, oracle.read(one.pages(1), one.table(1, [sequence])[0], 6), strict=True)
    )
    for backing in one._held[0].backings.values():
        number = backing.float() if backing.dtype != fp8.E4M3 else backing.view(torch.uint8) == 0x7F
        poisoned = number.isnan().sum() if backing.dtype != fp8.E4M3 else number.sum()
        assert int(poisoned) == backing.numel() * (16 * 4 - 6) // (16 * 4)


def test_scales_of_tokens_that_are_stored_stay_as_they_are():
    one = pool(group(keys="fp8_e4m3", scales="fixed", granularity="head"))
    scales = {"key_scales": torch.ones(2), "value_scales": torch.ones(2)}
    one.set_scales(0, scales)
    one.set_scales(0, scales)
    one.append(one.add(), 1)
    with pytest.raises(InputError, match="holds tokens"):
        one.set_scales(0, scales)
    one.reset()
    one.set_scales(0, scales)


def test_a_budget_makes_no_sequence_longer_than_an_int32():
    assert pool(group(window=8), chunk=4)._largest(1 << 40, None) < 1 << 31
