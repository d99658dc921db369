"""README and docs are held to what they say: snippets run, commands parse, settings and targets and links exist.

Nothing is passed over in silence: a kind of code block or a command that this file does not know is a failure.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from verl import cli, errors
from verl.commands import data, demo, doctor, gpu_check, migrate, plan, reward_test
from verl.commands.models import evaluate, generate
from verl.config import rollout_engines, train_engines
from verl.config.load import load, load_sft

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHOWN_ONLY = {"text", "diff", "json", "math", "mermaid"}  # languages of blocks that are not run
OTHER_PROGRAMS = {"pip", "uv", "docker", "apptainer", "pre-commit", "git", "cd", "ray", "python", "eval", "prometheus"}
WITH_ENGINES = {"python_api.md"}  # pages whose snippets train: `make show-api` runs them
PLACEHOLDERS = {"KEY": "data.seed", "DIR": "somewhere", "WORD": "seed"}


@dataclass(frozen=True)
class Piece:
    """A block or a command of a page; its name is its place, for the test's id."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Piece]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            yield Piece(page, text.count("\n", 0, match.start()) + 1, match[2], match[3])


def commands() -> Iterator[Piece]:
    """Every command line of a bash block, and every inline `verl ...` or `python -m verl...`."""
    for block in blocks():
        if block.language == "bash":
            for command in block.text.replace("\\\n", " ").splitlines():
                if command.strip() and not command.lstrip().startswith("#"):
                    yield Piece(block.page, block.line, "bash", command.strip())
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for code in re.findall(r"`((?:verl|make|python -m verl)(?: [^`]+)?)`", line):
                if code != "verl":
                    yield Piece(page, number, "bash", code)


def check_verl(arguments: list[str]) -> None:
    """The command exists, and what follows it is understood by the code that would run it."""
    name, *rest = [PLACEHOLDERS.get(argument, argument) for argument in arguments]
    rest = rest[: rest.index(">")] if ">" in rest else rest
    assert name in cli.COMMANDS, f"verl has no command {name!r}"
    if name == "train":
        settings = [argument for argument in rest if argument != "--dry-run"]
        load(settings, complete=bool(settings))
    elif name == "doctor" and rest:
        load(doctor.read_arguments(rest)[1], complete=False)
    elif name == "gpu-check" and rest:
        gpu_check.read_arguments(rest)
    elif name == "reward-test" and rest:
        reward_test.read_arguments(rest)
    elif name == "sft":
        load_sft(rest, complete=bool(rest))
    elif name == "demo":
        demo.read_arguments(rest)
    elif name == "data":
        data.read_arguments(rest or ["train.parquet"])
    elif name == "generate" and rest:
        generate.read_arguments(rest)
    elif name == "eval" and rest:
        evaluate.read_arguments(rest)
    elif name == "migrate" and rest:
        migrate.read_arguments(rest)
    elif name == "plan" and rest:
        plan.read_arguments(rest)
    elif name == "config":
        assert cli.main(["config", *rest]) == 0
    else:
        assert cli.main([name, "--help"]) == 0, "a new command: say here how its arguments are parsed"


def check_module(module: str, arguments: list[str]) -> None:
    assert (ROOT / f"{module.replace('.', '/')}.py").exists() or (ROOT / module.replace(".", "/")).is_dir()
    if module == "verl.trainer.main_ppo":
        load(arguments, complete=bool(arguments))
    elif module == "verl.trainer.sft_trainer":
        load_sft(arguments, complete=bool(arguments))


def test_there_are_pages_blocks_and_commands_to_check() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "architecture.md"} <= {page.name for page in PAGES}
    assert sum(block.language == "python" for block in blocks()) >= 4
    assert sum(command.text.startswith("verl ") for command in commands()) >= 5


