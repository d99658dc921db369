"""`verl completion`: shell completion of commands, options and settings."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence

from verl.commands.arguments import COMMANDS, MODULES, ArgumentParser
from verl.config.load import SFT, TRAIN
from verl.config.shell_completion import complete_setting
from verl.errors import VerlError

HELP = """\
usage: verl completion bash|zsh|fish

Print a script that completes commands, options, settings and their values. Settings come from the schema of the
installed version. Load the script in every shell, e.g. in ~/.bashrc, or write it to fish's completions folder:

  eval "$(verl completion bash)"
  eval "$(verl completion zsh)"
  verl completion fish > ~/.config/fish/completions/verl.fish

options:
  --line TEXT             print what the script asks for: completions of the last word of a command line
"""

_BASH = """\
_verl() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    local IFS=$'\\n'
    COMPREPLY=($(verl completion --line "$line" 2>/dev/null))
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[.=] ]] && compopt -o nospace 2>/dev/null
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    fi
}
complete -o default -F _verl verl
"""
_ZSH = """\
_verl() {
    local -a complete_words open_words
    local word
    for word in ${(f)"$(verl completion --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)"}; do
        if [[ $word == *[.=] ]]; then open_words+=($word); else complete_words+=($word); fi
    done
    (( $#open_words )) && compadd -S '' -- $open_words
    (( $#complete_words )) && compadd -- $complete_words
    (( $#open_words + $#complete_words )) || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _verl verl
"""
_FISH = "complete -c verl -a '(verl completion --line (commandline -cp) 2>/dev/null)'\n"
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_WITH_SETTINGS = ("train", "sft", "data", "generate", "eval", "config", "doctor", "reward-test")


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell, or the completions of a line."""
    parser = ArgumentParser("verl completion")
    parser.add_argument("shell", nargs="?")
    parser.add_argument("--line")
    options = parser.parse_args(argv)
    if options.line is not None:
        sys.stdout.write("".join(f"{word}\n" for word in complete(options.line)))
        return 0
    if options.shell not in SCRIPTS:
        raise VerlError(f"verl completion: name a shell: {', '.join(SCRIPTS)}")
    sys.stdout.write(SCRIPTS[options.shell])
    return 0


def complete(line: str) -> list[str]:
    """Return the completions of the last word of a command line; none where files are expected."""
    _, *words = [*line.split(), *([""] if line[-1:].isspace() else [])]
    if len(words) < 2:
        return [name for name in COMMANDS if name.startswith("".join(words))]
    command, *before, word = words
    if command not in COMMANDS:
        return []
    if word.startswith("-"):
        return [option for option in _list_options(command) if option.startswith(word)]
    if command == "completion":
        return [shell for shell in SCRIPTS if shell.startswith(word)]
    if command not in _WITH_SETTINGS or (before and before[-1] in ("--config-path", "--config-name")):
        return []
    run_type = SFT if command == "sft" or "--sft" in before else TRAIN
    return complete_setting(word, run_type, end="" if command == "config" else "=")


def _list_options(command: str) -> list[str]:
    module = importlib.import_module(f"verl.commands.{MODULES.get(command, command)}")
    return list(dict.fromkeys(re.findall(r"^  (?:-\w, )?(--[\w-]+)", module.HELP, re.MULTILINE)))
