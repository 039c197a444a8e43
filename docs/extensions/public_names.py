"""Public names for signatures: the path that users import, public fields of records, and no refused arguments."""

import dataclasses
import importlib
import inspect
from typing import Any, Never

from sphinx.application import Sphinx

MODULES = ("legacy_ddp.debug", "legacy_ddp.lightning", "legacy_ddp.data", "legacy_ddp")


def public_signature(record: type) -> inspect.Signature:
    """The arguments of a dataclass without private fields, with the values that factories of fields return."""
    parameters = dict(inspect.signature(record).parameters)
    for field in dataclasses.fields(record):
        if field.name.startswith("_"):
            del parameters[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            parameters[field.name] = parameters[field.name].replace(default=field.default_factory())
    return inspect.Signature(list(parameters.values()))


def make_public(_: Sphinx) -> None:
    """Change the public classes and functions in this process, which builds the site and ends."""
    for name in MODULES:
        module = importlib.import_module(name)
        for public in (getattr(module, public) for public in module.__all__):
            public.__module__ = name
            if dataclasses.is_dataclass(public):
                public.__signature__ = public_signature(public)


def hide_refused(_: Sphinx, function: Any, __: bool) -> None:
    """Take ``**unknown: Never`` out of the signature: it is there to refuse arguments with a text of its own."""
    signature = inspect.signature(function)
    taken = [parameter for parameter in signature.parameters.values() if parameter.annotation is not Never]
    if len(taken) < len(signature.parameters):
        function.__signature__ = signature.replace(parameters=taken)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the change for the beginning of a build."""
    app.connect("builder-inited", make_public)
    app.connect("autodoc-before-process-signature", hide_refused)
    return {"parallel_read_safe": True, "version": "1"}
