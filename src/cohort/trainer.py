"""GRPOTrainer: puts the parts of a run together, in the order that finds mistakes before anything expensive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from cohort.callbacks import Callbacks
from cohort.config import GRPOConfig, Schedule
from cohort.data import Data, DataCursor, LengthLimit, PromptSet, load_sets, prompt_loader
from cohort.data.render import time_now, use_template
from cohort.doctor import check_names, problem_lines
from cohort.environments import Acting
from cohort.errors import FIXABLE, CallbackError, DataError, NonFiniteError, RunFolderError
from cohort.evaluation import Best, Evaluation, Evaluator, check_settings
from cohort.objective import try_user_functions
from cohort.parallel import World, on_main, together
from cohort.policy import (
    context_length,
    end_token_ids,
    known_tokens,
    load_policy,
    load_tokenizer,
    read_config,
    resolve_device,
)
from cohort.policy.device import use_deterministic_algorithms
from cohort.policy.routing import check_mixture
from cohort.report.console import Display
from cohort.report.describe import announce, describe_run
from cohort.report.progress import best_lines, evaluation_line
from cohort.report.trackers import Trackers
from cohort.rewards import RewardFunction
from cohort.rollout import DividedSampler, EngineSetup, Sampler, Sampling, ServedEngine
from cohort.rollout.setup import with_engine
from cohort.runs.checkpoints import set_seed
from cohort.runs.folder import (
    Beginning,
    Resume,
    RunFolder,
    closed_on_error,
    closing,
    find_folder,
    log_to,
    template_time,
    with_template_time,
)
from cohort.runs.models import check_writable, save_gathered, save_merged
from cohort.runs.starts import Start
from cohort.state import check_state
from cohort.terminal import output_outlasted
from cohort.train import Adaptive, Observer, Observers, Optimizer, State, TrainerParts, find_budget, inputs, ranks, run
from cohort.train.boundary import Training, with_resume_hint
from cohort.train.boundary import resume as resume_run
from cohort.train.first_save import FirstSave
from cohort.train.inputs import Given, recorded
from cohort.train.loop import evaluate
from cohort.train.observers import CompleteStep
from cohort.train.signals import Requests, obeying_signals
from cohort.watchdog import dumps_on_quit


class GRPOTrainer:
    """Trains a causal language model with GRPO.

    Args:
        model: a folder, a hub id, or a loaded transformers model, which is trained in place. None: ``model.path``.
        reward_funcs: one or several reward functions: callables, or names as in ``reward.functions``. See
            ``cohort.rewards.contract``. None: ``reward.functions``.
        args: the settings. None: the defaults.
        train_dataset: rows with a prompt column: a list of dicts, a ``datasets.Dataset`` or similar. None:
            ``data.train``.
        eval_dataset: rows for evaluation, or a dict of named sets of rows. None: ``data.eval``; if that is unset too,
            there is no evaluation.
        processing_class: the tokenizer. None: the tokenizer in the model's folder.
        tools: tools that the policy may call, beside those of ``environment.tools``: typed functions with a docstring,
            plain or ``async``, or names.
        environment_factory: a class or function that makes the environment of each completion, or a dict of several by
            name, of which a row's column ``environment`` chooses one. None: ``environment.factory``.
        callbacks: objects with any of ``on_start``, ``on_rollout``, ``on_step``, ``on_evaluate``, ``on_save`` and
            ``on_end``. See ``cohort.callbacks``.
        optimizers: an optimizer of the parameters of a loaded model, and its learning-rate schedule or None, instead of
            those of the settings. See ``Optimizer.use``.

    Raises:
        CohortError: something is wrong that can be known before training. Checks run from cheap to expensive: data,
            tokenizer, prompts, rewards (tried on two rows), then the model.

    >>> trainer = GRPOTrainer(model="path/to/model", reward_funcs=reward, train_dataset=rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        callbacks: Sequence[Any] = (),
        *,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        self.started = time.perf_counter()
        """Start, for the summary, by the clock that never goes back. The command line sets it to its own start."""
        self.summary: dict[str, Any] = {}
        """Summary of the run; written to ``summary.json`` at its end."""
        self.last_metrics: dict[str, Any] = {}
        """Metrics of the latest step."""
        self.last_updates: list[dict[str, Any]] = []
        """Metrics of each of its updates, in order (``train.metrics.each_update``)."""
        self.folder: RunFolder | None = None
        """The run's folder, set when the run starts."""
        self.started_by = Start()
        """How the process was started, for the run folder."""
        self._found: tuple[RunFolder, Beginning] | None = None
        self._training: Training | None = None
        self._requests = Requests()
        config = inputs.checked_settings(args)
        self.world = World.of_environment(timeout=config.parallel.rank_timeout)
        """The ranks that train together."""
        config, self._chosen_engine = with_engine(config, self.world)
        self.args = config
        check_names(config.report.skip_checks)
        self._callbacks = Callbacks(self, callbacks, own=Trackers.of(config.report))
        self.layout = ranks.checked_layout(config, self.world)
        self._prints = config.report.progress and self.world.is_main
        self._times = on_main(self.world, lambda: (template_time(config), time_now()))
        given = Given(model, reward_funcs, train_dataset, eval_dataset, processing_class, tools, environment_factory)
        together(self.world, lambda: self._prepare(given))
        self.recorded, missing = recorded(config, given)  # the settings, with the names of what was given
        self.recorded = with_template_time(self.recorded, self._template_time)
        missing |= {"optimizers": "objects in memory"} if optimizers[0] is not None else {}
        self.started_by = Start(missing=missing)
        same = {name: fact for name, fact in self._facts.items() if name not in ("machine", "threads")}
        ranks.check_same(self.world, config, {**same, "weights": self._weights})
        ranks.divide_policy(self.layout, self.policy, self.reference)
        self.optimizer = Optimizer(self.policy.model, config.optim, self.schedule.updates, self.layout)
        if optimizers[0] is not None:
            self.optimizer.use(*optimizers)
        together(self.world, self.optimizer.allocate_state)  # before the free memory is measured, here and in rollouts
        lengths = self._longest_prompt, config.rollout.max_completion_length
        reserved = self.engine.turns.reserved if isinstance(self.engine, ServedEngine) else 0
        sizes = config.optim.microbatch_tokens, *lengths, reserved
        self.budget = ranks.common_budget(self.layout, lambda: find_budget(self.policy, *sizes))

    @output_outlasted()
    def _prepare(self, given: Given) -> None:
        """Check everything, from cheap to expensive, then load the model. Exchanges nothing between ranks."""
        config = self.args
        check_state()
        if config.run.deterministic:
            use_deterministic_algorithms(resolve_device(config.model.device))
        group = max(config.rollout.num_generations, config.eval.num_generations_eval)
        self.acting = Acting.of(config.environment, given.tools, given.environment_factory, group_size=group)
        """The tools and environments; None without."""
        self._engine_setup = EngineSetup(config, self.world)
        model = inputs.chosen_model(given.model, config.model)
        self.objective = objective = config.resolved_objective
        try_user_functions(objective, config.rollout.num_generations)
        self.rewards = inputs.checked_rewards(given.reward_funcs, config, objective, self.acting, self.world)
        data, eval_data = inputs.load_rows(given.train_dataset, given.eval_dataset, config)
        check_settings(config.eval, tuple(eval_data), self.rewards.names)
        trust = config.model.trust_remote_code
        self.tokenizer = given.processing_class or load_tokenizer(inputs.model_name(model), trust_remote_code=trust)
        whole = read_config(model, trust_remote_code=trust, whole=True)
        self._model_config, self._tokens = whole.get_text_config(), known_tokens(model, whole)
        if config.rollout.replay_routing:
            check_mixture(self._model_config)
        self._template_time = use_template(self.tokenizer, config.data.chat_template, *self._times)
        self._context = context_length(self._model_config)
        self._limit = LengthLimit.of(config.data, self._context, config.rollout.max_completion_length)
        if self.acting:
            ends = end_token_ids(model, self.tokenizer, trust_remote_code=trust)
            self._turn_format = self.acting.turn_format(self.tokenizer, ends, config.data.chat_template_kwargs)
        prompts = self._prompt_set(data)
        self.evaluator = self._evaluator(eval_data) if eval_data else None
        self.prompts = prompt_loader(prompts, config.data, seed=config.run.seed)
        self.schedule = Schedule.of(config, prompts.epoch_length)
        self._longest_prompt = prompts.longest
        trained = prompts.longest + config.rollout.max_completion_length
        self._longest = max(trained, self.evaluator.longest if self.evaluator else 0)
        self._load(model)

    def _load(self, model: Any) -> None:
        """Load the model, and make what needs the whole model: reference and engine."""
        config, objective = self.args, self.objective
        show = announce if self._prints else None
        if show and self._chosen_engine:
            show(self._chosen_engine)
        self._engine_setup.connect(self._model_config, self._longest, show)
        self.policy = load_policy(model, config.model, self._model_config, seed=config.run.seed)
        if config.rollout.replay_routing:
            self.policy.replay_routes()
        if self.world.is_main:
            check_writable(self.policy, self.tokenizer)
        self._weights = inputs.fingerprint(self.policy.model.state_dict()) if self.world.size > 1 else ""
        # A copy of the initial policy. Without a KL term there is no reference, and no memory is spent on one.
        self.reference = self.policy.reference(moves=config.objective.sync_ref_model) if objective.beta else None
        self.engine = self._engine_setup.engine(self.policy, self.tokenizer)
        self._episodes = self.acting.sampler(self.engine, self._turn_format, show) if self.acting else None
        self._facts = inputs.data_facts(self.prompts, self.rewards, self.acting, config)
        ends = end_token_ids(model, self.tokenizer, trust_remote_code=config.model.trust_remote_code)
        self._facts |= inputs.model_facts(self.policy, self._model_config, ends, self.world)

    @property
    def sampler(self) -> Sampler:
        """The engine or, with tools or environments, what drives it through episodes; on several ranks, what divides
        the prompts over them."""
        sampler: Sampler = self._episodes or self.engine
        if self._episodes:
            self._episodes.engine = self.engine  # which may have been replaced
        weights = partial(ranks.whole_to_sample, self.layout, self.engine)
        divided = self.world.size > 1 or self.layout.passes_exchange
        return DividedSampler(sampler, self.world, weights) if divided else sampler

    def train(self, *, resume: Resume = False, allow_changed: Collection[str] = ()) -> dict[str, Any]:
        """Train with a progress display; return the summary, which is also written to ``summary.json``.

        Args:
            resume: continue the run in ``run.output_dir`` from its newest checkpoint; without a checkpoint, start it
                again. "auto": also start it if the folder holds no run, and do nothing if the run is complete.
            allow_changed: settings and facts that may differ from the run's though they change results, as
                ``--allow-changed`` takes them.

        Raises:
            RunFolderError: the output folder holds another run, or nothing to resume.
            Stopped: a signal came, or ``stop`` was called; a checkpoint is written.
        """
        with self.obeying_signals():
            steps = self.steps(resume=resume, allow_changed=allow_changed)  # resuming may change the schedule
            folder = self.folder.path if self.folder else None
            shown = Display.of_training(self.schedule.steps, folder, lambda: self._requests.stop, enabled=self._prints)
            with contextlib.closing(steps), shown as display, self._resume_hint():
                for metrics in steps:
                    display.show(metrics)
        if self._prints:
            announce(*best_lines(self.summary))
        return self.summary

    def _resume_hint(self) -> contextlib.AbstractContextManager[None]:
        run = "" if self.started_by.needed(adapters=self.args.model.lora.wanted) else self.summary.get("output_dir", "")
        how = f"cohort resume {run}" if run else "the same script and train(resume='auto')"
        return with_resume_hint(how, show=self._prints and self._found is None)

    def stop(self) -> None:
        """Let the run stop, with a checkpoint of the moment between two steps; ``steps`` raises ``Stopped``. For other
        threads. After a step's first optimizer step, the step is completed."""
        self._requests.stop = True

    def save_now(self) -> None:
        """Let the run write a checkpoint before its next step, and go on."""
        self._requests.save = True

    def evaluate_now(self) -> None:
        """Let the run evaluate after the step in progress, as when ``eval.eval_steps`` says so."""
        self._requests.evaluate = True

    def checkpoint(self) -> Path:
        """Write a checkpoint between two of the ``steps``; return its folder once it is complete. Every rank calls."""
        if self._training is None:
            raise RunFolderError("there is no run to write a checkpoint of: it begins with train() or steps()")
        if not self._training.is_at_boundary:
            raise RunFolderError(
                "a step's updates are under way, and a checkpoint is of the moment between two steps: call "
                "checkpoint() between two of the steps()"
            )
        self._training.save(wait=True)
        return self._training.folder.checkpoint(self._training.state.complete_steps)

    @contextlib.contextmanager
    def obeying_signals(self) -> Iterator[None]:
        """While the block runs, signals stop the run or write a checkpoint, as they do in ``train``, and nothing that
        is printed ends it."""
        with obeying_signals(self._requests, self.args.run.stop_seconds), dumps_on_quit(), output_outlasted():
            yield

    def steps(
        self, *, resume: Resume = False, allow_changed: Collection[str] = (), observers: Sequence[Observer] = ()
    ) -> Generator[dict[str, Any]]:
        """Train step by step: an iterator over the steps' metrics. The call itself creates the run folder, or loads the
        checkpoint to resume. The folder is this trainer's until the iterator ends or is closed. A loop that is left
        writes a checkpoint, in a process that trains alone.

        Args:
            resume, allow_changed: as ``train`` takes them.
            observers: watch the run on every rank; see ``cohort.train.observers``.
        """
        if self.folder is not None:
            raise RunFolderError(f"this trainer's run in {self.folder.path} has started: make a new GRPOTrainer")
        check_state()
        folder, beginning = self._found or find_folder(self.recorded, self.world, resume, allow_changed)
        with closed_on_error(folder):
            if beginning is Beginning.COMPLETE:
                self.summary = on_main(self.world, folder.read_summary)
                return closing(folder, ())
            parts, state = self.make_parts(observers), self._first_state()
            goes_on = beginning is Beginning.RESUMED
            if goes_on:
                state = self._resume(folder, parts, state, allow_changed)
            else:
                self._start(folder, beginning)
            first = state.complete_steps
            record = partial(folder.record_start, self.started_by, first, self.schedule.steps, self._facts)
            on_main(self.world, record)
            self._training = training = Training(parts, self.schedule, folder, state, is_saved=goes_on)
        self.folder = folder
        self.summary = {**state.for_summary(self.args.rollout.num_generations), "output_dir": str(folder.path)}
        if self.evaluator and self.evaluator.success:
            self.summary["success"] = str(self.evaluator.success)
        return closing(folder, self._steps(training))

    def _first_state(self) -> State:
        metric = self.args.eval.metric_for_best_model
        best = Best(self.args.eval, self.evaluator.fingerprint(metric) if self.evaluator and metric else "")
        return State(Adaptive.of(self.objective), best, version=self.policy.version)

    def make_parts(self, observers: Sequence[Observer] = ()) -> TrainerParts:
        """What the loop works with. Begins nothing."""
        own = {one.name: getattr(self, one.name) for one in fields(TrainerParts) if hasattr(self, one.name)}
        return TrainerParts(
            **own,
            config=self.args,
            sampling=Sampling.of(self.args.rollout),
            facts=self._facts,
            first_save=FirstSave(self.policy, self.args.model, is_wanted=self.args.report.check_saved),
            requests=self._requests,
            observers=Observers([self._callbacks, *observers], self.world),
        )

    def _steps(self, training: Training) -> Generator[dict[str, Any]]:
        with self._callbacks.told_of_end(self):
            try:
                self._callbacks.start(training.state.complete_steps, self._facts, training.source.pending)
                self._evaluate_before(training)
                for step in run(training):
                    yield step.metrics
            except GeneratorExit:  # the loop that takes the steps is left; other ranks would have to come here to save
                if self.world.size == 1:
                    training.save_before_end()
                raise
            except CancelledError:  # a rollout or an evaluation, because the run is to stop
                training.stop_point()
                raise
            except NonFiniteError as error:  # the weights may be what is not finite: nothing is written of them
                error.args = (f"{error}; in step {self.summary['steps'] + 1}",)
                raise
            except FIXABLE as error:
                kept = training.save_before_end()
                where = "" if isinstance(error, CallbackError) else f"in step {self.summary['steps'] + 1}; "
                error.args = (f"{error}; {where}{kept}: fix it and resume",)
                raise
            finally:
                training.source.end("all")
                self.rewards.close()
                if self.acting:
                    self.acting.close()
            self._end(training)

    def _evaluate_before(self, training: Training) -> None:
        """Evaluate before the first step, if it is wanted. A resumed run reads that evaluation and the last one."""
        folder, evaluator = training.folder, self.evaluator
        evaluations = on_main(self.world, folder.evaluations)
        if evaluator and self.args.eval.eval_on_start and 0 not in evaluations and not training.state.complete_steps:
            state, found = evaluate(training)
            training.reached(state)
            on_main(self.world, lambda: folder.append_metrics({"step": 0, "time": time.time(), **found}))
            if self._prints:
                announce(evaluation_line(found, "before training", str(evaluator.success or "")))
            evaluations = {0: found}
        if last := max((step for step in evaluations if step), default=None):
            self.summary["eval_after"] = evaluations[last]
        if 0 in evaluations:
            self.summary["eval_before"] = evaluations[0]

    def record(self, step: CompleteStep) -> None:
        """Take a complete step into the summary, and as the latest one."""
        self.last_metrics, self.last_updates, summary = step.metrics, step.updates, self.summary
        summary.setdefault("seconds_to_first_update", round(time.perf_counter() - self.started, 2))
        summary |= step.state.for_summary(self.args.rollout.num_generations)
        if evaluated := {key: value for key, value in step.metrics.items() if key.startswith("eval/")}:
            summary["eval_after"] = evaluated

    def _end(self, training: Training) -> None:
        """Write what a complete run leaves beside its checkpoints."""
        if self.args.model.lora.save_merged:
            save_merged(training.folder.path / "merged", self.policy, self.tokenizer, self.world)
        best = training.state.best
        if note := best.note():
            self.summary["best"] = note
        if best.exhausted and self.summary["steps"] < self.schedule.steps:
            self.summary["stopped_early"] = True
        self.summary["seconds"] = round(time.perf_counter() - self.started, 2)
        lags = self.args.rollout.lag > 0  # rollouts that later weights cannot draw
        on_main(self.world, lambda: training.folder.write_summary(self.summary, keep_journal=lags))

    def evaluate(self, eval_dataset: Any = None) -> dict[str, Any]:
        """Sample and score the evaluation prompts with the current policy; return the metrics with their intervals.

        Args:
            eval_dataset: rows, or named sets of rows, instead of those given to the trainer.
        """
        found = self.evaluations(eval_dataset).items()
        return {key: value for name, one in found for key, value in one.metrics(name).items()}

    @output_outlasted()
    def evaluations(self, eval_dataset: Any = None) -> dict[str, Evaluation]:
        """Like ``evaluate``, with each prompt's numbers and every completion, by the sets' names ("" without one)."""
        evaluator = self.evaluator if eval_dataset is None else self._evaluator(load_sets(eval_dataset, self.args.data))
        if evaluator is None:
            raise DataError("no evaluation data: pass eval_dataset, or set data.eval")
        if self._training is not None:
            self._training.source.wait()
        ranks.update_engine(self.engine, self.policy, self.layout)
        return evaluator.evaluate(self.sampler)

    def save_model(self, path: str | Path, *, merge: bool = False) -> None:
        """Write weights, config and tokenizer as transformers loads them. With several ranks, each is to call it, and
        rank 0 writes.

        Args:
            path: a folder.
            merge: write a model with adapters as one model with the adapters merged, not the adapters alone.
        """
        save_gathered(self.policy, self.tokenizer, Path(path), self.world, merge=merge)

    def describe(self) -> str:
        """The run in words, as ``train`` prints it at the start."""
        lines = [
            describe_run(self.policy, self.engine, self.budget.describe(), self.prompts, self.rewards, self.schedule)
        ]
        lines += [f"ranks: {self.world.size}, layout {self.args.parallel.layout}"] if self.world.size > 1 else []
        lines += [self.acting.describe(), self._turn_format.describe()] if self.acting else []
        lines += [self.evaluator.describe()] if self.evaluator else []
        if self._template_time:
            lines.append(
                f"the chat template prints the time: {self._template_time} in the whole run (data.template_time)"
            )
        return "\n".join(lines + problem_lines(self))

    def began_as(self, start: Start, settings: GRPOConfig, folder: RunFolder, beginning: Beginning) -> None:
        """Take what the command line knows better than the arguments: how the process was started, the settings as the
        run folder has them (with the time that the chat template prints), the folder, and how to begin with what is in
        it."""
        self.started_by, self._found = start, (folder, beginning)
        self.recorded = with_template_time(settings, self._template_time)

    def _start(self, folder: RunFolder, beginning: Beginning) -> None:
        text, again = self.prompts.fetch(DataCursor(), 1)[0].text, beginning is Beginning.AGAIN
        on_main(self.world, lambda: folder.start(self.recorded, text, anew=again, facts=self._facts))
        log_to(folder, self.world)
        set_seed(ranks.seed_of(self.args.run.seed, self.world))
        if self._prints:
            note = " (it has no checkpoint: the run starts again)" if again else ""
            announce(self.describe(), f"run folder: {folder.path}{note}", *self.started_by.to_give_again())

    def _resume(self, folder: RunFolder, parts: TrainerParts, state: State, allowed: Collection[str]) -> State:
        state, self.schedule, changes = resume_run(folder, parts, self.schedule, state, self.recorded, allowed)
        log_to(folder, self.world)
        if self._prints:
            announce(self.describe(), f"resuming {folder.path} after step {state.complete_steps}", *changes)
        return state

    def _prompt_set(self, data: Data) -> PromptSet:
        """Render the rows to prompts, and try the reward functions on the first two."""
        tools = self.acting.schemas_of if self.acting else None
        prompts = PromptSet(data, self.tokenizer, self.args.data, limit=self._limit, tools=tools)
        prompts.check_tokens(*self._tokens)
        self.rewards.dry_run(prompts[:2], episodes=self.acting is not None)
        return prompts

    def _evaluator(self, sets: Mapping[str, Data]) -> Evaluator:
        """The evaluator of some sets; tries the reward functions on two rows of each."""
        return Evaluator.of(self.args, sets, self.rewards, self.tokenizer, self._context, self.acting, self._tokens)
