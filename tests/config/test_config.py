"""Settings: names, types, ranges, overrides, errors and written files."""

import copy
import math
import pickle
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cohort.config import (
    GRPOConfig,
    RolloutConfig,
    Source,
    annotated_toml,
    apply_overrides,
    load_config,
    parse_settings,
    to_toml,
    with_absolute_names,
)
from cohort.config.schema import foreign_names, setting_paths
from cohort.errors import ConfigError
from cohort.presets import PRESETS
from cohort.presets.parts import KL
from cohort.presets.trust_regions import PPOClip
from cohort.rollout import Sampling
from tests.conftest import each

HERE = Path.cwd()


def load(tmp_path, text, *overrides):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(path, overrides)


def written(tmp_path, config):
    (tmp_path / "config.toml").write_text(to_toml(config))
    return load_config(tmp_path / "config.toml", of_run=True)


def test_every_setting_has_a_unique_name_and_a_description():
    sections = [field.annotation for field in GRPOConfig.model_fields.values()]
    settings = [(key, field) for section in sections for key, field in section.model_fields.items()]
    assert len(setting_paths(GRPOConfig)) == len(settings)
    assert [key for key, field in settings if not field.description] == []
    assert not set(foreign_names()) & {key for key, _ in settings}


def test_settings_by_name_go_to_their_sections():
    config = GRPOConfig(num_generations=4, learning_rate=1e-5, output_dir=Path("x"))
    assert config == GRPOConfig(rollout={"num_generations": 4}, optim={"learning_rate": 1e-5}, run={"output_dir": "x"})
    mixed = GRPOConfig(rollout=RolloutConfig(num_generations=4), temperature=0.5)
    assert (mixed.rollout.num_generations, mixed.rollout.temperature) == (4, 0.5)


def test_settings_are_frozen_and_can_be_pickled_and_copied():
    config = GRPOConfig(num_generations=4, data={"train": ["a.jsonl"]})
    with pytest.raises(ConfigError, match=r"settings do not change: make new ones with \w+="):
        config.rollout.num_generations = 3
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_file_and_overrides(tmp_path):
    text = "[rollout]\nnum_generations = 4\ntemperature = 1\n[reward]\nfunctions = ['gsm8k']\n[run]\nmax_steps = 3"
    overrides = ["--rollout.num_generations", "6", "--run.seed=3", "--model.path", "5", "--run.max_steps", "none"]
    given = {
        "num_generations": 6,
        "temperature": 1.0,
        "functions": ["gsm8k"],
        "seed": 3,
        "path": "5",
    }  # text stays text
    assert load(tmp_path, text, *overrides) == GRPOConfig(**given)


@each(
    ("setting", "text", "value"),
    [
        ("optim.learning_rate", "1.", 1.0),
        ("objective.beta", ".04", 0.04),
        ("objective.beta", "none", None),
        ("objective.top_entropy", ".2", 0.2),
        ("report.progress", "False", False),
        ("model.quantization", "none", "none"),
        ("rollout.regex", "[0]", "[0]"),
        ("rollout.regex", "none", None),
        ("reward.weights", "1, .5", (1.0, 0.5)),
        ("reward.weights", "[1, 2]", (1.0, 2.0)),
        ("reward.functions", "", ()),
        ("reward.functions", '["a:f", "b:g"]', ("a:f", "b:g")),
        ("reward.functions", "f.py:a(x=1, y=(2, 3)),math", (f"{HERE}/f.py:a(x=1, y=(2, 3))", "math")),
        ("rollout.stop", "\n", ("\n",)),
        ("rollout.stop", "a,b)", ("a", "b)")),
        ("eval.pass_at_k", "1", (1,)),
        ("eval.pass_at_k", "", ()),
        ("model.lora.rank", "8", 8),
        ("model.lora.target_modules", "q_proj,v_proj", ("q_proj", "v_proj")),
        ("data.train", "c, d.jsonl", f"{HERE}/c, d.jsonl"),
        ("data.filter", "mine.py:keep", f"{HERE}/mine.py:keep"),
        ("data.filter", "{ n = 1 }", {"n": 1}),
        ("data.filter.pass_rate.min", "0.1", {"pass_rate": {"min": 0.1}}),
        ("data.chat_template_kwargs.a.b", "True", {"a": {"b": True}}),
        ("data.columns.a.b", "x", {"a.b": "x"}),
        ("data.eval", '{ gsm8k = "test.jsonl" }', {"gsm8k": f"{HERE}/test.jsonl"}),
        ("data.eval.gsm8k", "x.csv", {"gsm8k": f"{HERE}/x.csv"}),
        ("objective.baseline", "mine.py:base", f"{HERE}/mine.py:base"),
        ("environment.tools", "calculator,mcp:python server.py:x", ("calculator", "mcp:python server.py:x")),
        ("environment.factory.a", "world.py:World", {"a": f"{HERE}/world.py:World"}),
    ],
)
def test_values_on_the_command_line(setting, text, value):
    config = apply_overrides({}, [f"--{setting}", text])
    for key in setting.split(".")[: 3 if "lora" in setting else 2]:
        config = getattr(config, key)
    assert config == value


