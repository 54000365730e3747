"""Print cli.md, the page of the command, from the help texts in compile_cache/cli.

python docs/print_cli.py > docs/cli.md
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

import typer.main

from compile_cache.cli.app import app

HEAD = """\
# The command `compile-cache`

<!-- printed by docs/print_cli.py -->

In a checkout, install it (`s3` for buckets, `signing` for keys). In an image, call `python -m compile_cache.cli`; it
needs `typer` and `rich`, and `report` also `jinja2`.

<!-- needs: network -->
```sh
pip install ".[cli,s3,signing]"
compile-cache --install-completion      # bash, zsh, fish, PowerShell
```
"""
PICTURE = """\
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="report-dark.png">
  <img src="report-light.png" width="640" alt="The page: the newest boot's timeline, all boots, history">
</picture>
"""


def page() -> str:
    """The page. Options of several commands are described once, at the top."""
    group: Any = typer.main.get_command(app)
    texts = Counter(_item(one) for command in group.commands.values() for one in command.params)
    common = {text for text, times in texts.items() if times > 1}
    parts = [HEAD, *_paragraphs(group.help), "Options of several commands:\n", "".join(sorted(common))]
    for name, command in group.commands.items():
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        names = [_name(one) if one.required or _name(one).startswith("[") else f"[{_name(one)}]" for one in arguments]
        usage = [f"`compile-cache {name} {' '.join(names)}`\n"] if names else []
        parts += [f"## {name}\n", *usage, *_paragraphs(command.help), _list(command.params, common)]
        parts += [PICTURE] if name == "report" else []
    return "\n".join(filter(None, parts))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False) + "\n"


def _list(parameters: Any, common: Set[str]) -> str:
    items = [_item(one) for one in parameters]
    also = ", ".join(f"`{_name(one)}`" for one in parameters if _item(one) in common)
    return "".join(item for item in items if item not in common) + (f"- Also: {also}.\n" if also else "")


def _item(parameter: Any) -> str:
    return f"- `{_name(parameter)}`: {parameter.help}{_default(parameter)}\n"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    flag = "" if parameter.is_flag else f" {parameter.metavar}"
    return ", ".join(reversed(parameter.opts)) + flag


def _default(parameter: Any) -> str:
    return f" Default: `{parameter.default}`." if parameter.default else ""


if __name__ == "__main__":
    print(page(), end="")
