"""What Quire's services share. Knows nothing of models, HTTP routes or schedules; imports no service."""
