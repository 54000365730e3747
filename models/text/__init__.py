"""Text generation: any transformers causal language model."""
