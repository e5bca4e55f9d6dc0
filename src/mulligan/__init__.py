"""Mulligan."""
