"""transformers' callbacks in a run of Cohort: what they are told of each update, and what they ask for.

Callbacks are called on every rank after the updates of a rollout, once for each update and in transformers' order, with
the weights after the rollout. ``should_log`` is obeyed at the update; ``should_evaluate``, ``should_save`` and
``should_training_stop`` at the end of the rollout.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler as Handler
from transformers.trainer_callback import DefaultFlowCallback as DefaultFlow
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import speed_metrics

from cohort.errors import ConfigError, RunFolderError, did_you_mean
from cohort.evaluation import Evaluation
from cohort.train import Observer, Wishes
from cohort.train.metrics import EACH_UPDATE
from cohort.trl.checkpoints import note_best
from cohort.trl.logs import Window, evaluation_keys, evaluation_loss, numbers

log = logging.getLogger("cohort.trl")
NEVER_CALLED = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step", "on_predict")
"""Methods for moments that a run of Cohort does not stop at, or does not have."""
OF_THIS_PROCESS = (
    *("max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs"),
    *("is_local_process_zero", "is_world_process_zero"),
)
"""Fields of ``TrainerState`` that a resumed run has from its arguments, not from the checkpoint."""


class _WithoutOwnKeys(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Prints TRL's part of an entry of the log, without Cohort's own keys.

    Args:
        window: the log's.
    """

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Print an entry."""
        super().on_log(args, state, control, logs=self._window.without_own(logs), **more)


class Progress(_WithoutOwnKeys, ProgressCallback):  # type: ignore[misc]
    """A progress bar, and the log above it."""


class Printer(_WithoutOwnKeys, PrinterCallback):  # type: ignore[misc]
    """The log alone."""


def handler_of(
    args: Any, callbacks: Sequence[Any] | None, model: Any, tokenizer: Any, optimizer: Any, window: Window
) -> Handler:
    """A handler with the default callbacks, those of the trackers in ``report_to``, and the given ones."""
    from transformers.integrations import get_reporting_integration_callbacks

    own = [DefaultFlow, *get_reporting_integration_callbacks(args.report_to), *(callbacks or ())]
    handler = Handler(own, model, tokenizer, optimizer.rules[0], optimizer.schedules[0])
    handler.add_callback((Printer if args.disable_tqdm else Progress)(window))
    return handler


def check_trackers(names: Sequence[str]) -> None:
    """Check the names of ``report_to``.

    Raises:
        ConfigError: transformers has no such tracker, or its package is not installed.
    """
    from transformers.integrations import integration_utils

    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        if name not in known:
            raise ConfigError(
                f"report_to: expected {', '.join(sorted(known))}, got {name!r}{did_you_mean(name, known)}"
            )
        if name not in ("flyte", *integration_utils.get_available_reporting_integrations()):
            raise ConfigError(f"report_to: {name!r} is not installed: pip install it, or set report_to='none'")


def check_callback(callback: Any, args: Any) -> None:
    """Check that a callback is one of transformers; log a warning for methods of it that are never called.

    Raises:
        ConfigError: it is not, or it needs other arguments.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    if not issubclass(kind, TrainerCallback):
        raise ConfigError(
            f"callbacks: expected objects or classes of transformers.TrainerCallback, got {kind.__name__}; callbacks "
            "of Cohort go to cohort.GRPOTrainer"
        )
    if issubclass(kind, EarlyStoppingCallback) and (args.metric_for_best_model is None or args.eval_strategy == "no"):
        raise ConfigError("EarlyStoppingCallback needs eval_strategy and metric_for_best_model, such as 'eval_reward'")
    unheard = [name for name in NEVER_CALLED if getattr(kind, name) is not getattr(TrainerCallback, name)]
    if unheard and not kind.__module__.startswith("transformers."):
        named = " and ".join(unheard)
        log.warning("callback %s: %s is never called here (see 'cohort docs trl')", kind.__name__, named)


