"""The code reward: real programs, every shape of tests, and programs that try to pass without being right."""

import asyncio
import json
import subprocess
import sys

import pytest

from cohort.errors import DataError, RewardError
from cohort.rewards import RewardRunner, resolve_reward
from cohort.rewards.code import code, extract_program, parse_tests, same_output
from cohort.rewards.contract import call_options
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.sandbox.needs import needs_bwrap


def score(program: str, tests, **arguments):
    """The reward, and what it logged."""
    logged: dict = {}
    completion = f"Thinking.\n```python\n{program}\n```\nDone."
    value = asyncio.run(code(completion, tests, log_extra=logged.__setitem__, **arguments))
    return value, logged["passed"], logged["failure"]


# -- real programs -----------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "is_prime": (
        "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))",
        "def is_prime(n):\n    return n % 2 == 1",
        [
            "assert is_prime(2)",
            "assert not is_prime(9)",
            "assert [n for n in range(12) if is_prime(n)] == [2, 3, 5, 7, 11]",
        ],
    ),
    "two_sum": (
        "from typing import List, Tuple\ndef two_sum(a: List[int], t: int) -> Tuple[int, int]:\n    seen = {}\n"
        "    for i, x in enumerate(a):\n        if t - x in seen:\n            return seen[t - x], i\n        seen[x] = i",
        "def two_sum(a, t):\n    return (0, 1)",
        ["assert two_sum([2, 7, 11], 9) == (0, 1)", "assert two_sum([3, 2, 4], 6) == (1, 2)"],
    ),
    "rotate": (  # changes its argument
        "def rotate(m):\n    m[:] = [list(row) for row in zip(*m[::-1])]",
        "def rotate(m):\n    return [list(row) for row in zip(*m[::-1])]",
        ["m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]"],
    ),
    "evens": (  # a generator
        "def evens(n):\n    for i in range(0, n, 2):\n        yield i",
        "def evens(n):\n    return range(1, n, 2)",
        ["assert list(evens(7)) == [0, 2, 4, 6]", "assert next(iter(evens(3))) == 0"],
    ),
    "counts": (
        "from collections import Counter\ndef counts(s):\n    return Counter(s)",
        "def counts(s):\n    return dict.fromkeys(s, 1)",
        ["assert counts('aab') == {'a': 2, 'b': 1}"],
    ),
    "half": (
        "def half(x):\n    return x / 2",
        "def half(x):\n    return x // 2",
        ["assert abs(half(3) - 1.5) < 1e-9", "import math\nassert math.isclose(half(1), 0.5)"],
    ),
    "parse": (  # raises
        "def parse(s):\n    if not s.isdigit():\n        raise ValueError(f'not a number: {s}')\n    return int(s)",
        "def parse(s):\n    return int(s) if s.isdigit() else None",
        ["try:\n    parse('x')\nexcept ValueError as e:\n    assert 'x' in str(e)\nelse:\n    assert False"],
    ),
    "Stack": (
        "class Empty(Exception):\n    pass\nclass Stack:\n    def __init__(self):\n        self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n    def pop(self):\n"
        "        if not self.items:\n            raise Empty('none')\n        return self.items.pop()\n"
        "    def __len__(self):\n        return len(self.items)",
        "class Empty(Exception):\n    pass\nclass Stack(list):\n    push = list.append",
        [
            "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.items == [1]",
            "try:\n    Stack().pop()\nexcept Empty:\n    pass\nelse:\n    assert False",
        ],
    ),
    "Point": (  # objects compared with each other
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Point:\n    x: int\n    y: int\n"
        "    def __add__(self, other):\n        return Point(self.x + other.x, self.y + other.y)",
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Point:\n    x: int\n    y: int\n"
        "    def __add__(self, other):\n        return self",
        [
            "assert Point(1, 2) + Point(1, 1) == Point(2, 3)\nassert Point(1, 2) != Point(2, 1)\nassert Point(1, 2).x == 1"
        ],
    ),
    "sum": (  # named as a built-in is
        "def sum(a, b):\n    return a + b",
        "def sum(a, b):\n    return a - b",
        ["assert sum(10, 15) == 25"],
    ),
    "kinds": (  # what travels as what it is
        "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import deque\n"
        "def kinds():\n    return [None, True, 1, 2.5, float('inf'), 1j, 'é\\ud800', b'\\xff', (1,), {2}, frozenset({3}),"
        " {(1, 2): [4]}, range(3), deque([5]), Decimal('0.1'), Fraction(1, 3), 10**5000]",
        "def kinds():\n    return []",
        [
            "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import deque\n"
            "assert kinds() == [None, True, 1, 2.5, float('inf'), 1j, 'é\\ud800', b'\\xff', (1,), {2}, frozenset({3}),"
            " {(1, 2): [4]}, range(3), deque([5]), Decimal('0.1'), Fraction(1, 3), 10**5000]\n"
            "assert kinds()[1] is True and type(kinds()[8]) is tuple"
        ],
    ),
}