def test_overrides_are_merged_into_the_tables_of_the_file(tmp_path):
    file = "[data]\ncolumns = { prompt = 'the question' }\n[data.filter]\nlevel = 'hard'"
    data = load(tmp_path, file, "--data.columns.answer", "solution", "--data.filter.n.max=0.9").data
    assert data.columns == {"prompt": "the question", "answer": "solution"}
    assert data.filter == {"level": "hard", "n": {"max": 0.9}}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[rollout]\nnum_generation = 4", [], "config.toml: unknown setting rollout.num_generation; did you mean rol"),
        ("[rolout]\nnum_generations = 4", [], r"config.toml: unknown section \[rolout\]; did you mean \[rollout\]"),
        ("[zzz]\na = 4", [], r"unknown section \[zzz\]; sections are model, data, rollout"),
        ("num_generations = 4", [], "num_generations is outside a section; did you mean rollout.num_generations"),
        ("rollout = 4", [], r"rollout is a section: expected a table \[rollout\]"),
        ("[run]\neval_steps = 3", [], "unknown setting run.eval_steps; did you mean eval.eval_steps"),
        ("not toml", [], "config.toml is not valid TOML"),
        ("", ["--num_generations", "4"], "did you mean --rollout.num_generations"),
        ("", ["--rollout.num_generation", "4"], "unknown setting --rollout.num_generation; did you mean"),
        ("", ["--rollout.zzz", "4"], "'cohort config' lists all settings"),
        ("", ["--rollout", "4"], "--rollout is a section"),
        ("", ["--run.seed.x", "4"], "unknown setting --run.seed.x"),
        ("", ["--data.train.path", "a"], "unknown setting --data.train.path"),
        ("", ["--model", "x"], "--model is a section: set one of its settings, such as --model.path, --model."),
        ("", ["--model.lora", "8"], "--model.lora is a section: set one of its settings, such as --model.lora.rank, "),
        ("", ["--run.eval_steps", "3"], "unknown setting --run.eval_steps; did you mean --eval.eval_steps"),
        ("", ["--run.seed"], "--run.seed needs a value"),
        ("", ["seed"], "expected --section.key value, got 'seed'"),
        ("", ["--run.seed", "x"], "command line: run.seed: input should be a valid integer.*, got 'x'"),
        ("", ["--rollout.prompts_per_step", "0"], "prompts_per_step: input should be greater than or equal to 1"),
        ("", ["--eval.pass_at_k", "1,x"], "eval.pass_at_k.1: input should be a valid integer.*, got 'x'"),
        ("", ["--eval.pass_at_k", "[0]"], "eval.pass_at_k.0: input should be greater than or equal to 1, got 0"),
        ("", ["--data.eval", '{ "a/b" = "x" }'], "data.eval: an evaluation set's name .* got 'a/b'"),
        ("", ["--model.precision", "fp16"], "precision: input should be 'auto'"),
        (
            "",
            ["--rollout.json_schema", "nowhere.json"],
            f"rollout.json_schema: cannot read {HERE}/nowhere.json: No such",
        ),
        ("", ["--optim.per_device_train_batch_size", "4"], "batches follow from rollout.prompts_per_step"),
        ("[rollout]\nmin_tokens = 3", [], "unknown setting rollout.min_tokens: set rollout.min_completion_length"),
    ],
)
def test_mistakes_in_files_and_on_the_command_line(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text, *overrides)


