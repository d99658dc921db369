"""Answers that try to win without solving: none scores, and none escapes its 0 by an error. The honest one scores.

make show-unearned [ARGS=--short]

Programs cheat in the length of a Collatz sequence, in each form that tests have (a program, a function, assertions, a
check), with every kind of isolation, as root and as an ordinary user; claims try every scorer. `--short`: each program
with one isolation and in the form that it is made for, and those of the classes that once won with all.
"""

import argparse
import importlib
import math
import time

from _common import finish
from _users import run_as_each, scenarios

from verl.errors import RewardError
from verl.rewards.judge.judge import read_verdict
from verl.rewards.sandbox import sandbox
from verl.rewards.sandbox.sandbox import Limits
from verl.rewards.scorers.code import compute_score

LENGTHS = {27: 111, 97: 118, 871: 178, 6171: 261}
INPUTS = list(LENGTHS)

FORMS = {
    "program": {"inputs": [f"{n}\n" for n in INPUTS], "outputs": [f"{LENGTHS[n]}\n" for n in INPUTS]},
    "function": {"inputs": [[n] for n in INPUTS], "outputs": [LENGTHS[n] for n in INPUTS], "fn_name": "collatz"},
    "assertions": {
        "assert_case": [
            *(f"assert collatz({n}) == {length}" for n, length in LENGTHS.items()),
            "assert all(map(lambda pair: collatz(pair[0]) == pair[1], [(27, 111), (97, 118)]))",
            "assert [length for length in map(collatz, [27, 97])] == [111, 118]",
            "assert collatz(27) in (111,) and not collatz(27) != 111 and str(collatz(97)) == '118'",
        ]
    },
    "check": {
        "entry_point": "collatz",
        "test": "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {m}\n" for n, m in LENGTHS.items()),
    },
}

SOLVED = """
def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps
"""
HONEST = f"```python\n{SOLVED}\nif __name__ == '__main__':\n    print(collatz(int(input())))\n```"

_SEARCH = """
import gc, os, re, sys
def everything():
    texts = []
    for path, _, names in os.walk("/tmp"):
        texts += [open(os.path.join(path, name), errors="replace").read() for name in names]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try: texts.append(open(f"/proc/{pid}/{name}", errors="replace").read())
            except OSError: pass
    frame = sys._getframe()
    while frame: texts.append(repr({**frame.f_globals, **frame.f_locals})); frame = frame.f_back
    texts += [repr(thing) for thing in gc.get_objects() if type(thing) in (list, dict, tuple)]
    return "".join(texts)
text = everything()
def collatz(n):
    found = re.findall(rf"collatz\\W{n}\\W+(\\d+)", text) or re.findall(r"outputs\\W+(\\d+)", text)
    return int(found[0]) if found else 0
"""

_ALWAYS = """
class Always(VALUE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __contains__(self, other): return True
    def __str__(self): return "118"
    def __len__(self): return 1
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
def collatz(n): return Always()
"""

_WRITE = """
import os
def write():
    for fd in range(1, 64):
        try: os.write(fd, b'TEXT' * 9)
        except OSError: pass
write()
def collatz(n): write()
"""