FUNCTIONS |= {
    "enums": (
        "from enum import Enum, IntEnum\nclass C(str, Enum):\n    RED = 'red'\nclass N(IntEnum):\n    ONE = 1\n"
        "def f(): return C.RED\ndef g(x): return x is N.ONE",
        "class C:\n    RED = 'red'\nclass N:\n    ONE = 1\ndef f(): return 'red'\ndef g(x): return False",
        [
            "assert f() == 'red' and f() == C.RED and f().value == 'red' and isinstance(f(), C)",
            "assert N.ONE == 1 and N.ONE + 1 == 2 and N.ONE.name == 'ONE' and g(N.ONE)",
        ],
    ),
    "named": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')",
        "def P(x, y): return (x, y)",
        ["p = P(1, y=2)\nassert p == (1, 2) and p.y == 2 and repr(p) == 'P(x=1, y=2)' and isinstance(p, P)"],
    ),
    "mappings": (
        "from collections import Counter, defaultdict\ndef f(s): return Counter(s)\ndef g(): return defaultdict(int, a=1)",
        "def f(s): return dict.fromkeys(s, 2)\ndef g(): return {}",
        ["assert f('aab').most_common(1) == [('a', 2)]", "assert g()['z'] == 0 and f('a')['z'] == 0"],
    ),
    "own containers": (
        "class Stack(list):\n    def push(self, x): self.append(x)\nclass D(dict):\n    def __missing__(self, k): return 0\n"
        "def f(): return [*Stack('ab')]",
        "class Stack(list):\n    def push(self, x): pass\nclass D(dict): pass\ndef f(): return []",
        [
            "s = Stack()\ns.push(1)\nassert s == [1] and [1] == s and s != [2] and s[-1] == 1 and len(s) == 1",
            "assert D()['a'] == 0 and D(a=1) == {'a': 1} and f() == ['a', 'b']",
        ],
    ),
    "days": (
        "from datetime import *\ndef f(d): return d + timedelta(days=1, microseconds=3)",
        "def f(d): return d",
        [
            "import datetime\nassert f(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 2)",
            "from datetime import datetime, timezone, timedelta\nd = datetime(2020, 1, 1, tzinfo=timezone.utc)\n"
            "assert f(d) == datetime(2020, 1, 2, microsecond=3, tzinfo=timezone.utc) and f(d) - d == timedelta(1, 0, 3)",
        ],
    ),
    "types": ("def f(x): return type(x)", "def f(x): return 'int'", ["assert f(3) is int and f(3)('4') == 4"]),
    "the same object": (
        "class S:\n    one = None\n    def __new__(cls):\n        cls.one = cls.one or object.__new__(cls)\n        return cls.one\n"
        "class N: pass",
        "class S: pass\nclass N:\n    def __setattr__(self, name, value): vars(self)[name] = N()",
        [
            "assert S() is S()",
            "a, b = N(), N()\na.next = b\nassert a.next is b and a is not b\ndel a.next\nassert not hasattr(a, 'next')",
        ],
    ),
    "repr": (
        "class P:\n    def __repr__(self): return 'P()'\n    def __str__(self): return '<P>'\n    def __int__(self): return 3",
        "class P: pass",
        ["assert repr(P()) == 'P()' and str(P()) == '<P>' and str([P()]) == '[P()]' and int(P()) == 3"],
    ),
    "slices": (
        "class S:\n    def __init__(self, x): self.x = x\n    def __getitem__(self, i): return self.x[i]",
        "class S:\n    def __init__(self, x): self.x = x\n    def __getitem__(self, i): return self.x",
        ["assert S([1, 2, 3])[1:] == [2, 3]"],
    ),
    "changes": (
        "def f(m): m.reverse()",
        "def f(m): pass",
        [
            "l = [1, 2]\nf(m=l)\nassert l == [2, 1]",
            "from collections import deque\nd = deque([1, 2])\nf(d)\nassert d == deque([2, 1])",
        ],
    ),
    "errors": (
        "import json\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n"
        "class A(Exception): pass\nclass E(A):\n    def __init__(self, b):\n        super().__init__('no')\n        self.b = b\n"
        "def f(x): raise E(x)\ndef g(x): return {}[x]\ndef h(s): return json.loads(s)",
        "P = f = g = h = lambda x: x\nE = A = ValueError",
        [
            "try:\n    f(5)\nexcept E as e:\n    assert e.b == 5 and str(e) == 'no' and e.args == ('no',)\nelse:\n    assert 0",
            "try:\n    f(5)\nexcept A as e:\n    assert type(e).__name__ == 'E'\nelse:\n    assert 0",
            "try:\n    g('k')\nexcept KeyError as e:\n    assert str(e) == \"'k'\" and e.args == ('k',)\nelse:\n    assert 0",
            "import json\ntry:\n    h('{')\nexcept json.JSONDecodeError as e:\n    assert 'double quotes' in str(e)\nelse:\n    assert 0",
            "from dataclasses import FrozenInstanceError\np = P(1)\ntry:\n    p.x = 2\nexcept FrozenInstanceError:\n    pass\nelse:\n    assert 0",
        ],
    ),
    "names": (
        "def total(a): return sum(a)",
        "def total(a): return 0",
        [
            "def check(total):\n    assert total([1]) == 1\ncheck(total)",
            "def test_a():\n    assert total([1, 2]) == 3\ndef other():\n    total = 3\n    return total",
        ],
    ),
    "a name that is given a value": (
        "def total(a): return sum(a)",
        "def total(a): return 0",
        ["total = total([1])\nassert total == 1"],
    ),
}


