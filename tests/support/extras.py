"""A pytest plugin: the tests that one run skipped since a package was missing are run by another.

The first run is the README's, in an environment that holds nothing else. The second one has the
extras, and `--extras-only` leaves out of it all that the first has run.
"""

import pytest

KEPT = "kvlingo/lacking"  # in pytest's cache: ids of tests, and of modules that were skipped whole


class Lacking:
    """Collects the ids of what is skipped for a missing package; xdist's workers send theirs."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.found = config, set[str]()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and "could not import" in str(report.longrepr):
            self.found.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["lacking"] = sorted(self.found)
        elif self._whole and self.config.cache is not None:
            self.config.cache.set(KEPT, sorted(self.found))

    @property
    def _whole(self) -> bool:
        """Whether this is a run of all tests: one of some of them leaves what the last one kept."""
        option = self.config.option
        some = option.extras_only or option.keyword or option.markexpr or option.collectonly
        return not some and self.config.args_source is pytest.Config.ArgsSource.TESTPATHS

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.found.update(getattr(node, "workeroutput", {}).get("lacking", ()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extras-only",
        action="store_true",
        help="run only what the last run skipped since a package was missing",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lacking(config), "lacking")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("extras_only"):
        return
    kept = config.cache.get(KEPT, None) if config.cache is not None else None
    if kept is None:
        raise pytest.UsageError("--extras-only follows a run without it; run `make test` first")
    wanted = [i for i in items if not {i.nodeid, i.nodeid.split("::")[0]}.isdisjoint(kept)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted
