"""Refusal of unusable arguments: the error names the argument, the value and the expected value."""

import math
import re
from collections.abc import Iterable
from typing import Any, Literal, get_type_hints

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, SyncRecord
from legacy_ddp.debug import check_replicas
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, error_of, wrap

pytestmark = pytest.mark.usefixtures("alone")


_BUFFER_SIZE = "buffer_size is not usable: got {}, expected a number of elements, an int of at least 1"
_TIMEOUT = "timeout_seconds is not usable: got {}, expected a positive number of seconds"
_LEVEL = "checks: level is unknown: got {}, expected one of ('off', 'info', 'detail')"


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"module": "model"}, TypeError, "module is of the wrong type: got str, expected torch.nn.Module"),
        ({"module": nn.Linear}, TypeError, "module is of the wrong type: got type, expected torch.nn.Module"),
        ({"world_size": 2}, ValueError, "world_size does not match the process group: got 2, expected 1; leave it out"),
        ({"process_group": 3}, TypeError, "process_group is of the wrong type: got 3, expected ProcessGroup"),
        ({"buffer_size": 0}, ValueError, _BUFFER_SIZE.format(0)),
        ({"buffer_size": 2.0**28}, ValueError, _BUFFER_SIZE.format(2.0**28)),
        ({"buffer_size": True}, ValueError, _BUFFER_SIZE.format(True)),
        ({"reduce_dtype": torch.int32}, ValueError, "reduce_dtype is not usable: got torch.int32, expected one of"),
        ({"reduce_dtype": torch.complex64}, ValueError, "reduce_dtype is not usable: got torch.complex64, expected"),
        (
            {"reduce_dtype": torch.bfloat16, "reproducible": True},
            ValueError,
            "reduce_dtype is not usable with reproducible=True: got torch.bfloat16",
        ),
        ({"reduce_dtype": "bfloat16"}, ValueError, "reduce_dtype is not usable: got 'bfloat16', expected one of"),
        ({"absent_gradients": "zero"}, ValueError, "absent_gradients is unknown: got 'zero', expected one of ('none'"),
        ({"ignore": "weight"}, TypeError, "ignore is of the wrong type: got the string 'weight', expected several"),
        (
            {"ignore": ["weight", "wieght", "0.bias"]},
            ValueError,
            "ignore names what the module does not have: got ['0.bias', 'wieght'], expected parameter or buffer names",
        ),
        ({"checks": "on"}, ValueError, _LEVEL.format("'on'")),
        ({"checks": None}, TypeError, "checks is of the wrong type: got NoneType, expected a level (str) or Checks"),
        ({"timeout_seconds": 0}, ValueError, _TIMEOUT.format(0)),
        ({"timeout_seconds": math.inf}, ValueError, _TIMEOUT.format("inf")),
        ({"timeout_seconds": math.nan}, ValueError, _TIMEOUT.format("nan")),
        ({"timeout_seconds": "60"}, ValueError, _TIMEOUT.format("'60'")),
        ({"timeout_seconds": 1e300}, ValueError, _TIMEOUT.format("1e+300")),
        ({"timeout_seconds": True}, ValueError, _TIMEOUT.format(True)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_unusable_argument_is_named(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="^" + re.escape(text)) as caught:
        LegacyDistributedDataParallel(**{"module": nn.Linear(2, 1), **arguments})

    assert caught.type is error


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"level": "details"}, _LEVEL.format("'details'")),
        ({"uneven": "ignore"}, "checks: uneven is unknown: got 'ignore', expected one of ('warn', 'raise', 'allow')"),
        (
            {"unsynchronized_step": "warn"},
            "checks: unsynchronized_step is unknown: got 'warn', expected one of ('raise', ",
        ),
        (
            {"nonfinite": "allow"},
            "checks: nonfinite is unknown: got 'allow', expected one of ('ignore', 'warn', 'raise', 'skip')",
        ),
        ({"same_data": "raise"}, "checks: same_data is unknown: got 'raise', expected one of ('warn', 'allow')"),
        ({"edited": "ignore"}, "checks: edited is unknown: got 'ignore', expected one of ('warn', 'raise', 'allow')"),
        *(
            ({"every": every}, f"checks: every is not usable: got {every!r}, expected a number of calls, an int of at ")
            for every in (0, 2.0, True)
        ),
    ],
)
def test_checks_refuses_what_it_does_not_know(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        Checks(**arguments)


WITHOUT_EFFECT = [
    (Checks("off", nonfinite="raise"), "checks: nonfinite='raise' has no effect at level 'off'"),
    (Checks("off", nonfinite="skip"), "checks: nonfinite='skip' has no effect at level 'off'"),
    (Checks("off", divergence="raise"), "checks: divergence='raise' has no effect at level 'off'"),
    (Checks("off", edited="raise"), "checks: edited='raise' has no effect at level 'off'"),
    (Checks(every=5), "checks: every=5 has no effect at level 'info', expected level 'detail'"),
    (Checks("off", every=2), "checks: every=2 has no effect at level 'off', expected level 'detail'"),
    (Checks("detail", divergence="ignore"), "checks: divergence='ignore' has no effect at level 'detail'"),
]


@pytest.mark.parametrize("checks, text", WITHOUT_EFFECT, ids=str)
def test_a_setting_without_effect_at_its_level_is_refused(checks: Checks, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        wrap(checks=checks)


def _settings_differ(rank: int, name: str, values: list[Any]) -> Said:
    """``values``: by rank; a rank beyond them gives no value."""
    return error_of(wrap, **({name: values[rank]} if rank < len(values) else {}))


_RAISE, _SKIP = Checks(nonfinite="raise"), Checks(nonfinite="skip")
_SHARED: dict[str, tuple[str, list[Any]]] = {  # by the words of the error: the setting, and its values
    "setting 'buffer_size': rank 2 has 8; ranks 0-1 have 7": ("buffer_size", [7, 7, 8]),
    "setting 'reduce_dtype': rank 1 has torch.bfloat16; ranks 0, 2 have None": (
        "reduce_dtype",
        [None, torch.bfloat16, None],
    ),
    "setting 'absent_gradients': rank 1 has zeros; ranks 0, 2 have none": (
        "absent_gradients",
        ["none", "zeros", "none"],
    ),
    "setting 'reproducible': rank 1 has True; ranks 0, 2 have False": ("reproducible", [False, True, False]),
    "setting 'uneven': rank 0 has raise; ranks 1-2 have warn": ("checks", [Checks(uneven="raise"), "info", "info"]),
    "setting 'nonfinite': rank 0 has warn or ignore; ranks 1-2 have raise": ("checks", ["info", _RAISE, _RAISE]),
    "setting 'nonfinite': rank 1 has warn or ignore; ranks 0, 2 have raise": ("checks", [_RAISE, "off", _RAISE]),
    "setting 'nonfinite': rank 2 has skip; ranks 0-1 have warn or ignore": ("checks", ["off", "info", _SKIP]),
}


def test_settings_that_ranks_must_share_are_compared() -> None:
    for words, results in run_cases(_settings_differ, 3, _SHARED).items():
        assert results[0] == results[1] == results[2]
        assert results[0][0] == "LayoutError"
        assert words in results[0][1]


def test_settings_that_concern_one_rank_may_differ() -> None:
    cases: list[tuple[str, list[Any]]] = [
        ("checks", ["off", "info"]),
        ("checks", [Checks(nonfinite="warn"), Checks(nonfinite="ignore")]),
        ("checks", [Checks(same_data="allow"), "info"]),
        ("timeout_seconds", [5, None]),
        ("gradient_as_bucket_view", [True, False]),
    ]
    found = run_cases(_settings_differ, 2, {str(case): case for case in cases})

    assert found == {str(case): [None, None] for case in cases}


def test_an_unusable_argument_on_one_rank_is_an_error_on_all_instead_of_a_hang() -> None:
    cases: dict[str, tuple[list[Any], str]] = {
        "buffer_size": ([1, 0], "rank 1: ValueError: buffer_size is not usable"),
        "checks": (["info", "on"], "rank 1: ValueError: checks: level is unknown"),
        "ignore": ([[], ["no.such.name"]], "rank 1: ValueError: ignore names what the module does not have"),
        "device_ids": ([[0]], "rank 0: TypeError: LegacyDistributedDataParallel takes no device_ids; leave it out"),
    }
    found = run_cases(_settings_differ, 2, {name: (name, values) for name, (values, _) in cases.items()})

    for name, (_, words) in cases.items():
        assert [(kind, words in " ".join(text.split())) for kind, text in found[name]] == [("PeerError", True)] * 2


# Types


_VALUES = {
    "level": ("off", "info", "detail"),
    "uneven": ("warn", "raise", "allow"),
    "unsynchronized_step": ("raise", "allow"),
    "nonfinite": ("ignore", "warn", "raise", "skip"),
    "same_data": ("warn", "allow"),
    "divergence": ("warn", "raise", "ignore"),
}


def test_the_types_of_checks_are_the_values_that_checks_takes() -> None:
    hints = get_type_hints(Checks)

    for name, values in _VALUES.items():
        assert hints[name] == Literal[values]
        assert [getattr(Checks(**{name: value}), name) for value in values] == list(values)
    assert [name for name, hint in hints.items() if hint is str] == []


def test_the_types_of_arguments_are_the_values_that_they_take() -> None:
    wrapper = get_type_hints(LegacyDistributedDataParallel.__init__)
    assert wrapper["checks"] == Literal[_VALUES["level"]] | Checks
    assert wrapper["transport"] == Literal["auto", "gloo", "host"]
    assert get_type_hints(SyncRecord)["transport"] is str  # also empty
    parts = ("parameters", "buffers", "gradients", "optimizer", "rng")
    assert get_type_hints(check_replicas)["what"] == Iterable[Literal[parts]]
    assert check_replicas(nn.Linear(2, 1), what=parts).identical
