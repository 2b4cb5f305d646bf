"""Counts the cases that stand behind each promise of SECURITY.md, and prints them at the end of a run.

A test belongs to the promise that its file's mark names. It is one case, or as many as it says by `tried(n)`.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

CASES = pytest.StashKey[int]()
TABLE = pytest.StashKey[dict]()


def pytest_addoption(parser) -> None:
    parser.addoption("--fault-cases", help="write the number of cases of each promise to this JSON file")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "promise(number): the promise of SECURITY.md that a test is about")
    config.stash[TABLE] = defaultdict(lambda: [0, 0])


@pytest.fixture
def tried(request) -> Callable[[int], None]:
    """Adds to the number of cases that the test has tried."""

    def add(count: int = 1) -> None:
        request.node.stash[CASES] = request.node.stash.get(CASES, 0) + count

    return add


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    mark = item.get_closest_marker("promise")
    if mark is not None and (report.when == "call" or report.failed):
        row = item.config.stash[TABLE][mark.args[0]]
        cases = max(1, item.stash.get(CASES, 0))
        if not report.skipped:
            row[0] += cases
            row[1] += cases - report.failed
    return report


def pytest_terminal_summary(terminalreporter, config) -> None:
    table = {number: table for number, table in sorted(config.stash[TABLE].items())}
    if table:
        terminalreporter.section("cases behind the promises")
    for number, (cases, held) in table.items():
        terminalreporter.line(f"promise {number}: {cases} cases tried, {held} held")
    if path := config.getoption("--fault-cases"):
        Path(path).write_text(json.dumps(table), encoding="utf-8")
