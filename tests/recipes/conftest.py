"""Recipes run as they are shipped, but for settings on the command line that make them small."""

import contextlib
import importlib.util
import json

import pytest

from cohort import shipped
from tests.conftest import tiny_llama
from tests.data.templates import byte_tokenizer

ROLES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def run_recipe(tmp_path_factory):
    """``run_recipe("gsm8k", "--run.max_steps", "1", ...)``: ``cohort train`` with the shipped files, in this process and
    from an empty folder. Returns the run folder. The errors of a bad setting are raised, as ``CohortError``. ``file``
    names other settings than config.toml."""

    def run(name, *overrides, file="config.toml"):
        from cohort.cli.main import app

        config = shipped.recipes()[name].folder / file
        folder = tmp_path_factory.mktemp(name)
        arguments = ["train", str(config), "--run.output_dir", str(folder / "run"), *map(str, overrides)]
        command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
        with contextlib.chdir(folder):
            command(*bound.args, **bound.kwargs)
        return folder / "run"

    return run


@pytest.fixture(scope="session")
def recipe_file():
    """``recipe_file("compare", "compare.py")``: the Python file of a recipe as a module."""

    def load(name, file):
        path = shipped.recipes()[name].folder / file
        spec = importlib.util.spec_from_file_location(f"{name}_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory):
    """A random model with a token per byte and a chat template that shows roles: it takes any text."""
    path, tokenizer = tmp_path_factory.mktemp("tiny_chat_model"), byte_tokenizer(ROLES, bos=False)
    tokenizer.save_pretrained(path)
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2048}
    tiny_llama(**shape).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def gsm8k_data(tmp_path_factory):
    """Settings that name rows in the form of GSM8K: two to train on, with answers 2 and 3, two others to evaluate."""
    folder, settings = tmp_path_factory.mktemp("gsm8k"), []
    for name, numbers in (("train", (3, 4)), ("eval", (5, 6))):
        rows = [
            {"question": f"Ann has {n} eggs and eats one.", "answer": f"She has {n}-1\n#### {n - 1}"} for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings += [f"--data.{name}", str(folder / f"{name}.jsonl")]
    return settings
