"""Engines side by side: the same prompts through each, and through the trainer."""
