"""Episodes: what several turns cost, each figure beside what it is compared with, in one run.

    python benchmarks/episodes.py                       parts 1 to 3
    python benchmarks/episodes.py --parts turns
    python benchmarks/episodes.py --parts trl demo      needs the extra "bench"

turns: 24 turns of about 12 drawn tokens and answers of 64, when the engine keeps keys and values and reads only the
answer (``extend``), and when it reads the whole history again before each turn. Both draw the same tokens.

latency: 64 trajectories, each with an async answer that takes 1 s, and the same rollout with answers at once.

overhead: a turn through the host and the driver, without a model: an engine that has drawn already hands back each turn
at once. Its own time is measured alone and subtracted. The environment's ``step`` does nothing; the chat template is
ChatML. Once for one trajectory, where a turn takes the whole way there and back; once for 64 at a time.

trl: a GRPO step with a tool, see ``episodes_trl.py``.

demo: steps of ``cohort demo tool`` against TRL, see ``episodes_demo.py``.

The sides of a part alternate in one process, each time another one first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import build_model, make_rows, make_tokenizer

from cohort.config import EnvironmentConfig
from cohort.environments import Step
from cohort.environments.bridge import Bridge
from cohort.environments.episode import EpisodeSampler, TurnFormat
from cohort.environments.host import Host
from cohort.environments.shapes import find_environments
from cohort.environments.tools import Toolbox
from cohort.policy import Policy, resolve_precision
from cohort.rollout import EndedTurn, LocalEngine, Request, RNGKey, Sampling
from cohort.types import Completion, FinishReason, Message, Prompt
from rollout import GROUP, Shape, hardware, versions

SHAPE = Shape("qwen2", 256, 4, 8, 4, 32, 768, 4096)
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class Numbers:
    """Stands in for a bridge: an answer is numbers, each a token."""

    def after(self, messages: Sequence[Message], *, last_token: int, prompt: Prompt | None = None) -> list[int]:  # noqa: ARG002
        return [int(word) for message in messages for word in message["content"].split()]


class Talker:
    """Answers every turn but the last with random numbers."""

    turns, length, latency = 24, 64, 0.0

    def reset(self, seed: int) -> None:
        self._draw, self._turn = random.Random(seed), 0

    def step(self, text: str) -> Step:  # noqa: ARG002
        self._turn += 1
        words = (str(self._draw.randrange(1, SHAPE.vocab_size)) for _ in range(self.length))
        return Step(" ".join(words), 1.0, self._turn == self.turns)


class Slow(Talker):
    """Takes its time once."""

    turns = 2

    async def step(self, text: str) -> Step:
        if self._turn == 0:
            await asyncio.sleep(self.latency)
        return super().step(text)


def prompts_of(count: int, length: int) -> list[Prompt]:
    rows = make_rows(count, length, SHAPE.vocab_size)
    return [Prompt(n, n, tuple(map(int, row["prompt"].split())), "", "", {}) for n, row in enumerate(rows)]


def engine_of(policy: Policy, tokenizer: Any, ends: Sequence[int], *, keeps_rows: bool = True) -> LocalEngine:
    engine = LocalEngine(policy, tokenizer, ends)
    if not keeps_rows:
        engine.backend.keeps_rows = False  # the scheduler then prefills the history of a continued trajectory
    return engine


def sampler_of(engine: Any, factory: Any, turn_format: TurnFormat, **settings: Any) -> EpisodeSampler:
    config = EnvironmentConfig(**{"max_turns": 1000, **settings})
    return EpisodeSampler(engine, Host(Toolbox(), find_environments(factory), config), turn_format, config)


def alternate(sides: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each side, and processor seconds, after a call of each with -1 to warm up."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for run in sides.values():
        run(-1)
    for repeat in range(repeats):
        for name in [*sides][repeat % len(sides) :] + [*sides][: repeat % len(sides)]:
            start, processor = time.perf_counter(), time.process_time()
            sides[name](repeat)
            seconds[name].append((time.perf_counter() - start, time.process_time() - processor))
    return seconds


def clocks(pairs: Sequence[tuple[float, float]]) -> str:
    """Wall-clock and processor seconds."""
    return " | ".join(spread(own) for own in zip(*pairs, strict=True))


def spread(values: Sequence[float], scale: float = 1.0, form: str = ".2f") -> str:
    median, low, high = (scale * f(values) for f in (statistics.median, min, max))
    return f"{median:{form}} [{low:{form}} to {high:{form}}]"


# ---- turns


def model_and_ends(mean: int) -> tuple[Any, list[int]]:
    """The model, and so many end tokens that turns have a mean length."""
    ends = random.Random(2).sample(range(1, SHAPE.vocab_size), SHAPE.vocab_size // mean)
    return build_model(SHAPE, ends), ends


def policy_of(model: Any, precision: str) -> Policy:
    return Policy(model, resolve_precision(precision, torch.device("cpu"), SHAPE.hidden_size))


def part_turns(options: argparse.Namespace) -> None:
    model, ends = model_and_ends(12)
    policy = policy_of(model, options.precision)
    tokenizer = make_tokenizer(SHAPE.vocab_size, None)
    turn_format, prompts = TurnFormat(tokenizer, Numbers(), None), prompts_of(options.trajectories // GROUP, 64)
    groups: dict[str, Any] = {}

    def side(name: str, *, keeps_rows: bool) -> Callable[[int], None]:
        episodes = sampler_of(engine_of(policy, tokenizer, ends, keeps_rows=keeps_rows), Talker, turn_format)

        def run(seed: int) -> None:
            Talker.turns = 24 if seed >= 0 else 2
            groups[name] = episodes.generate(prompts, GROUP, Sampling(3072), RNGKey(0, 1 + seed))

        return run

    sides = {"extend": side("extend", keeps_rows=True), "re-reading": side("re-reading", keeps_rows=False)}
    seconds = alternate(sides, options.repeats)
    print(f"\n24 turns, answers of 64 tokens, {options.trajectories} trajectories; {policy.precision}")
    print("\n| side | seconds | processor | turns | tokens drawn | tokens given |\n|---|---|---|---|---|---|")
    for name, own in seconds.items():
        completions = [one for group in groups[name] for one in group.completions]
        turns = sum(len(one.episode.turns) for one in completions)
        drawn = sum(one.num_tokens for one in completions)
        given = sum(len(one.segments[0].token_ids) for one in completions) - drawn
        print(f"| {name} | {clocks(own)} | {turns} | {drawn:,} | {given:,} |")
    rounds = zip(seconds["extend"], seconds["re-reading"], strict=True)
    wall, processor = zip(*((b / a, d / c) for (a, c), (b, d) in rounds), strict=True)
    print(f"\nre-reading / extend: {spread(wall)}; processor: {spread(processor)} (goal: at least 3)", flush=True)


# ---- latency


def part_latency(options: argparse.Namespace) -> None:
    model, ends = model_and_ends(32)
    policy = policy_of(model, options.precision)
    tokenizer = make_tokenizer(SHAPE.vocab_size, None)
    turn_format, prompts = TurnFormat(tokenizer, Numbers(), None), prompts_of(64 // GROUP, 64)
    episodes = sampler_of(engine_of(policy, tokenizer, ends), Slow, turn_format)

    def side(latency: float) -> Callable[[int], None]:
        def run(seed: int) -> None:
            Slow.latency = latency
            episodes.metrics()  # forget those of earlier rounds
            groups = episodes.generate(prompts, GROUP, Sampling(512), RNGKey(0, 1 + seed))
            turns = [len(one.episode.turns) for group in groups for one in group.completions]
            assert turns == [2] * 64, turns
            blocked[latency].append(episodes.metrics()["seconds/episodes_blocked"])

        return run

    blocked: dict[float, list[float]] = {0.0: [], 1.0: []}
    seconds = alternate({"at once": side(0.0), "after 1 s": side(1.0)}, options.repeats)
    more = [b - a for (a, _), (b, _) in zip(seconds["at once"], seconds["after 1 s"], strict=True)]
    print(f"\n64 trajectories of 2 turns with one async answer each; {policy.precision}")
    print("\n| answers | seconds | processor | nothing to draw |\n|---|---|---|---|")
    for (name, own), waited in zip(seconds.items(), blocked.values(), strict=True):
        print(f"| {name} | {clocks(own)} | {spread(waited[1:])} |")
    print(f"\n1 s of latency for each adds {spread(more)} s (goal: at most 1.3)", flush=True)


# ---- overhead


class Drawn:
    """Stands in for an engine that draws in no time: every turn is the same tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._count, self._ready = 0, []
        self._turn = Completion.of_tokens(token_ids, [0.0] * len(token_ids), FinishReason.EOS)
        self._requests: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request]) -> list[int]:
        numbers = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        self._requests.update(zip(numbers, requests, strict=True))
        self._ready += numbers
        return numbers

    def stream(self, watch: Any = None) -> Generator[EndedTurn]:
        while self._ready:
            if watch:
                watch.on_step()
            ready, self._ready = self._ready, []
            for number in ready:
                length = len(self._turn.token_ids)
                yield EndedTurn(number, self._requests[number], self._turn, length, 1_000_000)

    def extend(self, trajectory: int, token_ids: Sequence[int], *, rewrite: bool = False) -> None:  # noqa: ARG002
        self._ready.append(trajectory)

    def release(self, trajectory: int) -> None:
        self._requests.pop(trajectory, None)

    def reset(self) -> None:
        self._ready.clear()


