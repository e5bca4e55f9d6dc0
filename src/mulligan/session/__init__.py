"""The durable identity of one agent run."""
