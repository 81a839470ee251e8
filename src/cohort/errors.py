"""Every error Cohort raises on purpose.

    CohortError
    ├── ConfigError          a setting is unknown, of the wrong type or out of range   (also ValueError)
    ├── DataError            a data set or one of its rows cannot be used              (also ValueError)
    ├── RewardError          a reward function broke its contract                      (also ValueError)
    ├── EpisodeError         the tools or environments of a run cannot be used         (also RuntimeError)
    ├── SandboxError         a sandbox could not be created, or was killed             (also RuntimeError)
    ├── ModelError           a model or tokenizer cannot be used as a policy           (also ValueError)
    ├── RunFolderError       the output folder holds another run, or none to resume    (also ValueError)
    │   └── DiskError        files could not be written                                (also OSError)
    ├── EngineError          servers that sample are unreachable, or answer wrongly    (also RuntimeError)
    ├── PolicyMismatchError  sampler and trainer disagree on the same tokens           (also RuntimeError)
    ├── CallbackError        a callback raised                                         (also RuntimeError)
    ├── TrackerError         an experiment tracker failed                              (also RuntimeError)
    ├── RankError            another rank has ended, or does not answer                (also RuntimeError)
    ├── StepError            memory ran out halfway through an optimizer step          (also RuntimeError)
    └── NonFiniteError       NaN or infinity; nothing of it is written                 (also FloatingPointError)

Each message says what was expected, what came, and what to set. The command line prints the message without a
traceback and exits with code 2, or with 1 if the machine or a server failed (DiskError, RankError, StepError,
TrackerError). Each class also derives from a built-in exception, so that ordinary ``except`` clauses work.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

STOPPED = 75
"""Exit code of a run that was stopped by a signal, with a checkpoint written (EX_TEMPFAIL of sysexits.h)."""


class CohortError(Exception):
    """Base of all errors that Cohort raises on purpose."""


class ConfigError(CohortError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class DataError(CohortError, ValueError):
    """A data set, or one of its rows, cannot be used."""


class RewardError(CohortError, ValueError):
    """A reward function cannot be found or broke its contract."""


class EpisodeError(CohortError, RuntimeError):
    """Every episode of a rollout failed in its tools or environment, or the environments of a group differ."""

    failed: Any = None
    """The groups whose episodes have all failed, for a sampler that knows of others; None: another reason."""


class SandboxError(CohortError, RuntimeError):
    """A sandbox could not be created, or something else killed it. Never caused by the program in it."""


class ModelError(CohortError, ValueError):
    """A model or tokenizer cannot be loaded, or cannot be used as a policy."""


class RunFolderError(CohortError, ValueError):
    """The output folder already holds another run, or there is nothing in it to resume."""


class DiskError(RunFolderError, OSError):
    """Files could not be written: the disk is full, read-only, gone, or at its quota."""


class EngineError(CohortError, RuntimeError):
    """The servers that sample cannot be reached, or answer what they must not."""


class PolicyMismatchError(CohortError, RuntimeError):
    """The sampler and the trainer give different log-probabilities to the same tokens under the same weights."""


class CallbackError(CohortError, RuntimeError):
    """A callback raised. The run ends with a checkpoint."""


class TrackerError(CohortError, RuntimeError):
    """An experiment tracker failed, in ``cohort track``. In a run, trackers never raise."""


class RankError(CohortError, RuntimeError):
    """Another rank of the run has ended or does not answer."""


class NonFiniteError(CohortError, FloatingPointError):
    """Weights, gradients, or the logits of every completion are NaN or infinite. Nothing of them is written."""


class StepError(CohortError, RuntimeError):
    """An optimizer step ended halfway: some weights are stepped and others not. Nothing of them is written."""


FIXABLE = (RewardError, EpisodeError, DataError, ConfigError, EngineError, ModelError, CallbackError)
"""Errors that end a run with a checkpoint: once their cause is fixed, the run can go on."""


class Stopped(SystemExit):
    """A run was stopped, by a signal or ``GRPOTrainer.stop``, and a checkpoint is written.

    A script that does not catch it ends with exit code 75.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(STOPPED)
        self.text, self.is_printed = text, False

    def __str__(self) -> str:
        return self.text


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory"  # torch on a CPU
    r"|(CUDA|HIP)( driver)?( error:)? out of memory|Triton Error \[\w+\]: out of memory"
    r"|_STATUS_(INTERNAL_ERROR_\w+_)?ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE
    r"|Cuda failure (\d+ )?'out of memory'|Failed to CUDA calloc"  # NCCL
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out here, on any device: by its class or, where a library has no class for
    it, by its message. Never an error of Cohort's own, which may quote one that cannot be met with less work."""
    if isinstance(error, CohortError):
        return False
    known = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)  # torch is not imported here
    return known or isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def did_you_mean(word: object, words: Iterable[str], *, form: str = "{}", most: int = 1, cutoff: float = 0.6) -> str:
    """The most similar words, as a question that ends an error message; empty if none is similar.

    Args:
        word: what was given.
        words: what is known.
        form: how to write a word.
        most: how many words to name.
        cutoff: how similar they must be, between 0 and 1.

    >>> did_you_mean("lenght", ["length", "width"], form="[{}]"), did_you_mean("x", ["length"])
    ('; did you mean [length]?', '')
    """
    close = difflib.get_close_matches(word, list(words), most, cutoff) if isinstance(word, str) else []
    return f"; did you mean {' or '.join(form.format(one) for one in close)}?" if close else ""