@pytest.mark.parametrize("block", list(blocks()), ids=str)
def test_every_block_is_of_a_kind_that_is_checked(block: Piece) -> None:
    assert block.language in {"python", "bash", "yaml"} | SHOWN_ONLY, "say what language it is, or teach this test"
    assert block.language != "mermaid" or ";" not in block.text, "Mermaid ends a statement at a semicolon"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in WITH_ENGINES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_snippets_run_one_after_another(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace a page; a snippet whose first line is `# name.py` is also written to that file."""
    monkeypatch.chdir(tmp_path)
    for registry in (rollout_engines, train_engines):  # snippets register engines
        monkeypatch.setattr(registry, "_ENGINES", dict(registry._ENGINES))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks():
        if block.page == page and block.language == "python":
            if file := re.match(r"# (\w+\.py)\n", block.text):
                Path(file[1]).write_text(block.text)
            exec(compile(block.text, str(block), "exec"), namespace)


def test_yaml_blocks_are_settings(tmp_path: Path) -> None:
    for block in blocks():
        if block.language == "yaml":
            (tmp_path / "config.yaml").write_text(block.text)
            if block.page.name == "sft.md":
                load_sft(["--config-path", str(tmp_path), "--config-name", "config"])
            else:
                load(["--config-name", str(tmp_path / "config.yaml")], complete=False)


@pytest.mark.parametrize("command", list(commands()), ids=lambda command: f"{command}-{command.text[:30]}")
def test_every_command_is_understood(command: Piece) -> None:
    program, *arguments = shlex.split(command.text)
    if program == "verl":
        check_verl(arguments)
    elif program.startswith("python") and arguments[:1] == ["-m"]:
        check_module(arguments[1], arguments[2:])
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
        for target in arguments:
            if "=" in target:
                assert f"$({target.partition('=')[0]})" in makefile, f"the Makefile does not use {target!r}"
                continue
            shown = target.startswith("show-") and [*ROOT.glob(f"tests/acceptance/*/{target[5:].replace('-', '_')}.py")]
            assert target in targets or shown, f"the Makefile has no {target!r}"
    else:
        assert program in OTHER_PROGRAMS, f"{program!r}: a command that no test knows"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)]
    for link in filter(None, links):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for name in re.findall(r"`((?:verl|tests|docs|examples)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def slugs(page: Path) -> set[str]:
    """The anchors that a Git host and the site give to the headings of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (heading.lower().replace("`", "") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings_that_exist(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)\s#]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        if target.suffix == ".md":
            assert anchor in slugs(target), f"{page.name} links to {link}#{anchor}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = set(re.findall(r"[\w/.-]+\.md", json.dumps(yaml.safe_load(navigation))))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages - listed == set(), "add them to the navigation in mkdocs.yml"
    assert listed - pages == {"contributing.md", "changelog.md", "code_of_conduct.md", "security_policy.md"}


def test_the_api_reference_has_every_public_name() -> None:
    described = {}
    for page in ROOT.glob("docs/api/*.md"):
        for module, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            described[name] = getattr(importlib.import_module(module), name)
    snapshot = json.loads((ROOT / "tests/acceptance/packaging/_surface.json").read_text(encoding="utf-8"))
    public = [(module, name) for module, names in snapshot["modules"].items() for name in names]
    public += [("verl.errors", name) for name in vars(errors) if name.endswith("Error")]
    for module, name in set(public) - {("verl", "__version__")}:
        entry = getattr(importlib.import_module(module), name)
        assert described.get(entry.__name__) is entry, f"docs/api has no entry for {module}.{name}"


def test_the_readmes_reward_function_and_data_do_what_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks():
        if block.page.name == "README.md" and block.language == "python":
            exec(block.text, namespace)
    score = namespace["compute_score"]
    assert callable(score)
    assert score("capitals", " Paris. ", "Paris") == {"score": 1.0, "one_word": True}
    assert score("capitals", "It is Paris", "Paris")["score"] == 0.0
    assert (tmp_path / "capitals.parquet").exists()
