"""Signatures of predictors: those that Cog's command accepts, and those that it refuses or drops a part of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TYPING = "from typing import Any, AsyncIterator, Dict, Iterator, List, Literal, Optional, Union"
COG = """\
import cog
from cog import AsyncConcatenateIterator, BaseModel, BaseRunner, ConcatenateIterator, Input, Path, Secret
from cog import concurrent, streaming
"""


@dataclass(frozen=True, slots=True)
class Signature:
    """A predictor in a line or a few: `above` is at the top level of its file, `decorator` above `run()`."""

    inputs: str = "x: str"
    output: str = "str"
    above: str = ""
    decorator: str = ""
    define: str = "def"
    typing: str = TYPING

    def write(self, folder: Path) -> str:
        """Write `predict.py`; the predictor's name for `openapi_schema`."""
        (folder / "predict.py").write_text(
            f"{self.typing}\n{COG}\n{self.above}\n\nclass Predictor(BaseRunner):\n    {self.decorator}\n"
            f"    {self.define} run(self, {self.inputs}) {self.output and '-> '}{self.output}:\n        ...\n"
        )
        return "predict.py:Predictor"


MODEL = """\
class Score(BaseModel):
    name: str
    value: float = 0.5
    box: Optional[List[float]]
"""

ACCEPTED = {
    "optional path": Signature("x: Optional[Path] = Input(description='A file', default=None)"),
    "path or none": Signature("x: Path | None = None"),
    "optional without a default": Signature("x: Optional[int]"),
    "optional secret": Signature("x: Optional[Secret] = Input(default=None)"),
    "secret without a value": Signature("x: Secret = Input(default=None)"),
    "bool": Signature("x: bool = False"),
    "list of paths": Signature("x: List[Path]"),
    "list with a default": Signature("x: list[str] = Input(default=['a', 'b'])"),
    "union": Signature("x: Union[str, List[str]], some_other: 'Optional[int]' = 3"),
    "union with none": Signature("x: Union[str, int, None], y: Optional[Union[str, float]] = None"),
    "list of dictionaries": Signature("x: List[Dict[str, str]]"),
    "dictionary": Signature("x: dict"),
    "anything": Signature("x: Any"),
    "qualified names": Signature("x: cog.Path"),
    "keywords only": Signature("*, x: int, y: int = 3"),
    "negative and separated bounds": Signature("x: float = Input(ge=-1.5, le=1_000)"),
    "bounds in other forms": Signature("x: float = Input(default=.5, ge=+0., le=1e3)"),
    "numbers in other bases": Signature("x: int = Input(default=0x1F), y: int = Input(default=-1_000)"),
    "lengths and a pattern": Signature("x: str = Input(min_length=1, max_length=20, regex=r'^\\w+$', deprecated=True)"),
    "kinds of files": Signature("x: List[Path] = Input(accept='image/*', deprecated=False)"),
    "choices in place": Signature("x: int = Input(default=1, choices=[1, 2])"),
    "choices by name": Signature("x: str = Input(choices=NAMES)", above="NAMES = ['a', 'b']"),
    "choices of a tuple by name": Signature("x: str = Input(choices=NAMES)", above="NAMES = ('a', 'b')"),
    "choices by keys": Signature("x: str = Input(choices=list(TABLE.keys()))", above="TABLE = {'a': 1, 'b': 2}"),
    "choices by values": Signature("x: int = Input(choices=list(TABLE.values()))", above="TABLE = {'a': 1, 'b': 2}"),
    "sum of choices": Signature("x: str = Input(choices=NAMES + ['c'])", above="NAMES = ['a', 'b']"),
    "choices of an optional": Signature("x: Optional[str] = Input(default=None, choices=['a'])"),
    "default by name": Signature("x: int = Input(default=N), y: int = N", above="N: int = 3"),
    "description by name": Signature("x: int = Input(description=WORDS)", above="WORDS = 'Some words'"),
    "description of several lines": Signature('x: int = Input(description="""Two\nlines""")'),
    "input by another name": Signature("x: int = Number(ge=1)", above="from cog import Input as Number"),
    "lists of lists": Signature(output="List[List[float]]"),
    "any list": Signature(output="list"),
    "dictionary of numbers": Signature(output="Dict[str, float]"),
    "dictionaries of numbers": Signature(output="List[Dict[str, float]]"),
    "model": Signature(output="Score", above=MODEL),
    "models": Signature(output="List[Score]", above=MODEL),
    "model that holds itself": Signature(output="Tree", above="class Tree(cog.BaseModel):\n    leaves: List['Tree']\n"),
    "iterator of paths": Signature(output="Iterator[Path]"),
    "async iterator": Signature(output="AsyncIterator[str]", define="async def"),
    "async text": Signature(output="AsyncConcatenateIterator[str]", define="async def"),
    "several at a time": Signature(decorator="@concurrent(max=8)", define="async def"),
    "stream": Signature(output="ConcatenateIterator[str]", decorator="@streaming"),
    "qualified stream": Signature(output="Iterator[str]", decorator="@cog.streaming"),
}

