"""Cases of a table in one job of the ranks, which costs as much as a job of one case."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from tests.helpers import logged_warnings, transports
from tests.helpers.ranks import run_ranks

P = ParamSpec("P")
T = TypeVar("T")


def run_cases(
    function: Callable[..., Any], world_size: int, cases: Mapping[str, tuple[Any, ...]], **options: Any
) -> dict[str, list[Any]]:
    """Return ``[function(0, *case), function(1, *case), ...]`` of each case, by name, on ranks that run all cases.

    A failure names its case. Cases share processes and a process group: a case that changes either keeps a job of its
    own. ``options`` are those of :func:`run_ranks`.
    """
    of_ranks = run_ranks(partial(_run_all, function, cases), world_size, **{"timeout_seconds": 120.0, **options})
    return {name: [of_rank[name] for of_rank in of_ranks] for name in cases}


def _run_all(function: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]], rank: int) -> dict[str, Any]:
    results = {}
    for name, arguments in cases.items():
        try:
            results[name] = function(rank, *arguments)
            logged_warnings.assert_nothing_left()
        except BaseException as error:
            error.add_note(f"in case {name!r} of a job of {len(cases)} cases")
            raise
    return results


def once(job: Callable[P, T]) -> Callable[P, T]:
    """``job`` runs once per arguments, also if it fails: every test that shares it gets the first result or error.

    Each transport has a job of its own.
    """

    @cache
    def outcome(transport: str, *args: Any, **kwargs: Any) -> tuple[T | None, Exception | None]:
        try:
            return job(*args, **kwargs), None
        except Exception as error:  # noqa: BLE001 - raised below
            return None, error

    def shared(*args: P.args, **kwargs: P.kwargs) -> T:
        result, error = outcome(transports.current, *args, **kwargs)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    return shared
