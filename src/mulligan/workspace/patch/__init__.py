"""Patches as text: read, checked, and worked out against the texts they change. Pure."""
