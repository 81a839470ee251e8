"""What the benchmarks against TRL share: sides in processes of their own that take turns, TRL's trainer at a stand
between its steps, the same data for both, and the memory of a process.

A side is a function of ``Turns`` and its job. It reports, waits for the word, does one step, reports again. So both
sides' real trainers do the whole work in the order of their own loops, never two at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rollout import GROUP, MEBI, MissingError, Shape, forget_peak, resident

TRL_VERSION = "1.16.0"
LEARNING_RATE = 1e-6
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# ---- processes that take turns


class Stop(BaseException):
    """The parent has seen enough."""


class Turns:
    """A side's end of the line to the parent."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def wait(self, report: dict[str, Any]) -> Any:
        """Report, and wait for the word to go on."""
        self._connection.send(report)
        word = self._connection.recv()
        if word == "stop":
            raise Stop
        return word


class Side:
    """The parent's end: a side that runs in a process of its own, and stands still unless it is asked."""

    def __init__(self, work: Callable[..., None], *arguments: Any, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, arguments, threads), daemon=True)
        self._process.start()
        theirs.close()
        self.first = self._receive()
        """What it said when it was ready."""

    def ask(self, word: Any = "go", *, patience: float | None = None) -> dict[str, Any]:
        """Give it its turn; what it reports. A side that takes more seconds than ``patience`` is ended."""
        self._connection.send(word)
        return self._receive(patience)

    def _receive(self, patience: float | None = None) -> dict[str, Any]:
        if not self._connection.poll(patience):
            self._process.kill()
            raise MissingError(f"its step had not ended after {patience:,.0f} s")
        try:
            report: dict[str, Any] = self._connection.recv()
        except EOFError:
            raise MissingError("its process ended without a word: was it out of memory?") from None
        if "error" in report:
            raise MissingError(report["error"])
        return report

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send("stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Any, work: Callable[..., None], arguments: Sequence[Any], threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            work(Turns(connection), *arguments)
        connection.send({"error": "it came to its end before it was told to stop"})
    except (Stop, EOFError, BrokenPipeError):  # the last two: the parent is gone
        pass
    except BaseException as error:  # the parent says what became of the side
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def progress(line: str) -> None:
    """What has been measured so far, on the error stream: standard output is the result's."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {key: round(value, 5) for key, value in found.items()}


# ---- memory


class Memory:
    """Peak of this process in MiB, and above what it held when this was made. Linux only."""

    def __init__(self) -> None:
        gc.collect()
        # What was freed and is still held by the C library would be used first and so not be seen.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        forget_peak()
        self.before = resident()

    def figures(self) -> dict[str, float]:
        peak = resident("VmHWM")
        return {"peak": round(peak / MEBI, 1), "above": round((peak - self.before) / MEBI, 1)}


# ---- the same data for both


def make_tokenizer(vocab_size: int, end: int | None) -> Any:
    """A word per token: its number. Texts of n numbers have exactly n tokens.

    Args:
        vocab_size: V.
        end: the end token; V itself stands outside the model's vocabulary and is never drawn, None is none.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AddedToken, PreTrainedTokenizerFast

    words = {str(token): token for token in range(vocab_size + 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Whole words only: otherwise special tokens are cut out of longer numbers.
    zero, last = (None if token is None else AddedToken(str(token), single_word=True) for token in (0, end))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=zero, unk_token=zero, eos_token=last)


def make_rows(count: int, length: int, vocab_size: int) -> list[dict[str, str]]:
    """Prompts of random tokens."""
    draw = random.Random(1)
    return [{"prompt": " ".join(str(draw.randrange(1, vocab_size)) for _ in range(length))} for _ in range(count)]


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that costs next to nothing: how many tokens are even."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def build_model(shape: Shape, ends: Sequence[int]) -> Any:
    """The model with random weights, always the same, whose completions end at any of some tokens."""
    model = shape.model("cpu", torch.float32)
    model.config.max_position_embeddings = 4096
    model.generation_config.eos_token_id = list(ends) or None
    return model


# ---- what a step has done


class Witness:
    """Whether the weights change, and how many steps any optimizer of the process makes. Makes no copies, and looks
    between the steps."""

    def __init__(self, model: Any) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer_steps = 0
        self._checksums = self._now()
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._optimizer_steps += 1

    def _now(self) -> list[int]:
        """Checksums of the weights' bits. Sums would stay the same where a step moves as many weights of 1 up as down,
        and sums of bits where it does so in a tensor of few numbers."""
        return [zlib.crc32(p.detach().contiguous().view(INTEGERS[p.element_size()]).numpy()) for p in self._parameters]

    def look(self) -> dict[str, Any]:
        before, self._checksums = self._checksums, self._now()
        changed = sum(a != b for a, b in zip(before, self._checksums, strict=True))
        return {"changed": changed / len(before), "optimizer_steps": self._optimizer_steps}


# ---- TRL


def trl_config(**settings: Any) -> Any:
    """TRL's settings without what only costs time: no files, no logs, no bars, no recomputed activations. The objective
    is Cohort's default (TRL's own default differs by its mean over tokens, at the same cost)."""
    quiet()
    from trl import GRPOConfig

    return GRPOConfig(
        "trl-run",
        **{
            "use_cpu": True,
            "bf16": False,
            "loss_type": "grpo",
            "num_generations": GROUP,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "shuffle_dataset": False,
            "max_steps": 1_000_000,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **settings,
        },
    )


def quiet() -> None:
    """Off: warnings of other people's imports, transformers' of sampling settings, and bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def trl_trainer(
    model: Any, config: Any, rows: Sequence[dict[str, Any]], tokenizer: Any, reward: Any, **more: Any
) -> Any:
    """TRL's trainer, which also keeps what the last step took: ``parts`` in seconds, ``tokens`` and ``longest``."""
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    if trl.__version__ != TRL_VERSION:
        raise MissingError(f"expected trl=={TRL_VERSION}, which the extra 'bench' installs, got {trl.__version__}")

    class Trainer(trl.GRPOTrainer):
        parts: dict[str, float]
        tokens = 0
        longest = 0

        @contextlib.contextmanager
        def timed(self, part: str) -> Iterator[None]:
            start = time.perf_counter()
            yield
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - start

        def _generate(self, *arguments: Any, **named: Any) -> Any:
            with self.timed("generate"):
                return super()._generate(*arguments, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with self.timed("rollout"):
                output = super()._generate_and_score_completions(inputs)
            lengths = output["completion_mask"].sum(dim=1)
            self.tokens, self.longest = int(lengths.sum()), int(lengths.max())
            return output

    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.parts = {}
    return trainer


def train_in_turns(trainer: Any, turn: Callable[[float], None]) -> None:
    """``trainer.train()`` that calls ``turn`` with the seconds of the step that has ended (0.0: none yet) before each
    step begins. A step's seconds run from there to the next one's beginning: nothing of its work is left out."""
    from transformers import TrainerCallback

    class Gate(TrainerCallback):
        started: float | None = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turn(0.0 if self.started is None else time.perf_counter() - self.started)
            trainer.parts = {}
            self.started = time.perf_counter()

    trainer.add_callback(Gate())
    trainer.train()


def temporary_run() -> str:
    """A folder for a run, inside the temporary one that a side works in."""
    return str(Path(tempfile.mkdtemp(dir=Path.cwd())) / "run")


def laid_out(
    prompts_P: Sequence[Sequence[int]],
    completions_S: Sequence[Sequence[int]],
    advantages_S: Sequence[float],
    device: Any = "cpu",
) -> Any:
    """A batch of equally large groups, with sampler log-probs of 0 and the given advantages."""
    from cohort.train import lay_out
    from cohort.types import Completion, FinishReason, Group, Prompt

    made = [Completion.of_tokens(ids, [0.0] * len(ids), FinishReason.EOS) for ids in completions_S]
    size = len(made) // len(prompts_P)
    groups = [
        Group(Prompt(p, p, tuple(ids), "", "", {}), tuple(made[p * size : (p + 1) * size]))
        for p, ids in enumerate(prompts_P)
    ]
    batch = lay_out(groups, torch.device(device))
    advantages = torch.tensor(advantages_S, dtype=torch.float64, device=batch.sequence_N.device)
    return replace(batch, advantages_N=advantages[batch.sequence_N])
