"""The settings, in sections. One TOML table per section, one ``--section.key`` per setting, one ``GRPOConfig`` in
Python.

A field's docstring says what it does, its unit and its off value; ``cohort config`` prints them all as a TOML file.
Importing this module imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from cohort.config.data import DataConfig
from cohort.config.evaluation import EvalConfig
from cohort.config.objective import ObjectiveConfig
from cohort.config.section import Count, Numbers, PathName, PositiveInt, Section, Strings
from cohort.presets import Objective
from cohort.presets.parts import BatchStd, GroupMean, TopK


class LoraConfig(Section):
    """Low-rank adapters instead of all weights; needs the extra "lora"."""

    rank: Count = 0
    """Rank of the adapters. 0: none, all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter's output is multiplied by alpha / rank ("rslora": alpha / sqrt(rank)). Unset: twice the rank."""
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """"rslora" scales for high ranks (arXiv 2312.03732), "dora" trains each matrix's column norms too (arXiv
    2402.09353)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapters. Needs `model.dropout`."""
    target_modules: Strings = ("all-linear",)
    """Which modules get one, by the ends of their names; "all-linear": all linear layers but the head."""
    modules_to_save: Strings = ()
    """Modules that are trained whole and saved with the adapter, as in ["lm_head"]."""
    adapter: PathName = ""
    """The folder of an adapter to train on with, in place of a new one; `rank` and what follows it are then its own.
    The reference is the adapter as it is loaded."""
    save_merged: bool = False
    """Also write the model with the adapter merged into it, to merged/ in the run folder, at the end."""

    @property
    def wanted(self) -> bool:
        """Whether there are adapters at all."""
        return bool(self.rank or self.adapter)


class ModelConfig(Section):
    """The policy."""

    path: PathName = ""
    """A Hugging Face causal language model: a folder, or a hub id. In Python the `model` argument takes its place."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """What the model computes in. The trained weights are float32 (float64 for "float64"); "bfloat16" computes in
    bfloat16 over them. "auto" is bfloat16 where the hardware is faster with it: CUDA and CPUs with AMX, and CPUs with
    AVX512-BF16 from a hidden size of 256 on; float32 elsewhere."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1". "auto" is CUDA where there is one, else the CPU."""
    dropout: bool = False
    """Keep the model's own dropout in the update. Off, as dropout makes the policy that is updated another one than the
    policy that sampled."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; see below."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Keep the model's frozen weights in so many bits ("4bit": NF4) under adapters, as QLoRA does (arXiv 2305.14314);
    needs `model.lora` and the extra "quantized"."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Of a mixture-of-experts model: what the load-balancing loss (arXiv 2101.03961) over the completions' tokens
    weighs in an update. Costs a pass without gradient. 0: off."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same gradient."""
    native_kernels: bool = True
    """On a CPU, what lies between the matrix products of sampling and of updates is computed in C, compiled at its
    first use by the machine's own compiler; without one, torch does it. Speed and memory only: the draws stay the same,
    and so do samples and gradients up to rounding."""
    trust_remote_code: bool = False
    """Run model code that comes with the model's folder."""


class RolloutConfig(Section):
    """Sampling."""

    prompts_per_step: PositiveInt = 8
    """Prompts in a rollout (P)."""
    num_generations: PositiveInt = 8
    """Completions per prompt (G). At least 2 where a completion is judged against the others of its group."""
    max_completion_length: PositiveInt = 256
    """Tokens after which a completion is cut (finish reason "length")."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in sampling and in every log-probability of the trainer alike."""
    top_k: Count = 0
    """Draw from the k likeliest tokens only. 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities reach p. 1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw from tokens at least so many times as likely as the likeliest. 0: all."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Logits of tokens that stand in the prompt or the completion are divided by it where positive and multiplied where
    negative. 1: off."""
    min_completion_length: Count = 0
    """No end token is drawn, and no stop string is looked for, before so many tokens. 0: off."""
    regex: str | None = None
    """Draw only what keeps the completion on the way to a text that matches this regular expression as a whole. Unset:
    anything."""
    json_schema: str | None = None
    """The same for JSON that a schema accepts: the schema as JSON text, or the name of a .json file with it, which is
    read at once. Unset: anything."""
    replay_sampling: bool = True
    """The update computes log-probabilities over what each token was drawn from, not over the whole vocabulary. Off:
    ratios take the truncated distribution for the policy's. Without any of the settings from `top_k` on the two are the
    same."""
    stop: Strings = ()
    """Strings that end a completion. Their tokens stay part of it."""
    max_batch_size: PositiveInt = 256
    """Completions decoded at a time, at most. Memory only: the draws stay the same, and so do the samples up to
    rounding."""
    cache_tokens: PositiveInt | None = None
    """Tokens whose keys and values are held at a time, prompts' included; completions that do not fit wait for their
    turn. Memory only, as above. Unset: as many as half of the free memory holds."""

    @property
    def replayed_penalty(self) -> float:
        """The repetition penalty that the update's log-probs are computed with."""
        return self.repetition_penalty if self.replay_sampling else 1.0

    @field_validator("json_schema")
    @classmethod
    def _read_schema(cls, value: str | None) -> str | None:
        """The schema's text, so that the settings of a run hold it whatever becomes of the file."""
        if value is None:
            return None
        text = value
        if value.endswith(".json"):
            try:
                text = Path(value).expanduser().read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"cannot read {value}: {error.strerror}") from None
        try:
            json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"expected a JSON schema, as JSON text or as the name of a .json file, got {value!r:.60} ({error})"
            ) from None
        return text.strip()