def test_errors_name_where_each_mistake_is(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(
        ConfigError, match=r"\Acommand line: run.seed.*\n.*config.toml: unknown setting optim.learnin_rat"
    ):
        load(tmp_path, "[optim]\nlearnin_rate = 1\n", "--run.seed", "x")


def test_all_unknown_settings_are_named_at_once(tmp_path):
    both = r"\Aunknown setting 'lr': set optim.learning_rate\nunknown setting 'rank': set model.lora.rank \(in .*\)\Z"
    with pytest.raises(ConfigError, match=both):
        GRPOConfig(lr=1e-5, rank=8)
    with pytest.raises(ConfigError, match=r"(?s)unknown setting --lr: .*unknown setting --group_size: .*: run.seed: "):
        load(tmp_path, "", "--lr", "1", "--group_size", "4", "--run.seed", "x")
    with pytest.raises(
        ConfigError,
        match=r"(?s)setting epochs is outside a section: set.*unknown section \[optimizer\]; did you mean \[optim\]",
    ):
        load(tmp_path, "epochs = 3\n[optimizer]\nlr = 1\n")


def test_a_list_that_is_given_twice_is_an_error():
    """A training on the second reward alone does not show that the first was dropped."""
    twice = ["--reward.functions", "a.py:f", "--reward.functions", "think_format"]
    with pytest.raises(ConfigError, match=r"given twice, .* as '\[\"a.py:f\", \"think_format\"\]'"):
        apply_overrides({}, twice)
    assert apply_overrides({}, twice[:2] * 2).reward.functions == (f"{HERE}/a.py:f",)
    assert apply_overrides({}, ["--reward.weights", "none", "--reward.weights", "[1]"]).reward.weights == (1.0,)
    assert apply_overrides({}, ["--run.seed", "1", "--run.seed", "2"]).run.seed == 2


def test_settings_of_tables_are_suggested_as_arguments():
    for name, key in {"lora_rank": "rank", "lora_alpha": "alpha", "rank": "rank"}.items():
        with pytest.raises(
            ConfigError, match=rf"^unknown setting '{name}': set model.lora.{key}.*lora={{'{key}': ...}}"
        ):
            GRPOConfig(**{name: 16})
    assert GRPOConfig(lora={"rank": 16}).model.lora.rank == 16
    with pytest.raises(ConfigError, match="^unknown setting model.lora_rank: set model.lora.rank$"):
        GRPOConfig(model={"lora_rank": 16})


def test_what_foreign_names_point_to_exists():
    known = set(setting_paths(GRPOConfig).values())
    for name, text in foreign_names().items():
        for path in re.findall(r"\b(?:model|data|rollout|reward|optim|eval|run|report)\.[a-z_]+", text):
            assert path in known or path == "model.lora", (name, path)


def test_overrides_may_correct_the_file(tmp_path):
    file = '[rollout]\nnum_generations = 4\n[objective]\npreset = "gfpo"\n'
    assert load(tmp_path, file, "--rollout.num_generations", "16").rollout.num_generations == 16
    with pytest.raises(ConfigError, match=r"config.toml: objective.group_filter.k \(8\)"):  # not corrected
        load(tmp_path, file, "--run.seed", "1")


OUT_OF_RANGE = {
    **{"temperature": 0, "top_p": 0.0, "min_p": 1.5, "repetition_penalty": 0.0, "stop": [""], "top_k": -1},
    **{"learning_rate": float("inf"), "adam_beta1": 1.0, "max_grad_norm": -1.0, "seed": -1, "max_steps": 0},
    **{"pass_at_k": [0], "temperature_eval": -0.1, "confidence": 1.0, "bootstrap_samples": 10, "timeout": 0},
    **{"order": "random", "max_prompt_length": 0, "overlong_prompts": "cut", "ref_model_mixup_alpha": 1.1},
}


@each("name", OUT_OF_RANGE)
def test_values_out_of_range(name):
    path = re.escape(setting_paths(GRPOConfig)[name])
    with pytest.raises(ConfigError, match=rf"^{path}(\.0)?: (input|string) should "):
        GRPOConfig(**{name: OUT_OF_RANGE[name]})


@each(
    ("settings", "message"),
    [
        ({"rollout": {"num_generations": 1}}, "num_generations is 1, and scale 'group_std' compares"),
        ({"min_completion_length": 257}, r"\(257\) must be at most rollout.max_completion_length \(256\)"),
        (
            {"min_completion_length": 9, "max_completion_length_eval": 8},
            r"at most eval.max_completion_length_eval \(8\)",
        ),
        ({"regex": "a", "json_schema": "{}"}, "regex and rollout.json_schema exclude each other"),
        ({"json_schema": "{"}, "rollout.json_schema: expected a JSON schema, as JSON text"),
        ({"warmup_steps": 2.5}, "a share of the run's updates below 1, got 2.5"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 1}}, "did you mean num_cycles"),
        ({"lr_scheduler_kwargs": {"power": 1}}, "has no argument 'power'; it takes none"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs lr_scheduler_kwargs with min_lr or min_lr_rate"),
        ({"reward": {"functions": ["a"], "weights": [1.0, 2.0]}}, "2 numbers for 1 functions"),
        ({"kl": {"direction": "k3"}}, "kl.direction: expected 'reverse' or 'forward', got 'k3'"),
        ({"preset": 5}, "preset: input should be a valid string, got 5"),
        ({"minibatches": 3}, r"must be a multiple of objective.minibatches \(3\), because"),
        ({"preset": "gspo", "prompts_per_step": 2}, r"minibatches \(4, unset, so that of preset gspo@2\)"),
        ({"sync_ref_model": True}, "set objective.beta above 0"),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1, "num_iterations": 2}, "must be at least the"),
        ({"sync_ref_model": True, "beta": 0.1, "lora": {"rank": 8}}, "sync_ref_model excludes adapters"),
        ({"lora": {"rank": 8, "dropout": 0.1}}, "needs model.dropout = true"),
        ({"lora": {"rank": 8, "adapter": "a"}}, "an adapter has its own rank"),
        ({"quantization": "4bit"}, "model.quantization freezes the weights"),
        ({"layout": "optimizer", "optimizer": "muon"}, "'muon' needs whole weights: set optim.optimizer 'adamw'"),
        ({"layout": "full", "optimizer": "adamw_8bit"}, "'adamw_8bit' needs whole weights"),
        ({"layout": "full", "lora": {"rank": 4}, "quantization": "4bit"}, "model.quantization needs weights that"),
        ({"layout": "full", "lora": {"rank": 4, "save_merged": True}}, "model.lora.save_merged needs weights that"),
        ({"layout": "full", "term_norms_steps": 1}, "report.term_norms_steps needs weights that"),
        ({"preset": "gfpo"}, r"k \(8\) must be less than rollout.num_generations \(8\)"),
        ({"preset": "reinforce_pp", "num_generations": 1, "prompts_per_step": 1}, "which has only one"),
        ({"preset": "maxrl", "reward": {"weights": [-1.0]}}, "scale 'group_mean' needs .* has a negative one"),
        ({"unlikeliness": "unlikeliness", "reward": {"weights": [-1.0]}}, "unlikeliness needs .* has a negative one"),
        ({"pass_at_k": [1, 8], "num_generations_eval": 4}, "pass_at_k needs 8 completions per prompt"),
        ({"maj_at_k": [2]}, "maj_at_k needs 2 completions per prompt, and num_generations_eval is 1"),
        ({"early_stopping_patience": 2}, "needs a metric: set eval.metric_for_best_model"),
        ({"confidence": 0.999, "bootstrap_samples": 100}, "no difference would be significant"),
        ({"order": "curriculum"}, "order 'curriculum' and the setting curriculum need each other"),
        ({"curriculum": "level"}, "order 'curriculum' and the setting curriculum need each other"),
        ({"order": "curriculum", "curriculum": "level", "streaming": True}, "streamed data cannot be ordered"),
        ({"streaming": True}, "data.streaming reads data of unknown length: set run.max_steps"),
        ({"select": "5"}, "data.select: expected a slice like '100:200' or '::10', got '5'"),
        ({"select": "1:2:3:4"}, "expected a slice"),
        ({"select": "::0"}, "a slice's step must be 1 or more"),
        ({"filter": {"n": {"mn": 1}}}, r"column 'n': expected a value, a list of values, or a range"),
        ({"filter": {"n": {"min": True}}}, r"column 'n': expected a value, a list of values, or a range"),
        ({"filter": {"n": []}}, "column 'n': an empty list matches no row"),
        ({"train": []}, "data.train: expected a path or a list of sources, got an empty list"),
        ({"train": 5}, "data.train: expected a path or a list of sources, got 5"),
        ({"train": [{"path": "a", "weight": 0}]}, "source 0: weight: input should be greater than 0, got 0"),
        ({"train": ["b", {"prompt_colum": "a"}]}, "source 1: unknown setting prompt_colum; did you mean prompt_column"),
        ({"train": [{"path": 5}]}, "source 0: expected a path, got 5"),
        ({"train": [5]}, "source 0: expected a path or a table with a path, got 5"),
        ({"chat_template": "no.jinja"}, "data.chat_template: cannot read no.jinja: No such file"),
        ({"data": {"eval": {"a/b": "x"}}}, "data.eval: an evaluation set's name .* got 'a/b'"),
        ({"data": {"eval": {"length": "x"}}}, "none of reward, rewards, length"),
        ({"data": {"eval": {}}}, "got an empty one"),
        ({"data": {"eval": {"a": ""}}}, "a: expected a path or a list of sources, got an empty string"),
        ({"data": {"eval": 3}}, "data.eval: expected a path or a list of sources, got 3"),
        *(
            ({"chat_template_kwargs": {"x": x}}, "data.chat_template_kwargs: expected")
            for x in (None, math.nan, {1: 2}, [None])
        ),
        ({"num_generation": 3}, "unknown setting 'num_generation'; did you mean rollout.num_generations"),
        ({"num_generations": "3"}, "num_generations: input should be a valid integer, got '3'"),
        ({"rollout": 5}, "rollout is a section"),
        ({"eval": "test.jsonl"}, "eval is a section: .*did you mean data.eval"),
        ({"num_generations": 3, "rollout": {"num_generations": 4}}, "given twice"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


@pytest.mark.parametrize(("setting", "suffix"), [("json_schema", "json"), ("chat_template", "jinja")])
def test_files_in_settings_are_read_at_once(tmp_path, setting, suffix):
    file = tmp_path / f"file.{suffix}"
    file.write_text('{"type": "object"}', encoding="utf-8")
    config = GRPOConfig(**{setting: str(file)})
    assert config == GRPOConfig(**{setting: '{"type": "object"}'}) == written(tmp_path, config)


def test_sampling_follows_the_settings():
    settings = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "min_completion_length": 3}
    settings |= {"max_completion_length": 9, "temperature": 0.5, "stop": ("x",), "regex": "a+"}
    assert Sampling.of(GRPOConfig(**settings).rollout) == Sampling(**settings)
    off = GRPOConfig(**settings, replay_sampling=False).rollout
    assert Sampling.of(off) == Sampling(**settings, record_support=False)
    assert not Sampling.of(GRPOConfig().rollout).reweights


