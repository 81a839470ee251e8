"""When a finding begins, worsens and ceases; what is skipped; numbers of untrusted metrics."""

import json
import re
from pathlib import Path
from random import Random

import pytest

from cohort import GRPOConfig
from cohort.errors import ConfigError
from cohort.report import diagnosis
from cohort.report.diagnosis import Diagnosis, Finding, Level, health_line

SOURCE = Path(diagnosis.__file__).read_text()
KEYS = sorted(set(re.findall(r'"([a-z]+(?:/[a-z0-9_]+)?)"', SOURCE)))
"""Everything in quotes that could be a metric that a check reads."""
DEAD = {"updates": 1, "updates_skipped": 1, "reward/mean": 0.0, "groups/dead_share": 1.0, "groups/sampled": 32}
LIVE = {"updates": 1, "updates_skipped": 0, "reward/mean": 0.5, "groups/dead_share": 0.25, "groups/sampled": 32}


def fed(lines, settings=None):
    """The findings that are said at each step, from 1."""
    diagnosis = Diagnosis(settings)
    said = [diagnosis.step({"step": step, **line}) for step, line in enumerate(lines, 1)]
    return diagnosis, [(one.check, str(one.level), one.step, one.end) for findings in said for one in findings]


def test_a_finding_is_said_when_it_begins_worsens_and_ends():
    some = DEAD | {"groups/dead_share": 0.875, "updates_skipped": 0}
    some |= {"groups/dead_high_share": 0.0, "groups/dead_low_share": 0.875}
    diagnosis, said = fed([some] * 15 + [DEAD] * 10 + [LIVE] * 20)
    assert {one[0] for one in said} == {"all_wrong"}
    begun, worse, *_, ended = said
    assert (begun[1], worse[1]) == ("warning", "alarm")
    assert begun[3] is worse[3] is None
    assert begun[2] <= 15 < worse[2] <= 25 < ended[3]
    (finding,) = diagnosis.findings
    assert (finding.begin, finding.end) == (begun[2], ended[3])
    assert diagnosis.standing == []


def test_checks_are_left_out_by_name_and_thresholds_are_set():
    assert fed([DEAD] * 12, {"report": {"skip_checks": ["all_wrong"]}})[1] == []
    assert fed([LIVE] * 12, {"report": {"thresholds": {"dead_groups": 0.1}}})[1][0][0] == "dead_groups"
    assert fed([DEAD] * 12, GRPOConfig(report={"thresholds": {"dead_groups": 1.0}}).model_dump())[1] == []


def test_an_unknown_threshold_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"report\.thresholds\.dead_grups; did you mean report\.thresholds\.dead_groups"
    ):
        GRPOConfig(report={"thresholds": {"dead_grups": 0.5}})


def test_metrics_and_settings_of_any_kind_are_taken():
    """A run folder can be anybody's: values of other types, huge, missing, in any mixture."""
    odd = [None, "x", [], {}, True, float("nan"), float("inf"), 10**400, -1, 0, 1, 2.5, 1e300]
    keys = [*KEYS, "rewards/a/failed", "rewards/a/within_group_std", "rewards/b/within_group_std", "eval/reward/high"]
    keys += ["rewards/a/unscored_share", "eval/reward/mean", "eval/reward/low"]
    random = Random(0)
    for value in odd:
        settings = {
            "report": value,
            "rollout": {"num_generations": value, "prompts_per_step": value, "max_completion_length": value},
            "objective": {"preset": value, "scale": value},
        }
        diagnosis = Diagnosis(settings)
        for step in range(30):
            line = {key: random.choice(odd) for key in keys if random.random() < 0.9}
            diagnosis.step({"step": step, "updates": 1, **line})
            assert health_line(line, diagnosis.findings)
    assert Diagnosis({"objective": {"preset": "of another version"}}).step({"step": "1"}) == []


def test_what_comes_from_the_folder_cannot_write_to_the_terminal():
    name = "a\x1b[2J"
    line = {**LIVE, f"rewards/{name}/failed": 200, f"rewards/{name}/within_group_std": 0.0}
    (finding, *_) = fed([line] * 3)[0].findings
    assert finding.check == "failing_rewards"
    assert "\x1b" not in finding.show()


def test_what_a_finding_shows():
    finding = Finding("all_wrong", Level.ALARM, 12, "88% of groups", "ease the prompts", {"dead_share": 0.88}, 10)
    assert finding.show().splitlines()[0] == "  step 12   ALARM   all_wrong          88% of groups"
    assert finding.show().splitlines()[1].strip() == "-> ease the prompts"
    assert json.loads(json.dumps(finding.as_json()))["numbers"] == {"dead_share": 0.88}
