"""The calculator, against results worked out by hand."""

import time

from cohort.environments.tools import calculator
from tests.conftest import each

SYNTAX = "error: cannot read the expression; it may have numbers, + - * / // % ** and parentheses"


@each(
    ("expression", "result"),
    [
        ("17 * 23", "391"),
        ("0.1 + 0.2", "0.3"),
        ("(3 + 4.5) * 2 ** 10", "7680"),
        ("-2 ** 2", "-4"),
        ("(-8) ** 3", "-512"),
        ("2 ** -3", "0.125"),
        ("0 ** 0", "1"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("1_000 * 2", "2000"),
        ("1e3", "1000"),
        ("1e-9", "1e-9"),
        ("0.00001", "0.00001"),
        ("1 / 3", "0.333333333333333"),
        ("2 / 3 * 3", "2"),
        ("123456789 * 987654321 / 7", "1.7418947301805e+16"),
        ("12345678901234567890 * 3", "37037036703703703670"),
        ("10 ** 60", "1e+60"),
        ("1 / 0", "error: division by zero"),
        ("1 % 0", "error: division by zero"),
        ("0 ** -1", "error: division by zero"),
        ("2 ** 0.5", "error: the exponent must be an integer"),
        ("9 ** 9 ** 9", "error: the number is too large"),
        ("1e999999999", "error: the number is too large"),
        ("1e999 ** 999", "error: the number is too large"),
        ("0.1 ** 9999", "error: the number is too large"),
        ("1" * 1001, "error: the expression has more than 1000 characters"),
        ("(" * 400 + "1" + ")" * 400, SYNTAX),
        ("-" * 999 + "1", SYNTAX),
        *[
            (wrong, SYNTAX)
            for wrong in ("", "x + 1", "1 +", "1,000", "3 4", "e", "(1", "007", "1if 2else 3", "\ud800", "0x10")
        ],
        ("__import__('os')", SYNTAX),
    ],
)
def test_results(expression, result):
    start = time.perf_counter()
    assert calculator(expression) == result
    assert time.perf_counter() - start < 0.5  # a power that is computed first takes far longer
    assert len(result) < 90
