"""``cohort eval``: its request, everything checked, then one model after the other loaded and evaluated."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cohort.config import (
    GRPOConfig,
    ModelConfig,
    Source,
    apply_overrides,
    hide_secrets,
    load_config,
    setting_names,
    with_values,
)
from cohort.config.schema import marks_of
from cohort.data import load_sets
from cohort.data.render import time_now
from cohort.environments import Acting
from cohort.environments.setup import reward_runner
from cohort.errors import ConfigError, DataError, EngineError, NonFiniteError
from cohort.evaluation.endpoint import EndpointModel, check_request, check_rewards
from cohort.evaluation.evaluate import (
    NOT_PROPORTIONS,
    Evaluation,
    Evaluator,
    Success,
    check_settings,
    eval_sampling,
    prefix,
)
from cohort.evaluation.model import ChosenModel
from cohort.flags import EvalFlags
from cohort.policy import context_length, known_tokens, resolve_device
from cohort.policy.device import release_memory
from cohort.rollout import Sampler
from cohort.runs.chosen import check_not_in_run, check_nothing_missing, model_of, run_of, why_unnamed
from cohort.runs.durable import as_json, write_atomically
from cohort.runs.trust import settings_of_run
from cohort.shipped import PREFIX
from cohort.statistics import Comparison, Estimate, compare

# ----------------------------------------
# The output of ``cohort eval``: a table, a verdict in words, rows with their completions, a summary.


Evaluations = Mapping[str, Evaluation]
Comparisons = Mapping[str, Mapping[str, Comparison]]
"""By set and metric."""
SUMMARY_SETTINGS = ("num_generations_eval", "bootstrap_samples", "confidence")
"""Settings in the summary beside the sampling."""
JUDGED = ("pass@", "maj@")
"""Beginnings of the metrics that depend on what is correct."""
OUTPUT_COLUMNS = ("set", "samples", "pass_rate")


def compared(first: Evaluations, second: Evaluations, settings: GRPOConfig) -> Comparisons:
    """Compare two models prompt by prompt, metric by metric."""
    numbers = (settings.eval.confidence, settings.eval.bootstrap_samples, settings.run.seed)
    found: dict[str, dict[str, Comparison]] = {name: {} for name in first}
    for name, evaluation in first.items():
        for metric, values_P in evaluation.values.items():
            proportion = metric not in NOT_PROPORTIONS
            found[name][metric] = compare(values_P, second[name].values[metric], *numbers, proportion=proportion)
    return found


def show(console: Console, found: Sequence[Evaluations], comparisons: Comparisons, settings: GRPOConfig) -> None:
    """Print a table per set and, with two models, a verdict on the reward."""
    confidence = settings.eval.confidence
    for name, evaluation in found[0].items():
        prompts = evaluation.table.num_rows // settings.eval.num_generations_eval
        title = f"{name}: " * bool(name) + f"{prompts:,} prompts, {_share(confidence)} intervals over them"
        table = Table("metric", *("model", "against")[: len(found)], title=title, box=SIMPLE)
        if comparisons:
            table.add_column("difference")
            table.add_column("p", justify="right")
        for metric in evaluation.estimates:
            cells = [_cell(one[name].estimates[metric], metric) for one in found]
            if comparisons:
                comparison = comparisons[name][metric]
                cells += [_cell(comparison.difference, metric, signed=True), f"{comparison.p_value:.2g}"]
            judged = f" ({evaluation.success})" if metric.startswith(JUDGED) else ""
            table.add_row(metric + judged, *cells)
        for count in dict.fromkeys(count for one in found for count, number in one[name].counts.items() if number):
            table.add_row(count, *(f"{one[name].counts.get(count, 0):g}" for one in found))
        console.print(table)
        if comparisons:
            rewards = np.concatenate([one[name].values["reward"] for one in found])
            points = bool(np.all((rewards >= 0) & (rewards <= 1) | np.isnan(rewards)))
            text = verdict(comparisons[name]["reward"], confidence, points=points)
            console.print(text, highlight=False, soft_wrap=True)


def verdict(comparison: Comparison, confidence: float, *, points: bool) -> str:
    """Which model is better, in words.

    Args:
        comparison: the comparison of rewards.
        confidence: confidence level of its interval.
        points: whether rewards lie between 0 and 1, so that differences are in percentage points.

    >>> from cohort.evaluation import Estimate
    >>> print(verdict(Comparison(Estimate(0.031, 0.004, 0.058), 30, 80, 10, 0.02), 0.95, points=True))
    reward: better by 3.1 points, 95% interval 0.4 to 5.8 (30 prompts better, 80 equal, 10 worse; p = 0.02)
    >>> print(verdict(Comparison(Estimate(-0.5, -1.5, 0.5), 3, 0, 5, 0.3), 0.95, points=False))
    reward: no difference shown: -0.5, 95% interval -1.5 to 0.5 (3 prompts better, 0 equal, 5 worse; p = 0.3)
    >>> print(verdict(Comparison(Estimate(0.363, 0.0188, 0.669), 3, 20, 0, 0.25), 0.95, points=False))
    reward: no difference shown: 0.363 (3 prompts better, 20 equal, 0 worse; p = 0.25). The 95% interval, 0.0188 to
    0.669, is above 0, but the permutation test does not confirm it.
    >>> nan = math.nan
    >>> print(verdict(Comparison(Estimate(0.0, nan, nan), 0, 12, 0, 1.0), 0.95, points=True))
    reward: no difference shown: all equal on 12 prompts
    >>> print(verdict(Comparison(Estimate(nan, nan, nan), 0, 0, 0, 1.0), 0.95, points=True))
    reward: no prompt was scored by both
    """
    difference, prompts = comparison.difference, comparison.wins + comparison.ties + comparison.losses
    if not prompts:
        return "reward: no prompt was scored by both"
    if comparison.ties == prompts and not difference.has_interval:
        return f"reward: no difference shown: all equal on {prompts:,} prompts"
    scale = 100 if points else 1
    shown = comparison.shown(confidence)
    sign = -1 if shown and difference.mean < 0 else 1
    low, high = sorted(sign * scale * bound for bound in (difference.low, difference.high))
    mean = f"{sign * scale * difference.mean:.3g}" + (" points" if points else "")
    result = f"{'better' if sign > 0 else 'worse'} by {mean}" if shown else f"no difference shown: {mean}"
    counts = f"{comparison.wins} prompts better, {comparison.ties} equal, {comparison.losses} worse"
    interval = f"{_share(confidence)} interval {low:.3g} to {high:.3g}"
    interval = interval if difference.has_interval else f"the same on all {prompts:,}, no interval"
    counts = f"({counts}; p = {comparison.p_value:.2g})"
    if difference.has_interval and not shown and low * high > 0:
        return (
            f"reward: {result} {counts}. The {interval.replace(' interval', ' interval,')}, is "
            f"{'above' if low > 0 else 'below'} 0, but the permutation test does not confirm it."
        )
    return f"reward: {result}, {interval} {counts}"


def _share(confidence: float) -> str:
    """A proportion as a percentage.

    >>> _share(0.95), _share(0.999)
    ('95%', '99.9%')
    """
    return f"{100 * confidence:.6g}%"


def _cell(estimate: Estimate, metric: str, *, signed: bool = False) -> str:
    if math.isnan(estimate.mean):
        return "none"
    form = ".1f" if metric == "length" else ".3f"
    # Without a space inside the interval, a narrow terminal breaks the line before it.
    interval = f"{estimate.low:{form}},{estimate.high:{form}}" if estimate.has_interval else "none"
    return f"{estimate.mean:{'+' * signed}{form}} [{interval}]"


def write_rows(file: str, evaluator: Evaluator, found: Evaluations) -> None:
    """Write one JSON line per prompt: the row's columns, the completions as ``samples``, and ``pass_rate``, the share
    of scored completions that are correct, if something decides what is correct. A column of the row with one of these
    names is written as ``row.NAME``.

    Args:
        file: path of the output.
        evaluator: the evaluator of the sets.
        found: the evaluation of each set.
    """
    settings, lines = evaluator.settings, []
    for name, evaluation in found.items():
        unused = [key for key in ("prompt", "sampler_logps", "full_logps") if key in evaluation.table.column_names]
        table = evaluation.table.drop_columns(unused).to_pylist()
        count = settings.num_generations_eval
        for index, first in enumerate(range(0, len(table), count)):
            row, samples = evaluator.sets[name].prompt(index, uid=index).columns, table[first : first + count]
            line = {
                **{(f"row.{key}" if key in OUTPUT_COLUMNS else key): value for key, value in row.items()},
                **({"set": name} if name else {}),
                "samples": [
                    {
                        **{key: one[key] for key in ("completion", "finish_reason")},
                        "length": len(one["token_ids"]),
                        **{key: value for key, value in one.items() if key.startswith(("reward", "extra/"))},
                    }
                    for one in samples
                ],
                **({"pass_rate": pass_rate(samples, evaluation.success)} if evaluation.success else {}),
            }
            lines.append(line)
    _write_lines(file, lines)


def write_pass_rates(file: str, evaluator: Evaluator, found: Evaluations) -> None:
    """Write one JSON line per prompt: the row's columns under their names in the source, so that the same settings read
    the file, with the measured ``pass_rate`` in place of an earlier one.

    Args:
        file: path of the output.
        evaluator: the evaluator of the sets.
        found: the evaluation of each set, which knows what is correct.
    """
    count, lines = evaluator.settings.num_generations_eval, []
    for name, evaluation in found.items():
        assert evaluation.success is not None  # checked before any model is loaded
        table = evaluation.table.select([f"rewards/{evaluation.success.function}"]).to_pylist()
        for index, first in enumerate(range(0, len(table), count)):
            row, renamed = evaluator.sets[name].original(index), evaluator.sets[name].data.sources[0].config.columns
            rate = pass_rate(table[first : first + count], evaluation.success)
            lines.append({**row, renamed.get("pass_rate", "pass_rate"): rate})
    _write_lines(file, lines)


def _write_lines(file: str, rows: Iterable[Mapping[str, Any]]) -> None:
    # Lone surrogates, which UTF-8 cannot encode, are escaped as JSON escapes them.
    text = "".join(as_json(row, ensure_ascii=False, default=str) for row in rows)
    write_atomically(Path(file).expanduser(), text.encode("utf-8", "backslashreplace").decode())


def pass_rate(samples: Sequence[Mapping[str, Any]], success: Success) -> float | None:
    """Share of the scored completions that are correct; None if none was scored."""
    rewards = [reward for one in samples if (reward := one[f"rewards/{success.function}"]) is not None]
    return float(np.mean([reward >= success.threshold for reward in rewards])) if rewards else None


def write_summary(
    file: str, models: Sequence[str], found: Sequence[Evaluations], comparisons: Comparisons, settings: GRPOConfig
) -> None:
    """Write all numbers as one JSON object."""
    summary = {
        "models": list(models),
        "data": hide_secrets(settings.data.model_dump(mode="json")["eval"]),
        "rewards": hide_secrets(list(settings.reward.functions)),
        "sampling": eval_sampling(settings).describe(),
        "success": next((str(one.success) for one in found[0].values() if one.success), None),
        "settings": {name: getattr(settings.eval, name) for name in SUMMARY_SETTINGS} | {"seed": settings.run.seed},
        "metrics": [
            {key: value for name, one in each.items() for key, value in one.metrics(name).items()} for each in found
        ],
        "comparison": {
            f"{prefix(name)}{metric}": asdict(comparison) | {"shown": comparison.shown(settings.eval.confidence)}
            for name, by_metric in comparisons.items()
            for metric, comparison in by_metric.items()
        },
    }
    write_atomically(Path(file).expanduser(), as_json(summary, ensure_ascii=False, indent=2))


_FLAGS = {field.name for field in fields(EvalFlags)}
SETTINGS = {mark.flag: name for name, mark in marks_of(GRPOConfig).items() if mark.flag in _FLAGS}
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
            unused = ("data.train", "model.path", "model.lora", "server")
            config = settings_of_run(run, config, self.trust, given=setting_names(given), unused=unused)
        if config.rollout.engine == "server":  # the servers have the weights of a training
            if "rollout.engine" in setting_names(given):
                raise ConfigError("cohort eval samples in its own process: set rollout.engine to 'vllm' or 'local'")
            config = with_values(config, {"rollout.engine": "auto"})
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
        permits = {name: mark.runs == "permit" for name, mark in marks_of(ModelConfig).items()}
        flags = {name: False for name, one in permits.items() if one and f"model.{name}" not in given}
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
    if request.endpoint:
        check_request(request, settings, acts=acting is not None)
    if acting is None and request.config is None and not request.endpoint:
        check_nothing_missing(request.model, "give --config to evaluate without them")
    rewards = reward_runner(acting, settings.reward.functions, settings)
    data = load_sets(None, settings.data)
    # The metric of the run's best model does not matter here.
    check_settings(settings.eval.model_copy(update={"metric_for_best_model": None}), tuple(data), rewards.names)
    request.check_pass_rates(settings, rewards.names)
    resolve_device(settings.model.device)
    names = [request.model] if request.against is None else [request.model, request.against]
    first = (request.model, "") if request.endpoint else model_of(request.model, request.checkpoint)
    chosen = [first, *map(model_of, names[1:])]
    now = time_now()  # one for both, where the settings have none
    subjects: list[Subject] = []
    for name, (path, note) in zip(names, chosen, strict=True):
        own = request.settings_for(name, settings)
        if request.endpoint and not subjects:
            check_rewards(rewards)
            remote = EndpointModel(request.endpoint, name)
            evaluator = Evaluator.of(own, data, rewards, remote.tokenizer, None, flag="--max-tokens")
            subjects.append(Subject(name, remote, evaluator))
            continue
        model = ChosenModel.of(path, note, own.model, own.data, acting, now)
        context, tokens = context_length(model.config), known_tokens(path, model.config)
        fits = not _sets_length(settings)
        evaluator = Evaluator.of(
            own, data, rewards, model.tokenizer, context, acting, tokens, fits=fits, flag="--max-tokens"
        )
        subjects.append(Subject(name, model, evaluator))
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
        write_summary(request.json, [path for path, _ in chosen], found, comparisons, settings)
    show(Console(width=None if Console().is_terminal else 120), found, comparisons, settings)
    return 0


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated."""

    name: str
    """The name in the request."""
    model: ChosenModel | EndpointModel
    evaluator: Evaluator


