"""``cohort eval``: its request, everything checked, then one model after the other loaded and evaluated."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cohort.config import GRPOConfig, LoraConfig, Source, apply_overrides, load_config, setting_names
from cohort.data import Data, load_sets
from cohort.data.chat import time_now, use_template
from cohort.environments import Acting
from cohort.environments.setup import reward_runner
from cohort.errors import ConfigError, DataError, NonFiniteError
from cohort.evaluation.evaluate import Evaluation, Evaluator, Success, check_settings
from cohort.evaluation.show import compared, show, write_pass_rates, write_rows, write_summary
from cohort.flags import EvalFlags
from cohort.policy import (
    context_length,
    end_token_ids,
    known_tokens,
    load_policy,
    load_tokenizer,
    read_config,
    resolve_device,
)
from cohort.rewards import RewardRunner
from cohort.rollout import LocalEngine, Sampler, local_engine
from cohort.runs.chosen import check_not_in_run, check_nothing_missing, model_of, run_of, why_unnamed
from cohort.runs.settings import settings_of_run
from cohort.runs.trust import MODEL_CODE
from cohort.shipped import PREFIX

SETTINGS = {
    "data": "data.eval",
    "rows": "data.eval_rows",
    "reward": "reward.functions",
    "n": "eval.num_generations_eval",
    "max_tokens": "eval.max_completion_length_eval",
    "temperature": "eval.temperature_eval",
    "top_k": "eval.top_k_eval",
    "top_p": "eval.top_p_eval",
    "min_p": "eval.min_p_eval",
    "k": "eval.pass_at_k",
    "success": "eval.success",
    "maj": "eval.maj_at_k",
    "seed": "run.seed",
    "precision": "model.precision",
    "device": "model.device",
}
"""Flags that are short for a setting."""


@dataclass(frozen=True)
class Request(EvalFlags):
    """The arguments of ``cohort eval``; see its ``--help``."""

    model: str
    overrides: Sequence[str] = ()
    """``--section.key value`` pairs."""

    def settings(self) -> GRPOConfig:
        """The settings of ``--config``, of the run that the model comes from, or the defaults; flags override them.

        Raises:
            ConfigError: a setting is wrong, or there is no data or no reward.
        """
        check_not_in_run(Path(self.model).expanduser())
        source, given = self._source(), [*self.overrides, *self._flags()]
        if self.reward:
            # The run's weights and its choice of what is correct belong to its own functions.
            given = ["--reward.weights", "none", "--eval.success", "none", *given]
        run = Path(source).parent if source and self.config is None else None
        config = load_config(source, given, of_run=run is not None) if source else apply_overrides({}, given)
        if run:
            unused = ("data.train", "vllm.")
            config = settings_of_run(run, config, self.trust, given=setting_names(given), unused=unused)
        if not config.data.eval:
            raise ConfigError(f"no data to evaluate on: give --data FILE{self._why(run, 'eval_dataset')}")
        if not config.reward.functions and not config.environment.factory:
            raise ConfigError(f"no reward function: give --reward NAME{self._why(run, 'reward_funcs')}")
        return config

    def settings_for(self, name: str, settings: GRPOConfig) -> GRPOConfig:
        """The settings for one of the models. What a run's settings allow its models, another model may not do."""
        runs = [run_of(Path(model).expanduser().resolve()) for model in (name, self.model)]
        if self._source() == self.config or runs[0] == runs[1]:
            return settings
        given = setting_names(self.overrides)
        flags = {flag.removeprefix("model."): False for flag in MODEL_CODE if flag not in given}
        return settings.model_copy(update={"model": settings.model.model_copy(update=flags)})

    def _why(self, run: Path | None, argument: str) -> str:
        """Why a setting is missing, if that is not obvious."""
        if run or self.config:
            return f" ({why_unnamed(run, argument) if run else f'{self.config} names none'})"
        path = Path(self.model).expanduser()
        if self.model.startswith(PREFIX):
            return ""
        if not path.exists():
            return f" ({self.model} is not a folder here, so it is taken for a hub id, which has no run)"
        is_model = path.is_file() or any((path / name).exists() for name in ("config.json", "adapter_config.json"))
        return "" if is_model else f" ({self.model} holds neither a model nor a run)"

    def _source(self) -> str | None:
        """The file of settings: ``--config``, or that of the run that the model comes from."""
        run = run_of(Path(self.model).expanduser())
        return str(run / "config.toml") if run and self.config is None else self.config

    def _flags(self) -> list[str]:
        values = {**vars(self), "data": _sets(self.data), "reward": self.reward or None}
        given = {setting: values[name] for name, setting in SETTINGS.items() if values[name] is not None}
        texts = {setting: value if isinstance(value, str) else json.dumps(value) for setting, value in given.items()}
        return [f"--{setting}={text}" for setting, text in texts.items()]

    def check_files(self, settings: GRPOConfig) -> None:
        """Check the output files before anything expensive; they are written at the end.

        Args:
            settings: the settings, whose data and reward files must not be overwritten.

        Raises:
            ConfigError: a file exists, is an input, or cannot be written.
        """
        rewards = [f"{name.partition('.py:')[0]}.py" for name in settings.reward.functions if ".py:" in name]
        read = [*_paths(settings.data.eval), *rewards, *filter(None, [self._source()])]
        given = {"--output": self.output, "--pass-rates": self.pass_rates, "--json": self.json}
        files = {flag: Path(file).expanduser() for flag, file in given.items() if file is not None}
        for flag, path in files.items():
            self.check_output(flag, path)
            if any(_is_read(path, one) for one in read):
                raise ConfigError(f"{flag} {path} is an input file of rows, rewards or settings: choose another")
        if len({path.resolve() for path in files.values()}) < len(files):
            raise ConfigError(f"{' and '.join(files)}: two of them are the same file")

    def check_pass_rates(self, settings: GRPOConfig, functions: Sequence[str]) -> None:
        """Check that ``--pass-rates`` can be measured.

        Raises:
            ConfigError: one completion per prompt is sampled, or nothing decides what is correct.
        """
        if self.pass_rates is None:
            return
        if settings.eval.num_generations_eval < 2:
            raise ConfigError("--pass-rates: with one completion per prompt, a pass rate is 0 or 1: give --n 4 or more")
        if Success.of(settings.eval, functions) is None:
            raise ConfigError(
                f"--pass-rates: several functions may decide what is correct: give --success, one of "
                f"{', '.join(functions)}"
            )


