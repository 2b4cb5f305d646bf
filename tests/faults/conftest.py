"""Counts the cases that stand behind each promise of SECURITY.md, and prints them at the end of a run.

A test belongs to the promise that its file's mark names. It is one case, or as many as it says by `tried(n)`.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

CASES = pytest.StashKey[int]()


def pytest_addoption(parser) -> None:
    parser.addoption("--fault-cases", help="write the number of cases of each promise to this JSON file")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "promise(number): the promise of SECURITY.md that a test is about")
    config.pluginmanager.register(Tally(config))


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
    if mark is not None and not report.skipped and (report.when == "call" or report.failed):
        report.user_properties.append(("promise", [mark.args[0], max(1, item.stash.get(CASES, 0))]))
    return report


class Tally:
    """Cases tried and held by promise; its own process collects the reports of all."""

    def __init__(self, config) -> None:
        self.config, self.table = config, defaultdict(lambda: [0, 0])

    def pytest_runtest_logreport(self, report) -> None:
        for name, value in report.user_properties:
            if name == "promise" and not report.skipped and (report.when == "call" or report.failed):
                number, cases = value
                self.table[number][0] += cases
                self.table[number][1] += cases - report.failed

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.table:
            terminalreporter.section("cases behind the promises")
        for number, (cases, held) in sorted(self.table.items()):
            terminalreporter.line(f"promise {number}: {cases} cases tried, {held} held")
        if path := self.config.getoption("--fault-cases"):
            Path(path).write_text(json.dumps(dict(self.table)), encoding="utf-8")
