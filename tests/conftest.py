"""Small models and tokenizers, made on the spot: no test reads a hub. Importing this module imports no torch, so that
tests of configuration and data run without it."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # as the package does; before torch is imported
# The native kernels are compiled once, and again only when they change.
os.environ["COHORT_CACHE"] = str(Path(__file__).parents[1] / ".pytest_cache" / "kernels")
if "cohort-tests-" not in os.environ.get("COHORT_STATE", ""):  # workers and child processes share it
    os.environ["COHORT_STATE"] = tempfile.mkdtemp(
        prefix=f"cohort-tests-{os.getpid()}-"
    )  # tests leave no records of known code
    atexit.register(shutil.rmtree, os.environ["COHORT_STATE"], ignore_errors=True)

import pytest
from _pytest.doctest import DoctestModule

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "src" / "cohort" / "demo" / "model"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def pytest_configure() -> None:
    os.fsync = os.fstat  # no test cuts the power, and a disk takes milliseconds for each of thousands of files
    gc.disable()  # until the collection ends: nothing goes away while modules are imported
    # Else every worker, and every process that a test starts, compiles the tests and the package anew.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a fresh clone, workers collect at the same time, and each would compile every test and the native kernels. The
    kernels are compiled beside the collection, and each worker imports a share of the tests before the others do. The
    process that others are forked from starts then, too: several tests would wait for it at once."""
    if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    worker = getattr(session.config, "workerinput", None)
    if worker is None and session.config.getoption("numprocesses", None):
        threading.Thread(target=lambda: importlib.import_module("tests.warm").start_server(), daemon=True).start()
        if not any(Path(os.environ["COHORT_CACHE"]).glob("*.so")):
            command = [sys.executable, "-c", "from cohort.native import load; load()"]
            atexit.register(subprocess.Popen(command, stderr=subprocess.DEVNULL).wait)
    elif worker is not None and not any((ROOT / "tests" / "__pycache__").glob("test_trainer.*pytest*.pyc")):
        modules = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "parity")
        for path in modules[int(worker["workerid"][2:]) :: worker["workercount"]]:
            # Collecting the module repeats an error and a skip.
            with contextlib.suppress(Exception, pytest.skip.Exception), warnings.catch_warnings(action="error"):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that start processes wait for them a third of the time."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Any:
    """Tests have no doctests: looking for them takes a third of the collection."""
    return [one for one in (yield) if not isinstance(one, DoctestModule)]


def pytest_collection_finish() -> None:
    import hypothesis  # noqa: F401  # for pytest's summary at the latest, and it looks for referrers, which freeze hides

    gc.freeze()  # collections in tests do not look at millions of objects that stay
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest adds six handlers a test to each logger that does not


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    if "torch" in sys.modules:  # imported by some test module
        sys.modules["torch"].set_num_threads(1)  # a second one only waits: the models are small


@pytest.fixture(scope="session", autouse=True)
def _budgets_are_measured_once() -> Iterator[None]:
    """The memory of a pass, which every trainer measures before its first step, is measured once for trainers of one
    model and one length: it is a third of a small run."""
    trainer = sys.modules.get("cohort.trainer")
    if trainer is None:
        yield
        return
    real, known = trainer.find_budget, {}

    def find_budget(policy: Any, *sizes: int | None) -> Any:
        parameters = [(name, one.shape, one.dtype, one.requires_grad) for name, one in policy.model.named_parameters()]
        saving = [name for name, one in policy.model.named_modules() if getattr(one, "gradient_checkpointing", False)]
        model = policy.model.config, policy.precision, policy.passes.description, saving
        key = repr((parameters, model, sizes, sys.modules["cohort.train.memory"].free_bytes))
        if key not in known:
            known[key] = real(policy, *sizes)
        return copy.copy(known[key])

    trainer.find_budget = find_budget
    yield
    trainer.find_budget = real


@pytest.fixture(scope="session", autouse=True)
def _mistakes_in_trials_are_raised() -> Iterator[None]:
    """An implementation whose trial fails is not used, and the next one hides a mistake of the package's own: tests
    raise what only a mistake raises. (Elsewhere the package reads what models' own code returns.)"""
    rooms = ("policy/recurrent", "policy/custom_", "policy/attention", "policy/lean", "policy/fused", "policy/mixers")
    rooms += ("rollout/local/cached", "rollout/local/mixing", "rollout/local/cache")
    modules = [
        sys.modules[name] for name in ("cohort.policy.choose", "cohort.rollout.local.choose") if name in sys.modules
    ]

    def one_line(error: Exception) -> str:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        own = trace is not None and any(f"/src/cohort/{room}" in trace.tb_frame.f_code.co_filename for room in rooms)
        if own and isinstance(error, TypeError | AttributeError):
            raise error
        return str(real(error))

    if modules:
        real = modules[0].one_line
    for module in modules:
        module.one_line = one_line
    yield
    for module in modules:
        module.one_line = real


