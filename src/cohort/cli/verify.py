"""``cohort verify``."""

from __future__ import annotations

from pathlib import Path

from cohort.cli.app import app


@app.command(sort_key=6, usage="Usage: cohort verify RUN")
def verify(run: str, /) -> int:
    """Check every file of a run folder, or of one checkpoint, against its size, hash or checksum.

    Exit code 0 if all are whole, 1 if not. Folders that were set aside (step-N.broken) do not count.

    Args:
        run: The folder.
    """
    from cohort.runs.verify import verify as verdicts

    found = list(verdicts(Path(run).expanduser()))
    broken = [one for one in found if one.problem]
    whole = [one.name for one in found if not one.problem and not one.note]
    models = [name for name in whole if not name.endswith((".toml", ".json", ".jsonl", ".parquet"))]
    files = len(whole) - len(models)
    for name in models:
        print(f"whole   {name}")
    if files:
        print(f"whole   {files} other file{'s' if files > 1 else ''}")
    for one in found:
        if one.note:
            print(f"note    {one.name}: {one.note}")
    for one in broken:
        print(f"broken  {one.name}: {one.problem}")
    return 1 if broken else 0
