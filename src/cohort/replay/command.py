"""``cohort replay``: its request, everything checked, then the replay, its file and its tables."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from cohort.config import GRPOConfig, hidden_settings, load_config, parse_settings
from cohort.errors import CohortError, NonFiniteError, RunFolderError
from cohort.flags import ReplayFlags
from cohort.objective import Objective, soft_overlong_punishment, try_user_functions
from cohort.policy import load_tokenizer
from cohort.presets import changes_between, preset
from cohort.replay import compare, weights
from cohort.replay.compare import Pair, coefficients_of
from cohort.replay.stored import Known, Stored, read_step
from cohort.replay.weights import Before
from cohort.report.words import cause_words, fine_share, one_line
from cohort.runs.durable import as_json, write_atomically
from cohort.runs.reader import Run, only_settings
from cohort.runs.trust import check_code, check_files, without

# ----------------------------------------
# A replay in words and as tables on a terminal.


TEXT = 36
"""Characters of a text that are printed: its end."""
ROWS = 8
"""Rows of a table that are printed; the file has more."""
LINE_BREAK = "\\n"
"""How a line break in a text is printed."""


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


def _number(key: str, form: str = ".3g") -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "-" if row[key] is None else format(row[key], form)


def _share_of(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: fine_share(row[key])


def _end_of(key: str) -> Callable[[Mapping[str, Any]], str]:
    """The end of a text, on one line."""
    return lambda row: one_line(row[key] or "", LINE_BREAK)[-TEXT:]


Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]
GRADIENTS: Columns = {
    "space": lambda row: row["space"],
    "": lambda row: row["name"],
    "run's norm": _number("norm_run"),
    "replay's": _number("norm_replay"),
    "factor": _number("ratio"),
    "cosine": lambda row: cosine(row["cosine"]),
}
CAUSES: Columns = {
    "run": lambda row: cause_words(row["run"]),
    "replay": lambda row: cause_words(row["replay"]),
    "tokens": _number("tokens", ","),
    "share of run's": _share_of("share_run"),
    "of replay's": _share_of("share_replay"),
}
STRONGEST: Columns = {
    "row": _number("row", ""),
    "place": _number("position", ""),
    "after": _end_of("before"),
    "token": lambda row: f"#{row['token_id']}" if row["text"] is None else one_line(row["text"], LINE_BREAK),
    "change": lambda row: row["change"],
    "run's c": _number("coefficient_run", ".2e"),
    "replay's c": _number("coefficient_replay", ".2e"),
}
COMPLETIONS: Columns = {
    "row": _number("row", ""),
    "group": _number("group", ""),
    "reward": _number("reward"),
    "tokens": _number("tokens", ","),
    "share of run's": _share_of("share_run"),
    "of replay's": _share_of("share_replay"),
    "text": _end_of("text"),
}
LEFT = ("", "run", "replay", "token", "after", "text", "change", "space")
"""Columns of text."""


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a replay: the sentence first, then what stands behind it."""
    console.print(Text(result["sentence"] + "."), style="bold")
    if changes := result["objective"]["changes"]:
        console.print(Text(f"changed: {'; '.join(changes)}"))
    for note in result["notes"]:
        console.print(Text(f"note: {note}"))
    gradients = []
    for space in ("parameters", "logits"):
        if found := result[space]:
            gradients.append({"space": space, "name": "whole", **found})
            gradients += [{"space": "", "name": name, **one} for name, one in found["terms"].items()]
    console.print(_table("gradient", GRADIENTS, gradients))
    if len(result["causes"]) > 1 or not result["identical"]:
        console.print(_table("tokens by what they have in place of a gradient", CAUSES, result["causes"]))
    if not result["identical"] and result["strongest"]:
        factor = f"once the replay's c is divided by the common factor {result['tokens']['factor']:.3g}"
        console.print(_table(f"tokens that change most, {factor}", STRONGEST, result["strongest"]))
    if result["completions"]:
        console.print(_table("completions that drive the gradient", COMPLETIONS, result["completions"]))


def _table(title: str, columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="", box=None, pad_edge=False)
    for column in columns:
        justify: JustifyMethod = "left" if column in LEFT else "right"
        table.add_column(column, justify=justify, overflow="ellipsis", no_wrap=True)
    for row in rows[:ROWS]:
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    return table


