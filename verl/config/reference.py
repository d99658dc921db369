"""The settings page: `python -m verl.config.reference > docs/settings.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from verl.config.paths import format_value
from verl.config.render import documentation, type_in_words
from verl.config.run_types import SFT, TRAIN, AnyRunType
from verl.config.schema import Setting, collect_settings

__all__ = ["render_reference"]

_HEAD = """\
# Settings

Every setting of verl, in the order of `verl config`. This page is written by `python -m verl.config.reference`.

Settings are given on the command line in [Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/)
(`key=value`, `+key=value`, `~key`, `--config-path`, `--config-name`, `-m` for sweeps), or in YAML files. Unknown
keys, wrong types and settings that contradict each other are reported all at once, before a run starts. `verl config`
prints the resolved settings, `verl config KEY` explains one. Supervised training has settings of its own,
[below](#settings-of-verl-sft): `verl config --sft` prints them.

**·** after a key: declared, not built yet; only the default is accepted. **\\*** after a value: not built yet.
"""


def render_reference() -> str:
    """The whole page, Markdown."""
    resumed = "| `global_steps_<N>` in `trainer.resume_from_path` | `global_step_<N>` |"
    parts = [_HEAD, *_settings(TRAIN), resumed, "\n# Settings of verl sft\n", *_settings(SFT), resumed]
    return "\n".join(parts) + "\n"


def _settings(run_type: AnyRunType) -> Iterator[str]:
    known = collect_settings(run_type.root)
    for section in known.values():
        if section.section is None:
            continue
        rows = [_row(known[f"{section.key}.{name}"]) for name in section.section.model_fields]
        rows = [row for row in rows if row]
        if rows:
            yield f"\n## {section.key}\n\n{section.doc}\n"
            yield "| key | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    yield "\n## Second spellings\n\nAccepted, and answered with a hint.\n"
    yield "| written | read as |\n| --- | --- |"
    yield from (f"| `{written_as}` | `{key}` |" for written_as, key in run_type.aliases.keys.items())
    for key, values in run_type.aliases.values.items():
        yield from (f"| `{key}={second}` | `{key}={first}` |" for second, first in values.items())


def _row(setting: Setting) -> str:
    if setting.section is not None:
        return ""
    mark = " **·**" if setting.planned is True or setting.planned_parent is not None else ""
    default = "required" if setting.required else f"`{format_value(setting.default)}`"
    run_type = type_in_words(setting).replace("*", "\\*").replace("|", "\\|")
    return f"| `{setting.path[-1]}`{mark} | {run_type} | {default} | {documentation(setting)} |"


if __name__ == "__main__":
    sys.stdout.write(render_reference())
