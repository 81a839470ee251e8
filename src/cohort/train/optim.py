"""The optimizer: by name, with gradient clipping and a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cohort.config import OptimConfig
from cohort.errors import ConfigError, ModelError, NonFiniteError, RunFolderError, out_of_memory
from cohort.parallel import Layout
from cohort.policy.policy import check_finite_weights, own
from cohort.rollout.local.backend import free_bytes
from cohort.runs.models import fill
from cohort.train.guard import GO_ON

STATE_SHARE = {"AdamW": 2.0, "AdamW8bit": 0.5, "Muon": 1.0}
"""Bytes of an optimizer's state over those of what it trains, by the class of the optimizer."""


class Optimizer:
    """An optimizer of torch's or of a library's, transformers' schedules, and clipping by the gradient's norm.

    Weight decay acts on matrices only: biases, norms and other vectors are left alone.

    Args:
        model: what is trained: its parameters that require gradients.
        config: the settings.
        num_updates: updates of the whole run, for schedules that end.
        layout: how the ranks hold the model.

    Raises:
        ModelError: nothing of the model requires a gradient, or the optimizer's library is not installed.
        ConfigError: the schedule refuses its arguments.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, num_updates: int, layout: Layout | None = None) -> None:
        self._model = model
        self.names = {p: name for name, p in (layout or Layout()).trained(model).items()}
        """The names of the trained parameters, or of those that they are shards of."""
        self.parameters = list(self.names)
        if not self.parameters:
            raise ModelError("no parameter of the model requires a gradient: there is nothing to train")
        self.max_grad_norm = config.max_grad_norm or math.inf
        self.rules = _rules(model, self.parameters, config)
        """One optimizer, or two where some parameters are not for the one that is named."""
        warmup = config.warmup_of(num_updates)
        factor = _schedule(config, self.rules[0], warmup, num_updates)

        # transformers' warm-up begins at a rate of exactly 0, which would spend the first rollout on nothing. Here
        # update k of w has k/w of the peak; after the warm-up the schedule is transformers' own.
        def from_one(update: int) -> float:
            return float(factor(update + 1 if update < warmup else update))

        self.schedules = [torch.optim.lr_scheduler.LambdaLR(rule, from_one) for rule in self.rules]
        self._factor = from_one
        self._unstepped: set[nn.Parameter] = set()
        """The parameters whose state is as ``allocate_state`` has made it: a checkpoint does not hold it."""

    def use(self, rule: torch.optim.Optimizer, schedule: Any = None) -> None:
        """Step with a ready optimizer in place of the one of the settings. Before the first step.

        Args:
            rule: an optimizer of parameters that are trained.
            schedule: its learning-rate schedule, a ``LambdaLR`` as transformers makes them. None: that of the settings.

        Raises:
            ConfigError: the optimizer has other parameters, or the schedule is another's.
        """
        known = {id(parameter) for parameter in self.parameters}
        if not all(id(parameter) in known for group in rule.param_groups for parameter in group["params"]):
            raise ConfigError(
                "the optimizer has parameters that are not trained here: make it from the parameters of the very model "
                "that the trainer is given, loaded with adapters if it has any, and with parallel.layout 'replicate'"
            )
        if schedule is None:
            schedule = torch.optim.lr_scheduler.LambdaLR(rule, self._factor)
        if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR) or schedule.optimizer is not rule:
            raise ConfigError(
                f"expected a LambdaLR schedule of the optimizer, as transformers.get_scheduler makes, got "
                f"{type(schedule).__name__}"
            )
        self.rules, self.schedules = [rule], [schedule]

    @property
    def learning_rate(self) -> float:
        """The next update's learning rate."""
        return float(self.schedules[0].get_last_lr()[0])

    def zero_grad(self) -> None:
        """Forget the last update's gradients."""
        for parameter in (*self._model.parameters(), *self.parameters):  # the latter may be shards of the former
            parameter.grad = None

    def allocate_state(self) -> None:
        """Allocate the state of parameters that have none, as their first step would, which could run out of memory
        halfway. A gradient and a learning rate of 0 change nothing; steps are counted from 0 again afterwards.

        Raises:
            ModelError: memory ran out.
        """
        for rule in self.rules:
            new = [p for group in rule.param_groups for p in group["params"] if p not in rule.state]
            if not new:
                continue
            rates = [group["lr"] for group in rule.param_groups]
            needed = STATE_SHARE.get(type(rule).__name__, 0.0) * sum(own(parameter).nbytes for parameter in new)
            try:
                if needed > (free_bytes(new[0].device) or math.inf):  # a CPU's system would kill the process
                    raise MemoryError
                for group in rule.param_groups:
                    group["lr"] = 0.0
                for parameter in new:
                    parameter.grad = torch.zeros_like(parameter)
                rule.step()
                for state in (rule.state[parameter] for parameter in new):
                    state.update({key: 0 * count for key, count in state.items() if key == "step"})
                self._unstepped.update(new)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                raise ModelError(
                    f"out of memory for the state of {type(rule).__name__}: set optim.optimizer to 'adamw_8bit', train "
                    "adapters (model.lora.rank), or use a smaller model"
                ) from error
            finally:
                for group, rate in zip(rule.param_groups, rates, strict=True):
                    group["lr"] = rate
                for parameter in new:
                    parameter.grad = None

    def step(self, clip: Callable[[Sequence[nn.Parameter], float], Tensor] = nn.utils.clip_grad_norm_) -> float:
        """Clip, step, advance the schedule. Returns the gradient's norm before clipping.

        A gradient of exactly 0 (every group dead, no KL term) makes no step: momentum and weight decay would move the
        weights although nothing was learned.

        Args:
            clip: scales gradients to at most a norm and returns the norm before, as ``Layout.clip_gradients``.

        Raises:
            NonFiniteError: the gradient is not finite; the weights are left as they were.
        """
        grad_norm = clip(self.parameters, self.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient's norm is {grad_norm.item()}, though every log-probability and coefficient is finite"
            )
        if grad_norm == 0:
            return 0.0
        for rule, schedule in zip(self.rules, self.schedules, strict=True):
            rule.step()
            schedule.step()
        self._unstepped.clear()
        return float(grad_norm)

    def check_weights(self) -> None:
        """Check that the weights are finite, or this rank's shards of them.

        Raises:
            NonFiniteError: names the first tensor that is not.
        """
        try:
            check_finite_weights({name: parameter for parameter, name in self.names.items()}, "the updated model")
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}. {GO_ON}") from None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the settings, by the names of parameters, so that parameters may be grouped
        or sharded in another way then.

        Returns:
            ``tensors``: "PARAMETER/STATE" -> a tensor, sharded as the parameter is; ``numbers``, in types of JSON:
            states that are no tensors under ``states``, and the ``schedules``.
        """
        states: dict[str, Any] = {
            f"{name}/{key}": value
            for parameter, name in self.names.items()
            for rule in self.rules
            for key, value in rule.state.get(parameter, {}).items()
            if parameter not in self._unstepped
        }
        tensors = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in states.items() if name not in tensors}
        return {
            "tensors": tensors,
            "numbers": {"states": numbers, "schedules": [schedule.state_dict() for schedule in self.schedules]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``, of whole tensors. Each rank takes its share of them.

        Raises:
            RunFolderError: the state is of a parameter that is not trained.
            ModelError: memory ran out.
        """
        for rule in self.rules:
            rule.state.clear()  # there may be no memory for both
        parameters = {name: parameter for parameter, name in self.names.items()}
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for path, value in {**state["tensors"], **state["numbers"]["states"]}.items():
            name, _, key = path.rpartition("/")
            if name not in parameters:
                raise RunFolderError(f"the saved optimizer state is of {name}, which is not trained here")
            found.setdefault(parameters[name], {})[key] = _placed(value, parameters[name])
        for rule, schedule, saved in zip(self.rules, self.schedules, state["numbers"]["schedules"], strict=True):
            # The position is the run's, the learning rate the settings': it may have been allowed to change.
            place = {key: saved[key] for key in ("last_epoch", "_step_count")}
            pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            rates = [peak * factor(place["last_epoch"]) for peak, factor in pairs]
            schedule.load_state_dict(schedule.state_dict() | place | {"_last_lr": rates})
            for group, rate in zip(rule.param_groups, rates, strict=True):
                group["lr"] = rate
            mine = [parameter for group in rule.param_groups for parameter in group["params"]]
            states = {index: found[parameter] for index, parameter in enumerate(mine) if parameter in found}
            # The library's own loading knows which states belong on which device.
            rule.load_state_dict({"state": states, "param_groups": rule.state_dict()["param_groups"]})
        self._unstepped.clear()
        self.allocate_state()  # of parameters that had made no step


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    """A saved state in memory of its own, sharded as the parameter is if it has the parameter's shape."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return fill(torch.empty_like(parameter, dtype=value.dtype, requires_grad=False), value)


def _schedule(config: OptimConfig, rule: torch.optim.Optimizer, warmup: int, num_updates: int) -> Any:
    """What gives the factor of the peak learning rate at an update, as transformers has it.

    Raises:
        ConfigError: the schedule refuses its arguments.
    """
    if config.lr_scheduler_type == "constant":  # transformers' schedules take two seconds to import
        return lambda update: min(1.0, update / warmup) if warmup else 1.0
    from transformers import get_scheduler

    arguments = {"num_warmup_steps": warmup, "num_training_steps": num_updates}
    more = config.lr_scheduler_kwargs
    try:
        schedule = get_scheduler(config.lr_scheduler_type, rule, **arguments, scheduler_specific_kwargs=more)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.lr_scheduler_kwargs: {error}") from None
    return schedule.lr_lambdas[0]


def _rules(model: nn.Module, parameters: Sequence[nn.Parameter], config: OptimConfig) -> list[torch.optim.Optimizer]:
    if config.optimizer == "adafactor":
        return [torch.optim.Adafactor(_groups(parameters, config), lr=config.learning_rate)]
    if config.optimizer == "adamw_8bit":
        return [_bitsandbytes().AdamW8bit(_groups(parameters, config), **_adam(config))]
    if config.optimizer == "muon":
        return _muon(model, parameters, config)
    return [_adamw(parameters, config)]


def _groups(parameters: Sequence[nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not."""
    matrices, rest = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adam(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def _adamw(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(_groups(parameters, config), **_adam(config), fused=fused)


def _muon(model: nn.Module, parameters: Sequence[nn.Parameter], config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embeddings, the head and everything that is no matrix, for which
    Muon is not meant. Its steps are scaled to AdamW's size, so that one learning rate fits both."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if head := getattr(model, "get_output_embeddings", lambda: None)():
        tables.add(id(head.weight))
    inner = [p for p in parameters if p.ndim == 2 and id(p) not in tables]
    chosen = {id(p) for p in inner}
    rest = [p for p in parameters if id(p) not in chosen]
    rules: list[torch.optim.Optimizer] = []
    if inner:
        decay = config.weight_decay
        rules.append(torch.optim.Muon(inner, config.learning_rate, decay, adjust_lr_fn="match_rms_adamw"))
    if rest:
        rules.append(_adamw(rest, config))
    return rules


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise ModelError(
            "optim.optimizer 'adamw_8bit' needs bitsandbytes, which is not installed: "
            "pip install 'cohort-rl[quantized]'"
        ) from None
    return bitsandbytes.optim
