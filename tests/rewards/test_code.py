"""The code reward: right and wrong programs, every form of tests, and programs that try to pass without being right."""

import asyncio
import json
import subprocess
import sys

import pytest

from cohort.errors import DataError, RewardError
from cohort.rewards import RewardRunner, resolve_reward
from cohort.rewards.code import code, extract_program, parse_tests, same_output
from tests.conftest import each
from tests.rewards.conftest import rollout
from tests.sandbox.needs import needs_bwrap


def score(program: str, tests, **arguments):
    """The reward, and what it logged. The time limits are for a busy machine."""
    return scores([(program, tests, arguments)])[0]


def scores(calls, at_once=3):
    """``score`` for each ``(program, tests, arguments)``, several at a time: a program mostly waits to be started."""

    async def one(free, program, tests, arguments):
        logged: dict = {}
        completion = f"Thinking.\n```python\n{program}\n```\nDone."
        limits = {"timeout": 90.0, "test_timeout": 30.0}
        async with free:
            value = await code(completion, tests, log_extra=logged.__setitem__, **limits | arguments)
        return value, logged["passed"], logged["failure"]

    async def every():
        free = asyncio.Semaphore(at_once)
        return await asyncio.gather(*(one(free, *call) for call in calls))

    return asyncio.run(every())


# -- right and wrong programs -------------------------------------------------------------------------------------------

VALUES = """[None, True, 1, 2.5, float('inf'), 1j, 'é\\ud800', b'\\xff', (1,), {2}, frozenset({3}), {(1, 2): [4]},
    range(3), deque([5]), Decimal('0.1'), Fraction(1, 3), 10**5000]"""
