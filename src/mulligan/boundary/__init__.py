"""May this resolved path be touched so: capability, policy, verdict. Pure."""
