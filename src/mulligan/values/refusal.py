"""A refusal: an expected outcome other than `ok`, raised where it is found and turned into a Receipt by the spine."""

from __future__ import annotations


class Refused(Exception):
    """The effect ends without a trace. `fields` are the receipt's other fields (`replacements`, `errors`, …)."""

    def __init__(self, status: str, code: str, message: str, **fields: object) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.fields = fields
