"""The checks that need no sampling. Every run makes them at its start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cohort.calls import LOGS
from cohort.config import GRPOConfig, Schedule
from cohort.data import unknown_tokens
from cohort.data.render import ANSWER, SENTINEL, USER, render, text_of
from cohort.doctor.cost import Memory, check_memory
from cohort.doctor.finding import Check, Finding
from cohort.doctor.prompts import check_columns, check_ends, check_lengths, check_prompts, check_text
from cohort.environments import Acting
from cohort.errors import RunFolderError
from cohort.lock import is_written
from cohort.parallel import World
from cohort.policy import context_length, has_adapters
from cohort.report.describe import describe_prompt
from cohort.rewards.contract import parameters_of
from cohort.rewards.functions import Function
from cohort.rollout import LocalEngine, Sampling
from cohort.rollout.backend import FREE_SHARE, free_bytes
from cohort.rollout.cache import round_up
from cohort.rollout.capacity import Capacity
from cohort.runs.checkpoints import COPY_SHARE
from cohort.runs.folder import RunFolder
from cohort.runs.models import own
from cohort.train import TrainerParts
from cohort.types import RESERVED_COLUMNS, Prompt

# ----------------------------------------
# Checks of settings against each other: the sampling, the optimizer.


COLD, FROZEN = 0.3, 0.02
"""Temperatures below which completions of a group are mostly, or always, the same."""
ADAPTER_RATE = 3e-6
"""Adapters need about ten times the learning rate of all weights, for which the default (1e-6) is made."""
HIGH_RATES = ((10**8, 1e-4), (10**6, 1e-3), (0, 1e-2))
"""Numbers of trained parameters, and the learning rate above which most models with at least so many are destroyed."""


def check_sampling(config: GRPOConfig) -> list[Finding]:
    """The effective sampling settings; those with which all completions of a group are the same or are cut."""
    rollout, sampling, check = config.rollout, Sampling.of(config.rollout), Check("sampling")
    if rollout.num_generations > 1:
        if rollout.top_k == 1 or rollout.temperature < FROZEN:
            what = "rollout.top_k is 1" if rollout.top_k == 1 else f"rollout.temperature is {rollout.temperature:g}"
            check.fail(
                f"{what}: all {rollout.num_generations} completions of a prompt are the same, so nothing is learned",
                "set rollout.top_k to 0 and rollout.temperature to 1",
            )
        elif rollout.temperature < COLD:
            check.warn(
                f"rollout.temperature is {rollout.temperature:g}: most completions of a prompt will be the same",
                "set rollout.temperature to between 0.7 and 1.2",
            )
    if rollout.min_completion_length == rollout.max_completion_length:
        check.warn(
            f"rollout.min_completion_length is rollout.max_completion_length ({rollout.max_completion_length}): no "
            "completion can end before it is cut",
            "lower rollout.min_completion_length",
        )
    if sampling.reweights and not rollout.replay_sampling:
        check.warn(
            "sampling is truncated or reweighted, and rollout.replay_sampling is off: the ratios of the update compare "
            "two different distributions",
            "set rollout.replay_sampling to true, or unset top_k, top_p, min_p, repetition_penalty and grammars",
        )
    return check.findings(sampling.describe())


def check_optimizer(config: GRPOConfig, updates: int, trained: int) -> list[Finding]:
    """Learning rates with which nothing, or too much, happens.

    Args:
        config: the settings.
        updates: optimizer steps of the run.
        trained: number of trained parameters.
    """
    optim, check = config.optim, Check("optimizer", {"learning_rate": config.optim.learning_rate, "trained": trained})
    if optim.learning_rate == 0:
        check.fail("optim.learning_rate is 0: the weights never change", "set optim.learning_rate; the default is 1e-6")
    elif config.model.lora.wanted and optim.learning_rate < ADAPTER_RATE:
        check.warn(
            f"optim.learning_rate is {optim.learning_rate:g}, which suits all weights; adapters need about ten times "
            "as much",
            "set optim.learning_rate to 1e-5 or more",
        )
    elif not config.model.lora.wanted and optim.learning_rate > (highest := _highest_rate(trained)):
        usual = ", and reinforcement learning of all weights uses 1e-6 to 1e-5" if highest == HIGH_RATES[0][1] else ""
        check.warn(
            f"optim.learning_rate is {optim.learning_rate:g} for {trained:,} trained parameters: more than {highest:g} "
            f"destroys most models of this size{usual}",
            "lower optim.learning_rate",
        )
    if (warmup := optim.warmup_of(updates)) >= updates:
        check.warn(
            f"optim.warmup_steps is {warmup}, and the run has {updates} updates: the learning rate reaches "
            "its peak with the last one or never",
            "lower optim.warmup_steps",
        )
    rate = f"{optim.optimizer}, learning rate {optim.learning_rate:g}"
    return check.findings(f"{rate} ({optim.lr_scheduler_type}); {trained:,} trained parameters")


def _highest_rate(trained: int) -> float:
    """The learning rate above which most models with so many trained parameters are destroyed."""
    return next(rate for count, rate in HIGH_RATES if trained >= count)


LOOKED_AT = 1000
"""Rows whose columns are looked at."""
READ = 16
"""Prompts whose text is looked at."""


class Trainer(Protocol):
    """What is needed of a trainer that has not started."""

    args: GRPOConfig
    schedule: Schedule
    world: World
    acting: Acting | None

    def make_parts(self) -> TrainerParts:
        """What the loop works on."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is about to start."""

    parts: TrainerParts
    schedule: Schedule
    config: GRPOConfig
    folder: Path
    """Where it will write; only the check ``folder`` looks at it."""

    @classmethod
    def of(cls, trainer: Trainer, folder: Path = Path()) -> Run:
        """The run of a trainer."""
        return cls(trainer.make_parts(), trainer.schedule, trainer.args, folder)

    @property
    def first_prompts(self) -> list[Prompt]:
        """The first rows as prompts."""
        return self.parts.prompts.prompts[:READ]


