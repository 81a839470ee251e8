"""The command that says what is wrong with a run: diagnose."""

from __future__ import annotations

from shutil import get_terminal_size
from typing import Annotated

from cyclopts import Parameter

from cohort.cli.app import app


@app.command(
    sort_key=12.5,
    usage="Usage: cohort diagnose RUN [--json]",
    help_epilogue="The exit code is 1 if an alarm stands at the end. 'cohort docs diagnosis' explains the checks.",
)
def diagnose(run: str, /, *, json_output: Annotated[bool, Parameter("--json")] = False) -> int:
    """Say what is wrong with a run, from its metrics: what, since when, why, and what to try.

    Args:
        run: A run folder, of a run that has ended or is in progress.
        json_output: Print one JSON object instead of text.
    """
    from cohort.report.diagnosis import Diagnosis, Level, not_run, worst
    from cohort.report.history import RunHistory
    from cohort.report.words import one_line
    from cohort.runs.lines import as_json

    history = RunHistory.read(run)
    diagnosis = Diagnosis(history.settings)
    said = [finding for metrics in history.metrics for finding in diagnosis.step(metrics)]
    silent = not_run(history.keys())
    alarm = worst(diagnosis.findings) is Level.ALARM
    steps = [metrics for metrics in history.metrics if "updates" in metrics]
    health = diagnosis.health or "no step yet"
    if json_output:
        findings = [finding.as_json() for finding in diagnosis.findings]
        found = {"ok": not alarm, "health": health, "steps": len(steps), "findings": findings, "not_run": list(silent)}
        print(as_json(found, indent=1), end="")
    else:
        lines = [finding.show(get_terminal_size((119, 24)).columns) for finding in said]
        print("\n".join([*lines, f"after step {steps[-1]['step']}, {health}" if steps else health]))
        if steps and silent:
            named = ", ".join(silent)
            print(f"not checked, because the run has no metrics for it: {named} (see 'cohort docs diagnosis')")
        for damage in history.missing:
            if damage.startswith("metrics.jsonl"):
                print(one_line(damage))
    return int(alarm)
