"""The groups of a stored step on the display."""

import pytest
from rich.cells import cell_len

from cohort.errors import RunFolderError
from cohort.report.console.view import StoredGroups, group_lines, group_view, newest_file
from tests.report.console.made import write_step


def test_the_newest_step(tmp_path):
    assert newest_file(tmp_path) is None
    for step in (2, 10, 9):
        write_step(tmp_path, step)
    (tmp_path / "rollouts" / "step-11.part").touch()
    assert newest_file(tmp_path).name == "step-10.parquet"


def test_a_group_in_lines(tmp_path):
    write_step(tmp_path, 3)
    groups = StoredGroups(newest_file(tmp_path))
    first, second = groups.read(0), groups.read(1)
    assert (first.step, first.number, first.count) == (3, 1, 2)
    assert "\n".join(one.plain for one in group_lines(second, 40)) == (
        "prompt\n  | 3 + 3\n"
        " 1  reward 1.000  advantage +0.500  eos\n  | first line\n  | second line\n"
        " 2  reward none  advantage none  eos\n  | \\x1b[2Jclears"
    )


def test_a_group_is_shown_page_by_page(tmp_path):
    write_step(tmp_path, 3)
    group = StoredGroups(newest_file(tmp_path)).read(1)
    lines, last = group_view(group, 60, 5, top=100, keys="g back")
    assert last == 4  # of 7 lines, 3 are shown
    assert [one.plain for one in lines] == [
        "step 3, group 2 of 2  lines 5 to 7 of 7",
        "  | second line",
        " 2  reward none  advantage none  eos",
        "  | \\x1b[2Jclears",
        "g back",
    ]


@pytest.mark.parametrize("width", [10, 20, 40, 200])
def test_foreign_text_stays_within_the_width(tmp_path, width):
    texts = [
        "日本語" * 200,
        "x" * 30_000,
        "\x1b]0;title\x07\r\x00\u202e\ud83d\n\n\n".encode("utf-8", "replace").decode(),
        "",
    ]
    write_step(
        tmp_path, 1, completion=texts, finish_reason=["\n\x1b[2J" * 9] * 4, reward_error=[None, "E" * 99, None, None]
    )
    groups = StoredGroups(newest_file(tmp_path))
    for group in map(groups.read, range(len(groups))):
        lines = [one.plain for one in [*group_lines(group, width), *group_view(group, width, 9)[0]]]
        assert max(map(cell_len, lines)) <= width - 1
        assert not any(ord(character) < 32 for text in lines for character in text)
        assert len(lines) < 9_000


@pytest.mark.parametrize("write", [lambda path: path.write_bytes(b"PAR1 and so on"), lambda path: path.unlink()])
def test_damaged_files(tmp_path, write):
    write_step(tmp_path, 1)
    file = newest_file(tmp_path)
    groups = StoredGroups(file)
    write(file)
    for read in (lambda: groups.read(0), lambda: StoredGroups(file)):
        with pytest.raises(RunFolderError, match=r"cannot read .*step-1\.parquet"):
            read()
