"""Bundles: one session as one portable document.

`export.export_session` builds a document, `redaction.Redactor` takes private names and secrets out of it (the shapes of
secrets are the table in `secret_kinds`), and `export_check` looks for secrets once more with code of its own. `format`
defines and checks the document; `importer.import_bundle` makes a session from one. Read `format.py` first.
"""
