"""``GRPOConfig``: all settings of a run, what they must satisfy together, and the schedule that follows from them.

The schedule says how many steps a run has and what each one computes. It is decided and printed before the run starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import model_validator

from cohort.config import schema
from cohort.config.schema import Section, explain_errors, setting_paths, suggestion
from cohort.errors import ConfigError, DataError
from cohort.presets import Objective, optional_parts
from cohort.presets.parts import BatchStd, DynamicSampling, GroupMean, TopK

MAX_COMPLETIONS = 1_000_000
"""Maximum number of completions in a rollout. More would fill the memory before the first update."""


class GRPOConfig(Section):
    """All settings of a run.

    Settings may be given by section, ``GRPOConfig(rollout={"num_generations": 4})``, or by name, since names are unique
    over all sections: ``GRPOConfig(num_generations=4, learning_rate=1e-5, output_dir="runs/mine")``.

    Raises:
        ConfigError: a setting is unknown (the error names the nearest one), of the wrong type, or out of range.
    """

    model: schema.ModelConfig = schema.ModelConfig()
    data: schema.DataConfig = schema.DataConfig()
    rollout: schema.RolloutConfig = schema.RolloutConfig()
    vllm: schema.VLLMConfig = schema.VLLMConfig()
    server: schema.ServerConfig = schema.ServerConfig()
    environment: schema.EnvironmentConfig = schema.EnvironmentConfig()
    reward: schema.RewardConfig = schema.RewardConfig()
    objective: schema.ObjectiveConfig = schema.ObjectiveConfig()
    optim: schema.OptimConfig = schema.OptimConfig()
    eval: schema.EvalConfig = schema.EvalConfig()
    parallel: schema.ParallelConfig = schema.ParallelConfig()
    run: schema.RunConfig = schema.RunConfig()
    report: schema.ReportConfig = schema.ReportConfig()

    def __init__(self, **settings: Any) -> None:
        with explain_errors(type(self)):
            super().__init__(**_by_section(type(self), settings))

    @model_validator(mode="after")
    def _check_together(self) -> GRPOConfig:
        objective, rollout = self.objective, self.rollout
        self._check_groups(self.resolved_objective)
        if objective.sync_ref_model and self.resolved_objective.beta == 0:
            raise ValueError("objective.sync_ref_model needs a reference policy: set objective.beta above 0")
        for name, longest in (
            ("rollout.max_completion_length", rollout.max_completion_length),
            ("eval.max_completion_length_eval", self.eval.max_completion_length_eval),
        ):
            if longest is not None and rollout.min_completion_length > longest:
                shortest = f"rollout.min_completion_length ({rollout.min_completion_length})"
                raise ValueError(f"{shortest} must be at most {name} ({longest})")
        if rollout.regex is not None and rollout.json_schema is not None:
            raise ValueError("rollout.regex and rollout.json_schema exclude each other: set one of them")
        if rollout.prompts_per_step % (minibatches := objective.resolved_minibatches):
            unset = f", unset, so that of preset {objective.preset}" if objective.minibatches is None else ""
            raise ValueError(
                f"rollout.prompts_per_step ({rollout.prompts_per_step}) must be a multiple of objective.minibatches "
                f"({minibatches}{unset}), because each optimizer step uses an equal share of prompts: set one of them"
            )
        if (count := rollout.prompts_per_step * rollout.num_generations) > MAX_COMPLETIONS:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.num_generations is {count:,}; a rollout has at most "
                f"{MAX_COMPLETIONS:,} completions"
            )
        self._check_adapters()
        self._check_layout()
        if objective.sync_ref_model and objective.ref_model_sync_steps < objective.updates_per_rollout:
            raise ValueError(
                f"objective.ref_model_sync_steps ({objective.ref_model_sync_steps}) must be at least the updates of "
                f"one rollout ({objective.updates_per_rollout}): reference log-probs are computed once per rollout"
            )
        if rollout.lag and rollout.sleep:
            raise ValueError("rollout.sleep frees memory during the update, when rollout.lag samples: unset one")
        if self.data.streaming and self.run.max_steps is None:
            raise ValueError("data.streaming reads data of unknown length: set run.max_steps")
        weights, functions = self.reward.weights, self.reward.functions
        if weights is not None and functions and len(weights) != len(functions):
            raise ValueError(f"reward.weights has {len(weights)} numbers for {len(functions)} functions")
        return self

    def _check_adapters(self) -> None:
        model = self.model
        if model.lora.dropout and not model.dropout:
            raise ValueError("model.lora.dropout needs model.dropout = true")
        if model.quantization != "none" and not model.lora.wanted:
            raise ValueError("model.quantization freezes the weights, so it needs adapters: set model.lora.rank")
        if model.lora.rank and model.lora.adapter:
            raise ValueError("model.lora.rank and model.lora.adapter exclude each other: an adapter has its own rank")
        if model.lora.wanted and self.objective.sync_ref_model:
            raise ValueError("objective.sync_ref_model excludes adapters: the reference is the model without them")

    def _check_layout(self) -> None:
        """Check that the layout can do what the settings ask for."""
        layout, rule = self.parallel.layout, self.optim.optimizer
        if layout != "replicate" and rule in ("muon", "adamw_8bit", "adafactor"):
            raise ValueError(
                f"parallel.layout {layout!r} divides the rows of each weight over the ranks, and optim.optimizer "
                f"{rule!r} needs whole weights: set optim.optimizer 'adamw' or parallel.layout 'replicate'"
            )
        if layout != "full":
            if self.parallel.offload:
                raise ValueError(f"parallel.offload needs parallel.layout 'full', which is {layout!r}: set one of them")
            return
        refused = {
            "model.quantization": self.model.quantization != "none",
            "model.lora.save_merged": self.model.lora.save_merged,
            "model.router_aux_loss_coef": self.model.router_aux_loss_coef > 0,
            "report.term_norms_steps": self.report.term_norms_steps > 0,
        }
        for setting, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{setting} needs weights that parallel.layout 'full' has divided: leave it unset, or set "
                    "parallel.layout to 'optimizer' or 'replicate'"
                )

    def _check_groups(self, objective: Objective) -> None:
        """Check the parts of the objective that depend on the number of completions or on the sign of the rewards."""
        size, scale, kept = self.rollout.num_generations, objective.scale, objective.group_filter
        if size == 1 and objective.group_relative:
            part = f"scale {scale.rule!r}" if scale else f"baseline {objective.baseline!r}"
            raise ValueError(
                f"rollout.num_generations is 1, and {part} compares a completion with the others of its group: set "
                "num_generations to 2 or more, or objective.baseline to 'batch_mean' and objective.scale to 'none'"
            )
        if isinstance(kept, TopK) and kept.k >= size:
            raise ValueError(
                f"objective.group_filter.k ({kept.k}) must be less than rollout.num_generations ({size}), or no "
                "completion is left out: raise num_generations, to 16 or 24, or lower k"
            )
        part = "scale 'group_mean'" if isinstance(scale, GroupMean) else "unlikeliness"
        if (isinstance(scale, GroupMean) or objective.unlikeliness) and min(self.reward.weights or (0,)) < 0:
            raise ValueError(f"objective.{part} needs rewards that are not negative: reward.weights has a negative one")
        of_rollout = objective.baseline == "batch_mean" or isinstance(scale, BatchStd)
        if of_rollout and size * self.rollout.prompts_per_step == 1:
            raise ValueError(
                "the objective compares the completions of a rollout, which has only one: raise "
                "rollout.prompts_per_step or rollout.num_generations"
            )

    @property
    def resolved_objective(self) -> Objective:
        """The preset with its changes, and with the lengths that follow from the rollout.

        Raises:
            ConfigError: the parts cannot be combined.
        """
        objective = self.objective.resolve()
        if objective.aggregation == "constant" and objective.aggregation_length is None:
            return objective.replace(aggregation_length=self.rollout.max_completion_length)
        return objective


def _by_section(schema: type[GRPOConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given by name, sorted into their sections."""
    paths = setting_paths(schema)
    sections = {key: value for key, value in settings.items() if key in schema.model_fields}
    by_name = {key: value for key, value in settings.items() if key not in sections}
    if unknown := [
        f"unknown setting {key!r}{suggestion(key, schema, python=True)}" for key in by_name if key not in paths
    ]:
        raise ConfigError("\n".join(unknown))
    for key, value in by_name.items():
        name = paths[key].partition(".")[0]
        section = sections.get(name, {})
        given = dict(section) if isinstance(section, Mapping) else section.model_dump(exclude_unset=True)
        if key in given:
            raise ConfigError(f"{key!r} is given twice: by its name and in section {name!r}")
        # For an optional part, None means absent, not unset.
        sections[name] = {**given, key: "none" if value is None and key in optional_parts() else value}
    return sections


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the settings and the number of training prompts determine."""

    config: GRPOConfig
    objective: Objective
    """The objective, with the numbers that the settings leave open."""
    num_prompts: int | None
    """Prompts of an epoch. None: the data is streamed."""
    total: int | None
    """Prompts of the whole run. None: ``run.max_steps`` ends it."""
    steps: int
    """Rollouts."""
    last_prompts: int
    """Prompts of the last step, which uses what remains of the epochs."""
    needs_old_logps: bool
    """Whether the log-probs of the weights before the first update are computed: several updates use a
    rollout, or the objective needs them (a KL in the reward or the advantage)."""
    needs_ref_logps: bool
    """Whether the reference's log-probs are computed before the first update: beta is not 0, and the KL is estimated
    from sampled tokens."""

    @classmethod
    def of(cls, config: GRPOConfig, num_prompts: int | None) -> Schedule:
        """The schedule of a run.

        Args:
            config: the settings.
            num_prompts: prompts of an epoch; None for streamed data.

        Raises:
            DataError: the data set is smaller than one step, or the data is streamed without ``run.max_steps``.
        """
        prompts, objective = config.rollout.prompts_per_step, config.resolved_objective
        if num_prompts is None and config.run.max_steps is None:
            raise DataError("the training data is streamed, so its length is unknown: set run.max_steps")
        if num_prompts is not None and num_prompts < prompts:
            raise DataError(
                f"the training data has {num_prompts} prompts, fewer than one step uses: "
                f"set rollout.prompts_per_step (now {prompts}) to {num_prompts} or less"
            )
        total = None if num_prompts is None or config.run.max_steps else num_prompts * config.run.num_epochs
        steps = config.run.max_steps or math.ceil((total or 0) / prompts)
        last_prompts = prompts if total is None else total - (steps - 1) * prompts
        needs_old_logps = config.objective.updates_per_rollout > 1 or objective.advantages_need_logps
        needs_ref_logps = objective.beta != 0 and objective.kl.estimator == "sampled"
        return cls(config, objective, num_prompts, total, steps, last_prompts, needs_old_logps, needs_ref_logps)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of every step but the last one."""
        return self.config.rollout.prompts_per_step

    def prompts_of(self, step: int) -> int:
        """Number of prompts of a step. Steps count from 0."""
        return self.last_prompts if step == self.steps - 1 else self.prompts_per_step

    def resumed(self, step: int, consumed: int) -> Schedule:
        """The schedule of a run that continues after ``step`` steps, which consumed ``consumed`` prompts.

        It differs from this one if ``run.num_epochs`` was raised after a last step with fewer prompts.
        """
        full_steps = consumed == step * self.prompts_per_step
        if self.total is None or full_steps or isinstance(self.objective.group_filter, DynamicSampling):
            return self
        left = self.total - consumed
        steps = step + math.ceil(left / self.prompts_per_step)
        return replace(self, steps=steps, last_prompts=left - (steps - step - 1) * self.prompts_per_step)

    @property
    def updates(self) -> int:
        """Maximum number of optimizer steps of the run: a rollout with fewer groups than minibatches has fewer."""
        objective = self.config.objective
        of_last = objective.num_iterations * min(objective.resolved_minibatches, self.last_prompts)
        return (self.steps - 1) * objective.updates_per_rollout + of_last

    def describe(self) -> str:
        """The schedule in words."""
        updates, size = self.config.objective, self.config.rollout.num_generations
        old = "not computed: one update per rollout, the old policy is the current one by identity"
        if self.needs_old_logps:
            why = f"{updates.updates_per_rollout} updates use it"
            why = "the KL needs it" if self.objective.advantages_need_logps else why
            old = f"one no-grad pass per rollout ({why})"
        elif self.objective.ratio_anchor == "old":
            old += ": every ratio is 1"
            region = self.objective.trust_region
            if region is not None and region.rule != "custom" and not self.config.rollout.lag:
                old += f"; {region.rule} has no effect without several updates (objective.minibatches)"
        elif self.objective.ratio_anchor == "sampler" and self.config.rollout.engine in ("local", "auto"):
            old += "; the engine samples with the same weights, so every ratio is 1 but for rounding"
        ref = "one no-grad pass per rollout" if self.needs_ref_logps else "over the vocabulary, in every update"
        if self.objective.beta == 0:
            ref = "not computed: beta is 0, no reference model"
        lag = f"\n  {self._lag()}" if self.config.rollout.lag else ""
        return (
            f"schedule: {self.prompts_per_step} prompts x {size} = {self.prompts_per_step * size} completions per "
            f"rollout, {_count(updates.updates_per_rollout, 'update')} each "
            f"({_count(updates.num_iterations, 'iteration')} x {self._minibatches()})\n"
            f"  {self._length()}\n  old log-probs: {old}\n  ref log-probs: {ref}{lag}"
        )

    def _minibatches(self) -> str:
        """The minibatches in words, and where their number comes from."""
        given, count = self.config.objective.minibatches, self.config.objective.resolved_minibatches
        origin = f" of preset {self.objective.identity}" if given is None else " of objective.minibatches"
        return _count(count, "minibatch", "es") + origin * (count > 1 or given is not None)

    def _lag(self) -> str:
        """The lag in words."""
        lag, objective = self.config.rollout.lag, self.objective
        seen = objective.ratio_anchor == "sampler" or bool(objective.mismatch)
        return f"lag: step t trains on what the weights after step t - {lag + 1} have drawn, beside the training" + (
            ""
            if seen
            else "; nothing in the objective looks at the difference: set objective.mismatch (see 'cohort docs scale')"
        )

    def _length(self) -> str:
        """The length of the run in words."""
        run = f"{_count(self.steps, 'rollout')} = {_count(self.updates, 'update')}"
        if self.num_prompts is None:
            return f"{run}, on streamed prompts"
        rollouts = f"{self.num_prompts / self.prompts_per_step:,.2f}".rstrip("0").rstrip(".")
        per_epoch = f"{rollouts} rollouts per epoch on {self.num_prompts:,} prompts"
        if self.total is None:
            return f"{per_epoch}; {run}, {self.steps * self.prompts_per_step / self.num_prompts:.3g} epochs"
        short = self.last_prompts < self.prompts_per_step
        last = f", the last of {_count(self.last_prompts, 'prompt')}" if short else ""
        return f"{per_epoch}; {_count(self.total // self.num_prompts, 'epoch')} = {run}{last}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
