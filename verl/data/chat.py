"""Renders prompts, which are chat messages or text, and tokenizes them.

A list of chat messages is rendered by the tokenizer's chat template, ending with the header of the response. A string
is used as it is, as if a template had produced it. Both are then tokenized without adding special tokens: the template,
or the author of the string, has already added those that belong there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.data.special_tokens import get_special_text, is_marked, remove_marks
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLE = re.compile(r"[\w-]+")  # templates build special tokens from roles, such as <|user|>


class PromptError(DataError):
    """The prompt at `index` of a list cannot be rendered; callers that know the source of the list add its location."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason

    def __str__(self) -> str:
        return self.reason


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `path`; raise OSError or ValueError if it has none.

    For a folder with only a model, transformers makes a tokenizer without a vocabulary for some families, and every
    prompt would be empty or unknown.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not has_text_vocabulary(tokenizer):
        raise ValueError(f"{path} has no vocabulary; save the tokenizer there, such as tokenizer.json")
    return tokenizer


def has_text_vocabulary(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the vocabulary has more than special and added tokens."""
    return bool(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab()))


def describe_vocabulary_gap(student: Mapping[str, int], teacher: Mapping[str, int], size: int) -> str | None:
    """Return how the tokens of a student differ from a teacher's, whose model knows ids below `size`; None if equal.

    The teacher may have more tokens than the student, which never generates them.

    >>> describe_vocabulary_gap({"a": 0, "b": 1}, {"a": 0, "b": 1, "<think>": 2}, size=8)
    """
    tokens = {index: token for token, index in teacher.items()}
    differing = sorted(index for token, index in student.items() if tokens.get(index) != token or index >= size)
    if not differing:
        return None
    first = differing[0]
    [mine] = [token for token, index in student.items() if index == first]
    other = repr(tokens[first]) if first in tokens else "no token"
    other = f"beyond its {size:,} embeddings" if first >= size else other
    return (
        f"its vocabulary is not the policy's: {len(differing):,} of {len(student):,} tokens differ; id {first} is "
        f"{mine!r} for the policy, and {other} for the teacher. The teacher reads the policy's tokens as they are; "
        "set it to a model with the policy's tokenizer, usually of the same family"
    )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], template_kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Tokenize prompts as they are in the data, for measuring and for training."""
    texts: list[str] = []
    for prompt in prompts:
        try:
            texts.append(render(tokenizer, prompt, template_kwargs))
        except DataError as error:
            raise PromptError(len(texts), str(error)) from None
    encoded = encode(tokenizer, texts)
    for index, token_ids in enumerate(encoded):
        if not token_ids:
            raise PromptError(
                index, f"the tokenizer returns no tokens for {texts[index][:60]!r}; remove the row or fill it"
            )
    return encoded


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """Tokenize what `render` returned. A batch is much faster than one at a time."""
    options: dict[str, Any] = {"add_special_tokens": add_special_tokens}
    plain = [text for text in texts if not is_marked(text)]
    ids = iter(tokenizer(plain, return_attention_mask=False, verbose=False, **options).input_ids if plain else ())
    return [get_special_text(tokenizer).encode(text, **options)[0] if is_marked(text) else next(ids) for text in texts]


def render(tokenizer: PreTrainedTokenizerBase, prompt: Any, template_kwargs: Mapping[str, Any]) -> str:
    """Return the text of one prompt: a string as it is, chat messages through the chat template.

    Special tokens that messages or tools spell are marked (see `special_tokens`): `encode` reads them as text, and
    `SpecialText.show` returns the text for people.

    >>> render(tokenizer, [{"role": "user", "content": "12+34=?"}], {})
    '<|im_start|>user\\n12+34=?<|im_end|>\\n<|im_start|>assistant\\n'
    """
    read = read_prompt(prompt)
    if isinstance(read, str):
        return remove_marks(read)
    if tokenizer.chat_template is None:
        raise DataError(
            f"the prompt is a list of messages, but the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat "
            "template; use a model that has one, or write the prompts as strings"
        )
    from jinja2 import TemplateError

    special = get_special_text(tokenizer)
    kwargs = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    if kwargs.get("tools"):
        kwargs["tools"] = special.mark(kwargs["tools"])
    try:
        return str(tokenizer.apply_chat_template(special.mark_messages(read), **kwargs))
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(str(message["role"]) for message in read[:8])
        raise DataError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} does not accept these messages (roles: "
            f"{roles}): {error}; fix the messages, or use a model whose template accepts them"
        ) from error


