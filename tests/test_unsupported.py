"""Errors for unsupported arguments of torch DDP."""

import inspect
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import Checks, LegacyDistributedDataParallel, UnsynchronizedStepError
from tests.helpers.besides_ddp import distributed_optimizers
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import Said, error_of

pytestmark = pytest.mark.usefixtures("alone")

SHARED = {"self", "module", "process_group", "init_sync", "gradient_as_bucket_view"}
OF_TORCH_DDP = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in SHARED]


@pytest.mark.parametrize("name", OF_TORCH_DDP)
def test_an_argument_of_torch_ddp_that_is_not_here_is_a_type_error_that_names_it(name: str) -> None:
    arguments: Any = {name: None}

    with pytest.raises(TypeError, match=rf"^LegacyDistributedDataParallel takes no {name}; \w+"):
        LegacyDistributedDataParallel(nn.Linear(1, 1), **arguments)


@pytest.mark.parametrize(
    "positional, named, said",
    [
        (
            (),
            {"bufer_size": 1},
            "has no argument 'bufer_size'; expected one of: absent_gradients, buffer_size, checks, "
            "gradient_as_bucket_view, ignore, "
            "init_sync, module, process_group, reduce_dtype, reproducible, timeout_seconds, transport, world_size\n",
        ),
        (([0],), {}, "world_size is of the wrong type: got list, .* device_ids are left out"),
        (
            (),
            {"device_ids": None, "find_unused_parameters": True, "chekcs": "off"},
            r"no device_ids; .* no find_unused_parameters; .* no argument 'chekcs'; ",
        ),
    ],
)
def test_an_argument_that_nobody_has_or_in_a_wrong_place_says_what_is_expected(
    positional: Any, named: Any, said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        LegacyDistributedDataParallel(nn.Linear(1, 1), *positional, **named)


@pytest.mark.parametrize(
    "name",
    [
        "_register_builtin_comm_hook",
        "_set_static_graph",
        "_register_fused_optim",
        "_register_buffer_comm_hook",
        "_get_ddp_logging_data",
        "_update_process_group",
        "scatter",
        "gather",
        "require_backward_grad_sync",
    ],
)
def test_a_member_of_torch_ddp_that_is_not_here_is_missing_and_does_not_do_nothing(name: str) -> None:
    module = nn.Linear(1, 1)
    assert hasattr(DistributedDataParallel(module), name)

    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(LegacyDistributedDataParallel(module), name)


def test_a_setting_of_torch_ddp_cannot_be_assigned_without_effect() -> None:
    module = nn.Linear(1, 1)
    ddp, model = DistributedDataParallel(module), LegacyDistributedDataParallel(module)
    of_torch = {name for name in vars(ddp) if not name.startswith("_")} - set(vars(nn.Module())) - set(vars(model))
    # The last two are names that scripts give to attributes of their own.
    public = of_torch - {"module", "process_group", "device", "logger"}

    assert "require_backward_grad_sync" in public
    for name in sorted(public | {"static_graph", "_use_python_reducer"}):
        for said in (error_of(setattr, model, name, False), error_of(getattr, model, name)):
            assert said[0] == "AttributeError"
            assert said[1].startswith(f"'LegacyDistributedDataParallel' object has no attribute '{name}'")
        assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=r"delete this line, and call all_reduce\(\) once"):
        model.require_backward_grad_sync = False


_ARGUMENTS = inspect.signature(LegacyDistributedDataParallel).parameters.values()
SETTINGS = {argument.name: argument.default for argument in _ARGUMENTS if argument.default is not argument.empty}


def test_a_setting_of_the_constructor_cannot_be_assigned_without_effect() -> None:
    model = LegacyDistributedDataParallel(nn.Linear(1, 1))
    compiled = torch.compile(model, backend="eager")
    before = repr(model)

    assert SETTINGS.keys() >= {"transport", "checks", "reduce_dtype", "buffer_size", "timeout_seconds", "reproducible"}
    for name in SETTINGS.keys() - {"process_group"}:
        for target in (model, compiled):
            said = error_of(setattr, target, name, SETTINGS[name])
            assert said[0] == "AttributeError"
            missing = "has no setter for" if name in ("buffer_size", "world_size") else "has no attribute"
            assert said[1] == (
                f"'LegacyDistributedDataParallel' object {missing} '{name}', and an assignment would do "
                f"nothing; pass {name}= to the constructor of a new wrapper"
            )
        assert name not in vars(model)
    assert repr(model) == before


