"""Programs that forge the result of Python tests. Each passed once, or left its completion unscored."""

import asyncio

import pytest

from cohort.errors import DataError
from cohort.rewards.code import code, parse_tests
from tests.rewards.test_code import score, scores
from tests.sandbox.needs import needs_bwrap

CATCHES = "try:\n    f(-1)\n    assert False\nexcept {}:\n    pass"
FAILS = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        try:\n            f(-1)\n"
    "            self.fail()\n        except Failure:\n            pass"
)
HELPER = "expected = got = 'a b'\nclass Helper:\n    expected = 'a b'\n    def __init__(self): pass\n"
READS = "__import__('sys').modules['tests'].expected"
FORGED = {  # a program that is wrong, and tests each of which it passed
    "exception classes that catch the test's own": (
        "Err = Exception\nFailure = AssertionError\nclass Named(Exception): pass\n"
        "Named.__module__, Named.__name__ = 'builtins', 'AssertionError'\ndef f(x): return 0",
        [CATCHES.format("Err"), CATCHES.format("Named"), FAILS, "import solution\n" + CATCHES.format("solution.Err")],
    ),
    "the end of the program": ("import os\nErr = ConnectionError\ndef f(x): os._exit(0)", [CATCHES.format("Err")]),
    "names of the standard library": (
        "def isclose(*a): return True\ninf = 0\nclass deque(list):\n    def __init__(self, *a): pass\n"
        "def floor(x): return 3\ndef f(x): return 0\ndef g(x): return []",
        [
            "assert isclose(f(1), 3)",
            "assert f(1) == inf",
            "assert g(1) == deque([3])",
            "r = f(1)\nassert floor(r) == 3",
        ],
    ),
    "a built-in beside an import": (
        "def all(x): return True\ndef f(x): return 0",
        ["from solution import f\nassert all([f(i) == 1 for i in range(3)])"],
    ),
    "texts that are evaluated": (
        f"def f(x): return 'expected'\ndef g(x): return {READS!r}",
        [
            "expected = 3\nassert eval(f(1)) == expected",
            "expected = 3\nassert eval(g(1)) == expected",
            "import builtins\nexpected = 3\nassert builtins.eval(g(1)) == expected",
            "case = {'expected': 3}\nexpected = case['expected']\nassert eval(f(1)) == expected",
            "expected = 3\nassert eval(f(1), globals()) == expected",
            "expected = 3\nassert eval(f(1), {'y': 1}, dict(globals())) == expected",
            "def test_a():\n    expected = 3\n    assert eval(f(1), {}, locals()) == expected",
            "def test_a():\n    expected = 3\n    assert eval(f(1), {**vars(), 'y': 1}) == expected",
        ],
    ),
    "templates that read the tests' objects": (
        "def f(x): return '{0.__init__.__globals__[expected]}'\ndef g(x): return '{0.expected}'\n"
        "def h(x): return '%(expected)s'\ndef k(x): return '{expected}'\ndef m(x): return '$expected'\n"
        "def n(x): return '/proc/self/status'\ndef a(x): return '__globals__'\ndef b(x): return 'got'",
        [
            f"{HELPER}assert f(1).format(Helper()) == expected",
            f"{HELPER}assert str.format(f(1), Helper()) == expected",
            f"{HELPER}assert [*map(str.format, [f(1)], [Helper()])] == [expected]",
            f"{HELPER}assert getattr(f(1), 'format')(Helper()) == expected",
            f"{HELPER}import string\nassert string.Formatter().format(f(1), Helper()) == expected",
            f"{HELPER}import string\nassert string.Formatter().vformat(f(1), (Helper(),), {{}}) == expected",
            f"{HELPER}assert ('<' + f(1) + '>').format(Helper()) == '<' + expected + '>'",
            f"{HELPER}t = f(1)\nassert eval('t.format(Helper())') == expected",
            f"{HELPER}assert g(1).format(Helper()) == expected",
            "expected = 'a b'\nassert h(1) % globals() == expected",
            "def test_a():\n    expected = 'a b'\n    assert h(1) % locals() == expected",
            "expected = 'a b'\nassert k(1).format(**globals()) == expected",
            "expected = 'a b'\nassert k(1).format_map(globals()) == expected",
            "def test_a():\n    expected = 'a b'\n    assert k(1).format_map({**locals()}) == expected",
            "import string\nexpected = 'a b'\nassert string.Template(m(1)).substitute(globals()) == expected",
            "assert open(n(1)).read() != 'x'",
            f"{HELPER}assert getattr(Helper.__init__, a(1))[b(1)]",
        ],
    ),
    "pickles that call a function or change a class": (
        'import pickle\nclass P:\n    def __reduce__(self): return eval, ("3",)\ndef f(x): return pickle.dumps(P())\n'
        "def g(x): return b'ccollections\\nCounter\\n(N}V__eq__\\ncbuiltins\\nset\\nstb.'",
        [
            "import pickle\nassert pickle.loads(f(1)) == 3",
            "import pickle\nfrom collections import Counter\npickle.loads(g(1))\nassert Counter('a') == Counter('b')",
        ],
    ),
}


