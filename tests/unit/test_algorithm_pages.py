"""The pages of docs/algorithms are held to the code: names, functions, settings, defaults, metrics and curves exist."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.losses import LOSSES
from verl.config.load import load_dict
from verl.config.paths import format_value, iter_leaves
from verl.config.schema import Config, collect_settings

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/algorithms"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")) if page.stem != "README"}
EXAMPLES = {example.stem: example for example in sorted((ROOT / "examples/algorithms").glob("*.yaml"))}
SHARED = {"aggregation", "kl", "rollout_correction"}
SECTIONS = ["When", "Settings", "Run", "Watch", "Our run", "Sources"]
SOURCE = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "verl").rglob("*.py")))
METRIC = re.compile(r"`((?:actor|critic|process|training|reward|response_length|sampling|timing_s)/\w+)`")


def functions(page: str) -> Iterator[tuple[str, Path]]:
    """(name, file) of every function that a page links to."""
    for name, file in re.findall(r"\[`(\w+)`\]\(\.\./\.\./(verl/[\w/]+\.py)\)", page):
        yield name, ROOT / file


def settings_rows(page: str) -> Iterator[list[str]]:
    """The cells of the table of settings, without back-ticks."""
    table = page.split("## Settings")[1].split("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            yield [cell.strip().strip("`") for cell in line.strip("|").split(" |")]


def names_of(setting: str) -> dict[str, list[str]]:
    """The index's table for a setting: each name and the pages that its row links to."""
    table = INDEX.split(f"| `{setting}` | page |")[1].split("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        names, pages = line.strip("|").split(" | ", 1)
        found |= {name: re.findall(r"\]\((\w+)\.md\)", pages) for name in re.findall(r"`(\w+)`", names)}
    return found


def test_every_example_has_a_page_and_the_index_names_it() -> None:
    assert set(PAGES) == set(EXAMPLES) | SHARED
    assert set(re.findall(r"^\| \[.+?\]\((\w+)\.md\)", INDEX, re.MULTILINE)) == set(EXAMPLES)
    assert all(f"]({page}.md)" in INDEX for page in SHARED)


@pytest.mark.parametrize(
    ("setting", "known"),
    [("algorithm.adv_estimator", ESTIMATORS), ("actor_rollout_ref.actor.policy_loss.loss_mode", LOSSES)],
    ids=["estimators", "losses"],
)
def test_every_estimator_and_loss_has_a_page_that_links_to_it(setting: str, known: dict) -> None:
    listed = names_of(setting)
    assert set(listed) == set(known)
    for name, pages in listed.items():
        assert pages, f"{name} has no page"
        for page in pages:
            assert known[name].__name__ in {function for function, _ in functions(PAGES[page])}


@pytest.mark.parametrize("name", PAGES)
def test_functions_that_a_page_names_exist(name: str) -> None:
    found = list(functions(PAGES[name]))
    assert found, "a page says which function it is about"
    for function, file in found:
        assert re.search(rf"^(def|class) {function}\b", file.read_text(), re.MULTILINE), f"{file} has no {function}"


@pytest.mark.parametrize("name", PAGES)
def test_settings_of_a_page_exist_with_these_defaults(name: str) -> None:
    known, rows = collect_settings(Config), list(settings_rows(PAGES[name]))
    assert rows
    for key, default, *_ in rows:
        assert key in known, f"{name}: there is no setting {key}"
        assert default == format_value(known[key].default), f"{name}: {key} has another default"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_column_of_the_example_is_the_example(name: str) -> None:
    example = yaml.safe_load(EXAMPLES[name].read_text())
    config, given = load_dict(example, complete=False).config, {".".join(path) for path, _ in iter_leaves(example)}
    shown = {key: value for key, _, value, _ in settings_rows(PAGES[name]) if value}
    assert set(shown) == given
    for key, value in shown.items():
        found: object = config
        for part in key.split("."):
            found = getattr(found, part)
        assert value == format_value(found), f"{name}: the example has another {key}"


@pytest.mark.parametrize("name", PAGES)
def test_metrics_that_a_page_names_are_reported(name: str) -> None:
    metrics = METRIC.findall(PAGES[name])
    assert len(metrics) >= 3
    for metric in metrics:
        role, _, rest = metric.partition("/")
        by_role = role in ("actor", "critic", "process") and f'"{{role}}/{rest}"' in SOURCE
        by_timer = role == "timing_s" and f'timer(times, "{rest}")' in SOURCE
        assert f'"{metric}"' in SOURCE or by_role or by_timer, f"{name}: nobody reports {metric}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_page_has_its_sections_its_command_and_its_curve(name: str) -> None:
    page = PAGES[name]
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == SECTIONS
    assert f"--config-path examples/algorithms --config-name {name} " in page
    assert f"](curves/{name}.svg)" in page
    assert name in ElementTree.parse(FOLDER / f"curves/{name}.svg").getroot().attrib["aria-label"]


def test_a_run_is_drawn_if_it_was_validated_more_than_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    lines = [
        {"step": 0, "val/addition/mean@1": 0.25},
        {"step": 1, "reward/mean": -0.4},
        {"step": 2, "reward/mean": "NaN"},
        {"step": 2, "val/addition/mean@1": 0.75},
    ]
    for name, kept in (("whole", 4), ("broken", 2)):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines[:kept])
        (tmp_path / name / "metrics.jsonl").write_text(text)
    assert importlib.import_module("draw_curves").draw(tmp_path, tmp_path) == ["whole"]
    picture = ElementTree.parse(tmp_path / "whole.svg").getroot()
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"whole", "0.25", "0.75", "-0.50", "step"} <= set(texts)
    trained, held_out = picture.findall("{http://www.w3.org/2000/svg}polyline")
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in held_out.attrib["points"].split())
    assert x0 < x1, "later is to the right"
    assert y0 > y1, "better is higher"
    assert len(trained.attrib["points"].split()) == 1, "what is not a number is left out"
