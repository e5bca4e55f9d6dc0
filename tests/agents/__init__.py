"""Agents: profiles, runner, loop, providers."""
