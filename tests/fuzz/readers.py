"""What the fuzzing reads: for each reader, changed and torn input, and the check that the answer is a
value or one of Cohort's errors.

A change replaces, removes or adds a node in a valid document; a tear cuts, repeats or overwrites bytes of its text.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import tomli_w
from safetensors.numpy import load, save

from cohort.config import GRPOConfig, apply_overrides, hide_secrets, load_config, to_toml
from cohort.data.source import read_file
from cohort.errors import CohortError
from cohort.evaluation.command import Request
from cohort.generate.request import Request as Generation
from cohort.policy import context_length, end_token_ids, load_tokenizer
from cohort.policy import read_config as model_config
from cohort.report.rollouts import StoredStep
from cohort.rewards.names import split_spec
from cohort.runs.checkpoints import load_checkpoint, random_state, saved_identity, set_random_state
from cohort.runs.chosen import model_of
from cohort.runs.durable import check_whole, write_manifest
from cohort.runs.folder import RunFolder
from cohort.runs.journal import DIGEST, TREE, StoredRollout, digest, encode_rollout, load_rollout
from cohort.runs.reading import damage_named, read_best
from cohort.runs.starts import last_start
from cohort.runs.tables import with_facts, write_table
from cohort.runs.verify import verify
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Turn
from tests.conftest import DEMO_MODEL
from tests.faults.compare import changed_facts, changed_settings, differences, read_whole
from tests.fuzz import inputs as st
from tests.train.harness import make_trainer

NUMBERS = [0, -1, 1, 2, 10**9, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e-320, 1e308, math.inf, math.nan]
TEXTS = [
    "",
    " ",
    "none",
    "1",
    "a",
    "..",
    "/",
    "~",
    "\0",
    "\ud800",
    "é",
    "{}",
    "{",
    "[1]",
    "$",
    "dict",
    "x" * 5000,
    ":",
    "a:b",
    "*",
]
ODD = st.sampled_from(
    [*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [None], {"": 0}, {"rule": 1}, {"$": "dict", "of": 3}]
)
TREES = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
BYTES = [b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b'"', b"{", b"}", b"[", b",", b":", b"null", b"NaN", b"-1", b"1e999",
         b"9" * 5000, b"[" * 4_000, b'{"a":' * 2_000, b"\\ud800", b"[[x]]\n", b"a.b.c = 1\n", b"\xef\xbb\xbf", b"true"]  # fmt: skip


def places(tree: Any, at: tuple = ()) -> list[tuple]:
    """The paths of all nodes of a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


def replaced(tree: Any, place: tuple, how: str, value: Any) -> Any:
    """A copy of a tree with the node at a place replaced or removed, or with a node more beside it."""
    if not place:
        return value
    tree = deepcopy(tree)
    node = tree
    for key in place[:-1]:
        node = node[key]
    if how == "remove":
        del node[place[-1]]
    elif how == "replace":
        node[place[-1]] = value
    elif isinstance(node, list):
        node.insert(place[-1], value)
    else:
        node[str(value)[:20]] = value
    return tree


def changed(*trees: Any) -> st.SearchStrategy[Any]:
    """A tree with a node changed."""
    every = [(tree, place) for tree in trees for place in places(tree)]
    how = st.sampled_from(["replace", "replace", "remove", "add"])
    return st.tuples(st.sampled_from(every), how, TREES).map(lambda one: replaced(*one[0], *one[1:]))


