"""``cohort replay``: its request, everything checked, then the replay, its file and its tables."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cohort.config import GRPOConfig, hidden_settings, load_config, parse_settings
from cohort.errors import CohortError, NonFiniteError, RunFolderError
from cohort.flags import ReplayFlags
from cohort.objective import Objective, soft_overlong_punishment, try_user_functions
from cohort.policy import load_tokenizer
from cohort.presets import changes_between, preset
from cohort.replay import compare, weights
from cohort.replay.compare import Pair, Settings, coefficients_of, laid_out
from cohort.replay.stored import Known, Stored, read_step
from cohort.replay.weights import Before
from cohort.report.words import cause_words, fine_share, one_line
from cohort.runs.durable import as_json, write_atomically
from cohort.runs.reader import Run, only_settings
from cohort.runs.reading import steps_of
from cohort.runs.trust import check_code, check_files, without

# ----------------------------------------
# A replay in words and as tables on a terminal.


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


def _shown(text: str) -> str:
    return one_line(text, "\\n")


VERSION = 1
"""Of the result; see docs/replay.md."""
LARGE_GAP = 0.01
"""A difference of log-probs, in nats, that other passes over the same weights do not explain in float32."""


@dataclass(frozen=True)
class Request(ReplayFlags):
    """The arguments of ``cohort replay``; see its ``--help``."""

    run: str


def run(request: Request) -> int:
    """Replay a step, write the result and print it."""
    folder = Path(request.run).expanduser()
    place = folder / "replays"
    if folder.is_dir():  # before the work; else ``replay`` says what is wrong
        check_files(folder)
        _check_writable(place)
    result = replay(folder, request)
    text = as_json(result, indent=1)
    if request.json:
        print(text, end="", flush=True)
    target = place / f"step-{result['step']}-{result['name']}.json"
    place.mkdir(exist_ok=True)
    write_atomically(target, text)
    if request.json:
        return 0
    console = Console(width=None if Console().is_terminal else 120, soft_wrap=True, highlight=False)
    show(result, console)
    console.print(f"\n{target}", markup=False)
    return 0


def _check_writable(place: Path) -> None:
    """Check that the folder of the result can be made and written to."""
    there = next(one for one in (place, *place.absolute().parents) if one.exists())
    if not there.is_dir():
        raise RunFolderError(f"{there} is not a folder, and the result is written into {place}: remove it")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunFolderError(f"{there} cannot be written by this account, and the result is written into {place}")


def replay(folder: Path, request: Request) -> dict[str, Any]:
    """The result of a replay, in types of JSON.

    Raises:
        RunFolderError: the run, the step or what the objective needs is missing or damaged, or the settings of the run
            name code that this account has not run before.
        ConfigError: the objective is unknown, or its parts do not fit together.
    """
    config = _settings_of(folder, request)
    step = request.step if request.step is not None else _last_step(folder)
    stored = read_step(folder, step, config)
    own = of_step(config.resolved_objective, stored)
    other = _asked_for(request, own, config)
    return _Replay(folder, config, stored, own, other, settings_of(stored, own), request).result()


def _settings_of(folder: Path, request: Request) -> GRPOConfig:
    """The settings of the run."""
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} is not a run folder: it has no config.toml")
    if not (folder / "rollouts").exists() and (settings := only_settings(folder)):
        raise RunFolderError(settings)
    config = load_config(folder / "config.toml", of_run=True)
    # Of the settings of the run, only these are used: rewards, tools and data are not.
    check_code(folder, without(config, ("data", "environment", "reward", "vllm")), request.trust)
    if hidden := [name for name in hidden_settings(config) if name.startswith("objective.")]:
        raise RunFolderError(
            f"{folder / 'config.toml'} has *** in place of a secret in {', '.join(hidden)}, so the "
            "run's objective cannot be rebuilt: secrets are not written into a run folder. Let the function read its "
            "key from the environment, or replay a copy of the run folder whose config.toml names the key"
        )
    return config


def settings_of(stored: Stored, objective: Objective) -> Settings:
    """The settings with which the updates of a step worked."""
    facts = stored.facts
    return Settings(
        minibatches=facts.minibatches,
        max_completion_length=facts.max_completion_length,
        has_old_logps=not bool(stored.known.old_logps_N.isnan().all()),
        top_entropy=objective.top_entropy,
        microbatch_tokens=facts.microbatch_tokens,
        shared_prompts=facts.shared_prompts,
    )


def _last_step(folder: Path) -> int:
    if steps := Run(folder).rollouts:
        return max(steps)
    raise RunFolderError(f"{folder} has no rollouts: set report.log_completions = true for the next run")


def of_step(objective: Objective, stored: Stored) -> Objective:
    """The run's objective with the step's weight of the KL, which may follow a target."""
    return objective if objective.kl.target is None else objective.replace(beta=stored.facts.beta)


def _asked_for(request: Request, own: Objective, config: GRPOConfig) -> Objective:
    """The objective to replay: a preset or the run's own, with changes.

    Raises:
        ConfigError: it is unknown, or its parts do not fit together.
    """
    changes = parse_settings(request.changes)
    objective = (own if request.objective is None else preset(request.objective)).replace(**changes)
    if objective.aggregation == "constant" and objective.aggregation_length is None:
        objective = objective.replace(aggregation_length=config.rollout.max_completion_length)
    try_user_functions(objective, config.rollout.num_generations)
    return objective


def result_name(request: Request) -> str:
    """The name of a result in its file's name.

    >>> result_name(Request("run", objective="dr_grpo", changes=["beta=0.1", "trust_region.high=1.4"]))
    'dr_grpo+beta=0.1+trust_region.high=1.4'
    """
    text = request.name or "+".join([request.objective or "run", *request.changes])
    return re.sub(r"[^\w.+=@-]+", "-", text, flags=re.ASCII).strip(".-")[:100] or "replay"


@dataclass(slots=True)
class _Replay:
    """The steps of a replay, and what is to be said about them."""

    folder: Path
    config: GRPOConfig
    stored: Stored
    own: Objective
    other: Objective
    settings: Settings
    request: Request

    def result(self) -> dict[str, Any]:
        """Compute everything."""
        notes = list(self._notes_of_store())
        before = self._before(notes)
        stored = self._filled(before, notes)
        pair = Pair(stored, *(coefficients_of(stored, one, self.settings) for one in (self.own, self.other)))
        gap = compare.stored_gap(stored, pair.run)
        if gap:
            notes.append(
                f"the run's objective does not give the stored coefficients bit for bit: the largest difference is "
                f"{gap:.2g}. The device is another, or the objective in config.toml was changed after the step"
            )
        found = self._compared(pair, before, gap, notes)
        found["sentence"] = sentence(found)
        return found

    def _compared(self, pair: Pair, before: Before | None, gap: float | None, notes: list[str]) -> dict[str, Any]:
        logits = compare.gradients(pair)
        parameters = self._in_parameters(pair, before, notes) if before else None
        estimated_N = self.stored.known.logps_N.isnan() & (pair.replay.total_N != 0)
        if count := int(estimated_N.sum()):
            source = f"computed with the weights of {before.source}" if before else "those of the sampler"
            notes.append(f"the log-probs of {count:,} tokens with a coefficient are not stored; here they are {source}")
        named = {"run's": self.own, "other": self.other}
        if over := [name for name, objective in named.items() if any(_over_vocabulary(objective))]:
            notes.append(
                f"the {' and the '.join(over)} objective has a term over the whole vocabulary (entropy bonus or full "
                "KL), which has no coefficients: only the gradient in the parameters has it"
            )
        notes += self._notes_of_rewards()
        decode = self._decoder(before)
        return {
            "version": VERSION,
            "step": self.stored.step,
            "name": result_name(self.request),
            "time": time.time(),
            "sentence": "",
            "notes": notes,
            "objective": {
                "run": self.own.identity,
                "replay": _named(self.request),
                "changes": changes_between(self.own, self.other),
            },
            "identical": compare.is_same(pair.run, pair.replay)
            and _over_vocabulary(self.own) == _over_vocabulary(self.other),
            "stored_gap": gap,
            "weights": before.source if before else None,
            "tokens": compare.token_counts(pair) | {"estimated": count},
            "gradient": {"space": "parameters" if parameters else "logits", **_headline(parameters or logits)},
            "parameters": parameters,
            "logits": logits,
            "causes": compare.causes(pair),
            "signs": compare.signs(pair),
            "completions": compare.completions(pair),
            "groups": compare.groups(pair),
            "strongest": compare.strongest(pair, decode),
        }

    def _notes_of_store(self) -> list[str]:
        stored, notes = self.stored, []
        if missing := stored.groups_missing:
            notes.append(
                f"{len(stored.groups)} of {len(stored.groups) + missing} groups are stored (report.store_groups): "
                "denominators, baselines and scales over the batch are those of the stored groups"
            )
        updates = self.config.objective.updates_per_rollout
        if updates > 1:
            notes.append(
                f"{updates} updates used the rollout: each token's coefficient is that of the first update that used it"
            )
        return notes

    def _notes_of_rewards(self) -> Iterator[str]:
        """What one of the objectives does to the rewards themselves, before a baseline."""
        lengths_S, limit = self.stored.lengths_S, self.settings.max_completion_length
        for whose, one, other in (("the run's", self.own, self.other), ("the other", self.other, self.own)):
            if (rule := one.soft_overlong) and rule != other.soft_overlong:
                length = rule.max_length or limit
                lowered_S = soft_overlong_punishment(lengths_S, length, rule.cache_share * length) < 0
                yield (
                    f"{whose} objective has soft_overlong, which lowers the rewards of completions of more than "
                    f"{length - rule.cache_share * length:,.0f} tokens: {int(lowered_S.sum()):,} of {len(lengths_S):,} "
                    "here. Rewards in these tables are those without it"
                )
            if one.unlikeliness and one.unlikeliness != other.unlikeliness:
                yield (
                    f"{whose} objective has unlikeliness, which changes rewards by the rank of their completion's "
                    "likelihood. Rewards in these tables are those without it"
                )

    def _before(self, notes: list[str]) -> Before | None:
        """The models before the step; None, with a note, if there are none or they are not wanted."""
        if self.request.no_model:
            return None
        try:
            if not self.stored.has_prompts:
                raise weights.NoWeightsError("the prompts' token ids are not stored")
            return self._load()
        except CohortError as error:  # also a damaged checkpoint, or a base model that is gone
            notes.append(f"the gradient is compared in the space of the logits: {error}")
        return None

    def _load(self) -> Before:
        needs = any(
            one.beta and (one.kl.estimator == "full" or self._lacks_reference()) for one in (self.own, self.other)
        )
        before = weights.load_before(self.folder, self.config, self.stored.step, self.own, reference=needs)
        self.settings = replace(self.settings, device=before.context.policy.device)
        return before

    def _lacks_reference(self) -> bool:
        return bool(self.stored.known.ref_logps_N.isnan().any())

    def _filled(self, before: Before | None, notes: list[str]) -> Stored:
        """The step with numbers for what is not stored: measured with the model, or else the sampler's."""
        if before is None:
            return self.stored.filled(from_sampler(self.stored))
        found = weights.measured(before, self.stored, self.settings)
        gap = weights.gap(self.stored, found)
        if gap is not None and gap > LARGE_GAP:
            notes.append(
                f"{before.source} gives log-probs up to {gap:.2g} nats from the stored ones, so its gradients are not "
                "exactly those of the run: precision, device or a library has changed"
            )
        return self.stored.filled(found)

    def _in_parameters(self, pair: Pair, before: Before, notes: list[str]) -> dict[str, Any] | None:
        own, other = (laid_out(pair.stored, one, self.settings) for one in (self.own, self.other))
        try:
            rates = weights.learning_rates(pair.stored) if len(own.minibatches) > 1 else []
            return weights.parameter_gradients(before, own, self.other, other, rates)
        except (NonFiniteError, RunFolderError) as error:
            notes.append(f"the gradient is compared in the space of the logits: {error}")
        return None

    def _decoder(self, before: Before | None) -> Callable[[list[int]], str] | None:
        """The text of token ids; None without a tokenizer."""
        tokenizer = before.tokenizer if before else None
        checkpoints = steps_of(self.folder / "checkpoints")
        if tokenizer is None and checkpoints:
            newest = self.folder / "checkpoints" / f"step-{checkpoints[-1]}"
            try:
                tokenizer = load_tokenizer(str(newest), trust_remote_code=self.config.model.trust_remote_code)
            except CohortError:
                return None
        return None if tokenizer is None else partial(_decoded, tokenizer)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of token ids; nothing for ids that the tokenizer does not have."""
    try:
        return str(tokenizer.decode(ids))
    except (OverflowError, ValueError, TypeError, IndexError):
        return ""


def from_sampler(stored: Stored) -> Known:
    """The sampler's log-probs in the place of those of the policy before the step, whose ratio is then 1."""
    empty = [torch.zeros(0, dtype=torch.float64)]
    logps_N = torch.cat([*empty, *(torch.from_numpy(one.sampler_logps) for one in stored.completions)]).nan_to_num(0.0)
    current_N = torch.where(stored.known.logps_N.isnan(), logps_N, stored.known.logps_N)
    unknown_N = torch.full_like(logps_N, torch.nan)
    return Known(logps_N, current_N, unknown_N, -logps_N, unknown_N)


def _over_vocabulary(objective: Objective) -> tuple[Any, Any]:
    """The terms of an objective that have no coefficients."""
    return objective.entropy, objective.kl if objective.beta and objective.kl.estimator == "full" else None


def _headline(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("norm_run", "norm_replay", "ratio", "cosine")}


def _named(request: Request) -> str:
    """The objective of a replay in words."""
    changes = ", ".join(request.changes)
    if request.objective is None:
        return f"the run's objective with {changes}" if changes else "the run's own objective"
    return f"{request.objective} with {changes}" if changes else request.objective
