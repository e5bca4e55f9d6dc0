"""Redaction of a text of one repeated character: 1 MB and 0.5 MB, taking turns, for each of 256 characters.

    python benchmarks/redaction.py [--characters 0-255] [--rounds 1]

The time is the processor's, so that other work on the machine counts little; of each size the shortest round counts.
A ratio over the limit is measured again with three times the rounds, and the goal is missed if it stays there.
"""

from __future__ import annotations

import argparse
import time

from mulligan.session.bundle.export_check import check_export
from mulligan.session.bundle.redaction import RedactionPolicy, Redactor, refuse_secrets

HALF, WHOLE = 500_000, 1_000_000
LIMIT = 2.5


def redaction_ms(text: str) -> float:
    """What an export does to each text: redact it, then check it twice."""
    start = time.process_time()
    document = {"content": Redactor(RedactionPolicy()).document(text)}
    refuse_secrets(document, doing="The export")
    check_export(document, doing="The export")
    return (time.process_time() - start) * 1000


def measured(character: str, rounds: int) -> tuple[float, float]:
    """The shortest time of 0.5 MB and of 1 MB."""
    pairs = [(redaction_ms(character * HALF), redaction_ms(character * WHOLE)) for _ in range(rounds)]
    return min(half for half, _ in pairs), min(whole for _, whole in pairs)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--characters", default="0-255")
    options.add_argument("--rounds", type=int, default=1)
    asked = options.parse_args()
    first, _, last = asked.characters.partition("-")
    found = []
    for number in range(int(first), int(last or first) + 1):
        half, whole = measured(chr(number), asked.rounds)
        if whole / half > LIMIT:
            half, whole = measured(chr(number), 3 * asked.rounds)
        found.append((whole / half, half, whole, chr(number)))
    found.sort(reverse=True)
    for ratio, half, whole, character in found[:10]:
        print(f"{character!r:8} 0.5 MB {half:8.1f} ms   1 MB {whole:8.1f} ms   ratio {ratio:.2f}")
    slowest = max(found, key=lambda one: one[2])
    print(f"slowest: {slowest[3]!r}, 1 MB in {slowest[2]:.1f} ms; largest ratio {found[0][0]:.2f}, limit {LIMIT}")
    print("goal met" if found[0][0] <= LIMIT else "goal missed")


if __name__ == "__main__":
    main()
