"""The project's pages, taken apart: code blocks with their marks, links, anchors, tables.

A mark is a comment before a code block: `<!-- needs: docker, gpu -->` keeps it from being run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

PROJECT = Path(__file__).parent.parent
NEEDS = ("account", "cluster", "docker", "gpu", "minutes", "network")
"""Why a block may not be run by a test: accounts and secrets, a Kubernetes cluster, a Docker daemon, a GPU, more than
a few seconds, packages from the network."""

_MARK = re.compile(r"<!-- needs: (.+?) -->")
_SOURCE = re.compile(r'(?:src|srcset|href)="([^"]+)"')
_VALUE = re.compile(r"%(?:\.\d+)?[sdrfg]")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `needs` is empty if a test must run it."""

    page: str
    line: int
    language: str
    text: str
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def guides() -> list[Path]:
    """README.md and docs/: the pages that users follow."""
    return [PROJECT / "README.md", *sorted(PROJECT.glob("docs/*.md"))]


def pages() -> list[Path]:
    """Every page of the repository."""
    names = [folder.name for folder in PROJECT.iterdir() if folder.is_dir()]
    folders = [PROJECT / name for name in names if name == ".github" or not name.startswith((".", "_"))]
    return sorted({*PROJECT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))})


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page."""
    mark = ""
    for token in _tokens(page):
        if token.type == "fence":
            needs = _MARK.search(mark)
            name = page.relative_to(PROJECT).as_posix()
            named = tuple(part.strip() for part in needs[1].split(",")) if needs else ()
            yield Block(name, (token.map or [0])[0] + 1, token.info.strip(), token.content, named)
        mark = token.content if token.type == "html_block" else ""


def codes(page: Path) -> Iterator[str]:
    """The text of each code block, and of each piece of code in a sentence."""
    for token in _tokens(page):
        if token.type == "fence":
            yield token.content
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def links(page: Path) -> Iterator[str]:
    """Where a page's links and pictures lead."""
    for token in _tokens(page):
        if token.type == "html_block":
            yield from _SOURCE.findall(token.content)
        for child in token.children or ():
            if child.type == "html_inline":
                yield from _SOURCE.findall(child.content)
            target = child.attrs.get("href") or child.attrs.get("src")
            if target:
                yield str(target)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for token in headings(page):
        text = "".join(child.content for child in token.children or ())
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.append(f"{slug}-{count}" if (count := sum(re.sub(r"-\d+$", "", one) == slug for one in found)) else slug)
    return frozenset(found)


def headings(page: Path) -> list[Token]:
    """The content of each heading."""
    tokens = _tokens(page)
    return [tokens[number + 1] for number, token in enumerate(tokens) if token.type == "heading_open"]


def rows(page: Path, header: str) -> Iterator[list[str]]:
    """The cells of each row of those tables whose first column is called `header`."""
    for table in re.split(r"\n\n+", page.read_text()):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("|")]
        if lines and lines[0][0].strip() == header:
            yield from ([cell.strip() for cell in line] for line in lines[2:])


def words(page: Path) -> int:
    """How many words a reader sees, those of code blocks and tables included."""
    return len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).split())


@cache
def source_texts() -> tuple[str, ...]:
    """Every text in the library's and the models' source, docstrings left out. A NUL stands for each value put in."""
    files = [path for folder in ("compile_cache", "models") for path in (PROJECT / folder).rglob("*.py")]
    return tuple(text for file in files for text in _texts(ast.parse(file.read_text())))


def _texts(tree: ast.Module) -> Iterator[str]:
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield _VALUE.sub("\0", node.value)


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())
