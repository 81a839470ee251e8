"""Small models and tokenizers, made on the spot: no test reads a hub. Importing this module imports no torch, so that
tests of configuration and data run without it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # as the package does; before torch is imported
# The native kernels are compiled once per session, for its child processes too.
os.environ["COHORT_CACHE"] = tempfile.mkdtemp(prefix="cohort-tests-")
os.environ["COHORT_STATE"] = os.environ["COHORT_CACHE"]  # tests leave no records of known code

import pytest

DEMO_MODEL = Path(__file__).parents[1] / "src" / "cohort" / "demo" / "model"
GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="session", autouse=True)
def _no_cache_left() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["COHORT_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    if "torch" in sys.modules:  # imported by some test module
        sys.modules["torch"].set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session")
def demo_model_path() -> str:
    return str(DEMO_MODEL)


@pytest.fixture(scope="session")
def demo_tokenizer():
    """The demo's tokenizer: a token per digit, sign and word; has a chat template."""
    from cohort.policy import load_tokenizer

    return load_tokenizer(str(DEMO_MODEL))


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
