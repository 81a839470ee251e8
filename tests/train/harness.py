"""A small run on the demo's task with a tiny random model, put together like ``GRPOTrainer`` does it."""

from cohort import GRPOConfig, GRPOTrainer
from tests.conftest import tiny_llama


def digits_reward(completions, **_):
    """Something a random model scores differently on: the share of digits."""
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


def make_trainer(tokenizer, output_dir, model=None, rewards=digits_reward, rows=ROWS, eval_rows=None, **settings):
    config = GRPOConfig(**SETTINGS | {"output_dir": output_dir and str(output_dir), **settings})
    model = model if model is not None else tiny_llama(vocab_size=len(tokenizer))
    return GRPOTrainer(model, rewards, config, rows, eval_rows, processing_class=tokenizer)


def shift_sampler_logps(monkeypatch, shift):
    """Let the engine say log-probs that are off by ``shift()``, asked at every decode step."""
    import cohort.rollout.local as local

    real = local.draw_tokens

    def shifted(*arguments, **settings):
        drawn = real(*arguments, **settings)
        return drawn._replace(logps_S=drawn.logps_S + shift())

    monkeypatch.setattr(local, "draw_tokens", shifted)


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
