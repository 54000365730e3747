"""Everything that knows torch's compiler: makes, stores, loads and checks compiled functions."""