def columns(run: Run) -> list[Finding]:
    """See ``check_columns``."""
    prompts, functions = run.parts.prompts.prompts, run.parts.rewards.functions
    reads = reads_of(run)
    first = [[*source.rows[:LOOKED_AT]] for source in prompts.data.sources]
    read = {column for some in reads.values() for column in some}
    values = {column: [[row.get(column) for row in rows] for rows in first] for column in read}
    known = {*prompts.columns, *RESERVED_COLUMNS, *LOGS, "prompt", "turns"}
    unfilled = {
        function.name: [p.name for p in _named(function) if p.default is not p.empty and p.name not in known]
        for function in functions
    }
    return check_columns(prompts.columns, reads, unfilled, values)


def reads_of(run: Run) -> dict[str, list[str]]:
    """The columns that each reward function names; the prompt is none of them."""
    given = run.parts.prompts.prompts.columns
    return {
        function.name: [p.name for p in _named(function) if p.name in given and p.name != "prompt"]
        for function in run.parts.rewards.functions
    }


def _named(function: Function) -> list[Any]:
    bound = function.call.keywords if isinstance(function.call, partial) else {}
    kinds = [(p, p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)) for p in parameters_of(function.call)]
    return [parameter for parameter, takes_all in kinds if not takes_all and parameter.name not in bound]


def prompts(run: Run) -> list[Finding]:
    """See ``check_prompts``."""
    sets = run.parts.evaluator.sets if run.parts.evaluator else {}
    return check_prompts(run.parts.prompts.prompts.keys(), {name: one.keys() for name, one in sets.items()})


def lengths(run: Run) -> list[Finding]:
    """See ``check_lengths``."""
    given = run.parts.prompts.prompts
    context, completion = context_length(run.parts.policy.model.config), run.config.rollout.max_completion_length
    counts = {"prompts": len(given), "dropped": given.dropped, "truncated": given.truncated}
    return check_lengths(given.longest, completion, context, **counts)