def _sets_length(settings: GRPOConfig) -> bool:
    """Whether a flag or a file sets the length of completions. Otherwise they may fill the model's context."""
    of_rollout = "max_completion_length" in settings.rollout.model_fields_set
    return of_rollout or settings.eval.max_completion_length_eval is not None


def _with_one_length(subjects: Sequence[Subject], settings: GRPOConfig) -> tuple[list[Subject], GRPOConfig]:
    """Completions of both models as long as the smaller context allows, and the settings that say so."""
    if _sets_length(settings):
        return list(subjects), settings
    length = min(subject.evaluator.sampling.max_completion_length for subject in subjects)
    evaluators = [subject.evaluator for subject in subjects]
    samplings = [replace(one.sampling, max_completion_length=length) for one in evaluators]
    evaluators = [replace(one, sampling=sampling) for one, sampling in zip(evaluators, samplings, strict=True)]
    found = [replace(subject, evaluator=one) for subject, one in zip(subjects, evaluators, strict=True)]
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
            found.append(_evaluation(subject, settings, quiet=request.quiet))
            release_memory()
            for file, write in ((request.output, write_rows), (request.pass_rates, write_pass_rates)):
                if file and len(found) == 1:
                    write(file, subject.evaluator, found[0])
                    written.append(f"{file} is written")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(", ".join(written) or "nothing was written") from None
    return found


