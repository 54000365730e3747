"""torch.compile: which modules are compiled, how a call is served, and how it is checked against eager."""
