"""Files and folders that survive a crash: on the disk, whole, before they have their name."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from safetensors import SafetensorError, safe_open

from cohort.errors import DiskError, RunFolderError, out_of_memory
from cohort.lock import alone_in

# ----------------------------------------
# Single files: written to the disk, written atomically, JSON, a JSON object per line. Imports no torch.


FileRecord: TypeAlias = dict[str, Any]
"""Size and hash of a file: ``{"bytes": ..., "sha256": ...}``."""


class Threads(ThreadPoolExecutor):
    """A thread pool that works in the calling thread while the interpreter exits, when pools take no work: a checkpoint
    may be written then."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """As of a thread pool."""
        try:
            return super().submit(function, *arguments, **named)
        except RuntimeError:
            done: Future[Any] = Future()
            done.set_result(function(*arguments, **named))
            return done


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file to the disk. A thread hashes each chunk while the next one is made and written."""
    digest, size = hashlib.sha256(), 0
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file, Threads(1) as thread:
        hashed: Future[None] | None = None
        for chunk in chunks:
            file.write(chunk)
            if hashed:
                hashed.result()  # so that no more than two chunks are in memory
            hashed = thread.submit(digest.update, chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it is the old one or the complete new one. Writers of a folder wait for each other, and
    the next one of the file removes what a killed one has left."""
    part = path.with_name(path.name + ".part")
    with alone_in(path.parent):
        part.unlink(missing_ok=True)
        try:
            write_file(part, [content.encode() if isinstance(content, str) else content])
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def as_json(value: Any, **settings: Any) -> str:
    """A value as JSON with a line break; null for NaN and infinity, which JSON lacks. ``settings`` are those of
    ``json.dumps``."""
    return json.dumps(_finite(value), allow_nan=False, **settings) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, or nothing if that fails. A line that was cut, by a crash or a full disk, is removed."""
    with path.open("ab+") as file:
        end = _end_of_lines(file)
        try:
            file.truncate(end)
            file.write(line.encode())
            file.flush()
        except OSError:
            with suppress(OSError):  # closing writes what is in the buffer
                file.close()
            os.truncate(path, end)
            raise


def _end_of_lines(file: BinaryIO) -> int:
    """The length of a file without a last line that has no line break."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


log = logging.getLogger("cohort.runs")
MANIFEST, FORMAT = "manifest.json", 1


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Bring every file of a folder to the disk, then write its manifest.

    Args:
        folder: the folder.
        known: records of files that ``write_file`` wrote, by path in the folder. Other files are read to be hashed.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    others = [name for name in names if name not in known]
    records = {**dict(zip(others, _records(folder, others, sync=True), strict=True)), **known}
    manifest = {"format": FORMAT, "files": {name: records[name] for name in names}}
    write_file(folder / MANIFEST, [(json.dumps(manifest, indent=1) + "\n").encode()])


def check_whole(folder: Path) -> None:
    """Compare the files of a folder with its manifest.

    Raises:
        RunFolderError: a file is missing or not as it was written.
    """
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    try:
        if MANIFEST not in files:
            raise FileNotFoundError
        manifest = json.loads(files[MANIFEST].read_bytes())
        form, expected = manifest["format"], {str(name): dict(record) for name, record in manifest["files"].items()}
    except FileNotFoundError:
        raise RunFolderError(f"{folder} has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise RunFolderError(f"{folder}: {MANIFEST} is damaged") from None
    if form != FORMAT:
        raise RunFolderError(f"{folder} is of format {form!r}, which this version of Cohort does not read")
    for name, record in expected.items():
        if name not in files:  # nor is a name of a file outside the folder
            raise RunFolderError(f"{folder} lacks {name:.200}")
        if (size := files[name].stat().st_size) != record.get("bytes"):
            raise RunFolderError(f"{folder}: {name} has {size:,} bytes; {record.get('bytes')} were written")
    for name, found in zip(expected, _records(folder, expected), strict=True):
        if found != expected[name]:
            raise RunFolderError(f"{folder}: {name} is not what was written: its SHA-256 differs")
    tensors = [name for name in files if name.endswith(".safetensors")]
    if added := [name for name in files if ".safetensors" in name and name not in expected]:
        raise RunFolderError(f"{folder}: {added[0]} was not written with it")
    for name in tensors:
        try:
            with safe_open(files[name], "numpy"):  # reads the header, which says where each tensor is
                pass
        except (SafetensorError, OSError) as error:
            raise RunFolderError(f"{folder}: {name} cannot be read, though it is as it was written: {error}") from None


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A new folder to write into, ``NAME.part``, which takes the target's name when the block ends. An error in the
    block removes it. A target that exists is ``NAME.old`` until the new one has its name.

    Raises:
        DiskError: the folder cannot be written.
    """
    part, old = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.old")
    failed: OSError | None = None
    try:
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
        except OSError as error:
            failed = error
        yield part  # also after a failure: other ranks may wait for what the block exchanges
        if failed:
            raise failed
        for folder in (*(path for path in part.rglob("*") if path.is_dir()), part):
            sync_path(folder)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        part.rename(target)
        sync_path(target.parent)
    except Exception as error:
        if is_of_disk(error):
            raise DiskError(f"cannot write {target}: {failed or error}") from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder. It is renamed first, so that nobody takes a half-deleted one for complete. Logs a failure."""
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        folder.rename(part)
        shutil.rmtree(part)
    except OSError as error:
        log.warning("cannot delete %s: %s", folder, error)


def recover(parent: Path, names: str) -> None:
    """Clear up after ``replaced`` and ``remove`` were killed: ``NAME.old`` takes its name, unless another folder has
    it; ``NAME.part`` is deleted.

    Args:
        parent: the folder that holds them.
        names: a pattern of names.
    """
    for old in parent.glob(f"{names}.old"):
        target = old.with_suffix("")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for part in parent.glob(f"{names}.part"):
        shutil.rmtree(part, ignore_errors=True)


def is_of_disk(error: Exception) -> bool:
    """Whether an error means that files cannot be written now. Of a full disk, safetensors raises an error of its own,
    and tokenizers a bare ``Exception``. Writing also needs memory."""
    return isinstance(error, OSError | SafetensorError) or type(error) is Exception or out_of_memory(error)


def _records(folder: Path, names: Iterable[str], *, sync: bool = False) -> list[FileRecord]:
    """The records of files, several at a time; with ``sync``, also bring them to the disk."""

    def record(name: str) -> FileRecord:
        if sync:
            sync_path(folder / name)
        with (folder / name).open("rb") as file:
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    with Threads() as threads:
        return list(threads.map(record, names))


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk. Some network file systems cannot do the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
