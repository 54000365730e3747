"""Make a virtual environment of what `requirements.txt` and cog need and nothing else, by links to what is installed.

Imports depend on all that is installed: transformers and diffusers look through every distribution, and import scikit-
learn, pandas or peft where they find them. An image that is built from `requirements.txt` has none of those; a machine
for benchmarks often does.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def read_requirements(path: Path) -> list[Requirement]:
    """Its lines; the installed versions count, not those that it asks for."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def closure(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """The distributions that pip would install for `requirements`, by name.

    Raises:
        SystemExit: one of them is not installed.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, "") for requirement in requirements]
    while todo:
        requirement, needed_by = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed, which {needed_by or 'requirements.txt'} needs") from None
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for needed in map(Requirement, found[name].requires or ()):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append((needed, name))
    return found


def link(distributions: Iterable[Distribution], folder: Path) -> None:
    """Link their modules, packages and metadata into `folder`."""
    for one in distributions:
        site = Path(str(one.locate_file("")))
        for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__", "bin"}:
            target = folder / name
            if not target.exists() and not name.endswith(".pth"):
                target.symlink_to((site / name).resolve())


def main() -> None:
    """Make the environment and print what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requirements", type=Path, default=ROOT / "requirements.txt")
    parser.add_argument("--out", type=Path, required=True, help="new folder; its bin/python sees nothing else")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists already")
    distributions = closure([Requirement("cog"), *read_requirements(args.requirements)])
    venv.create(args.out, symlinks=True, with_pip=False)
    site = sysconfig.get_path("purelib", "venv", {"base": str(args.out), "platbase": str(args.out)})
    link(distributions.values(), Path(site))
    for name, one in sorted(distributions.items()):
        print(f"{name}=={one.version}")
    print(f"{len(distributions)} distributions in {args.out}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
