"""Commands on checkpoints: verify, convert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.app import app
from cohort.cli.start import TRUST
from cohort.errors import RunFolderError

if TYPE_CHECKING:
    from cohort.runs.folder import RunFolder


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


@app.command(sort_key=7, usage="Usage: cohort convert RUN --unpickle [--trust RUN]")
def convert(run: str, /, *, unpickle: bool = False, trust: TRUST = None) -> None:
    """Convert the checkpoints of a run of an earlier version of Cohort, whose state is pickled.

    Args:
        run: The run folder.
        unpickle: Agree to read the pickled files. Of them, tensors, NumPy arrays and plain values are made; anything
            else is refused, so that no code of theirs runs. What you trust is torch's reader.
        trust: Run the code of the model, if the run's settings allow it, though this account has not run it before.
    """
    from cohort.runs.folder import RunFolder

    folder = RunFolder(Path(run).expanduser())
    folder.check_is_run()
    folder.take()
    try:
        _convert(folder, unpickle=unpickle, trust=trust)
    finally:
        folder.close()


def _convert(folder: RunFolder, *, unpickle: bool, trust: str | None) -> None:
    from cohort.config import load_config
    from cohort.runs.trust import MODEL_CODE, check_code
    from cohort.train.convert import convert as converted
    from cohort.train.convert import is_pickled

    run = folder.path
    found = [path for step in folder.checkpoint_steps() if is_pickled(path := folder.checkpoint(step))]
    if not found:
        raise RunFolderError(f"{run} has no checkpoint of an earlier version")
    if not unpickle:
        raise RunFolderError(
            f"{run} has {len(found)} checkpoints whose state is pickled. If you trust where they come from, add "
            "--unpickle: torch reads them with weights_only, which makes tensors, arrays and plain values and nothing "
            "else"
        )
    config = load_config(folder.path / "config.toml", of_run=True)
    check_code(folder.path, config, trust, read=MODEL_CODE)
    for path in found:
        converted(path, config)
        print(f"converted {path}; the earlier one is {path.name}.pickled")
