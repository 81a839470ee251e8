"""A crash between any two operations on files leaves a whole checkpoint: also when the power fails, and what was not
brought to the disk is lost."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from cohort.config.schema import RunConfig
from cohort.runs import checkpoints, durable
from cohort.runs.checkpoints import LOOP, NEEDED, OPTIMIZER, WEIGHTS, Content
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


def content(step, number):
    """A small content."""
    models = SimpleNamespace(policy=None, tokenizer=None)
    loop = json.dumps(STATE | {"step": step, "written": number}).encode()
    return Content(models, {WEIGHTS: {}, OPTIMIZER: {}}, step, {LOOP: loop})


def write_small(policy, tokenizer, folder, weights):
    """As ``save_model``: a file that a library writes."""
    (folder / "config.json").write_text("{}")
    (folder / "state").mkdir()


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_a_crash_between_any_two_operations(tmp_path, monkeypatch, again):
    monkeypatch.setattr(checkpoints, "save_model", write_small)
    folder = RunFolder(tmp_path / "run", RunConfig(save_total_limit=1))
    for target in (folder.checkpoint(1), folder.best):
        folder._replace(target, content(1, 1))
    with monkeypatch.context() as patch:
        states, step = States(folder.path, tmp_path / "copies", patch), 1 if again else 2
        for target in (folder.checkpoint(step), folder.best):
            folder._replace(target, content(step, 2))
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
