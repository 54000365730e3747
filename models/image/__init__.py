"""Text to image: any pipeline of diffusers."""
