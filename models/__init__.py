"""Model families: each module loads any model of its family, names what to compile, and runs it."""
