"""Folders that are on the disk before they have their name, and manifests by which a broken one is known."""

import json
import os
import threading
from pathlib import Path

import pytest

from cohort.errors import RunFolderError
from cohort.runs.durable import MANIFEST, check_whole, recover, replaced, write_atomically


def whole_folder(path):
    with replaced(path, manifest=True) as part:
        (part / "state").mkdir()
        (part / "state" / "a.bin").write_bytes(b"onetwo")
        (part / "config.json").write_text("{}")
    return path


def test_a_folder_and_its_manifest(tmp_path):
    folder = whole_folder(tmp_path / "step-1")
    check_whole(folder)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    # sha256sum of "onetwo" and of "{}"
    assert files == {
        "config.json": {"bytes": 2, "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},
        "state/a.bin": {"bytes": 6, "sha256": "25b6746d5172ed6352966a013d93ac846e1110d5a25e8f183b5931f4688842a1"},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "step-1 lacks config.json"),
        (lambda folder: (folder / "config.json").write_text("{ }"), "config.json has 3 bytes; 2 were written"),
        (lambda folder: flip(folder / "state/a.bin"), "a.bin is not what was written: its SHA-256"),
        (lambda folder: (folder / "b.safetensors").write_text(""), "b.safetensors was not written with it"),
        (lambda folder: (folder / MANIFEST).unlink(), "step-1 has no manifest.json"),
        (lambda folder: (folder / MANIFEST).write_text("["), "manifest.json is damaged"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": 1, "files": [1]}'), "manifest.json is damaged"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": 2, "files": {}}'), "is of format 2, which this ver"),
    ],
)
def test_a_broken_folder_is_named(tmp_path, break_, message):
    folder = whole_folder(tmp_path / "step-1")
    break_(folder)
    with pytest.raises(RunFolderError, match=message):
        check_whole(folder)


def test_a_failure_leaves_the_old_folder_and_no_remains(tmp_path):
    folder = whole_folder(tmp_path / "best")

    def fail():
        with replaced(folder) as part:
            (part / "model.safetensors").write_bytes(b"half")
            raise OSError(28, os.strerror(28))

    with pytest.raises(RunFolderError, match=r"cannot write .*best: .*No space left"):
        fail()
    check_whole(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    with replaced(folder, manifest=True):
        pass
    assert [path.name for path in folder.iterdir()] == [MANIFEST]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Not a directory"), replaced(tmp_path / "file" / "step-1"):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "step-2.part").symlink_to(tmp_path / "other")
    with pytest.raises(RunFolderError, match="File exists"), replaced(tmp_path / "step-2"):
        pass
    assert not (tmp_path / "step-2").exists()


def test_two_writers_of_one_file_wait_for_each_other(tmp_path, monkeypatch):
    """As of two ``cohort report`` of one run."""
    report, failures, others, real = tmp_path / "report.html", [], [], os.fsync

    def second():
        try:
            write_atomically(report, "second")
        except OSError as error:
            failures.append(error)

    def sync(descriptor):
        real(descriptor)
        if not others:
            others.append(threading.Thread(target=second))
            others[0].start()
            others[0].join(0.1)  # it would have ended, and taken the first one's file with it

    monkeypatch.setattr(os, "fsync", sync)
    (tmp_path / "report.html.part").write_text("left by a killed process")
    write_atomically(report, "first")
    others[0].join()
    assert not failures
    assert report.read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_files_are_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    whole_folder(tmp_path / "step-1")
    part = str(tmp_path / "step-1.part")
    files = {f"{part}/{name}" for name in ("state/a.bin", "config.json", MANIFEST, "state")}
    assert set(synced[:4]) == files
    assert synced[4:] == [part, str(tmp_path)]


def test_folders_take_their_names_after_a_kill(tmp_path):
    for name in ("step-1.old", "step-2", "step-2.old", "step-3.part"):
        (tmp_path / name).mkdir()
    recover(tmp_path, "step-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