@needs_bwrap
def test_a_forged_result_fails():
    found = scores([(program, tests, {"partial": True}) for program, tests in FORGED.values()])
    for (name, (_, tests)), (value, passed, _) in zip(FORGED.items(), found, strict=True):
        assert (value, passed) == (0.0, f"0/{len(tests)}"), name


RIGHT = {  # what the same tests are for
    "an alias of an exception": (
        "Err = ValueError\nclass Sub(Err): pass\nclass P(OSError): pass\nimport json\n"
        "def f(x): raise (Err('no') if x == 0 else Sub('no'))\ndef g(x): raise P(2, 'no')\ndef h(s): return json.loads(s)",
        "for x in (0, 1):\n    try:\n        f(x)\n        assert False\n    except Err as e:\n"
        "        assert isinstance(e, ValueError) and str(e) == 'no'\n"
        "try:\n    f(1)\n    assert False\nexcept Sub:\n    pass\n"
        "try:\n    g(1)\n    assert False\nexcept OSError as e:\n    assert e.errno == 2 and type(e) is P\n"
        "try:\n    h('{')\n    assert False\nexcept Err:\n    pass",
    ),
    "an alias through the module, and exceptions that are attributes": (
        "class Stack:\n    class Empty(Exception): pass\n    Full = ValueError\n    Full2 = KeyError\n"
        "    def pop(self): raise self.Empty('no')\n    def push(self): raise self.Full('full')\n"
        "Err = IndexError\ndef f(x): raise Err(x)",
        "import solution as s\nfrom solution import Stack as St\nn = 0\nstack = Stack()\n"
        "try:\n    f('a')\nexcept (s.Err, OSError) as e:\n    n += str(e) == 'a'\n"
        "try:\n    stack.pop()\nexcept Stack.Empty as e:\n    n += str(e) == 'no'\n"
        "try:\n    stack.push()\nexcept St.Full:\n    n += 1\nassert n == 3\n"
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        with self.assertRaises(Stack.Empty):\n            stack.pop()",
    ),
    "the exact class of an exception": (
        "def f(x): raise KeyError('k')",
        "try:\n    f(1)\nexcept Exception as e:\n    assert type(e) is KeyError\nelse:\n    assert False",
    ),
    "names of the standard library": (
        "from math import *\ndef f(x): return x / 2",
        "assert isclose(f(0.3), 0.15)\nassert floor(f(3)) == 1\nassert f(-inf) == -inf",
    ),
    "exercises with such names": (
        "def gcd(a, b, c=0): return gcd(b, a % b) if b else a\ndef mean(xs): return sum(xs) / len(xs) + 1",
        "assert gcd(4, 6, 2) == 2\nxs = [1, 3]\nassert mean(xs) == 3\nassert gcd(mean(xs), 6, 3) == 3",
    ),
    "an exercise of one such name": ("def isclose(a, b): return a < b", "assert isclose(1, 3)"),
    "eval": (
        "def f(x): return f'{x} + 1'\ndef g(x): return '[1, \"a\".upper(), min(g.__name__, max(2, 3), 4)][:2]'\n"
        "class P:\n    def __init__(self, x): self.x = x\n    def __repr__(self): return f'P({self.x!r})'\n"
        "    def __eq__(self, other): return self.x == other.x",
        "three = 3\nassert eval(f(2)) == three and eval('f(2)') == '2 + 1' and eval(f('x'), {'x': three}) == 4\n"
        "assert eval(repr(P(1))) == P(1) and eval(repr(P('a'))).x == 'a'\n"
        "y = three\nassert eval(f('y'), {'y': y}) == eval(f(3), globals()) == eval('three + 1') == 4\n"
        "def test_a(z=1):\n    assert eval(f('z'), {'z': z}) == 2\n"
        "assert eval(f'f({three})') == '3 + 1'\nassert all(map(eval, ['f(1) == \"1 + 1\"']))",
    ),
    "templates": (
        "def f(x): return '{} {0.real} {1[a]:>4} {x!r}'.replace('{}', '{2}')\ndef g(x): return '$a %(b)s {c:{d}}'\n"
        "class P:\n    format = 'csv'\n    y = 2\n    def query(self, a, b): return a + b",
        "import string\nassert f(1).format(1, {'a': 'b'}, 'c', x='d') == \"c 1    b 'd'\"\n"
        "assert g(1).format(c=1, d=3) == '$a %(b)s   1'\nassert 'x{}'.format(f(1)) == 'x' + f(1)\n"
        "assert string.Template('$a').substitute(a=1) == '1' and g(1)[3:8] % {'b': 2} == '2'\nb = 3\n"
        "assert '%(b)s' % globals() == '3' and '{b} {p.y} {0.stop}'.format(range(4), b=b, p=P()) == '3 2 4'\n"
        "p = P()\nassert p.format == 'csv' and p.query(1, 2) == 3 and getattr(p, 'z', 4) == 4 and format(2.5, '.2f') == '2.50'",
    ),
    "pickles of plain data": (
        "import pickle, datetime, collections\n"
        "def f(x): return pickle.dumps([x, {1: (2.5, b'c')}, {3}, datetime.date(2020, 1, 1), collections.deque([4])])",
        "import pickle, datetime, collections\n"
        "assert pickle.loads(f('a')) == ['a', {1: (2.5, b'c')}, {3}, datetime.date(2020, 1, 1), collections.deque([4])]\n"
        "exec('y = f(1)')\nassert pickle.loads(y)[0] == 1\n"
        "P = collections.namedtuple('P', 'a b')\nassert P(1, 2).b == 2 and f(1)",
    ),
}


