"""`verl explain` and the table of metrics in docs/tracking.md say the same, and know every number that is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.cli import main
from verl.diagnosis.rules import RULES
from verl.tracking.explanations import EXPLANATIONS, render_table

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs/tracking.md"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (["kl"], "kl (actor/kl_loss, actor/reward_kl, actor/ppo_kl)\n  KL divergence of the policy"),
        (["actor/kl_loss"], "kl ("),
        (["grad", "norm"], "grad norm ("),
        (["KL"], "kl ("),
        (["val/addition/mean@8"], "validation ("),
        (["val/addition/pass@8"], "val/<data source>/<metric>\n"),
        (["reward/std"], "reward/min, reward/max, reward/std\n"),
        (["eta"], "eta\n"),
        (["kl-explosion"], "kl-explosion\n  The policy is far from the reference"),
        (["Slow", "rank"], "slow-rank\n  The device of one train rank is slow"),
    ],
)
def test_a_label_or_a_metric_is_explained(name: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *name]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_without_a_name_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert all((each.label or each.metrics[0]) in text for each in EXPLANATIONS)
    assert text.index("eta\n") < text.index("warnings (verl explain NAME says more)\n  no-signal\n    Responses to a")
    assert all(f"\n  {rule.name}\n" in text for rule in RULES)


def test_a_rule_is_explained_with_its_limits_and_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "truncated-responses"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "looks at: response_length/clip_ratio warns if: More than 50% of the responses of a step." in text
    assert text.endswith(
        "remedy: Try a larger data.max_response_length, or check that the model generates its end token."
    )


def test_an_unknown_name_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "entropi"]) == 2
    assert "did you mean 'entropy'?" in capsys.readouterr().err
    assert main(["explain", "reward-hackin"]) == 2
    assert "did you mean 'reward-hacking'?" in capsys.readouterr().err
    assert main(["explain", "zzz"]) == 2
    assert "`verl explain` lists all" in capsys.readouterr().err


def test_no_label_and_no_metric_is_explained_twice() -> None:
    names = [name for each in EXPLANATIONS for name in (each.label, *each.metrics) if name]
    assert len(names) == len(set(names))


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    table = "\n".join(render_table())
    assert table in PAGE.read_text(encoding="utf-8"), f"replace the table of metrics in {PAGE.name} with:\n{table}"
