"""The flags of ``cohort generate``, ``eval``, ``launch`` and ``replay``: names, types, help. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from cohort.errors import ConfigError

PROMPTS, DATA, EPISODES, SAMPLING, METRICS, ENGINE, OUTPUT = (
    Parameter(group=Group.create_ordered(name))
    for name in ("Prompts", "Data and rewards", "Episodes", "Sampling", "Metrics", "Engine", "Output")
)
POSITIVE = Parameter(validator=Number(gte=1))
SEVERAL = Parameter(consume_multiple=True)
FILE = Parameter(metavar="FILE")
ANY_TEXT = Parameter(allow_leading_hyphen=True)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags of both commands. None: the flag was not given. The settings of a run are the defaults for its models."""

    n: Annotated[int | None, SAMPLING, Parameter(validator=Number(gte=1, lte=65_536))] = None
    """Completions per prompt. [default: 1]"""
    max_tokens: Annotated[int | None, SAMPLING, POSITIVE] = None
    """Maximum number of tokens of a completion. [default: 256, or what the model's context leaves]"""
    temperature: Annotated[float | None, SAMPLING] = None
    """Divides the logits; 0 is greedy. [default: 1]"""
    top_k: Annotated[int | None, SAMPLING] = None
    """Sample from the k most likely tokens only; 0: all. [default: 0]"""
    top_p: Annotated[float | None, SAMPLING] = None
    """Sample from the most likely tokens whose probabilities add up to p. [default: 1]"""
    min_p: Annotated[float | None, SAMPLING] = None
    """Sample from tokens at least p times as likely as the most likely one. [default: 0]"""
    seed: Annotated[int | None, SAMPLING, Parameter(validator=Number(gte=0, lt=2**32))] = None
    """Seed of the random numbers. [default: 0]"""
    checkpoint: Annotated[str | None, ENGINE, Parameter(metavar="STEP")] = None
    """Which model of a run: a step, best or newest. [default: best if there is one, else newest]"""
    trust: Annotated[str | None, ENGINE, Parameter(metavar="RUN")] = None
    """Run the code that the settings in this run folder name, though this account has not run it before."""
    engine: Annotated[Literal["auto", "local", "vllm"] | None, ENGINE] = None
    """What samples: local, vllm (in this process; extra "vllm"), or auto, which is vllm on CUDA where it is installed.
    [default: auto for eval, local for generate]"""
    endpoint: Annotated[str | None, ENGINE, Parameter(metavar="URL")] = None
    """An OpenAI-compatible server that samples, as in https://api.openai.com/v1; MODEL is its model's name, and the
    environment variable OPENAI_API_KEY its key."""
    precision: Annotated[Literal["auto", "float32", "bfloat16", "float64"] | None, ENGINE] = None
    """Compute precision. [default: auto]"""
    device: Annotated[str | None, ENGINE] = None
    """auto, cpu, cuda or cuda:1. [default: auto]"""
    overwrite: Annotated[bool, OUTPUT] = False
    """Overwrite existing files."""
    quiet: Annotated[bool, OUTPUT] = False
    """Print nothing to stderr except errors."""

    def check_output(self, flag: str, path: Path) -> None:
        """Check that a file can be created.

        Raises:
            ConfigError: it exists and ``--overwrite`` is not given, or its folder does not exist.
        """
        if path.is_dir():
            raise ConfigError(f"{flag} {path} is a folder: give a file")
        if path.is_file() and not self.overwrite:
            raise ConfigError(f"{flag} {path} exists: give another file, or --overwrite")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for {flag} {path.name}: create it first")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GenerateFlags(SamplingFlags):
    """Flags of ``cohort generate``."""

    prompts: Annotated[str | None, PROMPTS, FILE] = None
    """A file with one prompt per line (.txt) or with rows (.jsonl, .json, .csv, .parquet)."""
    prompt_column: Annotated[str | None, PROMPTS] = None
    """The column of the rows that holds the prompt: a string or a list of chat messages. [default: prompt]"""
    chat: Annotated[bool, PROMPTS] = False
    """Apply the chat template to strings too. It is always applied to lists of messages."""
    system: Annotated[str | None, PROMPTS, ANY_TEXT] = None
    """A system message before the prompt. Implies --chat."""
    tools: Annotated[Sequence[str], EPISODES, SEVERAL, Parameter(metavar="NAME...")] = ()
    """Tools that the model may call: calculator, python, module:function or file.py:function. Implies --chat."""
    environment: Annotated[str | None, EPISODES, Parameter(metavar="NAME")] = None
    """An environment that answers the model: module:Class or file.py:Class. Implies --chat."""
    max_turns: Annotated[int | None, EPISODES, POSITIVE] = None
    """Maximum number of turns with tools or an environment. [default: 16]"""
    min_tokens: Annotated[int | None, SAMPLING] = None
    """Minimum number of tokens of a completion. [default: 0]"""
    repetition_penalty: Annotated[float | None, SAMPLING] = None
    """Divides the logits of tokens that have occurred. [default: 1]"""
    stop: Annotated[Sequence[str], SAMPLING, ANY_TEXT] = ()
    """A string that ends a completion and remains part of it. May be repeated."""
    prefix: Annotated[str, SAMPLING, ANY_TEXT] = ""
    """Text that every completion begins with."""
    regex: Annotated[str | None, SAMPLING, ANY_TEXT] = None
    """A regular expression that the completion matches as a whole."""
    json_schema: Annotated[str | None, SAMPLING] = None
    """A JSON schema that the completion conforms to: JSON text or a .json file."""
    batch_size: Annotated[int | None, ENGINE, POSITIVE] = None
    """Maximum number of completions decoded at the same time. [default: 256]"""
    cache_tokens: Annotated[int | None, ENGINE, POSITIVE] = None
    """Maximum number of tokens in the key-value cache. [default: what fits half of the free memory]"""
    trust_remote_code: Annotated[bool, ENGINE] = False
    """Run code from the model's folder."""
    allow_pickled_weights: Annotated[bool, ENGINE] = False
    """Load pickled weights (pytorch_model.bin)."""
    output: Annotated[str | None, OUTPUT, FILE, ANY_TEXT] = None
    """Write one line of JSON per completion, in order; '-' is stdout."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EvalFlags(SamplingFlags):
    """Flags of ``cohort eval``."""

    data: Annotated[Sequence[str], DATA, SEVERAL, Parameter(metavar="FILE...")] = ()
    """Rows to evaluate on; NAME=FILE for each of several sets."""
    rows: Annotated[int | None, DATA] = None
    """Use only this many rows of each set, from the first."""
    reward: Annotated[Sequence[str], DATA, SEVERAL, Parameter(metavar="NAME...")] = ()
    """Reward functions: built-in names, module:function or file.py:function."""
    against: Annotated[str | None, DATA, Parameter(metavar="MODEL")] = None
    """A model to compare with, on the same prompts with the same random numbers."""
    config: Annotated[str | None, DATA, FILE] = None
    """A TOML file with the settings of a run."""
    k: Annotated[Sequence[int] | None, METRICS, SEVERAL] = None
    """Report pass@k for each of these k. [default: 1]"""
    success: Annotated[str | None, DATA] = None
    """The reward function that decides what is correct, for pass@k and maj@k. [default: the only one]"""
    maj: Annotated[Sequence[int] | None, METRICS, SEVERAL] = None
    """Report the majority vote of k completions for each of these k. Needs a reward that logs answers."""
    output: Annotated[str | None, OUTPUT, FILE] = None
    """Write one line of JSON per row: columns, completions, rewards, pass_rate."""
    pass_rates: Annotated[str | None, OUTPUT, FILE] = None
    """Write the rows with a column pass_rate, the share of correct completions: training data for data.filter and
    data.curriculum. Needs --n 2 or more."""
    json: Annotated[str | None, OUTPUT, FILE] = None
    """Write all numbers as JSON."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """Flags of ``cohort launch``."""

    ranks: Annotated[int | None, POSITIVE] = None
    """Processes on this machine; with --ray, in all. [default: one per GPU; 1 without GPUs]"""
    layout: Literal["replicate", "optimizer", "full"] | None = None
    """What each rank holds: sets parallel.layout."""
    nnodes: Annotated[int, POSITIVE] = 1
    """Machines. Run the same command on each of them. [default: 1]"""
    rdzv_endpoint: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """Where the machines meet: one of them, and a free port on it. Needed with --nnodes."""
    rdzv_id: str = "cohort"
    """Name of the job at the endpoint; the same on all machines. [default: cohort]"""
    max_restarts: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    """Start all ranks again this many times after a failure. Needs train --resume auto. [default: 0]"""
    ray: bool = False
    """Start the ranks in a Ray cluster: the one of RAY_ADDRESS or of this machine. Needs the extra "ray"."""
    dry_run: bool = False
    """Check the command and print what would be started."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Flags of ``cohort replay``."""

    step: int | None = None
    """The step, from 1. Default: the last stored one."""
    objective: str | None = None
    """A preset, or NAME@VERSION. Default: the run's own objective."""
    changes: Annotated[Sequence[str], SEVERAL, Parameter("--set", metavar="PART=VALUE...")] = ()
    """Change parts of it, as in trust_region.high=1.4."""
    name: str | None = None
    """Name of the result, in RUN/replays/step-N-NAME.json. Default: from the objective and its changes."""
    json: bool = False
    """Print the result as JSON."""
    no_model: bool = False
    """Do not load a checkpoint: compare the gradients in the space of the logits, from the store alone."""
    trust: Annotated[str | None, Parameter(metavar="RUN")] = None
    """Run the code that the settings in this run folder name, though this account has not run it before."""
