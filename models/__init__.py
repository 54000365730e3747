"""Model families. Each folder loads any model of its family, names the modules to compile, and runs it."""
