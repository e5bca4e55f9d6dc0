"""Calls as transactions, and every way back."""
