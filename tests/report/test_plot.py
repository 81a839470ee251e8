"""``cohort plot``: the numbers of the drawn lines, not pixels; and that files come out."""

import json
import sys

import numpy as np
import pytest

from cohort.cli import main
from cohort.errors import ConfigError
from cohort.report.plot import Look, describe, figure, save
from cohort.report.series import curve, loess
from tests.conftest import telling
from tests.report.made import history, rewards


def made(rate=1e-5, seed=0, shift=0.0, count=5, **more):
    lines = rewards([shift + n / 10 for n in range(count)], **more)
    lines = [line | {"time": 86400.0 + 2 * n, "entropy": 2.0**-n} for n, line in enumerate(lines)]
    return history(lines, {"run": {"seed": seed}, "optim": {"learning_rate": rate}}, name=f"rate{rate}-seed{seed}")


def drawn(axes):
    """The labelled lines, and those behind them."""
    lines = [(line.get_label(), line.get_xdata().tolist(), list(line.get_ydata())) for line in axes.lines]
    return [line for line in lines if line[0] != "_behind"], [line[1:] for line in lines if line[0] == "_behind"]


def test_one_run():
    axes = figure([made(tokens=50)], ["reward/mean"], Look(axis="tokens")).axes[0]
    lines, behind = drawn(axes)
    assert lines == [("rate1e-05-seed0", [50, 100, 150, 200, 250], pytest.approx([0, 0.1, 0.2, 0.3, 0.4]))]
    assert behind == []
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("drawn tokens", "training reward")
    assert axes.figure.get_suptitle() == "rate1e-05-seed0"


def test_smoothing_has_the_logged_values_behind():
    run = made(count=40)
    axes = figure([run], ["entropy"], Look(window=5)).axes[0]
    lines, behind = drawn(axes)
    values = run.column("entropy").tolist()
    assert behind == [(list(range(1, 41)), values)]
    fit, half = loess(np.array(values), 5)
    assert lines[0][2] == pytest.approx(fit.tolist())
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx((fit + half).max())


def test_seeds_become_one_line_and_lines_are_named_by_what_differs():
    runs = [made(seed=seed, shift=seed) for seed in range(3)] + [made(2e-5, seed, 5) for seed in range(2)]
    look = Look(title="Rates")
    done = figure(runs, ["reward/mean", "entropy"], look)
    lines, behind = drawn(done.axes[0])
    assert [label for label, *_ in lines] == ["learning_rate 1e-05", "learning_rate 2e-05"]
    assert lines[0][2] == pytest.approx([1, 1.1, 1.2, 1.3, 1.4])
    assert len(behind) == 5
    (legend,) = done.legends
    assert [text.get_text() for text in legend.get_texts()] == ["learning_rate 1e-05", "learning_rate 2e-05"]
    assert legend.get_title().get_text() == "Rates"
    assert done.get_supxlabel() == (
        "Lines: mean over seeds; behind them: single seeds. Bands: 95% interval of the mean over 3 seeds; range of 2 seeds."
    )
    assert figure(runs, ["entropy"], Look(bare=True)).get_supxlabel() == ""
    apart, _ = drawn(figure(runs, ["reward/mean"], Look(separate=True)).axes[0])
    assert [label for label, *_ in apart][2:4] == ["learning_rate 1e-05, seed 2", "learning_rate 2e-05, seed 0"]
    assert len({line.get_color() for line in done.axes[0].lines}) == 2


def test_axes_of_time():
    run = made(seconds=100.0)
    lines, _ = drawn(figure([run], ["reward/mean"], Look(axis="seconds")).axes[0])
    assert lines[0][1] == pytest.approx([100 / 60 * n for n in range(1, 6)])  # minutes
    axes = figure([run], ["reward/mean"], Look(axis="time")).axes[0]
    assert drawn(axes)[0][0][1][:2] == pytest.approx([1.0, 1 + 2 / 86400])  # days since 1970
    long = figure([made(seconds=9000.0)], ["reward/mean"], Look(axis="seconds")).axes[0]
    assert long.get_xlabel() == "training time, hours"


def test_scales_and_limits():
    runs = [made(seed=seed, shift=[0, 0, 1000][seed]) for seed in range(3)]
    low, high = figure(runs, ["reward/mean"]).axes[0].get_ylim()
    assert (low, high) == (pytest.approx(-500.2), pytest.approx(1500.6))  # of the lines' range, half at each side
    axes = figure(runs, ["entropy"], Look(log="xy")).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    with pytest.raises(ConfigError, match="--log y needs values above 0"):
        figure([history(rewards([-1.0, 0.0]))], ["reward/mean"], Look(log="y"))


def test_what_cannot_be_drawn():
    with pytest.raises(ConfigError, match="no run has the metric 'entrpy'; did you mean entropy"):
        figure([made()], ["entrpy"])
    with pytest.raises(ConfigError, match="reward/mean cannot be drawn over tokens: no run has both"):
        figure([history([{"reward/mean": 1.0}])], ["reward/mean"], Look(axis="tokens"))


def test_names_of_strangers_are_text(tmp_path):
    settings = [{"optim": {"name": name}} for name in ("_a $x^{$\n", "<b>\u202e\0")]
    runs = [history(rewards([1.0, 2.0]), one) for one in settings]
    done = figure(runs, ["reward/mean"])
    save(done, tmp_path / "a.svg")
    assert [label for label, *_ in drawn(done.axes[0])[0]] == [r"name _a \$x^{\$ ", "name <b>  "]


@pytest.mark.parametrize("suffix", telling([".png", ".svg", ".pdf"], ".png", ".svg"))
def test_files_are_the_same_each_time(tmp_path, suffix):
    texts = []
    for name in "ab":
        path = save(
            figure([made()], ["reward/mean"], Look(theme="dark")), tmp_path / f"{name}{suffix}", Look(theme="dark")
        )
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]
    assert texts[0].startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])


def test_the_command(tmp_path, capsys, monkeypatch):
    for seed in range(2):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        (folder / "config.toml").write_text(f"[run]\nseed = {seed}\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made(seed=seed).rows))
    output = str(tmp_path / "curves.png")
    runs = [str(tmp_path / "run0"), str(tmp_path / "run1")]
    assert main(["plot", *runs, "--key", "reward/mean", "entropy", "--x", "updates", "--output", output]) == 0
    assert capsys.readouterr().out == f"{output} is written\n"
    for arguments, message in (
        ([*runs, "--output", "curves.gif"], "expected a file that ends in .png, .svg, .pdf"),
        ([*runs, "--output", str(tmp_path / "none" / "a.png")], "there is no folder"),
        (["--output", output], "needs a run folder"),
        ([*runs, "--output", output, "--size", "6"], "expected width and height in inches"),
        ([str(tmp_path), "--output", output], "It holds the runs run0, run1."),
    ):
        assert main(["plot", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", *runs, "--output", output]) == 2
    assert "pip install 'cohort-rl[plot]'" in capsys.readouterr().err


def test_the_note_says_what_is_drawn():
    run = made(count=40)
    fit, raw = curve(run, "entropy", window=5), curve(run, "entropy")
    assert describe([raw]) == ""
    assert describe([fit, raw]) == (
        "Lines: local linear fits (LOESS) over 5 points; behind them: logged values. Bands: 95% band of the fit."
    )
