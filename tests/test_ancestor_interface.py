"""Names, places of arguments and marks of the ancestor's class (fairseq's legacy_ddp)."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, gradient_values, wrap

Model = LegacyDistributedDataParallel

# Arguments in their places


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:world_size is deprecated:DeprecationWarning")
def test_arguments_are_taken_in_the_places_of_the_older_and_of_the_newer_class() -> None:
    group, other = dist.group.WORLD, dist.new_group([0])

    def made(*arguments: Any, **by_name: Any) -> tuple[bool, int]:
        model = Model(nn.Linear(1, 1), *arguments, **by_name)
        return model.process_group is other, model.buffer_size

    default = 2**28
    assert made(1, other, 7) == made(1, other, buffer_size=7) == (True, 7)  # the older class has world_size
    assert made(other, 7) == made(other, buffer_size=7) == (True, 7)  # and the newer has not
    assert made(1) == made(None, None) == made(group) == (False, default)
    assert made(1, None, 7) == (False, 7)
    for arguments in ((group, other), (group, 7, 8)):
        said = error_of(made, *arguments)
        assert said[0] == "TypeError"
        assert said[1].startswith("arguments are given twice: got <torch")
        assert said[1].endswith("pass both by keyword")
    assert error_of(made, 1, 7)[1].startswith("process_group is of the wrong type: got 7")  # type: ignore[index]


# Attributes


@pytest.mark.usefixtures("alone")
def test_attributes_of_the_ancestor_can_be_read_and_those_without_a_meaning_not_be_written() -> None:
    model = wrap(buffer_size=5)
    assert (model.world_size, model.buffer_size, model.accumulate_grads) == (1, 5, False)
    for name in ("world_size", "buffer_size", "buffer", "need_reduction", "per_device_params"):
        said = error_of(setattr, model, name, 1)
        assert said[0] == "AttributeError"
        assert re.match(f"'LegacyDistributedDataParallel' object has no (setter for|attribute) '{name}', and", said[1])
    assert model.accumulate_grads is False
    assert error_of(setattr, model, "accumulate_grads", 1) == (
        "TypeError",
        "accumulate_grads is not usable: got 1, expected True or False",
    )


def _accumulates(rank: int) -> list[Any]:
    model = wrap(checks=Checks(uneven="raise"))
    model.accumulate_grads = True
    model.accumulate_grads = True  # once more, as before each micro-batch
    add_gradients(model, 1.0 + rank)
    seen: list[Any] = [model.accumulate_grads, model.all_reduce_grads().synchronized, gradient_values(model)["weight"]]
    copies = [copy.deepcopy(model).accumulate_grads, pickle.loads(pickle.dumps(model)).accumulate_grads]
    with model.no_sync():
        refused = error_of(setattr, model, "accumulate_grads", False)
        seen += [model.accumulate_grads]
    seen += [model.accumulate_grads]
    model.accumulate_grads = False
    add_gradients(model, 10.0)
    record = model.all_reduce_grads()
    return [*seen, copies, refused, gradient_values(model)["weight"], record.rows[rank].micro_batches]


def test_accumulate_grads_is_an_open_no_sync_block_until_it_is_false() -> None:
    for rank, seen in enumerate(run_ranks(_accumulates, 2)):
        *before, copies, refused, reduced, micro_batches = seen
        # The assignment inside of the block closes its own block alone.
        assert before == [True, False, 1.0 + rank, True, False]
        assert copies == [False, False]
        assert refused[0] == "LegacyDDPError"
        assert refused[1].startswith("accumulate_grads=False has no effect inside of a no_sync() block")
        assert (reduced, micro_batches) == (11.5, 2)  # the mean of 1 + 10 and 2 + 10


def _in_micro_batches(rank: int, how: str) -> list[float]:
    model = wrap(reproducible=True)
    for value in (0.1 + rank, 0.2, 0.3):
        if how == "attribute":
            model.accumulate_grads = True
            add_gradients(model, value)
            model.accumulate_grads = False
        else:
            with model.no_sync():
                add_gradients(model, value)
    add_gradients(model, 0.4)
    record = model.all_reduce(sample_size=3)
    weight: list[float] = model.module.weight.grad.flatten().tolist()
    return [*weight, record.rows[rank].micro_batches]


def test_accumulate_grads_divides_reproducible_micro_batches_as_blocks_do() -> None:
    found = run_cases(_in_micro_batches, 2, {how: (how,) for how in ("attribute", "block")})
    assert found["attribute"] == found["block"]


# Parameters of one rank


def _net(rank: int) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    for parameter in net[1].parameters():
        parameter.data.add_(rank)
    return net


def _mark(net: nn.Sequential, name: str, value: object = True) -> nn.Sequential:
    for parameter in net[1].parameters():
        setattr(parameter, name, value)
    return net


MARKS: dict[str, tuple[str, object, bool]] = {  # name, value, whether it is the mark of one rank
    "fairseq": ("expert", True, True),
    "fairseq, a number": ("expert", 0, True),
    "fairseq, base": ("base_expert", True, True),
    "Megatron": ("allreduce", False, True),
    "Megatron, shared": ("allreduce", True, False),
    "Tutel": ("skip_allreduce", True, True),
    "Tutel, shared": ("skip_allreduce", False, False),
}
ON_ONE_RANK = "rank 1"


def _refusals(rank: int) -> dict[str, tuple[Said, list[float]]]:
    """What the constructor says, and the weights of this rank behind it."""
    makers: dict[str, Callable[[], nn.Sequential]] = {
        case: lambda name=name, value=value: _mark(_net(rank), name, value)  # type: ignore[misc]
        for case, (name, value, _) in MARKS.items()
    }
    makers["frozen"] = lambda: _mark(_mark(_net(rank), "expert"), "requires_grad", value=False)
    makers[ON_ONE_RANK] = lambda: _mark(_net(rank), "expert") if rank else _net(rank)
    found = {}
    for case, make in makers.items():
        net = make()
        said = error_of(Model, net)
        found[case] = said, net[1].bias.tolist()
    return found


def test_a_parameter_with_a_mark_of_one_rank_is_an_error_of_all_ranks_and_is_not_overwritten() -> None:
    start = _net(0)[1].bias.tolist()
    of_ranks = run_ranks(_refusals, 2)
    for case, (said, _) in of_ranks[0].items():
        if not MARKS.get(case, ("", 0, True))[2]:
            assert said is None
            assert of_ranks[1][case] == (None, start)  # of rank 0
            continue
        assert [found[case][0] for found in of_ranks] == [said] * 2
        assert [found[case][1] for found in of_ranks] == [start, [value + 1 for value in start]]
        assert said[0] == ("PeerError" if case == ON_ONE_RANK else "ValueError")
        assert "parameters are marked as those of one rank: got" in said[1]
        assert re.search(r"for 2 of 4 parameters, first '1.bias', expected parameters that all ranks share", said[1])
        (expression,) = re.findall(r"leave them out with ignore=(\[.*?\]);", said[1])
        if case in MARKS:
            net = _mark(_net(0), *MARKS[case][:2])
            assert eval(expression, {"module": net}) == ["1.weight", "1.bias"]


def _in_calls(rank: int) -> list[Said]:
    """Of the function, and of a wrapper whose module gets an expert later."""
    net, wrapped = _mark(_net(rank), "expert"), Model(_net(0))
    add_gradients(net, 1.0)
    said = [error_of(all_reduce_gradients, net), error_of(all_reduce_gradients, list(net.parameters()))]
    all_reduce_gradients([parameter for parameter in net.parameters() if not hasattr(parameter, "expert")])
    wrapped.module.append(nn.Linear(2, 2))
    wrapped.module[2].weight.base_expert = True
    add_gradients(wrapped, 1.0)
    return [*said, error_of(wrapped.all_reduce)]


def test_a_call_refuses_parameters_of_one_rank() -> None:
    for of_module, of_list, later in run_ranks(_in_calls, 2):
        for said in (of_module, of_list):
            assert "give the other parameters to the call: [parameter for parameter in module.parameters()" in said[1]
        assert "got hasattr(parameter, \"base_expert\") for 1 of 6 parameters, first '2.weight'" in later[1]


# Training with experts, as docs/migration.md shows it

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
STEPS, RANKS = 5, 2
Step = list[tuple[torch.Tensor, torch.Tensor]]


def _data(rank: int) -> Step:
    draw = torch.Generator().manual_seed(rank)
    sizes = [3 + rank * (step % 2) for step in range(STEPS)]
    return [(torch.randn(n, 2, generator=draw).double(), torch.randn(n, 2, generator=draw).double()) for n in sizes]


def _train_experts(rank: int) -> dict[str, torch.Tensor]:
    (program,) = re.findall(r"^<!-- experts -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    module = _mark(_net(rank), "expert")
    names = {"module": module, "batches": _data(rank), "torch": torch, "LegacyDistributedDataParallel": Model}
    exec(program, names)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_training_with_experts_equals_one_process_that_holds_all_of_them() -> None:
    shared, experts = _net(0)[0], [_net(rank)[1] for rank in range(RANKS)]
    everything = nn.ModuleList([shared, *experts])
    optimizer = torch.optim.SGD(everything.parameters(), lr=0.1, momentum=0.9)
    for batches in zip(*map(_data, range(RANKS)), strict=True):
        optimizer.zero_grad()
        total = sum(len(inputs) for inputs, _ in batches)
        for expert, (inputs, targets) in zip(experts, batches, strict=True):
            ((expert(torch.tanh(shared(inputs))) - targets).square().sum() / total).backward()
        optimizer.step()

    for rank, weights in enumerate(run_ranks(_train_experts, RANKS)):
        for name, layer in (("0", shared), ("1", experts[rank])):
            for part, value in layer.state_dict().items():
                torch.testing.assert_close(weights[f"{name}.{part}"], value, rtol=1e-12, atol=1e-12)
