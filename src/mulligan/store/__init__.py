"""Everything that Mulligan stores durably: tables in transactions, hash-chained journals, and blobs.

Read `protocol.py` first: every engine implements `Store` and `Tx`, and a `Table` is declared once for all engines.
`sqlite.py` is the engine on disk, `memory.py` the one for tests and dry runs. `journal.py` appends records and folds
them into the projected tables; `blobs.py` packs and reads bytes; `originals.py` keeps the original of a replaced file
until the replacement is synced; `maintenance.py` syncs in the background.
"""