@pytest.fixture(scope="session", autouse=True)
def _trials_are_made_once(_mistakes_in_trials_are_raised: None) -> Iterator[None]:
    """Implementations are tried once for models of one shape: every trainer and every engine would compare its own with
    the model's forward pass, which is a sixth of a small run. Tests of the implementations themselves try each time."""
    modules = [
        sys.modules[name] for name in ("cohort.policy.choose", "cohort.rollout.local.choose") if name in sys.modules
    ]
    real, passed = modules[0].first_correct if modules else None, set[str]()

    def first_correct(candidates: Any, gaps: Any, model: Any, failures: list[str]) -> Any:
        torch, first = sys.modules["torch"], next(candidates := iter(candidates), None)
        every = itertools.chain(() if first is None else (first,), candidates)
        room = os.environ.get("PYTEST_CURRENT_TEST", "").split("/")[:2]
        if first is None or room in (["tests", "policy"], ["tests", "rollout"], ["tests", "families"]):
            return real(every, gaps, model, failures)
        with torch.no_grad(), contextlib.suppress(Exception):
            made = first.construct()
            made.description += sys.modules["cohort.policy.choose"].in_parentheses(failures)
            if key_of(made, gaps, model) in passed:
                return made
        before = len(failures)
        chosen = real(every, gaps, model, failures)
        if chosen is not None and len(failures) == before:
            passed.add(key_of(chosen, gaps, model))
        return chosen

    def key_of(chosen: Any, gaps: Any, model: Any) -> str:
        shapes = [(name, one.shape, one.dtype, one.requires_grad) for name, one in model.model.named_parameters()]
        saving = [name for name, one in model.model.named_modules() if getattr(one, "gradient_checkpointing", False)]
        attention = model.model.config._attn_implementation
        return repr(
            (gaps.__module__, chosen.description, shapes, saving, attention, model.model.config, model.precision)
        )

    for module in modules:
        module.first_correct = first_correct
    yield
    for module in modules:
        module.first_correct = real


@pytest.fixture(scope="session")
def demo_model_path() -> str:
    return str(DEMO_MODEL)


@pytest.fixture(scope="session")
def demo_tokenizer():
    """The demo's tokenizer: a token per digit, sign and word; has a chat template."""
    from cohort.policy import load_tokenizer

    return load_tokenizer(str(DEMO_MODEL))


def telling(cases: Any, *kept: Any) -> list[Any]:
    """A matrix for ``parametrize`` of which every suite runs the most telling cases; the others are slow."""
    assert set(kept) <= {*cases}, f"no cases: {set(kept) - {*cases}}"
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def each(names: str | tuple[str, ...], cases: Iterable[Any], ids: Any = None) -> Callable[[Callable[..., None]], Any]:
    """As ``pytest.mark.parametrize``, in one test: for a case that takes less time than what pytest does for a test. All
    cases run, and an error tells the case; where every case is skipped, the test is."""
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    table = [dict(zip(columns, case if len(columns) > 1 else (case,), strict=True)) for case in cases]
    assert table

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def of_each(*instance: Any, **fixtures: Any) -> None:
            failed, skipped = [], []
            for number, case in enumerate(table):
                try:
                    function(*instance, **fixtures, **case)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:
                    error.add_note(f"case {number} of {function.__name__}: {case!r:.2000}")
                    failed.append(error)
            if failed:
                raise failed[0] if len(failed) == 1 else BaseExceptionGroup(f"{len(failed)} cases fail", failed)
            if len(skipped) == len(table):
                raise skipped[0]

        signature = inspect.signature(function)
        kept = [one for name, one in signature.parameters.items() if name not in columns]
        of_each.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return of_each

    return decorate


def family_model(family: str, **settings: Any) -> Any:
    """A random model of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Before 5.21 transformers chooses SDPA for models with soft caps, and drops the caps.
    attention = {"attn_implementation": "eager"} if family in ("gemma2", "vaultgemma") else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), **attention)


def tiny_llama(vocab_size: int = 37, **changes):
    """A random Llama of a few thousand parameters. Weights are large enough that distributions are not flat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    } | changes
    return LlamaForCausalLM(LlamaConfig(**settings))


@pytest.fixture
def float64_policy() -> Any:
    import torch

    from cohort.policy import Policy, Precision

    return Policy(tiny_llama().double(), Precision(torch.float64, torch.float64))


@pytest.fixture
def float32_policy() -> Any:
    import torch

    from cohort.policy import Policy, Precision

    return Policy(tiny_llama(), Precision(torch.float32, torch.float32))
