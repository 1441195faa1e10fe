"""A decoder-only language model, its training over islands, and what it is trained on."""
