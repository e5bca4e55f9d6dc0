"""The Agent Client Protocol: our own agent, and a proxy around any other."""
