"""The bubblewrap command line: what a sandbox contains, and which user the program is."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path

INSIDE = Path(__file__).with_name("inside.py")
HOME = "/cohort"
"""The folder of ``INSIDE`` and of a harness in the sandbox."""
NOBODY = 65534
"""The user id of programs: inside the sandbox, and outside as well if the parent is root."""
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
"""The interpreter that runs this process. For a virtual environment, the Python that it was made from."""
LIBRARIES = tuple(f"{prefix}/{name}" for prefix in {sys.base_prefix, sys.base_exec_prefix} for name in ("lib", "lib64"))
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")


def installed_packages() -> list[str]:
    """The folders of installed packages, including those of a virtual environment."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys((paths["purelib"], paths["platlib"])))


def environment(home: str) -> dict[str, str]:
    """The environment of a program. Bubblewrap itself gets no other, because programs can read it."""
    # a single malloc arena: an arena per thread would take 64 MB of the address space each
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    variables = {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return variables | dict.fromkeys(threads, "1")


def arguments(
    packages: Sequence[str],
    harness: Path | None,
    disk: int,
    files: Mapping[str, FileIO],
    filter_file: FileIO,
    mapping: Sequence[FileIO],
) -> list[str]:
    """The arguments of ``bwrap`` up to the command.

    Args:
        packages: folders that are shown besides those of Python.
        harness: the file whose folder is shown.
        disk: size of /tmp in MB; 0: it is read-only.
        files: files in /tmp by relative path.
        filter_file: the seccomp filter.
        mapping: pipes to map two users from outside (``UserMapping``). Empty: bubblewrap maps its only user itself.
    """
    result = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    result += ["--cap-drop", "ALL", "--seccomp", str(filter_file.fileno())]
    if mapping:
        info, block = (str(end.fileno()) for end in mapping)
        result += ["--info-fd", info, "--userns-block-fd", block, "--uid", "0", "--gid", "0"]
        result += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # lost when ``inside.py`` changes the user
    else:
        result += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    # /tmp comes first: a Python environment may lie below it, and later mounts cover earlier ones
    result += ["--perms", "1777", "--size", str(disk << 20), "--tmpfs", "/tmp"] if disk else ["--dir", "/tmp"]
    result += _bind([*SYSTEM, *LIBRARIES, PYTHON, *packages])
    result += ["--ro-bind", str(INSIDE), f"{HOME}/{INSIDE.name}"]
    result += ["--ro-bind", str(harness.parent), f"{HOME}/{harness.parent.name}"] if harness else []
    for name, file in files.items():
        result += ["--perms", "0444", "--file", str(file.fileno()), f"/tmp/{name}"]
    result += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"]
    # the root is in memory as well, and its size is not limited
    return [*result, "--remount-ro", "/dev", "--chdir", "/tmp", "--remount-ro", "/"]


def _bind(paths: Iterable[str]) -> list[str]:
    """Show those of the paths that exist, each once."""
    result: list[str] = []
    bound: list[Path] = []
    for path in sorted({Path(path) for path in paths if os.path.exists(path)}):  # noqa: PTH110
        if any(path.is_relative_to(other) for other in bound):
            continue
        if path.parent == Path("/") and path.is_symlink():  # /lib is usr/lib
            result += ["--symlink", str(path.readlink()), str(path)]
            continue
        if path.parent != Path("/"):
            result += ["--dir", str(path.parent)]  # otherwise it would have the permissions of the folder outside
        result += ["--ro-bind", str(path), str(path)]
        bound.append(path)
    return result
