"""A TypeError or ValueError about an argument ends with the anchor of its section, wherever a user passes arguments."""

import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import legacy_ddp.data
import legacy_ddp.debug
from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, wrap

PUBLIC = (legacy_ddp, legacy_ddp.data, legacy_ddp.debug)
NOTES = {kind: f"meaning and next step: legacy-ddp explain {kind.__name__}" for kind in (TypeError, ValueError)}


CALLS = (
    "LegacyDistributedDataParallel(nn.Linear(1, 1), buffer_size=0)",
    "LegacyDistributedDataParallel(1)",
    "LegacyDistributedDataParallel(nn.Linear(1, 1), static_graph=True)",
    "LegacyDistributedDataParallel(nn.Linear(1, 1), process_group=1)",
    "LegacyDistributedDataParallel(nn.Linear(1, 1), 7)",
    'LegacyDistributedDataParallel(nn.Linear(1, 1), checks="on")',
    'Checks("on")',
    "model.all_reduce(sample_size=-1)",
    "model.all_reduce(skip=1)",
    'model.all_reduce(metrics={"loss": "high"})',
    "all_reduce_gradients([1])",
    "all_reduce_gradients(model.module, sample_size=-1)",
    "model.broadcast_parameters(src=9)",
    "model.register_comm_hook(None, 1)",
    "model.on_sync(1)",
    'check_replicas(model, what=["weights"])',
    "check_replicas(1)",
    'Recorder(model, "folder", every=0)',
    'Recorder(1, "folder")',
    'Recorder(model, "folder").log(loss=1.0)',
    'digest(torch.empty(1, device="meta"))',
    "GlobalBatchSampler(0, 1, 1)",
    "GlobalBatchSampler(1, 1, 1).load_state_dict({})",
    "GlobalBatchSampler(1, 1, 1).set_epoch(-1)",
    "aligned_splits(0)",
    "micro_batch_rng(-1, 0).__enter__()",
    "micro_batch_rng(0, -1).__enter__()",
    "model.all_reduce().noise_scale(1.0)",
    "Join([wrap(), model]).__enter__()",
)


def _names() -> dict[str, Any]:
    names = {name: getattr(module, name) for module in PUBLIC for name in module.__all__}
    return {**names, "Join": Join, "nn": nn, "torch": torch, "wrap": wrap}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_an_error_that_ends_with_its_command(call: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        eval(call, {**_names(), "model": wrap()})

    note = NOTES[type(caught.value)]
    assert traceback.format_exception_only(caught.value)[-1] == f"{note}\n"
    assert caught.value.__notes__ == [note]


def test_without_a_group_too() -> None:
    with pytest.raises(ValueError, match="no default process group") as caught:
        LegacyDistributedDataParallel(nn.Linear(1, 1))

    assert caught.value.__notes__ == [NOTES[ValueError]]


class _Broken(nn.Linear):
    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        raise ValueError("of the module")


@pytest.mark.usefixtures("alone")
def test_an_error_of_the_user_s_code_has_no_anchor() -> None:
    with pytest.raises(ValueError, match="of the module") as caught:
        LegacyDistributedDataParallel(_Broken(1, 1))

    assert not hasattr(caught.value, "__notes__")


def _notes(rank: int, wrong: tuple[int, ...]) -> list[str]:
    model = wrap()
    add_gradients(model, 1.0)
    try:
        model.all_reduce(sample_size=-1 if rank in wrong else 1)
    except Exception as error:  # noqa: BLE001 - the test looks at its notes
        return [*error.__notes__, *getattr(error.__cause__, "__notes__", ())]
    return []


def test_the_error_of_a_rank_keeps_its_command_behind_that_of_all_ranks() -> None:
    own, peer = NOTES[ValueError], "meaning and next step: legacy-ddp explain PeerError"
    assert run_ranks(partial(_notes, wrong=(0, 1)), 2) == [[own]] * 2
    assert run_ranks(partial(_notes, wrong=(1,)), 2) == [[peer], [peer, own]]
