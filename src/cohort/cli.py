"""The command line."""

from __future__ import annotations

import time

STARTED = time.time()  # before the heavy imports, so that reported times include them

import contextlib  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import TYPE_CHECKING, Annotated, Literal  # noqa: E402

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError  # noqa: E402
from cyclopts.token import Token  # noqa: E402

from cohort import __version__  # noqa: E402
from cohort.errors import CohortError, ConfigError, RankError  # noqa: E402
from cohort.flags import EvalFlags, GenerateFlags, LaunchFlags  # noqa: E402

if TYPE_CHECKING:
    from cohort.trainer import GRPOTrainer

PIPE_CLOSED = 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
"""Exit code for a closed pipe, as of other programs."""
ANY_TEXT = Parameter(allow_leading_hyphen=True)

app = App(
    name="cohort",
    help="GRPO for causal language models.",
    version=f"cohort {__version__}",
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=False, allow_repeating=True),
    suppress_keyboard_interrupt=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0; 1 for a failure of the machine; 2 for a user error; 130 for an interrupt; 141 for a closed
        pipe.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    try:
        tokens = _launched_apart(tokens)
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        if command is generate:
            _refuse_unknown_options(tokens, bound.args[1:])
        return command(*bound.args, **bound.kwargs) or 0
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Python flushes again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (CohortError, CycloptsError, OSError) as error:
        if not _told_by_rank_0(error):
            print(f"cohort: error: {error}", file=sys.stderr)
        # A full disk, a missing folder or a rank that has died is not a user error.
        return 1 if isinstance(error, OSError | RankError) else 2
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


