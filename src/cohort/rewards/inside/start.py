"""The first thing that runs inside a sandbox: it sets the limits, says that it has got so far, and runs the program.

Its arguments are ``name=value``; the program's text comes first on the standard input, and the program's own input
after it. This file is run as a script, by an interpreter that knows nothing of Cohort.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import os
import resource
import sys
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
    for fd in sorted(int(settings[name]) for name in ("ready", "reads", "writes") if name in settings):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, 1 << 16)


def read_exactly(count: int) -> bytes:
    """So many bytes of the standard input and not one more: what follows is the program's."""
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 16))
        if not part:
            raise EOFError("the standard input ended before the program's text did")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


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
    os.write(ready, b"1")
    os.close(ready)
    source = read_exactly(int(settings["length"]))
    if mode == "run":
        run(source)
    else:
        main_of_mode(source, int(settings["reads"]), int(settings["writes"]))


if __name__ == "__main__":
    main()
