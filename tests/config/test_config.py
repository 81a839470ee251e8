"""Settings: names, types, ranges, overrides, and errors that help."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import (
    GRPOConfig,
    RolloutConfig,
    Schedule,
    annotated_toml,
    apply_overrides,
    load_config,
    parse_settings,
    to_toml,
)
from cohort.config.load import setting_names
from cohort.errors import ConfigError, DataError
from cohort.presets import PRESETS
from cohort.rollout import Sampling


def load(tmp_path, text, *overrides):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_setting_names_are_unique_over_sections():
    count = sum(len(GRPOConfig.model_fields[s].annotation.model_fields) for s in GRPOConfig.SECTIONS)
    assert len(setting_names()) == count
    assert tuple(GRPOConfig.model_fields) == GRPOConfig.SECTIONS


def test_every_setting_is_documented():
    for section in GRPOConfig.SECTIONS:
        for key, field in GRPOConfig.model_fields[section].annotation.model_fields.items():
            assert field.description, f"{section}.{key}"


def test_settings_by_their_own_names_go_to_their_sections():
    config = GRPOConfig(num_generations=4, learning_rate=1e-5, output_dir="x")
    assert (config.rollout.num_generations, config.optim.learning_rate, config.run.output_dir) == (4, 1e-5, "x")
    assert config == GRPOConfig(rollout={"num_generations": 4}, optim={"learning_rate": 1e-5}, run={"output_dir": "x"})


def test_own_names_and_a_section_mix():
    config = GRPOConfig(rollout=RolloutConfig(num_generations=4), temperature=0.5)
    assert (config.rollout.num_generations, config.rollout.temperature) == (4, 0.5)


def test_file_and_overrides(tmp_path):
    text = "[rollout]\nnum_generations = 4\ntemperature = 1\n[reward]\nfunctions = ['gsm8k']"
    overrides = ["--rollout.num_generations", "6", "--run.seed=3", "--model.path", "5", "--run.max_steps", "7"]
    config = load(tmp_path, text, *overrides)
    assert config.rollout.num_generations == 6
    assert config.rollout.temperature == 1.0
    assert config.run.seed == 3
    assert config.model.path == "5"  # a text setting takes its value as it is
    assert config.run.max_steps == 7


def test_lists_and_unset_on_the_command_line(tmp_path):
    config = load(tmp_path, "[run]\nmax_steps = 3", "--reward.functions", "a.py:f,b", "--run.max_steps", "none")
    assert config.reward.functions == ("a.py:f", "b")
    assert config.run.max_steps is None
    config = load(
        tmp_path, "", "--reward.weights", "1, 0.5", "--rollout.stop", "\n", "--reward.functions", '["a:f", "b:g"]'
    )
    assert config.reward.weights == (1.0, 0.5)
    assert config.rollout.stop == ("\n",)
    assert config.reward.functions == ("a:f", "b:g")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "[rollout]\nnum_generation = 4",
            [],
            "unknown setting rollout.num_generation; did you mean rollout.num_generations",
        ),
        ("[rolout]\nnum_generations = 4", [], r"unknown section \[rolout\]; did you mean \[rollout\]"),
        ("num_generations = 4", [], "num_generations stands outside a section; did you mean rollout.num_generations"),
        ("rollout = 4", [], "rollout is a section"),
        ("[optim]\nnum_generations = 4", [], "did you mean rollout.num_generations"),
        ("[rollout]\nnum_generations = 1", [], "num_generations is 1, and scale 'group_std' compares"),
        ("[rollout]\nnum_generations = '4'", [], "num_generations: input should be a valid integer, got '4'"),
        ("[rollout]\nnum_generations = 2.5", [], "num_generations: input should be a valid integer"),
        ("[rollout]\ntemperature = 0", [], "temperature: input should be greater than 0"),
        ("[objective]\nkl = { direction = 'k3' }", [], "kl.direction: expected 'reverse' or 'forward', got 'k3'"),
        ("[objective]\nsync_ref_model = true", [], "set objective.beta above 0"),
        ("[objective]\nminibatches = 3", [], "must be a multiple of objective.minibatches"),
        ("[optim]\nwarmup_steps = 3", [], "constant_with_warmup"),
        ("[reward]\nfunctions = ['a']\nweights = [1.0, 2.0]", [], "2 numbers for 1 functions"),
        ("not toml", [], "not valid TOML"),
        ("", ["--num_generations", "4"], "did you mean --rollout.num_generations"),
        ("", ["--rollout.num_generation", "4"], "unknown setting --rollout.num_generation; did you mean"),
        ("", ["--rollout.zzz", "4"], "'cohort config' lists all settings"),
        ("", ["--run.seed"], "--run.seed needs a value"),
        ("", ["seed"], "expected --section.key value, got 'seed'"),
        ("", ["--run.seed", "x"], "run.seed: input should be a valid integer, got 'x'"),
        ("", ["--model.precision", "fp16"], "precision: input should be 'auto'"),
        ("[optim]\nlearning_rate = inf", [], "learning_rate: input should be a finite number"),
        ("[rollout]\nstop = ['']", [], "rollout.stop.0: string should have at least 1 character"),
        (
            "[objective]\nbeta = 0.1\nsync_ref_model = true\nref_model_sync_steps = 1\nnum_iterations = 2",
            [],
            "at least the",
        ),
        ("[rollout]\ntop_p = 0.0", [], "rollout.top_p: input should be greater than 0"),
        ("[rollout]\nmin_p = 1.5", [], "rollout.min_p: input should be less than or equal to 1"),
        ("[rollout]\nrepetition_penalty = 0.0", [], "rollout.repetition_penalty: input should be greater than 0"),
        (
            "[rollout]\nmin_completion_length = 257",
            [],
            r"\(257\) must be at most rollout.max_completion_length \(256\)",
        ),
        ("[rollout]\nregex = 'a'\njson_schema = '{}'", [], "regex and rollout.json_schema exclude each other"),
        ("[rollout]\njson_schema = '{'", [], "rollout.json_schema: expected a JSON schema, as JSON text"),
        ("", ["--rollout.json_schema", "nowhere.json"], "rollout.json_schema: cannot read nowhere.json: No such file"),
        ("[rollout]\nmin_tokens = 3", [], "unknown setting rollout.min_tokens: set rollout.min_completion_length"),
        ("", ["--optim.per_device_train_batch_size", "4"], "batches follow from rollout.prompts_per_step"),
        (
            "[data]\nshuffle = true",
            [],
            "unknown setting data.shuffle: set data.order: 'shuffled' for true, 'sequential'",
        ),
        ("[data]\norder = 'random'", [], "data.order: input should be 'shuffled', 'sequential' or 'curriculum'"),
        ("[data]\norder = 'curriculum'", [], "order 'curriculum' and the setting curriculum go together"),
        ("[data]\ncurriculum = 'level'", [], "order 'curriculum' and the setting curriculum go together"),
        ("[data]\nstreaming = true", [], "data.streaming reads data whose length is not known: set run.max_steps"),
        ("[data]\nselect = '5'", [], "data.select: expected a slice like '100:200' or '::10', got '5'"),
        ("[data]\nselect = '::-1'", [], "a slice's step must be 1 or more"),
        ("[data]\nfilter = { n = { mn = 1 } }", [], r"column 'n': expected a value, a list of values, or a range"),
        ("[data]\nfilter = { n = [] }", [], "column 'n': no value is in an empty list"),
        ("[data]\ntrain = []", [], "data.train: expected a path or a list of sources, got an empty list"),
        ("[data]\ntrain = 5", [], "data.train: expected a path or a list of sources, got 5"),
        ("[[data.train]]\npath = 'a'\nweight = 0", [], "source 0: weight: input should be greater than 0, got 0"),
        (
            "[[data.train]]\nprompt_colum = 'a'",
            [],
            "source 0: unknown setting prompt_colum; did you mean data.prompt_col",
        ),
        ("[[data.train]]\npath = 5", [], "source 0: expected a path, got 5"),
        ("[data]\nchat_template = 'no.jinja'", [], "data.chat_template: cannot read no.jinja: No such file"),
        ("[data]\nmax_prompt_length = 0", [], "data.max_prompt_length: input should be greater than or equal to 1"),
        ("[data]\noverlong_prompts = 'cut'", [], "data.overlong_prompts: input should be 'error', 'drop' or 'trunc"),
        ("", ["--data.train.path", "a"], "unknown setting --data.train.path"),
    ],
)
def test_mistakes_are_named(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text, *overrides)


def test_errors_name_their_source(tmp_path):
    with pytest.raises(ConfigError, match="config.toml: rollout"):
        load(tmp_path, "[rollout]\nnum_generations = 1")
    with pytest.raises(ConfigError, match="command line: rollout"):
        load(tmp_path, "", "--rollout.num_generations", "1")
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "missing.toml")


@pytest.mark.parametrize("settings", [{"num_generation": 3}, {"zzz": 1}, {"num_generations": "3"}, {"rollout": 5}])
def test_mistakes_in_python_are_the_same_errors(settings):
    with pytest.raises(ConfigError):
        GRPOConfig(**settings)
    with pytest.raises(ConfigError, match="given twice"):
        GRPOConfig(num_generations=3, rollout={"num_generations": 4})


def test_paths_may_be_path_objects_and_booleans_are_read_as_people_write_them(tmp_path):
    assert GRPOConfig(output_dir=tmp_path).run.output_dir == str(tmp_path)
    assert load(tmp_path, "", "--report.progress", "False").report.progress is False


def test_settings_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        GRPOConfig().rollout.num_generations = 3


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


def test_the_annotated_file_is_the_defaults():
    assert GRPOConfig(**tomllib.loads(annotated_toml())) == GRPOConfig()


def test_schedule_in_words():
    config = GRPOConfig(prompts_per_step=8, num_generations=8, num_iterations=2, minibatches=4, beta=0.1)
    schedule = Schedule.of(config, 7473)
    assert (schedule.steps, schedule.updates, schedule.needs_old_logps, schedule.needs_ref_logps) == (
        935,
        934 * 8 + 2,  # the last step has one prompt, so one minibatch
        True,
        True,
    )
    assert "8 prompts x 8 = 64 completions per rollout, 8 updates each" in schedule.describe()
    assert "934.12 rollouts per epoch on 7,473 prompts; 1 epoch = 935 rollouts = 7,474 updates" in schedule.describe()
    assert "the last of 1 prompt\n" in schedule.describe()
    two = Schedule.of(GRPOConfig(num_epochs=2), 7473).describe()
    assert "8 prompts x 8 = 64 completions per rollout, 1 update each" in two
    assert "2 epochs = 1,869 rollouts = 1,869 updates, the last of 2 prompts\n" in two
    assert "10 rollouts = 10 updates, 0.8 epochs\n" in Schedule.of(GRPOConfig(max_steps=10), 100).describe()


def test_a_stream_has_no_epochs():
    with pytest.raises(DataError, match="is a stream, whose length is not known: set run.max_steps"):
        Schedule.of(GRPOConfig(), None)
    schedule = Schedule.of(GRPOConfig(max_steps=3), None)
    assert [schedule.prompts_of(step) for step in range(3)] == [8, 8, 8]
    assert "3 rollouts = 3 updates, on a stream of prompts" in schedule.describe()


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4))
def test_the_steps_of_the_epochs_use_every_prompt_as_often(num_prompts, per_step, epochs):
    num_prompts = max(num_prompts, per_step)
    schedule = Schedule.of(GRPOConfig(prompts_per_step=per_step, num_epochs=epochs), num_prompts)
    counts = [schedule.prompts_of(step) for step in range(schedule.steps)]
    assert sum(counts) == num_prompts * epochs
    assert all(count == per_step for count in counts[:-1])
    assert 1 <= counts[-1] <= per_step


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_more_epochs_go_on_after_a_short_last_step(num_prompts, per_step, epochs, more):
    num_prompts = max(num_prompts, per_step)
    before = Schedule.of(GRPOConfig(prompts_per_step=per_step, num_epochs=epochs), num_prompts)
    taken = num_prompts * epochs
    after = Schedule.of(GRPOConfig(prompts_per_step=per_step, num_epochs=epochs + more), num_prompts)
    after = after.resumed(before.steps, taken)
    assert taken + sum(map(after.prompts_of, range(before.steps, after.steps))) == num_prompts * (epochs + more)


@pytest.mark.parametrize(
    ("iterations", "minibatches", "needs"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, True)]
)
def test_old_log_probs_are_needed_when_several_updates_use_a_rollout(iterations, minibatches, needs):
    config = GRPOConfig(num_iterations=iterations, minibatches=minibatches)
    assert Schedule.of(config, 100).needs_old_logps is needs
    assert ("by identity" in Schedule.of(config, 100).describe()) is not needs


def test_data_smaller_than_a_step():
    with pytest.raises(DataError, match=r"5 prompts, fewer than one step.*prompts_per_step \(now 8\) to 5"):
        Schedule.of(GRPOConfig(), 5)


def test_config_imports_no_torch():
    code = "import sys, cohort, cohort.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_overrides_need_no_file():
    assert apply_overrides({}, ["--run.seed", "4"]).run.seed == 4


def test_a_part_given_as_an_object_is_taken_whole():
    from cohort.presets.kl import KL
    from cohort.presets.trust_regions import PPOClip

    config = GRPOConfig(preset="intellect2", trust_region=PPOClip(low=0.8, high=1.2))
    assert config.resolved_objective.trust_region == PPOClip(low=0.8, high=1.2)  # not the preset's dual = 4
    assert GRPOConfig(beta=0.04, kl=KL(direction="forward")).resolved_objective.kl == KL(beta=0.04, direction="forward")


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "intellect2", "trust_region": {"dual": None}},
        {"beta": 0.1, "kl": {"target": None}},
        {"mismatch": [{"rule": "veto"}, {"rule": "weight", "high": 3}]},
        {"preset": "dapo", "group_filter": None, "scale": None, "baseline": 0.5, "soft_overlong": None},
        {"trust_region": "rules.py:band"},
        {"kl": "k3_legacy", "beta": 0.04},
    ],
)
def test_what_is_written_is_what_ran(tmp_path, settings):
    config = GRPOConfig(**settings)
    (tmp_path / "config.toml").write_text(to_toml(config))
    again = load_config(tmp_path / "config.toml")
    assert again.resolved_objective == config.resolved_objective
    assert again == config


def test_sources_on_the_command_line_and_in_the_file(tmp_path):
    file = """