@needs_bwrap
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    right, wrong, tests = FUNCTIONS[name]
    assert score(right, tests) == (1.0, f"{len(tests)}/{len(tests)}", "")
    assert score(wrong, tests)[0] == 0.0
    joined = "\n".join(tests)
    assert score(right, joined)[0] == 1.0
    assert score(wrong, joined)[0] == 0.0


PROGRAMS = [
    ("a, b = map(int, input().split())\nprint(a + b)", "1 2\n", "3\n"),
    ("import sys\nprint(max(map(int, sys.stdin.read().split())))", "3\n9\n4", "9"),
    ("n = int(input())\nfor i in range(n): print('*' * (i + 1), end=' \\n')", "3", "*\n**\n***"),
    ("import os\nprint(len(os.read(0, 100)))", "abc", "3"),
    (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()",
        "",
        "20000",
    ),
    ("if __name__ == '__main__':\n    print(open(0).read().upper())", "abc", "ABC"),
    ("print(open('/dev/stdin').read())", "abc", "abc"),
]


@needs_bwrap
@pytest.mark.parametrize(("program", "given", "expected"), PROGRAMS)
def test_programs(program, given, expected):
    assert score(program, [{"input": given, "output": expected}])[0] == 1.0
    assert score(program, [{"input": given, "output": expected + "\nmore"}])[0] == 0.0


