"""Scripts that torchrun or accelerate starts: the processes train together, and each calls its callbacks."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.parallel.launching import on_ranks


def trained_on_rank(folder, per_device):
    """A run of this rank: weights, log, and what a callback was told."""
    from cohort.policy import load_tokenizer
    from cohort.trl import GRPOConfig, GRPOTrainer
    from tests.conftest import DEMO_MODEL, tiny_llama
    from tests.train.harness import ROWS, digits_reward
    from tests.trl.test_trainer import SETTINGS

    class Steps(TrainerCallback):
        def __init__(self):
            self.told = []

        def on_step_end(self, args, state, control, **_):
            self.told.append((state.global_step, state.is_world_process_zero))

    tokenizer = load_tokenizer(str(DEMO_MODEL))
    args = GRPOConfig(str(folder), **SETTINGS | {"per_device_train_batch_size": per_device, "max_steps": 4})
    model, steps = tiny_llama(vocab_size=len(tokenizer)), Steps()
    trainer = GRPOTrainer(model, digits_reward, args, ROWS, processing_class=tokenizer, callbacks=[steps])
    output = trainer.train()
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    weights = [one.detach().cpu() for one in trainer.model.parameters()]
    found = weights, [entry.get("loss") for entry in trainer.state.log_history], steps.told, output.global_step
    places = trainer.accelerator.process_index, trainer.accelerator.num_processes, trainer.is_world_process_zero()
    trainer.core.world.close()
    return *found, places


@pytest.mark.ranks
def test_two_processes_train_as_one(tmp_path):
    """Half the batch on each of two processes is the batch of one, up to the rounding of sums."""
    (alone,) = on_ranks(1, trained_on_rank, tmp_path / "alone", 4)
    first, second = on_ranks(2, trained_on_rank, tmp_path / "both", 2)
    assert (first[1], first[3], first[4]) == (second[1], second[3], (0, 2, True))
    assert second[4] == (1, 2, False)
    assert (first[2], second[2]) == ([(n, True) for n in range(1, 5)], [(n, False) for n in range(1, 5)])
    for one, other, single in zip(first[0], second[0], alone[0], strict=True):
        assert torch.equal(one, other)
        assert torch.allclose(one, single, atol=1e-4)  # Adam's first steps divide small gradients by their size
    assert first[1][0] == pytest.approx(alone[1][0], abs=1e-5)
    assert get_last_checkpoint(str(tmp_path / "both")) == str(tmp_path / "both" / "checkpoint-4")
    assert (tmp_path / "both" / "final" / "model.safetensors").exists()


def asked_on_one_rank(folder, resume):
    """A run with evaluations whose second rank alone asks: for a checkpoint after update 1, for an evaluation after
    update 2, for the end after update 3, unless it is resumed."""
    from cohort.policy import load_tokenizer
    from cohort.trl import GRPOConfig, GRPOTrainer
    from tests.conftest import DEMO_MODEL, tiny_llama
    from tests.train.harness import ROWS, digits_reward
    from tests.trl.test_trainer import SETTINGS

    class Asking(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if not state.is_world_process_zero:
                control.should_save |= state.global_step == 1
                control.should_evaluate |= state.global_step == 2
                control.should_training_stop |= state.global_step == 3 and not resume

    def falling(completions, trainer_state, **_):
        return [score / 10 - trainer_state.global_step for score in digits_reward(completions)]

    tokenizer = load_tokenizer(str(DEMO_MODEL))
    asked = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    asked |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "steps_per_generation": 1}
    args = GRPOConfig(str(folder), **SETTINGS | asked | {"max_steps": 6, "metric_for_best_model": "eval_reward"})
    options = {"processing_class": tokenizer, "callbacks": [Asking()]}
    trainer = GRPOTrainer(tiny_llama(vocab_size=len(tokenizer)), falling, args, ROWS, ROWS[:2], **options)
    output = trainer.train(resume_from_checkpoint=resume)
    state, weights = trainer.state, [one.detach().cpu() for one in trainer.model.parameters()]
    evaluated = [entry["step"] for entry in state.log_history if "eval_reward" in entry]
    trainer.core.world.close()
    return output.global_step, evaluated, state.best_global_step, state.best_model_checkpoint, weights


@pytest.mark.ranks
def test_what_one_rank_asks_for_is_done_on_all(tmp_path):
    """The ranks stop together, go on together, know the best checkpoint, and load its weights at the end."""
    folder = tmp_path / "run"
    for resume, steps, evaluated, written in [(False, 3, [2], [1, 3]), (True, 6, [2, 4, 6], [1, 3, 4, 6])]:
        first, second = on_ranks(2, asked_on_one_rank, folder, resume)
        assert first[:4] == second[:4] == (steps, evaluated, 2, None)  # no checkpoint was asked for at update 2
        assert sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")) == written
        best = list(load_file(folder / "best" / "model.safetensors").values())
        for one, other in zip(first[4], second[4], strict=True):
            assert torch.equal(one, other)
            assert any(torch.equal(one, weight) for weight in best)
