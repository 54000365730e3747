"""The container's tests take minutes and need a Docker daemon, so only `make container` runs them."""

from __future__ import annotations

import pytest

collect_ignore = ["test_container.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in a section of its own that no container ran, and why."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = {report.longrepr[2] for report in skipped if "test_container.py" in report.nodeid}
    if reasons:
        terminalreporter.section("NO CONTAINER RAN", yellow=True, bold=True)
        for reason in sorted(reasons):
            terminalreporter.write_line(str(reason).removeprefix("Skipped: "))
