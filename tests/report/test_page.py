"""The page of a run, without a browser: what is embedded, how it is escaped, and what bad folders give."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.errors import RunFolderError
from cohort.lock import Lock
from cohort.report.diagnosis import CHECKS, Finding, Level
from cohort.report.page import sections, write_report
from cohort.report.page.charts import charts_of
from cohort.report.page.microscope import choose_completions, choose_groups, choose_steps, pack, read_vocabulary
from cohort.report.page.page import CONTROL, script_json
from cohort.report.page.sections import run_state, settings_table, timing
from cohort.runs.reader import Run
from tests.report.made_runs import WORDS, completions, make_run, metrics, seeds

HOSTILE = "<script>alert(1)</script></script><!--\u2028\u202e\x1b[31m\x00\u0645\u0631\u062d\u0628\u0627 \ud800&amp;\"'{{ 7*7 }}"


class _Page(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self._script: dict[str, str | None] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._script = dict(attrs) if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
            self._script = None
        else:
            self.texts.append(data)


def unpack(block: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A block as the browser reads it."""
    raw = zlib.decompress(base64.b64decode(block))
    end = 4 + int.from_bytes(raw[:4], "little")
    header, arrays = json.loads(raw[4:end]), {}
    for name, kind, count in header["arrays"]:
        size = count * (1 if kind == "u1" else 4)
        part, end = np.frombuffer(raw[end : end + size], np.uint8), end + size
        arrays[name] = (
            part if kind == "u1" else np.ascontiguousarray(part.reshape(4, -1).T).view(f"<{kind}").reshape(-1)
        )
    assert end == len(raw)
    return header, arrays


def blocks_of(page: _Page) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    return [unpack(text) for attributes, text in page.scripts if str(attributes.get("id")).startswith("group-")]


def page_of(folder: Path) -> _Page:
    return _Page(write_report([folder]).read_text(encoding="utf-8"))


def data_of(page: _Page) -> dict[str, Any]:
    return next(json.loads(text) for attributes, text in page.scripts if attributes.get("id") == "data")


def test_numbers_and_tokens_of_a_run_are_in_its_page(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", steps=40, summary={"steps": 40}))
    data = data_of(page)
    assert data["run"]["x"]["step"] == list(range(1, 41))
    assert data["run"]["x"]["seconds"][:2] == [2, 4]  # cumulated
    assert data["run"]["values"]["reward/mean"][0] == pytest.approx(
        metrics(1)["reward/mean"], rel=1e-6
    )  # 7 digits kept
    assert "kl/k3" not in data["run"]["values"], "a metric without any number is no curve"
    assert data["microscope"]["steps"] == [{"step": 1, "why": "first"}, {"step": 40, "why": "last"}]
    assert data["microscope"]["completions"]["clipped"] == [1, 0, 0, 0] * 2
    assert data["microscope"]["completions"]["number"] == [1, 2, 3, 4] * 2
    (header, arrays), _ = blocks_of(page)
    first = header["completions"][0]
    assert (first["reward"], first["drawn"], first["finish"]) == (1.0, 7, "eos")
    assert arrays["ids"].tolist() == [one for ids in completions()["token_ids"] for one in ids]
    assert arrays["sampler_logps"][:7] == pytest.approx(
        [-0.01 * (at + 1) for at in range(7)], rel=2**-15
    )  # 16 bits kept
    assert header["causes"][arrays["no_gradient"][6]] == "clipped_high"


def test_a_hostile_run_writes_no_markup(tmp_path: Path) -> None:
    line = metrics(1) | {f"rewards/{HOSTILE[:-14]}": 1.0, "rewards/right": 0.5}
    columns = completions(texts=[HOSTILE] * 4, prompt=HOSTILE.replace("\ud800", ""))
    columns["completion"] = [text.replace("\ud800", "\ufffd") for text in columns["completion"]]
    columns["messages"] = [json.dumps([{"role": HOSTILE, "content": HOSTILE}]), "[", None, "[1]"]
    config = f'[model]\npath = {json.dumps(HOSTILE.replace(chr(0xD800), ""))}\n["<b>x</b>"]\nunknown = "</script>"\n'
    folder = make_run(tmp_path / "run", lines=[line], stored={1: columns}, config=config.replace("\\u007f", ""))
    (folder / "objective.txt").write_text(HOSTILE, encoding="utf-8", errors="replace")
    html = write_report([folder]).read_text(encoding="utf-8")
    page = _Page(html)
    plain = _Page(
        write_report([make_run(tmp_path / "plain", lines=[metrics(1)], stored={1: completions()})]).read_text()
    )
    assert {*page.tags} == {*plain.tags} | {"pre", "summary", "details"}
    assert len(page.scripts) == len(plain.scripts)
    assert not CONTROL.search(html.replace("\n", ""))
    assert "7*7" in html
    assert blocks_of(page)[0][0]["completions"][0]["text"] == HOSTILE.replace("\ud800", "\ufffd")


def test_data_for_scripts_cannot_end_its_element() -> None:
    text = str(script_json({"</script>": ["<!--", "&", "\u2028\u2029", "\ud800"]}))
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff]", text)
    assert json.loads(text) == {"</script>": ["<!--", "&", "\u2028\u2029", "?"]}