IMPORTS = "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import deque\n"
FUNCTIONS = {  # a right program, a change that makes it wrong, and tests
    "a function": (
        "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))",
        ("n > 1", "n % 2 == 1"),
        ["assert is_prime(2)", "assert [n for n in range(12) if is_prime(n)] == [2, 3, 5, 7, 11]"],
    ),
    "arguments that are changed": (
        "def f(m): m.reverse()\ndef rotate(m):\n    m[:] = [list(row) for row in zip(*m[::-1])]",
        ("m.reverse()", "pass"),
        [
            "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]",
            "l = [1, 2]\nf(m=l)\nassert l == [2, 1]",
            "from collections import deque\nd = deque([1, 2])\nf(d)\nassert d == deque([2, 1])",
        ],
    ),
    "a generator with the name of a module": (
        "def queue(n):\n    for i in range(0, n, 2):\n        yield i",
        ("range(0", "range(1"),
        ["assert list(queue(7)) == [0, 2, 4, 6]", "assert next(iter(queue(3))) == 0"],
    ),
    "a class": (
        "class Empty(Exception): pass\nclass Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n    def pop(self):\n"
        "        if not self.items: raise Empty('none')\n        return self.items.pop()\n"
        "    def __len__(self): return len(self.items)",
        ("return self\n", "\n"),
        [
            "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.items == [1]",
            "try:\n    Stack().pop()\nexcept Empty:\n    pass\nelse:\n    assert False",
        ],
    ),
    "objects compared with each other": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Point:\n    x: int\n    y: int\n"
        "    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)",
        ("self.y + other.y", "self.y"),
        ["assert Point(1, 2) + Point(1, 1) == Point(2, 3)\nassert Point(1, 2) != Point(2, 1) and Point(1, 2).x == 1"],
    ),
    "the name of a built-in": ("def sum(a, b): return a + b", ("+", "-"), ["assert sum(10, 15) == 25"]),
    "every type of plain data": (
        f"{IMPORTS}def kinds(): return {VALUES}",
        ("[4]", "(4,)"),
        [f"{IMPORTS}assert kinds() == {VALUES}\nassert kinds()[1] is True and type(kinds()[8]) is tuple"],
    ),
    "enums": (
        "from enum import Enum, IntEnum\nclass C(str, Enum):\n    RED = 'red'\nclass N(IntEnum):\n    ONE = 1\n"
        "def f(): return C.RED\ndef g(x): return x is N.ONE",
        ("return C.RED", "return 'red'"),
        [
            "assert f() == 'red' and f() == C.RED and f().value == 'red' and isinstance(f(), C)",
            "assert N.ONE == 1 and N.ONE + 1 == 2 and N.ONE.name == 'ONE' and g(N.ONE)",
        ],
    ),
    "named tuples": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')",
        ("P = namedtuple('P', 'x y')", "def P(x, y): return (x, y)"),
        ["p = P(1, y=2)\nassert p == (1, 2) and p.y == 2 and repr(p) == 'P(x=1, y=2)' and isinstance(p, P)"],
    ),
    "mappings": (
        "from collections import Counter, defaultdict\ndef f(s): return Counter(s)\ndef g(): return defaultdict(int, a=1)",
        ("Counter(s)", "dict.fromkeys(s, 2)"),
        ["assert f('aab').most_common(1) == [('a', 2)]", "assert g()['z'] == 0 and f('a')['z'] == 0"],
    ),
    "classes that extend containers": (
        "class Stack(list):\n    def push(self, x): self.append(x)\nclass D(dict):\n    def __missing__(self, k): return 0\n"
        "def f(): return [*Stack('ab')]",
        ("self.append(x)", "pass"),
        [
            "s = Stack()\ns.push(1)\nassert s == [1] and [1] == s and s != [2] and s[-1] == 1 and len(s) == 1",
            "assert D()['a'] == 0 and D(a=1) == {'a': 1} and f() == ['a', 'b']",
        ],
    ),
    "dates": (
        "from datetime import *\ndef f(d): return d + timedelta(days=1, microseconds=3)",
        ("days=1", "days=2"),
        [
            "import datetime\nassert f(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 2)",
            "from datetime import datetime, timezone, timedelta\nd = datetime(2020, 1, 1, tzinfo=timezone.utc)\n"
            "assert f(d) == datetime(2020, 1, 2, microsecond=3, tzinfo=timezone.utc) and f(d) - d == timedelta(1, 0, 3)",
        ],
    ),
    "types": ("def f(x): return type(x)", ("type(x)", "'int'"), ["assert f(3) is int and f(3)('4') == 4"]),
    "identity": (
        "class S:\n    one = None\n    def __new__(cls):\n        cls.one = cls.one or object.__new__(cls)\n        return cls.one\n"
        "class N: pass",
        ("cls.one or ", ""),
        [
            "assert S() is S()",
            "a, b = N(), N()\na.next = b\nassert a.next is b and a is not b\ndel a.next\nassert not hasattr(a, 'next')",
        ],
    ),
    "repr and slices": (
        "class P:\n    def __repr__(self): return 'P()'\n    def __str__(self): return '<P>'\n    def __int__(self): return 3\n"
        "    def __getitem__(self, i): return [1, 2, 3][i]",
        ("__repr__", "__format__"),
        [
            "assert repr(P()) == 'P()' and str(P()) == '<P>' and str([P()]) == '[P()]' and int(P()) == 3",
            "assert P()[1:] == [2, 3]",
        ],
    ),
    "exceptions": (
        "import json\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n"
        "class A(Exception): pass\nclass E(A):\n    def __init__(self, b):\n        super().__init__('no')\n        self.b = b\n"
        "def f(x): raise E(x)\ndef g(x): return {}[x]\ndef h(s): return json.loads(s)",
        ("raise E(x)", "raise ValueError(x)"),
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
        ("sum(a)", "0"),
        [
            "def check(total):\n    assert total([1]) == 1\ncheck(total)",
            "def test_a():\n    assert total([1, 2]) == 3\ndef other():\n    total = 3\n    return total",
            "total = total([1])\nassert total == 1",
        ],
    ),
}


@needs_bwrap
def test_functions():
    wrong = {name: right.replace(*change) for name, (right, change, _) in FUNCTIONS.items()}
    found = scores([(right, tests, {}) for right, _, tests in FUNCTIONS.values()])
    failed = scores([(wrong[name], "\n".join(tests), {}) for name, (_, _, tests) in FUNCTIONS.items()])
    for (name, (right, _, tests)), passed, (value, *_) in zip(FUNCTIONS.items(), found, failed, strict=True):
        assert wrong[name] != right, name
        assert passed == (1.0, f"{len(tests)}/{len(tests)}", ""), name
        assert value == 0.0, name