def _paths(given: Any) -> list[str]:
    """The paths in ``data.eval``: a path, a source, several of them, or named sets of them."""
    if not isinstance(given, Mapping | tuple):
        return [str(given.path if isinstance(given, Source) else given)]
    return [path for item in (given.values() if isinstance(given, Mapping) else given) for path in _paths(item)]


def _is_read(path: Path, name: str) -> bool:
    """Whether an existing file is one that a name stands for: a file, a file in a folder, or a match of a pattern."""
    target, name = path.resolve(), str(Path(name).expanduser())
    read = {Path(found).resolve() for found in [name, *glob(name, recursive=True)]}  # noqa: PTH207 - may be absolute
    return path.exists() and any(target == one or (one.is_dir() and target.is_relative_to(one)) for one in read)


def _sets(given: Sequence[str]) -> str | None:
    """``--data`` as a value of ``data.eval``.

    >>> _sets(["a.jsonl"]), _sets(["x=a.jsonl", "y=b.jsonl"])
    ('a.jsonl', '{"x" = "a.jsonl", "y" = "b.jsonl"}')
    """
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    pairs = [one.partition("=") for one in given]
    if unnamed := [file for file, named, _ in pairs if not named]:
        raise ConfigError(f"--data with several files needs a name for each, NAME=FILE: {unnamed[0]} has none")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError("--data gives two files the same name")
    return "{" + ", ".join(f"{json.dumps(name)} = {json.dumps(file)}" for name, _, file in pairs) + "}"


def evaluate(request: Request) -> int:
    """Evaluate a model and print the result. Everything but the weights is checked first, the cheapest before all.

    Returns:
        The exit code, 0.

    Raises:
        CohortError: the request cannot be fulfilled.
        KeyboardInterrupt: after Ctrl-C; the message names the files that were written.
    """
    settings = request.settings()
    request.check_files(settings)
    acting = Acting.of(settings.environment, group_size=settings.eval.num_generations_eval)
    if acting is None and request.config is None:
        check_nothing_missing(request.model, "give --config to evaluate without them")
    rewards = reward_runner(acting, settings.reward.functions, settings)
    data = load_sets(None, settings.data)
    # The metric of the run's best model does not matter here.
    check_settings(settings.eval.model_copy(update={"metric_for_best_model": None}), tuple(data), rewards.names)
    request.check_pass_rates(settings, rewards.names)
    resolve_device(settings.model.device)
    names = [request.model] if request.against is None else [request.model, request.against]
    chosen = [model_of(request.model, request.checkpoint), *map(model_of, names[1:])]
    now = time_now()  # one for both, where the settings have none
    subjects = [
        _subject(name, *model, request.settings_for(name, settings), now, rewards, data, acting)
        for name, model in zip(names, chosen, strict=True)
    ]
    _check_same_prompts(subjects)
    subjects, settings = _with_one_length(subjects, settings)
    try:
        found = _evaluations(request, settings, subjects)
    finally:
        rewards.close()
        if acting:
            acting.close()
    comparisons = compared(found[0], found[1], settings) if len(found) > 1 else {}
    if request.json:
        write_summary(request.json, [subject.path for subject in subjects], found, comparisons, settings)
    show(Console(width=None if Console().is_terminal else 120), found, comparisons, settings)
    return 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model without its weights."""

    name: str
    """The name in the request."""
    path: str
    note: str
    """Which model of a run was chosen; empty if there was no choice."""
    tokenizer: Any
    config: Any
    """Configuration of the model."""
    evaluator: Evaluator
    sampler: Callable[[LocalEngine], Sampler] | None
    """What samples episodes with an engine. None: the engine samples."""


def _subject(
    name: str,
    path: str,
    note: str,
    settings: GRPOConfig,
    now: str,
    rewards: RewardRunner,
    data: Mapping[str, Data],
    acting: Acting | None,
) -> Subject:
    tokenizer = load_tokenizer(path, trust_remote_code=settings.model.trust_remote_code)
    use_template(tokenizer, settings.data.chat_template, settings.data.template_time, now)
    config = read_config(path, trust_remote_code=settings.model.trust_remote_code, whole=True)
    sampler = None
    if acting:
        ends = end_token_ids(path, tokenizer, trust_remote_code=settings.model.trust_remote_code)
        variables = settings.data.chat_template_kwargs
        sampler = partial(acting.sampler, turn_format=acting.turn_format(tokenizer, ends, variables))
    context, fits = context_length(config), not _sets_length(settings)
    tokens = known_tokens(path, config)
    evaluator = Evaluator.of(
        settings, data, rewards, tokenizer, context, acting, tokens, fits=fits, flag="--max-tokens"
    )
    return Subject(name, path, note, tokenizer, config.get_text_config(), evaluator, sampler)


def _sets_length(settings: GRPOConfig) -> bool:
    """Whether a flag or a file sets the length of completions. Otherwise they may fill the model's context."""
    of_rollout = "max_completion_length" in settings.rollout.model_fields_set
    return of_rollout or settings.eval.max_completion_length_eval is not None


