"""Capability, policy and verdict by example."""
