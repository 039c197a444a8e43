"""Several cases in one job of the ranks, which costs as much as a job of one case: of a table, or of a test module."""

import gc
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch

from tests.helpers import logged_warnings, transports
from tests.helpers.ranks import RankFailure, run_ranks

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
    results, generator_state = {}, torch.get_rng_state()
    for name, arguments in cases.items():
        torch.set_rng_state(generator_state)  # as in a job of its own
        try:
            results[name] = function(rank, *arguments)
            logged_warnings.assert_nothing_left()
            gc.collect()  # a wrapper in the traceback of an expected error would count among those of the process
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


_NOTHING = object()
_functions: dict[tuple[str, int], dict[str, Callable[[int], Any]]] = {}  # by module and number of ranks


def on_ranks(world_size: int, gives: object = _NOTHING) -> Callable[[Callable[[int], Any]], Callable[[], Any]]:
    """Run the decorated function on real ranks, in one job with the other such functions of its module.

    The decorated function takes no argument and returns the results of all ranks. With ``gives`` it is a test that
    compares these results with ``gives``.

    A function that changes its process, or the groups of torch, or that is skipped on some machines, needs a job of its
    own, with :func:`run_ranks`.
    """

    def decorate(function: Callable[[int], Any]) -> Callable[[], Any]:
        key, name = (function.__module__, world_size), function.__name__
        of_module = _functions.setdefault(key, {})
        assert name not in of_module, f"{name} stands twice in {function.__module__}"
        of_module[name] = function

        def results() -> list[Any]:
            return _results(*key, name)

        def test() -> None:
            assert results() == gives

        decorated = wraps(function)(results if gives is _NOTHING else test)
        del decorated.__wrapped__  # pytest would look for a fixture "rank"
        return decorated

    return decorate


def _results(module: str, world_size: int, name: str) -> list[Any]:
    """The results of a function. If a job of all functions failed in another one, this one runs alone."""
    try:
        return _results_of_module(module, world_size)[name]
    except RankFailure as error:
        text = str(error)
        if "in case " not in text or f"in case {name!r} " in text:
            raise
    return run_cases(_run_named, world_size, {name: (module, world_size, name)})[name]


@once
def _results_of_module(module: str, world_size: int) -> dict[str, list[Any]]:
    cases = {name: (module, world_size, name) for name in _functions[module, world_size]}
    return run_cases(_run_named, world_size, cases)


def _run_named(rank: int, module: str, world_size: int, name: str) -> Any:
    import_module(module)
    return _functions[module, world_size][name](rank)
