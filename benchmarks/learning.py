"""Learning beside TRL 1.16.0 on the demo's task: accuracy at equal updates, and the time to 90%.

    python benchmarks/learning.py --seeds 5 --updates 60 --plot docs/learning.svg

Both train the demo's model from its first weights: 32 problems x 8 completions a step, one AdamW update each, the same
problems in the same order, learning rate (constant) and objective. What differs is what they draw. TRL runs with
``loss_type="grpo"``, the demo's ``beta`` and ``use_bias_correction_kl``: Cohort's preset ``default``, as
``tests/parity`` shows. Cohort takes TRL's 1e-4 beside the standard deviation, which TRL cannot change. TRL computes in
the precision given (float32 by default, as the demo does), with all completions in one pass, or ``--trl-batch``.

Every ``--every`` updates the weights of each side draw one completion for each of 500 held-out problems, by the same
sampler with the same random numbers. Seconds are those of training steps alone; the sides take turns, a step each, so
that they meet the same disturbances. ``seconds_to_goal`` lies on the line between the evaluations around 90%.

The test: each seed gives both sides' mean accuracy over all evaluations after the first; the mean difference over
seeds, with a test that exchanges the sides within seeds (exact, two-sided: with 5 seeds its least p is 1/16).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import GROUP, Side, Turns, progress, temporary_run, train_in_turns, trl_config, trl_trainer

from rollout import hardware, only_this_on_stdout, versions

PROMPTS = 32
LIMIT = 96
GOAL = 0.9
TRL_EPSILON = 1e-4
SIDES = ("cohort", "trl")


@dataclass(frozen=True)
class Job:
    seed: int
    updates: int
    learning_rate: float
    beta: float
    trl_batch: int
    trl_precision: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """The training problems of a seed, in the order in which both sides take them."""
        from cohort.demo.task import problems

        rows = problems(PROMPTS * self.updates, held_out=False, seed=0)
        random.Random(self.seed).shuffle(rows)
        return rows


# ---- the sides: each waits for "go" (a step) or "evaluate"


class Held:
    """Accuracy on the held-out problems, by one sampler for both sides. Has a model of its own, so that a trainer's is
    left as it is."""

    def __init__(self) -> None:
        from cohort.config import DataConfig, EvalConfig
        from cohort.data import PromptSet
        from cohort.demo.run import EVAL_PROBLEMS, MODEL
        from cohort.demo.task import accuracy, problems
        from cohort.evaluation import Evaluator
        from cohort.policy import Policy, Precision, end_token_ids, load_model, load_tokenizer
        from cohort.rewards import RewardRunner
        from cohort.rollout import LocalEngine, Sampling

        precision = Precision(torch.float32, torch.float32)
        self._model = load_model(str(MODEL), precision, torch.device("cpu"))
        tokenizer = load_tokenizer(str(MODEL))
        self._policy = Policy(self._model, precision)
        self._engine = LocalEngine(self._policy, tokenizer, end_token_ids(self._model, tokenizer))
        rows = problems(EVAL_PROBLEMS, held_out=True, seed=0)
        prompts = PromptSet(rows, tokenizer, DataConfig(format="chat", prompt_column="question"))
        self._evaluator = Evaluator({"": prompts}, RewardRunner([accuracy]), Sampling(LIMIT), EvalConfig(), 0, 256)

    def accuracy(self, model: Any) -> float:
        self._model.load_state_dict(model.state_dict())
        self._policy.version += 1  # what the sampler prepared from the weights before is out of date
        return self._evaluator.evaluate(self._engine)[""].reward.mean


def serve(turns: Turns, held: Held, model: Any, seconds: float) -> None:
    report: dict[str, Any] = {"seconds": seconds}
    while turns.wait(report) == "evaluate":
        report = {"accuracy": held.accuracy(model)}


def cohort_side(turns: Turns, job: Job) -> None:
    import cohort
    from cohort.demo.run import MODEL
    from cohort.demo.task import accuracy

    config = cohort.GRPOConfig(
        format="chat",
        prompt_column="question",
        order="sequential",
        prompts_per_step=PROMPTS,
        num_generations=GROUP,
        max_completion_length=LIMIT,
        beta=job.beta,
        scale={"rule": "group_std", "epsilon": TRL_EPSILON},
        learning_rate=job.learning_rate,
        precision="float32",
        device="cpu",
        max_steps=job.updates,
        save_steps=0,
        seed=job.seed,
        progress=False,
        log_completions=False,
        output_dir=temporary_run(),
    )
    trainer = cohort.GRPOTrainer(str(MODEL), accuracy, config, job.rows)
    held, model, steps = Held(), trainer.policy.model, trainer.steps()
    serve(turns, held, model, 0.0)
    while True:
        start = time.perf_counter()
        next(steps)
        serve(turns, held, model, time.perf_counter() - start)


def trl_side(turns: Turns, job: Job) -> None:
    from transformers import AutoTokenizer

    from cohort.demo.run import MODEL
    from cohort.demo.task import accuracy

    count = PROMPTS * GROUP
    config = trl_config(
        per_device_train_batch_size=job.trl_batch,
        gradient_accumulation_steps=count // job.trl_batch,
        max_completion_length=LIMIT,
        bf16=job.trl_precision == "bfloat16 autocast",
        beta=job.beta,
        use_bias_correction_kl=True,
        learning_rate=job.learning_rate,
        seed=job.seed,
    )
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in [*job.rows, *job.rows[:PROMPTS]]  # the last step's end is the next one's beginning
    ]
    trainer = trl_trainer(str(MODEL), config, rows, AutoTokenizer.from_pretrained(str(MODEL)), accuracy)
    held = Held()
    train_in_turns(trainer, lambda seconds: serve(turns, held, trainer.model, seconds))


# ---- measuring

Curve = list[dict[str, float]]


def one_seed(job: Job, options: argparse.Namespace) -> dict[str, Curve]:
    """Updates, training seconds and accuracy of both sides."""
    curves: dict[str, Curve] = {name: [] for name in SIDES}
    seconds = dict.fromkeys(SIDES, 0.0)
    with (
        Side(cohort_side, job, threads=options.threads) as cohort,
        Side(trl_side, job, threads=options.threads) as trl,
    ):
        sides = dict(zip(SIDES, (cohort, trl), strict=True))
        for update in range(job.updates + 1):
            for name, side in sides.items():
                seconds[name] += side.ask()["seconds"] if update else 0.0
                if update % options.every == 0 or update == job.updates:
                    found = side.ask("evaluate")["accuracy"]
                    curves[name].append({"update": update, "seconds": seconds[name], "accuracy": found})
            if update % options.every == 0:
                newest = {name: curve[-1] for name, curve in curves.items()}
                told = ", ".join(f"{name} {p['accuracy']:.1%} in {p['seconds']:.0f} s" for name, p in newest.items())
                progress(f"seed {job.seed}, update {update}: {told}")
    return curves


def seconds_to_goal(curve: Curve) -> float | None:
    for before, after in itertools.pairwise(curve):
        if after["accuracy"] >= GOAL:
            share = (GOAL - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def exchange_test(differences: Sequence[float]) -> float:
    """Share of the sign patterns whose mean is at least as far from 0: the two-sided p of "neither side is better".

    >>> exchange_test([1.0, 2.0])  # of the sums 3, 1, -1, -3 two are as far
    0.5
    """
    seen = abs(sum(differences)) - 1e-12
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    return sum(abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= seen for sign in signs) / len(signs)


def compare(runs: Sequence[dict[str, Curve]], take: Any) -> dict[str, float | None]:
    """A number of each curve: means of both sides, the mean difference, its standard error and the test's p."""
    values = {name: [take(run[name]) for run in runs] for name in SIDES}
    differences = [ours - theirs for ours, theirs in zip(values["cohort"], values["trl"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    return {
        **{name: round(statistics.mean(own), 4) for name, own in values.items()},
        "difference": round(statistics.mean(differences), 4),
        "standard_error": None if error is None else round(error, 4),  # of one seed there is none
        "p": round(exchange_test(differences), 4),
    }


def summary(runs: Sequence[dict[str, Curve]]) -> dict[str, Any]:
    goals = {name: [seconds_to_goal(run[name]) for run in runs] for name in SIDES}
    pairs = list(zip(goals["trl"], goals["cohort"], strict=True))
    ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
    per_update = {name: [run[name][-1]["seconds"] / run[name][-1]["update"] for run in runs] for name in SIDES}
    return {
        "mean_accuracy": compare(runs, lambda curve: statistics.mean(point["accuracy"] for point in curve[1:])),
        "last_accuracy": compare(runs, lambda curve: curve[-1]["accuracy"]),
        "seconds_to_goal": goals,
        "ratio_to_goal": round(statistics.median(ratios), 3) if ratios else None,
        "ratios_to_goal": [round(ratio, 3) for ratio in ratios],
        "seconds_per_update": {name: round(statistics.median(own), 4) for name, own in per_update.items()},
    }


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    settings = (options.learning_rate, options.beta, options.trl_batch, options.trl_precision)
    runs = [one_seed(Job(seed, options.updates, *settings), options) for seed in range(options.seeds)]
    found = summary(runs)
    return {
        "ratio": found["ratio_to_goal"],
        **found,
        "curves": runs,
        "seeds": options.seeds,
        "updates": options.updates,
        "learning_rate": options.learning_rate,
        "beta": options.beta,
        "trl_setting": f"{options.trl_precision}, {PROMPTS * GROUP // options.trl_batch} x {options.trl_batch}",
        "threads": options.threads,
        "hardware": hardware("cpu"),
        "load_before": options.load,
        "versions": versions([]),
    }


# ---- the picture

WIDTH, HEIGHT, LEFT, TOP, GAP = 420, 300, 56, 46, 70
COLOURS = {"cohort": "#0b6e99", "trl": "#c4572b"}
NAMES = {"cohort": "Cohort", "trl": "TRL 1.16.0"}


def plot(runs: Sequence[dict[str, Curve]], path: Path) -> None:
    """Two panels: accuracy against updates, and against seconds of training. Thin lines are seeds; the thick one is
    their mean, the band one standard deviation."""
    panels = [panel(runs, axis, LEFT + place * (WIDTH + GAP)) for place, axis in enumerate(AXES)]
    width, height = LEFT + 2 * WIDTH + GAP + 24, TOP + HEIGHT + 52
    drawn = "\n".join(itertools.chain.from_iterable(panels))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{drawn}\n</svg>\n'
    )


AXES = {"update": "updates", "seconds": "seconds of training"}


def panel(runs: Sequence[dict[str, Curve]], axis: str, left: float) -> list[str]:
    most = max(run[name][-1][axis] for run in runs for name in SIDES)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if most / s <= 6)

    def at(x: float, y: float) -> str:
        return f"{left + x / most * WIDTH:.1f},{TOP + (1 - y) * HEIGHT:.1f}"

    found = [f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 40}" text-anchor="middle">{AXES[axis]}</text>']
    for percent in range(0, 101, 20):
        y = TOP + (1 - percent / 100) * HEIGHT
        found.append(f'<path d="M{left},{y:.1f}h{WIDTH}" stroke="#ddd"/>')
        found.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
    for tick in range(0, int(most) + 1, step):
        x = left + tick / most * WIDTH
        found.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{tick}</text>')
    y = TOP + (1 - GOAL) * HEIGHT
    found.append(f'<path d="M{left},{y:.1f}h{WIDTH}" stroke="#888" stroke-dasharray="4 4"/>')
    for place, name in enumerate(SIDES):
        colour = COLOURS[name]
        points = list(zip(*(run[name] for run in runs), strict=True))  # of all seeds, evaluation by evaluation
        xs = [statistics.mean(point[axis] for point in of) for of in points]
        means = [statistics.mean(point["accuracy"] for point in of) for of in points]
        spreads = [statistics.pstdev(point["accuracy"] for point in of) for of in points]
        above = [at(x, min(1, m + s)) for x, m, s in zip(xs, means, spreads, strict=True)]
        below = [at(x, max(0, m - s)) for x, m, s in zip(xs, means, spreads, strict=True)]
        found.append(f'<polygon points="{" ".join(above + below[::-1])}" fill="{colour}" opacity="0.18"/>')
        for run in runs:
            line = " ".join(at(point[axis], point["accuracy"]) for point in run[name])
            found.append(f'<polyline points="{line}" fill="none" stroke="{colour}" opacity="0.35"/>')
        line = " ".join(at(x, m) for x, m in zip(xs, means, strict=True))
        found.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x = left + 8 + 110 * place
        found.append(f'<path d="M{x},{TOP - 20}h22" stroke="{colour}" stroke-width="2.5"/>')
        found.append(f'<text x="{x + 28}" y="{TOP - 16}">{NAMES[name]}</text>')
    return found


# ---- report


def show(result: dict[str, Any]) -> None:
    print(f"The demo's task, {PROMPTS} x {GROUP} completions a step", end=", ")
    print(f"{result['updates']} updates, {result['seeds']} seeds")
    print(f"learning rate {result['learning_rate']}, beta {result['beta']}; TRL: {result['trl_setting']}")
    print(f"cpu, {result['hardware']}, {result['threads']} threads, load before {result['load_before']}; ", end="")
    print(", ".join(f"{k} {v}" for k, v in result["versions"].items()) + "\n")
    print("| updates | Cohort, mean (of seeds) | s | TRL, mean (of seeds) | s |")
    print("|---|---|---|---|---|")
    runs = result["curves"]
    for place, point in enumerate(runs[0]["cohort"]):
        cells = []
        for name in SIDES:
            values = [run[name][place]["accuracy"] for run in runs]
            spent = statistics.mean(run[name][place]["seconds"] for run in runs)
            cells.append(f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%}) | {spent:.0f}")
        print(f"| {point['update']} | {' | '.join(cells)} |")
    for key, what in (("mean_accuracy", "Mean accuracy over all evaluations"), ("last_accuracy", "Last accuracy")):
        found = result[key]
        print(f"\n{what}: Cohort {found['cohort']:.1%}, TRL {found['trl']:.1%}", end=", ")
        error = "none" if found["standard_error"] is None else f"{found['standard_error']:.1%}"
        print(f"difference {found['difference']:+.1%} (standard error {error}, p = {found['p']:.3f})", end="")
    print(f"\n\nSeconds to {GOAL:.0%}, by seed:")
    for name, values in result["seconds_to_goal"].items():
        print(f"  {name}: " + ", ".join("not reached" if v is None else f"{v:.1f}" for v in values))
    if result["ratio"] is not None:
        print(f"TRL / Cohort, median over seeds: {result['ratio']:.2f} ({result['ratios_to_goal']})")
    spent = result["seconds_per_update"]
    print(f"Seconds an update: Cohort {spent['cohort']:.2f}, TRL {spent['trl']:.2f}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="updates between evaluations")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--beta", type=float, default=0.01)
    parser.add_argument("--trl-batch", type=int, default=PROMPTS * GROUP, help="completions of one backward pass")
    parser.add_argument("--trl-precision", choices=("float32", "bfloat16 autocast"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="an .svg file to draw")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    options = parser.parse_args()
    if min(options.seeds, options.updates, options.every, options.threads) < 1:
        parser.error("--seeds, --updates, --every and --threads must be at least 1")
    if options.trl_batch < 1 or PROMPTS * GROUP % options.trl_batch:
        parser.error(f"--trl-batch must divide {PROMPTS * GROUP}, got {options.trl_batch}")
    if options.plot is not None and options.plot.suffix != ".svg":
        parser.error(f"--plot writes .svg, got {options.plot.name}")
    options.load = round(os.getloadavg()[0], 2)
    return options


def main() -> None:
    options = parse()
    if options.json:
        with only_this_on_stdout() as stdout:
            result = benchmark(options)
            stdout.write(json.dumps(result) + "\n")
    else:
        result = benchmark(options)
        show(result)
    if options.plot is not None:
        plot(result["curves"], options.plot)


if __name__ == "__main__":
    main()
