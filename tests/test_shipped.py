"""What the package brings along: recipes, two models, a data set."""

import re

import pytest

from cohort import shipped
from cohort.config import load_config
from cohort.data.source import read_source
from cohort.demo.task import problems
from cohort.errors import ConfigError, DataError, ModelError
from cohort.policy import load_tokenizer, read_config
from cohort.rewards.names import BUILTIN_REWARDS
from tests.conftest import ROOT


def test_shipped_models_have_names_wherever_a_model_is_named():
    assert load_tokenizer("cohort:demo").chat_template
    assert read_config("cohort:demo").hidden_size == read_config(str(shipped.MODELS["cohort:demo"])).hidden_size
    with pytest.raises(ModelError, match="no model 'cohort:dmeo' is shipped: .*did you mean cohort:demo?"):
        load_tokenizer("cohort:dmeo")


def test_shipped_problems_are_those_of_the_demo():
    for split, count, held_out in (("train", 2000, False), ("test", 500, True)):
        rows = read_source("cohort:addition", "data", split)
        assert rows == [row | {"answer": f"#### {row['answer']}"} for row in problems(count, held_out=held_out, seed=0)]
    with pytest.raises(DataError, match="did you mean cohort:addition"):
        read_source("cohort:additon", "data", "train")


def test_every_recipe_is_valid_and_says_what_it_is():
    found = shipped.recipes()
    assert "gsm8k" in found
    for recipe in found.values():
        load_config(recipe.folder / "config.toml")
        assert (shipped.folder("docs") / "recipes" / f"{recipe.name}.md").exists()
        assert (ROOT / "tests" / "recipes" / f"test_{recipe.name}.py").exists()
        assert len([file for file in recipe.folder.iterdir() if file.suffix == ".py"]) <= 1


def extras_of(recipe):
    """The extras that the settings and the files of a recipe need."""
    config = load_config(recipe.folder / "config.toml")
    code = "".join(file.read_text() for file in recipe.folder.glob("*.py"))
    rewards = [BUILTIN_REWARDS.get(name.partition("(")[0]) for name in config.reward.functions]
    needs = {
        "lora": config.model.lora.rank > 0,
        "quantized": config.model.quantization != "none",
        "grammar": config.rollout.json_schema is not None or config.rollout.regex is not None,
        "mcp": any(tool.startswith("mcp:") for tool in config.environment.tools),
        "reasoning-gym": "reasoning_gym" in config.model_dump_json(),
        "trl": "cohort.trl" in code,
        "plot": '"plot"' in code,
    }
    extras = {name for name, needed in needs.items() if needed} | set(config.report.trackers)
    return extras | {reward.extra for reward in rewards if reward and reward.package}


def test_the_head_of_a_recipe_installs_the_extras_that_it_needs():
    named = {}
    for recipe in shipped.recipes().values():
        found = re.findall(r"pip install 'cohort-rl\[([\w,-]+)\]'", "\n".join(recipe.commands))
        named[recipe.name] = {extra for one in found for extra in one.split(",")}
        assert extras_of(recipe) <= named[recipe.name], recipe.name
    assert {name for name, extras in named.items() if extras} >= {
        "lora_24gb",
        "ship",
        "trackers",
        "thinking",
        "compare",
    }


def test_a_recipe_without_its_head_is_named(monkeypatch, tmp_path):
    (tmp_path / "examples" / "mine").mkdir(parents=True)
    (tmp_path / "examples" / "mine" / "config.toml").write_text("# A title\n[model]\n")
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path)
    with pytest.raises(ConfigError, match="mine/config.toml does not begin with"):
        shipped.recipes()
    with pytest.raises(ConfigError, match="has no docs: looked for"):
        shipped.folder("docs")
