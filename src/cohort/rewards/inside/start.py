"""The first thing that runs inside a sandbox: it sets the limits, says that it has got so far, and runs the program.

Its arguments are ``name=value``; the program's text is in a file that is open, the program's input the standard input.
This file is run as a script, by an interpreter that knows nothing of Cohort.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import os
import resource
import sys
import time
from importlib import import_module

OPEN_FILES = 64
SIGNALS = 256  # each timer is counted as one


def set_limits(settings: dict[str, str]) -> None:
    """Limits of the kernel, which no program can raise again.

    The sandbox's first process gets them too: a program of the same user can write to that one's memory, and so have a
    second process for itself.
    """
    megabyte = 1024 * 1024
    limits = {
        resource.RLIMIT_AS: int(settings["memory"]) * megabyte,
        resource.RLIMIT_FSIZE: int(settings["files"]) * megabyte,
        resource.RLIMIT_CPU: int(settings["cpu"]),
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_SIGPENDING: SIGNALS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    sandboxed = "threads" in settings
    if sandboxed:
        limits[resource.RLIMIT_NPROC] = int(settings["threads"])
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # processor time: at the first limit a signal that says why, a second later the end
        pair = (limit, limit + 1) if which == resource.RLIMIT_CPU and limit == value else (limit, limit)
        if sandboxed:
            resource.prlimit(1, which, pair)
        resource.setrlimit(which, pair)


def change_user(user: int) -> None:
    """Be another user: root's tasks are not counted against RLIMIT_NPROC."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def close_others(settings: dict[str, str]) -> None:
    """Close what bubblewrap has left open."""
    last = 2
    for fd in sorted(int(settings[name]) for name in ("ready", "source", "reads", "writes") if name in settings):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, 1 << 16)


def wait_for_the_first() -> None:
    """Until the sandbox's first process has the filter: it takes it once it has bound itself to its parent's life."""
    status = os.open("/proc/1/status", os.O_RDONLY)
    while b"\nSeccomp:\t2\n" not in os.pread(status, 1 << 16, 0):
        time.sleep(0.001)
    os.close(status)


def run(source: bytes) -> None:
    """As ``python program.py`` would, in a ``__main__`` that has nothing of ours."""
    sys.argv[:] = ["program.py"]
    names = sys.modules["__main__"].__dict__
    kept = {name: names[name] for name in ("__name__", "__builtins__", "__doc__", "__spec__", "__loader__")}
    names.clear()
    names.update(kept, __doc__=None, __loader__=None, __file__="program.py")
    exec(compile(source, "program.py", "exec", dont_inherit=True), names)


def main() -> None:
    """Limits first, then the program."""
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
    mode, ready = settings["mode"], int(settings["ready"])
    if mode != "run":  # imported before the limits: the files may not be readable for another user
        sys.path.append(settings["here"])
        main_of_mode = import_module(f"inside.{mode}").main
        sys.path.pop()
    for name in ("exit", "quit"):  # which ``site`` makes, left out as it looks for packages
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    sys.path.extend(path for path in settings["packages"].split(os.pathsep) if path)
    close_others(settings)
    set_limits(settings)
    if "user" in settings:
        change_user(int(settings["user"]))
    if "threads" in settings:
        wait_for_the_first()
    os.write(ready, b"1")
    os.close(ready)
    with os.fdopen(int(settings["source"]), "rb") as file:
        source = file.read()
    if mode == "run":
        run(source)
    else:
        main_of_mode(source, int(settings["reads"]), int(settings["writes"]))


if __name__ == "__main__":
    main()