def torn(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """The text of a document with up to three edits."""
    edit = st.tuples(st.floats(0, 1), st.integers(0, 40), st.sampled_from(BYTES))

    def tear(one: tuple[bytes, list]) -> bytes:
        data, edits = one
        for share, removed, added in edits:
            at = int(share * len(data))
            data = data[:at] + added + data[at + removed :]
        return data

    return st.tuples(st.sampled_from(seeds), st.lists(edit, min_size=1, max_size=3)).map(tear)


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def as_toml(tree: Any) -> bytes:
    """TOML of a tree; nodes that TOML cannot hold become text."""
    try:
        return tomli_w.dumps(_toml(tree) if isinstance(tree, dict) else {"section": _toml(tree)}).encode(
            "utf-8", "surrogatepass"
        )
    except (ValueError, TypeError):
        return repr(tree).encode("utf-8", "surrogatepass")


def _toml(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _toml(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_toml(item) for item in tree]
    return "null" if tree is None else tree


CONFIG = json.loads(
    json.dumps(
        GRPOConfig(
            model={"path": "model", "lora": {"rank": 4}},
            data={
                "train": [{"path": "a.jsonl", "weight": 2.0, "filter": {"level": ["hard"], "n": {"min": 1.0}}}],
                "eval": {"x": "a.jsonl", "y": [{"path": "b.jsonl"}]},
                "columns": {"new": "old"},
                "select": "0:10:2",
            },
            environment={"factory": {"a": "world.py:World"}},
            reward={"functions": ["math", "mine.py:f(a=1)"], "weights": [1.0, 0.5]},
            objective={"trust_region": {"rule": "ppo_clip", "low": 0.8, "high": 1.3}},
            eval={"metric_for_best_model": "eval/x/reward/mean", "pass_at_k": [1]},
            run={"output_dir": "runs/a", "max_steps": 3},
        ).model_dump(exclude_none=True)
    )
)
PARTS = [
    {
        "trust_region": {"rule": "ppo_clip", "low": 0.8, "high": 1.28},
        "scale": {"rule": "group_std", "ddof": 1, "epsilon": 1e-6},
    },
    {
        "mismatch": [{"rule": "weight", "level": "token", "mode": "truncate", "high": 2.0}],
        "kl": {"direction": "reverse"},
    },
    {
        "preset": "dapo@1",
        "entropy": {"rule": "entropy", "coefficient": 0.001},
        "baseline": "leave_one_out",
        "beta": 0.04,
    },
    {
        "group_filter": {"rule": "top_k", "k": 2, "metric": "shortest"},
        "epsilon": 0.2,
        "epsilon_high": 0.3,
        "scale": "none",
    },
    {"soft_overlong": {"rule": "soft_overlong", "cache_share": 0.2}, "trust_region": {"rule": "cap", "high": 5.0}},
]
ROWS = [
    {"prompt": "1+1", "answer": 2, "tests": [{"a": None}]},
    {"prompt": [{"role": "user", "content": "é"}], "answer": 2.5},
]
METRICS = [{"step": 0, "time": 1.5, "eval/reward/mean": 0.5}, {"step": 1, "loss": None}, {"step": 2, "loss": 0.1}]
BEST = {"step": 2, "metric": "eval/reward/mean", "value": 0.5, "measured": {"prompts": "ab", "metric": "m"}}


@dataclass(frozen=True)
class Reader:
    """A reader with its input."""

    inputs: st.SearchStrategy[Any]
    read: Callable[[Path, Any], Any]
    prepare: Callable[[Path], Any] = lambda folder: None


def read_config(folder: Path, data: bytes) -> None:
    (folder / "c.toml").write_bytes(data)
    config = load_config(folder / "c.toml")
    assert to_toml(load_config_text(folder, to_toml(config))) == to_toml(config)


def load_config_text(folder: Path, text: str) -> GRPOConfig:
    (folder / "again.toml").write_text(text, encoding="utf-8")
    return load_config(folder / "again.toml", of_run=True)


def read_overrides(folder: Path, given: tuple[str, str]) -> None:
    apply_overrides({}, [f"--{given[0]}", given[1]])


def read_rows(folder: Path, given: tuple[str, bytes]) -> None:
    path = folder / f"rows{given[0]}"
    path.write_bytes(given[1])
    read_file(path)


def read_manifest(folder: Path, data: bytes) -> None:
    (folder / "step-1" / "manifest.json").write_bytes(data)
    check_whole(folder / "step-1")


def prepare_manifest(folder: Path) -> None:
    (folder / "step-1" / "state").mkdir(parents=True)
    for name in ("a.bin", "state/loop.json"):
        (folder / "step-1" / name).write_bytes(name.encode())
    write_manifest(folder / "step-1")


def _record(text: str) -> dict[str, Any]:
    return {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


MANIFEST = {"format": 1, "files": {name: _record(name) for name in ("a.bin", "state/loop.json")}}


def read_metrics(folder: Path, data: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    run = RunFolder(folder)
    run.evaluations()
    run.drop_metrics_after(1)


def read_best_json(folder: Path, data: bytes) -> None:
    (folder / "best.json").write_bytes(data)
    note = read_best(folder / "best.json")
    assert f"{note['step']} {note['metric']} {note['value']:.4g}"


def read_stored(folder: Path, data: bytes) -> None:
    (folder / "torn").write_bytes(data)
    load_rollout(folder / "torn")


def some_rollout() -> StoredRollout:
    prompt = Prompt(0, 3, (1, 2), "1+1", [{"role": "user", "content": "1+1"}], {"answer": 2, 3: (1, b"x")}, "", "a", {})
    segment = Segment(np.array([4, 5, 6]), np.array([True, False, True]))
    episode = Episode(
        (Turn(2, FinishReason.EOS, ({"role": "tool"},), reward=1.0, seconds=0.5),), 1.0, {"s": math.inf}, ""
    )
    completion = Completion((segment,), np.array([-0.5, -1.0]), FinishReason.EOS, "2\ud800", 3, episode=episode)
    return StoredRollout([Group(prompt, (completion,))], None, {"a": np.arange(3), "b": complex(1, 2)})


def as_journal(tree: Any) -> bytes:
    """A file with another tree, whose digest is right."""
    numbers = load(encode_rollout(some_rollout())) | {TREE: np.frombuffer(as_json(tree), np.uint8)}
    content: bytes = save(numbers, {DIGEST: digest(numbers)})
    return content


def journal_tree() -> Any:
    return json.loads(load(encode_rollout(some_rollout()))[TREE].tobytes())


STORED = {
    "facts": {"step": 3, "updates": [{"minibatch": 0}]},
    "columns": {
        "group": [0, 0],
        "completion": ["a", "b"],
        "token_ids": [[1, 2], [3]],
        "drawn": [[True, False], [True]],
        "segment_lengths": [[1, 1], [1]],
        "logps": [[-0.5], None],
        "no_gradient": [[None], ["masked"]],
        "support/token_ids": [[4, 5], []],
        "support/counts": [[2], [0]],
        "extra/x": ["a", None],
    },
}


def as_parquet(tree: Any) -> bytes:
    """A file of the store with these columns and facts; empty for what no table can hold."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_table(with_facts(tree["columns"], tree["facts"]), Path(folder) / "step-1.parquet")
            return (Path(folder) / "step-1.parquet").read_bytes()
    except (pyarrow.ArrowException, ValueError, TypeError, LookupError, OverflowError, AttributeError):
        return b""


def read_store(folder: Path, data: bytes) -> None:
    (folder / "step-1.parquet").write_bytes(data)
    step = StoredStep.read(folder / "step-1.parquet")
    assert step.step is None or step.step >= 0
    for name in step.names:
        assert len(step.values(name)) == step.num_rows
    for name in ("token_ids", "logps", "support/counts"):
        assert len(step.arrays(name)) == step.num_rows


def read_parts(folder: Path, given: Any) -> None:
    if isinstance(given, dict):
        config = GRPOConfig(objective=given)
        assert str(config.resolved_objective.settings())


def read_text(folder: Path, text: str) -> None:
    hidden = hide_secrets(text)
    assert hide_secrets(hidden) == hidden
    split_spec(text)


def _readers() -> dict[str, Reader]:
    toml = [as_toml(CONFIG)]
    rows = [as_json(row) for row in ROWS]
    lines = b"\n".join(rows) + b"\n"
    columns = {"prompt": ["a", "b"], "answer": [1, 2]}
    files = {
        ".jsonl": changed(*ROWS).map(as_json).map(lambda row: row + b"\n" + rows[0]) | torn(lines),
        ".json": changed(ROWS, columns, {"data": ROWS}).map(as_json) | torn(as_json(ROWS), as_json(columns)),
        ".csv": torn(b'prompt,answer\n"1+1",2\n2+2,"4\n4"\n'),
        ".jsonl.gz": torn(lines),
        ".parquet": torn(b"PAR1" + lines + b"PAR1"),
    }
    metrics = b"".join(as_json(one) + b"\n" for one in METRICS)
    settings = sorted(".".join(place) for place in map(_strings, places(GRPOConfig().model_dump())) if place)
    words = st.sampled_from([*TEXTS, *map(str, NUMBERS), "[1, 2", "{ a = 1 }", "{ a.b = [", "true"]) | st.text(
        max_size=9
    )
    spec = st.sampled_from(
        ["f.py:g(a=1, b='x')", "mcp:server --api-key 'x'", "https://a:b@c/d?token=e", "math(x=[(1, 2)])", "f("]
    )
    return {
        "config": Reader(changed(CONFIG).map(as_toml) | torn(*toml), read_config),
        "overrides": Reader(st.tuples(st.sampled_from(settings) | st.text(max_size=9), words), read_overrides),
        "rows": Reader(st.one_of(*(st.tuples(st.just(kind), data) for kind, data in files.items())), read_rows),
        "manifest": Reader(changed(MANIFEST).map(as_json) | torn(as_json(MANIFEST)), read_manifest, prepare_manifest),
        "metrics": Reader(
            changed(METRICS).map(
                lambda tree: b"".join(as_json(one) + b"\n" for one in (tree if isinstance(tree, list) else [tree]))
            )
            | torn(metrics),
            read_metrics,
        ),
        "best": Reader(changed(BEST).map(as_json) | torn(as_json(BEST)), read_best_json),
        "rollout": Reader(changed(journal_tree()).map(as_journal) | torn(encode_rollout(some_rollout())), read_stored),
        "store": Reader(changed(STORED).map(as_parquet) | torn(as_parquet(STORED)), read_store),
        "objective": Reader(changed(*PARTS), read_parts),
        "text": Reader(st.text(max_size=40) | torn_text(spec), read_text),
    }


def _strings(place: tuple) -> tuple[str, ...]:
    return tuple(map(str, place))


def torn_text(seeds: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    inserted = st.sampled_from([*TEXTS, "'", '"', ")", "(", ",", "=", "api_key=", "Bearer ", "://", "@"])
    return st.tuples(seeds, st.integers(0, 30), st.integers(0, 5), inserted).map(
        lambda one: one[0][: one[1]] + one[3] + one[0][one[1] + one[2] :]
    )


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def prepare_model(folder: Path) -> None:
    for name in MODEL_FILES:
        shutil.copy(DEMO_MODEL / name, folder)


def read_model(folder: Path, given: tuple[str, bytes]) -> None:
    name, data = given
    try:
        (folder / name).write_bytes(data)
        config = model_config(str(folder))
        tokenizer = load_tokenizer(str(folder))
        tokenizer.decode([1])
        assert all(isinstance(end, int) for end in end_token_ids(str(folder), tokenizer))
        assert context_length(config) is None or context_length(config) > 0
    finally:
        shutil.copy(DEMO_MODEL / name, folder)


def _model_files() -> st.SearchStrategy[Any]:
    files = {name: (DEMO_MODEL / name).read_bytes() for name in MODEL_FILES}
    return st.one_of(
        *(st.tuples(st.just(name), changed(json.loads(data)).map(as_json) | torn(data)) for name, data in files.items())
    )


@cache
def some_run() -> tuple[Any, Path]:
    """The parts and the first state of a run of one step, and its checkpoint."""
    folder, settings = Path(tempfile.mkdtemp()), {"max_steps": 1, "metric_for_best_model": "eval/reward/mean"}
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    trainer = make_trainer(
        tokenizer, folder / "run", eval_rows=[{"prompt": "1+1"}], max_completion_length=2, **settings
    )
    trainer.train()
    return (trainer.make_parts(), trainer._first_state()), folder / "run" / "checkpoints" / "step-1"


def read_state(folder: Path, data: bytes) -> None:
    (parts, state), checkpoint = some_run()
    whole, before = (checkpoint / "state" / "loop.json").read_bytes(), random_state()
    try:
        (checkpoint / "state" / "loop.json").write_bytes(data)
        assert isinstance(saved_identity(checkpoint), dict)
        with damage_named(checkpoint):  # as train.boundary does
            saved = load_checkpoint(checkpoint, parts.models)
            parts.optimizer.load_state_dict(saved.optimizer)
            state.restored(saved.loop, None)
    finally:
        (checkpoint / "state" / "loop.json").write_bytes(whole)
        set_random_state(before)


def _states() -> st.SearchStrategy[bytes]:
    def changes() -> st.SearchStrategy[Any]:
        real = json.loads((some_run()[1] / "state" / "loop.json").read_bytes())
        generators = {"random": real.pop("random")}  # thousands of numbers, of which a few are changed
        few = {"random": [{**generators["random"][0], "torch": "00", "numpy": ["MT19937", [1, 2], 0, 0, 0.0]}]}
        others = changed(real).map(lambda tree: {**generators, **tree} if isinstance(tree, dict) else tree)
        return others | changed(few).map(lambda tree: {**real, **tree} if isinstance(tree, dict) else tree)

    return st.deferred(changes).map(as_json) | torn(as_json({"step": 1, "identity": {"threads": "1"}}))


FILES = ("config.toml", "starts.jsonl", "summary.json", "metrics.jsonl", "run.lock", "rollouts/step-1.parquet",
         "best/best.json", "best/manifest.json", "best/config.json", "checkpoints/step-1/manifest.json",
         "checkpoints/step-1/model.safetensors", "checkpoints/step-1/state/loop.json")  # fmt: skip


def read_folder(folder: Path, given: tuple[str, bytes]) -> None:
    """Every command that reads a run folder; what a stranger's folder names may run."""
    name, data = given
    run, source = folder / "run", some_run()[1].parents[1]
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run)
    (run / name).write_bytes(data)
    answers = []
    for read_it in (
        lambda: list(verify(run)),
        lambda: list(differences(read_whole(run), read_whole(source))),
        lambda: changed_settings(read_whole(run), read_whole(source)),
        lambda: changed_facts(read_whole(run), read_whole(source)),
        lambda: Request(str(run), trust=str(run), data=("rows.jsonl",), reward=("math",)).settings(),
        lambda: model_of(str(run)),
        lambda: Generation(model=str(run), trust=str(run)).settings,
        lambda: last_start(run),
        lambda: RunFolder(run).check_resumable(load_config(run / "config.toml", of_run=True)),
        lambda: RunFolder(run).evaluations(),
    ):
        with suppress(CohortError):
            answers.append(read_it())
    assert answers


def _folders() -> st.SearchStrategy[Any]:
    def files() -> st.SearchStrategy[Any]:
        run = some_run()[1].parents[1]
        every = [(name, (run / name).read_bytes()) for name in FILES if (run / name).exists()]
        return st.one_of(*(st.tuples(st.just(name), torn(data)) for name, data in every))

    return st.deferred(files)


READERS = _readers()
SLOW = {
    "folder": Reader(_folders(), read_folder),
    "model": Reader(_model_files(), read_model, prepare_model),
    "state": Reader(_states(), read_state),
}
"""Readers of about 20 ms."""


def read(reader: Reader, folder: Path, given: Any) -> str:
    """Read one input: "read", or the class of Cohort's error. Any other exception is what the fuzzing looks for."""
    try:
        reader.read(folder, given)
    except CohortError as error:
        return type(error).__name__ if str(error) else "an error without a message"
    return "read"