@hypothesis_settings(deadline=None)  # a busy machine is not a failure
@given(
    st.builds(
        dict,
        num_generations=st.integers(2, 64),
        temperature=st.floats(0.01, 5),
        stop=st.lists(st.text(min_size=1), max_size=3),
        system_prompt=st.none() | st.text(),
        max_steps=st.none() | st.integers(1, 99),
        weights=st.none() | st.lists(st.floats(-2, 2), max_size=3),
        format=st.sampled_from(["auto", "chat"]),
        gradient_checkpointing=st.booleans(),
    )
)
def test_written_settings_read_back_the_same(settings):
    config = GRPOConfig(**settings)
    assert GRPOConfig(**tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "intellect2", "trust_region": {"dual": None}},
        {"beta": 0.1, "kl": {"target": None}},
        {"mismatch": [{"rule": "veto"}, {"rule": "weight", "high": 3}]},
        {"preset": "dapo", "group_filter": None, "scale": None, "baseline": 0.5, "soft_overlong": None},
        {"trust_region": "rules.py:band"},
        {"kl": "k3_legacy", "beta": 0.04},
        {"train": [{"path": "a.jsonl", "weight": 2}, "b.csv"], "filter": {"pass rate": {"min": 0.1, "max": 1}}},
        {"data": {"eval": {"both": ["a.jsonl", {"path": "b.jsonl", "rows": 2}], "aime-24": Path("x")}}},
        {"data": {"eval": {"path": "a.jsonl", "rows": 3}}, "chat_template_kwargs": {"a": {"b": [1, 2.5, "x"]}}},
    ],
)
def test_written_parts_and_sources_read_back_the_same(tmp_path, settings):
    config = GRPOConfig(**settings)
    again = written(tmp_path, config)
    assert again == config
    assert again.resolved_objective == config.resolved_objective


