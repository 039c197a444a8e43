"""Every use of torch beyond its public interface: to be reviewed when torch changes."""

# First, because an ImportError of the other modules does not name the version of torch that is needed.
from legacy_ddp._torch import private as private

# isort: split
from torch._C import Future as Future  # then() returns this type, not torch.futures.Future
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch.distributed.algorithms.join import _JoinConfig
from torch.utils.weak import WeakIdKeyDictionary as WeakIdKeyDictionary

from legacy_ddp._torch.dispatch import *
from legacy_ddp._torch.process_groups import *
from legacy_ddp._torch.tensors import *

JoinConfig = _JoinConfig
