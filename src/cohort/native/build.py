"""The native kernels' library: compiled at its first use by the machine's own C compiler, kept, and loaded.

It lies in ``$COHORT_CACHE``, else ``$XDG_CACHE_HOME/cohort``, else ``~/.cache/cohort``, under a name made of all that
it depends on (source, compiler, flags, CPU) and of what it holds: a file that was cut short is no match and is made
anew, and processes that build at once each put a whole file there.
"""

from __future__ import annotations

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
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No ``-ffast-math``: what is not a number must stay none, and every number comes from the same operations wherever it
is computed."""
NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",), "arm64": ("-mcpu=native",)}
COMPILERS = ("cc", "gcc", "clang")
THREADS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""What the kernels ask of torch's OpenMP runtime."""
TIMEOUT = 300
"""Seconds that a compiler may take."""


class Unavailable(Exception):  # noqa: N818 - not an error: the same is done in torch
    """There are no native kernels here; the message says why."""


def load() -> ctypes.CDLL:
    """The library, built if need be, on torch's threads. Asked once per process.

    Raises:
        Unavailable: no compiler, it fails, or what it makes cannot be loaded.
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
    """The library from a folder, where it is put if it is not there; from a passing place if it cannot be written to.

    Raises:
        Unavailable: as of ``load``.
        OSError, subprocess.SubprocessError: the same, in the system's words.
    """
    if sys.platform not in {"linux", "darwin"}:
        raise Unavailable(f"the system is {sys.platform}")
    threads = ctypes.CDLL(None)  # torch has loaded its OpenMP runtime for all to see
    if not all(hasattr(threads, name) for name in THREADS):
        raise Unavailable("torch's threads cannot be shared")
    command = compiler()
    key = _key(command)
    for kept in sorted(folder.glob(f"{key}-*.so")):
        if kept.stem == f"{key}-{_digest(kept.read_bytes())}":
            return _opened(kept, threads)
    workplace, stays = _workplace(folder)
    with workplace as name:
        made = _compiled(command, Path(name))
        if stays:
            made = made.replace(folder / f"{key}-{_digest(made.read_bytes())}.so")
        return _opened(made, threads)  # once it is loaded its file may go


def _workplace(folder: Path) -> tuple[tempfile.TemporaryDirectory[str], bool]:
    """Where to compile: within the folder, so that a whole file can be moved into its place, and True; elsewhere, and
    False, where that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder), True
    except OSError:
        return tempfile.TemporaryDirectory(), False


def cache_folder() -> Path:
    """Where libraries are kept between runs."""
    if own := os.environ.get("COHORT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cohort"


def compiler() -> list[str]:
    """The command of the C compiler: ``$CC``, else the first of ``COMPILERS`` that there is.

    Raises:
        Unavailable: there is none.
    """
    if own := shlex.split(os.environ.get("CC", "")):
        if not shutil.which(own[0]):
            raise Unavailable(f"no C compiler ($CC is {own[0]})")
        return own
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise Unavailable("no C compiler (cc, gcc or clang)")


def _flags() -> list[str]:
    return [*FLAGS, *NATIVE.get(platform.machine(), ())]


def _key(command: list[str]) -> str:
    """Names all that the library depends on."""
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=TIMEOUT, check=False).stdout
    parts = (
        *(part.read_bytes() for part in sorted(SOURCE.parent.glob("*.[ch]"))),
        shlex.join(command).encode(),
        version,
        " ".join(_flags()).encode(),
        _cpu(),
    )
    return _digest(b"\0".join(_digest(part).encode() for part in parts))


def _cpu() -> bytes:
    """What tells processors apart: ``-march=native`` uses what this one can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    told = {line for line in lines if line.split(":")[0].strip() in {"flags", "Features", "model name", "CPU part"}}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)]).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _compiled(command: list[str], workplace: Path) -> Path:
    made = workplace / "kernels.so"
    arguments = [*command, *_flags(), str(SOURCE), "-o", str(made), "-lm"]
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    if done.returncode or not made.exists():
        words = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no word"]
        )
        raise Unavailable(f"{command[0]} failed: {words[0].strip()}")
    return made


def _opened(library: Path, threads: ctypes.CDLL) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(library))
    opened.cohort_set_threads(*(ctypes.cast(getattr(threads, name), ctypes.c_void_p) for name in THREADS))
    return opened
