"""Public names that are imported at their first use."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


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