@app.command(sort_key=1, usage="Usage: cohort demo [tool] [--seed N] [--output-dir FOLDER]")
def demo(
    task: Literal["addition", "tool"] = "addition",
    /,
    *,
    seed: int = 0,
    output_dir: Annotated[str | None, Parameter(metavar="FOLDER")] = None,
) -> None:
    """Train a small model on column addition, or on when to call a calculator: about 90 seconds on two cores.

    Args:
        task: What it learns. [default: addition]
        seed: Seed of the run. [default: 0]
        output_dir: Run folder. [default: the next free runs/demo-NNN]
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # nothing is downloaded
    if task == "tool":
        from cohort.demo.tool import run_tool_demo as run
    else:
        from cohort.demo.run import run_demo as run

    run(seed=seed, output_dir=output_dir, started=STARTED)


@app.command(
    sort_key=2,
    usage="Usage: cohort train CONFIG.toml [--resume [auto]] [--section.key value ...]",
    help_epilogue="Every setting of 'cohort config' can be given as --section.key value. It overrides the file.",
)
def train(
    config: str,
    /,
    *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)],
    resume: Annotated[bool | Literal["auto"], Parameter(show_choices=False)] = False,
) -> None:
    """Train your model on your data and rewards.

    Args:
        config: The settings: a TOML file.
        resume: Continue the run in run.output_dir. auto: continue it if it has a checkpoint, start it if not, and do
            nothing if it is complete.
    """
    from cohort.config import load_config

    settings = load_config(config, overrides)  # before torch is imported, so that mistakes are reported at once
    from cohort.trainer import trainer_from_config

    if resume == "auto":
        from cohort.runs import resumes

        found = resumes(settings)
        if found is None:
            print(f"{settings.run.output_dir} is complete")
            return
        resume = found
    trainer = trainer_from_config(settings, resume=resume)
    trainer.started = STARTED
    try:
        summary = trainer.train(resume=resume)
    except KeyboardInterrupt as interrupt:
        interrupt.args = (_state_after_interrupt(trainer),)
        raise
    trainer.world.close()
    if settings.report.progress and trainer.world.is_main:
        print(
            f"done: {summary['updates']} updates on {summary['completions']:,} completions in "
            f"{summary['seconds']:.0f} s; run folder: {summary['output_dir']}"
        )
        if not summary["updates"]:
            from cohort.report.console import why_no_gradient

            print(f"nothing was learned; {why_no_gradient(trainer.last_metrics)}")


@app.command(
    sort_key=3,
    usage="Usage: cohort launch [--ranks N] [options] train CONFIG.toml [--section.key value ...]",
    help_epilogue="'cohort demo' can be launched too. docs/scale.md explains ranks, layouts and several machines.",
)
def launch(*command: Annotated[str, ANY_TEXT], flags: LaunchFlags | None = None) -> int:
    """Train on several processes: one per GPU, on one machine or several.

    Args:
        command: The command that every rank runs: 'train' or 'demo' with its arguments.
    """
    from cohort.launch import check_settings, job_of, settings_of
    from cohort.launch import launch as run

    # torch's warnings about a rank that has died are pages long, and the launcher says what is to be known.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    flags = flags or LaunchFlags()
    if not command or command[0] not in ("train", "demo"):
        given = f", got {command[0]!r}" if command else ""
        raise ConfigError(f"cohort launch starts 'train' or 'demo'{given}; other commands run in one process")
    inner, bound, _ = app.parse_args(list(command), exit_on_error=False, print_error=False)
    if inner is train:
        settings = settings_of(bound.args[0], bound.args[1:], flags)  # mistakes are reported once
        job = job_of(
            command,
            flags,
            output_dir=settings.run.output_dir,
            device=settings.model.device,
            layout=settings.parallel.layout,
            prompts=settings.rollout.prompts_per_step,
            resume=bound.kwargs.get("resume", False),
        )
        check_settings(settings, job.ranks * job.nodes)
    elif inner is demo:
        job = job_of(command, flags, output_dir=bound.kwargs.get("output_dir"), device="cpu")
    else:
        raise ConfigError(f"cohort launch cannot start 'cohort {' '.join(command)}'")
    return run(job, ray=flags.ray, dry_run=flags.dry_run)


@app.command(
    sort_key=4,
    usage="Usage: cohort objective [NAME] [--set PART=VALUE ...]",
    help_epilogue="Example: cohort objective dapo --set trust_region.high=1.4 beta=0.01 scale=none",
)
def objective(
    name: str | None = None,
    /,
    *assignments: Annotated[str, Parameter(show=False)],
    changes: Annotated[Sequence[str], Parameter("--set", consume_multiple=True, metavar="PART=VALUE...")] = (),
) -> None:
    """List the presets, or explain one: its formula, its numbers, its coefficients.

    Args:
        name: A preset, or NAME@VERSION.
        assignments: The same as changes.
        changes: Change parts of it, as in trust_region.high=1.4.
    """
    from cohort.config import parse_settings
    from cohort.presets import PRESETS, preset

    parts = parse_settings([*assignments, *changes])  # before torch is imported, so that mistakes are reported at once
    if name is None:
        if parts:
            raise ConfigError("--set needs a preset to change: cohort objective NAME --set ...")
        width = max(len(row.identity) for row in PRESETS.values())
        for row in PRESETS.values():
            print(f"{row.identity:<{width}}  {row.summary}")
        print('\ncohort objective NAME explains one; objective.preset = "NAME" trains with it')
        return
    resolved = preset(name).replace(**parts)
    from cohort.objective import explain, try_user_functions

    try_user_functions(resolved)
    print(explain(resolved))


@app.command(
    sort_key=5,
    usage="Usage: cohort generate MODEL [PROMPT ...] [--prompts FILE] [--output FILE.jsonl] [options]",
    help_epilogue="The seed and the position of a prompt determine its completions; other prompts do not change them. "
    "A prompt that begins with a dash goes after '--'.",
)
def generate(model: str, /, *prompt: Annotated[str, ANY_TEXT], flags: GenerateFlags | None = None) -> int:
    """Sample from a model: one prompt on the terminal, or a file of prompts.

    Args:
        model: A folder (also a run's checkpoint) or a hub id.
        prompt: Prompts; '-' is all of stdin, which is also the default in a pipe.
    """
    from cohort.generate.request import Request
    from cohort.generate.run import generate as run

    return run(Request(model=model, prompt=prompt, **vars(flags or GenerateFlags())))


@app.command(
    name="eval",
    sort_key=6,
    usage="Usage: cohort eval MODEL [--data FILE] [--reward NAME] [--against MODEL] [options] [--section.key value]",
    help_epilogue="If the model is in a run folder, the run's settings are the defaults. Every setting of "
    "'cohort config' can be given as --section.key value. docs/evaluation.md explains the metrics.",
)
def evaluate(
    model: str, /, *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)], flags: EvalFlags | None = None
) -> int:
    """Evaluate a model on data, with confidence intervals, or compare two models.

    Args:
        model: A folder, a hub id, or a run (its best/ model, else its newest checkpoint).
    """
    from cohort.evaluation import command

    return command.evaluate(command.Request(model=model, overrides=overrides, **vars(flags or EvalFlags())))


@app.command(
    sort_key=7,
    usage="Usage: cohort rewards [NAME]",
    help_epilogue='Example of the settings: reward.functions = ["math", "soft_overlong(max_length=1024, buffer=256)"]',
)
def rewards(name: str | None = None, /) -> None:
    """List the built-in rewards, or explain one.

    Args:
        name: A built-in reward.
    """
    from cohort.rewards.names import explain_reward, list_rewards

    print(list_rewards() if name is None else explain_reward(name))


@app.command(sort_key=8)
def config() -> None:
    """Print every setting with its default and meaning, as a TOML file."""
    from cohort.config import annotated_toml

    print(annotated_toml(), end="")


def _state_after_interrupt(trainer: GRPOTrainer) -> str:
    """What an interrupted run has written, and how to continue it."""
    if trainer.folder is None:
        return "nothing was written yet"
    path, steps = trainer.folder.path, trainer.folder.checkpoint_steps()
    if not steps:
        return f"{path} has no checkpoint yet: remove it to start over"
    return f"{path} has a checkpoint of step {steps[-1]}: continue with --resume --run.output_dir {path}"


if __name__ == "__main__":
    sys.exit(main())
