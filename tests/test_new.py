"""``cohort new``: the list of recipes, and the folder to start from."""

import pytest

from cohort import shipped
from cohort.cli import main
from cohort.config import load_config


def test_recipes_are_listed_with_hardware_and_time(capsys):
    assert main(["new"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for one in shipped.recipes().values():
        assert f"{one.name} {one.title} {one.hardware}; time: {one.time}" in output


@pytest.mark.parametrize("name", sorted(shipped.recipes()))
def test_a_starter_has_the_settings_of_its_recipe(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 0
    printed = capsys.readouterr().out.split("next:\n")[1].splitlines()[:-1]
    assert printed[0] == f"    cd {name}"
    assert {line.strip() for line in printed} >= {*shipped.recipes()[name].commands, "cohort doctor config.toml"}
    assert any(line.startswith("    cohort train config.toml") for line in printed)
    monkeypatch.chdir(tmp_path / name)
    recipe, starter = shipped.recipes()[name].folder, tmp_path / name
    saved = load_config(recipe / "config.toml").model_dump_json().replace(f"{recipe}/", "")
    assert load_config("config.toml").model_dump_json().replace(f"{starter}/", "") == saved
    for file in starter.iterdir():
        text = file.read_text()
        assert f"examples/{name}" not in text
        if file.suffix == ".py":
            compile(text, file.name, "exec")
    assert {file.name for file in starter.iterdir()} == {file.name for file in recipe.iterdir() if file.is_file()}


def test_what_is_in_the_way_is_never_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert main(["new", "gsm8k", "mine"]) == 0  # an empty folder is free
    (tmp_path / "mine" / "config.toml").write_text("my work")
    for target in ("mine", "mine/config.toml"):
        assert main(["new", "gsm8k", target]) == 2
        assert "give another folder, as in 'cohort new gsm8k FOLDER'" in capsys.readouterr().err
    assert (tmp_path / "mine" / "config.toml").read_text() == "my work"
    assert main(["new", "gsm8k", "a/b c"]) == 0
    assert "cd 'a/b c'" in capsys.readouterr().out


def test_a_misspelt_recipe_is_answered_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "gms8k"]) == 2
    assert "no recipe 'gms8k'; did you mean gsm8k?" in capsys.readouterr().err
    assert main(["new", "../cluster"]) == 2
    assert "no recipe '../cluster'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
