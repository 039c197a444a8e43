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

Model = LegacyDistributedDataParallel
INPUTS = torch.arange(24.0).reshape(4, 3, 2)


def _model(layer: Callable[..., nn.Module] = nn.BatchNorm1d, **arguments: Any) -> Model:
    return Model(nn.Sequential(layer(3), nn.Flatten(), nn.Linear(6, 1)), **arguments)


def _train(model: nn.Module, steps: int = 2) -> None:
    model.train()
    _step(model, steps)


def _step(model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(INPUTS + torch.distributed.get_rank()).sum().backward()
        model.all_reduce()


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(INPUTS)


def _trained_and_evaluated(model: Model) -> None:
    _train(model)
    _evaluate(model)


def _twice(model: Model) -> None:
    _trained_and_evaluated(model)
    _trained_and_evaluated(model)


def _inference_mode(model: Model) -> None:
    _train(model)
    with torch.inference_mode():
        model.eval()(INPUTS)


def _compiled_inside(model: Model) -> None:
    model.module.compile(backend="aot_eager")
    _trained_and_evaluated(model)


def _broadcast_too_early(model: Model) -> None:
    _train(model)
    model.broadcast_buffers()
    _evaluate(model)
    _train(model)
    _evaluate(model)


def _copied(model: Model) -> None:
    _trained_and_evaluated(copy.deepcopy(model))


def _loaded_before(model: Model) -> None:
    model.load_state_dict(model.state_dict())
    _train(model)
    _evaluate(model)


TOLD: dict[str, tuple[Callable[[Model], None], Callable[[], Model]]] = {
    "trained": (_trained_and_evaluated, _model),
    "once": (_twice, _model),
    "inference mode": (_inference_mode, _model),
    "instance norm": (_trained_and_evaluated, partial(_model, partial(nn.InstanceNorm1d, track_running_stats=True))),
    "compiled inside": (_compiled_inside, _model),
    "broadcast too early": (_broadcast_too_early, _model),
    "copy": (_copied, _model),
    "loaded before": (_loaded_before, _model),
    "detail": (_trained_and_evaluated, partial(_model, checks="detail")),
}


def _broadcast(model: Model) -> None:
    for _ in range(2):
        _train(model)
        model.broadcast_buffers()
        _evaluate(model)
        _evaluate(model)


def _frozen(model: Model) -> None:
    model.load_state_dict(model.state_dict())
    for _ in range(2):
        model.train()
        model.module[0].eval()
        _step(model)
        _evaluate(model)


def _frozen_after_a_broadcast(model: Model) -> None:
    _train(model)
    model.broadcast_buffers()
    model.module[0].eval()
    _step(model)
    _evaluate(model)


def _before_the_first_call(model: Model) -> None:
    model(INPUTS)
    _evaluate(model)


def _rank_0_alone(model: Model) -> None:
    _train(model)
    if torch.distributed.get_rank() == 0:
        _evaluate(model)


def _module_alone(model: Model) -> None:
    _train(model)
    model.eval()


def _compiled(model: Model) -> None:
    compiled = torch.compile(model, backend="eager")
    _train(model, 1)
    for _ in range(2):
        model.train()
        compiled(INPUTS).sum().backward()
        model.all_reduce()
        model.eval()
        compiled(INPUTS)


class _Synchronized(nn.SyncBatchNorm):
    """Its own forward needs a GPU."""

    forward = nn.BatchNorm1d.forward


SILENT: dict[str, tuple[Callable[[Model], None], Callable[[], Model]]] = {
    "broadcast": (_broadcast, _model),
    "frozen": (_frozen, _model),
    "no momentum": (_trained_and_evaluated, partial(_model, partial(nn.BatchNorm1d, momentum=0.0))),
    "no statistics": (_trained_and_evaluated, partial(_model, partial(nn.BatchNorm1d, track_running_stats=False))),
    "statistics of all ranks": (_trained_and_evaluated, partial(_model, _Synchronized)),
    "no layer": (_trained_and_evaluated, partial(_model, lambda _: nn.Dropout())),
    "frozen after a broadcast": (_frozen_after_a_broadcast, _model),
    "before the first call": (_before_the_first_call, _model),
    "rank 0 alone": (_rank_0_alone, _model),
    "module alone": (_module_alone, _model),
    "compiled": (_compiled, _model),
    "off": (_trained_and_evaluated, partial(_model, checks="off")),
    "local": (_trained_and_evaluated, partial(_model, checks=Checks(local_buffers=("*.running_*",)))),
    "ignored": (
        _trained_and_evaluated,
        partial(_model, ignore=["0.running_mean", "0.running_var", "0.num_batches_tracked"]),
    ),
}
CASES = {**TOLD, **SILENT}


def _all_cases(rank: int) -> dict[str, list[tuple[str, str]]]:
    said = {}
    for name, (case, build) in CASES.items():
        case(build())
        caught = logged_warnings.take_all()
        said[name] = [(warning.filename, warning.text) for warning in caught]
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


def _alone(_: int) -> None:
    _trained_and_evaluated(_model())


def test_a_single_rank_has_no_other_statistics() -> None:
    run_ranks(_alone, 1)  # a warning would be an error