[data]
columns = { prompt = "the question" }
chat_template_kwargs = { enable_thinking = false }
[data.filter]
level = ["hard", "medium"]
"pass rate" = { min = 0.1, max = 0.9 }
[[data.train]]
path = "a.jsonl"
weight = 2
[[data.train]]
path = "b.csv"
weight = 1.5
prompt_template = "{q}"
"""
    config = load(tmp_path, file)
    assert [(source.path, source.weight) for source in config.data.train] == [("a.jsonl", 2.0), ("b.csv", 1.5)]
    assert config.data.filter == {"level": ["hard", "medium"], "pass rate": {"min": 0.1, "max": 0.9}}
    assert GRPOConfig(**tomllib.loads(to_toml(config))) == config
    assert load(tmp_path, file, "--data.train", "c, d.jsonl").data.train == "c, d.jsonl"
    listed = load(tmp_path, file, "--data.train", '["a.jsonl", {path = "b", split = "x"}]').data.train
    assert [(source.path, source.split) for source in listed] == [("a.jsonl", None), ("b", "x")]
    data = load(tmp_path, file, "--data.chat_template_kwargs.level", "3", "--data.columns.answer", "solution").data
    assert data.chat_template_kwargs == {"enable_thinking": False, "level": 3}
    assert data.columns == {"prompt": "the question", "answer": "solution"}
    assert load(tmp_path, file, "--data.filter", "mine.py:keep").data.filter == "mine.py:keep"
    assert load(tmp_path, file, "--data.filter", "{ n = 1 }").data.filter == {"n": 1}


@pytest.mark.parametrize("value", [None, float("nan"), object(), {"a": {1: 2}}, [None]])
def test_tables_hold_what_toml_can(value):
    with pytest.raises(ConfigError, match="data.chat_template_kwargs: expected"):
        GRPOConfig(chat_template_kwargs={"x": value} if not isinstance(value, dict) else value)


def test_none_said_by_name_is_a_parts_absence():
    objective = GRPOConfig(preset="dapo", group_filter=None, scale=None, trust_region=None).resolved_objective
    assert (objective.group_filter, objective.scale, objective.trust_region) == (None, None, None)
    assert GRPOConfig(**GRPOConfig(preset="dapo").model_dump()).resolved_objective == PRESETS["dapo"]


def test_overrides_may_mend_the_file(tmp_path):
    (tmp_path / "a.toml").write_text('[rollout]\nnum_generations = 4\n[objective]\npreset = "gfpo"\n')
    with pytest.raises(ConfigError, match=r"a.toml: objective.group_filter.k is 8"):
        load_config(tmp_path / "a.toml")
    assert load_config(tmp_path / "a.toml", ["--rollout.num_generations", "16"]).rollout.num_generations == 16
    with pytest.raises(ConfigError, match=r"a.toml: objective.group_filter.k is 8"):  # still the file's mistake
        load_config(tmp_path / "a.toml", ["--run.seed", "1"])


def test_another_rule_on_the_command_line_begins_from_its_own_numbers(tmp_path):
    (tmp_path / "a.toml").write_text('[objective]\ntrust_region = { rule = "cap", low = 0.5, high = 3 }\n')
    config = load_config(tmp_path / "a.toml", ["--objective.trust_region.rule", "ppo_clip"])
    assert config.resolved_objective.trust_region == PRESETS["default"].trust_region


def test_numbers_as_people_write_them():
    config = apply_overrides(
        {}, ["--objective.beta", ".04", "--optim.learning_rate", "1.", "--objective.top_entropy", ".2"]
    )
    assert (config.objective.beta, config.optim.learning_rate, config.resolved_objective.top_entropy) == (
        0.04,
        1.0,
        0.2,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "gfpo"}, "leaves none of rollout.num_generations .8. out"),
        ({"preset": "reinforce_pp", "num_generations": 1, "prompts_per_step": 1}, "no batch to be compared with"),
        ({"preset": "maxrl", "reward": {"weights": [-1.0]}}, "reward.weights has a negative one"),
        ({"unlikeliness": "unlikeliness", "reward": {"weights": [-1.0]}}, "reward.weights has a negative one"),
    ],
)
def test_objectives_that_do_not_fit_the_rollout(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("delta=4", "set trust_region.dual"),
        ("mask_truncated_completions=true", "set truncated to 'mask'"),
        ("num_generations=4", "a setting of a run: rollout.num_generations"),
    ],
)
def test_names_from_elsewhere_are_translated_for_parts(assignment, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings([assignment])


def toml_blocks(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return [block.split("```")[0] for block in text.split("```toml\n")[1:]]


@pytest.mark.parametrize("block", toml_blocks("objective.md"))
def test_the_guides_settings_are_settings(tmp_path, block):
    (tmp_path / "a.toml").write_text(block)
    assert load_config(tmp_path / "a.toml").resolved_objective


def test_there_are_settings_in_the_guide():
    assert len(toml_blocks("objective.md")) >= 7
    assert len(toml_blocks("data.md")) >= 4


@pytest.mark.parametrize("block", toml_blocks("data.md"))
def test_the_settings_of_the_guide_to_data_are_settings(tmp_path, block):
    (tmp_path / "a.toml").write_text(block)
    assert load_config(tmp_path / "a.toml").data.train


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("kl = { beta = 0.1 }", ["--objective.kl.rule", "k3_legacy"], {"kl": "k3_legacy", "beta": 0.1}),
        ("", ["--objective.kl.beta", ".1", "--objective.kl", "k3_legacy"], {"kl": "k3_legacy", "beta": 0.1}),
        (
            "trust_region = { high = 1.4 }",
            ["--objective.trust_region.rule", "ppo_clip"],
            {"trust_region": {"high": 1.4}},
        ),
        (
            "trust_region = { high = 1.4 }",
            ["--objective.trust_region", "cap"],
            {"trust_region": "cap"},
        ),
        (
            "",
            ["--objective.trust_region.high", "3", "--objective.trust_region.rule", "cap"],
            {"trust_region": {"rule": "cap", "high": 3}},
        ),
        (
            "",
            ["--objective.trust_region", "cap", "--objective.trust_region.high", "3"],
            {"trust_region": {"rule": "cap", "high": 3}},
        ),
        (
            "scale = 'none'",
            ["--objective.scale.ddof", "0", "--objective.scale.rule", "group_std"],
            {"scale": {"ddof": 0}},
        ),
        ("baseline = 0.5", ["--objective.baseline", "0.25"], {"baseline": 0.25}),
    ],
)
def test_flags_over_a_files_parts(tmp_path, file, flags, expected):
    (tmp_path / "a.toml").write_text(f"[objective]\n{file}\n")
    assert load_config(tmp_path / "a.toml", flags).resolved_objective == PRESETS["default"].replace(**expected)


def test_two_mistakes_are_named_where_they_are(tmp_path):
    (tmp_path / "a.toml").write_text("[optim]\nlearnin_rate = 1\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "a.toml", ["--run.seed", "x"])
    lines = str(error.value).splitlines()
    assert any("a.toml: unknown setting optim.learnin_rate" in line for line in lines)
    assert any(line.startswith("command line: run.seed") for line in lines)


def test_lists_of_numbers_as_people_write_them():
    assert apply_overrides({}, ["--reward.weights", ".5,.5"]).reward.weights == (0.5, 0.5)


@pytest.mark.parametrize("kl", [5, [1]])
def test_a_kl_of_another_kind_is_refused_by_name(kl):
    with pytest.raises(ConfigError, match="kl: expected"):
        GRPOConfig(kl=kl, beta=0.1)


def test_epsilon_is_about_the_trust_region_that_is_chosen():
    assert GRPOConfig(preset="dapo", trust_region="fipo", epsilon=0.1).resolved_objective.trust_region.high == 1.1
    assert GRPOConfig(preset="grpo", kl=None).resolved_objective.beta == 0


def test_a_preset_that_is_no_name_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text("[objective]\npreset = 5\n")
    for flags in ([], ["--objective.trust_region.high", "2"]):
        with pytest.raises(ConfigError, match="preset: input should be a valid string, got 5"):
            load_config(tmp_path / "a.toml", flags)


def test_a_json_schema_is_read_from_its_file_at_once(tmp_path):
    file = tmp_path / "answer.json"
    file.write_text('{"type": "object"}\n', encoding="utf-8")
    config = GRPOConfig(json_schema=str(file))
    assert config.rollout.json_schema == '{"type": "object"}'
    file.unlink()
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "run.toml") == config


def test_what_is_sampled_with_follows_from_the_settings():
    settings = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "min_completion_length": 3}
    settings |= {"max_completion_length": 9, "temperature": 0.5, "stop": ("x",), "regex": "a+"}
    assert Sampling.of(GRPOConfig(**settings).rollout) == Sampling(**settings)
    off = GRPOConfig(**settings, replay_sampling=False).rollout
    assert Sampling.of(off) == Sampling(**settings, record_support=False)
    assert (GRPOConfig(**settings).rollout.replayed_penalty, off.replayed_penalty) == (1.2, 1.0)
    assert not Sampling.of(GRPOConfig().rollout).reweights


def test_a_comma_in_brackets_parts_nothing(tmp_path):
    (tmp_path / "run.toml").write_text("")
    given = ["--reward.functions", "f.py:a(x=1, y=(2, 3)),math,g.py:b", "--rollout.stop", "a,b)"]
    config = load_config(tmp_path / "run.toml", given)
    assert config.reward.functions == ("f.py:a(x=1, y=(2, 3))", "math", "g.py:b")
    assert config.rollout.stop == ("a", "b)")


# Evaluation --------------------------------------------------------------------------------------------------------------


def test_evaluation_settings_have_a_section_of_their_own(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text("[run]\neval_steps = 3\n[rollout]\nnum_generations_eval = 2\n")
    with pytest.raises(ConfigError, match="unknown setting run.eval_steps; did you mean eval.eval_steps"):
        load_config(path)
    with pytest.raises(ConfigError, match="did you mean eval.num_generations_eval"):
        load_config(path)
    with pytest.raises(ConfigError, match="unknown setting --run.eval_steps; did you mean --eval.eval_steps"):
        apply_overrides({}, ["--run.eval_steps", "3"])
    with pytest.raises(ConfigError, match="eval is a section: .*did you mean data.eval"):
        GRPOConfig(eval="test.jsonl")
    assert GRPOConfig(eval_steps=3, num_generations_eval=2).eval.eval_steps == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pass_at_k": [1, 8], "num_generations_eval": 4}, "pass_at_k asks for 8 completions per prompt"),
        ({"maj_at_k": [2]}, "maj_at_k asks for 2 completions per prompt, and num_generations_eval is 1"),
        ({"pass_at_k": [0]}, "eval.pass_at_k.0"),
        ({"early_stopping_patience": 2}, "needs a metric: set eval.metric_for_best_model"),
        ({"temperature_eval": -0.1}, "eval.temperature_eval"),
        ({"confidence": 1.0}, "eval.confidence"),
        ({"bootstrap_samples": 10}, "eval.bootstrap_samples"),
        (
            {"min_completion_length": 9, "max_completion_length_eval": 8},
            r"must be at most eval.max_completion_length_eval \(8\)",
        ),
        ({"load_best_model_at_end": True}, "set eval.metric_for_best_model"),
    ],
)
def test_evaluation_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(**settings)


def test_evaluation_sets(tmp_path):
    sets = {"gsm8k": "test.jsonl", "aime-24": str(tmp_path / "aime.jsonl")}
    config = GRPOConfig(data={"eval": {"gsm8k": "test.jsonl", "aime-24": tmp_path / "aime.jsonl"}})
    assert config.data.eval == sets
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "run.toml") == config
    flags = ["--data.eval", '{ gsm8k = "test.jsonl" }', "--eval.pass_at_k", "1,8", "--eval.num_generations_eval", "8"]
    flagged = apply_overrides({}, flags)
    assert (flagged.data.eval, flagged.eval.pass_at_k) == ({"gsm8k": "test.jsonl"}, (1, 8))
    assert apply_overrides({}, ["--data.eval.gsm8k", "x", "--data.eval.b", "y"]).data.eval == {"gsm8k": "x", "b": "y"}
    one = GRPOConfig(data={"eval": {"path": "a.jsonl", "rows": 3}})
    assert [(source.path, source.rows) for source in one.data.eval] == [("a.jsonl", 3)]
    mixed = GRPOConfig(data={"eval": {"both": ["a.jsonl", {"path": "b.jsonl", "rows": 2}]}})
    assert [source.path for source in mixed.data.eval["both"]] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "mixed.toml").write_text(to_toml(mixed))
    assert load_config(tmp_path / "mixed.toml") == mixed
    assert apply_overrides({}, ["--eval.pass_at_k", "", "--data.eval", "a.jsonl"]).eval.pass_at_k == ()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"a/b": "x"}, "data.eval: an evaluation set's name .* got 'a/b'"),
        ({"length": "x"}, "none of reward, rewards, length"),
        ({}, "it is empty"),
        ({"a": ""}, "a: expected a path or a list of sources, got an empty string"),
        (3, "data.eval: expected a path or a list of sources, got 3"),
    ],
)
def test_evaluation_sets_that_cannot_be(sets, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(data={"eval": sets})


def test_tables_of_the_users_own_on_the_command_line(tmp_path):
    data = load(
        tmp_path,
        "[data]\nfilter = { level = 'hard' }",
        *("--data.filter.pass_rate.min", "0.1", "--data.filter.pass_rate.max=0.9"),
        *("--data.chat_template_kwargs.enable_thinking", "False", "--data.chat_template_kwargs.a.b", "True"),
        *("--data.columns.a.b", "x"),
    ).data
    assert data.filter == {"level": "hard", "pass_rate": {"min": 0.1, "max": 0.9}}
    assert data.chat_template_kwargs == {"enable_thinking": False, "a": {"b": True}}
    assert data.columns == {"a.b": "x"}
