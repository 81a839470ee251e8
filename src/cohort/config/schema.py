"""The sections of the settings besides ``[data]`` and ``[objective]``.

Each setting has a docstring with its meaning, its unit and the value that turns it off; ``cohort config`` prints them
all as a TOML file.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cohort.config.section import (
    Count,
    Numbers,
    PathName,
    PositiveFloat,
    PositiveInt,
    PositiveInts,
    PositiveShare,
    Section,
    Share,
    Strings,
    read_text,
)

MAX_GENERATIONS = 65_536
"""Maximum number of completions of a prompt. A run with more would fill the memory before its first step."""
Workers = Annotated[int, Field(ge=0, le=1024)]
Retries = Annotated[int, Field(ge=0, le=1000)]


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
    """A Hugging Face causal language model: a folder, a hub id, a GGUF file (extra "gguf"), or a model of the package,
    "cohort:demo" or "cohort:demo-tool". In Python, pass the `model` argument instead."""
    revision: str = ""
    """Branch, tag or commit of a hub id. Empty: the newest of the main branch."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute precision. The trained weights are float32 (float64 for "float64"); "bfloat16" computes in bfloat16 over
    them. "auto" is bfloat16 where the hardware is faster with it (CUDA, CPUs with AMX, and AMD's with AVX512-BF16 from a
    hidden size of 256), and float32 elsewhere."""
    float32_head: bool = False
    """Compute the head in float32 when `precision` is "bfloat16", as ScaleRL does (arXiv 2510.13786): logits are not
    rounded to bfloat16. Slower. vLLM servers compute theirs in their own dtype."""
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
    torch_compile: bool = True
    """On CUDA, let torch compile norms, rotations and gates of an update's layers, where their results agree and
    compiling works: fewer kernels. Gradients are equal up to rounding."""
    trust_remote_code: bool = False
    """Run model code from the model's folder."""
    allow_pickled_weights: bool = False
    """Load pickled weights (pytorch_model.bin, adapter_model.bin) where there are no safetensors. Pickles can contain
    programs; torch's restricted unpickler reads them."""


