import math

import pytest

from verl.custom_functions import load_function

pytestmark = pytest.mark.unit

KNOWN = {"abs": abs}


def test_a_known_name_an_import_path_or_a_file(tmp_path):
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
