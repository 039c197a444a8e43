"""Facts about the surroundings of the ranks, as text: possible causes of a difference between runs or ranks."""

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._memory.layout import distinct, fingerprint, plan_layout
from legacy_ddp._settings import Settings
from legacy_ddp._text import Difference, compare_rows, name_ranks, shorten
from legacy_ddp._torch.device import device_name, library_facts
from legacy_ddp.debug._trace.records import NO_OPTIMIZER, Environment

UNKNOWN = "not known"

_LIMIT_SECONDS = 3.0
# One process tells commit and changes. It runs no other program that the repository names, and does not look for
# untracked files, because git would walk through all folders.
_COMMAND = (
    *("git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--no-ahead-behind"),
    *("--untracked-files=no", "--ignore-submodules=all"),
)
_COMMIT = re.compile(r"# branch\.oid ([0-9a-f]{40,64})")


def environment_of(
    module: nn.Module,
    settings: Settings,
    group: dist.ProcessGroup,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    every: int,
    first_step: int,
    transport: str,
    argv: Sequence[str] | None,
) -> Environment:
    parameters = distinct(module.named_parameters(remove_duplicate=False), settings.ignore)
    return Environment(
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        every=every,
        first_step=first_step,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        job=_job(),
        layout=f"{plan_layout(parameters, settings).fingerprint % 2**64:016x}",
        facts=facts_of(group, settings, {item.tensor.device for item in parameters}, optimizers, transport, argv),
        parameters=tuple(item.name for item in parameters),
        local_buffers=_local_buffers(module, settings.checks.local_buffers),
    )


