"""Hooks for agents that other people wrote: what they tell of their tools becomes calls that can be undone."""
