"""The checks. Those that need no sampling are of a run that is about to start, and every run makes them; those of a
rollout, at the end, are of plain numbers.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor

from cohort.calls import LOGS
from cohort.config import GRPOConfig, Schedule
from cohort.data import PromptSet, unknown_tokens
from cohort.data.render import ANSWER, SENTINEL, USER, render, text_of
from cohort.doctor.answers import ANSWER_COLUMNS
from cohort.doctor.finding import Check, Finding, Status, size
from cohort.environments import Acting
from cohort.errors import RunFolderError
from cohort.lock import is_written
from cohort.parallel import World
from cohort.policy import context_length, has_adapters
from cohort.policy.policy import own
from cohort.report.describe import describe_prompt
from cohort.report.words import duration
from cohort.rewards.contract import parameters_of
from cohort.rewards.functions import Function
from cohort.rollout import LocalEngine, Sampling
from cohort.rollout.local.backend import FREE_SHARE, free_bytes
from cohort.rollout.local.capacity import Capacity, round_up
from cohort.runs.checkpoints import COPY_SHARE
from cohort.runs.folder import RunFolder
from cohort.train import TrainerParts
from cohort.types import RESERVED_COLUMNS, Prompt

COLD, FROZEN = 0.3, 0.02
"""Temperatures below which completions of a group are mostly, or always, the same."""
ADAPTER_RATE = 3e-6
"""Adapters need about ten times the learning rate of all weights, for which the default (1e-6) is made."""
HIGH_RATES = ((10**8, 1e-4), (10**6, 1e-3), (0, 1e-2))
"""Numbers of trained parameters, and the learning rate above which most models with at least so many are destroyed."""
REPEATED, DROPPED, EMPTY = 0.1, 0.2, 0.01
"""Shares above which repeated prompts, dropped rows and empty cells are rarely intended."""
UNKNOWN = 0.01
"""Share of the prompts' tokens that the tokenizer does not know."""
TEXTLESS = 1e-3
"""Share of drawn tokens that are of no text. A trained model draws none."""
NEAR_MEMORY = 0.8
"""The share of the free memory that is close to all of it: predictions were off by up to 15%."""
MAX_SHOWN = 60
LOOKED_AT = 1000
"""Rows whose columns are looked at."""
READ = 16
"""Prompts whose text is looked at."""
EXPECTED = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.05}
"""Mean |difference of log-probs| in nats that rounding explains, by compute precision."""
MOST_DEAD, MANY_DEAD = 0.8, 0.6
"""Shares of groups with equal rewards above which almost nothing, or little, is learned."""
MANY_CUT, ALL_CUT = 0.25, 0.95
FEW_DISTINCT = 2.0
"""Different completions of a group, on average, below which sampling hardly explores."""
SAME = 1e-9
"""Rewards closer than this are equal."""
SLOW_REWARDS = 0.5
LONG_RUN = 7 * 86400


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
    def prompts(self) -> PromptSet:
        """The training data."""
        return self.parts.prompts.prompts

    @property
    def first_prompts(self) -> list[Prompt]:
        """The first rows as prompts."""
        return self.prompts[:READ]


def columns(run: Run) -> list[Finding]:
    """Which columns the reward functions read, and whether they hold something."""
    check, given, reads = Check("columns"), run.prompts.columns, reads_of(run)
    filled = {*given, *RESERVED_COLUMNS, *LOGS, "prompt", "turns"}
    for function in run.parts.rewards.functions:
        name, others = function.name, [column for column in given if column not in reads[function.name]]
        for parameter in (p.name for p in _named(function) if p.default is not p.empty and p.name not in filled):
            if close := difflib.get_close_matches(parameter, others, 1, 0.75):
                check.warn(
                    f"reward function {name} has a parameter {parameter!r}, and the data has {close[0]!r}: the "
                    "function always gets its default",
                    f'rename one of them, as in data.columns = {{ {parameter} = "{close[0]}" }}',
                )
    first = [[*source.rows[:LOOKED_AT]] for source in run.prompts.data.sources]
    for column in dict.fromkeys(column for some in reads.values() for column in some):
        names = ", ".join(name for name, some in reads.items() if column in some)
        sources = [[row.get(column) for row in rows] for rows in first if rows]
        # The column is not for a source in which it is always empty, unless it is empty in all of them.
        sources = [cells for cells in sources if not all(map(_is_empty, cells))] or sources
        partly = [cells for cells in sources if sum(map(_is_empty, cells)) > EMPTY * len(cells)]
        cells = [cell for source in sources for cell in source]
        if partly:
            empty = sum(_is_empty(cell) for cells in partly for cell in cells)
            check.warn(
                f"column {column!r}, which {names} reads, is empty in {empty:,} of {sum(map(len, partly)):,} rows",
                f"leave such rows out with data.filter, or let {names} return None for them",
            )
        elif column in ANSWER_COLUMNS and len(cells) > 1 and isinstance(cells[0], str) and len({*map(str, cells)}) == 1:
            check.warn(
                f"column {column!r}, which {names} reads, is {cells[0][:MAX_SHOWN]!r} in each of {len(cells):,} rows",
                "look at the data; data.columns renames columns",
            )
    words = [f"{name} reads {', '.join(some) or 'no column'}" for name, some in reads.items()]
    return check.findings(f"the data has {', '.join(given)}; {'; '.join(words)}")


