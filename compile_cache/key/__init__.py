"""The names of everything that compiled code depends on, before torch is imported: environment, model version, key."""
