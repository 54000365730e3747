"""Chats: checks a request's messages, and makes a prompt of them by the model's own chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any


def rendered(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that asks for the next message of a chat.

    messages: objects with `role`, and with `content` (a text, or parts of type text) or `tool_calls`; others of their
        keys are the template's.
    options: variables of the template.

    Raises:
        ValueError: an input is wrong, or the template refuses it.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the model's tokenizer has no chat template: put all that it is to know into the prompt")
    own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    if wrong := sorted(own & {*(options or {})}):
        raise ValueError(f"chat_template_kwargs has {wrong[0]}, which is no variable of a template; leave it out")
    chat = [_message(number, message) for number, message in enumerate(messages)]
    if not chat:
        raise ValueError("messages is empty; give one at least")
    try:
        return str(
            tokenizer.apply_chat_template(
                chat,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **(options or {}),
            )
        )
    except Exception as error:  # of a template's own code
        raise ValueError(f"the model's chat template refuses this: {error}") from error


def _message(number: int, message: Any) -> dict[str, Any]:
    """A message whose content is a text.

    Raises:
        ValueError: it is none.
    """
    name = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise ValueError(f"{name} has no role; give one, such as user")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{name} has a part of type {kind}; this model reads parts of type text, with a text")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name} has no content; give a text, or a list of parts of type text")
    return {**message, "content": content}
