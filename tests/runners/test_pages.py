"""Pages and tables made by hand: what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ledger.errors import InputError
from runners import fp8, pages
from runners.pages import Pages


def made(scales: torch.Tensor | None = None) -> Pages:
    """8 pages of 4 tokens, by hand."""
    keys, values = torch.zeros(8, 2, 4, 8, dtype=torch.bfloat16), torch.zeros(8, 2, 8, 4).to(fp8.E4M3)
    return Pages(keys, values, value_scales=scales)


def check_table(table: list[list[int]], lengths: list[int], given: Pages | None = None, **more: Any) -> None:
    rows = torch.tensor(table, dtype=torch.int32).reshape(len(lengths), -1 if table else 2)
    pages.check_table(given or made(), rows, torch.tensor(lengths, dtype=torch.int32), **more)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("table", "lengths", "words"),
    [
        ([[0, 1]], [9], "beyond its block table"),
        ([[0, 1]], [-1], "beyond its block table"),
        ([[0, 8]], [5], "does not exist"),
        ([[-1, 1]], [5], "does not exist"),
        ([[2, 2]], [5], "stands twice"),
        ([[0, 1], [2, 1]], [8, 7], "stands twice"),
        ([[0], [0]], [1, 1], "stands twice"),
        ([], [], "wrong shape"),
        ([[]], [0], "wrong shape"),
    ],
)
def test_a_hand_made_table_is_checked(table, lengths, words, shared):
    with pytest.raises(InputError, match=words) as caught:
        check_table(table, lengths, shared=shared)
    assert caught.value.expected and caught.value.found and caught.value.next


def test_a_full_page_stands_in_two_rows_only_where_sharing_is_declared():
    check_table([[0, 1], [0, 2]], [5, 8], shared=True)
    with pytest.raises(InputError, match="stands twice"):
        check_table([[0, 1], [0, 2]], [5, 8])


@pytest.mark.parametrize("window", [-3, 1.5, float("nan"), True, None])
def test_a_hand_made_table_is_checked_with_a_window_of_whole_tokens(window):
    with pytest.raises(InputError, match="window"):
        check_table([[0, 1]], [5], window=window)


@pytest.mark.parametrize(("table", "lengths"), [([[0, 1]], [5.5]), ([[0, 1]], [float("nan")]), ([[0.0, 1.0]], [5]), ([[True, False]], [5])])
def test_a_hand_made_table_is_of_integers(table, lengths):
    rows, held = torch.tensor(table), torch.tensor(lengths)
    for one, other in ((rows, held), (rows.to(torch.int32), held.long()), (rows.long(), held.to(torch.int32))):
        with pytest.raises(InputError, match="not of integers"):
            pages.check_table(made(), one, other)


def test_right_tables_pass_the_check():
    check_table([[3, 3, 1]], [12], window=2)  # what fell out of a window is not read
    check_table([[9, 9]], [0])


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_of_hand_made_pages_are_checked_where_they_are_read(wrong):
    with pytest.raises(InputError, match="no scale"):
        check_table([[0]], [1], made(torch.tensor([1.0, wrong])))
    each = torch.full((8, 2, 4), wrong)
    each[3, :, 1:] = each[5, :, :2] = 0.5
    check_table([[3, 5]], [6], made(each), window=5)
    check_table([[3, 5]], [0], made(each))
    for lengths, window in (([6], 0), ([7], 5)):
        with pytest.raises(InputError, match="value_scales hold a number that is no scale") as caught:
            check_table([[3, 5]], lengths, made(each), window=window)
        assert caught.value.expected and caught.value.found and caught.value.next


def test_the_check_covers_the_window_of_a_whole_chunk_and_what_is_to_be_written():
    check_table([[9, 1, 2]], [12], window=3)
    with pytest.raises(InputError, match="does not exist"):
        check_table([[9, 1, 2]], [12], window=3, tokens=8)
    check_table([[0, 9]], [4])
    with pytest.raises(InputError, match="does not exist"):
        check_table([[0, 9]], [4], room=1)
    with pytest.raises(InputError, match="beyond its block table"):
        check_table([[0, 1]], [4], room=5)
    with pytest.raises(InputError, match="chunk or the room"):
        check_table([[0, 1]], [4], tokens=0)


def test_a_shared_page_is_not_written_to_and_scales_of_room_are_not_read():
    check_table([[0, 1], [0, 2]], [4, 4], shared=True, room=4)
    with pytest.raises(InputError, match="stands twice"):
        check_table([[0, 1], [0, 1]], [4, 4], shared=True, room=1)
    scales = torch.full((8, 2, 4), float("nan"))
    scales[0] = 1.0
    check_table([[0, 1]], [4], made(scales), room=4)
