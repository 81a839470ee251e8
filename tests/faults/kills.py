"""Kill runs at instants spread over their phases, continue them, and compare what they leave, bit by bit.

    python -m tests.faults.kills --kills 300

Each run is a process, forked from this one so that torch is imported once. An instant is a seeded event of a phase
(``killer``) or, for the share ``--timed`` of the kills, a moment after the start. The killed run is continued by the
same command (``train --resume auto``), and may be killed again; the last time by ``cohort resume``. It must end with exit code 0 and leave the same
weights, optimizer, metrics apart from times, rollouts, evaluations, best model and summary as a run that nothing
interrupted, and nothing that is half written. A row of the table is a phase; the exit code is 1 if a run differs.
``--only VARIANT --at update:1234,checkpoint:56`` repeats one.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# A process with threads cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from cohort import trainer
from cohort.cli import main as cohort
from cohort.runs.durable import check_whole
from cohort.runs.folder import RunFolder
from cohort.train.memory import TokenBudget
from cohort.train.source import RolloutSource
from tests.faults.compare import changed_settings, differences, only_in, read_whole
from tests.faults.killer import PHASES, Killer
from tests.faults.variants import VARIANTS, write_inputs

LEFT_BEHIND = (".part", ".old", ".broken")
"""How the names of files and folders end that a continued run has to have completed or removed."""
TIMEOUT = 120.0
"""Seconds for one process."""
RESUME_EVENTS = 5_000
"""Fewer than the events of a run's phase "resume", which no undisturbed run has."""
DRAWN = "drawn: step "
STOPPED = 75
"""Exit code of a run that a signal has stopped."""


@dataclass
class Kill:
    """A run that is killed at one instant or several, and how it ended."""

    variant: str
    instants: list[str]
    """Such as "update:1234", the event of a phase, or "time:0.25", seconds after the start."""
    met: list[str] = field(default_factory=list)
    """Phases in which it was killed; the instants that it did not reach are missing."""
    problems: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.faults.kills --only {self.variant} --at {','.join(self.instants)}"


@dataclass(frozen=True)
class Reference:
    """The undisturbed run of a variant."""

    folder: Path
    events: Counter[str]
    """By phase."""
    seconds: float


class Harness:
    """Runs and kills variants. The clock of a run that goes on is an hour behind.

    Args:
        place: an empty folder.
        number: the signal.
        fresh: also compare the undisturbed run of each variant with one of another interpreter.
        fsync_seconds: what ``os.fsync`` takes longer, as on a slow disk.
    """

    def __init__(
        self, place: Path, number: int = signal.SIGKILL, *, fresh: bool = False, fsync_seconds: float = 0.0
    ) -> None:
        self._place, self._signal, self._fresh, self._fsync_seconds = place, number, fresh, fsync_seconds
        self._references: dict[str, Reference] = {}
        self.read, self.repeated = 0, list[str]()
        """Whole rollouts in the journals that processes have found, and those of them that they have drawn again."""
        write_inputs(place)
        # Measuring how much memory a pass needs is a third of a small run's start, and changes no number.
        trainer.find_budget = lambda *_: TokenBudget(64, None, None)

    def reference(self, variant: str) -> Reference:
        """The undisturbed run of a variant, which is made once."""
        if variant not in self._references:
            folder = self._place / f"{variant}-reference"
            for watch in (False, True) if not self._references else (True,):
                shutil.rmtree(folder, ignore_errors=True)
                start = time.monotonic()
                if code := self._run(variant, folder, watch=watch):
                    sys.exit(f"{variant} ended with {code} without a kill:\n{_log(folder)}")
                seconds, report = time.monotonic() - start, json.loads(self._report.read_text())
                for name in report["modules"]:  # so that the processes forked from now on need not
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
            self._references[variant] = Reference(folder, Counter(report["events"]), seconds)
            if self._fresh:
                other = self._place / f"{variant}-fresh"
                subprocess.run([sys.executable, "-m", "cohort", *self._command(variant, other)], check=True)
                if found := self._problems(folder, other):
                    sys.exit(f"{variant} differs in another interpreter:\n" + "\n".join(found))
        return self._references[variant]

    def carry_out(self, kill: Kill) -> Kill:
        """Start a run, kill it at its instants, continue it to its end, and compare."""
        reference, folder = self.reference(kill.variant), self._place / f"{kill.variant}-killed"
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.log").unlink(missing_ok=True)
        for instant in kill.instants:
            code = self._run(kill.variant, folder, instant)
            if code == 0:
                continue  # it had ended before the instant
            kill.met.append(instant.partition(":")[0])
            if code not in (-self._signal, STOPPED if self._signal != signal.SIGKILL else -self._signal):
                kill.problems.append(f"{instant}: exit code {code}: {_log(folder)}")
        if code := self._run(kill.variant, folder, from_folder=(folder / "config.toml").exists()):
            kill.problems.append(f"the continued run ended with exit code {code}: {_log(folder)}")
            return kill
        kill.problems += self._problems(reference.folder, folder)
        return kill

    def _problems(self, reference: Path, folder: Path) -> list[str]:
        """As ``problems``, in a process of its own: reading tables starts threads."""
        found, strict = self._place / "problems.json", self._signal == signal.SIGKILL
        code = _in_process(lambda: found.write_text(json.dumps(problems(reference, folder, strict))) and 0)
        return json.loads(found.read_text()) if code == 0 else [f"the comparison ended with exit code {code}"]

    @property
    def _report(self) -> Path:
        return self._place / "report.json"

    def _command(self, variant: str, folder: Path, *, from_folder: bool = False) -> list[str]:
        if from_folder:
            return ["resume", str(folder)]
        return ["train", str(self._place / f"{variant}.toml"), "--resume", "auto", "--run.output_dir", str(folder)]

    def _run(
        self, variant: str, folder: Path, instant: str = "", *, watch: bool = False, from_folder: bool = False
    ) -> int:
        """Start or continue a run in a process of its own.

        Args:
            variant: which run.
            folder: its folder.
            instant: when to kill it.
            watch: count its events.
            from_folder: continue it from its folder alone, as ``cohort resume``.

        Returns:
            The exit code; minus the number of the signal that ended it.
        """
        phase, _, number = instant.partition(":")
        timed = phase == "time"
        journal = set(RunFolder(folder).journal_steps())
        lines = len(Path(f"{folder}.log").read_text(errors="replace").splitlines()) if journal else 0
        killer = Killer(self._report, (phase, int(number)) if instant and not timed else None, self._signal)
        goes_on = folder.exists()

        def work() -> int:
            RolloutSource._sample = _told(RolloutSource._sample)
            if goes_on:
                time.time = partial(_behind, time.time)
            os.fsync = partial(_slow, os.fsync, self._fsync_seconds)
            before = set(sys.modules)
            if watch or killer.target:
                killer.begin()
            code = cohort(self._command(variant, folder, from_folder=from_folder))
            killer.end(modules=sorted(set(sys.modules) - before))
            return code

        after = (float(number), self._signal) if timed else None
        code = _in_process(work, Path(f"{folder}.log"), after)
        self.read += len(journal)
        self.repeated += sorted(f"{variant}, step {step}" for step in journal & _drawn(folder, lines) if journal)
        return code


