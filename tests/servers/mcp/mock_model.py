"""The model on loopback that ships with the test kit."""

from __future__ import annotations

from mulligan.testing.agents import MockModel, mock_model

__all__ = ["MockModel", "mock_model"]
