"""A hint at the first evaluation with running statistics that every rank has updated on its own data."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks

Model = LegacyDistributedDataParallel
INPUTS = torch.arange(24.0).reshape(4, 3, 2)


def _model(layer: Callable[..., nn.Module] = nn.BatchNorm1d, **arguments: Any) -> Model:
    return Model(nn.Sequential(layer(3), nn.Flatten(), nn.Linear(6, 1)), **arguments)


def _step(model: nn.Module) -> None:
    for _ in range(2):
        model.zero_grad()
        model(INPUTS + torch.distributed.get_rank()).sum().backward()
        model.all_reduce()


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model.eval()(INPUTS)


def _compiled(model: Model) -> None:
    compiled = torch.compile(model, backend="eager")
    _step(model)
    for _ in range(2):
        model.train()
        compiled(INPUTS).sum().backward()
        model.all_reduce()
        model.eval()
        compiled(INPUTS)


# What a script does, by the words of the cases below.
OPERATIONS: dict[str, Callable[[Model], object]] = {
    "train": lambda model: _step(model.train()),
    "step": _step,
    "forward": lambda model: model(INPUTS),
    "evaluate": _evaluate,
    "rank-0-evaluates": lambda model: torch.distributed.get_rank() or _evaluate(model),
    "evaluate-in-inference-mode": torch.inference_mode()(_evaluate),
    "eval": Model.eval,
    "freeze": lambda model: model.train().module[0].eval(),
    "broadcast": Model.broadcast_buffers,
    "load": lambda model: model.load_state_dict(model.state_dict()),
    "compiled": _compiled,
    "compile-inside": lambda model: model.module.compile(backend="aot_eager"),
}
Case = tuple[str, Callable[[], Model]]
TOLD: dict[str, Case] = {
    "trained": ("train evaluate", _model),
    "once": ("train evaluate train evaluate", _model),
    "inference mode": ("train evaluate-in-inference-mode", _model),
    "instance norm": ("train evaluate", partial(_model, partial(nn.InstanceNorm1d, track_running_stats=True))),
    "compiled inside": ("compile-inside train evaluate", _model),
    "broadcast too early": ("train broadcast evaluate train evaluate", _model),
    "copy": ("train evaluate", lambda: copy.deepcopy(_model())),
    "loaded before": ("load train evaluate", _model),
    "detail": ("train evaluate", partial(_model, checks="detail")),
}


class _Synchronized(nn.SyncBatchNorm):
    """Its own forward needs a GPU."""

    forward = nn.BatchNorm1d.forward


SILENT: dict[str, Case] = {
    "broadcast": ("train broadcast evaluate evaluate train broadcast evaluate evaluate", _model),
    "frozen": ("load freeze step evaluate freeze step evaluate", _model),
    "no momentum": ("train evaluate", partial(_model, partial(nn.BatchNorm1d, momentum=0.0))),
    "no statistics": ("train evaluate", partial(_model, partial(nn.BatchNorm1d, track_running_stats=False))),
    "statistics of all ranks": ("train evaluate", partial(_model, _Synchronized)),
    "no layer": ("train evaluate", partial(_model, lambda _: nn.Dropout())),
    "frozen after a broadcast": ("train broadcast freeze step evaluate", _model),
    "before the first call": ("forward evaluate", _model),
    "rank 0 alone": ("train rank-0-evaluates", _model),
    "module alone": ("train eval", _model),
    "compiled": ("compiled", _model),
    "off": ("train evaluate", partial(_model, checks="off")),
    "local": ("train evaluate", partial(_model, checks=Checks(local_buffers=("*.running_*",)))),
    "ignored": ("train evaluate", partial(_model, ignore=["0.running_mean", "0.running_var", "0.num_batches_tracked"])),
}
CASES = {**TOLD, **SILENT}


def _all_cases(rank: int) -> dict[str, list[tuple[str, str]]]:
    said = {}
    for name, (operations, build) in CASES.items():
        model = build()
        for operation in operations.split():
            OPERATIONS[operation](model)
        said[name] = [(told.filename, told.text) for told in logged_warnings.take_all()]
    return said


def _text(kind: str) -> str:
    return (
        f"evaluation after training: the running statistics of 1 layer, first '0' ({kind}), are of each rank's own "
        "data;\n"
        "in eval mode ranks give different results, and so does a checkpoint of each rank (told once);\n"
        "call broadcast_buffers() on every rank before an evaluation and before a checkpoint"
    )


def test_an_evaluation_with_statistics_of_each_rank_is_told_once_and_by_rank_1() -> None:
    other, told = run_ranks(_all_cases, 2, timeout_seconds=120)

    expected = {name: [(__file__, _text("BatchNorm1d"))] for name in TOLD} | {name: [] for name in SILENT}
    expected["instance norm"] = [(__file__, _text("InstanceNorm1d"))]
    assert told == expected
    assert other == {name: [] for name in CASES}


@on_ranks(1, [None])  # a warning would be an error
def test_a_single_rank_has_no_other_statistics(rank: int) -> None:
    model = _model()
    _step(model)
    _evaluate(model)
