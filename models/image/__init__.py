"""Text to image: any diffusers pipeline."""