def text(run: Run) -> list[Finding]:
    """See ``check_text``."""
    given, tokenizer = run.first_prompts, run.parts.tokenizer
    format_left = any(source.config.format == "auto" for source in run.parts.prompts.prompts.data.sources)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    start = tokenizer.bos_token_id
    doubled = start is not None and any(one.token_ids[:2] == (start, start) for one in given)
    spelt = [] if run.config.data.escape_control_tokens else run.parts.prompts.prompts.spelt
    lost = [] if run.parts.prompts.prompts.truncated else [m for one in given for m in _lost(one)]
    return check_text(
        describe_prompt(given[0]),
        lost,
        raw_for_chat=format_left and has_template and not given[0].is_conversation,
        doubled_start=tokenizer.bos_token if doubled else "",
        appended_end="" if given[0].is_conversation else appended_end(tokenizer),
        spelt=(len(spelt), spelt[0] if spelt else ""),
        unknown_tokens=unknown_tokens(given, tokenizer),
        tokens=sum(len(one.token_ids) for one in given),
    )


def appended_end(tokenizer: Any) -> str:
    """The special token that the tokenizer puts after text; empty if it puts none."""
    with_special, plain = (tokenizer("x", add_special_tokens=one)["input_ids"] for one in (True, False))
    return str(tokenizer.convert_ids_to_tokens(with_special[-1])) if with_special[-1] != plain[-1] else ""


def _lost(prompt: Prompt) -> list[str]:
    """The texts of a prompt, of its last message of a conversation, that its decoded tokens do not contain. Whitespace
    is not compared: some tokenizers do not keep it."""
    content = prompt.prompt if isinstance(prompt.prompt, str) else text_of(prompt.prompt[-1])
    return [] if "".join(content.split()) in "".join(prompt.text.split()) else [content]


def ends(run: Run) -> list[Finding]:
    """See ``check_ends``."""
    tokenizer, rollout = run.parts.tokenizer, run.config.rollout
    numbers = sorted(getattr(run.parts.engine, "end_token_ids", ()))
    return check_ends(
        dict(zip(numbers, tokenizer.convert_ids_to_tokens(numbers), strict=True)),
        turn_end(tokenizer) if run.first_prompts[0].is_conversation else None,
        other_ends=bool(rollout.stop or rollout.regex or rollout.json_schema),
        longest=rollout.max_completion_length,
        pad=tokenizer.pad_token,
        sizes=(len(tokenizer), run.parts.policy.vocab_size),
        textless=textless(run),
    )


def textless(run: Run) -> tuple[int, float]:
    """How many tokens of the model are of no text, and the probability that the first prompt is followed by one of
    them, estimated from a few. Weights that are divided over ranks are not asked."""
    policy, known = run.parts.policy, run.parts.tokenizer
    if run.parts.world.size > 1 or policy.vocab_size <= len(known):
        return 0, 0.0
    ids = sorted({*range(policy.vocab_size)} - {*known.get_vocab().values()})
    few = ids[:: ceil(len(ids) / READ)]
    with torch.no_grad():
        prompt, temperature = run.first_prompts[0].token_ids, run.config.rollout.temperature
        logps = policy.logps([prompt] * len(few), [[one] for one in few], temperature).logps_N
    return len(ids), float(logps.exp().mean()) * len(ids)


def turn_end(tokenizer: Any) -> tuple[int, str] | None:
    """The first special token that the chat template writes after an answer; None if there is none."""
    try:
        written = render(tokenizer, [USER, ANSWER])
    except Exception:  # the template may require other conversations
        return None
    after = written.rpartition(SENTINEL)[2]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = (number for number in tokenizer(after, add_special_tokens=False)["input_ids"] if number in special)
    return next(((number, tokenizer.convert_ids_to_tokens(number)) for number in found), None)


def sampling(run: Run) -> list[Finding]:
    """See ``check_sampling``."""
    return check_sampling(run.config)


