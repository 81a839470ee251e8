"""Build and load the library of native kernels: compiled by the machine's C compiler at the first use, then kept.

It is kept in ``$COHORT_CACHE``, else ``$XDG_CACHE_HOME/cohort``, else ``~/.cache/cohort``. The file name has a hash of
everything the library depends on (source, compiler, flags, CPU) and a hash of its content: a truncated file does not
match and is built again. Processes that need it at the same time wait for the one that compiles; where the file system
has no locks, each writes a complete file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cohort.lock import alone_in

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Without ``-ffast-math``: NaN must stay NaN, and a number must not depend on where it is computed."""
NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",), "arm64": ("-mcpu=native",)}
COMPILERS = ("cc", "gcc", "clang")
THREADS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""Functions of torch's OpenMP runtime that the kernels call."""
TIMEOUT = 300
"""Seconds that a compiler may take."""


class Unavailable(Exception):  # noqa: N818 - not an error: torch computes the same
    """There are no native kernels; the message says why."""


def load() -> ctypes.CDLL:
    """The library, which runs on torch's threads. Built at most once per process.

    Raises:
        Unavailable: there is no compiler, it fails, or its output cannot be loaded.
    """
    found = _load_once()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _load_once() -> ctypes.CDLL | str:
    try:
        return load_from(cache_folder())
    except Unavailable as reason:
        return str(reason)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def load_from(folder: Path) -> ctypes.CDLL:
    """The library from a folder. It is built and stored there if it is missing; if the folder cannot be written to, it
    is built in a temporary one.

    Raises:
        Unavailable: see ``load``.
        OSError, subprocess.SubprocessError: the compiler or a file failed.
    """
    if sys.platform not in {"linux", "darwin"}:
        raise Unavailable(f"the system is {sys.platform}")
    threads = ctypes.CDLL(None)  # torch has loaded its OpenMP runtime into the process
    if not all(hasattr(threads, name) for name in THREADS):
        raise Unavailable("torch's threads cannot be shared")
    command = compiler()
    key = _key(command)
    if kept := _kept(folder, key):
        return _opened(kept, threads)
    with _workplace(folder) as (kept_folder, workplace):
        if kept_folder is not None and (kept := _kept(folder, key)):  # another process has compiled it meanwhile
            return _opened(kept, threads)
        made = _compiled(command, workplace)
        if kept_folder is not None:
            made = made.replace(kept_folder / f"{key}-{_digest(made.read_bytes())}.so")
        return _opened(made, threads)  # the file of a loaded library may be deleted


def _kept(folder: Path, key: str) -> Path | None:
    paths = sorted(folder.glob(f"{key}-*.so"))
    return next((path for path in paths if path.stem == f"{key}-{_digest(path.read_bytes())}"), None)


@contextlib.contextmanager
def _workplace(folder: Path) -> Iterator[tuple[Path | None, Path]]:
    """The folder and a temporary one in it, while no other process compiles there. If the folder cannot be written to:
    None, and a temporary one elsewhere."""
    kept_folder: Path | None = folder
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(folder))
            temporary = tempfile.TemporaryDirectory(dir=folder)
        except OSError:
            temporary, kept_folder = tempfile.TemporaryDirectory(), None
        yield kept_folder, Path(stack.enter_context(temporary))


def cache_folder() -> Path:
    """Where libraries are kept between runs."""
    if folder := os.environ.get("COHORT_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cohort"


def compiler() -> list[str]:
    """The command of the C compiler: ``$CC``, else the first of ``COMPILERS`` that is installed.

    Raises:
        Unavailable: there is no compiler.
    """
    if command := shlex.split(os.environ.get("CC", "")):
        if not shutil.which(command[0]):
            raise Unavailable(f"no C compiler ($CC is {command[0]})")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise Unavailable("no C compiler (cc, gcc or clang)")


def _flags() -> list[str]:
    return [*FLAGS, *NATIVE.get(platform.machine(), ())]


def _key(command: list[str]) -> str:
    """A hash of everything the library depends on."""
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=TIMEOUT, check=False).stdout
    sources = (part.read_bytes() for part in sorted(SOURCE.parent.glob("*.[ch]")))
    parts = (*sources, shlex.join(command).encode(), version, " ".join(_flags()).encode(), _cpu())
    return _digest(b"\0".join(_digest(part).encode() for part in parts))


def _cpu() -> bytes:
    """What distinguishes processors: ``-march=native`` uses all instructions of this one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    told = {line for line in lines if line.split(":")[0].strip() in {"flags", "Features", "model name", "CPU part"}}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)]).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _compiled(command: list[str], folder: Path) -> Path:
    made = folder / "kernels.so"
    arguments = [*command, *_flags(), str(SOURCE), "-o", str(made), "-lm"]
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    if done.returncode or not made.exists():
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise Unavailable(f"{command[0]} failed: {first.strip()}")
    return made


def _opened(library: Path, threads: ctypes.CDLL) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(library))
    opened.cohort_set_threads(*(ctypes.cast(getattr(threads, name), ctypes.c_void_p) for name in THREADS))
    return opened