@needs_bwrap
def test_shares():
    asserts = ["assert f(1) == 1", "assert f(2) == 3", "assert f(3) == 3", "assert g() == 1"]
    value, passed, why = score("def f(x):\n    return x", asserts, partial=True)
    assert (value, passed) == (0.5, "2/4")
    assert why.startswith("test 2: AssertionError")
    assert score("def f(x):\n    return x", asserts)[:2] == (0.0, "1/4")  # none are run after the first that fails
    pairs = {"inputs": ["1", "2", "x"], "outputs": ["1", "3", "0"]}
    value, passed, why = score("print(int(input()))", pairs, partial=True)
    assert (value, passed, why) == (1 / 3, "1/3", "test 2: expected '3', got '2'")
    value, passed, why = score("print(int(input()))", {"inputs": ["x"], "outputs": ["1"]})
    assert (value, why[:30]) == (0.0, "test 1: failed: ValueError: in")


@needs_bwrap
def test_rows_as_humaneval_has_them():
    row = {
        "prompt": 'def incr_list(l: list):\n    """Return list with elements incremented by 1."""\n',
        "tests": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
        "    assert candidate([3, 2]) == [4, 3]\n",
        "entry_point": "incr_list",
    }
    whole = row["prompt"] + "    return [x + 1 for x in l]\n"
    assert score(whole, row["tests"], entry_point=row["entry_point"])[:2] == (1.0, "1/1")
    assert score(whole.replace("+", "-"), row["tests"], entry_point=row["entry_point"])[:2] == (0.0, "0/1")
    body = asyncio.run(code("    return [x + 1 for x in l]\n", continues=True, **row))
    assert body == 1.0
    assert (
        score("def sum(a):\n    return 7", "def check(candidate):\n    assert candidate([1]) == 7", entry_point="sum")[
            0
        ]
        == 1
    )
    method = "class Solution:\n    def double(self, x):\n        return 2 * x"
    check = "def check(candidate):\n    assert candidate(x=4) == 8"
    assert score(method, check, entry_point="Solution().double")[0] == 1.0


@needs_bwrap
def test_rows_as_apps_has_them():
    row = json.dumps({"fn_name": "pairs", "inputs": [[[1, 2], 3], [[], 0]], "outputs": [[[1, 3], [2, 3]], [[]]]})
    program = "def pairs(a, b):\n    return [(x, b) for x in a]"
    assert score(program, row)[0] == 1.0
    assert score(f"class Solution:\n    def pairs(self, a, b):\n        return [(x, b) for x in a]", row)[0] == 1.0  # noqa: F541
    assert score(program.replace("x, b", "b, x"), row)[:2] == (0.0, "0/2")
    lines = json.dumps({"inputs": [["1", "2"]], "outputs": [["2", "1"]]})
    assert score("a = input(); print(input()); print(a)", lines)[0] == 1.0


@needs_bwrap
def test_test_programs():
    tests = """
import unittest
from solution import add

class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.one = 1
    def test_ints(self): self.assertEqual(add(self.one, 2), 3)
    def test_strings(self): self.assertEqual(add("a", "b"), "ab")
    def test_errors(self):
        with self.assertRaises(TypeError): add(1, "x")

class TestPlain:
    def setup_method(self, method): self.two = 2
    def test_two(self): assert add(self.two, 2) == 4

def test_floats():
    for i in range(5):
        assert add(i, 0.5) == i + 0.5

if __name__ == "__main__":
    unittest.main()
"""
    assert score("def add(a, b):\n    return a + b", tests) == (1.0, "5/5", "")
    assert score("def add(a, b):\n    return a + b if a != 'a' else 0", tests, partial=True)[:2] == (0.8, "4/5")
    called = "def check(f):\n    assert f(1, 1) == 2\ncheck(add)\nfor i in range(3):\n    assert add(i, i) == 2 * i"
    assert score("def add(a, b):\n    return a + b", called)[:2] == (1.0, "2/2")
    assert score("def add(a, b):\n    return 2", called, partial=True)[:2] == (0.5, "1/2")
    no_assert = "if add(1, 1) != 2:\n    raise Exception('no')"
    assert score("def add(a, b):\n    return a + b", no_assert)[:2] == (1.0, "1/1")
    assert score("def add(a, b):\n    return 0", no_assert)[:2] == (0.0, "0/1")