class Events(Observer):
    """Tells the callbacks of a ``cohort.trl.GRPOTrainer`` what happens in its run. Its state is part of every
    checkpoint.

    Args:
        trainer: the trainer.
        window: the log's.
        updates_per_rollout: optimizer updates of a rollout, skipped ones included.
        updates_per_epoch: of an epoch.
    """

    evaluates_last = False
    initial_can_be_best = False

    def __init__(self, trainer: Any, window: Window, updates_per_rollout: int, updates_per_epoch: int) -> None:
        self._trainer: Any = weakref.proxy(trainer)  # the run's parts hold this object: no cycle
        self.window, self.updates_per_rollout, self._per_epoch = window, updates_per_rollout, updates_per_epoch
        self.wants_evaluation = self.wants_checkpoint = self.wants_stop = False
        """What the callbacks have asked for at the end of the rollout."""
        self._wants_epoch_stop = False
        self._in_epoch = False
        """Whether the callbacks were told of the beginning of the present epoch, in this process."""
        self._rollouts = self._logged = 0
        """Rollouts whose updates the callbacks were told of, and updates of which the log has an entry."""

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation], _metrics: Mapping[str, Any]) -> None:
        """An evaluation of the run ended: log it, tell the callbacks, and note whether it is the best. The one before
        training never is, as in transformers."""
        found = tell_evaluation(self._trainer, evaluations)
        if step:
            self.note(found)

    def note(self, found: Mapping[str, Any]) -> None:
        """Note whether an evaluation is the best so far.

        Args:
            found: its metrics, by TRL's names.
        """
        args = self._trainer.args
        is_best = note_best(args, self._trainer.state, found)
        if args.save_strategy == "best":
            self.wants_checkpoint = is_best

    def updated(self, metrics: Mapping[str, Any]) -> Wishes:
        """The updates of a rollout are made: tell the callbacks of each."""
        trainer = self._trainer
        if metrics["step"] > self._rollouts:  # else the run was stopped in the evaluation that follows, and resumed
            self._rollouts = metrics["step"]
            self.wants_evaluation = self.wants_checkpoint = self.wants_stop = False
            each, rollout = metrics[EACH_UPDATE], {key: one for key, one in metrics.items() if key != EACH_UPDATE}
            for number in range(self.updates_per_rollout):
                self._update(each[number] if number < len(each) else {}, None if number else rollout)
            if trainer.state.global_step >= trainer.state.max_steps:
                self.end_epoch()
        if any(trainer.core.world.gather(self._wants_epoch_stop)):  # a checkpoint follows, so all updates are told of
            raise ConfigError("should_epoch_stop is not supported here: set should_training_stop, which ends the run")
        return Wishes(evaluate=self.wants_evaluation and trainer.core.evaluator is not None)

    def _update(self, update: Mapping[str, Any], rollout: Mapping[str, Any] | None) -> None:
        trainer = self._trainer
        state, handler = trainer.state, trainer.callback_handler
        if not self._in_epoch:
            self._in_epoch = True
            trainer.control = handler.on_epoch_begin(trainer.args, state, trainer.control)
        trainer.control = handler.on_step_begin(trainer.args, state, trainer.control)
        state.global_step += 1
        state.epoch = state.global_step / self._per_epoch
        self.window.add(update, rollout)
        state.num_input_tokens_seen = self.window.num_tokens
        trainer.control = handler.on_step_end(trainer.args, state, trainer.control)
        self._obey()
        if state.global_step % self._per_epoch == 0:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Tell the callbacks that the epoch ended, unless they know."""
        trainer = self._trainer
        if self._in_epoch:
            self._in_epoch = False
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._obey()

    def _obey(self) -> None:
        """Log if it is asked for, and remember what else is."""
        trainer = self._trainer
        if trainer.control.should_log and trainer.state.global_step > self._logged:
            self._logged = trainer.state.global_step
            trainer.log(self.window.entry())
        control = trainer.control
        self.wants_evaluation |= control.should_evaluate
        self.wants_checkpoint |= control.should_save
        self.wants_stop |= control.should_training_stop
        self._wants_epoch_stop |= control.should_epoch_stop

    def state_dict(self) -> dict[str, Any]:
        """The state of transformers' trainer and of its callbacks, and what is to be logged."""
        return {
            "state": state_of(self._trainer),
            "window": self.window.state_dict(),
            "rollouts": self._rollouts,
            "logged": self._logged,
            "wanted": [self.wants_evaluation, self.wants_checkpoint, self.wants_stop],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``.

        Raises:
            RunFolderError: the run was not begun by ``cohort.trl``.
        """
        if not state:
            raise RunFolderError("the run was not begun with cohort.trl: continue it with 'cohort resume'")
        present = {name: getattr(self._trainer.state, name) for name in OF_THIS_PROCESS}
        self._trainer.state = TrainerState(**state["state"] | present)
        _restore_callbacks(self._trainer.callback_handler, state["state"]["stateful_callbacks"])
        self.window.load_state_dict(state["window"])
        self._rollouts, self._logged = state["rollouts"], state["logged"]
        self.wants_evaluation, self.wants_checkpoint, self.wants_stop = state["wanted"]


def tell_evaluation(trainer: Any, evaluations: Mapping[str, Evaluation], prefix: str = "eval") -> dict[str, Any]:
    """Log an evaluation and tell the callbacks; return what was logged.

    Args:
        trainer: a ``cohort.trl.GRPOTrainer``.
        evaluations: the evaluation of each set, "" if there is one.
        prefix: "eval" in the names of the metrics, TRL's and Cohort's.
    """
    args = trainer.args
    all_found: dict[str, Any] = {}
    for name, one in evaluations.items():
        metrics, prompts = one.metrics(name), len(one.values["reward"])
        found = evaluation_keys(metrics, name, trainer.state.num_input_tokens_seen) | metrics
        found = {f"{prefix}{key.removeprefix('eval')}": value for key, value in numbers(found).items()}
        trainer._events.window.own |= {f"{prefix}{key.removeprefix('eval')}" for key in metrics}
        batch = args.eval_batch_size * args.world_size
        batches, named = math.ceil(prompts / batch), f"{prefix}_{name}" if name else prefix
        found |= numbers({f"{named}_loss": evaluation_loss(one, trainer.core.args, batch)})
        found |= speed_metrics(named, time.time() - one.seconds, num_samples=prompts, num_steps=batches)
        trainer.log(found)
        trainer.control = trainer.callback_handler.on_evaluate(args, trainer.state, trainer.control, found)
        all_found |= found
    return all_found


def state_of(trainer: Any) -> dict[str, Any]:
    """The state of transformers' trainer with that of its callbacks, in types of JSON: ``trainer_state.json``."""
    exported = [
        one for one in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(one, ExportableState)
    ]
    values = {field.name: getattr(trainer.state, field.name) for field in fields(TrainerState)}
    return asdict(TrainerState(**values | {"stateful_callbacks": exported}))


def _restore_callbacks(handler: Handler, stored: Mapping[str, Any]) -> None:
    """Set the attributes of callbacks that keep a state; of several of a class, in their order."""
    left = {name: list(one) if isinstance(one, list) else [one] for name, one in stored.items()}
    for callback in handler.callbacks:
        states = left.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and states:
            for name, value in states.pop(0)["attributes"].items():
                setattr(callback, name, value)
