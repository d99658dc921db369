"""Reading of shell scripts without running them: statements, words, variables and arrays."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[\d@*#?])(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_CLOSING = {"(": ")", "{": "}"}
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def split_statements(text: str) -> Iterator[list[str]]:
    """Yield the raw words of every statement: quoted and unexpanded. Comments and redirections are left out.

    A comment between continued lines does not end the statement, as its author meant it.
    """
    words: list[str] = []
    word, index, is_continued = "", 0, False
    while index < len(text):
        char = text[index]
        if text.startswith("\\\n", index):
            index, is_continued = index + 2, True
            continue
        if char == "#" and not word:
            index = _find(text, "\n", index)
            index += is_continued and index < len(text)
            continue
        end = _end_of_group(text, index, word)
        if end > index:
            word, index, is_continued = word + text[index:end], end, False
            continue
        if char in " \t\r\n;&|()<>":
            if word and not (char in "<>" and word.isdigit()):
                words.append(word)
            word = ""
            if char in "<>":  # a redirection and its file
                match = re.compile(r"[<>&]+[ \t]*[^\s;|&()]*").match(text, index)
                index = match.end() if match else index + 1
                continue
            if char not in " \t\r" and words:
                yield words
                words = []
        else:
            word += char
        if char not in " \t":
            is_continued = False
        index += 1
    if word:
        words.append(word)
    if words:
        yield words


def _end_of_group(text: str, index: int, word: str) -> int:
    """Return the end of the quotes, the escape, the expansion or the array that starts at `index`; else `index`."""
    char = text[index]
    if char == "\\":
        return index + 2
    if char in "'\"":
        return _end_of_quotes(text, index)
    if char == "`":
        return _find(text, "`", index + 1) + 1
    if char == "$" and text[index + 1 : index + 2] in ("(", "{"):
        return _end_of_brackets(text, index + 1)
    if char == "(" and word.endswith("="):
        return _end_of_brackets(text, index)
    return index


def _end_of_quotes(text: str, index: int) -> int:
    quote, index = text[index], index + 1
    while index < len(text) and text[index] != quote:
        if quote == '"' and text[index] == "\\":
            index += 1
        elif quote == '"' and text[index] == "$" and text[index + 1 : index + 2] in ("(", "{"):
            index = _end_of_brackets(text, index + 1) - 1
        index += 1
    return index + 1


def _end_of_brackets(text: str, index: int) -> int:
    opening, closing, depth = text[index], _CLOSING[text[index]], 0
    while index < len(text):
        char = text[index]
        if char in "'\"":
            index = _end_of_quotes(text, index)
            continue
        if char == "#" and text[index - 1] in " \t\n" and opening == "(":
            index = _find(text, "\n", index)
            continue
        depth += (char == opening) - (char == closing)
        index += 1
        if depth == 0:
            break
    return index


def _find(text: str, part: str, start: int) -> int:
    index = text.find(part, start)
    return len(text) if index < 0 else index


@dataclass(slots=True)
class Variables:
    """Variables and arrays of a script, as far as its assignments say. Nothing is executed."""

    values: dict[str, list[str]] = field(default_factory=dict)
    conditional: set[str] = field(default_factory=set)
    """Variables that are set inside a condition or a loop, of which the last assignment counts."""
    depth: int = 0

    def read(self, words: list[str]) -> list[str]:
        """Take the assignments at the start of a statement, and return the raw words of the rest."""
        while words and words[0] in (*_OPENS, *_CLOSES, "then", "else", "elif", "do", "!", "{", "}"):
            self.depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
            words = words[1:]
        is_declaration = bool(words) and words[0] in _DECLARES
        words = words[is_declaration:]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            self._assign(*match.groups())
            words = words[1:]
        return [] if is_declaration else words

    def _assign(self, name: str, plus: str, raw: str) -> None:
        if raw.startswith("(") and raw.endswith(")"):
            items = [item for words in split_statements(raw[1:-1]) for word in words for item in self.expand(word)]
            self.values[name] = (self.values.get(name, []) if plus else []) + items
        else:
            value = " ".join(self.expand(raw, split=False))
            self.values[name] = [("".join(self.values.get(name, [])) if plus else "") + value]
        if self.depth > 0:
            self.conditional.add(name)

    def expand(self, raw: str, *, split: bool = True) -> list[str]:
        """Return the words of a raw word, without its quotes. Variables that the script does not set stay `${NAME}`."""
        if array := re.fullmatch(r'"?\$\{([A-Za-z_]\w*)\[[@*]\]\}"?', raw):
            return list(self.values.get(array[1], []))
        if raw.strip('"') in ("$@", "$*", "${@}", "${@:1}", "${@:2}"):
            return []
        text = self._expand_text(raw)
        if split and re.fullmatch(r"\$\{?\w+\}?", raw):  # unquoted: the shell splits its value
            return shlex.split(text) if text.count("'") % 2 == 0 and text.count('"') % 2 == 0 else text.split()
        return [text]

    def _expand_text(self, raw: str) -> str:
        parts, index, quote = [], 0, ""
        while index < len(raw):
            char = raw[index]
            if quote != "'" and char == "\\" and index + 1 < len(raw):
                keeps = quote == '"' and raw[index + 1] not in '"\\$`\n'
                parts.append(raw[index : index + 2] if keeps else raw[index + 1])
                index += 2
            elif char in "'\"" and quote in ("", char):
                quote, index = ("" if quote else char), index + 1
            elif char == "$" and quote != "'":
                text, index = self._expand_dollar(raw, index)
                parts.append(text)
            else:
                parts.append(char)
                index += 1
        return "".join(parts)

    def _expand_dollar(self, raw: str, index: int) -> tuple[str, int]:
        if raw.startswith("$((", index):
            end = _end_of_brackets(raw, index + 1)
            return self._calculate(raw[index + 3 : end - 2]), end
        if raw[index + 1 : index + 2] in ("(", "{"):
            end = _end_of_brackets(raw, index + 1)
            is_command = raw[index + 1] == "("
            return (raw[index:end] if is_command else self._expand_parameter(raw[index + 2 : end - 1])), end
        match = re.compile(r"[A-Za-z_]\w*|[\d@*#?]").match(raw, index + 1)
        return (self._expand_parameter(match[0]), match.end()) if match else ("$", index + 1)

    def _expand_parameter(self, inner: str) -> str:
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return f"${{{inner}}}"
        name, _, sign, default = match.groups()
        value = self.values.get(name)
        if value is not None and (value != [""] or not (sign or "").startswith(":")):
            return " ".join(value)
        if sign is not None:
            return self._expand_text(default)
        return "" if name in ("@", "*") else f"${{{name}}}"

    def _calculate(self, expression: str) -> str:
        """Return the result of integer arithmetic; the expression itself if it depends on something unknown."""
        text = re.sub(
            r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: " ".join(self.values.get(match[1], [match[1]])), expression
        )
        try:
            return str(_evaluate(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"$(({expression}))"


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not arithmetic of whole numbers")
