"""The import of the package: names that are imported at their first use, and the systems that it runs on."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from legacy_ddp._errors import import_error


def lazy_names(package: str, modules: Mapping[str, str], submodules: Collection[str] = ()) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package`` (PEP 562): imports a name at its first use.

    ``modules``: the module of each name. ``submodules``: modules of the package that are names themselves.
    """

    def find(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")  # the import makes it an attribute of the package
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next use costs no call
        return value

    return find


def check_system() -> None:
    """Refuse a system that is neither Linux nor like it, such as Windows.

    Raises:
        ImportError: Python has no fcntl here.
    """
    try:
        import_module("fcntl")
    except ModuleNotFoundError:
        raise import_error(
            "legacy_ddp does not run on this system: got a Python without fcntl "
            f"(sys.platform {sys.platform!r}), expected Linux, or macOS without shared memory; "
            "on Windows use the Windows Subsystem for Linux"
        ) from None
