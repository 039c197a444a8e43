"""Arguments of a cross-check: the checks without communication."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from legacy_ddp._checks import as_names
from legacy_ddp._torch import inside_of_compiled
from legacy_ddp._wrapper import LegacyDistributedDataParallel
from legacy_ddp.debug._arguments import as_flag

MAX_BYTES = 2**30


@dataclass(frozen=True)
class CrossCheckOptions:
    """The options of :func:`cross_check`. ``local_buffers``: a tuple of names, or None.

    Raises:
        TypeError, ValueError: an option is not usable.
    """

    operations: bool = False
    local_buffers: Iterable[str] | None = None
    max_bytes: int = MAX_BYTES
    raises: bool = False

    def __post_init__(self) -> None:
        as_flag("operations", self.operations)
        as_flag("raises", self.raises)
        _check_bytes("max_bytes", self.max_bytes)
        if self.local_buffers is not None:
            object.__setattr__(self, "local_buffers", as_names(self.local_buffers, "local_buffers"))


def check_functions(module: object, run: object) -> None:
    """Raise a TypeError for a model that is no module, and for a ``run`` without a call."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"model is of the wrong type: got {type(module).__name__}, expected torch.nn.Module")
    if not callable(run):
        got = repr(run) if run is None or isinstance(run, int | float | str) else f"a {type(run).__name__}"
        raise TypeError(f"run is not callable: got {got}, expected run(model, batch)")


def check_group(model: nn.Module, process_group: object) -> None:
    """Raise a ValueError for a group beside the group of a wrapper."""
    if process_group is not None and isinstance(inside_of_compiled(model), LegacyDistributedDataParallel):
        raise ValueError(
            "process_group is the wrapper's own, expected None; leave it out, or pass the module inside of the wrapper"
        )


def check_initialised(module: nn.Module) -> None:
    """Raises a ValueError for a parameter or buffer of a lazy module before its first forward pass."""
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        if lazy := [name for name, tensor in named if is_lazy(tensor)]:
            raise ValueError(
                f"{kind} {lazy[0]!r} is not initialised yet (lazy module), expected a model with values; run one "
                "forward pass before cross_check()"
            )


def _check_bytes(argument: str, value: object) -> None:
    expected = "expected a whole number of bytes, 1 or more"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} is of the wrong type: got {value!r}, {expected}")
    if value < 1:
        raise ValueError(f"{argument} is not usable: got {value}, {expected}")
