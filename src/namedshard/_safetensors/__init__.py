"""Checkpoints: safetensors files to arrays in place, and back."""
