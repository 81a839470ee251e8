"""The command line that makes a sandbox: what is in it, and who the program is there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.errors import RewardError

INSIDE = Path(__file__).parent / "inside"
HERE = "/cohort"
"""What is the folder of ``INSIDE`` in the sandbox."""
NOBODY = 65534
"""Who a program is, in the sandbox; and outside of it too where we are root."""
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_ASK = (
    "import json, sys, sysconfig; paths = sysconfig.get_paths(); print(json.dumps([sys._base_executable, "
    "sys.base_prefix, sys.base_exec_prefix, paths['purelib'], paths['platlib']]))"
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Where a Python and what it needs lie."""

    executable: str
    """Of a virtual environment the Python it was made from."""
    libraries: tuple[str, ...]
    packages: tuple[str, ...]
    """The folders of installed packages, a virtual environment's own."""


@functools.cache
def interpreter(python: str) -> Interpreter:
    """Ask an interpreter where its parts are.

    Raises:
        RewardError: it cannot be run.
    """
    try:
        asked = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise RewardError(f"the sandbox's python {python!r} cannot be run: {error}") from None
    executable, *prefixes, pure, native = json.loads(asked.stdout)
    libraries = tuple(f"{prefix}/{name}" for prefix in dict.fromkeys(prefixes) for name in ("lib", "lib64"))
    return Interpreter(os.path.realpath(executable), libraries, tuple(dict.fromkeys((pure, native))))


def environment(home: str) -> dict[str, str]:
    """All that a program's environment holds. Bubblewrap itself gets no more: its own can be read from inside."""
    # one arena: each thread's own would take 64 MB of the address space, used or not
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    return {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | dict.fromkeys(
        threads, "1"
    )


def arguments(
    python: Interpreter, packages: bool, files: int, filter_fd: int, map_fds: tuple[int, int] | None
) -> list[str]:
    """Bubblewrap's arguments, up to the command.

    Args:
        python: whose files are shown.
        packages: show its packages too.
        files: MB that /tmp holds; 0: it is read-only.
        filter_fd: where the filter of system calls is read from.
        map_fds: where bubblewrap says its process's id, and where it waits until the users are mapped. None: it maps
            the one user itself.
    """
    given = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    given += ["--cap-drop", "ALL", "--seccomp", str(filter_fd)]
    if map_fds:
        given += ["--info-fd", str(map_fds[0]), "--userns-block-fd", str(map_fds[1]), "--uid", "0", "--gid", "0"]
        given += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # gone once ``start.py`` is another user
    else:
        given += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    # First, as an environment may lie below it: what comes later lies on top.
    given += ["--perms", "1777", "--size", str(files << 20), "--tmpfs", "/tmp"] if files else ["--dir", "/tmp"]
    shown = [*SYSTEM, *python.libraries, python.executable, *(python.packages if packages else ())]
    given += _shown([path for path in shown if os.path.exists(path)])  # noqa: PTH110
    given += ["--ro-bind", str(INSIDE), f"{HERE}/inside", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    given += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    return [*given, "--chdir", "/tmp", "--remount-ro", "/"]  # its root is in memory too, and of no limited size


def _shown(paths: Sequence[str]) -> list[str]:
    given: list[str] = []
    bound: list[Path] = []
    for path in sorted(map(Path, set(paths))):
        if any(path.is_relative_to(other) for other in bound):
            continue
        if path.parent == Path("/") and path.is_symlink():  # /lib is usr/lib
            given += ["--symlink", os.readlink(path), str(path)]  # noqa: PTH115
            continue
        given += ["--dir", str(path.parent)] if path.parent != Path("/") else []  # else as closed as it is outside
        given += ["--ro-bind", str(path), str(path)]
        bound.append(path)
    return given


def map_users(pid: int) -> None:
    """Give a new user namespace two users: root, who makes the sandbox, and nobody, who runs the program. As root alone
    could: a namespace's own process may map one user only, and the kernel does not limit root's tasks."""
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
