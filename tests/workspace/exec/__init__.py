"""Tests of running commands and catching what they change."""
