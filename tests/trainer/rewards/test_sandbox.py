"""Ordinary programs and the assertions of known data sets keep working: each scores 1."""

from typing import Any

import pytest

from tests.trainer.rewards.config import reward_config
from trainer.rewards.code import score


def judged(program: str, truth: Any) -> float:
    config = reward_config(code={"time_limit": 5.0, "memory_limit_mb": 1024}).code
    return score(program, truth, config, seconds=60.0)["score"]


@pytest.mark.parametrize(
    ("program", "stdin", "stdout"),
    [
        ("print(sum(map(int, open(0).read().split())))", "1 2", "3"),
        ("print(sum(map(int, open('/dev/stdin').read().split())))", "1 2", "3"),
        ("import sys\nsys.stdin = open('/dev/stdin')\nprint(int(input()) + 1)", "2", "3"),
        ("import os, io\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(int(input()))", "3", "3"),
        ("print(2 ** 9999 % 10 ** 9)", "", str(2**9999 % 10**9)),
        ("import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(7 ** 20000)))", "", str(len(f"{7**5000:x}") and 16902)),
        ("from functools import cache\n@cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nprint(f(900) % 1000)", "", "800"),
        (
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
            "def f(n): return 0 if n == 0 else 1 + f(n - 1)\ndef main(): print(f(50000))\n"
            "t = threading.Thread(target=main)\nt.start()\nt.join()",
            "",
            "50000",
        ),
        ("from concurrent.futures import ThreadPoolExecutor as T\nwith T(8) as t: print(sum(t.map(int, '1234')))", "", "10"),
        ("import threading, queue\nq = queue.Queue()\nthreading.Timer(0.01, q.put, (7,)).start()\nprint(q.get())", "", "7"),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 7\nprint(asyncio.run(f()))", "", "7"),
        ("import datetime\nprint(datetime.datetime.strptime('2024-02-29', '%Y-%m-%d').timetuple().tm_yday)", "", "60"),
        ("import numpy as np\nprint(np.linalg.inv(np.eye(3)).sum(), np.fft.fft([1, 0]).real.sum())", "", "3.0 2.0"),
        ("import decimal, fractions, queue, array, zlib, hashlib, uuid, csv, pprint, textwrap, xml.dom\nprint(1)", "", "1"),
        ("import zoneinfo, locale, encodings.idna, unittest, dataclasses, enum, contextlib, graphlib\nprint('ü'.encode('idna'))", "",
         "b'xn--tda'"),
        ("import time\nt = time.perf_counter()\ntime.sleep(0.01)\nprint(time.perf_counter() > t)", "", "True"),
        ("import signal\nsignal.signal(signal.SIGALRM, lambda *a: print(7))\nsignal.alarm(1)\nsignal.pause()", "", "7"),
        ("import sys\nsys.stdout.write('7')\nsys.stdout.flush()\nprint(sys.stdin.isatty(), file=sys.stderr)", "", "7"),
        ("import resource, os\nprint(resource.getrlimit(resource.RLIMIT_CPU)[0] > 0, os.cpu_count() > 0, os.getpid() > 0)", "",
         "True True True"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    import traceback\n    traceback.print_exc()\nprint(7)", "", "7"),
        ("import random, tempfile\nprint(random.choice([7]))", "", "7"),
        ("exit(print(7))", "", "7"),
    ],
)  # fmt: skip
def test_programs_that_print(program: str, stdin: str, stdout: str) -> None:
    assert judged(program, {"inputs": [stdin], "outputs": [stdout]}) == 1.0


NODE = "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
BALANCED = NODE + "def depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))"
STACK = """
class StackError(Exception): pass
class Empty(StackError): pass
class Stack:
    LIMIT = 3
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty('nothing', 3)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __str__(self): return f'Stack{self.items}'
    def __add__(self, other): return Stack(*self.items, *other.items)
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *items): return cls(*items)
"""


@pytest.mark.parametrize(
    ("program", "asserts"),
    [
        # MBPP
        ("def remove_Occ(s, c): return s.replace(c, '', 1)", "assert remove_Occ('hello','l') == 'helo'"),
        ("def sum(a, b): return a + b", "assert sum(10,15) == 25"),
        ("def max(a, b): return a if a > b else b", "assert max(10,20)==20"),
        ("def lcm(a, b): return a * b", "assert lcm(2,3) == 6"),
        ("def add(a, b): return a + b", "assert isclose(add(1, 2), 3.0) and set(sorted([add(1, 2)])) == {3}"),
        ("def div_sum(n): return 3", "assert div_sum(7)==3"),
        ("class Pair(object):\n    def __init__(self, a, b): self.a, self.b = a, b\n"
         "def max_chain_length(arr, n): return len([p for p in arr if p.a < p.b][:n])",
         "assert max_chain_length([Pair(5, 24), Pair(15, 25), Pair(27, 40)], 4) == 3"),
        (BALANCED, "root = Node(4)\nroot.left = Node(2)\nroot.left.left = Node(1)\nassert depth(root) == 3 and root.right is None"),
        ("def f(x): return set(x), tuple(x), {1: x}", "assert f([1, 2]) == ({1, 2}, (1, 2), {1: [1, 2]})"),
        ("def area(r): return 3.14159 * r", "assert math.isclose(area(1), 3.14159, rel_tol=0.001)"),
        ("def f(): return 1j, b'x', 10 ** 5000, float('inf'), None, range(3), True",
         "assert f() == (1j, b'x', 10 ** 5000, float('inf'), None, range(3), True)"),
        ("def count_list(x): return len(x)", "assert count_list([[0], [1, 3], [5, 7]]) == 3"),
        # HumanEval's style without its form
        ("def encode(s): return s[::-1]\ndef decode(s): return s[::-1]",
         "from random import randint, choice\nimport string, copy\nfor _ in range(20):\n"
         "    text = ''.join(choice(string.ascii_lowercase) for i in range(randint(10, 20)))\n"
         "    assert decode(copy.deepcopy(encode(text))) == text"),
        # classes
        (STACK, "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and s.top == 1 and s[0] == 1"),
        (STACK, "assert list(Stack(1, 2) + Stack(3)) == [1, 2, 3] and str(Stack.of(1)) == 'Stack[1]' and Stack.LIMIT == 3"),
        (STACK, "assert 2 in Stack(1, 2) and 3 not in Stack(1, 2) and not Stack() and Stack(1) != None"),
        (STACK, "try:\n    Stack().pop()\n    assert False\nexcept StackError as error:\n    assert error.args == ('nothing', 3)"),
        (STACK, "import pytest\nwith pytest.raises(Empty, match='nothing'): Stack().pop()"),
        (STACK, "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and hasattr(Stack(), 'pop') and callable(Stack)"),
        (STACK, "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(Stack(3).pop(), 3)\n"
         "        self.assertRaises(Empty, Stack().pop)\n        self.assertRaises(AttributeError, getattr, Stack(), 'x')\n"
         "result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n"
         "assert result.testsRun == 1 and result.wasSuccessful()"),
        # exceptions
        ("def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** .5",
         "try:\n    root(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\nelse:\n    assert False"),
        ("def f(): return {}['a']", "try:\n    f()\nexcept KeyError as error:\n    assert error.args == ('a',)"),
        ("def f(b): return b.decode()", "try:\n    f(b'\\xff')\n    assert False\nexcept UnicodeDecodeError: pass"),
        # functions as arguments and results, generators
        ("def apply(f, xs): return [f(x) for x in xs]", "assert apply(lambda x: x * x, [1, 2]) == [1, 4] == apply(abs, [-1, 4])"),
        ("def f(key, xs): return sorted(xs, key=key)", "assert f(len, ['aa', 'b']) == ['b', 'aa'] and f(str.lower, ['b', 'A']) == ['A', 'b']"),
        ("def f(kinds, xs): return [x for x in xs if isinstance(x, kinds)]", "assert f(int, [1, 'a']) == [1] and f((int, str), [1, .5]) == [1]"),
        ("def adder(n): return lambda x: x + n", "assert adder(3)(4) == 7"),
        ("def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1", "assert list(itertools.islice(naturals(), 3)) == [0, 1, 2]"),
        ("def evens(xs): return (x for x in xs if x % 2 == 0)", "assert list(evens(iter([1, 2]))) == [2] and list(evens(x for x in 'a' if 0)) == []"),
        ("def f(d): return d.items(), d.keys()", "assert [sorted(x) for x in f({'b': 1})] == [[('b', 1)], ['b']]"),
        ("def f(xs): return map(str, xs)", "assert list(f([1])) == ['1']"),
        # arguments that are changed in place
        ("def rotate(xs): xs.append(xs.pop(0))", "xs = [1, 2, 3]\nassert rotate(xs) is None\nassert xs == [2, 3, 1]"),
        ("def fill(grid, d=None):\n    for row in grid: row[0] = 9\n    d['x'] = {1}", "g, d = [[1], [2]], {}\nfill(g, d=d)\nassert (g, d) == ([[9], [9]], {'x': {1}})"),
        # values of the standard library and numpy
        ("from collections import *\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2), Counter('aa'), deque([1], 3), OrderedDict(a=1), "
         "defaultdict(int, a=1)", "assert f() == ((1, 2), Counter(a=2), deque([1]), {'a': 1}, {'a': 1})"),
        ("from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\ndef f(d): return Decimal('1.10'), Fraction(1, 3), "
         "d + datetime.timedelta(1)", "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
         "assert f(datetime.date(2024, 2, 28)) == (Decimal('1.1'), Fraction(2, 6), datetime.date(2024, 2, 29))"),
        ("import enum\nclass C(enum.IntEnum):\n    RED = 1\ndef f(): return C.RED", "assert f() == 1 == C.RED"),
        ("import numpy as np\ndef f(x): return x @ x.T, np.int64(3), np.float32(.5), np.mean(x)",
         "product, n, half, mean = f(np.ones((2, 3)))\nassert np.allclose(product, 3) and product.shape == (2, 2) and n == 3 and half == mean / 2"),
        # what the assertions define themselves
        ("def total(node): return 0 if node is None else node.val + total(node.next)",
         "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
         "assert total(ListNode(1, ListNode(2))) == 3"),
        ("def double(node):\n    node.val *= 2\n    node.grow(1)\n    return node",
         "class N:\n    val = 3\n    def grow(self, n): self.val += n\nnode = N()\nassert double(node) is node and node.val == 7"),
        ("def f(x): return x + 1", "def reference(x): return x - -1\nassert all(f(i) == reference(i) for i in range(5))"),
        ("print('noise')\nx = 5\ndef f(): print('noise'); return x", "assert f() == x == 5"),
    ],
)  # fmt: skip
def test_assertions(program: str, asserts: str) -> None:
    assert judged(program, [asserts]) == 1.0


@pytest.mark.parametrize(
    ("program", "test", "entry_point"),
    [
        ("def truncate_number(x): return x % 1",
         "METADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n    assert candidate(3.5) == 0.5\n    assert abs(candidate(1.33) - 0.33) < 1e-6",
         "truncate_number"),
        ("def encode_cyclic(s): return s[1:] + s[:1]\ndef decode_cyclic(s): return s[-1:] + s[:-1]",
         "def check(candidate):\n    for s in ('abc', 'de'):\n        assert candidate(encode_cyclic(s)) == s", "decode_cyclic"),
        ("class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        return [0, 1]",
         "def check(candidate):\n    assert candidate(nums = [3,3],target = 6) == [0,1]", "Solution().twoSum"),
        ("def add(x: int, y: int): return x + y",
         "def check(candidate):\n    import random\n    for i in range(100):\n        x, y = random.randint(0, 1000), random.randint(0, 1000)\n"
         "        assert candidate(x, y) == x + y", "add"),
        ("def sorted_list_sum(xs): return sorted(x for x in xs if len(x) % 2 == 0)",
         "import numpy as np\ndef is_floats(x) -> bool:\n    return isinstance(x, float) or isinstance(x, np.ndarray)\n"
         "def assertion(out, exp, atol):\n    exact_match = out == exp\n    assert exact_match\ndef check(candidate):\n"
         "    for inp, exp in zip([[['aa', 'b']]], [['aa']]):\n        assertion(candidate(*inp), exp, 0)", "sorted_list_sum"),
        ("def solve(n): return n + 1", "def check(f):\n    assert f(1) == 2 and f.__name__ == 'solve'", "solve"),
    ],
)  # fmt: skip
def test_humaneval_and_leetcode(program: str, test: str, entry_point: str) -> None:
    assert judged(program, {"test": test, "entry_point": entry_point}) == 1.0


@pytest.mark.parametrize(
    ("program", "asserts"),
    [
        ("class P:\n    def __eq__(self, o): return True\ndef f(): return P()", "assert f() == P()"),
        ("class P:\n    def __eq__(self, o): return True\ndef f(): return P()", "assert f() != 3"),
        ("def f(x):\n    x.clear()\n    return []", "x = [3, 1]\nassert f(x) == sorted(x)"),
        ("def sorted(x): return [1]\ndef f(x): return x", "assert sorted(f([2, 1])) == [1]"),
        ("def isclose(*a): return True\ndef add(*a): return 0", "assert isclose(add(1, 2), 3)"),
        ("def isclose(*a): return True", "assert isclose(add(1, 2), 3)"),
        ("x = 1", "assert isclose(add(1, 2), 3)"),
        ("def add(*a): return 5\nsqrt = add", "assert add(1, 2) == sqrt(9)"),
        ("x = 1", "assert sum(1, 2) == 3"),
        ("class np:\n    def allclose(*a): return True\ndef f(): return 3", "assert np.allclose(f(), 4)"),
        ("def other(): pass", "assert missing() is None"),
    ],
)
def test_a_program_does_not_decide_whether_it_is_right(program: str, asserts: str) -> None:
    assert judged(program, [asserts]) == 0.0