class Short(Talker):
    """Says the same every time."""

    turns = 50

    def step(self, text: str) -> Step:  # noqa: ARG002
        self._turn += 1
        return Step("Go on.", 0.0, self._turn == self.turns)


class ShortAsync(Short):
    async def step(self, text: str) -> Step:
        return super().step(text)


def chat_tokenizer(template: str, control: Sequence[str] = ()) -> Any:
    """Byte-level BPE that was trained on a chat template, and has that template. <|im_end|> ends a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(template.replace("\\n", "\n").split("'"), trainer)
    special = ("<|im_start|>", "<|im_end|>", "<|pad|>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def part_overhead(options: argparse.Namespace) -> None:
    tokenizer = chat_tokenizer(CHATML)
    ends = [tokenizer.eos_token_id]
    turn_format = TurnFormat(tokenizer, Bridge(tokenizer, ends), None)
    drawn = [*tokenizer.encode("I go north, then east."), *ends]
    answer = [{"role": "user", "content": "Go on."}]
    sides = {
        "inline": (Short, {}, 0.1),
        "async": (ShortAsync, {}, 0.3),
        "worker": (Short, {"tool_workers": 1}, 1.0),
    }
    print("\nA turn through host and driver, without a model, in ms; the engine's own time is subtracted")
    print("\n| where `step` runs | goal | one trajectory | processor | 64 at a time | processor |")
    print("|---|---|---|---|---|---|")
    found: dict[str, list[str]] = {name: [] for name in [*sides, "tokenizer"]}
    for count in (1, 64):
        prompts = [Prompt(n, n, (1, 2, 3), "", "", {}) for n in range(count)]
        turns = count * Short.turns

        def engine_alone(_: int, prompts: Sequence[Prompt] = prompts) -> None:
            engine = Drawn(drawn)
            engine.submit([Request(prompt, 0, Sampling(10), RNGKey(0, 0), continues=True) for prompt in prompts])
            for number, turn in enumerate(engine.stream(), 1):
                if number <= len(prompts) * (Short.turns - 1):
                    engine.extend(turn.trajectory, ())

        def texts_alone(_: int, turns: int = turns, prompt: Prompt = prompts[0]) -> None:
            for _ in range(turns):
                turn_format.parse(drawn, "")
                turn_format.bridge.after(answer, last_token=drawn[-1], prompt=prompt)

        def side(factory: Any, settings: dict[str, Any], prompts: Sequence[Prompt] = prompts) -> Callable[[int], None]:
            episodes = sampler_of(Drawn(drawn), factory, turn_format, **settings)
            return lambda seed: episodes.generate(prompts, 1, Sampling(10), RNGKey(0, 1 + seed)) and None

        runs = {name: side(factory, settings) for name, (factory, settings, _) in sides.items()}
        seconds = alternate({"engine": engine_alone, "tokenizer": texts_alone, **runs}, options.repeats)
        for name, cells in found.items():
            pairs = [(a - c, b - d) for (a, b), (c, d) in zip(seconds[name], seconds["engine"], strict=True)]
            cells += [spread(own, 1e3 / turns, ".3f") for own in zip(*pairs, strict=True)]
    for name, cells in found.items():
        where, goal = (name, sides[name][2]) if name in sides else ("of that, reading and writing text", "")
        print(f"| {where} | {goal} | {' | '.join(cells)} |", flush=True)


# ---- the command


def part_trl(options: argparse.Namespace) -> None:
    from episodes_trl import compare

    compare(options)


def part_demo(options: argparse.Namespace) -> None:
    from episodes_demo import compare

    compare(options)


PARTS = {"turns": part_turns, "latency": part_latency, "overhead": part_overhead, "trl": part_trl, "demo": part_demo}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=["turns", "latency", "overhead"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trajectories", type=int, default=32, help=f"of the part turns, a multiple of {GROUP}")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    trl = parser.add_argument_group("the part trl")
    trl.add_argument("--batches", type=int, nargs="+", default=[64, 16], help="TRL's completions a pass")
    trl.add_argument("--calls", type=int, default=3, help="calls of an episode; a file of weights is for one number")
    trl.add_argument("--apart", action="store_true", help="no two trajectories alike; so is a file of weights")
    trl.add_argument("--learning-steps", type=int, default=400)
    trl.add_argument("--weights", type=Path, help="file to keep the model in that has learned the conversations")
    demo = parser.add_argument_group("the part demo")
    demo.add_argument("--after", type=int, default=0, help="steps of the demo before the first that is timed")
    demo.add_argument("--demo-batches", type=int, nargs="+", default=[256, 64], help="TRL's completions a pass")
    demo.add_argument("--continuous", action="store_true", help="also try TRL's continuous batching")
    options = parser.parse_args()
    if options.trajectories < GROUP or options.trajectories % GROUP:
        parser.error(f"--trajectories must be a multiple of {GROUP}, got {options.trajectories}")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    print(f"{hardware('cpu')}, {options.threads} threads, load before {os.getloadavg()[0]:.1f}", end="; ")
    print(", ".join(f"{name} {version}" for name, version in versions([]).items()))
    print(f"medians of {options.repeats} rounds [minimum to maximum]")
    for part in options.parts:
        PARTS[part](options)


if __name__ == "__main__":
    main()
