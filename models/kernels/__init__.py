"""Our own operators for a single token, with Triton kernels for GPUs, and the graph pass that joins them."""
