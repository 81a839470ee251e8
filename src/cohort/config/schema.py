"""The sections of the settings, and ``GRPOConfig``, which holds them.

Each setting has a docstring with its meaning, its unit and the value that turns it off; ``cohort config`` prints them
all as a TOML file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cohort.config.data import DataConfig
from cohort.config.errors import explain_errors, suggestion
from cohort.config.evaluation import EvalConfig
from cohort.config.objective import ObjectiveConfig
from cohort.config.section import (
    Count,
    Numbers,
    PathName,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
    Strings,
    read_text,
    setting_paths,
)
from cohort.errors import ConfigError
from cohort.presets import Objective, optional_parts
from cohort.presets.parts import BatchStd, GroupMean, TopK


class LoraConfig(Section):
    """Low-rank adapters instead of all weights; needs the extra "lora"."""

    rank: Count = 0
    """Rank of the adapters. 0: no adapters; all weights are trained."""
    alpha: PositiveFloat | None = None
    """The adapter's output is multiplied by alpha / rank ("rslora": alpha / sqrt(rank)). Unset: twice the rank."""
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """"rslora" scales for high ranks (arXiv 2312.03732); "dora" also trains each matrix's column norms (arXiv
    2402.09353)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapters. Needs `model.dropout`."""
    target_modules: Strings = ("all-linear",)
    """Modules that get an adapter, by the ends of their names. "all-linear": all linear layers except the head."""
    modules_to_save: Strings = ()
    """Modules that are trained in full and saved with the adapter, as in ["lm_head"]."""
    adapter: PathName = ""
    """The folder of an existing adapter to continue training. Its own settings replace `rank` and those below it. The
    reference is the adapter as it is loaded."""
    save_merged: bool = False
    """At the end, also write the model with the adapter merged into it, to merged/ in the run folder."""

    @property
    def wanted(self) -> bool:
        """Whether adapters are used."""
        return bool(self.rank or self.adapter)


class ModelConfig(Section):
    """The policy."""

    path: PathName = ""
    """A Hugging Face causal language model: a folder or a hub id. In Python, pass the `model` argument instead."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute precision. The trained weights are float32 (float64 for "float64"); "bfloat16" computes in bfloat16 over
    them. "auto" is bfloat16 where the hardware is faster with it (CUDA, CPUs with AMX, and CPUs with AVX512-BF16 from a
    hidden size of 256), and float32 elsewhere."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1". "auto" is CUDA if available, else the CPU."""
    dropout: bool = False
    """Keep the model's own dropout in updates. Off by default: dropout makes the updated policy differ from the policy
    that sampled."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; see below."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Quantize the frozen weights under adapters ("4bit": NF4), as in QLoRA (arXiv 2305.14314). Needs `model.lora` and
    the extra "quantized"."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models (arXiv 2101.03961), over the completions' tokens.
    Costs a pass without gradient. 0: off."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same gradient."""
    native_kernels: bool = True
    """On a CPU, compute everything between the matrix products in C, compiled at first use by the machine's compiler;
    without a compiler, torch computes it. Affects speed and memory only: random draws are the same, samples and
    gradients are equal up to rounding."""
    trust_remote_code: bool = False
    """Run model code from the model's folder."""


class RolloutConfig(Section):
    """Sampling."""

    prompts_per_step: PositiveInt = 8
    """Prompts in a rollout (P)."""
    num_generations: PositiveInt = 8
    """Completions per prompt (G). At least 2 if the objective compares the completions of a group."""
    max_completion_length: PositiveInt = 256
    """Maximum number of tokens of a completion (finish reason "length")."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, in sampling and in every log-probability of the trainer."""
    top_k: Count = 0
    """Sample from the k most likely tokens only. 0: all."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to p. 1: all."""
    min_p: Share = 0.0
    """Sample from tokens at least this fraction as likely as the most likely one. 0: all."""
    repetition_penalty: PositiveFloat = 1.0
    """The logits of tokens that occur in the prompt or the completion are divided by this if positive and multiplied by
    it if negative. 1: off."""
    min_completion_length: Count = 0
    """Before this many tokens, no end token is sampled and stop strings are ignored. 0: off."""
    regex: str | None = None
    """Sample only completions that match this regular expression as a whole. Unset: anything."""
    json_schema: str | None = None
    """Sample only JSON that this schema accepts: JSON text, or the name of a .json file, which is read at once. Unset:
    anything."""
    replay_sampling: bool = True
    """Compute the update's log-probabilities over the tokens that sampling could choose from, instead of over the whole
    vocabulary. Off: ratios treat the truncated distribution as the policy's. Makes a difference only with the settings
    from `top_k` on."""
    stop: Strings = ()
    """Strings that end a completion. Their tokens remain part of it."""
    max_batch_size: PositiveInt = 256
    """Maximum number of completions decoded at the same time. Affects memory only: random draws are the same, samples
    are equal up to rounding."""
    cache_tokens: PositiveInt | None = None
    """Maximum number of tokens in the key-value cache, including prompts; completions that do not fit wait. Affects
    memory only, as above. Unset: as many as fit half of the free memory."""

    @property
    def replayed_penalty(self) -> float:
        """The repetition penalty of the update's log-probs."""
        return self.repetition_penalty if self.replay_sampling else 1.0

    @field_validator("json_schema")
    @classmethod
    def _read_schema(cls, value: str | None) -> str | None:
        """Return the schema's text, so that the run's settings do not depend on the file."""
        if value is None:
            return None
        text = read_text(value) if value.endswith(".json") else value
        try:
            json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"expected a JSON schema, as JSON text or as the name of a .json file, got {value!r:.60} ({error})"
            ) from None
        return text.strip()