def test_sources(tmp_path):
    with pytest.raises(ConfigError, match=r"\Aunknown setting wieght"):
        Source(path="a", wieght=1)
    file = '[[data.train]]\npath = "a.jsonl"\nweight = 2\n[[data.train]]\npath = "b.csv"\nprompt_template = "{q}"'
    config = load(tmp_path, file)
    a, b = (str(tmp_path / name) for name in ("a.jsonl", "b.csv"))  # beside the file
    assert [(source.path, source.weight) for source in config.data.train] == [(a, 2.0), (b, None)]
    listed = load(tmp_path, file, "--data.train", '["a.jsonl", {path = "b", split = "x"}]').data.train
    assert [(source.path, source.name, source.split) for source in listed] == [
        (str(HERE / "a.jsonl"), "a.jsonl", None),
        ("b", None, "x"),
    ]
    one = GRPOConfig(data={"eval": {"path": "a.jsonl", "rows": 3}}).data.eval
    assert [(source.path, source.rows) for source in one] == [("a.jsonl", 3)]
    sets = GRPOConfig(data={"eval": {"a": tmp_path / "a.jsonl", "b": ["b.jsonl"]}}).data.eval
    assert (sets["a"], [source.path for source in sets["b"]]) == (str(tmp_path / "a.jsonl"), ["b.jsonl"])


