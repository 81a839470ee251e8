"""Readers of files that anybody may have written: whatever is in them, the answer is a value or a clean error.

``python -m tests.fuzz 100000`` reads as many inputs with each reader.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.readers import READERS, SLOW, read


def fuzz(name, folder, cases):
    """Read so many inputs; returns how often each answer came."""
    reader, answers = (READERS | SLOW)[name], {}
    reader.prepare(folder)

    @settings(max_examples=cases, database=None, derandomize=True, deadline=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(reader.inputs)
    def check(data):
        answer = read(reader, folder, data)
        answers[answer] = answers.get(answer, 0) + 1

    check()
    return answers


@pytest.mark.parametrize("name", READERS)
def test_only_clean_errors(name, tmp_path):
    answers = fuzz(name, tmp_path, 230)  # about 2,000 in all
    assert sum(answers.values()) > 100
    assert "an error without a message" not in answers
    assert len(answers) > 1 or name == "manifest"  # some inputs are read, others refused


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READERS, *SLOW])
def test_only_clean_errors_in_many_cases(name, tmp_path):
    fuzz(name, tmp_path, 2_000)
