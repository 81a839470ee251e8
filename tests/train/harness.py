"""Small runs of ``GRPOTrainer`` with a tiny random model on sums, and what they leave in their folders."""

import json

import pyarrow.parquet
import torch

from cohort import GRPOConfig, GRPOTrainer
from tests.conftest import tiny_llama


def digits_reward(completions, **_):
    """The share of digits, which differs between the completions of a random model."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ch.isdigit() for ch in text) / (len(text) + 1) for text in texts]


ROWS = [{"prompt": f"{n}+{n * 7 % 13}", "answer": str(n + n * 7 % 13)} for n in range(1, 21)]

SETTINGS = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 10,
    "learning_rate": 1e-2,
    "precision": "float32",
    "device": "cpu",
    "progress": False,
}


def make_trainer(
    tokenizer, output_dir, model=None, rewards=digits_reward, rows=ROWS, eval_rows=None, callbacks=(), **settings
):
    config = GRPOConfig(**SETTINGS | {"output_dir": output_dir and str(output_dir), **settings})
    model = model if model is not None else tiny_llama(vocab_size=len(tokenizer))
    return GRPOTrainer(model, rewards, config, rows, eval_rows, processing_class=tokenizer, callbacks=callbacks)


def shift_sampler_logps(monkeypatch, shift):
    """Add ``shift()``, called at every decode step, to the log-probs that the engine reports."""
    import cohort.rollout.local.runner as sequences

    real = sequences.draw_tokens

    def shifted(*arguments, **settings):
        drawn = real(*arguments, **settings)
        return drawn._replace(logps_S=drawn.logps_S + shift())

    monkeypatch.setattr(sequences, "draw_tokens", shifted)


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}


def same_parameters(one, other):
    """Whether two trainers have bit-equal weights."""
    others = parameters(other)
    return all(torch.equal(value, others[name]) for name, value in parameters(one).items())


def metrics_of(folder):
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed_metrics_of(folder):
    """The lines of a run's metrics.jsonl without what depends on the clock."""
    timed = ("seconds", "time", "tokens_per_second", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in metrics_of(folder)]


def rows_of(folder, step=1):
    """The completions of a step, as stored in its rollout file."""
    return pyarrow.parquet.read_table(folder / "rollouts" / f"step-{step}.parquet").to_pylist()


def untimed_rows_of(folder, step=1):
    """The completions of a step, without what depends on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in rows_of(folder, step)]


def checkpoints_of(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def break_after(trainer, step, *, resume=False):
    """Train until the metrics of a step are yielded, as a run that is killed there."""
    for metrics in trainer.steps(resume=resume):
        if metrics["step"] == step:
            trainer._training.save = lambda **_: None
            return


def straight_and_resumed(make, folder, stop):
    """A run in one go, and the same run killed after step ``stop`` and resumed: weights and metrics are bit-equal."""
    straight = make(folder / "straight")
    straight.train()
    break_after(make(folder / "broken"), stop)
    resumed = make(folder / "broken")
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)
    assert untimed_metrics_of(folder / "broken") == untimed_metrics_of(folder / "straight")
    return straight, resumed
