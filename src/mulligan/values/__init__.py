"""The words everything else is said in: ids, digests, paths, entries, payloads, limits, time, faults. Pure."""