class EnvironmentConfig(Section):
    """Tools and environments: completions of several turns."""

    tools: Strings = ()
    """Tools: built-in names ("python", "calculator"), "module:function", "file.py:function", or "mcp:" with a command
    or a URL. A function needs type hints and a docstring, from which its JSON schema is made. Rows whose column `tools`
    lists names can use those only."""
    factory: str | dict[str, str] = ""
    """An environment for each completion: "module:Class" or "file.py:Class". A table names several, and the column
    `environment` of a row chooses one."""
    max_turns: PositiveInt = 16
    """Maximum number of turns of an episode (finish reason "turns")."""
    max_turn_length: PositiveInt | None = None
    """Maximum number of tokens drawn in a turn (finish reason "length"). Unset: as many as
    `rollout.max_completion_length` leaves, which counts the tokens of all turns and answers."""
    max_observation_tokens: PositiveInt | None = None
    """Maximum number of tokens of an answer; of a longer one, the middle is replaced by a note that says how much is
    missing. Unset: no limit. An answer that leaves no room within `rollout.max_completion_length` ends the episode
    (finish reason "length")."""
    call_timeout: PositiveFloat | None = None
    """Time limit of a call of a tool or environment in seconds. Plain functions then run in worker processes, which can
    be killed. Unset: no limit."""
    episode_timeout: PositiveFloat | None = None
    """Time limit of an episode in seconds, sampling included (finish reason "timeout"). Unset: no limit."""
    call_retries: Count = 0
    """How often a tool call is repeated when its worker dies or it exceeds `call_timeout`. Environments are not
    repeated."""
    tool_workers: Count = 0
    """Worker processes for plain tools and environments. 0: they run in this process, unless `call_timeout` is set."""
    max_environments: PositiveInt = 256
    """Maximum number of environments that exist, and of async calls, at the same time; episodes beyond wait."""
    history: str = "append"
    """What the policy reads after a turn. "append": all tokens so far, then the answer. "template": the conversation as
    the chat template renders it, which may leave out earlier thoughts. "module:function" or "file.py:function": the
    messages that a function returns for those so far. Whatever is rewritten begins a new segment."""
    parser: str | None = None
    """A function that finds the calls in a turn's text: "module:function" or "file.py:function". Unset: the format is
    found in the chat template."""

    @property
    def wanted(self) -> bool:
        """Whether the settings name tools or an environment."""
        return bool(self.tools or self.factory)


class RewardConfig(Section):
    """Reward functions."""

    functions: Strings = ()
    """Reward functions: built-in names (`cohort rewards` lists them), "module:function", or "file.py:function".
    Arguments follow in parentheses: "soft_overlong(max_length=1024, buffer=256)"."""
    weights: Numbers | None = None
    """One weight per function. Unset: 1 each."""
    workers: Count = 0
    """Worker processes that call plain functions while sampling continues. 0: functions are called in this process
    after sampling, unless `timeout` is set, which needs a process that can be stopped."""
    timeout: PositiveFloat | None = None
    """Time limit of a call in seconds; a call scores one completion, a group or the rollout, depending on the function.
    The worker of a call that exceeds it is killed. Unset: no limit."""
    retries: Count = 0
    """How often a failed call is repeated, after the other calls have ended."""
    on_error: Literal["unscored", "stop"] = "unscored"
    """What to do when a function raises, exceeds the timeout or returns a number that is not finite. "unscored"
    excludes the completion from the update and from its group's statistics, and writes the traceback to the log and to
    rollouts/; "stop" ends the run. A function that fails on all completions of a rollout always ends the run."""
    cache: bool = False
    """Reuse the score of a row and completion that were scored before. For deterministic functions that score one
    completion at a time."""
    max_concurrent: PositiveInt = 256
    """Maximum number of concurrent async calls."""


