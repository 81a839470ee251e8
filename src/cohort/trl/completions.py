"""``log_completions``: with each entry of the log, a table of the last rollout on the console and in the trackers."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from cohort.callbacks import ScoredRollout
from cohort.report.words import clean

log = logging.getLogger("cohort.trl")


class LastRollout:
    """A callback of Cohort that keeps the last scored rollout, and warns of completions without any reward."""

    rollout: ScoredRollout | None = None

    def on_rollout(self, _trainer: Any, rollout: ScoredRollout) -> None:
        """Keep it, and warn as TRL does."""
        self.rollout, scores = rollout, rollout.scores
        missing = scores.by_function_SK.isnan().all(dim=1).nonzero().flatten().tolist()
        completions = [(group.prompt, one) for group in rollout.groups for one in group.completions]
        for place in missing:
            prompt, completion = completions[place]
            if completion.finish_reason.usable and place not in scores.errors:
                shown = {**prompt.columns, "prompt": prompt.prompt, "completion": completion.text}
                message = "All reward functions returned None for the following kwargs: %s. It is left out of its group"
                log.warning(message, shown)
                break  # one tells what is wrong

    def columns(self) -> dict[str, Any]:
        """TRL's ``trainer._logs`` of the rollout, to be read."""
        rows = list(_rows(self.rollout)) if self.rollout else []
        scores = self.rollout.scores if self.rollout else None
        found: dict[str, Any] = {name: [row[name] for row in rows] for name in ("prompt", "completion")}
        found["advantages"] = [row["advantage"] for row in rows]
        rewards = zip(scores.names, scores.by_function_SK.T.tolist(), strict=True) if scores else ()
        return {**found, "rewards": dict(rewards), "extra": dict(scores.extras) if scores else {}, "images": []}


class CompletionTables(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Prints the completions of the last rollout, ``num_completions_to_print`` of them drawn at random, and sends all
    to wandb and trackio; with ``log_unique_prompts`` one for each prompt.

    Args:
        last: where they come from.
    """

    def __init__(self, last: LastRollout) -> None:
        self._last = last

    def on_log(self, args: Any, state: Any, _control: Any, logs: Any = None, **_more: Any) -> None:
        """Show the table, if the entry is of training."""
        if self._last.rollout is None or "reward" not in (logs or {}):
            return
        rows = list(_rows(self._last.rollout))
        limit = args.num_completions_to_print
        shown = rows if limit is None else random.Random(state.global_step).sample(rows, min(limit, len(rows)))
        Console().print(_table(shown, state.global_step))
        if args.log_unique_prompts:
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        _send(args.report_to, [{"step": state.global_step, **row} for row in rows])


def _rows(rollout: ScoredRollout) -> Iterator[dict[str, Any]]:
    """The completions with prompt, rewards, advantage of the first token (0: unused) and logged columns."""
    scores, place = rollout.scores, 0
    for group in rollout.groups:
        for completion in group.completions:
            advantages = rollout.advantages[place]
            yield {
                "prompt": _text(group.prompt.prompt),
                "completion": completion.text,
                **dict(zip(scores.names, scores.by_function_SK[place].tolist(), strict=True)),
                "advantage": advantages[0] if advantages else 0.0,
                **{name: values[place] for name, values in scores.extras.items()},
            }
            place += 1


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role'].upper()}\n{message.get('content') or ''}" for message in prompt)


def _table(rows: list[dict[str, Any]], step: int) -> Panel:
    table = Table(show_lines=True, expand=True)
    for name in rows[0] if rows else ():
        table.add_column(Text(clean(name)), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        table.add_row(*(Text(clean(cell)) for cell in cells))  # text of a model: no markup, no control characters
    return Panel(table, title=f"Step {step}", expand=False)


def _send(report_to: list[str], rows: list[dict[str, Any]]) -> None:
    """Send the table to trackers that the script's own callbacks have started."""
    import pandas

    for name in {"wandb", "trackio"}.intersection(report_to):
        tracker = sys.modules.get(name)
        if tracker is not None and getattr(tracker, "run", True) is not None:
            tracker.log({"completions": tracker.Table(dataframe=pandas.DataFrame(rows))})
