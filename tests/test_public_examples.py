"""Every public name has an example that works."""

import doctest

import pytest

import matcher

# Exceptions and constants, and names that tests of their own follow.
WITHOUT_EXAMPLE = {
    "ImageError",
    "ImageWarning",
    "IntegrityError",
    "MatcherError",
    "UsageError",
    "PRESETS",
    "__version__",
}


@pytest.mark.parametrize("name", sorted(set(matcher.__all__) - WITHOUT_EXAMPLE))
def test_the_example_of_a_public_name_works(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = getattr(matcher, name)
    found = doctest.DocTestFinder(exclude_empty=True).find(
        thing, name, globs={"matcher": matcher, name: thing}
    )
    examples = [test for test in found if test.examples]
    assert any(test.name == name for test in examples), f"matcher.{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        output = []
        runner.run(test, out=output.append)
        assert runner.failures == 0, "".join(output)
