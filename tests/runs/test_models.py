"""What is written beside the weights of a model: what was loaded, unchanged, and nothing that a run finds out too late."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from cohort.config import ModelConfig
from cohort.errors import ModelError
from cohort.policy import load_policy
from cohort.runs.models import check_writable, save_model
from tests.conftest import each
from tests.policy.test_vision import made
from tests.train.harness import make_trainer

ODD = {"do_sample": False, "temperature": 0.6, "top_p": 0.8, "eos_token_id": [1, 7]}
GENERATION = [
    ODD,
    ODD | {"length_penalty": 2.0},
    ODD | {"early_stopping": True, "a_setting_of_a_later_version": {"a": [1]}},
    {"num_return_sequences": 4},
    {"suppress_tokens": [3], "forced_eos_token_id": 3},
    {"cache_implementation": "of_another_library"},
    {"max_new_tokens": 0, "pad_token_id": -1},
    {"do_sample": None, "top_k": 20, "output_scores": True},
]


@each("given", GENERATION)
def test_a_generation_config_is_written_back_as_it_was(float32_policy, demo_tokenizer, tmp_path, given):
    """transformers refuses to write each of these, after all the training."""
    config = GenerationConfig()
    for name, value in given.items():
        setattr(config, name, value)
    float32_policy.model.generation_config = config
    before = dict(vars(config))
    save_model(float32_policy, demo_tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: saved.get(name) for name in given} == given
    assert vars(float32_policy.model.generation_config) == before


@each("break_it", ["model.config", "model.generation_config", "tokenizer.init_kwargs"])
def test_what_cannot_be_written_is_refused_before_the_first_step(demo_model_path, tmp_path, break_it):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = load_policy(demo_model_path, ModelConfig(precision="float32", device="cpu"), None).model
    where, _, name = break_it.partition(".")
    held = getattr({"model": model, "tokenizer": tokenizer}[where], name)
    if isinstance(held, dict):
        held["mine"] = object()
    else:
        held.mine = object()
    with pytest.raises(ModelError, match=r"cannot be written, so no checkpoint could be: TypeError"):
        make_trainer(tokenizer, tmp_path / "run", model=model)


def test_the_processor_of_a_model_that_reads_images_goes_with_it(demo_tokenizer, tmp_path):
    files = ("preprocessor_config.json", "processor_config.json")
    source, saved = tmp_path / "source", tmp_path / "saved"
    made("gemma3").save_pretrained(source)
    for name in files:
        (source / name).write_text(f'{{"of": "{name}"}}')
    policy = load_policy(str(source), ModelConfig(precision="float32", device="cpu"), None)
    check_writable(policy, demo_tokenizer)
    save_model(policy, demo_tokenizer, saved)
    save_model(policy, demo_tokenizer, source)  # over itself
    assert [(saved / name).read_bytes() for name in files] == [(source / name).read_bytes() for name in files]
