"""Print the table of private names for versions.md, from compile_cache/inductor/private_names.py.

python docs/print_names.py
"""

from __future__ import annotations

from compile_cache.inductor.private_names import PRIVATE_NAMES


def table() -> str:
    """A row for each loss and the releases that have the names."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in PRIVATE_NAMES:
        names = ", ".join(f"`{name}`" for name in each.names.split())
        rows.setdefault((each.lost, each.releases), []).append(f"`{each.place}`: {names}")
    lines = [f"| {'; '.join(names)} | {releases} | {lost} |" for (lost, releases), names in rows.items()]
    return "\n".join(["| names | torch | lost without one |", "| --- | --- | --- |", *lines])


if __name__ == "__main__":
    print(table())
