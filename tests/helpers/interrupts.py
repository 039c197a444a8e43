"""An exception before a chosen bytecode of some functions, as from the handler of a signal; a sweep over all of them.

Python calls a handler between two bytecodes, so a sweep finds every place where an exception leaves half of a change.
Run a sweep in a process of its own (``run_ranks``), whose exit code is looked at: half of a change may end in SIGSEGV.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupt(Exception):  # noqa: N818 - not an error
    """What the handler of a signal raises, for example of a time limit."""


class Injection:
    """Raises in the block, once, before the bytecode with this number of those that run in ``functions``.

    ``place``: where it raised, empty if fewer bytecodes ran.
    """

    def __init__(self, functions: Iterable[object], number: int) -> None:
        self.place = ""
        self._codes = {code for function in functions for code in _codes(function)}
        self._left = number

    def __enter__(self) -> "Injection":
        sys._getframe().f_trace_opcodes = True  # in Python 3.12 a first frame must have it before settrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, *_: Any) -> Callable[..., Any] | None:
        if frame.f_code not in self._codes:
            return None
        frame.f_trace = self._step  # Python 3.13 looks for it in the assignment of the next line
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                code = frame.f_code
                self.place = f"{code.co_qualname}, line {frame.f_lineno}, bytecode {frame.f_lasti}"
                raise Interrupt
        return self._step


def _codes(function: object) -> Iterator[CodeType]:
    """The code of a function, a method or a property, without its decorators, and of the functions inside."""
    if isinstance(function, property):
        function = function.fget
    waiting: list[CodeType] = [inspect.unwrap(function).__code__]  # type: ignore[arg-type, attr-defined]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def sweep(
    functions: Iterable[object],
    prepare: Callable[[], T],
    operate: Callable[[T], object],
    judge: Callable[[T], object],
    *,
    stride: int = 1,
) -> int:
    """For each bytecode of ``functions`` that runs in ``operate(prepare())``: raise before it, and ``judge`` after it.

    ``stride``: of these bytecodes, take every such one. Returns the number of bytecodes that were tried.

    Raises:
        AssertionError: ``judge`` raised; with the place of the exception.
    """
    codes = list(functions)
    for tried in count():
        subject = prepare()
        with Injection(codes, tried * stride) as injection:
            try:
                operate(subject)
            except Exception:
                if not injection.place:
                    raise
        if not injection.place:
            return tried
        try:
            judge(subject)
        except Exception as error:
            raise AssertionError(f"after an exception in {injection.place}: {error!r}") from error
    raise AssertionError
