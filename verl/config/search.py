"""Searching the settings by words of their names and descriptions."""

from __future__ import annotations

import re
from difflib import get_close_matches

from verl.config.load import AnyRunType
from verl.config.schema import Setting, collect_settings


def search_settings(text: str, run_type: AnyRunType) -> list[Setting]:
    """Return the settings that have every word of `text` in their name, aliases or description.

    A word may be the beginning of one: "warm" finds warmup. First come the settings that are called so, then those with
    the words in their key, then those with the words in an alias or the description.
    """
    words = [re.compile(rf"(?<![a-z0-9]){re.escape(word)}") for word in text.casefold().split()]
    aliases: dict[str, str] = {}
    for alias, key in run_type.legacy.aliases.items():
        aliases[key] = f"{aliases.get(key, '')} {alias}"

    def rank(setting: Setting) -> int | None:
        texts = (setting.path[-1], setting.key, f"{setting.key} {aliases.get(setting.key, '')} {setting.doc}")
        ranks = (place for place, part in enumerate(texts) if all(word.search(part.casefold()) for word in words))
        return next(ranks, None)

    settings = [setting for setting in collect_settings(run_type.root).values() if setting.section is None]
    ranked = [(place, setting) for setting in settings if words and (place := rank(setting)) is not None]
    return [setting for _, setting in sorted(ranked, key=lambda pair: pair[0])]


def suggest_word(text: str, run_type: AnyRunType) -> str | None:
    """Return the word in names and descriptions that is spelled most like `text`; None if none is."""
    settings = collect_settings(run_type.root).values()
    known = {word for setting in settings for word in re.findall(r"[a-z0-9]{3,}", f"{setting.key} {setting.doc}")}
    return next(iter(get_close_matches(text.casefold(), sorted(known), n=1)), None)