class RewardConfig(Section):
    """What is good."""

    functions: Strings = ()
    """Reward functions: built-in names (`cohort rewards` lists them), "module:function", or "file.py:function". Values
    for their parameters stand in brackets: "soft_overlong(max_length=1024, buffer=256)"."""
    weights: Numbers | None = None
    """One weight per function. Unset: 1 each."""
    workers: Count = 0
    """Processes in which plain functions are called, while sampling goes on. 0: they are called in this process, after
    sampling, unless `timeout` is set; it takes a process to stop one."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one call may take: of one completion for functions that see one, of a group or the whole rollout for
    the others. Then the call is ended, its worker killed. Unset: any."""
    retries: Count = 0
    """A call that failed is made again so many times, after the others have ended."""
    on_error: Literal["unscored", "stop"] = "unscored"
    """What becomes of a completion whose scoring raised, took too long or gave no finite number: "unscored" keeps it
    out of the update and of its group's statistics, with its traceback in the log and in rollouts/; "stop" ends the
    run, as it does when a function fails on all completions of a rollout."""
    cache: bool = False
    """Do not call a function again for a row and a completion that it has scored before. For functions that see one
    completion, and give the same number each time."""
    max_concurrent: PositiveInt = 256
    """Async calls that are under way at a time, at most."""


class OptimConfig(Section):
    """The optimizer."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """"adamw_8bit" keeps AdamW's state in 8 bits (bitsandbytes, in the extra "quantized"); "adafactor" keeps a row and
    a column per matrix, and takes no `adam_*`; "muon" orthogonalises the steps of the layers' matrices, scaled to
    AdamW's size, and leaves embeddings, head and vectors to AdamW."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the squared gradient's mean."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The gradient's norm is cut to this."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "constant"
    """Schedule after the warm-up, by transformers' names."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises: update k has k/warmup_steps of the peak."""
    microbatch_tokens: PositiveInt | None = None
    """Tokens of one pass over prompts or completions. Memory only: the gradient is the same whatever it is. Unset: what
    half of the free memory holds, at most 1,024 on a CPU and 16,384 on CUDA; halved when memory runs out."""
    max_nonfinite_updates: PositiveInt = 3
    """An update whose log-probabilities, coefficients or gradient are not finite is not made, and its batch is written
    to nonfinite/ in the run folder; so many in a row stop the run."""


class RunConfig(Section):
    """How long, where to, how often."""

    output_dir: PathName | None = None
    """The run's folder. Must not hold another run. Unset: the next free runs/NAME-001."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds sampling, the order of the data and everything else that is drawn."""
    max_steps: PositiveInt | None = None
    """Rollouts to train on. Unset: as many as `num_epochs` takes."""
    num_epochs: PositiveInt = 1
    """Times each prompt is used, unless `max_steps` says otherwise. The last step takes what is left, so that no prompt
    is used more often than another."""
    save_steps: Count = 50
    """Write a checkpoint every so many steps, and at the end. 0: at the end only."""
    save_total_limit: PositiveInt | None = None
    """Keep only the newest so many checkpoints. Unset: all."""


class ReportConfig(Section):
    """What a run shows and keeps."""

    progress: bool = True
    """Print what the run is at its start, its progress and its evaluations. Off: nothing is printed."""
    log_completions: bool = True
    """Keep every completion with its tokens, log-probs, rewards and advantage in rollouts/step-N.parquet, and those of
    evaluations in evaluations/."""
    check_saved: bool = True
    """Read the weights of the last checkpoint and of best/ back when they are written, and compare them bit for bit
    with what was trained."""
    term_norms_steps: Count = 0
    """Every so many steps, measure the gradient's norm of each term (policy, KL, entropy) by a backward pass of its own
    over the first minibatch. 0: never."""
    update_kl_completions: Count = 8
    """Measure how far each step moved the policy (update_kl) on so many of its completions. 0: do not."""


