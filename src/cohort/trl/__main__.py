"""``python -m cohort.trl``: trains with the flags and the YAML file of ``trl grpo``.

Several processes are started by ``accelerate launch -m cohort.trl`` or ``torchrun -m cohort.trl``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from cohort.errors import STOPPED, CohortError, ConfigError, RankError, StepError, Stopped, did_you_mean
from cohort.rewards import BUILTIN_REWARDS, resolve_reward
from cohort.trl import rewards
from cohort.trl.arguments import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
    load_named,
)

REWARDS = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(1280, 256),
}
"""The names of TRL's command; the numbers are its own."""
RESUMING = re.compile(r"train\(resume_from_checkpoint=True(?:, allow_changed=\[([^\]]*)\])?\)")
NAME_MARKS = re.compile(r"[',]")


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """The data and the rewards of the command."""

    reward_model_name_or_path: str | None = HfArg(default=None, help="Folder or hub id of a reward model.")
    reward_funcs: list[str] | None = HfArg(
        default=None,
        help=f"Reward functions: {', '.join(REWARDS)}; an import path, as in my_lib.rewards.mine; or a built-in reward "
        "of Cohort ('cohort rewards' lists them).",
    )
    allow_changed: list[str] | None = HfArg(
        default=None, help="What may differ from the resumed run though it changes results; the error names it."
    )


def make_parser() -> TrlParser:
    """The parser of all arguments."""
    from cohort.trl.config import GRPOConfig

    kinds = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(kinds, prog="python -m cohort.trl")


def load_reward(name: str) -> Any:
    """A reward function by the name that ``--reward_funcs`` gives.

    Raises:
        RewardError: there is none of that name.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    if module and not set(name) & set(":/("):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import the reward function {name}: {error}") from None
    known = [*REWARDS, *BUILTIN_REWARDS]
    if name.isidentifier() and name not in BUILTIN_REWARDS:
        raise ConfigError(
            f"unknown reward function {name!r}: expected one of {', '.join(known)}, or an import path such as "
            f"my_lib.rewards.mine{did_you_mean(name, known)}"
        )
    return resolve_reward(name)


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig, *, evaluated: bool) -> tuple[Any, Any]:
    """The rows for training, and those for evaluation, or None.

    Raises:
        ConfigError: no data set is named, or a split does not exist.
        DataError: the data set cannot be loaded.
    """
    if mixture.datasets:
        splits = get_dataset(mixture)
    elif script.dataset_name:
        splits = load_named(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    else:
        raise ConfigError("no data: set --dataset_name, or list data sets under 'datasets:' in the --config file")
    for flag in ("dataset_train_split", *(("dataset_test_split",) if evaluated else ())):
        if getattr(script, flag) not in splits:
            raise ConfigError(f"{flag} = {getattr(script, flag)!r}: the data set has {', '.join(splits)}; set --{flag}")
    return splits[script.dataset_train_split], splits[script.dataset_test_split] if evaluated else None


def run(arguments: Sequence[str]) -> None:
    """Parse the arguments, train, save the model and, if asked, push it to the hub."""
    try:
        script, args, model, mixture = make_parser().parse_args_and_config(arguments)
    except (ValueError, ImportError) as error:  # of transformers.TrainingArguments
        raise ConfigError(str(error)) from error
    functions = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    functions += [load_reward(name) for name in script.reward_funcs or ()]
    loading = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    args.model_init_kwargs = loading | (args.model_init_kwargs or {})
    if model.model_name_or_path is None:
        raise ConfigError("no model: set --model_name_or_path")
    train_rows, eval_rows = load_data(script, mixture, evaluated=args.eval_strategy != "no")

    from cohort.trl.trainer import GRPOTrainer

    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=functions,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.begun_by = "python -m cohort.trl"
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint, allow_changed=script.allow_changed or ())
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0; 1 for a failure of the machine; 2 for a user error; 75 for a run that was stopped; 130 for an
        interrupt.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    given = given[1:] if given[:1] == ["grpo"] else given  # as in `trl grpo`
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        run(given)
    except Stopped:  # the trainer has said so
        return STOPPED
    except CohortError as error:
        _say(f"error: {in_flags(str(error))}")
        return 1 if isinstance(error, OSError | RankError | StepError) else 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    return 0


def in_flags(text: str) -> str:
    """A text with the command's flags in place of the arguments of ``train``.

    >>> in_flags("continue it with train(resume_from_checkpoint=True, allow_changed=['code', 'seed'])")
    'continue it with --resume_from_checkpoint true --allow_changed code seed'
    """
    return RESUMING.sub(
        lambda found: (
            "--resume_from_checkpoint true" + (f" --allow_changed {NAME_MARKS.sub('', found[1])}" if found[1] else "")
        ),
        text,
    )


def _say(text: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"cohort.trl: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
