"""Checkpoints that N ranks in one layout write and M in another read, bit for bit."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cohort.config import OptimConfig
from cohort.config.schema import RunConfig
from cohort.errors import RunFolderError
from cohort.parallel import World, layout_of, together
from cohort.policy import Policy, Precision
from cohort.runs.checkpoints import NEEDED, Models, SavedState, load_checkpoint, random_state
from cohort.runs.folder import RunFolder
from cohort.runs.models import check_saved, named_weights, whole
from cohort.train import Optimizer
from tests.conftest import tiny_llama
from tests.parallel.launching import on_ranks

SINGLE = Precision(torch.float32, torch.float32)


class NoTokenizer:
    def save_pretrained(self, path):
        pass


class Run:
    """A policy, a reference and an optimizer: what a checkpoint stores."""

    def __init__(self, layout, tied, world, values=True):
        self.world, self.layout = world, layout_of(layout, world)
        policy, reference = (tiny_llama(tie_word_embeddings=tied) for _ in range(2))
        for model in (policy, reference):
            if not values:
                for parameter in model.parameters():
                    torch.nn.init.zeros_(parameter)
            self.layout.shard(model)
        self.models = Models(Policy(policy, SINGLE), Policy(reference, SINGLE), NoTokenizer())
        self.optimizer = Optimizer(policy, OptimConfig(learning_rate=1e-2, lr_scheduler_type="cosine"), 5, self.layout)

    def train(self):
        for step in range(2):
            self.optimizer.zero_grad()
            ids = torch.randint(2, 37, (2, 9), generator=torch.Generator().manual_seed(step))
            self.models.policy.model(ids).logits.square().mean().backward()
            self.layout.sum_gradients(self.optimizer.parameters)
            assert self.optimizer.step(self.layout.clip_gradients) > 0
            self.layout.stepped()

    def save(self, path, minutes=60):
        random = self.world.gather(random_state())
        loop = {key: {} for key in NEEDED} | {"random": random, "version": self.models.policy.version}
        state = SavedState(2, self.optimizer.state_dict(), loop)
        settings = RunConfig(stop_when_unsaved_minutes=minutes)
        RunFolder(path, settings).save_checkpoint(self.models, state, self.world, wait=True)
        together(self.world, lambda: check_saved(self.models.policy, RunFolder(path).checkpoint(2)))

    def load(self, path):
        folder = RunFolder(path).checkpoint(2)
        state = load_checkpoint(folder, self.models, rank=self.world.rank)
        self.optimizer.load_state_dict(state.optimizer)
        return self

    def values(self):
        """Everything that was saved, gathered."""
        parts = {"policy": named_weights(self.models.policy.model), "optimizer": self.optimizer.state_dict()["tensors"]}
        parts["reference"] = named_weights(self.models.reference.model)
        found = {f"{part}.{name}": whole(tensor) for part, some in parts.items() for name, tensor in some.items()}
        return found | {"rate": torch.tensor(self.optimizer.learning_rate)}


def saved_and_loaded(folder: Path, layout: str, tied: bool, other: Path | None):
    """Save a trained run in a layout, and load what another wrote; the values of both."""
    world = World.of_environment()
    run = Run(layout, tied, world)
    run.train()
    run.save(folder)
    return run.values(), other and Run(layout, tied, world, values=False).load(other).values()


KINDS = [("full", True), ("optimizer", False)]
"""A layout with tied tables and one without; one start of the processes serves both."""


def both_saved(folder: Path):
    return [saved_and_loaded(folder / layout, layout, tied, None)[0] for layout, tied in KINDS]


def both_loaded(folder: Path):
    """Each kind in the layout of the other."""
    world, others = World.of_environment(), {"full": "optimizer", "optimizer": "full"}
    return [Run(others[layout], tied, world, values=False).load(folder / layout).values() for layout, tied in KINDS]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ranks
def test_two_sharded_ranks_and_one_process_read_each_other(tmp_path):
    one = Run("replicate", True, World())
    one.train()
    one.save(tmp_path / "one")
    (values, from_one), (same, _) = on_ranks(2, saved_and_loaded, tmp_path / "two", "full", True, tmp_path / "one")
    assert_equal(values, same)
    assert any(values["policy.model.norm.weight"] != 1)
    assert_equal(from_one, one.values())
    run = Run("replicate", True, World(), values=False).load(tmp_path / "two")
    assert_equal(run.values(), values)
    assert run.models.policy.model.lm_head.weight is run.models.policy.model.model.embed_tokens.weight
    theirs = AutoModelForCausalLM.from_pretrained(RunFolder(tmp_path / "two").checkpoint(2))
    assert_equal(theirs.state_dict(), run.models.policy.model.state_dict())


@pytest.mark.ranks
def test_four_ranks_save_and_fewer_or_more_load(tmp_path):
    """Of 5 ranks, one has no rows of a matrix with 12."""
    values, *_ = on_ranks(4, both_saved, tmp_path, timeout=600)
    for size in (2, 3, 5):
        for rank in on_ranks(size, both_loaded, tmp_path, timeout=600):
            assert_equal(rank[0], values[0])
            assert_equal(rank[1], values[1])
    for (layout, tied), expected in zip(KINDS, values, strict=True):
        assert_equal(Run("replicate", tied, World(), values=False).load(tmp_path / layout).values(), expected)


def full_disk(folder: Path):
    """Rank 0 fails while it writes, and no time is left to repeat it: every rank raises the same error, and the next
    checkpoint is written."""
    import cohort.runs.durable as durable

    world = World.of_environment()
    run, real = Run("full", True, world), durable.os.fsync
    run.train()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    durable.os.fsync = fail
    try:
        run.save(folder, minutes=0)
    except RunFolderError as error:
        text = str(error)
    durable.os.fsync = real
    left = [path.name for path in (folder / "checkpoints").iterdir()]
    world.barrier()
    run.save(folder)
    return text, left


@pytest.mark.ranks
def test_a_full_disk_is_every_ranks_error(tmp_path):
    for text, left in on_ranks(2, full_disk, tmp_path, timeout=600):
        assert "rank 0 of 2: could not be written for 0 minutes" in text
        assert "No space left on device" in text
        assert left == []
    Run("replicate", True, World(), values=False).load(tmp_path)