STACK = "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\ndef f(n): return n and 1 + f(n - 1)\n"
PROGRAMS = [
    ("a, b = map(int, input().split())\nprint(a + b)", "1 2\n", "3\n"),
    ("n = int(input())\nfor i in range(n): print('*' * (i + 1), end=' \\n')", "3", "*\n**\n***"),
    ("import os\nprint(len(os.read(0, 100)))", "abc", "3"),
    (f"{STACK}t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()", "", "20000"),
    ("if __name__ == '__main__':\n    print(open(0).read().upper())", "abc", "ABC"),
]


@needs_bwrap
def test_programs():
    for program, given, expected in PROGRAMS:
        assert score(program, [{"input": given, "output": expected}])[0] == 1.0, program
    assert score(PROGRAMS[0][0], [{"input": "1 2", "output": "3\nmore"}])[0] == 0.0
    pairs = [("", "\n\n"), ("a\r\nb", "a\nb "), ("a\n\nb", "a\nb"), ("A", "a")]
    assert [same_output(*pair) for pair in pairs] == [True, True, False, False]


@needs_bwrap
def test_shares():
    asserts = ["assert f(1) == 1", "assert f(2) == 3", "assert f(3) == 3", "assert g() == 1"]
    value, passed, why = score("def f(x):\n    return x", asserts, partial=True)
    assert (value, passed) == (0.5, "2/4")
    assert why.startswith("test 2: AssertionError")
    assert score("def f(x):\n    return x", asserts)[:2] == (0.0, "1/4")  # no test runs after the first failure
    pairs = {"inputs": ["1", "2", "x"], "outputs": ["1", "3", "0"]}
    value, passed, why = score("print(int(input()))", pairs, partial=True)
    assert (value, passed, why) == (1 / 3, "1/3", "test 2: expected '3', got '2'")
    value, passed, why = score("print(int(input()))", {"inputs": ["x", "1"], "outputs": ["1", "1"]})
    assert (value, passed, why[:30]) == (0.0, "0/2", "test 1: failed: ValueError: in")


@needs_bwrap
def test_humaneval_rows():
    row = {
        "prompt": 'def incr_list(l: list):\n    """Return list with elements incremented by 1."""\n',
        "tests": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
        "    assert candidate([3, 2]) == [4, 3]\n",
        "entry_point": "incr_list",
    }
    whole = row["prompt"] + "    return [x + 1 for x in l]\n"
    assert score(whole, row["tests"], entry_point="incr_list")[:2] == (1.0, "1/1")
    assert score(whole.replace("+", "-"), row["tests"], entry_point="incr_list")[:2] == (0.0, "0/1")
    assert asyncio.run(code("    return [x + 1 for x in l]\n", continues=True, **row)) == 1.0
    with pytest.raises(RewardError, match="prompts that are strings, got list"):
        asyncio.run(code("x", ["assert True"], prompt=[], continues=True))
    check = "def check(candidate):\n    assert candidate(x=4) == 8"
    assert score("def sum(x): return 8", check, entry_point="sum")[0] == 1.0
    assert score("class Solution:\n    def f(self, x): return 2 * x", check, entry_point="Solution().f")[0] == 1.0
    # The tested function is the program's, even where the standard library has one of its name.
    floors = "assert f(2) == 2\nassert floor(f(2)) == 2"
    assert score("def f(x): return x", floors, entry_point="floor")[0] == 0.0