def test_the_annotated_file_has_the_defaults():
    assert GRPOConfig(**tomllib.loads(annotated_toml())) == GRPOConfig()
    assert "# Completions per prompt (G)." in annotated_toml()
    assert "# max_steps =\n" in annotated_toml()


@pytest.mark.parametrize("page", ["objective.md", "data.md"])
def test_the_settings_in_the_docs_are_valid(tmp_path, page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    assert len(blocks) >= 4
    for block in blocks:
        assert load(tmp_path, block).resolved_objective


def test_a_part_given_as_an_object_replaces_the_presets_part():
    config = GRPOConfig(preset="intellect2", trust_region=PPOClip(low=0.8, high=1.2))
    assert config.resolved_objective.trust_region == PPOClip(low=0.8, high=1.2)  # not the preset's dual = 4
    assert GRPOConfig(beta=0.04, kl=KL(direction="forward")).resolved_objective.kl == KL(beta=0.04, direction="forward")


def test_none_by_name_means_that_a_part_is_absent():
    objective = GRPOConfig(preset="dapo", group_filter=None, scale=None, trust_region=None).resolved_objective
    assert (objective.group_filter, objective.scale, objective.trust_region) == (None, None, None)
    assert GRPOConfig(preset="grpo", kl=None).resolved_objective.beta == 0
    assert GRPOConfig(**GRPOConfig(preset="dapo").model_dump()).resolved_objective == PRESETS["dapo"]


def test_epsilon_applies_to_the_chosen_trust_region():
    assert GRPOConfig(preset="dapo", trust_region="fipo", epsilon=0.1).resolved_objective.trust_region.high == 1.1


@pytest.mark.parametrize("kl", [5, [1]])
def test_a_kl_of_another_type_is_refused(kl):
    with pytest.raises(ConfigError, match="kl: expected"):
        GRPOConfig(kl=kl, beta=0.1)


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("kl = { beta = 0.1 }", ["kl.rule", "k3_legacy"], {"kl": "k3_legacy", "beta": 0.1}),
        ("", ["kl.beta", ".1", "kl", "k3_legacy"], {"kl": "k3_legacy", "beta": 0.1}),
        ("trust_region = { high = 1.4 }", ["trust_region.rule", "ppo_clip"], {"trust_region": {"high": 1.4}}),
        ("trust_region = { rule = 'cap', low = 0.5, high = 3 }", ["trust_region.rule", "ppo_clip"], {}),
        ("trust_region = { high = 1.4 }", ["trust_region", "cap"], {"trust_region": "cap"}),
        ("", ["trust_region.high", "3", "trust_region.rule", "cap"], {"trust_region": {"rule": "cap", "high": 3}}),
        ("", ["trust_region", "cap", "trust_region.high", "3"], {"trust_region": {"rule": "cap", "high": 3}}),
        ("scale = 'none'", ["scale.ddof", "0", "scale.rule", "group_std"], {"scale": {"ddof": 0}}),
        ("baseline = 0.5", ["baseline", "0.25"], {"baseline": 0.25}),
    ],
)
def test_flags_change_the_parts_of_a_file(tmp_path, file, flags, expected):
    flags = [f"--objective.{flag}" if index % 2 == 0 else flag for index, flag in enumerate(flags)]
    config = load(tmp_path, f"[objective]\n{file}\n", *flags)
    assert config.resolved_objective == PRESETS["default"].replace(**expected)


