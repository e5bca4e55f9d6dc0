"""One scenario for each kind of user, told from their side. Read these first."""
