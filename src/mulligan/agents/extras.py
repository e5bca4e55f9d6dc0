"""Names the optional dependency to install when an adapter's framework is missing."""

from __future__ import annotations


def needs_extra(adapter: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error of an adapter whose framework is not installed. It says what to type."""
    return ModuleNotFoundError(f"{adapter} needs {error.name}: pip install 'mulligan[{extra}]'.", name=error.name)