def _is_empty(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def reads_of(run: Run) -> dict[str, list[str]]:
    """The columns that each reward function names; the prompt is none of them."""
    return {
        function.name: [p.name for p in _named(function) if p.name in run.prompts.columns and p.name != "prompt"]
        for function in run.parts.rewards.functions
    }


def _named(function: Function) -> list[Any]:
    bound = function.call.keywords if isinstance(function.call, partial) else {}
    takes_all = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for p in parameters_of(function.call) if p.kind not in takes_all and p.name not in bound]


def prompts(run: Run) -> list[Finding]:
    """Repeated prompts, and evaluation prompts that are also trained on."""
    keys = run.prompts.keys()
    known = set(keys)
    repeated = len(keys) - len(known)
    check = Check("prompts", {"prompts": len(keys), "repeated": repeated})
    if repeated > REPEATED * len(keys):
        check.warn(
            f"{repeated:,} of {len(keys):,} prompts are repeated: as token ids, only {len(known):,} differ",
            "if that is not intended, look at data.prompt_column or data.prompt_template, or remove the repetitions",
        )
    for name, others in (run.parts.evaluator.sets if run.parts.evaluator else {}).items():
        if both := sum(key in known for key in others.keys()):  # noqa: SIM118 - no mapping
            check.warn(
                f"{both:,} of the {len(others):,} evaluation prompts{f' of {name}' if name else ''} are also training "
                "prompts: the evaluation measures memory too",
                "remove them from the training data with data.filter or data.select",
            )
    return check.findings(f"{len(keys):,} prompts, {len(known):,} of them different")


def lengths(run: Run) -> list[Finding]:
    """The longest prompt against the model's context, and what ``data.overlong_prompts`` did."""
    given, completion = run.prompts, run.config.rollout.max_completion_length
    context, count, dropped = context_length(run.parts.policy.model.config), len(given), given.dropped
    check = Check("lengths", {"longest_prompt": given.longest, "completion": completion, "context": context})
    if given.truncated:
        check.warn(
            f"{given.truncated:,} of {count:,} prompts are cut to their last tokens, so the model does not see how "
            "they begin",
            "raise data.max_prompt_length, or set data.overlong_prompts to 'drop'",
        )
    if dropped > DROPPED * (count + dropped):
        check.warn(
            f"{dropped:,} of {count + dropped:,} prompts are dropped because they are too long",
            "raise data.max_prompt_length, or lower rollout.max_completion_length",
        )
    whole = "without a limit" if context is None else f"of {context:,}"
    return check.findings(
        f"the longest prompt has {given.longest:,} tokens; with a completion of {completion:,}: "
        f"{given.longest + completion:,}, in a context {whole}"
    )