def _told(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Sampling that prints which steps are drawn."""

    def told(source: RolloutSource, cursor: Any, pending: Any) -> Any:
        if pending.drawn is None:
            print(f"{DRAWN}{pending.step}", flush=True)
        return sample(source, cursor, pending)

    return told


def _drawn(folder: Path, start: int = 0) -> set[int]:
    """The steps that processes have drawn, by what they have printed from some line on."""
    lines = Path(f"{folder}.log").read_text(errors="replace").splitlines()[start:]
    return {int(line.removeprefix(DRAWN)) for line in lines if line.startswith(DRAWN)}


def _behind(now: Callable[[], float]) -> float:
    return now() - 3600.0


def _slow(sync: Callable[[int], None], seconds: float, descriptor: int) -> None:
    if seconds:
        time.sleep(seconds)
    sync(descriptor)


def _in_process(work: Callable[[], int], log: Path | None = None, kill: tuple[float, int] | None = None) -> int:
    """The exit code of a function that runs in a forked process, with its output in a file.

    Args:
        work: returns the exit code.
        log: the file.
        kill: send the process a signal after so many seconds.
    """
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = 70
        try:
            os.setsid()
            if log is not None:
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.setprofile(None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end, start = TIMEOUT, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - start
        if kill is not None and passed >= kill[0]:
            os.kill(child, kill[1])
            kill = None
        if passed >= end:
            os.killpg(child, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.002)


def _log(folder: Path) -> str:
    """The last lines that a run has printed."""
    return "\n".join(Path(f"{folder}.log").read_text(errors="replace").splitlines()[-15:])


def problems(reference: Path, folder: Path, strict: bool) -> list[str]:
    """In what a continued run differs from an undisturbed one.

    Args:
        reference: the folder of the undisturbed run.
        folder: that of the other.
        strict: False allows more checkpoints, as a signal writes one.
    """
    a, b = read_whole(reference), read_whole(folder)
    found = [str(one) for one in differences(a, b)]
    found += [f"setting {key}: {values}" for key, values in changed_settings(a, b)]
    found += [f"lacks {name}" for name in only_in(a, b)]
    found += [f"also has {name}" for name in only_in(b, a) if strict or not name.startswith("checkpoints/")]
    steps = [[json.loads(line)["step"] for line in (run.path / "metrics.jsonl").open()] for run in (a, b)]
    if steps[0] != steps[1]:
        found.append(f"lines of metrics.jsonl are of steps {steps[1]}, not {steps[0]}")
    found += [f"left {path.relative_to(folder)}" for path in folder.rglob("*") if path.name.endswith(LEFT_BEHIND)]
    for saved in (*b.checkpoints.values(), *([folder / "best"] if (folder / "best").exists() else [])):
        check_whole(saved)
    merged = [path / "merged" / "model.safetensors" for path in (reference, folder)]
    if merged[0].exists() and merged[0].read_bytes() != merged[1].read_bytes():
        found.append("merged/model.safetensors differs")
    return found


def planned(
    harness: Harness, kills: int, variants: list[str], seed: int, timed: float, again: float = 0.5
) -> list[Kill]:
    """Seeded kills, spread over the phases and the variants. A share of the runs is killed again when it is continued,
    the same share of these a third time.

    Args:
        harness: measures how many events a phase has.
        kills: how many there are in all, at least.
        variants: which runs.
        seed: of the instants.
        timed: share of the runs that are killed at a moment instead of an event.
        again: share of the runs that are killed again.
    """
    chance, plans = random.Random(seed), list[Kill]()
    phases = [phase for phase in PHASES if phase != "resume"]  # which comes when a run is killed again
    used = Counter[str]()
    for number in itertools.count():
        if sum(len(plan.instants) for plan in plans) >= kills:
            break
        phase = phases[number % len(phases)]
        able = [name for name in variants if harness.reference(name).events[phase]]
        if not able:
            phase, able = "update", variants
        variant = min(able, key=lambda name: used[name])
        used[variant] += 1
        reference = harness.reference(variant)
        if chance.random() < timed:
            instants = [f"time:{chance.uniform(0, reference.seconds):.3f}"]
        else:
            instants = [f"{phase}:{chance.randint(1, reference.events[phase])}"]
        while chance.random() < again and len(instants) < 4:
            # Of a run that goes on, only the rest is left, which begins with "start" and "resume".
            later = chance.choice(["start", "resume", *phases])
            events = RESUME_EVENTS if later == "resume" else reference.events[later] // 4
            instants.append(f"{later}:{chance.randint(1, max(1, events))}")
        plans.append(Kill(variant, instants))
    return plans


def table(kills: list[Kill]) -> str:
    """Kills and bit-equal runs by phase and by variant."""
    lines = []
    for title, names in (
        ("killed in", {kill.met[0] for kill in kills if kill.met}),
        ("variant", {kill.variant for kill in kills}),
    ):
        lines += [f"| {title} | runs | of them killed again | bit-equal |", "|---|---|---|---|"]
        for name in sorted(names, key=lambda name: [*PHASES, "time", *VARIANTS].index(name)):
            some = [kill for kill in kills if kill.variant == name or kill.met[:1] == [name]]
            again, equal = sum(len(kill.met) > 1 for kill in some), sum(not kill.problems for kill in some)
            lines.append(f"| {name} | {len(some)} | {again} | {equal} |")
        lines.append("")
    met = sum(len(kill.met) for kill in kills)
    equal = sum(not kill.problems for kill in kills)
    return "\n".join([*lines, f"{met} kills of {len(kills)} runs; {equal} runs bit-equal, {len(kills) - equal} not"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many kills in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timed", type=float, default=0.0, help="share that is killed at a moment instead of an event")
    parser.add_argument("--again", type=float, default=0.5, help="share that is killed again when it is continued")
    parser.add_argument("--only", default=",".join(VARIANTS), help="some of the variants")
    parser.add_argument("--at", help="carry out one kill of one variant: PHASE:EVENT or time:SECONDS, several in turn")
    parser.add_argument("--signal", type=lambda name: signal.Signals[name], default=signal.SIGKILL)
    parser.add_argument("--fresh", action="store_true", help="also compare with runs of other interpreters")
    parser.add_argument("--fsync-seconds", type=float, default=0.0, help="what os.fsync takes longer")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no kill after this time")
    parser.add_argument("--keep", type=Path, help="a folder to work in, which is left")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-kills-")))
        place.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("COHORT_CACHE", str(place / "cache"))
        start, variants = time.monotonic(), arguments.only.split(",")
        harness = Harness(place, arguments.signal, fresh=arguments.fresh, fsync_seconds=arguments.fsync_seconds)
        if arguments.at:
            plans = [Kill(variant, arguments.at.split(",")) for variant in variants]
        else:
            plans = planned(harness, arguments.kills, variants, arguments.seed, arguments.timed, arguments.again)
        done: list[Kill] = []
        for plan in plans:
            if time.monotonic() - start > 60 * arguments.minutes:
                print(f"the time is over: {len(plans) - len(done)} runs were not started")
                break
            done.append(harness.carry_out(plan))
            if len(done) % 20 == 0:
                print(f"{len(done)} of {len(plans)} runs", file=sys.stderr, flush=True)
            if plan.problems:
                print(f"{plan.command}\n  " + "\n  ".join(plan.problems[:8]).replace("\n", "\n  "), flush=True)
        used = os.times()
        cpu = used.user + used.system + used.children_user + used.children_system
        print(table(done))
        print(f"{harness.read} rollouts were in journals; {len(harness.repeated)} of them were drawn again")
        print("\n".join(harness.repeated), end="")
        print(f"{time.monotonic() - start:.0f} s, {cpu:.0f} s of processor time")
    return 1 if harness.repeated or any(kill.problems for kill in done) else 0


if __name__ == "__main__":
    sys.exit(main())