VERSION = 1
"""Of the result; see docs/replay.md."""
IN_LOGITS = "the gradient is compared in the space of the logits: {}"
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
    stored = read_step(folder, request.step if request.step is not None else _last_step(folder), config)
    own = config.resolved_objective
    own = own if own.kl.target is None else own.replace(beta=stored.facts.beta)  # the step's, which follows the target
    other = _asked_for(request, own, config)
    notes = _notes_of_store(stored, config)
    before, known, parameters = None, from_sampler(stored), None
    try:
        if not request.no_model:
            before = _before(folder, config, stored, own, other)
    except CohortError as error:  # also a damaged checkpoint, or a base model that is gone
        notes.append(IN_LOGITS.format(error))
    if before:
        stored = replace(stored, device=before.context.policy.device)
        known = weights.measured(before, stored)
        if (gap := weights.gap(stored, known) or 0.0) > LARGE_GAP:
            notes.append(
                f"{before.source} gives log-probs up to {gap:.2g} nats from the stored ones, so its gradients are not "
                "exactly those of the run: precision, device or a library has changed"
            )
    filled = stored.filled(known)
    pair = Pair(filled, coefficients_of(filled, own), coefficients_of(filled, other))
    stored_gap = compare.stored_gap(filled, pair.run)
    if stored_gap:
        notes.append(
            "the run's objective does not give the stored coefficients bit for bit: the largest difference is "
            f"{stored_gap:.2g}. The device is another, or the objective in config.toml was changed after the step"
        )
    logits = compare.gradients(pair)
    try:
        parameters = weights.parameter_gradients(before, filled, other) if before else None
    except (NonFiniteError, RunFolderError) as error:
        notes.append(IN_LOGITS.format(error))
    if count := int((stored.known.logps_N.isnan() & (pair.replay.total_N != 0)).sum()):
        source = f"computed with the weights of {before.source}" if before else "those of the sampler"
        notes.append(f"the log-probs of {count:,} tokens with a coefficient are not stored; here they are {source}")
    if over := [name for name, one in (("run's", own), ("other", other)) if any(_over_vocabulary(one))]:
        notes.append(
            f"the {' and the '.join(over)} objective has a term over the whole vocabulary (entropy bonus or full KL), "
            "which has no coefficients: only the gradient in the parameters has it"
        )
    notes += _notes_of_rewards(stored, own, other)
    decode, headline = _decoder(folder, config, before), parameters or logits
    result = {
        "version": VERSION,
        "step": stored.step,
        "name": result_name(request),
        "time": time.time(),
        "sentence": "",
        "notes": notes,
        "objective": {
            "run": own.identity,
            "replay": _named(request),
            "changes": changes_between(own, other),
        },
        "identical": compare.is_same(pair.run, pair.replay) and _over_vocabulary(own) == _over_vocabulary(other),
        "stored_gap": stored_gap,
        "weights": before.source if before else None,
        "tokens": compare.token_counts(pair) | {"estimated": count},
        "gradient": {
            "space": "parameters" if parameters else "logits",
            **{name: headline[name] for name in ("norm_run", "norm_replay", "ratio", "cosine")},
        },
        "parameters": parameters,
        "logits": logits,
        "causes": compare.causes(pair),
        "signs": compare.signs(pair),
        "completions": compare.completions(pair),
        "groups": compare.groups(pair),
        "strongest": compare.strongest(pair, decode),
    }
    return result | {"sentence": sentence(result)}


def _settings_of(folder: Path, request: Request) -> GRPOConfig:
    """The settings of the run."""
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} is not a run folder: it has no config.toml")
    if not (folder / "rollouts").exists() and (settings := only_settings(folder)):
        raise RunFolderError(settings)
    config = load_config(folder / "config.toml", of_run=True)
    # Of the settings of the run, only these are used: rewards, tools and data are not.
    check_code(folder, without(config, ("data", "environment", "reward", "vllm", "server")), request.trust)
    if hidden := [name for name in hidden_settings(config) if name.startswith("objective.")]:
        raise RunFolderError(
            f"{folder / 'config.toml'} has *** in place of a secret in {', '.join(hidden)}, so the "
            "run's objective cannot be rebuilt: secrets are not written into a run folder. Let the function read its "
            "key from the environment, or replay a copy of the run folder whose config.toml names the key"
        )
    return config


def _last_step(folder: Path) -> int:
    if steps := Run(folder).rollouts:
        return max(steps)
    raise RunFolderError(f"{folder} has no rollouts: set report.log_completions = true for the next run")


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


def _notes_of_store(stored: Stored, config: GRPOConfig) -> list[str]:
    notes = []
    if missing := stored.groups_missing:
        notes.append(
            f"{len(stored.groups)} of {len(stored.groups) + missing} groups are stored (report.store_groups): "
            "denominators, baselines and scales over the batch are those of the stored groups"
        )
    if (updates := config.objective.updates_per_rollout) > 1:
        notes.append(
            f"{updates} updates used the rollout: each token's coefficient is that of the first update that used it"
        )
    return notes


def _notes_of_rewards(stored: Stored, own: Objective, replayed: Objective) -> Iterator[str]:
    """What one of the objectives does to the rewards themselves, before a baseline."""
    lengths_S, limit = stored.lengths_S, stored.facts.max_completion_length
    for whose, one, other in (("the run's", own, replayed), ("the other", replayed, own)):
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


def _before(folder: Path, config: GRPOConfig, stored: Stored, own: Objective, other: Objective) -> Before:
    """The models before the step, with a reference if an objective needs what only it gives."""
    if not all(group.prompt.token_ids for group in stored.groups):
        raise weights.NoWeightsError("the prompts' token ids are not stored")
    lacks = bool(stored.known.ref_logps_N.isnan().any())
    needs = any(one.beta and (one.kl.estimator == "full" or lacks) for one in (own, other))
    return weights.load_before(folder, config, stored, own, reference=needs)


def _decoder(folder: Path, config: GRPOConfig, before: Before | None) -> Callable[[list[int]], str] | None:
    """The text of token ids, empty for ids that the tokenizer does not have; None without a tokenizer."""
    steps = list(Run(folder).checkpoints)
    if before is None and not steps:
        return None
    try:
        newest = str(folder / "checkpoints" / f"step-{max(steps, default=0)}")
        remote = config.model.trust_remote_code
        tokenizer = before.tokenizer if before else load_tokenizer(newest, trust_remote_code=remote)
    except CohortError:
        return None

    def decode(ids: list[int]) -> str:
        try:
            return str(tokenizer.decode(ids))
        except (OverflowError, ValueError, TypeError, IndexError):
            return ""

    return decode


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


def _named(request: Request) -> str:
    """The objective of a replay in words."""
    changes = ", ".join(request.changes)
    if request.objective is None:
        return f"the run's objective with {changes}" if changes else "the run's own objective"
    return f"{request.objective} with {changes}" if changes else request.objective
