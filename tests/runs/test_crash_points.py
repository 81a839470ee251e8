"""A crash between any two operations on files leaves a whole checkpoint: also when the power fails, and what was not
brought to the disk is lost."""

import json
import os
import shutil

import pytest
from safetensors.numpy import save

from cohort.config.schema import RunConfig
from cohort.parallel import World
from cohort.runs import checkpoints, durable
from cohort.runs.checkpoints import LOOP, NEEDED, OPTIMIZER
from cohort.runs.folder import RunFolder

STATE = dict.fromkeys(NEEDED)
"""What a checkpoint says beside its step."""
OPERATIONS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class States:
    """Copies of a folder before each operation: as a process that dies leaves it, and as a power cut may. For the
    latter, the content of files is lost that were not brought to the disk; names are not, which file systems bring
    there in their order."""

    def __init__(self, folder, copies, monkeypatch):
        self.folder, self.copies, self.safe = folder, copies, {}
        self.names = []
        self.copying = False
        for path in self.files():
            self.safe[path.stat().st_ino] = path.stat().st_mtime_ns
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self.watched(name, getattr(os, name)))

    def files(self):
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def watched(self, name, real):
        def operation(*arguments, **settings):
            if self.copying:
                return real(*arguments, **settings)
            self.keep()
            result = real(*arguments, **settings)
            if name == "fsync":
                status = os.fstat(arguments[0])
                self.safe[status.st_ino] = status.st_mtime_ns
            return result

        return operation

    def keep(self):
        """Copy the folder."""
        number, self.copying = len(self.names), True
        self.names.append(number)
        lost = [path.relative_to(self.folder) for path in self.files() if not self.is_safe(path)]
        for kind in ("killed", "unplugged"):
            shutil.copytree(self.folder, self.copies / kind / str(number))
        for path in lost:
            (self.copies / "unplugged" / str(number) / path).write_bytes(b"")
        self.copying = False

    def is_safe(self, path):
        return self.safe.get(path.stat().st_ino) == path.stat().st_mtime_ns


class Written:
    """A small content."""

    def __init__(self, loop):
        self.loop, self.step = loop, loop["step"]


def write_small(folder, content, *, write):
    """As ``write_content``: a file that a library writes, and the state of a run in files of ours."""
    (folder / "config.json").write_text("{}")
    (folder / OPTIMIZER).parent.mkdir(exist_ok=True)
    files = {OPTIMIZER: save({}), LOOP: json.dumps(STATE | content.loop).encode()}
    durable.write_manifest(folder, {name: durable.write_file(folder / name, [data]) for name, data in files.items()})


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_a_crash_between_any_two_operations(tmp_path, monkeypatch, again):
    monkeypatch.setattr(checkpoints, "write_content", write_small)
    folder = RunFolder(tmp_path / "run", RunConfig(save_total_limit=1))
    old, new = {"step": 1, "written": 1}, {"step": 1 if again else 2, "written": 2}
    for target in (folder.checkpoint(1), folder.best):
        folder._replace(target, Written(old), World())
    with monkeypatch.context() as patch:
        states = States(folder.path, tmp_path / "copies", patch)
        folder._write_checkpoint(Written(new), World())
        folder._replace(folder.best, Written(new), World())
        states.keep()
    assert len(states.names) > 20
    for kind in ("killed", "unplugged"):
        found = [written(tmp_path / "copies" / kind / str(name)) for name in states.names]
        for which in zip(*found, strict=True):  # the old one is whole until the new one is
            assert list(which) == sorted(which)
            assert set(which) == {1, 2}


def written(path):
    """Which checkpoint and which best model a run would go on from, both whole: 1, the old one, or 2."""
    folder = RunFolder(path)
    durable.recover(path / "checkpoints", "step-*")
    durable.recover(path, "best")
    checkpoint = folder.checkpoint(folder._newest_whole())
    durable.check_whole(folder.best)
    assert [one.name for one in (*path.iterdir(), *(path / "checkpoints").iterdir()) if one.suffix] == []
    return [json.loads((one / LOOP).read_text())["written"] for one in (checkpoint, folder.best)]