def test_a_policy_names_the_scripts_and_forbids_the_network(tmp_path: Path) -> None:
    html = write_report([make_run(tmp_path / "run")]).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert "default-src &#39;none&#39;" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r"(src|href)=\"(?!#)", html), "the page names no other file"


def test_state_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    assert run_state(Run.read(make_run(tmp_path / "ended", steps=3, summary={})))[0] == "complete"
    folder = make_run(tmp_path / "run", steps=3)
    run = Run.read(folder)
    again = f"cohort resume {folder} continues it"
    assert run_state(run) == ("stopped", f"stopped after step 3, before its end; {again}")
    with (folder / "run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run_state(run) == ("running", "in progress, after step 3")
    (folder / "run.lock").write_text("{}")
    assert run_state(run) == ("killed", f"killed after step 3; {again}")

    def refused(_: Lock) -> bool:
        raise PermissionError

    for check in (refused, lambda _: False):  # the latter: a file system without locks
        monkeypatch.setattr(Lock, "check", check)
        state, words = run_state(run)
        assert (state, "whether a process still trains it is unknown" in words) == ("unknown", True)


def test_a_huge_folder_makes_no_huge_page(tmp_path: Path) -> None:
    long = "y" * 100_000
    lines = [{"step": 1, f"eval/{long}/mean": 1.0, f"rewards/{long}": 1.0, "reward/mean": 0.5}]
    config = "[data]\n" + "".join(f"key{number} = 'x'\n" for number in range(2000)) + f"{long} = 1\n"
    folder = make_run(
        tmp_path / "run", lines=lines, stored={}, config=config, summary={f"{long}_before": 1, f"{long}_after": 2}
    )
    for name in ("objective.txt", "first_prompt.txt"):
        (folder / name).write_text("\x01" * 200_000)
    start = {"overrides": [long], "missing": {long: long}, "time": long, "facts": {"versions": f"{long}={long}"}}
    (folder / "starts.jsonl").write_text(f"{json.dumps(start)}\n" * 2)
    assert write_report([folder]).stat().st_size < 1_600_000


def test_sizes_stay_in_the_folder_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=3, stored={})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_bytes(b"x" * 2_000_000)
    (folder / "best").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (folder / "checkpoints" / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert timing(Run.read(folder))["sizes"] == [("checkpoints", "0.0 MB")]
    monkeypatch.setattr(sections, "MAX_ENTRIES", 1)
    (folder / "evaluations").mkdir()
    for name in "ab":
        (folder / "evaluations" / name).write_bytes(b"x" * 100_000)
    assert ("evaluations", "more than 0.1 MB") in timing(Run.read(folder))["sizes"]


def test_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    rows = {name: rest for name, *rest in settings_table(Run.read(make_run(tmp_path / "run")))}
    assert rows["rollout.temperature"] == ["0.7", "1.0"]
    assert rows["model.path"] == ["tiny", '""']
    assert rows["run.output_dir"] == ["somewhere", ""]


def test_a_folder_that_holds_almost_nothing_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        write_report([tmp_path])
    (tmp_path / "config.toml").write_text("[model\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rewa')
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-1.parquet").write_bytes(b"PAR1 no table")
    page = page_of(tmp_path)
    text = " ".join(page.texts)
    assert "config.toml cannot be read" in text
    assert "rollouts/step-1.parquet: " in text
    assert data_of(page)["run"]["values"] == {"reward/mean": [0.5]}


def test_an_older_table_without_columns_of_tokens_is_shown(tmp_path: Path) -> None:
    old = {"group": [0, 0], "completion": ["a", "b"], "token_ids": [[2, 3], [4]], "reward": [1.0, None]}
    ((header, arrays),) = blocks_of(page_of(make_run(tmp_path / "run", stored={4: old}, tokenizer=False)))
    assert [one["text"] for one in header["completions"]] == ["a", "b"]
    assert [one["advantage"] for one in header["completions"]] == [None, None]
    assert list(arrays) == ["ids"]
    assert header["completions"][1]["reward"] is None
    assert header["vocabulary"] is None


def test_a_completion_of_100_000_tokens_keeps_its_ends(tmp_path: Path) -> None:
    count = 100_000
    long = completions(texts=["x" * 500_000], token_ids=[[2] * (count - 1) + [0]])
    folder = make_run(tmp_path / "run", stored={1: long})
    ((header, arrays),) = blocks_of(page_of(folder))
    (completion,) = header["completions"]
    assert (completion["tokens"], completion["gap"]) == (count, [16_000, 80_000])
    assert len(arrays["ids"]) == len(arrays["ratio"]) == 20_000
    assert arrays["ids"][-1] == 0
    assert completion["text"][99_990:].startswith("x" * 10 + "\n[300,000 characters left out of this page]\nx")
    assert (folder / "report.html").stat().st_size < 2_000_000


def test_tokens_given_to_the_policy_have_no_numbers(tmp_path: Path) -> None:
    columns = completions(texts=["a"], token_ids=[[2, 3, 0]]) | {
        "token_ids": [[2, 1, 1, 3, 0]],
        "drawn": [[True, False, False, True, True]],
    }
    columns["messages"] = [
        json.dumps(
            [{"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "4"}]
        )
    ]
    columns["turn_lengths"] = [[1, 2]]
    ((header, arrays),) = blocks_of(page_of(make_run(tmp_path / "run", stored={1: columns})))
    (completion,) = header["completions"]
    assert arrays["drawn"].tolist() == [1, 0, 0, 1, 1]
    assert len(arrays["ratio"]) == 3
    answer, drawn = "answer, not drawn by the policy", "drawn by the policy"
    assert completion["turns"] == [[0, f"turn 1, {drawn}"], [1, answer], [3, f"turn 2, {drawn}"]]
    assert completion["messages"][0]["calls"] == ['{"name": "f"}']


def test_a_damaged_step_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    columns = completions()
    columns["ratio"] = [[1.0]] * 4
    page = page_of(make_run(tmp_path / "run", stored={1: columns, 2: completions()}))
    assert len(blocks_of(page)) == 1
    assert "cannot read" in " ".join(page.texts)


def test_the_output_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    target = tmp_path / "page.html"
    assert write_report([folder], target) == target
    write_report([folder], target)
    (tmp_path / "thesis.html").write_text("mine")
    with pytest.raises(RunFolderError, match="was not written by cohort report"):
        write_report([folder], tmp_path / "thesis.html")
    (folder / "report.html").symlink_to(tmp_path / "thesis.html")
    with pytest.raises(RunFolderError, match="symbolic link"):
        write_report([folder])
    with pytest.raises(RunFolderError, match="is a folder"):
        write_report([folder], tmp_path)
    assert (tmp_path / "thesis.html").read_text() == "mine"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cohort.cli import main

    folder = make_run(tmp_path / "run", steps=2)
    assert main(["report", str(folder), "--output", str(tmp_path / "mine.html")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'mine.html'} (0.")
    assert (main(["report"]), main(["report", str(tmp_path / "none")])) == (2, 2)
    assert "does not exist" in capsys.readouterr().err


def test_pieces_of_a_vocabulary() -> None:
    added, vocab = [{"id": 0, "content": "<|end|>", "special": True}], {word: n for n, word in enumerate(WORDS)}
    tokenizer = {"added_tokens": added, "decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}}
    pieces = read_vocabulary(tokenizer).of([0, 2, 7, 8, 9, 10, 99])
    assert pieces["pieces"][:3] == ["<|end|>", " the", "\n"]
    assert bytes(byte for piece in pieces["pieces"][3:] for byte in piece).decode() == "😀"
    assert (pieces["ids"], pieces["special"]) == ([0, 2, 7, 8, 9, 10], [0])
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    vocabulary = read_vocabulary({"decoder": decoder, "model": {"vocab": [["▁a", 0.0], ["<0xE2>", 0.0], ["b", -1.0]]}})
    assert vocabulary.of([0, 1, 2])["pieces"] == [" a", [0xE2], "b"]


def test_steps_are_chosen_for_reasons(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=200, stored={})
    for step in range(2, 201, 2):
        (folder / "rollouts" / f"step-{step}.parquet").touch()
    chosen = choose_steps(Run.read(folder), {50: "finding: entropy", 51: "not stored"}, limit=20)
    assert list(chosen.items())[:3] == [(200, "last"), (2, "first"), (50, "finding: entropy")]
    assert len(chosen) == 20
    words = list(chosen.values())
    assert words[3:5] == ["highest reward", "lowest reward"]
    assert words.count("evenly spaced") >= 14
    few = choose_steps(Run.read(folder), {}, limit=200)
    assert list(few.values()).count("in order") == 100 - 5


def test_groups_are_chosen_for_reasons() -> None:
    rewards, groups = [1, 1, 0, 0, 0, 1, None, None], [1, 1, 2, 2, 3, 3, 4, 4]
    rows = [{"group": g, "reward": r, "finish_reason": "eos"} for g, r in zip(groups, rewards, strict=True)]
    rows[-1]["finish_reason"] = "length"
    assert list(choose_groups(rows).items()) == [
        (3, "rewards differ most"),
        (1, "highest reward"),
        (2, "lowest reward"),
        (4, "most truncated"),
    ]
    assert choose_groups(rows[:2]) == {1: "the only group"}


def test_completions_of_a_large_group() -> None:
    assert choose_completions([0.1, 0.9, None, 0.5], [10, 10, 10, 10], 30) == [0, 1, 3]
    assert choose_completions([None, None, None], [10_000] * 3, 5) == [0, 1]


def test_a_long_run_is_shown_as_means_of_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "reward/mean": float(step)} for step in range(1, 9001)]
    curves = data_of(page_of(make_run(tmp_path / "run", lines=lines, stored={})))["run"]
    assert curves["stride"] == 3
    assert curves["values"]["reward/mean"][:2] == [2, 5]
    assert curves["x"]["step"][:2] == [3, 6]
    assert [width for width, _ in curves["windows"]] == [5, 11, 25, 51, 101, 301]


def test_charts_have_only_what_the_run_has() -> None:
    charts = charts_of(["reward/mean", "rewards/a", "rewards/b", "entropy", "eval/x/reward/mean"])
    assert [chart["title"] for chart in charts] == ["Reward", "Reward by function", "Entropy", "Evaluation: x/reward"]
    assert charts[2]["band"] is None
    assert [chart["title"] for chart in charts_of(["reward/mean", "rewards/a"])] == ["Reward"]


def test_packing_keeps_sixteen_bits() -> None:
    numbers = np.array([1.0, -2.5, 1e-30, np.nan, np.inf], np.float64)
    header, arrays = unpack(
        pack({"a": "é"}, {"x": numbers, "i": np.array([-1, 2**31 - 1]), "b": np.array([True, False])})
    )
    np.testing.assert_allclose(arrays["x"], numbers, rtol=2**-15)
    assert arrays["i"].tolist() == [-1, 2**31 - 1]
    assert arrays["b"].tolist() == [1, 0]
    assert header["a"] == "é"


def test_findings_are_marked_on_the_curves_that_they_are_about(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 0.5, "kl/k3": 0.1, "tokens/clipped_low_share": 0.1, "length/cut_share": 0.2}
    line |= {"eval/x/reward/mean": 0.5, f"eval/{'y' * 300}/reward/mean": 0.5}
    history = Run.read(make_run(tmp_path / "run", lines=[line], stored={}, tokenizer=False))
    checks = {check.name: check.metrics for check in CHECKS}
    names = ("kl_fast", "clipped", "end_token", "evaluation_falls")
    found = [Finding(name, Level.NOTE, 4, "better", begin=2, metrics=checks[name]) for name in names]
    assert (sections.opening_step(found), sections.is_ill(found)) == (None, False)
    ended = Finding("collapse", Level.ALARM, 3, "over", begin=3, end=4)
    alarms = [Finding("collapse", level, 5, "bad", begin=5) for level in (Level.WARNING, Level.ALARM)]
    assert (sections.opening_step([ended]), sections.is_ill([ended])) == (None, False)
    assert (sections.opening_step(alarms[:1]), sections.is_ill(alarms[:1])) == (None, True)
    assert (sections.opening_step([alarms[1], ended]), sections.is_ill(alarms)) == (5, True)
    found[0] = replace(found[0], worst=Finding("kl_fast", Level.ALARM, 3, "it was bad"))
    marked = sections.marks(history, found)
    assert [one["keys"] for one in marked] == [
        ["kl/k3"],
        ["tokens/clipped_low_share"],
        ["length/cut_share"],
        ["reward/mean", "eval/x/reward/mean"],
    ]
    assert [(one["step"], one["level"]) for one in marked[:2]] == [(2, "alarm"), (2, "note")]
    listed = sections.listed(history, found)
    assert [one["worst"] for one in listed["findings"]][:2] == ["Worst, alarm at step 3: it was bad", ""]
    assert listed["timeline"]["kl fast"] == [
        {"x": "100.000%", "width": "0.600%", "level": "alarm", "when": "since step 2"}
    ]


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = seeds(tmp_path)
    page = _Page(write_report([*runs, runs[0]], tmp_path / "report.html").read_text(encoding="utf-8"))
    text = " ".join(page.texts)
    assert "Comparison of 6 runs" in text
    assert "learning_rate 1e-05 is better than learning_rate 2e-06 by 0.099 evaluation reward" in text
    charts = {chart["title"]: chart for chart in data_of(page)["compared"]["charts"]}
    first, second = charts["Reward"]["curves"]
    assert first["label"] == "learning_rate 1e-05"
    assert first["updates"]["x"] == list(range(1, 41))
    assert (first["step"]["y"][20] - second["step"]["y"][20]) == pytest.approx(0.099, abs=1e-6)  # 7 digits kept
    assert charts["Reward"]["about"] == (
        "reward/mean. Lines: local linear fits over 5 points. Band: 95% interval of the mean over 3 seeds."
    )
    assert "Of many comparisons, some find a difference by chance" in text
    assert charts["Evaluation: reward"]["curves"][0]["step"]["x"] == [10, 20, 30, 40]


def test_replays_are_tables_and_damaged_ones_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stored={})
    (folder / "replays").mkdir()
    result = {
        "sentence": "Under <b>grpo</b>, 3% of the tokens change",
        "step": 4,
        "objective": {"run": "default", "replay": HOSTILE[:-14], "changes": ["scale -> none"]},
        "notes": "none",
        "logits": {"norm_run": 1.5, "cosine": 0.25, "terms": {"policy": {"norm_run": 0.5}, "kl": 3}},
        "causes": [{"run": "no_advantage", "replay": "active", "tokens": 12, "tokens_share": 0.12}, 7],
        "completions": {"row": 1},
        "strongest": [{"text": HOSTILE[:-14], "coefficient_run": "x"}],
    }
    (folder / "replays" / "step-4-a.json").write_text(json.dumps(result))
    (folder / "replays" / "step-4-b.json").write_text("{")
    html = write_report([folder]).read_text(encoding="utf-8")
    text = " ".join(_Page(html).texts)
    assert "Under <b>grpo</b>, 3% of the tokens change." in text
    assert "replays/step-4-b.json cannot be read" in text
    assert ("no advantage" in text, "12%" in text, "0.25" in text) == (True, True, True)
    assert "alert" not in _Page(html).tags
    assert "<script>alert" not in html


def test_evaluations_of_the_summary(tmp_path: Path) -> None:
    summary = {"accuracy_before": 0.25, "accuracy_before_interval": [0.2, 0.3], "accuracy_after": 0.5, "x_before": "?"}
    history = Run.read(make_run(tmp_path / "run", stored={}, summary=summary | {"before": {"a": {"b": 1}}}))
    rows = sections.before_and_after(history)
    assert rows == [("accuracy", "0.25 (0.2 to 0.3)", "0.5"), ("a, b", "1", "\N{EN DASH}")]