def optimizer(run: Run) -> list[Finding]:
    """See ``check_optimizer``."""
    trained = sum(parameter.numel() for parameter in run.parts.optimizer.parameters)
    return check_optimizer(run.config, run.schedule.updates, trained)


def memory(run: Run) -> list[Finding]:
    """See ``check_memory``."""
    return check_memory(memory_of(run))


def memory_of(run: Run) -> Memory:
    """The pieces of the prediction."""
    parts, where = run.parts, run.parts.policy.device.type

    def nbytes(tensors: Iterable[Tensor]) -> int:
        return sum(own(tensor).nbytes for tensor in tensors if own(tensor).device.type == where)  # not offloaded

    states = (state for rule in parts.optimizer.rules for state in rule.state.values())
    state = nbytes(value for each in states for value in each.values() if isinstance(value, Tensor))
    free = free_bytes(parts.policy.device)
    gradients, weights = nbytes(parts.optimizer.parameters), nbytes(parts.policy.model.parameters())
    copy = state + (gradients if has_adapters(parts.policy.model) else weights)
    on_device = where == "cpu" and free is not None and copy < free * COPY_SHARE
    return Memory(
        free=free,
        gradients=gradients if run.config.rollout.lag else 0,
        passes=parts.budget.predicted_bytes or 0,
        cache=_cache_bytes(run, free),
        copy=copy if on_device else 0,
    )


def _cache_bytes(run: Run, free: int | None) -> int:
    """Keys, values and states of a full rollout, as ``rollout.budget.plan`` allocates them; 0 if others sample."""
    rollout, engine = run.config.rollout, run.parts.engine
    if not isinstance(engine, LocalEngine):
        return 0
    multiple, each = engine.backend.token_multiple, engine.backend.token_bytes
    rows = min(rollout.max_batch_size, rollout.prompts_per_step * rollout.num_generations)
    count = min(rollout.prompts_per_step, 2 * ceil(rows / rollout.num_generations))
    sizes = run.parts.prompts.prompts.longest, rollout.max_completion_length
    wanted = Capacity(rows, count, *(round_up(tokens, multiple) for tokens in sizes)).cells * each
    wanted += (rows + count) * engine.backend.row_bytes
    if each and rollout.cache_tokens:
        return min(wanted, rollout.cache_tokens * each)
    return min(wanted, int((free or wanted / FREE_SHARE) * FREE_SHARE))


def folder(run: Run) -> list[Finding]:
    """Whether the run folder is free and can be written."""
    check, path = Check("folder"), run.folder
    try:
        RunFolder(path).check_free()
    except RunFolderError as error:
        if _can_go_on(path):
            check.warn(
                f"{path} holds a run already, which 'cohort train' does not write over",
                f"go on with it: 'cohort resume {path}', or --resume auto; or choose another run.output_dir",
            )
        else:
            check.fail(str(error), "choose another run.output_dir, or go on with the run that is there")
    else:
        whole = path.expanduser().absolute()
        parent = next(one for one in (whole, *whole.parents) if one.exists())
        if not os.access(parent, os.W_OK):
            check.fail(f"{parent} cannot be written", "choose another run.output_dir")
    return check.findings(f"{path} is free")


def _can_go_on(path: Path) -> bool:
    """Whether a folder holds a run that no process writes."""
    try:
        RunFolder(path).check_is_run()
    except RunFolderError:
        return False
    return not is_written(path)


CHECKS: Mapping[str, Callable[[Run], list[Finding]]] = {
    one.__name__: one for one in (columns, prompts, lengths, text, ends, sampling, optimizer, memory)
}
"""The checks that need no sampling, by name."""


def problem_lines(trainer: Trainer) -> list[str]:
    """The problems of a run that are known without sampling, for its description; empty if all is well."""
    run, skip = Run.of(trainer), trainer.args.report.skip_checks
    found = [finding for name, check in CHECKS.items() if name not in skip for finding in check(run)]
    problems = [finding.show() for finding in found if finding.advice]
    return (
        ["warnings (cohort doctor checks more; report.skip_checks leaves checks out):", *problems] if problems else []
    )