@needs_bwrap
def test_the_right_program_passes():
    found = scores([(*right, {}) for right in RIGHT.values()])
    assert dict(zip(RIGHT, (one[::2] for one in found), strict=True)) == dict.fromkeys(RIGHT, (1.0, ""))


RAISES = "def f(x): raise ImportError('no', name='pytest')"
UNSCORED = {  # tests that left this program unscored, or might have
    "an ImportError that is raised again": "try:\n    f(1)\nexcept ImportError as e:\n    raise ImportError(str(e), name=e.name)",
    "an ImportError before another": (
        "errors = []\nfor _ in range(2):\n    try:\n        f(1)\n    except ImportError as e:\n        errors.append(e)\n"
        "if errors:\n    raise errors[0]\nassert f(1) == 1"
    ),
    "an optional import": "try:\n    import pytest\nexcept ImportError:\n    pass\nassert f(1) == 1",
    "a test that it defines": "import solution\nif hasattr(solution, 'g'):\n    def test_a():\n        assert f(1) == 1",
}


@needs_bwrap
def test_a_program_does_not_choose_to_be_unscored():
    tests = list(UNSCORED.values())
    assert score(RAISES, tests, partial=True)[:2] == (0.0, f"0/{len(tests)}")


def test_tests_that_may_run_a_text_of_the_program_are_refused():
    for tests in (
        "exec(f(1))\nassert x == 1",
        "import marshal\nassert marshal.loads(f(1)) == 1",
        "from sympy import sympify\nassert sympify(f(1)) == 1",
        "import sympy\nassert sympy.sympify(f(1)) == 1",
        "from sympy import S\nassert S(f(1)) == 1",
        "import yaml\nassert yaml.load(f(1), Loader=yaml.Loader) == 1",
        "from yaml import unsafe_load_all\nassert [*unsafe_load_all(f(1))] == [1]",
    ):
        with pytest.raises(DataError, match="a text of the program could run where its results are compared"):
            parse_tests(tests)
    assert parse_tests("import re\nassert re.compile(f(1)).match('a')").count == 1


@needs_bwrap
def test_packages_and_assertions_that_are_not_imported_leave_the_row_unscored():
    for program, tests, name in (
        ("class np:\n    def allclose(*a): return True\ndef f(x): return 0", "assert np.allclose(f(1), 3)", "np"),
        (
            "from contextlib import suppress\nclass pytest: raises = suppress\ndef f(x): return 0",
            "with pytest.raises(ValueError):\n    f(1)\nassert f(2) == 0",
            "pytest",
        ),
        ("def assert_allclose(*a): pass\ndef f(x): return 0", "assert_allclose(f(1), 3)", "assert_allclose"),
    ):
        with pytest.raises(DataError, match=f"use {name} without importing it"):
            score(program, tests)


@needs_bwrap
def test_helpers_are_those_of_the_prompt():
    prompt = (
        "import math\ndef square(x):\n    return math.pow(x, 2)\ndef poly(xs, x):\n"
        "    return sum(c * (square(x) if i == 2 else x ** i) for i, c in enumerate(xs))\n"
        'def other(x):\n    """To be written."""\n\ndef find_zero(xs):\n    """A root."""\n'
    )
    row = {"prompt": prompt, "tests": "assert abs(poly([-4, 0, 1], find_zero([-4, 0, 1]))) < 1e-6", "continues": True}
    assert asyncio.run(code("    return 2.0\n", **row)) == 1.0
    assert asyncio.run(code("    return 1.0\ndef poly(xs, x): return 0\n", **row)) == 0.0
    assert asyncio.run(code("    return 1.0\ndef square(x): return 4\n", **row)) == 0.0


@pytest.mark.slow
@needs_bwrap
def test_sympy_parses_symbols_and_strings_of_the_tests_only():
    tests = [
        "import sympy\nx = sympy.Symbol('x')\nassert sympy.simplify('x + x') == 2 * x and (x + f(1)).subs('x', 1) == 2",
        "assert sympy.simplify(g(1)) == 1",
        "assert sympy.expand(g(1)) == 1",
    ]
    assert score("def f(x): return 1\ndef g(x): return '1'", tests, packages=True, partial=True)[1] == "1/3"