# The fault is named, and what to write in its place.
REFUSED = {
    "no annotation": (Signature("x"), "parameter x: it has no type; annotate it"),
    "no annotation, a default": (Signature("x=3"), "parameter x: it has no type; annotate it"),
    "no type of the output": (Signature(output=""), "its output has no type; annotate it"),
    "no output": (Signature(output="None"), "None is refused as an output"),
    "literal": (Signature("x: Literal['a', 'b']"), "parameter x: Literal.* is refused; write the type, and choices="),
    "set": (Signature("x: set[str]"), r"parameter x: set\[str\] is refused; write bool"),
    "bare list": (Signature("x: list"), "parameter x: list is refused"),
    "optional by another name": (
        Signature("x: Maybe[int]", above="from typing import Optional as Maybe"),
        r"parameter x: Maybe\[int\] is refused",
    ),
    "list of optionals": (Signature("x: List[Optional[int]]"), r"parameter x: Optional\[int\] is refused"),
    "list of lists": (Signature("x: List[List[int]]"), "parameter x: .* a list holds no lists"),
    "union with a path": (Signature("x: Union[str, Path]"), "parameter x: .*Path and Secret are no members"),
    "limits of a union": (Signature("x: Union[str, int] = Input(ge=3)"), "parameter x: .*no limits; write one type"),
    "choices of a list": (
        Signature("x: List[str] = Input(choices=['a'])"),
        "parameter x: .* by its choices",
    ),
    "kinds of no file": (Signature("x: str = Input(accept='image/*')"), "parameter x: accept is refused for str"),
    "stars": (Signature("*x: int, **y: int"), "parameter x: .*\n.*parameter y: Cog takes no"),
    "imported choices": (
        Signature("x: str = Input(choices=NAMES)", above="from names import NAMES"),
        "parameter x: Cog refuses or drops choices=NAMES; write a list of literals",
    ),
    "computed choices": (
        Signature("x: str = Input(choices=sorted([]))"),
        "parameter x: .* write a list of literals",
    ),
    "no choices": (Signature("x: str = Input(choices=[])"), "parameter x: .* write a list of literals"),
    "tuple of choices": (Signature("x: str = Input(choices=('a', 'b'))"), "parameter x: .* write a list of literals"),
    "choices from a table of calls": (
        Signature("x: str = Input(choices=list(TABLE.keys()))", above="TABLE = {'a': str(), 'b': 2}"),
        "parameter x: .* write a list of literals",
    ),
    "choices that change": (
        Signature("x: str = Input(choices=NAMES)", above="NAMES = ['a']\nNAMES += ['b']"),
        "parameter x: .* write a list of literals",
    ),
    "bound by name": (
        Signature("x: int = Input(le=N)", above="N = 3"),
        "parameter x: Cog drops or changes le=N: N is no literal number; write the value as one literal",
    ),
    "lower bound by name": (Signature("x: int = Input(ge=N)", above="N = 3"), "parameter x: .*ge=N"),
    "computed bound": (Signature("x: int = Input(le=2**3)"), r"parameter x: .*le=2\*\*3"),
    "hexadecimal bound": (Signature("x: int = Input(le=0x10)"), "parameter x: .*le=0x10"),
    "bound in parentheses": (Signature("x: int = Input(le=(3))"), r"parameter x: .*le=\(3\)"),
    "length by name": (Signature("x: str = Input(max_length=N)", above="N = 3"), "parameter x: .*max_length=N"),
    "pattern by name": (Signature("x: str = Input(regex=R)", above="R = 'a'"), "parameter x: .*regex=R"),
    "computed default": (
        Signature("x: int = Input(default=N + 1)", above="N = 3"),
        r"parameter x: Cog drops or refuses default=N \+ 1: .*write a literal",
    ),
    "computed plain default": (Signature("x: int = 2 + 1"), r"parameter x: .* the default 2 \+ 1: .*write a literal"),
    "imported default": (
        Signature("x: int = Input(default=N)", above="from names import N"),
        "parameter x: Cog drops or refuses default=N",
    ),
    "default that changes": (
        Signature("x: int = Input(default=N)", above="N = 3\nN = int('4')"),
        "parameter x: Cog drops or refuses default=N",
    ),
    "large default": (Signature("x: int = Input(default=9223372036854775808)"), "parameter x: .*more than 64 bits"),
    "default factory": (Signature("x: list[str] = Input(default_factory=list)"), "parameter x: .*default_factory="),
    "none that cannot be": (
        Signature("x: int = Input(default=None)"),
        r"parameter x: Cog drops default=None, .*write Optional\[int\]",
    ),
    "formatted description": (
        Signature("x: int = Input(description=f'at most {N}')", above="N = 3"),
        "parameter x: Cog drops or changes description=f'at most .*write the value as one literal",
    ),
    "added description": (Signature("x: int = Input(description='a' + 'b')"), "parameter x: .*description='a' "),
    "description in two parts": (Signature("x: int = Input(description='a ' 'b')"), "parameter x: .*Cog reads"),
    "description with an escape": (Signature(r"x: int = Input(description='a\tb')"), "parameter x: .*Cog reads"),
    "description in parentheses": (
        Signature("x: int = Input(description=(\n'a'\n))"),
        r"parameter x: .*description=\('a'\)",
    ),
    "imported description": (
        Signature("x: int = Input(description=WORDS)", above="from names import WORDS"),
        "parameter x: .*description=WORDS",
    ),
    "unnamed argument": (Signature("x: int = Input(3)"), r"parameter x: Cog drops 3 in Input\(\); name the argument"),
    "unpacked arguments": (
        Signature("x: int = Input(**LIMITS)", above="LIMITS = {'ge': 1}"),
        r"parameter x: Cog does not read \*\*LIMITS",
    ),
    "optional output": (Signature(output="Optional[str]"), "is refused as an output; return one type"),
    "output or none": (Signature(output="str | None"), "is refused as an output; return one type"),
    "union output": (Signature(output="Union[str, int]"), "is refused as an output; return one type"),
    "list by a star import": (
        Signature(output="List[str]", typing="from typing import *"),
        "import List by its name from typing, or write list",
    ),
    "other text": (Signature(output="ConcatenateIterator[int]"), "a ConcatenateIterator is of str"),
    "unknown output": (
        Signature(output="Picture", above="from PIL.Image import Picture"),
        "write a type that Cog",
    ),
    "model of another file's": (Signature(output="Score", above="from scores import Score"), "BaseModel of predict.py"),
    "model with a computed default": (
        Signature(output="Score", above="class Score(BaseModel):\n    value: float = 1 / 3\n"),
        r"Score.value: Cog drops the default 1 / 3; write a literal",
    ),
    "model with another parent": (
        Signature(output="Long", above=f"{MODEL}\nclass Long(Score, BaseModel):\n    more: str\n"),
        "Long has other parents than BaseModel",
    ),
    "stream of nothing": (Signature(decorator="@streaming"), "@streaming is refused without an Iterator"),
    "several at a time, not async": (Signature(decorator="@concurrent(max=8)"), "@concurrent is refused .* not async"),
    "computed number at a time": (
        Signature(decorator="@concurrent(max=2 * 4)", define="async def"),
        "write @concurrent",
    ),
    "another decorator": (Signature(decorator="@torch.inference_mode()"), "@torch.inference_mode, .*FieldInfo"),
}
