"""The command line: parsing, and one call per command."""

from __future__ import annotations

import time

STARTED = time.time()  # before anything heavy is imported: what the command takes is counted from here

import argparse  # noqa: E402
import contextlib  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from cohort.errors import CohortError, ConfigError  # noqa: E402

if TYPE_CHECKING:
    from cohort.trainer import GRPOTrainer

PIPE_CLOSED = 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
"""The exit code when nobody reads standard output any more, as of other programs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code: 0, 2 for a mistake in what was asked for, 1 when the
    machine failed, 130 when interrupted, 141 when nobody reads what is printed.
    """
    parser = build_parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.command == "objective" and "=" in overrides[0] and not overrides[0].startswith("-"):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}; did you mean --set {' '.join(overrides)}?")
    if options.command == "generate":
        options.prompt, overrides = more_prompts(options.prompt, overrides)
    if overrides and options.command not in ("train", "eval"):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        match options.command:
            case "demo":
                demo(options)
            case "train":
                train(options, overrides)
            case "objective":
                objective(options)
            case "generate":
                return generate(options)
            case "eval":
                return evaluate(options, overrides)
            case "rewards":
                rewards(options)
            case "config":
                from cohort.config import annotated_toml

                print(annotated_toml(), end="")
    except CohortError as error:
        print(f"cohort: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads what is printed
        with contextlib.suppress(OSError, ValueError):  # at its exit Python flushes once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:  # the disk is full, a folder is gone: not a mistake in what was asked for
        print(f"cohort: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"\ncohort: interrupted{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    from cohort import __version__

    parser = argparse.ArgumentParser(prog="cohort", description="GRPO for causal language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cohort {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo_parser = commands.add_parser(
        "demo", help="train a small model on column addition: about 90 seconds on two cores", allow_abbrev=False
    )
    demo_parser.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    demo_parser.add_argument("--output-dir", default=None, help="run folder (default: the next free runs/demo-NNN)")
    train_parser = commands.add_parser(
        "train",
        help="train your model on your data and rewards",
        usage="cohort train CONFIG.toml [--resume] [--section.key value ...]",
        epilog="Every setting of 'cohort config' can be given as --section.key value; it goes before the file's.",
        allow_abbrev=False,
    )
    train_parser.add_argument("config", metavar="CONFIG.toml", help="the settings")
    train_parser.add_argument("--resume", action="store_true", help="continue the run in run.output_dir")
    objective_parser = commands.add_parser(
        "objective",
        help="list the presets, or explain one: its formula, its numbers, its coefficients",
        usage="cohort objective [NAME] [--set PART=VALUE ...]",
        epilog="Example: cohort objective dapo --set trust_region.high=1.4 beta=0.01 scale=none",
        allow_abbrev=False,
    )
    objective_parser.add_argument("name", nargs="?", metavar="NAME", help="a preset, or name@version")
    objective_parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="PART=VALUE",
        help="change parts of it, as in trust_region.high=1.4",
    )
    add_generate(commands)
    add_eval(commands)
    rewards_parser = commands.add_parser(
        "rewards",
        help="list the built-in rewards, or explain one",
        usage="cohort rewards [NAME]",
        epilog='Example of the settings: reward.functions = ["math", "soft_overlong(max_length=1024, buffer=256)"]',
        allow_abbrev=False,
    )
    rewards_parser.add_argument("name", nargs="?", metavar="NAME", help="a built-in reward")
    commands.add_parser("config", help="print every setting with its default and meaning, as a TOML file")
    return parser


def add_generate(commands: Any) -> None:
    """``cohort generate`` and its options. Their defaults stand in ``cohort.generate.Request``."""
    parser = commands.add_parser(
        "generate",
        help="sample from a model: one prompt on the terminal, or a file of them",
        usage="cohort generate MODEL [PROMPT ...] [--prompts FILE] [--output FILE.jsonl] [options]",
        epilog="The same seed gives the prompt at the same place the same completions, whatever else is asked. "
        "A prompt that begins with a dash goes after '--'.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder (also a run's checkpoint) or a hub id")
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", default=[], help="'-', or none and a pipe: all of stdin")
    switch = {"action": "store_true"}
    groups: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
        "prompts": {
            "--prompts FILE": ({}, "a prompt per line (.txt), or rows (.jsonl, .json, .csv, .parquet)"),
            "--prompt-column NAME": ({}, "the rows' prompt: a string or a list of chat messages (prompt)"),
            "--chat": (switch, "put strings through the chat template too; lists of messages always go through it"),
            "--system TEXT": ({}, "a system message before the prompt; implies --chat"),
        },
        "sampling": {
            "--n N": ({"type": int}, "completions per prompt (1)"),
            "--max-tokens N": ({"type": int}, "cut a completion after so many (256, or what the context leaves)"),
            "--min-tokens N": ({"type": int}, "no end before so many (0)"),
            "--temperature T": ({"type": float}, "divides the logits; 0: greedy (1)"),
            "--top-k K": ({"type": int}, "draw from the k likeliest tokens; 0: all (0)"),
            "--top-p P": ({"type": float}, "draw from the likeliest tokens that reach p together (1)"),
            "--min-p P": ({"type": float}, "draw from tokens at least p times as likely as the likeliest (0)"),
            "--repetition-penalty R": ({"type": float}, "divides logits of tokens that were seen (1)"),
            "--stop TEXT": ({"action": "append"}, "ends a completion, and stays in it; may be repeated"),
            "--prefix TEXT": ({}, "every completion begins with it"),
            "--regex REGEX": ({}, "the completion matches it as a whole"),
            "--json-schema SCHEMA": ({}, "the completion is JSON that it accepts: JSON text or a .json file"),
            "--seed N": ({"type": int}, "of the random numbers (0)"),
        },
        "engine": {
            "--precision P": ({"choices": ["auto", "float32", "bfloat16", "float64"]}, "what is computed in (auto)"),
            "--device NAME": ({}, "auto, cpu, cuda, cuda:1 (auto)"),
            "--batch-size N": ({"type": int}, "completions decoded at a time, at most (256)"),
            "--cache-tokens N": ({"type": int}, "tokens whose keys and values are held (what fits half the memory)"),
            "--trust-remote-code": (switch, "run code from the model's folder"),
        },
        "output": {
            "--output FILE": ({}, "a line of JSON per completion, in order; '-': to stdout"),
            "--overwrite": (switch, "write FILE even if it exists"),
            "--quiet": (switch, "nothing on stderr but errors"),
        },
    }
    add_groups(parser, groups)


def add_eval(commands: Any) -> None:
    """``cohort eval`` and its options. What is not given is as the model's run had it, or as ``cohort config`` says."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a model on data, with intervals; or compare two",
        usage="cohort eval MODEL [--data FILE] [--reward NAME ...] [--against OTHER] [options] [--section.key value]",
        epilog="Of a model that lies in a run's folder, settings that are not given are the run's. Every setting of "
        "'cohort config' can be given as --section.key value. docs/evaluation.md says what is measured, and how.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a hub id, or a run (its best/, else newest checkpoint)"
    )
    switch = {"action": "store_true"}
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    groups: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
        "what": {
            "--data FILE": (several, "rows to evaluate on; NAME=FILE for each of several sets"),
            "--rows N": ({"type": int}, "the first so many rows of each only"),
            "--reward NAME": (several, "reward functions: built-in, module:function or file.py:function"),
            "--against OTHER": ({}, "a model to compare with, on the same prompts and draws"),
            "--config RUN.toml": ({}, "settings: those of a run"),
        },
        "sampling": {
            "--n N": ({"type": int}, "completions per prompt (1)"),
            "--max-tokens N": ({"type": int}, "cut a completion after so many (256)"),
            "--temperature T": ({"type": float}, "divides the logits; 0: greedy (1)"),
            "--top-k K": ({"type": int}, "draw from the k likeliest tokens; 0: all (0)"),
            "--top-p P": ({"type": float}, "draw from the likeliest tokens that reach p together (1)"),
            "--min-p P": ({"type": float}, "draw from tokens at least p times as likely as the likeliest (0)"),
            "--seed N": ({"type": int}, "of the random numbers (0)"),
            "--precision P": ({}, "what is computed in: auto, float32, bfloat16, float64 (auto)"),
            "--device NAME": ({}, "auto, cpu, cuda, cuda:1 (auto)"),
        },
        "metrics": {
            "--k K": (several | {"type": int}, "pass@k for each of these k (1)"),
            "--maj K": (several | {"type": int}, "majority of k for each of these k; needs a reward that logs answers"),
        },
        "output": {
            "--output FILE": ({}, "a line of JSON per row: columns, completions, rewards, pass_rate"),
            "--json FILE": ({}, "all numbers as JSON"),
            "--overwrite": (switch, "write files even if they exist"),
            "--quiet": (switch, "nothing on stderr but errors"),
        },
    }
    add_groups(parser, groups)


def add_groups(parser: argparse.ArgumentParser, groups: Mapping[str, Mapping[str, tuple[dict[str, Any], str]]]) -> None:
    """Options in groups, ``"--flag METAVAR"`` with argparse's settings and a help text each."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag, (settings, text) in flags.items():
            name, _, metavar = flag.partition(" ")
            named: dict[str, Any] = {"metavar": metavar} if metavar else {}
            group.add_argument(name, help=text, **named, **settings)


def more_prompts(prompts: Sequence[str], left_over: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prompts that stand after an option, which argparse leaves over; and what is then left over still."""
    before = list(left_over)
    after = before[before.index("--") + 1 :] if "--" in before else []
    before = before[: before.index("--")] if "--" in before else before
    if unknown := [text for text in before if text.startswith("-") and text != "-" and " " not in text]:
        return list(prompts), unknown
    return [*prompts, *before, *after], []


def demo(options: argparse.Namespace) -> None:
    """``cohort demo``."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # nothing is fetched; loading takes no time
    from cohort.demo.run import run_demo

    run_demo(seed=options.seed, output_dir=options.output_dir, started=STARTED)


def train(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """``cohort train``."""
    from cohort.config import load_config

    config = load_config(options.config, overrides)  # before torch is imported: a typo is answered at once
    from cohort.trainer import trainer_from_config

    trainer = trainer_from_config(config, resume=options.resume)
    trainer.started = STARTED
    try:
        summary = trainer.train(resume=options.resume)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what_is_left(trainer)) from None
    if config.report.progress:
        print(
            f"done: {summary['updates']} updates on {summary['completions']:,} completions in "
            f"{summary['seconds']:.0f} s; run folder: {summary['output_dir']}"
        )
        if not summary["updates"]:
            from cohort.report.console import why_no_gradient

            print(f"nothing was learned; {why_no_gradient(trainer.last_metrics)}")


def objective(options: argparse.Namespace) -> None:
    """``cohort objective``."""
    from cohort.config import parse_settings
    from cohort.presets import PRESETS, preset

    changes = parse_settings(options.set)  # before torch is imported: a typo is answered at once
    if options.name is None:
        if changes:
            raise ConfigError("--set needs a preset to change: cohort objective NAME --set ...")
        width = max(len(row.identity) for row in PRESETS.values())
        for row in PRESETS.values():
            print(f"{row.identity:<{width}}  {row.summary}")
        print('\ncohort objective NAME explains one; objective.preset = "NAME" trains with it')
        return
    resolved = preset(options.name).replace(**changes)
    from cohort.objective import explain, try_user_functions

    try_user_functions(resolved)
    print(explain(resolved))


def rewards(options: argparse.Namespace) -> None:
    """``cohort rewards``."""
    from cohort.rewards.listing import explain_reward, list_rewards

    print(list_rewards() if options.name is None else explain_reward(options.name))


def generate(options: argparse.Namespace) -> int:
    """``cohort generate``; its exit code."""
    from cohort.generate import Request
    from cohort.generate import generate as generate_all

    return generate_all(Request(**{name: value for name, value in vars(options).items() if name != "command"}))


def evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """``cohort eval``; its exit code."""
    from cohort.evaluation import Request
    from cohort.evaluation import evaluate as evaluate_model

    given = {name: value for name, value in vars(options).items() if name != "command"}
    return evaluate_model(Request(**given, overrides=overrides))


def what_is_left(trainer: GRPOTrainer) -> str:
    """What an interrupted run has left behind, and how to go on."""
    if trainer.folder is None:
        return "nothing was written yet"
    path, steps = trainer.folder.path, trainer.folder.checkpoint_steps()
    if not steps:
        return f"{path} has no checkpoint yet: remove it to start over"
    return f"{path} has a checkpoint of step {steps[-1]}: go on with --resume --run.output_dir {path}"


if __name__ == "__main__":
    sys.exit(main())
