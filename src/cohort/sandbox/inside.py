"""The first script that runs inside a sandbox: set the limits, report that they are set, run the program.

The arguments are ``name=value``. The program is read from an open file, and its input is the standard input. The
interpreter that runs this script knows nothing of Cohort.
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
SIGNALS = 256  # each timer counts as one


def set_limits(settings: dict[str, str]) -> None:
    """Set limits of the kernel that no program can raise again.

    The sandbox's first process gets them too: a program of the same user can write to the memory of the first process,
    and could use it as a second process.
    """
    megabyte = 1024 * 1024
    limits = {
        resource.RLIMIT_AS: int(settings["memory"]) * megabyte,
        resource.RLIMIT_FSIZE: int(settings["disk"]) * megabyte,
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
        # processor time: SIGXCPU at the soft limit, SIGKILL one second later
        pair = (limit, limit + 1) if which == resource.RLIMIT_CPU and limit == value else (limit, limit)
        if sandboxed:
            resource.prlimit(1, which, pair)
        resource.setrlimit(which, pair)


def change_user(user: int) -> None:
    """Become another user: the kernel does not count root's tasks against RLIMIT_NPROC."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def close_others(kept: list[int]) -> None:
    """Close the file descriptors that bubblewrap has left open."""
    last = 2
    for fd in sorted(kept):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, 1 << 16)


def wait_for_first_process() -> None:
    """Wait until the sandbox's first process has the seccomp filter: by then it is bound to its parent's life."""
    status = os.open("/proc/1/status", os.O_RDONLY)
    while b"\nSeccomp:\t2\n" not in os.pread(status, 1 << 16, 0):
        time.sleep(0.001)
    os.close(status)


def run_script(source: bytes) -> None:
    """Run a program as ``python program.py`` would, in a ``__main__`` without any names of this script."""
    sys.argv[:] = ["program.py"]
    names = sys.modules["__main__"].__dict__
    kept = {name: names[name] for name in ("__name__", "__builtins__", "__doc__", "__spec__", "__loader__")}
    names.clear()
    names.update(kept, __doc__=None, __loader__=None, __file__="program.py")
    exec(compile(source, "program.py", "exec", dont_inherit=True), names)


def main() -> None:
    """Set the limits, then run the program."""
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
    ready, source_file = int(settings["ready"]), int(settings["source"])
    pipes = [int(fd) for fd in settings["pipes"].split(",") if fd]
    run = run_script
    if settings["harness"]:  # imported before the limits are set: another user may not be able to read the files
        folder, file = os.path.split(settings["harness"])
        parent, package = os.path.split(folder)
        sys.path.append(parent)
        run = import_module(f"{package}.{file.removesuffix('.py')}").main
        sys.path.pop()
    for name in ("exit", "quit"):  # defined by ``site``, which is not imported because it looks for packages
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    sys.path.extend(path for path in settings["packages"].split(os.pathsep) if path)
    close_others([ready, source_file, *pipes])
    set_limits(settings)
    if "user" in settings:
        change_user(int(settings["user"]))
    if "threads" in settings:
        wait_for_first_process()
    os.write(ready, b"1")
    os.close(ready)
    with os.fdopen(source_file, "rb") as program:
        source = program.read()
    run(source, *pipes)


if __name__ == "__main__":
    main()