def facts_of(
    group: dist.ProcessGroup,
    settings: Settings,
    devices: Iterable[torch.device],
    optimizers: Sequence[torch.optim.Optimizer],
    transport: str,
    argv: Sequence[str] | None,
) -> dict[str, str]:
    """Versions, threads, flags and settings; docs/trace-format.md lists them. ``argv``: None to leave it out."""
    names = sorted({str(device) for device in devices})
    facts = {
        "torch": torch.__version__,
        "legacy_ddp": _package(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{_cpu_model()}, kernels for {torch.backends.cpu.get_cpu_capability()}",
        "devices": ", ".join(device_name(device) for device in names),
        "backend": ", ".join(_backend(group, device) for device in names),
        "transport": transport or UNKNOWN,
        "threads": str(torch.get_num_threads()),
        "interop threads": str(torch.get_num_interop_threads()),
        "default dtype": _short(torch.get_default_dtype()),
        "deterministic algorithms": _determinism(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "buffer_size": str(settings.buffer_size),
        "reduce_dtype": _short(settings.reduce_dtype),
        "reproducible": str(settings.reproducible),
        "absent_gradients": settings.absent_gradients,
        "gradient_as_bucket_view": str(settings.gradient_as_bucket_view),
        "ignore": ", ".join(sorted(settings.ignore)) or "nothing",
        "checks": settings.checks.level,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers) or NO_OPTIMIZER,
        "seed": str(torch.initial_seed()),
        "argv": "not recorded" if argv is None else shlex.join(argv),
        "commit": commit_of(Path()),
        "host": platform.node(),
        "pid": str(os.getpid()),
    }
    return {**facts, **library_facts({name.split(":")[0] for name in names})}


def _local_buffers(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns, and the first name of each shared buffer of which only another name matches a pattern."""
    buffers = distinct(module.named_buffers(remove_duplicate=False))

    def matches(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return (*patterns, *(item.name for item in buffers if not matches(item.name) and any(map(matches, item.names))))


def _job() -> str:
    """64 bits of the environment variables that a launcher such as torchrun sets to equal values on all ranks."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return f"{fingerprint(repr([os.environ.get(name) for name in names]).encode()) % 2**64:016x}"


def _backend(group: dist.ProcessGroup, device: str) -> str:
    try:
        return internals.backend_name(group, torch.device(device))
    except RuntimeError:
        return "none"


def _package() -> str:
    """The version of the library, and the commit of a checkout."""
    import legacy_ddp  # not at the top: this file is loaded while legacy_ddp is being imported

    version, checkout = legacy_ddp.__version__, Path(legacy_ddp.__file__).parent.parent
    # An installed package has no commit, even if its environment lies inside of the repository of a script.
    return f"{version}, commit {commit_of(checkout)}" if (checkout / ".git").exists() else version


def _determinism() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _cpu_model() -> str:
    """The model name of /proc/cpuinfo; without this file, the name that Python reports."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def commit_of(folder: Path) -> str:
    """Hash of the commit checked out in ``folder``, with ``, modified`` if a tracked file differs from the commit.

    ``not known`` outside of a repository, before the first commit, without git, or if git takes more than three
    seconds. Writes nothing, and raises nothing whatever the state of ``folder``.
    """
    try:
        status = subprocess.run(
            _COMMAND,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # git would write to the index otherwise
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    found = _COMMIT.match(status)
    if found is None:
        return UNKNOWN
    is_modified = any(not line.startswith("#") for line in status.splitlines())
    return f"{found[1]}, modified" if is_modified else found[1]


MODULE, RUN = "module ", "run "  # beginnings of names
_FEW = 3  # modules with a line of their own
_Holders = tuple[tuple[str, tuple[int, ...]], ...]
# Facts that should differ between ranks, or that have no influence on a result.
_OWN_FACTS = frozenset({"argv", "checks", "commit", "devices", "host", "pid", "seed", "transport"})
_VALUE_COLUMNS = 60


class RankSettings(NamedTuple):
    """The settings of a rank. ``values``: as text by name. ``numbers``: its rank, global rank and local rank."""

    values: Mapping[str, str]
    numbers: Mapping[str, int]


def settings_of(
    group: dist.ProcessGroup, settings: Settings, module: nn.Module, held: Mapping[str, Any]
) -> RankSettings:
    devices = {parameter.device for parameter in module.parameters()}
    facts = facts_of(group, settings, devices, (), "", None)
    numbers = {
        name: shorten(repr(value), _VALUE_COLUMNS)
        for name, value in held.items()
        if not isinstance(value, torch.Tensor)
    }
    values = {
        **{name: fact for name, fact in facts.items() if name not in _OWN_FACTS},
        **{f"autocast of {kind}": _autocast(kind) for kind in sorted({"cpu", *(device.type for device in devices)})},
        **{f"{MODULE}{name!r}": "training" if child.training else "eval" for name, child in module.named_modules()},
        **numbers,
    }
    return RankSettings(values, _numbers_of_rank(group))


def _numbers_of_rank(group: dist.ProcessGroup) -> dict[str, int]:
    """The number of this rank in the group and in the job, and on its host if the launcher tells it (torchrun does)."""
    numbers = {"rank": dist.get_rank(group), "global rank": dist.get_rank()}
    local = os.environ.get("LOCAL_RANK", "")
    return {**numbers, "local rank": int(local)} if local.isdecimal() else numbers


def _autocast(kind: str) -> str:
    if not torch.is_autocast_enabled(kind):
        return "off"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def differing_settings(rows: Sequence[RankSettings]) -> tuple[Difference, ...]:
    differences = compare_rows([row.values for row in rows]).differences
    # A value in the user's function may be the number of the rank: it should differ.
    return tuple(item for item in differences if not (item.name.startswith(RUN) and _is_own_number(item.name, rows)))


def _is_own_number(name: str, rows: Sequence[RankSettings]) -> bool:
    """Whether on all ranks the value is the same one of the rank's numbers, as an int or as text."""
    return any(
        all(row.values.get(name, "").strip("'") == str(row.numbers.get(way)) for row in rows) for way in rows[0].numbers
    )


def describe_settings(differences: Sequence[Difference]) -> Iterator[str]:
    """A line for each setting, but one line for many modules with equal values on the same ranks."""
    groups: dict[tuple[_Holders, str], list[str]] = {}
    for item in differences:
        kind = MODULE if item.name.startswith(MODULE) else item.name
        groups.setdefault((item.holders, kind), []).append(item.name)
    for (holders, _), names in groups.items():
        for name in names if len(names) <= _FEW else [_name_modules(names)]:
            yield f"{name_setting(name)}: {_values(holders)}"


def name_setting(name: str) -> str:
    return "the model" if name == f"{MODULE}{''!r}" else name


def _name_modules(names: Sequence[str]) -> str:
    paths = [name.removeprefix(MODULE).strip("'") for name in names]
    if "" in paths:
        return f"the model and {len(paths) - 1} modules inside"
    prefix = _common_prefix(paths)
    return f"{len(paths)} modules of {prefix!r}" if prefix else f"{len(paths)} modules, first {paths[0]!r}"


def _common_prefix(paths: Sequence[str]) -> str:
    """The path of the innermost module around all modules of ``paths``; empty for the model."""
    common = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _values(holders: _Holders) -> str:
    sides = sorted(holders, key=lambda side: min(side[1]))
    return "; ".join(f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in sides)
