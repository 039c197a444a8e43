"""The error of an import that this Python, this torch or a missing package does not allow."""


def import_error(text: str) -> ImportError:
    """An ImportError with the anchor of its section at its end, as all errors of the library."""
    error = ImportError(text)
    error.add_note("see docs/errors.md#importerror")
    return error