class GRPOConfig(Section):
    """All settings of a run.

    Settings may be given by section, ``GRPOConfig(rollout={"num_generations": 4})``, or by their own names, which are
    unique over all sections: ``GRPOConfig(num_generations=4, learning_rate=1e-5, output_dir="runs/mine")``.

    Raises:
        ConfigError: a setting is unknown (the nearest name is given), of the wrong type, or out of range.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()
    report: ReportConfig = ReportConfig()

    SECTIONS: ClassVar[tuple[str, ...]] = (
        *("model", "data", "rollout", "reward", "objective", "optim", "eval", "run", "report"),
    )

    def __init__(self, **settings: Any) -> None:
        from cohort.config.load import explain_errors, nest_settings

        with explain_errors():
            super().__init__(**nest_settings(type(self), settings))

    @model_validator(mode="after")
    def _check_together(self) -> GRPOConfig:
        objective, rollout, optim = self.objective, self.rollout, self.optim
        resolved = self.resolved_objective
        self._check_groups(resolved)
        if objective.sync_ref_model and resolved.beta == 0:
            raise ValueError("objective.sync_ref_model needs a reference policy: set objective.beta above 0")
        if rollout.min_completion_length > rollout.max_completion_length:
            raise ValueError(
                f"rollout.min_completion_length ({rollout.min_completion_length}) must be at most "
                f"rollout.max_completion_length ({rollout.max_completion_length})"
            )
        if rollout.min_completion_length > (self.eval.max_completion_length_eval or rollout.max_completion_length):
            raise ValueError(
                f"rollout.min_completion_length ({rollout.min_completion_length}) must be at most "
                f"eval.max_completion_length_eval ({self.eval.max_completion_length_eval})"
            )
        if rollout.regex is not None and rollout.json_schema is not None:
            raise ValueError("rollout.regex and rollout.json_schema exclude each other: set one of them")
        if rollout.prompts_per_step % objective.minibatches:
            raise ValueError(
                f"rollout.prompts_per_step ({rollout.prompts_per_step}) must be a multiple of objective.minibatches "
                f"({objective.minibatches}): each optimizer step uses an equal share of the prompts"
            )
        self._check_adapters()
        if optim.warmup_steps and optim.lr_scheduler_type == "constant":
            raise ValueError(
                "optim.warmup_steps has no effect with lr_scheduler_type 'constant': set 'constant_with_warmup'"
            )
        if objective.sync_ref_model and objective.ref_model_sync_steps < objective.updates_per_rollout:
            raise ValueError(
                f"objective.ref_model_sync_steps ({objective.ref_model_sync_steps}) must be at least the updates of "
                f"one rollout ({objective.updates_per_rollout}): reference log-probs are computed once per rollout"
            )
        if self.data.streaming and self.run.max_steps is None:
            raise ValueError("data.streaming reads data whose length is not known: set run.max_steps")
        weights, functions = self.reward.weights, self.reward.functions
        if weights is not None and functions and len(weights) != len(functions):
            raise ValueError(f"reward.weights has {len(weights)} numbers for {len(functions)} functions")
        return self

    def _check_adapters(self) -> None:
        model = self.model
        if model.lora.dropout and not model.dropout:
            raise ValueError("model.lora.dropout needs model.dropout = true")
        if model.quantization != "none" and not model.lora.wanted:
            raise ValueError("model.quantization needs adapters, as it freezes the weights: set model.lora.rank")
        if model.lora.rank and model.lora.adapter:
            raise ValueError("model.lora.rank and model.lora.adapter exclude each other: an adapter has its own rank")
        if model.lora.wanted and self.objective.sync_ref_model:
            raise ValueError("objective.sync_ref_model is not for adapters: the reference is the model without them")

    def _check_groups(self, objective: Objective) -> None:
        """Parts of the objective that depend on the group's size or on the rewards' sign."""
        size = self.rollout.num_generations
        if size == 1 and objective.group_relative:
            what = f"scale {objective.scale.rule!r}" if objective.scale else f"baseline {objective.baseline!r}"
            raise ValueError(
                f"rollout.num_generations is 1, and {what} compares a completion with the others of its group: set "
                "num_generations to 2 or more, or objective.baseline to 'batch_mean' and objective.scale to 'none'"
            )
        if isinstance(objective.group_filter, TopK) and objective.group_filter.k >= size:
            raise ValueError(
                f"objective.group_filter.k is {objective.group_filter.k}, which leaves none of "
                f"rollout.num_generations ({size}) out: raise num_generations, to 16 or 24, or lower k"
            )
        what = "scale 'group_mean'" if isinstance(objective.scale, GroupMean) else "unlikeliness"
        if (isinstance(objective.scale, GroupMean) or objective.unlikeliness) and min(self.reward.weights or (0,)) < 0:
            raise ValueError(f"objective.{what} needs rewards that are not negative: reward.weights has a negative one")
        of_batch = objective.baseline == "batch_mean" or isinstance(objective.scale, BatchStd)
        if of_batch and size * self.rollout.prompts_per_step == 1:
            raise ValueError(
                "a rollout of one completion has no batch to be compared with: raise rollout.prompts_per_step or "
                "rollout.num_generations"
            )

    @property
    def resolved_objective(self) -> Objective:
        """The objective that these settings come to: the preset, its changes, and lengths that follow from the rollout.

        Raises:
            ConfigError: the parts cannot be combined.
        """
        objective = self.objective.resolve()
        if objective.aggregation == "constant" and objective.aggregation_length is None:
            return objective.replace(aggregation_length=self.rollout.max_completion_length)
        return objective