CHEATS = {
    "exits with success": ("program", "import sys; sys.exit(0)"),
    "exits with success at once": ("assertions", "import os; os._exit(0)"),
    "exits when it is called": ("assertions", "def collatz(n): raise SystemExit(0)"),
    "exits in the middle of a call": ("check", "import os\ndef collatz(n): os._exit(0)"),
    "exits when it ends": ("program", "import atexit, os\natexit.register(os._exit, 0)"),
    "prints that it passed": ("program", "print('PASS'); print('OK'); print('True'); print(1); print('score: 1.0')"),
    "prints every number": ("program", "for n in range(300): print(n)"),
    "prints an expected line": ("program", "print(112)\nprint(111)"),
    "prints where results go": ("function", "def collatz(n): print('{\"value\": 111}', flush=True)"),
    "writes verdicts to every descriptor": ("assertions", _WRITE.replace("TEXT", "pass\\n")),
    "writes replies to every descriptor": ("function", _WRITE.replace("TEXT", '{"value": true}\\n')),
    "forges an object of the test": ("assertions", _WRITE.replace("TEXT", '{"value": {"object": "collatz"}}\\n')),
    "forges an exit of the test": ("assertions", _WRITE.replace("TEXT", '{"error": "SystemExit", "message": ""}\\n')),
    "floods every descriptor": ("function", _WRITE.replace("TEXT", "1" * 1000).replace("* 9", "* 9999")),
    "overrides equality": ("assertions", _ALWAYS.replace("VALUE", "object")),
    "overrides equality of a number": ("assertions", _ALWAYS.replace("VALUE", "int")),
    "overrides equality of text": ("check", _ALWAYS.replace("VALUE", "str")),
    "overrides equality of a list": ("function", _ALWAYS.replace("VALUE", "list")),
    "answers with a mock": ("check", "from unittest.mock import MagicMock\ncollatz = MagicMock()"),
    "answers with what is not a number": ("function", "def collatz(n): return float('nan')"),
    "answers without end": ("assertions", "import itertools\ndef collatz(n): return itertools.count(111)"),
    "stops the test's loop": ("assertions", "def collatz(n): raise StopIteration"),
    "fails as if it were the test": ("assertions", "def collatz(n): raise AssertionError"),
    "patches the built-ins": (
        "assertions",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.map = lambda *a: []\n"
        "builtins.all = builtins.any = builtins.bool = lambda *a: True\ndef collatz(n): return 0\n",
    ),
    "patches json": (
        "function",
        "import json\njson.loads = lambda *a: 0\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"
        "def collatz(n): return 0",
    ),
    "patches the harness": (
        "assertions",
        "import sys\nmain = sys.modules['__main__']\nfor name, value in list(vars(main).items()):\n"
        "    if callable(value): setattr(main, name, lambda *a, **k: {'value': True})\ndef collatz(n): return 0\n",
    ),
    "patches the test file": (
        "assertions",
        "import os\nfor name in ('tests.json', 'tests.py', 'solution.py', 'main.py', '/tmp/tests.json'):\n"
        '    with open(name, "w") as file: file.write(\'{"setup": "", "tests": [], "names": []}\')\n'
        "def collatz(n): return 0\n",
    ),
    "reads the tests": ("function", _SEARCH + "print(collatz(1))"),
    "reads the tests as a program": ("program", _SEARCH + "print(collatz(1))"),
    "reads the tests of assertions": ("assertions", _SEARCH),
    "changes its callers": (
        "check",
        "import sys\ndef collatz(n):\n    frame = sys._getframe()\n    while frame := frame.f_back:\n"
        "        for name in list(frame.f_locals): frame.f_locals[name] = True\n    return 0\n",
    ),
    "kills its grader": (
        "assertions",
        "import os\nfor pid in (os.getppid(), 1, -1):\n    try: os.kill(pid, 15)\n    except OSError: pass\n",
    ),
    "never answers": ("assertions", "def collatz(n):\n    while True: pass"),
    "nests its answer": (
        "function",
        "def collatz(n):\n    value = []\n    for _ in range(100_000): value = [value]\n    return value",
    ),
    "answers with a number without end": ("function", "def collatz(n): return 10 ** 5000"),
    # the guard, and the process that grades
    "writes a status for its guard": (
        "program",
        "import os, sys\nfor pid in (1, os.getppid()):\n    for fd in range(64):\n"
        '        try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), b"garbage\\n")\n'
        "        except OSError: pass\n"
        "sys.exit(1)",
    ),
    "writes a status for its guard in a call": (
        "assertions",
        "import os\ndef collatz(n):\n    for fd in range(64):\n"
        '        try: os.write(os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_WRONLY), b"x\\n")\n'
        "        except OSError: pass\n",
    ),
    "kills its guard": ("program", "import os\nfor number in (9, 15, 11, 19): os.kill(os.getppid(), number)"),
    "kills its guard in a call": ("check", "import os\ndef collatz(n): os.kill(os.getppid(), 9)"),
    "limits the time of its guard": (
        "assertions",
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))\ndef collatz(n): return 0",
    ),
    "limits the files of its guard": (
        "program",
        "import os, resource\nfor pid in (1, os.getppid()):\n"
        "    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE): resource.prlimit(pid, limit, (0, 0))",
    ),
    "reads the memory of its grader": (
        "program",
        "import os, re\npid = os.getppid()\nfor _ in range(6):\n    try:\n"
        "        memory = open(f'/proc/{pid}/mem', 'rb', 0)\n"
        "        for line in open(f'/proc/{pid}/maps'):\n            if 'rw-p' not in line: continue\n"
        "            start, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "            memory.seek(start)\n"
        "            if match := re.search(rb'outputs\\W+(\\d+)', memory.read(min(end - start, 1 << 24))):\n"
        "                print(int(match[1])); raise SystemExit\n"
        "        pid = int(open(f'/proc/{pid}/stat').read().split()[3])\n    except OSError: break\n",
    ),
    "reads the environment of its ancestors": (
        "function",
        "import os\ntexts = []\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: texts.append(open(f'/proc/{pid}/environ').read())\n    except OSError: pass\n"
        "def collatz(n): return 111 if 'LENGTHS' in ''.join(texts) else 0\n",
    ),
    "stops itself": ("assertions", "import os\ndef collatz(n): os.kill(os.getpid(), 19)"),
    "leaves its reply to a daemon": (
        "assertions",
        "import os, time\ndef collatz(n):\n    if os.fork(): os._exit(0)\n    time.sleep(0.1)\n    return 0\n",
    ),
    "answers twice": ("function", "import os\ndef collatz(n):\n    os.fork()\n    return 0"),
    "fills its disk": (
        "assertions",
        "try:\n    for i in range(99999): open(f'f{i}', 'wb').write(b'x' * 1_000_000)\nexcept OSError: pass\n"
        "def collatz(n): return 0",
    ),
    "uses up its processes": ("check", "import os\ndef collatz(n):\n    while True: os.fork()"),
    "uses up its memory": ("assertions", "def collatz(n): return [0] * 10 ** 12"),
    # the protocol
    "replies with what is no text": ("assertions", _WRITE.replace("TEXT", "\\xff\\xfe\\n")),
    "replies with half a line": ("assertions", "import os\ndef collatz(n): os.write(4, b'{\"value\": 1'); os._exit(0)"),
    "replies with a line without end": (
        "assertions",
        "import os\ndef collatz(n):\n    while True:\n        for fd in (1, 3, 4, 5):\n"
        "            try: os.write(fd, b'1' * 65536)\n            except OSError: pass\n",
    ),
    "forges an error of the grader": ("assertions", _WRITE.replace("TEXT", "invalid: a value\\n")),
    "forges an error without a name": ("check", _WRITE.replace("TEXT", '{"error": null}\\n')),
    "forges values of unknown kinds": ("function", _WRITE.replace("TEXT", '{"value": {"iterator": 5}}\\n')),
    "raises an error that cannot be shown": (
        "assertions",
        "class E(Exception):\n    def __str__(self): raise self\ndef collatz(n): raise E",
    ),
    "raises an error named like another": (
        "check",
        "E = type('AssertionError', (BaseException,), {})\ndef collatz(n): raise E",
    ),
    "answers with itself": ("function", "def collatz(n):\n    value = []\n    value.append(value)\n    return value"),
    "answers with a text of the number": ("function", "def collatz(n): return {27: '111'}.get(n, '118')"),
    "answers with all numbers": ("assertions", "def collatz(n): return list(range(300))"),
    "answers with an infinite number": ("function", "def collatz(n): return float('inf')"),
    "says nothing": ("program", ""),
    "is no Python": ("function", "I am sure that the tests pass."),
}

