"""Files and folders that survive a crash: on the disk, whole, before they have their name."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cohort.errors import DiskError, RunFolderError, out_of_memory
from cohort.lock import alone_in

# ----------------------------------------
# Single files: written to the disk, written atomically, JSON, a JSON object per line. Imports no torch.


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it is the old one or the complete new one. Writers of a folder wait for each other, and
    the next one of the file removes what a killed one has left."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(exist_ok=True)
    with alone_in(path.parent):
        part.unlink(missing_ok=True)
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            sync_path(part)
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
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            file.seek(0)
            end = file.read().rfind(b"\n") + 1
        rest = line.encode()
        try:
            file.truncate(end)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


log = logging.getLogger("cohort.runs")
MANIFEST, FORMAT = "manifest.json", 1


def write_manifest(folder: Path) -> None:
    """Write the sizes and hashes of a folder's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    records = {path.relative_to(folder).as_posix(): _record(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": records}, indent=1) + "\n")


def _record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_whole(folder: Path) -> None:
    """Compare the files of a folder with its manifest.

    Raises:
        RunFolderError: a file is missing or not as it was written.
    """
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
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
    with ThreadPoolExecutor() as threads:
        found = threads.map(_record, map(files.__getitem__, expected))
        for (name, record), now in zip(expected.items(), found, strict=True):
            if now != record:
                raise RunFolderError(f"{folder}: {name} is not what was written: its SHA-256 differs")
    if added := [name for name in files if ".safetensors" in name and name not in expected]:
        raise RunFolderError(f"{folder}: {added[0]} was not written with it")
    for name in (one for one in files if one.endswith(".safetensors")):
        try:
            with safe_open(files[name], "numpy"):  # reads the header, which says where each tensor is
                pass
        except (SafetensorError, OSError) as error:
            raise RunFolderError(f"{folder}: {name} cannot be read, though it is as it was written: {error}") from None


@contextmanager
def replaced(target: Path, *, manifest: bool = False) -> Iterator[Path]:
    """A new folder to write into, ``NAME.part``, which takes the target's name when the block ends and all of it is on
    the disk. An error in the block removes it. A target that exists is ``NAME.old`` until the new one has its name.

    Args:
        target: the folder.
        manifest: whether it has a manifest.

    Raises:
        DiskError: the folder cannot be written.
    """
    part, old = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.old")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        if manifest:
            write_manifest(part)
        for path in (*part.rglob("*"), part):
            sync_path(path)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        part.rename(target)
        sync_path(target.parent)
    except Exception as error:
        if is_of_disk(error):
            raise DiskError(f"cannot write {target}: {error}") from error
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
