"""A session: the durable record of one agent run.

`transcript.Transcript` holds the messages, the events and the context window; `clients.Clients` holds the attached
programs; `roots.Roots` holds the folders that the session works in. `effects.session.DurableSession` puts the three
together. All of them write records to the session's journal; `tables` says how records fold into rows. `state` is the
typed state (slices), `bundle` exports and imports a session, `importers` reads the transcript files of other agents,
`tokens` are the bearer tokens of servers.

Read `tables.py` first, then `transcript_log.py` and `transcript.py`.
"""