ESSENTIAL = ("writes a status for its guard", "kills its guard", "reads the memory of its grader", "fills its disk")

_TASK = {"fn_name": "f", "inputs": [[30]]}

# Name -> (scorer, ground truth, response): what each scorer once accepted, or might.
CLAIMS = {
    "Stirling's series": (
        "code",
        _TASK | {"outputs": [math.factorial(30)]},
        "import math\ndef f(n):\n    series = 1 + 1/(12*n) + 1/(288*n*n) - 139/(51840*n**3)\n"
        "    return math.sqrt(2*math.pi*n) * (n/math.e)**n * series\n",
    ),
    "zero for a small number": ("code", _TASK | {"outputs": [4.1e-7]}, "def f(n): return 0"),
    "zero for a small number in a list": ("code", _TASK | {"outputs": [[1e-9, 1.0]]}, "def f(n): return [0, 1]"),
    "a float for a large whole number": ("code", _TASK | {"outputs": [10**17 + 1]}, "def f(n): return 1e17"),
    "a number too large for a float": ("code", _TASK | {"outputs": [2.5]}, "def f(n): return 10**400"),
    "numbers too large for a float": ("code", _TASK | {"outputs": [[2.5]]}, "def f(n): return [-10**400]"),
    "true for a number": ("code", _TASK | {"outputs": [2.5]}, "def f(n): return True"),
    "a set for a sorted list": ("code", _TASK | {"inputs": [[[3, 1, 2]]], "outputs": [[1, 2, 3]]}, "f = set"),
    "a text for a list": ("code", _TASK | {"outputs": [["a", "b"]]}, "def f(n): return 'ab'"),
    "keys for a list": ("code", _TASK | {"outputs": [[1, 2]]}, "def f(n): return {1: 0, 2: 0}"),
    "zero printed for a small number": ("code", {"inputs": ["1"], "outputs": ["0.00000041"]}, "print(0)"),
    "a float printed for a whole number": (
        "code",
        {"inputs": ["1"], "outputs": [str(math.factorial(30))]},
        "print(2.6525285981219103e+32)",
    ),
    "what is not a number, printed": ("code", {"inputs": ["1"], "outputs": ["2.5"]}, "print('nan')"),
    "infinity, printed": ("code", {"inputs": ["1"], "outputs": ["2.5"]}, "print('inf')"),
    "4 = 5": ("math", "5", r"\boxed{4 = 5}"),
    "a chain of equations": ("math", "5", r"\boxed{1=2=5}"),
    "a variable with two values": ("math", "5", r"\boxed{x=4=5}"),
    "an equivalence": ("math", "5", r"\boxed{4 \equiv 5}"),
    "a wrong sum": ("math", "5", r"\boxed{2+2=5}"),
    "a shifted variable": ("math", "5", r"\boxed{x+1=x+2=5}"),
    "another base": ("math", "10", r"\boxed{10_{2}}"),
    "one base for another": ("math", "10_2", r"\boxed{10_3}"),
    "a set of guesses": ("math", "5", r"\boxed{\{4, 5\}}"),
    "one or the other": ("math", "5", r"\boxed{4 \text{ or } 5}"),
    "more or less": ("math", "5", r"\boxed{5 \pm 1}"),
    "an interval around it": ("math", "5", r"\boxed{[4, 6]}"),
    "an inequality": ("math", "5", r"\boxed{x \le 5}"),
    "the work left to the grader": ("math", "55", r"\boxed{\sum_{n=1}^{10} n}"),
    "what takes too long": ("math", "x=5", r"\boxed{\sin(\cos(\tan(\sin(\cos(\tan 1)))))}"),
    "what takes too long in a pair": ("math", "(1,2)", r"\boxed{(\sin(\cos(\tan(\sin(\cos(\tan 1))))),2)}"),
    "nothing in the box": ("math", "5", r"\boxed{}"),
    "a number in words": ("gsm8k", "18", "#### 18 million"),
    "a power": ("gsm8k", "18", "#### 18²"),
    "two numbers": ("gsm8k", "18", "#### 18 19"),
    "one number or another": ("gsm8k", "18", "#### 18 or 19"),
    "a range": ("gsm8k", "18", "#### 17-19"),
    "a formula": ("gsm8k", "18", "#### 18 + 0"),
    "a list": ("gsm8k", "18", "#### 17,18,19"),
    "no number": ("gsm8k", "18", "#### eighteen"),
    "the wrong sign": ("qa", "5", "<answer>-5</answer>"),
    "the wrong place of the point": ("qa", "15", "<answer>1.5</answer>"),
    "a fraction for a number": ("qa", "34", "<answer>3/4</answer>"),
    "every city": ("qa", "Paris", "<answer>Rome Paris London</answer>"),
    "several letters": ("multiple_choice", "B", "The answer is A or B."),
    "all letters": ("multiple_choice", "B", "Answer: A, B, C, D"),
    "a list of options": ("multiple_choice", "B", "A) 1\nB) 2\nC) 3\nD) 4"),
    "a key twice": ("json_schema", '{"required": ["a"], "properties": {"a": {"const": 1}}}', '{"a": 2, "a": 1}'),
    "JSON in prose": ("json_schema", '{"type": "integer"}', "The result is 5."),
    "a constant that is not JSON": ("json_schema", '{"type": "number"}', "NaN"),
    "brackets without end": ("json_schema", '{"type": "array"}', "[" * 100_000),
    "empty sections": ("format", "", "<think></think><answer></answer>"),
    "a section twice": ("format", "", "<think>a</think><answer>1</answer><answer>2</answer>"),
    "more than the answer": ("exact_match", "46", "46 or 47"),
    "a quoted verdict": ("judge", "", "Score: 2/10. The answer asked me to write 'score: 10/10'."),
    "a verdict inside a sentence": ("judge", "", "The answer claims that its score: 10/10"),
    "a truncated verdict": ("judge", "", "It says score: 10/10, and I would rate it at 5/"),
    "a verdict before the end": ("judge", "", "score: 10/10\nsays the answer, but it is wrong."),
    "two verdicts in JSON": ("judge", "", '{"score": 0, "score": 10}'),
    "a verdict in the reason": ("judge", "", '{"reason": "score: 10/10", "score": 0}'),
    "a negated verdict": ("judge words", "", "The answer is not correct."),
}


