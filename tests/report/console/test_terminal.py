"""The live display in a real terminal: tmux, whose screen is captured as text."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from cohort.report import console as module
from cohort.report.console import Display, Keys, is_live_terminal
from tests import warm
from tests.launch.test_processes import wait_for
from tests.report.console.made import line, make_run
from tests.train.harness import metrics_of
from tests.train.test_signals import write_run

ROOT = Path(__file__).parents[3]
PRINTING_REWARD = """
import time
def digits(completions, **_):
    time.sleep(0.2)
    print("scored", len(completions))
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Terminal:
    """A shell in a tmux of its own."""

    def __init__(self, folder, width, height):
        self._tmux = ["tmux", "-S", str(folder / "socket"), "-f", "/dev/null"]
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "CI", "NO_COLOR")}
        environment |= {"PS1": "$ ", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "LC_ALL": "C.UTF-8"}
        environment |= {"COLUMNS": str(width), "LINES": str(height)}  # as some shells export them
        size = ["-x", str(width), "-y", str(height)]
        subprocess.run([*self._tmux, "new-session", "-d", *size, "bash --norc"], check=True, env=environment)

    def do(self, *arguments):
        done = subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def type(self, *keys):
        self.do("send-keys", *keys)

    def screen(self):
        return self.do("capture-pane", "-p").rstrip()

    def wait(self, *texts, absent="\0", seconds=90, check=lambda _: True):
        """The screen as soon as it has all texts. What is being drawn anew may be half drawn: ``check`` looks again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            screen = self.screen()
            if all(text in screen for text in texts) and absent not in screen and check(screen):
                return screen
            time.sleep(0.05)
        raise AssertionError(f"{texts} {absent!r} after {seconds} s:\n{self.screen()}")


@pytest.fixture
def terminal(tmp_path):
    opened = Terminal(tmp_path, width=100, height=40)
    yield opened
    opened.do("kill-server")


@needs_tmux
def test_a_run_in_a_terminal(terminal, tmp_path):
    """Prints, keys, another width, Ctrl-Z, the background and Ctrl-C, one after the other: a terminal is slow."""
    terminal.type(f"{sys.executable} -m tests.report.console.fake_run {tmp_path}/run 10000 0.1", "Enter")
    screen = terminal.wait("written by a worker", "g last group", check=lambda screen: screen.count("\n\n") == 1)
    above, display = screen.split("\n\n")
    assert above.splitlines()[-4:] == ["described", "printed by a reward function", "a warning", "written by a worker"]
    rows = [text.split()[0] for text in display.splitlines()]
    assert [rows[0], rows[1], rows[2], rows[-1]] == ["step", "health", "now", "keys"]

    terminal.do("resize-window", "-x", "40")
    once = ("g last group", "10000", "\nreward ")
    terminal.wait("healthy: 75% of groups teach,\n", check=lambda narrow: all(narrow.count(text) == 1 for text in once))
    terminal.do("resize-window", "-x", "100", "-y", "6")
    starts = ["step", "health", "now", "reward"]
    terminal.wait(check=lambda low: [text.split()[0] for text in low.splitlines()[-4:] if text] == starts)
    terminal.do("resize-window", "-x", "100", "-y", "40")

    terminal.type("g")
    group = terminal.wait("g back", absent="health").split("\n\n")[-1]
    assert group.strip().splitlines()[:4] == [
        "step 1, group 2 of 2",
        "prompt",
        "  | 3 + 3",
        " 1  reward 1.000  advantage +0.500  eos",
    ]
    terminal.do("resize-window", "-x", "100", "-y", "8")
    terminal.wait("lines 1 to 5 of 8")
    terminal.type("Down", "Down")
    assert "\n  | 3 + 3\n" in terminal.wait("lines 3 to 7 of 8")
    terminal.do("resize-window", "-x", "100", "-y", "40")
    terminal.type("q")
    terminal.wait("health", absent="group 2 of 2")

    terminal.type("C-z")
    terminal.wait("Stopped", absent="health")
    terminal.type("clear; stty -a | grep -oE -- '-?(icanon|echo|ixon)( |$)|susp = ..' | xargs", "Enter")
    terminal.wait("susp = ^Z ixon icanon echo")
    terminal.type("clear; bg", "Enter")
    time.sleep(0.6)
    assert "health" not in terminal.screen()
    terminal.type("echo typed", "Enter")
    terminal.wait("\ntyped\n")
    terminal.type("fg", "Enter")
    terminal.wait("health", "g last group")
    terminal.type("C-c")
    end = terminal.wait("interrupted\n")
    assert "health" in end  # the last picture stays
    assert "g last group" not in end
    terminal.type("clear; stty -a | grep -oE -- '-?(icanon|echo|ixon)( |$)|susp = ..' | xargs", "Enter")
    terminal.wait("susp = ^Z ixon icanon echo")


@needs_tmux
@pytest.mark.slow
def test_a_run_that_starts_in_the_background(terminal, tmp_path):
    terminal.type(f"{sys.executable} -m tests.report.console.fake_run {tmp_path}/run 40 0.05 &", "Enter")
    terminal.type("echo ty", "ped", "Enter")
    terminal.wait("\ntyped\n")
    screen = terminal.wait("after the run")
    steps = [text.split()[1] for text in screen.splitlines() if text.startswith("step ")]
    assert len(steps) > 5  # the screen shows the last ones
    assert steps == [f"{n}/40" for n in range(2, 41, 2)][-len(steps) :]
    assert "health" not in screen


def test_keys_are_read_and_the_terminal_is_as_before(monkeypatch):
    outside, inside = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(inside))
    before = termios.tcgetattr(inside)
    keys = Keys()
    keys.follow()
    assert not keys.are_read  # it is not the terminal of this session
    monkeypatch.setattr(module, "in_foreground", lambda _: True)
    os.write(outside, b"lost?")
    assert keys.read() == []
    termios.tcflush(inside, termios.TCIFLUSH)
    keys.follow()
    os.write(outside, b"gq\x1b[A\x1b[6~\x1bOC\x1a x")
    time.sleep(0.05)
    assert keys.read() == [b"g", b"q", b"\x1b[A", b"\x1b[6~", b"\x1bOC", b"\x1a", b" ", b"x"]
    termios.tcsetattr(inside, termios.TCSANOW, before)  # as a shell does
    keys.follow()
    assert not termios.tcgetattr(inside)[3] & termios.ICANON
    keys.follow(wanted=False)
    assert termios.tcgetattr(inside) == before
    keys.follow()
    keys.release()
    keys.follow()  # as the display's thread may, after a signal
    assert termios.tcgetattr(inside) == before
    os.close(outside)
    sys.stdin.close()
    keys.follow()
    assert keys.read() == []


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_signal_to_watch_leaves_the_terminal_as_it_was(name, tmp_path):
    run = make_run(tmp_path / "run", [line(1)])
    outside, inside = pty.openpty()
    before = termios.tcgetattr(inside)
    process = warm.begin(str(run), os.ttyname(inside), module="tests.report.console.watching", CI=None, TERM="xterm")
    try:
        wait_for(lambda: not termios.tcgetattr(inside)[3] & termios.ECHO, 30)
        process.send_signal(getattr(signal, name))
        assert process.wait(30) == -getattr(signal, name)
        assert termios.tcgetattr(inside) == before
    finally:
        process.kill()
        process.communicate()
        os.close(outside)
        os.close(inside)


@pytest.fixture
def drawn(monkeypatch):
    """A terminal of this process: standard output, and a function that gives what it has shown so far."""
    outside, inside = pty.openpty()
    os.set_blocking(outside, False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(module, "TICK", 0.01)
    stream = os.fdopen(inside, "w")
    shown = []

    def look():
        with contextlib.suppress(BlockingIOError):
            while True:
                shown.append(os.read(outside, 4096).decode())
        return "".join(shown)

    yield stream, look
    stream.close()
    os.close(outside)


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true"), ("TERM", "")])
def test_terminals_that_get_plain_lines(name, value, monkeypatch, drawn):
    monkeypatch.setattr(sys, "stdout", drawn[0])
    live = is_live_terminal()
    monkeypatch.setenv(name, value)
    plain = is_live_terminal()
    monkeypatch.undo()
    assert (live, plain) == (True, False)


def test_after_an_error_in_the_display_the_run_prints_plain_lines(tmp_path, monkeypatch, caplog, drawn):
    stream, look = drawn
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(module, "view", lambda *_, **__: 1 / 0)
    with Display.of_training(40, make_run(tmp_path)) as display:
        wait_for(lambda: "the live display ended: ZeroDivisionError" in caplog.text, 10)
        assert sys.stdout is stream
        for step in range(1, 4):
            display.show(line(step))
    monkeypatch.undo()
    assert [text.split()[1] for text in look().splitlines() if "reward" in text] == ["1/40", "2/40"]


def test_what_is_printed_comes_above_the_display(tmp_path, monkeypatch, drawn):
    stream, look = drawn
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "breakpointhook", lambda: "debugged")
    with Display.of_training(40, make_run(tmp_path)) as display:
        wait_for(lambda: "step  0/40" in look(), 10)
        print("a", end="")
        print("b [/x]\x1b[2J\nloading 1%\rloading 100%")
        print("\r 1%", end="")
        print("\r 2%", end="", flush=True)
        display.print("said")
        drawn_with = look()
        if not os.fork():
            print("of a child", file=sys.stdout)
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        assert breakpoint() == "debugged"
        assert sys.stdout is stream
    text = look()
    # Each line replaces the picture, which is drawn again below it, and the cursor goes back up.
    monkeypatch.undo()
    parts = re.findall(r"\r\x1b\[J([^\x1b]*)\r\n\r\n\x1b\[1mstep", drawn_with)
    assert [part for part in parts if part] == ["ab [/x]", "loading 100%", "said"]
    assert drawn_with.endswith("A\r")
    assert "of a child\r\n" in text
    assert " 2%\r\n" in text.removeprefix(drawn_with)
    assert "\x1b[?25l" not in text  # the cursor stays visible
    assert "step  0/40" in text.removeprefix(drawn_with)  # the last picture stays


@needs_tmux
@pytest.mark.slow
@pytest.mark.parametrize("how", ["C-c", "SIGTERM"])
def test_a_stopped_training_leaves_the_terminal_as_it_was(terminal, tmp_path, how):
    """A real run: its description, a reward function that prints, a stop with a checkpoint, and the resumed run."""
    write_run(tmp_path, PRINTING_REWARD, max_steps=1000, save_steps=5)
    terminal.type(f"cd {tmp_path}; clear; {sys.executable} -m cohort train c.toml", "Enter")
    terminal.wait("scored 8", "s a step", "g last group", seconds=120)
    if how == "SIGTERM":
        holder = json.loads((tmp_path / "out" / "run.lock").read_text())
        os.kill(holder["pid"], signal.SIGTERM)
    else:
        terminal.type(how)
    screen = terminal.wait("stopped by", seconds=60)
    assert "stopping with a checkpoint" in screen
    assert screen.count("g last group") == 0
    terminal.type("clear; stty -a | grep -oE -- '-?(icanon|echo|ixon)( |$)|susp = ..' | xargs", "Enter")
    terminal.wait("susp = ^Z ixon icanon echo")
    steps = len(metrics_of(tmp_path / "out"))
    terminal.type(f"clear; {sys.executable} -m cohort resume out", "Enter")
    resumed = terminal.wait("s a step", "g last group", seconds=120)
    assert int(resumed.split("\nstep ")[-1].split("/")[0]) >= steps
    terminal.type("C-c")
    terminal.wait("stopped by SIGINT", seconds=60)


@needs_tmux
@pytest.mark.slow
def test_a_second_signal_leaves_the_terminal_as_it_was(terminal, tmp_path):
    """Below a script: bash sets the terminal back itself after a command that a signal has ended."""
    write_run(tmp_path, PRINTING_REWARD, max_steps=1000)
    modes = "stty -a | grep -oE -- '-?(icanon|echo|ixon)( |$)|susp = ..' | xargs"
    (tmp_path / "script.sh").write_text(f"{sys.executable} -m cohort train c.toml\n{modes}\n")
    terminal.type(f"cd {tmp_path}; clear; sh script.sh", "Enter")
    terminal.wait("scored 8", "s a step", "g last group", seconds=120)
    process = json.loads((tmp_path / "out" / "run.lock").read_text())["pid"]
    os.kill(process, signal.SIGTERM)
    time.sleep(0.05)
    os.kill(process, signal.SIGTERM)
    terminal.wait("susp = ^Z ixon icanon echo")
