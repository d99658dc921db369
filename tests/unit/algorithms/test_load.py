import math

import pytest

from verl.algorithms.load import load_function

pytestmark = pytest.mark.unit

KNOWN = {"abs": abs}


def test_a_known_name_or_an_import_path():
    assert load_function("abs", KNOWN, "x") is abs
    assert load_function("math:sqrt", KNOWN, "x") is math.sqrt


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("sqrt", "'sqrt' is not one of abs, nor package.module:function"),
        ("math:root", "cannot be imported: .*root.*importable where the run starts"),
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
        ("math:pi", "'math:pi' is float, it must be a function"),
    ],
)
def test_what_is_not_a_function_is_refused_with_the_setting(name, complaint):
    with pytest.raises(ValueError, match=f"^algorithm.adv_estimator: .*{complaint}"):
        load_function(name, KNOWN, "algorithm.adv_estimator")