SHAPES = {
    "called under the guard": "def run_tests():\n    assert f(1) == 2\nif __name__ == '__main__':\n    run_tests()",
    "through another": "def one():\n    assert f(1) == 2\ndef run():\n    one()\nrun()",
    "given arguments": "def check_one(a, b):\n    assert f(a) == b\nfor a, b in [(1, 2), (2, 3)]:\n    check_one(a, b)",
    "in a branch": "if True:\n    def test_a():\n        assert f(1) == 2",
    "in a try": "try:\n    import math\n    def test_a():\n        assert f(1) == 2\nexcept ImportError:\n    pass",
    "runTest": "import unittest\nclass T(unittest.TestCase):\n    def runTest(self):\n        self.assertEqual(f(1), 2)\nunittest.main()",
    "inherited": "import unittest\nclass Base:\n    def test_a(self): self.assertEqual(f(1), 2)\nclass T(Base, unittest.TestCase): pass",
    "set up": "class TestF:\n    def setup_method(self):\n        self.a = 1\n    def test_a(self):\n        assert f(self.a) == 2",
    "as pairs": [{"input": [1], "output": 2, "fn_name": "f"}, {"input": [2], "output": 3, "fn_name": "f"}],
    "a function in a list": ["def test_a():\n    assert f(1) == 2"],
    "another of the same name": "def check(candidate):\n    f = candidate(1)\n    assert f == 2",
    "a reference of the same name": "def f(x): return x + 1\ndef check(candidate):\n    assert candidate(1) == f(1)",
}


@needs_bwrap
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_tests(name):
    entry = {"entry_point": "f"} if "check(candidate)" in SHAPES[name] else {}
    assert score("def f(x): return x + 1", SHAPES[name], **entry)[0] == 1.0
    assert score("def f(x): return 0", SHAPES[name], **entry)[0] == 0.0