def test_a_wrong_preset_is_reported_also_with_flags(tmp_path):
    with pytest.raises(ConfigError, match="preset: input should be a valid string, got 5"):
        load(tmp_path, "[objective]\npreset = 5\n", "--objective.trust_region.high", "2")


@each(
    ("assignment", "message"),
    [
        ("delta=4", "set trust_region.dual"),
        ("mask_truncated_completions=true", "set truncated to 'mask'"),
        ("num_generations=4", "a setting of a run: rollout.num_generations"),
        ("beta", "expected PART=VALUE"),
        ("=1", "expected PART=VALUE"),
    ],
)
def test_assignments_that_are_not_parts(assignment, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings([assignment])


@each(
    ("settings", "message"),
    [
        ({"num_generations": 10**9}, "rollout.num_generations: .* less than or equal to 65536, got 1000000000"),
        ({"num_generations": 65_536, "prompts_per_step": 64}, "4,194,304; a rollout has at most 1,000,000 completions"),
        ({"bootstrap_samples": 10**12}, "eval.bootstrap_samples: .* less than or equal to 1000000"),
        ({"retries": 10**12}, "reward.retries: .* less than or equal to 1000"),
        ({"workers": 10**6}, "reward.workers: .* less than or equal to 1024"),
        ({"chat_template": "/dev/zero"}, "cannot read /dev/zero: more than 16,777,216 bytes"),
        ({"json_schema": "[" * 100_000}, "expected a JSON schema"),
    ],
)
def test_what_would_fill_the_memory_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


def test_a_config_file_without_an_end(tmp_path):
    with pytest.raises(ConfigError, match="cannot read /dev/zero: more than"):
        load_config("/dev/zero")
    (tmp_path / "c.toml").write_text("a = " + "9" * 5000)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "c.toml")


