import math
import sys
from pathlib import Path

import pytest

from verl.custom_functions import import_external, load_function
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

KNOWN = {"abs": abs}


def test_a_function_is_loaded_by_name_import_path_or_file(tmp_path):
    assert load_function("abs", KNOWN, "x") is abs
    assert load_function("math:sqrt", KNOWN, "x") is math.sqrt
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    assert load_function(f"{tmp_path}/mine.py:double", {}, "x")(4) == 8


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("sqrt", "'sqrt' is not one of abs, nor package.module:function"),
        ("math:root", "cannot be imported: .*root.*importable where the run starts"),
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
        ("nowhere/mine.py:f", "cannot be imported: .*No such file.*nowhere/mine.py"),
        ("math:pi", "'math:pi' is float, it must be a function"),
    ],
)
def test_what_is_not_a_function_is_refused_with_the_setting(name, complaint):
    with pytest.raises(ValueError, match=f"^algorithm.adv_estimator: .*{complaint}"):
        load_function(name, KNOWN, "algorithm.adv_estimator")


def test_external_modules_are_imported_once(tmp_path, monkeypatch):
    (tmp_path / "registers_itself.py").write_text(
        "import sys\nsys.count_of_imports = getattr(sys, 'count_of_imports', 0) + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_external(["registers_itself"])
    import_external(["registers_itself", "math"])
    assert sys.count_of_imports == 1


def test_an_external_module_that_cannot_be_imported_is_reported_with_its_setting():
    with pytest.raises(ConfigError, match=r"model.external_lib: no_such_module cannot be imported: .*PYTHONPATH"):
        import_external(["no_such_module"])


def test_a_file_imports_modules_next_to_it_and_they_shadow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "units_of_a_reward.py").write_text("SCALE = 3.0\n")
    (tmp_path / "random.py").write_text("raise RuntimeError('shadows the standard library')\n")
    (tmp_path / "reward.py").write_text(
        "from units_of_a_reward import SCALE\ndef score():\n    import random\n    return SCALE, random.random() < 1\n"
    )
    assert load_function(f"{tmp_path}/reward.py:score", {}, "x")() == (3.0, True)
