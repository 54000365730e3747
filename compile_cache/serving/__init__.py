"""Serves the calls of a model's regions: finds them, routes each call, compares new code with eager."""
