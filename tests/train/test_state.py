"""What torch keeps for a process or a thread: a run computes the same whatever the script has set, and what user
functions change is put back and told."""

import ast
import asyncio
import re
from pathlib import Path

import pytest
import torch

import cohort
from cohort import state
from cohort.calls import Calls, recorded
from cohort.errors import ConfigError
from tests.conftest import tiny_llama
from tests.train.harness import digits_reward, make_trainer, metrics_of

TIMES = ("time", "seconds", "tokens_per_second", "memory")
MAKERS = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye"}
MADE = re.compile(rf"\btorch\s*\.\s*({'|'.join(MAKERS)})\b")


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    state._told.clear()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def numbers(folder):
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in metrics_of(folder)
    ]


def test_memory_names_its_dtype():
    """The default is the script's, and may change in the middle of a run."""
    unnamed = []
    for path in Path(cohort.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if MADE.search(text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                owner, named = node.func.value, {word.arg for word in node.keywords}
                if isinstance(owner, ast.Name) and owner.id == "torch" and not named & {"dtype", None}:
                    unnamed.append(f"{path.name}:{node.lineno}")
    assert unnamed == []


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "float32"), ("float64", "bfloat16")])
def test_the_default_dtype_of_a_script_changes_nothing(demo_tokenizer, tmp_path, dtype, precision):
    more = {"max_steps": 2, "precision": precision, "beta": 0.1, "num_iterations": 2, "eval_rows": [{"prompt": "1"}]}
    for name in ("float32", dtype):
        model = tiny_llama(vocab_size=len(demo_tokenizer))
        torch.set_default_dtype(getattr(torch, name))
        make_trainer(demo_tokenizer, tmp_path / name, model, **more).train()
        assert torch.get_default_dtype() == getattr(torch, name)  # user functions find the script's
        torch.set_default_dtype(torch.float32)
    assert numbers(tmp_path / dtype) == numbers(tmp_path / "float32")


CHANGES = {
    "set_default_dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "manual_seed": lambda: torch.manual_seed(5),
    "set_default_device": lambda: torch.set_default_device("meta"),
}


@pytest.fixture(scope="module")
def plain(demo_tokenizer, tmp_path_factory):
    """The numbers of a run whose reward changes nothing."""
    folder = tmp_path_factory.mktemp("state") / "plain"
    make_trainer(demo_tokenizer, folder, max_steps=2).train()
    return numbers(folder)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_reward_changes_is_put_back_and_told_once(demo_tokenizer, tmp_path, caplog, plain, name):
    def careless(completions, **_):
        CHANGES[name]()
        return digits_reward(completions)

    make_trainer(demo_tokenizer, tmp_path / "run", rewards=careless, max_steps=2).train()
    told = [record.getMessage() for record in caplog.records if "is put back" in record.getMessage()]
    assert len(told) == 1
    assert f"careless has called torch.{name}" in told[0]
    for one, other in zip(plain, numbers(tmp_path / "run"), strict=True):
        assert one["grad_norm"] == other["grad_norm"]
    assert torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("change", [False, True])
def test_deterministic_algorithms_that_only_warn_stay_so(change, caplog):
    """A script's mode has two flags, and a function may change either."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with state.kept(digits_reward):
        torch.use_deterministic_algorithms(change)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert "digits_reward has called torch.use_deterministic_algorithms: True is put back" in caplog.messages[0]


def test_an_update_needs_no_gradients_of_the_script(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, term_norms_steps=1)
    torch.set_grad_enabled(False)
    trainer.train()
    assert not torch.is_grad_enabled()
    assert trainer.last_metrics["grad_norm"] > 0


def test_a_state_in_which_nothing_can_be_trained_is_refused(demo_tokenizer):
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"torch\.inference_mode is on"):
        make_trainer(demo_tokenizer, None)
    torch.set_default_device("meta")
    try:
        with pytest.raises(ConfigError, match=r"torch's default device is meta.*model\.device"):
            make_trainer(demo_tokenizer, None, "unused")
    finally:
        torch.set_default_device(None)


def test_async_functions_that_change_it_beside_each_other():
    async def careless(seconds):
        torch.set_default_dtype(torch.bfloat16)
        await asyncio.sleep(seconds)
        return seconds

    calls = Calls(1)
    ended = [calls.submit(recorded(careless), {"seconds": seconds}) for seconds in (0.05, 0.01)]
    assert [one.result().returned for one in ended] == [0.05, 0.01]
    assert torch.get_default_dtype() == torch.float32


def test_random_numbers_of_a_reward_go_on():
    """Only a seed that it sets is taken back."""
    drawn = [Calls(1).submit(recorded(lambda: torch.rand(()).item()), {}, here=True).result().returned for _ in "ab"]
    assert drawn[0] != drawn[1]