def text(run: Run) -> list[Finding]:
    """What the model reads. The first prompt is shown beside every problem."""
    given, tokenizer, whole = run.first_prompts, run.parts.tokenizer, run.prompts
    format_left = any(source.config.format == "auto" for source in whole.data.sources)
    start, is_chat = tokenizer.bos_token_id, given[0].is_conversation
    spelt = [] if run.config.data.escape_control_tokens else whole.spelt
    lost = [] if whole.truncated else [message for one in given if (message := _lost(one)) is not None]
    unknown, tokens = unknown_tokens(given, tokenizer), sum(len(one.token_ids) for one in given)
    check = Check("text", {"unknown_tokens": unknown, "lost": len(lost), "spelt": len(spelt)})
    if format_left and getattr(tokenizer, "chat_template", None) and not is_chat:
        check.warn(
            "the prompts are plain text, and the model has a chat template: it reads them without the turns that it "
            "was trained on",
            "set data.format to 'chat', or to 'text' if plain text is intended",
        )
    if start is not None and any(one.token_ids[:2] == (start, start) for one in given):
        check.warn(
            f"prompts begin with {tokenizer.bos_token!r} twice: the text contains it, and the tokenizer adds it",
            f"remove {tokenizer.bos_token!r} from the prompts",
        )
    if not is_chat and (end := appended_end(tokenizer, str(given[0].prompt))):
        check.warn(
            f"the tokenizer puts {end!r} after every prompt: the model completes a text that has ended",
            "set add_eos_token to false in tokenizer_config.json, or data.format to 'chat'",
        )
    if spelt:
        rows = "row spells" if len(spelt) == 1 else "rows spell"
        check.warn(
            f"messages of {len(spelt):,} {rows} control tokens of the chat template ({spelt[0]}): their text ends its "
            "turn and may go on as another speaker",
            "set data.escape_control_tokens to true, which reads them as plain text; or clean the data",
        )
    if lost:
        check.warn(
            f"a message is not in its decoded prompt as it was written: {lost[0][:MAX_SHOWN]!r}. The chat template or "
            "the tokenizer changes it",
            "compare it with the first prompt below; set data.chat_template, or clean the data",
        )
    if unknown > UNKNOWN * tokens:
        check.warn(
            f"{unknown / tokens:.0%} of the prompts' tokens are the unknown token",
            "use the tokenizer that the model was trained with; if this is it, the model cannot read this text: use "
            "other data, or another model",
        )
    first = describe_prompt(given[0])
    return [*check.findings(first), *([Finding("text", Status.PASS, first)] if check.has_problems else [])]


def appended_end(tokenizer: Any, text: str) -> str:
    """The special token that the tokenizer puts after a text; empty if it puts none, or the text has no tokens."""
    with_special, plain = (tokenizer(text, add_special_tokens=one)["input_ids"] for one in (True, False))
    if not plain or with_special[-1] == plain[-1]:
        return ""
    return str(tokenizer.convert_ids_to_tokens(with_special[-1]))


def _lost(prompt: Prompt) -> str | None:
    """The text of a prompt, of its last message of a conversation, that its decoded tokens do not contain. Whitespace
    is not compared: some tokenizers do not keep it."""
    content = prompt.prompt if isinstance(prompt.prompt, str) else text_of(prompt.prompt[-1])
    return None if "".join(content.split()) in "".join(prompt.text.split()) else content