class OptimConfig(Section):
    """The optimizer."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """"adamw_8bit" keeps AdamW's state in 8 bits (bitsandbytes, in the extra "quantized"); "adafactor" keeps one row
    and one column per matrix, and uses none of `adam_*`; "muon" orthogonalises the updates of the layers' matrices,
    scaled to AdamW's size, and uses AdamW for embeddings, head and vectors."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "constant"
    """Schedule after the warm-up, by transformers' names."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises: update k has k/warmup_steps of the peak."""
    microbatch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one forward and backward pass. Affects memory only: the gradient is the same. Unset:
    what half of the free memory holds, at most 1,024 on a CPU and 16,384 on CUDA. Halved when memory runs out."""
    max_nonfinite_updates: PositiveInt = 3
    """An update with non-finite log-probabilities, coefficients or gradient is skipped, and its batch is written to
    nonfinite/ in the run folder. This many in a row stop the run."""


class RunConfig(Section):
    """Duration, output and checkpoints."""

    output_dir: PathName | None = None
    """The run folder. Must not contain another run. Unset: the next free runs/NAME-001."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of sampling, data order and all other random numbers."""
    max_steps: PositiveInt | None = None
    """Number of rollouts. Unset: determined by `num_epochs`."""
    num_epochs: PositiveInt = 1
    """How often each prompt is used, unless `max_steps` is set. The last step uses the remaining prompts, so that all
    prompts are used equally often."""
    save_steps: Count = 50
    """Write a checkpoint every this many steps, and at the end. 0: at the end only."""
    save_total_limit: PositiveInt | None = None
    """Number of checkpoints to keep; older ones are deleted. Unset: all."""


class ReportConfig(Section):
    """Output and diagnostics."""

    progress: bool = True
    """Print a description of the run at its start, progress and evaluations. Off: print nothing."""
    log_completions: bool = True
    """Write every completion with its tokens, log-probs, rewards and advantage to rollouts/step-N.parquet, and those of
    evaluations to evaluations/."""
    check_saved: bool = True
    """Read back the weights of the last checkpoint and of best/ after writing, and compare them bit for bit with the
    trained ones."""
    term_norms_steps: Count = 0
    """Every this many steps, measure the gradient norm of each term (policy, KL, entropy) with a separate backward pass
    over the first minibatch. 0: never."""
    update_kl_completions: Count = 8
    """Number of completions per step on which to measure how far the step moved the policy (update_kl). 0: off."""


class GRPOConfig(Section):
    """All settings of a run.

    Settings may be given by section, ``GRPOConfig(rollout={"num_generations": 4})``, or by name, since names are unique
    over all sections: ``GRPOConfig(num_generations=4, learning_rate=1e-5, output_dir="runs/mine")``.

    Raises:
        ConfigError: a setting is unknown (the error names the nearest one), of the wrong type, or out of range.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()
    report: ReportConfig = ReportConfig()

    def __init__(self, **settings: Any) -> None:
        with explain_errors(type(self)):
            super().__init__(**_by_section(type(self), settings))

    @model_validator(mode="after")
    def _check_together(self) -> GRPOConfig:
        objective, rollout, optim = self.objective, self.rollout, self.optim
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
        if rollout.prompts_per_step % objective.minibatches:
            raise ValueError(
                f"rollout.prompts_per_step ({rollout.prompts_per_step}) must be a multiple of objective.minibatches "
                f"({objective.minibatches}): each optimizer step uses an equal share of the prompts"
            )
        self._check_adapters()
        if optim.warmup_steps and optim.lr_scheduler_type == "constant":
            raise ValueError("optim.warmup_steps needs a schedule: set optim.lr_scheduler_type 'constant_with_warmup'")
        if objective.sync_ref_model and objective.ref_model_sync_steps < objective.updates_per_rollout:
            raise ValueError(
                f"objective.ref_model_sync_steps ({objective.ref_model_sync_steps}) must be at least the updates of "
                f"one rollout ({objective.updates_per_rollout}): reference log-probs are computed once per rollout"
            )
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
        if objective.credit == "process" and self.environment.factory:
            raise ValueError(
                "objective.credit 'process' is biased where the number of turns depends on the policy, as with rewards "
                "of an environment: set objective.credit 'turns' (baseline 'leave_one_out', scale 'none') or 'outcome'"
            )
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
    for key, value in settings.items():
        if key in schema.model_fields:
            continue
        if key not in paths:
            raise ConfigError(f"unknown setting {key!r}{suggestion(key, schema)}")
        name = paths[key].partition(".")[0]
        section = sections.get(name, {})
        given = dict(section) if isinstance(section, Mapping) else section.model_dump(exclude_unset=True)
        if key in given:
            raise ConfigError(f"{key!r} is given twice: by its name and in section {name!r}")
        # For an optional part, None means absent, not unset.
        sections[name] = {**given, key: "none" if value is None and key in optional_parts() else value}
    return sections