def _evaluation(subject: Subject, settings: GRPOConfig, *, quiet: bool) -> Mapping[str, Evaluation]:
    """Load a model and evaluate it."""
    model, evaluator, count = subject.model, subject.evaluator, settings.eval.num_generations_eval
    engine, prompts = model.engine(settings, evaluator.longest), sum(map(len, evaluator.sets.values()))
    if not quiet:
        print(
            f"evaluating {subject.name}" + (f": {model.note}" if model.note else ""),
            engine.describe_model(),
            f"sampling: {evaluator.describe_sampling()}",
            evaluator.describe_success(),
            f"{prompts:,} prompts x {count} = {prompts * count:,} completions, seed {settings.run.seed}",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
    columns = (TextColumn("completion"), MofNCompleteColumn(), BarColumn(bar_width=30), TimeRemainingColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=prompts * count)
        with closing(engine):
            sampler: Sampler = model.sampler(engine)  # type: ignore[arg-type]
            found = evaluator.evaluate(sampler, on_completion=lambda: bar.advance(task))
    if all(one.counts["errors"] == one.table.num_rows for one in found.values()):
        if isinstance(model, EndpointModel):
            raise EngineError(f"no completion of {subject.name} can be scored: the server cut them all, as by a filter")
        raise NonFiniteError(f"no completion of {subject.name} could be drawn: its logits are NaN or infinite")
    return found
