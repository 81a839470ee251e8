"""Names of the installed TRL that the face knows."""

import ast
from importlib.util import find_spec
from pathlib import Path

from transformers import Trainer

from cohort.trl.trainer import PRIVATE


def test_every_private_method_of_trl_is_known():
    trainers = Path(find_spec("trl").origin).parent / "trainer"  # importing TRL takes seconds
    classes = [
        node
        for name in ("grpo_trainer", "base_trainer")
        for node in ast.parse((trainers / f"{name}.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in ("GRPOTrainer", "_BaseTrainer")
    ]
    theirs = {node.name for one in classes for node in one.body if isinstance(node, ast.FunctionDef)}
    assert len(theirs) > 20
    assert theirs - {*dir(Trainer), "__init__"} <= PRIVATE