def chat_template_hint(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, template_kwargs: Mapping[str, Any]
) -> str | None:
    """Return a hint if `prompt` is plain text that the tokenizer's chat template would change."""
    if not isinstance(prompt, str) or tokenizer.chat_template is None:
        return None
    if any(token in prompt for token in tokenizer.all_special_tokens):
        return None  # rendered already
    try:
        if render(tokenizer, [{"role": "user", "content": prompt}], template_kwargs) == prompt:
            return None
    except DataError:
        return None
    return (
        f"hint: prompts are strings, so the chat template of {tokenizer.name_or_path or 'the tokenizer'} is not "
        'applied. To apply it, write each prompt as a list of messages: [{"role": "user", "content": "..."}]'
    )


def teacher_template_hint(
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    prompt: Any,
    template_kwargs: Mapping[str, Any],
    *,
    is_used: bool,
) -> str | None:
    """Return a hint if a teacher's chat template differs but is not used, or is used without an effect."""
    setting = "distillation.teacher.use_own_chat_template"
    ignored = f"hint: {setting}=true has no effect: " if is_used else None
    if isinstance(prompt, str):
        return ignored and ignored + "prompts are strings, to which no template is applied"
    try:
        own, other = (encode_prompts(each, [prompt], template_kwargs) for each in (tokenizer, teacher))
    except DataError:
        return None  # reported where the prompt is used
    if own == other:
        return ignored and ignored + "both templates render the first prompt alike"
    if is_used:
        return None
    return (
        "hint: the teacher's chat template renders prompts differently, but the teacher reads the policy's rendering. "
        f"To render prompts for it in its own template, set {setting}=true"
    )


def read_prompt(prompt: Any, name: str = "prompt", setting: str = "prompt_key") -> str | list[dict[str, Any]]:
    """Return a prompt as a string or as chat messages; raise `DataError` if it is neither.

    `name` and the `setting` that names its column appear in the error.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"the {name} is an empty string; remove the row or fill it")
        if prompt.startswith(("[{'role'", '[{"role"', "[{'content'", '[{"content"')):
            raise DataError(
                f"the {name} is text that holds chat messages, {prompt[:40]!r}; it must be the list itself. Write the "
                "file again without json.dumps or str around it"
            )
        return prompt
    if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(each, Mapping) for each in prompt):
        raise DataError(
            f"the {name} is {_describe_type(prompt)}; it must be a string or a list of messages such as "
            f'[{{"role": "user", "content": "..."}}]. Fix the data or name another column with data.{setting}'
        )
    messages: list[dict[str, Any]] = drop_none(prompt)
    for index, message in enumerate(messages):
        if missing := {"role", "content"} - message.keys() - ({"content"} if "tool_calls" in message else set()):
            raise DataError(
                f"message {index} of the {name} has no {' and no '.join(sorted(missing))}, only "
                f"{', '.join(message) or 'nothing'}; every message needs role and content"
            )
        if not isinstance(message["role"], str) or not _ROLE.fullmatch(message["role"]):
            raise DataError(f"message {index} of the {name} has the role {message['role']!r}; it must be a word")
    return messages


def drop_none(value: Any) -> Any:
    """Remove entries that are None, at any depth.

    A Parquet struct has the keys of all rows; those that a row lacks, such as the arguments of other tools, are None
    and would reach the model.

    >>> drop_none([{"role": "user", "content": "?", "name": None}])
    [{'role': 'user', 'content': '?'}]
    """
    if isinstance(value, Mapping):
        return {key: drop_none(each) for key, each in value.items() if each is not None}
    return [drop_none(each) for each in value] if isinstance(value, (list, tuple)) else value


def truncate(token_ids: list[int], limit: int, side: str) -> list[int]:
    """Return at most `limit` ids, removing ids on a `side`: left, right or middle.

    >>> truncate([1, 2, 3, 4, 5], 3, "middle")
    [1, 4, 5]
    """
    excess = len(token_ids) - limit
    if excess <= 0:
        return token_ids
    if side == "left":
        return token_ids[excess:]
    if side == "right":
        return token_ids[:limit]
    if side != "middle":
        raise DataError(f"{len(token_ids)} tokens are more than the limit of {limit}, and are not to be truncated")
    head = limit // 2
    return token_ids[:head] + token_ids[head + excess :]


def _describe_type(prompt: Any) -> str:
    if isinstance(prompt, Sequence) and prompt:
        return f"a list that holds {type(prompt[0]).__name__}"
    return "an empty list" if prompt == [] else "missing" if prompt is None else f"of type {type(prompt).__name__}"
