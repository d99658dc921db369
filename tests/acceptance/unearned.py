"""Answers that try to win without solving: none scores, and none escapes its 0 by an error. The honest one scores.

python tests/acceptance/unearned.py [--short]

The task, in each form that tests have (a program, a function, assertions, a check): the length of a Collatz sequence.
`--short` tries every cheat in the form that it is made for; otherwise each in all of them.
"""

import argparse
import time

from _common import finish

from verl.rewards.sandbox.sandbox import Limits, best_isolation
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
    "says nothing": ("program", ""),
    "is no Python": ("function", "I am sure that the tests pass."),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="every cheat in one form of tests")
    short = parser.parse_args().short
    limits = Limits(seconds=4.0, output_bytes=1 << 20)
    begun, won, tried = time.monotonic(), {}, 0
    honest = {
        form: compute_score("collatz", HONEST, truth, limits=Limits(seconds=30.0)) for form, truth in FORMS.items()
    }
    print(f"{'the honest answer':40} {honest}", flush=True)
    for name, (made_for, code) in CHEATS.items():
        for form in [made_for] if short else FORMS:
            tried += 1
            try:
                result = compute_score("collatz", f"```python\n{code}\n```", FORMS[form], limits=limits)
            except Exception as error:  # noqa: BLE001 - an error would spare the cheat its 0
                result = {"score": f"{type(error).__name__}: {error}"}
            if result != {"score": 0.0, "passed": 0.0}:
                won[f"{name} ({form})"] = result
            print(f"{name:40} {form:12} {result}", flush=True)
    finish(
        "unearned",
        not won and len(CHEATS) >= 15 and all(result["score"] == 1.0 for result in honest.values()),
        isolation=best_isolation(),
        cheats=len(CHEATS),
        tried=tried,
        won=won,
        honest={form: result["score"] for form, result in honest.items()},
        seconds=round(time.monotonic() - begun, 1),
    )


if __name__ == "__main__":
    main()