@needs_bwrap
def test_keys_that_json_makes_texts():
    row = json.dumps({"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [{1: [True], 2: [True]}]})
    assert score("def f(a): return {x: (True,) for x in a}", row)[0] == 1.0
    assert score("def f(a): return {x: (False,) for x in a}", row)[0] == 0.0


# -- programs that want the reward and not the work --------------------------------------------------------------------

YES = "__eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = __instancecheck__ = lambda *a: True"
ANY = f"""
class Any:
    {YES}
    __sub__ = __rsub__ = __abs__ = __add__ = __round__ = __getattr__ = __call__ = lambda *a, **k: Any()
    __len__ = __float__ = __int__ = __index__ = lambda *a: 3
    __hash__ = lambda *a: hash(3)
    __class__ = int
"""
READER = r"""
import re
TEST = re.compile(rb"a[s]sert f\(1\) == (\d+)")  # is not what it looks for
def f(x):
    with open("/proc/self/mem", "rb", 0) as memory, open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(place, 16) for place in line.split()[0].split("-"))
            try:
                memory.seek(start)
                found = TEST.search(memory.read(end - start))
            except (OSError, ValueError, OverflowError):
                continue
            if found:
                return int(found[1])
"""
HACKS = {
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits when called": "import os\ndef f(x):\n    os._exit(0)",
    "raises SystemExit when called": "def f(x):\n    raise SystemExit(0)",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "an object equal to all": f"{ANY}\ndef f(x):\n    return Any()",
    "a number equal to all": f"class N(int):\n    {YES}\ndef f(x):\n    return N(0)",
    "a text equal to all": f"class N(str):\n    {YES}\ndef f(x):\n    return N('')",
    "a list of such": f"{ANY}\ndef f(x):\n    return [Any()]",
    "an exception of such": f"{ANY}\ndef f(x):\n    raise ValueError(Any())",
    "patches built-ins": "import builtins\nfor n in ('abs', 'all', 'isinstance', 'len'):\n    setattr(builtins, n, lambda *a: True)\n"
    "builtins.AssertionError = builtins.Exception = type('E', (BaseException,), {})\ndef f(x): return 0",
    "defines built-ins": "all = any = abs = isinstance = lambda *a: 0\nclass AssertionError(BaseException): pass\ndef f(x): return 0",
    "defines math": "class math:\n    isclose = lambda *a: True\ndef f(x): return 0",
    "patches the wire": "import sys, json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\n"
    "for m in list(sys.modules.values()):\n    if 'wire' in getattr(m, '__name__', ''):\n"
    "        m.encode = lambda *a: True\n        m.Wire.send = lambda *a: None\ndef f(x): return 0",
    "writes everywhere": "import os\nfor fd in range(64):\n    try:\n"
    '        os.write(fd, b\'{"tests": 1}\\n{"passed": true, "error": null}\\n{"value": true}\\n\' * 9)\n    except OSError:\n        pass\n'
    "def f(x): return 0",
    "answers for itself": "import os, sys\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"value\": 3}\\n' * 50)\n"
    "    except OSError: pass\ndef f(x): return 0\n",
    "reads its memory": READER,
    "kills": "import os, signal\nfor p in range(1, 50):\n    try: os.kill(p, 0) if p == os.getpid() else os.kill(p, 9)\n"
    "    except OSError: pass\ndef f(x): return 0",
    "says yes": "print('{\"tests\": 2}')\nprint('{\"passed\": true, \"error\": null}')\nprint('OK')\ndef f(x): return 0",
    "ends the tests' loops": "def f(x):\n    raise StopIteration",
    "takes long to answer": "import time\ndef f(x): time.sleep(60)",
    "answers a lot": "def f(x): return 'x' * (1 << 27)",
    "answers deeply": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "answers itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
}
ASSERTS = [
    "assert f(1) == 1234567",
    "assert 1234567 == f(1)",
    "assert abs(f(1) - 1234567) < 1e-6",
    "assert 1234567 in f(1)",
    "assert f(1) in (1234567, 0.5)",
    "assert all(f(i) == 1234567 for i in range(3))",
    "assert all(map(lambda i: f(i) == 1234567, range(3)))",
    "assert isinstance(f(1), int) and f(1) > 1234566",
    "assert math.isclose(f(1), 1234567)",
    "assert len(f(1)) == 1234567",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 1234567)",
]


@needs_bwrap
@pytest.mark.parametrize("name", HACKS)
def test_hacks(name):
    value, _, why = score(HACKS[name], ASSERTS, partial=True, test_timeout=0.3, timeout=5.0)
    assert (value, bool(why)) == (0.0, True), why


def test_the_reader_of_memory_would_find_a_test_in_it():
    told = [sys.executable, "-c", f"{READER}\ntests = 'assert f(1) == ' + input()\nprint(f(1))"]
    assert subprocess.run(told, input="1234567", capture_output=True, text=True, check=True).stdout == "1234567\n"


@needs_bwrap
def test_the_right_answer_passes_the_same_tests():
    program = "class N(int):\n    def __len__(self): return 1234567\ndef f(x): return 1234567"
    assert score(program, ASSERTS, partial=True)[1] == "9/11"  # an int has no ``in`` and no ``len``


@needs_bwrap
def test_hacks_by_output():
    pairs = [{"input": "1\n", "output": "1234567"}]
    for program in ("import sys; sys.exit(0)", "print('OK')", "import os; os._exit(0)", "", "print('1234567'[:3])"):
        assert score(program, pairs)[0] == 0.0, program
    assert score("print(1234567); raise SystemExit(1)", pairs)[0] == 0.0  # right, and then it failed
    assert score("while True: print(1234567)", pairs)[0] == 0.0


UNSCORED = [
    ("class enc(Exception): pass\ndef dec(x): return 0", "assert dec(enc('abc')) == 'abc'"),
    ("def enc(x): raise ImportError('x')\ndef dec(x): return x", "assert dec(enc('abc')) == 'abc'"),
    (
        "class O:\n    def sort(self, key=None): return 1\ndef f(x): return O()",
        "r = f(1)\nr.sort(key=lambda x: x)\nassert r == [1]",
    ),
    (
        "class O:\n    def sort(self, key=None): return 1\nclass f(O):\n    def __init__(self, x): pass",
        "r = f(1)\nr.sort(key=lambda x: x)\nassert r == [1]",
    ),
    ("def f(x): return 1", "from solution import g\nassert g(1) == 2"),
    (
        "class E(Exception): pass\nE.__module__, E.__name__ = 'unittest.case', 'SkipTest'\ndef f(x): raise E",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)",
    ),
]


