"""Conversations: the model's chat template, rendered in child processes, and which text of it a user wrote."""
