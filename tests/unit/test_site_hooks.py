"""The hooks of the documentation site: links that leave docs/, anchors of settings, and links to them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from settings_pages import render_reference

from verl.config.load import SFT, TRAIN
from verl.config.schema import Config, SftConfig, collect_settings

pytestmark = pytest.mark.unit

PATH = Path(__file__).parents[2] / "docs/site_hooks.py"
SPEC = importlib.util.spec_from_file_location("site_hooks", PATH)
assert SPEC is not None
assert SPEC.loader is not None
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)

NAMES = {"data.seed", "trainer.faults.retries"}


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[`grpo`](../../verl/algorithms/advantages.py)", "`grpo` (`verl/algorithms/advantages.py`)"),
        ("[verl/types.py](../../verl/types.py)", "`verl/types.py`"),
        ("[log](../../CHANGELOG.md)", "[log](../changelog.md)"),
        ("[how](../../CONTRIBUTING.md#style)", "[how](../contributing.md#style)"),
        ("[sums](../../examples/smollm2/sums.py)", "[sums](../examples/smollm2.md#sums.py)"),
        ("[examples](../../examples/sft)", "[examples](../examples/sft.md)"),
        ("`examples/agents/`", "[`examples/agents/`](../examples/agents.md)"),
        ("`examples/none`", "`examples/none`"),
    ],
)
def test_a_link_that_leaves_docs_becomes_a_page_or_a_path(markdown: str, expected: str) -> None:
    assert hooks.rewrite_links(markdown, "algorithms/grpo.md", "") == expected


@pytest.mark.parametrize(
    "markdown",
    [
        "[KL](kl.md#estimators)",
        "[data](../data.md)",
        "![curve](curves/grpo.svg)",
        "[below](#settings)",
        "[paper](https://example.org/a.py)",
        "[us](mailto:us@example.org)",
        "```text\n[file](../../verl/types.py)\n```",
    ],
)
def test_other_links_stay(markdown: str) -> None:
    assert hooks.rewrite_links(markdown, "algorithms/grpo.md", "https://host.example/verl") == markdown


def test_with_an_address_of_the_repository_files_and_folders_are_links() -> None:
    text = "[code](../verl/types.py) [tests](../tests/unit)"
    address = "https://host.example/verl"
    assert hooks.rewrite_links(text, "data.md", f"{address}/") == (
        f"[code]({address}/blob/main/verl/types.py) [tests]({address}/tree/main/tests/unit)"
    )


def test_a_page_of_examples_has_each_file_below_its_name() -> None:
    folder = hooks.ROOT / "examples/smollm2"
    page = hooks.render_examples("examples/smollm2", [folder / "sums.py"])
    assert page.startswith("# examples/smollm2\n\n## sums.py { #sums.py }\n\n~~~~python\n")
    assert (folder / "sums.py").read_text(encoding="utf-8").rstrip() in page


def test_cells_of_wide_tables_know_their_headings() -> None:
    row = "<tr>\n<td>1</td>\n<td>2</td>\n<td>3</td>\n</tr>"
    table = f"<table><tr><th>a</th><th><code>b</code></th><th>c</th></tr>{row}</table>"
    assert '<td data-label="b">2</td>' in hooks.label_cells(table)
    assert hooks.label_cells(table.replace("<th>c</th>", "")) == table.replace("<th>c</th>", "")


def test_links_of_a_page_at_the_root_are_relative_to_the_root() -> None:
    text = "[a](docs/architecture.md#layers) [b](CHANGELOG.md) [c](Makefile)"
    expected = "[a](architecture.md#layers) [b](changelog.md) c (`Makefile`)"
    assert hooks.rewrite_links(text, "contributing.md", "") == expected


@pytest.mark.parametrize(("run_type", "root"), [(TRAIN, Config), (SFT, SftConfig)], ids=["train", "sft"])
def test_the_settings_of_a_reference_page_are_those_of_the_schema(run_type: object, root: type) -> None:
    expected = {key for key, setting in collect_settings(root).items() if setting.section is None}
    assert hooks.list_settings(render_reference(run_type)) == expected


def test_every_setting_has_an_anchor() -> None:
    html = '<h2 id="data">data</h2><tr>\n<td><code>seed</code></td><td><code>1</code></td></tr>'
    html += '<h3 id="trainerfaults">trainer.faults</h3><tr>\n<td><code>retries</code></td></tr>'
    anchored = hooks.add_setting_anchors(html)
    assert '<td id="data.seed"><code>seed</code></td><td><code>1</code></td>' in anchored
    assert '<td id="trainer.faults.retries"><code>retries</code>' in anchored


def test_names_of_settings_link_to_their_anchors_outside_headings_links_and_blocks() -> None:
    linked = hooks.link_settings("<p><code>data.seed</code>, <code>data.seed=3</code></p>", NAMES, "../settings/")
    assert linked == (
        '<p><a href="../settings/#data.seed"><code>data.seed</code></a>, '
        '<a href="../settings/#data.seed"><code>data.seed=3</code></a></p>'
    )
    for html in (
        '<h2 id="x"><code>data.seed</code></h2>',
        '<a href="x"><code>data.seed</code></a>',
        "<pre><code>data.seed</code></pre>",
        "<code>data.other</code>",
        "<code>seed</code>",
    ):
        assert hooks.link_settings(html, NAMES, "../settings/") == html