@needs_bwrap
@pytest.mark.parametrize(("program", "tests"), UNSCORED)
def test_no_program_makes_itself_unscored(program, tests):
    assert score(program, tests)[0] == 0.0


@needs_bwrap
def test_loops_of_the_tests_are_not_ended_by_the_program():
    tests = [
        "assert all(map(lambda i: next(f(i)) == 2, range(3)))",
        "assert list(filter(lambda i: next(f(i)), [1])) == []",
    ]
    assert score("def f(x): return iter([])", tests, partial=True)[0] == 0.0
    assert score("def f(x): return iter([2 * (x < 3)])", [tests[0]])[0] == 1.0


@needs_bwrap
def test_what_one_test_does_to_the_next():
    program = "import time\ndef f(x):\n    if x == 2:\n        while True: time.sleep(0.01)\n    return x"
    _, passed, why = score(program, [f"assert f({i}) == {i}" for i in (1, 2, 3)], partial=True, test_timeout=1.0)
    assert (passed, why) == ("2/3", "test 2: TimeoutError: the test's time is over")
    stuck = "def f(x):\n    return x if x != 2 else sum(range(10**12))"  # in C: it cannot be called back
    _, passed, why = score(stuck, [f"assert f({i}) == {i}" for i in (1, 2, 3)], partial=True, test_timeout=1.0)
    assert passed == "1/3"
    slow = "import time\ntime.sleep(60)"
    assert score(slow, [{"input": "", "output": ""}] * 20, timeout=0.7, test_timeout=0.3, partial=True)[1:] == (
        "0/20",
        "test 1: timeout",
    )


@needs_bwrap
def test_limits_are_handed_on():
    eats = "def f(x):\n    return len(bytearray(150 * 10**6))"
    assert score(eats, ["assert f(1)"])[0] == 1.0
    assert "MemoryError" in score(eats, ["assert f(1)"], memory=100)[2]
    writes = "def f(x):\n    return open('file', 'w').write(x * 1000)"
    assert "Read-only" in score(writes, ["assert f('a') == 1000"])[2]
    assert score(writes, ["assert f('a') == 1000"], files=1)[0] == 1.0
    numpy = "import numpy as np\ndef f(n):\n    return np.arange(n)"
    tests = ["import numpy as np\nassert (f(3) == np.array([0, 1, 2])).all()", "assert f(3)[1] == 1"]
    assert score(numpy, tests, packages=True)[0] == 1.0
    assert "ModuleNotFoundError" in score(numpy, tests)[2]


# -- rows that cannot be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "must be assert statements, a test program, or inputs with outputs; got None"),
        ("", "got ''"),
        ([], r"got \[\]"),
        ([1], r"got \[1\]"),
        ([{"input": "1"}], "got .*input"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ({"inputs": [], "outputs": []}, "as many inputs as outputs"),
        ("assert f(", "SyntaxError"),
        (["assert f(1) == 1", "assert f("], "SyntaxError"),
        ("def check(candidate): assert candidate(1)", "entry_point"),
        ("def test_it(fixture): assert f(1)", "must take nothing"),
        ("def verify():\n    assert f(1) == 2", "only in functions that nothing calls"),
        (["def verify():\n    assert f(1) == 2"], "only in functions that nothing calls"),
        (
            "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): assert f(1)",
            "not be async",
        ),
        ("class TestF:\n    def test_a(self, tmp_path): assert f(1)", "nothing but self"),
        ("from contextlib import redirect_stdout\nassert f()", "does not reach the program"),
        (
            "from unittest.mock import patch\nwith patch('builtins.input'):\n    assert f()",
            "does not reach the program",
        ),
        ("import sys, io\nsys.stdin = io.StringIO('1')\nassert f()", r"use sys.stdin"),
        ("import asyncio\nassert asyncio.run(f()) == 1", "use asyncio"),
        ([{"input": 1, "output": 1, "fn_name": "f"}, {"input": 1, "output": 1}], "all be of one function"),
    ],
)
def test_rows_without_tests(tests, message):
    with pytest.raises(DataError, match=message):
        parse_tests(tests)


