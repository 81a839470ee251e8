"""``main``: parses the arguments, runs the command, and turns errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import CycloptsError, UnknownOptionError
from cyclopts.token import Token

from cohort.cli import explain, models, runs, training  # noqa: F401  (commands)
from cohort.cli.app import app
from cohort.errors import STOPPED, CohortError, RankError, StepError, Stopped, TrackerError
from cohort.watchdog import dumps_on_quit, save_signal_ignored

PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit code for a closed pipe, as of other programs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0; 1 for a failure of the machine; 2 for a user error; 75 for a run that was stopped; 130 for an
        interrupt; 141 for a closed pipe. docs/reliability.md has the table.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that its encoding lacks is printed as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    try:
        tokens = _launched_apart(tokens)
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        if command is models.generate:
            _refuse_unknown_options(tokens, bound.args[1:])
        with dumps_on_quit(), save_signal_ignored():
            return command(*bound.args, **bound.kwargs) or 0
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Python flushes again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (CohortError, CycloptsError, OSError) as error:
        if not _told_by_rank_0(error):
            print(f"cohort: error: {error}", file=sys.stderr)
        # A full disk, a missing folder, a rank that has died or a server without an answer is not a user error.
        return 1 if isinstance(error, OSError | RankError | StepError | TrackerError) else 2
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0" and not stopped.is_printed:  # as it is of the demo
            print(f"cohort: {stopped}", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt as interrupt:
        if not _told_by_rank_0(interrupt):
            print(f"\ncohort: interrupted{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return 130


def _told_by_rank_0(error: BaseException) -> bool:
    """Whether this is another rank than 0, and the error is one that ``parallel.agreed`` has raised on every rank."""
    return os.environ.get("RANK", "0") != "0" and bool(getattr(error, "__notes__", None))


def _launched_apart(tokens: Sequence[str]) -> list[str]:
    """The arguments, with "--" before the command that ``cohort launch`` starts: options after it are the command's."""
    tokens = list(tokens)
    if tokens[:1] == ["launch"] and "--" not in tokens:
        names = {name for name in app if not name.startswith("-")}
        at = next((number for number, token in enumerate(tokens) if number and token in names), None)
        if at is not None:
            tokens.insert(at, "--")
    return tokens


def _refuse_unknown_options(tokens: Sequence[str], prompts: Sequence[str]) -> None:
    """Refuse prompts that look like options, except after "--"."""
    before = tokens[: tokens.index("--")] if "--" in tokens else tokens
    for text in prompts:
        if text.startswith("-") and text != "-" and " " not in text and text in before:
            options = app["generate"].assemble_argument_collection()
            raise UnknownOptionError(token=Token(value=text, source="cli"), argument_collection=options, verbose=False)
