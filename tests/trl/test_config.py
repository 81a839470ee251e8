"""``GRPOConfig``: defaults, refusals, old names, and what scripts do with it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
from transformers import HfArgumentParser, TrainingArguments

from cohort.errors import ConfigError
from cohort.trl import GRPOConfig
from cohort.trl.translate import check_args, translate
from tests.conftest import each


def test_plain_arguments_work_on_a_machine_without_gpu():
    args = GRPOConfig("out")
    assert isinstance(args, TrainingArguments)
    assert (args.bf16, args.generation_batch_size, args.steps_per_generation) == (False, 8, 1)
    assert args.given == {"output_dir"}


def test_a_subclass_is_read_by_the_argument_parser_with_help():
    @dataclass
    class MyConfig(GRPOConfig):
        benchmarks: str = "none"

    parser = HfArgumentParser(MyConfig)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--num_generations", "4", "--benchmarks", "all", "--warmup_ratio", "0.1"]
    )
    assert (args.num_generations, args.benchmarks, args.warmup_steps) == (4, "all", 0.1)
    assert "rollout.num_generations" in parser.format_help()


def test_a_refused_field_is_refused_as_a_subclass_s_default_too():
    @dataclass
    class Half(GRPOConfig):
        fp16: bool = True

    with pytest.raises(ConfigError, match="fp16=True is not supported"):
        Half("out")


def test_copies_are_equal():
    args = GRPOConfig("out", num_generations=4, beta=0.1)
    for other in (copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args)):
        assert translate(other, num_prompts=100) == translate(args, num_prompts=100)


def test_old_names_give_their_values_to_the_present_ones():
    args = GRPOConfig("out", vllm_importance_sampling_cap=2.0, use_transformers_paged=True)
    assert (args.vllm_importance_sampling_clip_max, args.use_transformers_continuous_batching) == (2.0, True)
    assert GRPOConfig("out", warmup_ratio=0.1, warmup_steps=5).warmup_steps == 5
    with pytest.raises(ConfigError, match="'evaluation_strategy'; did you mean eval_strategy"):
        GRPOConfig("out", evaluation_strategy="epoch")


@each(
    ("fields", "words"),
    [
        ({"learning_rate": "1e-6"}, "learning_rate must be a number, got '1e-6'"),
        ({"beta": None}, "beta must be a number, got None"),
        ({"num_iterations": True}, "num_iterations must be a number, got True"),
        ({"generation_kwargs": "top_p=0.5"}, "generation_kwargs must be a dict or its JSON"),
        ({"chat_template_kwargs": "{enable_thinking}"}, "chat_template_kwargs must be a dict or its JSON"),
    ],
)
def test_values_of_another_type_are_refused(fields, words):
    with pytest.raises(ConfigError) as caught:
        GRPOConfig("out", **fields)
    assert words in str(caught.value)


def test_errors_of_transformers_are_errors_of_the_settings():
    with pytest.raises(ConfigError, match="use_cpu"):
        GRPOConfig("out", bf16=True)


def test_a_field_set_afterwards_is_checked_too():
    args = GRPOConfig("out")
    args.auto_find_batch_size = True
    assert "auto_find_batch_size" in args.given
    with pytest.raises(ConfigError, match="auto_find_batch_size=True is not supported"):
        check_args(args)


def test_without_accelerate_the_import_names_the_extra():
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'accelerate' else find(name, *rest)\n"
        "import cohort\n"
        "try: import cohort.trl\n"
        "except ImportError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ("cohort.trl needs accelerate, which is not installed: pip install 'cohort-rl[trl]'")