class RolloutConfig(Section):
    """Sampling."""

    engine: Literal["local", "vllm"] = "local"
    """"local" samples in the trainer's process with the trainer's weights; "vllm" on the servers of `[vllm]`."""
    prompts_per_step: PositiveInt = 8
    """Prompts in a rollout (P)."""
    num_generations: Annotated[int, Field(ge=1, le=MAX_GENERATIONS)] = 8
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
    """Sample only JSON that this schema accepts, with the spaces of `json.dumps`: JSON text, or the name of a .json
    file, which is read at once. Unset: anything."""
    replay_sampling: bool = True
    """Compute the update's log-probabilities over the tokens that sampling could choose from, instead of over the whole
    vocabulary. Off: ratios treat the truncated distribution as the policy's. Makes a difference only with the settings
    from `top_k` on."""
    stop: Strings = ()
    """Strings that end a completion. Their tokens remain part of it."""
    max_batch_size: PositiveInt = 256
    """Maximum number of completions decoded at the same time. Affects memory only: random draws are the same, samples
    are equal up to rounding."""
    lag: Count = 0
    """How many steps sampling and scoring run ahead of training, in the background (see 'cohort docs scale'): step t
    samples with the weights after step t - 1 - lag, exactly. 0: each step samples with the present weights and then
    trains. 1 hides sampling behind training; 2 also hides rewards that take longer than a step."""
    cache_tokens: PositiveInt | None = None
    """Maximum number of tokens in the key-value cache, including prompts; completions that do not fit wait. Affects
    memory only, as above. Unset: as many as fit half of the free memory."""

    @field_validator("json_schema")
    @classmethod
    def _read_schema(cls, value: str | None) -> str | None:
        """Return the schema's text, so that the run's settings do not depend on the file."""
        if value is None:
            return None
        text = read_text(value) if value.endswith(".json") else value
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
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
    starts: Literal["same", "any", "own"] = "same"
    """How the episodes of a prompt's completions begin. "same": with one seed, and alike, or the run ends. "any": with
    one seed; what environments draw elsewhere, as on a server, may differ. "own": each with its own seed, as in TRL; in
    an evaluation, with one. Where they differ, the mean of a group's rewards is over different tasks."""
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
    call_retries: Retries = 0
    """How often a tool call is repeated when its worker dies or it exceeds `call_timeout`. Environments are not
    repeated."""
    tool_workers: Workers = 0
    """Worker processes for plain tools, and as many for plain environments, each of which lives in one of them. 0: they
    run in this process, unless `call_timeout` is set: then one for two cores."""
    max_environments: PositiveInt = 256
    """Maximum number of environments of a factory that exist, and of async calls, at the same time; episodes beyond
    wait."""
    history: str = "append"
    """What the policy reads after a turn. "append": all tokens so far, then the answer. "template": the conversation as
    the chat template renders it, which may leave out earlier thoughts. "module:function" or "file.py:function": the
    messages that a function returns for those so far. Whatever is rewritten begins a new segment."""
    parser: str | None = None
    """A function that finds the calls in a turn's text: "module:function" or "file.py:function". Unset: the format is
    found in the chat template."""

    @field_validator("history")
    @classmethod
    def _known_history(cls, value: str) -> str:
        if value not in ("append", "template") and ":" not in value:
            raise ValueError(f"expected 'append', 'template', 'module:function' or 'file.py:function', got {value!r}")
        return value

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
    workers: Workers = 0
    """Worker processes that call plain functions while sampling continues. 0: functions are called in this process
    after sampling, unless `timeout` is set, which needs a process that can be stopped."""
    timeout: PositiveFloat | None = None
    """Time limit of a call in seconds; a call scores one completion, a group or the rollout, depending on the function.
    The worker of a call that exceeds it is killed. Unset: no limit."""
    retries: Retries = 0
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


class ParallelConfig(Section):
    """Several processes (ranks) that train together: `torchrun` or `cohort launch` starts them
    (see 'cohort docs scale')."""

    layout: Literal["replicate", "optimizer", "full"] = "replicate"
    """How the ranks hold what is trained. "replicate": each holds everything. "optimizer": gradients and the
    optimizer's state are divided. "full": the weights too, which are gathered layer by layer in each pass."""
    offload: bool = False
    """With the layout "full" on GPUs: keep weights, gradients and the optimizer's state in main memory, where the
    optimizer steps. For models that do not fit otherwise; also with one rank."""
    rank_timeout: PositiveFloat = 3600.0
    """Seconds that a rank waits for the others before the run ends. A rank that dies is noticed at once."""


