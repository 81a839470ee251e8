"""Readers of files that anybody may have written: whatever is in them, the answer is a value or a clean error.

``python -m tests.fuzz 100000`` reads as many inputs with each reader.
"""

from random import Random

import pytest

from tests.fuzz.readers import READERS, SLOW, read


def fuzz(name, folder, cases):
    """Read so many inputs; returns how often each answer came."""
    reader, answers = (READERS | SLOW)[name], {}
    reader.prepare(folder)
    for number in range(cases):
        given = reader.inputs.draw(Random(f"{name} {number}"))
        try:
            answer = read(reader, folder, given)
        except BaseException as error:
            error.add_note(f"input {number} of the reader {name}: {given!r:.2000}")
            raise
        answers[answer] = answers.get(answer, 0) + 1
    return answers


@pytest.mark.parametrize("name", READERS)
def test_only_clean_errors(name, tmp_path):
    answers = fuzz(name, tmp_path, 230)  # about 2,000 in all
    assert "an error without a message" not in answers
    assert len(answers) > 1  # some inputs are read, others refused


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READERS, *SLOW])
def test_only_clean_errors_in_many_cases(name, tmp_path):
    fuzz(name, tmp_path, 2_000)