def _with_one_length(subjects: Sequence[Subject], settings: GRPOConfig) -> tuple[list[Subject], GRPOConfig]:
    """Completions of both models as long as the smaller context allows, and the settings that say so."""
    if _sets_length(settings):
        return list(subjects), settings
    length = min(subject.evaluator.sampling.max_completion_length for subject in subjects)
    found = []
    for subject in subjects:
        sampling = replace(subject.evaluator.sampling, max_completion_length=length)
        found.append(replace(subject, evaluator=replace(subject.evaluator, sampling=sampling)))
    eval_settings = settings.eval.model_copy(update={"max_completion_length_eval": length})
    return found, settings.model_copy(update={"eval": eval_settings})


def _check_same_prompts(subjects: Sequence[Subject]) -> None:
    """Models are compared prompt by prompt, so both must accept the same prompts."""
    first, *others = (subject.evaluator.sets for subject in subjects)
    for other in others:
        for name, prompts in first.items():
            if not np.array_equal(prompts.row_indices, other[name].row_indices):
                raise DataError(
                    f"{prompts.name}: data.overlong_prompts drops {prompts.dropped} prompts of one model and "
                    f"{other[name].dropped} of the other, so they would be compared on different prompts: set "
                    "data.overlong_prompts to 'error' or 'truncate_left', or choose shorter prompts"
                )


def _evaluations(request: Request, settings: GRPOConfig, subjects: Sequence[Subject]) -> list[Mapping[str, Evaluation]]:
    """Evaluate the models, each freed before the next is loaded, and write the completions of the first."""
    found: list[Mapping[str, Evaluation]] = []
    written: list[str] = []
    try:
        for subject in subjects:
            found.append(_evaluation(subject, request.settings_for(subject.name, settings), quiet=request.quiet))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            for file, write in ((request.output, write_rows), (request.pass_rates, write_pass_rates)):
                if file and len(found) == 1:
                    write(file, subject.evaluator, found[0])
                    written.append(f"{file} is written")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(", ".join(written) or "nothing was written") from None
    return found


def _evaluation(subject: Subject, settings: GRPOConfig, *, quiet: bool) -> Mapping[str, Evaluation]:
    """Load a model and evaluate it."""
    plain = {"lora": LoraConfig(), "quantization": "none", "router_aux_loss_coef": 0.0}
    policy = load_policy(subject.path, settings.model.model_copy(update=plain), subject.config)
    engine = local_engine(policy, subject.tokenizer, settings.rollout)
    count = settings.eval.num_generations_eval
    prompts = sum(map(len, subject.evaluator.sets.values()))
    if not quiet:
        print(
            f"evaluating {subject.name}" + (f": {subject.note}" if subject.note else ""),
            engine.describe_model(),
            f"sampling: {subject.evaluator.describe_sampling()}",
            subject.evaluator.describe_success(),
            f"{prompts:,} prompts x {count} = {prompts * count:,} completions, seed {settings.run.seed}",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
    columns = (TextColumn("completion"), MofNCompleteColumn(), BarColumn(bar_width=30), TimeRemainingColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=prompts * count)
        sampler = subject.sampler(engine) if subject.sampler else engine
        found = subject.evaluator.evaluate(sampler, on_completion=lambda: bar.advance(task))
    if all(one.counts["errors"] == one.table.num_rows for one in found.values()):
        raise NonFiniteError(f"no completion of {subject.name} could be drawn: its logits are NaN or infinite")
    return found