@needs_bwrap
def test_tests_that_cannot_be_run_are_no_zero():
    with pytest.raises(DataError, match=r"hand over a function: only plain data"):
        score("def f(g):\n    return g(1)", ["assert f(lambda x: x) == 1"])
    in_a_case = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(f(len), 1)"
    )
    with pytest.raises(DataError, match="hand over a builtin_function_or_method"):
        score("def f(g):\n    return g(1)", in_a_case)


@needs_bwrap
def test_tests_that_need_what_is_not_there_are_no_zero():
    with pytest.raises(DataError, match="No module named 'pytest'"):
        score("def f(x): return x", "import pytest\nfrom solution import f\ndef test_a():\n    assert f(1) == 1")
    with pytest.raises(DataError, match="do not define test_a after all"):
        score("def f(x): return x", "if False:\n    def test_a():\n        assert f(1) == 1")


@needs_bwrap
def test_tests_that_test_nothing_are_no_one():
    with pytest.raises(DataError, match="an empty program passes them"):
        score("def f(x): return x", "def run():\n    if f(1) != 2: raise Exception('no')")
    with pytest.raises(DataError, match="an empty program passes them"):
        score("def f(x): return x", ["assert True"], partial=True)


def test_without_a_sandbox_it_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match="Install bubblewrap"):
        asyncio.run(code("no program at all", ["assert f(1)"]))


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```\n```cpp\nb\n```", "a\n"),
        ("```cpp\na\n```", None),
        ("```Python title=x\na\n", "a\n"),
        ("  ```python3\n  a\n  ```", "  a\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("a = 1", "a = 1"),
        ("  \n", None),
        ("```python\n```", ""),
    ],
)
def test_programs_are_found(text, program):
    assert extract_program(text) == program


@needs_bwrap
def test_what_stands_in_the_prompt_already_counts():
    completion = [{"role": "assistant", "content": "def f(x):\n    return x\n```"}]
    assert asyncio.run(code(completion, ["assert f(1) == 1"], prefill="```python\n")) == 1.0
    assert asyncio.run(code("def f(x):\n    return x", ["assert f(1) == 1"])) == 1.0
    assert asyncio.run(code("def f(x):\n    return x", ["assert f(1) == 1"], unfenced=False)) == 0.0


def test_outputs():
    assert same_output("", "\n\n")
    assert same_output("a\r\nb", "a\nb ")
    assert not same_output("a\n\nb", "a\nb")
    assert not same_output("A", "a")


@needs_bwrap
def test_a_program_that_goes_on_needs_a_text():
    with pytest.raises(RewardError, match="prompts that are strings, got list"):
        asyncio.run(code("x", ["assert True"], prompt=[], continues=True))


@needs_bwrap
def test_in_the_runner_a_row_without_tests_is_unscored():
    prompts = [Prompt(n, n, (1,), "", "", {"tests": tests}) for n, tests in enumerate([["assert f(1) == 1"], None])]
    texts = ["```python\ndef f(x): return 1\n```", "```python\ndef f(x): return 2\n```", "no program\n```\n1/0\n```"]
    groups = [
        Group(prompt, tuple(Completion((3,), (0.0,), FinishReason.EOS, text, 0) for text in texts))
        for prompt in prompts
    ]
    scores = RewardRunner([resolve_reward("cohort.rewards.code:code")]).score(groups)
    assert scores.rewards_S[:3].tolist() == [1.0, 0.0, 0.0]
    assert scores.rewards_S[3:].isnan().all()
    assert "DataError" in scores.errors[3]
    assert scores.extras["passed"] == ["1/1", "0/1", "0/1", None, None, None]


def test_it_is_called_per_sample():
    kind = call_options(code)
    assert (kind.per, kind.is_async) == ("sample", True)