class EvalConfig(Section):
    """Evaluation on fresh samples of `data.eval`'s prompts, with the same random numbers every time
    (see 'cohort docs evaluation')."""

    eval_steps: Count = 0
    """Evaluate every this many steps. 0: only before the first step and after the last one."""
    eval_on_start: bool = True
    """Also evaluate before the first step, for comparison."""
    num_generations_eval: Annotated[int, Field(ge=1, le=MAX_GENERATIONS)] = 1
    """Completions per prompt."""
    temperature_eval: Annotated[float, Field(ge=0)] | None = None
    """Divides the logits; 0 is greedy. Unset: as in training, also for the four settings below."""
    top_p_eval: PositiveShare | None = None
    """Sample from the smallest set of most likely tokens whose probabilities add up to p. 1: all."""
    top_k_eval: Count | None = None
    """Sample from the k most likely tokens only. 0: all."""
    min_p_eval: Share | None = None
    """Sample from tokens at least this fraction as likely as the most likely one. 0: all."""
    max_completion_length_eval: PositiveInt | None = None
    """Maximum number of tokens of a completion."""
    success: str | None = None
    """The reward function that decides whether a completion is correct, for pass@k and maj@k. Unset: the only one; with
    several, there is neither."""
    success_threshold: float = 1.0
    """A completion is correct if that function returns at least this."""
    pass_at_k: PositiveInts | None = None
    """Log the probability that at least one of k completions is correct, for each of these k. []: off. Unset: 1, if a
    function decides what is correct."""
    maj_at_k: PositiveInts = ()
    """Log the probability that the most frequent answer of k completions is correct, for each of these k. Needs a
    reward function that logs the column "answer" (`log_extra`)."""
    bootstrap_samples: Annotated[int, Field(ge=100, le=1_000_000)] = 2_000
    """Resamples of each confidence interval."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence level of the intervals."""
    metric_for_best_model: str | None = None
    """Keep the model with the best value of this metric, as in "eval/reward/mean", in best/ in the run folder. Unset:
    off."""
    greater_is_better: bool = True
    """Whether a higher value of that metric is better."""
    early_stopping_patience: Count = 0
    """End the run after this many evaluations in a row without a new best. 0: off."""

    @model_validator(mode="after")
    def _check_together(self) -> EvalConfig:
        for name in ("pass_at_k", "maj_at_k"):
            if (k := max(getattr(self, name) or (), default=0)) > self.num_generations_eval:
                raise ValueError(
                    f"{name} needs {k} completions per prompt, and num_generations_eval is "
                    f"{self.num_generations_eval}: raise it, or lower k"
                )
        if self.early_stopping_patience and self.metric_for_best_model is None:
            raise ValueError("early_stopping_patience needs a metric: set eval.metric_for_best_model")
        if 1 / (1 + self.bootstrap_samples) > 1 - self.confidence:
            raise ValueError(
                f"bootstrap_samples ({self.bootstrap_samples}) is too small for confidence {self.confidence}: the "
                "smallest possible p-value is above 1 - confidence, so no difference would be significant. Raise it"
            )
        return self

    def what_is_measured(self) -> dict[str, Any]:
        """The settings that the value of ``metric_for_best_model`` depends on. Values are comparable only under the
        same settings."""
        metric = self.metric_for_best_model or ""
        sampling = {name for name in type(self).model_fields if name.endswith("_eval")}
        names = {"metric_for_best_model", "greater_is_better"} | sampling
        if "@" in metric:
            names |= {"success", "success_threshold"}
        if metric.endswith(("/low", "/high")):
            names |= {"bootstrap_samples", "confidence"}
        return self.model_dump(include=names, mode="json")


class RunConfig(Section):
    """Duration, output and checkpoints."""

    output_dir: PathName | None = None
    """The run folder. Must not contain another run. Unset: the next free runs/NAME-001."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of sampling, data order and all other random numbers."""
    deterministic: bool = False
    """On CUDA, use algorithms that give the same bytes each time, which are slower; one that has no such variant is
    named in a warning. On a CPU, the same seed, settings and machine give the same bytes without it."""
    max_steps: PositiveInt | None = None
    """Number of rollouts. Unset: determined by `num_epochs`."""
    num_epochs: PositiveInt = 1
    """How often each prompt is used, unless `max_steps` is set. The last step uses the remaining prompts, so that all
    prompts are used equally often."""
    save_steps: Count = 50
    """Write a checkpoint every this many steps, and at the end. 0: at the end only."""
    save_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Also write a checkpoint when the last one is this many minutes old. 0: never."""
    save_total_limit: PositiveInt | None = None
    """Number of checkpoints to keep; older ones are deleted. Unset: all."""
    keep_every: Count = 0
    """Never delete the checkpoints of steps that are multiples of this. 0: none is exempt from `save_total_limit`."""
    stop_when_unsaved_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """While files cannot be written (disk full, read-only, gone), training goes on and the writes are repeated. The run
    ends when that has lasted this many minutes. 0: it ends at the first failure."""
    stop_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0
    """Time to stop after SIGTERM, SIGINT (Ctrl-C) or SIGUSR1: to cancel sampling or end the step's updates, and write a
    checkpoint. Then the process ends without one. 0: no limit."""
