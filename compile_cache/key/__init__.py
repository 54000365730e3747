"""What compiled code depends on, known before torch is imported: environment, model version, key."""
