"""Tests of the workspace room."""
