"""Text generation: any causal language model of transformers."""
