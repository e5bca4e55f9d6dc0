"""Tools as transactions, the loop that runs them, models to run it with, and adapters for other people's loops."""