def ends(run: Run) -> list[Finding]:
    """Tokens that end a completion, the pad token, and the size of the vocabulary."""
    tokenizer, rollout = run.parts.tokenizer, run.config.rollout
    ids = sorted(getattr(run.parts.engine, "end_token_ids", ()))
    names = ", ".join(f"{token!r} ({i})" for i, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
    other_ends = rollout.stop or rollout.regex or rollout.json_schema
    turn = turn_end(tokenizer) if run.first_prompts[0].is_conversation else None
    count, known, (without_text, share) = run.parts.policy.vocab_size, len(tokenizer), textless(run)
    check = Check("ends", {"textless": without_text, "textless_share": share})
    if not ids and not other_ends:
        check.warn(
            "neither the model nor the tokenizer names an end token: every completion runs to "
            f"{rollout.max_completion_length:,} tokens",
            "set eos_token_id in the model's generation_config.json, or rollout.stop",
        )
    elif turn is not None and turn[0] not in ids and not other_ends:
        check.warn(
            f"the chat template ends the assistant's turn with {turn[1]!r} ({turn[0]}), which is not an end token; end "
            f"tokens: {names}. Completions run on after their end",
            f"add {turn[0]} to eos_token_id in the model's generation_config.json, or set rollout.stop to "
            f"[{turn[1]!r}]",
        )
    if known > count:
        check.warn(
            f"the tokenizer has {known:,} tokens and the model {count:,}: a text with one of the others, as of a tool, "
            "stops the run",
            "resize the model's embeddings, or use its own tokenizer",
        )
    if share > TEXTLESS:
        check.warn(
            f"{without_text:,} of the model's {count:,} tokens are of no text, and {share:.1%} of what it draws are "
            "such tokens: completions have less text than tokens",
            f"a new model: give it {known:,} tokens, by vocab_size in its config or model.resize_token_embeddings",
        )
    padding = "no pad token" if tokenizer.pad_token is None else f"pad token {tokenizer.pad_token!r}"
    return check.findings(f"end tokens {names or 'none'}; {padding}, which is not needed: nothing is padded")


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


def optimizer(run: Run) -> list[Finding]:
    """Learning rates with which nothing, or too much, happens."""
    trained = sum(parameter.numel() for parameter in run.parts.optimizer.parameters)
    return check_optimizer(run.config, run.schedule.updates, trained)


def memory(run: Run) -> list[Finding]:
    """The predicted peak against what is free with the optimizer's state allocated. The peak is the larger of two: the
    longest pass of the update (tried before the run, gradients included), and the keys and values of a full rollout."""
    parts, where = run.parts, run.parts.policy.device.type

    def nbytes(tensors: Iterable[Tensor]) -> int:
        return sum(own(tensor).nbytes for tensor in tensors if own(tensor).device.type == where)  # not offloaded

    states = (state for rule in parts.optimizer.rules for state in rule.state.values())
    state = nbytes(value for each in states for value in each.values() if isinstance(value, Tensor))
    free = free_bytes(parts.policy.device)  # None: unknown
    gradients, weights = nbytes(parts.optimizer.parameters), nbytes(parts.policy.model.parameters())
    passes, cache = parts.budget.predicted_bytes or 0, _cache_bytes(run, free)
    sampling = cache + gradients if run.config.rollout.lag else cache  # gradients lie beside a rollout
    needed = max(passes, sampling)
    copy = state + (gradients if has_adapters(parts.policy.model) else weights)  # from which a checkpoint is written
    copy = copy if where == "cpu" and free is not None and copy < free * COPY_SHARE else 0
    check = Check("memory", {"needed": needed, "free": free, "copy": copy})
    pieces = f"the longest update pass with gradients {size(passes)}, keys and values of a rollout {size(cache)}"
    pieces += f"; {size(copy)} on top while a checkpoint is written" if copy else ""
    found = f"estimate: the run needs {size(needed)} more; {'unknown' if free is None else size(free)} free ({pieces})"
    first = "set model.gradient_checkpointing, lower rollout.max_completion_length"
    first = "lower rollout.cache_tokens" if sampling > passes else first
    if free is not None and needed > NEAR_MEMORY * free:
        add = check.fail if needed > free else check.warn
        add(found, f"{first}, train adapters (model.lora.rank), or use a smaller model")
    return check.findings(found)


def _cache_bytes(run: Run, free: int | None) -> int:
    """Keys, values and states of a full rollout, as ``rollout.budget.plan`` allocates them; 0 if others sample."""
    rollout, engine = run.config.rollout, run.parts.engine
    if not isinstance(engine, LocalEngine):
        return 0
    multiple, each = engine.backend.token_multiple, engine.backend.token_bytes
    rows = min(rollout.max_batch_size, rollout.prompts_per_step * rollout.num_generations)
    count = min(rollout.prompts_per_step, 2 * ceil(rows / rollout.num_generations))
    sizes = run.prompts.longest, rollout.max_completion_length
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
    **{check.__name__: check for check in (columns, prompts, lengths, text, ends)},
    "sampling": lambda run: check_sampling(run.config),
    "optimizer": optimizer,
    "memory": memory,
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
    elif not config.model.lora.wanted and optim.learning_rate > (
        highest := next(rate for count, rate in HIGH_RATES if trained >= count)
    ):
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


# ----------------------------------------
# Checks of a rollout, on plain numbers.


def check_sampler(gap: float, most: float, precision: str, advice: str) -> list[Finding]:
    """The sampler's log-probs against the trainer's, for the same tokens and weights.

    Args:
        gap: mean |difference| in nats.
        most: the gap at which a run stops.
        precision: "float32", "bfloat16" or "float64".
        advice: what to try.
    """
    check = Check("sampler", {"gap": _known(gap)})
    found = f"sampler and trainer differ by {gap:.2g} nats per token on average"
    if not gap <= most:
        check.fail(f"{found}; a run stops above {most:g}", advice)
    elif gap > EXPECTED[precision]:
        check.warn(f"{found}; {precision} explains {EXPECTED[precision]:g}", advice)
    return check.findings(found)


def check_reference(gap: float | None, precision: str) -> list[Finding]:
    """The reference against the policy that starts as its equal.

    Args:
        gap: the largest |difference of log-probs| in nats; None: the run has no reference.
        precision: see ``check_sampler``.
    """
    check = Check("reference", {"largest_gap": _known(gap)})
    if gap is None:
        return check.findings("no reference: objective.beta is 0")
    if not gap <= 10 * EXPECTED[precision]:
        check.fail(
            f"the KL to the reference is not 0 before the first update: log-probs differ by up to {gap:.2g} nats",
            "set model.dropout to false; if that does not help, this is a bug: report it with the settings",
        )
    return check.findings(f"the KL to the reference is 0 (log-probs differ by at most {gap:.2g} nats)")


def _known(gap: float | None) -> float | None:
    return None if gap is None or not math.isfinite(gap) else gap


def check_signal(
    rewards_PG: Sequence[Sequence[float]],
    most: float,
    *,
    group_relative: bool = True,
    rounds: int = 1,
    by_function: Mapping[str, Sequence[float]] | None = None,
) -> list[Finding]:
    """Whether rewards differ where the objective compares them: the plain verdict.

    Args:
        rewards_PG: rewards of each group's completions, NaN where unscored.
        most: the largest reward that the run has a name for, the sum of the positive weights: with rewards of 0 and 1,
            a group at it is solved.
        group_relative: whether completions are compared with their own group; otherwise with the whole rollout.
        rounds: with dynamic sampling, how often groups with equal rewards are replaced by others.
        by_function: rewards of all completions by each function with a weight, NaN where unscored.
    """
    scored = [[reward for reward in group if not math.isnan(reward)] for group in rewards_PG]
    every = [reward for group in scored for reward in group]
    if not every:
        check = Check("signal")
        check.fail("no completion was scored", "see the check 'rewards'")
        return check.findings("")
    compared = scored if group_relative else [every]
    dead = [group for group in compared if not group or max(group) - min(group) < SAME]
    mean, share = fmean(every), len(dead) / len(compared)
    spread = math.fsum(_deviation(group) for group in compared if group) / len(compared)
    check = Check("signal", {"dead_share": share, "mean_reward": mean, "within_group_std": spread})
    groups = f"{share:.0%} of groups ({len(dead)} of {len(compared)}) have equal rewards"
    if not group_relative:
        groups = "all completions have equal rewards" if dead else "completions have different rewards"
    verdict = f"mean reward {mean:.2f}, standard deviation within groups {spread:.2f}"
    advice = _advice(dead, most, mean)
    if share >= MOST_DEAD and rounds > 1:
        check.warn(f"{groups}: dynamic sampling will use most of its {rounds} rounds; {verdict}", advice)
    elif share >= MOST_DEAD:
        check.fail(f"{groups}: almost nothing will be learned; {verdict}", advice)
    elif share >= MANY_DEAD:
        check.warn(f"{groups}: they teach nothing; {verdict}", advice)
    elif flat := _rewarding_nothing(by_function or {}):
        others = ", ".join(name for name in by_function or {} if name not in flat)
        check.warn(
            f"{groups}; {verdict}. But all of it comes from {others}: {', '.join(flat.values())}",
            f"if {' or '.join(flat)} is what counts, ease the data or warm up first: it is not what will be learned",
        )
    return check.findings(f"{groups}; {verdict}")


def _rewarding_nothing(by_function: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """The functions that give all completions the same reward, at most 0, and a sentence about each; empty if all
    functions do."""
    found = {}
    for name, rewards in by_function.items():
        scored = [reward for reward in rewards if not math.isnan(reward)]
        if scored and max(scored) < SAME and max(scored) - min(scored) < SAME:
            found[name] = f"{name} is {scored[0]:.3g} for all {len(scored)} completions"
    return found if len(found) < len(by_function) else {}


def _deviation(numbers: Sequence[float]) -> float:
    return math.sqrt(fmean((number - fmean(numbers)) ** 2 for number in numbers))


def _advice(dead: Sequence[Sequence[float]], most: float, mean: float) -> str:
    """What helps, by where the equal rewards lie."""
    solved = sum(1 for group in dead if group and group[0] >= most - SAME)
    if dead and solved >= 0.75 * len(dead):
        return "most of these groups have the full reward: use harder prompts, or raise rollout.temperature"
    if mean < 0.1 * most:
        return (
            "hardly any completion is rewarded: ease the data, warm up (fine-tune on solutions first), reward partial "
            "success, or raise rollout.num_generations"
        )
    return "raise rollout.num_generations, ease the data, or warm up (fine-tune on solutions first)"


def check_rewards(by_function: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[Finding]:
    """What each reward function gave over a rollout: the same for all, or nothing.

    Args:
        by_function: rewards of all completions, NaN where unscored.
        weights: the functions' weights.
    """
    check, words = Check("rewards"), []
    for name, rewards in by_function.items():
        scored = [reward for reward in rewards if not math.isnan(reward)]
        unscored = 1 - len(scored) / len(rewards) if rewards else 0.0
        if unscored > 0:
            check.warn(
                f"reward function {name} did not score {unscored:.0%} of {len(rewards)} completions: it returned None "
                "or failed",
                "if that is not intended, look at the tracebacks above",
            )
        if not scored:
            continue
        low, high = min(scored), max(scored)
        if high - low < SAME and len(by_function) > 1:
            check.warn(
                f"reward function {name} gave {low:.3g} to each of {len(scored)} completions: now it teaches nothing",
                "if it never differs, remove it, or show the model what it asks for",
            )
        note = f"{low:.3g} to {high:.3g}" if weights[name] else "weight 0: logged only"
        words.append(f"{name} {fmean(scored):.2f} ({note})")
    return check.findings(f"mean (range): {', '.join(words)}")


def check_distinct(distinct_P: Sequence[int], size: int) -> list[Finding]:
    """Whether the completions of a group differ.

    Args:
        distinct_P: number of different completions of each group.
        size: completions of a group.
    """
    mean = fmean(distinct_P)
    check = Check("duplicates", {"distinct": mean, "duplicate_share": 1 - mean / size})
    found = f"of {size} completions of a prompt, {mean:.1f} differ on average"
    if size > 1 and mean == 1:
        check.fail(
            f"all {size} completions of each prompt are the same: nothing can be learned",
            "raise rollout.temperature; check that rollout.top_k, rollout.top_p and a grammar leave a choice",
        )
    elif size > FEW_DISTINCT and mean < FEW_DISTINCT:
        check.warn(found, "raise rollout.temperature, or use prompts with more than one possible answer")
    return check.findings(found)


def check_cut(cut: int, completions: int, limit: int, *, masked: bool, no_signal: bool = False) -> list[Finding]:
    """The completions that the length limit cut.

    Args:
        cut: how many.
        completions: of how many.
        limit: ``rollout.max_completion_length``.
        masked: whether the objective leaves cut completions out.
        no_signal: whether the check ``signal`` has failed: then completions that are too short may be why.
    """
    share = cut / completions
    check = Check("cut", {"cut_share": share})
    found = f"{share:.0%} of completions are cut at {limit:,} tokens"
    advice = "raise rollout.max_completion_length; see the check 'ends' if completions should have ended"
    if share >= ALL_CUT and masked:
        check.fail(f"{found}, and objective.truncated 'mask' leaves them out: almost nothing is trained on", advice)
    elif share >= ALL_CUT and no_signal:
        check.fail(f"{found}, and their rewards do not differ: they end before an answer", advice)
    elif share >= MANY_CUT:
        check.warn(found, advice)
    return check.findings(found)


def check_time(
    phases: Mapping[str, float], prompts: int, *, steps: int, evaluation: float, evaluations: int, lag: int = 0
) -> list[Finding]:
    """The predicted time of a step and of the run, without its start and its checkpoints.

    Args:
        phases: seconds of the phases of a step: generate, reward, logps, update, measure.
        prompts: number of prompts that they were measured on.
        steps: steps of the run.
        evaluation: seconds of one evaluation.
        evaluations: how many of them.
        lag: ``rollout.lag``: sampling and scoring run beside the training.
    """
    sampling = sum(phases.get(name, 0.0) for name in ("generate", "reward"))
    training = sum(phases.values()) - sampling
    step = max(sampling, training) if lag else sampling + training
    run = step * steps + evaluation * evaluations
    phases = {name: seconds for name, seconds in phases.items() if seconds > 0}
    check = Check("time", {"step": step, "run": run, **{f"step/{name}": seconds for name, seconds in phases.items()}})
    words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items())
    found = f"estimate from {prompts} prompts: {duration(step)} a step ({words}); {_count(steps, 'step')}"
    if evaluations:
        found += f", {_count(evaluations, 'evaluation')} of {duration(evaluation)}"
    found += f": {duration(run)} in all. Longer completions take longer"
    total = sum(phases.values())
    if total and phases.get("reward", 0.0) > SLOW_REWARDS * total and not lag:
        check.warn(
            f"rewards take {phases['reward'] / total:.0%} of a step. {found}",
            "set reward.workers, make the functions async, or set rollout.lag to score beside the training",
        )
    if run > LONG_RUN:
        check.warn(found, "set run.max_steps, shorter completions, or more devices (see 'cohort docs scale')")
    return check.findings(found)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
