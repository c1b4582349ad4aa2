"""Result tables as printed in the terminal."""

from __future__ import annotations

from result_values import speedup, stats, sweep_line

from bench.report.tables import tables
from bench.table import Table, labelled, text_of
from offload.units import GIB


def test_the_table_shows_every_column() -> None:
    item = stats(2.0, 2)
    value = {
        **speedup(),
        "plain": item,
        "speculative": item,
        "speedup": 4.0,
        "storage_roofline_fraction": 0.93,
        "storage_bytes_per_second": 2.2e9,
        "storage_probe": "O_DIRECT",
        "token_match": 0.99,
        "prompts_equal": 3,
        "first_mismatches": {"HumanEval/2": 17},
        "near_ties": [{"prompt": "HumanEval/2", "explained": True, "gap": 0.0625, "drift": 0.125}],
        "model": "grown",
        "draft_model": "pair:draft",
        "memory_budget_bytes": 2**30,
        "enforced": True,
        "n_prompts": 4,
        "sampling": {"max_tokens": 64},
    }
    text = text_of(tables("speedup", value))
    for part in (
        "4.00x",
        "0.93 of 2.20 GB/s (plain decode passes; probed with O_DIRECT)",
        "from token 17 on: a near tie",
        "1.00 GiB",
        "a tree drafts several for each position",
    ):
        assert part in text
    assert "None" not in text


def test_columns_are_aligned_and_a_few_long_rows_stand_side_by_side() -> None:
    rows = (("x", "1", "22"), ("y", "333", "4"))
    table = Table("", ("", "a", "bb"), rows, ("before",), ("after",))
    assert text_of([table]).splitlines() == [
        "before", "", "     a  bb", "x    1  22", "y  333   4", "", "after"
    ]  # fmt: skip
    wide = Table("", tuple("abcdefghi"), (tuple("123456789"),))
    assert text_of([wide]).splitlines()[:2] == ["a  1", "b  2"]


def test_markup_in_a_text_is_text() -> None:
    assert "[red]x[/red]" in text_of([Table("", ("a",), (("[red]x[/red]",),))])


def test_equal_outputs_and_outputs_not_the_targets_own() -> None:
    line = {**sweep_line(GIB, None, 16, 2.0), "num_seqs": 3, "n_equal_outputs": 2}
    value = {"settings": [line, {**line, "is_lossless": False}, sweep_line(GIB, None, 0, None)]}
    [table] = tables("sweep", value)
    shown = [row[-2] for row in table.rows]
    assert shown == ["2 of 3", "2 of 3  LOSSY (--accept-threshold)", "-"]
    assert table.rows[2][-1] == "oom-killed: killed"


def test_labels_are_padded_to_the_widest_or_to_a_width() -> None:
    pairs = (("draft", "none"), ("prompts", "4"))
    assert labelled(pairs) == ("draft   none", "prompts 4")
    assert labelled(pairs, 10) == ("draft     none", "prompts   4")
    assert labelled(()) == ()
