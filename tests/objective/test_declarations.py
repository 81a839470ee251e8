"""Every declared rule has its function, every function its declaration, and the page about objectives names both."""

import re
from pathlib import Path

import torch

from cohort.objective import token_weights
from cohort.objective.advantages import centred_rewards, group_statistics
from cohort.objective.ratio import leveled_log_ratio
from cohort.objective.trust import apply
from cohort.presets import Objective
from cohort.presets.base import Part, kinds
from cohort.presets.words import WORDS

PAGE = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")


def test_declared_rules_and_registered_functions_are_the_same():
    declared = set(kinds(Objective.model_fields["trust_region"].annotation).values())
    assert set(apply.registry) - {object} == declared


def subclasses(kind):
    return {kind} | {each for inner in kind.__subclasses__() for each in subclasses(inner)}


def test_every_declaration_can_be_chosen():
    # A class that was left out of its union has no setting that reaches it.
    reachable = {kind for field in Objective.model_fields.values() for kind in kinds(field.annotation).values()}
    assert {kind for kind in subclasses(Part) if "rule" in kind.__annotations__ and kind is not Part} == reachable


def test_every_word_has_its_mathematics():
    sequence_N, ones_S = torch.tensor([0, 0, 1]), torch.ones(2, dtype=torch.float64)
    statistics = group_statistics(ones_S, torch.zeros(2, dtype=torch.long))
    for word in WORDS["baseline"]:
        assert centred_rewards(word, ones_S, statistics, torch.tensor([2, 1])).shape == (2,)
    for word in WORDS["ratio_level"]:
        assert leveled_log_ratio(torch.zeros(3), word, sequence_N).shape == (3,)
    for word in WORDS["aggregation"]:
        assert token_weights(sequence_N, 2, aggregation=word, group_S=torch.tensor([0, 0]), length=2).shape == (3,)


def test_the_page_names_every_rule_and_word_and_the_numbers_of_a_trust_region():
    for name, field in Objective.model_fields.items():
        declared = {*kinds(field.annotation), *WORDS.get(name, ())} - {"custom", "kl"}
        assert not [rule for rule in declared if f"`{rule}`" not in PAGE and f'"{rule}"' not in PAGE], name
    for rule, kind in kinds(Objective.model_fields["trust_region"].annotation).items():
        numbers = {number for number in kind.__annotations__ if number in kind.model_fields} - {"rule", "function"}
        rows = [set(re.findall(r"`(\w+)`", line)) for line in PAGE.splitlines() if line.startswith(f"| `{rule}` |")]
        assert rule == "custom" or any(numbers <= row for row in rows), rule
