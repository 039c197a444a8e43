"""Examples in docstrings, run with the names that the reference announces."""

import builtins
import doctest
from typing import Any


def run_examples(thing: Any, names: dict[str, Any]) -> tuple[int, str]:
    """The number of examples in the docstring of ``thing``, and the failures as text."""
    parser, failures = doctest.DocTestParser(), list[str]()
    test = parser.get_doctest(thing.__doc__ or "", dict(names), thing.__name__, None, None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags, verbose=False).run(test, out=failures.append)
    vars(builtins).pop("_", None)  # the last shown value
    return len(test.examples), "".join(failures)