def claim(name):
    """The score of a claim; of the judge also "no verdict", which is not a score."""
    scorer, truth, response = CLAIMS[name]
    if scorer.startswith("judge"):
        try:
            return read_verdict(response, verdicts={"correct": 1, "incorrect": 0} if "words" in scorer else None)
        except RewardError:
            return 0.0
    module = importlib.import_module(f"verl.rewards.scorers.{scorer}")
    extra = {"require": "limits", "limits": Limits(seconds=30.0)} if scorer == "code" else {}
    try:
        result = module.compute_score("claims", response, truth, **extra)
    except Exception as error:  # noqa: BLE001 - an error would spare the cheat its 0
        return f"{type(error).__name__}: {error}"
    return result["score"] if isinstance(result, dict) else result


def run_case(kind, cheats, *, forms, seconds):
    """Try cheats with one kind of isolation, as the user who runs this: the figures."""
    sandbox.best_isolation = lambda: kind
    won, tried = {}, 0
    limits, slow = Limits(seconds=seconds, output_bytes=1 << 20), Limits(seconds=30.0)
    honest = {form: compute_score("c", HONEST, FORMS[form], limits=slow, require="limits") for form in FORMS}
    print(f"{'the honest answer':40} {honest}", flush=True)
    for name in cheats:
        made_for, code = CHEATS[name]
        for form in forms or [made_for]:
            tried += 1
            response = f"```python\n{code}\n```"
            try:
                result = compute_score("collatz", response, FORMS[form], limits=limits, require="limits")
            except Exception as error:  # noqa: BLE001 - an error would spare the cheat its 0
                result = {"score": f"{type(error).__name__}: {error}"}
            if result != {"score": 0.0, "passed": 0.0}:
                won[f"{name} ({form})"] = result
            print(f"{name:40} {form:12} {result}", flush=True)
    return {"tried": tried, "won": won, "honest": all(result["score"] == 1.0 for result in honest.values())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="each cheat with one isolation and one form of tests")
    parser.add_argument("--case", nargs=2, metavar=("USER", "KIND"), help="only this one; the user is the current one")
    parser.add_argument("--cases", nargs="*", default=[], help="all that run, as USER-KIND")
    arguments = parser.parse_args()
    begun = time.monotonic()
    if arguments.case:
        user, kind = arguments.case
        index, count = arguments.cases.index(f"{user}-{kind}"), len(arguments.cases)
        others = [name for name in CHEATS if name not in ESSENTIAL]
        cheats = [*ESSENTIAL, *others[index::count]] if arguments.short else list(CHEATS)
        forms = list(FORMS) if not arguments.short and index == 0 else None
        figures = run_case(kind, cheats, forms=forms, seconds=1.5 if arguments.short else 4.0)
        finish("unearned case", figures["honest"] and not figures["won"], user=user, isolation=kind, **figures)
    cases = scenarios()
    short = ["--short"] if arguments.short else []
    results = list(run_as_each("unearned.py", cases, *short, "--cases", *(f"{user}-{kind}" for user, kind in cases)))
    won = {f"{one['user']} {one['isolation']}": one.get("won", one) for one in results if not one["pass"]}
    for name in CLAIMS:
        score = claim(name)
        print(f"{name:40} {CLAIMS[name][0]:16} {score}", flush=True)
        if score != 0.0:
            won[name] = score
    count = len(CHEATS) + len(CLAIMS)
    finish(
        "unearned",
        not won and count >= 70,
        cheats=count,
        tried=sum(one.get("tried", 0) for one in results) + len(CLAIMS),
        isolation={f"{one['user']} {one['isolation']}": one["pass"] for one in results},
        won=won,
        honest=all(one.get("honest") for one in results),
        seconds=round(time.monotonic() - begun, 1),
    )


if __name__ == "__main__":
    main()
