"""Settings from environment variables: they override the arguments of the script, and are refused if unusable."""

import os
import re
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, SyncTimeoutError, all_reduce_gradients
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("alone")

_PLACE = "environment variable LEGACY_DDP_CHECKS: "
_NAMES = re.escape("expected a level, or name=value with a name of ('level', 'uneven', ")


def _settings(checks: Any = "info") -> str:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1), checks=checks)
    return model.extra_repr().splitlines()[-1]


# The value of the variable, and the settings of a wrapper with Checks(uneven="raise") in the script.
_OVERRIDES = [
    ("", "checks=Checks(uneven='raise')"),
    ("level=detail", "checks=Checks(level='detail', uneven='raise')"),
    ("detail,every=100", "checks=Checks(level='detail', uneven='raise', every=100)"),
    ("uneven=allow", "checks=Checks(uneven='allow')"),
    (
        "detail, warn_after_seconds=1.5, report_dir=/var/tmp",
        "checks=Checks(level='detail', uneven='raise', warn_after_seconds=1.5, report_dir='/var/tmp')",
    ),
    ("timeout_seconds=30", "timeout_seconds=30.0, checks=Checks(uneven='raise')"),
    ("local_buffers=*.mean:*.seen", "checks=Checks(uneven='raise', local_buffers=('*.mean', '*.seen'))"),
    (
        "unsynchronized_step=allow,nonfinite=raise,same_data=allow,divergence=raise,edited=allow",
        "checks=Checks(uneven='raise', unsynchronized_step='allow', nonfinite='raise', same_data='allow', "
        "divergence='raise', edited='allow')",
    ),
]


@pytest.mark.parametrize("value, shown", _OVERRIDES, ids=str)
def test_the_environment_overrides_what_it_names_and_keeps_the_rest(
    value: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGACY_DDP_CHECKS", value)

    assert _settings(Checks(uneven="raise")) == shown


_REFUSED = [
    ("verbose", "checks: level is unknown: got 'verbose', expected one of ('off', 'info', 'detail')"),
    ("every=often,detail", "checks: every is not usable: got 'often', expected a number of calls"),
    ("warn_after_seconds=soon", "checks: warn_after_seconds is not usable: got 'soon', expected a positive number"),
    ("warn_after_seconds=nan", "checks: warn_after_seconds is not usable: got nan"),
    ("report_dir=", "checks: report_dir is not usable: got '', expected a path or None"),
    ("timeout_seconds=1h", "timeout_seconds is not usable: got '1h'"),
    ("info,detail", "level is set twice; leave one out"),
    # Settings of the environment that the resulting level leaves without effect.
    ("off,nonfinite=raise", "checks: nonfinite='raise' has no effect at level 'off'"),
    ("every=5", "checks: every=5 has no effect at level 'info', expected level 'detail'"),
]


@pytest.mark.parametrize("value, text", _REFUSED, ids=str)
def test_an_unusable_setting_is_blamed_on_the_environment(
    value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGACY_DDP_CHECKS", value)

    with pytest.raises(ValueError, match=f"^{re.escape(_PLACE + text)}"):
        _settings()


@pytest.mark.parametrize("item", ["warn_after=10", "grad_scaler=x", "UNEVEN=warn", "=off"])
def test_an_unknown_name_is_an_error_that_lists_the_names(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGACY_DDP_CHECKS", f"detail,{item}")

    with pytest.raises(ValueError, match=f"^{_PLACE}got '{item}', {_NAMES}.*'timeout_seconds'") as caught:
        _settings()
    assert "grad_scaler" not in str(caught.value).replace(item, "")


@pytest.mark.parametrize("level", ["off", "info", "detail"])
def test_the_level_of_the_environment_may_leave_any_setting_of_the_script_without_effect(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGACY_DDP_CHECKS", level)

    for checks in (Checks("detail", every=5), Checks(nonfinite="raise"), Checks(divergence="ignore")):
        _settings(checks)


def _call_without_rank_1(rank: int) -> None:
    os.environ["LEGACY_DDP_CHECKS"] = "timeout_seconds=0.5"
    if rank == 0:
        with pytest.raises(SyncTimeoutError, match=r"rank 1 did not arrive within 0\.5 s") as caught:
            all_reduce_gradients(nn.Linear(2, 1))
        assert "a call under a condition such as if rank == 0 (make it" in str(caught.value)
        assert "LEGACY_DDP_CHECKS=timeout_seconds=..." in str(caught.value)
        assert "wrapper" not in str(caught.value)
    dist.barrier()


def test_the_timeout_of_the_environment_ends_the_wait_of_a_function() -> None:
    run_ranks(_call_without_rank_1, 2, fresh=True)