@needs_bwrap
def test_apps_rows():
    row = json.dumps({"fn_name": "pairs", "inputs": [[[1, 2], 3], [[], 0]], "outputs": [[[1, 3], [2, 3]], [[]]]})
    program = "def pairs(a, b):\n    return [(x, b) for x in a]"
    assert score(program, row)[0] == 1.0
    assert score("class Solution:\n    def pairs(self, a, b): return [(x, b) for x in a]", row)[0] == 1.0
    assert score(program.replace("x, b", "b, x"), row)[:2] == (0.0, "0/2")
    lines = json.dumps({"inputs": [["1", "2"]], "outputs": [["2", "1"]]})
    assert score("a = input(); print(input()); print(a)", lines)[0] == 1.0
    keys = json.dumps({"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [{1: [True], 2: [True]}]})  # become strings
    assert score("def f(a): return {x: (True,) for x in a}", keys)[0] == 1.0
    assert score("def f(a): return {x: (False,) for x in a}", keys)[0] == 0.0


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


FORMS = {
    "called under the guard": "def run_tests():\n    assert f(1) == 2\nif __name__ == '__main__':\n    run_tests()",
    "through another": "def one():\n    assert f(1) == 2\ndef run():\n    one()\nrun()",
    "given arguments": "def check_one(a, b):\n    assert f(a) == b\nfor a, b in [(1, 2), (2, 3)]:\n    check_one(a, b)",
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
def test_forms_of_tests():
    for program, expected in (("def f(x): return x + 1", 1.0), ("def f(x): return 0", 0.0)):
        entries = [{"entry_point": "f"} if "check(candidate)" in form else {} for form in FORMS.values()]
        found = scores([(program, form, entry) for form, entry in zip(FORMS.values(), entries, strict=True)])
        assert dict(zip(FORMS, (value for value, *_ in found), strict=True)) == dict.fromkeys(FORMS, expected)


# -- programs that try to cheat -----------------------------------------------------------------------------------------

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
TEST = re.compile(rb"a[s]sert f\(1\) == (\d+)")  # this line does not match
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
    "exits immediately": "import os\nos._exit(0)",
    "exits when called": "import os\ndef f(x):\n    os._exit(0)",
    "raises SystemExit when called": "def f(x):\n    raise SystemExit(0)",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "an object that equals everything": f"class Equal:\n    {YES}\ndef f(x):\n    return Equal()",
    "an object that equals everything and claims to be a number": f"{ANY}\ndef f(x):\n    return Any()",
    "a number that equals everything": f"class N(int):\n    {YES}\ndef f(x):\n    return N(0)",
    "a string that equals everything": f"class N(str):\n    {YES}\ndef f(x):\n    return N('')",
    "a list of such objects": f"{ANY}\ndef f(x):\n    return [Any()]",
    "an exception with such an object": f"{ANY}\ndef f(x):\n    raise ValueError(Any())",
    "patches built-ins": "import builtins\nfor n in ('abs', 'all', 'isinstance', 'len'):\n    setattr(builtins, n, lambda *a: True)\n"
    "builtins.AssertionError = builtins.Exception = type('E', (BaseException,), {})\ndef f(x): return 0",
    "defines built-ins": "all = any = abs = isinstance = lambda *a: 0\nclass AssertionError(BaseException): pass\ndef f(x): return 0",
    "defines math": "class math:\n    isclose = lambda *a: True\ndef f(x): return 0",
    "patches the wire": "import sys, json\njson.dumps = lambda *a, **k: '{\"error\": null}'\n"
    "for m in list(sys.modules.values()):\n    if 'wire' in getattr(m, '__name__', ''):\n"
    "        m.encode = lambda *a: True\n        m.Wire.send = lambda *a: None\ndef f(x): return 0",
    "writes everywhere": "import os\nfor fd in range(64):\n    try:\n"
    '        os.write(fd, b\'{"tests": 1}\\n{"error": null}\\n{"value": true}\\n\' * 9)\n    except OSError:\n        pass\n'
    "def f(x): return 0",
    "forges answers": "import os, sys\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"value\": 3}\\n' * 50)\n"
    "    except OSError: pass\ndef f(x): return 0\n",
    "reads its memory": READER,
    "kills": "import os, signal\nfor p in range(1, 50):\n    try: os.kill(p, 0) if p == os.getpid() else os.kill(p, 9)\n"
    "    except OSError: pass\ndef f(x): return 0",
    "prints results": "print('{\"tests\": 2}')\nprint('{\"error\": null}')\nprint('OK')\ndef f(x): return 0",
    "ends the tests' loops": "def f(x):\n    raise StopIteration",
    "answers slowly": "import time\ndef f(x): time.sleep(60)",
    "a long answer": "def f(x): return 'x' * (1 << 27)",
    "a deeply nested answer": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "an answer that contains itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
}
ASSERTS = [
    "assert f(1) == 1234567",
    "assert 1234567 == f(1)",
    "assert abs(f(1) - 1234567) < 1e-6",
    "assert 1234567 in f(1)",
    "assert f(1) in (1234567, 0.5)",
    "assert all(f(i) == 1234567 for i in range(3))",
    "assert all(map(lambda i: f(i) == 1234567, range(3)))",
    "assert all(x == 1234567 for x in itertools.starmap(f, [(1,)]))",
    "assert isinstance(f(1), int) and f(1) > 1234566",
    "assert math.isclose(f(1), 1234567)",
    "assert len(f(1)) == 1234567",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 1234567)",
]


@needs_bwrap
def test_hacks():
    short = {"test_timeout": 0.5, "timeout": 2.0}
    limits = [short if name in ("answers slowly", "patches the wire") else {} for name in HACKS]
    calls = [
        (program, ASSERTS, {"partial": True, **some}) for program, some in zip(HACKS.values(), limits, strict=True)
    ]
    for name, (value, _, why) in zip(HACKS, scores(calls), strict=True):
        assert (value, bool(why)) == (0.0, True), (name, why)


def test_reading_memory_would_find_a_test_there():
    told = [sys.executable, "-c", f"{READER}\ntests = 'assert f(1) == ' + input()\nprint(f(1))"]
    assert subprocess.run(told, input="1234567", capture_output=True, text=True, check=True).stdout == "1234567\n"


@needs_bwrap
def test_the_right_answer_passes_the_same_tests():
    program = "class N(int):\n    def __len__(self): return 1234567\ndef f(x): return 1234567"
    assert score(program, ASSERTS, partial=True)[1] == "10/12"  # ``in`` and ``len`` do not apply to an int


@needs_bwrap
def test_hacks_by_output():
    pairs = [{"input": "1\n", "output": "1234567"}]
    for program in ("import sys; sys.exit(0)", "print('OK')", "import os; os._exit(0)", "", "print('1234567'[:3])"):
        assert score(program, pairs)[0] == 0.0, program
    assert score("print(1234567); raise SystemExit(1)", pairs)[0] == 0.0  # right, but it failed afterwards
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
def test_a_program_cannot_make_itself_unscored_or_end_loops_of_the_tests():
    assert [score(program, tests)[0] for program, tests in UNSCORED] == [0.0] * len(UNSCORED)
    loops = ["all(map(lambda i: next(f(i)) == 2, range(3)))", "list(filter(lambda i: next(f(i)), [1])) == []"]
    asserts = [f"assert {loop}" for loop in loops]
    assert score("def f(x): return iter([])", asserts, partial=True)[0] == 0.0
    assert score("def f(x): return iter([2 * (x < 3)])", asserts[:1])[0] == 1.0


@needs_bwrap
def test_a_stuck_test_and_the_next_one():
    program = "import time\ndef f(x):\n    if x == 2:\n        while True: time.sleep(0.01)\n    return x"
    stuck = "def f(x):\n    return x if x != 2 else sum(range(10**12))"  # in C, where no signal handler runs
    slow = "import time\nif input() == 'a': time.sleep(60)"
    tests = [f"assert f({i}) == {i}" for i in (1, 2, 3)]
    calls = [
        (program, tests, {"partial": True, "test_timeout": 1.0}),
        (program, ["assert f(2) == 2"], {"timeout": 1.0}),
        (stuck, tests, {"partial": True, "test_timeout": 1.0}),
    ]
    for inputs, limit in (("ab", 20.0), ("a" * 20, 0.7)):
        limits = {"timeout": limit, "test_timeout": min(2.0, limit / 2)}
        calls.append((slow, [{"input": given, "output": ""} for given in inputs], {"partial": True, **limits}))
    of_one, of_all, in_c, *of_inputs = scores(calls, at_once=5)
    assert of_one[1:] == ("2/3", "test 2: TimeoutError: the test's time is over")
    assert of_all[2] == "test 1: timeout"
    assert in_c[1] == "1/3"
    assert [found[1:] for found in of_inputs] == [("1/2", "test 1: timeout"), ("0/20", "test 1: timeout")]


@needs_bwrap
def test_limits_reach_the_program():
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


# -- rows without usable tests ---------------------------------------------------------------------------------------


@each(
    ("tests", "message"),
    [
        (None, "must be assert statements, a test program, or inputs with outputs; got None"),
        ("", "got ''"),
        ([], r"got \[\]"),
        ([{"input": "1"}], "got .*input"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ("assert f(", "SyntaxError"),
        (["assert f(1) == 1", "assert f("], "SyntaxError"),
        ("def check(candidate): assert candidate(1)", "entry_point"),
        ("def test_it(fixture): assert f(1)", "must have no parameters"),
        ("def verify():\n    assert f(1) == 2", "only in functions that nothing calls"),
        ("class TestF:\n    async def test_a(self): assert f(1)", "not be async"),
        ("class TestF:\n    def test_a(self, tmp_path): assert f(1)", "no parameters but self"),
        ("from contextlib import redirect_stdout\nassert f()", "does not reach the program"),
        ("from unittest.mock import patch\nwith patch('builtins.input'): assert f()", "does not reach the program"),
        ("import sys, io\nsys.stdin = io.StringIO('1')\nassert f()", r"use sys.stdin"),
        ("import asyncio\nassert asyncio.run(f()) == 1", "use asyncio"),
        ([{"input": 1, "output": 1, "fn_name": "f"}, {"input": 1, "output": 1}], "all be of one function"),
    ],
)
def test_invalid_tests(tests, message):
    with pytest.raises(DataError, match=message):
        parse_tests(tests)


@needs_bwrap
def test_tests_that_cannot_be_run_give_no_score():
    in_a_case = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(f(len), 1)"
    for tests, message in {
        "assert f(lambda x: x) == 1": "pass a function to the program",
        in_a_case: "pass a builtin_function_or_method",
        "import pytest\nfrom solution import f\ndef test_a():\n    assert f(1) == 1": "No module named 'pytest'",
        "if False:\n    def test_a():\n        assert f(1) == 1": "the definition of test_a did not run",
        "def run():\n    if f(1) != 2: raise Exception('no')": "an empty program passes them",
        "assert True": "an empty program passes them",
        "S().push(len)\nassert f(1) == 1": "pass a builtin_function_or_method",
    }.items():
        with pytest.raises(DataError, match=message):
            score("def f(x): return x\nclass S:\n    def push(self, x): pass", tests, partial=True)


def test_without_a_sandbox_the_reward_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match="Install bubblewrap"):
        asyncio.run(code("no program at all", ["assert f(1)"]))


# -- parts -------------------------------------------------------------------------------------------------------------


@each(
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
def test_extract_program(text, program):
    assert extract_program(text) == program


@needs_bwrap
def test_a_prefilled_fence_and_no_fence():
    completion = [{"role": "assistant", "content": "def f(x):\n    return x\n```"}]
    assert asyncio.run(code(completion, ["assert f(1) == 1"], prefill="```python\n")) == 1.0
    assert asyncio.run(code("def f(x):\n    return x", ["assert f(1) == 1"])) == 1.0
    assert asyncio.run(code("def f(x):\n    return x", ["assert f(1) == 1"], unfenced=False)) == 0.0


@needs_bwrap
def test_the_runner_leaves_a_row_without_tests_unscored():
    texts = ["```python\ndef f(x): return 1\n```", "```python\ndef f(x): return 2\n```", "no program\n```\n1/0\n```"]
    groups = [rollout(texts, tests=tests)[0] for tests in (["assert f(1) == 1"], None)]
    scores = RewardRunner([resolve_reward("cohort.rewards.code:code")]).score(groups)
    assert scores.rewards_S[:3].tolist() == [1.0, 0.0, 0.0]
    assert scores.rewards_S[3:].isnan().all()
    assert "DataError" in scores.errors[3]
    assert scores.extras["passed"] == ["1/1", "0/1", "0/1", None, None, None]
