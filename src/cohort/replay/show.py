"""A replay in words and as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cohort.report.words import cause_words, fine_share, one_line

TEXT = 36
"""Characters of a text that are printed: its end."""
ROWS = 8
"""Rows of a table that are printed; the file has more."""


def sentence(result: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    tokens, gradient, name = result["tokens"], result["gradient"], result["objective"]["replay"]
    if not gradient["norm_run"] and not gradient["norm_replay"]:
        return "The step taught nothing, under either objective: the gradient is 0. Choose another with --step"
    if result["identical"]:
        return f"Under {name} nothing changes: all {tokens['total']:,} coefficients are equal, bit for bit"
    if not gradient["norm_run"] or not gradient["norm_replay"]:
        which = name if gradient["norm_run"] else result["objective"]["run"]
        return f"Under {which} the gradient of this step is 0; there is nothing to compare it with"
    ratio, angle = f"{gradient['ratio']:.3g}", cosine(gradient["cosine"])
    return (
        f"Under {name}, {fine_share(tokens['changed_share'])} of the tokens change their coefficient by more than "
        f"{tokens['changed_means']:.0%} of its root mean square (beyond the common factor {tokens['factor']:.3g}), "
        f"{fine_share(tokens['sign_share'])} change its sign; gradient norm {ratio}x, cosine {angle}"
        + (" in the space of the logits" if gradient["space"] == "logits" else "")
    )


def cosine(value: float | None) -> str:
    """A cosine with two digits, or with as many nines as it has.

    >>> cosine(0.5), cosine(0.99961), cosine(1.0), cosine(None)
    ('0.50', '0.9996', '1.00', '-')
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if 0.995 <= value < 0.99995 else f"{value:.2f}"


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a replay: the sentence first, then what stands behind it."""
    console.print(Text(result["sentence"] + "."), style="bold")
    if changes := result["objective"]["changes"]:
        console.print(Text(f"changed: {'; '.join(changes)}"))
    for note in result["notes"]:
        console.print(Text(f"note: {note}"))
    if result["training"]:
        _show_training(result["training"], console)
    console.print(_gradients(result))
    if len(result["causes"]) > 1 or not result["identical"]:
        console.print(_causes(result["causes"]))
    if not result["identical"] and result["strongest"]:
        console.print(_strongest(result["strongest"], result["tokens"]["factor"]))
    if result["completions"]:
        console.print(_completions(result["completions"]))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for column in columns:
        left = column in ("", "run", "replay", "token", "after", "text", "change", "space")
        table.add_column(column, justify="left" if left else "right", overflow="ellipsis", no_wrap=True)
    return table


def _gradients(result: Mapping[str, Any]) -> Table:
    table = _table("\ngradient", "space", "", "run's norm", "replay's", "factor", "cosine")
    for space in ("parameters", "logits"):
        if (found := result[space]) is None:
            continue
        for name, one in (("whole", found), *found["terms"].items()):
            norms = f"{one['norm_run']:.3g}", f"{one['norm_replay']:.3g}"
            factor = "-" if one["ratio"] is None else f"{one['ratio']:.3g}"
            table.add_row(space if name == "whole" else "", name, *norms, factor, cosine(one["cosine"]))
    return table


def _causes(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "\ntokens by what they have in place of a gradient", "run", "replay", "tokens", "share of run's", "of replay's"
    )
    for row in rows[:ROWS]:
        names = cause_words(row["run"]), cause_words(row["replay"])
        table.add_row(*names, f"{row['tokens']:,}", fine_share(row["share_run"]), fine_share(row["share_replay"]))
    return table


def _strongest(rows: Sequence[Mapping[str, Any]], factor: float) -> Table:
    title = f"\ntokens that change most, once the replay's c is divided by the common factor {factor:.3g}"
    table = _table(title, "row", "place", "after", "token", "change", "run's c", "replay's c")
    for row in rows[:ROWS]:
        text = f"#{row['token_id']}" if row["text"] is None else _shown(row["text"])
        numbers = f"{row['coefficient_run']:.2e}", f"{row['coefficient_replay']:.2e}"
        place = f"{row['row']}", f"{row['position']}"
        table.add_row(*place, Text(_shown(row["before"] or "")[-TEXT:]), Text(text), row["change"], *numbers)
    return table


def _completions(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "\ncompletions that drive the gradient",
        "row",
        "group",
        "reward",
        "tokens",
        "share of run's",
        "of replay's",
        "text",
    )
    for row in rows[:ROWS]:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3g}"
        shares = fine_share(row["share_run"]), fine_share(row["share_replay"])
        table.add_row(
            f"{row['row']}", f"{row['group']}", reward, f"{row['tokens']:,}", *shares, Text(_shown(row["text"])[-TEXT:])
        )
    return table


def _show_training(found: Mapping[str, Any], console: Console) -> None:
    moved = {name: found[name]["update_kl"] for name in ("run", "replay")}
    again = {
        True: ", which is the run's own next checkpoint bit for bit",
        False: ", not equal bit for bit to the run's",
    }
    console.print(
        Text(
            f"trained: the run's objective moved the policy by {_nats(moved['run'])}"
            f"{again.get(found['run']['reproduced'], '')}; the other one by {_nats(moved['replay'])}; "
            f"the two results are {_nats(found['between'])} apart. Model: {found['output']}"
        )
    )


def _nats(value: float | None) -> str:
    return "an unknown distance" if value is None else f"{value:.3g} nats per token"


def _shown(text: str) -> str:
    return one_line(text, "\\n")