class _WithItsOwn(LegacyDistributedDataParallel):
    reducer = "of the subclass"
    checks = "of the subclass"


def test_attributes_of_scripts_and_of_subclasses_may_be_assigned_and_so_may_module_and_group() -> None:
    model, other = _WithItsOwn(nn.Linear(1, 1)), nn.Linear(1, 1)
    group = model.process_group
    model.module, model.process_group = other, group
    assert (model.module, model.process_group) == (other, group)
    model.reducer = model.checks = "assigned"
    model.device = "cpu"  # type: ignore[assignment]
    model.epoch = 3  # type: ignore[assignment]

    assert (model.reducer, model.checks, model.device, model.epoch) == ("assigned", "assigned", "cpu", 3)


@pytest.mark.parametrize("is_before_wrapping", [True, False])
def test_an_optimizer_inside_backward_is_refused_before_it_steps(is_before_wrapping: bool) -> None:
    module = nn.Linear(2, 1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    model = None if is_before_wrapping else LegacyDistributedDataParallel(module)
    distributed_optimizers()._apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = model or LegacyDistributedDataParallel(module)

    with pytest.raises(UnsynchronizedStepError, match=r"call model\.all_reduce\(\) between backward\(\) and step\(\)"):
        model(torch.ones(1, 2)).sum().backward()

    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))


def _shard(rank: int) -> tuple[Said, float, list[float]]:
    """Two ranks that share a layer's weight, and train another layer with all_reduce()."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    sharded = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    module[0].weight = sharded
    said = error_of(LegacyDistributedDataParallel, module)
    model = LegacyDistributedDataParallel(module, ignore=["0.weight"], checks=Checks(same_data="allow"))
    module[1].weight.grad = torch.full((1, 2), float(rank))
    local = torch.full((1, 2), 3.0 + rank)
    sharded.grad = DTensor.from_local(local, mesh, [Shard(0)])
    model.all_reduce()
    return said, float(module[1].weight.grad[0, 0]), sharded.grad.to_local().flatten().tolist()


def test_a_sharded_parameter_is_refused_by_name_and_left_alone_if_it_is_ignored() -> None:
    for rank, (said, mean, shard) in enumerate(run_ranks(_shard, 2)):
        assert said[0] == "ValueError"
        assert said[1].startswith("parameter '0.weight' is a DTensor, expected a dense tensor; list it in ignore=")
        assert mean == 0.5
        assert shard == [3.0 + rank] * 2


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, LegacyDistributedDataParallel])
def test_a_wrapper_inside_the_module_is_refused(wrapper: type[nn.Module]) -> None:
    with pytest.raises(
        ValueError, match=f"^module contains a {wrapper.__name__}, expected no wrapper; wrap the plain "
    ):
        LegacyDistributedDataParallel(nn.Sequential(nn.Linear(1, 1), wrapper(nn.Linear(1, 1))))


def test_syncbatchnorm_on_cpu_is_torch_s_own_error_and_not_before_forward() -> None:
    model = LegacyDistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)))

    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        model(torch.ones(3, 2))


def _in_an_rpc_context(rank: int) -> tuple[int, list[float]]:
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's RPC does, inside torch
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc

    where = rpc.TensorPipeRpcBackendOptions(init_method=Path(tempfile.mkdtemp(), "store").as_uri())
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=where)
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [model(torch.ones(1, 2)).sum()])
        unseen = model.all_reduce().payload_bytes
        for parameter, grad in dist_autograd.get_gradients(context).items():
            parameter.grad = grad
    model.all_reduce(sample_size=4)
    rpc.shutdown()
    return unseen, model.module.weight.grad.flatten().tolist()


def test_gradients_in_an_rpc_context_are_not_seen_until_they_are_written_to_grad() -> None:
    assert run_ranks(_in_an_rpc_context, 1) == [(0, [0.25, 0.25])]