def test_names_of_files_are_absolute(tmp_path, monkeypatch):
    """Those of a file belong to its folder, else to the working directory; those of overrides to the latter. What is no
    name of a file stays."""
    (tmp_path / "here").mkdir()
    (tmp_path / "conf" / "org" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("rows.jsonl", "both.jsonl", "mine.py", "math", "../conf/both.jsonl", "../conf/rewards.py"):
        Path(name).touch()
    for folder, text in (("here", "another"), ("conf", "{{ messages }}")):
        (tmp_path / folder / "t.jinja").write_text(text)
    text = """
        model.path = "org/there"
        model.lora.adapter = "org/gone"
        data.train = ["rows.jsonl", { path = "both.jsonl", filter = "rewards.py:keep" }, "org/rows", "cohort:addition"]
        data.eval = { a = "gone.jsonl", b = { path = "./gone" } }
        data.filter = { file = "both.jsonl" }
        data.chat_template = "t.jinja"
        data.prompt_template = "mine.py:keep {x}"
        reward.functions = ["rewards.py:f(x='mine.py:g')", "module:f", "math", "gone.py:f", "regex(pattern='.py:')"]
        environment.factory = { a = "mine.py:World" }
        objective.baseline = "rewards.py:base"
        server.folder = "conf"
    """
    (tmp_path / "conf" / "c.toml").write_text(text)
    here, conf = tmp_path / "here", tmp_path / "conf"
    config = load_config("../conf/c.toml", ["--environment.history", "gone.py:f", "--model.revision", "mine.py"])
    assert (config.model.path, config.model.lora.adapter, config.model.revision) == (
        f"{conf}/org/there",
        "org/gone",
        "mine.py",
    )
    assert [(source.path, source.name, source.filter) for source in config.data.train] == [
        (f"{here}/rows.jsonl", "rows.jsonl", None),
        (f"{conf}/both.jsonl", "both.jsonl", f"{conf}/rewards.py:keep"),
        ("org/rows", None, None),
        ("cohort:addition", None, None),
    ]
    assert config.data.eval["a"] == f"{conf}/gone.jsonl"
    assert [source.path for source in config.data.eval["b"]] == [f"{conf}/gone"]
    assert config.data.filter == {"file": "both.jsonl"}
    assert (config.data.chat_template, config.data.prompt_template) == ("{{ messages }}", "mine.py:keep {x}")
    functions = (
        f"{conf}/rewards.py:f(x='mine.py:g')",
        "module:f",
        "math",
        f"{conf}/gone.py:f",
        "regex(pattern='.py:')",
    )
    assert config.reward.functions == functions
    assert config.environment.factory == {"a": f"{here}/mine.py:World"}
    assert config.environment.history == f"{here}/gone.py:f"
    assert (config.objective.baseline, config.server.folder) == (f"{conf}/rewards.py:base", "conf")
    assert written(tmp_path, config) == with_absolute_names(config) == config
    (tmp_path / "a (1)").mkdir()
    monkeypatch.chdir(tmp_path / "a (1)")
    Path("judge (2)").mkdir()
    specs = ("r.py:f(x=1, y='b.py:g')", "r.py:f()", "judge (2)(batch_tokens=9)", "judge (2)", "math()")
    found = with_absolute_names(with_absolute_names(GRPOConfig(functions=specs))).reward.functions
    assert found == (*(f"{tmp_path}/a (1)/{spec}" for spec in specs[:4]), "math()")
    monkeypatch.chdir(here)
    python = GRPOConfig(train="rows.jsonl", filter="gone.py:keep")
    assert python.data.train == "rows.jsonl"
    assert with_absolute_names(python) == GRPOConfig(train=f"{here}/rows.jsonl", filter=f"{here}/gone.py:keep")


def test_text_that_is_not_utf_8():
    for give in (
        lambda text: apply_overrides({}, ["--data.chat_template", text]),
        lambda text: to_toml(GRPOConfig(chat_template=text)),
    ):
        with pytest.raises(ConfigError, match="UTF-8"):
            give("{\udcff")


def test_a_folder_beside_the_file_is_no_builtin_reward(tmp_path):
    for name in ("gsm8k", "judge"):
        (tmp_path / name).mkdir()
    (tmp_path / "c.toml").write_text('[reward]\nfunctions = ["gsm8k", "gsm8k()", "judge", "judge(batch_tokens=9)"]')
    found = load_config(tmp_path / "c.toml").reward.functions
    assert found == ("gsm8k", "gsm8k()", f"{tmp_path}/judge", f"{tmp_path}/judge(batch_tokens=9)")
